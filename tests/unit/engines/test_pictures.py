"""Pictures in requests: engines expand a prompt from the data exactly to the tokens that are trained."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from gcore.engines.pictures import PictureReader
from gcore.media.placeholders import PictureRule
from gcore.testing.vision_models import FAMILIES, Family, make_picture, make_tiny_vision_model
from gcore.train.hf_models import load_module


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_expands_a_prompt_from_the_data_to_the_trained_tokens(family: Family, tmp_path: Path) -> None:
    folder = make_tiny_vision_model(tmp_path, family)
    rule, tokenizer = PictureRule.load(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    sizes = [rule.target_size(40, 30), rule.target_size(64, 64)]
    short = tokenizer.encode(f"3{rule.picture_text}{rule.picture_text}+1").ids
    module = load_module(folder, torch.float32)
    reader = PictureReader(module, folder, None)
    pictures = reader.read([base64.b64encode(make_picture(*size)).decode() for size in sizes])
    assert reader.expand(rule.request_ids(short, sizes), pictures) == rule.expand(short, sizes)

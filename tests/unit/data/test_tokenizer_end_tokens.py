"""Every end token of a model is known, whichever file of its folder names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gcore.data.tokenizer import end_tokens
from gcore.errors import DataError

IDS = {"<eos>": 1, "<eot>": 5, "<eom>": 6}


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "special", "expected"),
    [
        pytest.param({}, None, None, None, (), id="none"),
        pytest.param({"eos_token_id": 7}, None, None, None, (7,), id="config"),
        pytest.param({"eos_token_id": [7, 8]}, {"eos_token_id": [8, 9]}, None, None, (8, 9, 7), id="lists"),
        pytest.param({"eos_token_id": None}, {"eos_token_id": 0}, None, None, (0,), id="zero"),
        pytest.param(
            {"eos_token_id": 1}, {"eos_token_id": [1, 5]}, {"eos_token": "<eot>"}, None, (5, 1), id="all, each once"
        ),
        pytest.param({}, None, {"eos_token": {"content": "<eot>"}}, None, (5,), id="the tokenizer, as an object"),
        pytest.param({}, None, None, {"eos_token": "<eom>"}, (6,), id="the map of special tokens"),
        pytest.param(
            {"text_config": {"eos_token_id": [3]}}, None, None, None, (3,), id="the text part of a larger model"
        ),
        pytest.param(
            {"eos_token_id": "2"}, {"eos_token_id": [True, None, 4]}, {"eos_token": "<no>"}, None, (4,), id="no tokens"
        ),
    ],
)
def test_all_end_tokens_of_a_model_are_found(
    tmp_path: Path, config: Any, generation: Any, tokenizer: Any, special: Any, expected: tuple[int, ...]
) -> None:
    files = {"generation_config": generation, "tokenizer_config": tokenizer, "special_tokens_map": special}
    for name, tree in files.items():
        if tree is not None:
            (tmp_path / f"{name}.json").write_text(json.dumps(tree))
    assert end_tokens(tmp_path, config, IDS.get) == expected


def test_a_generation_config_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(DataError, match="cannot read"):
        end_tokens(tmp_path, {}, IDS.get)

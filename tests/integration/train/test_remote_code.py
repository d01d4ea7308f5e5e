"""A model with its own code is refused by default, and loads in engine and rank once it is trusted."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
import torch
from engine_processes import engine_process

from gcore.engines.torch.model import load_model
from gcore.errors import DataError
from gcore.models.hubs import ModelError
from gcore.models.resolve import resolve_model
from gcore.testing.models import make_tiny_model
from gcore.train.hf_models import load_module

CODE = """
from transformers import Qwen3Config, Qwen3ForCausalLM


class StrangeConfig(Qwen3Config):
    model_type = "strange"


class StrangeForCausalLM(Qwen3ForCausalLM):
    config_class = StrangeConfig
"""


@pytest.fixture
def strange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model of a type that only its own code knows."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = make_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "strange",
        "architectures": ["StrangeForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_strange.StrangeConfig",
            "AutoModelForCausalLM": "modeling_strange.StrangeForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_strange.py").write_text(CODE)
    return folder


def test_it_is_refused_before_anything_is_started_and_by_an_engine_too(strange: Path) -> None:
    with pytest.raises(ModelError, match=r"modeling_strange\.py.*model\.trust_remote_code: true"):
        resolve_model(str(strange))
    with pytest.raises(DataError, match="trust_remote_code"):
        load_model(strange, dtype="float32", device="cpu", context=None, text=None)
    assert not (strange.parent / "modules").exists()


def test_trusted_it_is_the_same_model_to_engine_and_rank(strange: Path) -> None:
    assert resolve_model(str(strange), trust_remote_code=True).remote_code == ("modeling_strange.py",)
    module = load_module(strange, torch.float32, trust_remote_code=True)
    assert type(module).__name__ == "StrangeForCausalLM"
    with engine_process(strange, cold=True, trust_remote_code=True) as url:
        request = {
            "text": "12+3=",
            "sampling_params": {"temperature": 0, "max_new_tokens": 4},
            "return_logprob": True,
        }
        answer = httpx.post(f"{url}/generate", json=request, timeout=60).json()
        changed = httpx.post(f"{url}/update_weights_from_disk", json={"model_path": str(strange)}, timeout=60).json()
    assert changed["success"], changed
    tokens = [token for _, token, *_ in answer["meta_info"]["output_token_logprobs"]]
    prompt = _ids(strange, "12+3=")
    with torch.no_grad():
        logits = module(input_ids=torch.tensor([prompt + tokens])).logits[0]
    assert [int(logits[len(prompt) - 1 + n].argmax()) for n in range(len(tokens))] == tokens


def _ids(folder: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return ids

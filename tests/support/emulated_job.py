"""Specs of jobs on emulated slots, for runs in which only the devices are simulated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gcore.engines.emulated.launch import LAW_FILE
from gcore.testing.models import make_tiny_model


def write_emulated_job(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str = "emulated", *, speedup: float = 4.0, **sections: Any
) -> Path:
    """Write a spec with its model, which is only read for its vocabulary, and 400 prompts. `sections`: of the spec, instead of or beside the
    usual ones; `speedup`: how many times as fast as usual the devices compute."""
    law = folder / "law.json"
    law.write_text(json.dumps({"speedup": speedup, "load_s": 0.2}))
    monkeypatch.setenv(LAW_FILE, str(law))
    make_tiny_model(folder / "model", seed=1)
    lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a in range(20) for b in range(20)]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    job = {
        "model": {"path": "model"},
        "data": {"path": "train.jsonl", "shards": 32},
        "rollout": {"max_new_tokens": 80},
        **sections,
    }
    file = folder / "job.yaml"
    file.write_text(f"name: {name}\n" + "\n".join(f"{key}: {json.dumps(value)}" for key, value in job.items()) + "\n")
    return file

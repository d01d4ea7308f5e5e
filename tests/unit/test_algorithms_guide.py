"""The guide to the algorithms: its program runs and prints what it says, and it has every name that a spec may say."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, get_args

import pytest
from documents import ROOT, blocks

from gcore.config.rollout import RolloutSpec
from gcore.config.train import TrainSpec

GUIDE = ROOT / "docs" / "algorithms.md"


def test_the_program_of_the_guide_prints_what_the_guide_says() -> None:
    (program,) = blocks(GUIDE, "python")
    (printed,) = blocks(GUIDE, "text")
    ended = subprocess.run([sys.executable, "-c", program.text], capture_output=True, text=True, check=True)
    assert ended.stdout == printed.text


def words(annotation: Any) -> set[str]:
    """The words that a field may be."""
    return {word for part in (annotation, *get_args(annotation)) for word in get_args(part) if isinstance(word, str)}


NAMES = {
    **{f"train.{name}": TrainSpec.model_fields[name] for name in ("advantage", "loss", "aggregation", "kl_estimator")},
    "train.old_logprobs": TrainSpec.model_fields["old_logprobs"],
    "rollout.correction": RolloutSpec.model_fields["correction"],
}


@pytest.mark.parametrize("field", NAMES)
def test_every_name_that_a_spec_may_say_is_in_the_guide(field: str) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    known = words(NAMES[field].annotation)
    assert len(known) > 2
    assert [word for word in sorted(known) if f"`{word}`" not in text] == []

"""The prepared judge of the arithmetic example scores answers of the example's own model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from gcore.quickstart import arithmetic as sums
from gcore.quickstart.arithmetic import (
    JUDGE_CHARACTERS,
    RESPONSE_TOKENS,
    AnsweredSum,
    near_misses,
    score_verdicts,
    split_sums,
)
from gcore.quickstart.lessons import Alphabet
from gcore.quickstart.pretraining import SmallModel, deterministic_torch, generate_responses

SAMPLES = 8

pytestmark = pytest.mark.large  # the judge takes two minutes to prepare


def loaded(folder: Path, characters: str) -> SmallModel:
    return SmallModel(AutoModelForCausalLM.from_pretrained(folder), Alphabet(characters))


def test_of_what_the_warm_started_model_answers_to_held_out_sums_the_judge_is_right_nearly_always(
    example: Path, judge: Path
) -> None:
    policy, asked = loaded(example / "model", sums.SUMS_CHARACTERS), []
    held_out = split_sums(0).held_out
    with deterministic_torch(0):
        generator = torch.Generator().manual_seed(0)
        for _ in range(SAMPLES):
            given = generate_responses(policy, [one.prompt for one in held_out], RESPONSE_TOKENS, generator)
            asked += [AnsweredSum(one, response) for one, response in zip(held_out, given, strict=True)]
        assert 0.4 < sum(one.is_right for one in asked) / len(asked) < 0.7, "there is something to tell apart"
        marks = score_verdicts(
            asked, generate_responses(loaded(judge / "model", JUDGE_CHARACTERS), [one.prompt for one in asked], 6, None)
        )
    assert marks.accuracy >= 0.97
    assert marks.false_yes <= 0.02


def test_a_policy_that_looks_for_what_the_judge_lets_pass_finds_little(judge: Path) -> None:
    asked = [
        AnsweredSum(one, response) for one in split_sums(0).held_out for response in [one.answer, *near_misses(one)]
    ]
    with deterministic_torch(0):
        marks = score_verdicts(
            asked, generate_responses(loaded(judge / "model", JUDGE_CHARACTERS), [one.prompt for one in asked], 6, None)
        )
    assert marks.false_yes <= 0.02

"""The example's spec is valid for the output of `gcore prepare`."""

from __future__ import annotations

from pathlib import Path

from due_steps import steps_evaluated, steps_with_checkpoint

from gcore.config.load import load_spec
from gcore.quickstart.arithmetic import split_sums

EXAMPLE = Path(__file__).parents[3] / "examples" / "arithmetic" / "grpo.yaml"


def test_the_spec_of_the_example_is_valid_and_names_the_prepared_files() -> None:
    spec = load_spec(EXAMPLE)
    assert spec.eval.path is not None
    named = {Path(path).name for path in (spec.model.path, spec.data.path, spec.eval.path)}
    assert named == {"model", "train.jsonl", "eval.jsonl"}


def test_a_response_of_the_example_may_be_as_long_as_the_longest_right_one() -> None:
    split = split_sums(0)
    longest = max(len(s.answer) + 1 for s in [*split.train, *split.held_out])  # one character, one token
    assert load_spec(EXAMPLE).rollout.max_new_tokens == longest


def test_the_example_is_evaluated_and_checkpointed_a_few_times() -> None:
    spec = load_spec(EXAMPLE)
    assert 4 <= len(steps_evaluated(spec)) <= 6
    assert steps_with_checkpoint(spec) == {10, 20, 30, 40} | (steps_evaluated(spec) - {0}), (
        "what may be the best has a checkpoint"
    )

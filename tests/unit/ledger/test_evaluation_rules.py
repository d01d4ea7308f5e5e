"""Evaluation: its parts, their owners, the aggregate, the best checkpoint, and the spec."""

from __future__ import annotations

import math
from typing import Any

import pytest
from due_steps import steps_evaluated, steps_with_checkpoint
from hypothesis import given
from hypothesis import strategies as st

from controllers.flow.evaluation import clip_for_record
from controllers.rules.step import TAKEOVER_S, evaluation_order, evaluation_turn, parts_to_take
from gcore.config import JobSpec, parse_spec
from gcore.config.data import ACCURACY_OR_REWARD, MOST_SETS, EvalSampling
from gcore.config.spec import eval_sets
from gcore.errors import SpecError
from gcore.ledger.chain import ChainWriter, base_entry
from gcore.ledger.evaluation import (
    MOST_PARTS,
    PART_RESPONSES,
    BestEvaluation,
    best_evaluation,
    compose_evaluation,
    metric_value,
    pass_at_k,
    plan_parts,
)
from gcore.ledger.records.chain import Checkpoint, Head, Lineage
from gcore.ledger.records.job import EvalPart, EvalSample, Evaluation, SourceScore
from gcore.ledger.retention import superfluous_evaluations
from gcore.ledger.transactions import Versioned
from gcore.store.keys import JobKeys
from gcore.store.types import Put, check_transaction
from gcore.types import Version

VERSION = Version(0, 8)
SIZES = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 300)), min_size=1, max_size=4)


@given(SIZES)
def test_every_prompt_is_in_one_part_and_parts_are_many_enough_and_not_too_many(sizes: list[tuple[int, int]]) -> None:
    named = [(f"s{n}", prompts, samples) for n, (prompts, samples) in enumerate(sizes)]
    plans = plan_parts(named)
    assert [plan.number for plan in plans] == list(range(len(plans)))
    for name, prompts, samples in named:
        its = [plan for plan in plans if plan.source == name]
        assert [index for plan in its for index in plan.prompts] == list(range(prompts))
        most = max(PART_RESPONSES, math.ceil(sum(p * s for _, p, s in named) / MOST_PARTS))
        assert all(len(plan.prompts) == 1 or len(plan.prompts) * samples <= most for plan in its)
    assert all(plan.parts == len(plans) for plan in plans)
    # A prompt is never divided, so that a part may be little more than half full.
    assert len(plans) <= max(2 * MOST_PARTS + len(sizes), sum(p * s > 0 for _, p, s in named))


MEMBERS = st.lists(st.text("abcdef", min_size=1, max_size=4), min_size=1, max_size=6, unique=True)


@given(MEMBERS, st.integers(0, 40))
def test_every_part_has_one_owner_and_all_own_as_many(names: list[str], count: int) -> None:
    members = evaluation_order(VERSION, names)
    owned = [sum(evaluation_turn(name, number, members) == 0 for number in range(count)) for name in members]
    assert sum(owned) == count
    assert max(owned) - min(owned) <= 1
    assert evaluation_order(VERSION, reversed(names)) == members, "the same for everybody"  # type: ignore[arg-type]


@given(MEMBERS, st.integers(1, 40))
def test_undelivered_parts_are_taken_over_by_one_member_after_another(names: list[str], count: int) -> None:
    members = evaluation_order(VERSION, names)
    numbers = range(count)

    def takers(quiet_s: float) -> dict[int, int]:
        taken = [parts_to_take(name, numbers, members, dict.fromkeys(names, quiet_s)) for name in members]
        return {number: sum(number in its for its in taken) for number in numbers}

    assert set(takers(0.0).values()) == {1}
    assert set(takers(TAKEOVER_S).values()) == {min(2, len(members))}
    assert set(takers(len(members) * TAKEOVER_S).values()) == {len(members)}


def test_helpers_take_parts_from_the_end_and_only_from_quiet_members() -> None:
    members = evaluation_order(VERSION, "abc")
    first, second, third = members
    quiet = {first: TAKEOVER_S, second: 0.0, third: 3 * TAKEOVER_S}
    # Of 0, 3, 6, ... `first` is the owner, of 1, 4, 7 `second`, of 2, 5, 8 `third`.
    assert parts_to_take(second, range(9), members, quiet) == (1, 4, 7, 6, 3, 0)
    assert parts_to_take(first, range(9), members, quiet) == (0, 3, 6, 8, 5, 2)
    assert parts_to_take(third, range(9), members, quiet) == (2, 5, 8)
    assert parts_to_take("late", range(3), members, dict.fromkeys(members, 0.0)) == ()


DRAWS = {
    "sums": EvalSampling(4, 1.0, 1.0, (2, 4), 1.0, 1000),
    "words": EvalSampling(1, 0.0, 1.0, (), 1.0, 1000),
}


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=200),
    st.lists(st.integers(0, 1), min_size=1, max_size=200),
    st.randoms(use_true_random=False),
)
def test_parts_add_up_to_the_same_in_any_order(sums: list[int], words: list[int], random: Any) -> None:
    outcomes = {"sums": sums, "words": words}
    plans = plan_parts([(name, len(its), DRAWS[name].samples) for name, its in outcomes.items()])
    parts = [
        EvalPart(
            version=VERSION,
            number=plan.number,
            parts=plan.parts,
            source=plan.source,
            first=plan.first,
            samples=DRAWS[plan.source].samples,
            correct=tuple(outcomes[plan.source][index] for index in plan.prompts),
            reward=float(sum(outcomes[plan.source][index] for index in plan.prompts)),
            by=random.choice("ab"),
        )
        for plan in plans
    ]
    random.shuffle(parts)
    made = compose_evaluation(VERSION, plans, {part.number: part for part in parts}, DRAWS, 5)
    assert made.count == len(sums) + len(words)
    assert made.by_source["sums"].accuracy == pytest.approx(sum(sums) / (4 * len(sums)))
    assert made.by_source["sums"].metrics == {
        "mean@4": pytest.approx(sum(sums) / (4 * len(sums))),
        "pass@1": made.by_source["sums"].accuracy,
        "pass@2": pytest.approx(sum(pass_at_k(4, c, 2) for c in sums) / len(sums)),
        "pass@4": pytest.approx(sum(c > 0 for c in sums) / len(sums)),
    }
    share = sum(sums) / 4 + sum(words)
    assert made.accuracy == pytest.approx(share / made.count)
    assert sum(made.responses_by.values()) == 4 * len(sums) + len(words)
    assert Evaluation.decode(made.encode()) == made
    lacking = {part.number: part for part in parts[1:]}
    with pytest.raises(ValueError, match="does not match its plan"):
        compose_evaluation(VERSION, plans, lacking, DRAWS, 5)


def test_a_record_of_a_part_fits_into_the_store_however_large_the_evaluation() -> None:
    plans = plan_parts([("all", 2_000_000, 16)])
    largest = max(plans, key=lambda plan: len(plan.prompts))
    part = EvalPart(
        version=VERSION,
        number=largest.number,
        parts=len(plans),
        source="all",
        first=largest.first,
        samples=16,
        correct=(16,) * len(largest.prompts),
        reward=1.0,
    )
    assert len(part.encode()) < 64 * 1024


def test_an_evaluation_fits_into_the_store_however_many_sets_measure_and_show_whatever_they_like() -> None:
    draws = EvalSampling(64, 1.0, 1.0, tuple(range(33, 65)), 1.0, 1000)
    sets = {f"{number:063}": draws for number in range(MOST_SETS)}
    plans = plan_parts([(name, 1, 64) for name in sets])
    text = clip_for_record("\U0001f600" * 5000)
    shown = EvalSample(prompt=text, response=text, answer=text, reward=0.0, unscored=text)
    parts = {
        plan.number: EvalPart(
            version=VERSION,
            number=plan.number,
            parts=len(plans),
            source=plan.source,
            first=plan.first,
            samples=64,
            correct=(21,),
            reward=1 / 3,
            unscored=1,
            why_unscored=text,
            shown=(shown,),
        )
        for plan in plans
    }
    made = compose_evaluation(VERSION, plans, parts, sets, 50)
    key = JobKeys("u").evaluation(str(VERSION))
    check_transaction((), (Put(key, made.encode()),))
    assert len(made.by_source) == MOST_SETS
    one = compose_evaluation(VERSION, plans[:1], {0: parts[0]}, sets, 50)
    assert len(one.samples) == 1, "where there is room"


def test_parts_and_evaluations_stand_under_different_keys() -> None:
    keys = JobKeys("u")
    assert keys.eval_part("0.8", 3) == f"{keys.eval_part_prefix}0.8/000003"
    assert not keys.eval_part("0.8", 3).startswith(keys.eval_prefix)


def evaluated(version: Version, accuracy: float, pass_2: float = 0.0) -> Evaluation:
    score = SourceScore(accuracy=accuracy, count=4, samples=2, metrics={"pass@2": pass_2, "pass@1": accuracy})
    return Evaluation(version=version, accuracy=accuracy, count=4, by_source={"a": score})


def head_at(step: int, *lineages: int) -> Head:
    """Head of the last of these lineages, each given by its base step."""
    numbered = tuple(Lineage(number=n, base_step=at) for n, at in enumerate((0, *lineages)))
    first = base_entry(1, "w", ChainWriter("a", "n")).head
    return first.model_copy(update={"step": step, "lineage": len(lineages), "lineages": numbered})


def test_the_best_is_the_highest_on_heads_chain_and_of_equal_ones_the_earlier() -> None:
    made = [evaluated(Version(0, step), accuracy) for step, accuracy in ((0, 0.1), (8, 0.7), (16, 0.5), (24, 0.7))]
    head = head_at(24)
    assert best_evaluation(head, made, "accuracy") == BestEvaluation(Version(0, 8), "accuracy", 0.7)
    assert best_evaluation(head, reversed(made), "accuracy") == BestEvaluation(Version(0, 8), "accuracy", 0.7)
    assert best_evaluation(head, made, None) is None
    assert best_evaluation(head, [], "accuracy") is None


def test_evaluations_of_a_discarded_branch_are_not_the_best() -> None:
    made = [evaluated(Version(0, 8), 0.5), evaluated(Version(0, 16), 0.9), evaluated(Version(1, 12), 0.6)]
    assert best_evaluation(head_at(12, 8), made, "accuracy") == BestEvaluation(Version(1, 12), "accuracy", 0.6)
    assert best_evaluation(head_at(12, 8), made[:2], "accuracy") == BestEvaluation(Version(0, 8), "accuracy", 0.5)


def test_any_metric_that_was_measured_may_tell() -> None:
    made = [evaluated(Version(0, 8), 0.5, pass_2=0.6), evaluated(Version(0, 16), 0.4, pass_2=0.9)]
    assert best_evaluation(head_at(16), made, "a/pass@2") == BestEvaluation(Version(0, 16), "a/pass@2", 0.9)
    assert best_evaluation(head_at(16), made, "a/accuracy") == BestEvaluation(Version(0, 8), "a/accuracy", 0.5)
    assert metric_value(made[0], "a/pass@4") is None
    assert metric_value(made[0], "b/accuracy") is None


def spec_of(evaluation: dict[str, Any], **sections: Any) -> JobSpec:
    return parse_spec(
        {
            "name": "t",
            "model": {"path": "m"},
            "data": {"path": "d"},
            "flow": {"steps": 20},
            "rollout": {"max_new_tokens": 8, "temperature": 0.7, "stop": ["."]},
            "eval": evaluation,
            **sections,
        }
    )


SETS = [
    {"name": "greedy", "path": "a"},
    {"name": "drawn", "path": "b", "samples": 8, "temperature": 0.6, "pass_k": [8]},
]


def graded(version: Version, accuracy: float, **means: float) -> Evaluation:
    """Sets of four prompts with two responses each."""
    scores = {
        name: SourceScore(accuracy=accuracy, count=4, samples=2, metrics={"mean@2": mean, "pass@1": accuracy})
        for name, mean in means.items()
    }
    return Evaluation(version=version, accuracy=accuracy, count=4 * len(scores), by_source=scores)


def test_the_mean_reward_tells_more_than_the_accuracy_where_rewards_are_not_only_0_and_1() -> None:
    plain = graded(Version(0, 0), 0.5, a=0.5, b=0.5)
    assert (plain.is_graded, plain.mean_reward) == (False, 0.5)
    some = graded(Version(0, 8), 0.25, a=0.25, b=0.75)
    assert (some.is_graded, some.mean_reward) == (True, 0.5)
    unscored = SourceScore(accuracy=0.25, count=4, samples=2, metrics={"mean@2": 0.5}, unscored=4)
    assert not unscored.is_graded, "of four scored responses two have reward 1, and of eight two are correct"
    assert graded(Version(0, 8), 0.0).mean_reward is None


def test_the_best_goes_by_the_mean_reward_where_rewards_are_graded() -> None:
    made = [graded(Version(0, 0), 0.2, a=0.2), graded(Version(0, 8), 0.1, a=0.4), graded(Version(0, 16), 0.0, a=0.3)]
    head = head_at(16)
    assert best_evaluation(head, made, ACCURACY_OR_REWARD) == BestEvaluation(Version(0, 8), "reward", 0.4)
    assert best_evaluation(head, made[:1], ACCURACY_OR_REWARD) == BestEvaluation(Version(0, 0), "accuracy", 0.2)
    assert best_evaluation(head, made, "accuracy") == BestEvaluation(Version(0, 0), "accuracy", 0.2)


def test_the_evaluation_of_the_best_by_reward_stays_in_the_store() -> None:
    means = {1: 0.9}
    made = [graded(Version(0, step), 0.2 if step == 2 else 0.1, a=means.get(step, 0.3)) for step in range(14)]
    stored = {str(one.version): Versioned(one, number) for number, one in enumerate(made)}
    known = [Checkpoint(lineage=0, step=13, seq=13, file="checkpoints/0-13")]
    gone = superfluous_evaluations(head_at(13), known, stored, ACCURACY_OR_REWARD)
    assert gone == ("0.2", "0.3", "0.4", "0.5")
    assert "0.1" in superfluous_evaluations(head_at(13), known, stored, "accuracy")


def test_a_set_says_how_it_is_drawn_and_the_section_says_the_rest() -> None:
    spec = spec_of({"sources": SETS, "top_p": 1.0, "limit": 50, "max_new_tokens": 32, "threshold": 0.5})
    greedy, drawn = eval_sets(spec)
    assert greedy.draws == EvalSampling(1, 0.0, 1.0, (), 0.5, 50)
    assert drawn.draws == EvalSampling(8, 0.6, 1.0, (8,), 0.5, 50)
    assert (greedy.source.sampling.temperature, drawn.source.sampling.temperature) == (0.0, 0.6)
    assert (greedy.source.sampling.max_new_tokens, greedy.source.sampling.stop) == (32, (".",))
    assert drawn.draws.metrics == ("accuracy", "mean@8", "pass@1", "pass@8")
    assert spec.eval.metrics[:4] == ("accuracy", "reward", "greedy/accuracy", "greedy/mean@1")


@pytest.mark.parametrize(
    ("evaluation", "said"),
    [
        pytest.param({"path": "e", "samples": 4}, "eval: samples is 4 with temperature 0", id="the same four times"),
        pytest.param({"path": "e", "pass_k": [1, 4]}, r"eval: pass@4 needs at least 4 .* samples is 1", id="k above n"),
        pytest.param(
            {"sources": [*SETS, {"name": "few", "path": "c", "pass_k": [2]}]},
            "eval: set 'few': pass@2 needs at least 2",
            id="of one set",
        ),
        pytest.param({"every": 5}, "eval: every is set, but there are no held-out prompts", id="no prompts"),
        pytest.param(
            {"sources": [{"name": "s", "path": "a", "sampling": {"max_new_tokens": 8}}]},
            r"eval\.sources\.0: set 's': .* does not use sampling\.max_new_tokens; set max_new_tokens on the set itself",
            id="a key in two places",
        ),
        pytest.param(
            {"sources": [{"name": "s", "path": "a", "sampling": {"min_p": 0.1}}]},
            r"does not use sampling\.min_p; leave it out",
            id="training's sampling",
        ),
        pytest.param(
            {"sources": [{"name": "s", "path": "a", "weight": 0.5}]},
            "does not use weight",
            id="training's weight",
        ),
        pytest.param({"path": "e", "samples": 10_001, "temperature": 1}, r"eval\.samples: .*10000", id="far too many"),
        pytest.param({"path": "e", "samples": 0}, r"eval\.samples: ", id="none"),
        pytest.param({"path": "e", "pass_k": [0]}, r"eval\.pass_k\.0: ", id="pass at nothing"),
        pytest.param({"path": "e", "temperature": 1e-9}, r"must be 0 \(greedy\)", id="nearly greedy"),
        pytest.param({"path": "e", "temperature": -1}, r"eval\.temperature: ", id="below zero"),
        pytest.param({"path": "e", "top_p": 0.9}, "top_p is 0.9 with temperature 0", id="a nucleus of one"),
        pytest.param({"path": "e", "threshold": math.nan}, r"eval\.threshold: ", id="no number"),
        pytest.param({"sources": [SETS[0], SETS[0]]}, "have the same name", id="one name"),
        pytest.param({"sources": [{"name": "accuracy", "path": "a"}]}, "cannot be named 'accuracy'", id="a metric"),
        pytest.param({"path": "e", "pass_at": [1]}, "did you mean 'eval.pass_k'", id="misspelt"),
        pytest.param(
            {"path": "e", "pass_k": [True]}, r"eval\.pass_k: a boolean .*is not allowed here", id="a truth for a k"
        ),
        pytest.param(
            {"path": "e", "samples": 99, "temperature": 1, "pass_k": list(range(1, 41))},
            r"eval\.pass_k: it should have at most 32 items \(got 40\)",
            id="more than anyone looks at",
        ),
        pytest.param(
            {"sources": [{"name": f"s{n}", "path": "p"} for n in range(257)]},
            r"eval\.sources: it should have at most 256 items \(got 257\)",
            id="more sets than a record holds",
        ),
    ],
)
def test_invalid_evaluations_are_refused(evaluation: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        spec_of(evaluation)


@pytest.mark.parametrize(
    ("best", "evaluation", "metric"),
    [
        pytest.param(None, {"path": "e"}, ACCURACY_OR_REWARD, id="what rewards tell, if anything is evaluated"),
        pytest.param("reward", {"path": "e"}, "reward", id="the mean reward over all sets"),
        pytest.param(None, {}, None, id="nothing evaluated"),
        pytest.param("none", {"path": "e"}, None, id="not wanted"),
        pytest.param("data/mean@1", {"path": "e"}, "data/mean@1", id="the only set"),
        pytest.param("drawn/pass@8", {"sources": SETS}, "drawn/pass@8", id="one of several"),
    ],
)
def test_a_metric_tells_which_checkpoint_is_best(
    best: str | None, evaluation: dict[str, Any], metric: str | None
) -> None:
    spec = spec_of({**evaluation, "every": 6} if evaluation else {}, checkpoint={"best": best, "every": 10})
    assert spec.best_metric == metric
    evaluated_too = {6, 12, 18} if metric is not None else set()
    assert steps_with_checkpoint(spec) == {10, 20} | evaluated_too


@pytest.mark.parametrize(
    ("best", "evaluation", "said"),
    [
        pytest.param("drawn/pass@4", {"sources": SETS}, "did you mean 'drawn/pass@8'", id="another k"),
        pytest.param("acuracy", {"path": "e"}, "did you mean 'accuracy'", id="misspelt"),
        pytest.param(
            "loss", {"path": "e"}, r"measured: accuracy, reward, data/accuracy, data/mean@1, data/pass@1", id="no such"
        ),
        pytest.param("accuracy", {}, "no held-out prompts", id="no set"),
    ],
)
def test_a_metric_that_is_not_measured_is_refused(best: str, evaluation: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=rf"checkpoint\.best is .*{said}"):
        spec_of(evaluation, checkpoint={"best": best})


def test_an_evaluation_at_the_start_may_be_left_out() -> None:
    assert steps_evaluated(spec_of({"path": "e", "every": 8})) == {0, 8, 16, 20}
    assert steps_evaluated(spec_of({"path": "e", "every": 8, "at_start": False})) == {8, 16, 20}

"""The contract of `gcore.train.objectives.Objective`: every policy loss, the critic's loss, and the fake."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pytest
import torch
from torch import Tensor

from gcore.config import parse_spec
from gcore.config.spec import JobSpec
from gcore.config.train import CriticSpec, TrainSpec
from gcore.testing.training import FakeObjective
from gcore.train.batching import MicroBatch, Scores, TokenFeeding, make_dummy
from gcore.train.objectives import (
    Count,
    Need,
    Objective,
    PolicyGradient,
    Supervised,
    Targets,
    ValueFit,
    ValueFunction,
    policy_objective,
)

MASK = torch.tensor([[True, True, False, True], [True, False, False, False], [True, True, True, True]])
FEWER = torch.tensor([[False, True, False, True], [False, False, False, False], [True, True, False, True]])
"""Of `MASK`; a sequence is left out as a whole."""
DRAW = torch.Generator().manual_seed(5)
OLD, ENGINE, REFERENCE, NEW = (-2 * torch.rand(MASK.shape, generator=DRAW) for _ in range(4))
GAINS = torch.randn(MASK.shape, generator=DRAW)
VALUES, RETURNS = (torch.randn(MASK.shape, generator=DRAW) for _ in range(2))
TRAIN = TrainSpec(aggregation="token-mean", kl_coef=0.1, entropy_coef=0.01)
SEQUENCES = TrainSpec(aggregation="seq-mean-token-mean")
EXTREMES = ("ratio_min", "ratio_max")


@dataclass
class Case:
    """An objective, and what of a batch's rows it is given: outputs of a model [b, w] that a gradient goes through."""

    objective: Objective[Any, Any]
    given: Callable[[Tensor, MicroBatch, slice], tuple[Any, Any]]
    outputs: Tensor
    mean_over: Literal["tokens", "sequences"] = "tokens"
    by_sequence: bool = False
    """Whether the loss of a trained token has a gradient by the other tokens of its sequence."""


def policy(outputs: Tensor, batch: MicroBatch, rows: slice) -> tuple[Scores, Targets]:
    targets = Targets(batch, GAINS[rows], OLD[rows], REFERENCE[rows], batch.mask)
    return Scores(outputs, outputs * -0.5), targets


def values(outputs: Tensor, batch: MicroBatch, rows: slice) -> tuple[Tensor, ValueFit]:
    return outputs, ValueFit(RETURNS[rows], VALUES[rows] + 0.1, batch.mask)


CASES = {
    "ppo": Case(PolicyGradient(TRAIN, 8.0), policy, NEW),
    "gspo": Case(
        PolicyGradient(SEQUENCES.model_copy(update={"loss": "gspo"}), 8.0), policy, NEW, "sequences", by_sequence=True
    ),
    "cispo": Case(PolicyGradient(TRAIN.model_copy(update={"loss": "cispo"}), 8.0), policy, NEW),
    "tis": Case(PolicyGradient(TRAIN, 8.0, "tis"), policy, NEW),
    "icepop": Case(PolicyGradient(TRAIN, 8.0, "icepop"), policy, NEW),
    "mis": Case(PolicyGradient(SEQUENCES, 8.0, "mis"), policy, NEW, "sequences"),
    "supervised": Case(Supervised(TRAIN, 8.0), policy, NEW),
    "norm": Case(Supervised(TrainSpec(aggregation="seq-mean-token-sum-norm"), 8.0), policy, NEW, "sequences"),
    "values": Case(ValueFunction(TRAIN, 8.0, CriticSpec()), values, VALUES),
    "values by sequence": Case(ValueFunction(SEQUENCES, 8.0, CriticSpec()), values, VALUES, "sequences"),
    "fake": Case(FakeObjective(), policy, NEW),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def batch_of(rows: slice, mask: Tensor = MASK) -> MicroBatch:
    dummy = make_dummy(TokenFeeding("bucketed", 4, torch.device("cpu")))
    return dataclasses.replace(dummy, mask=mask[rows], scored=mask[rows], rollout_logp=ENGINE[rows])


def loss_of(case: Case, rows: slice, outputs: Tensor | None = None, mask: Tensor = MASK) -> tuple[Tensor, Tensor]:
    """And its gradient by the outputs."""
    own = (case.outputs if outputs is None else outputs)[rows].clone().requires_grad_()
    loss = case.objective.loss(*case.given(own, batch_of(rows, mask), rows))
    (gradient,) = torch.autograd.grad(loss, own)
    return loss.detach(), gradient


EVERY, ROWS = slice(0, 3), [slice(row, row + 1) for row in range(3)]


def test_the_loss_of_a_batch_is_the_sum_of_its_rows_losses(case: Case) -> None:
    whole, gradient = loss_of(case, EVERY)
    alone = [loss_of(case, row) for row in ROWS]
    assert whole.shape == ()
    assert torch.allclose(whole, torch.stack([loss for loss, _ in alone]).sum(), rtol=1e-5)
    assert torch.allclose(gradient, torch.cat([found for _, found in alone]), rtol=1e-5, atol=1e-7)
    assert bool(gradient.any())


def test_masked_positions_do_not_affect_the_loss(case: Case) -> None:
    whole, gradient = loss_of(case, EVERY)
    assert not gradient[~MASK].any()
    other, _ = loss_of(case, EVERY, torch.where(MASK, case.outputs, -7.0))
    assert torch.equal(whole, other)


def test_a_batch_of_nothing_adds_nothing(case: Case) -> None:
    loss, gradient = loss_of(case, EVERY, mask=torch.zeros_like(MASK))
    assert float(loss) == 0.0
    assert not gradient.any()


def test_only_tokens_of_the_targets_mask_are_trained(case: Case) -> None:
    own = case.outputs.clone().requires_grad_()
    scores, targets = case.given(own, batch_of(EVERY), EVERY)
    loss = case.objective.loss(scores, dataclasses.replace(targets, mask=FEWER))
    (gradient,) = torch.autograd.grad(loss, own)
    untrained = ~FEWER.any(dim=1) if case.by_sequence else ~FEWER
    assert not gradient[untrained].any()
    assert bool(gradient[FEWER].any())


def test_the_denominator_depends_on_the_count_alone(case: Case) -> None:
    found = case.objective.denominator(Count(tokens=8, sequences=3))
    assert found > 0
    assert found == case.objective.denominator(Count(8, 3))


def test_the_loss_is_a_mean_over_all_tokens_or_all_sequences_of_the_update(case: Case) -> None:
    for count in (Count(tokens=8, sequences=3), Count(tokens=16, sequences=6), Count(tokens=16, sequences=1)):
        assert case.objective.denominator(count) == getattr(count, case.mean_over)


def test_metrics_are_sums_over_the_rows(case: Case) -> None:
    def metrics(rows: slice) -> dict[str, Tensor]:
        own = case.outputs[rows].clone().requires_grad_()
        return dict(case.objective.metrics(*case.given(own, batch_of(rows), rows)))

    whole, alone = metrics(EVERY), [metrics(row) for row in ROWS]
    assert all(value.shape == () and not value.requires_grad for value in whole.values())
    for name in whole.keys() - set(EXTREMES):
        assert torch.allclose(
            whole[name].double(), torch.stack([one[name] for one in alone]).sum().double(), rtol=1e-5, atol=1e-6
        )
    if "ratio_min" in whole:
        assert float(whole["ratio_min"]) == min(float(one["ratio_min"]) for one in alone)
        assert float(whole["ratio_max"]) == max(float(one["ratio_max"]) for one in alone)


def test_trained_tokens_are_some_of_the_mask(case: Case) -> None:
    batch = batch_of(EVERY)
    found = case.objective.trained(batch, OLD)
    assert not bool((found & ~batch.mask).any())
    if "all_old_logprobs" not in case.objective.needs:
        assert torch.equal(found, batch.mask)


def test_needs_are_passes_that_the_trainer_knows(case: Case) -> None:
    assert case.objective.needs <= set(get_args(Need))


def job(**train: Any) -> JobSpec:
    return parse_spec(
        {
            "name": "j",
            "model": {"path": "m"},
            "data": {"path": "d"},
            "flow": {"steps": 3},
            "rollout": {"max_new_tokens": 4},
            "train": train,
        }
    )


def test_a_job_needs_what_its_settings_use() -> None:
    assert policy_objective(job()).needs == {"old_logprobs"}
    assert policy_objective(job(kl_coef=0.1, entropy_coef=0.1)).needs == {
        "old_logprobs",
        "reference",
        "entropy_gradient",
    }
    assert PolicyGradient(TrainSpec(), 8.0, "mis").needs == {"old_logprobs", "all_old_logprobs"}
    assert Supervised(TrainSpec(), 8.0).needs == set()
    assert ValueFunction(TRAIN, 8.0, CriticSpec()).needs == set()

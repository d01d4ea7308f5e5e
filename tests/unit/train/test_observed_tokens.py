"""What a tool or an environment said stands in a response and is not trained: it counts nowhere, and is handed through."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ready_seals import ready_seal
from torch import Tensor

from controllers.cli.view.data import mark_observed_text
from controllers.flow.group_buffer import GroupBuffer
from gcore.api.v1 import jobs_pb2, train_pb2
from gcore.config.train import TrainSpec
from gcore.flows.filters import untrainable_reason
from gcore.ledger.balance import balance_samples
from gcore.ledger.records.chain import OfferedGroup, SealedGroup
from gcore.observability.samples import make_kept_group
from gcore.rollout.postprocess import penalize_sample
from gcore.testing.flows import group_of
from gcore.train.advantages import advantages, value_targets
from gcore.train.batching import BatchIndex, Feeding, ModelInputs, StepTensors, cut_step, score_batch
from gcore.train.metrics import TrainStepMetrics
from gcore.train.objectives import PolicyGradient, Targets
from gcore.train.rank.feed import StepInput, TrainGroup, TrainSample, _lacking
from gcore.train.rank.messages import FeedDamaged, _sample, read_payload, write_payload
from gcore.train.step import trained_mask
from gcore.types import Group, PromptRef, Range, Sample, Version, VersionSpan, range_problem

VOCABULARY = 11
CPU = torch.device("cpu")
OPTIONS = {"micro_batch_tokens": 16, "mini_batches": 1}


def told_group(observed: tuple[Range, ...] = ((2, 4),)) -> Group:
    """A group of two, of which the first response has heard something."""
    group = group_of([1.0, 0.0])
    first = group.samples[0]
    logprobs = tuple(
        0.0 if any(start <= at < end for start, end in observed) else p for at, p in enumerate(first.logprobs)
    )
    return replace(group, samples=(replace(first, observed=observed, logprobs=logprobs), group.samples[1]))


@pytest.mark.parametrize(
    ("ranges", "length", "fine"),
    [
        ((), 0, True),
        (((0, 1),), 1, True),
        (((0, 2), (3, 4)), 4, True),
        (((0, 0),), 4, False),
        (((2, 1),), 4, False),
        (((0, 5),), 4, False),
        (((0, 2), (2, 3)), 4, False),
        (((2, 3), (0, 1)), 4, False),
        (((-1, 2),), 4, False),
    ],
)
def test_ranges_ascend_and_do_not_touch(ranges: tuple[Range, ...], length: int, fine: bool) -> None:
    assert (range_problem(ranges, length) == "") is fine


def test_a_sample_that_heard_nothing_has_the_digest_that_it_always_had() -> None:
    sample = Sample((5, 6), (-1.0, -0.5), "ab", "stop", (VersionSpan(Version(0, 0), 0, 2),), 1.0)
    assert sample.digest().hex() == "0d669d6f6355562e7929e6ec38c1661a52893794cb5f119a50e2cd5db1ea5635"
    assert sample.digest() != replace(sample, observed=((1, 2),)).digest()
    assert replace(sample, observed=((1, 2),)).own_tokens == 1


def test_observed_ranges_go_over_the_wire_and_are_not_there_when_there_are_none() -> None:
    group = told_group()
    data = write_payload([(group, frozenset({0, 1}))])
    payload = train_pb2.FeedPayload.FromString(data)
    assert [len(sample.observed) for sample in payload.groups[0].samples] == [8, 0]
    header = train_pb2.FeedHeader(sender="n", total_bytes=len(data), sha256=hashlib.sha256(data).digest())
    held = read_payload(header, data)[group.digest()]
    assert held.samples[0].observed == ((2, 4),)
    assert held.samples[1].observed == ()
    part = payload.groups[0].samples[0]
    part.observed = np.array([[2, 5]], dtype="<i4").tobytes()
    with pytest.raises(FeedDamaged, match="digest"):
        _sample(part, group.samples[0].digest(), "here")


@pytest.mark.parametrize("ranges", [((4, 2),), ((0, 10**6),), ((1, 3), (2, 4))])
def test_ranges_that_are_none_are_refused_even_with_their_digest(ranges: tuple[Range, ...]) -> None:
    group = group_of([1.0])
    bent = replace(group, samples=(replace(group.samples[0], observed=ranges),))
    part = train_pb2.FeedPayload.FromString(write_payload([(bent, frozenset({0}))])).groups[0].samples[0]
    with pytest.raises(FeedDamaged, match="ranges ascend"):
        _sample(part, bent.samples[0].digest(), "here")
    assert "misplaced" in (untrainable_reason(bent, TrainSpec(loss="sft")) or "")


def test_a_response_of_which_the_policy_made_nothing_is_not_trained() -> None:
    whole = len(group_of([1.0]).samples[0].token_ids)
    assert "made no token" in (untrainable_reason(told_group(((0, whole),)), TrainSpec()) or "")
    assert untrainable_reason(told_group(), TrainSpec()) is None


def test_an_offer_tells_how_much_was_observed_and_only_if_something_was() -> None:
    offered = []
    for group in (told_group(), group_of([1.0, 0.0])):
        buffer = GroupBuffer()
        buffer.add_group(group)
        offered += buffer.offers.values()
    length = len(group_of([1.0]).samples[0].token_ids)
    assert [one.observed for one in offered] == [(2, 0), ()]
    assert [one.own_tokens for one in offered] == [(length - 2, length), (length, length)]


def test_only_what_the_policy_made_is_too_long() -> None:
    group = told_group()
    length = len(group.samples[0].token_ids)
    told, alone = (
        penalize_sample(sample, longest=length, cache=2, penalty=1.0)
        for sample in (group.samples[0], replace(group.samples[0], observed=()))
    )
    assert told.reward == group.samples[0].reward
    assert alone.reward == group.samples[0].reward - 1.0


def test_what_was_observed_is_kept_for_people_and_marked() -> None:
    group = told_group()
    told = replace(group.samples[0], text="6*7=<<6*7>>42 so 42", observed_text=((11, 13),))
    kept = make_kept_group(replace(group, samples=(told,)), "d", "p", "", "n.a", 12).samples[0]
    assert (kept.observed, kept.observed_tokens) == (((11, 12),), 2)
    message = jobs_pb2.SampleResponse(
        text=jobs_pb2.SampleText(text=told.text), observed=[jobs_pb2.ObservedText(start=11, end=13)]
    )
    assert mark_observed_text(message) == "6*7=<<6*7>>⟦42⟧ so 42"


def test_a_rank_refuses_a_sample_that_observed_more_than_the_seal_says() -> None:
    work = work_of([Drawn(6, ((1, 3),))], [0.0])
    seal, (held,) = work.seal, work.groups.values()
    assert _lacking(held, seal, 0, 0) == ""
    sealed = seal.groups[0].model_copy(update={"observed": (1,)})
    assert "2 observed tokens instead of 1" in _lacking(held, seal.model_copy(update={"groups": (sealed,)}), 0, 0)


# Training.


@dataclass(frozen=True)
class Drawn:
    """A response of so many tokens, and what of it was observed."""

    length: int
    observed: tuple[Range, ...] = ()

    @property
    def own(self) -> list[int]:
        told = {at for start, end in self.observed for at in range(start, end)}
        return [at for at in range(self.length) if at not in told]


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    length = draw(st.integers(1, 9))
    told = draw(st.lists(st.booleans(), min_size=length, max_size=length).filter(lambda flags: not all(flags)))
    edges = [at for at in range(length + 1) if (at > 0 and told[at - 1]) != (at < length and told[at])]
    return Drawn(length, tuple(zip(edges[::2], edges[1::2], strict=True)))


def work_of(samples: Sequence[Drawn], noise: Sequence[float]) -> StepInput:
    """One group; what engines are said to have drawn observations with is `noise`, which nothing may look at."""
    rng = np.random.default_rng(5)
    held = {}
    for number, one in enumerate(samples):
        logprobs = rng.uniform(-2, -0.1, one.length).astype(np.float32)
        for start, end in one.observed:
            logprobs[start:end] = noise[number % len(noise)]
        tokens = rng.integers(0, VOCABULARY, one.length).astype(np.int32)
        held[number] = TrainSample(tokens, logprobs, float(number), observed=one.observed)
    group = TrainGroup(PromptRef(0, 0, 0), "d", np.array([3, 4], np.int32), held)
    told = tuple(one.length - len(one.own) for one in samples)
    sealed = SealedGroup(
        ref=group.ref,
        digest="d",
        prompt_tokens=2,
        response_tokens=tuple(one.length for one in samples),
        versions=(Version(0, 0),),
        holder="h",
        observed=told if any(told) else (),
    )
    seal = ready_seal([sealed])
    return StepInput(seal, balance_samples(seal), 0, {"d": group})


class Alone:
    def sum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def max(self, values: Sequence[float]) -> list[float]:
        return list(values)


def cut(work: StepInput, train: TrainSpec, packing: Any = "packed") -> StepTensors:
    return cut_step(work, train, Feeding(packing, VOCABULARY, CPU))


def bigram(table: Tensor) -> Any:
    """A model whose logits follow from the token before only; exact, in float64."""

    def logits_of(inputs: ModelInputs) -> Tensor:
        if inputs.positions is not None:
            return table[inputs.tokens[0, inputs.columns]]
        every = table[inputs.tokens[:, inputs.columns]].reshape(-1, VOCABULARY)
        return every if inputs.rows is None else every[inputs.rows]

    return logits_of


def loss_of(
    step: StepTensors, table: Tensor, train: TrainSpec, gains: Mapping[BatchIndex, Tensor], correction: str
) -> Tensor:
    """The loss of the step's one update, as a rank adds it up."""
    objective = PolicyGradient(train, 7.0, correction)
    scores = {place: score_batch(bigram(table), step.at(place)) for place in step.places()}
    kept = trained_mask(step, objective, {place: one.logp.detach() for place, one in scores.items()}, Alone())
    (count,) = kept.counts
    total = torch.zeros((), dtype=torch.float64)
    for place, one in scores.items():
        batch = step.at(place)
        targets = Targets(batch, gains[place], batch.rollout_logp.double(), None, kept.masks[place])
        total = total + objective.loss(one, targets)
    return total / objective.denominator(count)


def by_definition(
    samples: Sequence[Drawn], work: StepInput, table: Tensor, train: TrainSpec, gains: Sequence[float]
) -> Tensor:
    """PPO's loss over the policy's tokens, one after the other."""
    (group,) = work.groups.values()
    rows = []
    for number, one in enumerate(samples):
        held = group.samples[number]
        tokens = [*group.prompt_ids.tolist(), *held.token_ids.tolist()]
        terms = []
        for at in one.own:
            place = len(group.prompt_ids) + at
            logp = torch.log_softmax(table[tokens[place - 1]], dim=0)[tokens[place]]
            ratio = (logp - float(held.logprobs[at])).exp()
            clipped = ratio.clamp(1 - train.clip_low, 1 + train.clip_high)
            terms.append(torch.maximum(-gains[number] * ratio, -gains[number] * clipped))
        rows.append(torch.stack(terms))
    match train.aggregation:
        case "token-mean":
            return torch.cat(rows).mean()
        case "seq-mean-token-mean":
            return torch.stack([row.mean() for row in rows]).mean()
        case "seq-mean-token-sum":
            return torch.stack([row.sum() for row in rows]).mean()
        case _:
            return torch.stack([row.sum() for row in rows]).mean() / 7.0


@settings(deadline=None, max_examples=40)
@given(
    st.lists(drawn(), min_size=1, max_size=4),
    st.sampled_from(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]),
    st.sampled_from(["packed", "bucketed"]),
    st.lists(st.sampled_from([0.0, -3.0, 5.0, -40.0]), min_size=1, max_size=3),
)
def test_loss_and_gradients_are_those_of_the_policys_own_tokens_and_of_nothing_else(
    samples: list[Drawn], aggregation: Any, packing: str, noise: list[float]
) -> None:
    train = TrainSpec(aggregation=aggregation, **OPTIONS)
    table = torch.randn(VOCABULARY, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = []
    for told in ([0.0], noise):
        work = work_of(samples, told)
        step = cut(work, train, packing)
        gains = {}
        for place in step.places():
            batch = step.at(place)
            rows = [float(slot.sample) - 1.5 for slot in batch.slots] or [0.0]
            whole = torch.tensor(rows, dtype=torch.float64).unsqueeze(1).expand(batch.mask.shape)
            gains[place] = torch.where(batch.mask, whole, torch.full_like(whole, told[0]))
        weights = table.clone().requires_grad_()
        loss = loss_of(step, weights, train, gains, "none")
        loss.backward()
        assert weights.grad is not None
        found.append((loss.detach(), weights.grad))
    (loss, gradient), (other, changed) = found
    assert torch.equal(loss, other)
    assert torch.equal(gradient, changed)
    weights = table.clone().requires_grad_()
    exact = by_definition(samples, work_of(samples, noise), weights, train, [n - 1.5 for n in range(len(samples))])
    exact.backward()
    assert weights.grad is not None
    assert torch.allclose(loss, exact.detach(), rtol=1e-9, atol=1e-12)
    assert torch.allclose(gradient, weights.grad, rtol=1e-7, atol=1e-10)


@settings(deadline=None, max_examples=40)
@given(st.lists(drawn(), min_size=1, max_size=4), st.floats(0.5, 1.0), st.floats(0.0, 1.0))
def test_gae_hands_observations_through_as_if_they_were_not_there(
    samples: list[Drawn], gamma: float, lam: float
) -> None:
    train = TrainSpec(advantage="gae", gamma=gamma, gae_lambda=lam, critic={}, **OPTIONS)
    step = cut(work_of(samples, [0.0]), train)
    generator = torch.Generator().manual_seed(1)
    values = {p: torch.randn(step.at(p).mask.shape, generator=generator, dtype=torch.float64) for p in step.places()}
    targets = value_targets(step, train, values, {})
    for place in step.places():
        for row, slot in enumerate(step.at(place).slots):
            own = samples[slot.sample].own
            ahead = running = 0.0
            for at in reversed(own):
                value = float(values[place][row, at])
                reward = float(slot.sample) if at == own[-1] else 0.0
                running = reward + gamma * ahead - value + gamma * lam * running
                ahead = value
                assert math.isclose(float(targets.advantages[place][row, at]), running, rel_tol=1e-9, abs_tol=1e-9)
                assert math.isclose(float(targets.returns[place][row, at]), running + value, rel_tol=1e-9, abs_tol=1e-9)
            others = [at for at in range(values[place].shape[1]) if at not in own]
            assert not targets.advantages[place][row, others].any()


@settings(deadline=None, max_examples=30)
@given(st.lists(drawn(), min_size=2, max_size=4))
def test_counts_means_and_whitening_are_over_the_policys_own_tokens(samples: list[Drawn]) -> None:
    train = TrainSpec(advantage="reinforce_pp", gamma=0.9, **OPTIONS)
    step = cut(work_of(samples, [-9.0]), train)
    own = sum(len(one.own) for one in samples)
    assert sum(plan.tokens for plan in step.plans) == own
    assert sum(int(step.at(place).mask.sum()) for place in step.places()) == own
    found = advantages(step, train, {}, Alone())
    whole = torch.cat([found[place][step.at(place).mask] for place in step.places()]).double()
    assert len(whole) == own
    assert abs(float(whole.mean())) < 1e-5
    assert all(not found[place][~step.at(place).mask].any() for place in step.places())
    tally = TrainStepMetrics()
    for slot in step.work.layout.of_rank(0):
        tally.sample(step.reward(slot), step.work.seal.groups[slot.group], slot.sample)
    for place in step.places():
        tally.mismatch(step.at(place).rollout_logp, step.at(place))
    metrics = tally.metrics(Alone())
    assert metrics["tokens"] == own
    assert metrics["response_length_mean"] == pytest.approx(own / len(samples))
    assert metrics["mismatch_abs"] == 0.0


def test_an_offer_without_observations_is_written_as_before() -> None:
    offered = OfferedGroup(
        ref=PromptRef(0, 0, 0), digest="d", prompt_tokens=1, response_tokens=(3, 4), versions=(Version(0, 0),)
    )
    assert "observed" not in offered.model_dump(exclude_defaults=True)
    assert offered.own_tokens == (3, 4)

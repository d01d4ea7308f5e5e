"""The trained part of a step, its totals over all ranks, and the use of a group's baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ready_seals import ready_seal
from torch import Tensor

from gcore.config.train import TrainSpec
from gcore.errors import DataError
from gcore.ledger.balance import balance_samples
from gcore.ledger.records.chain import SealedGroup
from gcore.train.advantages import advantages
from gcore.train.batching import BatchIndex, StepTensors, TokenFeeding, cut_step
from gcore.train.objectives import Count, PolicyGradient
from gcore.train.rank.feed import StepInput, TrainGroup, TrainSample
from gcore.train.step import TrainedMask, trained_mask
from gcore.types import PromptRef, Version

LENGTHS = ((4, 0, 3), (1, 6), (2, 2))
FEEDING = TokenFeeding("packed", 10, torch.device("cpu"))
BAND = {"correction_band": (0.5, 2.0)}


class Alone:
    """One rank: what it has is what all have."""

    def sum(self, values: Sequence[float]) -> list[float]:
        return list(values)


def step_of(rank: int = 0, ranks: int = 1, *, baseline: float | None = None, **train: Any) -> StepTensors:
    """Two mini-batches; every response of one prompt token, the engine's log-probabilities all -1, rewards 0, 1, 2 ..."""
    held, sealed = {}, []
    for number, lengths in enumerate(LENGTHS):
        ref, digest = PromptRef(0, number, 0), f"{number:032x}"
        samples = {
            i: TrainSample(np.full(n, 5, np.int32), np.full(n, -1.0, np.float32), float(i))
            for i, n in enumerate(lengths)
        }
        held[digest] = TrainGroup(ref, digest, np.array([3], np.int32), samples, 1.0, baseline)
        sealed.append(
            SealedGroup(
                ref=ref,
                digest=digest,
                prompt_tokens=1,
                response_tokens=lengths,
                versions=(Version(0, 0),),
                holder="h",
            )
        )
    seal = ready_seal(sealed, ranks=ranks, mini_batches=2)
    work = StepInput(seal, balance_samples(seal), rank, held)
    return cut_step(work, TrainSpec(micro_batch_tokens=6, mini_batches=2, **train), FEEDING)


def mis(step: StepTensors, old: dict[BatchIndex, Tensor]) -> TrainedMask:
    return trained_mask(step, PolicyGradient(TrainSpec(**BAND), 8.0, "mis"), old, Alone())


def same(step: StepTensors, logp: float) -> dict[BatchIndex, Tensor]:
    return {place: torch.full(step.at(place).mask.shape, logp) for place in step.places()}


def test_without_a_correction_that_drops_all_tokens_of_the_responses_are_trained() -> None:
    step = step_of()
    found = trained_mask(step, PolicyGradient(TrainSpec(), 8.0, "icepop"), {}, Alone())
    assert [(count.tokens, count.sequences) for count in found.counts] == [(p.tokens, p.sequences) for p in step.plans]
    assert sum(count.tokens for count in found.counts) == 18
    assert all(torch.equal(found.masks[place], step.at(place).mask) for place in step.places())


def test_samples_inside_the_band_are_all_kept_and_those_outside_all_dropped() -> None:
    step = step_of()
    assert (
        mis(step, same(step, -1.2)).counts
        == trained_mask(step, PolicyGradient(TrainSpec(), 8.0, "none"), {}, Alone()).counts
    )
    gone = mis(step, same(step, -4.0))
    assert gone.counts == (Count(0, 0), Count(0, 0))
    assert not any(mask.any() for mask in gone.masks.values())


@given(st.integers(0, 10**6), st.integers(1, 3))
def test_the_counts_of_all_ranks_are_those_of_the_masks_of_all_ranks(seed: int, ranks: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    steps = [step_of(rank, ranks) for rank in range(ranks)]
    old = [
        {place: -1 + torch.randn(step.at(place).mask.shape, generator=generator) for place in step.places()}
        for step in steps
    ]
    brought: list[list[float]] = []

    class Collecting:
        def sum(self, values: Sequence[float]) -> list[float]:
            brought.append(list(values))
            return list(values)

    class Summed:
        def sum(self, values: Sequence[float]) -> list[float]:
            return [sum(column) for column in zip(*brought, strict=True)]

    objective = PolicyGradient(TrainSpec(**BAND), 8.0, "mis")
    for step, own in zip(steps, old, strict=True):
        trained_mask(step, objective, own, Collecting())
    found = [trained_mask(step, objective, own, Summed()) for step, own in zip(steps, old, strict=True)]
    assert all(one.counts == found[0].counts for one in found)
    for number, count in enumerate(found[0].counts):
        masks = [mask for one in found for place, mask in one.masks.items() if place.mini_batch == number]
        assert count.tokens == sum(int(mask.sum()) for mask in masks)
        assert count.sequences == sum(int(mask.any(dim=1).sum()) for mask in masks)


def test_remax_takes_the_baseline_off_what_is_still_to_come_at_every_token() -> None:
    train = TrainSpec(advantage="remax", gamma=0.5)
    step = step_of(baseline=0.25, advantage="remax", gamma=0.5)
    found = advantages(step, train, {}, Alone())
    for place in step.places():
        batch = step.at(place)
        for row, slot in enumerate(batch.slots):
            n = LENGTHS[slot.group][slot.sample]
            expected = [slot.sample * 0.5 ** (n - 1 - t) - 0.25 for t in range(n)]
            assert found[place][row, :n].tolist() == pytest.approx(expected)
            assert not found[place][row, n:].any()


def test_remax_without_a_baseline_is_one_sentence() -> None:
    with pytest.raises(DataError, match=r"has no baseline, which train\.advantage: remax needs"):
        advantages(step_of(advantage="remax"), TrainSpec(advantage="remax"), {}, Alone())


def test_imitated_samples_have_no_advantage() -> None:
    """Not even where the estimator could not be taken: groups of one, no baseline."""
    train = TrainSpec(loss="sft", advantage="remax")
    step = step_of(loss="sft", advantage="remax")
    assert not any(value.any() for value in advantages(step, train, {}, Alone()).values())


def test_groups_of_different_sizes_are_compared_each_with_its_own() -> None:
    step = step_of()
    found = advantages(step, TrainSpec(advantage="rloo"), {}, Alone())
    by_slot = {
        slot: float(found[place][row, 0]) for place in step.places() for row, slot in enumerate(step.at(place).slots)
    }
    assert {(slot.group, slot.sample): value for slot, value in by_slot.items()} == {
        (0, 0): -1.5,
        (0, 1): 0.0,
        (0, 2): 1.5,
        (1, 0): -1.0,
        (1, 1): 1.0,
        (2, 0): -1.0,
        (2, 1): 1.0,
    }

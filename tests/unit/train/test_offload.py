"""A rank's memory is released and restored bit for bit: with a plain optimizer here, under DeepSpeed in integration tests."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gcore.config import parse_spec
from gcore.system.memory import release_free_memory
from gcore.testing import FakeClock
from gcore.train import offload as resting_module
from gcore.train.backends.base import forward_tensors
from gcore.train.backends.deepspeed import optimizer_tensors
from gcore.train.models import RankModels
from gcore.train.offload import MemoryOffloader, OffloadedLost
from gcore.train.rank.feed import FeedState, WorldName
from gcore.train.rank.launch import PARTS, CannotOffload, refuse_release, refuse_restore, unknown_parts
from gcore.types import Token

SPEC = parse_spec(
    {
        "name": "j",
        "model": {"path": "m"},
        "data": {"path": "d"},
        "flow": {"steps": 3},
        "rollout": {"max_new_tokens": 4},
    }
)
MIB = 2**20


class Small:
    """As much of a trained model as resting looks at; a vector stays in memory, a matrix is worth putting aside."""

    def __init__(self, width: int = 128) -> None:
        self.module = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width, bias=False))
        self.module.register_buffer("table", torch.randn(width, width))
        self.updater = torch.optim.AdamW(self.module.parameters(), lr=0.1)
        self.learn()

    def learn(self) -> float:
        loss = self.module(torch.ones(4, self.module[0].in_features)).square().sum()
        self.updater.zero_grad()
        loss.backward()
        self.updater.step()
        return float(loss.detach())

    def forward_tensors(self) -> Iterator[torch.Tensor]:
        return forward_tensors(self.module)

    def optimizer_tensors(self) -> Iterator[torch.Tensor]:
        return optimizer_tensors(self.updater)

    def everything(self) -> list[torch.Tensor]:
        return [*self.module.state_dict().values(), *optimizer_tensors(self.updater)]


def emptied(tensor: torch.Tensor) -> bool:
    """But for what is less than a page at either end."""
    first = tensor.untyped_storage()
    values = torch.empty(0, dtype=torch.float32).set_(first)
    return bool(values[1024:-1024].eq(0).all())


def resting(model: Any) -> MemoryOffloader:
    return MemoryOffloader(RankModels(model, None), SPEC.train, torch.device("cpu"), FakeClock())


def nothing(_: str) -> None:
    pass


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_restored_memory_is_bitwise_equal_and_views_stay_views() -> None:
    model = Small()
    row = model.module[0].weight.data[3]
    row.numpy()  # after which torch itself could not give the memory back
    before = [one.detach().clone() for one in model.everything()]
    rank = resting(model)
    rank.rest(PARTS, nothing)
    assert rank.released == PARTS
    assert emptied(row)
    rank.rest((), nothing)
    assert rank.released == frozenset()
    assert all(one.equal(other) for one, other in zip(model.everything(), before, strict=True))
    model.module[0].weight.data[3] = 7.0
    assert row.eq(7.0).all()


def test_training_goes_on_after_a_rest_as_if_there_had_been_none() -> None:
    torch.manual_seed(0)
    rested = Small()
    torch.manual_seed(0)
    awake = Small()
    rank = resting(rested)
    losses = []
    for _ in range(4):
        rank.rest({"optimizer"}, nothing)
        rank.rest(PARTS, nothing)
        rank.rest((), nothing)
        losses.append((rested.learn(), awake.learn()))
    assert all(one == other for one, other in losses)
    assert len({one for one, _ in losses}) == len(losses)


def test_the_parts_are_released_each_by_itself_and_asking_twice_does_nothing() -> None:
    model, told = Small(), []
    rank = resting(model)
    rank.rest({"optimizer"}, told.append)
    assert not emptied(model.module[0].weight), "the forward pass has its weights still"
    assert all(
        emptied(one)
        for one in optimizer_tensors(model.updater.state)
        if one.ndim == 2 and one.grad_fn is None and not one.requires_grad
    )
    rank.rest({"optimizer"}, told.append)
    rank.rest({"weights"}, told.append)
    assert rank.released == {"weights"}
    assert emptied(model.module[0].weight)
    assert set(told) == {"releasing", "restoring"}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sets(st.sampled_from(sorted(PARTS))), max_size=6))
def test_parts_released_in_any_order_are_restored(orders: list[set[str]]) -> None:
    model = Small(64)
    before = [one.detach().clone() for one in model.everything()]
    rank = resting(model)
    for what in orders:
        rank.rest(what, nothing)
        assert rank.released == what
    rank.rest((), nothing)
    assert all(one.equal(other) for one, other in zip(model.everything(), before, strict=True))


def test_memory_is_really_free_and_nothing_is_left_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = Small(1536)
    release_free_memory()
    before = resident()
    rank = resting(model)
    rank.rest(PARTS, nothing)
    # Two weights, their gradients and Adam's state, and a table: nine matrices of nine megabytes.
    assert before - resident() > 75 * MIB
    assert list(tmp_path.iterdir()) == [], "its file has no name"
    rank.rest((), nothing)
    assert before - resident() < 10 * MIB


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_failed_offload_changes_nothing_and_names_a_fix() -> None:
    model = Small()
    rank = resting(model)
    with files_of_at_most(100_000), pytest.raises(CannotOffload, match=r"cannot be offloaded.*TMPDIR"):
        rank.rest(PARTS, nothing)
    assert rank.released == frozenset()
    model.learn()


def test_where_one_part_finds_no_room_the_other_may_be_released_and_both_come_back() -> None:
    model = Small()
    before = [one.detach().clone() for one in model.everything()]
    rank = resting(model)
    weights = sum(one.nbytes() for one in rank._storages("weights"))
    optimizer = sum(one.nbytes() for one in rank._storages("optimizer"))
    assert weights != optimizer
    first_fits = optimizer < weights
    with files_of_at_most((optimizer + weights) // 2), pytest.raises(CannotOffload):
        rank.rest(PARTS, nothing)
    assert rank.released == ({"optimizer"} if first_fits else set())
    rank.rest((), nothing)
    assert all(one.equal(other) for one, other in zip(model.everything(), before, strict=True))


def test_a_part_that_finds_room_stays_released_when_the_other_does_not() -> None:
    model = Small()
    rank = resting(model)
    rank.rest({"weights"}, nothing)
    with files_of_at_most(100_000), pytest.raises(CannotOffload):
        rank.rest(PARTS, nothing)
    assert rank.released == {"weights"}
    rank.rest((), nothing)
    model.learn()


def test_damaged_offload_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda prefix: (tmp_path / prefix).open("w+b"))
    rank = resting(Small())
    rank.rest({"optimizer"}, nothing)
    with (tmp_path / "gcore-rests-").open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)
        file.seek(5000)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(OffloadedLost, match="came back damaged"):
        rank.rest((), nothing)


def test_on_a_gpu_host_memory_is_kept_for_what_is_released_and_for_nothing_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host, empty, made = torch.device("cpu"), torch.empty, []

    def pinned(size: int, *, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        made.extend([size] if pin_memory else [])
        return empty(size, **more)

    bytes_of = resting_module._bytes_of
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(resting_module, "_bytes_of", lambda storage, device: bytes_of(storage, host))
    monkeypatch.setattr(MemoryOffloader, "_worth_it", lambda self, storage: storage.nbytes() >= resting_module.SMALLEST)
    model = Small()
    rank = MemoryOffloader(RankModels(model, None), SPEC.train, torch.device("cuda"), FakeClock())  # type: ignore[arg-type]
    for _ in range(4):
        before = [one.detach().clone() for one in model.everything()]
        rank.rest({"weights"}, nothing)
        rank.rest(PARTS, nothing)
        rank.rest((), nothing)
        assert all(one.equal(other) for one, other in zip(model.everything(), before, strict=True))
        model.learn()  # gradients are other tensors each time
    places = sum(len(kept) for kept in rank._pinned.values())
    assert len(made) == places, "each step uses the memory of the one before"
    model.module.table = torch.zeros(64, 128)
    rank.rest(PARTS, nothing)
    assert sum(len(kept) for kept in rank._pinned.values()) == places
    assert len(made) == places + 1, "what had another size is let go"


STATE = FeedState(WorldName("j", "w", 0), 0, 1, done=4)


@pytest.mark.parametrize(
    ("state", "step", "why"),
    [
        pytest.param(STATE, 4, "", id="between two steps"),
        pytest.param(STATE, 3, "the last applied step is 4, not 3", id="a word that comes late"),
        pytest.param(STATE, 5, "the last applied step is 4, not 5", id="a word that comes early"),
        pytest.param(
            FeedState(STATE.name, 0, 1, done=4, applying=Token(0, 5, 1)), 4, "is being applied", id="while it trains"
        ),
        pytest.param(
            FeedState(STATE.name, 0, 1, done=4, begun=(("d",),)), 4, "parts of step 5 were begun", id="amid a step"
        ),
    ],
)
def test_a_rank_gives_memory_back_only_between_two_steps(state: FeedState, step: int, why: str) -> None:
    refused = refuse_release(state, step)
    assert (refused is None) == (not why)
    if refused is not None:
        assert why in refused.reason


def test_a_rank_that_trains_needs_nobody_to_restore_it() -> None:
    assert refuse_restore(STATE) is None
    refused = refuse_restore(FeedState(STATE.name, 0, 1, done=4, applying=Token(0, 5, 1)))
    assert refused is not None
    assert "restores the rank's memory itself" in refused.reason


def test_a_part_that_no_rank_has_is_named() -> None:
    assert unknown_parts(["weights", "optimizer"]) == ""
    assert unknown_parts(["kv_cache"]) == "a rank has no part 'kv_cache'; it releases optimizer and weights"

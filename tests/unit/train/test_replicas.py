"""A rank's copies in its node's memory, and the check for room, with a model of a few numbers and no world."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gcore.ledger.records.chain import WorldState
from gcore.models.replicas import Extent, list_copies
from gcore.testing.models import rank_launch
from gcore.train.checkpoint.replicas import StateReplicator
from gcore.train.checkpoint.writer import UpdateCounts

NUMBERS = 100
STATE_BYTES = 3 * 4 * NUMBERS


class Alone:
    """A collective of one rank."""

    size, device = 1, torch.device("cpu")

    def sum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def max(self, values: Sequence[float]) -> list[float]:
        return list(values)


class Policy:
    def extents(self) -> Iterator[Extent]:
        yield Extent(name="a", start=0, numel=NUMBERS)

    def pieces(self, kind: str, extents: Any) -> Iterator[torch.Tensor]:
        for extent in extents:
            yield torch.ones(extent.numel)


def copier(
    memory: Path,
    lineage: int = 0,
    start: WorldState | None = None,
    copies_gb: float | None = None,
    base_sample: str = "",
) -> StateReplicator:
    spec = {
        "name": "j",
        "model": {"path": "m"},
        "data": {"path": "d"},
        "flow": {"steps": 9},
        "rollout": {"max_new_tokens": 4},
        "train": {"copies_gb": copies_gb},
    }
    begun = {"step": start.step, "state": start.model_dump()} if start else None
    launch = rank_launch(spec, memory.parent / "run", start=begun).model_copy(
        update={"world": f"w{lineage}", "lineage": lineage, "nodes": ("a",), "memory_dir": str(memory)}
    )
    models: Any = SimpleNamespace(policy=Policy(), critic=None, follower=None)
    world: Any = Alone()
    return StateReplicator(launch, world, models, base_sample)


def keep(one: StateReplicator, step: int) -> int:
    one.begin(step)
    return one.keep(step, 1, UpdateCounts(0, 0), lambda: None)


def states(memory: Path) -> set[tuple[str, int]]:
    return {(one.of.world, one.of.step) for one in list_copies(memory, "j")}


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    return folder


def has_room(monkeypatch: pytest.MonkeyPatch, memory: Path, states: float) -> None:
    """The memory takes so many states, no more."""

    def usage(folder: Path) -> Any:
        used = sum(path.stat().st_size for path in memory.glob("*.data"))
        return SimpleNamespace(free=states * STATE_BYTES - used)

    monkeypatch.setattr(shutil, "disk_usage", usage)


@pytest.mark.parametrize(("room", "copies_gb"), [(2.1, 1.0), (4 * 2.1, None)], ids=["as the spec says", "by default"])
def test_room_for_one_world_is_enough_for_the_next(
    memory: Path, monkeypatch: pytest.MonkeyPatch, room: float, copies_gb: float | None
) -> None:
    has_room(monkeypatch, memory, room)
    start = None
    for lineage in range(3):
        world = copier(memory, lineage, start, copies_gb)
        assert world.wanted, f"lineage {lineage}"
        first = start.step if start else 0
        for step in range(first + 1, first + 4):
            assert keep(world, step) == STATE_BYTES
        start = WorldState(world=f"w{lineage}", lineage=lineage, step=first + 3, attempt=1, shards=1)
        assert states(memory) == {(start.world, start.step - 1), (start.world, start.step)}


def test_a_world_that_has_no_room_leaves_what_it_starts_from_until_a_step_is_behind_it(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_room(monkeypatch, memory, 9)
    world = copier(memory)
    for step in (1, 2):
        keep(world, step)
    start = WorldState(world="w0", lineage=0, step=2, attempt=1, shards=1)
    has_room(monkeypatch, memory, 1)
    small = copier(memory, 1, start)
    assert not small.wanted
    assert states(memory) == {("w0", 2)}
    assert keep(small, 3) == 0
    assert states(memory) == {("w0", 2)}, "if this step is lost, it is what is left of the one before"
    assert keep(small, 4) == 0
    assert states(memory) == set(), "nobody will ever start from it again"


def test_a_copy_that_somebody_took_away_is_not_sent_and_costs_no_step(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_room(monkeypatch, memory, 9)
    world = copier(memory)
    sent: list[int] = []

    def send(tensor: torch.Tensor, keeper: int, group: Any) -> None:
        sent.append(int(tensor[0]))

    write = StateReplicator._write

    def taken_away(self: StateReplicator, *arguments: Any) -> Any:
        header = write(self, *arguments)
        for path in memory.iterdir():
            path.unlink()
        return header

    monkeypatch.setattr(StateReplicator, "_write", taken_away)
    monkeypatch.setattr(dist, "isend", send)
    world._keepers = (1,)
    keep(world, 1)
    assert sent == [0], "that there is nothing"


def test_replicas_record_the_sample_of_the_base_model(memory: Path) -> None:
    keep(copier(memory, copies_gb=1.0, base_sample="5eed"), 1)
    assert [one.base_sample for one in list_copies(memory, "j")] == ["5eed"]

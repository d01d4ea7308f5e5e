"""Copies of train states in a node's memory: their files, the owners of second copies, and release of the memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.ledger.records.chain import WorldState
from gcore.models.replicas import (
    KINDS,
    CopyHeader,
    Extent,
    data_file,
    drop_copies,
    header_file,
    home_folder,
    list_copies,
    memory_folder,
    open_folder,
    second_keepers,
    shard_bytes,
    sweep_memory,
)

EXTENTS = (Extent(name="a", start=0, numel=3), Extent(name="b", start=4, numel=2))


def state(step: int = 1, world: str = "w", lineage: int = 0, attempt: int = 1, shards: int = 2) -> WorldState:
    return WorldState(world=world, lineage=lineage, step=step, attempt=attempt, shards=shards)


def leave(folder: Path, of: WorldState, shard: int, *, size: int = 4, job_uid: str = "j") -> CopyHeader:
    """A copy, whole."""
    header = CopyHeader(job_uid=job_uid, of=of, shard=shard, extents={"policy": ()}, size=size, sha256="0" * 64)
    data_file(folder, of, shard).write_bytes(b"\0" * size)
    header_file(folder, of, shard).write_bytes(header.encode())
    return header


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_a_second_copy_is_on_another_node_if_there_is_one(nodes: list[str]) -> None:
    for rank, keeper in enumerate(second_keepers(nodes)):
        if keeper is None:
            assert set(nodes) == {nodes[rank]}
        else:
            assert nodes[keeper] != nodes[rank]


@given(st.lists(st.sampled_from("abcd"), min_size=2, max_size=12), st.sampled_from("abcd"))
def test_every_shard_survives_the_loss_of_any_node(nodes: list[str], lost: str) -> None:
    left = {node for node in nodes if node != lost}
    if left:
        for rank, keeper in enumerate(second_keepers(nodes)):
            assert nodes[rank] != lost or (keeper is not None and nodes[keeper] in left)


@pytest.mark.parametrize("nodes", [("a", "b", "c", "d"), ("a", "b", "a", "b")], ids=["one a node", "two a node"])
def test_ranks_that_are_spread_evenly_each_keep_one_neighbours_copy(nodes: tuple[str, ...]) -> None:
    assert sorted(keeper for keeper in second_keepers(nodes) if keeper is not None) == list(range(len(nodes)))


def test_a_header_says_where_everything_stands_in_the_data() -> None:
    header = CopyHeader(
        job_uid="j",
        of=state(),
        shard=0,
        extents={"policy": EXTENTS, "critic": EXTENTS[:1]},
        size=shard_bytes(EXTENTS) + shard_bytes(EXTENTS[:1]),
        sha256="0" * 64,
    )
    places = list(header.places())
    assert [(model, kind, extent.name) for model, kind, extent, _ in places] == [
        *(("policy", kind, extent.name) for kind in KINDS for extent in EXTENTS),
        *(("critic", kind, "a") for kind in KINDS),
    ]
    ends = [offset + 4 * extent.numel for _, _, extent, offset in places]
    assert [offset for _, _, _, offset in places] == [0, *ends[:-1]]
    assert ends[-1] == header.size


def test_incomplete_copies_are_not_listed(tmp_path: Path) -> None:
    whole = leave(tmp_path, state(), 0)
    leave(tmp_path, state(), 1)
    data_file(tmp_path, state(), 1).write_bytes(b"\0\0")  # shorter than its header says
    leave(tmp_path, state(2), 0)
    header_file(tmp_path, state(2), 0).write_bytes(b"{")
    leave(tmp_path, state(3), 0)
    data_file(tmp_path, state(3), 0).unlink()
    data_file(tmp_path, state(4), 0).write_bytes(b"\0\0\0\0")  # its rank died before the header
    leave(tmp_path, state(5), 0, job_uid="another job")
    header_file(tmp_path, state(), 0).with_name("renamed.json").write_bytes(whole.encode())
    assert list_copies(tmp_path, "j") == (whole,)
    assert list_copies(tmp_path / "none", "j") == ()


def test_dropped_copies_and_headerless_files_are_deleted_and_others_stay(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        leave(tmp_path, state(step), 0)
    leave(tmp_path, state(1, world="other", lineage=1), 0)
    data_file(tmp_path, state(1), 7).write_bytes(b"half")
    drop_copies(tmp_path, "j", lambda of: of.world == "w" and of.step < 3)
    assert {(one.of.world, one.of.step) for one in list_copies(tmp_path, "j")} == {("w", 3), ("other", 1)}
    assert len(list(tmp_path.iterdir())) == 4


def test_a_world_whose_name_has_dashes_is_told_from_its_numbers(tmp_path: Path) -> None:
    data_file(tmp_path, state(2, world="a-b-1"), 0).write_bytes(b"half")
    drop_copies(tmp_path, "j", lambda of: of == state(2, world="a-b-1", shards=1))
    assert not list(tmp_path.iterdir())


def test_ended_jobs_and_installations_that_are_gone_give_their_memory_back(tmp_path: Path) -> None:
    root, home, gone = tmp_path / "memory", tmp_path / "home", tmp_path / "gone"
    for one in (home, gone):
        one.mkdir()
        for node, job in (("node-0", "running"), ("node-0", "ended"), ("node-1", "ended")):
            assert open_folder(memory_folder(root, str(one), node, job), str(one))
    gone.rmdir()
    sweep_memory(root, str(home), "node-0", ["running"])
    mine = home_folder(root, str(home))
    assert {str(path.relative_to(mine)) for path in mine.glob("*/*")} == {"node-0/running", "node-1/ended"}
    assert not home_folder(root, str(gone)).exists()


def test_a_memory_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    assert not open_folder(memory_folder(tmp_path / "file", "home", "node-0", "j"), "home")


def test_a_folder_that_somebody_else_laid_there_is_not_used(tmp_path: Path) -> None:
    folder = memory_folder(tmp_path / "memory", "home", "node-0", "j")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "memory").mkdir()
    folder.parents[2].symlink_to(tmp_path / "theirs")
    assert not open_folder(folder, "home")


def test_only_its_user_may_look_into_a_jobs_memory(tmp_path: Path) -> None:
    folder = memory_folder(tmp_path, "home", "node-0", "j")
    assert open_folder(folder, "home")
    assert folder.parents[2].stat().st_mode & 0o077 == 0

"""Nodes prove that they share one folder, in any order of arrival; a node that does not is named with its path."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from controllers.api.store_reader import StoreReader
from controllers.api.submission.submit import Submitter
from controllers.identity import Identity
from controllers.storage import run_folder as storage
from controllers.storage.run_folder import FOLDER, StorageNotShared, StorageProof, localize_mirror, run_folder
from gcore.errors import UsageError
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.job import JobRecord
from gcore.ledger.transactions import Versioned
from gcore.store.keys import JobKeys
from gcore.testing import FakeClock, MemoryCluster, MemoryStore


class Nodes:
    """Some nodes of one cluster; each may have another disk behind the job's path."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster(FakeClock())
        self.store = MemoryStore(self.cluster)
        self.pauses = 0

    async def pause(self, seconds: float) -> None:
        self.pauses += 1
        await asyncio.sleep(0)

    async def prove(self, node: str, folder: Path, lease: int | None = None, *, is_apart: bool = False) -> None:
        granted = await self.store.grant(60) if lease is None else lease
        identity = Identity(node, f"{node}.aaaa", "h:1", granted)
        await StorageProof(self.store, JobKeys("u"), identity, folder, self.pause, is_apart).run()


async def test_one_node_proves_that_it_can_write(tmp_path: Path) -> None:
    nodes = Nodes()
    await nodes.prove("a", tmp_path / "runs" / "j-u")
    assert nodes.pauses == 0, "on one machine nothing is waited for"
    assert [path.name for path in (tmp_path / "runs" / "j-u" / FOLDER).iterdir()] == ["a"]


async def test_nodes_that_share_a_folder_get_past_each_other_in_any_order(tmp_path: Path) -> None:
    nodes = Nodes()
    await asyncio.gather(*(nodes.prove(name, tmp_path) for name in "abcd"))
    await nodes.prove("late", tmp_path)
    await nodes.prove("a", tmp_path)  # started again


async def test_of_two_that_do_not_share_one_names_the_other_and_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "LOOKS", 3)
    nodes = Nodes()
    await nodes.prove("a", tmp_path / "disk of a")
    with pytest.raises(StorageNotShared, match=re.escape("b does not see what a wrote")) as caught:
        await nodes.prove("b", tmp_path / "disk of b")
    assert str(tmp_path / "disk of b") in str(caught.value)
    assert "storage.root" in str(caught.value)
    assert nodes.pauses == 3


async def test_proof_from_an_earlier_life_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "LOOKS", 1)
    nodes = Nodes()
    for disk in ("one", "other"):
        (tmp_path / disk / FOLDER).mkdir(parents=True)
        (tmp_path / disk / FOLDER / "a").write_text("a number of another life")
    await nodes.prove("a", tmp_path / "one")
    with pytest.raises(StorageNotShared):
        await nodes.prove("b", tmp_path / "other")


async def test_a_file_that_shows_late_is_waited_for(tmp_path: Path) -> None:
    nodes = Nodes()
    here, there = tmp_path / "here", tmp_path / "there"
    await nodes.prove("a", here)

    async def arrives(seconds: float) -> None:
        nodes.pauses += 1
        if nodes.pauses == 5:
            (there / FOLDER / "a").write_bytes((here / FOLDER / "a").read_bytes())

    nodes.pause = arrives  # type: ignore[method-assign]
    await nodes.prove("b", there)
    assert nodes.pauses == 5


async def test_a_node_that_is_gone_need_not_be_seen(tmp_path: Path) -> None:
    nodes = Nodes()
    lease = await nodes.store.grant(60)
    await nodes.prove("a", tmp_path / "disk of a", lease)
    await nodes.store.revoke(lease)
    await nodes.prove("b", tmp_path / "disk of b")


async def test_a_folder_that_takes_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("no folder")
    with pytest.raises(StorageNotShared, match=r"a cannot write to the job's folder \(.+\)"):
        await Nodes().prove("a", tmp_path / "runs" / "j-u")


async def test_nodes_with_copies_get_past_each_other_when_they_share_nothing(tmp_path: Path) -> None:
    nodes = Nodes()
    for name in "abc":
        await nodes.prove(name, tmp_path / name, is_apart=True)
    await nodes.prove("a", tmp_path / "a", is_apart=True)  # started again
    assert nodes.pauses == 0


async def test_nodes_with_copies_that_share_a_folder_are_told_that_one_copy_would_count_as_two(tmp_path: Path) -> None:
    nodes = Nodes()
    await nodes.prove("a", tmp_path / "runs", is_apart=True)
    with pytest.raises(StorageNotShared, match="b sees what a wrote") as caught:
        await nodes.prove("b", tmp_path / "runs", is_apart=True)
    assert "storage.copies" in str(caught.value)


def job_record(spec: dict[str, object]) -> JobRecord:
    return JobRecord(uid="u", name="j", spec=spec, run_dir="/submitter/runs/j-u", created=0.0, prompts=1)


def test_with_copies_a_run_lies_under_each_nodes_own_root_and_else_where_the_record_says() -> None:
    apart, shared = job_record({"storage": {"root": None, "copies": 2}}), job_record({"storage": {"root": None}})
    assert run_folder(apart, Path("/mine")) == Path("/mine/j-u")
    assert run_folder(shared, Path("/mine")) == Path("/submitter/runs/j-u")
    for record, seen in (
        (apart, "/mine/j-u"),
        (shared, "/submitter/runs/j-u"),
        (job_record({}), "/submitter/runs/j-u"),
    ):
        mirror = localize_mirror(JobMirror(JobKeys("u"), job=Versioned(record, 3)), Path("/mine"))
        assert mirror.job is not None
        assert (mirror.job.record.run_dir, mirror.job.revision) == (seen, 3)
        assert localize_mirror(mirror, Path("/mine")) == mirror


@pytest.mark.parametrize("local", [True, False])
async def test_copies_on_the_one_folder_of_a_local_cluster_are_refused_before_anything_is_read_or_written(
    tmp_path: Path, local: bool
) -> None:
    store = MemoryStore(MemoryCluster(FakeClock()))
    submissions = Submitter(store, StoreReader(store), tmp_path, tmp_path, FakeClock(), local=local)
    spec = {"name": "j", "model": {"path": "nowhere"}, "data": {"path": "nowhere"}, "flow": {"steps": 1}}
    spec |= {"rollout": {"max_new_tokens": 4}, "storage": {"copies": 2}}
    said = "storage.copies: the nodes of a local cluster share one folder" if local else "nowhere"
    with pytest.raises(UsageError, match=said) as raised:
        await submissions.create("", json.dumps(spec), anew=False)
    assert raised.value.exit_code == 2

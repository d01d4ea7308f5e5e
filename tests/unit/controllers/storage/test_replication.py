"""A node's own folder of a run fetches missing files from peers, reports its contents, and refuses damaged files."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import KEYS, ME, PEER, SPEC, running_job, sealed_job, stored
from peer_folder import UID, checkpoint, serving

from controllers.job.executor import apply_action
from controllers.rules.actions import (
    ArchiveRecords,
    DiscardCheckpoints,
    FetchCheckpoint,
    FetchStart,
    FetchWeights,
    GatherReceipts,
    ReportFolder,
    Rollback,
)
from controllers.rules.view import JobView, SavedCheckpoint
from controllers.storage.peer_files import PeerFiles
from controllers.storage.replication import Replicator, verify_files
from controllers.storage.run_folder import LocalRunFolder
from gcore.ledger import archive
from gcore.ledger.records.chain import Checkpoint, Checkpoints, Head, HeldCheckpoint, LogEntry, NodeFolder
from gcore.ledger.records.job import NodeRecord
from gcore.ledger.transactions import TransactionExecutor, TxnOutcome
from gcore.testing import FakeClock, MemoryCluster, MemoryStore
from gcore.types import Token, Version

APART = SPEC.model_copy(update={"storage": SPEC.storage.model_copy(update={"copies": 2})})


class Clock:
    """Nobody waits in a test; it is as late as a test says."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        """Not at all."""


class Node:
    """node-0, and what it does with its own folder while `peers` serve theirs."""

    def __init__(self, folder: Path) -> None:
        self.store = MemoryStore(MemoryCluster(FakeClock()))
        self.run_dir = folder / "mine"
        self.told: dict[str, str] = {}
        self.own = LocalRunFolder(PeerFiles(UID, self.run_dir, owner="me"))
        self.lease = 0
        self.clock = Clock()

    async def does(self, action: Any, view: JobView) -> TxnOutcome:
        self.lease = self.lease or await self.store.grant(60)
        return (await apply_action(action, view, self.effects(TransactionExecutor(self.store, KEYS)))).outcome

    def effects(self, ledger: Any) -> Any:
        """The effects of the node's actions."""
        clock: Any = self.clock
        tell = self.told.__setitem__
        return SimpleNamespace(
            store=self.store,
            ledger=ledger,
            run_dir=self.run_dir,
            replicator=Replicator(self.store, ledger, self.lease, clock, self.run_dir, tell, self.own),
            tell=tell,
            away=str,
            clock=clock,
        )

    async def said(self) -> NodeFolder:
        kv = await self.store.get(KEYS.folder("node-0"))
        assert kv is not None
        return NodeFolder.decode(kv.value)


def view(addresses: Mapping[str, str], has: Mapping[str, tuple[HeldCheckpoint, ...]] | None = None) -> JobView:
    """Of node-0, with peers that answer there and say that they have checkpoints."""
    base = sealed_job(ready=True)
    names = {"node-0": "h:1", **addresses}
    nodes = {n: NodeRecord(name=n, incarnation=n, address=a, slots=("cpu:0",), pid=1) for n, a in names.items()}
    members = {f"{n}.x" if n not in ("node-0", "node-1") else {"node-0": ME, "node-1": PEER}[n]: n for n in names}
    by_node = {n: name for name, n in members.items()}
    folders = {
        n: stored(NodeFolder(node=n, by=by_node[n], checkpoints=held))
        for n, held in (has or {}).items()
        if n in by_node
    }
    member = base.mirror.members[ME].record
    mirror = replace(
        base.mirror,
        folders=folders,
        members={
            name: stored(member.model_copy(update={"incarnation": name, "node": n})) for name, n in members.items()
        },
    )
    return replace(base, spec=APART, nodes=nodes, mirror=mirror)


def saved(digest: str, step: int = 3) -> SavedCheckpoint:
    return SavedCheckpoint(Version(0, step), f"checkpoints/0-{step}", digest)


def held(digest: str, step: int = 3) -> tuple[HeldCheckpoint, ...]:
    return (HeldCheckpoint(lineage=0, step=step, digest=digest),)


def harm(run_dir: Path, step: int = 3) -> None:
    path = run_dir / "checkpoints" / f"0-{step}" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[1 << 20] ^= 1
    path.write_bytes(data)


async def test_a_copy_that_is_fetched_is_said_and_once_more_changes_nothing(tmp_path: Path) -> None:
    node, digest = Node(tmp_path), checkpoint(tmp_path / "theirs")
    async with serving(tmp_path / "theirs") as address:
        seen = view({"node-1": address}, {"node-1": held(digest)})
        assert await node.does(FetchCheckpoint(saved(digest)), seen) is TxnOutcome.WON
        verify_files(node.run_dir / "checkpoints/0-3", digest)
        assert (await node.said()).checkpoints == held(digest)
        assert await node.does(FetchCheckpoint(saved(digest)), seen) is TxnOutcome.STALE
        assert await node.does(ReportFolder(), seen) is TxnOutcome.STALE


async def test_of_peers_that_have_it_damaged_the_whole_one_counts(tmp_path: Path) -> None:
    node, digest = Node(tmp_path), checkpoint(tmp_path / "theirs")
    (tmp_path / "others").mkdir()
    (tmp_path / "theirs" / "checkpoints").rename(tmp_path / "others" / "checkpoints")
    for name in ("node-1", "node-2"):
        shutil.copytree(tmp_path / "others", tmp_path / name)
        harm(tmp_path / name)
    async with AsyncExitStack() as stack:
        names = {n: tmp_path / n for n in ("node-1", "node-2")} | {"node-3": tmp_path / "others"}
        addresses = {n: await stack.enter_async_context(serving(folder)) for n, folder in names.items()}
        seen = view(addresses, {n: held(digest) for n in names})
        assert await node.does(FetchCheckpoint(saved(digest)), seen) is TxnOutcome.WON
    verify_files(node.run_dir / "checkpoints/0-3", digest)


async def test_damaged_local_checkpoint_is_replaced_before_a_rank_starts_from_it(tmp_path: Path) -> None:
    node, digest = Node(tmp_path), checkpoint(tmp_path / "theirs")
    async with serving(tmp_path / "theirs") as address:
        seen = view({"node-1": address}, {"node-1": held(digest)})
        assert await node.does(FetchCheckpoint(saved(digest)), seen) is TxnOutcome.WON
        harm(node.run_dir)
        assert await node.does(FetchStart(saved(digest), "w"), seen) is TxnOutcome.WON
        verify_files(node.run_dir / "checkpoints/0-3", digest)
        assert node.own.brought == {"w"}


async def test_damaged_checkpoint_without_another_copy_is_not_reported_as_present(tmp_path: Path) -> None:
    node, digest = Node(tmp_path), checkpoint(tmp_path / "mine")
    seen = view({})
    assert await node.does(ReportFolder(), seen) is TxnOutcome.WON
    assert (await node.said()).checkpoints == held(digest)
    harm(node.run_dir)
    assert await node.does(FetchStart(saved(digest), "w"), seen) is TxnOutcome.UNKNOWN
    assert (await node.said()).checkpoints == ()
    assert not node.own.brought


async def test_a_checkpoint_that_two_actions_need_at_once_is_fetched_once(tmp_path: Path) -> None:
    node, digest = Node(tmp_path), checkpoint(tmp_path / "theirs")
    fetches = 0
    fetch = node.own.files.folder

    async def counted(*args: Any, **options: Any) -> Path:
        nonlocal fetches
        fetches += 1
        return await fetch(*args, **options)

    node.own.files.folder = counted  # type: ignore[method-assign]
    async with serving(tmp_path / "theirs") as address:
        seen = view({"node-1": address}, {"node-1": held(digest)})
        replicator = node.effects(SimpleNamespace()).replicator
        found = await asyncio.gather(
            *(replicator.ensure_checkpoint(saved(digest), seen, read_all=whole) for whole in (False, True))
        )
    assert [one.problem for one in found] == ["", ""]
    assert fetches == 1
    verify_files(node.run_dir / "checkpoints/0-3", digest)


def going_back(seen: JobView, digests: Mapping[int, str]) -> JobView:
    """Head is at step 8; checkpoints of these steps are registered."""
    head = seen.head.model_copy(update={"step": 8, "seq": 8})
    log = {
        step: stored(
            LogEntry(
                seq=step,
                kind="train",
                parent=0,
                lineage=0,
                step=step,
                world="w",
                cursors=head.cursors,
                tally=head.tally,
                nonce="n",
            )
        )
        for step in digests
    }
    entries = [Checkpoint(lineage=0, step=0, seq=0, file="")]
    entries += [Checkpoint(lineage=0, step=s, seq=s, file=f"checkpoints/0-{s}", digest=d) for s, d in digests.items()]
    mirror = replace(
        seen.mirror,
        head=stored(head),
        seals={},
        log={**seen.mirror.log, **log},
        checkpoints=stored(Checkpoints(entries=tuple(entries))),
    )
    return replace(seen, mirror=mirror)


@pytest.mark.parametrize(
    ("case", "step"), [("here", 6), ("there", 6), ("damaged there", 4), ("nowhere", 4), ("not there after all", 4)]
)
async def test_a_world_goes_back_to_the_newest_that_some_node_has_whole(tmp_path: Path, case: str, step: int) -> None:
    node = Node(tmp_path)
    older = checkpoint(tmp_path / "theirs", 4)
    newer = checkpoint(tmp_path / ("mine" if case == "here" else "theirs"), 6)
    if case == "damaged there":
        harm(tmp_path / "theirs", 6)
    has = held(older, 4) + (held(newer, 6) if case in ("there", "damaged there", "not there after all") else ())
    if case == "not there after all":
        (tmp_path / "theirs" / "checkpoints" / "0-6").rename(tmp_path / "gone")
    written: list[Any] = []

    async def run(txn: Any) -> Any:
        written.extend(put for put in txn.writes if hasattr(put, "value"))
        return SimpleNamespace(outcome=TxnOutcome.WON, revision=9)

    async with serving(tmp_path / "theirs") as address:
        seen = going_back(view({"node-1": address}, {"node-1": has}), {4: older, 6: newer})
        effects = node.effects(SimpleNamespace(run=run))
        done = await apply_action(Rollback("rank 0 is gone"), seen, effects)
    assert done.outcome is TxnOutcome.WON
    head = next(Head.decode(put.value) for put in written if put.key == KEYS.head)
    assert head.step == step
    verify_files(node.run_dir / f"checkpoints/0-{step}", newer if step == 6 else older)


async def test_a_peer_that_does_not_answer_has_damaged_nothing(tmp_path: Path) -> None:
    node, digest = Node(tmp_path), checkpoint(tmp_path / "theirs", 6)
    async with serving(tmp_path / "theirs") as address:
        pass
    seen = going_back(view({"node-1": address}, {"node-1": held(digest, 6)}), {6: digest})
    assert await node.does(Rollback("rank 0 is gone"), seen) is TxnOutcome.UNKNOWN


async def test_receipts_are_gathered_from_the_nodes_of_the_ranks_and_said(tmp_path: Path) -> None:
    node, token = Node(tmp_path), Token(0, 1, 1)
    (tmp_path / "theirs" / "receipts").mkdir(parents=True)
    (tmp_path / "theirs" / "receipts" / "w-1.jsonl").write_text("{}\n")
    async with serving(tmp_path / "theirs") as address:
        seen = view({"node-1": address})
        assert await node.does(GatherReceipts(token), seen) is TxnOutcome.WON
    assert (await node.said()).receipts == str(token)
    assert (node.run_dir / "receipts" / "w-1.jsonl").read_text() == "{}\n"
    assert await node.does(GatherReceipts(Token(0, 2, 1)), seen) is TxnOutcome.UNKNOWN, (
        "while a rank's node does not answer"
    )
    assert (await node.said()).receipts == str(token)
    assert await node.does(GatherReceipts(Token(0, 2, 1)), view({})) is TxnOutcome.WON, (
        "one that is gone is not waited for"
    )


async def test_old_entries_are_written_down_from_the_store_with_what_peers_have_of_earlier_ones(tmp_path: Path) -> None:
    node, seen = Node(tmp_path), view({})
    early = LogEntry(seq=7, kind="account", parent=6, lineage=0, step=0, world="w", nonce="n")
    archive.append_entries(tmp_path / "theirs", "node-1.x", [early])
    async with serving(tmp_path / "theirs") as address:
        seen = view({"node-1": address})
        assert await node.does(ArchiveRecords((0,), ()), seen) is TxnOutcome.WON
    assert set(archive.read_entries(node.run_dir)) == {0, 7}
    assert (await node.said()).log == (0,)


async def test_weights_come_from_where_they_were_staged_or_from_who_has_them(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for step in range(1, 6):
        folder = tmp_path / "node-2" / "weights" / f"0-{step}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes(step))
    (tmp_path / "node-1").mkdir()
    async with serving(tmp_path / "node-1") as first, serving(tmp_path / "node-2") as second:
        seen = view({"node-1": first, "node-2": second})
        for step in range(1, 6):
            assert await node.does(FetchWeights(Version(0, step), "node-1"), seen) is TxnOutcome.WON
        assert await node.does(FetchWeights(Version(0, 9), "node-1"), seen) is TxnOutcome.UNKNOWN
    assert sorted(path.name for path in (node.run_dir / "weights").iterdir()) == ["0-3", "0-4", "0-5"]


async def test_a_disk_that_takes_nothing_is_told_and_ends_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path)
    (tmp_path / "theirs" / "weights" / "0-1").mkdir(parents=True)
    (tmp_path / "theirs" / "weights" / "0-1" / "model.safetensors").write_bytes(b"x")
    node.run_dir.write_text("a file where the folder should be")
    async with serving(tmp_path / "theirs") as address:
        outcome = await node.does(FetchWeights(Version(0, 1), "node-1"), view({"node-1": address}))
    assert outcome is TxnOutcome.UNKNOWN
    assert "cannot write to its run folder" in node.told["copies"]


async def test_files_that_peers_do_not_deliver_are_reported_until_they_do(tmp_path: Path) -> None:
    node, token = Node(tmp_path), Token(0, 1, 1)
    (tmp_path / "theirs").mkdir()
    async with serving(tmp_path / "theirs") as address:
        pass
    away = view({"node-1": address})
    assert await node.does(GatherReceipts(token), away) is TxnOutcome.UNKNOWN
    assert node.told == {}, "its death may be heard of in a moment"
    node.clock.now = 60.0
    assert await node.does(GatherReceipts(token), away) is TxnOutcome.UNKNOWN
    assert "gather the receipts of 0.1.1: node-1: " in node.told["copies"]
    assert await node.does(GatherReceipts(token), view({})) is TxnOutcome.WON
    assert node.told["copies"] == ""


async def test_discarded_copies_are_gone_and_no_longer_said(tmp_path: Path) -> None:
    node, digest = Node(tmp_path), checkpoint(tmp_path / "mine", 6)
    checkpoint(tmp_path / "mine", 4)
    seen = view({})
    await node.does(ReportFolder(), seen)
    assert await node.does(DiscardCheckpoints((Version(0, 4),)), seen) is TxnOutcome.WON
    assert (await node.said()).checkpoints == held(digest, 6)


async def test_where_nodes_share_a_folder_nothing_of_this_is_done(tmp_path: Path) -> None:
    effects: Any = SimpleNamespace(replicator=None)
    assert (await apply_action(ReportFolder(), running_job(), effects)).outcome is TxnOutcome.STALE


async def test_remaining_log_is_reported_as_it_was_at_the_controllers_start(tmp_path: Path) -> None:
    """The number exceeds head's only in a restored store; entries that are archived later do not."""
    node = Node(tmp_path)
    archive.append_entries(node.run_dir, "another", [entry_of(9)])
    await node.does(ReportFolder(), running_job())
    assert (await node.said()).entry == 9
    archive.append_entries(node.run_dir, ME, [entry_of(12)])
    await node.does(ReportFolder(), running_job())
    assert (await node.said()).entry == 9


def entry_of(seq: int) -> LogEntry:
    return LogEntry(seq=seq, parent=seq - 1, kind="account", lineage=0, step=0, world="w", nonce="n")

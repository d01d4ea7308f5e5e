"""A damaged checkpoint is skipped for the one before it, and an event names the checkpoint and the damage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import KEYS, RecordingLedger, job_record, node_record

from controllers.job.executor import apply_action
from controllers.rules.actions import Rollback
from controllers.rules.view import EngineView, JobView
from controllers.storage.run_folder import FOLDER, folder_loss
from controllers.telemetry.events import EventLog
from gcore.config import parse_spec
from gcore.data.order import shard_lengths
from gcore.ledger import chain
from gcore.ledger.chain import ChainWriter
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Checkpoint, Checkpoints, Head, Lineage, LogEntry, Tally
from gcore.ledger.records.job import EnginePlace, Plan, RankPlace
from gcore.ledger.selection import StreamRules, is_ancestor
from gcore.ledger.transactions import TxnKind, TxnOutcome, Versioned
from gcore.models.layout import (
    MANIFEST_FILE,
    Manifest,
    TensorsFile,
    checkpoint_folder,
    file_entry,
    manifest_digest,
)
from gcore.models.tensors import TensorShape
from gcore.store.types import KeyValue, WatchBatch, WatchEvent
from gcore.system.files import replace_folder
from gcore.testing import FakeClock
from gcore.types import Version

SPEC = parse_spec(
    {
        "name": "j",
        "model": {"path": "m"},
        "data": {"path": "d", "shards": 2},
        "flow": {"steps": 9},
        "rollout": {"max_new_tokens": 4},
    }
)
TENSORS = ("model.safetensors", "exp_avg.safetensors", "exp_avg_sq.safetensors")
FILES = (*TENSORS, "config.json", "tokenizer.json")
ALL = (*FILES, *(f"critic/{name}" for name in (*TENSORS, "config.json")), MANIFEST_FILE)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


HARMS: dict[str, Callable[[Path], None]] = {
    "a bit is flipped": flip,
    "cut off": cut_off,
    "emptied": empty,
    "removed": Path.unlink,
}


def make_checkpoint(run_dir: Path, step: int) -> Checkpoint:
    """A whole one, with a critic, as a rank writes it."""
    target = checkpoint_folder(run_dir, Version(0, step))
    with replace_folder(target, owner="w", durable=False) as folder:
        (folder / "critic").mkdir()
        for name in (*FILES, *(f"critic/{name}" for name in (*TENSORS, "config.json"))):
            if name.endswith(".json"):
                (folder / name).write_text("{}")
                continue
            with TensorsFile(folder / name, {"a": TensorShape("F32", (2,))}) as file:
                file.write("a", memoryview(bytes([step] * 8)))
        files = {str(p.relative_to(folder)): file_entry(p) for p in folder.rglob("*") if p.is_file()}
        manifest = Manifest(job_uid="u", world="w", lineage=0, step=step, updates=step, files=files)
        (folder / MANIFEST_FILE).write_bytes(manifest.encode())
    return Checkpoint(
        lineage=0, step=step, seq=step, file=str(target.relative_to(run_dir)), digest=manifest_digest(target)
    )


def view(*checkpoints: Checkpoint) -> JobView:
    """Head at step 7, in a world of one rank that is lost."""
    base = chain.base_entry(2, "w", ChainWriter("a", "n"))
    head = base.head.model_copy(update={"step": 7, "seq": 7, "parent": 6})
    cursors = base.head.cursors
    log = {0: Versioned(base.entry, 1)} | {
        one.seq: Versioned(
            LogEntry(
                seq=one.seq,
                parent=one.seq - 1,
                kind="train",
                lineage=0,
                step=one.step,
                world="w",
                nonce="n",
                cursors=cursors,
                tally=Tally(),
            ),
            1,
        )
        for one in checkpoints
    }
    first = Checkpoint(lineage=0, step=0, seq=0, file="")
    plan = Plan(
        generation=1,
        world="w",
        ranks=(RankPlace(rank=0, node="node-0", slot="cpu:0"),),
        engines=(EnginePlace(node="node-0", slot="cpu:0"),),
    )
    mirror = JobMirror(
        KEYS,
        job=Versioned(job_record(), 1),
        head=Versioned(head, 1),
        log=log,
        plan=Versioned(plan, 1),
        checkpoints=Versioned(Checkpoints(entries=(first, *checkpoints)), 1),
    )
    nodes = {"node-0": node_record("node-0", "i", "h:1")}
    return JobView(SPEC, StreamRules(shard_lengths(40, 2), 8, 2), mirror, "a", "node-0", nodes, {})


async def roll_back(run_dir: Path, seen: JobView) -> tuple[Head, RecordingLedger]:
    """Head after a rollback, and the written records."""
    ledger = RecordingLedger()
    effects: Any = SimpleNamespace(
        replicator=None, ledger=ledger, run_dir=run_dir, away=str, clock=FakeClock(), tell=lambda topic, sentence: None
    )
    done = await apply_action(Rollback("rank 0 is gone"), seen, effects)
    assert done.outcome is TxnOutcome.WON
    return Head.decode(ledger.written(TxnKind.ROLLBACK, KEYS.head)), ledger


async def test_no_lineage_that_anything_is_left_of_is_begun_again(tmp_path: Path) -> None:
    """A restored store lacks the later lineages, so their files would pass for those of the new one."""
    newest = make_checkpoint(tmp_path, 6)
    engine = EngineView("e", "h:1", Version(2, 9))
    head, _ = await roll_back(tmp_path, replace(view(newest), engines={"e": engine}))
    assert head.lineages[1:] == (Lineage(number=3, base_step=6),)
    for lying in ("weights/4-9", "checkpoints/.5-8.w.tmp"):
        (tmp_path / lying).mkdir(parents=True)
    head, _ = await roll_back(tmp_path, replace(view(newest), engines={"e": engine}))
    assert head.lineage == 6
    assert not is_ancestor(head, Version(5, 6)), "none of its own, though not beyond where the new one begins"
    assert is_ancestor(head, Version(6, 6))


def told(ledger: RecordingLedger) -> tuple[str, str]:
    """The event that people see: its kind and its message."""
    key = KEYS.trouble("damaged")
    put = KeyValue(key=key, value=ledger.written(TxnKind.WARN, key), mod_revision=9, create_revision=9)
    events, mirror = EventLog(KEYS), JobMirror(KEYS)
    batch = WatchBatch((WatchEvent("put", put),), 9)
    events.note(mirror, batch, mirror.fold(batch), 0.0)
    (event,) = events.events
    return event.kind, event.message


async def test_a_whole_checkpoint_is_used_and_nothing_is_told(tmp_path: Path) -> None:
    head, ledger = await roll_back(tmp_path, view(make_checkpoint(tmp_path, 4), make_checkpoint(tmp_path, 6)))
    assert head.step == 6
    assert [txn.kind for txn in ledger.made] == [TxnKind.ROLLBACK]


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", ALL)
async def test_any_harm_to_any_file_is_found_and_the_one_before_is_used(tmp_path: Path, name: str, harm: str) -> None:
    older, newer = make_checkpoint(tmp_path, 4), make_checkpoint(tmp_path, 6)
    HARMS[harm](tmp_path / newer.file / name)
    head, ledger = await roll_back(tmp_path, view(older, newer))
    assert (head.step, head.parent, head.lineage) == (4, 4, 1)
    kind, message = told(ledger)
    assert kind == "warning"
    assert "checkpoint checkpoints/0-6 is skipped" in message
    assert "using the earlier checkpoint of step 4" in message
    assert name in message or (name == MANIFEST_FILE and "differs from the registered checkpoint" in message)
    entry = LogEntry.decode(ledger.written(TxnKind.ROLLBACK, KEYS.log(8)))
    assert "checkpoints/0-6 is skipped" in entry.reason


async def test_all_that_are_damaged_are_named_and_the_first_model_is_left(tmp_path: Path) -> None:
    both = [make_checkpoint(tmp_path, step) for step in (4, 6)]
    for one in both:
        cut_off(tmp_path / one.file / "exp_avg.safetensors")
    head, ledger = await roll_back(tmp_path, view(*both))
    assert (head.step, head.parent) == (0, 0)
    _, message = told(ledger)
    assert "checkpoints/0-6 is skipped" in message
    assert "checkpoints/0-4 is skipped" in message
    assert message.endswith("using the initial model")


async def test_another_whole_checkpoint_in_its_place_is_not_the_one_that_was_registered(tmp_path: Path) -> None:
    older, newer = make_checkpoint(tmp_path, 4), make_checkpoint(tmp_path, 6)
    imposter = make_checkpoint(tmp_path / "elsewhere", 5)
    for path in (tmp_path / newer.file, tmp_path / newer.file / "critic"):
        for file in [one for one in path.iterdir() if one.is_file()]:
            file.unlink()
    for file in [one for one in (tmp_path / "elsewhere" / imposter.file).rglob("*") if one.is_file()]:
        file.rename(tmp_path / newer.file / file.relative_to(tmp_path / "elsewhere" / imposter.file))
    head, ledger = await roll_back(tmp_path, view(older, newer))
    assert head.step == 4
    assert "differs from the registered checkpoint" in told(ledger)[1]


async def test_a_folder_that_this_node_does_not_see_any_more_is_no_damage(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    newest = make_checkpoint(run_dir, 6)
    mark = run_dir / FOLDER / "node-0"
    mark.parent.mkdir()
    mark.write_text("number")
    run_dir.rename(tmp_path / "unmounted")
    (run_dir / "logs").mkdir(parents=True)  # as a worker's log makes it
    ledger, told_of = RecordingLedger(), dict[str, str]()
    effects: Any = SimpleNamespace(
        replicator=None,
        ledger=ledger,
        run_dir=run_dir,
        away=partial(folder_loss, run_dir, "node-0"),
        tell=told_of.__setitem__,
    )
    done = await apply_action(Rollback("rank 0 is gone"), view(newest), effects)
    assert (done.outcome, ledger.made) == (TxnOutcome.UNKNOWN, [])
    assert "node-0 no longer sees the run's folder" in told_of["mount"]
    (run_dir / "logs").rmdir()
    run_dir.rmdir()
    (tmp_path / "unmounted").rename(run_dir)
    done = await apply_action(Rollback("rank 0 is gone"), view(newest), effects)
    assert done.outcome is TxnOutcome.WON
    assert told_of["mount"] == "", "it is over, and would be told anew"
    assert Head.decode(ledger.written(TxnKind.ROLLBACK, KEYS.head)).step == 6


@pytest.mark.parametrize("newest", [6, 7])
async def test_for_a_larger_world_nothing_that_was_trained_is_given_up(tmp_path: Path, newest: int) -> None:
    older, one = make_checkpoint(tmp_path, 4), make_checkpoint(tmp_path, newest)
    if newest == 7:  # of head's own step, and damaged
        cut_off(tmp_path / one.file / "config.json")
    ledger = RecordingLedger()
    effects: Any = SimpleNamespace(
        replicator=None, ledger=ledger, run_dir=tmp_path, away=str, tell=lambda topic, sentence: None
    )
    done = await apply_action(Rollback("2 ranks instead of 1", between_steps=True), view(older, one), effects)
    assert (done.outcome, ledger.made) == (TxnOutcome.STALE, [])


async def test_the_same_damage_is_told_once_however_often_the_rollback_is_tried(tmp_path: Path) -> None:
    older, newer = make_checkpoint(tmp_path, 4), make_checkpoint(tmp_path, 6)
    cut_off(tmp_path / newer.file / "config.json")
    seen = view(older, newer)
    _, first = await roll_back(tmp_path, seen)
    key = KEYS.trouble("damaged")
    put = KeyValue(key=key, value=first.written(TxnKind.WARN, key), mod_revision=9, create_revision=9)
    known = seen.mirror.fold(WatchBatch((WatchEvent("put", put),), 9))
    again = JobView(SPEC, seen.rules, known, "a", "node-0", seen.nodes, {})
    _, second = await roll_back(tmp_path, again)
    assert [txn.kind for txn in second.made] == [TxnKind.ROLLBACK]

"""A rollback that finds too few slots waits for nodes to come back; forgetting checkpoints leaves no folder behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import KEYS, ME, PEER, RecordingLedger, bare_job, node_record, offered_group, running_job

from controllers.job.executor import apply_action
from controllers.rules.actions import MakeSeal, RetainCheckpoints, Rollback
from controllers.rules.view import JobView
from gcore.config import parse_spec
from gcore.ledger.records.chain import Checkpoint, Checkpoints, Seal
from gcore.ledger.retention import orphaned_checkpoints
from gcore.ledger.selection import SealStep, sealed_group
from gcore.ledger.transactions import TxnKind, TxnOutcome, Versioned
from gcore.types import PromptRef, Version

SPEC = parse_spec(
    {
        "name": "j",
        "model": {"path": "m"},
        "data": {"path": "d", "shards": 2},
        "flow": {"steps": 3},
        "rollout": {"max_new_tokens": 4},
        "train": {"ranks": 2},
    }
)


def view(*nodes: str) -> JobView:
    return bare_job(SPEC, {name: node_record(name, name, "h:1") for name in nodes})


async def test_a_world_that_does_not_fit_on_what_is_left_is_waited_for() -> None:
    ledger = RecordingLedger()
    effects: Any = SimpleNamespace(
        replicator=None, ledger=ledger, run_dir=Path("run"), tell=lambda topic, sentence: None
    )
    done = await apply_action(Rollback("rank 1 is gone"), view("node-0"), effects)
    assert done.outcome is TxnOutcome.STALE
    assert "2 train ranks do not fit on 1 slot." in done.sentence
    assert ledger.kinds == []
    done = await apply_action(Rollback("rank 1 is gone"), view("node-0", "node-1"), effects)
    assert (done.outcome, ledger.kinds) == (TxnOutcome.WON, [TxnKind.ROLLBACK])


def checkpoint(step: int, lineage: int = 0) -> Checkpoint:
    return Checkpoint(lineage=lineage, step=step, seq=step, file=f"checkpoints/{lineage}-{step}" if step else "")


async def test_orphaned_checkpoint_folders_are_deleted_with_forgotten_ones(tmp_path: Path) -> None:
    seen = view("node-0")
    for name in ("0-0", "1-4", "notes", ".0-2.part"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    effects: Any = SimpleNamespace(
        replicator=None, ledger=RecordingLedger(), run_dir=tmp_path, tell=lambda topic, sentence: None
    )
    done = await apply_action(RetainCheckpoints((checkpoint(0),)), seen, effects)
    assert done.outcome is TxnOutcome.WON
    left = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert left == {"0-0", "notes", ".0-2.part"}, "of a lineage that head does not know: nobody will ever name it"


def knowing(seen: JobView, step: int, *known: Checkpoint) -> JobView:
    """The same job, so many steps on, with these checkpoints registered."""
    assert seen.mirror.head is not None
    head = Versioned(seen.mirror.head.record.model_copy(update={"step": step}), 2)
    checkpoints = Versioned(Checkpoints(entries=known), 2)
    return replace(seen, mirror=replace(seen.mirror, head=head, checkpoints=checkpoints))


@pytest.mark.parametrize(
    ("outcome", "stays"),
    [
        pytest.param(TxnOutcome.WON, False, id="won"),
        pytest.param(TxnOutcome.STALE, True, id="lost"),
        pytest.param(TxnOutcome.UNKNOWN, True, id="not answered"),
    ],
)
async def test_no_file_goes_before_its_entry_surely_has(tmp_path: Path, outcome: TxnOutcome, stays: bool) -> None:
    forgotten = tmp_path / "checkpoints" / "0-4"
    forgotten.mkdir(parents=True)
    there: list[bool] = []
    ledger = RecordingLedger(outcome, watch=lambda: there.append(forgotten.is_dir()))
    effects: Any = SimpleNamespace(replicator=None, ledger=ledger, run_dir=tmp_path, tell=lambda topic, sentence: None)
    seen = knowing(view("node-0"), 9, checkpoint(0), checkpoint(4), checkpoint(8))
    done = await apply_action(RetainCheckpoints((checkpoint(0), checkpoint(8))), seen, effects)
    assert done.outcome is outcome
    assert there == [True], "its files lie there as long as its entry may"
    assert forgotten.is_dir() is stays


def test_possibly_registered_checkpoints_are_not_orphaned() -> None:
    head = view("node-0").head.model_copy(update={"step": 9})
    lying = [Version(0, step) for step in (2, 4, 6, 8)] + [Version(3, 8)]
    assert orphaned_checkpoints(head, (checkpoint(0), checkpoint(4)), lying) == {Version(0, 2), Version(3, 8)}


def test_one_of_a_step_that_is_trained_and_not_committed_yet_stays() -> None:
    head = view("node-0").head.model_copy(update={"step": 4})
    assert orphaned_checkpoints(head, (checkpoint(0), checkpoint(4)), [Version(0, 5), Version(0, 3)]) == {Version(0, 3)}


async def sealed_by(seen: JobView, holders: tuple[str, ...], media_bytes: int) -> Seal:
    """The seal of a step with a group of each holder."""
    groups = tuple(
        sealed_group(offered_group(PromptRef(0, 0, number)).model_copy(update={"media_bytes": media_bytes}), holder)
        for number, holder in enumerate(holders)
    )
    ledger = RecordingLedger()
    effects: Any = SimpleNamespace(replicator=None, ledger=ledger)
    await apply_action(MakeSeal(1, SealStep(groups, ())), seen, effects)
    return Seal.decode(ledger.written(TxnKind.SEAL, KEYS.seal(1)))


async def test_a_seal_says_which_ranks_are_near_the_blobs_of_its_groups() -> None:
    seen = running_job()
    assert (await sealed_by(seen, (PEER, ME, "gone.1"), 9)).near == {ME: (0,), PEER: (1,)}
    assert (await sealed_by(seen, (PEER,), 9)).near == {PEER: (1,)}
    assert (await sealed_by(seen, (PEER, ME), 0)).near == {}, "a text job's seal is as before"
    train = seen.spec.train.model_copy(update={"sequence_parallel": 2})
    together = replace(seen, spec=seen.spec.model_copy(update={"train": train}))
    assert (await sealed_by(together, (PEER, ME), 9)).near == {ME: (0,), PEER: (0,)}

"""A rollback that finds too few slots waits for nodes to come back; forgetting checkpoints leaves no folder behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controllers.job.executor import apply_action
from controllers.rules.actions import Retain, Rollback
from controllers.rules.view import JobView
from gcore.config import parse_spec
from gcore.data.order import shard_lengths
from gcore.ledger import chain
from gcore.ledger.chain import ChainWriter
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Checkpoint, Checkpoints
from gcore.ledger.records.job import EnginePlace, NodeRecord, Plan, RankPlace
from gcore.ledger.retention import orphaned_checkpoints
from gcore.ledger.selection import StreamRules
from gcore.ledger.transactions import Transaction, TxnKind, TxnOutcome, TxnReport, Versioned
from gcore.store.keys import JobKeys
from gcore.types import Version

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


class Recorded:
    """A ledger that wins everything, or what it is told to. `watch`: looks around whenever a transaction is made."""

    def __init__(self, outcome: TxnOutcome = TxnOutcome.WON, watch: Callable[[], None] = lambda: None) -> None:
        self.made: list[TxnKind] = []
        self._outcome = outcome
        self._watch = watch

    async def run(self, txn: Transaction) -> TxnReport:
        self._watch()
        self.made.append(txn.kind)
        return TxnReport(self._outcome, 9)


def view(*nodes: str) -> JobView:
    base = chain.base_entry(2, "w", ChainWriter("a", "n"))
    ranks = tuple(RankPlace(rank=i, node=f"node-{i}", slot="cpu:0") for i in range(2))
    engines = tuple(EnginePlace(node=f"node-{i}", slot="cpu:0") for i in range(2))
    first = Checkpoint(lineage=0, step=0, seq=0, file="")
    mirror = JobMirror(
        JobKeys("u"),
        head=Versioned(base.head, 1),
        log={0: Versioned(base.entry, 1)},
        plan=Versioned(Plan(generation=1, world="w", ranks=ranks, engines=engines), 1),
        checkpoints=Versioned(Checkpoints(entries=(first,)), 1),
    )
    there = {n: NodeRecord(name=n, incarnation=n, address="h:1", slots=("cpu:0",), pid=1) for n in nodes}
    return JobView(SPEC, StreamRules(shard_lengths(4, 2), 8, 2), mirror, "a", "node-0", there, {})


async def test_a_world_that_does_not_fit_on_what_is_left_is_waited_for() -> None:
    ledger = Recorded()
    hands: Any = SimpleNamespace(replicator=None, ledger=ledger, run_dir=Path("run"), tell=lambda topic, sentence: None)
    done = await apply_action(Rollback("rank 1 is gone"), view("node-0"), hands)
    assert done.outcome is TxnOutcome.STALE
    assert "2 train ranks do not fit on 1 slot." in done.sentence
    assert ledger.made == []
    done = await apply_action(Rollback("rank 1 is gone"), view("node-0", "node-1"), hands)
    assert (done.outcome, ledger.made) == (TxnOutcome.WON, [TxnKind.ROLLBACK])


def checkpoint(step: int, lineage: int = 0) -> Checkpoint:
    return Checkpoint(lineage=lineage, step=step, seq=step, file=f"checkpoints/{lineage}-{step}" if step else "")


async def test_what_no_record_names_goes_with_what_is_forgotten(tmp_path: Path) -> None:
    seen = view("node-0")
    for name in ("0-0", "1-4", "notes", ".0-2.part"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    hands: Any = SimpleNamespace(
        replicator=None, ledger=Recorded(), run_dir=tmp_path, tell=lambda topic, sentence: None
    )
    done = await apply_action(Retain((checkpoint(0),)), seen, hands)
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
    ledger = Recorded(outcome, watch=lambda: there.append(forgotten.is_dir()))
    hands: Any = SimpleNamespace(replicator=None, ledger=ledger, run_dir=tmp_path, tell=lambda topic, sentence: None)
    seen = knowing(view("node-0"), 9, checkpoint(0), checkpoint(4), checkpoint(8))
    done = await apply_action(Retain((checkpoint(0), checkpoint(8))), seen, hands)
    assert done.outcome is outcome
    assert there == [True], "its files lie there as long as its entry may"
    assert forgotten.is_dir() is stays


def test_one_that_may_still_be_registered_stays() -> None:
    head = view("node-0").head.model_copy(update={"step": 9})
    lying = [Version(0, step) for step in (2, 4, 6, 8)] + [Version(3, 8)]
    assert orphaned_checkpoints(head, (checkpoint(0), checkpoint(4)), lying) == {Version(0, 2), Version(3, 8)}


def test_one_of_a_step_that_is_trained_and_not_committed_yet_stays() -> None:
    head = view("node-0").head.model_copy(update={"step": 4})
    assert orphaned_checkpoints(head, (checkpoint(0), checkpoint(4)), [Version(0, 5), Version(0, 3)]) == {Version(0, 3)}

"""What is said of what hangs, from views made by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import running_job, sealed_job

from controllers.job import effects as tidying
from controllers.rules.actions import Publish
from controllers.rules.decide import decide
from controllers.rules.view import EngineView, JobView, RankView
from controllers.rules.waits import PATIENCE_S, Wait, current_waits
from controllers.storage import run_folder as storage
from controllers.telemetry.notices import WarningLog
from gcore.config.rollout import AgentSpec
from gcore.ledger.transactions import TxnOutcome
from gcore.store.keys import JobKeys
from gcore.testing import FakeClock, MemoryCluster, MemoryStore
from gcore.types import Version
from gcore.worker.sandbox.pool import PoolStatus

ROOT = Path(__file__).parents[4]


def waits(view: JobView) -> dict[str, Wait]:
    return {wait.cause: wait for wait in current_waits(view)}


def test_a_silent_engine_is_named_and_published_to_no_more() -> None:
    engine = EngineView("e", "h:1", None, silent=True, why="has answered nothing for 30 s")
    view = replace(running_job(), engines={"e": engine}, staged=frozenset({Version(0, 0)}))
    assert waits(view)["engine"].what == "engine e has answered nothing for 30 s"
    assert not [i for i in decide(view) if isinstance(i.action, Publish)]
    well = replace(view, engines={"e": replace(engine, silent=False, why="")})
    assert "engine" not in waits(well)
    assert [i for i in decide(well) if isinstance(i.action, Publish)]


def test_that_it_is_to_be_ended_is_another_wait_than_that_it_is_silent() -> None:
    engines = [EngineView("e", "h:1", None, silent=True, hung=hung, why="x") for hung in (False, True)]
    stalls = {waits(replace(running_job(), engines={"e": engine}))["engine"].stall for engine in engines}
    assert len(stalls) == 2


def test_rewards_that_wait_are_named_and_move_when_one_is_scored() -> None:
    one, two = (
        waits(replace(running_job(), scoring=PoolStatus(4, scored, "4 responses wait to be scored by reward 'r'")))[
            "reward"
        ]
        for scored in (7, 8)
    )
    assert one.what == "on node-0 4 responses wait to be scored by reward 'r'"
    assert one.key == two.key
    assert one.stall != two.stall
    assert "reward" not in waits(replace(running_job(), scoring=PoolStatus(0, 8, "")))


@pytest.mark.parametrize("cause", ["tools", "agent"])
def test_who_waits_for_a_process_of_agents_or_tools_is_named_and_moves_when_one_is_free(cause: str) -> None:
    view = running_job()
    if cause == "agent":
        view = replace(view, spec=view.spec.model_copy(update={"agent": AgentSpec(name="solver")}))
    one, two = (waits(replace(view, crewing=PoolStatus(3, done, "3 responses wait for x")))[cause] for done in (7, 8))
    assert one.what == "on node-0 3 responses wait for x"
    assert one.key == two.key
    assert one.stall != two.stall
    assert cause not in waits(replace(view, crewing=PoolStatus(0, 8, "")))


def test_a_rank_in_a_step_moves_with_its_progress_and_stands_still_without() -> None:
    view = sealed_job(ready=True, fed=(0, 1))

    def at(progress: int, phase: str = "update") -> Wait:
        ranks = {r: replace(known, phase=phase, progress=progress) for r, known in view.ranks.items()}
        return waits(replace(view, ranks=ranks))["train"]

    assert at(1).key == at(2).key
    assert at(1).stall == at(1).stall
    assert len({at(1).stall, at(2).stall, at(2, "stage").stall}) == 3
    assert at(1).what == "train ranks 0 and 1 train step 1 (update)"


def test_a_step_that_waits_for_the_disk_says_so() -> None:
    view = sealed_job(ready=True, fed=(0, 1))
    ranks = {
        r: replace(known, phase="saving", trouble="the weights of step 1 cannot be written")
        for r, known in view.ranks.items()
    }
    assert waits(replace(view, ranks=ranks))["train"].what.endswith("(saving); the weights of step 1 cannot be written")


def test_a_batch_on_its_way_moves_with_what_arrives() -> None:
    view, some = sealed_job(), sealed_job(fed=(0,))
    assert waits(view)["exchange"].key == waits(some)["exchange"].key
    assert waits(view)["exchange"].stall != waits(some)["exchange"].stall


@pytest.mark.parametrize(
    ("condition", "cause"),
    [("world w []", "recovery"), ("grow 3", "recovery"), ("prune 3", "tidying"), ("forget 3", "tidying")],
)
def test_what_a_disk_can_hold_up_is_named_while_it_is_under_way(condition: str, cause: str) -> None:
    assert cause in waits(replace(running_job(), under_way=frozenset({condition})))
    assert cause not in waits(running_job())


async def test_a_folder_that_takes_no_old_records_is_told_once_until_it_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock()
    book = WarningLog(MemoryStore(MemoryCluster(clock), "n"), JobKeys("u"), "n", clock)
    full: list[bool] = [True]

    def append(*_: Any) -> None:
        if full[0]:
            raise OSError(28, "No space left on device")

    async def run(_: Any) -> Any:
        return SimpleNamespace(outcome=TxnOutcome.WON, revision=1)

    monkeypatch.setattr(tidying.archive, "append_entries", append)
    hands: Any = SimpleNamespace(
        replicator=None, run_dir=Path(), tell=book.hold, ledger=SimpleNamespace(run=run), away=str
    )
    prune: Any = SimpleNamespace(seqs=(0,))
    for _ in range(3):
        assert (await tidying.prune_log(prune, running_job(), hands)).outcome is TxnOutcome.UNKNOWN
    assert [one.sentence for one in book._waiting] == [
        "the run's folder takes no old records (No space left on device); they stay in the store, which grows"
    ]
    full[0] = False
    monkeypatch.setattr(tidying.transactions, "prune", lambda *_: None)
    assert (await tidying.prune_log(prune, running_job(), hands)).outcome is TxnOutcome.WON
    full[0] = True
    await tidying.prune_log(prune, running_job(), hands)
    assert len(book._waiting) == 2


async def test_old_records_do_not_leave_the_store_for_a_folder_that_is_not_the_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beneath a mount that is gone, or where the run's folder was moved away, nobody would ever find them."""

    def append(*_: Any) -> None:
        raise AssertionError("written where nobody looks")

    monkeypatch.setattr(tidying.archive, "append_entries", append)
    told: list[str] = []
    hands: Any = SimpleNamespace(
        run_dir=tmp_path / "run",
        tell=lambda topic, sentence: told.append(sentence),
        away=lambda: storage.folder_loss(tmp_path / "run", "node-0"),
    )
    prune: Any = SimpleNamespace(seqs=(0,))
    assert (await tidying.prune_log(prune, running_job(), hands)).outcome is TxnOutcome.UNKNOWN
    (sentence,) = told
    assert "node-0 does not see the run's folder" in sentence
    assert "stay in the store" in sentence


def test_every_cause_is_watched_and_none_else() -> None:
    assert RankView(0).progress == 0
    told = set(re.findall(r"Wait\(\s*\"(\w+)\"", (ROOT / "controllers" / "rules" / "waits.py").read_text()))
    assert told - PATIENCE_S.keys() == {"in_flight", "engine"}

"""Waits without progress become events: the delay, the reporter, and the definition of progress.

The reports about hung components, from hand-made views.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import running_job, sealed_job

from controllers.identity import node_of
from controllers.job import effects as job_effects
from controllers.rules.actions import PublishWeights
from controllers.rules.decide import decide
from controllers.rules.view import EngineView, JobView, RankView, Timers, turn_of
from controllers.rules.waits import LOCAL, PATIENCE_S, WHOLE, Wait, current_waits, overdue_waits, wait_sentence
from controllers.storage import run_folder as storage
from controllers.telemetry.notices import WaitReporter, WarningLog
from gcore.config.rollout import AgentSpec
from gcore.errors import StoreUnavailable
from gcore.ledger.records.job import Trouble
from gcore.ledger.transactions import TxnOutcome
from gcore.observability.metrics import Metrics
from gcore.store.keys import JobKeys
from gcore.testing import FakeClock, MemoryCluster, MemoryStore, PerfectNetwork
from gcore.train.rank.feed import Fetching
from gcore.types import Version
from gcore.worker.sandbox.pool import PoolStatus

MEMBERS = ("node-0.a", "node-1.b", "node-2.c")


def view_of(me: str, members: tuple[str, ...] = MEMBERS) -> Any:
    nodes = dict.fromkeys(member.split(".")[0] for member in MEMBERS)
    return SimpleNamespace(
        me=me, node=me.split(".")[0], nodes=nodes, mirror=SimpleNamespace(members=dict.fromkeys(members))
    )


def told(wait: Wait, seconds: float, me: str, members: tuple[str, ...] = MEMBERS) -> bool:
    waits = Timers({}).note([wait.stall], 100.0)
    return bool([*overdue_waits(view_of(me, members), [wait], waits, 100.0 + seconds)])


@pytest.mark.parametrize("cause", PATIENCE_S)
def test_each_cause_is_told_by_one_peer_after_its_time_and_not_before(cause: str) -> None:
    wait = Wait(cause, "something", f"wait {cause}", "1")
    tellers = [me for me in MEMBERS if told(wait, PATIENCE_S[cause], me)]
    assert tellers == (
        list(MEMBERS) if cause in LOCAL else [m for m in MEMBERS if turn_of(MEMBERS, m, f"tell {cause}") == 0]
    )
    assert not any(told(wait, PATIENCE_S[cause] - 0.1, me) for me in MEMBERS)
    stood_still = f"no progress for {PATIENCE_S[cause]:g} s: "
    assert wait_sentence(wait) == f"{'' if cause in WHOLE else stood_still}something"


def test_when_the_teller_is_gone_another_tells() -> None:
    wait = Wait("train", "something", "wait train", "1")
    (first,) = (m for m in MEMBERS if told(wait, 1e3, m))
    rest = tuple(m for m in MEMBERS if m != first)
    assert len([m for m in rest if told(wait, 1e3, m, rest)]) == 1


@pytest.mark.parametrize("cause", ["start", "model"])
def test_before_anybody_is_a_member_one_of_the_nodes_tells(cause: str) -> None:
    wait = Wait(cause, "something", f"wait {cause}", "1")
    assert len([me for me in MEMBERS if told(wait, PATIENCE_S[cause], me, ())]) == 1
    one = MEMBERS[:1]
    assert [me for me in MEMBERS if told(wait, PATIENCE_S[cause], me, one)] == list(one), "members tell for the others"


def test_progress_begins_the_time_anew_and_the_wait_itself_goes_on() -> None:
    one, two = (Wait("train", "x", "wait train 0.1.1", moved) for moved in ("0:update:1", "0:update:2"))
    waits = Timers({}).note([one.key, one.stall], 0.0).note([two.key, two.stall], 50.0)
    alone = ("node-0.a",)
    assert not [*overdue_waits(view_of("node-0.a", alone), [two], waits, 109.0)]
    assert [*overdue_waits(view_of("node-0.a", alone), [two], waits, 110.0)] == [two]
    assert waits.since[two.key] == 0.0


def test_an_engine_that_answers_nothing_is_told_at_once_for_it_is_one_only_after_its_own_time() -> None:
    wait = Wait("engine", "engine e has answered nothing for 30 s", "wait engine e False")
    assert all(told(wait, 0.0, me) for me in MEMBERS)
    assert wait_sentence(wait) == wait.what


@dataclass
class Away:
    """A store that is away for the first writes."""

    inner: MemoryStore
    times: int
    asked: list[float] = field(default_factory=list)

    async def transact(self, compares: Any, writes: Any) -> Any:
        if self.times:
            self.times -= 1
            raise StoreUnavailable("away")
        return await self.inner.transact(compares, writes)


async def test_warnings_noted_during_a_store_outage_are_written_in_order_afterwards() -> None:
    clock, keys = FakeClock(), JobKeys("u")
    cluster = MemoryCluster(clock)
    inner = MemoryStore(cluster, network=PerfectNetwork(clock))
    book = WarningLog(Away(inner, 3), keys, "node-0", clock)  # type: ignore[arg-type]
    running = asyncio.ensure_future(book.run())
    book.note("wait-train", "one")
    book.note("reward-node-0", "two")
    await clock.advance(2.5)
    assert await clock.run(inner.get(keys.trouble("wait-train"))) is None
    await clock.advance(2.0)
    found = [Trouble.decode(kv.value, kv.key) for kv in (await clock.run(inner.list(keys.trouble_prefix))).kvs]
    assert {(t.topic, t.node, t.sentence) for t in found} == {
        ("wait-train", "node-0", "one"),
        ("reward-node-0", "node-0", "two"),
    }
    running.cancel()


class Preparing:
    """A job without a controller."""

    def __init__(self, clock: FakeClock) -> None:
        self.waits = Timers({})
        self.said: list[tuple[str, str]] = []
        self.warnings: Any = SimpleNamespace(note=lambda topic, words: self.said.append((topic, words)))
        self.view = replace(running_job(), missing_input="its data cannot be read.")

    def look(self) -> Any:
        return self.view


async def test_missing_input_is_reported_once_and_again_when_it_recurs() -> None:
    clock = FakeClock()
    job = Preparing(clock)
    running = asyncio.ensure_future(WaitReporter(job, Metrics(), clock).run())  # type: ignore[arg-type]
    await clock.advance(PATIENCE_S["material"] - 1.0)
    assert job.said == []
    await clock.advance(60.0)
    told = (
        "wait-material-node-0",
        "no progress for 30 s: node-0 cannot work on the job: its data cannot be read",
    )
    assert job.said == [told]
    job.view = running_job()
    await clock.advance(5.0)
    job.view = replace(running_job(), missing_input="its data cannot be read.")
    await clock.advance(60.0)
    assert job.said.count(told) == 2
    running.cancel()


ROOT = Path(__file__).parents[4]


def waits(view: JobView) -> dict[str, Wait]:
    return {wait.cause: wait for wait in current_waits(view)}


def test_a_silent_engine_is_named_and_published_to_no_more() -> None:
    engine = EngineView("e", "h:1", None, silent=True, why="has answered nothing for 30 s")
    view = replace(running_job(), engines={"e": engine}, staged=frozenset({Version(0, 0)}))
    assert waits(view)["engine"].what == "engine e has answered nothing for 30 s"
    assert not [i for i in decide(view) if isinstance(i.action, PublishWeights)]
    well = replace(view, engines={"e": replace(engine, silent=False, why="")})
    assert "engine" not in waits(well)
    assert [i for i in decide(well) if isinstance(i.action, PublishWeights)]


def test_hung_engine_is_another_wait_than_a_silent_one() -> None:
    engines = [EngineView("e", "h:1", None, silent=True, hung=hung, why="x") for hung in (False, True)]
    stalls = {waits(replace(running_job(), engines={"e": engine}))["engine"].stall for engine in engines}
    assert len(stalls) == 2


def test_a_store_that_takes_no_write_is_the_only_cause_that_is_named_whatever_else_is_awaited() -> None:
    view = sealed_job()
    assert "store" not in waits(view)
    refused = replace(view, store_trouble="the store's database is full. Compact and defragment it.")
    (wait,) = current_waits(refused)
    assert (wait.cause, wait.key) == ("store", "wait store")
    assert (
        wait.what == f"{view.node} cannot write to the store: the store's database is full. Compact and defragment it"
    )
    assert told(wait, PATIENCE_S["store"], MEMBERS[0])
    assert wait_sentence(wait) == wait.what


def test_rewards_that_wait_are_named_and_move_when_one_is_scored() -> None:
    one, two = (
        waits(replace(running_job(), reward_pool=PoolStatus(4, scored, "4 responses wait to be scored by reward 'r'")))[
            "reward"
        ]
        for scored in (7, 8)
    )
    assert one.what == "on node-0 4 responses wait to be scored by reward 'r'"
    assert one.key == two.key
    assert one.stall != two.stall
    assert "reward" not in waits(replace(running_job(), reward_pool=PoolStatus(0, 8, "")))


@pytest.mark.parametrize("cause", ["tools", "agent"])
def test_wait_for_an_agent_or_tool_process_is_named_and_progresses_when_one_is_free(cause: str) -> None:
    view = running_job()
    if cause == "agent":
        view = replace(view, spec=view.spec.model_copy(update={"agent": AgentSpec(name="solver")}))
    one, two = (waits(replace(view, tool_pool=PoolStatus(3, done, "3 responses wait for x")))[cause] for done in (7, 8))
    assert one.what == "on node-0 3 responses wait for x"
    assert one.key == two.key
    assert one.stall != two.stall
    assert cause not in waits(replace(view, tool_pool=PoolStatus(0, 8, "")))


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


def test_a_rank_that_waits_for_blobs_names_the_prompt_the_nodes_and_the_bytes() -> None:
    view = sealed_job()
    seal = view.seal
    assert seal is not None
    first, second = seal.groups[:2]

    def at(fetched: int, lost: frozenset[str] = frozenset()) -> Wait:
        fetching = {
            first.digest: Fetching(frozenset({0}), 3_000_000, fetched),
            second.digest: Fetching(frozenset({0}), 3_000_000, 0, lost),
        }
        known = RankView(0, holding=seal.token, fetching=fetching, fetched_bytes=fetched)
        return waits(replace(view, ranks={0: known}))["blobs"]

    holder, node = node_of(first.holder), view.plan.ranks[0].node
    assert at(1_200_000).what == (
        f"train rank 0 on {node} waits for blobs of prompt {first.ref} from {holder}: 1.2 of 3.0 MB are there, and for "
        "those of 1 more prompt"
    )
    assert f"prompt {second.ref} from {holder}: no store has blob {'ab' * 32}" in at(0, frozenset({"ab" * 32})).what
    assert at(0).key == at(1).key
    assert at(0).stall != at(1).stall
    assert "blobs" not in waits(view)


def test_bytes_of_blobs_are_progress_of_the_transfer() -> None:
    view = sealed_job()
    assert view.seal is not None

    def at(fetched: int) -> Wait:
        return waits(replace(view, ranks={0: RankView(0, fetched_bytes=fetched)}))["exchange"]

    assert at(0).stall != at(1).stall


@pytest.mark.parametrize(
    ("condition", "cause"),
    [("world w []", "recovery"), ("grow 3", "recovery"), ("prune 3", "tidying"), ("forget 3", "tidying")],
)
def test_actions_that_a_disk_can_block_are_named_while_under_way(condition: str, cause: str) -> None:
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

    monkeypatch.setattr(job_effects.archive, "append_entries", append)
    effects: Any = SimpleNamespace(
        replicator=None, run_dir=Path(), tell=book.hold, ledger=SimpleNamespace(run=run), away=str
    )
    prune: Any = SimpleNamespace(seqs=(0,))
    for _ in range(3):
        assert (await job_effects.prune_log(prune, running_job(), effects)).outcome is TxnOutcome.UNKNOWN
    assert [one.sentence for one in book._waiting] == [
        "old records cannot be written to the run's folder (No space left on device); they stay in the store, so the store grows"
    ]
    full[0] = False
    monkeypatch.setattr(job_effects.transactions, "prune", lambda *_: None)
    assert (await job_effects.prune_log(prune, running_job(), effects)).outcome is TxnOutcome.WON
    full[0] = True
    await job_effects.prune_log(prune, running_job(), effects)
    assert len(book._waiting) == 2


async def test_old_records_do_not_leave_the_store_for_a_folder_that_is_not_the_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below a lost mount, or after a move of the run's folder, the files would be unreachable."""

    def append(*_: Any) -> None:
        raise AssertionError("written into an unreachable folder")

    monkeypatch.setattr(job_effects.archive, "append_entries", append)
    told: list[str] = []
    effects: Any = SimpleNamespace(
        run_dir=tmp_path / "run",
        tell=lambda topic, sentence: told.append(sentence),
        away=lambda: storage.folder_loss(tmp_path / "run", "node-0"),
    )
    prune: Any = SimpleNamespace(seqs=(0,))
    assert (await job_effects.prune_log(prune, running_job(), effects)).outcome is TxnOutcome.UNKNOWN
    (sentence,) = told
    assert "node-0 no longer sees the run's folder" in sentence
    assert "stay in the store" in sentence


def test_every_cause_is_watched_and_none_else() -> None:
    assert RankView(0).progress == 0
    told = set(re.findall(r"Wait\(\s*\"(\w+)\"", (ROOT / "controllers" / "rules" / "waits.py").read_text()))
    assert told - PATIENCE_S.keys() == {"in_flight", "engine"}

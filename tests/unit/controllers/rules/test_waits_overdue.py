"""Waits that stand still become events: after how long, told by whom, and what counts as getting anywhere."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from builders import running_job

from controllers.rules.view import Timers, turn_of
from controllers.rules.waits import LOCAL, PATIENCE_S, WHOLE, Wait, overdue_waits, wait_sentence
from controllers.telemetry.notices import WaitReporter, WarningLog
from gcore.errors import StoreUnavailable
from gcore.ledger.records.job import Trouble
from gcore.observability.metrics import Metrics
from gcore.store.keys import JobKeys
from gcore.testing import FakeClock, MemoryCluster, MemoryStore, PerfectNetwork

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
    stood_still = f"nothing has moved for {PATIENCE_S[cause]:g} s: "
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


async def test_what_is_noted_while_the_store_is_away_is_written_when_it_is_back_in_order() -> None:
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
    """A job that nobody drives yet."""

    def __init__(self, clock: FakeClock) -> None:
        self.waits = Timers({})
        self.said: list[tuple[str, str]] = []
        self.troubles: Any = SimpleNamespace(note=lambda topic, words: self.said.append((topic, words)))
        self.view = replace(running_job(), lacks="its data cannot be read.")

    def look(self) -> Any:
        return self.view


async def test_what_a_node_lacks_is_told_once_while_it_prepares_and_again_if_it_comes_again() -> None:
    clock = FakeClock()
    job = Preparing(clock)
    running = asyncio.ensure_future(WaitReporter(job, Metrics(), clock).run())
    await clock.advance(PATIENCE_S["material"] - 1.0)
    assert job.said == []
    await clock.advance(60.0)
    told = (
        "wait-material-node-0",
        "nothing has moved for 30 s: node-0 cannot work on the job: its data cannot be read",
    )
    assert job.said == [told]
    job.view = running_job()
    await clock.advance(5.0)
    job.view = replace(running_job(), lacks="its data cannot be read.")
    await clock.advance(60.0)
    assert job.said.count(told) == 2
    running.cancel()

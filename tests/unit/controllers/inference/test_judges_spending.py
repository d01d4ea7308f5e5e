"""A job's spending: shared by all controllers, durable over their deaths, reported once; at the limit the job waits."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controllers.inference.judges import WRITE_S, ExternalJudges, JudgeBudget, JudgeMetricsObserver
from gcore.config import JobSpec, parse_spec
from gcore.errors import DataError
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Member
from gcore.ledger.records.job import Trouble
from gcore.ledger.transactions import Versioned
from gcore.ledger.usage import SPARE_NODES, JudgeUse, NodeSpent
from gcore.observability.metrics import Metrics
from gcore.store.keys import JobKeys
from gcore.store.types import Delete, Put, WatchBatch, WatchEvent
from gcore.testing import Call, FakeClock, Fate, MemoryCluster, MemoryStore, PerfectNetwork

KEYS = JobKeys("u")
EXTERNAL = {"url": "http://x/v1", "model": "m", "price_in": 1.0, "price_out": 1000.0, "most_cost": 10.0}
TREE: dict[str, Any] = {"name": "t", "model": {"path": "m"}, "data": {"path": "d"}, "flow": {"steps": 1}}
TREE |= {"rollout": {"max_new_tokens": 4}, "reward": {"judge": "x"}}
SPEC = parse_spec(TREE | {"judges": [{"name": "x", "template": "{{ response }}", "external": EXTERNAL}]})
THOUSAND = 1000
"""Tokens of an answer: one unit of money."""


class House:
    """A store, and controllers that spend; each reads the store only on `look`."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.cluster = MemoryCluster(self.clock)
        self.store = MemoryStore(self.cluster)
        self.mirror = JobMirror(KEYS)
        self.nodes = {"a", "b"}
        self.tasks: list[asyncio.Task[None]] = []

    def life(self, node: str, number: int = 1, store: MemoryStore | None = None, spec: JobSpec = SPEC) -> JudgeBudget:
        spending = JudgeBudget(
            spec.judges,
            store or self.store,
            KEYS,
            node,
            f"{node}.{number}",
            self.clock,
            lambda: self.mirror,
            lambda: self.nodes,
        )
        self.tasks.append(asyncio.ensure_future(spending.run()))
        return spending

    async def look(self) -> None:
        listing = await self.store.list(KEYS.prefix)
        puts = tuple(WatchEvent("put", kv) for kv in listing.kvs)
        self.mirror = JobMirror(KEYS).fold(WatchBatch(puts, listing.revision, reset=True))

    async def stored(self, node: str) -> int:
        """Answers that a node's record counts."""
        kv = await self.store.get(KEYS.spent(node))
        return 0 if kv is None else NodeSpent.decode(kv.value).uses["x"].requests

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.fixture
async def house() -> Any:
    house = House()
    yield house
    await house.end()


def pay(spending: JudgeBudget, answers: int = 1) -> None:
    for _ in range(answers):
        spending.note("x", 0, THOUSAND)


async def test_every_controller_knows_what_all_have_spent_and_its_own_at_once(house: House) -> None:
    a, b = house.life("a"), house.life("b")
    pay(a, 3)
    assert a.cost("x") == 3
    await house.clock.advance(0.1)
    await house.look()
    assert b.cost("x") == 3
    pay(b, 2)
    assert (a.cost("x"), b.cost("x")) == (3, 5)
    await house.clock.advance(0.1)
    await house.look()
    assert a.cost("x") == b.cost("x") == 5


async def test_written_spending_without_a_notification_counts_once(house: House) -> None:
    a = house.life("a")
    pay(a)
    await house.clock.advance(0.1)
    assert await house.stored("a") == 1
    assert a.cost("x") == 1, "the mirror has not heard of it"
    await house.look()
    assert a.cost("x") == 1


async def test_many_answers_take_few_writes(house: House) -> None:
    a = house.life("a")
    before = (await house.store.list(KEYS.prefix)).revision
    for _ in range(100):
        pay(a)
        await house.clock.advance(0.1)
    await house.clock.advance(WRITE_S)
    assert await house.stored("a") == 100
    assert (await house.store.list(KEYS.prefix)).revision - before <= 10 / WRITE_S + 2


async def test_the_next_life_of_a_node_goes_on_from_what_the_one_before_had_spent(house: House) -> None:
    pay(house.life("a", 1), 4)
    await house.clock.advance(0.1)
    await house.end()
    await house.look()
    again = house.life("a", 2)
    assert again.cost("x") == 4
    pay(again)
    await house.clock.advance(0.1)
    assert await house.stored("a") == 5
    await house.look()
    assert again.cost("x") == 5


async def test_a_controller_that_takes_its_job_up_again_in_the_same_life_forgets_nothing_of_what_was_spent(
    house: House,
) -> None:
    once = house.life("a", 1)
    pay(once, 4)
    await house.clock.advance(0.1)
    await once.finish()
    await house.end()
    await house.look()
    again = house.life("a", 1)
    assert again.cost("x") == 4
    pay(again)
    assert again.cost("x") == 5
    await house.clock.advance(0.1)
    assert await house.stored("a") == 5
    await house.look()
    assert again.cost("x") == 5


async def test_remaining_spending_is_written_at_the_end_of_a_controller(house: House) -> None:
    a = house.life("a")
    pay(a)
    await house.clock.advance(0.1)
    pay(a, 6)
    await a.finish()
    assert await house.stored("a") == 7


class Rough(PerfectNetwork):
    """What becomes of the first writes, one after the other."""

    def __init__(self, clock: FakeClock, fates: list[Fate]) -> None:
        super().__init__(clock)
        self._fates = list(fates)

    async def request(self, call: Call) -> Fate:
        await super().request(call)
        return self._fates.pop(0) if call.kind == "transact" and self._fates else Fate.DELIVER


@settings(deadline=None, max_examples=60)
@given(fates=st.lists(st.sampled_from(list(Fate)), max_size=8), late_after=st.integers(0, 8))
def test_each_answer_counts_once_whatever_happens_to_writes(fates: list[Fate], late_after: int) -> None:
    async def play() -> None:
        house = House()
        a = house.life("a", store=MemoryStore(house.cluster, network=Rough(house.clock, fates)))
        for turn in range(10):
            pay(a)
            await house.clock.advance(WRITE_S)
            if turn == late_after:
                house.cluster.deliver_late()
            assert a.cost("x") == turn + 1
        await house.clock.advance(WRITE_S * 3)
        house.cluster.deliver_late()
        await house.look()
        assert (await house.stored("a"), a.cost("x")) == (10, 10)
        await house.end()

    asyncio.run(play())


async def test_two_lives_of_one_node_that_overlap_count_each_answer_once(house: House) -> None:
    old, new = house.life("a", 1), house.life("a", 2)
    for _ in range(3):
        pay(old)
        pay(new)
        await house.clock.advance(WRITE_S * 3)
    assert await house.stored("a") == 6


async def test_records_of_nodes_that_are_gone_are_added_up_and_one_that_comes_back_begins_anew(house: House) -> None:
    for number in range(SPARE_NODES + 3):
        record = NodeSpent(node=f"old{number}", by="x", life={"x": JudgeUse(requests=1, tokens_out=THOUSAND)})
        await house.store.transact((), (Put(KEYS.spent(record.node), record.encode()),))
    await house.look()
    a = house.life("a")
    pay(a)
    assert a.cost("x") == SPARE_NODES + 4
    await house.clock.advance(0.1)
    await house.look()
    assert len(house.mirror.spent) == SPARE_NODES + 1
    assert a.cost("x") == SPARE_NODES + 4
    back = house.life("old0")
    pay(back)
    assert back.cost("x") == SPARE_NODES + 5


async def test_a_node_whose_record_was_added_to_anothers_does_not_count_twice(house: House) -> None:
    a = house.life("a")
    pay(a, 2)
    await house.clock.advance(WRITE_S)
    taken = NodeSpent(node="b", by="b.1", before={"x": JudgeUse(requests=2, tokens_out=2 * THOUSAND)})
    await house.store.transact((), (Delete(KEYS.spent("a")), Put(KEYS.spent("b"), taken.encode())))
    pay(a)
    await house.clock.advance(WRITE_S)
    await house.look()
    assert (await house.stored("a"), a.cost("x")) == (1, 3)


async def test_a_damaged_record_is_written_anew(house: House) -> None:
    await house.store.transact((), (Put(KEYS.spent("a"), b"{"),))
    a = house.life("a")
    pay(a)
    await house.clock.advance(0.1)
    assert await house.stored("a") == 1


async def test_all_is_spent_when_the_sum_has_come_to_it_and_the_sentence_says_what_to_do(house: House) -> None:
    a = house.life("a")
    pay(a, 9)
    assert a.overdrawn("x") == ""
    pay(a)
    assert a.overdrawn("x") == (
        "judge 'x' has spent 10.00 of its external.most_cost 10, so it gets no more requests; a job's spec cannot be "
        "changed: cancel the job, export its model, and start a new job from it with a higher limit"
    )


async def test_a_small_sum_that_is_spent_is_told_as_more_than_nothing(house: House) -> None:
    cheap = EXTERNAL | {"price_in": 0.0, "price_out": 0.5123, "most_cost": 0.0005}
    spec = parse_spec(TREE | {"judges": [{"name": "x", "template": "{{ response }}", "external": cheap}]})
    a = house.life("a", spec=spec)
    pay(a)
    assert "has spent 0.0005123 of its external.most_cost 0.0005," in a.overdrawn("x")


class Office:
    """The external judges of one controller."""

    def __init__(self, house: House, me: str = "a.1", spec: Any = SPEC, **environ: str) -> None:
        self.told: list[tuple[str, str]] = []
        self.metrics = Metrics()
        self.counts = JudgeMetricsObserver(self.metrics, lambda topic, said: self.told.append((topic, said)))
        self.judges = ExternalJudges(
            spec,
            house.store,
            KEYS,
            me.partition(".")[0],
            me,
            house.clock,
            self.counts,
            lambda: house.mirror,
            lambda: house.nodes,
            lambda topic, said: self.told.append((topic, said)),
            environ,
        )
        house.tasks.append(asyncio.ensure_future(self.judges.run()))


def join(house: House, *members: str) -> None:
    records = {m: Versioned(Member(incarnation=m, node=m[0], address="h:1"), 1) for m in members}
    house.mirror = replace(house.mirror, members=records)


async def test_exhausted_budget_is_reported_once_by_one_member(house: House) -> None:
    join(house, "a.1", "b.1")
    a, b = Office(house), Office(house, "b.1")
    pay(b.judges.spending, 11)
    await house.clock.advance(0.1)
    house.mirror = JobMirror(KEYS)
    await house.look()
    join(house, "a.1", "b.1")
    await house.clock.advance(20)
    assert a.told == [("judge-cost-x", "judge 'x' has spent its budget of 10 (external.most_cost), and the job waits")]
    assert b.told == []
    after = Office(house)
    trouble = Trouble(topic="judge-cost-x", node="a", sentence=a.told[0][1])
    house.mirror = replace(house.mirror, troubles={trouble.topic: Versioned(trouble, 1)})
    await house.clock.advance(20)
    assert after.told == [], "nor by the next life of whoever told it"
    assert b.metrics.registry.get_sample_value("gcore_judge_cost_total", {"judge": "x"}) == 11


async def test_why_questions_wait_stands_with_what_waits(house: House) -> None:
    office = Office(house)
    office.counts.begun("x")
    office.counts.waits("x", "all is spent")
    assert office.counts.scoring.what == "1 question waits for judge 'x'; all is spent"
    office.counts.waits("x", "")
    assert office.counts.scoring.what == "1 question waits for judge 'x'"
    office.counts.held("x", "cost", 2.5)
    seconds = office.metrics.registry.get_sample_value(
        "gcore_judge_held_seconds_total", {"judge": "x", "cause": "cost"}
    )
    assert seconds == 2.5


async def test_a_job_without_judges_of_others_writes_nothing(house: House) -> None:
    office = Office(house, spec=parse_spec(TREE | {"reward": {"name": "math"}}))
    await office.judges.close()
    assert (await house.store.list(KEYS.prefix)).kvs == ()


async def test_a_judge_is_opened_with_its_key_or_not_at_all(house: House) -> None:
    keyed = SPEC.judges[0].model_copy(
        update={"external": SPEC.judges[0].external.model_copy(update={"key_env": "THE_KEY"})}  # type: ignore[union-attr]
    )
    with pytest.raises(DataError, match="THE_KEY is not set here"):
        Office(house).judges.asker(0, keyed)
    office = Office(house, THE_KEY="sk-x")
    office.judges.asker(0, keyed)
    await office.judges.close()

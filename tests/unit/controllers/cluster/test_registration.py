"""A node's registration: what stands in the store is what the daemon knows, whatever became of its calls."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from controllers.changes import ChangeSignal
from controllers.cluster.registration import NodeFactsReader, NodeRegistration
from controllers.cluster.slot_health import SlotHealth
from controllers.identity import Identity
from gcore.config import NodeConfig
from gcore.ledger.records.cluster import SickSlots
from gcore.ledger.records.job import NodeRecord
from gcore.schema import set_written_version, written_version
from gcore.store import keys
from gcore.store.reference import StoreRef
from gcore.store.session import Session
from gcore.store.types import Put
from gcore.testing import FakeClock, MemoryCluster, MemoryStore
from gcore.testing.store import Call, Fate, PerfectNetwork


class Losing(PerfectNetwork):
    """Loses the answers to transactions as `fates` says, and tells `lost` of each."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.fates: list[Fate] = []
        self.asked = asyncio.Event()

    async def request(self, call: Call) -> Fate:
        if call.kind != "transact" or not self.fates:
            return Fate.DELIVER
        self.asked.set()
        return self.fates.pop(0)


class Node:
    """A daemon's life, as far as it registers."""

    def __init__(self, folder: Path) -> None:
        self.clock = FakeClock()
        self.network = Losing(self.clock)
        self.store = MemoryStore(MemoryCluster(self.clock), network=self.network)
        config = NodeConfig(
            node="n", home=str(folder), run_root=str(folder), etcd=StoreRef(endpoints=("h:1",)), slots=("cpu:0",)
        )
        self.config = config
        self.health = SlotHealth(config.node, config.slots, self.clock)
        self.changes = ChangeSignal()
        self.told: list[tuple[bool, str]] = []

    async def begin(self) -> asyncio.Task[None]:
        """Register, for ever."""
        session = await Session.open(self.store, clock=self.clock)
        identity = Identity("n", "n.1", "h:1", session.lease)

        async def ready(can: bool, status: str) -> None:
            self.told.append((can, status))

        registration = NodeRegistration(
            self.config,
            self.health,
            NodeFactsReader(self.config),
            lambda: True,
            self.clock,
            self.store,
            identity,
            "h:2",
            self.changes,
            session,
            ready,
        )
        return asyncio.create_task(registration.run())

    async def sick(self) -> dict[str, str]:
        """As others read it."""
        known = await self.store.get(keys.sick_slots("n"))
        return {} if known is None else SickSlots.decode(known.value, known.key).slots

    async def until_ready(self) -> None:
        """Registered."""
        while not any(can for can, _ in self.told):
            await self.clock.advance(0.5)
            await asyncio.sleep(0)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def test_a_slot_that_falls_sick_while_the_answer_to_the_registration_is_lost_is_told_all_the_same(
    node: Node,
) -> None:
    node.network.fates = [Fate.LOSE_REPLY]
    task = await node.begin()
    await node.network.asked.wait()
    node.health.sick = {"cpu:0": "it is gone"}
    node.changes.notify()
    await node.until_ready()
    for _ in range(10):
        await node.clock.advance(0.5)
        await node.clock.settle()
    assert await node.sick() == {"cpu:0": "it is gone"}
    task.cancel()


async def test_a_slot_that_is_sick_from_the_beginning_is_told_before_anything_can_be_placed_on_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def found() -> None:
        node.health.sick = {"cpu:0": "it is gone"}

    monkeypatch.setattr(node.health, "check", found)
    task = await node.begin()
    await node.until_ready()
    assert await node.sick() == {"cpu:0": "it is gone"}
    registered, told = await node.store.get(keys.node("n")), await node.store.get(keys.sick_slots("n"))
    assert registered is not None
    assert told is not None
    assert registered.mod_revision == told.mod_revision
    task.cancel()


async def test_sick_slots_are_told_with_the_registration_and_when_they_change(node: Node) -> None:
    task = await node.begin()
    await node.until_ready()
    assert await node.sick() == {}
    for sick in ({"cpu:0": "one"}, {"cpu:0": "two"}, {}):
        node.health.sick = sick
        node.changes.notify()
        await node.clock.settle()
        assert await node.sick() == sick
    task.cancel()


async def test_a_name_that_another_life_has_is_waited_for(node: Node) -> None:
    lease = await node.store.grant(5)
    await node.store.transact((), (Put(keys.node("n"), b"other", lease=lease),))
    task = await node.begin()
    for _ in range(4):
        await node.clock.advance(0.5)
        await node.clock.settle()
    assert not any(can for can, _ in node.told)
    await node.store.revoke(lease)
    await node.until_ready()
    known = await node.store.get(keys.node("n"))
    assert known is not None
    assert NodeRecord.decode(known.value, known.key).incarnation == "n.1"
    task.cancel()


async def test_another_version_is_written_anew(node: Node) -> None:
    task = await node.begin()
    await node.until_ready()
    before = await node.store.get(keys.node("n"))
    newest = written_version()
    set_written_version(newest - 1)
    try:
        node.changes.notify()
        await node.clock.settle()
        after = await node.store.get(keys.node("n"))
    finally:
        set_written_version(newest)
    assert before is not None
    assert after is not None
    assert after.mod_revision > before.mod_revision
    task.cancel()

"""A node's registration: the record in the store equals the daemon's state, whatever happened to its calls.

The facts that a daemon reports of its node, and those that it omits.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.changes import ChangeSignal
from controllers.cli.local import memory_share_gib
from controllers.cluster import registration as machine
from controllers.cluster.registration import (
    Gpu,
    NodeFactsReader,
    NodeRegistration,
    node_facts,
    parse_gpus,
    slot_facts,
)
from controllers.cluster.slot_health import SlotHealth
from controllers.identity import Identity
from gcore.config import NodeConfig
from gcore.engines.emulated.launch import LAW_FILE
from gcore.ledger.records.cluster import NodeFacts, SickSlots, SlotFacts
from gcore.ledger.records.job import NodeRecord
from gcore.schema import NEWEST_VERSION
from gcore.store import keys
from gcore.store.reference import StoreRef
from gcore.store.session import Session
from gcore.store.types import Put
from gcore.system.memory import HostMemory, group_limits, host_memory
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
        """Keep registering."""
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
            "http://h:3",
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


async def test_another_version_is_written_anew(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    task = await node.begin()
    await node.until_ready()
    before = await node.store.get(keys.node("n"))
    monkeypatch.setattr(machine, "written_version", lambda: NEWEST_VERSION + 1)
    node.changes.notify()
    await node.clock.settle()
    after = await node.store.get(keys.node("n"))
    assert before is not None
    assert after is not None
    assert after.mod_revision > before.mod_revision
    task.cancel()


H200 = Gpu("NVIDIA H200", 140.401)
ANSWER = "NVIDIA H200, 143771, Disabled\nNVIDIA H200, 143771, Disabled\n"


def driver(answer: str, code: int = 0) -> tuple[str, ...]:
    """A program that answers as the driver's does."""
    return (sys.executable, "-c", f"print({answer!r}, end=''); raise SystemExit({code})")


async def test_gpus_are_told_with_their_memory_and_name() -> None:
    facts = await node_facts(("cuda:0", "cuda:1"), 100.0, driver(ANSWER))
    slots = tuple(SlotFacts(slot=f"cuda:{n}", memory_gib=140.401, device="NVIDIA H200") for n in (0, 1))
    assert facts == NodeFacts(host_memory_gib=100.0, slots=slots)


async def test_cores_have_a_part_of_their_hosts_memory_and_no_driver_is_asked() -> None:
    facts = await node_facts(("cpu:0", "cpu:1"), command=("no-such-program",))
    assert facts is not None
    assert facts.host_memory_gib == pytest.approx(host_memory().total / 2**30, abs=0.001)
    assert facts.slots == (SlotFacts(slot="cpu:0"), SlotFacts(slot="cpu:1"))


async def test_emulated_slots_have_the_memory_of_their_timing_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "law.json"
    monkeypatch.setenv(LAW_FILE, str(file))
    assert await node_facts(("emulated:0",)) is None, "a file that is not there"
    for text in ('{"speedup": 4.0}', '{"memory_gib": "much"}', "no JSON"):
        file.write_text(text)
        assert await node_facts(("emulated:0",)) is None
    file.write_text('{"memory_gib": 2.5}')
    slots = (SlotFacts(slot="emulated:0", memory_gib=2.5), SlotFacts(slot="emulated:1", memory_gib=2.5))
    assert await node_facts(("emulated:0", "emulated:1"), 8.0) == NodeFacts(host_memory_gib=8.0, slots=slots)


@pytest.mark.parametrize(
    ("slots", "command"),
    [
        pytest.param(("emulated:0",), driver(ANSWER), id="emulated slots"),
        pytest.param(("cuda:0",), ("no-such-program",), id="no driver"),
        pytest.param(("cuda:0",), driver(ANSWER, 9), id="a driver that fails"),
        pytest.param(("cuda:0",), driver("what?\n"), id="an answer that is none"),
        pytest.param(("cuda:2",), driver(ANSWER), id="fewer GPUs than slots"),
        pytest.param(("cuda:0",), driver("NVIDIA H200, 143771, Enabled\n"), id="a GPU in parts"),
    ],
)
async def test_uncertain_facts_are_not_reported(slots: tuple[str, ...], command: tuple[str, ...]) -> None:
    assert await node_facts(slots, command=command) is None


async def test_a_driver_that_hangs_holds_no_daemon_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ASK_S", 0.05)
    hangs = (sys.executable, "-c", "import time; time.sleep(60)")
    assert await node_facts(("cuda:0",), command=hangs) is None


def test_a_driver_that_knows_no_parts_tells_whole_gpus() -> None:
    assert parse_gpus("NVIDIA L4, 23034, [N/A]\n") == (Gpu("NVIDIA L4", 22.494),)


@given(st.lists(st.sampled_from([H200, Gpu("NVIDIA L4", 22.5), Gpu("NVIDIA L4", 22.4)]), min_size=1, max_size=4))
def test_where_gpus_differ_no_slot_is_told_more_than_the_least(gpus: list[Gpu]) -> None:
    facts = slot_facts(("cuda:0", "cpu:0"), gpus)
    assert facts is not None
    assert facts[0].memory_gib == min(one.memory_gib for one in gpus)
    assert facts[0].device == (gpus[0].name if len(set(gpus)) == 1 else "")
    assert facts[1] == SlotFacts(slot="cpu:0")


@given(st.integers(1, 64), st.integers(1, 16))
def test_daemons_of_one_machine_share_its_memory(slots: int, daemons: int) -> None:
    share = memory_share_gib(slots, slots * daemons)
    if daemons == 1:
        assert share is None
    else:
        total = host_memory().total / 2**30
        assert share is not None
        assert daemons * (share - 2.0) == pytest.approx(max(total - 2.0, 0.0), abs=0.001 * daemons)


def test_a_control_group_that_allows_less_than_the_machine_has_is_what_there_is(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nHugePages_Total: 0\n")
    assert host_memory(meminfo, tmp_path) == HostMemory(16 << 30, 8 << 30)
    (tmp_path / "memory.max").write_text("4294967296\n")
    (tmp_path / "memory.current").write_text("1073741824\n")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert host_memory(meminfo, tmp_path) == HostMemory(4 << 30, 3 << 30)
    assert group_limits(tmp_path).cores == 1.5
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory(meminfo, tmp_path).total == 16 << 30

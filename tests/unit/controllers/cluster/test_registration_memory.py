"""What a daemon tells of its node, and what it leaves unsaid."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.cli.local import memory_share_gib
from controllers.cluster import registration as machine
from controllers.cluster.registration import Gpu, node_facts, parse_gpus, slot_facts
from gcore.ledger.records.cluster import NodeFacts, SlotFacts
from gcore.ledger.records.job import NodeRecord
from gcore.system.memory import HostMemory, group_limits, host_memory, is_out_of_memory

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
async def test_what_is_not_known_for_sure_is_not_told(slots: tuple[str, ...], command: tuple[str, ...]) -> None:
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


def test_cached_files_that_nothing_reads_count_as_free(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")
    (tmp_path / "memory.max").write_text("4294967296\n")
    (tmp_path / "memory.current").write_text("3221225472\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 1073741824\n")
    assert host_memory(meminfo, tmp_path) == HostMemory(4 << 30, 2 << 30)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("mmap: Cannot allocate memory"), True),
        (RuntimeError("the shapes do not fit"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_an_allocation_that_failed_is_known_by_its_type_or_its_words(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_a_node_of_the_version_before_is_read_and_tells_nothing_to_one() -> None:
    facts = NodeFacts(host_memory_gib=8.0, slots=(SlotFacts(slot="cpu:0"),))
    record = NodeRecord(name="n", incarnation="n.1", address="h:1", slots=("cpu:0",), pid=1, facts=facts)
    assert NodeRecord.decode(record.encode()).facts == facts
    assert NodeRecord.decode(record.encode(1)).facts is None

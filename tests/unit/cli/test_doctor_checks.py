"""What `gcore doctor` makes of facts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from controllers.cli.commands.doctor import parse_probe
from controllers.cli.commands.doctor import read_home as look_at_home
from controllers.cli.view import doctor_checks as judge
from controllers.cli.view.doctor_checks import (
    Check,
    CheckState,
    EtcdTry,
    HomeFacts,
    MachineFacts,
    PackageFacts,
    Probe,
    RequestedSlots,
    RunningCluster,
    ServerProbe,
)
from gcore.engines.sglang.command import find_python
from gcore.testing import FakeClock

GIB = 1 << 30
MACHINE = MachineFacts(
    cpus=2, cores=2, memory=16 * GIB, available=8 * GIB, open_files=20000, shared=8 * GIB, wall=1.9e9
)
HOME = HomeFacts(Path("/home/x/.gcore"), free=100 * GIB, sync_ms=1.0)
PROBE = Probe(torch="2.13.0+cpu", deepspeed="0.19.8", started=True)
ETCD = EtcdTry("/usr/bin/etcd", "3.5.21", 0.3)
CPU, CUDA = RequestedSlots("cpu", 2), RequestedSlots("cuda", 2)


def all_checks(**facts: object) -> list[Check]:
    """Every check about a machine that is as it should be, but for `facts`."""
    machine, home = facts.get("machine", MACHINE), facts.get("home", HOME)
    wanted = facts.get("wanted", CPU)
    return [
        judge.check_python(facts.get("python", (3, 11, 9))),  # type: ignore[arg-type]
        *judge.check_packages([facts.get("package", PackageFacts("pydantic", "2.14.3"))]),  # type: ignore[list-item]
        *judge.check_torch(facts.get("probe", PROBE), wanted),  # type: ignore[arg-type]
        judge.check_deepspeed(facts.get("probe", PROBE)),  # type: ignore[arg-type]
        *judge.check_etcd(facts.get("etcd", ETCD)),  # type: ignore[arg-type]
        *judge.check_home(home),  # type: ignore[arg-type]
        judge.check_clock(machine, home),  # type: ignore[arg-type]
        judge.check_cores(machine, wanted),  # type: ignore[arg-type]
        judge.check_memory(machine, wanted),  # type: ignore[arg-type]
        *judge.check_limits(machine, wanted),  # type: ignore[arg-type]
        judge.check_threads(facts.get("environment", {}), MACHINE.cpus),  # type: ignore[arg-type]
        judge.check_sglang(*facts.get("sglang", (None, None))),  # type: ignore[misc]
        *judge.check_hubs(facts.get("hubs", ())),  # type: ignore[arg-type]
        *judge.check_cluster(facts.get("cluster")),  # type: ignore[arg-type]
    ]


def test_a_good_machine_has_nothing_to_do() -> None:
    checks = all_checks()
    assert {check.state for check in checks} == {CheckState.OK}
    assert {check.fix for check in checks} == {""}


BROKEN = {
    "an old Python": ({"python": (3, 10, 1)}, "Python", CheckState.FAIL),
    "a package that is absent": ({"package": PackageFacts("pydantic", None)}, "package pydantic", CheckState.FAIL),
    "an extra that is absent": (
        {"package": PackageFacts("torch", None, needed_for="train")},
        "package torch",
        CheckState.WARN,
    ),
    "a package that is too old": (
        {"package": PackageFacts("pydantic", "1.10", ">=2.10", fits=False)},
        "package pydantic",
        CheckState.FAIL,
    ),
    "a package off its pin": (
        {"package": PackageFacts("torch", "2.12.0", pinned="2.13.0")},
        "package torch",
        CheckState.WARN,
    ),
    "no torch": ({"probe": Probe(error="No module named 'torch'")}, "torch", CheckState.FAIL),
    "DeepSpeed that does not start": ({"probe": Probe("2.13.0", error="no gloo")}, "DeepSpeed", CheckState.FAIL),
    "GPUs that are not there": ({"wanted": CUDA}, "devices", CheckState.FAIL),
    "no etcd": ({"etcd": EtcdTry(error="no etcd is to be found")}, "etcd", CheckState.FAIL),
    "an etcd that does not start": ({"etcd": EtcdTry("/e", "3.5.21", error="exited")}, "etcd starts", CheckState.FAIL),
    "the wheel's etcd": ({"etcd": EtcdTry("/e", "3.5.1", 0.2)}, "etcd", CheckState.WARN),
    "a home that cannot be written": ({"home": replace(HOME, error="Read-only file system")}, "home", CheckState.FAIL),
    "a full disk": ({"home": replace(HOME, free=1 << 20)}, "home", CheckState.FAIL),
    "a rather full disk": ({"home": replace(HOME, free=2 * GIB)}, "home", CheckState.WARN),
    "a disk that syncs slowly": ({"home": replace(HOME, sync_ms=300.0)}, "disk", CheckState.WARN),
    "a clock of long ago": ({"machine": replace(MACHINE, wall=0.0)}, "clock", CheckState.FAIL),
    "a file server with another clock": ({"home": replace(HOME, clock_apart_s=-30.0)}, "clock", CheckState.WARN),
    "more slots than cores": ({"wanted": RequestedSlots("cpu", 8)}, "processors", CheckState.WARN),
    "a control group of half a core": ({"machine": replace(MACHINE, cpus=0.5)}, "processors", CheckState.WARN),
    "little memory": ({"machine": replace(MACHINE, available=GIB)}, "memory", CheckState.WARN),
    "few open files": ({"machine": replace(MACHINE, open_files=256)}, "open files", CheckState.FAIL),
    "rather few open files": ({"machine": replace(MACHINE, open_files=1024)}, "open files", CheckState.WARN),
    "no shared memory": ({"machine": replace(MACHINE, shared=None)}, "/dev/shm", CheckState.WARN),
    "no loopback": ({"machine": replace(MACHINE, loopback="127.0.0.1: refused")}, "loopback", CheckState.FAIL),
    "threads that spin": ({"environment": {"OMP_WAIT_POLICY": "active"}}, "threads", CheckState.WARN),
    "too many threads": ({"environment": {"OMP_NUM_THREADS": "64"}}, "threads", CheckState.WARN),
    "SGLang that is named and absent": ({"sglang": (None, None, "there is no such Python")}, "SGLang", CheckState.FAIL),
    "a broken SGLang": ({"sglang": ("/p", None)}, "SGLang", CheckState.FAIL),
    "another SGLang": ({"sglang": ("/p", "0.4.0")}, "SGLang", CheckState.WARN),
    "a hub that is away": (
        {"hubs": [ServerProbe("ModelScope", "https://x", "gone", "look")]},
        "ModelScope",
        CheckState.WARN,
    ),
    "a controller that is away": (
        {"cluster": RunningCluster([ServerProbe("node-0", "127.0.0.1:1", "does not answer", "look")])},
        "node-0",
        CheckState.FAIL,
    ),
    "a worker that failed": ({"cluster": RunningCluster([], {"rollout-1": "failed"})}, "workers", CheckState.WARN),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_named_with_what_to_do_and_nothing_else_is(case: str) -> None:
    facts, name, state = BROKEN[case]
    bad = [check for check in all_checks(**facts) if check.state is not CheckState.OK]  # type: ignore[arg-type]
    assert (name, state) in [(check.name, check.state) for check in bad]
    assert all(check.seen and check.fix for check in bad)
    others = {check.name for check in bad} - {name}
    assert others <= ({"DeepSpeed"} if name == "torch" else set())


def test_an_optional_hub_client_that_is_absent_is_no_fault() -> None:
    checks = list(judge.check_packages([PackageFacts("modelscope-hub", None, needed_for="modelscope")]))
    assert [check.state for check in checks] == [CheckState.OK]


def test_gpus_that_are_there_satisfy_who_asks_for_them() -> None:
    probe = replace(PROBE, cuda="13.0", devices=("H200", "H200"))
    assert [c.state for c in judge.check_torch(probe, CUDA)] == [CheckState.OK, CheckState.OK]
    assert [c.state for c in judge.check_torch(replace(probe, devices=("H200",)), CUDA)] == [
        CheckState.OK,
        CheckState.FAIL,
    ]


def test_the_probe_s_words_are_read_past_its_libraries_chatter() -> None:
    out = 'warming up\n[1, 2]\n{"torch": "2.13.0", "cuda": null, "devices": ["H200"]}\n{"deepspeed": "0.19.8"}\nbye\n'
    assert parse_probe(out, "a warning", 0) == Probe("2.13.0", None, ("H200",), "0.19.8", started=True)


def test_a_probe_that_died_leaves_its_last_words() -> None:
    probe = parse_probe('{"torch": "2.13.0", "cuda": null, "devices": []}\n', "Traceback\nImportError: no gloo\n\n", 1)
    assert probe == Probe("2.13.0", error="ImportError: no gloo")
    assert parse_probe("", "", -9).error == "ended with -9"


def test_a_home_that_cannot_be_looked_at_is_a_verdict_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert look_at_home(tmp_path / ("n" * 300), FakeClock()).error == "File name too long"
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert look_at_home(Path(".gcore"), FakeClock()).error == "No such file or directory"
    found = find_python(environ={})  # not every machine has one
    assert found is None or found.is_absolute()


def test_what_only_the_simulator_wants_is_not_said_to_be_wanted_by_nodes() -> None:
    (check,) = judge.check_packages([PackageFacts("matplotlib", None, needed_for="simulate")])
    assert check.seen == "not installed; only the plots of make bench-placement need it (simulate)"
    (check,) = judge.check_packages([PackageFacts("numba", None, needed_for="simulate")])
    assert check.seen == "not installed; gcore simulate is a hundred times as fast with it (simulate)"
    (check,) = judge.check_packages([PackageFacts("torch", None, needed_for="train")])
    assert "nodes with workers need it" in check.seen

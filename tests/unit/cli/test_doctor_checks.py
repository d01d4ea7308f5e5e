"""The findings of `gcore doctor`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from controllers.cli.commands.doctor import inspect_home, parse_probe, try_etcd
from controllers.cli.view import doctor_checks as judge
from controllers.cli.view.doctor_checks import Check, CheckState, PackageFacts, RequestedSlots
from gcore.engines.environments import SGLANG, VLLM
from gcore.store.etcd import EtcdBinary, EtcdFailed, EtcdNotFound
from gcore.testing import FakeClock

GIB = 1 << 30
HOME = Path("/home/x/.gcore")
PROBE: dict[str, Any] = {"torch": "2.13.0+cpu", "cuda": None, "devices": [], "fsdp2": True, "deepspeed": "0.19.8"}
CPU, CUDA = RequestedSlots("cpu", 2), RequestedSlots("cuda", 2)


def all_checks(**seen: Any) -> list[Check]:
    """Every check about a machine that is as it should be, but for what was `seen`."""

    def get(name: str, good: Any) -> Any:
        return seen.get(name, good)

    wanted, probe = get("wanted", CPU), get("probe", PROBE)
    return [
        judge.check_python(get("python", (3, 11, 9))),
        *judge.check_packages([get("package", PackageFacts("pydantic", "2.14.3"))]),
        *judge.check_torch(probe, wanted),
        *judge.check_backends(probe),
        judge.check_etcd("/usr/bin/etcd", get("etcd", "3.5.21")),
        *judge.check_home(HOME, get("free", 100 * GIB), get("sync_ms", 1.0)),
        judge.check_clock(get("wall", 1.9e9), HOME, get("apart_s", 0.0)),
        judge.check_cores(get("cpus", 2), 2, wanted),
        judge.check_memory(get("available", 8 * GIB), 16 * GIB, wanted),
        judge.check_open_files(get("open_files", 20000)),
        judge.check_shared_memory(get("shared", 8 * GIB), wanted),
        judge.check_loopback(get("loopback", "")),
        judge.check_threads(get("environment", {}), 2),
        judge.check_environment(SGLANG, *get("sglang", (None, None))),
        judge.check_environment(VLLM, *get("vllm", (None, None))),
        judge.check_workers(get("workers", {})),
    ]


def test_a_good_machine_has_nothing_to_do() -> None:
    checks = all_checks()
    assert {check.state for check in checks} == {CheckState.OK}
    assert {check.fix for check in checks} == {""}


BROKEN: dict[str, tuple[dict[str, Any], str, CheckState]] = {
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
    "no torch": ({"probe": {"error": "No module named 'torch'"}}, "torch", CheckState.FAIL),
    "FSDP2 that does not start": ({"probe": {"torch": "2.13.0", "error": "no gloo"}}, "FSDP2", CheckState.FAIL),
    "no DeepSpeed": ({"probe": {"torch": "2.13.0", "fsdp2": True, "error": "none"}}, "DeepSpeed", CheckState.WARN),
    "GPUs that are not there": ({"wanted": CUDA}, "devices", CheckState.FAIL),
    "the wheel's etcd": ({"etcd": "3.5.1"}, "etcd", CheckState.WARN),
    "a full disk": ({"free": 1 << 20}, "home", CheckState.FAIL),
    "a rather full disk": ({"free": 2 * GIB}, "home", CheckState.WARN),
    "a disk that syncs slowly": ({"sync_ms": 300.0}, "disk", CheckState.WARN),
    "a clock of long ago": ({"wall": 0.0}, "clock", CheckState.FAIL),
    "a file server with another clock": ({"apart_s": -30.0}, "clock", CheckState.WARN),
    "more slots than cores": ({"wanted": RequestedSlots("cpu", 8)}, "processors", CheckState.WARN),
    "a control group of half a core": ({"cpus": 0.5}, "processors", CheckState.WARN),
    "little memory": ({"available": GIB}, "memory", CheckState.WARN),
    "few open files": ({"open_files": 256}, "open files", CheckState.FAIL),
    "rather few open files": ({"open_files": 1024}, "open files", CheckState.WARN),
    "no shared memory": ({"shared": None}, "/dev/shm", CheckState.WARN),
    "no loopback": ({"loopback": "127.0.0.1: refused"}, "loopback", CheckState.FAIL),
    "threads that spin": ({"environment": {"OMP_WAIT_POLICY": "active"}}, "threads", CheckState.WARN),
    "too many threads": ({"environment": {"OMP_NUM_THREADS": "64"}}, "threads", CheckState.WARN),
    "SGLang that is named and absent": ({"sglang": (None, None, "there is no such Python")}, "SGLang", CheckState.FAIL),
    "a broken SGLang": ({"sglang": ("/p", None)}, "SGLang", CheckState.FAIL),
    "vLLM of a version that is not supported": (
        {"vllm": (None, None, "vLLM 0.9.0 is installed in /p, and gcore supports only 0.32.*")},
        "vLLM",
        CheckState.FAIL,
    ),
    "another SGLang": ({"sglang": ("/p", "0.4.0")}, "SGLang", CheckState.WARN),
    "a worker that failed": ({"workers": {"rollout-1": "failed"}}, "workers", CheckState.WARN),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_part_is_named_with_a_fix_and_no_other_part_is(case: str) -> None:
    seen, name, state = BROKEN[case]
    bad = [check for check in all_checks(**seen) if check.state is not CheckState.OK]
    assert (name, state) in [(check.name, check.state) for check in bad]
    assert all(check.seen and check.fix for check in bad)
    others = {check.name for check in bad} - {name}
    assert others <= ({"FSDP2"} if name == "torch" else set())


async def test_no_etcd_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_etcd() -> EtcdBinary:
        raise EtcdNotFound("no etcd is to be found")

    monkeypatch.setattr("gcore.store.etcd.find_etcd", find_etcd)
    (check,) = await try_etcd(FakeClock())
    assert (check.name, check.state, check.seen) == ("etcd", CheckState.FAIL, "no etcd is to be found")
    assert check.fix


async def test_an_etcd_that_does_not_start_is_a_failure_with_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(*_: object, **__: object) -> None:
        raise EtcdFailed("etcd exited", fix="Look into its log")

    monkeypatch.setattr("gcore.store.etcd.find_etcd", lambda: EtcdBinary(Path("/e")))
    monkeypatch.setattr("gcore.store.etcd.EtcdBinary.version", lambda binary: "3.5.21")
    monkeypatch.setattr("gcore.store.etcd.LocalEtcd.start", start)
    found, starts = await try_etcd(FakeClock())
    assert (found.state, found.seen) == (CheckState.OK, "3.5.21 at /e")
    assert (starts.name, starts.state, starts.seen) == (
        "etcd starts",
        CheckState.FAIL,
        "etcd exited: Look into its log",
    )


def test_a_home_that_cannot_be_written_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    checks = {check.name: check for check in inspect_home(tmp_path, FakeClock(wall=1.9e9))}
    assert checks["home"].state is CheckState.FAIL
    assert checks["home"].seen == f"{tmp_path}: Read-only file system"
    assert checks["clock"].state is CheckState.OK


def test_an_optional_hub_client_that_is_absent_is_no_fault() -> None:
    checks = list(judge.check_packages([PackageFacts("modelscope-hub", None, needed_for="modelscope")]))
    assert [check.state for check in checks] == [CheckState.OK]


def test_gpus_that_are_there_satisfy_who_asks_for_them() -> None:
    def states(devices: list[str]) -> list[CheckState]:
        probe = {**PROBE, "cuda": "13.0", "devices": devices}
        return [check.state for check in judge.check_torch(probe, CUDA)]

    assert states(["H200", "H200"]) == [CheckState.OK, CheckState.OK]
    assert states(["H200"]) == [CheckState.OK, CheckState.FAIL]


def test_the_probe_s_words_are_read_past_its_libraries_chatter() -> None:
    out = 'warming up\n[1, 2]\n{"torch": "2.13.0", "cuda": null, "devices": ["H200"]}\n{"deepspeed": "0.19.8"}\nbye\n'
    told = {"torch": "2.13.0", "cuda": None, "devices": ["H200"], "deepspeed": "0.19.8"}
    assert parse_probe(out, "a warning", 0) == told


def test_a_probe_that_died_leaves_its_last_words() -> None:
    probe = parse_probe('{"torch": "2.13.0", "cuda": null, "devices": []}\n', "Traceback\nImportError: no gloo\n\n", 1)
    assert probe == {"torch": "2.13.0", "cuda": None, "devices": [], "error": "ImportError: no gloo"}
    assert parse_probe("", "", -9)["error"] == "exited with -9"


def test_a_home_that_cannot_be_looked_at_is_a_verdict_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert inspect_home(tmp_path / ("n" * 300), FakeClock())[0].seen.endswith(": File name too long")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert inspect_home(Path(".gcore"), FakeClock())[0].seen.endswith(": No such file or directory")
    found = SGLANG.find(environ={})  # not every machine has one
    assert found is None or found.is_absolute()


def test_packages_for_the_simulator_are_not_required_on_nodes() -> None:
    (check,) = judge.check_packages([PackageFacts("matplotlib", None, needed_for="simulate")])
    assert (
        check.seen
        == "not installed; only `run.plot()` in Python and the plots of make bench-placement need it (simulate)"
    )
    (check,) = judge.check_packages([PackageFacts("numba", None, needed_for="simulate")])
    assert check.seen == "not installed; it makes gcore simulate a hundred times as fast (simulate)"
    (check,) = judge.check_packages([PackageFacts("torch", None, needed_for="train")])
    assert "nodes with workers need it" in check.seen

"""The checks of `gcore doctor`: pure functions from facts to a graded result with advice.

`fail`: gcore does not work on this machine, or not with the requested options. `warn`: gcore works, but slower or only for some jobs.
`commands/doctor` collects the facts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from gcore.engines.environments import EngineEnvironment


class CheckState(StrEnum):
    """The result of a check. WARN: gcore works, but slower or only for some jobs. FAIL: gcore does not work here."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


OK, WARN, FAIL = CheckState.OK, CheckState.WARN, CheckState.FAIL


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `seen`: what was found; `fix`: what to do, empty if nothing."""

    name: str
    state: CheckState
    seen: str
    fix: str = ""


class PackageFacts(NamedTuple):
    """A package that gcore requires. `installed`: its version, None if missing. `wanted`: the required versions;
    `fits`: whether `installed` is one of them. `pinned`: the tested version, if known."""

    name: str
    installed: str | None
    wanted: str = ""
    fits: bool = True
    pinned: str | None = None
    needed_for: str = ""
    """The extra that requires it; empty: gcore itself requires it."""


class RequestedSlots(NamedTuple):
    """The slots that the user wants on this machine. `kind` is cpu or cuda."""

    kind: str
    slots: int


PYTHON = (3, 11)

SYNC_SLOW_MS = 50.0
"""If synced writes take longer, etcd loses its leader."""

GIB = 1 << 30
DISK_FAIL, DISK_WARN = GIB, 10 * GIB
SHARED_WARN = 256 << 20
FILES_FAIL, FILES_WARN = 1024, 4096

SLOT_BYTES = GIB
"""Memory of the engine and the train rank of one CPU slot, with a small model."""

CLOCK_OLD = 1_750_000_000
"""An earlier wall clock is wrong; certificates then fail to verify."""

CLOCK_APART_S = 2.0

FOR_WHAT = {
    "numba": "it makes gcore simulate a hundred times as fast",
    "matplotlib": "only `run.plot()` in Python and the plots of make bench-placement need it",
}
"""The uses of optional packages, by package name. No node of a cluster needs these packages."""

DAMAGED_ETCD = ((3, 5, 0), (3, 5, 2))
"""First and last etcd version that can lose data in a crash."""


def grade(name: str, seen: str, *grades: tuple[bool, CheckState, str]) -> Check:
    """Grade a finding. Each of `grades` is (condition, state, advice); the first whose condition is true counts, or
    else the state is ok."""
    return next((Check(name, state, seen, fix) for holds, state, fix in grades if holds), Check(name, OK, seen))


def check_python(version: tuple[int, int, int]) -> Check:
    """Check the version of the Python interpreter."""
    return grade("Python", ".".join(map(str, version)), (version[:2] < PYTHON, FAIL, "Use Python 3.11 or newer"))


def check_packages(found: Sequence[PackageFacts]) -> Iterator[Check]:
    """Check the packages: one result for each that is missing or has a wrong version, or a single one if there is none."""
    bad = [check for package in found if (check := _package(package)) is not None]
    if not bad:
        pinned = sum(package.pinned is not None for package in found)
        pins = f", {pinned} of them at the pinned version" if pinned else "; pinned versions are not known here"
        yield Check("packages", OK, f"{len(found)} packages meet the requirements{pins}")
    yield from bad


def _package(package: PackageFacts) -> Check | None:
    name = f"package {package.name}"
    extra = f"`pip install 'gcore[{package.needed_for}]'`" if package.needed_for else "`pip install gcore`"
    if package.installed is None:
        if package.needed_for == "modelscope":
            return None  # Only ms:// models need it, and their error says so.
        who = FOR_WHAT.get(package.name, "nodes with workers need it")
        use = f"; {who} ({package.needed_for})" if package.needed_for else ""
        return Check(name, WARN if package.needed_for else FAIL, f"not installed{use}", f"Install it: {extra}")
    if not package.fits:
        return Check(name, FAIL, f"{package.installed}, but gcore requires {package.wanted}", f"Run {extra}")
    if package.pinned is not None and package.pinned != package.installed:
        fix = "Install the tested version: make setup, or pip install -c constraints/cpu.txt"
        return Check(name, WARN, f"{package.installed}, tested with {package.pinned}", fix)
    return None


def check_torch(probe: Mapping[str, Any], wanted: RequestedSlots) -> Iterator[Check]:
    """Check torch and the devices that it sees. `probe`: facts that the self-test in a subprocess printed
    (`gcore.train.rank.selftest`)."""
    if not probe.get("torch"):
        yield Check("torch", FAIL, probe.get("error") or "cannot be imported", "Install gcore[train,engine]")
        return
    cuda = probe.get("cuda")
    yield Check("torch", OK, f"{probe['torch']}, {f'CUDA {cuda}' if cuda else 'CPU build'}")
    devices = list(map(str, probe.get("devices") or ()))
    seen = ", ".join(devices) or "no GPU"
    if wanted.kind == "cuda" and len(devices) < wanted.slots:
        fix = "Use --slots cpu:N" if not devices else f"Use at most --slots cuda:{len(devices)}"
        if not cuda:
            fix += ", or install a CUDA build of torch (constraints/cuda.txt)"
        yield Check("devices", FAIL, f"{seen}; --slots requests {wanted.slots} GPUs", fix)
    else:
        yield Check("devices", OK, seen)


def check_backends(probe: Mapping[str, Any]) -> Iterator[Check]:
    """Check each train backend with one optimizer update on one rank. `probe` as in `check_torch`."""
    version, error = probe.get("deepspeed"), probe.get("error")
    why = f"failed: {error}" if error else "failed"
    if not probe.get("fsdp2"):
        yield Check("FSDP2", FAIL, f"an update on gloo {why}", "Install the pinned torch (constraints/cpu.txt)")
        return
    yield Check("FSDP2", OK, "an update on gloo succeeded")
    if "deepspeed" in probe:
        yield Check("DeepSpeed", OK, f"{version}; an update on gloo succeeded")
        return
    fix = (
        "Run `DS_ACCELERATOR=cpu pip install --no-build-isolation deepspeed`, or set train.backend: fsdp2 in each spec"
    )
    yield Check("DeepSpeed", WARN, f"cannot be imported: {error}" if error else "cannot be imported", fix)


def check_etcd(path: str, version: str) -> Check:
    """Warn of an etcd version that can lose data. `path`: that of the binary."""
    parts = version.split("-")[0].split(".")
    number = tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()
    seen = f"{version or 'version unknown'} at {path}"
    if DAMAGED_ETCD[0] <= number <= DAMAGED_ETCD[1]:
        fix = "Sufficient for tests; to keep data, install etcd 3.5.3 or newer on PATH"
        return Check("etcd", WARN, f"{seen}; 3.5.0 to 3.5.2 can lose data in a crash", fix)
    return Check("etcd", OK, seen)


def check_home(path: Path, free: int, sync_ms: float) -> Iterator[Check]:
    """Check that a writable folder can hold a cluster's state. `sync_ms`: time of a small synced write."""
    yield grade(
        "home",
        f"{path} is writable, {_size(free)} free",
        (free < DISK_FAIL, FAIL, "Free disk space: a checkpoint is three times the size of the model in float32"),
        (free < DISK_WARN, WARN, "Enough for small models: a checkpoint is three times the size of the model"),
    )
    slow = sync_ms > SYNC_SLOW_MS
    seen = f"a synced write takes {sync_ms:.{0 if slow else 1}f} ms"
    yield grade("disk", seen, (slow, WARN, "etcd needs fast synced writes: put --home on a local disk"))


def check_clock(wall: float, path: Path, apart_s: float) -> Check:
    """Check the wall clock, which certificates depend on. `apart_s`: seconds by which a new file in `path` is dated later."""
    if wall < CLOCK_OLD:
        return Check(
            "clock", FAIL, "the clock of this machine is years behind", "Set the clock; no certificate verifies"
        )
    if abs(apart_s) > CLOCK_APART_S:
        seen = f"new files in {path} differ from the clock by {apart_s:+.1f} s"
        return Check("clock", WARN, seen, "Synchronize this machine and the file server with the same time server")
    return Check("clock", OK, "plausible, and file times agree with it")


def check_cores(cpus: float, cores: int, wanted: RequestedSlots) -> Check:
    """Compare the cores with the requested slots. `cpus`: cores that this process may use, by affinity and cgroup
    quota; `cores`: all."""
    seen = f"{cpus:g} of {cores} cores are usable"
    if wanted.kind == "cpu" and wanted.slots > cpus:
        fix = f"Use --slots cpu:{max(1, int(cpus))}: workers that share a core are slower"
        return Check("processors", WARN, f"{seen}; --slots requests {wanted.slots}", fix)
    return Check("processors", OK, f"{seen}; --slots {wanted.kind}:{wanted.slots}")


def check_memory(available: int, total: int, wanted: RequestedSlots) -> Check:
    """Check whether free memory suffices for the requested slots with a small model. `available`, `total`: bytes."""
    needed = wanted.slots * SLOT_BYTES if wanted.kind == "cpu" else SLOT_BYTES
    fix = f"An engine and a train rank need about 1 GiB plus the model: free {_size(needed)}, or use fewer slots"
    return grade("memory", f"{_size(available)} of {_size(total)} are free", (available < needed, WARN, fix))


def check_open_files(limit: int) -> Check:
    """Check the limit of open files of this process."""
    return grade(
        "open files",
        f"limit {limit}",
        (limit < FILES_FAIL, FAIL, "Raise it: ulimit -n 65536, or LimitNOFILE of the service"),
        (limit < FILES_WARN, WARN, "Enough here; hundreds of requests in flight need more: ulimit -n 65536"),
    )


def check_shared_memory(size: int | None, wanted: RequestedSlots) -> Check:
    """Check shared memory. `size`: bytes of /dev/shm; None: it does not exist."""
    if size is None:
        return Check("/dev/shm", WARN, "does not exist", "Mount a tmpfs there; NCCL and SGLang pass tensors through it")
    fix = "Give the container more (docker run --shm-size 8g); NCCL and SGLang pass tensors through it"
    return grade("/dev/shm", _size(size), (wanted.kind == "cuda" and size < SHARED_WARN, WARN, fix))


def check_loopback(problem: str) -> Check:
    """Check connections on 127.0.0.1. `problem`: why one failed; empty: it succeeded."""
    fix = "gcore's processes communicate over 127.0.0.1: bring the interface lo up, and allow it in the firewall"
    return grade("loopback", problem or "a test connection succeeded", (bool(problem), FAIL, fix))


def check_threads(environment: Mapping[str, str], cpus: float) -> Check:
    """Check for settings that make waiting threads spin. gcore overrides them for its workers; other programs would take the workers' cores."""
    odd = []
    if environment.get("OMP_WAIT_POLICY", "").upper() == "ACTIVE":
        odd.append("OMP_WAIT_POLICY=ACTIVE")
    if environment.get("KMP_BLOCKTIME", "").lower() == "infinite":
        odd.append("KMP_BLOCKTIME=infinite")
    if environment.get("GOMP_SPINCOUNT", "0").lower() not in ("", "0"):
        odd.append(f"GOMP_SPINCOUNT={environment['GOMP_SPINCOUNT']}")
    many = environment.get("OMP_NUM_THREADS", "")
    if many.isdigit() and int(many) > max(1, cpus):
        odd.append(f"OMP_NUM_THREADS={many} on {cpus:g} cores")
    fix = "gcore overrides these for its workers; unset them for other programs on this machine"
    return grade("threads", ", ".join(odd) or "no setting makes threads spin", (bool(odd), WARN, fix))


def check_environment(
    environment: EngineEnvironment, python: str | None, version: str | None, error: str = ""
) -> Check:
    """Check the environment of an engine, which only specs that name the engine need.

    `python`: its interpreter; None: no environment. `version`: of the engine; None: not installed. `error`: why the given
    interpreter cannot be used.
    """
    name, make = environment.name, f"make {environment.engine}-setup"
    if error:
        fix = f"Correct or unset {environment.option} or {environment.variable}; `{make}` creates an environment"
        return Check(name, FAIL, error, fix)
    if python is None:
        return Check(name, OK, f"none; only rollout.engine: {environment.engine} needs it")
    if version is None:
        return Check(name, FAIL, f"{python} reports no {name} version", f"Reinstall it: {make}")
    if version != environment.tested:
        return Check(
            name, WARN, f"{version} in {python}, tested with {environment.tested}", "Test it before you use it"
        )
    return Check(name, OK, f"{version} in {python}")


def check_workers(states: Mapping[str, str]) -> Check:
    """Check the workers of the local cluster. `states`: the state of each worker, by its name."""
    failed = sorted(instance for instance, state in states.items() if state == "failed")
    if failed:
        fix = "See their logs in the run folder; the controllers start replacements"
        return Check("workers", WARN, f"failed: {', '.join(failed)}", fix)
    counts = [f"{list(states.values()).count(state)} {state}" for state in sorted(set(states.values()))]
    return Check("workers", OK, ", ".join(counts) or "none")


def _size(amount: int) -> str:
    return f"{amount / GIB:.1f} GiB" if amount >= GIB else f"{amount / (1 << 20):.0f} MiB"

"""The checks of `gcore doctor`: functions from what was seen to a verdict with advice.

`fail`: gcore will not work here, or not as asked. `warn`: it works, but worse than it could, or only for some jobs.
`commands/doctor` looks at the machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple


class CheckState(StrEnum):
    """A verdict."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


OK, WARN, FAIL = CheckState.OK, CheckState.WARN, CheckState.FAIL


@dataclass(frozen=True, slots=True)
class Check:
    """`seen`: what is there; `fix`: what to do about it, empty if nothing."""

    name: str
    state: CheckState
    seen: str
    fix: str = ""


class PackageFacts(NamedTuple):
    """An installed package. `wanted`: what gcore asks for; `pinned`: what it was tested with, if that is known here."""

    name: str
    installed: str | None
    wanted: str = ""
    fits: bool = True
    pinned: str | None = None
    needed_for: str = ""
    """The extra that brings it; empty: nothing works without."""


class RequestedSlots(NamedTuple):
    """What is to run here. `kind` is cpu or cuda."""

    kind: str
    slots: int


PYTHON = (3, 11)

SYNC_SLOW_MS = 50.0
"""A write that takes longer to reach the disk makes etcd lose its leader."""

GIB = 1 << 30
DISK_FAIL, DISK_WARN = GIB, 10 * GIB
SHARED_WARN = 256 << 20
FILES_FAIL, FILES_WARN = 1024, 4096

SLOT_BYTES = GIB
"""What the engine and the rank of one CPU slot take, with a small model."""

CLOCK_OLD = 1_750_000_000
"""A wall clock before this is wrong, and certificates do not verify."""

CLOCK_APART_S = 2.0
SGLANG_TESTED = "0.5.23"

FOR_WHAT = {
    "numba": "gcore simulate is a hundred times as fast with it",
    "matplotlib": "only the plots of make bench-placement need it",
}
"""Of packages that no node needs, what does."""

DAMAGED_ETCD = ((3, 5, 0), (3, 5, 2))
"""From and to which version etcd could lose data on a crash."""


def grade(name: str, seen: str, *grades: tuple[bool, CheckState, str]) -> Check:
    """The check with the state and the advice of the first of `grades` whose condition holds; ok if none does."""
    return next((Check(name, state, seen, fix) for holds, state, fix in grades if holds), Check(name, OK, seen))


def check_python(version: tuple[int, int, int]) -> Check:
    """The interpreter."""
    return grade("Python", ".".join(map(str, version)), (version[:2] < PYTHON, FAIL, "Use Python 3.11 or newer"))


def check_packages(found: Sequence[PackageFacts]) -> Iterator[Check]:
    """One line for what is as it should be, and one for each package that is not."""
    bad = [check for package in found if (check := _package(package)) is not None]
    if not bad:
        pinned = sum(package.pinned is not None for package in found)
        pins = f", {pinned} of them as pinned" if pinned else "; no pins are at hand to compare with"
        yield Check("packages", OK, f"{len(found)} as gcore asks for{pins}")
    yield from bad


def _package(package: PackageFacts) -> Check | None:
    name = f"package {package.name}"
    extra = f"pip install 'gcore[{package.needed_for}]'" if package.needed_for else "pip install gcore"
    if package.installed is None:
        if package.needed_for == "modelscope":
            return None  # only for models of ms://, which says so itself
        who = FOR_WHAT.get(package.name, "nodes with workers need it")
        use = f"; {who} ({package.needed_for})" if package.needed_for else ""
        return Check(name, WARN if package.needed_for else FAIL, f"not installed{use}", f"Install it: {extra}")
    if not package.fits:
        return Check(name, FAIL, f"{package.installed}, and gcore asks for {package.wanted}", f"Run {extra}")
    if package.pinned is not None and package.pinned != package.installed:
        fix = "Install what was tested: make setup, or pip install -c constraints/cpu.txt"
        return Check(name, WARN, f"{package.installed}, tested with {package.pinned}", fix)
    return None


def check_torch(probe: Mapping[str, Any], wanted: RequestedSlots) -> Iterator[Check]:
    """torch, and the devices that it sees. `probe`: what `gcore.train.rank.selftest` told, and under `error` its last words."""
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
        yield Check("devices", FAIL, f"{seen}; --slots asks for {wanted.slots} GPUs", fix)
    else:
        yield Check("devices", OK, seen)


def check_deepspeed(probe: Mapping[str, Any]) -> Check:
    """DeepSpeed, by an update of a world of one rank. `probe` as in `check_torch`."""
    version, error = probe.get("deepspeed"), probe.get("error")
    if "deepspeed" in probe:
        return Check("DeepSpeed", OK, f"{version} makes an update on gloo")
    fix = "Install gcore[train] with DS_ACCELERATOR=cpu pip install --no-build-isolation deepspeed"
    return Check("DeepSpeed", FAIL, f"cannot be imported: {error}" if error else "cannot be imported", fix)


def check_etcd(path: str, version: str) -> Check:
    """The binary."""
    parts = version.split("-")[0].split(".")
    number = tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()
    seen = f"{version or 'version unknown'} at {path}"
    if DAMAGED_ETCD[0] <= number <= DAMAGED_ETCD[1]:
        fix = "Good for a laptop; for anything to keep install etcd 3.5.3 or newer on PATH"
        return Check("etcd", WARN, f"{seen}; 3.5.0 to 3.5.2 can lose data in a crash", fix)
    return Check("etcd", OK, seen)


def check_home(path: Path, free: int, sync_ms: float) -> Iterator[Check]:
    """Whether a cluster can keep its state in a folder that can be written to. `sync_ms`: of a small write until it is on the disk."""
    yield grade(
        "home",
        f"{path} is writable, {_size(free)} free",
        (free < DISK_FAIL, FAIL, "Make room: checkpoints are three times the model in float32"),
        (free < DISK_WARN, WARN, "Enough for small models; checkpoints are three times the model"),
    )
    slow = sync_ms > SYNC_SLOW_MS
    seen = f"a write takes {sync_ms:.{0 if slow else 1}f} ms to reach it"
    yield grade("disk", seen, (slow, WARN, "etcd needs quick syncs: put --home on a local disk"))


def check_clock(wall: float, path: Path, apart_s: float) -> Check:
    """Wall clocks: only shown to people, and certificates hang on them. `apart_s`: by which a new file in `path` is dated later."""
    if wall < CLOCK_OLD:
        return Check("clock", FAIL, "the machine's clock is years behind", "Set it; no certificate verifies")
    if abs(apart_s) > CLOCK_APART_S:
        seen = f"files in {path} are dated {apart_s:+.1f} s apart"
        return Check("clock", WARN, seen, "Have machine and file server follow one time server")
    return Check("clock", OK, "plausible, and the disk agrees")


def check_cores(cpus: float, cores: int, wanted: RequestedSlots) -> Check:
    """Cores against slots. `cpus`: those this process may use, after affinity and the control group's quota."""
    seen = f"{cpus:g} of {cores} cores may be used"
    if wanted.kind == "cpu" and wanted.slots > cpus:
        fix = f"Use --slots cpu:{max(1, int(cpus))}: workers that share a core take turns, and all are slower"
        return Check("processors", WARN, f"{seen}; --slots asks for {wanted.slots}", fix)
    return Check("processors", OK, f"{seen}; --slots {wanted.kind}:{wanted.slots}")


def check_memory(available: int, total: int, wanted: RequestedSlots) -> Check:
    """Memory against slots, for a small model; nobody can say it for a large one without the spec."""
    needed = wanted.slots * SLOT_BYTES if wanted.kind == "cpu" else SLOT_BYTES
    fix = f"An engine and a rank take about 1 GiB beside the model: free {_size(needed)}, or use fewer slots"
    return grade("memory", f"{_size(available)} of {_size(total)} are free", (available < needed, WARN, fix))


def check_open_files(limit: int) -> Check:
    """How many this process may open."""
    return grade(
        "open files",
        f"{limit} may be open",
        (limit < FILES_FAIL, FAIL, "Raise it: ulimit -n 65536, or LimitNOFILE of the service"),
        (limit < FILES_WARN, WARN, "Enough here; hundreds of requests in flight need more: ulimit -n 65536"),
    )


def check_shared_memory(size: int | None, wanted: RequestedSlots) -> Check:
    """`size`: of /dev/shm, in bytes; None: there is none."""
    if size is None:
        return Check("/dev/shm", WARN, "there is none", "Mount a tmpfs there; NCCL and SGLang pass tensors by it")
    fix = "Give the container more (docker run --shm-size 8g); NCCL and SGLang pass tensors by it"
    return grade("/dev/shm", _size(size), (wanted.kind == "cuda" and size < SHARED_WARN, WARN, fix))


def check_loopback(problem: str) -> Check:
    """`problem`: why a connection on 127.0.0.1 cannot be made; empty: it can."""
    fix = "gcore's processes talk over 127.0.0.1: bring the interface lo up, and let no firewall between"
    return grade("loopback", problem or "ports are free and answer", (bool(problem), FAIL, fix))


def check_threads(environment: Mapping[str, str], cpus: float) -> Check:
    """Settings that make waiting threads spin. gcore sets its workers' own; whatever else runs here takes their cores."""
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
    fix = "gcore's workers get settings of their own; unset these for what runs beside them"
    return grade("threads", ", ".join(odd) or "nothing that makes threads spin", (bool(odd), WARN, fix))


def check_sglang(python: str | None, version: str | None, error: str = "") -> Check:
    """The environment of SGLang, which is needed for `rollout.engine: sglang` alone."""
    if error:
        return Check("SGLang", FAIL, error, "Correct or unset what names it; `make sglang-setup` makes one")
    if python is None:
        return Check("SGLang", OK, "none; only rollout.engine: sglang needs it")
    if version is None:
        return Check("SGLang", FAIL, f"{python} cannot tell its version", "Install it again: make sglang-setup")
    if version != SGLANG_TESTED:
        return Check("SGLang", WARN, f"{version} in {python}, tested with {SGLANG_TESTED}", "Try before you rely")
    return Check("SGLang", OK, f"{version} in {python}")


def check_workers(states: Mapping[str, str]) -> Check:
    """Of the cluster that is up in the home, by instance."""
    failed = sorted(instance for instance, state in states.items() if state == "failed")
    if failed:
        fix = "See their logs in the run's folder; the controllers start others"
        return Check("workers", WARN, f"failed: {', '.join(failed)}", fix)
    counts = [f"{list(states.values()).count(state)} {state}" for state in sorted(set(states.values()))]
    return Check("workers", OK, ", ".join(counts) or "none")


def _size(amount: int) -> str:
    return f"{amount / GIB:.1f} GiB" if amount >= GIB else f"{amount / (1 << 20):.0f} MiB"

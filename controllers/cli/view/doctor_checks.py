"""What `gcore doctor` makes of what it saw: each check a pure function from facts to a verdict with what to do.

`fail` means that gcore will not work here, or not as asked; `warn`, that it will, but worse than it could, or only for
some jobs. Looking is `doctor_facts`' business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

# -------------------- doctor_seen
# What `gcore doctor` saw on this machine, as records: facts without a verdict. `doctor_facts` and `doctor_reach` fill them in,
# `doctor_checks` judges them.


@dataclass(frozen=True, slots=True)
class PackageFacts:
    """An installed package. `wanted`: what gcore asks for; `pinned`: what it was tested with, if that is known here."""

    name: str
    installed: str | None
    wanted: str = ""
    fits: bool = True
    pinned: str | None = None
    needed_for: str = ""
    """The extra that brings it; empty: nothing works without."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What a process that imported torch and DeepSpeed told. `error`: its last words, if it did not get so far."""

    torch: str | None = None
    cuda: str | None = None
    """The CUDA that torch was built for; None: a CPU build."""
    devices: tuple[str, ...] = ()
    deepspeed: str | None = None
    started: bool = False
    """Whether a model of one rank made an update on gloo."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class EtcdTry:
    """An etcd that was started on a fresh folder for a moment."""

    path: str = ""
    version: str = ""
    answered_s: float | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Sizes in bytes. `cpus`: cores this process may use, after affinity and the control group's quota."""

    cpus: float
    cores: int
    memory: int
    available: int
    open_files: int
    loopback: str = ""
    """Why a connection on 127.0.0.1 cannot be made; empty: it can."""
    shared: int | None = None
    """Size of /dev/shm."""
    wall: float = 0.0
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class HomeFacts:
    """The folder of a cluster, or where it would be."""

    path: Path
    free: int = 0
    error: str = ""
    sync_ms: float = 0.0
    """Median time of a small write until it is on the disk."""
    clock_apart_s: float = 0.0
    """The disk's clock (a file server may have its own) against this machine's."""


@dataclass(frozen=True, slots=True)
class RequestedSlots:
    """What is to run here. `kind` is cpu or cuda."""

    kind: str
    slots: int


@dataclass(frozen=True, slots=True)
class ServerProbe:
    """Whether a server answers. `problem` empty: it does."""

    name: str
    where: str
    problem: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """What is up in the home."""

    answers: Sequence[ServerProbe] = ()
    workers: Mapping[str, str] = field(default_factory=dict)
    """Instance and state."""


PYTHON = (3, 11)

SYNC_SLOW_MS = 50.0
"""A write that takes longer to reach the disk makes etcd lose its leader."""

DISK_FAIL, DISK_WARN = 1 << 30, 10 << 30
SHARED_WARN = 256 << 20
FILES_FAIL, FILES_WARN = 1024, 4096

SLOT_BYTES = 1 << 30
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


class CheckState(StrEnum):
    """A verdict."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """`seen`: what is there; `fix`: what to do about it, empty if nothing."""

    name: str
    state: CheckState
    seen: str
    fix: str = ""


def check_python(version: tuple[int, int, int]) -> Check:
    """The interpreter."""
    text = ".".join(map(str, version))
    if version[:2] < PYTHON:
        return Check("Python", CheckState.FAIL, text, "Use Python 3.11 or newer")
    return Check("Python", CheckState.OK, text)


def check_packages(found: Sequence[PackageFacts]) -> Iterator[Check]:
    """One line for what is as it should be, and one for each package that is not."""
    bad = [check for package in found if (check := _package(package)) is not None]
    if not bad:
        yield Check("packages", CheckState.OK, f"{len(found)} as gcore asks for" + _pins(found))
    yield from bad


def _package(package: PackageFacts) -> Check | None:
    name = f"package {package.name}"
    extra = f"pip install 'gcore[{package.needed_for}]'" if package.needed_for else "pip install gcore"
    if package.installed is None:
        if package.needed_for == "modelscope":
            return None  # only for models of ms://, which says so itself
        state = CheckState.WARN if package.needed_for else CheckState.FAIL
        who = FOR_WHAT.get(package.name, "nodes with workers need it")
        use = f"; {who} ({package.needed_for})" if package.needed_for else ""
        return Check(name, state, f"not installed{use}", f"Install it: {extra}")
    if not package.fits:
        return Check(name, CheckState.FAIL, f"{package.installed}, and gcore asks for {package.wanted}", f"Run {extra}")
    if package.pinned is not None and package.pinned != package.installed:
        return Check(
            name,
            CheckState.WARN,
            f"{package.installed}, tested with {package.pinned}",
            "Install what was tested: make setup, or pip install -c constraints/cpu.txt",
        )
    return None


def _pins(found: Sequence[PackageFacts]) -> str:
    pinned = sum(package.pinned is not None for package in found)
    return f", {pinned} of them as pinned" if pinned else "; no pins are at hand to compare with"


def check_torch(probe: Probe, wanted: RequestedSlots) -> Iterator[Check]:
    """torch, and the devices that it sees."""
    if probe.torch is None:
        yield Check("torch", CheckState.FAIL, probe.error or "cannot be imported", "Install gcore[train,engine]")
        return
    build = f"CUDA {probe.cuda}" if probe.cuda else "CPU build"
    yield Check("torch", CheckState.OK, f"{probe.torch}, {build}")
    seen = ", ".join(probe.devices) or "no GPU"
    if wanted.kind == "cuda" and len(probe.devices) < wanted.slots:
        fix = "Use --slots cpu:N" if not probe.devices else f"Use at most --slots cuda:{len(probe.devices)}"
        if not probe.cuda:
            fix += ", or install a CUDA build of torch (constraints/cuda.txt)"
        yield Check("devices", CheckState.FAIL, f"{seen}; --slots asks for {wanted.slots} GPUs", fix)
    else:
        yield Check("devices", CheckState.OK, seen)


def check_deepspeed(probe: Probe) -> Check:
    """DeepSpeed, by an update of a world of one rank."""
    if probe.started:
        return Check("DeepSpeed", CheckState.OK, f"{probe.deepspeed} makes an update on gloo")
    seen = f"{probe.deepspeed} does not start" if probe.deepspeed else "cannot be imported"
    fix = "Install gcore[train] with DS_ACCELERATOR=cpu pip install --no-build-isolation deepspeed"
    return Check("DeepSpeed", CheckState.FAIL, f"{seen}: {probe.error}" if probe.error else seen, fix)


def check_etcd(tried: EtcdTry) -> Iterator[Check]:
    """The binary, and whether it serves."""
    if not tried.path:
        fix = "Put an `etcd` binary on PATH, or install gcore[local]; a cluster with --etcd-endpoints needs none here"
        yield Check("etcd", CheckState.FAIL, tried.error or "not found", fix)
        return
    seen = f"{tried.version or 'version unknown'} at {tried.path}"
    if DAMAGED_ETCD[0] <= _numbers(tried.version) <= DAMAGED_ETCD[1]:
        fix = "Good for a laptop; for anything to keep install etcd 3.5.3 or newer on PATH"
        yield Check("etcd", CheckState.WARN, f"{seen}; 3.5.0 to 3.5.2 can lose data in a crash", fix)
    else:
        yield Check("etcd", CheckState.OK, seen)
    if tried.answered_s is None:
        yield Check("etcd starts", CheckState.FAIL, tried.error or "it does not answer", "Look at what it said")
    else:
        yield Check("etcd starts", CheckState.OK, f"answers after {tried.answered_s:.1f} s")


def check_home(seen: HomeFacts) -> Iterator[Check]:
    """Whether a cluster can keep its state there."""
    if seen.error:
        yield Check("home", CheckState.FAIL, f"{seen.path}: {seen.error}", "Choose another --home, or make it writable")
        return
    free = f"{seen.path} is writable, {_size(seen.free)} free"
    if seen.free < DISK_FAIL:
        yield Check("home", CheckState.FAIL, free, "Make room: checkpoints are three times the model in float32")
    elif seen.free < DISK_WARN:
        yield Check("home", CheckState.WARN, free, "Enough for small models; checkpoints are three times the model")
    else:
        yield Check("home", CheckState.OK, free)
    if seen.sync_ms > SYNC_SLOW_MS:
        fix = "etcd needs quick syncs: put --home on a local disk"
        yield Check("disk", CheckState.WARN, f"a write takes {seen.sync_ms:.0f} ms to reach it", fix)
    else:
        yield Check("disk", CheckState.OK, f"a write takes {seen.sync_ms:.1f} ms to reach it")


def check_clock(machine: MachineFacts, where: HomeFacts) -> Check:
    """Wall clocks: only shown to people, and certificates hang on them."""
    if machine.wall < CLOCK_OLD:
        return Check("clock", CheckState.FAIL, "the machine's clock is years behind", "Set it; no certificate verifies")
    if abs(where.clock_apart_s) > CLOCK_APART_S:
        seen = f"files in {where.path} are dated {where.clock_apart_s:+.1f} s apart"
        return Check("clock", CheckState.WARN, seen, "Have machine and file server follow one time server")
    return Check("clock", CheckState.OK, "plausible, and the disk agrees")


def check_cores(machine: MachineFacts, wanted: RequestedSlots) -> Check:
    """Cores against slots."""
    seen = f"{machine.cpus:g} of {machine.cores} cores may be used"
    if wanted.kind == "cpu" and wanted.slots > machine.cpus:
        fix = f"Use --slots cpu:{max(1, int(machine.cpus))}: workers that share a core take turns, and all are slower"
        return Check("processors", CheckState.WARN, f"{seen}; --slots asks for {wanted.slots}", fix)
    return Check("processors", CheckState.OK, f"{seen}; --slots {wanted.kind}:{wanted.slots}")


def check_memory(machine: MachineFacts, wanted: RequestedSlots) -> Check:
    """Memory against slots, for a small model; nobody can say it for a large one without the spec."""
    seen = f"{_size(machine.available)} of {_size(machine.memory)} are free"
    needed = wanted.slots * SLOT_BYTES if wanted.kind == "cpu" else SLOT_BYTES
    if machine.available < needed:
        fix = f"An engine and a rank take about 1 GiB beside the model: free {_size(needed)}, or use fewer slots"
        return Check("memory", CheckState.WARN, seen, fix)
    return Check("memory", CheckState.OK, seen)


def check_limits(machine: MachineFacts, wanted: RequestedSlots) -> Iterator[Check]:
    """Open files, shared memory, loopback."""
    seen = f"{machine.open_files} may be open"
    if machine.open_files < FILES_FAIL:
        yield Check("open files", CheckState.FAIL, seen, "Raise it: ulimit -n 65536, or LimitNOFILE of the service")
    elif machine.open_files < FILES_WARN:
        fix = "Enough here; hundreds of requests in flight need more: ulimit -n 65536"
        yield Check("open files", CheckState.WARN, seen, fix)
    else:
        yield Check("open files", CheckState.OK, seen)
    if machine.shared is None:
        yield Check(
            "/dev/shm", CheckState.WARN, "there is none", "Mount a tmpfs there; NCCL and SGLang pass tensors by it"
        )
    elif wanted.kind == "cuda" and machine.shared < SHARED_WARN:
        fix = "Give the container more (docker run --shm-size 8g); NCCL and SGLang pass tensors by it"
        yield Check("/dev/shm", CheckState.WARN, _size(machine.shared), fix)
    else:
        yield Check("/dev/shm", CheckState.OK, _size(machine.shared))
    if machine.loopback:
        fix = "gcore's processes talk over 127.0.0.1: bring the interface lo up, and let no firewall between"
        yield Check("loopback", CheckState.FAIL, machine.loopback, fix)
    else:
        yield Check("loopback", CheckState.OK, "ports are free and answer")


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
    if odd:
        fix = "gcore's workers get settings of their own; unset these for what runs beside them"
        return Check("threads", CheckState.WARN, ", ".join(odd), fix)
    return Check("threads", CheckState.OK, "nothing that makes threads spin")


def check_sglang(python: str | None, version: str | None, error: str = "") -> Check:
    """The environment of SGLang, which is needed for `rollout.engine: sglang` alone."""
    if error:
        return Check("SGLang", CheckState.FAIL, error, "Correct or unset what names it; `make sglang-setup` makes one")
    if python is None:
        return Check("SGLang", CheckState.OK, "none; only rollout.engine: sglang needs it")
    if version is None:
        return Check(
            "SGLang", CheckState.FAIL, f"{python} cannot tell its version", "Install it again: make sglang-setup"
        )
    if version != SGLANG_TESTED:
        return Check(
            "SGLang", CheckState.WARN, f"{version} in {python}, tested with {SGLANG_TESTED}", "Try before you rely"
        )
    return Check("SGLang", CheckState.OK, f"{version} in {python}")


def check_hubs(answers: Sequence[ServerProbe]) -> Iterator[Check]:
    """Only asked for with --online; a model in a folder needs none."""
    for answer in answers:
        state = CheckState.WARN if answer.problem else CheckState.OK
        yield Check(answer.name, state, answer.problem or f"{answer.where} answers", answer.fix)


def check_cluster(seen: RunningCluster | None) -> Iterator[Check]:
    """What is up in the home."""
    if seen is None:
        yield Check("cluster", CheckState.OK, "none is up in this home")
        return
    for answer in seen.answers:
        state = CheckState.FAIL if answer.problem else CheckState.OK
        yield Check(answer.name, state, answer.problem or f"serves at {answer.where}", answer.fix)
    failed = sorted(instance for instance, state in seen.workers.items() if state == "failed")
    if failed:
        fix = "See their logs in the run's folder; the controllers start others"
        yield Check("workers", CheckState.WARN, f"failed: {', '.join(failed)}", fix)
    else:
        states = sorted(set(seen.workers.values()))
        counts = ", ".join(f"{list(seen.workers.values()).count(s)} {s}" for s in states)
        yield Check("workers", CheckState.OK, counts or "none")


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("-")[0].split(".")
    return tuple(int(part) for part in parts) if all(p.isdigit() for p in parts) else ()


def _size(amount: int) -> str:
    return f"{amount / (1 << 30):.1f} GiB" if amount >= 1 << 30 else f"{amount / (1 << 20):.0f} MiB"

"""What `gcore doctor` saw on this machine, as records: facts without a verdict. `doctor_facts` and `doctor_reach` fill them in,
`doctor_checks` judges them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Package:
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
class Machine:
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
class Home:
    """The folder of a cluster, or where it would be."""

    path: Path
    free: int = 0
    error: str = ""
    sync_ms: float = 0.0
    """Median time of a small write until it is on the disk."""
    clock_apart_s: float = 0.0
    """The disk's clock (a file server may have its own) against this machine's."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to run here. `kind` is cpu or cuda."""

    kind: str
    slots: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether a server answers. `problem` empty: it does."""

    name: str
    where: str
    problem: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Cluster:
    """What is up in the home."""

    answers: Sequence[Answer] = ()
    workers: Mapping[str, str] = field(default_factory=dict)
    """Instance and state."""

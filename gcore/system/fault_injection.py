"""Fault points: named places in the code where a test ends or stops the process, or loses an answer, at that very moment.

    point(TxnKind.COMMIT, "before")        the transaction is about to be sent
    point(TxnKind.COMMIT, "after")         it was answered, and nobody here has heard of it yet

Faults at random moments find what nobody thought of; faults at these points hit, every time, the few moments on which the
step protocol's promises turn. A point is armed by a file: the folder is named by `GCORE_FAULT_POINTS` in the environment, the
file is called `commit.before` and says what happens there and at which pass of a process (`kill`, `stop 3`, `lose`). Whoever
comes to the point takes the file away by renaming it to `commit.before.fired.PID`, which only one process can do: so a
fault happens once in a cluster, and the process that is started again does not meet it anew.

Without the variable, which nothing but a test sets, a point is one comparison. Nothing here decides anything; no code may
behave differently for what `point` does, since in production it does nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Literal

from gcore.errors import StoreUnavailable, UsageError

VARIABLE = "GCORE_FAULT_POINTS"
When = Literal["before", "after"]


class FaultPoint(StrEnum):
    """Points that are no transaction of the ledger; those are named by their `TxnKind`."""

    NODE = "node"
    """A daemon's registration."""
    WORKER = "worker"
    """A worker's registration, with a rank's claim."""
    RENDEZVOUS = "rendezvous"
    """Rank 0's supervisor tells the other ranks of the world where they meet."""
    FEED = "feed"
    """A controller pushes groups to a rank."""
    APPLY = "apply"
    """A controller tells a rank to train."""
    PUBLISH = "publish"
    """A controller brings an engine to new weights."""
    FORGET = "forget"
    """The files of checkpoints that the store no longer names are deleted."""
    STEP = "step"
    """A rank trains on a sealed step: before it shows the others what it applies, after its last update."""
    STAGE = "stage"
    """A rank writes weights for the engines."""
    CHECKPOINT = "checkpoint"
    """A rank writes a checkpoint."""
    RECEIPT = "receipt"
    """A rank writes down what it trained on."""
    COPIES = "copies"
    """A rank leaves copies of its state in the memory of nodes."""


class MoveFaultPoint(StrEnum):
    """Points within a move of the placement, and where a slot's memory changes hands."""

    SLEEP = "sleep"
    """A controller has an engine give its memory back."""
    WAKE = "wake"
    """A controller gives an engine its memory again."""
    RELEASE = "release"
    """A rank gives memory back."""
    RESTORE = "restore"
    """A rank takes its memory again."""


class FaultEffect(StrEnum):
    """What happens at an armed point."""

    KILL = "kill"
    """SIGKILL to this process."""
    STOP = "stop"
    """SIGSTOP to this process; it goes on when somebody sends SIGCONT."""
    LOSE = "lose"
    """As if the store's answer had not come. Only around transactions."""


def fault_folder(environment: Mapping[str, str]) -> Path | None:
    """Where armed points stand; None: nowhere, which is so in production."""
    named = environment.get(VARIABLE)
    return Path(named) if named else None


_FOLDER = fault_folder(os.environ)

_passes: dict[str, int] = {}
"""How often this process has come to a point while it was armed."""


def fault_point(what: str, when: When) -> None:
    """Do what the point is armed for, if it is. Raises StoreUnavailable where an answer is to be lost."""
    if _FOLDER is not None:
        _come_to(_FOLDER, f"{what}.{when}")


def _come_to(folder: Path, name: str) -> None:
    armed = folder / name
    try:
        words = armed.read_text(encoding="utf-8").split()
    except FileNotFoundError:
        return
    deed, at_pass = _read(words, armed)
    _passes[name] = _passes.get(name, 0) + 1
    if _passes[name] < at_pass:
        return
    try:
        armed.rename(folder / f"{name}.fired.{os.getpid()}")
    except FileNotFoundError:
        return  # another process was first: the fault is its
    _passes.pop(name)
    if deed is FaultEffect.LOSE:
        raise StoreUnavailable(f"the answer is lost at fault point {name}", where=VARIABLE)
    os.kill(os.getpid(), signal.SIGKILL if deed is FaultEffect.KILL else signal.SIGSTOP)


def _read(words: list[str], where: Path) -> tuple[FaultEffect, int]:
    """Raises UsageError: a test that arms a point wrongly must not pass for want of a fault."""
    deeds = {str(deed): deed for deed in FaultEffect}
    if not 1 <= len(words) <= 2 or words[0] not in deeds or not all(word.isdigit() for word in words[1:]):
        raise UsageError(
            f"a fault point is armed with {' '.join(words)!r}",
            where=str(where),
            fix="Write kill, stop or lose, and at which pass",
        )
    return deeds[words[0]], int(words[1]) if words[1:] else 1

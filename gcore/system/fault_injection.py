"""Fault points: named places in the code where a test kills or stops the process, or loses a response.

    fault_point(TxnKind.COMMIT, "before")        the transaction is about to be sent
    fault_point(TxnKind.COMMIT, "after")         the response arrived, but this process has not used it yet

Faults at random moments find unexpected problems; faults at these points reliably hit the few moments on which the step protocol's guarantees
depend. A file arms a point. Its folder is `GCORE_FAULT_POINTS` in the environment. The file is named like `commit.before`. It contains the
effect and optionally how often a process must reach the point before it happens: `kill`, `lose`, `stop 3` (at the third time). The process that reaches the point renames the file to
`commit.before.fired.PID`, which only one process can do. So a fault happens once in a cluster, and the restarted process does not hit it again.

Without the variable, which only tests set, a point costs one comparison. Code must not depend on the effect of a point, because in production it
has none.
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
    """Places where a fault can be armed, besides the ledger's transactions (those are named by their `TxnKind`)."""

    NODE = "node"
    """A daemon registers its node in the store."""
    WORKER = "worker"
    """A worker registers in the store, and a train worker claims its rank."""
    RENDEZVOUS = "rendezvous"
    """Rank 0's supervisor publishes the address at which the world's ranks connect."""
    FEED = "feed"
    """A controller pushes groups to a rank."""
    APPLY = "apply"
    """A controller asks a rank to train."""
    PUBLISH = "publish"
    """A controller loads new weights into an engine."""
    FORGET = "forget"
    """Files of checkpoints that the store no longer names are deleted."""
    STEP = "step"
    """A rank trains on a sealed step: before it announces what it applies, and after its last update."""
    STAGE = "stage"
    """A rank writes weights for the engines."""
    CHECKPOINT = "checkpoint"
    """A rank writes a checkpoint."""
    RECEIPT = "receipt"
    """A rank writes its receipt."""
    COPIES = "copies"
    """A rank writes in-memory replicas of its state."""


class MoveFaultPoint(StrEnum):
    """Fault points within a placement change, and where engine and rank exchange a slot's memory."""

    SLEEP = "sleep"
    """A controller has an engine release its memory."""
    WAKE = "wake"
    """A controller has an engine take its memory again."""
    RELEASE = "release"
    """A rank releases its memory."""
    RESTORE = "restore"
    """A rank takes its memory again."""


class FaultEffect(StrEnum):
    """The effect of an armed point."""

    KILL = "kill"
    """SIGKILL to this process."""
    STOP = "stop"
    """SIGSTOP to this process; it continues after SIGCONT."""
    LOSE = "lose"
    """As if the store's response were lost. Only around transactions."""


def fault_folder(environment: Mapping[str, str]) -> Path | None:
    """Return the folder with the files that arm fault points; None in production."""
    named = environment.get(VARIABLE)
    return Path(named) if named else None


_FOLDER = fault_folder(os.environ)

_passes: dict[str, int] = {}
"""How often this process has reached each armed point, by name (`commit.before`)."""


def fault_point(what: str, when: When) -> None:
    """Trigger the armed effect, if a test has armed the point `what` at this time. Does nothing in production.

    Raises StoreUnavailable for the effect LOSE.
    """
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
        return  # another process took the fault
    _passes.pop(name)
    if deed is FaultEffect.LOSE:
        raise StoreUnavailable(f"the response was lost at fault point {name}", where=VARIABLE)
    os.kill(os.getpid(), signal.SIGKILL if deed is FaultEffect.KILL else signal.SIGSTOP)


def _read(words: list[str], where: Path) -> tuple[FaultEffect, int]:
    """Return the effect and the pass (from 1) at which it happens, from the words of the file that arms a point.

    Raises UsageError for other words, so that a test with a wrong file cannot pass without a fault.
    """
    deeds = {str(deed): deed for deed in FaultEffect}
    if not 1 <= len(words) <= 2 or words[0] not in deeds or not all(word.isdigit() for word in words[1:]):
        raise UsageError(
            f"a fault point is armed with the invalid text {' '.join(words)!r}",
            where=str(where),
            fix="Write kill, stop or lose, and optionally the pass",
        )
    return deeds[words[0]], int(words[1]) if words[1:] else 1

"""What a step cannot go on without is written again until the run's folder takes it: staged weights, receipts.

A full disk must not cost a world, whose next one would meet the same disk. All ranks try together, since gathering weights is
a collective, and all know why a try failed. It is shown meanwhile, and bounded: a folder that takes nothing for as long as
the watchdog gives a rank ends the world, in a sentence that names it. Anything but a failing disk is raised at once.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from gcore.atomic import DiskFull
from gcore.errors import GcoreError

log = logging.getLogger("gcore.train")

AGAIN_S = 5.0
"""After a try that failed, until the next."""
TELL_S = 0.5
"""Between two signs of life meanwhile."""

Highest = Callable[[Sequence[float]], list[float]]
"""Each number's largest over the ranks; a collective."""


class NotTaken(GcoreError):
    """The run's folder did not take what training cannot go on without."""


class Insisting:
    """Of one rank. `show` hears what is tried again, and nothing when it is over; `limit_s`: so long is waited at most."""

    def __init__(self, show: Callable[[str], None], limit_s: float, again_s: float = AGAIN_S) -> None:
        self._show = show
        self._limit_s = limit_s
        self._again_s = again_s

    def until_taken(
        self, what: str, where: Path, attempt: Callable[[], None], highest: Highest, tell: Callable[[], None]
    ) -> None:
        """Have `attempt` made by all ranks until none of them fails. A collective. Raises NotTaken, on every rank.

        `attempt` raises OSError or DiskFull when it has taken part in all that is collective about it.
        """
        waited = 0.0
        while True:
            (number,) = highest([float(_tried(attempt, where))])
            if not number:
                if waited:
                    self._show("")
                return
            why = f"{what} cannot be written ({os.strerror(int(number))})"
            if waited >= self._limit_s:
                raise NotTaken(
                    f"{why}, and could not be for {waited:.0f} s",
                    where=str(where),
                    fix="Free some space on this disk, or mend it; train.watchdog_s says how long is waited",
                )
            self._show(f"{why}: {where}; it is tried again for {self._limit_s:.0f} s")
            self._pause(tell)
            waited += self._again_s

    def _pause(self, tell: Callable[[], None]) -> None:
        left = self._again_s
        while left > 0:
            threading.Event().wait(min(left, TELL_S))  # the thread's own sleep: nobody sets it
            left -= TELL_S
            tell()


def _tried(attempt: Callable[[], None], where: Path) -> int:
    """The number of the error that the disk gave, or 0."""
    try:
        attempt()
    except (OSError, DiskFull) as error:
        log.warning("%s: %s", where, error)
        cause = error.__cause__ if isinstance(error, DiskFull) else error
        return (cause.errno if isinstance(cause, OSError) else None) or errno.EIO
    return 0

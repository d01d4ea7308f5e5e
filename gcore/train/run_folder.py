"""The run's folder, known again: so that a rank does not go on in another one that has come to stand at its path.

Where a mount is gone, or somebody moved the folder away, whoever writes "makes what lacks" and goes on in an empty folder:
checkpoints that nobody else sees, receipts that the audit misses. So before each write it is looked whether the folder is
the one that was found first.
"""

from __future__ import annotations

import errno
from pathlib import Path


class RunFolder:
    """Of one rank. Any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: tuple[int, int] | None = None
        self.check()

    def check(self) -> None:
        """Raises OSError if it is not the folder any more that was there the first time; before that there may be none."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            if self._known is None:
                return
            raise
        if self._known is None:
            self._known = (found.st_dev, found.st_ino)
        elif self._known != (found.st_dev, found.st_ino):
            raise OSError(errno.ESTALE, "another folder stands where the run's was", str(self.path))

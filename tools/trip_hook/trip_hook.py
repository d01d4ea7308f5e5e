"""Record which files of the product are entered by calls, in every Python process that has this folder on its path.

`sitecustomize` imports this module at the start of each process. `GCORE_TRIPS` names a folder, in which the process writes
its command line and its parent (`PID.json`). On each SIGUSR1 it writes the files entered since the last one (`PID-N.json`). Its main
thread is profiled from the first signal on, so that imports of large libraries take no longer; with `GCORE_TRIPS_WHOLE` from its start
to its end. Calls during the import of a module do not count. This module uses the standard library only.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
from contextvars import ContextVar
from types import CodeType, FrameType
from typing import Any

FOLDER, WHOLE = "GCORE_TRIPS", "GCORE_TRIPS_WHOLE"
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
PACKAGES = ("gcore", "placement", "controllers")
GENERATED = os.path.join("gcore", "api", "v1")

in_flow: ContextVar[bool] = ContextVar("in_flow", default=False)
"""Whether a call is made by a job's flow, or by a task that the flow began."""


class Entered:
    """The files of the product that this process enters."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._dumps = 0
        self._files: dict[CodeType, str | None] = {}
        self._thread = threading.local()
        self._seen: dict[bool, set[str]] = {True: set(), False: set()}

    def start(self, *, whole: bool) -> None:
        """Profile all threads that are started, and this one at once (`whole`) or from the first SIGUSR1 on."""
        signal.signal(signal.SIGUSR1, self.dump)
        signal.siginterrupt(signal.SIGUSR1, False)
        threading.setprofile(self.hook)
        self._write(f"{os.getpid()}.json", {"argv": sys.orig_argv, "parent": os.getppid()})
        if whole:
            atexit.register(self.dump)
            sys.setprofile(self.hook)

    def hook(self, frame: FrameType, event: str, _: Any) -> None:
        """Of `sys.setprofile`."""
        if event == "call":
            code = frame.f_code
            if code.co_name == "<module>":
                self._thread.importing = getattr(self._thread, "importing", 0) + 1
                return
            try:
                name = self._files[code]
            except KeyError:
                name = self._files[code] = file_of(code)
            if name is not None and not getattr(self._thread, "importing", 0):
                self._seen[in_flow.get()].add(name)
        elif event == "return" and frame.f_code.co_name == "<module>":
            self._thread.importing = max(0, getattr(self._thread, "importing", 0) - 1)

    def dump(self, *_: object) -> None:
        """Write the entered files, and start again."""
        seen, self._seen = self._seen, {True: set(), False: set()}
        self._dumps += 1
        self._write(f"{os.getpid()}-{self._dumps}.json", {"flow": sorted(seen[True]), "others": sorted(seen[False])})
        sys.setprofile(self.hook)

    def _write(self, name: str, tree: Any) -> None:
        file = os.path.join(self._folder, name)
        with open(f"{file}.part", "w") as part:
            json.dump(tree, part)
        os.replace(f"{file}.part", file)


def file_of(code: CodeType) -> str | None:
    """The product's file of a code object, relative to the repository; None: it is none."""
    if not code.co_filename.startswith(ROOT):
        return None
    name = code.co_filename[len(ROOT) :]
    return name if name.split(os.sep, 1)[0] in PACKAGES and not name.startswith(GENERATED) else None


def start() -> None:
    """Start in this process if `GCORE_TRIPS` is set."""
    if folder := os.environ.get(FOLDER):
        Entered(folder).start(whole=WHOLE in os.environ)

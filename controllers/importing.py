"""Imports what only jobs need, when it is needed: off the event loop, and one such import at a time.

Two threads that import packages which need one another's parts wait for each other, and Python ends one of them with an error: a request
that comes when the first job is found would be refused for it.
"""

from __future__ import annotations

import asyncio
import importlib
import threading

_ONE = threading.Lock()


async def imported(module: str) -> None:
    """It is there when this returns."""
    await asyncio.to_thread(_import, module)


def _import(module: str) -> None:
    with _ONE:
        importlib.import_module(module)

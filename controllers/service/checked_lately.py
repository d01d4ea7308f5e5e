"""What a controller has found out about a spec's files a moment ago, so that a sweep of hundreds of jobs over the same data and model is
checked once and not hundreds of times.

A finding counts for another submission whose spec is the same but for its name, its namespace and its place among jobs, as long as none of
the files that it names has changed, and for `KEPT_S` at most: code of plug-ins, which nobody watches, may have. Only what was found in
order is kept; several who ask at once wait for one check. Models of hubs are looked up each time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controllers.service.allowed import paths_of
from controllers.service.grounds import Use
from gcore.clock import Clock
from gcore.config import JobSpec
from gcore.ledger.facts import ModelConfigs
from gcore.models.names import hub_model

KEPT_S = 30.0
MOST = 8
"""Findings that are kept at once."""
MOST_FILES = 256
"""Of a folder; one with more is not watched, and what names it is checked each time."""
OF_NO_FILE = ("name", "namespace", "scheduling")
"""Sections of a spec that no check of its files depends on."""


@dataclass(frozen=True, slots=True)
class Found:
    """What of a check goes into a job's record."""

    prompts: int
    data_digest: str
    held_out_digest: str
    model_revision: str
    remote_code: tuple[str, ...]
    judge_revisions: dict[str, str]
    attention_equals_at: int
    models: ModelConfigs | None


class CheckedLately:
    """Of one controller. One event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[str, tuple[float, asyncio.Future[Found]]] = {}

    async def found(self, spec: JobSpec, check: Callable[[], Awaitable[Found]]) -> Found:
        """What `check` finds, or found lately. Raises what it raises."""
        key = await asyncio.to_thread(key_of, spec)
        if key is None:
            return await check()
        now = self._clock.monotonic()
        self._known = {
            name: (at, one) for name, (at, one) in self._known.items() if now - at < KEPT_S or not one.done()
        }
        if key not in self._known:
            while len(self._known) >= MOST:
                del self._known[min(self._known, key=lambda name: self._known[name][0])]
            self._known[key] = now, asyncio.ensure_future(check())
        at, finding = self._known[key]
        try:
            # Whoever gives up asking takes it from nobody else.
            return await asyncio.shield(finding)
        except BaseException:
            if finding.done() and self._known.get(key) == (at, finding):
                del self._known[key]
            raise


def key_of(spec: JobSpec) -> str | None:
    """Names the spec and its files as they are now; None where they cannot be named. Blocks on the disk."""
    tree = {name: value for name, value in spec.model_dump(mode="json").items() if name not in OF_NO_FILE}
    # What is written to changes with each job, and nothing in it is checked.
    paths = sorted({named.path for named in paths_of(spec) if named.use is not Use.WRITE})
    if any(hub_model(path) is not None for path in paths):
        return None
    try:
        return json.dumps([tree, [_file(Path(path)) for path in paths]], sort_keys=True)
    except (OSError, ValueError):
        return None


def _file(path: Path) -> list[Any]:
    """What changes when the file does, or anything in the folder. Raises OSError, ValueError for what is too large to be watched."""
    status = path.stat()
    found: list[Any] = [str(path), status.st_mtime_ns, status.st_size, status.st_ino]
    if path.is_dir():
        entries = sorted(path.iterdir())
        if len(entries) > MOST_FILES:
            raise ValueError(f"{path} has {len(entries)} files")
        found += [[entry.name, *entry.stat()[6:9], entry.stat().st_mtime_ns] for entry in entries]
    return found

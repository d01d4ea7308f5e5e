"""Keeps samples of each step in the run's folder: those that this controller holds, of groups that were sealed.

What is sealed is picked up when the seal is heard of, before anything of it is dropped, and written once the batch is READY
or committed, in a thread. Of a batch that was given up nothing is written. What cannot be written is told, once until it can
be again, and missing: samples are for people, and a step must not wait for them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from controllers.changes import Changes
from controllers.holdings import Holdings
from controllers.recording import Warn
from gcore.config import JobSpec
from gcore.errors import GcoreError
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records import Seal, SealState
from gcore.prompts.source import OpenSource
from gcore.prompts.stream import PromptStream
from gcore.samples import folder
from gcore.samples.choice import chosen
from gcore.samples.records import KeptGroup, kept_group
from gcore.types import Group, Token, Version

log = logging.getLogger(__name__)

MOST_WAITING = 4
"""Steps whose samples wait to be written; when the disk is slower than the steps, the oldest are left out."""


@dataclass(frozen=True, slots=True)
class _Held:
    group: Group
    digest: str
    source: OpenSource
    entry: int


class SampleKeeper:
    """One controller's, of one job."""

    def __init__(self, me: str, warn: Warn) -> None:
        self._me = me
        self._warn = warn
        self._in_trouble = False
        self._stream: PromptStream | None = None
        self._spec: JobSpec | None = None
        self._held: dict[Token, tuple[_Held, ...]] = {}
        self._ready: deque[tuple[Version, tuple[_Held, ...]]] = deque(maxlen=MOST_WAITING)
        self._changes = Changes()
        self._run_dir = Path()
        self.has_room = True
        """Whether the run's folder is to take more samples."""

    def open(self, spec: JobSpec, stream: PromptStream, run_dir: Path) -> None:
        """From here on prompts can be looked up."""
        self._spec, self._stream, self._run_dir = spec, stream, run_dir

    def note(self, mirror: JobMirror, holdings: Holdings) -> None:
        """Called at each change, before what is terminal leaves the holdings."""
        if self._spec is None or mirror.head is None:
            return
        for stored in mirror.seals.values():
            seal = stored.record
            sealed = seal.state in (SealState.SEALED, SealState.READY)
            if self.has_room and sealed and seal.token not in self._held and self._spec.samples.due(seal.step):
                self._held[seal.token] = tuple(self._mine(seal, holdings))
        if not self._held:
            return
        head = mirror.head.record
        ready = {s.record.token for s in mirror.seals.values() if s.record.state is SealState.READY}
        ready |= {s.record.token for s in mirror.log.values() if s.record.token is not None}
        for token in list(self._held):
            if token in ready:
                held = self._held[token]
                if held:
                    self._ready.append((Version(token.lineage, token.step), held))
                    self._changes.notify()
                self._held[token] = ()  # written once
            if token.lineage != head.lineage or token.step <= head.step:
                del self._held[token]

    async def run(self) -> None:
        """Write what is ready, for ever."""
        while True:
            await self.write()
            await self._changes.wait()

    async def write(self) -> None:
        """Write what is ready now."""
        while self._ready:
            version, held = self._ready.popleft()
            try:
                await asyncio.to_thread(self._write, version, held)
            except OSError as error:
                told = f"the samples of step {version.step} are not kept: {error}"
                log.warning("%s", told)
                if not self._in_trouble:
                    self._in_trouble = True
                    await self._warn("samples", told)
            else:
                self._in_trouble = False

    def _mine(self, seal: Seal, holdings: Holdings) -> list[_Held]:
        assert self._stream is not None
        assert self._spec is not None
        found = []
        for sealed in chosen(seal, self._spec.samples.groups):
            group = holdings.group(sealed.digest) if sealed.holder == self._me else None
            if group is not None:
                found.append(_Held(group, sealed.digest, *self._stream.found(sealed.ref)))
        return found

    def _write(self, version: Version, held: tuple[_Held, ...]) -> None:
        assert self._spec is not None
        characters, keep = self._spec.samples.characters, self._spec.samples.keep
        folder.write(self._run_dir, version, self._me, [self._kept(one, characters) for one in held])
        folder.prune(self._run_dir, keep)

    def _kept(self, held: _Held, characters: int) -> KeptGroup:
        try:
            prompt = held.source.unfiltered(held.entry, held.group.ref)
            text, answer = prompt.text, prompt.fields.get(held.source.source.reward.answer, "")
        except GcoreError as error:
            text, answer = f"(the prompt cannot be read: {error})", ""
        return kept_group(held.group, held.digest, text, str(answer), self._me, characters)

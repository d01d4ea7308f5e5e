"""The interface of an engine towards the HTTP routes, and the lock between requests and weight updates.

`ServedEngine` has two implementations: the torch engine, whose model runs in its own thread, and the emulated engine.
The same routes pause them, put them to sleep and update their weights. Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from gcore.engines.request import ABORTED, PauseMode, check_version
from gcore.errors import EngineError
from gcore.rollout.engine_time import EngineTimeSums
from gcore.system.clock import Clock

W = TypeVar("W")


class UpdateLock:
    """Readers-writer lock between requests (readers) and weight updates (writers), without effect in a paused engine.

    As in SGLang, an update that arrives while requests are running waits until they are answered; requests that arrive
    meanwhile wait until the update is done. A paused or sleeping engine is updated at once, so to update at once, pause
    the engine or abort all requests first. `still`: returns whether the engine is paused or asleep now.
    """

    def __init__(self, still: Callable[[], bool]) -> None:
        self._still = still
        self._inside = 0
        self._wanting = 0
        """Number of waiting and running updates; at most one runs."""
        self._moved = asyncio.Event()
        self._one = asyncio.Lock()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Hold the lock while a request runs."""
        while self._wanting:
            await self._moved.wait()
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            self.recheck()

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """Hold the lock while weights change. Only one change at a time: otherwise a slow update could install its
        older weights last.
        """
        async with self._one:
            if self._still():
                yield
                return
            self._wanting += 1
            try:
                while self._inside and not self._still():
                    await self._moved.wait()
                yield
            finally:
                self._wanting -= 1
                self.recheck()

    def recheck(self) -> None:
        """Wake up all waiters to check again whether they may continue. Call it after a pause."""
        self._moved.set()
        self._moved = asyncio.Event()


class EngineState(Protocol):
    """What the HTTP routes read from an engine: from the torch engine's core, or the emulated engine's device."""

    @property
    def version(self) -> str:
        """Version of the served weights."""
        ...

    @property
    def paused(self) -> bool:
        """Whether it generates no tokens until it is resumed."""
        ...

    @property
    def asleep(self) -> frozenset[str]:
        """Names of the memory that is released: "weights", "kv_cache"."""
        ...

    @property
    def running(self) -> int:
        """Number of running sequences."""
        ...

    @property
    def waiting(self) -> int:
        """Number of waiting sequences."""
        ...


class ServedEngine(ABC, Generic[W]):
    """An engine as the HTTP routes use it. `W`: type of weights that were loaded and checked, but are not served yet.

    `description`: facts about the process for `/model_info` and `/server_info`. Its `model_path` is the folder of the
    weights at start; `model_path` of the engine changes with updates. `gate`: lock between requests and updates.
    """

    kind = "this engine"
    alternative = "Ask an SGLang server"
    """Suggestion for requests that this engine refuses."""
    time_scale = 1.0
    """Seconds per unit of `time_sums`."""

    def __init__(self, clock: Clock, state: EngineState, description: dict[str, Any]) -> None:
        self.clock = clock
        self.state = state
        self.model_path = str(description["model_path"])
        self.requests = 0
        self.prompt_tokens = 0
        self.gate = UpdateLock(lambda: state.paused or bool(state.asleep))
        self.flushing = asyncio.Lock()
        """Only one flush request polls the engine at a time."""
        self._description = description
        self._names: set[str] = set()
        """Request IDs (`rid`) of running requests."""

    def describe(self) -> dict[str, Any]:
        """Return the facts about model and process that `/model_info` and `/server_info` report."""
        path = self.model_path
        return {
            **self._description,
            "model_path": path,
            "served_model_name": path,
            "weight_version": self.state.version,
        }

    def check_names(self, names: set[str]) -> None:
        """Raise EngineError if a request with one of these request IDs is running."""
        if taken := self._names & names:
            raise EngineError(
                f"a request with rid {min(taken)!r} is already running", fix="Give each request a unique rid"
            )

    async def update_from_disk(self, path: str, version: str | None, *, flush: bool, abort: bool) -> None:
        """Load the weights of folder `path` and serve them as `version`. Raises EngineError; then nothing has changed.

        `flush`: also drop the KV cache. `abort`: end all requests first instead of waiting for them.
        """
        await self.make_way(version, flush=flush, abort=abort)
        async with self.gate.changing():
            check_version(version, self.state.version)
            staged = await self.stage_weights(Path(path))
            await self.install_weights(staged, version, flush=flush)
        self.model_path = path

    async def make_way(self, version: str | None, *, flush: bool, abort: bool) -> None:
        """Before weights are loaded: abort all requests if `abort`, and check that the update is possible.

        Raises EngineError for an older version, or if `flush` is impossible because paused requests use the cache.
        """
        if abort:
            await self.abort(lambda _: True, "aborted by a weight update")
        state = self.state
        check_version(version, state.version)
        if flush and state.paused and state.running:
            raise EngineError(
                f"cannot flush the cache: {state.running} paused requests still use it",
                fix="Pause with mode retract, or send flush_cache: false",
            )

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether the engine can still respond to requests."""

    @property
    @abstractmethod
    def generated_tokens(self) -> int:
        """Number of tokens generated since the start."""

    @abstractmethod
    def time_sums(self) -> EngineTimeSums:
        """How the time until now was spent (idle, busy, paused and so on), in units of `time_scale` seconds."""

    @abstractmethod
    async def abort(self, unwanted: Callable[[Any], bool], message: str = ABORTED) -> None:
        """End the requests for which `unwanted` is true, with the tokens that they have so far.

        `message`: reported to their clients as the reason.
        """

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Stop generating tokens. `mode`: "abort" running requests, "retract" (preempt) them, or keep them "in_place"."""

    @abstractmethod
    async def resume(self) -> None:
        """Generate tokens again."""

    @abstractmethod
    async def flush(self) -> bool:
        """Drop the KV cache. Returns False, without effect, while requests use it."""

    @abstractmethod
    async def release(self, tags: frozenset[str]) -> None:
        """Release the memory named by `tags` ("weights", "kv_cache"); new requests wait.

        Raises EngineError while requests run.
        """

    @abstractmethod
    async def wake(self, tags: frozenset[str]) -> None:
        """Restore the released memory named by `tags`."""

    @abstractmethod
    async def rename(self, version: str, *, abort: bool) -> None:
        """Change only the version name of the served weights. `abort`: end all requests first.

        Raises EngineError for an older version.
        """

    @abstractmethod
    async def stage_weights(self, folder: Path) -> W:
        """Load the weights of a folder and check that they fit the model, without serving them. Raises EngineError."""

    @abstractmethod
    async def install_weights(self, staged: W, version: str | None, *, flush: bool) -> None:
        """Serve staged weights from the next token on. `version` None: keep the name. `flush`: drop the KV cache."""

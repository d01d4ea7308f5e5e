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
    """Separates requests and weight updates, unless the engine is paused.

    As in SGLang, an update that arrives while requests are running waits until they are answered; requests that arrive
    meanwhile wait until the update is done. To update at once, pause the engine or abort all requests first. A paused
    or sleeping engine is updated at once. `still()`: whether the engine generates no tokens now.
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
        """Hold the lock while weights change: one change at a time, or the older weights of a slow update could be
        installed last."""
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
        """Make waiters check again whether they may continue, for example after a pause."""
        self._moved.set()
        self._moved = asyncio.Event()


class EngineState(Protocol):
    """State of an engine: the torch engine's core, or the emulated engine's device."""

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
        """Released memory, of "weights" and "kv_cache"."""
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
    """An engine behind the routes. `W`: weights that were loaded and checked, but are not served yet.

    `description`: facts about the process for `/model_info` and `/server_info`. Its `model_path` is the folder of the
    served weights, and changes with updates.
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
        """Names of running requests."""

    def describe(self) -> dict[str, Any]:
        """Return facts for `/model_info` and `/server_info`."""
        path = self.model_path
        return {
            **self._description,
            "model_path": path,
            "served_model_name": path,
            "weight_version": self.state.version,
        }

    def check_names(self, names: set[str]) -> None:
        """Raises EngineError if a request with one of these names is running."""
        if taken := self._names & names:
            raise EngineError(
                f"a request with rid {min(taken)!r} is already running", fix="Give each request a unique rid"
            )

    async def update_from_disk(self, path: str, version: str | None, *, flush: bool, abort: bool) -> None:
        """Serve the weights of a folder. Raises EngineError; then nothing has changed."""
        await self.make_way(version, flush=flush, abort=abort)
        async with self.gate.changing():
            check_version(version, self.state.version)
            staged = await self.stage_weights(Path(path))
            await self.install_weights(staged, version, flush=flush)
        self.model_path = path

    async def make_way(self, version: str | None, *, flush: bool, abort: bool) -> None:
        """Prepare an update before weights are loaded. Raises EngineError if the update is not possible."""
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
        """Whether it can still respond."""

    @property
    @abstractmethod
    def generated_tokens(self) -> int:
        """Number of tokens generated since the start."""

    @abstractmethod
    def time_sums(self) -> EngineTimeSums:
        """How the time until now was spent, in seconds of the clock."""

    @abstractmethod
    async def abort(self, unwanted: Callable[[Any], bool], message: str = ABORTED) -> None:
        """End requests now, with the tokens they have. `unwanted` is called with each request's `rid`."""

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Stop generating tokens."""

    @abstractmethod
    async def resume(self) -> None:
        """Generate tokens again."""

    @abstractmethod
    async def flush(self) -> bool:
        """Release the cache's memory; False while requests use it."""

    @abstractmethod
    async def release(self, tags: frozenset[str]) -> None:
        """Release memory; requests wait. Raises EngineError while requests run."""

    @abstractmethod
    async def wake(self, tags: frozenset[str]) -> None:
        """Restore released memory."""

    @abstractmethod
    async def rename(self, version: str, *, abort: bool) -> None:
        """Set the version of the served weights. Raises EngineError for an older one."""

    @abstractmethod
    async def stage_weights(self, folder: Path) -> W:
        """Load and check the weights of a folder. Raises EngineError if they do not fit."""

    @abstractmethod
    async def install_weights(self, staged: W, version: str | None, *, flush: bool) -> None:
        """Serve staged weights from the next token on."""

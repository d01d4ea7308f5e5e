"""Served engine: what the HTTP routes need of any engine, and the lock between requests and weight updates.

`ServedEngine` has two implementations: the torch engine, whose model runs in a thread of its own, and the emulated engine.
Both are paused, put to sleep and given other weights by the same routes. Everything here belongs to the event loop.
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
    """Keeps requests and weight updates apart unless the engine is paused.

    As in SGLang, an update that comes while requests are under way waits until they have their answers; requests that come
    meanwhile wait until it is done. To update at once, pause the engine or abort everything first. An engine that is
    paused or asleep is updated at once, whatever it holds. `still()`: whether the engine makes no tokens now.
    """

    def __init__(self, still: Callable[[], bool]) -> None:
        self._still = still
        self._inside = 0
        self._wanting = 0
        """Updates that wait or are under way; at most one is under way."""
        self._moved = asyncio.Event()
        self._one = asyncio.Lock()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """While a request is under way."""
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
        """While weights are changed: one change at a time, or a slow reader's older weights could be installed last."""
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
        """Let waiters look again whether they may go on, for example after a pause."""
        self._moved.set()
        self._moved = asyncio.Event()


class EngineState(Protocol):
    """What an engine is at: the torch engine's core, or the emulated engine's device."""

    @property
    def version(self) -> str:
        """Name of the served weights."""
        ...

    @property
    def paused(self) -> bool:
        """Whether it makes no tokens until it is resumed."""
        ...

    @property
    def asleep(self) -> frozenset[str]:
        """Memory that was released, of "weights" and "kv_cache"."""
        ...

    @property
    def running(self) -> int:
        """Sequences that are worked on."""
        ...

    @property
    def waiting(self) -> int:
        """Sequences that wait."""
        ...


class ServedEngine(ABC, Generic[W]):
    """An engine behind the routes. `W`: weights that were read and checked, but are not served yet.

    `description`: facts about the process for `/model_info` and `/server_info`; `model_path` among them is the folder whose
    weights are served, and follows updates.
    """

    kind = "this engine"
    alternative = "Ask an SGLang server"
    """Where to send what this engine refuses."""
    time_scale = 1.0
    """Seconds that one second of `time_sums` is."""

    def __init__(self, clock: Clock, state: EngineState, description: dict[str, Any]) -> None:
        self.clock = clock
        self.state = state
        self.model_path = str(description["model_path"])
        self.requests = 0
        self.prompt_tokens = 0
        self.gate = UpdateLock(lambda: state.paused or bool(state.asleep))
        self.flushing = asyncio.Lock()
        """One request to flush polls the engine at a time."""
        self._description = description
        self._names: set[str] = set()
        """Of requests under way."""

    def describe(self) -> dict[str, Any]:
        """Facts for `/model_info` and `/server_info`."""
        path = self.model_path
        return {
            **self._description,
            "model_path": path,
            "served_model_name": path,
            "weight_version": self.state.version,
        }

    def check_names(self, names: set[str]) -> None:
        """Raises EngineError if a request of such a name is under way."""
        if taken := self._names & names:
            raise EngineError(f"a request called {min(taken)!r} is under way", fix="Give each request a rid of its own")

    async def update_from_disk(self, path: str, version: str | None, *, flush: bool, abort: bool) -> None:
        """Serve the weights of a folder. Raises EngineError; then nothing has changed."""
        await self.make_way(version, flush=flush, abort=abort)
        async with self.gate.changing():
            check_version(version, self.state.version)
            staged = await self.stage_weights(Path(path))
            await self.install_weights(staged, version, flush=flush)
        self.model_path = path

    async def make_way(self, version: str | None, *, flush: bool, abort: bool) -> None:
        """Prepare an update before weights are read. Raises EngineError for what will not be possible."""
        if abort:
            await self.abort(lambda _: True, "aborted by a change of weights")
        state = self.state
        check_version(version, state.version)
        if flush and state.paused and state.running:
            raise EngineError(
                f"{state.running} requests stand where they were, and the cache that is to be flushed is theirs",
                fix="Pause with mode retract, or send flush_cache: false",
            )

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it can still answer."""

    @property
    @abstractmethod
    def generated_tokens(self) -> int:
        """Tokens made since the start."""

    @abstractmethod
    def time_sums(self) -> EngineTimeSums:
        """How the time until now was spent, in seconds of the clock."""

    @abstractmethod
    async def abort(self, unwanted: Callable[[Any], bool], message: str = ABORTED) -> None:
        """End requests now, with the tokens they have. `unwanted` sees each request's `rid`."""

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Make no more tokens."""

    @abstractmethod
    async def resume(self) -> None:
        """Make tokens again."""

    @abstractmethod
    async def flush(self) -> bool:
        """Release the cache's memory; False while requests hold it."""

    @abstractmethod
    async def release(self, tags: frozenset[str]) -> None:
        """Release memory; requests wait. Raises EngineError while anything runs."""

    @abstractmethod
    async def wake(self, tags: frozenset[str]) -> None:
        """Take memory again."""

    @abstractmethod
    async def rename(self, version: str, *, abort: bool) -> None:
        """Call the served weights `version`. Raises EngineError for an older one."""

    @abstractmethod
    async def stage_weights(self, folder: Path) -> W:
        """Read and check the weights of a folder. Raises EngineError when they do not fit."""

    @abstractmethod
    async def install_weights(self, staged: W, version: str | None, *, flush: bool) -> None:
        """Serve staged weights from the next token on."""

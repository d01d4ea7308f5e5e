"""What the routes that control an engine need of it, whatever it is that it serves.

A generator's core and a classifier's are told apart by nobody here: both are paused, put to sleep and given other weights
in the same words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar

from gcore.clock import Clock
from gcore.rollout.engine.gate import Gate
from gcore.rollout.engine.weights import Loaded, Staged
from gcore.rollout.metered import Sums

T = TypeVar("T")
PauseMode = Literal["abort", "retract", "in_place"]
ABORTED = "aborted on request"


class Named(Protocol):
    """Something that was asked for, by the client's name for it."""

    @property
    def rid(self) -> str:
        """Its name."""
        ...


class Served(Protocol):
    """A model that serves. But for what is read here, it is the model's thread's."""

    version: str
    paused: bool
    asleep: frozenset[str]

    @property
    def model(self) -> Loaded:
        """What is loaded."""
        ...

    @property
    def running(self) -> int:
        """How many are worked on."""
        ...

    @property
    def waiting(self) -> int:
        """How many wait."""
        ...

    @property
    def generated_tokens(self) -> int:
        """How many tokens were made."""
        ...

    def abort(self, unwanted: Callable[[Any], bool], message: str = ABORTED) -> None:
        """End these now; `unwanted` is asked about each by its name (`Named`)."""

    def abort_all(self, message: str = ABORTED) -> None:
        """End everything now."""

    def pause(self, mode: PauseMode) -> None:
        """Do nothing more."""

    def resume(self) -> None:
        """Go on."""

    def flush(self) -> None:
        """Give the cache back."""

    def check_version(self, version: str | None) -> None:
        """Raises EngineError for a version older than what is served."""

    def change_weights(self, staged: Staged, version: str | None, *, flush: bool, abort: bool) -> None:
        """Serve these weights. Raises EngineError; then nothing has changed."""

    def rename(self, version: str) -> None:
        """Call the served weights so."""

    def release(self, tags: frozenset[str]) -> None:
        """Give memory back. Raises EngineError while anything runs."""

    def wake(self, tags: frozenset[str]) -> None:
        """Take memory again."""


class Thread(Protocol):
    """The model's thread."""

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        ...

    def sums(self) -> Sums:
        """What its time was."""
        ...


class Front(Protocol):
    """What stands between HTTP and the model's thread."""

    clock: Clock
    gate: Gate
    requests: int
    prompt_tokens: int

    @property
    def runner(self) -> Thread:
        """The model's thread."""
        ...

    async def perform(self, action: Callable[[], T]) -> T:
        """Carry out `action` between two steps."""
        ...

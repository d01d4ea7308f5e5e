"""The line to each engine that this controller is responsible for: its client, what is known of it, what is under way there."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

from controllers.owing import Owing
from controllers.pulse import Pulse
from controllers.view import EngineView
from gcore.rollout.client import EngineClient
from gcore.types import Version


@dataclass
class Asked:
    """A request for `count` responses that the engine has. `owing`: what it owes of it; `ended`: the places of those that it has told the
    end of; `taken_back`: when it was told to give it back, so that another can go on with it."""

    count: int
    owing: Owing
    ended: set[int] = field(default_factory=set)
    taken_back: float | None = None

    @property
    def left(self) -> int:
        """Responses that are still to come."""
        return self.count - len(self.ended)


@dataclass
class Line:
    """What is known of one."""

    client: EngineClient
    view: EngineView
    in_flight: int = 0
    """Samples (or scores) asked for and not answered, with those that wait for its weights."""
    owed: float = 0.0
    """The same as what it is taken for: responses, or tokens that are expected."""
    coming: Version | None = None
    """What it is being brought to."""
    pulse: Pulse = field(default_factory=lambda: Pulse(0.0))
    requests: set[asyncio.Task[Any]] = field(default_factory=set)
    """For responses or scores, under way."""
    asked: dict[str, Asked] = field(default_factory=dict)
    """Those for responses, by name, the oldest first."""
    probe: asyncio.Task[None] | None = None
    """The last question how it is."""
    probed: float = 0.0
    """When it was put."""
    shut: float | None = None
    """Since when nothing new goes there, because the plan says that it sleeps."""
    woken: bool = False
    """Whether it has its memory again and has not been brought its weights yet."""
    waking: float = 0.0
    """Since when it is being woken."""

    def take(self, samples: int, owed: float) -> None:
        """A request more; or, with negative numbers, one less."""
        self.in_flight += samples
        # Of tokens that were expected, sums and differences need not come back to nothing.
        self.owed = max(self.owed + owed, 0.0) if self.in_flight else 0.0

    @property
    def busy(self) -> int:
        """Responses (or scores) that it has still to bring."""
        return self.in_flight - sum(len(one.ended) for one in self.asked.values())

    def leave(self) -> None:
        """Whoever waits for its responses goes to another."""
        for request in self.requests:
            request.cancel()

    def distrust(self) -> None:
        """Nothing is known of the engine any more; it is asked, and brought up to date, before it is used again."""
        self.view = replace(self.view, version=None)

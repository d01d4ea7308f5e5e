"""What a pool of rewards keeps of its work: requests, their responses, and the places of its processes. Mutable; no behaviour."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gcore.reward.process import RewardProcess
from gcore.reward.registry import Response
from gcore.reward.scoring import Scored

BATCH_S = 0.02
"""What a batch should take, so that slow responses are spread over the processes."""


@dataclass(eq=False, slots=True)
class Request:
    """Some responses that are scored together."""

    results: list[Scored | None]
    done: asyncio.Future[None]
    reward: int
    missing: int = 0


@dataclass(eq=False, slots=True)
class Call:
    """One response."""

    request: Request
    place: int
    reward: int
    fields: Mapping[str, Any]
    response: Response
    tried: bool = False
    """Whether a process has died with it. It goes first in a fresh one then, and alone."""


@dataclass(eq=False, slots=True)
class Slot:
    """Where a process is, and how long its responses take."""

    process: RewardProcess | None = None
    seconds: float = BATCH_S
    """A moving average, seconds a response; at first, such that it gets one."""

"""Rewards, tried out before there is a job: loaded where they will run, and asked about an empty response.

For code that has no event loop. What cannot be loaded, an option that is misspelt, answers of the wrong kind, isolation that
cannot be had: all of that fails here, not in the first step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from gcore.clock import SystemClock
from gcore.config.spec import RewardSpec, ScoringSpec
from gcore.reward.pool import RewardPool
from gcore.reward.registry import Response
from gcore.reward.scoring import Scored


class RewardTrial:
    """A process with a job's rewards, as a context: entering it loads them. Blocks. Not within an event loop."""

    def __init__(self, rewards: Mapping[str, RewardSpec], scoring: ScoringSpec) -> None:
        """`rewards`: under the source that each is told by. Of `scoring` the limits count; one process is enough."""
        self._pool = RewardPool(rewards, scoring.model_copy(update={"workers": 1}), SystemClock())
        self._runner = asyncio.Runner()

    def __enter__(self) -> RewardTrial:
        """Raises PluginFault for a reward that cannot be had, CannotStart if none can be loaded here."""
        try:
            self._runner.run(self._pool.warm())
        except BaseException:
            self._runner.close()
            raise
        return self

    def score(self, spec: RewardSpec, fields: Mapping[str, Any], response: Response) -> Scored:
        """What one response is worth, or why that cannot be said. Raises SpecError."""
        (result,) = self._runner.run(self._pool.score(spec, fields, (response,)))
        return result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._runner.run(self._pool.close())
        finally:
            self._runner.close()

"""What scores responses for whoever has some: the interface that a controller uses, whichever process does the work.

A whole group is scored at once. A response that cannot be scored does not keep the others from being: each has a result or
an error of its own, in the order of the responses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gcore.config.spec import RewardSpec
from gcore.reward.composed import OpenReward
from gcore.reward.registry import Response, RewardError, RewardResult

Scored = RewardResult | RewardError


class Scorer(Protocol):
    """Scores responses by the rewards it was made for."""

    async def warm(self) -> None:
        """Load them. Raises SpecError for one that cannot be had."""
        ...

    async def score(
        self, spec: RewardSpec, fields: Mapping[str, Any], responses: Sequence[Response]
    ) -> tuple[Scored, ...]:
        """What each of the responses to one prompt is worth, in their order. `fields`: the prompt's entry."""
        ...


class DirectScorer:
    """Scores where it is called, with no bound on time or memory: for tests and small programs, not for a controller."""

    def __init__(self) -> None:
        self._open: list[tuple[RewardSpec, OpenReward]] = []

    async def warm(self) -> None:
        """Nothing to do: a reward is loaded when it is first asked for."""

    async def score(
        self, spec: RewardSpec, fields: Mapping[str, Any], responses: Sequence[Response]
    ) -> tuple[Scored, ...]:
        """As `Scorer`. Raises SpecError for a reward that cannot be had."""
        reward = next((found for known, found in self._open if known == spec), None)
        if reward is None:
            reward = OpenReward.of(spec)
            self._open.append((spec, reward))
        return tuple(scored(reward, response, fields) for response in responses)


def scored(reward: OpenReward, response: Response, fields: Mapping[str, Any]) -> Scored:
    """The reward's result, or its error."""
    try:
        return reward(response, fields)
    except RewardError as error:
        return error

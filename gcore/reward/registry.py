"""What a reward is, and how a job's reward is found by name.

A reward is a plug-in: a function under the entry-point group `gcore.rewards`. It sees one response, the prompt's entry and
the spec's reward section, and returns a number with its parts. It is called on the controller's event loop, so it must be
quick and must not wait. Because it is foreign code, what `find_reward` returns checks each result: a number that is not
finite, a result of another type, or an exception becomes a `RewardError`, with which the prompt ends as failed and the job
goes on.

Rewards that ask a model are not here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gcore.config.spec import RewardSpec
from gcore.errors import GcoreError
from gcore.plugins import PluginKind, find_plugin, sentence_of

REWARDS = PluginKind("reward", "gcore.rewards", "reward.name")
LARGEST = 3.4e38
"""Rewards travel as float32."""


class RewardError(GcoreError):
    """A response could not be scored. Its prompt's outcome is failed, with this as the reason."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The reward of one response, and what it is made of: names and numbers, for people."""

    value: float
    parts: tuple[tuple[str, float], ...] = ()


class Reward(Protocol):
    """Scores one response."""

    def __call__(self, response: str, fields: Mapping[str, Any], spec: RewardSpec) -> RewardResult:
        """`response`: the text without special tokens; `fields`: the prompt's entry. Raises RewardError."""
        ...


def find_reward(name: str) -> Reward:
    """The reward of that entry-point name, its results checked. Raises PluginFault, with the nearest name if there is none."""
    reward: Reward = find_plugin(REWARDS, name)
    return CheckedReward(name, reward)


class CheckedReward:
    """A reward whose every result is checked."""

    def __init__(self, name: str, reward: Reward) -> None:
        self._name = name
        self._reward = reward

    def __call__(self, response: str, fields: Mapping[str, Any], spec: RewardSpec) -> RewardResult:
        """As the reward. Raises RewardError and nothing else."""
        try:
            result = self._reward(response, fields, spec)
        except RewardError:
            raise
        except Exception as error:  # the edge to foreign code: one odd response must not end the controller
            raise RewardError(f"reward {self._name!r} raised {sentence_of(error)}", fix="Correct the reward") from error
        if not isinstance(result, RewardResult):
            raise RewardError(
                f"reward {self._name!r} returned a {type(result).__name__}, not a RewardResult",
                fix="Correct the reward",
            )
        value = self._number("value", result.value)
        return RewardResult(value, tuple((str(part), self._number(str(part), number)) for part, number in result.parts))

    def _number(self, what: str, value: Any) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise RewardError(f"reward {self._name!r} gave {value!r} as {what}", fix="Correct the reward") from error
        if not math.isfinite(number) or abs(number) > LARGEST:
            raise RewardError(
                f"reward {self._name!r} gave {number} as {what}, which is not finite in float32",
                fix="Correct the reward",
            )
        return number

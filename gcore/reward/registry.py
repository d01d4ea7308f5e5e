"""What a reward is, and how a job's reward is found by name.

A reward is a plug-in: a function under the entry-point group `gcore.rewards`. It sees one response, the prompt's entry and
the spec's reward section, and returns a number with its parts. Because it is foreign code, what `find_reward` returns checks
each result: a number that is not finite, a result of another type, or an exception becomes a `RewardError`, with which the
prompt ends as failed and the job goes on. What foreign code may do beyond that (hang, crash, take all memory) is bounded by
the process that it runs in (`gcore.reward.pool`).

Rewards that ask a model are not here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gcore.config.explain import shortened
from gcore.config.reward import LARGEST
from gcore.config.spec import RewardSpec
from gcore.errors import GcoreError
from gcore.plugins import RAISED, PluginKind, find_plugin, sentence_of, trace_of

REWARDS = PluginKind("reward", "gcore.rewards", "reward.name")
MOST_PARTS, LONGEST_PART = 64, 64
"""Parts of a result, and characters of a part's name: they are kept for every response."""


class RewardError(GcoreError):
    """A response could not be scored. Its prompt's outcome is failed, with this as the reason.

    `trace`: the traceback of the plug-in's own code, or empty. It is for the event, not for the reason.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None, trace: str = "") -> None:
        super().__init__(what, where=where, fix=fix)
        self.trace = trace


class Response(str):
    """A response's text, without special tokens, which also knows its length in tokens.

    Rewards are handed one; to those that only want the text it is a string like any other.
    """

    __slots__ = ("environment", "tokens", "truncated")
    tokens: int | None
    """Its length, end token included; None where nobody knows."""
    truncated: bool
    """Whether it was cut off at its longest length."""
    environment: float | None
    """What its environment said that it is worth; None where there is none, or it said nothing."""

    def __new__(
        cls, text: str, tokens: int | None = None, truncated: bool = False, environment: float | None = None
    ) -> Response:
        """`text` with what else is known of it."""
        response = super().__new__(cls, text)
        response.tokens, response.truncated, response.environment = tokens, truncated, environment
        return response


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


def find_reward(name: str) -> CheckedReward:
    """The reward of that entry-point name, its results checked. Raises PluginFault, with the nearest name if there is none."""
    reward: Reward = find_plugin(REWARDS, name)
    return CheckedReward(name, reward)


class CheckedReward:
    """A reward whose every result is checked."""

    def __init__(self, name: str, reward: Reward) -> None:
        self._name = name
        self._reward = reward

    def start(self, spec: RewardSpec) -> None:
        """What the reward wants done once before its first response, if it has a `start` of its own. Raises RewardError."""
        start: Callable[[RewardSpec], object] | None = getattr(self._reward, "start", None)
        if start is None:
            return
        try:
            start(spec)
        except RewardError:
            raise
        except RAISED as error:  # the edge to foreign code
            raise self._raised(error, "while it was started") from error

    def __call__(self, response: str, fields: Mapping[str, Any], spec: RewardSpec) -> RewardResult:
        """As the reward. Raises RewardError and nothing else."""
        try:
            return self._checked(self._reward(response, fields, spec))
        except RewardError:
            raise
        except RAISED as error:  # the edge to foreign code: one odd response or result must not end the process
            raise self._raised(error) from error

    def _checked(self, result: Any) -> RewardResult:
        """What it gave, in gcore's own types. Its numbers, names and sequences may be foreign code too."""
        if not isinstance(result, RewardResult):
            raise RewardError(
                f"reward {self._name!r} returned a {type(result).__name__}, not a RewardResult",
                fix="Correct the reward",
            )
        value = self._number("value", result.value)
        return RewardResult(
            value, tuple((self._part(part), self._number(str(part), n)) for part, n in self._parts(result))
        )

    def _raised(self, error: BaseException, when: str = "") -> RewardError:
        said = " ".join(word for word in (f"reward {self._name!r} raised", sentence_of(error), when) if word)
        return RewardError(said, fix="Correct the reward", trace=trace_of(error))

    def _parts(self, result: RewardResult) -> list[tuple[Any, Any]]:
        try:
            pairs = [(name, number) for name, number in result.parts]
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"reward {self._name!r} gave parts that are no pairs of a name and a number", fix="Correct the reward"
            ) from error
        if len(pairs) > MOST_PARTS:
            raise RewardError(
                f"reward {self._name!r} gave {len(pairs)} parts; at most {MOST_PARTS}", fix="Correct the reward"
            )
        return pairs

    def _part(self, name: Any) -> str:
        text = str(name)
        if len(text) > LONGEST_PART:
            raise RewardError(
                f"reward {self._name!r} gave a part a name of {len(text)} characters; at most {LONGEST_PART}",
                fix="Correct the reward",
            )
        return text

    def _number(self, what: str, value: Any) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            shown = shortened(repr(value))
            raise RewardError(f"reward {self._name!r} gave {shown} as {what}", fix="Correct the reward") from error
        if not math.isfinite(number) or abs(number) > LARGEST:
            raise RewardError(
                f"reward {self._name!r} gave {number} as {what}, which is not finite in float32",
                fix="Correct the reward",
            )
        return number

"""Several rewards as one: a weighted sum, a gate, the smallest.

Every part is computed for every response, also where it cannot change the value any more: the parts are what people look at
to see why a response is worth what it is. A part that cannot score a response makes the whole one that cannot be scored;
nothing is filled in for it. But a judge's part without weight changes no value: where it cannot judge, it is left out. What a part is itself made of stays with it, as "LABEL.NAME".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gcore.config.reward import LARGEST, RewardPart
from gcore.config.spec import RewardSpec
from gcore.plugins import PluginFault
from gcore.reward.registry import CheckedReward, RewardError, RewardResult, find_reward


class OpenReward:
    """A reward of a spec, found and started. `OpenReward.of` makes it."""

    def __init__(self, spec: RewardSpec, parts: tuple[tuple[RewardSpec, CheckedReward], ...]) -> None:
        self._spec = spec
        self._parts = parts

    @classmethod
    def of(cls, spec: RewardSpec) -> OpenReward:
        """Find what the spec names, and start it. Raises SpecError (PluginFault) or RewardError."""
        told = [spec.of_part(part) for part in spec.parts] or [spec]
        found = []
        for number, one in enumerate(told):
            try:
                reward = find_reward(one.name)
            except PluginFault as fault:
                if not spec.parts:
                    raise
                where = f"reward.parts.{number}.name"
                raise PluginFault(fault.what, where=where, fix=fault.fix, trace=fault.trace) from fault
            reward.start(one)
            found.append((one, reward))
        return cls(spec, tuple(found))

    def __call__(self, response: str, fields: Mapping[str, Any]) -> RewardResult:
        """The response's reward and its parts. Raises RewardError."""
        if not self._spec.parts:
            spec, reward = self._parts[0]
            return reward(response, fields, spec)
        return composed(self._spec, [self._scored(number, response, fields) for number in range(len(self._parts))])

    def _scored(self, number: int, response: str, fields: Mapping[str, Any]) -> RewardResult:
        spec, reward = self._parts[number]
        try:
            return reward(response, fields, spec)
        except RewardError as error:
            raise blamed(self._spec.parts[number], error) from error


def blamed(part: RewardPart, error: RewardError) -> RewardError:
    """`error` of a part, which says which."""
    return RewardError(f"part {part.shown_as!r}: {error.what}", fix=error.fix, trace=error.trace)


def is_only_shown(spec: RewardSpec, part: RewardPart) -> bool:
    """Whether it is a judge's part that changes no value, whatever the judge says."""
    return part.judge is not None and part.weight == 0 and spec.compose != "min"


def composed(spec: RewardSpec, results: Sequence[RewardResult | None]) -> RewardResult:
    """What the parts of a reward come to, one result a part; None for one that is only shown, and that there is not.

    Raises RewardError if it is not finite in float32.
    """
    value = _value(spec, [0.0 if result is None else result.value for result in results])
    if not math.isfinite(value) or abs(value) > LARGEST:
        raise RewardError(
            f"the parts of the reward come to {value}, which is not finite in float32", fix="Lower their weights"
        )
    known = [(part.shown_as, one) for part, one in zip(spec.parts, results, strict=True) if one is not None]
    shown = [(label, result.value) for label, result in known]
    inner = [(f"{label}.{name}", number) for label, result in known for name, number in result.parts]
    return RewardResult(value, (*shown, *inner))


def _value(spec: RewardSpec, values: Sequence[float]) -> float:
    weighted = [part.weight * value for part, value in zip(spec.parts, values, strict=True)]
    if spec.compose == "min":
        return min(weighted)
    if spec.compose == "gate":
        return math.fsum(weighted[1:]) if values[0] > 0 else 0.0
    return math.fsum(weighted)

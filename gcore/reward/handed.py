"""The reward `environment`: what the response's environment said that it is worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gcore.config.spec import RewardSpec
from gcore.reward.registry import Response, RewardError, RewardResult


def environment(response: str, fields: Mapping[str, Any], spec: RewardSpec) -> RewardResult:
    """As the environment said when it was done; a response that was cut off before is worth 0. Raises RewardError."""
    if spec.options:
        raise RewardError("reward 'environment' has no options", fix="Leave reward.options out")
    said = response.environment if isinstance(response, Response) else None
    if said is not None:
        return RewardResult(said)
    if isinstance(response, Response) and response.truncated:
        return RewardResult(0.0)
    raise RewardError(
        "the environment gave no reward",
        fix="Let it give Done(reward), or score with another reward than 'environment'",
    )

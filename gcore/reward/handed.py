"""The rewards `environment` and `agent`: what the response's environment, or the agent that made it, said that it is worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gcore.config.spec import RewardSpec
from gcore.reward.registry import Response, RewardError, RewardResult


def environment(response: str, fields: Mapping[str, Any], spec: RewardSpec) -> RewardResult:
    """As the environment said when it was done; a response that was cut off before is worth 0. Raises RewardError."""
    return _handed(response, spec, "environment", "Let it give Done(reward)")


def agent(response: str, fields: Mapping[str, Any], spec: RewardSpec) -> RewardResult:
    """As the agent returned it; a response that was cut off, and of which it said nothing, is worth 0. Raises RewardError."""
    return _handed(response, spec, "agent", "Let it return a number")


def _handed(response: str, spec: RewardSpec, who: str, fix: str) -> RewardResult:
    if spec.options:
        raise RewardError(f"reward {who!r} has no options", fix="Leave reward.options out")
    said = response.environment if isinstance(response, Response) else None
    if said is not None:
        return RewardResult(said)
    if isinstance(response, Response) and response.truncated:
        return RewardResult(0.0)
    raise RewardError(
        f"the {who} gave no reward",
        fix=f"{fix}, or score with another reward than {who!r}",
    )

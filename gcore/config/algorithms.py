"""Names of advantage estimators and losses: gcore's own, and those that a package of the user's brings as entry points.

Only names are looked at here. The functions compute with tensors, so they are loaded, and tried, by the train ranks
(`gcore.train.own`). A spec that was stored was checked when it came in: reading it looks nothing up, since a controller need
not have the package installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, ValidationInfo
from pydantic_core import PydanticCustomError

from gcore.plugins import PluginKind

STORED = {"stored": True}
"""The validation context of a spec that was stored."""
ADVANTAGES = PluginKind("advantage estimator", "gcore.advantages", "train.advantage")
LOSSES = PluginKind("loss", "gcore.losses", "train.loss")

BuiltInAdvantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "gae"]
BuiltInLoss = Literal["ppo", "gspo", "cispo", "sft"]


def is_own_advantage(name: str) -> bool:
    """Whether it is none of gcore's."""
    return name not in get_args(BuiltInAdvantage)


def is_own_loss(name: str) -> bool:
    """Whether it is none of gcore's."""
    return name not in get_args(BuiltInLoss)


def _provided(name: str, info: ValidationInfo, kind: PluginKind, built_in: Sequence[str]) -> str:
    if name in built_in or (info.context or {}).get("stored"):
        return name
    own = sorted({point.name for point in entry_points(group=kind.group)} - set(built_in))
    if name in own:
        return name
    *some, last = (repr(one) for one in (*built_in, *own))
    # As pydantic says of a Literal, so that it is put in the same words (`gcore.config.explain`).
    expected = f"{', '.join(some)} or {last}; one of your own is an entry point in {kind.group}"
    raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})


def _advantage(name: str, info: ValidationInfo) -> str:
    return _provided(name, info, ADVANTAGES, get_args(BuiltInAdvantage))


def _loss(name: str, info: ValidationInfo) -> str:
    return _provided(name, info, LOSSES, get_args(BuiltInLoss))


AdvantageName = Annotated[BuiltInAdvantage | str, AfterValidator(_advantage)]
LossName = Annotated[BuiltInLoss | str, AfterValidator(_loss)]

"""What a flow sets in a spec unless the spec says otherwise: the estimator that its paper uses, say.

    @flow(train={"advantage": "rloo"}, flow={"samples_per_prompt": 4})
    async def rloo(peer: Peer) -> None: ...

Then `flow.name: rloo` alone is RLOO. The settings are put *under* what a user wrote, key by key along the schema's sections
(a list, or the options of a plug-in, are one value), before anything is validated. That happens where a spec comes in, once:
a stored job's spec has every key, and nothing is looked up for it, so a newer gcore or a newer flow changes no job that runs.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel

from gcore.config.flow import FlowSpec
from gcore.config.spec import JobSpec
from gcore.flows.api import find_flow
from gcore.nearest import did_you_mean

F = TypeVar("F", bound=Callable[..., Any])
Tree = dict[str, Any]
_SETTINGS = "__gcore_settings__"
_NOT_A_FLOWS = ("name", "seed", "model", "data")
"""Sections that say what a job is about, which no flow knows."""


def flow(**settings: Mapping[str, Any]) -> Callable[[F], F]:
    """Marks a flow with its settings, section by section as in a spec. Raises ValueError for a section it may not set."""
    for section, values in settings.items():
        if section in _NOT_A_FLOWS or section not in JobSpec.model_fields or (section == "flow" and "name" in values):
            what = "flow.name" if section == "flow" else section
            raise ValueError(f"a flow cannot set {what!r}: {_why_not(section)}")

    def marked(function: F) -> F:
        setattr(function, _SETTINGS, copy.deepcopy(dict(settings)))
        return function

    return marked


def _why_not(section: str) -> str:
    if section in JobSpec.model_fields:
        return "that is the job's own"
    return "a spec has no such section" + did_you_mean(section, JobSpec.model_fields.keys() - set(_NOT_A_FLOWS))


def settings_of(found: Callable[..., Any]) -> Mapping[str, Any]:
    """What a flow sets; empty for one that was not marked."""
    settings = getattr(found, _SETTINGS, {})
    return settings if isinstance(settings, Mapping) else {}


def settled(tree: Tree) -> Tree:
    """A spec as a user wrote it, with its flow's settings under it. Raises PluginFault for a flow that cannot be had.

    A tree whose `flow` is no section is given back as it is: validation says what is wrong with it.
    """
    section = tree.get("flow")
    if not isinstance(section, Mapping):
        return tree
    name = section.get("name", FlowSpec.model_fields["name"].default)
    if not isinstance(name, str):
        return tree
    settings = settings_of(find_flow(name))
    return _under(tree, settings, JobSpec) if settings else tree


def _under(tree: Mapping[str, Any], settings: Mapping[str, Any], model: type[BaseModel]) -> Tree:
    merged = dict(tree)
    for key, value in settings.items():
        section = _section(model, key)
        if key not in merged:
            merged[key] = copy.deepcopy(value)
        elif section is not None and isinstance(merged[key], Mapping) and isinstance(value, Mapping):
            merged[key] = _under(merged[key], value, section)
    return merged


def _section(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The section that `key` is; None if it is a single value, or not known."""
    field = model.model_fields.get(key)
    if field is None:
        return None
    kinds = get_args(field.annotation) if isinstance(field.annotation, types.UnionType) else (field.annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def blamed(tree: Tree, problems: list[str], own: list[str]) -> list[str]:
    """`problems` of a settled spec, each that the user's own tree does not have told as the flow's.

    `own`: the problems of the tree as the user wrote it.
    """
    section = tree.get("flow")
    name = section.get("name", "") if isinstance(section, Mapping) else ""
    return [p if p in own else f"{p} (with the settings of flow {name!r})" for p in problems]

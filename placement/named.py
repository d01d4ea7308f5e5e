"""Placement policies by the name that a spec gives: gcore's own, and those of other packages, as entry points. Pure but for that."""

from __future__ import annotations

from typing import cast

from gcore.plugins import PluginKind, find_plugin
from placement.live import NewPolicy

KIND = PluginKind("placement policy", "gcore.placement", "placement.policy")


def find_policy(name: str) -> NewPolicy:
    """What makes the policy. Raises PluginFault."""
    return cast(NewPolicy, find_plugin(KIND, name))

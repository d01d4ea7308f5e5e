"""The job spec, validated and frozen; the configuration of daemons and of local clusters.

The names below are imported at first use, because building the spec's model takes a tenth of a second and most commands need
only the local cluster's record.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gcore.config.load import apply_overrides, dump_explicit, load_spec, new_spec, parse_spec, stored_spec
    from gcore.config.node import NodeConfig
    from gcore.config.spec import JobSpec

__all__ = [
    "JobSpec",
    "NodeConfig",
    "apply_overrides",
    "dump_explicit",
    "load_spec",
    "new_spec",
    "parse_spec",
    "stored_spec",
]

_HOMES = {"JobSpec": "spec", "NodeConfig": "node"} | dict.fromkeys(
    ("apply_overrides", "dump_explicit", "load_spec", "new_spec", "parse_spec", "stored_spec"), "load"
)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

"""The job spec: what a user writes, validated and frozen."""

from gcore.config.load import apply_overrides, load_spec, parse_spec
from gcore.config.node import NodeConfig
from gcore.config.spec import JobSpec

__all__ = ["JobSpec", "NodeConfig", "apply_overrides", "load_spec", "parse_spec"]

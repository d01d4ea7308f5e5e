"""Flows: the RL program that every controller runs on its shards.

This package exports what flow and filter plug-ins need. Read `api` first.
"""

from gcore.config.load import find_flow, flow
from gcore.flows.api import Batch, Peer, Step
from gcore.flows.filters import FilterError, find_filters

__all__ = ["Batch", "FilterError", "Peer", "Step", "find_filters", "find_flow", "flow"]

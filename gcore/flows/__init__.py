"""Flows: the RL program that every controller runs on its shards.

What a flow or filter plug-in needs is exported here.
"""

from gcore.config.load import find_flow, flow
from gcore.flows.api import Batch, Peer, Step
from gcore.flows.filters import FilterError, find_filters

__all__ = ["Batch", "FilterError", "Peer", "Step", "find_filters", "find_flow", "flow"]

"""Flows: the RL program that every controller runs on its shards, written as if there were one controller.

What a flow or filter plug-in needs is exported here.
"""

from gcore.flows.api import Batch, Peer, Step, find_flow
from gcore.flows.settings import flow

__all__ = ["Batch", "Peer", "Step", "find_flow", "flow"]

"""Flows: the RL program that every controller runs on its shards, written as if there were one controller."""

from gcore.flows.api import Batch, Peer, Step, find_flow

__all__ = ["Batch", "Peer", "Step", "find_flow"]

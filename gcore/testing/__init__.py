"""Fakes that are shipped, and tested like the rest: a clock that stands still, and a store in memory."""

from gcore.testing.clock import FakeClock
from gcore.testing.memory_cluster import MemoryCluster
from gcore.testing.memory_store import Call, Fate, MemoryStore, Network, PerfectNetwork

__all__ = ["Call", "FakeClock", "Fate", "MemoryCluster", "MemoryStore", "Network", "PerfectNetwork"]

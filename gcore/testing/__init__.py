"""Fakes that are shipped, and tested like the rest: a clock that stands still, a store in memory, a bad network."""

from gcore.testing.clock import FakeClock
from gcore.testing.memory_cluster import MemoryCluster
from gcore.testing.memory_store import Call, Fate, MemoryStore, Network, PerfectNetwork
from gcore.testing.proxy import Proxy

__all__ = ["Call", "FakeClock", "Fate", "MemoryCluster", "MemoryStore", "Network", "PerfectNetwork", "Proxy"]

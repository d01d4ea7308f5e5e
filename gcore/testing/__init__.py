"""Fakes that are shipped, and tested like the rest: a clock that stands still, a store in memory, a bad network."""

from gcore.testing.clock import FakeClock
from gcore.testing.proxy import Proxy
from gcore.testing.store import Call, Fate, MemoryCluster, MemoryStore, Network, PerfectNetwork

__all__ = ["Call", "FakeClock", "Fate", "MemoryCluster", "MemoryStore", "Network", "PerfectNetwork", "Proxy"]

"""Fakes and contract suites for tests, also for those of plug-ins: clock, store with its network, flows, engines,
training."""

from gcore.testing.clock import FakeClock
from gcore.testing.store import Call, Fate, MemoryCluster, MemoryStore, Network, PerfectNetwork

__all__ = ["Call", "FakeClock", "Fate", "MemoryCluster", "MemoryStore", "Network", "PerfectNetwork"]

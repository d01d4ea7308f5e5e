"""Fakes for tests, also for those of plug-ins: clock, store, flows, judges, network; contract suites."""

from gcore.testing.clock import FakeClock
from gcore.testing.proxy import Proxy
from gcore.testing.store import Call, Fate, MemoryCluster, MemoryStore, Network, PerfectNetwork

__all__ = ["Call", "FakeClock", "Fate", "MemoryCluster", "MemoryStore", "Network", "PerfectNetwork", "Proxy"]

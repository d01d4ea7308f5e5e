"""Base of the metrics catalogue: a registry, and how metrics are declared in it.

A metric with the label `job` belongs to a job, and `forget_job` removes it regardless of its other labels. So the modules of the catalogue need
not track their series. This module declares no metric.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

CALL_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Upper bounds for calls to the store and to the API, in seconds."""

WORK_BUCKETS_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Upper bounds for parts of a step and requests to engines, in seconds."""


class MetricsBase:
    """A registry that can remove a job's series."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._of_jobs: list[Gauge] = []
        self.labels_of: dict[str, tuple[str, ...]] = {}
        """Labels by metric family, for documentation."""

    def forget_job(self, job: str) -> None:
        """Remove all series of `job`."""
        for gauge in self._of_jobs:
            gauge.remove_by_labels({"job": job})

    def _counter(self, name: str, help_: str, *labels: str, known: Iterable[Sequence[str]] = ()) -> Counter:
        """Declare a counter. `known`: label values that exist from the start, at 0, because a rate misses a series' first count."""
        counter = Counter(name, help_, labels, registry=self.registry)
        self.labels_of[name.removesuffix("_total")] = labels
        for values in known:
            counter.labels(*values)
        return counter

    def _gauge(self, name: str, help_: str, *labels: str) -> Gauge:
        gauge = Gauge(name, help_, labels, registry=self.registry)
        self.labels_of[name] = labels
        if "job" in labels:
            self._of_jobs.append(gauge)
        return gauge

    def _histogram(self, name: str, help_: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        self.labels_of[name] = labels
        return Histogram(name, help_, labels, buckets=buckets, registry=self.registry)

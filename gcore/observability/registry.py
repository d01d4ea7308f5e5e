"""What every subject of the catalogue stands on: a registry of its own, and how a metric is declared in it.

A metric that has the label `job` is about a job, and goes with `forget_job` whatever its other labels are; so no
subject keeps account of what it has shown. Knows no metric.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

CALL_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Upper bounds for calls to the store and to the API, in seconds."""

WORK_BUCKETS_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Upper bounds for parts of a step and requests to engines, in seconds."""


class MetricsBase:
    """One registry, and what is about a job in it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._of_jobs: list[Gauge] = []
        self.labels_of: dict[str, tuple[str, ...]] = {}
        """By family: for whoever writes the catalogue down."""

    def forget_job(self, job: str) -> None:
        """Take away everything that is about `job`."""
        for gauge in self._of_jobs:
            gauge.remove_by_labels({"job": job})

    def _counter(self, name: str, help_: str, *labels: str, known: Iterable[Sequence[str]] = ()) -> Counter:
        """`known`: label values that are there from the beginning, at 0: a rate does not see a series' first count."""
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

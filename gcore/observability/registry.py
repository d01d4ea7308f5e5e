"""Base class of the classes that declare metrics: a Prometheus registry, and methods that declare metrics in it.

A gauge with the label `job` belongs to a job. `forget_job` removes its series when the controller stops working on the
job.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

CALL_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Histogram buckets for the duration of calls to the store and to the API: upper bounds in seconds."""

WORK_BUCKETS_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Histogram buckets for the duration of a step's phases and of requests to engines: upper bounds in seconds."""


class MetricsBase:
    """A Prometheus registry, with a list of the gauges that belong to jobs."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._of_jobs: list[Gauge] = []
        self.labels_of: dict[str, tuple[str, ...]] = {}
        """Label names by metric family, for the generated page of metrics."""

    def forget_job(self, job: str) -> None:
        """Remove all series with the label value `job`."""
        for gauge in self._of_jobs:
            gauge.remove_by_labels({"job": job})

    def _counter(self, name: str, help_: str, *labels: str, known: Iterable[Sequence[str]] = ()) -> Counter:
        """Declare a counter. `known`: label values whose series are created at 0, because PromQL's `rate` ignores the
        first value of a new series.
        """
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

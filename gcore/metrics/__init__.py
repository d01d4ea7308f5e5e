"""The catalogue of gcore's metrics: every name, label and meaning that Prometheus sees, by subject.

Base units (seconds, bytes; ratios from 0 to 1), `_total` for counters and for nothing else. Labels take few values: a
code, a phase, a result, a pool, the name of a judge. Never a prompt, a request, an instance, an incarnation or a free text. What is known
about a job is a gauge labelled with the job's name, or with a source's or a set's of its spec too, and goes with
`forget_job` when the controller lets go of it.

    declared      a registry, and how a metric is declared in it
    store         calls, transactions, sizes
    steps         the chain, phases, learning curves; `step_stats` is the table of a step's numbers
    generation    engines and what is in flight
    judges        questions and verdicts
    slots         the books, the split, moves with what was expected and what came of them
    membership    nodes, workers, jobs, waits
    calls         the job API's calls

Each process has one `Metrics` with a registry of its own, handed to whoever counts; no metric lives at module level.
How they are served is `gcore.metrics.serving`'s. Does not decide what is worth an alert (`deploy/prometheus`).
"""

from __future__ import annotations

from prometheus_client import ProcessCollector

from gcore import __version__
from gcore.metrics.calls import CallMetrics
from gcore.metrics.generation import GenerationMetrics
from gcore.metrics.judges import JudgeMetrics
from gcore.metrics.membership import MembershipMetrics
from gcore.metrics.slots import SlotMetrics
from gcore.metrics.step_stats import SOURCE_STATS, STEP_STATS
from gcore.metrics.steps import StepMetrics
from gcore.metrics.store import StoreMetrics

__all__ = ["SOURCE_STATS", "STEP_STATS", "Metrics"]


class Metrics(StoreMetrics, StepMetrics, GenerationMetrics, JudgeMetrics, SlotMetrics, MembershipMetrics, CallMetrics):
    """One process's metrics. Count with e.g. `metrics.transactions.labels(kind="seal", result="won").inc()`."""

    def __init__(self) -> None:
        super().__init__()
        ProcessCollector(registry=self.registry)  # process_start_time_seconds, _resident_memory_bytes, ...
        self._gauge("gcore_build_info", "Always 1; the version is in the label.", "version").labels(__version__).set(1)

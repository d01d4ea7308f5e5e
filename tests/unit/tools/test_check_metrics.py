"""The checker of the catalogue of metrics finds each kind of fault."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted import Fault, not_found, plant, repository
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from gcore.observability.metrics import Metrics
from tools import check_metrics
from tools.problem import ROOT


@pytest.mark.parametrize(
    ("kind", "name", "sentence", "labels", "message"),
    [
        (Gauge, "steps", "Steps of the job so far.", (), "the name is not `gcore_`"),
        (Gauge, "gcore_wait_ms", "Milliseconds of the wait.", (), "no base unit"),
        (Gauge, "gcore_steps_total", "Steps of the job so far.", (), "only a counter may end in _total"),
        (Histogram, "gcore_steps", "Steps of the job so far.", (), "a histogram ends in"),
        (Gauge, "gcore_steps", "steps of the job so far", (), "no sentence"),
        (Gauge, "gcore_wait_seconds", "How long the job waits.", (), "does not name the unit (seconds)"),
        (Gauge, "gcore_steps", "Steps of the job so far.", ("prompt",), "the label prompt is unknown"),
        (Counter, "gcore_steps_total", "Steps of the job so far.", ("job",), "a metric about a job is a gauge"),
    ],
)
def test_a_fault_of_a_metric_is_found(
    kind: type[MetricWrapperBase], name: str, sentence: str, labels: tuple[str, ...], message: str
) -> None:
    registry = CollectorRegistry()
    kind(name, sentence, labels, registry=registry)
    (family,) = registry.collect()
    found = [
        *check_metrics.wrong_name(family),
        *check_metrics.wrong_sentence(family),
        *check_metrics.wrong_labels(family, labels),
    ]
    assert len(found) == 1
    assert message in found[0]


def test_a_metric_that_no_code_sets_and_a_page_that_is_old_are_found(tmp_path: Path) -> None:
    root = repository(tmp_path, "docs")
    faults: list[Fault] = [
        ("docs/reference/metrics.md", "gcore_", "gcore", "docs/reference/metrics.md:1: it differs from the catalogue")
    ]
    plant(root, faults)
    assert not_found(check_metrics.page_is_current(root), faults) == []
    metrics = Metrics()
    metrics.planted = metrics._gauge("gcore_planted", "A metric that no code sets.")  # type: ignore[attr-defined]
    (problem,) = check_metrics.unused(metrics, ROOT)
    assert problem.message.startswith("no code sets the metric planted")


def test_a_metric_is_found_where_it_is_declared() -> None:
    path, line = check_metrics.declared_at("gcore_transactions", ROOT)
    assert '"gcore_transactions_total"' in (ROOT / path).read_text().splitlines()[line - 1]

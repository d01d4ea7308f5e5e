"""Check the catalogue of metrics: names, units, sentences, labels, use, and the page that lists it.

A metric's name is `gcore_` and words in lower case, in base units; its help is one sentence that names the unit. A
metric about a job is a gauge, or it could not be removed with the job.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Gauge, Histogram, Metric

from deploy.tools.files import metrics as metrics_page
from deploy.tools.files import outdated
from gcore.observability.metrics import Metrics
from gcore.observability.registry import MetricsBase
from tools.problem import PRODUCT, Problem, line_of, main, relative

LABELS = {
    *("judge", "kind", "source", "result", "operation", "code", "outcome", "job", "phase", "pool", "state", "cause"),
    *("version", "set", "metric", "part", "endpoint", "alarm", "measure", "method", "where"),
}
"""Each takes few values."""
WRONG_UNITS = re.compile(r"_(ms|millis\w*|micros\w*|minutes|hours|kb|mb|kib|mib|percent|pct)(_|$)")
WITH_UNIT = {"seconds": r"\b[Ss]econds?\b", "bytes": r"\b[Bb]ytes\b", "ratio": r"0 to 1", "tokens": r"\b[Tt]okens\b"}
HISTOGRAMS = ("_seconds", "_bytes", "_ratio", "_verdict")
"""Endings of histograms; a verdict has no unit."""
SUFFIXES = ("_total", "_count", "_sum", "_bucket", "_created")


def check(root: Path) -> Iterator[Problem]:
    metrics = Metrics()
    for family in metrics.registry.collect():
        if not family.name.startswith("process_"):
            path, line = declared_at(family.name, root)
            labels = metrics.labels_of.get(family.name)
            if labels is None:
                yield Problem(
                    path, line, f"{family.name}: it is not declared as the others are: use _counter, _gauge ..."
                )
                labels = ()
            for message in (*wrong_name(family), *wrong_sentence(family), *wrong_labels(family, labels)):
                yield Problem(path, line, f"{family.name}: {message}")
    yield from unused(metrics, root)
    yield from page_is_current(root)


def wrong_name(family: Metric) -> Iterator[str]:
    name = family.name
    if not re.fullmatch(r"gcore(_[a-z]+)+", name):
        yield "the name is not `gcore_` and lower-case words: rename it"
    if WRONG_UNITS.search(name):
        yield "the unit is no base unit: use seconds, bytes or a ratio from 0 to 1"
    # A counter's family is named without its ending, so a name that still has one belongs to another type.
    if name.endswith(SUFFIXES):
        yield f"only a counter may end in _total, and no metric in another of {', '.join(SUFFIXES)}: rename it"
    if family.type == "histogram" and not name.endswith(HISTOGRAMS):
        yield f"a histogram ends in one of {', '.join(HISTOGRAMS)}: rename it"


def wrong_sentence(family: Metric) -> Iterator[str]:
    if not re.fullmatch(r"[A-Z].{10,}\.", family.documentation):
        yield f"the help {family.documentation!r} is no sentence: write one, with a capital and a full stop"
    for unit, said in WITH_UNIT.items():
        if re.search(rf"_{unit}(_|$)", family.name) and not re.search(said, family.documentation):
            yield f"the help {family.documentation!r} does not name the unit ({unit}): name it"


def wrong_labels(family: Metric, labels: tuple[str, ...]) -> Iterator[str]:
    if more := set(labels) - LABELS:
        yield f"the label {', '.join(sorted(more))} is unknown: use a known one, or add it to tools/check_metrics.py if it takes few values"
    if "job" in labels and family.type != "gauge":
        yield f"a metric about a job is a gauge, not a {family.type}: it could not be removed with the job"


def catalogue_files() -> list[Path]:
    """The modules in which the classes of the catalogue are defined."""
    return sorted({Path(inspect.getfile(kind)) for kind in Metrics.__mro__ if issubclass(kind, MetricsBase)})


def declared_at(name: str, root: Path) -> tuple[str, int]:
    """Where a metric is declared: (path, line)."""
    files = catalogue_files()
    for file in sorted({*files, *(file for one in files for file in one.parent.glob("*.py"))}):
        text = file.read_text(encoding="utf-8")
        for quoted in (f'"{name}"', f'"{name}_total"'):
            if quoted in text:
                return relative(file, root), line_of(text, quoted)
    return relative(files[0], root), 1


def unused(metrics: MetricsBase, root: Path) -> Iterator[Problem]:
    """Metrics that no code sets: neither directly, nor by a method of the catalogue that some code calls."""
    own_files = {relative(file, root) for file in catalogue_files()}
    texts = {
        relative(file, root): file.read_text(encoding="utf-8")
        for package in PRODUCT
        for file in sorted((root / package).rglob("*.py"))
    }
    own = "\n".join(text for path, text in texts.items() if path in own_files)
    everything = "\n".join(texts.values())
    called = {
        name for name in re.findall(r"    def ((?:show|count|know)_\w+)\(", own) if f"etrics.{name}(" in everything
    }
    methods = re.findall(r"    def (\w+)\((.*?)(?=\n    def |\nclass |\Z)", own, re.DOTALL)
    shown = "\n".join(body for name, body in methods if name in called)
    for name, metric in vars(metrics).items():
        if not _is_metric(metric):
            continue
        direct = not name.startswith("_") and re.search(rf"etrics\.{name}\b", everything)
        if not direct and f"self.{name}" not in shown:
            path, text = next(((p, t) for p, t in texts.items() if f"self.{name} = " in t), (min(own_files), ""))
            yield Problem(path, line_of(text, f"self.{name} = "), f"no code sets the metric {name}: set or remove it")


def _is_metric(one: Any) -> bool:
    values = list(one.values()) if isinstance(one, dict) else [one]
    return bool(values) and all(isinstance(value, Counter | Gauge | Histogram) for value in values)


def page_is_current(root: Path) -> Iterator[Problem]:
    for path in outdated(metrics_page(), root):
        yield Problem(path, 1, "it differs from the catalogue: run python -m deploy.tools and commit the page")


if __name__ == "__main__":
    sys.exit(main({"metrics": check}, __doc__))

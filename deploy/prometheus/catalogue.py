"""Writes docs/metrics.md, the list of every metric, from the catalogue: `python deploy/prometheus/catalogue.py [FILE]`, after a change of
`gcore/metrics`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gcore.observability.metrics import CallMetrics, MembershipMetrics, Metrics, SlotMetrics, StoreMetrics
from gcore.observability.registry import MetricsBase
from gcore.observability.step_metrics import ChainMetrics, GenerationMetrics, JudgeMetrics

FILE = Path(__file__).parents[2] / "docs" / "metrics.md"
SUBJECTS: tuple[tuple[str, type[MetricsBase]], ...] = (
    ("Steps and what came of them", ChainMetrics),
    ("Slots and placement", SlotMetrics),
    ("Engines, and what is in flight", GenerationMetrics),
    ("Judges", JudgeMetrics),
    ("Nodes, jobs, waits", MembershipMetrics),
    ("The store", StoreMetrics),
    ("The job API", CallMetrics),
)
HEAD = """# Every metric

What a controller shows at `/metrics`, by subject. [Watching a cluster](watching.md) says how to read them: what is labelled `job` is told by every
controller that works on the job, so take the maximum; counters are each process's own, so sum them. Histograms have `_bucket`, `_sum` and
`_count`. Beside these there are Prometheus' own `process_*`, and `gcore_build_info{version}`.

<!-- Made by deploy/prometheus/catalogue.py; `make lint` compares it with the catalogue. -->
"""


def page() -> str:
    """The document."""
    parts = [HEAD]
    for title, subject in SUBJECTS:
        parts.append(f"\n## {title}\n\n| metric | kind | labels | meaning |\n|---|---|---|---|\n")
        parts.extend(sorted(_rows(subject())))
    return "".join(parts)


def _rows(subject: MetricsBase) -> list[str]:
    rows = []
    for family in subject.registry.collect():
        labels = ", ".join(f"`{label}`" for label in subject.labels_of[family.name])
        name = f"{family.name}_total" if family.type == "counter" else family.name
        rows.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |\n")
    return rows


def names() -> set[str]:
    """The families that the document has."""
    return {family.name for _, subject in SUBJECTS for family in subject().registry.collect()}


def every() -> set[str]:
    """The families that there are, but for those that it names in its head."""
    own = {family.name for family in Metrics().registry.collect()}
    return {name for name in own if not name.startswith(("process_", "gcore_build"))}


if __name__ == "__main__":
    assert names() == every(), "a subject is missing here"
    (Path(sys.argv[1]) if len(sys.argv) > 1 else FILE).write_text(page(), encoding="utf-8")

"""The page docs/reference/metrics.md: the list of every metric, from the catalogue in `gcore/observability`."""

from __future__ import annotations

from gcore.observability.metrics import CallMetrics, MembershipMetrics, Metrics, SlotMetrics, StoreMetrics
from gcore.observability.registry import MetricsBase
from gcore.observability.step_metrics import ChainMetrics, GenerationMetrics, JudgeMetrics

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

What a controller shows at `/metrics`, by subject. [Watching a cluster](../operate/monitoring.md) says how to read them: what is labelled `job` is told by every
controller that works on the job, so take the maximum; counters are each process's own, so sum them. Histograms have `_bucket`, `_sum` and
`_count`. Beside these there are Prometheus' own `process_*`, and `gcore_build_info{version}`.

<!-- Made by `python -m deploy.tools metrics`; `make lint` compares it with the catalogue. -->
"""


def page() -> str:
    """The document. Raises ValueError if a metric belongs to none of the subjects."""
    listed = {family.name for _, subject in SUBJECTS for family in subject().registry.collect()}
    every = {family.name for family in Metrics().registry.collect()}
    if missing := {name for name in every - listed if not name.startswith(("process_", "gcore_build"))}:
        raise ValueError(f"{', '.join(sorted(missing))} belong to no subject: add their class to SUBJECTS")
    parts = [HEAD]
    for title, kind in SUBJECTS:
        parts.append(f"\n## {title}\n\n| metric | kind | labels | meaning |\n|---|---|---|---|\n")
        parts.extend(sorted(_rows(kind())))
    return "".join(parts)


def _rows(subject: MetricsBase) -> list[str]:
    rows = []
    for family in subject.registry.collect():
        labels = ", ".join(f"`{label}`" for label in subject.labels_of[family.name])
        name = f"{family.name}_total" if family.type == "counter" else family.name
        rows.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |\n")
    return rows

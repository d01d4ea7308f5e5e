"""Results of the Python clients: frozen, typed, with tables for notebooks.

All text in HTML is escaped, because specs and models wrote it. Times are seconds since the epoch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from typing import Any, TypeVar

from gcore.api.v1 import jobs_pb2 as pb
from gcore.client.calls import job_state_name

ENDED_STATES = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Waiting:
    """A wait report: who waits, for what, and since when (seconds since the epoch)."""

    who: str
    what: str
    since: float


@dataclass(frozen=True, slots=True)
class Job:
    """A job as it was at the time of the request. `ended`: None until it ends. `queue_position`: 0 if it does not wait
    for slots."""

    uid: str
    name: str
    namespace: str
    state: str
    reason: str
    step: int
    steps: int
    lineage: int
    priority: int
    slots: int
    queue_position: int
    owner: str
    created: float
    ended: float | None
    run_dir: str
    checkpoint: str
    spec: Mapping[str, Any] = field(repr=False)
    waiting: tuple[Waiting, ...] = ()

    @property
    def has_ended(self) -> bool:
        """Whether the job is in a final state."""
        return self.state in ENDED_STATES

    def _repr_html_(self) -> str:
        waits = "; ".join(f"{one.who}: {one.what}" for one in self.waiting)
        rows = {
            "job": f"{self.namespace}/{self.name} ({self.uid})",
            "state": f"{self.state}: {self.reason}" if self.reason else self.state,
            "step": f"{self.step} of {self.steps}, lineage {self.lineage}",
            "slots": f"{self.slots}, priority {self.priority}",
            "created": format_time(self.created),
            "checkpoint": self.checkpoint or "none yet",
            "waits for": waits or "nothing",
        }
        return html_table(("", ""), rows.items())


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a worker's log. `rank` is set for train ranks. `time` is None if the line has no time."""

    text: str
    instance: str
    node: str
    role: str
    rank: int | None
    time: float | None

    def __str__(self) -> str:
        return f"{self.instance}  {self.text}"


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The metrics of a committed step. `values`: by name; `lineage`: increases at each rollback."""

    lineage: int
    step: int
    values: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        return self.values[name]


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster. `uses`: uid of the job that has a slot, by slot name. `sick`: unhealthy slots with the
    reason."""

    name: str
    address: str
    slots: tuple[str, ...]
    draining: bool
    sick: tuple[str, ...]
    uses: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard of a job's prompt stream. `node`: the node that generates for it; empty: none.

    `data_epoch`, `seq`: the first prompt without an outcome (trained, filtered or failed). `length`: prompts per data
    epoch. `ahead`: how many later prompts already have an outcome.
    """

    shard: int
    node: str
    data_epoch: int
    seq: int
    length: int
    ahead: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Slot usage of one group of jobs. `by`: the values of the grouping keys. `busy_hours`: part of `slot_hours` in
    which the slots worked."""

    by: Mapping[str, str]
    slot_hours: float
    busy_hours: float


class Listing(tuple[T, ...]):
    """A tuple of results that a notebook displays as a table, one row per result."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        if not self:
            return "<em>none</em>"
        names = [name for name in getattr(self[0], "__slots__", ()) if name not in ("spec", "waiting", "run_dir")]
        names = [name for name in names if any(getattr(one, name) is not None for one in self)]
        return html_table(names, [[getattr(one, name) for name in names] for one in self])


def format_time(epoch_s: float) -> str:
    """Format seconds since the epoch as a UTC time; empty for 0."""
    return datetime.fromtimestamp(epoch_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if epoch_s else ""


def html_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an HTML table with all cells escaped."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        "<tr>" + "".join(f"<td style='text-align:left'>{escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def parse_job(message: pb.Job) -> Job:
    """Convert a job from the API's message."""
    try:
        spec = json.loads(message.spec_json) if message.spec_json else {}
    except ValueError:
        spec = {}
    return Job(
        uid=message.uid,
        name=message.name,
        namespace=message.namespace or "default",
        state=job_state_name(message.state),
        reason=message.reason,
        step=message.step,
        steps=message.steps,
        lineage=message.lineage,
        priority=message.priority,
        slots=message.slots,
        queue_position=message.queue_position,
        owner=message.owner,
        created=message.created,
        ended=message.ended or None,
        run_dir=message.run_dir,
        checkpoint=message.checkpoint,
        spec=spec if isinstance(spec, dict) else {},
        waiting=tuple(Waiting(one.who, one.what, one.since) for one in message.waiting),
    )


def parse_line(message: pb.LogLine) -> LogLine:
    """Convert a log line from the API's message."""
    rank = message.rank if message.HasField("rank") else None
    return LogLine(message.text, message.instance, message.node, message.role, rank, message.time or None)


def parse_node(message: pb.Node) -> Node:
    """Convert a node from the API's message."""
    uses = {use.slot: use.job_uid for use in message.uses}
    return Node(message.name, message.address, tuple(message.slots), message.draining, tuple(message.sick), uses)

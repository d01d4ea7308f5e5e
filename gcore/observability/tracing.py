"""Steps as OpenTelemetry spans, exported to a collector over HTTP (needs the extra `gcore[otel]`).

A step is one trace, however many nodes took part: its ID is derived from job, lineage and step, so nodes agree on it
without communication. Each node adds one span for the step, with the seconds of its slots by state as attributes, and
below it one span for each phase of the job, timed by that node's clock. Spans wait in a bounded queue, and a separate
thread sends them, so no step waits for a collector. Without a collector, the oldest spans are dropped. The node's
configuration or `OTEL_EXPORTER_OTLP_ENDPOINT` names the collector.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gcore.errors import UsageError
from gcore.ledger.records.slot_accounting import AccountLine

if TYPE_CHECKING:
    from opentelemetry.context import Context

NS = 1e9
UNKNOWN = "not known"
Value = str | float | int


@dataclass(frozen=True)
class TraceSpan:
    """An OpenTelemetry span to export. Times in nanoseconds since the epoch. `within`: child spans."""

    name: str
    begin: int
    end: int
    attributes: Mapping[str, Value]
    within: tuple[TraceSpan, ...] = field(default=())


def trace_id(uid: str, line: AccountLine) -> int:
    """Return the 128-bit trace ID of a step, the same on every node and never 0."""
    version = line.book.version
    said = f"{uid} {version.lineage} {version.step}"
    return int.from_bytes(hashlib.sha256(said.encode()).digest()[:16], "big") or 1


def step_span(job: str, uid: str, line: AccountLine) -> TraceSpan:
    """Convert a node's accounting of a step to a span, with the job's phases as child spans."""
    book = line.book
    about: dict[str, Value] = {
        "gcore.job": job,
        "gcore.job.uid": uid,
        "gcore.node": line.node,
        "gcore.step": book.version.step,
        "gcore.lineage": book.version.lineage,
    }
    attributes = about | {"gcore.slots": book.slots, "gcore.slot_seconds.unbooked": book.unbooked}
    attributes |= {f"gcore.slot_seconds.{state.replace(' ', '.')}": seconds for state, seconds in book.booked.items()}
    begin, end = _ns(book.began), _ns(line.until)
    return TraceSpan(f"step {book.version.step}", begin, end, attributes, tuple(_phases(line, about)))


def _phases(line: AccountLine, about: Mapping[str, Value]) -> Iterator[TraceSpan]:
    began = line.book.began
    for phase in line.phases:
        if phase.end > phase.begin:
            yield TraceSpan(phase.most or UNKNOWN, _ns(began + phase.begin), _ns(began + phase.end), about)


def _ns(seconds: float) -> int:
    return round(seconds * NS)


PATH = "/v1/traces"
QUEUE, BATCH = 4096, 512
SEND_EVERY_MS = 2000
PATIENCE_S = 5.0
LACKING = "Install the extra: pip install 'gcore[otel]', or remove the collector from the node's configuration"


class StepTraces:
    """Exports the steps of one process as traces. `tell` never blocks; `close` may block for about `PATIENCE_S`
    seconds.
    """

    def __init__(self, endpoint: str, node: str) -> None:
        """Set up the exporter to the collector at `endpoint`. Raises UsageError if `gcore[otel]` is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        except ImportError as error:
            raise UsageError(
                f"traces for {endpoint} need the Python package {error.name}, which is not installed", fix=LACKING
            ) from error

        class StepIds(RandomIdGenerator):
            """ID generator that gives the next trace the ID in `trace`."""

            trace = 0

            def generate_trace_id(self) -> int:
                return self.trace

        self._ids = StepIds()
        about = Resource.create({"service.name": "gcore", "service.instance.id": node})
        exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + PATH, timeout=PATIENCE_S)
        self._provider = TracerProvider(id_generator=self._ids, resource=about, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter, max_queue_size=QUEUE, max_export_batch_size=BATCH, schedule_delay_millis=SEND_EVERY_MS
            )
        )
        self._tracer = self._provider.get_tracer("gcore")

    def tell(self, job: str, uid: str, line: AccountLine) -> None:
        """Queue the trace of a step for export. Call it after the node's slot accounting of the step is complete."""
        from opentelemetry.context import Context

        self._ids.trace = trace_id(uid, line)
        self._send(step_span(job, uid, line), Context())

    def _send(self, traced: TraceSpan, under: Context) -> None:
        from opentelemetry import trace

        span = self._tracer.start_span(
            traced.name, context=under, start_time=traced.begin, attributes=dict(traced.attributes)
        )
        for one in traced.within:
            self._send(one, trace.set_span_in_context(span, under))
        span.end(end_time=traced.end)

    def close(self) -> None:
        """Send the remaining spans, for at most `PATIENCE_S` seconds; the rest is lost with the process."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(PATIENCE_S)

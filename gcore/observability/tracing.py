"""Steps as OpenTelemetry spans, and their export to a collector over HTTP (needs the extra `gcore[otel]`).

One step is one trace however many nodes took part: its id follows from job, lineage and step, so nodes agree on it without a
message. Each node adds one span for the step with the seconds of its slots by state, and under it one for each phase of the job as
that node saw it, by its own clock. Spans wait in a bounded queue and a thread of their own sends them: no step waits for a
collector, and while there is none the oldest are dropped. The node's configuration names a collector, or
`OTEL_EXPORTER_OTLP_ENDPOINT` does.
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
    """Times in nanoseconds since the epoch. `within`: the spans under it."""

    name: str
    begin: int
    end: int
    attributes: Mapping[str, Value]
    within: tuple[TraceSpan, ...] = field(default=())


def trace_id(uid: str, line: AccountLine) -> int:
    """Of the step, the same on every node; never 0."""
    version = line.book.version
    said = f"{uid} {version.lineage} {version.step}"
    return int.from_bytes(hashlib.sha256(said.encode()).digest()[:16], "big") or 1


def step_span(job: str, uid: str, line: AccountLine) -> TraceSpan:
    """A step on a node, with its phases."""
    book = line.book
    about: dict[str, Value] = {
        "gcore.job": job,
        "gcore.job.uid": uid,
        "gcore.node": line.node,
        "gcore.step": book.version.step,
        "gcore.lineage": book.version.lineage,
    }
    told = about | {"gcore.slots": book.slots, "gcore.slot_seconds.unbooked": book.unbooked}
    told |= {f"gcore.slot_seconds.{state.replace(' ', '.')}": seconds for state, seconds in book.booked.items()}
    begin, end = _ns(book.began), _ns(line.until)
    return TraceSpan(f"step {book.version.step}", begin, end, told, tuple(_phases(line, about)))


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
LACKING = "Install the extra: pip install 'gcore[otel]', or leave traces out of the node's configuration"


class StepTraces:
    """Traces of the steps of one process. `tell` never blocks; `close` may, for about `PATIENCE_S`."""

    def __init__(self, endpoint: str, node: str) -> None:
        """Raises UsageError without the extra."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        except ImportError as error:
            raise UsageError(
                f"traces are to be sent to {endpoint}, and {error.name} is not there", fix=LACKING
            ) from error

        class StepIds(RandomIdGenerator):
            """The next trace is that of the step."""

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
        """A step was booked."""
        from opentelemetry.context import Context

        self._ids.trace = trace_id(uid, line)
        self._send(step_span(job, uid, line), Context())

    def _send(self, told: TraceSpan, under: Context) -> None:
        from opentelemetry import trace

        span = self._tracer.start_span(
            told.name, context=under, start_time=told.begin, attributes=dict(told.attributes)
        )
        for one in told.within:
            self._send(one, trace.set_span_in_context(span, under))
        span.end(end_time=told.end)

    def close(self) -> None:
        """Send what is there, for a bounded time: what is not sent by then is lost with the process."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(PATIENCE_S)

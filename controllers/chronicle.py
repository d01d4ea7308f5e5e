"""What is told of a job while it goes on, to whoever looks: its events, its metrics, its books and spans, words for log lines.

One for each job that a controller works on. Hears every change of the job's records; decides nothing, and nothing waits for it.
"""

from __future__ import annotations

from controllers.booking import Booking
from controllers.gauges import show
from controllers.identity import Identity
from controllers.placement_gauges import show_placement
from controllers.service.events import EventLog
from controllers.stopwatch import Stopwatch
from controllers.store_gauges import JobSize
from controllers.view import JobView
from gcore.clock import Clock
from gcore.ledger.books_file import BookLine
from gcore.ledger.mirror import JobMirror
from gcore.metrics import Metrics
from gcore.otel import StepTraces
from gcore.rollout.reaching import EngineReach
from gcore.store.keys import JobKeys
from gcore.store.types import Store, WatchBatch


class Chronicle:
    """Mutable; one event loop."""

    def __init__(
        self,
        store: Store,
        keys: JobKeys,
        identity: Identity,
        metrics: Metrics,
        clock: Clock,
        reach: EngineReach,
        traces: StepTraces | None,
    ) -> None:
        """`traces`: where steps are told as spans; None: nowhere."""
        self._keys = keys
        self._incarnation = identity.incarnation
        self._metrics = metrics
        self._clock = clock
        self._traces = traces
        self._mirror = JobMirror(keys)
        self._size = JobSize()
        self.events = EventLog(keys)
        self.stopwatch = Stopwatch()
        self.booking = Booking(store, keys, identity.node, identity.lease, metrics, clock, reach, self._trace)

    @property
    def about(self) -> dict[str, object]:
        """What stands beside each line of the log that is written for this job."""
        told: dict[str, object] = {"job": self._keys.uid}
        if self._mirror.job is not None:
            told["job_name"] = self._mirror.job.record.full_name
        if self._mirror.head is not None:
            told["step"] = self._mirror.head.record.step
        return told

    def note(self, before: JobMirror, batch: WatchBatch, now: JobMirror) -> None:
        """The job's records were as `before`, and with `batch` they are as `now`. Its events are noted one revision at a time
        (`events`)."""
        self._mirror = now
        self.stopwatch.note(before, now, self._clock.monotonic())
        if now.head is not None:
            self.booking.head_moved(now.head.record.version)
        show(self._metrics, now, batch, self._incarnation)
        show_placement(self._metrics, before, now)
        self._size.note(batch)
        if now.job is not None:
            self._size.show(self._metrics, now.job.record.full_name)

    def stats(self, view: JobView) -> dict[str, float]:
        """Of the step that is under way, for its statistics."""
        return self.stopwatch.stats(view, self._clock.monotonic())

    def close(self) -> None:
        """Nothing more is heard of the job here."""
        if self._mirror.job is not None:
            self._metrics.forget_job(self._mirror.job.record.full_name)

    def _trace(self, line: BookLine) -> None:
        if self._traces is not None and self._mirror.job is not None:
            self._traces.tell(self._mirror.job.record.full_name, self._keys.uid, line)

"""Declarations of gcore's Prometheus metrics: names, labels and help texts, by subject.

Rules: base units (seconds, bytes; ratios from 0 to 1), and `_total` for counters only. Labels take few values, such as
a code, a phase, a result, a pool or the name of a judge. A prompt, a request, an instance, an incarnation or free text
is never a label. Metrics of a job are gauges with the label `job`, some also with a source or a set of the spec.
`forget_job` removes them when the controller stops working on the job.

Each process has one `Metrics` with its own registry and passes it to the code that counts; no metric is at module
level. This module has the metrics of the store (calls, transactions, sizes), the job API, nodes, workers, jobs, waits,
slots, placement and blob stores. Steps, engines and judges are in `gcore.observability.step_metrics`. `gcore.observability.http`
serves them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import ProcessCollector

from gcore import __version__
from gcore.errors import StoreUnavailable
from gcore.observability.registry import CALL_BUCKETS_S, MetricsBase
from gcore.observability.step_metrics import ChainMetrics, GenerationMetrics, JudgeMetrics
from gcore.store.types import (
    ALARMS,
    Compare,
    Delete,
    KeyListing,
    KeyValue,
    Put,
    Store,
    StoreMemberStatus,
    TxnResult,
    WatchBatch,
)
from gcore.system.clock import Clock

RESULTS = ("won", "stale", "unknown")
"""Values of the label `result` of transactions (`gcore.ledger.transactions.TxnOutcome`)."""


class StoreMetrics(MetricsBase):
    """Metrics of this process's store calls and of the etcd members."""

    def __init__(self) -> None:
        super().__init__()
        self.transactions = self._counter(
            "gcore_transactions_total",
            "Guarded transactions by kind (seal, reseal, ready, commit, account, rollback, ...) "
            "and result (won, stale, unknown).",
            "kind",
            "result",
        )
        self.store_seconds = self._histogram(
            "gcore_store_call_seconds",
            "Duration of store calls in seconds, including failed calls.",
            CALL_BUCKETS_S,
            "operation",
        )
        self.store_unavailable = self._counter(
            "gcore_store_unavailable_total", "Store calls without an answer in time.", "operation"
        )
        self._database = self._gauge(
            "gcore_store_database_bytes", "Size of an etcd member's database file in bytes.", "endpoint"
        )
        self._in_use = self._gauge(
            "gcore_store_in_use_bytes",
            "Bytes in use in an etcd member's database; defragmentation frees the rest.",
            "endpoint",
        )
        self._alarm = self._gauge(
            "gcore_store_alarm",
            "Whether an etcd member reports this alarm (NOSPACE, CORRUPT): 1 or 0.",
            "endpoint",
            "alarm",
        )
        self._certificate_ends = self._gauge(
            "gcore_store_certificate_expiry_timestamp_seconds",
            "Expiry of the certificate that an etcd member serves, in seconds since the epoch.",
            "endpoint",
        )
        self.job_keys = self._gauge("gcore_store_job_keys", "Number of the job's keys in the store.", "job")
        self.job_bytes = self._gauge(
            "gcore_store_job_bytes", "Bytes of the job in the store, including keys, without old revisions.", "job"
        )

    def count_transaction(self, kind: str, result: str) -> None:
        """Count a finished transaction. The first one of a kind creates the series of all results at 0."""
        for known in RESULTS:
            self.transactions.labels(kind, known).inc(known == result)

    def show_store_certificates(self, ends: Mapping[str, float]) -> None:
        """Set the certificate expiry of each etcd member, in seconds since the epoch, by host:port.

        Members that are not given are removed.
        """
        self._certificate_ends.clear()
        for endpoint, end in ends.items():
            self._certificate_ends.labels(endpoint).set(end)

    def show_members(self, members: Mapping[str, StoreMemberStatus]) -> None:
        """Set database size and alarms of each etcd member, by host:port. Members that are not given are removed."""
        for gauge in (self._database, self._in_use, self._alarm):
            gauge.clear()
        for endpoint, standing in members.items():
            self._database.labels(endpoint).set(standing.database_bytes)
            self._in_use.labels(endpoint).set(standing.in_use_bytes)
            for alarm in ALARMS:
                self._alarm.labels(endpoint, alarm).set(alarm in standing.alarms)


class CallMetrics(MetricsBase):
    """Metrics of the API calls that this process serves. Calls of methods that do not exist count as `unknown`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self._counter(
            "gcore_api_calls_total",
            "Answered calls of the job API by method and status code.",
            "method",
            "code",
        )
        self.call_seconds = self._histogram(
            "gcore_api_call_seconds", "Duration of unary calls of the job API in seconds.", CALL_BUCKETS_S, "method"
        )
        self.open_streams = self._gauge("gcore_api_open_streams", "Open streams of the job API.", "method")


JOB_STATES = ("running", "queued", "paused")


class MembershipMetrics(MetricsBase):
    """Metrics of the cluster as this process sees it, and of this process's waits."""

    def __init__(self) -> None:
        super().__init__()
        self._nodes = self._gauge("gcore_nodes", "Controllers registered in the cluster.")
        self.ready = self._gauge("gcore_ready", "Whether this controller holds its lease and is registered: 1 or 0.")
        self.lives = self._counter(
            "gcore_incarnations_total", "Incarnations of this process; each one after the first follows a lost lease."
        )
        self._jobs = self._gauge(
            "gcore_jobs",
            "Unfinished jobs by state: running (with slots), queued (waiting for slots) or paused.",
            "state",
        )
        self._job_slots = self._gauge("gcore_job_slots", "Slots that the job may use now.", "job")
        self._shown_jobs: frozenset[str] = frozenset()
        self._node_slots = self._gauge("gcore_node_slots", "Slots of this node by state (usable, sick).", "state")
        self.certificate_ends = self._gauge(
            "gcore_certificate_expiry_timestamp_seconds",
            "Earliest expiry of this process's certificates (for callers and for the store), in seconds since the epoch; "
            "0 without certificates.",
        )
        self.members = self._gauge("gcore_members", "Controllers that work on the job.", "job")
        self.shards_owned = self._gauge("gcore_shards_owned", "Shards of the job assigned to this process.", "job")
        self._workers = self._gauge(
            "gcore_workers",
            "Workers of this node by pool and state (starting, serving, stopping, failed).",
            "pool",
            "state",
        )
        self._waiting = self._gauge(
            "gcore_waiting", "Jobs that wait now, as this process sees them, by cause.", "cause"
        )
        self._job_waits = self._gauge(
            "gcore_job_waiting_seconds",
            "Seconds since the start of the job's current wait, as this process sees it, by cause.",
            "job",
            "cause",
        )
        self._waited: dict[str, Mapping[str, float]] = {}
        self.stalls = self._counter(
            "gcore_stalls_total",
            "Waits without progress that were reported as an event, by cause.",
            "cause",
        )
        self._waiting_seconds = self._counter(
            "gcore_waiting_seconds_total", "Seconds that jobs waited, as this process saw them, by cause.", "cause"
        )

    def show_cluster(self, nodes: int, workers: Mapping[tuple[str, str], int]) -> None:
        """Set the number of controllers, and of this node's workers by pool and state."""
        self._nodes.set(nodes)
        self._workers.clear()
        for (pool, state), count in workers.items():
            self._workers.labels(pool, state).set(count)

    def show_jobs(self, states: Mapping[str, int], slots: Mapping[str, int]) -> None:
        """Set the number of jobs by state, and the slots of jobs that have any, by name."""
        for state in JOB_STATES:
            self._jobs.labels(state).set(states.get(state, 0))
        for job in self._shown_jobs - slots.keys():
            self._job_slots.remove_by_labels({"job": job})
        for job, count in slots.items():
            self._job_slots.labels(job).set(count)
        self._shown_jobs = frozenset(slots)

    def show_slots(self, slots: int, sick: int) -> None:
        """Set the number of usable and of sick slots of this node."""
        self._node_slots.labels("usable").set(slots - sick)
        self._node_slots.labels("sick").set(sick)

    def show_waits(self, job: str, seconds: Mapping[str, float]) -> None:
        """Set the durations of the job's current waits, by cause. Causes that are not given are removed."""
        before = self._waited.get(job, {})
        self._waited[job] = dict(seconds)
        for cause in before.keys() - seconds.keys():
            self._job_waits.remove(job, cause)
        for cause, held in seconds.items():
            self._job_waits.labels(job, cause).set(held)
            self.stalls.labels(cause)  # create the series at 0
            # A smaller value is a new wait for the same cause.
            more = held - before.get(cause, 0.0)
            self._waiting_seconds.labels(cause).inc(more if more >= 0 else held)
        for cause in before.keys() | seconds.keys():
            waiting = sum(cause in causes for causes in self._waited.values())
            self._waiting.labels(cause).set(waiting)

    def forget_job(self, job: str) -> None:
        """See `MetricsBase.forget_job`. Also ends the job's waits."""
        self.show_waits(job, {})
        self._waited.pop(job, None)
        super().forget_job(job)


EXPECTED, MEASURED = "expected", "measured"
POOLS = ("rollout", "reward", "train")


@dataclass(frozen=True, slots=True)
class MoveFigures:
    """Figures of a placement change, in seconds. None: unknown.

    `expected_gain_s`, `gain_s`: expected and measured reduction of the time per step. `expected_s`, `took_s`: expected
    and measured duration of the change itself.
    """

    expected_gain_s: float | None = None
    gain_s: float | None = None
    expected_s: float | None = None
    took_s: float | None = None


class SlotMetrics(MetricsBase):
    """Metrics of this node's slots, and of the placement of its jobs."""

    def __init__(self) -> None:
        super().__init__()
        self.slot_seconds = self._counter(
            "gcore_slot_seconds_total",
            "Seconds of this node's slots by state: busy and idle (with cause) of a pool, switching (to the pool, from the one "
            "in cause), syncing, failed, unallocated; unbooked: could not be assigned.",
            "pool",
            "state",
            "cause",
        )
        self.moves = self._counter(
            "gcore_placement_moves_total",
            "Placement moves decided by this process, by kind (split, world, lend, return, mend) and state (done, wanted, would).",
            "kind",
            "state",
        )
        self._split = self._gauge("gcore_split_slots", "Slots of a pool in the job's plan.", "job", "pool")
        self._move_gain = self._gauge(
            "gcore_move_gain_seconds",
            "Expected and measured reduction of the step time by the newest move of a kind, in seconds; may be negative.",
            "job",
            "kind",
            "measure",
        )
        self._move_took = self._gauge(
            "gcore_move_seconds",
            "Expected and measured duration of the newest move of a kind, in seconds.",
            "job",
            "kind",
            "measure",
        )

    def show_split(self, job: str, slots: Mapping[str, int]) -> None:
        """Set the number of slots that each pool has in the job's plan."""
        for pool in POOLS:
            self._split.labels(job, pool).set(slots.get(pool, 0))

    def show_move(self, job: str, kind: str, figures: MoveFigures) -> None:
        """Set the figures of a job's newest placement change of a kind. Unknown figures are removed."""
        values = (
            (self._move_gain, EXPECTED, figures.expected_gain_s),
            (self._move_gain, MEASURED, figures.gain_s),
            (self._move_took, EXPECTED, figures.expected_s),
            (self._move_took, MEASURED, figures.took_s),
        )
        for gauge, measure, seconds in values:
            if seconds is not None:
                gauge.labels(job, kind, measure).set(seconds)
            else:
                gauge.remove_by_labels({"job": job, "kind": kind, "measure": measure})


BLOB_ERRORS = ("full", "disk", "damaged", "gone")
"""Values of the label `kind` of errors of a blob store."""


class BlobMetrics(MetricsBase):
    """Metrics of this node's blob store, as the daemon reads them from its process."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes = self._gauge(
            "gcore_blob_bytes",
            "Bytes of blobs (pictures) on this node by kind (stored; of these pinned; arriving, reserved and free) and where "
            "(store; worlds: the folders of train ranks, which link to the same files).",
            "kind",
            "where",
        )
        self._fetches = self._counter("gcore_blob_fetches_total", "Blobs that this node's store received from others.")
        self._fetch_seconds = self._counter(
            "gcore_blob_fetch_seconds_total", "Seconds that these transfers took, added up."
        )
        self._fetched = self._counter(
            "gcore_blob_fetched_bytes_total", "Bytes that this node's blob store received from others."
        )
        self._errors = self._counter(
            "gcore_blob_store_errors_total",
            "Errors of this node's blob store by kind: full (requests without room), disk (failed reads and writes), damaged "
            "(removed blobs whose bytes had changed), gone (ends of its process).",
            "kind",
            known=[(kind,) for kind in BLOB_ERRORS],
        )

    def show_blobs(self, now: Mapping[str, int], more: Mapping[str, int], world_bytes: int) -> None:
        """Set the metrics from the counters of the store (`gcore.media.server`). `more`: their increase since the last
        call. `world_bytes`: bytes in the folders of train ranks."""
        free = max(0, now["bound"] - now["held"] - now["incoming"] - now["reserved"])
        kinds = {"stored": "stored", "pinned": "pinned", "arriving": "incoming", "reserved": "reserved"}
        for kind, name in kinds.items():
            self._bytes.labels(kind, "store").set(now[name])
        self._bytes.labels("free", "store").set(free)
        self._bytes.labels("stored", "worlds").set(world_bytes)
        self._fetches.inc(more["fetches"])
        self._fetch_seconds.inc(more["fetch_ms"] / 1000)
        self._fetched.inc(more["bytes_fetched"])
        for kind, name in (("full", "refused_full"), ("disk", "failed_disk"), ("damaged", "blobs_damaged")):
            self._errors.labels(kind).inc(more[name])

    def count_blob_store_end(self) -> None:
        """Count an end of the store's process."""
        self._errors.labels("gone").inc()


class Metrics(
    StoreMetrics,
    ChainMetrics,
    GenerationMetrics,
    JudgeMetrics,
    SlotMetrics,
    BlobMetrics,
    MembershipMetrics,
    CallMetrics,
):
    """All metrics of one process. Count for example with `metrics.transactions.labels("seal", "won").inc()`."""

    def __init__(self) -> None:
        super().__init__()
        ProcessCollector(registry=self.registry)  # process_start_time_seconds, _resident_memory_bytes, ...
        self._gauge("gcore_build_info", "Always 1; the label has the version.", "version").labels(__version__).set(1)


T = TypeVar("T")


class InstrumentedStore:
    """A `gcore.store.types.Store` that passes calls to `inner` and records their duration in the metrics.

    Watches are not measured, because they do not end.
    """

    def __init__(self, inner: Store, metrics: Metrics, clock: Clock) -> None:
        self._inner = inner
        self._metrics = metrics
        self._clock = clock

    async def get(self, key: str) -> KeyValue | None:
        """See `Store.get`."""
        return await self._timed("get", self._inner.get(key))

    async def list(self, prefix: str) -> KeyListing:
        """See `Store.list`."""
        return await self._timed("list", self._inner.list(prefix))

    async def newest(self, prefix: str, limit: int, before: int | None = None) -> KeyListing:
        """See `Store.newest`."""
        return await self._timed("newest", self._inner.newest(prefix, limit, before))

    async def between(self, first: str, behind: str, limit: int) -> KeyListing:
        """See `Store.between`."""
        return await self._timed("between", self._inner.between(first, behind, limit))

    async def transact(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TxnResult:
        """See `Store.transact`."""
        return await self._timed("transact", self._inner.transact(compares, writes))

    async def grant(self, ttl: int) -> int:
        """See `Store.grant`."""
        return await self._timed("grant", self._inner.grant(ttl))

    async def keep_alive(self, lease: int) -> float:
        """See `Store.keep_alive`."""
        return await self._timed("keep_alive", self._inner.keep_alive(lease))

    async def revoke(self, lease: int) -> None:
        """See `Store.revoke`."""
        await self._timed("revoke", self._inner.revoke(lease))

    def watch(self, prefix: str) -> AsyncIterator[WatchBatch]:
        """See `Store.watch`."""
        return self._inner.watch(prefix)

    async def close(self) -> None:
        """See `Store.close`."""
        await self._inner.close()

    async def _timed(self, operation: str, call: Awaitable[T]) -> T:
        self._metrics.store_unavailable.labels(operation)  # create the series at 0
        begun = self._clock.monotonic()
        try:
            return await call
        except StoreUnavailable:
            self._metrics.store_unavailable.labels(operation).inc()
            raise
        finally:
            self._metrics.store_seconds.labels(operation).observe(max(self._clock.monotonic() - begun, 0.0))

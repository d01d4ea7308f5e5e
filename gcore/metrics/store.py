"""The store, and what goes through it: calls, guarded transactions, how much it holds.

How large the database is, is what etcd's members say of themselves; etcd's own metrics say more of each
(docs/watching.md). Measures nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from gcore.metrics.declared import CALL_BUCKETS_S, Declared
from gcore.store.standing import ALARMS, StoreStanding

RESULTS = ("won", "stale", "unknown")
"""What comes of a guarded transaction (`gcore.ledger.guarded`)."""


class StoreMetrics(Declared):
    """Of this process's calls, and of the members that it can ask."""

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
            "Seconds a call to the store took, answered or not.",
            CALL_BUCKETS_S,
            "operation",
        )
        self.store_unavailable = self._counter(
            "gcore_store_unavailable_total", "Calls to the store that had no answer in time.", "operation"
        )
        self._database = self._gauge(
            "gcore_store_database_bytes", "Bytes of a member's database file, as it says itself.", "endpoint"
        )
        self._in_use = self._gauge(
            "gcore_store_in_use_bytes",
            "Bytes of a member's database that are in use: defragmenting gives back the rest.",
            "endpoint",
        )
        self._alarm = self._gauge(
            "gcore_store_alarm",
            "Whether a member says that this alarm (NOSPACE, CORRUPT) is raised: 1 or 0.",
            "endpoint",
            "alarm",
        )
        self._certificate_ends = self._gauge(
            "gcore_store_certificate_expiry_timestamp_seconds",
            "When the certificate ends that a member shows to whoever connects, in seconds since the epoch.",
            "endpoint",
        )
        self.job_keys = self._gauge("gcore_store_job_keys", "Keys that the store holds of the job.", "job")
        self.job_bytes = self._gauge(
            "gcore_store_job_bytes", "Bytes that the store holds of the job, keys included, without its history.", "job"
        )

    def count_transaction(self, kind: str, result: str) -> None:
        """A guarded transaction has ended. With a kind's first one all its results are there."""
        for known in RESULTS:
            self.transactions.labels(kind, known).inc(known == result)

    def show_store_certificates(self, ends: Mapping[str, float]) -> None:
        """Set when the certificates of the store's members end, by host:port; one that does not answer is shown no more."""
        self._certificate_ends.clear()
        for endpoint, end in ends.items():
            self._certificate_ends.labels(endpoint).set(end)

    def show_members(self, members: Mapping[str, StoreStanding]) -> None:
        """Set what the store's members say of themselves, by host:port; one that does not answer is shown no more."""
        for gauge in (self._database, self._in_use, self._alarm):
            gauge.clear()
        for endpoint, standing in members.items():
            self._database.labels(endpoint).set(standing.database_bytes)
            self._in_use.labels(endpoint).set(standing.in_use_bytes)
            for alarm in ALARMS:
                self._alarm.labels(endpoint, alarm).set(alarm in standing.alarms)

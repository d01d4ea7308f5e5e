"""Who is there, who works on what, and what is waited for."""

from __future__ import annotations

from collections.abc import Mapping

from gcore.metrics.declared import Declared

JOB_STATES = ("running", "queued", "paused")


class MembershipMetrics(Declared):
    """Of the cluster as this process sees it, and of its own waits."""

    def __init__(self) -> None:
        super().__init__()
        self._nodes = self._gauge("gcore_nodes", "Controllers registered in the cluster.")
        self.ready = self._gauge(
            "gcore_ready", "Whether this controller has its lease and is registered, so that it can work: 1 or 0."
        )
        self.lives = self._counter(
            "gcore_incarnations_total", "Lives that this process began: each but the first followed a lost lease."
        )
        self._jobs = self._gauge(
            "gcore_jobs",
            "Jobs that have not ended, by whether they have slots (running), wait for some (queued) or are paused.",
            "state",
        )
        self._job_slots = self._gauge("gcore_job_slots", "Slots that the job may use now.", "job")
        self._shown_jobs: frozenset[str] = frozenset()
        self._node_slots = self._gauge("gcore_node_slots", "Slots of this node by state (usable, sick).", "state")
        self.certificate_ends = self._gauge(
            "gcore_certificate_expiry_timestamp_seconds",
            "When the first of this process's certificates ends (the one for callers, the one for the store), in seconds since the "
            "epoch; 0 without certificates.",
        )
        self.members = self._gauge("gcore_members", "Controllers that work on the job.", "job")
        self.shards_owned = self._gauge("gcore_shards_owned", "Shards assigned to this process.", "job")
        self._workers = self._gauge(
            "gcore_workers",
            "Workers of this node by pool and state (starting, serving, stopping, failed).",
            "pool",
            "state",
        )
        self._waiting = self._gauge("gcore_waiting", "Jobs that wait in this process now, by cause.", "cause")
        self._job_waits = self._gauge(
            "gcore_job_waiting_seconds",
            "Seconds that the job has been waiting for something, as this process sees it, by cause.",
            "job",
            "cause",
        )
        self._waited: dict[str, Mapping[str, float]] = {}
        self.stalls = self._counter(
            "gcore_stalls_total",
            "Waits of which nothing had moved for so long that an event tells it, by cause.",
            "cause",
        )
        self._waiting_seconds = self._counter(
            "gcore_waiting_seconds_total", "Seconds that jobs waited in this process, by cause.", "cause"
        )

    def show_cluster(self, nodes: int, workers: Mapping[tuple[str, str], int]) -> None:
        """Set how many controllers there are, and how many workers of this node by pool and state."""
        self._nodes.set(nodes)
        self._workers.clear()
        for (pool, state), count in workers.items():
            self._workers.labels(pool, state).set(count)

    def show_jobs(self, states: Mapping[str, int], slots: Mapping[str, int]) -> None:
        """Set how many jobs are in which state, and the slots of those that have any, by name."""
        for state in JOB_STATES:
            self._jobs.labels(state).set(states.get(state, 0))
        for job in self._shown_jobs - slots.keys():
            self._job_slots.remove_by_labels({"job": job})
        for job, count in slots.items():
            self._job_slots.labels(job).set(count)
        self._shown_jobs = frozenset(slots)

    def show_slots(self, slots: int, sick: int) -> None:
        """Set how many of this node's slots may be used, and how many are sick."""
        self._node_slots.labels("usable").set(slots - sick)
        self._node_slots.labels("sick").set(sick)

    def show_waits(self, job: str, seconds: Mapping[str, float]) -> None:
        """Set for how long the job has been waiting, by cause; of a cause that is over nothing is shown."""
        before = self._waited.get(job, {})
        self._waited[job] = dict(seconds)
        for cause in before.keys() - seconds.keys():
            self._job_waits.remove(job, cause)
        for cause, held in seconds.items():
            self._job_waits.labels(job, cause).set(held)
            self.stalls.labels(cause)  # there, before it counts anything
            # Less than before: it was over, and has begun again.
            more = held - before.get(cause, 0.0)
            self._waiting_seconds.labels(cause).inc(more if more >= 0 else held)
        for cause in before.keys() | seconds.keys():
            waiting = sum(cause in causes for causes in self._waited.values())
            self._waiting.labels(cause).set(waiting)

    def forget_job(self, job: str) -> None:
        """See `Declared.forget_job`; the job waits for nothing any more either."""
        self.show_waits(job, {})
        self._waited.pop(job, None)
        super().forget_job(job)

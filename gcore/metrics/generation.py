"""Engines and what they make, as the controller that asks them sees it.

What an engine says of itself stands in its own `/metrics`, and what its slot was doing in the books (`slots`).
"""

from __future__ import annotations

from itertools import product

from gcore.metrics.declared import WORK_BUCKETS_S, Declared


class GenerationMetrics(Declared):
    """Of the requests that this process makes, and of the groups that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = self._counter("gcore_samples_total", "Samples generated for this process.")
        self.generated_tokens = self._counter("gcore_generated_tokens_total", "Tokens generated for this process.")
        self.kept_tokens = self._counter(
            "gcore_kept_tokens_total", "Tokens of unfinished responses that were kept when their engine was lost."
        )
        self.engine_requests = self._counter(
            "gcore_engine_requests_total",
            "Requests to engines by pool and result (ok, aborted, refused, unreachable).",
            "pool",
            "result",
            known=product(("rollout", "reward"), ("ok", "aborted", "refused", "unreachable")),
        )
        self.engine_seconds = self._histogram(
            "gcore_engine_request_seconds", "Seconds a request to an engine took.", WORK_BUCKETS_S, "pool"
        )
        self.engine_open = self._gauge(
            "gcore_engine_open_requests", "Requests to engines that this process waits for now, by pool.", "pool"
        )
        self.groups_in_flight = self._gauge(
            "gcore_groups_in_flight", "Groups this process has started and not finished.", "job"
        )
        self.oldest_seconds = self._gauge(
            "gcore_oldest_in_flight_seconds", "Seconds since the oldest prompt in flight here was begun.", "job"
        )
        self.oldest_steps = self._gauge(
            "gcore_oldest_in_flight_steps",
            "Steps committed since the oldest prompt in flight here was begun; rollout.staleness bounds it.",
            "job",
        )
        self.groups_offered = self._gauge(
            "gcore_groups_offered", "Finished groups this process holds and offers.", "job"
        )

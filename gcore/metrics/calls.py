"""Calls of the job API that this process answered, by method and by the status they ended with."""

from __future__ import annotations

from gcore.metrics.declared import CALL_BUCKETS_S, Declared


class CallMetrics(Declared):
    """Of one process. Methods are those that are served; a call of any other is counted as `unknown`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self._counter(
            "gcore_api_calls_total",
            "Calls of the job API that were answered, by method and status code.",
            "method",
            "code",
        )
        self.call_seconds = self._histogram(
            "gcore_api_call_seconds", "Seconds that a unary call of the job API took.", CALL_BUCKETS_S, "method"
        )
        self.open_streams = self._gauge("gcore_api_open_streams", "Streams of the job API that are open.", "method")

"""atheris: random bytes as requests of the job API. The server answers that they are no message or that fields are wrong: `make fuzz`."""

from __future__ import annotations

import contextlib
import sys

import atheris

with atheris.instrument_imports(include=["controllers.api"]):
    from controllers.api.fleet import parse_usage_query
    from controllers.api.job_messages import parse_query, update_change
    from controllers.api.jobs import check_creation
    from controllers.api.logs import check_log_request, line_time
    from controllers.api.streams import parse_position

from google.protobuf.message import DecodeError

from gcore.api.v1 import jobs_pb2 as pb
from gcore.errors import GcoreError
from gcore.ledger.records.cluster import Claim

LOOKS = (
    (pb.CreateJobRequest, check_creation),
    (pb.ListJobsRequest, lambda request: parse_query(request, None)),
    (pb.StreamLogsRequest, check_log_request),
    (pb.StreamMetricsRequest, parse_position),
    (pb.UpdateJobRequest, lambda request: update_change(request)(Claim())),
    (pb.GetUsageRequest, lambda request: parse_usage_query(request, 1e9)),
)


def one(data: bytes) -> None:
    """Raises what is a defect."""
    line_time(data.decode(errors="replace"))
    for kind, look in LOOKS:
        with contextlib.suppress(DecodeError, GcoreError):
            look(kind.FromString(data))


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()

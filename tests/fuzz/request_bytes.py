"""atheris: bytes as requests of the job API, and what looks at them first. The answer is that they are no message, or that fields of
them are wrong: `make fuzz`."""

from __future__ import annotations

import contextlib
import sys

import atheris

with atheris.instrument_imports(include=["controllers.api"]):
    from controllers.api.fleet import asked_usage
    from controllers.api.job_messages import updated, wanted
    from controllers.api.jobs import check_creation
    from controllers.api.logs import check, time_of
    from controllers.api.streams import place_of

from google.protobuf.message import DecodeError

from gcore.api.v1 import jobs_pb2 as pb
from gcore.errors import GcoreError
from gcore.ledger.records.cluster import Claim

LOOKS = (
    (pb.CreateJobRequest, check_creation),
    (pb.ListJobsRequest, lambda request: wanted(request, None)),
    (pb.StreamLogsRequest, check),
    (pb.StreamMetricsRequest, place_of),
    (pb.UpdateJobRequest, lambda request: updated(request)(Claim())),
    (pb.GetUsageRequest, lambda request: asked_usage(request, 1e9)),
)


def one(data: bytes) -> None:
    """Raises what is a defect."""
    time_of(data.decode(errors="replace"))
    for kind, look in LOOKS:
        with contextlib.suppress(DecodeError, GcoreError):
            look(kind.FromString(data))


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()

"""How long what is waited for, and which states a job ends in."""

from __future__ import annotations

from dataclasses import dataclass

from gcore.api.v1 import jobs_pb2 as pb

ENDED = frozenset({pb.JOB_STATE_SUCCEEDED, pb.JOB_STATE_FAILED, pb.JOB_STATE_CANCELLED})
MAX_ANSWER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Patience:
    """How long what is waited for, in seconds."""

    call_s: float = 10.0
    """For the answer to one call."""
    create_s: float = 1800.0
    """For the creation of a job, before which its data are read and checked, and copied if they are no JSONL."""
    audit_s: float = 600.0
    """For an audit, which reads the whole log."""
    samples_s: float = 120.0
    """For samples, which may be many."""
    quiet_s: float = 5.0
    """Following, without an event: then the controller is asked whether it is still there."""
    probe_s: float = 3.0
    """For the answer to that."""
    retry_s: float = 0.3
    """Between two rounds over all controllers."""
    lost_s: float = 60.0
    """Without any controller that answers, before following gives up."""


def job_state_name(state: int) -> str:
    """`RUNNING` for JOB_STATE_RUNNING; `UNKNOWN` for a state that this version does not know, or that nobody can read."""
    if state == pb.JOB_STATE_UNSPECIFIED:
        return "UNKNOWN"
    try:
        return pb.JobState.Name(state).removeprefix("JOB_STATE_")
    except ValueError:
        return "UNKNOWN"

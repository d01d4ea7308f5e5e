"""A job's events as a client holds them: one thing that happened, with a number that grows by happening.

The same event is a message of the job API, a line of `events.jsonl` and a step of a view's fold. `kind` says which keys
`data` has; a reader passes over kinds and keys it does not know, because an older client meets a newer cluster. Imports
nothing heavy; knows neither gRPC nor the terminal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gcore.api.v1 import jobs_pb2


@dataclass(frozen=True, slots=True)
class JobEvent:
    """`sequence` is unique in the job and grows; `time` is seconds since the epoch, for people."""

    sequence: int
    time: float
    kind: str
    message: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_message(cls, message: jobs_pb2.JobEvent) -> JobEvent:
        """From the job API. Data that is no JSON object is treated as absent."""
        return cls(message.sequence, message.time, message.kind, message.message, _object(message.data_json))

    @classmethod
    def from_line(cls, line: str) -> JobEvent:
        """From a line of `events.jsonl`. Raises ValueError on anything else."""
        tree = json.loads(line)
        if not isinstance(tree, dict) or not isinstance(tree.get("sequence"), int):
            raise ValueError(f"not an event: {line[:80]!r}")
        data = tree.get("data")
        return cls(
            sequence=tree["sequence"],
            time=float(tree.get("time", 0.0)),
            kind=str(tree.get("kind", "note")),
            message=str(tree.get("message", "")),
            data=data if isinstance(data, dict) else {},
        )

    def to_line(self) -> str:
        """One line of JSON, without the line break."""
        return json.dumps(
            {
                "sequence": self.sequence,
                "time": self.time,
                "kind": self.kind,
                "message": self.message,
                "data": dict(self.data),
            },
            separators=(",", ":"),
        )


def _object(text: str) -> dict[str, Any]:
    try:
        tree = json.loads(text) if text else {}
    except ValueError:
        return {}
    return tree if isinstance(tree, dict) else {}

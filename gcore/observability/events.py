"""A job's events as clients see them: `JobEvent`, and its conversion from the job API and from `events.jsonl`.

`kind` defines which keys `data` has. Readers ignore unknown kinds and keys, because an older client may talk to a newer
cluster. This module imports nothing heavy and depends on neither gRPC nor the terminal.
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
    """An event of a job. `sequence`: unique in the job and increasing. `time`: seconds since the epoch, for display."""

    sequence: int
    time: float
    kind: str
    message: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_message(cls, message: jobs_pb2.JobEvent) -> JobEvent:
        """Convert an event message of the job API. Data that is not a JSON object counts as absent."""
        return cls(message.sequence, message.time, message.kind, message.message, _object(message.data_json))

    @classmethod
    def from_line(cls, line: str) -> JobEvent:
        """Parse a line of `events.jsonl`. Raises ValueError if it is not an event."""
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
        """Return the event as a line of `events.jsonl`, without the line break."""
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

"""What a controller and a process that scores for it say to each other: JSON, one value a line, over a pair of sockets.

    controller → process   {"rewards": [[SOURCE, SPEC]...], "memory_mb": 4096}   once
    process → controller   {"ready": true} or {"failed": {...}}                once, when the rewards are loaded or cannot be
    controller → process   [[REWARD, FIELDS, [[TEXT, TOKENS, TRUNCATED, ENVIRONMENT]...]]...]   a batch; REWARD is an index
    process → controller   [VALUE, [[PART, NUMBER]...]] or {"what": ...}       for each response, in order, a few at once

Answers of quick rewards are sent together, a few milliseconds' worth; so which response a process hangs or dies at is told by a
few bytes of memory that both see, where the process writes what it begins (`Begun`). Nothing here runs anything.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from gcore.config.spec import RewardSpec
from gcore.errors import GcoreError
from gcore.plugins import MAX_TRACE, PluginFault
from gcore.reward.registry import Response, RewardError, RewardResult
from gcore.reward.scoring import Scored

LONGEST_WORDS = 2000
"""Characters of what an error says, where, and what to do: a reward's own may hold any text."""
Call = tuple[int, Mapping[str, Any], Response]
"""The number of a reward, a prompt's entry, a response."""


class Begun:
    """Which response of which batch a process has begun last: memory that it shares with its controller."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _BEGUN.size)

    def write(self, batch: int, number: int) -> None:
        """The process: `number` of `batch` is begun."""
        _BEGUN.pack_into(self._memory, 0, batch, number)

    def read(self, batch: int) -> int:
        """The controller: the number of the response of `batch` that was begun last; 0 if the batch was not."""
        found, number = _BEGUN.unpack_from(self._memory)
        return number if found == batch else 0

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


_BEGUN = struct.Struct("<QQ")
BEGUN_BYTES = _BEGUN.size


def line_of(value: Any) -> bytes:
    """One line. ASCII, so that nothing in a text can end it or cannot be written."""
    return json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n"


def setup_line(sources: Sequence[str], specs: Sequence[RewardSpec], memory_mb: int) -> bytes:
    """The first line to a process. `sources`: for each reward, the source that it is told by."""
    rewards = [[source, spec.model_dump(mode="json")] for source, spec in zip(sources, specs, strict=True)]
    return line_of({"rewards": rewards, "memory_mb": memory_mb})


def batch_line(calls: Sequence[Call]) -> bytes:
    """A batch. An entry that neighbours share is written once."""
    groups: list[tuple[int, Mapping[str, Any], list[tuple[str, int | None, bool, float | None]]]] = []
    for reward, fields, response in calls:
        if not groups or groups[-1][0] != reward or groups[-1][1] is not fields:
            groups.append((reward, fields, []))
        groups[-1][2].append((response, response.tokens, response.truncated, response.environment))
    return line_of(groups)


def calls_of(batch: Any) -> list[Call]:
    """Inverse of `batch_line`."""
    return [
        (reward, fields, Response(text, *known)) for reward, fields, responses in batch for text, *known in responses
    ]


def answer_line(scored: Scored) -> bytes:
    """A response's reward, or why it has none."""
    if isinstance(scored, RewardError):
        return line_of(_told(scored, scored.trace))
    return line_of((scored.value, scored.parts))


def answer_of(value: Any) -> Scored:
    """Inverse of `answer_line`. Raises ValueError on anything else."""
    match value:
        case [float() | int() as number, list() as parts]:
            return RewardResult(float(number), tuple((str(name), float(part)) for name, part in parts))
        case {"what": str(what), "where": where, "fix": fix, "trace": str(trace)}:
            return RewardError(what, where=where, fix=fix, trace=trace)
    raise ValueError(f"no answer: {value!r}")


def failed_line(fault: PluginFault) -> bytes:
    """A reward that cannot be had."""
    return line_of({"failed": _told(fault, fault.trace)})


def check_ready(value: Any) -> None:
    """Raises PluginFault if the rewards cannot be had, ValueError for anything that is no such message."""
    match value:
        case {"ready": True}:
            return
        case {"failed": {"what": str(what), "where": where, "fix": fix, "trace": str(trace)}}:
            raise PluginFault(what, where=where, fix=fix, trace=trace)
    raise ValueError(f"neither ready nor failed: {value!r}")


def _told(error: GcoreError, trace: str) -> dict[str, str | None]:
    words = {"where": error.where, "fix": error.fix}
    said = {name: None if word is None else str(word)[:LONGEST_WORDS] for name, word in words.items()}
    return {"what": str(error.what)[:LONGEST_WORDS], **said, "trace": trace[-MAX_TRACE:]}

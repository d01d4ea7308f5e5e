"""A step as trace events (the JSON that ui.perfetto.dev and chrome://tracing open): a process a node, a track a slot, one for the job's
phases and one for the moves of its placement. Pure.

A slice is named by what the slot was most of the time; how many of its seconds were what stands in its arguments, and beside the
slot a counter shows how much of it was busy. What nobody can say is a slice too, called `unbooked`. Times are microseconds from the moment
when the first node began the step; nodes are put beside one another by their wall clocks, so as exactly as those agree.

Slices of a track touch and never overlap, in what is written too: who reads them nests by time. Processes are counted from 1, for to
Perfetto process 0 is the machine's idle one; a move is an instant of its own track, for one of the whole trace would stand on none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gcore.ledger.books_file import BookLine, Stretch
from gcore.ledger.placing import Move

US = 1e6
PHASES_TRACK = 1
JOB, MOVES_TRACK = 1, 1
UNBOOKED = "unbooked"
COLOURS = {
    "busy rollout": "thread_state_running",
    "busy reward": "rail_animation",
    "busy train": "thread_state_runnable",
    "idle": "grey",
    "switching": "thread_state_iowait",
    "syncing": "rail_response",
    "failed": "terrible",
    UNBOOKED: "bad",
}
"""Of chrome://tracing's palette; Perfetto chooses its own."""


def trace_of(job: str, lines: Mapping[str, BookLine], moves: Sequence[Move]) -> dict[str, Any]:
    """The whole document. `lines`: the step, by node; of `moves` those that were made while it went on are shown."""
    began = min(line.book.began for line in lines.values())
    ended = max(line.book.began + line.book.seconds for line in lines.values())
    events: list[dict[str, Any]] = [
        _named("process_name", JOB, 0, f"job {job}"),
        _named("thread_name", JOB, MOVES_TRACK, "moves"),
    ]
    for number, (node, line) in enumerate(sorted(lines.items()), start=JOB + 1):
        events += _of_node(number, node, line, line.book.began - began)
    events += (_move(move, began) for move in moves if began <= move.time <= ended)
    versions = {str(line.book.version) for line in lines.values()}
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"job": job, "step": ", ".join(sorted(versions))},
    }


def _of_node(pid: int, node: str, line: BookLine, offset: float) -> Iterator[dict[str, Any]]:
    yield _named("process_name", pid, 0, f"node {node}")
    yield _named("thread_name", pid, PHASES_TRACK, "phases")
    for phase in line.phases:
        yield _slice(pid, PHASES_TRACK, phase.most or UNBOOKED, "phase", offset + phase.begin, offset + phase.end, {})
    for tid, (slot, spans) in enumerate(sorted(line.spans.items()), start=PHASES_TRACK + 1):
        yield _named("thread_name", pid, tid, slot)
        for span in spans:
            state = span.most or UNBOOKED
            told = {name: round(seconds, 4) for name, seconds in sorted(span.seconds.items())}
            yield _slice(pid, tid, state, state.partition(" ")[0], offset + span.begin, offset + span.end, told)
            yield _counter(pid, f"busy {slot}", offset + span.begin, _busy(span))
        if spans:
            yield _counter(pid, f"busy {slot}", offset + spans[-1].end, 0.0)


def _busy(span: Stretch) -> float:
    """The share of it in which the slot was at work."""
    length = span.end - span.begin
    return sum(s for state, s in span.seconds.items() if state.startswith("busy ")) / length if length > 0 else 0.0


def _slice(
    pid: int, tid: int, name: str, kind: str, begin: float, end: float, told: Mapping[str, float]
) -> dict[str, Any]:
    at, until = _us(begin), _us(end)
    event = {"ph": "X", "name": name, "cat": kind, "pid": pid, "tid": tid, "ts": at, "dur": until - at}
    colour = COLOURS.get(name) or COLOURS.get(kind)
    return event | {"args": {"seconds": dict(told)} if told else {}} | ({"cname": colour} if colour else {})


def _counter(pid: int, name: str, at: float, value: float) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": pid, "ts": _us(at), "args": {"busy": round(value, 4)}}


def _move(move: Move, began: float) -> dict[str, Any]:
    said = {
        "reason": move.reason,
        "slots": list(move.slots),
        "gain_s": move.gain_s,
        "cost_s": move.cost_s,
        "expected_s": move.expected_s,
        "before_s": move.before_s,
        "idle": dict(move.idle),
        "outcome": move.outcome.model_dump(mode="json", exclude_none=True) if move.outcome is not None else None,
    }
    name = f"{move.kind.value}: plan {move.generation}"
    args = {key: value for key, value in said.items() if value not in (None, "", [], {})}
    at = _us(move.time - began)
    return {"ph": "i", "s": "t", "name": name, "cat": "move", "pid": JOB, "tid": MOVES_TRACK, "ts": at, "args": args}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _us(seconds: float) -> int:
    return round(seconds * US)

"""Tables, sentences and JSON for `gcore placement`, `gcore top` and `gcore trace`.

The split is the number of slots of each pool (rollout, reward, train). A move is a change of the placement, and a stay
is a period of steps after which the policy changed nothing. Reasons come from policies and files, which may have any
content. They are never printed as markup, and control characters are escaped.

`top` shows the newest step with slot accounting on each node, not the current step. Its numbers are slot time divided
by step time: `2.1 slots` means the time of 2.1 slots.

`trace` writes Chrome trace events: one process per node, one track per slot, and one track each for phases and moves. A
slice is named after the slot's most frequent state. Its arguments have the seconds of each state, and a counter shows
the busy share. Time without accounting is a slice `unbooked`. Times are microseconds since the first node began the
step; nodes are aligned by their wall clocks. Slices of a track touch but never overlap, because viewers nest by time.
Processes are numbered from 1, because process 0 is Perfetto's idle process.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from controllers.accounting.states import add_times
from controllers.cli.output import format_seconds, printable_text
from controllers.cli.terminal import QUIET, Pairs, Rows, rows_table
from controllers.cli.view.state import PHASE_NAMES
from gcore.config.placement import FIXED_POLICIES
from gcore.ledger.records.cluster import Slot
from gcore.ledger.records.job import HoldPeriod, Move, MoveKind, Moves, Pin, Plan
from gcore.ledger.records.slot_accounting import AccountLine, EngineSums, Span, StepAccount, sum_engines
from placement.assign import split_of
from placement.moves import (
    foretold_in_words,
    move_in_words,
    numbers_in_words,
    outcome_in_words,
    span_in_words,
    split_from,
    stay_in_words,
)
from placement.slots import count_noun

if TYPE_CHECKING:
    from gcore.api.v1 import jobs_pb2 as pb

MOST_SHOWN = 16_384
"""Maximum characters of a line. A reason has at most some hundreds, plus the slots of its move."""

SURPRISE = 0.1
"""Relative difference between measured and expected step time above which it is mentioned."""


def plan_of(reply: pb.PlacementReply) -> Plan | None:
    """Decode the current plan (the worker on each slot); None before the job has started."""
    return Plan.decode(reply.plan, "the job's plan") if reply.plan else None


def moves_of(reply: pb.PlacementReply) -> Moves:
    """Decode the newest moves and periods without moves from a placement reply."""
    return Moves.decode(reply.moves, "the job's moves") if reply.moves else Moves()


def pin_words(reply: pb.PlacementReply) -> str:
    """The parts of the placement that a user pinned, as text."""
    return str(Pin.decode(reply.pin, "what is fixed")) if reply.pin else str(Pin())


def placement_rows(reply: pb.PlacementReply) -> dict[str, str]:
    """The rows of `gcore placement show` above its table."""
    plan = plan_of(reply)
    rows = {
        "job": f"{reply.name} ({reply.uid})",
        "policy": reply.policy + " (dry run: proposes moves but makes none)" * reply.dry_run,
        "step": str(reply.step),
    }
    if plan is None:
        return rows | {"plan": "none: the job has not started"}
    rows["slots"] = split_in_words(plan, reply.away)
    rows["plan"] = _shown(f"generation {plan.generation}: {plan.reason}")
    rows["planned by"] = reply.leader or "no controller now"
    rows["pinned"] = pin_words(reply)
    fixed = bool(reply.pin) and Pin.decode(reply.pin).fixes
    rows["elastic reassignment"] = "no" if not reply.lends else "not while pinned" if fixed else "yes"
    moves = moves_of(reply)
    rows["moves"] = str(moves.total)
    if moves.newest is not None:
        rows["newest move"] = _shown(f"{_at(moves.newest)}: {move_in_words(moves.newest)}")
    if moves.stays:
        stay = moves.stays[-1]
        rows["newest decision" if moves.newest is None or stay.time > moves.newest.time else "before that"] = _shown(
            f"{span_in_words(stay)}: {stay_in_words(stay)}"
        )
    if reply.away:
        rows["absent nodes"] = ", ".join(reply.away)
    return rows


def divide_plan(plan: Plan, away: Collection[str]) -> tuple[Plan, Plan]:
    """Divide a plan into its part on present nodes and its part on absent nodes. `away`: names of the absent nodes."""

    def on(*, there: bool) -> Plan:
        ranks = tuple(one for one in plan.ranks if (one.node not in away) is there)
        engines = tuple(one for one in plan.engines if (one.node not in away) is there)
        return plan.model_copy(update={"ranks": ranks, "engines": engines})

    return on(there=True), on(there=False)


def split_in_words(plan: Plan, away: Collection[str]) -> str:
    """Say how many slots each pool has on present nodes, and how many slots are on absent nodes (`away`)."""
    here, gone = divide_plan(plan, away)
    if not (lost := slot_roles(gone)):
        return str(split_of(here))
    nodes = " and ".join(sorted({slot.node for slot in lost}))
    pools = ", ".join(f"{count} {pool}" for pool, count in _pools(gone).items() if count)
    together = split_of(gone).mode == "colocated"
    had = "" if together or not pools else f", planned for {pools},"
    return (
        f"{split_of(here)}; {count_noun(len(lost), 'slot')} of {nodes}{had} {'is' if len(lost) == 1 else 'are'} absent"
    )


def _pools(plan: Plan) -> dict[str, int]:
    split = split_of(plan)
    return {"rollout": split.rollout, "reward": split.reward, "train": split.train}


def slot_roles(plan: Plan) -> dict[Slot, list[str]]:
    """The workers that a plan puts on each slot, as text, awake ones first. An engine on several slots is listed with
    their numbers."""
    found: dict[Slot, list[str]] = {}
    for rank in sorted(plan.ranks, key=lambda one: one.rank):
        found.setdefault(rank.on, []).append(f"train rank {rank.rank}")
    for place in sorted(plan.engines, key=lambda one: (one.asleep, one.judge)):
        what = f"judge {place.judge}" if place.judge else "rollout"
        if place.further:
            what += f" on {'+'.join(slot.rpartition(':')[2] for slot in place.slots)}"
        for slot in place.on:
            found.setdefault(slot, []).append(what + " (asleep)" * place.asleep)
    return dict(sorted(found.items()))


def slots_table(reply: pb.PlacementReply) -> Rows:
    """A table with one row per slot: node, slot, and the workers on it."""
    plan = plan_of(reply)
    rows = [
        [_shown(one) for one in (slot.node + " (absent)" * (slot.node in reply.away), slot.slot, ", ".join(what))]
        for slot, what in (slot_roles(plan).items() if plan is not None else ())
    ]
    return rows_table(("node", "slot", "serves"), rows)


def placement_tree(reply: pb.PlacementReply) -> dict[str, Any]:
    """The placement as a JSON object: plan, slots per pool, pins, and the workers on each slot."""
    plan = plan_of(reply)
    here, gone = (None, None) if plan is None else divide_plan(plan, reply.away)
    return {
        "uid": reply.uid,
        "job": reply.name,
        "policy": reply.policy,
        "dry_run": reply.dry_run,
        "lends": reply.lends,
        "step": reply.step,
        "planned_by": reply.leader or None,
        "generation": plan.generation if plan is not None else None,
        "split": None if here is None else {"mode": split_of(here).mode, **_pools(here)},
        "split_away": None if gone is None or not reply.away else _pools(gone),
        "fixed": json.loads(Pin.decode(reply.pin).model_dump_json(exclude={"schema_version"})) if reply.pin else None,
        "slots": {} if plan is None else {str(slot): what for slot, what in slot_roles(plan).items()},
        "moves": moves_of(reply).total,
        "away": list(reply.away),
    }


def move_tree(move: Move) -> dict[str, Any]:
    """A placement change as a JSON object, with sentences about the change (`sentence`) and its measured effect
    (`came_of_it`)."""
    tree: dict[str, Any] = json.loads(move.model_dump_json())
    return {**tree, "sentence": move_in_words(move), "came_of_it": outcome_in_words(move)}


def history_tree(moves: Sequence[Move], stays: Sequence[HoldPeriod]) -> list[dict[str, Any]]:
    """Moves, and periods without moves (kind `stay`), as JSON objects, oldest first."""
    told = [(move.time, move_tree(move)) for move in moves]
    for stay in stays:
        tree = {"kind": "stay", **json.loads(stay.model_dump_json()), "sentence": stay_in_words(stay)}
        told.append((stay.began, tree))
    return [tree for _, tree in sorted(told, key=lambda one: one[0])]


def placement_story(
    name: str, reply: pb.PlacementReply | None, moves: Sequence[Move], left_out: int, stays: Sequence[HoldPeriod] = ()
) -> list[str]:
    """The lines of `gcore placement explain`: the current placement, each move with its reason, expected and measured effect, and the reasons
    why there was no move."""
    lines = []
    if reply is not None:
        plan = plan_of(reply)
        by = f" on {reply.leader}" if reply.leader else ""
        lines.append(f"Job {name} is placed by policy {reply.policy}{by}; {reply.step} steps are committed.")
        if plan is not None:
            lines.append(f"Now: {split_in_words(plan, reply.away)} (plan {plan.generation}).")
        if (fixed := pin_words(reply)) != str(Pin()):
            lines.append(f"Pinned by a user: {fixed}.")
        if reply.dry_run:
            lines.append("Dry run: the policy proposes moves but makes none.")
    else:
        lines.append(f"Job {name}, read from its run folder because no cluster is running.")
    if not moves:
        why = (
            f": policy {reply.policy} never moves slots" if reply is not None and reply.policy in FIXED_POLICIES else ""
        )
        lines.append(f"There were no moves{why}.")
    if left_out:
        lines.append(f"{left_out} earlier moves are not shown.")
    told = [(move.time, _told(move, before)) for before, move in zip((None, *moves), moves, strict=False)]
    told += [(stay.began, _stayed(stay)) for stay in stays]
    for _, some in sorted(told, key=lambda one: one[0]):
        lines += ["", *(_shown(line) for line in some)]
    return lines


def _shown(text: str) -> str:
    return printable_text(text, MOST_SHOWN)


def _clock(time: float) -> str:
    """The UTC time of day as the beginning of a line; empty if `time` (seconds since the epoch) is 0 or invalid."""
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return f"{datetime.fromtimestamp(time, UTC):%H:%M:%S} UTC, " if time else ""
    return ""


def _at(move: Move) -> str:
    """Say when a move happened: at the start, after a step or within a step."""
    if move.kind is MoveKind.BEGIN:
        return "at the start"
    return f"within step {move.step + 1}" if move.within else f"after step {move.step}"


def _told(move: Move, before: Move | None) -> list[str]:
    """The lines of `gcore placement explain` about one move. `before`: the previous move, or None."""
    lines = [f"{_clock(move.time)}{_at(move)}: {move_in_words(move)}."]
    idle = {pool: share for pool, share in move.idle.items() if pool in ("rollout", "reward", "train")}
    if not all(f"{pool} was idle for" in move.reason for pool in idle):
        lines.append("  Idle before: " + ", ".join(f"{pool} {share:.0%}" for pool, share in idle.items()) + ".")
    if said := numbers_in_words(move):
        alone = "; the step time without the move cannot be measured" if move.kind is MoveKind.LEND else ""
        lines.append(f"  Expected: {said}{alone}.")
    if before is not None and move.by and before.by not in ("", move.by):
        lines.append(f"  Planned by {move.by} from here on; before by {before.by}.")
    if move.slots:
        more = f", and {move.more_slots} more" if move.more_slots else ""
        lines.append(f"  Slots: {_slots_in_words(move.slots)}{more}.")
    if said := outcome_in_words(move):
        lines.append(f"  Measured: {said}{_beside_expected(move)}.")
    return lines


def _stayed(stay: HoldPeriod) -> list[str]:
    lines = [f"{_clock(stay.began)}{span_in_words(stay)}: {stay_in_words(stay)}."]
    if said := foretold_in_words(stay.foretold):
        lines.append(f"  Measured: {said}.")
    return lines


def _beside_expected(move: Move) -> str:
    """Say whether the steps after a move took longer or shorter than expected; empty if the difference is at most
    `SURPRISE`."""
    took = None if move.outcome is None else move.outcome.step_s
    if took is None or move.expected_s is None or move.within or move.state != "done":
        return ""
    if abs(took - move.expected_s) <= SURPRISE * move.expected_s:
        return ""
    return f"; this is {'longer' if took > move.expected_s else 'shorter'} than expected"


def _by_node(nodes: Mapping[str, Sequence[str]]) -> str:
    return " and ".join(f"{', '.join(numbers)} on {node}" for node, numbers in nodes.items())


def _slots_in_words(slots: Sequence[str]) -> str:
    """Group the slots of a move by their change. Lines `NODE/KIND:NUMBER was -> is` become `rollout -> reward: 3, 4, 5
    on node-0 and 6 on node-1`; other lines are unchanged."""
    found: dict[str, dict[str, list[str]]] = {}
    others = []
    for line in slots:
        name, _, change = line.partition(" ")
        node, _, slot = name.rpartition("/")
        number = slot.rpartition(":")[2]
        if node and number.isdecimal() and change:
            found.setdefault(change, {}).setdefault(node, []).append(number)
        else:
            others.append(line)
    told = [f"{change}: {_by_node(nodes)}" for change, nodes in found.items()]
    return "; ".join([*told, *others])


def history_table(moves: Sequence[Move]) -> Rows:
    """A table with one row per placement change: when, kind, state, slots before and after, expected and measured step
    time, reason."""
    rows = (
        (
            _at(move),
            move.kind.value,
            move.state,
            "" if move.kind is MoveKind.BEGIN else str(split_from(move.before)),
            str(split_from(move.after)),
            "" if move.expected_s is None else f"{move.expected_s:.1f} s",
            "" if move.outcome is None or move.outcome.step_s is None else f"{move.outcome.step_s:.1f} s",
            _shown(move.reason),
        )
        for move in moves
    )
    return rows_table(("when", "kind", "state", "from", "to", "expected", "measured", "why"), rows)


HOLDS = {
    "barrier": "training: the batch is complete, and generation must wait for its weights",
    "waiting_weights": "the weight sync: engines wait for the weights of the newest step",
    "tail": "the tail: all requests are running, and the last responses and verdicts are missing",
    "back_pressure": "admission: no new requests are allowed (judges, rollout.concurrency or rollout.staleness)",
    "no_work": "generation: there are no inputs yet",
}
"""What idle slots wait for, by the cause in their state."""

BAR = 30


@dataclass(frozen=True)
class JobTop:
    """What `gcore top` shows of a job. `books`: the slot accounting of the newest step, by node. `folder`: the run
    folder, if it was read from there; else empty."""

    name: str
    uid: str
    state: str
    step: int
    steps: str
    books: Mapping[str, StepAccount]
    folder: str = ""
    pictures: bool = False
    """Whether the policy generates pictures, whose tokens are denoising steps."""

    @property
    def slots(self) -> int:
        """Number of the job's slots, on the nodes with slot accounting."""
        return sum(book.slots for book in self.books.values())

    @property
    def by_state(self) -> dict[str, float]:
        """Number of slots in each state, averaged over the newest step (slot-seconds divided by the step time), over
        all nodes."""
        total: dict[str, float] = {}
        for book in self.books.values():
            if book.seconds > 0:
                total = add_times(total, {state: told / book.seconds for state, told in book.booked.items()})
                total = add_times(total, {"unbooked": book.unbooked / book.seconds} if book.unbooked else {})
        return total

    @property
    def step_s(self) -> float:
        """Duration of the newest step in seconds."""
        return max((book.seconds for book in self.books.values()), default=0.0)

    @property
    def error(self) -> float:
        """The share of slot time that is unaccounted or counted twice, 0 to 1."""
        total = sum(book.seconds * book.slots for book in self.books.values())
        return sum(book.error * book.seconds * book.slots for book in self.books.values()) / total if total else 0.0

    @property
    def engines(self) -> dict[str, EngineSums]:
        """Work of the inference engines summed over all nodes, by pool."""
        return sum_engines(self.books.values())

    @property
    def bottleneck(self) -> str:
        """The cause (a key of `HOLDS`) that most idle slot time is due to; empty if no slot is idle."""
        causes: dict[str, float] = {}
        for state, slots in self.by_state.items():
            if state.startswith("idle "):
                cause = state.rpartition(" ")[2]
                causes[cause] = causes.get(cause, 0.0) + slots
        return max(causes, key=lambda cause: (causes[cause], cause), default="")


def top_rows(top: JobTop) -> Iterable[tuple[str, str]]:
    """The rows of `gcore top` above its table."""
    yield "job", f"{top.name} {top.state}"
    yield (
        "step",
        f"{top.step}/{top.steps}"
        + (f", the newest recorded step took {format_seconds(top.step_s)}" if top.books else ""),
    )
    yield "slots", f"{top.slots} on {len(top.books)} nodes; {top.error:.2%} of their time is unaccounted"
    if top.bottleneck:
        idle = sum(slots for state, slots in top.by_state.items() if state.startswith("idle "))
        yield "idle", f"{idle:.1f} slots, most of them waiting for {HOLDS[top.bottleneck]}"
    for pool, sums in sorted(top.engines.items()):
        if sums.active_s > 0:
            speed = sums.tokens / top.step_s if top.step_s else 0.0
            unit = "denoising steps" if top.pictures and pool == "rollout" else "tokens"
            yield pool, f"{sums.running_s / sums.active_s:.1f} concurrent requests per engine, {speed:,.0f} {unit}/s"
    if top.folder:
        yield "read from", f"{printable_text(top.folder)}, because no cluster is running"
        yield "see also", f"`gcore trace {top.uid} --step N`, `gcore placement explain {top.uid}`"


def states_table(top: JobTop) -> Table:
    """A table of the number of slots in each state (busy, idle and others), largest first."""
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_row(*(Text(word, style=QUIET) for word in ("state", "slots", "")))
    for state, slots in sorted(top.by_state.items(), key=lambda item: (-item[1], item[0])):
        share = slots / top.slots if top.slots else 0.0
        table.add_row(
            Text(state), Text(f"{slots:.1f}", justify="right"), Text("█" * round(share * BAR) + f" {share:.0%}")
        )
    return table


def render_top(top: JobTop) -> Group:
    """The complete output of `gcore top`."""
    parts: list[Any] = [Pairs(dict(top_rows(top)))]
    if top.books:
        parts += [Text(""), states_table(top)]
    else:
        parts.append(Text(f"There is no slot accounting{'' if top.folder else ' yet'}.", style=QUIET))
    return Group(*parts)


def top_tree(top: JobTop) -> dict[str, Any]:
    """The slot accounting as a JSON object."""
    return {
        "job": top.name,
        "state": top.state,
        "step": top.step,
        "slots": top.slots,
        "step_seconds": top.step_s,
        "by_state": {state: round(slots, 4) for state, slots in sorted(top.by_state.items())},
        "error": round(top.error, 6),
        "bottleneck": top.bottleneck,
        "engines": {pool: sums.model_dump(mode="json") for pool, sums in sorted(top.engines.items())},
        "nodes": {node: book.model_dump(mode="json") for node, book in sorted(top.books.items())},
    }


US = 1e6
PHASES_TRACK = 1
JOB, MOVES_TRACK = 1, 1
UNACCOUNTED = "unbooked"

COLOURS = {
    "busy rollout": "thread_state_running",
    "busy reward": "rail_animation",
    "busy train": "thread_state_runnable",
    "idle": "grey",
    "switching": "thread_state_iowait",
    "syncing": "rail_response",
    "failed": "terrible",
    UNACCOUNTED: "bad",
}
"""Colors of chrome://tracing by state; Perfetto chooses its own."""


def build_trace(job: str, lines: Mapping[str, AccountLine], moves: Sequence[Move]) -> dict[str, Any]:
    """Build the Chrome trace of one step. `lines`: the slot accounting of the step, by node. Only those `moves` that
    happened in the step are included."""
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


def _of_node(pid: int, node: str, line: AccountLine, offset: float) -> Iterator[dict[str, Any]]:
    yield _named("process_name", pid, 0, f"node {node}")
    yield _named("thread_name", pid, PHASES_TRACK, "phases")
    for phase in line.phases:
        name = PHASE_NAMES.get(phase.most, phase.most) or UNACCOUNTED
        yield _slice(pid, PHASES_TRACK, name, "phase", offset + phase.begin, offset + phase.end, {})
    for tid, (slot, spans) in enumerate(sorted(line.spans.items()), start=PHASES_TRACK + 1):
        yield _named("thread_name", pid, tid, slot)
        for span in spans:
            state = span.most or UNACCOUNTED
            told = {name: round(seconds, 4) for name, seconds in sorted(span.seconds.items())}
            yield _slice(pid, tid, state, state.partition(" ")[0], offset + span.begin, offset + span.end, told)
            yield _counter(pid, f"busy {slot}", offset + span.begin, _busy(span))
        if spans:
            yield _counter(pid, f"busy {slot}", offset + spans[-1].end, 0.0)


def _busy(span: Span) -> float:
    """The share of the time interval in which the slot was busy, 0 to 1."""
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

"""The life of a worker, as its supervisor decides it. Pure: events in, a new life and instructions out.

In order: register in the store; only then start the child (for a train rank the registration also takes its rank of
its world, and who comes second never starts a child); wait until it serves; go on until it ends, hangs or is stopped.

Ways to end:

- *failed*: the child ended by itself, said so, hung, never served, or lost its rank. What still lives of it is killed;
  the reason stays readable in the store for a little while; then the supervisor leaves with `FAILED`.
- *stopping*: asked to by a signal, orphaned (no controller on its node for the grace period), or out of the store's
  sight for very long. The child is told to stop, drains, is killed after a grace, or at once if it does not serve yet; then
  the supervisor leaves with `STOPPED`.

That a watch shows no controller is only a hint: the key is read once more before an orphan leaves, and while the store
does not answer, nobody is called an orphan. A failure while stopping changes nothing: it was on its way out.

What this does not do: processes, sockets, the store (`gcore.worker.supervisor`, `gcore.worker.registrar`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from gcore.worker.events import (
    ChildEnded,
    ChildFailed,
    ChildListens,
    ChildProgressed,
    ChildServes,
    ChildStarted,
    Event,
    Instruction,
    KillChild,
    Leave,
    LineClosed,
    Looked,
    NodeRead,
    NodeWatched,
    PublishRendezvous,
    ReadNode,
    Refused,
    Registered,
    RendezvousKnown,
    Shown,
    StartChild,
    StopAsked,
    StoreSeen,
    TellRendezvous,
    TellStop,
)
from gcore.worker.records import LaunchSpec, WorkerState
from gcore.worker.watchdog import LOADING, Hung, Watchdog

STOPPED = 0
FAILED = 1

LINE_GRACE_S = 5.0
"""Between a child's farewell (failed, or its line closed) and its end; then it is killed."""
OVERSLEPT_S = 2.0
"""Who acts later than this after it meant to was itself paused, and must not blame the child for the gap."""
SHOW_LIMIT_S = 60.0
"""How long a failure waits for the store to take it: what fails with the store, of a full disk, would never be told."""


class Child(Enum):
    """What there is of the child."""

    NONE = "none"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Life:
    """Everything the supervisor decides from. Times are monotonic seconds.

    `serve_by`: when it must serve, at the latest. `kill_at`: when what still runs of the child is killed. `leave_at`:
    when the supervisor leaves after a failure; `shown`: the store shows the failure. `absent_since`: from when on the node had no controller; `asked`: the
    store was asked about that and has not answered yet. `away_since`: since when the store does not answer.
    """

    spec: LaunchSpec
    serve_by: float
    state: WorkerState = "starting"
    address: str = ""
    reason: str = ""
    child: Child = Child.NONE
    child_pid: int | None = None
    killed: bool = False
    watchdog: Watchdog | None = None
    kill_at: float | None = None
    kill_reason: str = ""
    leave_at: float | None = None
    shown: bool = False
    absent_since: float | None = None
    asked: bool = False
    away_since: float | None = None
    left: bool = False

    @classmethod
    def begin(cls, spec: LaunchSpec, now: float) -> Life:
        """Before anything has happened."""
        return cls(spec, serve_by=now + spec.start_limit_s)

    @property
    def ending(self) -> bool:
        """Whether it is on its way out, well or not."""
        return self.state in ("failed", "stopping")


@dataclass(frozen=True, slots=True)
class Decision:
    """The life after an event, and what is to be done, in order."""

    life: Life
    instructions: tuple[Instruction, ...] = ()


def decide(life: Life, event: Event, now: float) -> Decision:
    """What follows from `event`, and from the time being `now`. A life that was left decides nothing any more."""
    if life.left:
        return Decision(life)
    taken = _take(_pardon(life, now), event, now)
    looked = _look(taken.life, now)
    return Decision(looked.life, taken.instructions + looked.instructions)


def wake_at(life: Life) -> float | None:
    """When to look next if nothing happens; None: not before something does."""
    times = [life.leave_at]
    if life.child is Child.RUNNING:
        times.append(None if life.killed else life.kill_at)
    if not life.ending:
        times.append(None if life.address else life.serve_by)
        times.append(None if life.away_since is None else life.away_since + life.spec.store_grace_s)
        if life.absent_since is not None and not life.asked:
            times.append(life.absent_since + life.spec.orphan_grace_s)
        if life.watchdog is not None:
            times.append(life.watchdog.due)
    return min((time for time in times if time is not None), default=None)


def _pardon(life: Life, now: float) -> Life:
    """A supervisor that was paused (SIGSTOP, a frozen machine) has not heard its child: start counting anew."""
    planned = wake_at(life)
    if planned is None or now <= planned + OVERSLEPT_S:
        return life
    watchdog = life.watchdog and replace(life.watchdog, since=now, stopped_since=None)
    return replace(life, watchdog=watchdog, serve_by=max(life.serve_by, now + OVERSLEPT_S))


def _take(life: Life, event: Event, now: float) -> Decision:
    """What follows from the event alone."""
    match event:
        case Registered():
            begun = life.child is not Child.NONE or life.ending
            return Decision(life, () if begun else (StartChild(),))
        case Refused(reason) | ChildFailed(reason):
            grace = LINE_GRACE_S if isinstance(event, ChildFailed) else 0.0
            return _fail(life, reason, now, grace_s=grace)
        case Shown(state):
            return Decision(_linger(replace(life, shown=True), now) if life.state == state == "failed" else life)
        case StoreSeen(answers):
            since = life.away_since if life.away_since is not None else now
            return Decision(replace(life, away_since=None if answers else since))
        case NodeWatched() | NodeRead():
            return _node(life, event, now)
        case RendezvousKnown(address):
            tell = life.child is Child.RUNNING and not life.ending
            return Decision(life, (TellRendezvous(address),) if tell else ())
        case StopAsked(why):
            return _stop(life, why, now)
        case Looked(stopped):
            return Decision(_heard(life, lambda dog: dog.note_stopped(stopped=stopped, now=now)))
        case _:
            return _take_child(life, event, now)


def _take_child(life: Life, event: Event, now: float) -> Decision:
    """What follows from something about the child."""
    match event:
        case ChildStarted(pid):
            spec = life.spec
            dog = Watchdog(spec.watchdog_s, spec.start_limit_s, phase=LOADING, since=now)
            serve_by = now + spec.start_limit_s
            return Decision(replace(life, child=Child.RUNNING, child_pid=pid, watchdog=dog, serve_by=serve_by))
        case ChildServes(address) if not life.ending:
            # Whoever serves waits for work, until it says otherwise.
            life = _heard(life, lambda dog: dog.note("waiting", dog.progress, now))
            return Decision(replace(life, state="serving", address=address))
        case ChildListens(address) if not life.ending:
            return Decision(life, (PublishRendezvous(address),))
        case ChildProgressed(phase, progress):
            return Decision(_heard(life, lambda dog: dog.note(phase, progress, now)))
        case LineClosed() if life.child is Child.RUNNING and life.kill_at is None:
            reason = f"closed its control line and was still there {LINE_GRACE_S:.0f} s later"
            return Decision(replace(life, kill_at=now + LINE_GRACE_S, kill_reason=reason))
        case ChildEnded(how):
            return _ended(life, how, now)
        case _:
            return Decision(life)


def _look(life: Life, now: float) -> Decision:
    """What is due at `now`."""
    if life.leave_at is not None and now >= life.leave_at:
        return Decision(replace(life, left=True), (Leave(FAILED),))
    running = life.child is Child.RUNNING
    if running and life.kill_at is not None and now >= life.kill_at and not life.killed:
        if not life.ending:
            return _fail(life, life.kill_reason, now, grace_s=0.0)
        return Decision(replace(life, killed=True), (KillChild(),))
    if life.ending:
        return Decision(life)
    return _look_at_the_living(life, now)


def _look_at_the_living(life: Life, now: float) -> Decision:
    spec = life.spec
    verdict = life.watchdog.verdict(now) if life.watchdog else None
    if not life.address and now >= life.serve_by:
        waited = "did not serve" if life.child is Child.RUNNING else "could not register in the store"
        return _fail(life, f"{waited} within {spec.start_limit_s:g} s of its start", now, grace_s=0.0)
    if isinstance(verdict, Hung):
        return _fail(life, verdict.reason(now), now, grace_s=0.0)
    if life.away_since is not None and now >= life.away_since + spec.store_grace_s:
        return _stop(life, f"the store has been away for {now - life.away_since:.0f} s", now)
    if life.absent_since is not None and not life.asked and now >= life.absent_since + spec.orphan_grace_s:
        return Decision(replace(life, asked=True), (ReadNode(),))
    return Decision(life)


def _node(life: Life, event: NodeWatched | NodeRead, now: float) -> Decision:
    if event.present:
        return Decision(replace(life, absent_since=None, asked=False))
    since = now if life.absent_since is None else life.absent_since
    if isinstance(event, NodeWatched):
        return Decision(replace(life, absent_since=since))
    life = replace(life, absent_since=since, asked=False)
    if life.ending or now < since + life.spec.orphan_grace_s:
        return Decision(life)
    return _stop(life, f"orphaned: node {life.spec.node} has had no controller for {now - since:.0f} s", now)


def _stop(life: Life, why: str, now: float) -> Decision:
    if life.state == "stopping":  # asked again: who asks twice does not want to wait
        return Decision(replace(life, kill_at=now))
    if life.state == "failed":
        return Decision(replace(life, leave_at=now) if life.child is not Child.RUNNING else life)
    # Who has not served yet has nothing to drain, and hears nothing while it imports and loads.
    grace_s = life.spec.stop_grace_s if life.address else 0.0
    life = replace(life, state="stopping", reason=why, kill_at=now + grace_s)
    if life.child is Child.RUNNING:
        return Decision(life, (TellStop(),))
    return Decision(replace(life, left=True), (Leave(STOPPED),))


def _fail(life: Life, reason: str, now: float, *, grace_s: float) -> Decision:
    """The first reason stands: what follows is its consequence."""
    if life.ending:
        return Decision(life)
    life = replace(life, state="failed", reason=reason)
    if life.child is not Child.RUNNING:
        return Decision(_linger(life, now))
    if grace_s > 0:
        return Decision(replace(life, kill_at=now + grace_s))
    return Decision(replace(life, kill_at=now, killed=True), (KillChild(),))


def _linger(life: Life, now: float) -> Life:
    """A failure stays in the store for a while, once it stands there and nothing of the child is left."""
    if life.child is Child.RUNNING:
        return life
    return replace(life, leave_at=now + (life.spec.linger_s if life.shown else SHOW_LIMIT_S))


def _ended(life: Life, how: str, now: float) -> Decision:
    life = replace(life, child=Child.ENDED, watchdog=None)
    if life.state == "stopping":
        return Decision(replace(life, left=True), (Leave(STOPPED),))
    if life.state == "failed":
        return Decision(_linger(life, now))
    return _fail(life, how, now, grace_s=0.0)


def _heard(life: Life, note: Callable[[Watchdog], Watchdog]) -> Life:
    return life if life.watchdog is None else replace(life, watchdog=note(life.watchdog))

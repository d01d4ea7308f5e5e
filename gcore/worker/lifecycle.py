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

from gcore.worker.records import LaunchSpec, WorkerState

# -------------------- events
# What can happen to a worker, and what its supervisor can do about it. The two vocabularies of `gcore.worker.lifecycle`.


@dataclass(frozen=True, slots=True)
class Registered:
    """The registration stands in the store (for the first time, or again)."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The registration cannot be made, now or later: another has the rank, or the world is gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class Shown:
    """The store shows `state` now."""

    state: WorkerState


@dataclass(frozen=True, slots=True)
class StoreSeen:
    """Whether the store answers."""

    answers: bool


@dataclass(frozen=True, slots=True)
class NodeWatched:
    """The watch shows whether the node has a controller: a hint."""

    present: bool


@dataclass(frozen=True, slots=True)
class NodeRead:
    """A read of the store shows whether the node has a controller."""

    present: bool


@dataclass(frozen=True, slots=True)
class RendezvousKnown:
    """Rank 0 of the world listens at `address`."""

    address: str


@dataclass(frozen=True, slots=True)
class ChildStarted:
    """The child runs."""

    pid: int


@dataclass(frozen=True, slots=True)
class ChildServes:
    """The child answers at `address`."""

    address: str


@dataclass(frozen=True, slots=True)
class ChildListens:
    """The child, rank 0, waits for the other ranks at `address`."""

    address: str


@dataclass(frozen=True, slots=True)
class ChildProgressed:
    """The child tells how far it is."""

    phase: str
    progress: int


@dataclass(frozen=True, slots=True)
class ChildFailed:
    """The child says that it failed, and will end; or could not be started, or understood."""

    reason: str


@dataclass(frozen=True, slots=True)
class LineClosed:
    """The child closed its control line."""


@dataclass(frozen=True, slots=True)
class ChildEnded:
    """The child's process has ended. `how`: one sentence, e.g. with its exit code and last words."""

    how: str


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The worker shall go."""

    why: str


@dataclass(frozen=True, slots=True)
class Looked:
    """Time has passed. `stopped`: the child's process was seen stopped by a signal."""

    stopped: bool = False


Event = (
    Registered
    | Refused
    | Shown
    | StoreSeen
    | NodeWatched
    | NodeRead
    | RendezvousKnown
    | ChildStarted
    | ChildServes
    | ChildListens
    | ChildProgressed
    | ChildFailed
    | LineClosed
    | ChildEnded
    | StopAsked
    | Looked
)


@dataclass(frozen=True, slots=True)
class StartChild:
    """Start the child and give it its launch document."""


@dataclass(frozen=True, slots=True)
class TellStop:
    """Tell the child to stop."""


@dataclass(frozen=True, slots=True)
class TellRendezvous:
    """Tell the child where rank 0 listens."""

    address: str


@dataclass(frozen=True, slots=True)
class PublishRendezvous:
    """Write where this rank 0 listens; once."""

    address: str


@dataclass(frozen=True, slots=True)
class KillChild:
    """SIGKILL."""


@dataclass(frozen=True, slots=True)
class ReadNode:
    """Read whether the node has a controller, and say so with `NodeRead`."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Revoke the lease and end with `code`."""

    code: int


Instruction = StartChild | TellStop | TellRendezvous | PublishRendezvous | KillChild | ReadNode | Leave


# -------------------- watchdog
# When is a child that still lives a hung one? Pure.
#
# A child tells its phase and a number that grows whenever it gets anywhere. A phase of work in which the number stands
# still for `limit_s` is a hang: collective libraries wait without end for a rank that is gone, and no time-out inside
# the process can be trusted. Phases that wait for work (`PATIENT`) may last for ever; loading has a limit of its own. A
# child that was stopped by a signal (SIGSTOP) hangs in any phase, for it would not take work either.
#
# Does not decide what follows from a hang, and reads no clock.

PATIENT = frozenset({"waiting"})


LOADING = "loading"


STOPPED = "stopped by a signal"
"""The phase named in the verdict on a child in process state T."""


@dataclass(frozen=True, slots=True)
class Alive:
    """Nothing is wrong. `until`: the monotonic second at which it would be, if nothing is heard; None: never."""

    until: float | None


@dataclass(frozen=True, slots=True)
class Hung:
    """No progress in `phase` since the monotonic second `since`."""

    phase: str
    since: float

    def reason(self, now: float) -> str:
        """The verdict as a sentence for people."""
        return f"no progress in phase {self.phase!r} for {now - self.since:.0f} s"


@dataclass(frozen=True, slots=True)
class Watchdog:
    """What is known of the child's progress. Times are monotonic seconds.

    `since`: when `phase` was entered or `progress` last changed. `stopped_since`: from when on it was seen stopped.
    """

    limit_s: float
    loading_limit_s: float
    phase: str
    since: float
    progress: int = 0
    stopped_since: float | None = None

    def note(self, phase: str, progress: int, now: float) -> Watchdog:
        """The child was heard. The same phase with the same number is no progress."""
        if phase == self.phase and progress == self.progress:
            return self
        return replace(self, phase=phase, progress=progress, since=now)

    def note_stopped(self, *, stopped: bool, now: float) -> Watchdog:
        """Whether the child's process was just seen stopped by a signal."""
        if stopped == (self.stopped_since is not None):
            return self
        return replace(self, stopped_since=now if stopped else None)

    @property
    def due(self) -> float | None:
        """The monotonic second from which on the verdict is `Hung`, if nothing is heard; None: never."""
        return min((suspicion.at for suspicion in self._suspicions()), default=None)

    def verdict(self, now: float) -> Alive | Hung:
        """Whether it hangs, as of `now`."""
        hung = next((suspicion.hung for suspicion in self._suspicions() if suspicion.at <= now), None)
        return hung or Alive(self.due)

    def _suspicions(self) -> list[_Suspicion]:
        return [suspicion for suspicion in (self._stopped(), self._stalled()) if suspicion is not None]

    def _stopped(self) -> _Suspicion | None:
        if self.stopped_since is None:
            return None
        return _Suspicion(self.stopped_since + self.limit_s, Hung(STOPPED, self.stopped_since))

    def _stalled(self) -> _Suspicion | None:
        if self.phase in PATIENT:
            return None
        limit = self.loading_limit_s if self.phase == LOADING else self.limit_s
        return _Suspicion(self.since + limit, Hung(self.phase, self.since))


@dataclass(frozen=True, slots=True)
class _Suspicion:
    """If nothing is heard, the verdict is `hung` from `at` on."""

    at: float
    hung: Hung


LIFECYCLE_STOPPED = 0


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
    return Decision(replace(life, left=True), (Leave(LIFECYCLE_STOPPED),))


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
        return Decision(replace(life, left=True), (Leave(LIFECYCLE_STOPPED),))
    if life.state == "failed":
        return Decision(_linger(life, now))
    return _fail(life, how, now, grace_s=0.0)


def _heard(life: Life, note: Callable[[Watchdog], Watchdog]) -> Life:
    return life if life.watchdog is None else replace(life, watchdog=note(life.watchdog))

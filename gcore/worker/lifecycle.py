"""The state machine of a worker, run by its supervisor: events in, a new state and instructions out; and the watchdog.

The supervisor registers the worker in the store, then starts the child, waits until it serves, and continues until it
ends, hangs or is stopped. For a train rank the registration also claims its rank in its world. A worker that finds the
rank claimed by another never starts a child.

Ways to end:

- *failed*: the child exited by itself, reported a failure, hung, never served, or its rank belongs to another worker.
  Its remaining processes are killed. The reason stays readable in the store for a short time, then the supervisor exits
  with `FAILED`.
- *stopping*: requested by a signal, orphaned (no controller on its node for the grace period), or without the store for
  very long. The child gets a stop command, drains, and is killed after a grace period, or at once if it does not serve
  yet; then the supervisor exits with `STOPPED`.

If a watch shows no controller, this is only a hint: the key is read once more before an orphan exits. While the store
does not respond, no worker counts as an orphan. A failure while stopping changes nothing.

A child reports its phase and a counter that grows with its progress. A working phase in which the counter does not
change for `limit_s` is a hang: collective libraries wait forever for a lost rank, and timeouts inside the process
cannot be relied on. Phases that wait for work (`PATIENT`) may last forever; loading has its own limit. A child that was
stopped by a signal (SIGSTOP) counts as hung in any phase, because it would not accept work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gcore.worker.records import LaunchSpec, WorkerState


@dataclass(frozen=True, slots=True)
class Registered:
    """The store has the worker's registration (for the first time, or again after a lost lease)."""


@dataclass(frozen=True, slots=True)
class RegistrationRefused:
    """The registration can never succeed: another worker or process has the rank or the name, or the world was deleted."""

    reason: str


@dataclass(frozen=True, slots=True)
class StatePublished:
    """The registration in the store now has the worker's state `state`."""

    state: WorkerState


@dataclass(frozen=True, slots=True)
class StoreSeen:
    """The lease renewals or a request showed whether the store responds (`answers`)."""

    answers: bool


@dataclass(frozen=True, slots=True)
class NodeWatched:
    """The watch on the node's key shows whether the node has a controller.

    This may be outdated, so it is only a hint.
    """

    present: bool


@dataclass(frozen=True, slots=True)
class NodeRead:
    """A read of the node's key, after `ReadNode`, shows whether the node has a controller."""

    present: bool


@dataclass(frozen=True, slots=True)
class RendezvousKnown:
    """The store has the address at which rank 0 of this worker's world waits for the other ranks."""

    address: str


@dataclass(frozen=True, slots=True)
class ChildStarted:
    """The child process was started with process id `pid`."""

    pid: int


@dataclass(frozen=True, slots=True)
class ChildServes:
    """The child accepts requests at `address`."""

    address: str


@dataclass(frozen=True, slots=True)
class ChildListens:
    """The child, which is rank 0, waits for the other ranks of its world at `address`."""

    address: str


@dataclass(frozen=True, slots=True)
class ChildProgressed:
    """The child reports its phase, and the counter of its progress."""

    phase: str
    progress: int


@dataclass(frozen=True, slots=True)
class ChildFailed:
    """The child reports a failure and will end; or it could not be started, or sent an invalid message."""

    reason: str


@dataclass(frozen=True, slots=True)
class LineClosed:
    """The child's end of the control line was closed."""


@dataclass(frozen=True, slots=True)
class ChildEnded:
    """The child's process has ended. `how`: one sentence, e.g. with its exit code and last output."""

    how: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A signal requests that the worker stops. `why`: which one."""

    why: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A deadline or the periodic check is due.

    `stopped`: whether the child's process is stopped by a signal (SIGSTOP).
    """

    stopped: bool = False


WorkerEvent = (
    Registered
    | RegistrationRefused
    | StatePublished
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
    | StopRequested
    | Tick
)


@dataclass(frozen=True, slots=True)
class StartChild:
    """Start the child and send it its launch document."""


@dataclass(frozen=True, slots=True)
class SendStop:
    """Send the stop command to the child."""


@dataclass(frozen=True, slots=True)
class SendRendezvous:
    """Send the child the address at which rank 0 of its world waits."""

    address: str


@dataclass(frozen=True, slots=True)
class PublishRendezvous:
    """Write the address at which the child, rank 0, waits to the store, unless one is there."""

    address: str


@dataclass(frozen=True, slots=True)
class KillChild:
    """Send SIGKILL to the child's process group."""


@dataclass(frozen=True, slots=True)
class ReadNode:
    """Read from the store whether the node has a controller, and emit `NodeRead`."""


@dataclass(frozen=True, slots=True)
class EndSupervisor:
    """Revoke the lease, which deletes the registration, and exit with `code`."""

    code: int


Instruction = StartChild | SendStop | SendRendezvous | PublishRendezvous | KillChild | ReadNode | EndSupervisor
PATIENT = frozenset({"waiting"})
"""Phases in which a child waits for work and need not make progress."""
LOADING = "loading"
"""The phase of a child from its start until it serves."""

SIGNAL_STOPPED = "stopped by a signal"
"""What the watchdog's verdict names as the phase of a child that is stopped by a signal."""


@dataclass(frozen=True, slots=True)
class ProgressOk:
    """The child does not hang. `until`: the monotonic second from which on it would, without progress; None: never."""

    until: float | None


@dataclass(frozen=True, slots=True)
class ProgressStalled:
    """The child hangs: it has made no progress in `phase` since the monotonic second `since`."""

    phase: str
    since: float

    def reason(self, now: float) -> str:
        """Return the reason of the failure, as a sentence for the registration."""
        return f"no progress in phase {self.phase!r} for {now - self.since:.0f} s"


@dataclass(frozen=True, slots=True)
class Watchdog:
    """What is known of the child's progress, and from which time on it counts as hung. Times are monotonic seconds.

    `limit_s`, `loading_limit_s`: seconds without progress after which a child hangs, in a working phase and while
    loading. `since`: when `phase` began or `progress` last changed. `stopped_since`: when its process was found stopped
    by a signal.
    """

    limit_s: float
    loading_limit_s: float
    phase: str
    since: float
    progress: int = 0
    stopped_since: float | None = None

    def note(self, phase: str, progress: int, now: float) -> Watchdog:
        """Return the watchdog after a report of the child. The same phase with the same counter is no progress."""
        if phase == self.phase and progress == self.progress:
            return self
        return replace(self, phase=phase, progress=progress, since=now)

    def note_stopped(self, *, stopped: bool, now: float) -> Watchdog:
        """Return the watchdog after a check whether the child's process is stopped by a signal."""
        if stopped == (self.stopped_since is not None):
            return self
        return replace(self, stopped_since=now if stopped else None)

    @property
    def due(self) -> float | None:
        """The monotonic second from which on the child counts as hung if it makes no progress; None: never."""
        return min((suspicion.at for suspicion in self._suspicions()), default=None)

    def verdict(self, now: float) -> ProgressOk | ProgressStalled:
        """Whether the child hangs at the monotonic second `now`."""
        hung = next((suspicion.hung for suspicion in self._suspicions() if suspicion.at <= now), None)
        return hung or ProgressOk(self.due)

    def _suspicions(self) -> list[_Suspicion]:
        return [suspicion for suspicion in (self._stopped(), self._stalled()) if suspicion is not None]

    def _stopped(self) -> _Suspicion | None:
        if self.stopped_since is None:
            return None
        return _Suspicion(self.stopped_since + self.limit_s, ProgressStalled(SIGNAL_STOPPED, self.stopped_since))

    def _stalled(self) -> _Suspicion | None:
        if self.phase in PATIENT:
            return None
        limit = self.loading_limit_s if self.phase == LOADING else self.limit_s
        return _Suspicion(self.since + limit, ProgressStalled(self.phase, self.since))


@dataclass(frozen=True, slots=True)
class _Suspicion:
    """A possible hang: unless the child makes progress, the verdict is `hung` from the monotonic second `at` on."""

    at: float
    hung: ProgressStalled


STOPPED = 0
"""Exit code of a supervisor after an orderly stop."""
FAILED = 1
"""Exit code of a supervisor whose worker failed."""

LINE_GRACE_S = 5.0
"""Seconds that a child has to exit after its failure report, or after its line was closed; then it is killed."""

OVERSLEPT_S = 2.0
"""A supervisor that acts this many seconds later than planned was itself paused, and must not blame the child for it.
"""

SHOW_LIMIT_S = 60.0
"""Maximum seconds that a failed supervisor waits until the store has accepted its failure.

If it ended earlier while the store fails for the same cause, such as a full disk, the failure would never be reported.
"""


class ChildState(Enum):
    """Whether the child process exists: not started yet, running, or ended."""

    NONE = "none"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class SupervisorState:
    """The state of a worker, from which `decide` derives what to do. Times are monotonic seconds.

    `serve_by`: deadline for the child to serve. `kill_at`: when the child is killed, for the reason `kill_reason`.
    `leave_at`: when the supervisor exits after a failure. `shown`: whether the store has the failure. `absent_since`:
    since when the node has no controller. `asked`: whether the store was queried about that and has not responded yet.
    `away_since`: since when the store does not respond. `left`: whether the supervisor was instructed to exit.
    """

    spec: LaunchSpec
    serve_by: float
    state: WorkerState = "starting"
    address: str = ""
    reason: str = ""
    child: ChildState = ChildState.NONE
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
    def begin(cls, spec: LaunchSpec, now: float) -> SupervisorState:
        """Return the state of a worker at its start, before any event."""
        return cls(spec, serve_by=now + spec.start_limit_s)

    @property
    def ending(self) -> bool:
        """Whether the worker has failed or is stopping."""
        return self.state in ("failed", "stopping")


@dataclass(frozen=True, slots=True)
class Transition:
    """The worker's state after an event, and what the supervisor must do, in order."""

    life: SupervisorState
    instructions: tuple[Instruction, ...] = ()


def decide(life: SupervisorState, event: WorkerEvent, now: float) -> Transition:
    """Return the new state and the instructions for `event` at the monotonic second `now`, including deadlines that are
    due.

    After the supervisor was instructed to end, events change nothing.
    """
    if life.left:
        return Transition(life)
    taken = _take(_pardon(life, now), event, now)
    looked = _look(taken.life, now)
    return Transition(looked.life, taken.instructions + looked.instructions)


def wake_at(life: SupervisorState) -> float | None:
    """Return the monotonic second at which the next deadline is due if no event comes; None: there is no deadline."""
    times = [life.leave_at]
    if life.child is ChildState.RUNNING:
        times.append(None if life.killed else life.kill_at)
    if not life.ending:
        times.append(None if life.address else life.serve_by)
        times.append(None if life.away_since is None else life.away_since + life.spec.store_grace_s)
        if life.absent_since is not None and not life.asked:
            times.append(life.absent_since + life.spec.orphan_grace_s)
        if life.watchdog is not None:
            times.append(life.watchdog.due)
    return min((time for time in times if time is not None), default=None)


def _pardon(life: SupervisorState, now: float) -> SupervisorState:
    """Restart the child's time limits if the supervisor itself was paused (SIGSTOP, a frozen machine).

    It has not received the child's messages meanwhile, so it must not count the pause against the child.
    """
    planned = wake_at(life)
    if planned is None or now <= planned + OVERSLEPT_S:
        return life
    watchdog = life.watchdog and replace(life.watchdog, since=now, stopped_since=None)
    return replace(life, watchdog=watchdog, serve_by=max(life.serve_by, now + OVERSLEPT_S))


def _take(life: SupervisorState, event: WorkerEvent, now: float) -> Transition:
    """Return the transition for the event alone, without checking deadlines."""
    match event:
        case Registered():
            begun = life.child is not ChildState.NONE or life.ending
            return Transition(life, () if begun else (StartChild(),))
        case RegistrationRefused(reason) | ChildFailed(reason):
            grace = LINE_GRACE_S if isinstance(event, ChildFailed) else 0.0
            return _fail(life, reason, now, grace_s=grace)
        case StatePublished(state):
            return Transition(_linger(replace(life, shown=True), now) if life.state == state == "failed" else life)
        case StoreSeen(answers):
            since = life.away_since if life.away_since is not None else now
            return Transition(replace(life, away_since=None if answers else since))
        case NodeWatched() | NodeRead():
            return _node(life, event, now)
        case RendezvousKnown(address):
            tell = life.child is ChildState.RUNNING and not life.ending
            return Transition(life, (SendRendezvous(address),) if tell else ())
        case StopRequested(why):
            return _stop(life, why, now)
        case Tick(stopped):
            return Transition(_update_watchdog(life, lambda dog: dog.note_stopped(stopped=stopped, now=now)))
        case _:
            return _take_child(life, event, now)


def _take_child(life: SupervisorState, event: WorkerEvent, now: float) -> Transition:
    """Return the transition for an event that the child caused."""
    match event:
        case ChildStarted(pid):
            spec = life.spec
            dog = Watchdog(spec.watchdog_s, spec.start_limit_s, phase=LOADING, since=now)
            serve_by = now + spec.start_limit_s
            return Transition(replace(life, child=ChildState.RUNNING, child_pid=pid, watchdog=dog, serve_by=serve_by))
        case ChildServes(address) if not life.ending:
            # A serving child waits for work until it reports otherwise.
            life = _update_watchdog(life, lambda dog: dog.note("waiting", dog.progress, now))
            return Transition(replace(life, state="serving", address=address))
        case ChildListens(address) if not life.ending:
            return Transition(life, (PublishRendezvous(address),))
        case ChildProgressed(phase, progress):
            return Transition(_update_watchdog(life, lambda dog: dog.note(phase, progress, now)))
        case LineClosed() if life.child is ChildState.RUNNING and life.kill_at is None:
            reason = f"closed its control line and was still running {LINE_GRACE_S:.0f} s later"
            return Transition(replace(life, kill_at=now + LINE_GRACE_S, kill_reason=reason))
        case ChildEnded(how):
            return _ended(life, how, now)
        case _:
            return Transition(life)


def _look(life: SupervisorState, now: float) -> Transition:
    """Return the transition for the first deadline that is due at `now`; no change if none is."""
    if life.leave_at is not None and now >= life.leave_at:
        return Transition(replace(life, left=True), (EndSupervisor(FAILED),))
    running = life.child is ChildState.RUNNING
    if running and life.kill_at is not None and now >= life.kill_at and not life.killed:
        if not life.ending:
            return _fail(life, life.kill_reason, now, grace_s=0.0)
        return Transition(replace(life, killed=True), (KillChild(),))
    if life.ending:
        return Transition(life)
    return _look_at_the_living(life, now)


def _look_at_the_living(life: SupervisorState, now: float) -> Transition:
    spec = life.spec
    verdict = life.watchdog.verdict(now) if life.watchdog else None
    if not life.address and now >= life.serve_by:
        waited = "did not serve" if life.child is ChildState.RUNNING else "could not register in the store"
        return _fail(life, f"{waited} within {spec.start_limit_s:g} s of its start", now, grace_s=0.0)
    if isinstance(verdict, ProgressStalled):
        return _fail(life, verdict.reason(now), now, grace_s=0.0)
    if life.away_since is not None and now >= life.away_since + spec.store_grace_s:
        return _stop(life, f"the store has been unreachable for {now - life.away_since:.0f} s", now)
    if life.absent_since is not None and not life.asked and now >= life.absent_since + spec.orphan_grace_s:
        return Transition(replace(life, asked=True), (ReadNode(),))
    return Transition(life)


def _node(life: SupervisorState, event: NodeWatched | NodeRead, now: float) -> Transition:
    if event.present:
        return Transition(replace(life, absent_since=None, asked=False))
    since = now if life.absent_since is None else life.absent_since
    if isinstance(event, NodeWatched):
        return Transition(replace(life, absent_since=since))
    life = replace(life, absent_since=since, asked=False)
    if life.ending or now < since + life.spec.orphan_grace_s:
        return Transition(life)
    return _stop(life, f"orphaned: node {life.spec.node} has had no controller for {now - since:.0f} s", now)


def _stop(life: SupervisorState, why: str, now: float) -> Transition:
    if life.state == "stopping":  # a second request: do not wait
        return Transition(replace(life, kill_at=now))
    if life.state == "failed":
        return Transition(replace(life, leave_at=now) if life.child is not ChildState.RUNNING else life)
    # A child that does not serve yet has nothing to drain, and reads no commands while it imports and loads.
    grace_s = life.spec.stop_grace_s if life.address else 0.0
    life = replace(life, state="stopping", reason=why, kill_at=now + grace_s)
    if life.child is ChildState.RUNNING:
        return Transition(life, (SendStop(),))
    return Transition(replace(life, left=True), (EndSupervisor(STOPPED),))


def _fail(life: SupervisorState, reason: str, now: float, *, grace_s: float) -> Transition:
    """Record a failure, and have the child killed after `grace_s`. The first reason counts: later ones are its
    consequences.
    """
    if life.ending:
        return Transition(life)
    life = replace(life, state="failed", reason=reason)
    if life.child is not ChildState.RUNNING:
        return Transition(_linger(life, now))
    if grace_s > 0:
        return Transition(replace(life, kill_at=now + grace_s))
    return Transition(replace(life, kill_at=now, killed=True), (KillChild(),))


def _linger(life: SupervisorState, now: float) -> SupervisorState:
    """Schedule the supervisor's exit after a failure, once the child has ended.

    The failure stays readable for `linger_s` after the store has it; the wait for the store is limited to
    `SHOW_LIMIT_S`.
    """
    if life.child is ChildState.RUNNING:
        return life
    return replace(life, leave_at=now + (life.spec.linger_s if life.shown else SHOW_LIMIT_S))


def _ended(life: SupervisorState, how: str, now: float) -> Transition:
    life = replace(life, child=ChildState.ENDED, watchdog=None)
    if life.state == "stopping":
        return Transition(replace(life, left=True), (EndSupervisor(STOPPED),))
    if life.state == "failed":
        return Transition(_linger(life, now))
    return _fail(life, how, now, grace_s=0.0)


def _update_watchdog(life: SupervisorState, note: Callable[[Watchdog], Watchdog]) -> SupervisorState:
    return life if life.watchdog is None else replace(life, watchdog=note(life.watchdog))

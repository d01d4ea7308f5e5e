"""What can happen to a worker, and what its supervisor can do about it. The two vocabularies of `gcore.worker.lifecycle`."""

from __future__ import annotations

from dataclasses import dataclass

from gcore.worker.records import WorkerState

# What happens.


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


# What to do about it. The registration follows from the life itself (state, address, reason, child's pid).


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

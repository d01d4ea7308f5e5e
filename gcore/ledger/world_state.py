"""What a state of a train world is called: by the world, and by the token after which it had it.

A world applies a token once, and only from its READY seal, whose content no one can change; so world and token name one
state for ever, whichever rank or node one asks. Copies of it carry the name (`gcore.weights.copies`), and so does the
rollback whose new world starts from them. Pure; reads no copies.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from pydantic import NonNegativeInt, PositiveInt

from gcore.schema import Part, Record

if TYPE_CHECKING:
    from gcore.ledger.records import Head, LogEntry


class WorldState(Part):
    """The state of `world` after it applied the token (lineage, step, attempt). `attempt` 0: the one it began with."""

    world: str
    lineage: NonNegativeInt
    step: NonNegativeInt
    attempt: NonNegativeInt
    shards: PositiveInt
    """Of how many ranks the world is: so many shards are the whole state."""

    def __str__(self) -> str:
        return f"step {self.step} of world {self.world}"


class HeldState(Part):
    """The shards of a state that lie in one node's memory."""

    state: WorldState
    shards: tuple[NonNegativeInt, ...]


class NodeCopies(Record):
    """`copies/{node}`, under its controller's lease: what lies in the node's memory, as it looked. A hint for who chooses
    where a new world starts from; the world itself proves what it reads."""

    node: str
    by: str
    """The incarnation that looked."""
    seq: NonNegativeInt
    """Head's, before it looked: copies of head's state were there by then, or never will be."""
    held: tuple[HeldState, ...] = ()


class StateName(NamedTuple):
    """A `WorldState` but for its number of shards, which the log does not say."""

    world: str
    lineage: int
    step: int
    attempt: int


def names_of_head(head: Head, log: Mapping[int, LogEntry]) -> tuple[StateName, ...]:
    """What head's state is called, best known first; nothing if the log does not reach far enough back, or for the base.

    A commit names the world and the token it was trained by. After a rollback that no step has followed, head's state is
    what the new world began with, and that is what the rollback says it started from.
    """
    entry = log.get(head.seq)
    while entry is not None and entry.kind == "account":
        entry = None if entry.parent is None else log.get(entry.parent)
    if entry is None or entry.step != head.step:
        return ()
    if entry.kind == "train":
        if entry.token is None:
            return ()
        return (StateName(entry.world, entry.token.lineage, entry.token.step, entry.token.attempt),)
    if entry.kind != "rollback":
        return ()
    began = StateName(entry.world, entry.lineage, entry.step, 0)
    if entry.state is None:
        return (began,)
    state = entry.state
    return (began, StateName(state.world, state.lineage, state.step, state.attempt))


def whole_state(names: Iterable[StateName], held: Mapping[str, NodeCopies], nodes: Container[str]) -> WorldState | None:
    """The first of these states of which every shard lies in the memory of one of `nodes` at least."""
    for name in names:
        shards: dict[WorldState, set[int]] = {}
        for node, copies in held.items():
            for one in copies.held if node in nodes else ():
                if (one.state.world, one.state.lineage, one.state.step, one.state.attempt) == name:
                    shards.setdefault(one.state, set()).update(one.shards)
        for state in sorted(shards, key=lambda state: state.shards):
            if shards[state] >= set(range(state.shards)):
                return state
    return None

"""What of a job's records nothing asks for any more, beside old log entries (`gcore.ledger.chain.prunable`), and its removal.

- *Worlds.* Who is which rank, and where rank 0 listens, matters for head's world alone: a rank of another one is refused by
  all, and one that registers again finds its world gone.
- *Parts of evaluations* that cannot be completed: of other weights than head's. Only head's version is evaluated.
- *Troubles* of a node are written over by its next of the same kind. A cluster whose nodes come and go under ever new names
  would leave them behind: of nodes that are gone the newest few stay.
- *Evaluations.* The newest few stay, the first (what the job began with), and the best: on head's chain as it is, and as it
  would be after going back to each registered checkpoint. The others move to the run's folder first.

So the store holds the same few whatever has happened before. Every transaction compares head and the checkpoints, from which
this follows. Pure; when it is worth while is `controllers.sweeping`'s business.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from gcore.ledger.ancestry import is_ancestor, resumable
from gcore.ledger.evaluation import best_of, value_of
from gcore.ledger.guarded import Stored, Transaction, TxnKind
from gcore.ledger.job import EvalPart, Evaluation, Trouble
from gcore.ledger.records import Checkpoint, Checkpoints, Head
from gcore.store.keys import JobKeys
from gcore.store.types import Compare, Delete

NEWEST_EVALUATIONS = 8
"""Evaluations that stay in any case."""
NEWEST_TROUBLES = 16
"""Troubles of nodes that are gone which stay."""
MOST_SWEPT = 100
"""Keys, or worlds, of one transaction: the store takes 128 operations."""


@dataclass(frozen=True, slots=True)
class Swept:
    """Worlds whose keys go, parts of evaluations, by "version/number" as the key spells it, and troubles by topic."""

    worlds: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    troubles: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.worlds or self.parts or self.troubles)


def superfluous(
    head: Head,
    worlds: Iterable[str],
    parts: Mapping[str, Stored[EvalPart]],
    troubles: Mapping[str, Stored[Trouble]] = MappingProxyType({}),
    nodes: Collection[str] = (),
) -> Swept:
    """What belongs to other worlds than head's, to evaluations of other weights, and to nodes that are gone.

    `worlds`: of which there are any keys; `nodes`: those that are there.
    """
    past = sorted({world for world in worlds if world != head.world})[:MOST_SWEPT]
    cut_off = sorted(name for name, part in parts.items() if part.record.version != head.version)
    cut_off = cut_off[: MOST_SWEPT - len(past)]
    left = [topic for topic, one in troubles.items() if one.record.is_of_a_node and one.record.node not in nodes]
    left.sort(key=lambda topic: troubles[topic].revision, reverse=True)
    return Swept(tuple(past), tuple(cut_off), tuple(left[NEWEST_TROUBLES:][: MOST_SWEPT - len(past) - len(cut_off)]))


def superfluous_evaluations(
    head: Head, checkpoints: Iterable[Checkpoint], evaluations: Mapping[str, Stored[Evaluation]], metric: str | None
) -> tuple[str, ...]:
    """The versions whose evaluations may move to the run's folder, oldest first."""
    by_age = sorted(evaluations, key=lambda name: evaluations[name].revision)
    kept = set(by_age[-NEWEST_EVALUATIONS:])
    on_chain = [evaluations[name].record for name in by_age if is_ancestor(head, evaluations[name].record.version)]
    first = min(on_chain, key=lambda one: one.version.step, default=None)
    kept |= {str(first.version)} if first is not None else set()
    if metric is not None:
        for step in {head.step, *(target.step for target in resumable(head, checkpoints))}:
            reached = [one for one in on_chain if one.version.step <= step and value_of(one, metric) is not None]
            best = best_of(head, reached, metric)
            kept |= {str(best.version)} if best is not None else set()
    return tuple(name for name in by_age if name not in kept)


def sweep(keys: JobKeys, head: Stored[Head], known: Stored[Checkpoints], swept: Swept) -> Transaction:
    """Take it away."""
    if head.record.world in swept.worlds:
        raise ValueError(f"world {head.record.world} is head's")
    worlds = (Delete(keys.world(world), prefix=True) for world in swept.worlds)
    parts = (Delete(f"{keys.eval_part_prefix}{part}") for part in swept.parts)
    troubles = (Delete(keys.trouble(topic)) for topic in swept.troubles)
    return _pruning(keys, head, known, (*worlds, *parts, *troubles))


def forget_evaluations(
    keys: JobKeys, head: Stored[Head], known: Stored[Checkpoints], versions: Sequence[str]
) -> Transaction:
    """Take evaluations out of the store that stand in the run's folder by now."""
    return _pruning(keys, head, known, tuple(Delete(keys.evaluation(version)) for version in versions))


def _pruning(keys: JobKeys, head: Stored[Head], known: Stored[Checkpoints], deletes: tuple[Delete, ...]) -> Transaction:
    if len(deletes) > MOST_SWEPT:
        raise ValueError(f"{len(deletes)} keys are more than the {MOST_SWEPT} of one transaction")
    compares = (Compare(keys.head, head.revision), Compare(keys.checkpoints, known.revision))
    return Transaction(TxnKind.PRUNE, compares, deletes)

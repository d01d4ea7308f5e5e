"""Which policy versions and checkpoints belong to the chain that head ends.

A version carries its lineage, because step 5 of a rolled-back lineage is not step 5. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from gcore.ledger.records import Checkpoint, Head
from gcore.types import Version


def is_ancestor(head: Head, version: Version) -> bool:
    """Whether the weights `version` are a state that head's chain went through.

    They are, if their lineage is one of head's, and no later one began below them: for every lineage after the version's,
    `step <= base_step`. A lineage that is not among head's was begun by a store that was put back to an older state since.
    """
    if version.step > head.step or all(one.number != version.lineage for one in head.lineages):
        return False
    return all(version.step <= later.base_step for later in head.lineages if later.number > version.lineage)


def is_fresh(step: int, versions: Iterable[Version], staleness: int) -> bool:
    """Whether tokens of these versions may be trained at `step`: `(step - 1) - oldest step <= staleness`."""
    return step - 1 - min(version.step for version in versions) <= staleness


def is_acceptable(head: Head, step: int, versions: tuple[Version, ...], staleness: int) -> bool:
    """Whether a group made by `versions` may be trained at `step` after `head`."""
    return (
        bool(versions)
        and all(is_ancestor(head, version) for version in versions)
        and is_fresh(step, versions, staleness)
    )


def resumable(head: Head, checkpoints: Iterable[Checkpoint]) -> tuple[Checkpoint, ...]:
    """The checkpoints on head's chain, newest first: where a new world may start from."""
    on_chain = [c for c in checkpoints if is_ancestor(head, c.version)]
    return tuple(sorted(on_chain, key=lambda c: (c.step, c.lineage), reverse=True))

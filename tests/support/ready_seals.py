"""A seal as a rank receives it."""

from __future__ import annotations

from collections.abc import Iterable

from gcore.ledger.records.chain import Seal, SealedGroup, SealState


def ready_seal(
    groups: Iterable[SealedGroup],
    *,
    step: int = 1,
    lineage: int = 0,
    world: str = "w",
    ranks: int = 1,
    mini_batches: int = 1,
) -> Seal:
    """READY at its first attempt, for a world of `ranks`."""
    return Seal(
        lineage=lineage,
        step=step,
        attempt=1,
        state=SealState.READY,
        world=world,
        world_size=ranks,
        mini_batches=mini_batches,
        groups=tuple(groups),
    )

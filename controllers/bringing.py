"""Brings a checkpoint to this node's own folder of the run, where nodes share none: it lies here whole, or it is said why not.

What was fetched counts once every byte of it was read here, against its manifest and the digest that was registered. Decides
nothing, and writes nothing to the store.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from controllers.hands import Hands
from controllers.own_files import OwnFolder
from controllers.peer_files import NotThere, from_first
from controllers.spreading import holders
from controllers.turns import order
from controllers.view import JobView, SavedCheckpoint
from gcore.weights.layout import CheckpointDamaged, manifest_digest, verify_checkpoint


@dataclass(frozen=True, slots=True)
class Brought:
    """Why a checkpoint does not lie whole on this node, or nothing. `is_final`: it will not while things are as they are,
    since no node that is there has it undamaged."""

    problem: str = ""
    is_final: bool = False


async def bring(
    checkpoint: SavedCheckpoint, view: JobView, hands: Hands, own: OwnFolder, *, read_all: bool = False
) -> Brought:
    """See that a checkpoint lies here, and fetch it if not. `read_all`: every byte of one that lies here, and fetch another in
    its place if it is damaged. Raises OSError."""
    name, folder = (checkpoint.version, checkpoint.digest), hands.run_dir / checkpoint.file
    here = ""
    try:
        await asyncio.to_thread(prove if read_all or name in own.damaged else prove_name, folder, checkpoint.digest)
    except CheckpointDamaged as error:
        here = str(error)
    else:
        own.damaged.discard(name)
        return Brought()
    lies = await asyncio.to_thread(folder.is_dir)
    if lies:
        own.damaged.add(name)
    peers = addresses(view)
    said = holders(view, *name) - {view.node}
    fetch = partial(
        own.files.folder, folder=checkpoint.file, prove=partial(prove, digest=checkpoint.digest), durable=True
    )
    fetched = await from_first(peers, order(said, f"source {view.node}"), fetch)
    if fetched.source:
        own.damaged.discard(name)
        return Brought()
    is_final = said == fetched.wrong.keys() and all(
        isinstance(error, CheckpointDamaged | NotThere) for error in fetched.wrong.values()
    )
    why = fetched.why or "no other node that is there has it"
    return Brought(f"{here}; {why}" if lies else why, is_final)


def prove(folder: Path, digest: str) -> None:
    """Read every byte of a checkpoint. Raises CheckpointDamaged if it is not whole, or not the one of that digest."""
    verify_checkpoint(folder)
    prove_name(folder, digest)


def prove_name(folder: Path, digest: str) -> None:
    """Raises CheckpointDamaged if the manifest is not that of `digest`, or is not there."""
    if manifest_digest(folder) != digest:
        raise CheckpointDamaged("it is not the one that was registered", where=str(folder))


def addresses(view: JobView) -> dict[str, str]:
    """Where the peers that are there answer."""
    return {name: record.for_peers for name, record in view.nodes.items() if name != view.node}

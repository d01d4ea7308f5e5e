"""`gcore export` of a checkpoint that does not lie on this machine, because the job's nodes share no folder: it is fetched from a
node that has it, and proved, before it is copied."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from gcore.errors import UsageError


@contextlib.contextmanager
def on_this_machine(folder: Path, job: str, home: Path, address: str | None, near: Path) -> Iterator[Path]:
    """The checkpoint `folder` where it lies, or fetched beside `near` for as long as the block lasts.

    Raises GcoreError, and OSError if there is no room beside `near`.
    """
    if folder.is_dir():
        yield folder
        return
    fetch = _fetcher(folder, job, home, address)
    near.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{near.name}.", suffix=".tmp", dir=near.parent))
    try:
        yield fetch(scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _fetcher(folder: Path, job: str, home: Path, address: str | None) -> Callable[[Path], Path]:
    """What brings the checkpoint into a folder, once it is known who has it."""
    from controllers.cli.checkpoints_verb import find_checkpoints
    from controllers.cli.finding import find_cluster
    from controllers.cli.job_verbs import call
    from controllers.peer_files import PeerFiles, from_first
    from gcore.weights.layout import verify_checkpoint

    found = find_checkpoints(job, home, address).reply
    nodes = next((list(one.nodes) for one in found.checkpoints if Path(one.folder).name == folder.name), [])
    if not nodes:
        raise UsageError(
            "the checkpoint is not to be seen on this machine",
            where=str(folder),
            fix="Run this where storage is mounted",
        )
    connector = find_cluster(address, home).connector
    addresses = {node.name: node.address for node in call(lambda client: client.list_nodes(), address, home).nodes}

    def fetch(scratch: Path) -> Path:
        files = PeerFiles(found.uid, scratch, owner="export", connector=connector)

        async def from_peer(peer: str) -> None:
            await files.folder(peer, f"checkpoints/{folder.name}", verify_checkpoint, durable=False)

        fetched = asyncio.run(from_first(addresses, nodes, from_peer))
        if not fetched.source:
            raise UsageError(
                f"the checkpoint is on {', '.join(nodes)}, and none of them gives it ({fetched.why or 'they are not there'})",
                where=str(folder),
                fix="Ask again when one of them is there",
            )
        return scratch / "checkpoints" / folder.name

    return fetch

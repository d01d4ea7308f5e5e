"""Fetches the blobs that a rank's samples name (pictures and other arrays) into the folder of its world.

The blob store of the rank's node does the transfers (`gcore.media`), so each blob crosses the network once per node. It
links verified blobs into the world's folder, where nothing else deletes them. The rank then reports the samples as held.

A store that does not answer is asked again; a blob that no named node has is reported as unavailable, and asked for
again when a controller sends the group again. The folder is emptied when a step is trained.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from gcore.errors import GcoreError
from gcore.media.client import BlobClient
from gcore.media.protocol import Blob
from gcore.system.clock import Clock, retry_delay
from gcore.train.rank.feed import WantedBlob
from gcore.train.rank.service import RankStatus

BATCH = 256
"""Maximum number of blobs in one request to the store."""

log = logging.getLogger("gcore.train")


class BlobFetcher:
    """Fetches wanted blobs while the rank receives samples. Belongs to the rank's event loop.

    `client`: of the store on the rank's node. `folder`: of the world; created here. `board`: gets what arrives.
    """

    def __init__(self, client: BlobClient, folder: Path, board: RankStatus, clock: Clock) -> None:
        self._client = client
        self._folder = folder
        self._board = board
        self._clock = clock
        self._wanted = asyncio.Event()

    def look(self) -> None:
        """Look for wanted blobs: samples have arrived, or a step was trained."""
        self._wanted.set()

    async def run(self) -> None:
        """Fetch what is wanted; never returns. Raises OSError if the folder cannot be written."""
        await asyncio.to_thread(self._folder.mkdir, parents=True, exist_ok=True)
        failures = 0
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await asyncio.to_thread(self._sweep, self._board.state.blobs)
            failed = False
            for holders, blobs in grouped(self._lacking()):
                try:
                    await self._fetch(holders, blobs)
                except GcoreError as error:
                    log.warning("cannot fetch %d blobs: %s", len(blobs), error)
                    failed = True
            failures = failures + 1 if failed else 0
            if failed:
                await self._clock.sleep(retry_delay(failures))
                self._wanted.set()

    def _lacking(self) -> Mapping[str, WantedBlob]:
        state = self._board.state
        return {name: one for name, one in state.wanted.items() if name not in state.unavailable}

    async def _fetch(self, holders: Collection[str], blobs: Collection[WantedBlob]) -> None:
        before = self._board.fetched_bytes

        def progress(received: int, _: int) -> None:
            self._board.fetched_bytes = max(self._board.fetched_bytes, before + received)
            self._board.show(wanted=False)

        wanted = [Blob(one.medium.sha256, one.medium.size) for one in blobs]
        result = await self._client.fetch(wanted, holders, progress)
        self._board.fetched_bytes = before + sum(blob.size for blob in wanted if blob.sha256 in result.present)
        missing = await self._client.link(result.present, self._folder)
        self._board.add_blobs(result.present - set(missing))
        if result.unavailable:
            self._board.miss_blobs(result.unavailable)
        if missing or result.failed:
            why = next(iter(result.failed.values()), "the store has lost them")
            raise GcoreError(f"{len(missing) + len(result.failed)} of {len(wanted)} blobs did not arrive ({why})")

    def _sweep(self, kept: Collection[str]) -> None:
        """Delete the files of blobs that are no longer kept."""
        for file in self._folder.iterdir():
            if file.name not in kept:
                file.unlink(missing_ok=True)


def grouped(wanted: Mapping[str, WantedBlob]) -> Iterable[tuple[frozenset[str], list[WantedBlob]]]:
    """Divide wanted blobs by the nodes that have them, at most `BATCH` in each part."""
    parts: dict[frozenset[str], list[WantedBlob]] = {}
    for one in wanted.values():
        parts.setdefault(one.holders, []).append(one)
    for holders, blobs in parts.items():
        for start in range(0, len(blobs), BATCH):
            yield holders, blobs[start : start + BATCH]

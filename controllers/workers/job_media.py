"""The media of a job on this controller: from a prompt's picture files to blobs, and the pins of blobs.

The store of the node makes the blobs; this process handles names only. It pins the blobs of all prompts that it produces
or holds groups of, and renews the pins. A pin that expires, because the controller hangs, costs a group at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from controllers.changes import ChangeSignal
from controllers.workers.blobs import NodeBlobs
from gcore.errors import DataError, EngineError, EngineUnreachable, GcoreError
from gcore.media.pictures import PictureError
from gcore.media.protocol import (
    TRANSFERS,
    Blob,
    BlobTooLarge,
    StoreFailed,
    StoreFull,
    StoreUnreachable,
    blob_path,
)
from gcore.reward.api import PictureFile
from gcore.rollout.api import PicturesUnavailable, RequestPictures
from gcore.system.clock import Clock, retry_delay
from gcore.system.concurrency import cancel_all, gather_or_cancel
from gcore.types import Medium, PictureRef, Prompt, PromptRef

if TYPE_CHECKING:
    from gcore.media.client import BlobFetch

PIN_S = 120.0
"""Seconds for which a pin lasts."""

RENEW_S = 30.0
"""Seconds between two renewals of all pins."""

REPORT_S = 1.0
"""Seconds between two reports of what is wrong with the store."""

STORE_TRIES = 6
"""Number of tries to reach the store of an engine's node. Together they outlast the restart of a daemon, whose store ends
with it. Meanwhile the engine counts as busy, so that other engines get other requests."""

AGAIN = "The request is sent again"

Pictures = tuple[PictureRef, ...]


class JobMedia:
    """The media of a job on this controller. `me`: this incarnation. `held`: returns the prompts that this controller produces or holds groups of. `worlds`:
    returns the train worlds whose ranks on this node may need their blobs; empty: not known yet. `changes`: notified when
    they change. `warn`: called with what is wrong with the store of this node, and with an empty sentence when that is over.
    """

    def __init__(
        self,
        blobs: NodeBlobs,
        uid: str,
        me: str,
        held: Callable[[], Iterable[PromptRef]],
        worlds: Callable[[], Collection[str]],
        changes: ChangeSignal,
        warn: Callable[[str], None],
        clock: Clock,
    ) -> None:
        self._blobs = blobs
        self._uid = uid
        self._me = me
        self._held = held
        self._worlds = worlds
        self._changes = changes
        self._warn = warn
        self._clock = clock
        self._making: dict[Pictures, asyncio.Task[tuple[Medium, ...]]] = {}
        """By pictures: the task that makes their blobs, kept as long as a held prompt has them."""
        self._prompts: dict[PromptRef, set[Pictures]] = {}
        """The pictures of prompts that are trained, and those that tools returned in responses to them."""
        self._kept: Counter[str] = Counter()
        """By SHA-256: how often the blobs of responses are in use (`stored`)."""
        self._made: dict[PromptRef, set[str]] = {}
        """SHA-256 of the blobs that engines have made for responses to prompts that are trained."""
        self._elsewhere: dict[str, set[str]] = {}
        """By SHA-256: the other nodes whose stores have fetched the blob for a request of this controller."""
        self._used: Counter[Pictures] = Counter()
        """How often pictures are in use beside that."""
        self._reserved: dict[Pictures | PromptRef, int] = {}
        """Bytes that are reserved for the blobs of pictures that are not stored yet, and of those that may be made for the responses
        to a prompt."""
        self._reserving = asyncio.Lock()

    async def reserve(self, prompt: Prompt, made_bytes: int = 0) -> bool:
        """Reserve room in the store for a prompt that will be sampled; return whether there is room. `made_bytes`: upper bound
        for the bytes of the blobs that are made for its responses: pictures of tools, or those that the policy generates.

        A store that does not answer counts as room: making the blobs then fails, with the reason.
        """
        pictures, more = prompt.pictures, dict[Pictures | PromptRef, int]()
        async with self._reserving:
            if pictures and pictures not in self._making and pictures not in self._reserved:
                more[pictures] = sum(one.size for one in pictures)
            if made_bytes:
                more[prompt.ref] = made_bytes
            if more and not await self._set_reservation(self._reserved | more):
                return False
            self._reserved |= more
        self.keep(prompt.ref, pictures)
        return True

    def keep(self, ref: PromptRef, pictures: Pictures) -> None:
        """Keep the blobs of pictures pinned as long as this controller holds the prompt `ref`."""
        if pictures:
            self._prompts.setdefault(ref, set()).add(pictures)

    async def keep_made(self, ref: PromptRef, media: Collection[Medium]) -> None:
        """Pin the blobs that an engine has made for responses to the prompt `ref`, as long as this controller holds it.

        An engine puts them into the store of its own node; if that is another node, they are fetched from there. Raises
        EngineError.
        """
        if not media:
            return
        names = {one.sha256 for one in media}
        try:
            client = await self._blobs.client(self._uid)
            await client.pin(self._me, sorted(names), PIN_S)
            blobs = [Blob(one.sha256, one.size) for one in media]
            found = await client.fetch(blobs, self._blobs.nodes_with_stores(), holder=self._me)
        except GcoreError as error:
            raise _failed_here(error) from error
        if lacking := names - found.present:
            raise EngineError(f"no blob store has blob {min(lacking)} of a response to prompt {ref}", fix=AGAIN)
        self._made.setdefault(ref, set()).update(names)
        await self._lower_reservation(ref, sum({one.sha256: one.size for one in media}.values()))

    async def end_sampling(self, ref: PromptRef) -> None:
        """End the reservation for pictures of tools: all responses to the prompt are finished."""
        if self._reserved.pop(ref, None) is not None:
            await self._renew_reservation()

    async def reserve_for_ranks(self, size: int) -> bool:
        """Reserve room in the store of this node for blobs that its train ranks lack; return whether there is room. 0 bytes
        end the reservation. A store that does not answer counts as room, as in `reserve`."""
        client = await self._blobs.client(self._uid)
        try:
            return await client.reserve(TRANSFERS, size, PIN_S)
        except GcoreError:
            return True

    async def _lower_reservation(self, ref: PromptRef, stored: int) -> None:
        """Lower the reservation for responses to a prompt by the bytes of blobs that are stored now."""
        if ref in self._reserved:
            self._reserved[ref] = max(self._reserved[ref] - stored, 0)
            await self._renew_reservation()

    async def _renew_reservation(self) -> None:
        """Set the reservation at the store to the present one. It waits for one that is being raised, so that the store does
        not keep a lower one than this controller."""
        async with self._reserving:
            await self._set_reservation(self._reserved)

    async def _set_reservation(self, wanted: Mapping[Pictures | PromptRef, int]) -> bool:
        client = await self._blobs.client(self._uid)
        try:
            return await client.reserve(self._me, sum(wanted.values()), PIN_S)
        except GcoreError:
            return True

    async def release(self, ref: PromptRef) -> None:
        """End the pins of a prompt whose group was dropped to make room, except those that other prompts need."""
        await self.end_sampling(ref)
        others = set[Pictures]().union(*(found for held, found in self._prompts.items() if held != ref))
        unused = [one for one in self._prompts.pop(ref, ()) if not self._used[one] and one not in others]
        tasks = [task for one in unused if (task := self._making.pop(one, None)) is not None]
        dropped = self._names(tasks) | self._made.pop(ref, set())
        needed = set(self._used).union(*self._prompts.values())
        for pictures, task in list(self._making.items()):  # the same blobs, as a judge has seen them
            if pictures not in needed and task.done() and self._names((task,)) <= dropped:
                del self._making[pictures]
        dropped -= self._names(self._making.values()).union(*self._made.values())
        if dropped:
            client = await self._blobs.client(self._uid)
            with contextlib.suppress(GcoreError):  # the pins end by themselves
                await client.unpin(self._me, sorted(dropped), ends_grace=True)

    async def of(self, prompt: Prompt) -> tuple[Medium, ...]:
        """The media of a prompt; the store makes their blobs at the first call, and again if it has lost them. Raises
        EngineError if it cannot, and PictureError if a picture has changed or is damaged.
        """
        return await self._of_pictures(prompt.pictures)

    async def _of_pictures(self, pictures: Pictures) -> tuple[Medium, ...]:
        if not pictures:
            return ()
        task = self._making.get(pictures)
        if task is not None and _has_made(task) and await self._blobs.find_lost(self._uid, task.result()):
            if self._making.get(pictures) is task:
                del self._making[pictures]
            task = self._making.get(pictures)
        if task is None or (task.done() and not _has_made(task)):
            task = self._making[pictures] = asyncio.create_task(self._make(pictures), name=f"media {pictures[0].path}")
        return await asyncio.shield(task)

    @contextlib.asynccontextmanager
    async def in_use(self, pictures: Pictures) -> AsyncIterator[tuple[Medium, ...]]:
        """Yield the media of pictures; their blobs stay pinned until the block ends. Raises as `of`."""
        self._used[pictures] += 1
        try:
            yield await self._of_pictures(pictures)
        finally:
            self._used[pictures] -= 1
            self._used += Counter()  # drops those that are no longer in use

    async def store_for(self, ref: PromptRef, picture: PictureRef) -> Medium:
        """Make the blob of a picture that a tool returned in a response to a trained prompt; it stays pinned as long as this
        controller holds the prompt. Raises as `of`."""
        self.keep(ref, (picture,))
        (medium,) = await self._of_pictures((picture,))
        await self._lower_reservation(ref, medium.size)
        return medium

    @contextlib.asynccontextmanager
    async def files(self, prompt: Prompt) -> AsyncIterator[tuple[PictureFile, ...]]:
        """Yield the files of a prompt's pictures on this node, which stay there until the block ends. Raises as `of`."""
        async with self.in_use(prompt.pictures) as media:
            yield self.picture_files(media)

    def picture_files(self, media: Iterable[Medium]) -> tuple[PictureFile, ...]:
        """Where the store of this node keeps pictures of prompts and tools."""
        return tuple(self._file(one) for one in media if one.kind == "picture")

    def generated_picture(self, media: Iterable[Medium]) -> PictureFile:
        """Where the store of this node keeps the picture that the policy generated. Raises EngineError if there is none, so
        that the prompt is sampled again."""
        made = [one for one in media if one.kind == "decoded"]
        if len(made) != 1:
            raise EngineError(f"the engine returned {len(made)} pictures for a response, instead of 1", fix=AGAIN)
        return self._file(made[0])

    def _file(self, picture: Medium) -> PictureFile:
        path = self.folder / blob_path(picture.sha256)
        return PictureFile(str(path), picture.sha256, *picture.shape[:2])

    @contextlib.asynccontextmanager
    async def stored(self, media: Collection[Medium]) -> AsyncIterator[None]:
        """Keep the blobs of media in the store of this node until the block ends; it first fetches those that it has lost.
        Raises EngineError, so that the prompt is sampled again, if no store has one.
        """
        if not media:
            yield
            return
        blobs = {one.sha256: Blob(one.sha256, one.size) for one in media}
        self._kept.update(blobs.keys())
        try:
            await self._bring(blobs)
            yield
        finally:
            self._kept.subtract(blobs.keys())
            self._kept += Counter()  # drops those that are no longer kept

    async def _bring(self, blobs: Mapping[str, Blob]) -> None:
        client = await self._blobs.client(self._uid)
        try:
            await client.pin(self._me, sorted(blobs), PIN_S)
            found = await client.fetch(blobs.values(), [])
            lacking = sorted({*found.unavailable, *found.failed})
            if lacking:
                nodes = set[str]().union(*(await self.locate(lacking)).values())
                found = await client.fetch([blobs[one] for one in lacking], sorted(nodes))
        except GcoreError as error:
            raise _failed_here(error) from error
        for blob in (*found.unavailable, *found.failed):
            why = found.failed.get(blob) or "no store has it"
            raise PicturesUnavailable(f"picture {blob} of a response was lost ({why})", fix=AGAIN)

    async def in_request(self, prompt: Prompt, *, trained: bool) -> RequestPictures:
        """The pictures of a prompt as a request to an engine names them. Raises EngineError. `trained`: whether their
        blobs stay pinned as long as this controller holds the prompt.
        """
        if trained:
            self.keep(prompt.ref, prompt.pictures)
        media = await self.of(prompt)
        return self.name_pictures(prompt.pictures, media, len(prompt.request_ids), prompt.token_ids)

    def name_pictures(
        self, pictures: Pictures, media: tuple[Medium, ...], short: int, token_ids: tuple[int, ...]
    ) -> RequestPictures:
        """Return pictures as a request to an engine names them. `media`: their blobs. `short`, `token_ids`: as in
        `RequestPictures`."""
        provide, nodes = partial(self._provide, pictures, media), partial(self._nodes_with, media)
        return RequestPictures(media, short, token_ids, provide, nodes)

    def _nodes_with(self, media: tuple[Medium, ...]) -> frozenset[str]:
        """The nodes whose stores have all these blobs, as far as this controller knows; this node is one of them."""
        others = [self._elsewhere.get(one.sha256, set()) for one in media]
        return frozenset({self._blobs.node}).union(set.intersection(*others) if others else ())

    async def _provide(self, pictures: Pictures, media: tuple[Medium, ...], node: str) -> str:
        """Let the store of an engine's node fetch blobs, from the store of this node or of another that has fetched them, and
        return their folder there.

        Raises EngineUnreachable if that store does not answer, and PicturesUnavailable if it could not get a blob.
        """
        if node == self._blobs.node:
            if lost := await self._blobs.find_lost(self._uid, media):
                self._making.pop(pictures, None)
                raise PicturesUnavailable(f"the blob store of {node} has lost picture {lost}", fix=AGAIN)
            return str(self._blobs.job_folder(self._uid))
        for tries in itertools.count(1):
            try:
                found = await self._fetch(media, node)
                break
            except StoreUnreachable as error:
                if tries == STORE_TRIES:
                    raise EngineUnreachable(
                        f"the blob store of the engine's node {node}: {error}", fix="The request goes to another engine"
                    ) from error
            except GcoreError as error:
                raise EngineError(f"the blob store of the engine's node {node}: {error}", fix=AGAIN) from error
            await self._clock.sleep(retry_delay(tries))
        for sha256 in found.present:
            self._elsewhere.setdefault(sha256, set()).add(node)
        if found.unavailable:
            self._making.pop(pictures, None)  # so that this node's store makes them again
            for sha256 in found.unavailable:
                self._elsewhere.pop(sha256, None)
        for blob in (*found.unavailable, *found.failed):
            why = found.failed.get(blob) or f"{self._blobs.node} does not have it"
            raise PicturesUnavailable(f"{node} could not fetch picture {blob} ({why})", fix=AGAIN)
        return found.folder

    async def _fetch(self, media: tuple[Medium, ...], node: str) -> BlobFetch:
        client = await self._blobs.client_of(self._uid, node)
        await client.pin(self._me, [one.sha256 for one in media], PIN_S)
        nodes = sorted(self._nodes_with(media) - {node})
        return await client.fetch([Blob(one.sha256, one.size) for one in media], nodes)

    async def _make(self, pictures: Pictures) -> tuple[Medium, ...]:
        client = await self._blobs.client(self._uid)
        try:
            made = [await client.make_picture(one, self._me, PIN_S) for one in pictures]
        except DataError as error:
            if any(Path(one.path).is_relative_to(self.folder) for one in pictures):  # of a response, for a judge
                raise EngineUnreachable(f"the blob store of this node: {error.what}", fix=AGAIN) from error
            raise PictureError(error.what, where=error.where, fix=error.fix) from error
        except GcoreError as error:
            raise _failed_here(error) from error
        finally:
            if self._reserved.pop(pictures, None) is not None:
                await self._renew_reservation()
        return tuple(made)

    @property
    def folder(self) -> Path:
        """The folder of the job's blobs in the store of this node."""
        return self._blobs.job_folder(self._uid)

    async def locate(self, blobs: Sequence[str]) -> Mapping[str, Collection[str]]:
        """The nodes whose stores have each blob."""
        return await self._blobs.locate(self._uid, blobs)

    async def close(self, *, ended: bool) -> None:
        """Stop. `ended`: the job has ended, so that its blobs are deleted."""
        await cancel_all(self._making.values())
        if ended:
            await self._blobs.forget(self._uid)

    async def ready(self) -> None:
        """Wait until this node can reach blob stores and start ranks that do."""
        await self._blobs.wait_for_secret()

    async def run(self) -> None:
        """Renew pins, delete the blobs of former train worlds, and report problems of the store; never returns."""
        await gather_or_cancel((self._renew_pins(), self._sweep_worlds(), self._report_trouble()))

    async def _report_trouble(self) -> None:
        while True:
            self._warn(self._blobs.trouble)
            await self._clock.sleep(REPORT_S)

    async def _sweep_worlds(self) -> None:
        """Delete the blobs of a train world when no rank can need them any more."""
        while True:
            worlds = self._worlds()
            if worlds:
                await self._blobs.sweep_worlds(self._uid, self._worlds)
            await self._changes.until(lambda worlds=worlds: self._worlds() != worlds)  # type: ignore[misc]

    async def _renew_pins(self) -> None:
        """Renew the pins of held prompts, and end those of all others."""
        while True:
            await self._clock.sleep(RENEW_S)
            held = set(self._held())
            self._prompts = {ref: pictures for ref, pictures in self._prompts.items() if ref in held}
            needed = set(self._used).union(*self._prompts.values())
            gone = [pictures for pictures, task in self._making.items() if pictures not in needed and task.done()]
            dropped = self._names(self._making.pop(pictures) for pictures in gone)
            dropped |= set[str]().union(*(self._made.pop(ref) for ref in self._made.keys() - held))
            kept = self._names(self._making.values()).union(self._kept, *self._made.values())
            self._elsewhere = {sha256: nodes for sha256, nodes in self._elsewhere.items() if sha256 in kept}
            if self._reserved:
                wanted = needed | self._making.keys() | held
                self._reserved = {one: size for one, size in self._reserved.items() if one in wanted}
                await self._renew_reservation()
            client = await self._blobs.client(self._uid)
            with contextlib.suppress(GcoreError):  # repeated at the next renewal
                if kept:
                    await client.pin(self._me, sorted(kept), PIN_S)
                if dropped - kept:
                    await client.unpin(self._me, sorted(dropped - kept))

    @staticmethod
    def _names(tasks: Iterable[asyncio.Task[tuple[Medium, ...]]]) -> set[str]:
        return {medium.sha256 for task in tasks if _has_made(task) for medium in task.result()}


def _has_made(task: asyncio.Task[tuple[Medium, ...]]) -> bool:
    """Whether a task has made its blobs."""
    return task.done() and not task.cancelled() and task.exception() is None


def _failed_here(error: GcoreError) -> EngineError:
    """The error of a request that the store of this node failed. While the store is away, full or without disk, the next
    try waits; otherwise a prompt would use up its tries at once."""
    waits = isinstance(error, StoreUnreachable | StoreFailed | StoreFull) and not isinstance(error, BlobTooLarge)
    return (EngineUnreachable if waits else EngineError)(f"the blob store of this node: {error}", fix=AGAIN)

"""The orders in which a curriculum hands out prompts: worked out off the event loop, one shard and epoch after the other.

An epoch's order follows from its record in the store (`gcore.ledger.statistics`), so every peer works out the same one; epoch 0 needs
no record. No prompt of a shard is issued in an epoch before its order is known. An order takes four bytes for each ref of the shard.
Orders are dropped when a rollback made them void, when their shard went to another peer, and when their epoch is over; but not while
groups of them are held or in flight here, since people may want to read those prompts. A job without a curriculum keeps none of this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from gcore.config.spec import JobSpec, training_sources
from gcore.data.curriculum import (
    Curriculum,
    CurriculumView,
    SourceStatistics,
    arrange_shard,
    entry_key,
    find_curriculum,
    shard_keys,
)
from gcore.data.stream import PromptStream, ShardPermutation
from gcore.ledger.records.chain import EpochRecord, SourceTally
from gcore.types import PromptRef, Version


@dataclass(frozen=True, slots=True)
class _Arranged:
    version: Version | None
    """Of the record it follows from; None for epoch 0."""
    order: ShardPermutation | None
    """None: the usual one."""


class CurriculumOrders:
    """The curriculum's orders of one job's shards. `notify` is called when an order has been worked out."""

    def __init__(self, spec: JobSpec, stream: PromptStream, notify: Callable[[], None]) -> None:
        self._spec = spec
        self._stream = stream
        self._notify = notify
        name = spec.data.curriculum
        self._curriculum: Curriculum | None = find_curriculum(name) if name is not None else None
        self._arranged: dict[tuple[int, int], _Arranged] = {}
        self._work: asyncio.Task[None] | None = None
        self._closed = False
        self._defect: BaseException | None = None
        if self._curriculum is not None:
            stream.reorder = self.order

    @property
    def arranging(self) -> bool:
        """Whether an order is being worked out."""
        return self._work is not None

    def ready(
        self,
        refs: Iterable[PromptRef],
        begun: Mapping[int, EpochRecord],
        mine: Collection[int],
        held: Iterable[PromptRef] = (),
    ) -> list[PromptRef]:
        """The refs of `refs` whose order is known; starts to work out the orders of the others. All are due and of my shards `mine`.

        `held`: refs that were issued here and are held or in flight, whatever shard they are of. Raises what a curriculum, or reading the
        data for it, raised.
        """
        due = list(refs)
        if self._curriculum is None:
            return due
        if self._defect is not None:
            raise self._defect
        wanted = list(dict.fromkeys((ref.data_epoch, ref.shard) for ref in due))
        self._forget(wanted, begun, mine, {(ref.data_epoch, ref.shard) for ref in held})
        known = {pair for pair in wanted if self._is_known(pair, begun)}
        if self._work is None and not self._closed:
            for epoch, shard in wanted:
                if (epoch, shard) not in known and (epoch == 0 or epoch in begun):
                    self._work = asyncio.create_task(self._arrange(epoch, shard, begun.get(epoch)), name="curriculum")
                    self._work.add_done_callback(self._done)
                    break
        return [ref for ref in due if (ref.data_epoch, ref.shard) in known]

    def order(self, data_epoch: int, shard: int) -> ShardPermutation | None:
        """For the stream. Raises RuntimeError if the order is not known: such a ref must not have been issued."""
        found = self._arranged.get((data_epoch, shard))
        if found is None:
            raise RuntimeError(f"the order of shard {shard} in epoch {data_epoch} was asked for before it was known")
        return found.order

    async def close(self) -> None:
        """Let what is being worked out end."""
        self._closed = True
        if self._work is not None:
            await asyncio.wait({self._work})

    def _is_known(self, pair: tuple[int, int], begun: Mapping[int, EpochRecord]) -> bool:
        found = self._arranged.get(pair)
        record = begun.get(pair[0])
        return found is not None and found.version == (record.version if record is not None else None)

    def _forget(
        self,
        wanted: Iterable[tuple[int, int]],
        begun: Mapping[int, EpochRecord],
        mine: Collection[int],
        held: Collection[tuple[int, int]],
    ) -> None:
        """Drop all orders but those that are due or held, and newer ones: the window may reach into these again."""
        oldest: dict[int, int] = {}
        for epoch, shard in wanted:
            oldest[shard] = min(epoch, oldest.get(shard, epoch))
        for epoch, shard in list(self._arranged):
            # A shard of which nothing is due keeps what it has: the next step begins where this one ended.
            is_over = shard not in mine or epoch < oldest.get(shard, epoch)
            if (is_over and (epoch, shard) not in held) or not self._is_known((epoch, shard), begun):
                del self._arranged[epoch, shard]

    async def _arrange(self, epoch: int, shard: int, record: EpochRecord | None) -> None:
        found = await asyncio.to_thread(self._worked_out, epoch, shard, record)
        if found is not None:
            self._arranged[epoch, shard] = found

    def _done(self, task: asyncio.Task[None]) -> None:
        """Keep what the task raised: the next call of `ready` raises it."""
        self._work = None
        if not task.cancelled():
            self._defect = task.exception()
        self._notify()

    def _worked_out(self, epoch: int, shard: int, record: EpochRecord | None) -> _Arranged | None:
        """Work the order out, in a thread of its own. None if the orders were closed meanwhile."""
        assert self._curriculum is not None
        version = record.version if record is not None else None
        key = self._curriculum(curriculum_view(self._spec, epoch, record))
        if key is None:
            return _Arranged(version, None)
        keys = shard_keys(self._stream, key, epoch, shard, stopped=lambda: self._closed)
        return None if keys is None else _Arranged(version, arrange_shard(self._spec.seed, epoch, shard, keys))


def curriculum_view(spec: JobSpec, epoch: int, record: EpochRecord | None) -> CurriculumView:
    """The view of an epoch that a curriculum gets; `record` None: nothing was committed before it."""
    names = tuple(source.name for source in training_sources(spec))
    so_far = record.so_far if record is not None else {}
    latest = record.latest if record is not None else {}
    return CurriculumView(
        seed=spec.seed,
        epoch=epoch,
        options=dict(spec.data.curriculum_options),
        sources=names,
        so_far={name: source_statistics(so_far.get(name, SourceTally())) for name in names},
        latest={name: source_statistics(latest.get(name, SourceTally())) for name in names},
    )


def source_statistics(tally: SourceTally) -> SourceStatistics:
    """A tally as means."""
    return SourceStatistics(
        kept=tally.kept,
        filtered=tally.filtered,
        failed=tally.failed,
        mean_reward=tally.reward / tally.kept if tally.kept else None,
        mean_length=tally.tokens / tally.samples if tally.samples else None,
        truncated=tally.truncated / tally.samples if tally.samples else None,
    )


def check_curriculum(spec: JobSpec, stream: PromptStream, sample: int) -> None:
    """Order some entries of epoch 0 as the job will, `sample` at most, spread over all. Raises SpecError, GcoreError."""
    if spec.data.curriculum is None:
        return
    key = find_curriculum(spec.data.curriculum)(curriculum_view(spec, 0, None))
    if key is None:
        return
    refs = sum(stream.shape.lengths)
    count = min(refs, sample)
    for number in range(count):
        place, shard = divmod(number * refs // count, len(stream.shape.lengths))
        entry_key(stream, key, 0, shard, place)

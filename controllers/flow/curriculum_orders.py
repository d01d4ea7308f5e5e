"""The order in which a curriculum samples the prompts of a shard in a data epoch. It is computed in a thread, one shard
and epoch at a time.

The order follows from the epoch's record in the store (`gcore.ledger.statistics`), so every peer computes the same one;
epoch 0 needs no record. No prompt of a shard is sampled in an epoch before the order is known. An order takes four
bytes for each prompt of the shard. It is dropped when a rollback makes it invalid, when the shard moves to another
peer, and when the epoch is over; but not while this peer holds groups of it or has prompts of it in flight, because
users may look at those prompts. Jobs without a curriculum do not use this module's orders.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

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
    """The computed order of one shard in one epoch."""

    version: Version | None
    """The weight version of the epoch's record from which the order was computed; None for epoch 0."""
    order: ShardPermutation | None
    """The order; None: the curriculum keeps the default order."""


class CurriculumOrders:
    """Computes and caches the prompt orders of one job's curriculum. `notify`: called when an order has been
    computed."""

    def __init__(self, spec: JobSpec, curriculum: Curriculum, stream: PromptStream, notify: Callable[[], None]) -> None:
        self._spec = spec
        self._curriculum = curriculum
        self._stream = stream
        self._notify = notify
        self._arranged: dict[tuple[int, int], _Arranged] = {}
        self._work: asyncio.Task[None] | None = None
        self._closed = False
        self._defect: BaseException | None = None
        stream.reorder = self.order

    @classmethod
    def find(cls, spec: JobSpec, stream: PromptStream, notify: Callable[[], None]) -> Self | None:
        """The orders of the job's curriculum; None if it has no curriculum. Raises PluginFault if it is unknown."""
        name = spec.data.curriculum
        return None if name is None else cls(spec, find_curriculum(name), stream, notify)

    @property
    def arranging(self) -> bool:
        """Whether an order is being computed."""
        return self._work is not None

    def ready(
        self,
        refs: Iterable[PromptRef],
        begun: Mapping[int, EpochRecord],
        mine: Collection[int],
        held: Iterable[PromptRef] = (),
    ) -> list[PromptRef]:
        """Return those of the due prompts `refs` whose order is known, and start to compute the next unknown order.

        `begun`: the records of epochs. `mine`: the shards of this peer, to which all `refs` belong. `held`: prompts of
        any shard that this peer holds or has in flight, whose orders are kept. Raises the exception with which an
        earlier computation failed.
        """
        due = list(refs)
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
        """Return the order of a shard in an epoch; the prompt stream calls this. Raises RuntimeError if it is not
        computed: no prompt of it may have been sampled then."""
        found = self._arranged.get((data_epoch, shard))
        if found is None:
            raise RuntimeError(f"the order of shard {shard} in epoch {data_epoch} was requested before it was computed")
        return found.order

    async def close(self) -> None:
        """Stop, and wait for the running computation."""
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
        """Drop the orders that are no longer needed: of shards of other peers, of epochs before the oldest due one, and
        invalid ones. Orders of held prompts are kept."""
        oldest: dict[int, int] = {}
        for epoch, shard in wanted:
            oldest[shard] = min(epoch, oldest.get(shard, epoch))
        for epoch, shard in list(self._arranged):
            # A shard without due refs keeps its orders: the next step continues where this one ended.
            is_over = shard not in mine or epoch < oldest.get(shard, epoch)
            if (is_over and (epoch, shard) not in held) or not self._is_known((epoch, shard), begun):
                del self._arranged[epoch, shard]

    async def _arrange(self, epoch: int, shard: int, record: EpochRecord | None) -> None:
        found = await asyncio.to_thread(self._worked_out, epoch, shard, record)
        if found is not None:
            self._arranged[epoch, shard] = found

    def _done(self, task: asyncio.Task[None]) -> None:
        """Store the task's exception; the next call of `ready` raises it."""
        self._work = None
        if not task.cancelled():
            self._defect = task.exception()
        self._notify()

    def _worked_out(self, epoch: int, shard: int, record: EpochRecord | None) -> _Arranged | None:
        """Compute the order of a shard in an epoch; runs in a thread. Return None if this object was closed
        meanwhile."""
        version = record.version if record is not None else None
        key = self._curriculum(curriculum_view(self._spec, epoch, record))
        if key is None:
            return _Arranged(version, None)
        keys = shard_keys(self._stream, key, epoch, shard, stopped=lambda: self._closed)
        return None if keys is None else _Arranged(version, arrange_shard(self._spec.seed, epoch, shard, keys))


def curriculum_view(spec: JobSpec, epoch: int, record: EpochRecord | None) -> CurriculumView:
    """Return the input of a curriculum for an epoch: the statistics of its sources. `record` None: nothing was
    committed before the epoch."""
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
    """Convert the sums of a source to counts and means (reward, length, share of truncated responses)."""
    return SourceStatistics(
        kept=tally.kept,
        filtered=tally.filtered,
        failed=tally.failed,
        mean_reward=tally.reward / tally.kept if tally.kept else None,
        mean_length=tally.tokens / tally.samples if tally.samples else None,
        truncated=tally.truncated / tally.samples if tally.samples else None,
    )


def check_curriculum(spec: JobSpec, stream: PromptStream, sample: int) -> None:
    """Test a job's curriculum: compute its sort keys for up to `sample` evenly spaced entries of epoch 0. Raises
    SpecError, GcoreError."""
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

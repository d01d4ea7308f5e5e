"""The order in which a curriculum samples prompts, computed off the event loop, one shard and epoch at a time.

An epoch's order follows from its record in the store (`gcore.ledger.statistics`), so every peer computes the same one; epoch 0 needs no
record. No prompt of a shard is sampled in an epoch before its order is known. An order takes four bytes for each ref of the shard. An order
is dropped when a rollback makes it invalid, when its shard moves to another peer, and when its epoch is over; but not while groups of it are
held or in flight here, because users may read those prompts. A job without a curriculum needs none of this.
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
    """The version of the epoch's record; None for epoch 0."""
    order: ShardPermutation | None
    """None: the default order."""


class CurriculumOrders:
    """The curriculum's orders of one job's shards. `notify`: called when an order was computed."""

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
        """Whether an order is being computed."""
        return self._work is not None

    def ready(
        self,
        refs: Iterable[PromptRef],
        begun: Mapping[int, EpochRecord],
        mine: Collection[int],
        held: Iterable[PromptRef] = (),
    ) -> list[PromptRef]:
        """The refs of `refs` whose order is known; starts to compute the order of another one. All refs are due and in my shards `mine`.

        `held`: refs of any shard that were sampled here and are held or in flight. Raises what a curriculum, or reading its data, raised.
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
        """The order of a shard in an epoch, for the stream. Raises RuntimeError if it is unknown: such a ref must not have been sampled."""
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
        """Drop all orders except those that are due or held, and newer ones, which the window may need again."""
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
        """Compute an order, in a thread. None if this object was closed meanwhile."""
        assert self._curriculum is not None
        version = record.version if record is not None else None
        key = self._curriculum(curriculum_view(self._spec, epoch, record))
        if key is None:
            return _Arranged(version, None)
        keys = shard_keys(self._stream, key, epoch, shard, stopped=lambda: self._closed)
        return None if keys is None else _Arranged(version, arrange_shard(self._spec.seed, epoch, shard, keys))


def curriculum_view(spec: JobSpec, epoch: int, record: EpochRecord | None) -> CurriculumView:
    """What a curriculum sees of an epoch; `record` None: nothing was committed before it."""
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
    """The means of a tally."""
    return SourceStatistics(
        kept=tally.kept,
        filtered=tally.filtered,
        failed=tally.failed,
        mean_reward=tally.reward / tally.kept if tally.kept else None,
        mean_length=tally.tokens / tally.samples if tally.samples else None,
        truncated=tally.truncated / tally.samples if tally.samples else None,
    )


def check_curriculum(spec: JobSpec, stream: PromptStream, sample: int) -> None:
    """Compute the keys of up to `sample` entries of epoch 0, spread over all, to check the curriculum. Raises SpecError, GcoreError."""
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

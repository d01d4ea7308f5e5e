"""From a prompt ref to the prompt: order, source, entry, text and tokens in one call.

Whoever shows a prompt to an engine takes it from here, so that the same ref is the same tokens everywhere: it is a pure
function of the data, the seed and the ref. A curriculum may give a shard of an epoch another order than the keyed
permutation, and must then be as pure (`Reorder`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from gcore.errors import DataError
from gcore.prompts.cursor import StreamShape, shard_lengths
from gcore.prompts.mixture import Mixture, Share
from gcore.prompts.shards import entry_index, shard_length
from gcore.prompts.source import OpenSource
from gcore.types import Prompt, PromptRef


class Order(Protocol):
    """A bijection of range(length of the shard) onto itself."""

    def index(self, seq: int) -> int:
        """The place in the shard that comes `seq`-th."""
        ...


Reorder = Callable[[int, int], Order | None]
"""(data_epoch, shard) to that shard's order in that epoch; None: the usual one. The same on every node, for ever."""


class PromptStream:
    """The prompts of one job. `reorder`: a curriculum's; whoever has one may set it before the first prompt is asked."""

    def __init__(
        self, sources: Sequence[OpenSource], *, shards: int, seed: int, reorder: Reorder | None = None
    ) -> None:
        self.sources = tuple(sources)
        self.mixture = Mixture([Share(s.name, len(s), s.source.weight) for s in self.sources], seed)
        self.shape: StreamShape = cut(self.mixture.refs, shards)
        self.reorder = reorder
        self._seed = seed

    def prompt(self, ref: PromptRef) -> Prompt:
        """The prompt that `ref` stands for.

        Raises PromptFiltered if its source leaves it out, DataError if it does not render or fit, DataChanged (a
        DataError) if the data are no longer what they were, IndexError outside the stream.
        """
        source, entry = self.found(ref)
        return source.prompt(entry, ref)

    def found(self, ref: PromptRef) -> tuple[OpenSource, int]:
        """The source and the entry that `ref` stands for. Reads no data. Raises IndexError outside the stream."""
        order = self._reordered(ref.data_epoch, ref.shard)
        if order is None:
            return self._at(ref.data_epoch, entry_index(self.shape, self._seed, ref))
        return self.at(ref.data_epoch, ref.shard, order.index(ref.seq))

    def at(self, data_epoch: int, shard: int, place: int) -> tuple[OpenSource, int]:
        """The source and the entry at a place of a shard, which is what an order arranges. Raises IndexError."""
        if not 0 <= place < shard_length(self.shape, shard):
            raise IndexError(f"place {place} of a shard of {self.shape.lengths[shard]}")
        return self._at(data_epoch, place * len(self.shape.lengths) + shard)

    def _at(self, data_epoch: int, place: int) -> tuple[OpenSource, int]:
        found = self.mixture.at(data_epoch, place)
        return self.sources[found.source], found.entry

    def _reordered(self, data_epoch: int, shard: int) -> Order | None:
        return None if self.reorder is None else self.reorder(data_epoch, shard)


def cut(refs: int, shards: int) -> StreamShape:
    """Cut an epoch into shards. Raises DataError if there are more shards than prompts."""
    if refs < shards:
        raise DataError(
            f"an epoch holds {refs} prompt{'s' * (refs != 1)}, and data.shards is {shards}; every shard needs at least one",
            where="data.shards",
            fix=f"Set data.shards to {refs} or less",
        )
    return shard_lengths(refs, shards)


def prompt_limit(context: int | None, max_new_tokens: int, *, named: str = "rollout.max_new_tokens") -> int | None:
    """The most tokens a prompt may have if a response of `max_new_tokens` shall fit into `context` after it.

    None if the context is not known. Raises DataError if no prompt fits at all; `named`: where the length is set.
    """
    if context is None:
        return None
    if max_new_tokens >= context:
        raise DataError(
            f"{named} ({max_new_tokens}) leaves no room for a prompt in the model's context of {context}",
            fix="Lower it, or raise model.max_length if the model allows it",
        )
    return context - max_new_tokens

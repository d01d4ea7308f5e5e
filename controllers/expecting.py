"""What this controller remembers of lengths, and which of the due prompts it begins first because of that.

Of each source the newest groups are known, and of each prompt that was answered here how its responses compared with its
source's at that time (`gcore.rollout.lengths`): in a later data epoch that is what is expected of it. In the first epoch, and
of a prompt whose shard was another controller's then, only the source's lengths are known. All of it is lost with the process,
and nothing is wrong without it: it only says who goes first, and to which engine.

With `rollout.order: longest_first` the prompts that became due at the same head go longest expected first; what became due at an
earlier one goes before all of them. So nothing can be passed over for ever, however few may be in flight at once. All that is due
is produced in any case, and what a seal takes is another's rule: the order changes when a prompt is begun, not whether.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from controllers.owing import Expect
from gcore.rollout.lengths import NONE, Siblings, SourceLengths, expected
from gcore.rollout.outliving import left
from gcore.types import PromptRef, Version

NEWEST_GROUPS = 64
"""Groups of a source that stand for its recent lengths."""
EVERY = 8
"""After so many more groups they are looked at anew."""
MOST_PROMPTS = 65_536
"""Prompts that are remembered; those that were answered the longest time ago are forgotten first."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A prompt, whatever the data epoch: an entry of a source, whose responses have at most `longest` tokens."""

    source: str
    number: int
    longest: int


@dataclass(frozen=True, slots=True)
class Turn:
    """`since`: head's version when it became due; `tokens`: what was expected of a response to it then."""

    since: Version
    tokens: float


@dataclass
class _Source:
    newest: deque[tuple[int, ...]] = field(default_factory=lambda: deque(maxlen=NEWEST_GROUPS))
    fresh: int = 0
    """Groups that were not looked at yet."""
    lengths: SourceLengths = field(default_factory=lambda: SourceLengths(()))


class Expecting:
    """Mutable; one event loop. `entry` says which prompt a ref stands for."""

    def __init__(self, entry: Callable[[PromptRef], Entry]) -> None:
        self._entry = entry
        self._sources: dict[str, _Source] = {}
        self._prompts: OrderedDict[tuple[str, int], Siblings] = OrderedDict()
        self._turns: dict[PromptRef, Turn] = {}
        """Of what is due; worked out once."""

    def note(self, ref: PromptRef, lengths: Sequence[int]) -> None:
        """So long were the responses to it."""
        entry = self._entry(ref)
        source = self._sources.setdefault(entry.source, _Source())
        source.newest.append(tuple(lengths))
        source.fresh += 1
        if source.fresh >= EVERY or len(source.newest) <= EVERY:
            source.lengths, source.fresh = SourceLengths.of(source.newest), 0
        self._prompts[entry.source, entry.number] = Siblings.of(source.lengths, lengths)
        self._prompts.move_to_end((entry.source, entry.number))
        while len(self._prompts) > MOST_PROMPTS:
            self._prompts.popitem(last=False)

    def tokens(self, ref: PromptRef) -> float:
        """What a response to it is expected to have."""
        entry = self._entry(ref)
        return expected(self._lengths(entry), self._siblings(entry), 0, entry.longest)

    def of(self, ref: PromptRef, *, weighs: bool = True) -> Expect:
        """What responses to it are expected to have still to come, as they grow."""
        return Expect(partial(self._left, self._entry(ref)), weighs)

    def in_turn(self, due: Sequence[PromptRef], head: Version) -> list[PromptRef]:
        """The refs that are due, in the order in which they are begun."""
        self._turns = {ref: self._turns.get(ref) or Turn(head, self.tokens(ref)) for ref in due}
        return longest_first(due, self._turns)

    def _left(self, entry: Entry, finished: Sequence[int], growing: Sequence[int]) -> float:
        return left(self._lengths(entry), self._siblings(entry), finished, growing, entry.longest)

    def _lengths(self, entry: Entry) -> SourceLengths:
        known = self._sources.get(entry.source)
        return known.lengths if known is not None else SourceLengths(())

    def _siblings(self, entry: Entry) -> Siblings:
        return self._prompts.get((entry.source, entry.number), NONE)


def longest_first(due: Sequence[PromptRef], turns: Mapping[PromptRef, Turn]) -> list[PromptRef]:
    """What has been due for longer first, of that the longest; among equals as they come. Pure."""
    return sorted(due, key=lambda ref: (turns[ref].since, -turns[ref].tokens))

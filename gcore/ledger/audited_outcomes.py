"""The audit of outcomes: a walk along the final lineage that recomputes cursors, counts and steps from the entries. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from gcore.ledger.ancestry import is_acceptable, is_ancestor
from gcore.ledger.audited_chain import ChainFacts
from gcore.ledger.findings import Found, few
from gcore.ledger.records import EndedRef, Head, LogEntry, Tally
from gcore.ledger.rules import StreamRules
from gcore.prompts.cursor import Cursors, ShardCursor
from gcore.types import PromptRef, Version

SPAN = 1 << 20
"""Positions in which differences are looked for: more than any window, and no more than a damaged number may make of it."""
MOST_NAMED = 100
"""Refs of one difference that are looked for."""


class Walk:
    """What the entries so far add up to. `counted`: whether the job has kept tallies from its beginning."""

    def __init__(self, rules: StreamRules, head: Head, facts: ChainFacts, found: Found, *, counted: bool) -> None:
        self._rules = rules
        self._head = head
        self._facts = facts
        self._found = found
        self._counted = counted
        self._doubles: dict[PromptRef, int] = {}
        self._shards = [ShardCursor()] * len(rules.shape.lengths)
        self.step = 0
        self.counts = {"trained": 0, "filtered": 0, "failed": 0}
        self.holders: dict[str, int] = {}

    @property
    def cursors(self) -> Cursors:
        """What has ended, as the entries say."""
        return Cursors(tuple(self._shards))

    @property
    def finished_epochs(self) -> int:
        """Data epochs of which every prompt has its outcome."""
        lengths = self._rules.shape.lengths
        return min(cursor.low_water // length for cursor, length in zip(self._shards, lengths, strict=True))

    def has_ended(self, ref: PromptRef) -> bool:
        """Whether an entry so far ended `ref`, which must be a prompt of the job."""
        return self._shards[ref.shard].is_terminal(self._rules.shape.position(ref))

    def add(self, entry: LogEntry) -> None:
        """The next entry of the final lineage."""
        expected = self.step + 1 if entry.kind == "train" else self.step
        if entry.step != expected:
            what = f"log entry {entry.seq} ({entry.kind}) is at step {entry.step}, expected {expected}"
            self._found.add("step", what)
        self.step = entry.step
        before = list(self._shards)
        for one in entry.delta:
            self._end(entry, one, before)
        self._check_versions(entry)
        self._check_kept(entry)

    def _end(self, entry: LogEntry, one: EndedRef, before: Sequence[ShardCursor]) -> None:
        ref, rules = one.ref, self._rules
        if not is_prompt(rules, ref):
            self._found.add("outcome", f"prompt {ref} ended in entry {entry.seq}, and the job has none", [ref])
            return
        position, cursor = rules.shape.position(ref), self._shards[ref.shard]
        if cursor.is_terminal(position):
            self._doubles.setdefault(ref, entry.seq)
            return
        if rules.epochs is not None and ref.data_epoch >= rules.epochs:
            epochs = "1 data epoch" if rules.epochs == 1 else f"{rules.epochs} data epochs"
            what = f"prompt {ref} ended in entry {entry.seq}, beyond the job's {epochs}"
            self._found.add("outcome", what, [ref])
        low = before[ref.shard].low_water
        if position >= low + rules.window:
            oldest = rules.shape.ref(ref.shard, low)
            what = f"prompt {ref} ended in entry {entry.seq}, a window beyond prompt {oldest}, which has no outcome"
            self._found.add("outcome", what, [oldest, ref])
            if position >= low + rules.window + SPAN:
                return  # a bitmap that reaches there would not fit anywhere
        self._shards[ref.shard] = cursor.mark(position)
        self.counts[one.kind] += 1
        if one.kind == "trained":
            self.holders[one.holder] = self.holders.get(one.holder, 0) + 1

    def _check_versions(self, entry: LogEntry) -> None:
        """What made the entry's groups was acceptable when it was written; what it ended without a group, no stranger's."""
        if not entry.delta:
            return
        at = self._at(entry)
        for one in entry.delta:
            if one.kind == "trained":
                if not is_acceptable(at, entry.step, one.versions, self._rules.staleness):
                    what = f"prompt {one.ref}, trained at step {entry.step}, was made by {_made_by(one.versions)}"
                    self._found.add("version", what, [one.ref])
            elif not all(is_ancestor(at, version) for version in one.versions):
                what = f"prompt {one.ref}, {one.kind} in entry {entry.seq}, was made by {_made_by(one.versions)}"
                self._found.add("version", what, [one.ref])

    def _at(self, entry: LogEntry) -> Head:
        """Head as it was before `entry`, as far as ancestry goes."""
        return self._head.model_copy(
            update={
                "lineage": entry.lineage,
                "step": entry.step - 1 if entry.kind == "train" else entry.step,
                "lineages": tuple(one for one in self._facts.lineages if one.number <= entry.lineage),
            }
        )

    def _check_kept(self, entry: LogEntry) -> None:
        """What a rollback would go back to."""
        if entry.cursors is not None and entry.cursors != self.cursors:
            what = f"log entry {entry.seq} keeps cursors that are not the sum of the entries up to it"
            self._found.add("cursors", what, self.differing(entry.cursors))
        if entry.tally is not None and self._counted:
            for sentence in self._miscounted(entry.tally, f"log entry {entry.seq}"):
                self._found.add("tally", sentence)

    def _miscounted(self, tally: Tally, whose: str) -> Iterator[str]:
        sources = tally.sources.values()
        told = {
            "trained": sum(one.kept for one in sources),
            "filtered": sum(one.filtered for one in sources),
            "failed": sum(one.failed for one in sources),
        }
        for kind, count in self.counts.items():
            if told[kind] != count:
                yield f"{whose}'s tally says {told[kind]} prompts {kind}, its chain {count}"

    def tell_doubles(self, log: Mapping[int, LogEntry]) -> None:
        """Where what ended twice ended first: only looked for if there is such a thing."""
        if not self._doubles:
            return
        first: dict[PromptRef, int] = {}
        for seq in self._facts.chain:
            for one in log[seq].delta:
                if one.ref in self._doubles:
                    first.setdefault(one.ref, seq)
        for ref, again in sorted(self._doubles.items()):
            what = f"prompt {ref} ended twice: in entries {first[ref]} and {again}"
            self._found.add("outcome", what, [ref])

    def compare(self, since_step: Iterable[LogEntry]) -> None:
        """Head says what its entries add up to. `since_step`: the account entries after its step."""
        head = self._head
        if self.step != head.step:
            self._found.add("step", f"head is at step {head.step}, its chain at step {self.step}")
        if head.cursors != self.cursors:
            refs = self.differing(head.cursors)
            told = f": {few(refs)}" if refs else ""
            what = f"head's cursors are not the sum of the entries along its chain{told}"
            self._found.add("cursors", what, refs)
        if not self._counted:
            return
        for sentence in self._miscounted(head.tally, "head"):
            self._found.add("tally", sentence)
        ended = sum(len(entry.delta) for entry in since_step)
        if ended != head.tally.since_step.ended:
            said = head.tally.since_step.ended
            self._found.add("tally", f"head says {said} prompts ended since step {head.step}, its chain {ended}")

    def differing(self, told: Cursors) -> list[PromptRef]:
        """The first prompts that have ended by `told` or by the entries, and not by both. In a shard that `told` lacks nothing
        has ended; one that the job has not is passed over."""
        refs: list[PromptRef] = []
        lacking = [ShardCursor()] * (len(self._shards) - len(told.shards))
        for shard, (mine, other) in enumerate(zip(self._shards, (*told.shards, *lacking), strict=False)):
            base = max(min(mine.low_water, other.low_water), 0)
            different = _bits(mine, base) ^ _bits(other, base)
            while different and len(refs) < MOST_NAMED:
                lowest = different & -different
                refs.append(self._rules.shape.ref(shard, base + lowest.bit_length() - 1))
                different ^= lowest
        return refs


def _bits(cursor: ShardCursor, base: int) -> int:
    """Bit i: position `base + i` has ended; of the first `SPAN` only."""
    shift, mask = cursor.low_water - base, (1 << SPAN) - 1
    if not 0 <= shift < SPAN:
        return mask if shift > 0 else 0
    return ((1 << shift) - 1 | (cursor.beyond & mask) << shift) & mask


def is_prompt(rules: StreamRules, ref: PromptRef) -> bool:
    """Whether `ref` is a prompt of the job's data."""
    lengths = rules.shape.lengths
    return ref.data_epoch >= 0 and 0 <= ref.shard < len(lengths) and 0 <= ref.seq < lengths[ref.shard]


def _made_by(versions: Iterable[Version]) -> str:
    """For a sentence."""
    return ", ".join(map(str, versions)) or "nothing"

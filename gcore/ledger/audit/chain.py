"""Audit of the log: findings, structure of the log, and outcomes along the chain of entries that ends at head.

Numbers, parents, lineages, worlds and digests are checked for discarded branches too. The walk along head's chain
recomputes cursors (which prompts have an outcome), counts and steps. A finding has a kind, a sentence, and the prompts
that it concerns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from gcore.data.order import Cursors, ShardCursor
from gcore.ledger.chain import entry_digest, head_digest, job_digest
from gcore.ledger.records.chain import EndedRef, Head, Lineage, LogEntry, Tally
from gcore.ledger.records.job import JobRecord
from gcore.ledger.selection import StreamRules, is_acceptable, is_ancestor
from gcore.types import PromptRef, Token, Version

Kind = Literal[
    "record",  # a line or record that cannot be read, or that exists in two versions
    "chain",  # entries: numbers, parents, lineages and digests
    "step",  # steps have no gap
    "outcome",  # each prompt has exactly one outcome
    "version",  # the versions that generated a group
    "receipt",  # what the ranks trained
    "cursors",  # the cursors of head or of an entry
    "tally",  # the counts of head or of an entry
    "checkpoint",  # what a rollback would restore
    "open",  # open seals and live offers
    "balance",  # issued = trained + filtered + failed + in flight
    "end",  # a job in phase SUCCEEDED has finished
]

MOST_FOUND = 500
"""Maximum number of findings that are listed; further ones are counted."""

MOST_REFS = 100
"""Maximum number of prompts that a finding names."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One violation that the audit found. `refs`: the prompts that it concerns, if any."""

    kind: Kind
    sentence: str
    refs: tuple[PromptRef, ...] = ()


@dataclass(frozen=True)
class Audit:
    """Result of an audit: its findings, and counts along head's chain. Without findings everything is consistent.

    `trained`, `filtered` and `failed` count prompts; `groups_by_holder` counts trained groups by the incarnation that
    held them.
    """

    findings: tuple[Finding, ...] = ()
    more: int = 0
    """Number of violations beyond `MOST_FOUND`."""
    steps: int = 0
    trained: int = 0
    filtered: int = 0
    failed: int = 0
    in_flight: int = 0
    """Prompts without an outcome that an open seal or a live offer names."""
    issued: int = 0
    """Prompts that no controller would sample again: ended by head's cursors, or named by an open seal or a live offer.
    """
    epochs: int = 0
    """Data epochs in which every prompt has an outcome."""
    lineages: int = 0
    groups_by_holder: Mapping[str, int] = field(default_factory=dict)

    @property
    def violations(self) -> tuple[str, ...]:
        """The sentences of all findings; a last one counts those beyond `MOST_FOUND`."""
        more = (f"and {self.more} more violation{'s' * (self.more != 1)}",) if self.more else ()
        return tuple(finding.sentence for finding in self.findings) + more

    def with_problems(self, problems: Sequence[str]) -> Audit:
        """This audit with `problems` (unreadable or contradictory lines) added as violations."""
        unread = tuple(Finding("record", problem) for problem in problems[:MOST_FOUND])
        return replace(self, findings=unread + self.findings, more=self.more + len(problems) - len(unread))

    @property
    def clean(self) -> bool:
        """Whether the audit found no violation."""
        return not self.findings


class FindingCollector:
    """Collects findings: keeps the first `MOST_FOUND` and counts the rest."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.more = 0

    @property
    def count(self) -> int:
        """Number of findings so far."""
        return len(self.findings) + self.more

    def add(self, kind: Kind, sentence: str, refs: Iterable[PromptRef] = ()) -> None:
        """Add one violation, with the prompts that it concerns."""
        if len(self.findings) >= MOST_FOUND:
            self.more += 1
        else:
            self.findings.append(Finding(kind, sentence, tuple(refs)[:MOST_REFS]))


def list_some_refs(refs: Sequence[PromptRef], count: int | None = None) -> str:
    """Text that names the first five of `refs` and counts the others. `count`: total number, if it exceeds `refs`."""
    total = len(refs) if count is None else count
    named = ", ".join(map(str, refs[:5]))
    return named if total <= 5 else f"{named} and {total - min(len(refs), 5)} more"


@dataclass(slots=True)
class WorldSteps:
    """Which steps one train world committed. Each lineage has its own world."""

    world: str
    last: int
    """The newest committed step, or the step that the world started from."""
    lost: bool = False
    """Whether entries may be lost because etcd was restored from an older backup while this world trained."""


@dataclass(frozen=True, slots=True)
class ChainFacts:
    """What the log says about head's chain and the discarded branches.

    `chain`: numbers of the entries on head's chain, ascending. `lineages`: those that the rollbacks in the log began,
    or head's if entries are missing. `since_step`: numbers of the account entries after the newest step. `cut_off`:
    numbers of the step entries that are not on the chain. `committed`: world and token of each step, on all branches.
    `worlds`: committed steps of each train world, by lineage, on all branches. `lost`: ranges of lineages that were
    lost when the store was restored from a backup.
    """

    chain: tuple[int, ...]
    lineages: tuple[Lineage, ...]
    since_step: tuple[int, ...]
    cut_off: tuple[int, ...] = ()
    committed: frozenset[tuple[str, Token]] = frozenset()
    worlds: Mapping[int, WorldSteps] = field(default_factory=dict)
    lost: tuple[range, ...] = ()


def check_chain(head: Head, log: Mapping[int, LogEntry], job: JobRecord | None, found: FindingCollector) -> ChainFacts:
    """Check number, parent, lineage, world and digests of every entry up to head's on all branches; then walk back from
    head.

    `job`: the job's record, whose digest the entries contain; None: not checked. Findings go to `found`.
    """
    before: LogEntry | None = None
    whole = True
    cut_off = _cut_off(head, log)
    lineage, world = 0, None
    begun = [Lineage(number=0, base_step=0)]
    last = max(log, default=-1)
    gap: int | None = None
    binding = JobBinding()
    steps: set[int] = set()
    committed: set[tuple[str, Token]] = set()
    worlds: dict[int, WorldSteps] = {}
    lost: list[range] = []
    for seq in range(min(head.seq, last) + 1):  # bounded by `last`, because head may be damaged
        if any(seq in numbers for numbers in cut_off):  # lost when the store was restored from a backup
            if gap is not None:
                _tell_missing(gap, seq - 1, found)
                gap = None
            continue
        entry = log.get(seq)
        if entry is None:
            gap = seq if gap is None else gap
            before, whole = None, False
            continue
        if gap is not None:
            _tell_missing(gap, seq - 1, found)
            gap = None
        if entry.kind == "rollback":
            # After a restore from backup the lineage increases by more than one, so that lost numbers are not reused.
            if entry.follows is not None:
                lost.append(range(lineage + 1, entry.lineage))
                if lineage in worlds:
                    worlds[lineage].lost = True
            lineage, world = max(lineage + 1, entry.lineage), entry.world
            skipped = None if entry.follows is None else seq
            begun.append(Lineage(number=entry.lineage, base_step=entry.step, entry=skipped))
        _check_place(seq, entry, lineage, world, found)
        _check_parent(entry, before, log, found)
        binding.check(entry, found)
        lineage, world, before = entry.lineage, entry.world, entry
        of_world = worlds.setdefault(entry.lineage, WorldSteps(entry.world, entry.step))
        if entry.kind == "train":
            steps.add(seq)
            of_world.last = max(of_world.last, entry.step)
            if entry.token is not None:
                committed.add((entry.world, entry.token))
    if head.seq > last and gap is None:
        gap, whole = last + 1, False
    if gap is not None:
        _tell_missing(gap, head.seq, found)
    for seq in sorted(seq for seq in log if seq > head.seq):
        refs = [one.ref for one in log[seq].delta]
        found.add("chain", f"log entry {seq} is beyond head, which is at entry {head.seq}", refs)
    lineages = tuple(begun)
    if not whole:
        lineages = head.lineages
    elif lineages != head.lineages:
        rollbacks = " ".join(f"{one.number} from step {one.base_step}" for one in lineages)
        found.add("chain", f"head's lineages differ from those that the rollbacks in the log began ({rollbacks})")
    _check_head(head, log.get(head.seq), found)
    if job is not None:
        binding.compare(job, found)
    chain, since_step = _walk(head, log, found)
    cut_off_steps = tuple(sorted(steps - set(chain)))
    return ChainFacts(chain, lineages, since_step, cut_off_steps, frozenset(committed), worlds, tuple(lost))


def _cut_off(head: Head, log: Mapping[int, LogEntry]) -> tuple[range, ...]:
    """Ranges of log numbers that were skipped after the store was restored from a backup.

    Head names the rollback entries that skipped numbers. Only the content of those entries counts, because digests
    protect it: a damaged head cannot hide missing entries.
    """
    telling = (log.get(one.entry) for one in head.lineages if one.entry is not None)
    rollbacks = (entry for entry in telling if entry is not None and entry.kind == "rollback")
    return tuple(range(one.follows + 1, one.seq) for one in rollbacks if one.follows is not None)


def _tell_missing(first: int, last: int, found: FindingCollector) -> None:
    what = f"log entry {first} is missing" if first == last else f"log entries {first} to {last} are missing"
    found.add("chain", what)


def _check_place(seq: int, entry: LogEntry, lineage: int, world: str | None, found: FindingCollector) -> None:
    """Check an entry's number, parent, lineage and world against what the entries before it imply.

    `world` None: any.
    """
    if entry.seq != seq or (entry.parent is not None and entry.parent >= seq):
        found.add("chain", f"log entry {seq} has number {entry.seq} and parent {entry.parent}, which is impossible")
    elif (entry.kind == "base") != (seq == 0) or (entry.parent is None) != (seq == 0):
        found.add("chain", f"log entry {seq} has kind {entry.kind} and parent {entry.parent}, which is impossible")
    elif entry.kind in ("train", "account") and entry.parent != seq - 1:
        found.add("chain", f"log entry {seq} ({entry.kind}) has parent {entry.parent}, expected {seq - 1}")
    if entry.lineage != lineage:
        found.add("chain", f"log entry {seq} ({entry.kind}) has lineage {entry.lineage}, expected {lineage}")
    if world is not None and entry.world != world:
        found.add("chain", f"log entry {seq} ({entry.kind}) has world {entry.world}, expected {world}")


def _check_parent(
    entry: LogEntry, before: LogEntry | None, log: Mapping[int, LogEntry], found: FindingCollector
) -> None:
    """Check, by digest, that the entry's parent and the entry that a rollback undoes are unchanged since.

    `before`: the entry with the number before, if it was already read.
    """
    if entry.undoes:
        undone = log.get(entry.seq - 1 if entry.follows is None else entry.follows)
        if undone is not None and entry_digest(undone) != entry.undoes:
            found.add("chain", f"log entry {undone.seq} was changed after entry {entry.seq} undid it")
    if entry.parent is None:
        return
    if not entry.parent_digest:
        found.add("chain", f"log entry {entry.seq} has no digest of its parent")
        return
    parent = before if before is not None and before.seq == entry.parent else log.get(entry.parent)
    if parent is not None and entry_digest(parent) != entry.parent_digest:
        found.add("chain", f"log entry {entry.parent} was changed after entry {entry.seq} was written")


class JobBinding:
    """Compares the job's record with the digest in each entry.

    Entries of schema version 2 have no digest. After the first entry with a digest, all entries must have one. If an
    entry raises the job's goal, the entries before it contain the digest of the record with the earlier goal.
    """

    def __init__(self) -> None:
        self._first: int | None = None
        self._raising: list[LogEntry] = []
        self._bound: list[dict[str, int]] = [{}]
        """For each period between goal changes: job digests, each with the first entry that has it."""

    def check(self, entry: LogEntry, found: FindingCollector) -> None:
        """Check that the next entry, of any lineage, has a digest if an earlier one has; remember the digest."""
        if entry.raised is not None:
            self._raising.append(entry)
            self._bound.append({})
        if entry.job:
            self._first = entry.seq if self._first is None else self._first
            self._bound[-1].setdefault(entry.job, entry.seq)
        elif self._first is not None:
            what = f"log entry {entry.seq} has no digest of the job's record, but entry {self._first} has one"
            found.add("chain", what)

    def compare(self, job: JobRecord, found: FindingCollector) -> None:
        """Compare `job`, the current record, with the remembered digests. Call it after `check` of every entry."""
        _check_raised(self._raising, job, found)
        for record, bound in zip(_with_earlier_goals(job, self._raising), self._bound, strict=True):
            for digest, seq in bound.items():
                if digest != job_digest(record):
                    found.add("record", f"the job's record was changed after log entry {seq} was written")
                    return


def _with_earlier_goals(job: JobRecord, raising: Sequence[LogEntry]) -> list[JobRecord]:
    """The job's record at each stage, oldest first: before its goal was first raised, after that, and so on to `job`.

    `raising`: the log entries that raised the goal, in order.
    """
    found = [job]
    for entry in reversed(raising):
        assert entry.raised is not None
        found.insert(0, found[0].with_goal(entry.raised.what, entry.raised.before))
    return found


def _check_raised(raising: Sequence[LogEntry], job: JobRecord, found: FindingCollector) -> None:
    """Check the log entries that raise the job's goal: only rollbacks do, each starts from the previous goal, and the
    job's record has the newest goal.
    """
    for entry in raising:
        raised = entry.raised
        assert raised is not None
        if entry.kind != "rollback" or raised.after <= raised.before:
            found.add("chain", f"log entry {entry.seq} ({entry.kind}) cannot raise the job's goal to {raised}")
    for earlier, later in itertools.pairwise(raising):
        assert earlier.raised is not None
        assert later.raised is not None
        if (later.raised.what, later.raised.before) != (earlier.raised.what, earlier.raised.after):
            what = f"log entry {later.seq} raises the job's goal to {later.raised}"
            found.add("chain", f"{what}, but the earlier entry {earlier.seq} to {earlier.raised}")
    last = raising[-1].raised if raising else None
    if last is not None and job.spec["flow"].get(last.what) != last.after:
        what = f"the job's record has flow.{last.what} {job.spec['flow'].get(last.what)}"
        found.add("record", f"{what}, but log entry {raising[-1].seq} raised it to {last}")


def _check_head(head: Head, entry: LogEntry | None, found: FindingCollector) -> None:
    """Check that head agrees with its log entry."""
    if entry is None:
        return
    if entry.nonce != head.nonce:
        found.add("chain", f"log entry {head.seq} and head were written by different transactions")
    elif not head.digest:
        found.add("chain", f"head has no digest of its log entry {head.seq}")
    elif entry_digest(entry) != head.digest:
        found.add("chain", f"log entry {head.seq} was changed after head was written with it")
    if entry.head and head_digest(head) != entry.head:
        found.add("chain", f"head was changed after log entry {head.seq} was written with it")
    for name in ("parent", "lineage", "step", "world"):
        of_head, of_entry = getattr(head, name), getattr(entry, name)
        if of_head != of_entry:
            found.add("chain", f"head is at {name} {of_head}, but its log entry {head.seq} is at {of_entry}")


def _walk(head: Head, log: Mapping[int, LogEntry], found: FindingCollector) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Walk from head to the first entry. Returns the entry numbers on the chain, and those after its newest step."""
    chain: list[int] = []
    since: list[int] = []
    stepless = True
    seq: int | None = head.seq
    while seq is not None:
        entry = log.get(seq)
        if entry is None or entry.seq != seq or (entry.parent is not None and entry.parent >= seq):
            found.add("chain", f"the chain from head ends at log entry {seq} instead of its base")
            break
        chain.append(seq)
        stepless = stepless and entry.kind == "account"
        if stepless:
            since.append(seq)
        seq = entry.parent
    return tuple(chain[::-1]), tuple(since[::-1])


SPAN = 1 << 20
"""Number of positions in which differences are searched. It is larger than any window, and it bounds the work if a
stored number is damaged.
"""

MOST_NAMED = 100
"""Maximum number of refs that `ChainTotals.differing` returns."""


class ChainTotals:
    """Recomputes cursors, counts and step from the entries of head's chain, and checks each entry on the way.

    Entries are added in order. Findings go to `found`.
    """

    def __init__(self, rules: StreamRules, head: Head, facts: ChainFacts, found: FindingCollector) -> None:
        self._rules = rules
        self._head = head
        self._facts = facts
        self._found = found
        self._doubles: dict[PromptRef, int] = {}
        self._shards = [ShardCursor()] * len(rules.shape.lengths)
        self.step = 0
        self.counts = {"trained": 0, "filtered": 0, "failed": 0}
        self.holders: dict[str, int] = {}

    @property
    def cursors(self) -> Cursors:
        """Cursors (which prompts have an outcome) recomputed from the entries added so far."""
        return Cursors(tuple(self._shards))

    @property
    def finished_epochs(self) -> int:
        """Number of data epochs in which every prompt has an outcome."""
        lengths = self._rules.shape.lengths
        return min(cursor.low_water // length for cursor, length in zip(self._shards, lengths, strict=True))

    def has_ended(self, ref: PromptRef) -> bool:
        """Whether an entry added so far contains the outcome of `ref`, which must be a prompt of the job."""
        return self._shards[ref.shard].is_terminal(self._rules.shape.position(ref))

    def add(self, entry: LogEntry) -> None:
        """Check the next entry of head's chain, and add its outcomes."""
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
            self._found.add(
                "outcome", f"prompt {ref} ended in entry {entry.seq}, but the job has no such prompt", [ref]
            )
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
            what = f"prompt {ref} ended in entry {entry.seq}, but prompt {oldest}, a window before it, has no outcome"
            self._found.add("outcome", what, [oldest, ref])
            if position >= low + rules.window + SPAN:
                return  # a bitmap up to this position would be too large
        self._shards[ref.shard] = cursor.mark(position)
        self.counts[one.kind] += 1
        if one.kind == "trained":
            self.holders[one.holder] = self.holders.get(one.holder, 0) + 1

    def _check_versions(self, entry: LogEntry) -> None:
        """Check the versions that generated the entry's prompts.

        Those of a trained group must have been acceptable when the entry was written; those of a filtered or failed
        prompt must be on the chain.
        """
        if not entry.delta:
            return
        at = self._at(entry)
        for one in entry.delta:
            if one.kind == "trained":
                if not is_acceptable(at, entry.step, one.versions, self._rules.staleness):
                    what = f"prompt {one.ref}, trained at step {entry.step}, was generated by {_made_by(one.versions)}"
                    self._found.add("version", f"{what}: too old or discarded", [one.ref])
            elif not all(is_ancestor(at, version) for version in one.versions):
                what = f"prompt {one.ref}, {one.kind} in entry {entry.seq}, was generated by {_made_by(one.versions)}"
                self._found.add("version", f"{what}, which is not on the chain", [one.ref])

    def _at(self, entry: LogEntry) -> Head:
        """Head before `entry`, with the fields that `is_ancestor` needs."""
        return self._head.model_copy(
            update={
                "lineage": entry.lineage,
                "step": entry.step - 1 if entry.kind == "train" else entry.step,
                "lineages": tuple(one for one in self._facts.lineages if one.number <= entry.lineage),
            }
        )

    def _check_kept(self, entry: LogEntry) -> None:
        """Check the cursors and tally in an entry, which a rollback would restore."""
        if entry.kind in ("base", "rollback") and (entry.cursors is None or entry.tally is None):
            lacks = "cursors" if entry.cursors is None else "tally"
            self._found.add("chain", f"log entry {entry.seq} ({entry.kind}) has no {lacks}")
        if entry.cursors is not None and entry.cursors != self.cursors:
            what = f"the cursors in log entry {entry.seq} are not the sum of the entries up to it"
            self._found.add("cursors", what, self.differing(entry.cursors))
        if entry.tally is not None:
            for sentence in self._miscounted(entry.tally, f"log entry {entry.seq}"):
                self._found.add("tally", sentence)

    def _miscounted(self, tally: Tally, whose: str) -> Iterator[str]:
        sources = tally.sources.values()
        tallied = {
            "trained": sum(one.kept for one in sources),
            "filtered": sum(one.filtered for one in sources),
            "failed": sum(one.failed for one in sources),
        }
        for kind, count in self.counts.items():
            if tallied[kind] != count:
                yield f"{whose}'s tally counts {tallied[kind]} prompts {kind}, but the entries {count}"

    def tell_doubles(self, log: Mapping[int, LogEntry]) -> None:
        """Add a finding for each prompt with two outcomes. Call it after all entries were added."""
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
        """Compare head's step, cursors and tally with those recomputed from the entries.

        `since_step`: the account entries after head's step.
        """
        head = self._head
        if self.step != head.step:
            self._found.add("step", f"head is at step {head.step}, but its chain is at step {self.step}")
        if head.cursors != self.cursors:
            refs = self.differing(head.cursors)
            examples = f": {list_some_refs(refs)}" if refs else ""
            what = f"head's cursors are not the sum of the entries along its chain{examples}"
            self._found.add("cursors", what, refs)
        for sentence in self._miscounted(head.tally, "head"):
            self._found.add("tally", sentence)
        ended = sum(len(entry.delta) for entry in since_step)
        if ended != head.tally.since_step.ended:
            said = head.tally.since_step.ended
            what = f"head counts {said} prompts that ended since step {head.step}"
            self._found.add("tally", f"{what}, but the entries {ended}")

    def differing(self, reported: Cursors) -> list[PromptRef]:
        """The first refs that ended according to either `reported` or the entries, but not both.

        For a shard that `reported` lacks, no ref has ended. Extra shards in `reported` are ignored.
        """
        refs: list[PromptRef] = []
        lacking = [ShardCursor()] * (len(self._shards) - len(reported.shards))
        for shard, (mine, other) in enumerate(zip(self._shards, (*reported.shards, *lacking), strict=False)):
            base = max(min(mine.low_water, other.low_water), 0)
            different = _bits(mine, base) ^ _bits(other, base)
            while different and len(refs) < MOST_NAMED:
                lowest = different & -different
                refs.append(self._rules.shape.ref(shard, base + lowest.bit_length() - 1))
                different ^= lowest
        return refs


def _bits(cursor: ShardCursor, base: int) -> int:
    """Bitmap in which bit i says that position `base + i` has ended, for the first `SPAN` positions."""
    shift, mask = cursor.low_water - base, (1 << SPAN) - 1
    if not 0 <= shift < SPAN:
        return mask if shift > 0 else 0
    return ((1 << shift) - 1 | (cursor.beyond & mask) << shift) & mask


def is_prompt(rules: StreamRules, ref: PromptRef) -> bool:
    """Whether `ref` is a prompt of the job's data."""
    lengths = rules.shape.lengths
    return ref.data_epoch >= 0 and 0 <= ref.shard < len(lengths) and 0 <= ref.seq < lengths[ref.shard]


def _made_by(versions: Iterable[Version]) -> str:
    """Text that lists the versions that generated a prompt."""
    return ", ".join(map(str, versions)) or "no version"

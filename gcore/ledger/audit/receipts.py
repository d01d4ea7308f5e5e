"""Train receipts, and their checks: each rank trained exactly the committed groups, and each sample once.

Train ranks write receipts (`gcore.train.checkpoint.run_files`): one file per rank and world, one line per token.
Because there may be many, the folder is indexed once and a line is parsed when it is needed. A damaged line is
reported; the other lines still count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gcore.ledger.archive import LinePosition, index_lines
from gcore.ledger.audit.chain import ChainFacts, FindingCollector, list_some_refs
from gcore.ledger.chain import seal_shares, shares_digest
from gcore.ledger.records.chain import EndedRef, Head, LogEntry, Seal, SealState
from gcore.types import PromptRef, Token

FOLDER = "receipts"

_NAMED = re.compile(rb'"token":"(\d+\.\d+\.\d+)","world":"([^"\\]*)","rank":(\d+)')
"""Matches the beginning of a receipt's line after its schema version: token, world and rank."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one rank trained under one token: for each group, the indexes of its samples and the group's digest."""

    token: Token
    world: str
    rank: int
    samples: Mapping[PromptRef, frozenset[int]]
    digests: Mapping[PromptRef, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, line: Mapping[str, Any]) -> Receipt:
        """Parse a receipt's JSON object. Raises KeyError, TypeError or ValueError if it is not one."""
        samples: dict[PromptRef, frozenset[int]] = {}
        digests: dict[PromptRef, str] = {}
        for name, digest, indexes in line["groups"]:
            ref = PromptRef.parse(str(name))
            if ref in samples or list(indexes) != sorted(set(indexes)):
                raise ValueError(f"prompt {ref} or one of its samples is repeated or out of order")
            samples[ref] = frozenset(int(i) for i in indexes)
            digests[ref] = str(digest)
        return cls(Token.parse(line["token"]), str(line["world"]), int(line["rank"]), samples, digests)


class Receipts(Protocol):
    """All receipts of a run."""

    def tokens(self) -> Iterable[tuple[str, Token]]:
        """The pairs of world and token for which there are receipts."""
        ...

    def of(self, world: str, token: Token) -> Sequence[Receipt]:
        """The receipts of all ranks of `world` for `token`, in no particular order."""
        ...


class ReceiptsInMemory:
    """Receipts that were parsed before, kept in memory."""

    def __init__(self, receipts: Iterable[Receipt]) -> None:
        self._found: dict[tuple[str, Token], list[Receipt]] = {}
        for receipt in receipts:
            self._found.setdefault((receipt.world, receipt.token), []).append(receipt)

    def tokens(self) -> Iterable[tuple[str, Token]]:
        """See `Receipts`."""
        return self._found

    def of(self, world: str, token: Token) -> Sequence[Receipt]:
        """See `Receipts`."""
        return self._found.get((world, token), ())


class ReceiptFolder:
    """Receipts in a run folder, parsed on access. `problems`: one sentence for each line that is not a receipt."""

    def __init__(self, run_dir: Path) -> None:
        """Index all lines without parsing them. Raises OSError."""
        self.problems: list[str] = []
        self._found: dict[tuple[str, Token], list[LinePosition]] = {}
        for place, line in index_lines(run_dir / FOLDER):
            named = _NAMED.search(line, 0, 256)
            if named is None or not line.endswith(b"}"):
                self.problems.append(f"{place} is not a receipt")
                continue
            where = (named[2].decode(errors="replace"), Token.parse(named[1].decode()))
            self._found.setdefault(where, []).append(place)

    def tokens(self) -> Iterable[tuple[str, Token]]:
        """See `Receipts`."""
        return self._found

    def of(self, world: str, token: Token) -> Sequence[Receipt]:
        """See `Receipts`. A line that cannot be read is added to `problems`. Raises OSError."""
        return tuple(self._read(world, token))

    def _read(self, world: str, token: Token) -> Iterator[Receipt]:
        for place in self._found.get((world, token), ()):
            try:
                receipt = Receipt.parse(json.loads(place.read()))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                self.problems.append(f"{place} is not a receipt: {error}")
                continue
            yield receipt


def check_receipts(entry: LogEntry, receipts: Receipts, found: FindingCollector) -> None:
    """Check that the ranks of a committed step trained exactly the prompts of its log entry, and each sample once.

    Also checks digests, the order of the groups, and which rank trained which sample. Findings go to `found`.
    """
    token = entry.token
    if token is None:
        found.add("receipt", f"log entry {entry.seq} trained step {entry.step} without a token")
        return
    if (token.lineage, token.step) != (entry.lineage, entry.step):
        found.add("receipt", f"log entry {entry.seq} trained step {entry.step} under token {token}")
    papers = receipts.of(entry.world, token)
    committed = {one.ref: one for one in entry.delta if one.kind == "trained"}
    earlier = found.count
    if not papers:
        what = f"no rank left a receipt for step {entry.step} (token {token})"
        found.add("receipt", what, sorted(committed))
        return
    trained: dict[PromptRef, list[int]] = {}
    for paper in papers:
        for ref, indexes in paper.samples.items():
            trained.setdefault(ref, []).extend(indexes)
    for ref, one in sorted(committed.items()):
        if not one.digest or not one.samples:
            lacks = "digest" if not one.digest else "number of samples"
            found.add("receipt", f"the commit of prompt {ref} at step {entry.step} has no {lacks}", [ref])
    incomplete = [ref for ref, one in sorted(committed.items()) if _lacks(one, trained.get(ref, ()))]
    lost = _check_ranks(entry, papers, incomplete, found)
    for paper in papers:
        for ref, digest in paper.digests.items():
            group = committed.get(ref)
            if group is not None and group.digest and group.digest != digest:
                what = f"prompt {ref} was committed at step {entry.step} as group {group.digest}, but rank {paper.rank}"
                found.add("receipt", f"{what} trained on group {digest}", [ref])
    order = {ref: number for number, ref in enumerate(committed)}
    for paper in papers:
        numbers = [order[ref] for ref in paper.samples if ref in order]
        if numbers != sorted(numbers):
            what = f"the receipt of rank {paper.rank} lists the groups of step {entry.step} in a different order"
            found.add("receipt", what, _named([paper]))
    # If a rank's whole receipt is missing, one finding covers all of its samples.
    excused = set(incomplete) if lost else set()
    for who, refs in (
        ("was committed but no rank trained on it", sorted(committed.keys() - trained.keys() - excused)),
        ("was trained on but not committed", sorted(trained.keys() - committed.keys())),
    ):
        for ref in refs:
            found.add("receipt", f"prompt {ref} {who} at step {entry.step}", [ref])
    for ref, samples in sorted(trained.items()):
        if ref not in excused:
            _check_samples(entry, ref, committed.get(ref), sorted(samples), found)
    trained_shares = shares_digest({paper.rank: paper.samples for paper in papers})
    if entry.shares not in ("", trained_shares) and found.count == earlier:
        found.add("receipt", f"the ranks trained other shares of step {entry.step} than its seal assigned")


def check_cut_off(entry: LogEntry, receipts: Receipts, found: FindingCollector) -> None:
    """Check the receipts of a committed step that a rollback discarded.

    Only if every rank's receipt exists: receipts may be lost together with their node.
    """
    if entry.token is None or entry.ranks is None:
        return
    if len(receipts.of(entry.world, entry.token)) >= entry.ranks:
        check_receipts(entry, receipts, found)


def check_ready(seal: Seal, receipts: Receipts, found: FindingCollector) -> None:
    """Check the receipts of a READY step that is not committed yet: each rank trained the share that `seal` assigns."""
    papers = receipts.of(seal.world, seal.token) if seal.state is SealState.READY else ()
    fits = sum(seal.parts) in (0, len(seal.groups))  # check_open reports other seals
    if not papers or not fits:
        return
    shares, digests = seal_shares(seal), {group.ref: group.digest for group in seal.groups}
    for paper in papers:
        share = [(ref, frozenset(samples)) for ref, samples in shares.get(paper.rank, {}).items()]
        same = list(paper.samples.items()) == share
        if not same or any(digests[ref] != digest for ref, digest in paper.digests.items()):
            what = f"rank {paper.rank} did not train its share of the READY seal of step {seal.step}"
            found.add("receipt", f"{what} (token {seal.token})", _named([paper]))


def _lacks(one: EndedRef, samples: Collection[int]) -> bool:
    """Return whether the trained `samples` of a committed group are incomplete, but none is wrong or repeated."""
    expected = range(one.samples or 1)
    return len(samples) == len(set(samples)) and set(samples) < set(expected)


def _check_ranks(
    entry: LogEntry, papers: Sequence[Receipt], incomplete: Sequence[PromptRef], found: FindingCollector
) -> frozenset[int]:
    """Check that every rank of the world left exactly one receipt for a step. Returns the ranks without a receipt.

    `incomplete`: the prompts of which samples are in no receipt; they are named for the missing ranks.
    """
    ranks = sorted(paper.rank for paper in papers)
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    for rank in twice:
        what = f"rank {rank} left several receipts for step {entry.step} (token {entry.token})"
        found.add("receipt", what, _named(paper for paper in papers if paper.rank == rank))
    if entry.ranks is None:
        found.add("receipt", f"log entry {entry.seq} has no number of ranks for step {entry.step}")
        return frozenset()
    lost = frozenset(range(entry.ranks)) - set(ranks)
    lacking = f"; samples of {list_some_refs(incomplete)} are in no other receipt" if incomplete else ""
    for rank in sorted(lost):
        what = f"rank {rank} left no receipt for step {entry.step} (token {entry.token})"
        found.add("receipt", what + lacking, incomplete)
    for rank in sorted(set(ranks) - set(range(entry.ranks))):
        what = f"rank {rank} left a receipt for step {entry.step}, but the world has {entry.ranks} ranks"
        found.add("receipt", what, _named(paper for paper in papers if paper.rank == rank))
    return lost


def _named(papers: Iterable[Receipt]) -> list[PromptRef]:
    """Prompts that the receipts name, sorted."""
    return sorted({ref for paper in papers for ref in paper.samples})


def _check_samples(
    entry: LogEntry, ref: PromptRef, one: EndedRef | None, samples: list[int], found: FindingCollector
) -> None:
    expected = one.samples if one is not None and one.samples else len(samples)
    if samples != list(range(expected)):
        of = f" of {expected}" if one is not None and one.samples else ""
        only = "only " if one is not None and _lacks(one, samples) else ""
        found.add("receipt", f"{only}samples {samples}{of} of prompt {ref} were trained at step {entry.step}", [ref])


def check_tokens(receipts: Receipts, found: FindingCollector) -> None:
    """Check that no train world trained one step under two tokens (attempts).

    Once a world has trained a step, the step is committed or the world ends.
    """
    seen: dict[tuple[str, int], Token] = {}
    for world, token in sorted(receipts.tokens()):
        first = seen.setdefault((world, token.step), token)
        if first != token:
            refs = _named(receipts.of(world, token))
            what = f"world {world} trained step {token.step} under two tokens, {first} and {token}"
            found.add("receipt", f"{what}: {list_some_refs(refs)}" if refs else what, refs)


def check_uncommitted(
    facts: ChainFacts,
    head: Head,
    seals: Sequence[Seal],
    receipts: Receipts,
    known: Collection[tuple[str, Token]] | None,
    found: FindingCollector,
) -> None:
    """Check that every receipt belongs to a committed step, with one exception per world.

    In head's world the exception is the token of the open READY seal. In an ended world it is the step after the last
    commit, which ranks may have trained before the rollback. `known`: the tokens that had receipts before head was
    read, because ranks continue during the audit; None: all.
    """
    ready = {(seal.world, seal.token) for seal in seals if seal.state is SealState.READY}
    for world, token in sorted(receipts.tokens()):
        if (world, token) in facts.committed or (known is not None and (world, token) not in known):
            continue
        if any(token.lineage in numbers for numbers in facts.lost):
            continue
        steps = facts.worlds.get(token.lineage)
        what = f"ranks of world {world} left receipts for step {token.step} (token {token})"
        if steps is None or steps.world != world:
            why = f"but lineage {token.lineage} has no such world"
        elif steps.lost and token.step > steps.last:
            continue
        elif token.lineage == head.lineage:
            if (world, token) in ready:
                continue
            why = f"which no log entry names: head is at step {head.step}"
        elif token.step == steps.last + 1:
            continue
        else:
            why = f"which no log entry names: that world ended after step {steps.last}"
        refs = _named(receipts.of(world, token))
        found.add("receipt", f"{what}, {why}", refs)

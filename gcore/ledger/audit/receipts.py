"""The ranks' receipts as the audit reads them: each rank trained on exactly what was committed, each sample once, and nothing else.

Ranks write them (`gcore.train.checkpoint.run_files`), one file a rank and a world, one line a token. There may be very many, so
a folder is gone through once, and each line is read again when it is asked for. A damaged line is reported, and the others
count.
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
"""How a line begins, but for its schema version."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """One rank's word on one token: the samples it trained on, by group, and what the groups were."""

    token: Token
    world: str
    rank: int
    samples: Mapping[PromptRef, frozenset[int]]
    digests: Mapping[PromptRef, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, line: Mapping[str, Any]) -> Receipt:
        """From a receipt's JSON object. Raises KeyError, TypeError or ValueError on anything else."""
        samples: dict[PromptRef, frozenset[int]] = {}
        digests: dict[PromptRef, str] = {}
        for name, digest, indexes in line["groups"]:
            ref = PromptRef.parse(str(name))
            if ref in samples or list(indexes) != sorted(set(indexes)):
                raise ValueError(f"prompt {ref} or a sample of it occurs twice, or out of order")
            samples[ref] = frozenset(int(i) for i in indexes)
            digests[ref] = str(digest)
        return cls(Token.parse(line["token"]), str(line["world"]), int(line["rank"]), samples, digests)


class Receipts(Protocol):
    """All receipts of a run."""

    def tokens(self) -> Iterable[tuple[str, Token]]:
        """The worlds and tokens of which there are any."""
        ...

    def of(self, world: str, token: Token) -> Sequence[Receipt]:
        """Those of a token, in no order."""
        ...


class ReceiptsInMemory:
    """Receipts at hand."""

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
    """Receipts in a run's folder. `problems`: lines that are none, a sentence each."""

    def __init__(self, run_dir: Path) -> None:
        """Goes through all lines, without taking them apart. Raises OSError."""
        self.problems: list[str] = []
        self._found: dict[tuple[str, Token], list[LinePosition]] = {}
        for place, line in index_lines(run_dir / FOLDER):
            named = _NAMED.search(line, 0, 256)
            if named is None or not line.endswith(b"}"):
                self.problems.append(f"{place} is no receipt")
                continue
            where = (named[2].decode(errors="replace"), Token.parse(named[1].decode()))
            self._found.setdefault(where, []).append(place)

    def tokens(self) -> Iterable[tuple[str, Token]]:
        """See `Receipts`."""
        return self._found

    def of(self, world: str, token: Token) -> Sequence[Receipt]:
        """See `Receipts`; a line that cannot be read is a problem. Raises OSError."""
        return tuple(self._read(world, token))

    def _read(self, world: str, token: Token) -> Iterator[Receipt]:
        for place in self._found.get((world, token), ()):
            try:
                receipt = Receipt.parse(json.loads(place.read()))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                self.problems.append(f"{place} is no receipt: {error}")
                continue
            yield receipt


def check_receipts(entry: LogEntry, receipts: Receipts, found: FindingCollector) -> None:
    """The ranks of the entry's world trained on its prompts and on nothing else, each sample once."""
    token = entry.token
    if token is None:
        found.add("receipt", f"log entry {entry.seq} trained step {entry.step} without a token")
        return
    if (token.lineage, token.step) != (entry.lineage, entry.step):
        found.add("receipt", f"log entry {entry.seq} trained step {entry.step} under token {token}")
    papers = receipts.of(entry.world, token)
    committed = {one.ref: one for one in entry.delta if one.kind == "trained"}
    told = found.count
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
                what = f"prompt {ref} was committed at step {entry.step} as group {group.digest}, and rank {paper.rank}"
                found.add("receipt", f"{what} trained on group {digest}", [ref])
    order = {ref: number for number, ref in enumerate(committed)}
    for paper in papers:
        numbers = [order[ref] for ref in paper.samples if ref in order]
        if numbers != sorted(numbers):
            what = f"rank {paper.rank} names the groups of step {entry.step} in another order than the commit"
            found.add("receipt", what, _named([paper]))
    # Where a rank's whole receipt is missing, what stood in it is told with that, and not sample by sample.
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
    if entry.shares not in ("", trained_shares) and found.count == told:
        found.add("receipt", f"the ranks trained other shares of step {entry.step} than its seal gave them")


def check_cut_off(entry: LogEntry, receipts: Receipts, found: FindingCollector) -> None:
    """Check a step that a rollback undid, if all of its receipts are there: some may be lost with a node."""
    if entry.token is None or entry.ranks is None:
        return
    if len(receipts.of(entry.world, entry.token)) >= entry.ranks:
        check_receipts(entry, receipts, found)


def check_ready(seal: Seal, receipts: Receipts, found: FindingCollector) -> None:
    """Compare the receipts of a READY step, which is not committed yet, with the shares that its seal gives to the ranks."""
    papers = receipts.of(seal.world, seal.token) if seal.state is SealState.READY else ()
    fits = sum(seal.parts) in (0, len(seal.groups))  # else check_open reports the seal
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
    """Whether samples of a committed group are missing, and nothing else is wrong with them."""
    expected = range(one.samples or 1)
    return len(samples) == len(set(samples)) and set(samples) < set(expected)


def _check_ranks(
    entry: LogEntry, papers: Sequence[Receipt], incomplete: Sequence[PromptRef], found: FindingCollector
) -> frozenset[int]:
    """Every rank of the world left one receipt. `incomplete`: the prompts of which samples stand in none. Returns the ranks that
    left none."""
    ranks = sorted(paper.rank for paper in papers)
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    for rank in twice:
        what = f"rank {rank} left several receipts for step {entry.step} (token {entry.token})"
        found.add("receipt", what, _named(paper for paper in papers if paper.rank == rank))
    if entry.ranks is None:
        found.add("receipt", f"log entry {entry.seq} has no number of ranks for step {entry.step}")
        return frozenset()
    lost = frozenset(range(entry.ranks)) - set(ranks)
    lacking = f"; samples of {list_some_refs(incomplete)} stand in no other" if incomplete else ""
    for rank in sorted(lost):
        what = f"rank {rank} left no receipt for step {entry.step} (token {entry.token})"
        found.add("receipt", what + lacking, incomplete)
    for rank in sorted(set(ranks) - set(range(entry.ranks))):
        what = f"rank {rank} left a receipt for step {entry.step}, which {entry.ranks} ranks trained"
        found.add("receipt", what, _named(paper for paper in papers if paper.rank == rank))
    return lost


def _named(papers: Iterable[Receipt]) -> list[PromptRef]:
    """The prompts of which they name samples."""
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
    """No world trained one step under two tokens: after the first it can only be committed, or the world ends."""
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
    """Every receipt belongs to a committed step, except for one token of each world.

    In head's world the exception is the token of the open READY seal. In an ended world it is the step after the last commit, which ranks
    may have trained before the rollback. `known`: the tokens that had receipts before head was read, because ranks continue
    meanwhile; None: all.
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

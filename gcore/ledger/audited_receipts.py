"""The audit of receipts: the ranks trained on exactly what was committed, each sample once. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from gcore.ledger.findings import Found, few
from gcore.ledger.receipts import Receipt, Receipts
from gcore.ledger.records import EndedRef, LogEntry
from gcore.types import PromptRef, Token


def check_receipts(entry: LogEntry, receipts: Receipts, found: Found) -> None:
    """The ranks of the entry's world trained on its prompts and on nothing else, each sample once."""
    token = entry.token
    if token is None:
        found.add("receipt", f"log entry {entry.seq} trained step {entry.step} without a token")
        return
    if (token.lineage, token.step) != (entry.lineage, entry.step):
        found.add("receipt", f"log entry {entry.seq} trained step {entry.step} under token {token}")
    papers = receipts.of(entry.world, token)
    committed = {one.ref: one for one in entry.delta if one.kind == "trained"}
    if not papers:
        what = f"no rank left a receipt for step {entry.step} (token {token})"
        found.add("receipt", what, sorted(committed))
        return
    trained: dict[PromptRef, list[int]] = {}
    for paper in papers:
        for ref, indexes in paper.samples.items():
            trained.setdefault(ref, []).extend(indexes)
    incomplete = [ref for ref, one in sorted(committed.items()) if _lacks(one, trained.get(ref, ()))]
    lost = _check_ranks(entry, papers, incomplete, found)
    for paper in papers:
        for ref, digest in paper.digests.items():
            one = committed.get(ref)
            if one is not None and one.digest and one.digest != digest:
                what = f"prompt {ref} was committed at step {entry.step} as group {one.digest}, and rank {paper.rank}"
                found.add("receipt", f"{what} trained on group {digest}", [ref])
    # Where a rank's whole receipt is missing, what stood in it is told with that, and not sample by sample.
    told = set(incomplete) if lost else set()
    for who, refs in (
        ("was committed but no rank trained on it", sorted(committed.keys() - trained.keys() - told)),
        ("was trained on but not committed", sorted(trained.keys() - committed.keys())),
    ):
        for ref in refs:
            found.add("receipt", f"prompt {ref} {who} at step {entry.step}", [ref])
    for ref, samples in sorted(trained.items()):
        if ref not in told:
            _check_samples(entry, ref, committed.get(ref), sorted(samples), found)


def _lacks(one: EndedRef, samples: Collection[int]) -> bool:
    """Whether samples of a committed group are missing, and nothing else is wrong with them."""
    expected = range(one.samples or 1)
    return len(samples) == len(set(samples)) and set(samples) < set(expected)


def _check_ranks(
    entry: LogEntry, papers: Sequence[Receipt], incomplete: Sequence[PromptRef], found: Found
) -> frozenset[int]:
    """Every rank of the world left one receipt. `incomplete`: the prompts of which samples stand in none. Returns the ranks that
    left none."""
    ranks = sorted(paper.rank for paper in papers)
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    for rank in twice:
        what = f"rank {rank} left several receipts for step {entry.step} (token {entry.token})"
        found.add("receipt", what, _named(paper for paper in papers if paper.rank == rank))
    if entry.ranks is None:
        return frozenset()
    lost = frozenset(range(entry.ranks)) - set(ranks)
    lacking = f"; samples of {few(incomplete)} stand in no other" if incomplete else ""
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


def _check_samples(entry: LogEntry, ref: PromptRef, one: EndedRef | None, samples: list[int], found: Found) -> None:
    expected = one.samples if one is not None and one.samples else len(samples)
    if samples != list(range(expected)):
        of = f" of {expected}" if one is not None and one.samples else ""
        only = "only " if one is not None and _lacks(one, samples) else ""
        found.add("receipt", f"{only}samples {samples}{of} of prompt {ref} were trained at step {entry.step}", [ref])


def check_tokens(receipts: Receipts, found: Found) -> None:
    """No world trained one step under two tokens: after the first it can only be committed, or the world ends."""
    seen: dict[tuple[str, int], Token] = {}
    for world, token in sorted(receipts.tokens()):
        first = seen.setdefault((world, token.step), token)
        if first != token:
            refs = _named(receipts.of(world, token))
            what = f"world {world} trained step {token.step} under two tokens, {first} and {token}"
            found.add("receipt", f"{what}: {few(refs)}" if refs else what, refs)

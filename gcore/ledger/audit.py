"""The audit: recomputes a job's accounts from the log and the ranks' receipts, and says what does not add up.

It trusts no counter. It walks from head along the parents, which is the final lineage, and looks at each entry: is every
prompt ref ended at most once, do the steps have no gap, do head's cursors equal the sum of the entries, was every trained
group made by versions that the chain went through and that were fresh enough, and did the ranks of the entry's world
train on exactly the entry's prompts? Pure; `receipts` are the lines the ranks left in the run's folder.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gcore.ledger.ancestry import is_acceptable
from gcore.ledger.records import Head, LogEntry
from gcore.ledger.stream import StreamRules
from gcore.prompts.cursor import Cursors
from gcore.types import PromptRef, Token


@dataclass(frozen=True)
class Audit:
    """What was found. `violations` is empty if all adds up."""

    violations: tuple[str, ...]
    steps: int = 0
    trained: int = 0
    filtered: int = 0
    failed: int = 0
    lineages: int = 0
    groups_by_holder: Mapping[str, int] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        """Whether nothing was found."""
        return not self.violations


@dataclass(frozen=True, slots=True)
class Receipt:
    """One rank's word on one token: the samples it trained on, by group."""

    token: Token
    world: str
    rank: int
    samples: Mapping[PromptRef, frozenset[int]]

    @classmethod
    def parse(cls, line: Mapping[str, Any]) -> Receipt:
        """From a receipt's JSON object. Raises KeyError, TypeError or ValueError on anything else."""
        samples: dict[PromptRef, frozenset[int]] = {}
        for ref, _digest, indexes in line["groups"]:
            samples[PromptRef.parse(ref)] = frozenset(int(i) for i in indexes)
        return cls(Token.parse(line["token"]), str(line["world"]), int(line["rank"]), samples)


def audit(rules: StreamRules, head: Head, log: Mapping[int, LogEntry], receipts: Sequence[Receipt]) -> Audit:
    """Prove or refute, with the offending refs."""
    violations: list[str] = []
    chain = _chain(head, log, violations)
    ended: dict[PromptRef, int] = {}
    counts = {"trained": 0, "filtered": 0, "failed": 0}
    holders: dict[str, int] = {}
    cursors = Cursors.start(len(rules.shape.lengths))
    step = 0
    by_token: dict[tuple[str, Token], list[Receipt]] = {}
    for receipt in receipts:
        by_token.setdefault((receipt.world, receipt.token), []).append(receipt)
    for entry in chain:
        step = _check_step(entry, step, violations)
        for one in entry.delta:
            if one.ref in ended:
                violations.append(f"prompt {one.ref} ended twice: in entries {ended[one.ref]} and {entry.seq}")
                continue
            ended[one.ref] = entry.seq
            if rules.epochs is not None and one.ref.data_epoch >= rules.epochs:
                epochs = "1 data epoch" if rules.epochs == 1 else f"{rules.epochs} data epochs"
                violations.append(f"prompt {one.ref} ended in entry {entry.seq}, beyond the job's {epochs}")
            counts[one.kind] += 1
            cursors = cursors.union(rules.shape, [one.ref])
            if one.kind == "trained":
                holders[one.holder] = holders.get(one.holder, 0) + 1
        if entry.kind == "train":
            _check_versions(rules, head, entry, violations)
            _check_receipts(entry, by_token, violations)
    if 0 not in log or log[0].tally is not None:  # a job that began under a version without tallies has no whole one
        violations += _tally_violations(head, counts)
        violations += _since_step_violations(head, chain)
    if cursors != head.cursors:
        violations.append("head's cursors are not the sum of the entries along its chain")
    if step != head.step:
        violations.append(f"head is at step {head.step}, its chain at step {step}")
    return Audit(
        violations=tuple(violations),
        steps=step,
        trained=counts["trained"],
        filtered=counts["filtered"],
        failed=counts["failed"],
        lineages=head.lineage,
        groups_by_holder=holders,
    )


def _tally_violations(head: Head, counts: Mapping[str, int]) -> Iterator[str]:
    """Head's tally, which statistics and the next epochs' order come from, is the sum of the entries too."""
    sources = head.tally.sources.values()
    told = {
        "trained": sum(one.kept for one in sources),
        "filtered": sum(one.filtered for one in sources),
        "failed": sum(one.failed for one in sources),
    }
    for kind, count in counts.items():
        if told[kind] != count:
            yield f"head's tally says {told[kind]} prompts {kind}, its chain {count}"


def _since_step_violations(head: Head, chain: Sequence[LogEntry]) -> Iterator[str]:
    """What the step to come has used up already, which its limit counts, is the sum of the entries since the last step."""
    since = list(itertools.takewhile(lambda entry: entry.kind == "account", reversed(chain)))
    counted = sum(len(entry.delta) for entry in since)
    if counted != head.tally.since_step.ended:
        yield f"head says {head.tally.since_step.ended} prompts ended since step {head.step}, its chain {counted}"


def _chain(head: Head, log: Mapping[int, LogEntry], violations: list[str]) -> list[LogEntry]:
    """The entries from the base to head, along the parents."""
    chain: list[LogEntry] = []
    seq: int | None = head.seq
    while seq is not None:
        entry = log.get(seq)
        if entry is None:
            violations.append(f"log entry {seq} is missing")
            break
        if entry.seq != seq or (entry.parent is not None and entry.parent >= seq):
            violations.append(f"log entry {seq} says it is entry {entry.seq} after {entry.parent}")
            break
        chain.append(entry)
        seq = entry.parent
    if chain and chain[0].nonce != head.nonce:
        violations.append(f"log entry {head.seq} and head were written by different transactions")
    return chain[::-1]


def _check_step(entry: LogEntry, step: int, violations: list[str]) -> int:
    """The step after `entry`, which must not leave a gap."""
    expected = step + 1 if entry.kind == "train" else step
    if entry.step != expected:
        violations.append(f"log entry {entry.seq} ({entry.kind}) is at step {entry.step}, expected {expected}")
    return entry.step


def _check_versions(rules: StreamRules, head: Head, entry: LogEntry, violations: list[str]) -> None:
    """Every trained group's versions were acceptable when the entry was written."""
    at_the_time = head.model_copy(
        update={
            "lineage": entry.lineage,
            "step": entry.step - 1,
            "lineages": tuple(one for one in head.lineages if one.number <= entry.lineage),
        }
    )
    for one in entry.delta:
        if one.kind == "trained" and not is_acceptable(at_the_time, entry.step, one.versions, rules.staleness):
            made_by = ", ".join(map(str, one.versions)) or "nothing"
            violations.append(f"prompt {one.ref}, trained at step {entry.step}, was made by {made_by}")


def _check_receipts(
    entry: LogEntry, receipts: Mapping[tuple[str, Token], Sequence[Receipt]], violations: list[str]
) -> None:
    """The ranks of the entry's world trained on its prompts and on nothing else, each sample once."""
    if entry.token is None:
        violations.append(f"log entry {entry.seq} trained step {entry.step} without a token")
        return
    found = receipts.get((entry.world, entry.token), ())
    if not found:
        violations.append(f"no rank left a receipt for step {entry.step} (token {entry.token})")
        return
    trained: dict[PromptRef, list[int]] = {}
    for receipt in found:
        for ref, indexes in receipt.samples.items():
            trained.setdefault(ref, []).extend(indexes)
    committed = {one.ref for one in entry.delta if one.kind == "trained"}
    for ref in sorted(committed ^ trained.keys()):
        who = "was committed but no rank trained on it" if ref in committed else "was trained on but not committed"
        violations.append(f"prompt {ref} {who} at step {entry.step}")
    for ref, samples in sorted(trained.items()):
        if sorted(samples) != list(range(len(samples))):
            violations.append(f"samples {sorted(samples)} of prompt {ref} were trained at step {entry.step}")


def read_receipts(lines: Iterable[Mapping[str, Any]]) -> list[Receipt]:
    """Receipts from their JSON objects. Raises ValueError if one is none."""
    try:
        return [Receipt.parse(line) for line in lines]
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a receipt: {error}") from error

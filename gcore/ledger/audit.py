"""The audit: recomputes a job's accounts from raw records and the ranks' receipts, and says what does not add up.

It trusts no counter. What it reads is the log (what the store has of it, and what the run's folder has), the seals and offers
as they stand, the registered checkpoints and the receipts; head's own numbers are only ever compared. It proves, or refutes
with the prompts that are at fault:

1. *Outcomes.* Along the final lineage, which is the walk from head along the parents, every prompt ref has at most one outcome,
   and none is missing below the ends of the finished epochs: nothing can be issued more than a window beyond the oldest prompt
   of its shard that has none, and head's cursors are exactly what the entries have ended.
2. *Steps.* They have no gap, entries no missing number; each entry names its parent by number and content.
3. *Versions.* Every trained group was made by states that the chain went through, and by none too old. The lineages are those
   that the rollbacks in the log began, not those that head tells.
4. *The balance.* issued = trained + filtered + failed + in flight. *Issued* is what no controller would issue again: what head's
   cursors call ended, and what an open seal or a live, acceptable offer names (finished groups, outcomes, prompts in flight).
   *In flight* is what of that an open seal or an offer names and no entry of the chain has ended.
5. *Receipts.* The ranks of an entry's world trained under its token on exactly its groups (by content, where the entry names
   it), each sample once, every rank; and no world trained one step under two tokens.

Beside these: what a rollback would go back to (checkpoints, and the cursors and tallies that their entries keep) is the sum of
the entries up to there, and a job that has succeeded has done everything. Pure. Does not look at the assignment, members or
leases, on which nothing rests, nor into checkpoints' files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gcore.ledger.audited_chain import check_chain
from gcore.ledger.audited_open import check_checkpoints, check_end, check_open
from gcore.ledger.audited_outcomes import Walk
from gcore.ledger.audited_receipts import check_receipts, check_tokens
from gcore.ledger.findings import Audit, Finding, Found
from gcore.ledger.job import JobPhase
from gcore.ledger.receipts import HeldReceipts, Receipt, Receipts
from gcore.ledger.records import Checkpoint, Head, LogEntry, Offer, Seal
from gcore.ledger.rules import StreamRules

__all__ = ["Audit", "Finding", "Receipt", "Standing", "audit"]


@dataclass(frozen=True)
class Standing:
    """What stands in the store beside head and log. `checkpoints`, `phase` None: not looked at."""

    seals: Sequence[Seal] = ()
    offers: Sequence[Offer] = ()
    checkpoints: Sequence[Checkpoint] | None = None
    phase: JobPhase | None = None


def audit(
    rules: StreamRules,
    head: Head,
    log: Mapping[int, LogEntry],
    receipts: Receipts | Sequence[Receipt],
    standing: Standing | None = None,
) -> Audit:
    """Prove or refute, with the offending refs. `log`: every entry that was ever written, those of cut-off lineages too."""
    found = Found()
    papers = HeldReceipts(receipts) if isinstance(receipts, Sequence) else receipts
    standing = standing or Standing()
    facts = check_chain(head, log, found)
    walk = Walk(rules, head, facts, found, counted=_counts(log))
    for seq in facts.chain:
        entry = log[seq]
        walk.add(entry)
        if entry.kind == "train":
            check_receipts(entry, papers, found)
    check_tokens(papers, found)
    walk.tell_doubles(log)
    walk.compare([log[seq] for seq in facts.since_step])
    if standing.checkpoints is not None:
        check_checkpoints(standing.checkpoints, log, found)
    issued, in_flight = check_open(rules, head, standing.seals, standing.offers, walk, found)
    if standing.phase is JobPhase.SUCCEEDED:
        check_end(rules, head, walk, found)
    return Audit(
        findings=tuple(found.findings),
        more=found.more,
        steps=walk.step,
        trained=walk.counts["trained"],
        filtered=walk.counts["filtered"],
        failed=walk.counts["failed"],
        in_flight=in_flight,
        issued=issued,
        epochs=walk.finished_epochs,
        lineages=head.lineage,
        groups_by_holder=walk.holders,
    )


def _counts(log: Mapping[int, LogEntry]) -> bool:
    """Whether the job has counted from its beginning: one that began under a version without tallies has no whole one."""
    base = log.get(0)
    return base is None or base.tally is not None

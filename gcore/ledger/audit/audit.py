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
   it), each sample once, every rank; no world trained one step under two tokens, and none trained a step that no entry names,
   but for the one it was at when it ended, or is at.

Beside these: what a rollback would go back to (checkpoints, and the cursors and tallies that their entries keep) is the sum of
the entries up to there, and a job that has succeeded has done everything. Of checkpoints that lie in the run's folder the manifest
is compared, and not the files that it names. The assignment, members and leases are not looked at, because nothing rests on them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gcore.ledger.audit.chain import Audit, ChainTotals, FindingCollector, check_chain, is_prompt, list_some_refs
from gcore.ledger.audit.receipts import (
    Receipt,
    Receipts,
    ReceiptsInMemory,
    check_cut_off,
    check_ready,
    check_receipts,
    check_tokens,
    check_uncommitted,
)
from gcore.ledger.records.chain import Checkpoint, Head, LogEntry, Offer, Seal, SealState
from gcore.ledger.records.job import JobPhase, JobRecord
from gcore.ledger.selection import StreamRules, is_acceptable, is_ancestor, is_over
from gcore.types import PromptRef, Token, Version, checkpoint_file

MOST_MISSING = 100
"""Prompts without an outcome that are looked for."""


def check_open(
    rules: StreamRules,
    head: Head,
    seals: Sequence[Seal],
    offers: Sequence[Offer],
    walk: ChainTotals,
    found: FindingCollector,
) -> tuple[int, int]:
    """The balance, and that nothing open has ended already. Returns how many prompts were issued, and are in flight."""
    sealed: dict[PromptRef, int] = {}
    for seal in seals:
        _check_seal(rules, head, seal, walk, found)
        for ref, _ in _held(seal):
            if ref in sealed:
                what = f"prompt {ref} is sealed twice, for steps {sealed[ref]} and {seal.step}"
                found.add("open", what, [ref])
            sealed.setdefault(ref, seal.step)
    named = {ref for ref in sealed if is_prompt(rules, ref)}
    for offer in offers:
        refs = _offered(rules, head, offer)
        strange = sorted(ref for ref in refs if not is_prompt(rules, ref))
        if strange:
            found.add(
                "open", f"{offer.incarnation} offers {list_some_refs(strange)}, and the job has no such prompt", strange
            )
        named |= {ref for ref in refs if is_prompt(rules, ref)}
    in_flight = {ref for ref in named if not walk.has_ended(ref)}
    whole = len(head.cursors.shards) == len(rules.shape.lengths)
    if not whole:
        what = f"head has cursors of {len(head.cursors.shards)} shards, not {len(rules.shape.lengths)}"
        found.add("cursors", what, walk.differing(head.cursors))
        return sum(walk.counts.values()) + len(in_flight), len(in_flight)
    going_on = sum(not head.cursors.is_terminal(rules.shape, ref) for ref in named)
    issued = head.cursors.terminal_count + going_on
    trained, filtered, failed = (walk.counts[kind] for kind in ("trained", "filtered", "failed"))
    if issued != trained + filtered + failed + len(in_flight):
        what = f"{issued} prompts were issued, and {trained} trained, {filtered} filtered, {failed} failed"
        found.add("balance", f"{what}, {len(in_flight)} are in flight", walk.differing(head.cursors))
    return issued, len(in_flight)


def _check_seal(rules: StreamRules, head: Head, seal: Seal, walk: ChainTotals, found: FindingCollector) -> None:
    what = f"the open seal of step {seal.step}"
    refs = [ref for ref, _ in _held(seal)]
    if (seal.step, seal.lineage, seal.world) != (head.step + 1, head.lineage, head.world):
        expected = f"step {head.step + 1}, lineage {head.lineage}, world {head.world}"
        found.add("open", f"{what} is of lineage {seal.lineage}, world {seal.world}; expected {expected}", refs)
    if sum(seal.parts) != (len(seal.groups) if seal.parts else 0) or seal.ready_parts > len(seal.parts):
        found.add("open", f"{what} has parts of {seal.parts} groups, and {len(seal.groups)} in all", refs)
    loose = [ref for ref in refs if ref not in {group.ref for group in seal.kept}]
    if seal.state is SealState.OPEN and loose:
        found.add("open", f"{what} is {seal.state} and holds {list_some_refs(loose)}", loose)
    for ref, versions in _held(seal):
        if not is_prompt(rules, ref):
            found.add("open", f"{what} holds prompt {ref}, and the job has none", [ref])
        elif walk.has_ended(ref):
            found.add("open", f"{what} holds prompt {ref}, which has its outcome already", [ref])
        elif versions is not None and not is_acceptable(head, seal.step, versions, rules.staleness):
            made_by = ", ".join(map(str, versions)) or "nothing"
            found.add("version", f"{what} holds prompt {ref}, which was made by {made_by}", [ref])


def _held(seal: Seal) -> Iterable[tuple[PromptRef, tuple[Version, ...] | None]]:
    """Every ref of a seal; of a group also its versions."""
    yield from ((group.ref, group.versions) for group in seal.groups)
    yield from ((ended.ref, None) for ended in seal.outcomes)


def _offered(rules: StreamRules, head: Head, offer: Offer) -> set[PromptRef]:
    """What an offer names and nobody issues again meanwhile: the rest is too old, or of a cut-off lineage."""
    step = head.step + 1
    refs = {group.ref for group in offer.groups if is_acceptable(head, step, group.versions, rules.staleness)}
    refs |= {one.ref for one in offer.outcomes if all(is_ancestor(head, version) for version in one.versions)}
    return refs | {one.ref for one in offer.in_flight if is_acceptable(head, step, (one.version,), rules.staleness)}


@dataclass(frozen=True, slots=True)
class ManifestFacts:
    """Job and version of a checkpoint's manifest, and the manifest's SHA-256."""

    job_uid: str
    version: Version
    digest: str


def check_checkpoints(
    checkpoints: Sequence[Checkpoint],
    log: Mapping[int, LogEntry],
    manifests: Mapping[str, ManifestFacts],
    uid: str,
    found: FindingCollector,
) -> None:
    """Each checkpoint belongs to the entry it names, the entry keeps what a rollback needs, and the checkpoint's folder has the registered
    manifest. The base is registered, and checkpoints are in the order of their entries."""
    if not any((one.seq, one.lineage, one.step, one.file) == (0, 0, 0, "") for one in checkpoints):
        found.add("checkpoint", "the checkpoints lack the base, without which a job may have nothing to go back to")
    for earlier, later in itertools.pairwise(checkpoints):
        if later.seq <= earlier.seq:
            order = f"{_name(later)} is listed after {_name(earlier)}"
            found.add("checkpoint", f"{order}, and its log entry {later.seq} is not after entry {earlier.seq}")
    for one in checkpoints:
        what, entry = _name(one), log.get(one.seq)
        if one.seq and one.file != checkpoint_file(one.version):
            found.add("checkpoint", f"{what} has another path than {checkpoint_file(one.version)}")
        if bool(one.seq) != bool(one.digest):
            found.add("checkpoint", f"{what} has {'no' if one.seq else 'a'} manifest digest")
        if entry is None:
            found.add("checkpoint", f"{what} is of log entry {one.seq}, which is missing")
        elif (entry.lineage, entry.step) != (one.lineage, one.step) or entry.kind not in ("base", "train"):
            is_of = f"{entry.kind} {entry.lineage}.{entry.step}"
            found.add("checkpoint", f"{what} is of log entry {one.seq}, which is {is_of}")
        elif entry.cursors is None or entry.tally is None:
            lacks = "cursors" if entry.cursors is None else "tally"
            found.add("checkpoint", f"{what} is of log entry {one.seq}, which keeps no {lacks}")
        manifest = manifests.get(one.file)
        if manifest is None:
            continue
        if manifest.digest != one.digest:
            found.add(
                "checkpoint", f"{what} was registered with manifest {one.digest}, and its folder has {manifest.digest}"
            )
        if (manifest.job_uid, manifest.version) != (uid, one.version):
            found.add("checkpoint", f"{what}: its folder has step {manifest.version} of job {manifest.job_uid}")


def _name(one: Checkpoint) -> str:
    return f"checkpoint {one.file or 'of the first model'} ({one.lineage}.{one.step})"


def check_end(rules: StreamRules, head: Head, walk: ChainTotals, found: FindingCollector) -> None:
    """A job that has succeeded has made its last step, and left no prompt of its epochs without an outcome."""
    if rules.epochs is not None:
        missing: list[PromptRef] = []
        for shard, (cursor, length) in enumerate(zip(walk.cursors.shards, rules.shape.lengths, strict=True)):
            position = cursor.low_water
            while position < rules.epochs * length and len(missing) < MOST_MISSING:
                if not cursor.is_terminal(position):
                    missing.append(rules.shape.ref(shard, position))
                position += 1
        if missing:
            count = rules.epochs * sum(rules.shape.lengths) - walk.cursors.terminal_count
            what = f"the job has succeeded, and {count} prompts of its epochs have no outcome: "
            found.add("end", what + list_some_refs(missing, count), missing)
    elif not is_over(rules, head):
        found.add("end", f"the job has succeeded, and head is at step {head.step} of {rules.steps}")


@dataclass(frozen=True)
class AuditInputs:
    """What stands in the store beside head and log, and in the run's folder beside receipts.

    `checkpoints`, `phase` None: not looked at. `manifests`: of the registered checkpoints that lie in the folder, by `Checkpoint.file`.
    `known`: the tokens of which there were receipts before head was read (`check_uncommitted`); None: all.
    """

    uid: str = ""
    job: JobRecord | None = None
    """The job's record; None: not looked at."""
    seals: Sequence[Seal] = ()
    offers: Sequence[Offer] = ()
    checkpoints: Sequence[Checkpoint] | None = None
    manifests: Mapping[str, ManifestFacts] = field(default_factory=dict)
    phase: JobPhase | None = None
    known: Collection[tuple[str, Token]] | None = None


def audit_records(
    rules: StreamRules,
    head: Head,
    log: Mapping[int, LogEntry],
    receipts: Receipts | Sequence[Receipt],
    standing: AuditInputs | None = None,
) -> Audit:
    """Prove or refute, with the offending refs. `log`: every entry that was ever written, those of cut-off lineages too."""
    found = FindingCollector()
    papers = ReceiptsInMemory(receipts) if isinstance(receipts, Sequence) else receipts
    standing = standing or AuditInputs()
    facts = check_chain(head, log, standing.job, found)
    walk = ChainTotals(rules, head, facts, found)
    for seq in facts.chain:
        entry = log[seq]
        walk.add(entry)
        if entry.kind == "train":
            check_receipts(entry, papers, found)
    for seq in facts.cut_off:
        check_cut_off(log[seq], papers, found)
    for seal in standing.seals:
        check_ready(seal, papers, found)
    check_tokens(papers, found)
    check_uncommitted(facts, head, standing.seals, papers, standing.known, found)
    walk.tell_doubles(log)
    walk.compare([log[seq] for seq in facts.since_step])
    if standing.checkpoints is not None:
        check_checkpoints(standing.checkpoints, log, standing.manifests, standing.uid, found)
    issued, in_flight = check_open(rules, head, standing.seals, standing.offers, walk, found)
    if standing.phase is JobPhase.PENDING:
        found.add("record", "the job's state is PENDING, but it has a head")
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

"""The conditions after every event of a simulated cluster: I1 to I5 of the step protocol, and its rules.

The ledger's own audit recomputes I1, I2 and I4 from the chain whenever head moves. I3 is checked in the ranks' weights, I5
in the log. Beside them: a token never names two sets of groups, a slot only makes the transitions of the protocol, and a sealed
prompt is neither terminal nor sealed twice. This module reads everything and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simulated_workers import Content, Floor

from controllers.rules.placement import plan_slots
from gcore.ledger.audit.audit import AuditInputs, audit_records
from gcore.ledger.balance import part_digests
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Head, LogEntry, Seal, SealState
from gcore.ledger.records.cluster import Shares, slots_of_share
from gcore.ledger.selection import StreamRules, rules_of
from gcore.store import keys as store_keys
from gcore.store.keys import JobKeys
from gcore.store.types import WatchBatch, WatchEvent
from gcore.types import Token, Version

MOVES: dict[SealState | None, set[SealState | None]] = {
    None: {SealState.SEALED, SealState.PARTIAL},
    SealState.OPEN: {SealState.SEALED, SealState.PARTIAL, None},
    SealState.PARTIAL: {SealState.OPEN, None},
    SealState.SEALED: {SealState.OPEN, SealState.READY, None},
    SealState.READY: {None},
}
"""Allowed transitions of a slot; None: absent. From SEALED and OPEN it is removed only by a rollback, from READY also by a commit."""


class Invariants:
    """Of one job."""

    def __init__(
        self,
        rules: StreamRules,
        keys: JobKeys,
        floor: Floor,
        wrong: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        self._rules = rules
        self._keys = keys
        self._floor = floor
        self._wrong = wrong
        self._tell = tell
        self._log: dict[int, LogEntry] = {}
        """Every entry that ever was."""
        self._sealed: dict[Token, Any] = {}
        """The groups of each token."""
        self._states: dict[Version, Content] = {}
        """The training refs of each version's weights. Recorded here, so that no rule is compared with itself."""
        self._shares = Shares()
        self.mirror = JobMirror(keys)

    def revision(self, events: tuple[WatchEvent, ...]) -> None:
        """The store has changed."""
        mine = tuple(event for event in events if event.kv.key.startswith(self._keys.prefix))
        shared = [event for event in events if event.kv.key == store_keys.SHARES]
        if shared:
            self._shares = Shares.decode(shared[-1].kv.value) if shared[-1].kind == "put" else Shares()
            self._tell(f"  revision {events[-1].kv.mod_revision}: shares {self._shares.jobs.get(self._keys.uid)}")
            self._check_share()
        if not mine:
            return
        before = self.mirror
        self.mirror = before.fold(WatchBatch(mine, events[-1].kv.mod_revision))
        self._tell(f"  revision {events[-1].kv.mod_revision}: {', '.join(self._short(event) for event in mine)}")
        if self.mirror.plan != before.plan:
            self._check_share()
        if self.mirror.job != before.job and self.mirror.job is not None:  # it goes on after its end
            self._rules = rules_of(self.mirror.job_record)
        head = self.mirror.head
        for event in mine:
            if event.kind == "put" and event.kv.key.startswith(self._keys.log_prefix):
                self._check_log(LogEntry.decode(event.kv.value))
        for step in before.seals.keys() | self.mirror.seals.keys():
            old, new = before.seals.get(step), self.mirror.seals.get(step)
            if old != new:
                self._check_slot(step, old.record if old else None, new.record if new else None)
        if head is not None and head != before.head:
            self._check_head(head.record)
        if head is not None:
            self.ranks_changed()

    def ranks_changed(self) -> None:
        """I3: what the current world was trained on is the chain, or the chain and the READY seal."""
        if self.mirror.head is None:
            return
        head = self.mirror.head.record
        chain = self._trained(head)
        slot = self.mirror.seals.get(head.step + 1)
        ready = slot.record if slot is not None and slot.record.state is SealState.READY else None
        allowed = {chain}
        if ready is not None and ready.world == head.world:
            allowed.add((*chain, frozenset(group.ref for group in ready.groups)))
        for rank in self._floor.worlds.get(head.world, ()):
            claim = self.mirror.claim(head.world, rank.spec.rank or 0)
            if claim is not None and claim.instance != rank.spec.instance:
                continue  # it came second, and is fed by nobody; it ends when it hears that
            ready_parts = slot.record.ready_parts if slot is not None else 0
            stated = part_digests(slot.record, ready_parts) if slot is not None else ()
            begun = rank.state.begun
            if rank.alive and rank.state.done == head.step and begun != stated[: len(begun)]:
                self._wrong(
                    f"{rank.spec.instance} has begun {len(begun)} parts of step {head.step + 1}, READY are {ready_parts}"
                )
            if rank.alive and not rank.damage and rank.content not in allowed:
                self._wrong(
                    f"I3: {rank.spec.instance} was trained on {_shown(rank.content)}, the chain on {_shown(chain)}"
                )

    def _check_share(self) -> None:
        """Slots of a plan have not been released."""
        plan, share = self.mirror.plan, self._shares.jobs.get(self._keys.uid)
        if plan is None or (self.mirror.status is not None and self.mirror.status.record.phase.ended):
            return
        held = slots_of_share(share.held) if share is not None else frozenset()
        if not plan_slots(plan.record) <= held:
            self._wrong(f"the plan uses {sorted(plan_slots(plan.record) - held)}, which the job does not hold")

    def at_the_end(self) -> None:
        """The job has ended well: the whole account, once more."""
        if self.mirror.head is not None:
            self._check_head(self.mirror.head.record)

    def _check_head(self, head: Head) -> None:
        self._states[head.version] = self._trained(head)
        seals = [stored.record for stored in self.mirror.seals.values()]
        job = self.mirror.job_record if self.mirror.job is not None else None
        found = audit_records(self._rules, head, self._log, self._floor.receipts, AuditInputs(job=job, seals=seals))
        if not found.clean:
            self._wrong(f"the audit: {'; '.join(found.violations)}")

    def _check_log(self, entry: LogEntry) -> None:
        if self._log.setdefault(entry.seq, entry) != entry:
            self._wrong(f"I5: log entry {entry.seq} was overwritten")

    def _check_slot(self, step: int, old: Seal | None, new: Seal | None) -> None:
        before, after = (old.state if old else None), (new.state if new else None)
        if after not in MOVES[before]:
            self._wrong(f"slot of step {step} went from {before} to {after}")
        if new is None:
            return
        if old is not None and (new.attempt < old.attempt or new.lineage < old.lineage):
            self._wrong(f"slot of step {new.step} went from attempt {old.token} back to {new.token}")
        if old is not None and (new.kept[: len(old.kept)] != old.kept or new.ready_parts < old.ready_parts):
            self._wrong(f"slot {new.token} is without a READY part of {old.token}")
        if sum(new.parts) != (len(new.groups) if new.parts else 0):
            self._wrong(f"slot {new.token} has parts of {new.parts} groups and {len(new.groups)} in all")
        if new.state is SealState.OPEN and (new.groups != new.kept or new.outcomes):
            self._wrong(f"the OPEN slot {new.token} carries refs beside its READY parts")
        if new.state is SealState.OPEN and not new.groups:
            return
        content = (new.groups, new.outcomes, new.world)
        if self._sealed.setdefault(new.token, content) != content:
            self._wrong(f"two sets of groups share the token {new.token}")
        self._check_refs(new)

    def _check_refs(self, seal: Seal) -> None:
        """Sealed refs have not ended, and are sealed once; versions are states that the chain went through, and fresh."""
        assert self.mirror.head is not None
        head = self.mirror.head.record
        refs = [g.ref for g in seal.groups] + [o.ref for o in seal.outcomes]
        over = {one.ref for entry in self._walk(head) for one in entry.delta}
        over |= {
            ref
            for step, slot in self.mirror.seals.items()
            if step != seal.step
            for ref in (*(g.ref for g in slot.record.groups), *(o.ref for o in slot.record.outcomes))
        }
        for ref in refs:
            if ref in over or refs.count(ref) > 1:
                self._wrong(f"prompt {ref} was sealed as {seal.token}, and is terminal, or sealed twice")
        chain = self._trained(head)
        for group in seal.groups:
            for version in group.versions:
                state = self._states.get(version)
                if state is None or chain[: len(state)] != state or head.step - version.step > self._rules.staleness:
                    self._wrong(f"prompt {group.ref} was sealed as {seal.token}, made by {version}")

    def _walk(self, head: Head) -> list[LogEntry]:
        """The entries of head's chain, newest first."""
        entries = []
        seq: int | None = head.seq
        while seq is not None and seq in self._log:
            entries.append(self._log[seq])
            seq = self._log[seq].parent
        return entries

    def _trained(self, head: Head) -> Content:
        trained = [entry for entry in self._walk(head) if entry.kind == "train"]
        return tuple(frozenset(one.ref for one in entry.delta if one.kind == "trained") for entry in reversed(trained))

    def _short(self, event: WatchEvent) -> str:
        key = event.kv.key.removeprefix(self._keys.prefix)
        if event.kind == "delete":
            return f"-{key}"
        if key.startswith("seal/"):
            seal = Seal.decode(event.kv.value)
            return f"seal {seal.token} {seal.state} by {seal.sealer}"
        if key == "head":
            head = Head.decode(event.kv.value)
            return f"head {head.seq} at {head.version}"
        return key


def _shown(content: Content) -> str:
    return " | ".join(" ".join(sorted(map(str, step))) for step in content) or "nothing"

"""Whoever leads plans: once for each step that was trained it asks which split is to come next (`controllers.next_split`), and within a step,
about once a second, whether slots are lent (`controllers.lender`). What comes of it is a proposal, which `controllers.leading` has written
down while it is still about what there is.

It knows when to ask, keeps account of what came of moves, and tells people what is in the way; what is to move, it does not decide.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Protocol

from controllers.changes import Changes
from controllers.forming import models_of, snapshot
from controllers.leading import is_due, leads
from controllers.lender import Lender
from controllers.moves_file import MovesFile
from controllers.next_split import NextSplit
from controllers.staying import Staying
from controllers.step_history import StepHistory, rows_of
from controllers.troubles import TroubleBook
from controllers.view import JobView
from gcore.clock import Clock
from gcore.config import JobSpec
from gcore.ledger.job import Plan
from gcore.ledger.mirror import JobMirror
from gcore.ledger.placing import MoveKind, Moves
from gcore.tls.connecting import PLAIN, Connector
from gcore.types import Version
from placement.live import Moving
from placement.moves import Accounted, Deciding, Proposal, with_unasked
from placement.outcomes import with_outcomes
from placement.plan import counted

log = logging.getLogger(__name__)

POLL_S, SOON_S = 1.0, 0.25
"""How often it is looked whether slots are lent; and while a move takes effect, to know how long that takes."""
BOOKS_S = 0.5
"""So long are the books of the newest step waited for, before the policy is asked."""


class Planned(Protocol):
    """The job that is planned."""

    uid: str
    node: str
    changes: Changes
    troubles: TroubleBook

    @property
    def me(self) -> str:
        """This incarnation."""
        ...

    @property
    def mirror(self) -> JobMirror:
        """Its records as last heard."""
        ...

    def look(self) -> JobView:
        """The view now."""
        ...

    def look_anew(self) -> None:
        """What is proposed has changed."""
        ...


class Planner:
    """Of one job, on one controller, for one incarnation."""

    def __init__(self, job: Planned, spec: JobSpec, clock: Clock, run_dir: Path, connector: Connector = PLAIN) -> None:
        self._job = job
        self._spec = spec
        self._clock = clock
        self._file = MovesFile(run_dir)
        self._moving = Moving.by(spec, models_of(job.mirror))
        self._rows = rows_of(spec)
        self._history = StepHistory.of(spec.served_judges)
        self._next = NextSplit(spec, self._moving, self._rows, self._history)
        self._lender = Lender(spec, job.uid, self._moving, self._rows, clock, self._history, connector)
        self._staying = Staying(clock)
        self._decided: Version | None = None
        self._stood: tuple[object, ...] = ()
        """How step and leadership stood when they were looked at last."""
        self._wait_s = POLL_S
        self._before: Plan | None = None
        """The plan before the newest."""
        self._kept: Moves | None = None
        self.proposal: Proposal | None = None
        self.account: Accounted | None = None

    def note(self, before: JobMirror, after: JobMirror) -> None:
        """A change of the job's records."""
        self._history.note(before, after, lambda: snapshot(self._job.look()))
        self._lender.note(before, after, self._job.me)
        if before.plan is not None and after.plan is not None and before.plan is not after.plan:
            self._before = before.plan.record

    async def run(self) -> None:
        """For ever."""
        try:
            while True:
                self._wait_s = POLL_S
                await self._turn()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._wait_s):
                        await self._job.changes.until(self._is_news)
        finally:
            leader = self._job.mirror.leader
            if self._kept is not None and (leader is None or leader.record.incarnation == self._job.me):
                # Who planned to the end writes down the end.
                self._file.keep(self._at_the_end(self._job.mirror), to_the_end=True)
            await self._lender.close()

    def _is_news(self) -> bool:
        """Whether there is another step, its batch is closed, or somebody else leads."""
        return self._standing() != self._stood

    def _standing(self) -> tuple[object, ...]:
        mirror = self._job.mirror
        leader = None if mirror.leader is None else mirror.leader.record.incarnation
        if mirror.head is None:
            return None, leader
        head = mirror.head.record
        seal = mirror.seals.get(head.step + 1)
        return head.lineage, head.step, seal is not None and not seal.record.collects, leader

    async def _turn(self) -> None:
        mirror = self._job.mirror
        self._stood = self._standing()
        if mirror.head is None or mirror.plan is None:
            return
        view = self._job.look()
        if not leads(view) or view.is_over:
            self._propose(None, None)
            if not leads(view):
                self._next.forget()
                self._staying.forget()
            return
        step = trained(view.mirror)
        if self._decided is None and step is not None and has_moved(view.mirror, step):
            self._decided = step  # who planned before has decided on it
        if step is not None and self._decided != step:
            await self._booked(view)
            view = self._job.look()
            if not leads(view) or trained(view.mirror) != step:
                return
            proposal = await self._between(view)
            self._decided = step
        elif self.proposal is not None and not self.proposal.move.within and is_due(self.proposal, view):
            proposal = self.proposal  # the store has not taken it yet; a loan in its place would be the end of it
        else:
            stored = view.mirror.plan
            proposal = await self._lender.proposal(view, self._deciding(view))
            if self._job.mirror.plan is not stored:
                return
        self._propose(proposal, self._accounted(view))
        await self._keep(view)
        if self._lender.is_settling or (proposal is not None and proposal.plan is not None):
            self._wait_s = SOON_S

    def _propose(self, proposal: Proposal | None, account: Accounted | None) -> None:
        if (proposal, account) != (self.proposal, self.account):
            self.proposal, self.account = proposal, account
            self._job.look_anew()
            self._job.changes.notify()

    async def _booked(self, view: JobView) -> None:
        """Until the books of the newest step are there, or for a moment."""
        until = self._clock.monotonic() + BOOKS_S
        members = {stored.record.node for stored in view.mirror.members.values()}
        while (left := until - self._clock.monotonic()) > 0:
            books = self._job.mirror.books
            if all(node in books and books[node].record.at(view.head.version) is not None for node in members):
                return
            await self._job.changes.wait(left)

    async def _between(self, view: JobView) -> Proposal | None:
        """What the policy wants for the next steps; what else it says is told."""
        at = self._deciding(view)
        wish = await self._next.wished(view, self._lender.costs(view), at)
        if wish.kept is not None:
            self._staying.note(view.mirror.moves, at, wish.kept, wish.expected_s, self._history.took)
        if wish.trouble is not None:
            self._job.troubles.hold(f"placement-{self._job.node}", wish.trouble)
        return wish.proposal

    def _deciding(self, view: JobView) -> Deciding:
        dry = self._spec.placement.dry_run
        return Deciding(view.head.step, view.head.seq, view.node, self._clock.wall(), dry)

    def _accounted(self, view: JobView) -> Accounted | None:
        """The moves with what is known by now of what came of them; None: nothing new."""
        assert view.mirror.plan is not None
        known = view.mirror.moves
        steps, plan = self._history.committed(view.mirror), view.mirror.plan.record
        told = with_unasked(known, self._before, plan, self._deciding(view), formed_because(view))
        found = with_outcomes(told, steps, self._lender.took, view.head.seq, plan)
        found = self._staying.told(found, self._history.took, at_once=found != known)
        return None if found == known else Accounted(found, view.mirror.moves_revision)

    def _at_the_end(self, mirror: JobMirror) -> Moves:
        """The moves, with what came of those in the last step; the store is told of it no more."""
        moves = mirror.moves
        if mirror.head is not None and mirror.plan is not None:
            steps, seq = self._history.committed(mirror), mirror.head.record.seq
            moves = with_outcomes(moves, steps, self._lender.took, seq, mirror.plan.record)
        return self._staying.told(moves, self._history.took, at_once=True)

    async def _keep(self, view: JobView) -> None:
        """Every move stands in the run's folder too: the store keeps the newest."""
        if view.mirror.moves is not self._kept:
            self._kept = view.mirror.moves
            await asyncio.to_thread(self._file.keep, self._kept)


def has_moved(mirror: JobMirror, step: Version) -> bool:
    """Whether a move was decided on after that step already."""
    asked = (MoveKind.SPLIT, MoveKind.WORLD)
    seq = next((s.record.seq for s in mirror.log.values() if Version(s.record.lineage, s.record.step) == step), 0)
    return any(one.kind in asked and one.step == step.step and one.seq >= seq for one in mirror.moves.moves)


def formed_because(view: JobView) -> str:
    """Why the train world that there is was placed, and what it cost; empty: it is the first, or the log has it no more."""
    assert view.mirror.plan is not None
    world, log = view.mirror.plan.record.world, view.log
    seq = max((seq for seq, one in log.items() if one.kind == "rollback" and one.world == world), default=None)
    if seq is None:
        return ""
    earlier = max((one for one in log if one < seq), default=seq)
    again = log[earlier].step - log[seq].step
    return log[seq].reason + (f"; {counted(again, 'step')} had to be made again" if again > 0 else "")


def trained(mirror: JobMirror) -> Version | None:
    """The newest step that was trained, of those that the log has. A rollback to it changes nothing about it."""
    assert mirror.head is not None
    entries = [stored.record for stored in mirror.log.values() if stored.record.kind == "train"]
    on_chain = [one for one in entries if one.step <= mirror.head.record.step]
    newest = max(on_chain, key=lambda one: one.seq, default=None)
    return None if newest is None else Version(newest.lineage, newest.step)

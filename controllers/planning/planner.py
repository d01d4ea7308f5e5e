"""The planner of a job: calls its placement policy, proposes moves, and records their outcomes.

Every controller of a job has a planner; only that of the leader (the controller that plans the placement) is active.
After each trained step it asks the policy for the next split, that is how many slots each pool gets (`SplitDecider`).
Within a step, about once a second, it checks whether to lend slots (`controllers.planning.lender`). The result is a
`MoveProposal`, which `controllers.rules.placement` writes to the store if it still refers to the present state.

A policy may be third-party code: `PolicyRunner` calls it in its own thread with a time limit and checks its result. A
policy that hangs keeps its thread, and is not called again until it returns. Its decision must be feasible and is
adapted to the pin (a placement that a person fixed); `placement.assign` turns it into places on slots. If a policy
raises or returns an infeasible split, nothing moves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TypeVar, cast

from controllers.planning.history import MovesFile, StepHistory, engine_rows
from controllers.planning.lender import Lender
from controllers.rules.placement import is_leader, is_proposal_due
from controllers.rules.view import JobView
from controllers.rules.world import is_state_at_hand, may_use_copies, model_configs, placeable_nodes, placement_snapshot
from controllers.telemetry.notices import LiveJob
from gcore.api.tls import PLAIN, Connector
from gcore.config.spec import JobSpec
from gcore.errors import GcoreError
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.job import MOST_REASON, HoldPeriod, MoveKind, Moves, Plan
from gcore.plugins import RAISED, error_sentence, shown_name
from gcore.system.clock import Clock
from gcore.system.concurrency import limit_time
from gcore.types import Version
from placement.assign import assign_split
from placement.lending import EngineRows
from placement.moves import (
    DecisionContext,
    MoveProposal,
    MoveReport,
    add_outcomes,
    add_stay,
    add_taken,
    add_unrequested,
    base_split,
    extend_stay,
    is_repeated,
    propose_move,
)
from placement.placer import apply_pin, find_bounds, first_split, movable_request
from placement.policies.base import Decision, Policy, PolicyStart, Situation, SwitchCosts, find_policy
from placement.request import PlacementRequest
from placement.slots import Snapshot, Split, SplitBounds, count_noun

T = TypeVar("T")

ANSWER_S = 30.0
"""Time limit of a call to a policy, in seconds. gcore's own policies take 0.2 s."""

MOST_IDLE, MOST_NAME = 8, 24
"""Maximum number of pools in a decision's `idle`, and of characters in a pool's name. Both are stored in the record of
moves."""

MOST_SLOTS = 1_000_000
"""Maximum slots of a pool that is accepted in a decision; larger numbers may not even be printable."""

log = logging.getLogger(__name__)

TELL_S = 10.0
"""Seconds between two updates of a hold period in the store."""

POLL_S, SOON_S = 1.0, 0.25
"""Seconds between two cycles of the planner; the shorter time applies while a move takes effect, to measure how long
that takes."""

ACCOUNTS_WAIT_S = 0.5
"""Maximum seconds that a decision waits for the slot accounts of the newest step."""


class PolicyFailed(GcoreError):
    """A policy raised an error, took too long, or returned no valid decision."""


class PolicyRunner:
    """Calls a policy in a thread, one call at a time. Belongs to one event loop."""

    def __init__(self, limit_s: float = ANSWER_S) -> None:
        self._limit_s = limit_s
        self._thread: threading.Thread | None = None

    async def make_policy(self, make: Callable[[], object]) -> Policy:
        """Create the policy by calling `make` in a thread. Raises PolicyFailed."""
        return await self._in_thread(lambda: check_policy(make()))

    async def ask_policy(self, policy: Policy, situation: Situation) -> Decision:
        """Ask the policy for its decision in `situation`, in a thread. Raises PolicyFailed."""
        return await self._in_thread(lambda: check_decision(policy.plan(situation)))

    async def _in_thread(self, call: Callable[[], T]) -> T:
        if self._thread is not None and self._thread.is_alive():
            raise PolicyFailed("it has not returned from its previous call")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def ask() -> None:
            # Do not re-raise the policy's exception in the event loop: StopIteration and CancelledError have another
            # meaning there.
            try:
                settle = partial(_give, answer, call())
            except BaseException as error:  # noqa: BLE001 - the edge to foreign code: a policy may raise anything
                failed = PolicyFailed(error.what if isinstance(error, PolicyFailed) else error_sentence(error))
                failed.__cause__ = error
                settle = partial(_fail, answer, failed)
            with contextlib.suppress(RuntimeError):  # the loop may have ended
                loop.call_soon_threadsafe(settle)

        self._thread = threading.Thread(target=ask, name="placement policy", daemon=True)
        self._thread.start()
        try:
            async with limit_time(self._limit_s):
                await asyncio.wait({answer})
        except TimeoutError:
            raise PolicyFailed(f"it has not returned within {self._limit_s:.0f} s") from None
        self._thread = None
        return answer.result()


def _give(answer: asyncio.Future[T], given: T) -> None:
    if not answer.done():
        answer.set_result(given)


def _fail(answer: asyncio.Future[T], failed: PolicyFailed) -> None:
    if not answer.done():
        answer.set_exception(failed)


def check_policy(made: object) -> Policy:
    """Check the object that a policy's factory returned. Return it if it is a policy. Raises PolicyFailed."""
    if not callable(getattr(made, "plan", None)):
        raise PolicyFailed(f"its factory returned {type(made).__name__!r}, which has no method plan")
    return cast(Policy, made)


def check_decision(given: object) -> Decision:
    """Check the object that a policy returned. Return it as a valid decision. Raises PolicyFailed."""
    if not isinstance(given, Decision) or not isinstance(given.split, Split):
        raise PolicyFailed(f"it returned {type(given).__name__!r} instead of a Decision with a Split")
    split = given.split
    slots = (split.rollout, split.reward, split.train)
    if split.mode not in ("coexisting", "colocated") or not all(map(_is_slots, slots)):
        raise PolicyFailed("its split has pools that are not whole numbers of slots")
    if not isinstance(given.reason, str) or not isinstance(given.idle, Mapping):
        raise PolicyFailed("its reason is not a string, or its idle is not a mapping")
    idle = dict(given.idle)  # a copy, so that the policy cannot change it later
    estimates = [one for one in (given.expected_s, given.before_s) if one is not None]
    numbers = [given.cost_s, given.gain_s, *estimates, *idle.values()]
    if not all(isinstance(one, int | float) and isfinite(one) for one in numbers):
        raise PolicyFailed("its expected_s, before_s, cost_s, gain_s or idle are not numbers")
    if len(idle) > MOST_IDLE or not all(isinstance(pool, str) and len(pool) <= MOST_NAME for pool in idle):
        raise PolicyFailed("its idle has keys that are not pool names")
    return replace(given, idle=idle, reason=given.reason.encode("utf-8", "replace").decode())


def _is_slots(count: object) -> bool:
    return type(count) is int and 0 <= count <= MOST_SLOTS


class _CannotBe(Exception):
    """The decision cannot be carried out; the message says why nothing moves."""


@dataclass(frozen=True, slots=True)
class SplitProposal:
    """Result of asking the policy for the next split.

    `proposal`: the move to make; None: none. `kept`: why the policy keeps the present split; None: it does not, or was
    not asked. `expected_s`: expected seconds of a step on the present split. `trouble`: sentence that says what
    prevents a decision; empty: nothing; None: the policy was not asked.
    """

    proposal: MoveProposal | None = None
    kept: str | None = None
    expected_s: float | None = None
    trouble: str | None = None


class SplitDecider:
    """Calls the policy between two steps, and turns its decision into a proposal. `moving`: the job's placement
    request. `rows`: maximum of concurrent requests per engine."""

    def __init__(self, spec: JobSpec, moving: PlacementRequest, rows: EngineRows, history: StepHistory) -> None:
        self._spec = spec
        self._moving = moving
        self._rows = rows
        self._history = history
        self._runner = PolicyRunner()
        self._policy: Policy | None = None

    def forget(self) -> None:
        """Drop the policy, because another controller leads. A new one is created when this one leads again."""
        self._policy = None

    async def propose(self, view: JobView, costs: SwitchCosts, at: DecisionContext) -> SplitProposal:
        """Ask the policy for the split of the next steps, and make a proposal of it. `costs`: of placement changes."""
        stored = view.mirror.plan
        assert stored is not None
        plan, pin = stored.record, view.mirror.pin
        if pin.frozen:
            return SplitProposal()  # the lender returns lent slots in any case
        there = placeable_nodes(view)
        if not {place.node for place in plan.ranks} <= {one.node for one in there.nodes}:
            # A node with a rank is absent: either it returns, or the world is lost and placed again.
            return SplitProposal()
        base = base_split(plan, there)
        try:
            decision = await self._decision(view, plan, there, base, costs)
            proposal = await asyncio.to_thread(self._proposal, decision, plan, there, base, at)
        except _CannotBe as error:
            return SplitProposal(trouble=str(error))
        if proposal is not None and is_repeated(view.mirror.moves, proposal.move):
            proposal = None
        if decision.split == base:
            return SplitProposal(proposal, decision.reason, decision.expected_s, "")
        return SplitProposal(proposal, trouble="")

    async def _decision(self, view: JobView, plan: Plan, there: Snapshot, base: Split, costs: SwitchCosts) -> Decision:
        """Return the policy's decision, adapted to the pin. `there`: nodes on which ranks may be placed. `base`: the
        split before slots were lent. Raises _CannotBe if it is not feasible."""
        pin, policy = view.mirror.pin, self._spec.placement.policy
        limits = find_bounds(there, self._moving, pin, len(plan.ranks))
        if not (is_state_at_hand(view) or may_use_copies(view)):
            limits = replace(
                limits, train_sizes=(len(plan.ranks),)
            )  # a world of another size cannot continue from here
        slots = count_noun(limits.slots, "slot")
        first = first_split(limits, self._moving)
        if first is None:
            raise _CannotBe(f"the pools do not fit on {slots} with {pin}; nothing moves")
        asked = await self._ask(view, limits, base, first, costs)
        decision = await asyncio.to_thread(apply_pin, asked, limits, pin)  # it may search all splits
        if decision is None:
            raise _CannotBe(f"{pin}, which is not possible on {slots}; nothing moves")
        if decision.split != base and not limits.allows(decision.split):
            raise _CannotBe(
                f"policy {shown_name(policy)!r} wants {decision.split}, which is not possible on {slots}; nothing moves"
            )
        return decision

    async def _ask(self, view: JobView, limits: SplitBounds, base: Split, first: Split, costs: SwitchCosts) -> Decision:
        """Call the policy. `limits`: the splits that it may choose. `base`: the present split; `first`: the initial
        one. Raises _CannotBe if the policy fails."""
        name, steps = self._spec.placement.policy, self._spec.flow.steps
        situation = Situation(
            bounds=limits,
            now=base,
            history=self._history.steps(view.mirror),
            costs=costs,
            steps_left=None if steps is None else steps - view.head.step,
            overlaps=self._spec.rollout.staleness > 0,
            lends=self._spec.placement.lends,
        )
        try:
            if self._policy is None:
                start = PolicyStart(first, self._rows.rollout, self._rows.reward, self._moving.sizes)
                self._policy = await self._runner.make_policy(lambda: find_policy(name)(start))
            return await self._runner.ask_policy(self._policy, situation)
        except RAISED as error:  # third-party code may raise anything
            log.exception("placement policy %s failed", name)
            self._policy = None
            why = error.what if isinstance(error, PolicyFailed) else error_sentence(error)
            raise _CannotBe(f"placement policy {shown_name(name)!r} failed, so nothing moves: {why}") from error

    def _proposal(
        self, decision: Decision, plan: Plan, there: Snapshot, base: Split, at: DecisionContext
    ) -> MoveProposal | None:
        """Make the proposal of a decision; None if it changes nothing. Runs in a thread, because it is slow for a
        thousand slots. Raises _CannotBe."""
        return propose_move(decision, plan, self._place(decision, plan, there), base, at)

    def _place(self, decision: Decision, plan: Plan, there: Snapshot) -> Plan | None:
        """Return the plan with the decided split; None if that needs a train world of another size, which a rollback
        forms. Raises _CannotBe if engines cannot be placed."""
        split = decision.split
        if split.train != len(plan.ranks):
            return None
        after = assign_split(
            split,
            plan,
            there,
            tuple(self._moving.judges),
            world=plan.world,
            generation=plan.generation + 1,
            reason=f"{split}: {decision.reason}"[:MOST_REASON],
            sizes=self._moving.sizes,
        )
        if after is None:
            raise _CannotBe(
                f"policy {shown_name(self._spec.placement.policy)!r} wants {split}, but with the present ranks no node has enough adjacent slots for the engines; "
                "nothing moves"
            )
        return after


class HoldLog:
    """Keeps the newest hold period (steps after which the policy moved nothing) of a leader, and limits how often it is
    written to the store.

    The record of moves is always written completely, so a hold period is written when it begins, together with other
    changes of the record, and otherwise only every `TELL_S`. `took`: returns the duration of a step that was committed
    after a log entry; None: not known yet (`StepHistory.took`).
    """

    def __init__(self, clock: Clock, took: Callable[[int, int], float | None]) -> None:
        self._clock = clock
        self._took = took
        self._newest: HoldPeriod | None = None
        self._stored: HoldPeriod | None = None
        """The hold period as it was in the store at the last call."""
        self._since = 0.0
        """Since when it is in the store in this form."""

    def note(self, moves: Moves, at: DecisionContext, reason: str, expected_s: float | None) -> None:
        """Record a decision that moved nothing. `expected_s`: expected seconds of the next step."""
        known = self._newest or (moves.stays[-1] if moves.stays else None)
        self._newest = extend_stay(self._with_taken(known), moves, at, reason, expected_s)

    def forget(self) -> None:
        """Drop the hold period, because another controller leads."""
        self._newest = None

    def with_newest_stay(self, moves: Moves, *, at_once: bool) -> Moves:
        """Return the record of moves with the newest hold period, if that should be written now; else unchanged.
        `at_once`: the record is written in any case, so include it."""
        stay = self._newest = self._with_taken(self._newest)
        stored = next((one for one in moves.stays if stay is not None and one.began == stay.began), None)
        now = self._clock.monotonic()
        if stored != self._stored:
            self._stored, self._since = stored, now
        if stay is None or stay == stored:
            return moves
        is_time = at_once or stored is None or now >= self._since + TELL_S
        return add_stay(moves, stay) if is_time else moves

    def _with_taken(self, stay: HoldPeriod | None) -> HoldPeriod | None:
        return None if stay is None else add_taken(stay, self._took(stay.step + 1, stay.seq))


class Planner:
    """Plans the placement of one job while this controller leads. `proposal`, `move_report`: the results, which rules
    write to the store."""

    def __init__(self, job: LiveJob, spec: JobSpec, clock: Clock, run_dir: Path, connector: Connector = PLAIN) -> None:
        self._job = job
        self._spec = spec
        self._clock = clock
        self._file = MovesFile(run_dir)
        self._moving = movable_request(spec, model_configs(job.mirror))
        self._rows = engine_rows(spec)
        self._history = StepHistory.of(spec)
        self._next = SplitDecider(spec, self._moving, self._rows, self._history)
        self._lender = Lender(spec, job.uid, self._moving, self._rows, clock, self._history, connector)
        self._holds = HoldLog(clock, self._history.took)
        self._decided: Version | None = None
        self._last_state: tuple[object, ...] = ()
        """Step and leader at the last cycle."""
        self._wait_s = POLL_S
        self._before: Plan | None = None
        """The plan before the newest one."""
        self._kept: Moves | None = None
        self.proposal: MoveProposal | None = None
        self.move_report: MoveReport | None = None

    def note(self, before: JobMirror, after: JobMirror) -> None:
        """Process a change of the job's records."""
        self._history.note(before, after, lambda: placement_snapshot(self._job.look()))
        self._lender.note(before, after, self._job.me)
        if before.plan is not None and after.plan is not None and before.plan is not after.plan:
            self._before = before.plan.record

    async def run(self) -> None:
        """Run cycles until cancelled: one per second, and one after each commit."""
        try:
            while True:
                self._wait_s = POLL_S
                await self._turn()
                with contextlib.suppress(TimeoutError):
                    async with limit_time(self._wait_s):
                        await self._job.changes.until(self._is_news)
        finally:
            leader = self._job.mirror.leader
            if self._kept is not None and (leader is None or leader.record.incarnation == self._job.me):
                # The last leader writes the end.
                self._file.keep(self._at_the_end(self._job.mirror), to_the_end=True)
            await self._lender.close()

    def _is_news(self) -> bool:
        """Whether, since the last cycle, a step was committed, a batch was sealed, or the leader changed."""
        return self._state() != self._last_state

    def _state(self) -> tuple[object, ...]:
        mirror = self._job.mirror
        leader = None if mirror.leader is None else mirror.leader.record.incarnation
        if mirror.head is None:
            return None, leader
        head = mirror.head.record
        seal = mirror.seals.get(head.step + 1)
        return head.lineage, head.step, seal is not None and not seal.record.collects, leader

    async def _turn(self) -> None:
        """Run one cycle: after a new step ask the policy, else check whether to lend slots; then report outcomes."""
        mirror = self._job.mirror
        self._last_state = self._state()
        if mirror.head is None or mirror.plan is None:
            return
        view = self._job.look()
        if not is_leader(view) or view.is_over:
            self._propose(None, None)
            if not is_leader(view):
                self._next.forget()
                self._holds.forget()
            return
        step = newest_trained(view.mirror)
        if self._decided is None and step is not None and has_moved(view.mirror, step):
            self._decided = step  # the previous leader has decided on it
        if step is not None and self._decided != step:
            await self._wait_for_accounts(view)
            view = self._job.look()
            if not is_leader(view) or newest_trained(view.mirror) != step:
                return
            proposal = await self._decide_split(view)
            self._decided = step
        elif self.proposal is not None and not self.proposal.move.within and is_proposal_due(self.proposal, view):
            proposal = self.proposal  # not in the store yet; a loan would replace it
        else:
            stored = view.mirror.plan
            proposal = await self._lender.proposal(view, self._context(view))
            if self._job.mirror.plan is not stored:
                return
        self._propose(proposal, self._report(view))
        await self._write_moves(view)
        if self._lender.is_settling or (proposal is not None and proposal.plan is not None):
            self._wait_s = SOON_S

    def _propose(self, proposal: MoveProposal | None, move_report: MoveReport | None) -> None:
        if (proposal, move_report) != (self.proposal, self.move_report):
            self.proposal, self.move_report = proposal, move_report
            self._job.look_anew()
            self._job.changes.notify()

    async def _wait_for_accounts(self, view: JobView) -> None:
        """Wait until the slot accounts of the newest step have arrived, at most `ACCOUNTS_WAIT_S`."""
        until = self._clock.monotonic() + ACCOUNTS_WAIT_S
        members = {stored.record.node for stored in view.mirror.members.values()}
        while (left := until - self._clock.monotonic()) > 0:
            books = self._job.mirror.books
            if all(node in books and books[node].record.at(view.head.version) is not None for node in members):
                return
            await self._job.changes.wait(left)

    async def _decide_split(self, view: JobView) -> MoveProposal | None:
        """Ask the policy for the next split. If it keeps the present one, record that; warn users of a problem."""
        at = self._context(view)
        found = await self._next.propose(view, self._lender.costs(view), at)
        if found.kept is not None:
            self._holds.note(view.mirror.moves, at, found.kept, found.expected_s)
        if found.trouble is not None:
            self._job.warnings.hold(f"placement-{self._job.node}", found.trouble)
        return found.proposal

    def _context(self, view: JobView) -> DecisionContext:
        dry = self._spec.placement.dry_run
        return DecisionContext(view.head.step, view.head.seq, view.node, self._clock.wall(), dry)

    def _report(self, view: JobView) -> MoveReport | None:
        """Return the record of moves with what is known by now (unrequested changes, outcomes, hold period); None:
        nothing is new."""
        assert view.mirror.plan is not None
        known = view.mirror.moves
        moves = add_unrequested(known, self._before, view.mirror.plan.record, self._context(view), world_reason(view))
        moves = self._with_outcomes(view.mirror, moves)
        moves = self._holds.with_newest_stay(moves, at_once=moves != known)
        return None if moves == known else MoveReport(moves, view.mirror.moves_revision)

    def _at_the_end(self, mirror: JobMirror) -> Moves:
        """Return the moves with the outcomes of the last step, for the file only: the job has ended, so the store does
        not get them."""
        return self._holds.with_newest_stay(self._with_outcomes(mirror, mirror.moves), at_once=True)

    def _with_outcomes(self, mirror: JobMirror, moves: Moves) -> Moves:
        if mirror.head is None or mirror.plan is None:
            return moves
        steps = self._history.committed(mirror)
        return add_outcomes(moves, steps, self._lender.took, mirror.head.record.seq, mirror.plan.record)

    async def _write_moves(self, view: JobView) -> None:
        """Write new and changed moves to `moves.jsonl`, because the store keeps only the newest."""
        if view.mirror.moves is not self._kept:
            self._kept = view.mirror.moves
            await asyncio.to_thread(self._file.keep, self._kept)


def has_moved(mirror: JobMirror, step: Version) -> bool:
    """Whether a policy's move was already decided after the step `step` was committed."""
    asked = (MoveKind.SPLIT, MoveKind.WORLD)
    seq = next((s.record.seq for s in mirror.log.values() if Version(s.record.lineage, s.record.step) == step), 0)
    return any(one.kind in asked and one.step == step.step and one.seq >= seq for one in mirror.moves.moves)


def world_reason(view: JobView) -> str:
    """Return why the present train world was formed, and how many steps had to be repeated; empty if it is the first
    one, or the log no longer has the reason."""
    assert view.mirror.plan is not None
    world, log = view.mirror.plan.record.world, view.log
    seq = max((seq for seq, one in log.items() if one.kind == "rollback" and one.world == world), default=None)
    if seq is None:
        return ""
    earlier = max((one for one in log if one < seq), default=seq)
    again = log[earlier].step - log[seq].step
    return log[seq].reason + (f"; {count_noun(again, 'step')} had to be repeated" if again > 0 else "")


def newest_trained(mirror: JobMirror) -> Version | None:
    """Return the version of the newest trained step that no rollback has discarded; None if there is none."""
    assert mirror.head is not None
    entries = [stored.record for stored in mirror.log.values() if stored.record.kind == "train"]
    on_chain = [one for one in entries if one.step <= mirror.head.record.step]
    newest = max(on_chain, key=lambda one: one.seq, default=None)
    return None if newest is None else Version(newest.lineage, newest.step)

"""Why engines and ranks have nothing to do: each cause by evidence of its own, as this controller sees the job now. Pure.

waiting_weights  an engine does not serve head's version. Of ranks and judges: none of this controller's engines does, so nothing can be
                 made yet that they could work on
barrier          the step's batch is closed, or whole and about to be: it is exchanged, trained and committed, and nothing may begin
                 before that
back_pressure    prompts are due, and admission holds them: as many groups are in flight as may be (`rollout.concurrency`), a judge has all the
                 questions that it may have, or the step's batch is closed and what comes after it would be too old (`rollout.staleness`)
tail             everything that is due here was begun: others have the last responses, or the last verdicts
no_work          prompts are due that nothing holds, and they are not begun yet; of a controller without prompts of its own: the batch is
                 open. Before a job's first step and after its last there is no work either

These exclude one another: a look finds one. How long each held is `controllers.booking`'s to sum up.
"""

from __future__ import annotations

from controllers.view import JobView
from gcore.ledger.job import JobPhase
from gcore.ledger.records import SealState
from placement.books import Cause, Pool


def stage_of(view: JobView, *, held_back: bool) -> Cause:
    """What keeps those idle that have nothing to do. `held_back`: whether no prompt should be begun because of a judge."""
    mirror = view.mirror
    running = mirror.status is not None and mirror.status.record.phase is JobPhase.RUNNING
    if mirror.head is None or not running or view.is_over:
        return "no_work"
    if view.seal is not None and not view.seal.collects and not (view.rules.staleness and view.due):
        return "back_pressure" if view.rules.staleness else "barrier"
    sources = (view.due, mirror.assign, view.holdings, view.outcomes, view.in_flight)
    found = view.remembered.get("all begun", sources, lambda: _all_begun(view))
    if found is None:
        return "no_work" if view.due else "barrier"
    if found:
        return "tail" if view.due or view.in_flight else "barrier"
    full = len(view.in_flight) >= view.spec.rollout.concurrency
    return "back_pressure" if full or held_back or view.leaving else "no_work"


def _all_begun(view: JobView) -> bool | None:
    """Whether this controller has begun all that is due of its shards; None: it has no shards."""
    mine = set(view.mirror.assign.record.shards_of(view.me)) if view.mirror.assign is not None else set()
    if not mine:
        return None
    return all(
        ref.shard not in mine or ref in view.in_flight or ref in view.holdings or ref in view.outcomes
        for ref in view.due
    )


def phase_of(view: JobView, stage: Cause) -> str:
    """What the job is at, for the trace: as the log entries call it."""
    seal = view.seal if view.mirror.head is not None else None
    if seal is None or seal.collects:
        return "publish" if cause_of(view, stage, "train", "") == "waiting_weights" else "collect"
    return "train" if seal.state is SealState.READY else "exchange"


def cause_of(view: JobView, stage: Cause, pool: Pool, instance: str) -> Cause:
    """Why a worker of `pool` is idle, if it is. `stage`: what keeps everybody."""
    served = view.engines
    if pool == "rollout":
        engine = served.get(instance)
        late = engine is not None and view.mirror.head is not None and engine.version != view.head.version
        return "waiting_weights" if late and not view.is_over else stage
    open_now = stage not in ("barrier", "back_pressure") and view.mirror.head is not None and not view.is_over
    awake = [engine for engine in served.values() if not engine.asleep] if open_now else []
    if awake and all(engine.version != view.head.version for engine in awake):
        return "waiting_weights"
    return "no_work" if pool == "reward" and stage == "back_pressure" else stage

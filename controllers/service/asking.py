"""Has a running job's weights evaluated out of turn, because a person wants to know.

The step that is under way is asked for: its weights are the newest as soon as it is committed, and whoever hears of that has heard of
this, so all peers evaluate it or none. If head's own weights are being evaluated, or are evaluated already, there is nothing to ask.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from controllers.service.refusals import Conflict, JobEnded
from gcore.config import stored_spec
from gcore.errors import StoreUnavailable
from gcore.ledger.evaluation import ask
from gcore.ledger.guarded import Ledger, TxnOutcome
from gcore.ledger.job import EvalAsked
from gcore.ledger.mirror import JobMirror
from gcore.ledger.rules import is_over, rules_of
from gcore.types import Version

TRIES = 10


async def ask_for_evaluation(ledger: Ledger, look: Callable[[], Awaitable[JobMirror]], by: str, time: float) -> Version:
    """Whose weights are evaluated. Raises Conflict, StoreUnavailable."""
    for _ in range(TRIES):
        mirror = await look()
        version = _known(mirror)
        if version is not None:
            return version
        assert mirror.head is not None
        head = mirror.head
        known = mirror.written(mirror.keys.asked, mirror.askings.get(""))
        asked = EvalAsked(step=head.record.step + 1, by=by, time=time)
        report = await ledger.run(ask(mirror.keys, head, known, asked))
        if report.outcome is TxnOutcome.WON:
            return Version(head.record.lineage, asked.step)
        if report.outcome is TxnOutcome.UNKNOWN:
            raise StoreUnavailable("the store did not answer, so it is not known whether it was asked", fix="Ask again")
    raise StoreUnavailable("the job commits one step after the other meanwhile", fix="Ask again")


def _known(mirror: JobMirror) -> Version | None:
    """The version that is evaluated without being asked for, or was asked for already. Raises Conflict."""
    assert mirror.job is not None
    job = mirror.job.record
    spec = stored_spec(job.spec)
    if mirror.status is not None and mirror.status.record.phase.ended:
        raise JobEnded(f"job {job.name!r} has ended", fix="`gcore describe` tells its last evaluation")
    if not spec.eval.wanted:
        raise Conflict(f"job {job.name!r} has no held-out prompts", fix="Submit it with eval.path")
    if mirror.head is None:
        raise Conflict(f"job {job.name!r} has not begun", fix="Ask again when it has")
    head = mirror.head.record
    over = is_over(rules_of(job), head)
    if spec.evaluates_after(head.step, last=over) or str(head.version) in mirror.evaluations:
        return head.version
    asked = mirror.asked
    if asked is not None and asked.step == head.step:  # it is under way
        return head.version
    if asked is not None and asked.step == head.step + 1:
        return Version(head.lineage, asked.step)
    return None

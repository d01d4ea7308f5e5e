"""Parts and evaluations, written to the store: guarded transactions, made once. What stands, the mirror tells."""

from __future__ import annotations

from collections.abc import Callable

from gcore.ledger import evaluation as rules
from gcore.ledger.guarded import Ledger, TxnOutcome
from gcore.ledger.job import EvalPart, Evaluation
from gcore.ledger.mirror import JobMirror


class StoredEvaluations:
    """Implements `controllers.evaluating.EvaluationBook`."""

    def __init__(self, ledger: Ledger, mirror: Callable[[], JobMirror]) -> None:
        self._ledger = ledger
        self._mirror = mirror

    async def add_part(self, part: EvalPart) -> bool:
        """Whether the part stands now, or needs not stand any more; False if that is not known."""
        report = await self._ledger.run(rules.record_part(self._mirror().keys, part))
        return report.outcome is not TxnOutcome.UNKNOWN

    async def conclude(self, evaluation: Evaluation) -> None:
        """Write it down, if head still is what was evaluated."""
        mirror = self._mirror()
        if mirror.head is not None and mirror.head.record.version == evaluation.version:
            await self._ledger.run(rules.record_evaluation(mirror.keys, mirror.head, evaluation))

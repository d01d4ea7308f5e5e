"""Sweeping rules of `controllers.decide`: what nothing asks for any more leaves the store, and checkpoints of cut-off lineages
the run's folder. Pure, like all rules; none of them is needed for a step to be safe, but that the store stays as small as it is
(`gcore.ledger.bounds`) rests on them.
"""

from __future__ import annotations

from collections.abc import Iterator

from controllers.actions import ForgetEvaluations, Intent, Sweep
from controllers.spreading import archived_evaluations, archiving
from controllers.turns import SETTLE_S
from controllers.view import JobView
from gcore.ledger.sweeping import MOST_SWEPT, superfluous, superfluous_evaluations

FORGET_AT = 8
"""How many evaluations make a trip to the run's folder worth while."""


def sweeping(view: JobView) -> Iterator[Intent]:
    """After each change of the train world: its claims and rendezvous, parts of evaluations, and checkpoints that were cut off;
    and what nodes that are gone have told."""
    mirror = view.mirror
    sources = (mirror.head, mirror.claims, mirror.rendezvous, mirror.eval_parts, mirror.troubles, view.nodes)
    swept = view.remembered.get(
        "swept",
        sources,
        lambda: superfluous(view.head, mirror.worlds, mirror.eval_parts, mirror.troubles, view.nodes),
    )
    if swept:
        topic = f"sweep {view.head.version} {view.head.world}"
        yield Intent(Sweep(swept), topic, view.turn(topic), after=SETTLE_S)


def forgetting(view: JobView) -> Iterator[Intent]:
    """Old evaluations move to the run's folder, several at a time."""
    known = view.mirror.checkpoints
    assert known is not None
    if len(view.mirror.evaluations) < FORGET_AT:
        return
    old = superfluous_evaluations(view.head, known.record.entries, view.mirror.evaluations, view.spec.best_metric)
    if len(old) < FORGET_AT:
        return
    ripe = archived_evaluations(view, old[:MOST_SWEPT])
    if len(ripe) >= FORGET_AT:
        topic = f"forget evaluation {ripe[0]}"
        yield Intent(ForgetEvaluations(ripe), topic, view.turn(topic), after=SETTLE_S)
    else:
        yield from archiving(view, evaluations=old[:FORGET_AT])

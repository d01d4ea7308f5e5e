"""What a job's placement is, shown as metrics: the split, the newest move of each kind with what was expected of it and what came of
it, and what the newest decision expects of a step. Pure but for the gauges; counts nothing.
"""

from __future__ import annotations

from gcore.ledger.mirror import JobMirror
from gcore.ledger.placing import Move, Moves
from gcore.metrics import Metrics
from gcore.metrics.slots import MoveFigures
from placement.assign import split_of


def show_placement(metrics: Metrics, before: JobMirror, after: JobMirror) -> None:
    """Set the gauges of what has changed."""
    if after.job is None:
        return
    job = after.job.record.full_name
    if after.plan is not None and after.plan is not before.plan:
        split = split_of(after.plan.record)
        metrics.show_split(job, {"rollout": split.rollout, "reward": split.reward, "train": split.train})
    if after.movings is before.movings:
        return
    for kind, move in newest_by_kind(after.moves).items():
        metrics.show_move(job, kind, figures_of(move))
    if (expected := expected_s(after.moves)) is not None:
        metrics.expected.labels(job).set(expected)


def newest_by_kind(moves: Moves) -> dict[str, Move]:
    """The newest move of each kind that was made, or would have been."""
    return {move.kind.value: move for move in moves.moves if move.state in ("done", "would")}


def figures_of(move: Move) -> MoveFigures:
    """What was expected of a move, and what came of it. A step's gain is what it became shorter by."""
    outcome = move.outcome
    expected = move.gain_s
    if move.before_s is not None and move.expected_s is not None:
        expected = move.before_s - move.expected_s
    gained = took = None
    if outcome is not None:
        took = outcome.took_s
        if outcome.before_s is not None and outcome.step_s is not None:
            gained = outcome.before_s - outcome.step_s
    return MoveFigures(expected, gained, move.cost_s, took)


def expected_s(moves: Moves) -> float | None:
    """What the newest decision, whether it moved anything or not, expects of a step."""
    told = [(move.time, move.expected_s) for move in moves.moves if move.expected_s is not None]
    told += [(stay.time, stay.expected_s) for stay in moves.stays if stay.expected_s is not None]
    return max(told, default=(0.0, None), key=lambda one: one[0])[1]

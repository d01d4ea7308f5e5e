"""Loans that a guess forbids: at last one is made, and what changes cost is measured by it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controllers.planning.lender import WORTH_KNOWING, ForgoneGain, is_unmeasured
from gcore.ledger.records.job import Move, MoveKind, MoveOutcome, Moves, SplitPart
from placement.moves import MoveProposal, switch_costs

BEFORE, AFTER = (
    SplitPart(mode="coexisting", rollout=6, reward=1, train=1),
    SplitPart(mode="coexisting", rollout=4, reward=3, train=1),
)


def loan(gain_s: float, **more: object) -> MoveProposal:
    move = Move(
        generation=2, step=1, kind=MoveKind.LEND, before=BEFORE, after=AFTER, reason="they had much", gain_s=gain_s
    )
    return MoveProposal(move.model_copy(update=more), None)


def test_what_a_guess_forbids_is_done_once_it_has_cost_as_much_as_the_guess() -> None:
    forgone = ForgoneGain()
    assert forgone.weighed(loan(3.0), 1, 10.0) is None
    assert forgone.weighed(loan(4.0), 1, 10.0) is None, "of a step the best counts, and not each look at it"
    assert forgone.weighed(None, 2, 10.0) is None
    assert forgone.weighed(loan(4.0), 3, 10.0) is None
    made = forgone.weighed(loan(2.0), 4, 10.0)
    assert made is not None
    assert made.move.cost_s == 10.0
    assert made.move.reason == f"they had much; {WORTH_KNOWING}"


def test_what_a_move_took_counts_where_nodes_tell_a_guess_that_is_higher() -> None:
    """A node whose controller was started again has seen no engine wake: it guessed for as long as nothing was lent."""
    begun = Moves().plus(loan(0.0, kind=MoveKind.BEGIN, outcome=MoveOutcome(took_s=0.1)).move)
    assert switch_costs(begun, None, 30.0).move_s == 30.0, "of none is it known what it took"
    moved = begun.plus(loan(1.0, outcome=MoveOutcome(took_s=0.9)).move)
    assert switch_costs(moved, None, 30.0).move_s == 0.9
    assert switch_costs(moved, None, 0.3).move_s == 0.3


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 50)), max_size=30), st.floats(0.1, 100))
def test_nothing_is_lent_before_as_much_was_given_away(looks: list[tuple[int, float]], guess_s: float) -> None:
    forgone, best = ForgoneGain(), {}
    for step, gain in looks:
        best[step] = max(best.get(step, 0.0), gain)
        made = forgone.weighed(loan(gain), step, guess_s)
        assert (made is not None) == (sum(best.values()) >= guess_s)


def test_what_a_change_costs_is_a_guess_until_it_was_measured_how_an_engine_changed_over() -> None:
    begun, took = Moves().plus(loan(0.0, kind=MoveKind.BEGIN).move), MoveOutcome(took_s=0.9)
    assert is_unmeasured(Moves(), {})
    assert is_unmeasured(begun, {1: 0.0})
    assert is_unmeasured(begun.plus(loan(1.0, state="would").move), {2: 0.9})
    assert is_unmeasured(begun.plus(loan(1.0, kind=MoveKind.WORLD, outcome=took).move), {}), "a world is another thing"
    for kind in (MoveKind.SPLIT, MoveKind.LEND, MoveKind.RETURN):
        made = begun.plus(loan(1.0, kind=kind).move)
        assert is_unmeasured(made, {}), "who measured it was killed before it was told: nothing else would ever be lent"
        assert not is_unmeasured(made, {2: 0.9}), "it is about to be told"
        assert not is_unmeasured(begun.plus(loan(1.0, kind=kind, outcome=took).move), {})

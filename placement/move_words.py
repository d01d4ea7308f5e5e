"""A move in words, for people: what was done and why, what was expected of it, what came of it. Pure; what a move is stands in
`placement.moves`, and who shows it where is not known here.
"""

from __future__ import annotations

from gcore.ledger.placing import Move, MoveKind, MoveOutcome
from placement.moves import BETWEEN, WITHIN, split_from
from placement.plan import counted
from placement.split import Split

OTHER_WORK = 0.1
"""By how much the work of steps differs before a word is lost about it, as a share of what it was."""


def in_words(move: Move) -> str:
    """What was done, and why: one sentence that a person can follow."""
    before, after = split_from(move.before), split_from(move.after)
    match move.kind:
        case MoveKind.BEGIN:
            done, rest = ("begin", "began", "begun"), f"with {after}"
        case MoveKind.LEND:
            giver = "the judges" if _gains(before, after) == "rollout" else "rollout"
            rest = f"{counted(abs(after.reward - before.reward), 'slot')} from {giver} to {_gains(before, after)}"
            done = ("lend", "lent", "lent")
        case MoveKind.RETURN:
            done = ("give", "gave", "given")
            rest = f"{counted(abs(after.rollout - before.rollout), 'slot')} back to {_gains(before, after)}"
        case MoveKind.WORLD:
            done = ("form", "formed", "formed")
            rest = f"a train world of {counted(after.train, 'rank')} in place of {before.train} ({before} -> {after})"
        case MoveKind.MEND:  # nobody wished for it: it is never told before it is done
            became = (
                f"{before} became {after}" if before != after else f"what they had was placed anew, {after} as before"
            )
            return _because(f"nodes or workers came or went, and {became}", move)
        case _:
            done, rest = ("go", "went", "gone"), f"from {before} to {after}"
    return _because(_in_its_state(move, done, rest), move)


def _in_its_state(move: Move, done: tuple[str, str, str], rest: str) -> str:
    """`done`: the verb as it is, was, and has been."""
    now, was, been = done
    match move.state:
        case "would":
            return f"would have {been} {rest}"
        case "wanted":
            return f"wants to {now} {rest}"
        case "lapsed":
            return f"wanted to {now} {rest}"
        case _:
            return f"{was} {rest}"


def _because(what: str, move: Move) -> str:
    said = f"{what}, because {move.reason}" if move.reason else what
    return said + "; it was not formed before the next step" * (move.state == "lapsed")


def numbers_in_words(move: Move) -> str:
    """What was expected of it."""
    said = []
    if move.kind is MoveKind.BEGIN and move.expected_s is not None:
        said.append(f"a step was to take {move.expected_s:.3g} s")
    elif move.before_s is not None and move.expected_s is not None and move.kind in BETWEEN:
        said.append(f"a step was to take {move.expected_s:.1f} s instead of {move.before_s:.1f} s")
    elif move.gain_s is not None and move.gain_s > 0:
        said.append(f"it was to gain {move.gain_s:.1f} s")
    if move.cost_s is not None and move.cost_s > 0:
        said.append(f"the change was to cost {move.cost_s:.1f} s once")
    return ", and ".join(said)


def outcome_in_words(move: Move) -> str:
    """What came of it."""
    outcome = move.outcome
    if move.state != "done":
        return ""
    if outcome is None:
        return "nothing is known of what came of it"
    said = [f"it took {outcome.took_s:.1f} s"] if outcome.took_s is not None else []
    if outcome.step_s is not None and move.kind not in WITHIN:
        held = f", before it {outcome.before_s:.1f} s" if outcome.before_s is not None else ""
        steps = "step after it took" if outcome.steps == 1 else f"{outcome.steps} steps after it took"
        each = "" if outcome.steps == 1 else " each"
        said.append(f"the {steps} {outcome.step_s:.1f} s{each}{held}{_other_work(outcome)}")
    elif outcome.step_s is not None:
        said.append(f"the step it was in took {outcome.step_s:.1f} s")
    return "; ".join(said) or "nothing is known of what came of it"


def _other_work(outcome: MoveOutcome) -> str:
    """What the steps after it had to do, where it was more than those before it had, or less: else the move would be given the credit of
    it, or the blame."""
    said = []
    if _differ(outcome.tokens, outcome.before_tokens):
        said.append(f"responses of {outcome.tokens:.0f} tokens instead of {outcome.before_tokens:.0f}")
    if _differ(outcome.question_s, outcome.before_question_s):
        said.append(
            f"{outcome.question_s:.2g} s of a judge for each question instead of {outcome.before_question_s:.2g} s"
        )
    return ", with " + " and ".join(said) if said else ""


def _differ(after: float | None, before: float | None) -> bool:
    """By so much that it is worth a word."""
    return after is not None and before is not None and abs(after - before) > OTHER_WORK * before


def _gains(before: Split, after: Split) -> str:
    return "rollout" if after.rollout > before.rollout else "the judges"

"""The prepared examples, by the names that `gcore prepare` knows them by.

Each makes a folder, or finds it there, and says in half a sentence what there is in it now. Raises DataError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from gcore.prepare import arithmetic, arithmetic_judge, calculator


def _arithmetic(to: Path, seed: int) -> str:
    made = arithmetic.prepare(to, seed=seed)
    return f"{made.greedy_accuracy:.1%} of held-out sums right before RL"


def _arithmetic_judge(to: Path, seed: int) -> str:
    made = arithmetic_judge.prepare(to, seed=seed)
    return f"{made.judge_accuracy:.1%} of verdicts right, {made.judge_false_yes:.1%} of wrong answers called right"


def _calculator(to: Path, seed: int) -> str:
    made = calculator.prepare(to, seed=seed)
    return f"{made.calls:.1%} of responses ask the calculator before RL"


EXAMPLES: Mapping[str, Callable[[Path, int], str]] = {
    "arithmetic": _arithmetic,
    "arithmetic-judge": _arithmetic_judge,
    "calculator": _calculator,
}

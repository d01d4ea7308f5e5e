"""`python -m gcore.quickstart EXAMPLE --to FOLDER`: prepare an example by name, without the rest of the command line.

Each function in `EXAMPLES` prepares a folder, or finds it prepared, and returns a phrase about its contents. Raises
DataError.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from gcore.errors import GcoreError
from gcore.quickstart import arithmetic, calculator, counting, pictures, pictures_judge, zoom


def _arithmetic(to: Path, seed: int) -> str:
    made = arithmetic.prepare_arithmetic(to, seed=seed).manifest
    return f"{made.greedy_accuracy:.1%} of held-out sums right before RL"


def _arithmetic_judge(to: Path, seed: int) -> str:
    made = arithmetic.prepare_arithmetic_judge(to, seed=seed).manifest
    return _verdicts(made.judge_accuracy, made.judge_false_yes)


def _arithmetic_judge_adapter(to: Path, seed: int) -> str:
    made = arithmetic.prepare_judge_adapter(to, seed=seed).manifest
    right = f"{made.greedy_accuracy:.1%} of held-out sums right before RL"
    return f"{right}; {_verdicts(made.judge_accuracy, made.judge_false_yes)}"


def _verdicts(accuracy: float, false_yes: float) -> str:
    return f"{accuracy:.1%} of verdicts right, {false_yes:.1%} of wrong answers called right"


def _calculator(to: Path, seed: int) -> str:
    made = calculator.prepare_calculator(to, seed=seed).manifest
    return f"{made.calls:.1%} of responses call the calculator before RL"


def _counting(to: Path, seed: int) -> str:
    made = counting.prepare_counting(to, seed=seed).manifest
    return f"{made.greedy_accuracy:.1%} of held-out pictures counted right before RL, {made.best_constant:.1%} by the best constant answer"


def _counting_judge(to: Path, seed: int) -> str:
    made = counting.prepare_counting_judge(to, seed=seed).manifest
    return _verdicts(made.judge_accuracy, made.judge_false_yes)


def _pictures(to: Path, seed: int) -> str:
    return _shares(pictures.prepare_pictures(to, seed=seed).manifest)


def _pictures_ddim(to: Path, seed: int) -> str:
    return _shares(pictures.prepare_pictures(to, "pictures-ddim", seed=seed).manifest)


def _shares(made: pictures.PicturesManifest) -> str:
    return (
        f"{made.right_share:.1%} of pictures right before RL, {made.colour_share:.1%} with the right colour, "
        f"{made.place_share:.1%} with the right place"
    )


def _pictures_judge(to: Path, seed: int) -> str:
    made = pictures_judge.prepare_pictures_judge(to, seed=seed).manifest
    return f"{made.judge_accuracy:.1%} of verdicts right, {made.judge_false_yes:.1%} of wrong pictures called right"


def _zoom(to: Path, seed: int) -> str:
    made = zoom.prepare_zoom(to, seed=seed).manifest
    return f"{made.greedy_accuracy:.1%} of held-out pictures counted right before RL, {made.calls:.1%} of responses call the tool"


EXAMPLES: Mapping[str, Callable[[Path, int], str]] = {
    "arithmetic": _arithmetic,
    "arithmetic-judge": _arithmetic_judge,
    "arithmetic-judge-adapter": _arithmetic_judge_adapter,
    "calculator": _calculator,
    "counting": _counting,
    "counting-judge": _counting_judge,
    "pictures": _pictures,
    "pictures-ddim": _pictures_ddim,
    "pictures-judge": _pictures_judge,
    "zoom": _zoom,
}


def main(argv: list[str] | None = None) -> int:
    """Prepare the example that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m gcore.quickstart", description="Make an example's data and model.")
    parser.add_argument("example", choices=list(EXAMPLES))
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="folder to create")
    parser.add_argument("--seed", type=int, default=0, help="seed of every random choice (default: 0)")
    chosen = parser.parse_args(argv)
    try:
        there = EXAMPLES[chosen.example](chosen.to, chosen.seed)
    except GcoreError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"{chosen.to}: {there}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

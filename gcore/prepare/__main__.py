"""`python -m gcore.prepare arithmetic --to FOLDER`: prepares an example, without the rest of the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gcore.errors import GcoreError
from gcore.prepare.arithmetic import prepare


def main(argv: list[str] | None = None) -> int:
    """Prepare what the arguments name; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m gcore.prepare", description="Make an example's data and model.")
    parser.add_argument("example", choices=["arithmetic"])
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="folder to make")
    parser.add_argument("--seed", type=int, default=0, help="every random choice follows from it (default: 0)")
    chosen = parser.parse_args(argv)
    try:
        made = prepare(chosen.to, seed=chosen.seed)
    except GcoreError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"{made.folder}: {made.greedy_accuracy:.1%} of held-out sums right before RL\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

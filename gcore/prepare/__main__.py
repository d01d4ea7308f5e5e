"""`python -m gcore.prepare EXAMPLE --to FOLDER`: prepares an example, without the rest of the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gcore.errors import GcoreError
from gcore.prepare.examples import EXAMPLES


def main(argv: list[str] | None = None) -> int:
    """Prepare what the arguments name; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m gcore.prepare", description="Make an example's data and model.")
    parser.add_argument("example", choices=list(EXAMPLES))
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="folder to make")
    parser.add_argument("--seed", type=int, default=0, help="every random choice follows from it (default: 0)")
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

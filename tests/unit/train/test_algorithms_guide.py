"""The program in docs/use/algorithms.md prints the output that the page shows."""

from __future__ import annotations

import subprocess
import sys

from documents import ROOT, blocks

GUIDE = ROOT / "docs" / "use" / "algorithms.md"


def test_the_program_of_the_guide_prints_what_the_guide_says() -> None:
    (program,) = blocks(GUIDE, "python")
    (printed,) = blocks(GUIDE, "text")
    ended = subprocess.run([sys.executable, "-c", program.text], capture_output=True, text=True, check=True)
    assert ended.stdout == printed.text

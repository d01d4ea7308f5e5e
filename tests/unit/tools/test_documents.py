"""What the documents show works: the reward of the guide, completion in a shell, how printed lines are compared."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT, blocks, mismatch
from picture_files import encoded, picture
from PIL import Image

from gcore.reward import Response


def test_the_reward_of_the_guide_passes_the_test_of_the_guide(tmp_path: Path) -> None:
    code, _pictures, _generated, _batch, test = (
        block.text for block in blocks(ROOT / "docs" / "use" / "rewards.md", "python")
    )
    (toml,) = (block.text for block in blocks(ROOT / "docs" / "use" / "rewards.md", "toml"))
    name, value = re.findall(r'^(\w+) = "([\w.:]+)"$', toml, re.M)[0]
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "reward.py").write_text(code)
    (tmp_path / "test_reward.py").write_text(test)
    info = tmp_path / "my_package-0.1.dist-info"  # as pip would leave it
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[gcore.rewards]\n{name} = {value}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "6 passed" in ended.stdout


def test_the_reward_of_the_guide_that_opens_pictures_measures_one(tmp_path: Path) -> None:
    _, code, *_ = (block.text for block in blocks(ROOT / "docs" / "use" / "rewards.md", "python"))
    (tmp_path / "a.png").write_bytes(encoded(picture(48, 8)))
    made: dict[str, Any] = {}
    exec(code, made)
    files = [(str(tmp_path / "a.png"), "")]
    assert [made["score"](Response(text, files=files), {}) for text in ("48", "8")] == [1.0, 0.0]


def test_the_reward_of_the_guide_for_generated_pictures_measures_red(tmp_path: Path) -> None:
    code = [block.text for block in blocks(ROOT / "docs" / "use" / "rewards.md", "python")][2]
    Image.new("RGB", (4, 4), (51, 200, 0)).save(tmp_path / "a.png")
    made: dict[str, Any] = {}
    exec(code, made)
    assert made["red"](Response("", picture_file=(str(tmp_path / "a.png"), "")), {}) == 0.2


def test_printed_lines_are_compared_in_order_and_dots_match_anything() -> None:
    assert mismatch(("one", "...", "th...e"), "one\ntwo\nthree\nfour") is None
    assert mismatch((), "anything") is None
    assert mismatch(("two",), "one\ntwo") == "two"
    assert mismatch(("...", "five"), "one\ntwo") == "five"
    assert mismatch(("one", "three"), "one\ntwo\nthree") == "three"


@pytest.mark.parametrize(("words", "completed"), [("gcore ex", "export"), ("gcore run --pl", "--plain")])
def test_the_shell_completes_verbs_and_options(words: str, completed: str) -> None:
    asked = {"_GCORE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    program = "import sys; from controllers.cli.main import app; sys.argv = ['gcore']; app(prog_name='gcore')"
    ended = subprocess.run([sys.executable, "-c", program], env=os.environ | asked, capture_output=True, text=True)
    assert ended.stdout.split() == [completed]


def test_completion_can_be_installed(tmp_path: Path) -> None:
    asked = {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    program = "from controllers.cli.main import app; app(['--install-completion', 'bash'], prog_name='gcore')"
    ended = subprocess.run([sys.executable, "-c", program], env=os.environ | asked, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "_GCORE_COMPLETE" in (tmp_path / ".bash_completions" / "gcore.sh").read_text()

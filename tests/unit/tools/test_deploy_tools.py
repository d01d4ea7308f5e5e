"""`python -m deploy.tools` writes outdated files; with --check it only lists them."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.tools.files import DASHBOARDS, PAGE, main
from tools.problem import ROOT


def test_check_lists_outdated_files_and_writes_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "metrics"], tmp_path) == 1
    assert capsys.readouterr().out.startswith(f"{PAGE}: out of date")
    assert list(tmp_path.iterdir()) == []


def test_generated_files_match_the_committed_ones(tmp_path: Path) -> None:
    assert main([], tmp_path) == 0
    assert main(["--check"], tmp_path) == 0
    assert (tmp_path / PAGE).read_bytes() == (ROOT / PAGE).read_bytes()
    made = {file.name: file.read_bytes() for file in (tmp_path / DASHBOARDS).iterdir()}
    assert made == {file.name: file.read_bytes() for file in (ROOT / DASHBOARDS).glob("*.json")}


def test_an_unknown_kind_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["rules"], tmp_path)
    assert "unknown kind rules" in capsys.readouterr().err

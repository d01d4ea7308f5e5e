"""Errors of the machine or of a path are printed as a sentence by every command; other errors of the system keep their traceback."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from controllers.cli import main as program


@pytest.fixture(autouse=True)
def signals_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "accept_signals", lambda: None)
    monkeypatch.setattr(program, "interrupt_on_sigterm", lambda: None)


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gcore", *words])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    "words",
    [("init", "{long}"), ("down", "--home", "{long}"), ("certs", "show", "{long}"), ("certs", "init", "--authority", "{long}")],
    ids=lambda words: " ".join(words[:-1]),
)  # fmt: skip
def test_a_path_that_is_too_long_is_a_wrong_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    long = tmp_path / ("a" * 300)
    assert run(monkeypatch, *(word.format(long=long) for word in words)) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "File name too long" in said
    assert said.endswith("Name another path, or change the rights of its folders")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "code", "fix"),
    [(errno.ENOSPC, 1, "Make room"), (errno.EACCES, 2, "Name another path"), (errno.EMFILE, 1, "Raise the limit")],
)
def test_an_error_of_the_machine_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, code: int, fix: str
) -> None:
    def fail() -> None:
        raise OSError(number, os.strerror(number), "/some/file")

    monkeypatch.setattr(program, "app", fail)
    assert run(monkeypatch) == code
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith(f"gcore: /some/file: the system refused an operation ({os.strerror(number)}). {fix}")


def test_another_error_of_the_system_is_a_bug_and_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(program, "app", fail)
    with pytest.raises(OSError, match="Bad file descriptor"):
        program.main()

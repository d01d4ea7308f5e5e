"""The list of tools that tests need, their installation with apt, and the closing line that names left-out tests."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import system_tools
from system_tools import REQUIRE_ALL, TOOLS, Tool, install, library, machine_etcd, missing, program, tool

ROOT = Path(__file__).parents[3]
PLANTED = "a-planted-tool"


@pytest.fixture(autouse=True)
def _not_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REQUIRE_ALL, raising=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on PATH."""
    path = tmp_path / "bin"
    path.mkdir()
    monkeypatch.setenv("PATH", str(path))
    return path


@pytest.fixture
def planted(folder: Path) -> Tool:
    """A tool that is missing."""
    return Tool(PLANTED, program(PLANTED), "planted-package", "a test")


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def fake_apt(folder: Path, then: str = "") -> Path:
    """An `apt-get` that writes its last words to a file, one call a line. `then`: what it does after that."""
    calls = folder / "calls"
    script(folder / "apt-get", f'for last; do :; done; echo "$last $DEBIAN_FRONTEND" >> {calls}\n{then}')
    return calls


def root(monkeypatch: pytest.MonkeyPatch, uid: int = 0) -> None:
    monkeypatch.setattr(system_tools.os, "geteuid", lambda: uid)


# --- the list


def test_each_tool_is_listed_once_and_some_test_needs_it() -> None:
    names = [one.name for one in TOOLS]
    assert len(names) == len(set(names))
    marks = {
        name
        for file in ROOT.glob("tests/**/test_*.py")
        for names in re.findall(r"mark\.needs\(([^)]*)\)", file.read_text())
        for name in re.findall(r'"([^"]+)"', names)
    }
    assert marks == set(names)


def test_a_program_is_found_on_the_path_alone(folder: Path) -> None:
    assert not program(PLANTED)()
    script(folder / PLANTED, "exit 0")
    assert program(PLANTED)()


def test_a_library_is_found_by_the_linker() -> None:
    assert library("libc.so.6")()
    assert not library("liba-planted-library.so.1")()


def test_the_wheels_etcd_is_not_the_machines(folder: Path) -> None:
    assert machine_etcd() is None
    script(folder / "etcd", "exit 0")
    found = machine_etcd()
    assert found is not None
    assert found.path == folder / "etcd"


def test_a_name_that_is_not_in_the_list_is_an_error() -> None:
    with pytest.raises(ValueError, match=rf"no tool is named '{PLANTED}'; the names are promtool, "):
        tool(PLANTED)


# --- installation


def test_apt_is_not_called_where_nothing_is_missing(
    folder: Path, planted: Tool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root(monkeypatch)
    calls = fake_apt(folder)
    script(folder / PLANTED, "exit 0")
    assert install([planted]) == 0
    assert not calls.exists()
    assert capsys.readouterr().out == ""


def test_root_installs_what_is_missing_and_nothing_else(
    folder: Path, planted: Tool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root(monkeypatch)
    monkeypatch.setenv(REQUIRE_ALL, "1")
    script(folder / "another", "exit 0")
    calls = fake_apt(folder, f'[ "$last" = update ] || cp {folder}/another {folder}/{PLANTED}')
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/bin")
    assert install([Tool("another", program("another"), "another-package", "a test"), planted]) == 0
    assert calls.read_text().splitlines() == ["update noninteractive", "planted-package noninteractive"]
    assert missing([planted]) == []
    assert "apt-get install planted-package" in capsys.readouterr().out


def test_a_package_that_apt_does_not_have_keeps_no_other_away(
    folder: Path, planted: Tool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    root(monkeypatch)
    calls = fake_apt(folder, 'echo "no package $last"; [ "$last" = planted-package ]')
    other = Tool("another", program("another"), "another-package", "a test")
    assert install([other, planted]) == 0
    assert [line.split()[0] for line in calls.read_text().splitlines()] == [
        *("update", "another-package", "planted-package")
    ]
    said = capfd.readouterr()
    assert "could not install another-package" in said.out
    assert "could not install planted-package" not in said.out
    assert "no package another-package" in said.err


@pytest.mark.parametrize("uid", [pytest.param(0, id="root without apt"), pytest.param(1000, id="another user")])
def test_where_nothing_can_be_installed_tests_are_left_out_unless_all_are_required(
    folder: Path, planted: Tool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], uid: int
) -> None:
    root(monkeypatch, uid)
    calls = fake_apt(folder) if uid else None
    assert install([planted]) == 0
    said = capsys.readouterr()
    assert "nothing is installed" in said.out
    assert said.err == ""
    monkeypatch.setenv(REQUIRE_ALL, "1")
    assert install([planted]) == 1
    assert f"{PLANTED} is missing: apt-get install planted-package" in capsys.readouterr().err
    assert calls is None or not calls.exists()


# --- the closing line


def test_nothing_is_said_where_no_test_was_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "left-out").touch()
    assert system_tools.main(["left-out", str(tmp_path / "left-out")]) == 0
    assert capsys.readouterr().out == ""


def test_one_line_counts_the_tests_by_their_missing_tools_and_names_every_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "left-out"
    system_tools.record(file, [["promtool"], ["etcd", "chromium"]])
    system_tools.record(file, [["promtool"]])
    assert system_tools.main(["left-out", str(file)]) == 0
    assert capsys.readouterr().out == (
        "Left out 3 tests: "
        f"1 needs chromium and etcd ({tool('chromium').needed_for}; {tool('etcd').needed_for}), "
        f"2 need promtool ({tool('promtool').needed_for}). "
        "To run them, as root: apt-get install chromium etcd-server prometheus\n"
    )

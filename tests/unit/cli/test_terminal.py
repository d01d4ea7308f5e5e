"""How the commands write to a terminal: wrapping, tables, and colours by one palette that the web page shares."""

import io
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

import controllers.web
from controllers.cli import terminal
from controllers.cli.output import jobs_table
from controllers.cli.terminal import Pairs, display, list_commands, rows_table, say, terminal_columns, wrap_text
from controllers.cli.view.screens import LiveScreen, PlainScreen, choose_screen
from controllers.cli.view.state import PHASES, JobSnapshot
from gcore.api.v1 import jobs_pb2 as pb
from gcore.testing import FakeClock

PATH = "/srv/runs/" + "a-long-folder/" * 6 + "checkpoints"
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class FakeTerminal(io.StringIO):
    def isatty(self):
        return True


def console(width, **options):
    return Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, **options)


def printed(renderable, width):
    out = console(width)
    display(renderable, out)
    return out.file.getvalue()


WORDS = st.lists(st.text("abcé漢`/-", min_size=1, max_size=30), min_size=1, max_size=20)


@given(WORDS, st.integers(10, 100), st.sampled_from(["", "  "]))
def test_wrapping_keeps_every_word_whole_and_every_line_within_the_width(words, width, indent):
    text = " ".join(words).replace("`", "")
    lines = wrap_text(text, width, indent).split("\n")
    assert " ".join(line.strip() for line in lines).split() == text.split()
    assert all(cell_len(line) <= width or len(line.split()) == 1 for line in lines)
    assert all(line.startswith(indent) for line in lines[1:])


def test_a_command_in_backquotes_and_a_path_are_never_broken():
    command = "`gcore export 24aea1b7193e --to trained`"
    lines = wrap_text(f"gcore: no such file ({PATH}). Use {command}, then try again.", 44, "  ").split("\n")
    assert lines == ["gcore: no such file", f"  ({PATH}).", "  Use", f"  {command},", "  then try again."]


def test_a_list_keeps_its_indent_when_it_wraps():
    assert wrap_text("head\n  one two three", 10, "  ") == "head\n  one two\n    three"


def test_sentences_wrap_on_a_terminal_and_not_in_a_pipe(monkeypatch, capsys):
    sentence = " ".join(["word"] * 60)
    say(sentence)
    assert capsys.readouterr().out == sentence + "\n"
    monkeypatch.setattr(terminal, "terminal_columns", lambda stream: 80)
    say(sentence)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) == 4


def test_the_lines_of_a_long_command_run_when_they_are_copied(monkeypatch, capsys):
    long = "gcore run 'my spec.yaml' " + " ".join(f"--set a.field{number}=1" for number in range(9))
    commands = {"short": "gcore samples u1", "train longer": long}
    list_commands(commands)
    assert capsys.readouterr().out.splitlines() == ["  short          gcore samples u1", f"  train longer   {long}"]
    monkeypatch.setattr(terminal, "terminal_columns", lambda stream: 80)
    list_commands(commands)
    first, purpose, *lines = capsys.readouterr().out.splitlines()
    assert (first, purpose) == ("  short          gcore samples u1", "  train longer")
    assert max(map(len, lines)) <= 80
    assert all(line.endswith(" \\") for line in lines[:-1])
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == shlex.split(long)


def test_the_width_is_that_of_the_terminal_and_of_columns(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert terminal_columns(io.StringIO()) is None
    assert terminal_columns(FakeTerminal()) == 80  # It has no file descriptor to ask.
    monkeypatch.setenv("COLUMNS", "132")
    assert terminal_columns(FakeTerminal()) == 132


def test_a_table_wraps_its_widest_cells_on_words_and_breaks_no_path():
    sentence = "the newest one and the best one by the accuracy on held-out prompts"
    table = rows_table(
        ("STEP", "KEPT", "FOLDER"), [("1", sentence, "/a/b"), ("200", "newest", "/a/c")], right=("STEP",)
    )
    lines = printed(table, 50).splitlines()
    assert max(map(len, lines)) <= 50
    assert set(sentence.split()) | {"/a/b", "/a/c"} <= {word for line in lines for word in line.split()}
    assert lines[1].startswith("   1  the newest")
    wide = printed(rows_table(("STEP", "FOLDER"), [("1", PATH)]), 50).splitlines()
    assert wide == ["STEP", "1", f"    {PATH}"]


def test_a_table_in_a_pipe_has_one_line_for_each_row():
    out = Console(file=io.StringIO(), width=80)
    display(rows_table(("A", "B"), [("x " * 100, "y")]), out)
    assert len(out.file.getvalue().splitlines()) == 2


def test_values_hang_beside_their_names():
    lines = printed(Pairs({"run folder": PATH, "why": "word " * 20}), 50).splitlines()
    assert lines[0] == f"run folder   {PATH}"
    assert all(line.startswith(" " * 13) for line in lines[2:])
    assert max(map(len, lines[1:])) <= 50


@pytest.mark.parametrize("options", [{"no_color": True}, {"environ": {"TERM": "dumb"}}, {"environ": {"NO_COLOR": "1"}}])
def test_there_are_no_colours_with_no_color_and_on_a_dumb_terminal(options):
    environ = {"TERM": "xterm-256color", **options.get("environ", {})}
    out = Console(file=io.StringIO(), force_terminal=True, width=80, _environ=environ, no_color=options.get("no_color"))
    display(jobs_table([JobSnapshot("sums", "u1", "FAILED")]), out)
    for code in COLOUR.findall(out.file.getvalue()):
        assert not [part for part in code[2:-1].split(";") if part.isdecimal() and 30 <= int(part) <= 107]


def test_a_failed_job_is_red_on_a_terminal():
    out = Console(file=io.StringIO(), force_terminal=True, width=80, color_system="standard", _environ={})
    display(jobs_table([JobSnapshot("sums", "u1", "FAILED")]), out)
    assert "\x1b[1;31mFAILED" in out.file.getvalue()


def test_a_dumb_terminal_gets_plain_lines():
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    full = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm"})
    assert isinstance(choose_screen(dumb, FakeClock(), plain=False), PlainScreen)
    assert isinstance(choose_screen(full, FakeClock(), plain=False), LiveScreen)


def test_every_state_and_every_phase_has_a_colour():
    states = {name.removeprefix("JOB_STATE_") for name, number in pb.JobState.items() if number}
    assert states == set(terminal.STATE_COLOURS)
    assert set(PHASES) == set(terminal.PHASE_COLOURS)


def test_the_page_gives_states_and_phases_the_same_meaning():
    page = Path(controllers.web.__file__).with_name("page.html").read_text()
    meanings = {"good": terminal.GOOD, "bad": terminal.BAD, "warn": terminal.ATTENTION, "accent": terminal.ACTIVE}
    shown = {}
    for names, colour in re.findall(r"(?m)^(\.[A-Z][A-Z., ]+) \{ color: var\(--(\w+)\); \}", page):
        shown |= dict.fromkeys(re.findall(r"[A-Z]+", names), meanings[colour])
    assert {state: shown[state] for state in terminal.STATE_COLOURS} == terminal.STATE_COLOURS
    colours = {"rollout": "bright_blue", "switching": "yellow", "train": "green", "syncing": "cyan"}
    (line,) = re.findall(r"const PHASES = (.*);", page)
    phases = {key: colours[fill] for key, fill in re.findall(r'"(\w+)_s", "[^"]+", "f-(\w+)"', line)}
    assert phases == terminal.PHASE_COLOURS

"""How the commands write to a terminal: wrapping, tables, colours, and hints with the program's name as the user called it.

On a terminal, sentences wrap on words at its width (at most `MOST_COLUMNS`) and continue with an indent. A path, an identifier or a
command in backquotes is one word: if it is longer than a line, it is printed whole, so that it can be copied. Tables wrap the cells of
their widest columns in the same way. In a file or a pipe nothing is wrapped: every sentence and every row is one line, for scripts.
-o json and -o yaml do not pass through this module.

Every colour of the commands is named here, by its meaning. rich writes no colours into files and pipes, on dumb terminals, and with NO_COLOR.
The web page uses the same meanings (`STATE_COLOURS`, `PHASE_COLOURS`).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import typer

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.text import Text

GOOD, BAD, ATTENTION, ACTIVE = "green", "bold red", "yellow", "bright_blue"
QUIET, HEADING = "dim", "bold"

STATE_COLOURS = {
    "RUNNING": ACTIVE,
    "SUCCEEDED": GOOD,
    "FAILED": BAD,
    "CANCELLED": ATTENTION,
    "PENDING": ATTENTION,
    "QUEUED": ATTENTION,
    "PAUSED": ATTENTION,
}
CHECK_COLOURS = {"ok": GOOD, "warn": ATTENTION, "fail": BAD}
"""Colours of the results of `gcore doctor`."""

EVENT_STYLES = {"rollback": ATTENTION, "warning": ATTENTION, "fault": ATTENTION, "member": HEADING, "state": HEADING}
PHASE_COLOURS = {"collect": "bright_blue", "exchange": "yellow", "train": "green", "publish": "cyan"}
"""Colours of the phases of a step, by their names in the statistics."""

REWARD_COLOUR, HELD_OUT_COLOUR = "bright_blue", "green"
NODE_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "bright_red", "bright_cyan", "bright_magenta")

MOST_COLUMNS = 100
"""Longest line of prose, because longer ones are hard to read."""

PIPE_COLUMNS = 1000

_WORD = re.compile(r"(?:`[^`\n]*`|\S)+")
_HINT = "`gcore "
_TABLE_GAP, _PAIRS_GAP = 2, 3
_LIST_INDENT = "  "
_BLANK = "\ue000"
"""A private character that stands for a blank inside a quoted word."""

_BELOW = 4
"""Indent of the last column of a table, if it is printed below its row because the row is wider than the terminal."""


def terminal_columns(stream: TextIO) -> int | None:
    """The width of the terminal that `stream` writes to; None if it is a file or a pipe. COLUMNS overrides the width."""
    if not stream.isatty():
        return None
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def wrap_text(text: str, width: int | None, indent: str = "") -> str:
    """Wrap the lines of `text` at `width` terminal columns (None: not at all). A continued line begins with the indent
    of its line and `indent`.

    Text in backquotes is one word. A word that is longer than a line has a line for itself.
    """
    if width is None:
        return text
    return "\n".join("\n".join(_wrapped(line, width, indent)) for line in text.split("\n"))


def _wrapped(line: str, width: int, indent: str) -> list[str]:
    from rich.cells import cell_len

    words = list(_WORD.finditer(line))
    if not words or cell_len(line) <= width:
        return [line]
    first = line[: words[0].start()]
    lines, used, end = [first], cell_len(first), words[0].start()
    for number, word in enumerate(words):
        gap, size = line[end : word.start()], cell_len(word.group())
        if number and used + len(gap) + size > width:
            lines.append(first + indent + word.group())
            used = len(first + indent) + size
        else:
            lines[-1] += gap + word.group()
            used += len(gap) + size
        end = word.end()
    return lines


def list_commands(commands: Mapping[str, str]) -> None:
    """Print a list of commands, each after its purpose. `commands`: command line by purpose. On a terminal a long
    command continues after a backslash, so that a copy of its lines runs."""
    columns = terminal_columns(sys.stdout)
    left = max(map(len, commands), default=0) + _PAIRS_GAP
    for purpose, line in commands.items():
        if columns is None or len(_LIST_INDENT) + left + len(line) <= columns:
            typer.echo(f"{_LIST_INDENT}{purpose:<{left}}{line}")
            continue
        indent = _LIST_INDENT * 2
        words = (shlex.quote(word).replace(" ", _BLANK) for word in shlex.split(line))
        wrapped = wrap_text(indent + " ".join(words), columns - len(" \\"), _LIST_INDENT)
        shown = wrapped.replace("\n", " \\\n").replace(_BLANK, " ")
        typer.echo(f"{_LIST_INDENT}{purpose}\n{shown}")


def say(text: str, *, err: bool = False, indent: str = "") -> None:
    """Print sentences, wrapped on a terminal by at most `MOST_COLUMNS` columns. Commands in backquotes begin with the
    name by which the user called the program. `indent`: of continued lines."""
    columns = terminal_columns(sys.stderr if err else sys.stdout)
    width = None if columns is None else min(columns, MOST_COLUMNS)
    typer.echo(wrap_text(with_program_name(text), width, indent), err=err)


def stdout_console() -> Console:
    """A console for standard output. In a file or a pipe it has `PIPE_COLUMNS` columns, so that rich wraps nothing there."""
    from rich.console import Console

    found = Console()
    return found if found.is_terminal else Console(width=PIPE_COLUMNS)


def display(renderable: RenderableType, console: Console | None = None) -> None:
    """Print tables and styled text on standard output. A row that is wider than the terminal is not cropped."""
    (console or stdout_console()).print(renderable, crop=False, highlight=False)


def _whole(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ignore"
    return text


@dataclass(frozen=True)
class Rows:
    """A table with headings, as a rich renderable."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str | Text, ...], ...]
    right: frozenset[str] = frozenset()
    """Headings of right-aligned columns."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        cells = [[one if isinstance(one, Text) else Text(one) for one in row] for row in self.rows]
        heads = [Text(heading, style=HEADING) for heading in self.headings]
        every = [heads, *cells]
        limit = options.max_width if console.is_terminal else None
        widths = _column_widths([[cell.plain for cell in row] for row in every], limit)
        below = limit is not None and len(widths) > 1 and sum(widths) + _TABLE_GAP * (len(widths) - 1) > limit
        for row in every:
            yield from self._lines(row[:-1] if below else row, widths)
            if below and row is not heads:
                yield _whole(Text.assemble(" " * _BELOW, row[-1]))

    def _lines(self, row: Sequence[Text], widths: Sequence[int]) -> Iterable[Text]:
        from rich.text import Text

        parts = [_wrap_cell(cell, width) for cell, width in zip(row, widths, strict=False)]
        for number in range(max((len(part) for part in parts), default=1)):
            line = Text()
            for heading, part, width in zip(self.headings, parts, widths, strict=False):
                cell = part[number] if number < len(part) else Text()
                blank = " " * max(0, width - cell.cell_len)
                line = line + (Text(blank) + cell if heading in self.right else cell + Text(blank))
                line.append(" " * _TABLE_GAP)
            line.rstrip()
            yield _whole(line)


def _column_widths(rows: Sequence[Sequence[str]], limit: int | None) -> list[int]:
    """The column widths of a table: those of the longest cells, or if the table is wider than `limit`, with the widest
    columns narrowed.

    No column gets narrower than its longest word, so the table may still exceed `limit`.
    """
    from rich.cells import cell_len

    columns = list(zip(*rows, strict=True))
    widths = [max(map(cell_len, column)) for column in columns]
    least = [max(cell_len(word) for cell in column for word in _WORD.findall(cell) or [""]) for column in columns]
    excess = 0 if limit is None else sum(widths) + _TABLE_GAP * (len(widths) - 1) - limit
    while excess > 0:
        open_ = [at for at, width in enumerate(widths) if width > least[at]]
        if not open_:
            break
        widest = max(open_, key=lambda at: widths[at])
        widths[widest] -= 1
        excess -= 1
    return widths


def _wrap_cell(cell: Text, width: int) -> list[Text]:
    """Wrap a table cell into lines of at most `width` columns. A wrapped cell keeps only its base style."""
    from rich.text import Text

    if cell.cell_len <= width:
        return [cell]
    return [Text(line, style=cell.style) for line in wrap_text(cell.plain, width).split("\n")]


def rows_table(headings: Sequence[str], rows: Iterable[Sequence[str | Text]], *, right: Collection[str] = ()) -> Rows:
    """Create a table. `right`: headings of the right-aligned columns. Cells are not parsed as rich markup."""
    return Rows(tuple(headings), tuple(tuple(row) for row in rows), frozenset(right))


@dataclass(frozen=True)
class Pairs:
    """A table of two columns, names and values, as a rich renderable."""

    rows: Mapping[str, str]
    styles: Mapping[str, str] = field(default_factory=dict)
    """rich styles of the values, by name."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.cells import cell_len
        from rich.text import Text

        left = max(map(cell_len, self.rows), default=0) + _PAIRS_GAP
        width = min(options.max_width, MOST_COLUMNS) - left if console.is_terminal else None
        for name, value in self.rows.items():
            first, *others = wrap_text(value, width).split("\n")
            style = self.styles.get(name, "")
            yield _whole(Text.assemble((name, HEADING), " " * (left - cell_len(name)), (first, style)))
            for line in others:
                yield _whole(Text.assemble(" " * left, (line, style)))


def program_name() -> str:
    """`gcore` if the shell finds this program by that name, else its path as it was called."""
    called = Path(sys.argv[0])
    found = shutil.which("gcore")
    # Under another name, a test or another program is running.
    if called.name != "gcore" or (found is not None and _same(Path(found), called)):
        return "gcore"
    relative = os.path.relpath(called)
    return relative if not relative.startswith("..") else str(called)


def with_program_name(text: str) -> str:
    """Replace `gcore` by `program_name()` in the commands that `text` has in backquotes."""
    return text.replace(_HINT, f"`{program_name()} ")


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False

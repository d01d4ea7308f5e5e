"""What `gcore placement` prints of reasons that anybody's policy wrote: as it was written, and never as markup or control characters."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from controllers.cli.placement_words import account, history_table
from gcore.ledger.placing import Move, MoveKind, SplitPart

SPLIT = SplitPart(mode="coexisting", rollout=2, reward=1, train=1)


def move(reason: str, time: float = 0.0) -> Move:
    return Move(generation=1, step=1, kind=MoveKind.LEND, before=SPLIT, after=SPLIT, reason=reason, time=time)


@pytest.mark.parametrize("reason", ["a [/red] end", "[red] alert", "[rollout 80%] is idle", "[/]", "[link=x]y"])
def test_brackets_in_a_reason_are_shown_and_are_no_markup(reason: str) -> None:
    screen = Console(file=StringIO(), width=300)
    screen.print(history_table([move(reason)]))
    assert isinstance(screen.file, StringIO)
    assert reason in screen.file.getvalue()


def test_control_characters_of_a_reason_do_not_reach_the_terminal() -> None:
    screen = Console(file=StringIO(), width=300, force_terminal=True)
    reason = "because\n\x1b[31mred\x07 \u202e"
    screen.print(history_table([move(reason)]))
    assert isinstance(screen.file, StringIO)
    for told in (screen.file.getvalue(), "\n".join(account("j", None, [move(reason)], 0))):
        assert r"because\n\x1b[31mred\x07 \u202e" in told
        assert "\x1b[31m" not in told


@pytest.mark.parametrize("time", [1e18, -1e18, float("nan"), float("inf")])
def test_a_time_that_is_none_is_left_out(time: float) -> None:
    assert account("j", None, [move("why", time)], 0)[2].startswith("after step 1: ")

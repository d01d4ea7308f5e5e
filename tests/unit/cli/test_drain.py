"""The output of `gcore drain` until a node is drained."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from typer.testing import CliRunner

from controllers.cli.commands import cluster
from controllers.cli.main import app
from gcore.api.v1 import jobs_pb2 as pb


def node(*users: str, draining: bool = True, runs: bool = True) -> pb.Node:
    uses = [pb.SlotUse(slot=f"cpu:{n}", job_uid=uid) for n, uid in enumerate(users)]
    return pb.Node(name="gpu-7", draining=draining, uses=uses, incarnation="gpu-7.a" if runs else "")


class DrainingClient:
    """Answers with the first node, then lists the others in turn; None: the node is not registered."""

    def __init__(self, first: pb.Node, *later: pb.Node | None) -> None:
        self.first, self.later = first, iter(later)

    async def drain_node(self, name: str, *, undo: bool) -> pb.Node:
        return self.first

    async def list_nodes(self) -> pb.ListNodesReply:
        found = next(self.later)
        return pb.ListNodesReply(nodes=[pb.Node(name="other", draining=True), *([found] if found else [])])


def drained(monkeypatch: pytest.MonkeyPatch, nodes: Iterable[pb.Node | None], *words: str) -> Any:
    client = DrainingClient(*nodes)  # type: ignore[arg-type]

    def call(what: Any, *_: Any) -> Any:
        return asyncio.run(what(client))

    monkeypatch.setattr(cluster, "call_cluster", call)
    monkeypatch.setattr(cluster, "LOOK_S", 0.0)
    return CliRunner().invoke(app, ["drain", "gpu-7", *words])


def test_a_node_is_draining_until_no_job_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = drained(monkeypatch, [node("a", "a", "b"), node("a", "a", "b"), node("b"), node()])
    assert shown.exit_code == 0
    assert shown.stdout.splitlines() == [
        "Node gpu-7 is draining; it is still used by a 2, b 1.",
        "Node gpu-7 is draining; it is still used by b 1.",
        "Node gpu-7 is drained; no job uses it.",
    ]


def test_an_unused_node_is_drained_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drained(monkeypatch, [node()]).stdout == "Node gpu-7 is drained; no job uses it.\n"


@pytest.mark.parametrize("nodes", [[node(runs=False)], [node("a"), None]], ids=["before", "meanwhile"])
def test_a_node_whose_daemon_has_ended_is_drained(nodes: list[pb.Node | None], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = drained(monkeypatch, nodes)
    assert shown.exit_code == 0
    assert shown.stdout.splitlines()[-1] == "Node gpu-7 is drained; its daemon does not run."


@pytest.mark.parametrize("words", [["--no-wait"], ["-o", "json"]])
def test_nothing_is_waited_for_if_the_user_or_a_program_does_not_want_to(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = drained(monkeypatch, [node("a")], *words)
    assert shown.exit_code == 0
    assert "draining" in shown.stdout


def test_undone_draining_ends_the_wait_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = drained(monkeypatch, [node("a"), node("a", draining=False)])
    assert shown.exit_code != 0
    assert "another user undid it" in str(shown.exception) + shown.output


def test_undo_says_that_the_node_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drained(monkeypatch, [node(draining=False)], "--undo").stdout == "Node gpu-7 is available again.\n"


def test_the_help_names_both_states() -> None:
    shown = CliRunner().invoke(app, ["drain", "--help"]).stdout
    assert "draining" in shown
    assert "drained" in shown

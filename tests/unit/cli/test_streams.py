"""`gcore logs` says so when there are no lines, and where to look."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from controllers.cli.commands import streams as stream_verbs
from controllers.cli.main import app
from gcore.api.v1 import jobs_pb2 as pb


def logs(monkeypatch: pytest.MonkeyPatch, lines: list[pb.LogLine], *args: str) -> tuple[int, str, str]:
    async def stream_logs(request: pb.StreamLogsRequest) -> AsyncGenerator[pb.LogLine, None]:
        for line in lines:
            yield line

    def call(what: Any, address: str | None, home: Any) -> Any:
        return asyncio.run(what(SimpleNamespace(stream_logs=stream_logs)))

    monkeypatch.setattr(stream_verbs, "call_cluster", call)
    done = CliRunner().invoke(app, ["logs", "sums", *args])
    return done.exit_code, done.stdout, done.stderr


def test_empty_log_prints_where_lines_are(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = logs(monkeypatch, [], "--role", "train")
    assert (code, out) == (0, "")
    assert "gcore logs sums --previous" in err
    code, out, err = logs(monkeypatch, [], "--previous", "-o", "json")
    assert (code, out) == (0, "")
    assert "No exited worker" in err


def test_non_empty_log_prints_no_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    line = pb.LogLine(instance="train-n-1", node="n", role="train", text="serves")
    assert logs(monkeypatch, [line]) == (0, "train-n-1  serves\n", "")

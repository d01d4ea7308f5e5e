"""The command line's verbs against a scripted controller: requests, output, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from api_in_thread import served
from click.testing import Result
from fake_jobs import Script
from played_script import SPEC, played_script
from typer.testing import CliRunner

from controllers.cli.commands.streams import parse_time
from controllers.cli.main import app, main
from gcore.api.v1 import jobs_pb2 as pb
from gcore.errors import GcoreError, UsageError
from gcore.observability.events import JobEvent


@pytest.fixture
def script() -> Script:
    """A job at its second step, with all that verbs tell of."""
    return played_script()


@pytest.fixture
def address(script: Script) -> Iterator[str]:
    """Where it is served."""
    with served(script) as (server,):
        yield server.address


def run(address: str, *words: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, [*words, "--address", address], input=stdin)


def tree(address: str, *words: str, output: str = "json") -> Any:
    result = run(address, *words, "-o", output)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout) if output == "json" else yaml.safe_load(result.stdout)


TREES = {
    "list": (["list"], lambda t: t[0]["uid"] == "u1"),
    "describe": (
        ["describe", "sums"],
        lambda t: (t["namespace"], t["priority"], len(t["events"])) == ("research", 5, 5),
    ),
    "nodes": (["nodes", "--workers"], lambda t: (t["nodes"][0]["uses"], len(t["workers"])) == ({"cuda:0": "u1"}, 1)),
    "shards": (["shards", "sums"], lambda t: (t[0]["ahead"], t[1]["node"]) == (2, "")),
    "usage": (["usage"], lambda t: t[0] == {"namespace": "research", "slot_seconds": 7200.0, "busy_seconds": 3600.0}),
    "drain": (["drain", "node-0", "--no-wait"], lambda t: t["draining"] is True),
    "pause": (["pause", "sums"], lambda t: t["state"] == "PAUSED"),
    "resume": (["resume", "sums"], lambda t: t["state"] == "RUNNING"),
    "cancel": (["cancel", "sums"], lambda t: t["state"] == "CANCELLED"),
    "update": (["update", "sums", "--priority", "7"], lambda t: t["priority"] == 7),
    "eval": (["eval", "sums"], lambda t: t == {"step": 3, "lineage": 0}),
    "audit": (["audit", "sums"], lambda t: t["clean"] is True),
}


@pytest.mark.parametrize("output", ["json", "yaml"])
@pytest.mark.parametrize(("words", "expected"), TREES.values(), ids=TREES)
def test_every_answer_is_there_for_programs(address: str, words: list[str], expected: Any, output: str) -> None:
    found = tree(address, *words, output=output)
    assert expected(found), found


@pytest.mark.parametrize("words", [words for words, _ in TREES.values()], ids=TREES)
def test_every_answer_is_there_for_people_without_a_control_character(address: str, words: list[str]) -> None:
    result = run(address, *words)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()
    assert not any(ord(c) < 32 and c != "\n" for c in result.stdout)


def test_a_job_is_described_with_its_slots_what_it_waits_for_and_its_last_events(address: str) -> None:
    shown = run(address, "describe", "sums", "--events", "2").stdout
    assert "research/sums (u1), owner ada" in shown
    assert "2 (min 1, max unlimited), priority 5" in shown
    assert "node-0: the batch of step 3, for" in shown
    assert "event 8" in shown
    assert "event 6" not in shown


def test_the_list_is_filtered_by_the_cluster(address: str, script: Script) -> None:
    run(
        address,
        "list",
        "--state",
        "running",
        "--state",
        "QUEUED",
        "--namespace",
        "research",
        "--name",
        "su",
        "--limit",
        "7",
    )
    asked = script.asked[-1]
    assert list(asked.states) == [pb.JOB_STATE_RUNNING, pb.JOB_STATE_QUEUED]
    assert (asked.namespace, asked.name_prefix, asked.page_size) == ("research", "su", 7)


def test_cancelling_with_drain_says_so(address: str, script: Script) -> None:
    run(address, "cancel", "sums", "--drain")
    assert script.asked[-1].mode == pb.CANCEL_MODE_DRAIN
    run(address, "cancel", "sums")
    assert script.asked[-1].mode == pb.CANCEL_MODE_NOW


def test_only_what_is_given_is_changed(address: str, script: Script) -> None:
    run(address, "update", "sums", "--slots-min", "2", "--slots-max", "0")
    assert sorted(script.asked[-1].update_mask.paths) == ["slots_max", "slots_min"]


def test_events_are_told_once_with_their_numbers(address: str) -> None:
    lines = run(address, "events", "sums", "--tail", "3").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["6", "7", "8"]
    found = run(address, "events", "sums", "--after", "4", "--kind", "step", "-o", "json").stdout.splitlines()
    assert [json.loads(line)["sequence"] for line in found] == [5, 7]
    documents = list(yaml.safe_load_all(run(address, "events", "sums", "--after", "6", "-o", "yaml").stdout))
    assert [one["data"] for one in documents] == [{"n": 7}, {"n": 8}]


def test_logs_say_whose_each_line_is_and_write_nothing_into_a_terminal(address: str, script: Script) -> None:
    first, second = run(address, "logs", "sums", "--role", "train", "--rank", "0", "--tail", "5").stdout.splitlines()
    assert first.startswith("rank 0 on n  one ")
    assert "\x1b" not in first
    assert second == "rollout-n-1  two"
    asked = script.asked[-1]
    assert (asked.role, asked.rank, asked.tail, asked.HasField("rank")) == ("train", 0, 5, True)
    found = [json.loads(line) for line in run(address, "logs", "sums", "-o", "json").stdout.splitlines()]
    assert [one.get("rank") for one in found] == [0, None]
    assert found[0]["text"] == "one \x1b[31mred"
    assert len(list(yaml.safe_load_all(run(address, "logs", "sums", "-o", "yaml").stdout))) == 2


def test_usage_is_told_in_hours_with_a_sum(address: str, script: Script) -> None:
    shown = run(address, "usage", "--by", "namespace", "--since", "2026-11-01", "--until", "2026-11-30").stdout
    assert "research" in shown
    assert "3.00" in shown.splitlines()[-1]
    assert script.asked[-1].since == 1793491200.0


def test_a_job_that_has_ended_is_begun_once_more_and_only_once_and_ends_no_other(address: str, script: Script) -> None:
    result = run(address, "retry", "sums")
    assert isinstance(result.exception, UsageError)
    assert "has not ended" in str(result.exception)
    script.job.state = pb.JOB_STATE_FAILED
    for _ in range(2):
        assert run(address, "retry", "sums").exit_code == 0
    assert [(one.request_id, one.mode) for one in script.requests] == [("retry-u1", pb.START_MODE_RESUME)] * 2


def test_deleting_files_asks_first(address: str, script: Script) -> None:
    script.job.state = pb.JOB_STATE_FAILED
    assert run(address, "delete", "sums", "--files", stdin="n\n").exit_code == 1
    assert not script.deleted
    result = run(address, "delete", "sums", "--files", "--yes")
    assert result.exit_code == 0
    assert "is deleted" in result.stdout
    assert script.asked[-1].files


def test_deleting_without_files_says_what_stays(address: str, script: Script) -> None:
    script.job.state = pb.JOB_STATE_FAILED
    assert "its run folder /r/sums-u1 is kept" in run(address, "delete", "sums").stdout


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """A spec file."""
    file = tmp_path / "sums.yaml"
    file.write_text(yaml.safe_dump(SPEC))
    return file


def test_a_job_that_is_waited_for_ends_the_command_as_it_ended(address: str, script: Script, spec: Path) -> None:
    script.play([JobEvent(20, 1.0, "state", data={"state": "FAILED", "reason": "no luck"})])
    result = run(address, "submit", str(spec), "--request-id", "nightly-17", "--wait", "-o", "json")
    assert isinstance(result.exception, GcoreError)
    assert result.exception.exit_code == 1
    assert json.loads(result.stdout)["state"] == "FAILED"
    assert script.requests[0].request_id == "nightly-17"


def test_waiting_and_following_are_not_asked_for_together(address: str, spec: Path) -> None:
    result = run(address, "submit", str(spec), "--wait", "--follow")
    assert isinstance(result.exception, UsageError)


def test_a_dry_run_submits_nothing(address: str, script: Script, spec: Path, tmp_path: Path) -> None:
    result = run(address, "submit", str(spec), "--dry-run", "--home", str(tmp_path / "home"))
    assert isinstance(result.exception, GcoreError), "there are no such data"
    assert script.requests == []


ENDINGS: dict[str, tuple[list[str], grpc.StatusCode | None, int]] = {
    "it worked": (["list"], None, 0),
    "a wrong option": (["list", "--stat", "x"], None, 2),
    "a wrong value": (["list", "--state", "x"], None, 2),
    "a wrong request": (["describe", "sums"], grpc.StatusCode.INVALID_ARGUMENT, 2),
    "no such job": (["describe", "nothing"], None, 2),
    "a store that is away": (["describe", "sums"], grpc.StatusCode.UNAVAILABLE, 3),
    "nobody is known": (["describe", "sums"], grpc.StatusCode.UNAUTHENTICATED, 4),
    "not allowed": (["cancel", "sums"], grpc.StatusCode.PERMISSION_DENIED, 4),
    "a controller's failure": (["describe", "sums"], grpc.StatusCode.INTERNAL, 1),
    "too much": (["logs", "sums"], grpc.StatusCode.RESOURCE_EXHAUSTED, 1),
}


@pytest.mark.parametrize(("words", "refused", "code"), ENDINGS.values(), ids=ENDINGS)
def test_the_exit_code_is_the_documented_one_and_the_error_one_line(
    address: str,
    script: Script,
    words: list[str],
    refused: grpc.StatusCode | None,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if refused is not None:
        script.refusal = (refused, "the reason")
    monkeypatch.setattr(sys, "argv", ["gcore", *words, "--address", address])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code or 0) == code
    said = capsys.readouterr().err
    if refused is not None:
        assert said.startswith("gcore: ")
        assert said.count("\n") == 1
        assert "the reason" in said


def test_the_documented_exit_codes_are_those_of_the_help() -> None:
    shown = CliRunner().invoke(app, ["--help"]).stdout
    page = (Path(__file__).parents[3] / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    for code in ("0", "1", "2", "3", "4", "130"):
        assert f" {code}  " in shown
        assert f"| `{code}` |" in page


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["events", "sums", "--follow"], "gcore events sums --after 8 --follow"),
        (["logs", "sums", "--follow"], "gcore logs sums --follow"),
    ],
    ids=["events", "logs"],
)
def test_interrupted_follow_prints_how_to_continue(address: str, words: list[str], hint: str) -> None:
    command = [sys.executable, "-m", "controllers.cli.main", *words, "--address", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        wanted = "event 8" if words[0] == "events" else "two"
        for line in child.stdout:
            if wanted in line:
                break
        child.send_signal(signal.SIGINT)
        said = child.stderr.read()
        assert child.wait(30) == 130
    assert hint in said
    assert "continues" in said


def complete(address: str, line: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("GCORE_ADDRESS", address)
    words = line.split(" ")
    environment = {"_GCORE_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": line, "COMP_CWORD": str(len(words) - 1)}
    result = CliRunner().invoke(app, [], prog_name="gcore", env=environment)
    return result.stdout.splitlines()


def test_a_shell_completes_jobs_and_nodes(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert any('"sums"' in line for line in complete(address, "gcore describe su", monkeypatch))
    assert not any('"sums"' in line for line in complete(address, "gcore describe xx", monkeypatch))
    assert any('"node-0"' in line for line in complete(address, "gcore drain no", monkeypatch))


def test_nothing_is_completed_where_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    said = complete("127.0.0.1:9", "gcore describe su", monkeypatch)
    assert not any("rror" in line for line in said)


TIMES = {"90s": 910.0, "1.5m": 910.0, "2h": 0.0, "1970-01-01T00:10": 600.0, "1970-01-01T01:10+01:00": 600.0}


@pytest.mark.parametrize(("text", "time"), TIMES.items())
def test_a_time_is_so_long_ago_or_a_moment(text: str, time: float) -> None:
    assert parse_time(text, 1000.0) == time


@pytest.mark.parametrize("text", ["", "yesterday", "10x", "-5m", "99999-01-01", "m"])
def test_invalid_times_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a time"):
        parse_time(text, 1000.0)

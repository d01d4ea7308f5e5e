"""The commands as a user runs them: output, exit codes, and errors of one sentence."""

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import termios
from dataclasses import dataclass

import grpc
import pytest
import yaml
from fake_jobs import FakeJobs, Script
from warm_programs import COMMANDS, WarmProcess

from gcore.api.v1 import jobs_pb2 as pb
from gcore.observability.events import JobEvent

SPEC = {
    "name": "sums",
    "model": {"path": "model"},
    "data": {"path": "train.jsonl", "shards": 4},
    "flow": {"steps": 2},
    "rollout": {"max_new_tokens": 4},
}


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


async def start(*words: str, cwd) -> WarmProcess:
    return await asyncio.to_thread(
        COMMANDS.popen, "controllers.cli.main", *words, cwd=cwd, env={**os.environ, "COLUMNS": "200"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


async def gcore(*words: str, cwd) -> Done:
    process = await start(*words, cwd=cwd)
    out, err = await asyncio.to_thread(process.communicate)
    return Done(process.returncode, out.decode(), err.decode())


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(SPEC))
    (tmp_path / "train.jsonl").write_text("".join(f'{{"prompt":"{n}+1=","answer":"{n + 1}"}}\n' for n in range(9)))
    return tmp_path


@pytest.fixture
def script(folder):
    return Script(
        pb.Job(uid="u1", name="sums", state=pb.JOB_STATE_RUNNING, steps=2, run_dir=str(folder / "run"), created=1.0),
        audit=pb.AuditReport(clean=True, steps=2, groups_by_node={"node-0": 3, "node-1": 1}),
    )


@pytest.fixture
async def server(script):
    fake = await FakeJobs(script).start()
    yield fake
    await fake.kill()


def finished(state="SUCCEEDED"):
    return [
        JobEvent(1, 1.0, "eval", data={"step": 0, "accuracy": 0.5, "count": 9}),
        JobEvent(
            2, 2.0, "step", data={"step": 1, "steps": 2, "stats": {"reward": 0.5}, "groups_by_node": {"node-0": 4}}
        ),
        JobEvent(
            3, 3.0, "step", data={"step": 2, "steps": 2, "stats": {"reward": 0.7}, "groups_by_node": {"node-0": 4}}
        ),
        JobEvent(4, 4.0, "eval", data={"step": 2, "accuracy": 0.9, "count": 9}),
        JobEvent(5, 5.0, "state", data={"state": state, "reason": "so it is"}),
    ]


async def test_run_follows_the_job_and_sums_it_up(server, script, folder):
    script.play(finished())
    done = await gcore("run", "spec.yaml", "--address", server.address, cwd=folder)
    assert (done.code, done.err) == (0, "")
    assert "step 1/2 reward 0.500" in done.out
    assert "50.0% before, 90.0% after" in done.out
    assert "node-0 3, node-1 1" in done.out
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["audit"], summary["groups_by_controller"]) == ("clean", {"node-0": 3, "node-1": 1})
    recorded = (folder / "run" / "events.jsonl").read_text().splitlines()
    assert [JobEvent.from_line(line) for line in recorded] == finished()


async def test_on_a_terminal_the_view_is_drawn_over_and_its_last_state_stays(server, script, folder):
    script.play(finished()[:4])
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 110, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    environment.pop("COLUMNS", None)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "controllers.cli.main", "run", "spec.yaml", "--address", server.address,
        cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    os.close(theirs)
    drawn = b""
    while b"step 2/2" not in drawn:
        drawn += await asyncio.to_thread(os.read, ours, 65536)
    script.play(finished()[4:])
    with contextlib.suppress(OSError):  # Linux says EIO when the other side of a terminal is closed
        while chunk := await asyncio.to_thread(os.read, ours, 65536):
            drawn += chunk
    os.close(ours)
    _, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert b"\x1b[1A" in drawn  # the cursor went up, to draw over
    assert "held-out accuracy" in drawn.decode()
    assert "SUCCEEDED" in drawn.decode()
    assert drawn.endswith(b"\n")


async def test_run_submits_the_resolved_spec_and_resumes_unless_it_is_to_be_new(server, script, folder):
    script.play(finished())
    await gcore("run", "spec.yaml", "--set", "flow.steps=7", "--address", server.address, cwd=folder)
    await gcore("run", "spec.yaml", "--new", "--address", server.address, cwd=folder)
    first, second = script.requests
    sent = json.loads(first.spec_json)
    assert (sent["flow"]["steps"], sent["data"]["path"]) == (7, str(folder / "train.jsonl"))
    assert (first.mode, second.mode) == (pb.START_MODE_RESUME, pb.START_MODE_NEW)
    assert first.request_id != second.request_id


async def test_a_run_that_is_followed_again_keeps_one_history(server, script, folder):
    script.play(finished())
    for _ in range(2):
        assert (await gcore("run", "spec.yaml", "--address", server.address, cwd=folder)).code == 0
    assert len((folder / "run" / "events.jsonl").read_text().splitlines()) == 5


async def test_run_survives_the_death_of_the_controller_it_talks_to(server, script, folder):
    other = await FakeJobs(script).start()
    script.play(finished()[:2])
    process = await start("run", "spec.yaml", "--address", f"{server.address},{other.address}", cwd=folder)
    assert process.stdout is not None
    while b"step 1/2" not in await asyncio.to_thread(process.stdout.readline):
        pass
    await server.kill()
    script.play(finished()[2:])
    out, err = await asyncio.to_thread(process.communicate)
    await other.kill()
    assert (process.returncode, err) == (0, b"")
    assert out.count(b"step 2/2") == 1
    assert len((folder / "run" / "events.jsonl").read_text().splitlines()) == 5


@pytest.mark.parametrize("state", ["FAILED", "CANCELLED"])
async def test_run_ends_with_1_when_the_job_did_not_succeed(server, script, folder, state):
    script.play(finished(state))
    done = await gcore("run", "spec.yaml", "--address", server.address, cwd=folder)
    assert done.code == 1
    assert f"{state}: so it is" in done.out


async def test_run_ends_with_1_when_the_audit_found_something(server, script, folder):
    script.audit = pb.AuditReport(clean=False, violations=["0/1/2 was trained twice"])
    script.play(finished())
    done = await gcore("run", "spec.yaml", "--address", server.address, cwd=folder)
    assert done.code == 1
    assert "0/1/2 was trained twice" in done.out
    assert json.loads((folder / "run" / "summary.json").read_text())["audit"] == ["0/1/2 was trained twice"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
async def test_an_interrupted_run_on_a_cluster_that_was_up_only_stops_watching(server, script, folder, number):
    script.play(finished()[:2])
    process = await start("run", "spec.yaml", "--address", server.address, cwd=folder)
    assert process.stdout is not None
    while b"step 1/2" not in await asyncio.to_thread(process.stdout.readline):
        pass
    process.send_signal(number)
    _, err = await asyncio.to_thread(process.communicate)
    assert process.returncode == 130
    assert err.decode().count("\n") == 1
    assert "Stopped following at step 1 of 2; the job continues" in err.decode()
    assert script.job.state == pb.JOB_STATE_RUNNING


async def test_submit_prints_the_job_and_repeats_the_request_id(server, script, folder):
    done = await gcore(
        "submit", "spec.yaml", "--request-id", "nightly", "-o", "json", "--address", server.address, cwd=folder
    )
    assert (done.code, json.loads(done.out)["uid"]) == (0, "u1")
    assert script.requests[0].request_id == "nightly"


async def test_submit_of_a_paused_job_says_how_it_continues(server, script, folder):
    script.job.state = pb.JOB_STATE_PAUSED
    done = await gcore("submit", "spec.yaml", "--address", server.address, cwd=folder)
    assert done.code == 0
    assert f"resume {script.job.name}` continues it" in " ".join(done.out.split())


@pytest.mark.parametrize("verb", ["submit", "run"])
async def test_code_that_comes_with_a_model_is_warned_of_at_once(server, script, folder, verb):
    script.play(finished())
    trusting = ("--set", "model.trust_remote_code=true")
    done = await gcore(verb, "spec.yaml", *trusting, "--address", server.address, cwd=folder)
    assert done.code == 0
    assert done.err.startswith("warning: model.trust_remote_code is set. Python code that comes with ")
    assert "warning" not in (await gcore(verb, "spec.yaml", "--new", "--address", server.address, cwd=folder)).err


@pytest.mark.parametrize(("state", "code"), [("SUCCEEDED", 0), ("FAILED", 1)])
async def test_submit_that_follows_ends_as_the_job_does(server, script, folder, state, code):
    script.play(finished(state))
    done = await gcore("submit", "spec.yaml", "--follow", "--address", server.address, cwd=folder)
    assert done.code == code
    assert "step 2/2" in done.out
    assert done.err.count("\n") == code
    assert len((folder / "run" / "events.jsonl").read_text().splitlines()) == 5
    assert json.loads((folder / "run" / "summary.json").read_text())["state"] == state


async def test_submit_can_follow_in_json_one_event_a_line(server, script, folder):
    script.play(finished())
    done = await gcore("submit", "spec.yaml", "--follow", "-o", "json", "--address", server.address, cwd=folder)
    assert [JobEvent.from_line(line) for line in done.out.splitlines()] == finished()


@pytest.mark.parametrize("verb", [("run",), ("submit", "--follow")], ids=["run", "submit"])
async def test_a_run_whose_folder_is_on_another_machine_is_followed_without_a_record(server, script, folder, verb):
    script.job.run_dir = "/nowhere/runs/sums-u1"
    script.play(finished())
    done = await gcore(*verb, "spec.yaml", "--address", server.address, cwd=folder)
    assert (done.code, done.err.count("\n")) == (0, 1)
    assert "not on this machine" in done.err


async def test_a_submission_that_is_no_longer_followed_says_that_the_job_goes_on(server, script, folder):
    script.play(finished()[:1])
    process = await start("submit", "spec.yaml", "--follow", "--address", server.address, cwd=folder)
    assert process.stdout is not None
    while b"eval" not in await asyncio.to_thread(process.stdout.readline):
        pass
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.to_thread(process.communicate)
    assert (process.returncode, err.count(b"\n")) == (130, 1)
    assert b"job sums continues" in err
    assert b"cancel u1` cancels it" in err
    assert script.job.state == pb.JOB_STATE_RUNNING


async def test_an_interrupted_command_ends_with_130_and_no_traceback(folder):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        silent.setblocking(False)
        process = await start("list", "--address", f"127.0.0.1:{silent.getsockname()[1]}", cwd=folder)
        await asyncio.get_running_loop().sock_accept(silent)  # it has asked, and waits for an answer
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.to_thread(process.communicate)
    assert (process.returncode, err) == (130, b"gcore: interrupted\n")


async def test_list_describe_cancel_and_audit_answer_in_both_forms(server, script, folder):
    at = ("--address", server.address)
    assert "sums" in (await gcore("list", *at, cwd=folder)).out
    assert json.loads((await gcore("list", "-o", "json", *at, cwd=folder)).out)[0]["name"] == "sums"
    assert "RUNNING" in (await gcore("describe", "sums", *at, cwd=folder)).out
    assert json.loads((await gcore("describe", "u1", "-o", "json", *at, cwd=folder)).out)["state"] == "RUNNING"
    assert "clean" in (await gcore("audit", "sums", *at, cwd=folder)).out
    assert "CANCELLED" in (await gcore("cancel", "sums", *at, cwd=folder)).out
    script.audit = pb.AuditReport(clean=False, violations=["lost: 0/1/2"])
    done = await gcore("audit", "sums", "-o", "json", *at, cwd=folder)
    assert (done.code, json.loads(done.out)["violations"]) == (1, ["lost: 0/1/2"])


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        pytest.param(["list"], 3, "no local cluster is running", id="no cluster"),
        pytest.param(["list", "--address", "127.0.0.1:1"], 3, "nothing listens there", id="nobody there"),
        pytest.param(["list", "--address", "nonsense"], 2, "is not host:port", id="no address"),
        pytest.param(["run", "none.yaml"], 2, "cannot read the spec", id="no spec"),
        pytest.param(["run", "spec.yaml", "--set", "flow.stepz=1"], 2, "did you mean 'flow.steps'", id="unknown key"),
        pytest.param(["run", "spec.yaml", "--slots", "cpu:1"], 2, "cannot be divided", id="too few slots"),
        pytest.param(["run", "spec.yaml", "--home", "train.jsonl"], 2, "the folder is not writable", id="home is a file"),
        pytest.param(["up", "--slots", "2"], 2, "is not KIND:NUMBER", id="slots without kind"),
        pytest.param(["up", "--home", "train.jsonl/x"], 2, "the folder is not writable", id="home under a file"),
        pytest.param(["validate", "spec.yaml"], 2, "the model folder does not exist", id="no model"),
        pytest.param(["validate", "spec.yaml", "--set", "train.ranks=9"], 2, "9 train ranks do not fit", id="ranks"),
        pytest.param(["prepare", "algebra"], 2, "there is no example 'algebra'", id="unknown example"),
        pytest.param(["export", "sums", "--to", "out"], 3, "no local cluster is running", id="export without a cluster"),
    ],
)  # fmt: skip
async def test_a_mistake_is_one_sentence_and_its_exit_code(folder, words, code, part):
    done = await gcore(*words, cwd=folder)
    assert done.code == code
    assert part in done.err
    assert done.err.startswith("gcore: ")
    assert done.err.count("\n") == 1
    assert done.out == ""


@pytest.mark.parametrize("words", [["lst"], ["run"], ["list", "-o", "xml"], ["up", "--controllers", "x"]], ids=" ".join)
async def test_a_wrong_command_line_ends_with_2_and_no_traceback(folder, words):
    done = await gcore(*words, cwd=folder)
    assert done.code == 2
    assert "Traceback" not in done.err


async def test_a_refusal_of_the_controller_is_one_sentence(server, script, folder):
    script.refusal = (grpc.StatusCode.FAILED_PRECONDITION, "job 'sums' is not finished and its spec differs (seed)")
    done = await gcore("run", "spec.yaml", "--address", server.address, cwd=folder)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "its spec differs (seed)" in done.err


async def test_a_job_that_is_not_there_is_one_sentence(server, folder):
    done = await gcore("describe", "other", "--address", server.address, cwd=folder)
    assert (done.code, done.err.count("\n")) == (2, 1)


async def test_the_schema_is_json_and_names_every_section(folder):
    done = await gcore("schema", cwd=folder)
    assert {"model", "data", "flow", "rollout", "train"} <= set(json.loads(done.out)["properties"])


async def test_down_where_nothing_is_up_is_no_error(folder):
    done = await gcore("down", cwd=folder)
    assert (done.code, done.err) == (0, "")
    assert "No cluster was running" in done.out
    assert not (folder / ".gcore").exists()

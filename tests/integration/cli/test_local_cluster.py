"""The local cluster starts completely or not at all, and stops without leftovers. Real etcd, real processes."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from stopping import stop_process
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from controllers.cli import local
from controllers.cli.commands.run import NOTICE
from controllers.cli.local import home_processes
from gcore.config.local_cluster import LocalClusterState
from gcore.errors import GcoreError, UsageError
from gcore.store.etcd import EtcdNotFound
from gcore.system.clock import SystemClock
from gcore.system.process import is_running, send_signal, wait_process_ended

pytestmark = pytest.mark.serial
CLOCK = SystemClock()


@pytest.fixture
def home(tmp_path):
    folder = tmp_path / "home"
    yield folder
    local.stop_cluster(folder, clock=CLOCK, grace_s=0)


def up(home: Path, **options) -> local.UpResult:
    return asyncio.run(local.start_cluster(local.UpRequest(home, 2, "cpu:2"), clock=CLOCK, **options))


def gcore(*words: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "controllers.cli.main", *words], cwd=cwd, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.fixture
def job(tmp_path):
    """A spec whose files are all right as far as a controller looks; its weights hold no tensors, so it never trains."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 64}))
    (model / "tokenizer_config.json").write_text("{}")
    Tokenizer(WordLevel({"1": 0, "2": 1}, unk_token="2")).save(str(model / "tokenizer.json"))
    (model / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    (tmp_path / "train.jsonl").write_text('{"prompt":"1","answer":"2"}\n' * 16)
    spec = {
        "name": "never", "model": {"path": "model"}, "data": {"path": "train.jsonl", "shards": 4},
        "flow": {"steps": 2, "groups_per_step": 2}, "rollout": {"max_new_tokens": 4},
    }  # fmt: skip
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    return tmp_path / "spec.yaml"


def test_a_cluster_comes_up_twice_the_same_and_goes_down_without_a_trace(home):
    first = up(home)
    assert (first.started, len(first.cluster.controllers), first.cluster.slots) == (True, 2, ("cpu:0", "cpu:1"))
    assert {p.kind for p in home_processes(home)} == {"controller", "etcd"}
    second = up(home)
    assert (second.started, second.absent, second.cluster) == (False, (), first.cluster)
    assert local.stop_cluster(home, clock=CLOCK).ended == 3
    assert home_processes(home) == ()
    assert LocalClusterState.load(home) is None
    assert not any(is_running(c.process) for c in first.cluster.controllers)


def test_a_daemon_that_died_in_a_living_cluster_is_waited_for(home):
    cluster = up(home).cluster
    victim = cluster.controllers[0].process
    send_signal(victim, signal.SIGKILL)
    assert wait_process_ended(victim, 10)
    again = up(home)
    assert (again.started, again.absent) == (False, ())
    assert again.cluster.controllers[0].process != victim
    assert again.cluster.controllers[1] == cluster.controllers[1]


def test_a_dead_remnant_is_replaced_and_the_jobs_stay(home, job):
    cluster = up(home).cluster
    address = ",".join(cluster.addresses)
    code, out, _ = finished(gcore("submit", str(job), "-o", "json", "--address", address, cwd=job.parent))
    assert code == 0
    for process in (*(c.process for c in cluster.controllers), cluster.etcd.process):
        send_signal(process, signal.SIGKILL)
        assert wait_process_ended(process, 10)
    assert up(home).started
    code, listed, _ = finished(gcore("list", "-o", "json", "--home", str(home), cwd=job.parent))
    assert (code, [one["uid"] for one in json.loads(listed)]) == (0, [json.loads(out)["uid"]])
    finished(gcore("cancel", "never", "--home", str(home), cwd=job.parent))


def test_a_daemon_that_ends_at_once_leaves_nothing_running(home, tmp_path):
    program = tmp_path / "gcore-controller"
    program.write_text("import sys; sys.exit('the reason it gave')")
    with pytest.raises(GcoreError, match=r"node-\d exited right after its start.*the reason it gave") as caught:
        up(home, command=lambda folder, file: [sys.executable, str(program), "--home", folder, "--config", file])
    assert "node-" in str(caught.value)
    assert home_processes(home) == ()
    assert LocalClusterState.load(home) is None


def test_a_port_that_is_taken_is_one_sentence_and_leaves_nothing_running(home):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} is in use"):
            asyncio.run(local.start_cluster(local.UpRequest(home, 1, "cpu:1", port=port), clock=CLOCK))
        with pytest.raises(UsageError, match=f"--etcd-port: port {port} is in use"):
            asyncio.run(local.start_cluster(local.UpRequest(home, 1, "cpu:1", etcd_port=port), clock=CLOCK))
    assert home_processes(home) == ()


def test_without_an_etcd_it_says_where_to_get_one_and_names_no_option_it_has_not(home, monkeypatch):
    def find_etcd() -> None:
        raise EtcdNotFound("no etcd is to be found", fix="Name one with --etcd-endpoints")

    monkeypatch.setattr("gcore.store.etcd.find_etcd", find_etcd)
    with pytest.raises(EtcdNotFound, match="on PATH") as caught:
        up(home)
    assert "--etcd-endpoints" not in str(caught.value)
    assert home_processes(home) == ()


def test_two_at_a_time_do_not_get_in_each_others_way(home):
    with local._alone(home), pytest.raises(UsageError, match="another"):
        up(home)


def test_a_cluster_file_that_was_lost_does_not_hide_what_runs(home):
    up(home)
    (home / "cluster.json").unlink()
    assert local.stop_cluster(home, clock=CLOCK).ended == 3
    assert home_processes(home) == ()


def test_a_run_that_is_refused_takes_down_what_it_started(home, job):
    (job.parent / "train.jsonl").write_text("no json\n")
    code, _, err = finished(gcore("run", str(job), "--home", str(home), cwd=job.parent))
    *before, error = err.splitlines()
    assert (code, [line for line in before if line != NOTICE]) == (2, [])  # a slow machine prints the notice
    assert "train.jsonl:1" in error
    assert home_processes(home) == ()


def test_an_interrupted_run_takes_down_what_it_started_and_says_how_to_go_on(home, job):
    process = gcore("run", str(job), "--new", "--home", str(home), cwd=job.parent)
    assert process.stdout is not None
    _until(process, "RUNNING")
    os.kill(process.pid, signal.SIGINT)
    code, _, err = finished(process)
    assert code == 130
    assert err.splitlines()[-1] == f"To continue the job, run the same command again: `gcore run {job} --home {home}`"
    assert "Traceback" not in err
    assert home_processes(home) == ()


def test_a_second_key_press_kills(home, job):
    process = gcore("run", str(job), "--home", str(home), cwd=job.parent)
    _until(process, "RUNNING")
    stopped = [p.process for p in home_processes(home) if p.kind == "controller"]
    for one in stopped:
        stop_process(one.pid)  # so that it would take its whole grace
    os.kill(process.pid, signal.SIGINT)
    assert process.stderr is not None
    process.stderr.readline()
    process.stderr.readline()  # what it says before it begins to stop things
    os.kill(process.pid, signal.SIGINT)
    code, _, err = finished(process)
    assert (code, "Traceback" in err) == (130, False)
    assert home_processes(home) == ()


def test_a_valid_spec_is_shown_resolved_with_every_process(home, job):
    code, out, err = finished(gcore("validate", str(job), "-o", "json", "--home", str(home), cwd=job.parent))
    assert (code, err) == (0, "")
    shown = json.loads(out)
    assert (shown["prompts"], shown["spec"]["data"]["path"]) == (16, str(job.parent / "train.jsonl"))
    assert [(p["process"], p["node"], p["slot"]) for p in shown["processes"]] == [
        ("etcd", "this machine", "-"),
        ("controller", "node-0", "cpu:0"),
        ("controller", "node-1", "cpu:1"),
        ("rollout engine (torch)", "node-0", "cpu:0"),
        ("rollout engine (torch)", "node-1", "cpu:1"),
        ("train rank 0", "node-0", "cpu:0"),
        ("train rank 1", "node-1", "cpu:1"),
    ]
    assert not home.exists()
    code, out, _ = finished(gcore("validate", str(job), "--home", str(home), cwd=job.parent))
    assert (code, "is valid: 16 prompts, 2 steps" in out) == (0, True)


def _until(process: subprocess.Popen[str], word: str) -> list[str]:
    """The lines up to the one with `word`."""
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if word in line:
            return lines
    raise AssertionError(f"it ended without {word!r}: {lines} {process.stderr.read() if process.stderr else ''}")

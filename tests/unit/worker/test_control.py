"""A child's messages, its cause of death, and the records of workers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gcore.errors import UsageError
from gcore.store.reference import StoreRef
from gcore.system import process as death
from gcore.system.control_line import CONTROL_FD
from gcore.system.daemon import log_environment
from gcore.system.process import SIZED, CannotStart, ProcessId, terminate_process, thread_environment
from gcore.worker.control import child_environment, parse_event
from gcore.worker.lifecycle import ChildFailed, ChildListens, ChildProgressed, ChildServes, WorkerEvent
from gcore.worker.main import READ_WITHIN_S, read_launch, start_worker, sweep_launches, worker_command
from gcore.worker.records import LaunchSpec, WorkerRecord

ENGINE: dict[str, Any] = {
    "instance": "w1",
    "node": "node-1",
    "role": "rollout",
    "job_uid": "j",
    "slot": "cpu:0",
    "store": StoreRef(endpoints=("127.0.0.1:1",)),
    "log_file": "/dev/null",
    "command": ("true",),
}


@pytest.mark.parametrize(
    ("said", "event"),
    [
        ({"event": "serving", "address": "h:1"}, ChildServes("h:1")),
        ({"event": "store", "address": "h:1"}, ChildListens("h:1")),
        ({"event": "progress", "phase": "update", "progress": 17, "more": 1}, ChildProgressed("update", 17)),
        ({"event": "failed", "reason": "no model"}, ChildFailed("no model")),
        ({"event": "something new", "x": 1}, None),
    ],
    ids=lambda value: value["event"] if isinstance(value, dict) else "",
)
def test_a_line_of_the_child_is_understood(said: dict[str, Any], event: WorkerEvent | None) -> None:
    assert parse_event(json.dumps(said).encode() + b"\n") == event


@pytest.mark.parametrize(
    "line",
    [b"hello\n", b"[]\n", b'{"event": "serving"}\n', b'{"event": "progress", "phase": 3}\n', b"{}\n", b"\xff\xfe\n"],
    ids=["no JSON", "no object", "no address", "no phase", "no event", "no text"],
)
def test_a_line_that_cannot_be_understood_is_a_failure_that_quotes_it(line: bytes) -> None:
    event = parse_event(line)
    assert isinstance(event, ChildFailed)
    assert event.reason.startswith("sent a line that its supervisor cannot parse: ")


@given(st.binary(max_size=300))
def test_nothing_a_child_says_raises(line: bytes) -> None:
    parse_event(line)


def test_the_launch_names_the_threads_and_its_own_environment_wins() -> None:
    base = {"PATH": "/bin", "OMP_WAIT_POLICY": "ACTIVE"}
    spec = LaunchSpec(**ENGINE, threads=2)
    plain = child_environment(spec, base, control_fd=5)
    assert plain == {"PATH": "/bin", CONTROL_FD: "5"} | thread_environment(2) | log_environment(spec.about)
    assert plain["OMP_WAIT_POLICY"] == "PASSIVE"
    assert {plain[name] for name in SIZED} == {"2"}
    own = child_environment(LaunchSpec(**ENGINE, env={"OMP_NUM_THREADS": "4"}), base, control_fd=5)
    assert own["OMP_NUM_THREADS"] == "4"


@pytest.mark.parametrize(
    ("code", "words", "oom", "expected"),
    [
        (0, "", False, "ended by itself with exit code 0"),
        (3, "ValueError: no", False, "ended by itself with exit code 3: ValueError: no"),
        (-9, "", True, "killed by the kernel because memory ran out (SIGKILL)"),
        (-9, "", False, "killed by SIGKILL"),
        (-11, "", True, "killed by SIGSEGV"),
        (-63, "", False, "killed by signal 63"),
    ],
    ids=["exit", "exit with words", "out of memory", "killed", "crash beside an out-of-memory kill", "nameless signal"],
)
def test_a_death_is_one_sentence(code: int, words: str, oom: bool, expected: str) -> None:
    assert death.exit_sentence(code, words, out_of_memory=oom) == expected


def test_last_words_are_the_last_lines_of_this_child_only(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"an earlier child\n")
    since = log.stat().st_size
    assert death.last_log_lines(log, since) == ""
    with log.open("ab") as file:
        file.write(b"one\n\ntwo\n  three\xff  \nfour\n")
    assert death.last_log_lines(log, since) == "two | three\N{REPLACEMENT CHARACTER} | four"
    assert death.last_log_lines(tmp_path / "missing", 0) == ""


def test_last_words_are_bounded(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 100_000 + b"end\n")
    words = death.last_log_lines(log, 0)
    assert len(words) == death.LAST_WORDS
    assert words.endswith("xend")


def test_out_of_memory_kills_are_read_from_the_machine_and_from_both_kinds_of_control_groups(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (cgroups / "job").mkdir(parents=True)
    (cgroups / "memory" / "old").mkdir(parents=True)
    assert death.out_of_memory_kills(proc, cgroups) == 0, "a kernel that tells nothing"
    (proc / "vmstat").write_text("nr_free_pages 5\noom_kill 1\n")
    (proc / "self" / "cgroup").write_text("4:memory:/old\n1:cpu,memory_x:/\n0::/job\n")
    (cgroups / "job" / "memory.events").write_text("oom 9\noom_kill 2\noom_group_kill 8\n")
    (cgroups / "memory" / "old" / "memory.oom_control").write_text("under_oom 0\noom_kill 4\n")
    assert death.out_of_memory_kills(proc, cgroups) == 7


def test_this_machines_out_of_memory_kills_can_be_read() -> None:
    assert death.out_of_memory_kills() >= 0


@pytest.mark.parametrize(
    "changes",
    [{"role": "train"}, {"role": "train", "world": "w"}, {"world": "w", "rank": 0}, {"rank": 0}],
    ids=["rank without a world", "world without a rank", "engine with a world", "engine with a rank"],
)
def test_only_a_train_rank_has_a_world_and_a_rank(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="a train rank has both, any other worker neither"):
        LaunchSpec.model_validate(ENGINE | changes)


def test_an_instance_cannot_name_another_folder() -> None:
    with pytest.raises(ValidationError):
        LaunchSpec.model_validate(ENGINE | {"instance": "../w1"})


def test_records_survive_the_store() -> None:
    launch = LaunchSpec(**ENGINE, child={"kind": "engine", "deep": {"x": [1, None]}}, env={"A": "b"})
    assert LaunchSpec.decode(launch.encode()) == launch
    record = WorkerRecord(
        instance="w1", node="n", role="train", job_uid="j", slot="s", pid=3, pid_started=4, world="w", rank=0
    )
    assert WorkerRecord.decode(record.encode()) == record
    assert record.process == ProcessId(3, 4)


def test_a_launch_document_is_for_its_owner_only(tmp_path: Path) -> None:
    # The store's address answers nobody: the supervisor waits, and goes when it is told to.
    spec = LaunchSpec(**ENGINE)
    supervisor = start_worker(spec, tmp_path)
    try:
        file = tmp_path / "workers" / "w1.json"
        assert file.stat().st_mode & 0o777 == 0o600
        assert read_launch(file) == spec
        assert worker_command(tmp_path, file)[1:] == (
            "-P",
            "-m",
            "gcore.worker.main",
            "--home",
            str(tmp_path),
            "--launch",
            str(file),
        )
    finally:
        terminate_process(supervisor, grace_s=60)


def test_launch_documents_of_long_ago_go_and_those_that_may_not_be_read_yet_stay(tmp_path: Path) -> None:
    for name, age_s in (("old", 2 * READ_WITHIN_S), ("young", READ_WITHIN_S / 2), ("newest", 0.0)):
        file = tmp_path / f"{name}.json"
        file.write_text("{}")
        os.utime(file, (1e9 - age_s, 1e9 - age_s))
    (tmp_path / "notes.txt").write_text("mine")
    os.utime(tmp_path / "notes.txt", (0, 0))
    sweep_launches(tmp_path / "newest.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["newest.json", "notes.txt", "young.json"]


def test_a_home_that_is_no_folder_is_one_sentence(tmp_path: Path) -> None:
    home = tmp_path / "file"
    home.write_text("")
    with pytest.raises(CannotStart, match="cannot write the launch document"):
        start_worker(LaunchSpec(**ENGINE), home)


def test_a_launch_document_that_cannot_be_put_in_place_leaves_no_half(tmp_path: Path) -> None:
    (tmp_path / "workers" / "w1.json").mkdir(parents=True)
    with pytest.raises(CannotStart, match="cannot write the launch document"):
        start_worker(LaunchSpec(**ENGINE), tmp_path)
    assert [path.name for path in (tmp_path / "workers").iterdir()] == ["w1.json"]


@pytest.mark.parametrize(
    "content", [None, "{", '{"schema_version": 99}'], ids=["missing", "damaged", "of another version"]
)
def test_a_launch_document_that_cannot_be_used_is_one_sentence(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "launch.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=re.escape(str(path))):
        read_launch(path)


def test_a_supervisor_loads_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "deepspeed", "numpy", "httpx", "typer", "rich", "yaml", "jinja2", "tokenizers"}
    script = "import sys, gcore.worker.main; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert heavy.isdisjoint(loaded)

"""Control groups of jobs: location, contents, and one warning on machines without them."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.config.node import JobLimits
from gcore.system.cgroups import CannotLimit, group_of_process, limit_files
from gcore.system.process import GUARD
from gcore.worker.control_groups import JobGroups, groups_base

LIMITS = JobLimits(memory_gib=2.0, cpus=1.5, pids=100)


class Machine:
    """A folder that looks like the kernel's."""

    def __init__(self, folder: Path, own: str, given: str = "cpu memory pids io") -> None:
        self.mount = folder / "cgroup"
        self.proc = folder / "self"
        self.proc.write_text(own)
        self.service = self.mount / "system.slice" / "gcore.service"
        (self.service / "daemon").mkdir(parents=True)
        (self.service / "cgroup.controllers").write_text(given)
        (self.service / "cgroup.subtree_control").write_text("")

    def groups(self, limits: JobLimits = LIMITS) -> JobGroups:
        return JobGroups(limits, self.mount, self.proc)


DELEGATED = "0::/system.slice/gcore.service/daemon\n"


def test_each_job_has_a_group_beside_the_daemons_own_with_the_limits(tmp_path: Path) -> None:
    machine = Machine(tmp_path, DELEGATED)
    groups = machine.groups()
    group = Path(groups.group_of("abc"))
    assert groups.why_not == ""
    assert group == machine.service / "job-abc"
    assert (machine.service / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    assert {file.name: file.read_text() for file in group.iterdir()} == {
        "memory.max": str(2 << 30),
        "cpu.max": "150000 100000",
        "pids.max": "100",
    }
    assert groups.group_of("abc") == str(group), "a second time, after a restart, say"


def test_only_what_is_limited_is_asked_of_the_machine(tmp_path: Path) -> None:
    machine = Machine(tmp_path, DELEGATED, given="pids")
    groups = machine.groups(JobLimits(pids=7))
    assert [file.name for file in Path(groups.group_of("abc")).iterdir()] == ["pids.max"]
    assert machine.groups(JobLimits()).group_of("abc") == "", "without a limit there is no group"
    assert machine.groups(JobLimits(pids=7, cgroup="off")).group_of("abc") == ""


def test_groups_of_ended_jobs_go_and_others_stay(tmp_path: Path) -> None:
    machine = Machine(tmp_path, DELEGATED)
    groups = machine.groups()
    for uid in ("ended", "running"):
        group = Path(groups.group_of(uid))
        for file in group.iterdir():  # the kernel's files do not keep a folder from going
            file.unlink()
    busy = Path(groups.group_of("busy"))  # as if something ran there: its files keep it
    groups.sweep({"running"})
    assert not (machine.service / "job-ended").exists()
    assert (machine.service / "job-running").exists()
    assert busy.exists()
    assert (machine.service / "daemon").exists()


@pytest.mark.parametrize(
    ("own", "said"),
    [
        pytest.param("0::/user.slice/session-1.scope\n", "is not delegated to it", id="a login"),
        pytest.param("0::/\n", "is not delegated to it", id="a container"),
        pytest.param("0::/daemon\n", "is not delegated to it", id="at the root"),
        pytest.param("4:memory:/a\n1:cpu:/\n", "no control groups of version 2", id="version 1 alone"),
        pytest.param("", "no control groups of version 2", id="none"),
    ],
)
def test_a_machine_without_them_is_told_once_and_jobs_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, own: str, said: str
) -> None:
    with caplog.at_level(logging.WARNING):
        groups = Machine(tmp_path, own).groups()
        assert groups.group_of("abc") == groups.group_of("xyz") == ""
        groups.sweep(set())
    assert [said in record.getMessage() for record in caplog.records] == [True]
    assert said in groups.why_not


def test_a_controller_that_is_not_given_is_named(tmp_path: Path) -> None:
    assert "cannot limit memory, pids" in Machine(tmp_path, DELEGATED, given="cpu io").groups().why_not


def test_a_group_that_is_named_is_taken_wherever_the_daemon_is(tmp_path: Path) -> None:
    named = tmp_path / "mine"
    named.mkdir()
    (named / "cgroup.controllers").write_text("pids")
    (named / "cgroup.subtree_control").write_text("pids")
    groups = Machine(tmp_path, "0::/\n").groups(JobLimits(pids=7, cgroup=str(named)))
    assert groups.group_of("abc") == str(named / "job-abc")
    assert (named / "cgroup.subtree_control").read_text() == "pids", "what is on is not switched on again"
    with pytest.raises(CannotLimit, match="delegated"):
        groups_base(JobLimits(pids=7), Path("/sys/fs/cgroup"), "/x")


@pytest.mark.parametrize("cgroup", ["relative", "", "Off"])
def test_a_group_that_is_no_place_is_refused(cgroup: str) -> None:
    with pytest.raises(ValueError, match="auto, off, or the absolute path"):
        JobLimits(cgroup=cgroup)


@given(st.floats(0.05, 1e6), st.floats(0.01, 4096), st.integers(1, 1 << 22))
def test_limits_are_written_as_the_kernel_reads_them(memory: float, cpus: float, pids: int) -> None:
    written = limit_files(memory_gib=memory, cpus=cpus, pids=pids)
    assert int(written["memory.max"]) % 4096 == 0
    assert 0 <= memory * (1 << 30) - int(written["memory.max"]) < 4097
    quota, period = map(int, written["cpu.max"].split())
    assert quota >= 1000
    assert abs(quota / period - cpus) < 0.0051
    assert int(written["pids.max"]) == pids


@given(st.text(max_size=200))
def test_any_text_is_a_process_s_groups(text: str) -> None:
    found = group_of_process(text)
    assert found is None or found.startswith("/")


def test_a_command_that_enters_a_group_is_there_from_its_beginning(tmp_path: Path) -> None:
    command = [
        *GUARD,
        "enter",
        str(tmp_path),
        sys.executable,
        "-c",
        "import os; print(os.getpid())",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (tmp_path / "cgroup.procs").read_text() == ended.stdout.strip()
    ended = subprocess.run(
        [*command[:5], str(tmp_path / "none"), *command[6:]], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip().isdigit()
    assert "not in the control group" in ended.stderr

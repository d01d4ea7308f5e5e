"""One controller's connection to a tracker's process: real processes, a user's plug-in, and failures."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controllers.changes import ChangeSignal
from controllers.cli.local import classify_process
from controllers.rules.view import turn_of
from controllers.telemetry.events import EventLog
from controllers.telemetry.run_recorder import MetricsFileWriter
from controllers.telemetry.trackers import TrackerProcess, TrackerTimeouts
from gcore.config.spec import TrackerSpec
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Member
from gcore.ledger.records.job import METRICS_FILE, JobPhase, JobRecord, JobStatus, Trouble
from gcore.ledger.transactions import Versioned
from gcore.observability.metrics_file import encode_lines
from gcore.store.keys import JobKeys
from gcore.store.types import KeyValue, WatchBatch, WatchEvent
from gcore.system.clock import SystemClock

ME = "node-0.abc"
PLUGIN = '''
"""A tracker that writes each step to a file, with its process's id. What it does wrong, the file `how` says."""

import json
import os
import signal
import time
from pathlib import Path


class Own:
    def __init__(self, run, options):
        self.run, self.how = run, run.run_dir / "how"
        print("chatter of a package", flush=True)

    def log(self, point):
        how = self.how.read_text() if self.how.exists() else ""
        if how == "raises":
            raise RuntimeError("no such project")
        if how.startswith("prints"):
            print("x" * 4_000_000 + "\\nthe end of it", flush=True)
        if how == "prints and dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises much":
            raise RuntimeError("no such page: " + 300_000 * "<")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hangs":
            (self.run.run_dir / "hung").touch()
            time.sleep(1000)
        with (self.run.run_dir / "told").open("a") as file:
            file.write(json.dumps([os.getpid(), point.step]) + "\\n")

    def rolled_back(self, point, reason):
        pass

    def flush(self):
        pass

    def finish(self, state):
        (self.run.run_dir / "finished").write_text(str(state))
'''


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a package that provides a tracker `own` installed."""
    site = tmp_path / "site"
    info = site / "own_tracker-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "own_tracker.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-tracker\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[gcore.trackers]\nown = own_tracker:Own\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    run = tmp_path / "run"
    run.mkdir()
    return run


class HeldClock(SystemClock):
    """Real sleeps; a time that only the test moves, so that no busy machine makes a tracker late."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Job:
    """A job's mirror, as a controller has it."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.clock = HeldClock()
        self.members = [ME]
        self.phase = JobPhase.RUNNING
        self.told = ChangeSignal()
        self.warned: list[str] = []
        self.steps = 0

    def mirror(self) -> JobMirror:
        job = JobRecord(uid="u", name="job", spec={}, run_dir=str(self.run_dir), created=0.0, prompts=9)
        members = {name: Versioned(Member(incarnation=name, node=name, address=""), 1) for name in self.members}
        status = JobStatus(phase=self.phase, reason="done")
        return JobMirror(JobKeys("u"), job=Versioned(job, 1), status=Versioned(status, 1), members=members)

    def step(self) -> None:
        self.steps += 1
        self._line(
            {"kind": "step", "seq": self.steps, "lineage": 0, "step": self.steps, "time": 1.0, "metrics": {"r": 1.0}}
        )

    def end(self) -> None:
        self.phase = JobPhase.SUCCEEDED
        self._line({"kind": "end", "state": "SUCCEEDED", "reason": "done", "time": 1.0})

    def _line(self, line: dict[str, Any]) -> None:
        with (self.run_dir / METRICS_FILE).open("ab") as file:
            file.write(encode_lines([line]))
        self.told.notify()

    async def warn(self, topic: str, sentence: str) -> None:
        self.warned.append(f"{topic}: {sentence}")

    def keeper(self) -> TrackerProcess:
        patience = TrackerTimeouts(stall_s=60.0, end_s=30.0)
        spec = TrackerSpec(name="own")
        return TrackerProcess(ME, self.run_dir, spec, self.mirror, self.told, self.warn, self.clock, patience)

    def reached(self) -> list[list[int]]:
        file = self.run_dir / "told"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def how(self, word: str) -> None:
        (self.run_dir / "how").write_text(word)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await SystemClock().sleep(0.05)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controllers.telemetry.trackers.FIRST_RETRY_S", 0.1)
    monkeypatch.setattr("controllers.telemetry.trackers.LONGEST_RETRY_S", 0.2)


async def test_a_tracker_of_ones_own_is_told_each_step_and_the_end(run_dir: Path) -> None:
    job = Job(run_dir)
    keeping = asyncio.create_task(job.keeper().run())
    job.step()
    await until(lambda: len(job.reached()) == 1)
    job.step()
    job.end()
    await asyncio.wait_for(keeping, 60)
    assert [step for _, step in job.reached()] == [1, 2]
    assert len({pid for pid, _ in job.reached()}) == 1
    assert (run_dir / "finished").read_text() == "SUCCEEDED"
    assert job.warned == []
    assert "chatter of a package" in (run_dir / "trackers" / "own" / "output.log").read_text()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raises", "RuntimeError: no such project"),
        ("raises much", "RuntimeError: no such page: <<<"),
        ("dies", "its process exited with -9"),
        ("hangs", "no progress for 60 s"),
    ],
)
@pytest.mark.usefixtures("quick")
async def test_a_tracker_in_trouble_is_started_again_told_of_once_and_misses_nothing(
    run_dir: Path, how: str, reason: str
) -> None:
    job = Job(run_dir)
    keeping = asyncio.create_task(job.keeper().run())
    job.step()
    await until(lambda: len(job.reached()) == 1)
    job.how(how)
    job.step()

    def warned() -> bool:
        if not job.warned and (run_dir / "hung").exists():
            job.clock.now += 61
        return bool(job.warned)

    await until(warned)
    job.how("")
    job.step()
    job.end()
    await asyncio.wait_for(keeping, 60)
    assert [step for _, step in job.reached()] == [1, 2, 3]
    assert len({pid for pid, _ in job.reached()}) == 2
    (warned,) = job.warned
    assert warned.startswith(f"tracker-own: tracker 'own' failed and is being restarted: {reason}")
    assert len(warned) < 1000


@pytest.mark.usefixtures("quick")
async def test_a_machine_that_cannot_start_one_more_process_is_told_of_and_tried_again(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(run_dir)
    start, tries = TrackerProcess._started, iter([True, True])

    async def started(*arguments: Any) -> asyncio.subprocess.Process:
        if next(tries, False):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await start(*arguments)

    monkeypatch.setattr(TrackerProcess, "_started", started)
    keeping = asyncio.create_task(job.keeper().run())
    job.step()
    job.end()
    await asyncio.wait_for(keeping, 60)
    assert [step for _, step in job.reached()] == [1]
    (warned,) = job.warned
    assert "its process cannot be started (Resource temporarily unavailable)" in warned


@pytest.mark.usefixtures("quick")
async def test_output_of_a_package_does_not_fill_the_disk(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controllers.telemetry.trackers.MOST_OUTPUT", 2_000_000)
    monkeypatch.setattr("controllers.telemetry.trackers.KEPT_OUTPUT", 1000)
    job = Job(run_dir)
    job.how("prints")
    keeping = asyncio.create_task(job.keeper().run())
    log = run_dir / "trackers" / "own" / "output.log"
    for _ in range(3):
        job.step()
        await until(lambda: len(job.reached()) == job.steps)
        await until(lambda: log.stat().st_size < 2_000_000 and "the end of it" in log.read_text())
    assert job.warned == []
    job.how("prints and dies")
    job.step()
    await until(lambda: job.warned)
    assert log.stat().st_size < 2_000_000
    job.how("")
    job.end()
    await asyncio.wait_for(keeping, 60)


async def test_controller_that_is_no_longer_first_stops_and_another_continues(run_dir: Path) -> None:
    job = Job(run_dir)
    others = [f"node-{n}.x" for n in range(1, 9)]
    job.members = [ME]
    keeping = asyncio.create_task(job.keeper().run())
    job.step()
    await until(lambda: len(job.reached()) == 1)
    job.members = others  # its lease has ended
    job.told.notify()
    await until(lambda: (run_dir / "finished").exists())
    assert (run_dir / "finished").read_text() == "None"
    job.step()
    job.members = [ME]
    job.told.notify()
    await until(lambda: len(job.reached()) == 2)
    job.end()
    await asyncio.wait_for(keeping, 60)
    assert [step for _, step in job.reached()] == [1, 2]
    assert len({pid for pid, _ in job.reached()}) == 2


@pytest.mark.parametrize("how", ["", "hangs"])
async def test_stopped_tracker_leaves_no_process(run_dir: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controllers.telemetry.trackers.LET_GO_S", 1.0)
    job = Job(run_dir)
    keeping = asyncio.create_task(job.keeper().run())
    job.step()
    await until(lambda: len(job.reached()) == 1)
    ((pid, _),) = job.reached()
    job.how(how)
    job.step()
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


async def test_controller_that_is_not_first_starts_no_tracker(run_dir: Path) -> None:
    job = Job(run_dir)
    job.members = ["node-9.x"]
    keeping = asyncio.create_task(job.keeper().run())
    job.step()
    job.end()
    await asyncio.wait_for(keeping, 60)
    assert not (run_dir / "trackers").exists()


def test_trouble_is_a_warning_event() -> None:
    keys = JobKeys("u")
    trouble = Trouble(topic="tracker-wandb", node="node-1", sentence="tracker 'wandb' fails")
    kv = KeyValue(keys.trouble("tracker-wandb"), trouble.encode(), 5, 5)
    batch = WatchBatch((WatchEvent("put", kv),), 5)
    log = EventLog(keys)
    before = JobMirror(keys)
    log.note(before, batch, before.fold(batch), 1.0)
    (event,) = log.events
    assert (event.kind, event.message) == ("warning", "node-1: tracker 'wandb' fails")
    assert event.data == {"cause": "tracker-wandb", "node": "node-1", "reason": "tracker 'wandb' fails"}


async def test_a_folder_that_takes_no_lines_is_told_once_and_tried_again(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controllers.telemetry.run_recorder.RETRY_S", 0.05)
    job, changes = Job(run_dir), ChangeSignal()
    (run_dir / METRICS_FILE).mkdir()
    job.phase = JobPhase.SUCCEEDED
    recorder = MetricsFileWriter(ME, job.mirror, changes, job.warn, SystemClock())
    recording = asyncio.create_task(recorder.run())
    await until(lambda: job.warned)
    (run_dir / METRICS_FILE).rmdir()
    await until((run_dir / METRICS_FILE).exists)
    await until(lambda: (run_dir / METRICS_FILE).read_text())
    recording.cancel()
    assert json.loads((run_dir / METRICS_FILE).read_text())["kind"] == "end"
    assert len(job.warned) == 1


async def test_a_peer_writes_the_lines_when_who_is_first_does_not(run_dir: Path) -> None:
    job = Job(run_dir)
    job.phase = JobPhase.FAILED
    job.members = [ME, "node-1.x", "node-2.x"]
    last = max(job.members, key=lambda name: turn_of(job.members, name, "metrics"))
    recorders = [MetricsFileWriter(last, job.mirror, ChangeSignal(), job.warn, SystemClock()) for _ in range(2)]
    recording = [asyncio.create_task(one.run()) for one in recorders]
    file = run_dir / METRICS_FILE
    await until(lambda: file.exists() and file.read_text())
    for task, one in zip(recording, recorders, strict=True):
        task.cancel()
        await one.finish()
    assert [json.loads(line)["kind"] for line in file.read_text().splitlines()] == ["end"]


def test_gcore_down_knows_a_trackers_process_of_its_home(tmp_path: Path) -> None:
    command = ["python", "-m", "gcore.tracking", "--home", str(tmp_path), "--run-dir", "r", "--tracker", "own"]
    assert classify_process(command, tmp_path) == "child"
    assert classify_process(command, tmp_path / "other") is None

"""Late imports are done by one thread at a time; a node stops its own workers."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType

import pytest
from builders import worker_record

from controllers.daemon.incarnation import import_in_thread, unneeded_workers

LATE = """
import time, late_probe
late_probe.inside += 1
late_probe.most = max(late_probe.most, late_probe.inside)
time.sleep(0.02)
late_probe.inside -= 1
"""


async def test_several_who_need_modules_at_once_get_them_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    probe = ModuleType("late_probe")
    vars(probe).update(inside=0, most=0)
    monkeypatch.setitem(sys.modules, "late_probe", probe)
    names = [f"late_module_{number}" for number in range(5)]
    for name in names:
        (tmp_path / f"{name}.py").write_text(LATE)
    await asyncio.gather(*(import_in_thread(name) for name in [*names, *names]))
    assert all(name in sys.modules for name in names)
    assert vars(probe)["most"] == 1


async def test_failed_import_is_raised_and_the_next_succeeds() -> None:
    with pytest.raises(ModuleNotFoundError):
        await import_in_thread("controllers.nothing_of_that_name")
    await import_in_thread("controllers.daemon.incarnation")


def test_workers_of_other_jobs_on_this_node_are_ended_once_nothing_reads_them() -> None:
    states = {"a": "serving", "b": "starting", "c": "stopping", "d": "failed"}
    workers = {name: worker_record(name, "rollout", "node-0", state=state) for name, state in states.items()}
    workers["e"] = worker_record("e", "rollout", "node-1")
    assert [worker.instance for worker in unneeded_workers(workers, "node-0", {"another"})] == ["a", "b"]
    assert not list(unneeded_workers(workers, "node-0", {"u"}))

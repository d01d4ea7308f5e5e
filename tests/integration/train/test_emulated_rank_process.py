"""An emulated rank's process, started by a supervisor and called by a controller."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from ready_seals import ready_seal

from controllers.workers.launch_documents import rank_command
from controllers.workers.ranks import RankConnections
from gcore.engines.emulated.launch import LAW_FILE
from gcore.ledger.records.chain import SealedGroup
from gcore.models.layout import verify_checkpoint
from gcore.store.reference import StoreRef
from gcore.system.clock import SystemClock
from gcore.testing.models import rank_launch
from gcore.train.rank.feed import WorldName
from gcore.types import Group, PromptRef, Sample, Token, Version, VersionSpan
from gcore.worker.control import ChildProcess
from gcore.worker.lifecycle import ChildEnded, ChildFailed, ChildProgressed, ChildServes, WorkerEvent
from gcore.worker.records import LaunchSpec

GROUP = Group(
    PromptRef(0, 0, 0),
    (1, 2),
    tuple(Sample((n,) * 3, (-1.0,) * 3, "", "stop", (VersionSpan(Version(0, 0), 0, 3),), float(n)) for n in range(2)),
)


def launch_spec(tmp_path: Path) -> LaunchSpec:
    model, law = tmp_path / "model", tmp_path / "law.json"
    model.mkdir()
    (model / "config.json").write_text("{}")
    law.write_text(json.dumps({"speedup": 100.0}))
    spec = {
        "name": "j",
        "model": {"path": str(model)},
        "data": {"path": "d"},
        "flow": {"steps": 1, "groups_per_step": 1, "samples_per_prompt": 2},
        "rollout": {"max_new_tokens": 4},
    }
    return LaunchSpec(
        instance="t0",
        node="n",
        role="train",
        job_uid="j",
        slot="emulated:0",
        store=StoreRef(endpoints=("127.0.0.1:1",)),
        log_file=str(tmp_path / "rank.log"),
        command=rank_command("emulated:0"),
        child=rank_launch(spec, tmp_path / "run").model_dump(mode="json"),
        env={LAW_FILE: str(law)},
        world="w",
        rank=0,
    )


def mapped(pid: int) -> str:
    """The libraries of a process."""
    return Path(f"/proc/{pid}/maps").read_text()


async def test_it_serves_trains_reports_and_leaves_in_good_order(tmp_path: Path) -> None:
    events: asyncio.Queue[WorkerEvent] = asyncio.Queue()
    child = await ChildProcess.start(launch_spec(tmp_path))
    running = asyncio.create_task(child.run(events.put_nowait))
    changed = asyncio.Event()
    links = RankConnections(SystemClock(), changed.set)
    try:
        async with asyncio.timeout(60):
            while not isinstance(event := await events.get(), ChildServes):
                assert not isinstance(event, ChildEnded | ChildFailed), (tmp_path / "rank.log").read_text()
            links.aim(WorldName("j", "w", 0), {0: event.address})
            sealed = SealedGroup(
                ref=GROUP.ref,
                digest=GROUP.digest(),
                prompt_tokens=2,
                response_tokens=(3, 3),
                versions=(Version(0, 0),),
                holder="h",
            )
            seal = ready_seal((sealed,))
            await links.feed(0, seal, [(GROUP, frozenset({0, 1}))], 2, "h")
            await links.apply(0, seal, seal.encode())
            while not ((view := links.views.get(0)) and view.applied == Token(0, 1, 1) and links.saved):
                changed.clear()
                await changed.wait()
        assert view.metrics["emulated"] == 1.0
        (saved,) = links.saved.values()
        assert verify_checkpoint(tmp_path / "run" / saved.file).version == Version(0, 1)
        assert "libtorch" not in mapped(child.pid)
        child.tell("stop")
        async with asyncio.timeout(30):
            await running
        heard = [events.get_nowait() for _ in range(events.qsize())]
        assert "update" in {event.phase for event in heard if isinstance(event, ChildProgressed)}
        (ended,) = (event for event in heard if isinstance(event, ChildEnded))
        assert ended.how.startswith("ended by itself with exit code 0")
    finally:
        await links.close()
        running.cancel()
        child.kill()

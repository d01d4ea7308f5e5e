"""Runs the arithmetic example and kills a controller with SIGKILL in the middle, on screen.

    python examples/arithmetic/demo_kill.py [--victim node-1] [any option of `gcore run`]

Watch the view: the controller's shards move to its peer, the run goes on, the daemon comes back, the shards return.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from gcore.client import JobsClient
from gcore.config import load_spec
from gcore.config.local_cluster import LocalClusterState
from gcore.errors import GcoreError
from gcore.system.clock import SystemClock

SPEC = Path(__file__).parent / "grpo.yaml"


async def kill_in_the_middle(home: Path, victim: str, name: str, at_step: int, told: list[str]) -> None:
    """Wait until the job has reached `at_step`, then kill -9 the victim."""
    clock = SystemClock()
    while True:
        await clock.sleep(0.2)
        try:
            cluster = LocalClusterState.load(home)
            if cluster is None:
                continue
            async with JobsClient(cluster.addresses, clock=clock) as client:
                job = await client.get_job(name)
        except GcoreError:
            continue  # not up yet, or the job is not there yet
        if job.step >= at_step and not job.ended:
            pid = next(c.pid for c in cluster.controllers if c.name == victim)
            os.kill(pid, signal.SIGKILL)
            told.append(f"{victim} (process {pid}) was killed with SIGKILL after step {job.step} of {job.steps}.")
            return


def run_command(home: Path) -> list[str]:
    """`gcore` is the script beside this Python: what it tells to type at the end begins with its path, if no shell finds it."""
    return [str(Path(sys.executable).with_name("gcore")), "run", str(SPEC), "--new", "--home", str(home)]


def main() -> int:
    """The exit code of `gcore run`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--victim", default="node-1", help="controller to kill (default: node-1)")
    parser.add_argument("--home", default=".gcore", type=Path)
    known, others = parser.parse_known_args()
    spec = load_spec(SPEC)
    told: list[str] = []
    killer = kill_in_the_middle(known.home, known.victim, spec.name, spec.flow.steps * 2 // 5, told)
    threading.Thread(target=asyncio.run, args=(killer,), daemon=True).start()
    code = subprocess.run(
        [*run_command(known.home), "--controllers", "2", "--slots", "cpu:2", *others], check=False
    ).returncode
    for sentence in told or ["Nothing was killed: the run ended before its middle."]:
        print(sentence)
    return code if told else code or 1


if __name__ == "__main__":
    sys.exit(main())

"""Runs an example on two controllers. If its data has answers, prints the accuracy of the best constant answer beside its result.

    python examples/demo.py examples/counting/grpo.yaml [--kill node-1] [any option of `gcore run`]

With `--kill`, the script kills that controller with SIGKILL in the middle. Watch the view: the controller's shards move
to its peer, the run goes on, the daemon comes back, the shards return.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from gcore.client import JobsClient
from gcore.config import load_spec
from gcore.config.local_cluster import LocalClusterState
from gcore.config.spec import JobSpec, eval_sources
from gcore.data.dataset import Dataset
from gcore.errors import GcoreError
from gcore.system.clock import SystemClock
from gcore.types import entry_text


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


def run_command(spec: Path, home: Path) -> list[str]:
    """`gcore` is the script beside this Python: what it tells to type at the end begins with its path, if no shell finds it."""
    return [str(Path(sys.executable).with_name("gcore")), "run", str(spec), "--new", "--home", str(home)]


def best_constant(answers: Iterable[str]) -> tuple[str, float]:
    """The most frequent answer, and its share: the accuracy of a model that always gives it."""
    counted = Counter(answers)
    answer, count = counted.most_common(1)[0]
    return answer, count / counted.total()


def describe_best_constant(spec: JobSpec, home: Path) -> str:
    """A sentence about the best constant answer to the held-out prompts; empty if they have no answers. Raises DataError."""
    answers: list[str] = []
    for source in eval_sources(spec):
        if not source.reward.answers:
            continue
        named = {"prompt_field": source.prompt, "answer_fields": source.reward.answers, "images": source.images}
        with Dataset.open(source.path, **named, cache_dir=home / "cache") as data:
            answers += [entry_text(entry, source.reward.answer) for entry in data]
    if not answers:
        return ""
    answer, share = best_constant(answers)
    return f"The best constant answer, {answer!r}, is right for {share:.1%} of the {len(answers)} held-out prompts."


def main() -> int:
    """The exit code of `gcore run`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--kill", metavar="NODE", default="", help="controller to kill in the middle, such as node-1")
    parser.add_argument("--home", default=".gcore", type=Path)
    known, others = parser.parse_known_args()
    spec = load_spec(known.spec)
    told: list[str] = []
    if known.kill:
        killer = kill_in_the_middle(known.home, known.kill, spec.name, spec.flow.steps * 2 // 5, told)
        threading.Thread(target=asyncio.run, args=(killer,), daemon=True).start()
    run = [*run_command(known.spec, known.home), "--controllers", "2", "--slots", "cpu:2", *others]
    code = subprocess.run(run, check=False).returncode
    if known.kill and not told:
        told, code = ["Nothing was killed: the run ended before its middle."], code or 1
    for sentence in filter(None, (*told, describe_best_constant(spec, known.home))):
        print(sentence)
    return code


if __name__ == "__main__":
    sys.exit(main())

"""Run by test_train_elastic.py: worlds of several sizes that go on from one another's copies, ranks as real processes.

python train_elastic_program.py FOLDER

Each case once without an interruption, as one world of two ranks, and once as three worlds, each of which is killed after two
steps without a word of farewell, and the memory of nodes with it. No checkpoint is written.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from train_rank_program import GROUPS, SAMPLES, make_model, make_step

from gcore.ledger.balance import balance_samples
from gcore.ledger.records.chain import WorldState
from gcore.system.clock import SystemClock
from gcore.testing.models import rank_launch
from gcore.train.checkpoint.replicas import CopiesLost
from gcore.train.checkpoint.run_files import BackgroundWriter
from gcore.train.rank.feed import StepInput
from gcore.train.rank.launch import RankLaunch
from gcore.train.rank.main import RendezvousCalls, load_rank

STEPS = 6
NO_MEMORY, NO_ROOM = 5, 6
"""Lineages of a world whose memory goes away once it serves, and of one that may take next to nothing."""
PLAIN: dict[str, Any] = {"old_logprobs": "recompute", "mini_batches": GROUPS, "kl_coef": 0.1, "weight_decay": 0.1}
GAE: dict[str, Any] = {"advantage": "gae", "critic": {"learning_rate": 1e-2}, "packing": "packed"}
CASES: dict[str, dict[str, Any]] = {
    "zero1": PLAIN | {"zero_stage": 1},
    "half": PLAIN | {"zero_stage": 2, "dtype": "bf16"},
    "critic": PLAIN | GAE | {"zero_stage": 3},
}


@dataclass(frozen=True)
class Part:
    """A world of the chain: its ranks' nodes, the last step it makes, and the nodes whose memory is lost with it."""

    nodes: tuple[str, ...]
    until: int
    lost: tuple[str, ...] = ()


WORLDS = (Part(("a", "b"), 2, lost=("b",)), Part(("a",), 4), Part(("a", "b", "c"), STEPS))
SAME = (Part(("a", "b"), 2, lost=("a",)), Part(("a", "b"), 4, lost=("b",)), Part(("a", "b"), STEPS))
PARTS = dict.fromkeys(CASES, WORLDS) | {"half": SAME}
"""In half precision other sums are other numbers, so that one case has worlds of the same size, and exactly the same losses."""


def launch_of(folder: Path, case: str, name: str, lineage: int, part: Part, rank: int, start: Any) -> RankLaunch:
    spec = {
        "name": "tiny",
        "model": {"path": str(folder / "model")},
        "data": {"path": "none"},
        "flow": {"steps": 100, "groups_per_step": GROUPS, "samples_per_prompt": SAMPLES},
        "rollout": {"max_new_tokens": 12},
        "train": {"learning_rate": 5e-3, "micro_batch_tokens": 40, "schedule": "linear"} | CASES[case],
        "checkpoint": {"every": 1000},
    }
    launch = rank_launch(spec, folder / name, rank=rank, world_size=len(part.nodes), start=start)
    memory = folder / name / "memory" / part.nodes[rank]
    memory.mkdir(parents=True, exist_ok=True)
    if lineage == NO_ROOM:
        train = launch.spec.train.model_copy(update={"copies_gb": 1e-6})
        launch = launch.model_copy(update={"spec": launch.spec.model_copy(update={"train": train})})
    more = {"world": f"w{lineage}", "lineage": lineage, "nodes": part.nodes, "memory_dir": str(memory)}
    return launch.model_copy(update=more)


def rank_process(folder: Path, name: str, launch: RankLaunch) -> None:
    """Load, train to the end of the part, and die."""
    clock = SystemClock()
    address = folder / name / f"address-{launch.world}"
    loss_file = folder / name / f"losses-{launch.world}-{launch.rank}.json"

    def publish(found: str) -> None:
        address.with_suffix(".part").write_text(found)
        address.with_suffix(".part").rename(address)

    def find() -> str:
        began = clock.monotonic()
        while not address.exists():
            assert clock.monotonic() - began < 100
            threading.Event().wait(0.02)
        return address.read_text()

    try:
        writer = BackgroundWriter(launch.run_path, launch.world)
        loaded = load_rank(launch, RendezvousCalls(publish, find), clock, lambda phase: None, writer)
    except CopiesLost as error:
        (folder / name / f"refused-{launch.world}-{launch.rank}").write_text(str(error))
        os.kill(os.getpid(), signal.SIGKILL)
    if launch.lineage == NO_MEMORY:
        shutil.rmtree(launch.memory_dir)
    seal, held = make_step()
    found = []
    until = STEPS if name.endswith("whole") else launch.start.step + 2
    for step in range(launch.start.step + 1, until + 1):
        more = {"world_size": launch.world_size, "mini_batches": GROUPS, "step": step, "lineage": launch.lineage}
        cut = seal.model_copy(update=more)
        metrics = dict(loaded.run(StepInput(cut, balance_samples(cut), launch.rank, held), lambda phase: None).metrics)
        found.append(metrics)
    loss_file.write_text(json.dumps(found))
    os.kill(os.getpid(), signal.SIGKILL)


def world(folder: Path, case: str, name: str, lineage: int, part: Part, start: dict[str, Any]) -> None:
    """A whole world, to its death."""
    launches = [launch_of(folder, case, name, lineage, part, rank, start) for rank in range(len(part.nodes))]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=rank_process, args=(folder, name, one), daemon=True) for one in launches]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode != -signal.SIGKILL:
            for other in processes:
                other.kill()
            sys.exit(f"{case}: a rank of {name}, lineage {lineage}, ended with {process.exitcode}")
    for node in part.lost:
        shutil.rmtree(folder / name / "memory" / node)


def refused(folder: Path, case: str, start: dict[str, Any]) -> None:
    """Worlds that do not start: one that lacks a shard, and one that finds another damaged. And worlds without copies."""
    name, memory = f"{case}-parts", folder / f"{case}-parts" / "memory"
    world(folder, case, name, 3, Part(("a",), STEPS), start)
    (found,) = (memory / "a").glob("w2-2-6-1.0.data")
    data = bytearray(found.read_bytes())
    data[len(data) // 2] ^= 1
    found.write_bytes(data)
    world(folder, case, name, 4, Part(("a", "b"), STEPS), start)
    for lineage in (NO_MEMORY, NO_ROOM):
        world(folder, case, name, lineage, Part(("d",), STEPS), {"step": 0})


def main(folder: Path) -> None:
    import gcore.train.models  # noqa: F401

    warnings.filterwarnings("ignore")
    make_model(folder)
    gc.collect()
    gc.freeze()
    torch.set_num_threads(1)
    for case in CASES:
        world(folder, case, f"{case}-whole", 0, Part(("a", "b"), STEPS), {"step": 0})
        start: dict[str, Any] = {"step": 0}
        for lineage, part in enumerate(PARTS[case]):
            world(folder, case, f"{case}-parts", lineage, part, start)
            state = WorldState(world=f"w{lineage}", lineage=lineage, step=part.until, attempt=1, shards=len(part.nodes))
            start = {"step": part.until, "state": state.model_dump()}
        if case == "zero1":
            refused(folder, case, start)
    with contextlib.suppress(OSError):
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

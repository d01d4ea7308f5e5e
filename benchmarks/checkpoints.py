"""What checkpoints, and copies in the nodes' memory, cost the steps; and how soon a world starts from either.

**Checkpoints** (`checkpoints`): one train rank trains a qwen3 with random weights (--hidden, --layers), as it does in a job. A round is
STEPS steps; in a round with a checkpoint it is due after the first of them. The three kinds take turns, so that what else the
machine does meets all of them alike:

- beside:  as gcore does it: the step copies the state to host memory, and a thread writes it while the next steps go on;
- within:  the same, but the step waits until the checkpoint is on the disk;
- none:    no checkpoint is due.

Measured are the seconds of the first step, and of the whole round: what is written beside takes processor time from the
steps. Not in the round's seconds, but shown, is how long the write goes on after the last of its steps.

**Copies** (`copies`): two train ranks, each a process as in a job, train over gloo for --steps steps, each of which leaves its state in
two folders of /dev/shm, as two nodes would; the last also in a checkpoint. Then worlds of two ranks start --pairs times each from those
copies and from that checkpoint, in turns, and make one step. Measured are, as the ranks report it, the seconds of a step's copies (its
slowest rank's), of the rest of the step, and of a start until the rank serves. Both ranks are on this machine, so what a network
takes is not included.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.harness import Benchmark, Result, spread
from benchmarks.ranks import FEW_SAMPLES, LEARNING_RATE, load_rank, make_batches, make_model, rank_spec, ready_step

KINDS = ("beside", "within", "none")
STEPS = 5
EVERY = 1000
"""Far more than a round's steps: only a round that begins at a multiple has a checkpoint."""


class Rank:
    """One rank of a world of one."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        from gcore.testing.models import rank_launch
        from gcore.train.backends.distributed import Collective, Rendezvous, open_store

        model = make_model(folder, arguments.hidden, arguments.layers)
        meeting = Rendezvous(0, 1, "127.0.0.1")
        world = Collective.join(meeting, open_store(meeting).store)
        train = {"learning_rate": LEARNING_RATE, "micro_batch_tokens": 2048}
        spec = rank_spec(model, FEW_SAMPLES.samples, FEW_SAMPLES.longest, train, every=EVERY)
        loaded = load_rank(rank_launch(spec, folder / "run"), world)
        self.saver, self.trainer = loaded.saver, loaded.trainer
        self.parameters = sum(tensor.tensor.numel() for tensor in loaded.models.policy.tensors("served"))
        self.batch = make_batches(FEW_SAMPLES)[0]
        self.rounds = 0

    def step(self, number: int) -> None:
        work = ready_step(self.batch, step=number, rank=0, size=1, weight=4096)
        self.trainer.run(work, lambda phase: None)

    def round(self, kind: str) -> dict[str, float]:
        """Seconds of the first step, of all, and of what was still to be written after them."""
        self.rounds += 1
        number = EVERY * self.rounds + (kind == "none")
        began = perf_counter()
        self.step(number)
        if kind == "within":
            self.written()
        first = perf_counter() - began
        for more in range(1, STEPS):
            self.step(number + more)
        whole = perf_counter() - began
        began = perf_counter()
        self.written()
        return {"first_step": first, "round": whole, "left_over": perf_counter() - began}

    def written(self) -> None:
        """Wait for the disk."""
        assert self.saver.writer.wait(600)
        assert self.saver.writer.writing is None or not self.saver.writer.writing.error


def measure_checkpoints(arguments: argparse.Namespace, taken: Result) -> Result:
    """Rounds of each kind in turn."""
    use_cpu()
    with tempfile.TemporaryDirectory(dir=arguments.on) as name:
        rank = Rank(Path(name), arguments)
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for kind in KINDS:
            rank.round(kind)  # not counted: memory is allocated, kernels are chosen
        for turn in range(arguments.pairs):
            for kind in KINDS[turn % 3 :] + KINDS[: turn % 3]:
                found[kind].append(rank.round(kind))
            last = ", ".join(f"{kind} {rounds[-1]['round']:.2f} s" for kind, rounds in found.items())
            print(f"round {turn + 1} of {arguments.pairs}: {last}", flush=True)
        return taken | {
            "what": "seconds of the step with a checkpoint, and of a round of steps; one rank, one thread",
            "model": f"qwen3, {arguments.layers} layers of {arguments.hidden}, {rank.parameters / 1e6:.1f}M parameters",
            "steps_of_a_round": STEPS,
            "checkpoint_bytes": 12 * rank.parameters,
            "kinds": {
                kind: {key: spread([one[key] for one in rounds]) for key in rounds[0]} for kind, rounds in found.items()
            },
            "added_seconds": {
                f"{key}_{kind}_less_none": spread(
                    [a[key] - b[key] for a, b in zip(found[kind], found["none"], strict=True)]
                )
                for kind in ("beside", "within")
                for key in ("first_step", "round")
            },
        }


def use_cpu() -> None:
    """One thread, no GPU; before torch is imported."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    import torch

    torch.set_num_threads(1)


def model_options(parser: argparse.ArgumentParser, hidden: int) -> None:
    """Of both benchmarks."""
    parser.add_argument("--hidden", type=int, default=hidden)
    parser.add_argument("--layers", type=int, default=4)


def checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """The model and the disk."""
    model_options(parser, 256)
    parser.add_argument("--on", type=Path, help="folder on the disk that is measured; default: the temporary one")


# Copies ---------------------------------------------------------------------------------------------------------------

NODES = ("a", "b")


def rank_process(launch: Any, folder: Path, steps: int) -> None:
    """Load, train, tell, and end as if killed."""
    from gcore.system.clock import SystemClock
    from gcore.train.checkpoint.run_files import BackgroundWriter
    from gcore.train.rank.main import RendezvousCalls, load_rank

    address = folder / f"address-{launch.world}"

    def publish(found: str) -> None:
        address.with_suffix(".part").write_text(found)
        address.with_suffix(".part").rename(address)

    def find() -> str:
        while not address.exists():
            threading.Event().wait(0.01)
        return address.read_text()

    writer = BackgroundWriter(launch.run_path, launch.world)
    loaded = load_rank(launch, RendezvousCalls(publish, find), SystemClock(), lambda phase: None, writer)
    batch = make_batches(FEW_SAMPLES)[0]
    found = []
    for step in range(launch.start.step + 1, launch.start.step + steps + 1):
        work = ready_step(batch, step=step, rank=launch.rank, size=2, weight=4096, lineage=launch.lineage)
        found.append(dict(loaded.run(work, lambda phase: None).metrics))
    assert writer.wait(600)
    (folder / f"{launch.world}-{launch.rank}.json").write_text(json.dumps(found))
    os.kill(os.getpid(), signal.SIGKILL)


def world(
    folder: Path,
    memory: Path,
    arguments: argparse.Namespace,
    name: str,
    lineage: int,
    start: dict[str, Any],
    steps: int,
) -> list[dict[str, float]]:
    """A world's steps, as rank 0 tells them."""
    from gcore.testing.models import rank_launch

    train = {"learning_rate": 1e-4, "micro_batch_tokens": 2048, "copies_gb": 100}
    spec = rank_spec(folder / "model", FEW_SAMPLES.samples, FEW_SAMPLES.longest, train, every=arguments.steps)
    ranks = []
    for rank, node in enumerate(NODES):
        (memory / node).mkdir(exist_ok=True)
        launch = rank_launch(spec, folder / "run", rank=rank, world_size=2, start=start)
        more = {"world": name, "lineage": lineage, "nodes": NODES, "memory_dir": str(memory / node)}
        ranks.append((launch.model_copy(update=more), folder, steps))
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=rank_process, args=one, daemon=True) for one in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode != -signal.SIGKILL:
            sys.exit(f"a rank of world {name} ended with {process.exitcode}")
    found: list[dict[str, float]] = json.loads((folder / f"{name}-0.json").read_text())
    return found


def measure_copies(arguments: argparse.Namespace, taken: Result) -> Result:
    """Steps, then starts."""
    use_cpu()
    # Ranks are forks: what they need is imported once.
    import gcore.train.models  # noqa: F401
    from gcore.ledger.records.chain import WorldState
    from gcore.models.replicas import drop_copies
    from gcore.train.checkpoint.replicas import ReplicaRestore  # noqa: F401

    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir="/dev/shm") as in_memory:
        folder, memory = Path(name), Path(in_memory)
        make_model(folder, arguments.hidden, arguments.layers)
        steps = world(folder, memory, arguments, "first", 0, {"step": 0}, arguments.steps)
        state = WorldState(world="first", lineage=0, step=arguments.steps, attempt=1, shards=2)
        starts: dict[str, list[float]] = {"copies": [], "checkpoint": []}
        for turn in range(arguments.pairs):
            for number, kind in enumerate(starts):
                start: dict[str, Any] = {"step": arguments.steps}
                if kind == "copies":
                    start["state"] = state.model_dump()
                else:
                    start["checkpoint"] = f"checkpoints/0-{arguments.steps}"
                # All of lineage 0, as if each were the first after it: so nobody clears away what the next starts from.
                (one,) = world(folder, memory, arguments, f"{kind}{turn}x{number}", 0, start, 1)
                starts[kind].append(one["start_seconds"])
                for node in NODES:
                    drop_copies(memory / node, "j", lambda of: of.world != "first")
    copies = [one["copies_seconds"] for one in steps[1:]]  # in the first, memory is found
    copied = steps[-1]["copied_bytes"]
    return taken | {
        "what": "two ranks on one machine, each with its own and its neighbour's shard in /dev/shm; one thread a rank",
        "model": f"qwen3, {arguments.layers} layers of {arguments.hidden}, {copied / 24 / 1e6:.1f}M parameters",
        "copied_bytes": copied,
        "copies_seconds": spread(copies),
        "gigabytes_per_second": spread([copied / 1e9 / one for one in copies]),
        "update_seconds": spread([one["update_seconds"] for one in steps[1:]]),
        "start_seconds": {kind: spread(values) for kind, values in starts.items()},
    }


def copy_options(parser: argparse.ArgumentParser) -> None:
    """The model and its steps."""
    model_options(parser, 512)
    parser.add_argument("--steps", type=int, default=12)


BENCHMARKS = (
    Benchmark(
        "checkpoints",
        "checkpoints",
        measure_checkpoints,
        ("torch", "deepspeed"),
        10,
        checkpoint_options,
        exits_at_once=True,
    ),
    Benchmark("copies", "copies", measure_copies, ("torch", "deepspeed"), 5, copy_options),
)

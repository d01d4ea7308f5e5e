"""What copies in the nodes' memory cost a step, and how soon a world goes on from them beside from a checkpoint.

    make bench-copies      writes benchmarks/results/copies.json

Two train ranks, each a process as in a job, train a qwen3 with random weights (--hidden, --layers) over gloo, for --steps steps, each
of which leaves its state in two folders of /dev/shm, as two nodes would; the last also in a checkpoint. Then worlds of two ranks
start --starts times each from those copies and from that checkpoint, in turns, and make one step.

Measured are, as the ranks tell it, the seconds of a step's copies (its slowest rank's), of the rest of the step, and of a start until
the rank serves. Both ranks are on this machine, so that what a network takes is not among them.
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
from typing import Any

NODES = ("a", "b")


def rank_process(launch: Any, folder: Path, steps: int) -> None:
    """Load, train, tell, and end as if killed."""
    from trainer_sides import Case, make_batches, ready_step

    from gcore.clock import SystemClock
    from gcore.train.loading import Meet, load
    from gcore.train.writing import CheckpointWriter

    address = folder / f"address-{launch.world}"

    def publish(found: str) -> None:
        address.with_suffix(".part").write_text(found)
        address.with_suffix(".part").rename(address)

    def find() -> str:
        while not address.exists():
            threading.Event().wait(0.01)
        return address.read_text()

    writer = CheckpointWriter(launch.run_path, launch.world)
    loaded = load(launch, Meet(publish, find), SystemClock(), lambda phase: None, writer)
    batch = make_batches(Case("few samples", 16, 20, 64))[0]
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
    from gcore.testing.rank_launch import rank_launch

    spec = {
        "name": "bench",
        "model": {"path": str(folder / "model")},
        "data": {"path": "none"},
        "flow": {"steps": 10**6, "groups_per_step": 2, "samples_per_prompt": 8},
        "rollout": {"max_new_tokens": 64},
        "train": {"learning_rate": 1e-4, "old_logprobs": "engine", "micro_batch_tokens": 2048, "copies_gb": 100},
        "checkpoint": {"every": arguments.steps},
    }
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--starts", type=int, default=5, help="from copies, and from the checkpoint")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--out", default="copies", help="the result's name")
    arguments = parser.parse_args()
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    import measured
    import torch
    from trainer import make_model

    import gcore.train.models  # noqa: F401
    from gcore.ledger.world_state import WorldState
    from gcore.train.copied import Copies  # noqa: F401
    from gcore.weights.copies import drop

    torch.set_num_threads(1)
    result = measured.circumstances("torch", "deepspeed")
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir="/dev/shm") as in_memory:
        folder, memory = Path(name), Path(in_memory)
        made = make_model(folder, arguments.hidden, arguments.layers)
        if made != folder / "model":
            made.rename(folder / "model")
        steps = world(folder, memory, arguments, "first", 0, {"step": 0}, arguments.steps)
        state = WorldState(world="first", lineage=0, step=arguments.steps, attempt=1, shards=2)
        starts: dict[str, list[float]] = {"copies": [], "checkpoint": []}
        for turn in range(arguments.starts):
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
                    drop(memory / node, "j", lambda of: of.world != "first")
    copies = [one["copies_seconds"] for one in steps[1:]]  # in the first, memory is found
    copied = steps[-1]["copied_bytes"]
    result |= {
        "what": "two ranks on one machine, each with its own and its neighbour's shard in /dev/shm; one thread a rank",
        "model": f"qwen3, {arguments.layers} layers of {arguments.hidden}, {copied / 24 / 1e6:.1f}M parameters",
        "copied_bytes": copied,
        "copies_seconds": measured.spread(copies),
        "gigabytes_per_second": measured.spread([copied / 1e9 / one for one in copies]),
        "update_seconds": measured.spread([one["update_seconds"] for one in steps[1:]]),
        "start_seconds": {kind: measured.spread(values) for kind, values in starts.items()},
    }
    print(
        json.dumps({key: result[key] for key in ("copies_seconds", "gigabytes_per_second", "start_seconds")}, indent=1)
    )
    print(measured.write(arguments.out, result))


if __name__ == "__main__":
    main()

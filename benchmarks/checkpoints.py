"""The cost of checkpoints for the training steps.

One train rank trains a qwen3 with random weights (--hidden, --layers), as it does in a job. A round has `STEPS` steps; in a round with a
checkpoint it is due after the first of them. The three kinds alternate, so that other load on the machine affects all of them alike:

- beside:  gcore's way: the step copies the state to host memory, and a thread writes it during the next steps.

- within:  the same, but the step waits until the checkpoint is on the disk.

- none:    no checkpoint is due.

The result has the seconds of the first step and of the whole round: a background write takes processor time from the
steps. It also shows the time from the last step to the end of the write, which is not part of the round's seconds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from time import perf_counter

from benchmarks.harness import Benchmark, Result, spread
from benchmarks.trainer import FEW_SAMPLES, LEARNING_RATE, load_rank, make_batches, make_model, rank_spec, ready_step

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


def measure(arguments: argparse.Namespace, taken: Result) -> Result:
    """Rounds of each kind in turn."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    import torch

    torch.set_num_threads(1)
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


def options(parser: argparse.ArgumentParser) -> None:
    """The model and the disk."""
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--on", type=Path, help="folder on the disk that is measured; default: the temporary one")


BENCHMARKS = (
    Benchmark("checkpoints", "checkpoints", measure, ("torch", "deepspeed"), 10, options, exits_at_once=True),
)

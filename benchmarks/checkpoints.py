"""What a checkpoint costs the steps: written beside them, written within one, and none at all.

    make bench-checkpoints      writes benchmarks/results/checkpoints.json

One train rank trains a qwen3 with random weights (--hidden, --layers), as it does in a job. A round is STEPS steps; in a round
with a checkpoint it is due after the first of them. The three kinds take turns, so that what else the machine does meets all
of them alike:

- beside:  as gcore does it: the step copies the state to host memory, and a thread writes it while the next steps go on;
- within:  the same, but the step waits until the checkpoint is on the disk, which is what it did before there was a thread;
- none:    no checkpoint is due.

Measured are the seconds of the first step, and of the whole round: what is written beside takes processor time from the
steps. Not in the round's seconds, but shown, is how long the write goes on after the last of its steps.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from time import perf_counter

KINDS = ("beside", "within", "none")
STEPS = 5
EVERY = 1000
"""Far more than a round's steps: only a round that begins at a multiple has a checkpoint."""


class Rank:
    """One rank of a world of one."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        from trainer import make_model
        from trainer_sides import LEARNING_RATE, Case, make_batches

        from gcore.clock import SystemClock
        from gcore.testing.rank_launch import rank_launch
        from gcore.train.collective import Collective, Meeting, open_store
        from gcore.train.models import load_models
        from gcore.train.saving import Progress, Saver
        from gcore.train.step import StepTrainer

        model = make_model(folder, arguments.hidden, arguments.layers)
        case = Case("few samples, so that a step is short beside its checkpoint", 16, 20, 64)
        meeting = Meeting(0, 1, "127.0.0.1")
        world = Collective.join(meeting, open_store(meeting).store)
        spec = {
            "name": "bench",
            "model": {"path": str(model)},
            "data": {"path": "none"},
            "flow": {"steps": 10**6, "groups_per_step": case.samples // 8, "samples_per_prompt": 8},
            "rollout": {"max_new_tokens": case.longest},
            "train": {"learning_rate": LEARNING_RATE, "old_logprobs": "engine", "micro_batch_tokens": 2048},
            "checkpoint": {"every": EVERY},
        }
        launch = rank_launch(spec, folder / "run")
        models = load_models(launch, world.device, world.max, lambda: None)
        self.saver = Saver(launch, models.policy)
        self.trainer = StepTrainer(launch, world, models, self.saver, SystemClock(), Progress(0, 0))
        self.parameters = sum(tensor.tensor.numel() for tensor in models.policy.tensors("served"))
        self.batch = make_batches(case)[0]
        self.rounds = 0

    def step(self, number: int) -> None:
        from trainer_sides import ready_step

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="of each kind")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--on", type=Path, default=None, help="folder on the disk that is measured; default: the temporary one"
    )
    parser.add_argument("--out", default="checkpoints", help="the result's name")
    arguments = parser.parse_args()
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    import measured
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.on) as name:
        rank = Rank(Path(name), arguments)
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for kind in KINDS:
            rank.round(kind)  # once for nothing: memory is found, kernels are chosen
        result = measured.circumstances("torch", "deepspeed")
        for turn in range(arguments.rounds):
            for kind in (*KINDS[turn % 3 :], *KINDS[: turn % 3]):
                found[kind].append(rank.round(kind))
            last = ", ".join(f"{kind} {rounds[-1]['round']:.2f} s" for kind, rounds in found.items())
            print(f"round {turn + 1} of {arguments.rounds}: {last}", flush=True)
        copied = 12 * rank.parameters
        result |= {
            "what": "seconds of the step with a checkpoint, and of a round of steps; one rank, one thread",
            "model": f"qwen3, {arguments.layers} layers of {arguments.hidden}, {rank.parameters / 1e6:.1f}M parameters",
            "steps_of_a_round": STEPS,
            "checkpoint_bytes": copied,
            "kinds": {
                kind: {key: measured.spread([one[key] for one in rounds]) for key in rounds[0]}
                for kind, rounds in found.items()
            },
        }
        pairs = {
            f"{key}_{kind}_less_none": measured.spread(
                [a[key] - b[key] for a, b in zip(found[kind], found["none"], strict=True)]
            )
            for kind in ("beside", "within")
            for key in ("first_step", "round")
        }
        result["added_seconds"] = pairs
    for kind in KINDS:
        numbers = result["kinds"][kind]
        print(
            f"{kind}: first step {numbers['first_step']['median']:.3f} s, round {numbers['round']['median']:.3f} s, "
            f"left over {numbers['left_over']['median']:.3f} s"
        )
    for name, value in pairs.items():
        print(f"{name}: {value['median']:.3f} s [{value['least']:.3f}, {value['most']:.3f}]")
    print(f"checkpoint of {copied / 1e6:.0f} MB; {measured.write(arguments.out, result)}")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort the interpreter on its way out


if __name__ == "__main__":
    main()

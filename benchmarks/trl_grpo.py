"""TRL's `GRPOTrainer` on the arithmetic example's model: the other side of `benchmarks/grpo_step.py`, run in an
environment of its own (`make bench-grpo` builds it). Prints one JSON line with the seconds of each step.

Set as `grpo_step.py` sets gcore: the same model, prompts, reward, sizes, learning rate, loss (token-mean over the batch,
one update a step, no reference), float32, every response exactly `--tokens` long. `--processes` of torch.distributed are
started by `torchrun` around it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from time import perf_counter

import torch


def main() -> None:
    """Train, and say how long each step took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="tokens of each response")
    parser.add_argument("--completions", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--work", type=Path, required=True, help="folder for what the trainer writes")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Steps(TrainerCallback):
        """When each step ended."""

        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: object, **__: object) -> None:
            self.ends.append(perf_counter())

    def exact(completions: list[str], answer: list[str], **_: object) -> list[float]:
        return [float(text.strip() == wanted) for text, wanted in zip(completions, answer, strict=True)]

    entries = [json.loads(line) for line in arguments.data.read_text().splitlines()]
    world = int(os.environ.get("WORLD_SIZE", "1"))
    config = GRPOConfig(
        output_dir=str(arguments.work),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=arguments.completions // world,
        num_generations=arguments.samples,
        max_completion_length=arguments.tokens,
        generation_kwargs={"min_new_tokens": arguments.tokens},
        max_steps=arguments.steps,
        learning_rate=3e-4,
        lr_scheduler_type="linear",
        adam_beta2=0.95,
        max_grad_norm=1.0,
        loss_type="dapo",
        beta=0.0,
        temperature=1.0,
        logging_steps=10_000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=0,
    )
    steps = Steps()
    trainer = GRPOTrainer(
        model=str(arguments.model),
        reward_funcs=exact,
        args=config,
        train_dataset=Dataset.from_list(entries),
        callbacks=[steps],
    )
    trainer.train()
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row]
    if int(os.environ.get("RANK", "0")) == 0:
        seconds = [later - sooner for sooner, later in zip(steps.ends, steps.ends[1:], strict=False)]
        print(json.dumps({"seconds": seconds, "mean_length": lengths[-1] if lengths else None}), flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

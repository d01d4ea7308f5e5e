"""The two sides of `trainer.py`, a process each: the plain loop, and a rank of gcore.

A side answers on descriptor 3, a line of JSON a step, to lines of JSON on its input; its own output is for its errors.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

VOCABULARY, PROMPT, BATCHES = 512, 5, 4
LEARNING_RATE, CLIP, NORM = 3e-4, 0.2, 1.0


@dataclass(frozen=True)
class Case:
    """`samples` responses whose lengths have this median and longest (equal ones if they are the same)."""

    name: str
    samples: int
    median: int
    longest: int

    def lengths(self, rng: np.random.Generator) -> list[int]:
        if self.median == self.longest:
            return [self.longest] * self.samples
        drawn = np.exp(rng.normal(np.log(self.median), 0.9, self.samples)).round()
        return [int(n) for n in drawn.clip(2, self.longest)]


CASES = (
    Case("prompt 5 + 4 tokens", 512, 4, 4),
    Case("up to 64 tokens, long tail", 192, 20, 64),
    Case("up to 256 tokens, long tail", 64, 60, 256),
)


@dataclass(frozen=True)
class Batch:
    """Samples of one step: prompts [n, PROMPT], responses, the engine's log-probabilities, rewards; groups of 8."""

    prompts: np.ndarray
    responses: list[np.ndarray]
    logprobs: list[np.ndarray]
    rewards: np.ndarray


def make_batches(case: Case) -> list[Batch]:
    """The same for everybody."""
    found = []
    for number in range(BATCHES):
        rng = np.random.default_rng([number, case.samples, case.longest])
        lengths = case.lengths(rng)
        prompts = rng.integers(0, VOCABULARY, (case.samples // 8, PROMPT)).repeat(8, axis=0).astype(np.int32)
        responses = [rng.integers(0, VOCABULARY, n).astype(np.int32) for n in lengths]
        # About what random weights make of random tokens; what the ratio begins with does not matter.
        logprobs = [(-np.log(VOCABULARY) + rng.normal(0, 0.05, n)).astype(np.float32) for n in lengths]
        found.append(Batch(prompts, responses, logprobs, rng.integers(0, 2, case.samples).astype(np.float32)))
    return found


# The plain loop -------------------------------------------------------------------------------------------------------


class Plain:
    """A loop as one writes it."""

    def __init__(self, model: Path, budget: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.budget = budget

    def micro_batches(self, batch: Batch) -> list[list[int]]:
        order = sorted(range(len(batch.responses)), key=lambda i: -len(batch.responses[i]))
        found: list[list[int]] = []
        for i in order:
            longest = PROMPT + len(batch.responses[found[-1][0]]) if found else 0
            if found and (len(found[-1]) + 1) * longest <= self.budget:
                found[-1].append(i)
            else:
                found.append([i])
        return found

    def step(self, batch: Batch) -> dict[str, float]:
        import torch
        from torch.nn import functional

        rewards = torch.from_numpy(batch.rewards).view(-1, 8)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
        total = sum(len(response) for response in batch.responses)
        losses = 0.0
        for rows in self.micro_batches(batch):
            width = max(len(batch.responses[i]) for i in rows)
            ids = torch.zeros(len(rows), PROMPT + width, dtype=torch.long)
            mask, old = torch.zeros(len(rows), width), torch.zeros(len(rows), width)
            for row, i in enumerate(rows):
                n = len(batch.responses[i])
                ids[row, :PROMPT] = torch.from_numpy(batch.prompts[i])
                ids[row, PROMPT : PROMPT + n] = torch.from_numpy(batch.responses[i])
                mask[row, :n] = 1
                old[row, :n] = torch.from_numpy(batch.logprobs[i])
            logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=width + 1).logits[:, :-1]
            nll = functional.cross_entropy(logits.flatten(0, 1), ids[:, PROMPT:].flatten(), reduction="none")
            ratio = (-nll.view(len(rows), width) - old).exp()
            advantage = advantages[rows, None]
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP))
            loss = (loss * mask).sum() / total
            loss.backward()
            losses += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": losses, "grad_norm": float(norm)}


# gcore ----------------------------------------------------------------------------------------------------------------


class Phases:
    """Processor seconds from where saving began."""

    def __init__(self) -> None:
        self._began: float | None = None

    def tell(self, phase: str) -> None:
        if phase == "saving" and self._began is None:
            self._began = process_time()

    def saving(self) -> float:
        return 0.0 if self._began is None else process_time() - self._began


class Gcore:
    """One rank of a train world."""

    def __init__(self, model: Path, folder: Path, case: Case, budget: int, rank: int, size: int) -> None:
        from gcore.clock import SystemClock
        from gcore.ledger.cost import attention_equals_at
        from gcore.testing.rank_launch import rank_launch
        from gcore.train.collective import Collective, Meeting, find_store, open_store
        from gcore.train.models import load_models
        from gcore.train.saving import Progress, Saver
        from gcore.train.step import StepTrainer

        meeting = Meeting(rank, size, "127.0.0.1")
        if rank == 0:
            opened = open_store(meeting)
            say(address=opened.address)
            store = opened.store
        else:
            store = find_store(hear()["address"], meeting)
        world = Collective.join(meeting, store)
        spec = {
            "name": "bench",
            "model": {"path": str(model)},
            "data": {"path": "none"},
            "flow": {"steps": 1_000_000, "groups_per_step": case.samples // 8, "samples_per_prompt": 8},
            "rollout": {"max_new_tokens": case.longest},
            "train": {
                "learning_rate": LEARNING_RATE,
                "betas": [0.9, 0.95],
                "old_logprobs": "engine",
                "max_grad_norm": NORM,
                "micro_batch_tokens": budget,
            },
            "checkpoint": {"every": 1_000_000},
        }
        launch = rank_launch(spec, folder / f"run-{size}", rank=rank, world_size=size)
        models = load_models(launch, world.device, world.max, lambda: None)
        self.trainer = StepTrainer(launch, world, models, Saver(launch, models.policy), SystemClock(), Progress(0, 0))
        self.weight = attention_equals_at(json.loads((model / "config.json").read_text()))
        self.rank, self.size, self.number = rank, size, 0

    def step(self, batch: Batch) -> dict[str, float]:
        """Seconds are those of everything but saving."""
        self.number += 1
        work = ready_step(batch, step=self.number, rank=self.rank, size=self.size, weight=self.weight)
        timer = Phases()
        began, busy = perf_counter(), process_time()
        result = self.trainer.run(work, timer.tell)
        seconds, busy = perf_counter() - began, process_time() - busy
        kept = ("loss", "grad_norm", "padding", "cut_seconds", "update_seconds", "saving_seconds")
        found = {"seconds": seconds - result.metrics["saving_seconds"], "cpu_seconds": busy - timer.saving()}
        return found | {name: result.metrics[name] for name in kept}


def ready_step(batch: Batch, *, step: int, rank: int, size: int, weight: int, lineage: int = 0) -> Any:
    """A batch as rank `rank` of `size` holds it once its seal is READY. `weight`: see `gcore.ledger.cost`."""
    from gcore.ledger.balance import balance
    from gcore.ledger.records import Seal, SealedGroup, SealState
    from gcore.train.feed_state import HeldGroup, HeldSample, Work
    from gcore.types import PromptRef, Version

    sealed, held = [], {}
    for group in range(len(batch.responses) // 8):
        rows = range(8 * group, 8 * group + 8)
        ref, digest = PromptRef(0, 0, group), f"{group:032x}"
        samples = {
            k: HeldSample(batch.responses[i], batch.logprobs[i], float(batch.rewards[i])) for k, i in enumerate(rows)
        }
        held[digest] = HeldGroup(ref, digest, batch.prompts[rows[0]], samples)
        lengths = tuple(len(batch.responses[i]) for i in rows)
        sealed.append(
            SealedGroup(
                ref=ref,
                digest=digest,
                prompt_tokens=PROMPT,
                response_tokens=lengths,
                versions=(Version(0, 0),),
                holder="h",
            )
        )
    seal = Seal(
        lineage=lineage,
        step=step,
        attempt=1,
        state=SealState.READY,
        world="w",
        world_size=size,
        mini_batches=1,
        groups=tuple(sealed),
        attention_equals_at=weight,
    )
    return Work(seal, balance(seal), rank, held)


# The processes --------------------------------------------------------------------------------------------------------


def say(**message: Any) -> None:
    os.write(3, json.dumps(message).encode() + b"\n")


def hear() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(sys.stdin.readline())
    return found


def main() -> None:
    """Steps as it is told, until its input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=("plain", "gcore"))
    parser.add_argument("--folder", type=Path, required=True, help="where the model is, in folder/model")
    for name in ("--case", "--budget", "--rank", "--size", "--threads"):
        parser.add_argument(name, type=int, required=True)
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(arguments.threads)
    case = CASES[arguments.case]
    batches, model = make_batches(case), arguments.folder / "model"
    side: Plain | Gcore
    if arguments.side == "plain":
        side = Plain(model, arguments.budget)
    else:
        side = Gcore(model, arguments.folder, case, arguments.budget, arguments.rank, arguments.size)
    say(ready=True)
    for line in sys.stdin:
        batch = batches[json.loads(line)["batch"]]
        began, busy = perf_counter(), process_time()
        found = side.step(batch)
        own = {"seconds": perf_counter() - began, "cpu_seconds": process_time() - busy}
        say(**(own | found))
    os._exit(0)  # gloo's threads may abort the interpreter on its way out


if __name__ == "__main__":
    main()

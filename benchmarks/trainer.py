"""An optimizer step of the trainer beside a plain PyTorch loop on the same samples.

The model is a qwen3 of 1.0M parameters with random weights (--hidden and --layers make it larger). A step is one update on
all samples of a case: GRPO's clipped loss with token mean, gradient clipping, AdamW. Cases: short responses, and responses
with a long tail up to 64 and 256 tokens.

gcore is one train rank, or two, as they run in a job (DeepSpeed ZeRO-1 over gloo, `StepTrainer`), from the sealed samples
to the updated weights, with all that a step measures and agrees on; only writing weights to the disk is left out. The
plain loop is what a competent person writes: micro-batches of the same token budget, sorted by length and padded on the
right, logits of the responses only, fused attention and Adam, no mask. Each has as many threads as the other: one rank
against one thread, two ranks against two threads (so the ratio is one per core). Both wait passively.

Before anything is measured, ten updates on both sides must have the same losses. Then the sides take turns, step by step;
a pair is one step of each on the same samples, and its ratio the plain loop's seconds through gcore's: above 1, gcore is
faster. The ratio of processor seconds stands beside it: other processes disturb that one less.

Each side is a process of this module, and more than one for a world of several ranks (`python -m benchmarks.trainer SIDE`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, process_time

from benchmarks.harness import Benchmark, Child, Result, send_parent, spread
from benchmarks.ranks import (
    BATCHES,
    GROUP,
    LEARNING_RATE,
    PROMPT,
    VOCABULARY,
    Batch,
    Case,
    load_rank,
    make_batches,
    make_model,
    rank_spec,
    ready_step,
)

CLIP, NORM = 0.2, 1.0
CHECKED = 10
"""Updates whose losses are compared before anything is measured."""
CASES = (
    Case("prompt 5 + 4 tokens", 512, 4, 4),
    Case("up to 64 tokens, long tail", 192, 20, 64),
    Case("up to 256 tokens, long tail", 64, 60, 256),
)


# The sides ------------------------------------------------------------------------------------------------------------


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

        rewards = torch.from_numpy(batch.rewards).view(-1, GROUP)
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
        from gcore.ledger.records.cluster import attention_equals_at
        from gcore.testing.models import rank_launch
        from gcore.train.backends.distributed import Collective, Rendezvous, find_store, open_store

        meeting = Rendezvous(rank, size, "127.0.0.1")
        if rank == 0:
            opened = open_store(meeting)
            send_parent(address=opened.address)
            store = opened.store
        else:
            store = find_store(json.loads(sys.stdin.readline())["address"], meeting)
        world = Collective.join(meeting, store)
        train = {
            "learning_rate": LEARNING_RATE,
            "betas": [0.9, 0.95],
            "max_grad_norm": NORM,
            "micro_batch_tokens": budget,
        }
        spec = rank_spec(model, case.samples, case.longest, train)
        launch = rank_launch(spec, folder / f"run-{size}", rank=rank, world_size=size)
        self.trainer = load_rank(launch, world).trainer
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


def side_main() -> None:
    """A side as a process: a step for each line of input, until the input ends."""
    parser = argparse.ArgumentParser(description=side_main.__doc__)
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
    send_parent(ready=True)
    for line in sys.stdin:
        batch = batches[json.loads(line)["batch"]]
        began, busy = perf_counter(), process_time()
        figures = side.step(batch)
        own = {"seconds": perf_counter() - began, "cpu_seconds": process_time() - busy}
        send_parent(**(own | figures))
    os._exit(0)  # gloo's threads may abort the interpreter at its end


# The comparison -------------------------------------------------------------------------------------------------------


class Side:
    """The processes of one side."""

    def __init__(self, folder: Path, case: int, budget: int, side: str, size: int, threads: int) -> None:
        words = ["--folder", str(folder), "--case", str(case), "--budget", str(budget), "--size", str(size)]
        words += ["--threads", str(threads)]
        self.ranks = [Child("trainer", side, *words, "--rank", str(rank), threads=threads) for rank in range(size)]
        if side == "gcore":
            address = self.ranks[0].answer()["address"]
            for rank in self.ranks[1:]:
                rank.send(address=address)
        for rank in self.ranks:
            assert rank.answer()["ready"]

    def step(self, batch: int) -> dict[str, float]:
        """One step, on all ranks; the slowest's seconds, and the processor seconds of all."""
        for rank in self.ranks:
            rank.send(batch=batch)
        answers = [rank.answer() for rank in self.ranks]
        cpu = sum(answer["cpu_seconds"] for answer in answers)
        return answers[0] | {"seconds": max(answer["seconds"] for answer in answers), "cpu_seconds": cpu}

    def end(self) -> None:
        """Stop its processes."""
        for rank in self.ranks:
            rank.end()


@contextmanager
def both(folder: Path, case: int, budget: int, ranks: int) -> Iterator[tuple[Side, Side]]:
    """The plain loop and gcore, with as many threads."""
    plain = Side(folder, case, budget, "plain", 1, ranks)
    gcore = Side(folder, case, budget, "gcore", ranks, 1)
    try:
        yield plain, gcore
    finally:
        plain.end()
        gcore.end()


def compare(folder: Path, case: int, ranks: int, arguments: argparse.Namespace) -> Result:
    """One case: equal losses first, then pairs."""
    with both(folder, case, arguments.budget, ranks) as (plain, gcore):
        checked = [(plain.step(n % BATCHES)["loss"], gcore.step(n % BATCHES)["loss"]) for n in range(CHECKED)]
        apart = max(abs(a - b) / max(abs(a), 1e-2) for a, b in checked)
        if apart > arguments.tolerance:
            raise SystemExit(f"the losses differ by {apart:.2e} (plain, gcore): {checked}")
        pairs = []
        for number in range(arguments.pairs):
            turns = (plain, gcore) if number % 2 == 0 else (gcore, plain)
            answers = {id(side): side.step(number % BATCHES) for side in turns}
            pairs.append((answers[id(plain)], answers[id(gcore)]))
    ratios = [a["seconds"] / b["seconds"] for a, b in pairs]
    tokens = sum(PROMPT + len(response) for response in make_batches(CASES[case])[0].responses)
    return {
        "case": CASES[case].name,
        "samples": CASES[case].samples,
        "tokens_of_the_first_batch": tokens,
        "ranks": ranks,
        "losses_apart_at_most": float(f"{apart:.2e}"),
        "ratio": spread(ratios),
        "cpu_ratio": spread([a["cpu_seconds"] / b["cpu_seconds"] for a, b in pairs]),
        "plain_seconds": spread([a["seconds"] for a, _ in pairs]),
        "gcore_seconds": spread([b["seconds"] for _, b in pairs]),
        "gcore_saving_seconds": spread([b["saving_seconds"] for _, b in pairs]),
        "gcore_padding": spread([b["padding"] for _, b in pairs]),
        "pairs": [[round(a["seconds"], 4), round(b["seconds"], 4)] for a, b in pairs],
    }


def measure(arguments: argparse.Namespace, taken: Result) -> Result:
    """All cases, with each number of ranks."""
    result = taken | {
        "what": "plain loop's seconds through gcore's, an optimizer step on the same samples; threads equal",
        "model": f"qwen3, {arguments.layers} layers of {arguments.hidden}, vocabulary {VOCABULARY}, random weights",
        "micro_batch_tokens": arguments.budget,
        "cases": [],
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, arguments.hidden, arguments.layers)
        for case in arguments.only:
            for ranks in arguments.ranks:
                found = compare(folder, case, ranks, arguments)
                result["cases"].append(found)
                print(f"{found['case']}, {ranks} rank(s): ratio {found['ratio']}", flush=True)
    return result


def options(parser: argparse.ArgumentParser) -> None:
    """Sizes and cases."""
    parser.add_argument("--budget", type=int, default=2048, help="micro_batch_tokens, on both sides")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tolerance", type=float, default=1e-5, help="of the losses, relative")
    parser.add_argument("--only", type=int, nargs="*", default=range(len(CASES)), help="cases, by number")
    parser.add_argument("--ranks", type=int, nargs="*", default=(1, 2))


BENCHMARKS = (Benchmark("trainer", "trainer", measure, ("torch", "transformers", "deepspeed"), 20, options),)

if __name__ == "__main__":
    side_main()

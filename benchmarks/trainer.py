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
faster. Two ratios stand beside it that other processes disturb less: of processor seconds, and of the seconds without those in
which other processes had the cores (`own_ratio`).

Each side is a process of this module, and more than one for a world of several ranks (`python -m benchmarks.trainer SIDE`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Child, Result, Stopwatch, send_parent, slowed, spread

# Ranks without a cluster ----------------------------------------------------------------------------------------------

VOCABULARY, PROMPT, BATCHES, GROUP = 512, 5, 4, 8
LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class Case:
    """`samples` responses whose lengths have this median and longest (equal ones if they are the same)."""

    name: str
    samples: int
    median: int
    longest: int

    def lengths(self, rng: np.random.Generator) -> list[int]:
        """Of all responses, in tokens."""
        if self.median == self.longest:
            return [self.longest] * self.samples
        drawn = np.exp(rng.normal(np.log(self.median), 0.9, self.samples)).round()
        return [int(n) for n in drawn.clip(2, self.longest)]


FEW_SAMPLES = Case("few samples, so that a step is short beside its checkpoint", 16, 20, 64)


@dataclass(frozen=True)
class Batch:
    """Samples of one step: prompts [n, PROMPT], responses, the engine's log-probabilities, rewards; groups of `GROUP`."""

    prompts: np.ndarray
    responses: list[np.ndarray]
    logprobs: list[np.ndarray]
    rewards: np.ndarray


def make_batches(case: Case) -> list[Batch]:
    """The same in every process."""
    found = []
    for number in range(BATCHES):
        rng = np.random.default_rng([number, case.samples, case.longest])
        lengths = case.lengths(rng)
        prompts = rng.integers(0, VOCABULARY, (case.samples // GROUP, PROMPT)).repeat(GROUP, axis=0).astype(np.int32)
        responses = [rng.integers(0, VOCABULARY, n).astype(np.int32) for n in lengths]
        # About what random weights make of random tokens; the ratio's first value does not matter.
        logprobs = [(-np.log(VOCABULARY) + rng.normal(0, 0.05, n)).astype(np.float32) for n in lengths]
        found.append(Batch(prompts, responses, logprobs, rng.integers(0, 2, case.samples).astype(np.float32)))
    return found


def make_model(folder: Path, hidden: int, layers: int) -> Path:
    """A qwen3 with random weights, in folder/model."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    (folder / "model" / "tokenizer.json").write_text("{}")
    return folder / "model"


def rank_spec(model: Path | str, samples: int, longest: int, train: Mapping[str, Any], every: int = 10**6) -> Any:
    """The spec of a job that a rank is started for. `every`: steps between checkpoints."""
    return {
        "name": "bench",
        "model": {"path": str(model)},
        "data": {"path": "none"},
        "flow": {"steps": 10**6, "groups_per_step": samples // GROUP, "samples_per_prompt": GROUP},
        "rollout": {"max_new_tokens": longest},
        "train": {"old_logprobs": "engine", **train},
        "checkpoint": {"every": every},
    }


def ready_step(batch: Batch, *, step: int, rank: int, size: int, weight: int) -> Any:
    """A batch as rank `rank` of `size` holds it once its seal is READY. `weight`: see `gcore.ledger.records.cluster`."""
    from gcore.ledger.balance import balance_samples
    from gcore.ledger.records.chain import Seal, SealedGroup, SealState
    from gcore.train.rank.feed import StepInput, TrainGroup, TrainSample
    from gcore.types import PromptRef, Version

    sealed, held = [], {}
    for group in range(len(batch.responses) // GROUP):
        rows = range(GROUP * group, GROUP * (group + 1))
        ref, digest = PromptRef(0, 0, group), f"{group:032x}"
        samples = {
            k: TrainSample(batch.responses[i], batch.logprobs[i], float(batch.rewards[i])) for k, i in enumerate(rows)
        }
        held[digest] = TrainGroup(ref, digest, batch.prompts[rows[0]], samples)
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
        lineage=0,
        step=step,
        attempt=1,
        state=SealState.READY,
        world="w",
        world_size=size,
        mini_batches=1,
        groups=tuple(sealed),
        attention_equals_at=weight,
    )
    return StepInput(seal, balance_samples(seal), rank, held)


@dataclass(frozen=True)
class LoadedRank:
    """A rank that has joined its world and loaded its models, with what writes its checkpoints."""

    models: Any
    saver: Any
    trainer: Any


def load_rank(launch: Any, world: Any) -> LoadedRank:
    """`world`: a joined `Collective`."""
    from gcore.system.clock import SystemClock
    from gcore.train.checkpoint.writer import CheckpointWriter, FolderPublisher, UpdateCounts
    from gcore.train.models import load_models
    from gcore.train.step import StepTrainer

    models = load_models(launch, world.device, world.max, lambda: None)
    saver = CheckpointWriter(launch, models.policy, models.critic)
    publisher = FolderPublisher(launch, models.policy, saver.writer, saver.insisting, world.max)
    trainer = StepTrainer(launch, world, models, saver, publisher, SystemClock(), UpdateCounts(0, 0))
    return LoadedRank(models, saver, trainer)


# Cases ----------------------------------------------------------------------------------------------------------------

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
        self.folder, self.budget = model, budget

    def begin(self, case: Case) -> None:
        """Load the model; what the case is makes no difference."""
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

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
    """What a step had taken when it began to save."""

    def __init__(self) -> None:
        self._watch = Stopwatch()
        self.spent: dict[str, float] = {}

    def tell(self, phase: str) -> None:
        if phase == "saving" and not self.spent:
            self.spent = self._watch.spent()


class Gcore:
    """A train rank, without its process around it."""

    def __init__(self, model: Path, folder: Path, budget: int, rank: int, size: int) -> None:
        from gcore.ledger.records.cluster import attention_equals_at
        from gcore.train.backends.distributed import Collective, Rendezvous, find_store, open_store

        meeting = Rendezvous(rank, size, "127.0.0.1")
        if rank == 0:
            opened = open_store(meeting)
            send_parent(address=opened.address)
            store = opened.store
        else:
            store = find_store(json.loads(sys.stdin.readline())["address"], meeting)
        self.world = Collective.join(meeting, store)
        self.model, self.folder, self.budget = model, folder, budget
        self.weight = attention_equals_at(json.loads((model / "config.json").read_text()))
        self.rank, self.size, self.number = rank, size, 0
        self.trainer: Any = None

    def begin(self, case: Case) -> None:
        """Load the model, for a job of this case."""
        from gcore.testing.models import rank_launch

        train = {
            "learning_rate": LEARNING_RATE,
            "betas": [0.9, 0.95],
            "max_grad_norm": NORM,
            "micro_batch_tokens": self.budget,
        }
        spec = rank_spec(self.model, case.samples, case.longest, train)
        place = self.folder / f"run-{self.size}-{case.samples}"
        self.trainer = load_rank(rank_launch(spec, place, rank=self.rank, world_size=self.size), self.world).trainer
        self.number = 0

    def step(self, batch: Batch) -> dict[str, float]:
        """Seconds are those of everything but saving."""
        self.number += 1
        work = ready_step(batch, step=self.number, rank=self.rank, size=self.size, weight=self.weight)
        timer = Phases()
        began = perf_counter()
        result = self.trainer.run(work, timer.tell)
        seconds = perf_counter() - began
        kept = ("loss", "grad_norm", "padding", "cut_seconds", "update_seconds", "saving_seconds")
        found = timer.spent | {"seconds": seconds - result.metrics["saving_seconds"]}
        return found | {name: result.metrics[name] for name in kept}


def side_main() -> None:
    """A side as a process: for each line of input it begins a case, or makes a step, until the input ends."""
    parser = argparse.ArgumentParser(description=side_main.__doc__)
    parser.add_argument("side", choices=("plain", "gcore"))
    parser.add_argument("--folder", type=Path, required=True, help="where the model is, in folder/model")
    for name in ("--budget", "--rank", "--size", "--threads"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--slowed", action="store_true")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(arguments.threads)
    model = arguments.folder / "model"
    side: Plain | Gcore
    if arguments.side == "plain":
        side = Plain(model, arguments.budget)
    else:
        side = Gcore(model, arguments.folder, arguments.budget, arguments.rank, arguments.size)
        if arguments.slowed:
            from gcore.train.step import StepTrainer

            StepTrainer._updates = slowed(StepTrainer._updates)  # type: ignore[method-assign]
    batches: list[Batch] = []
    for line in sys.stdin:
        asked = json.loads(line)
        if "case" in asked:
            batches = make_batches(CASES[asked["case"]])
            side.begin(CASES[asked["case"]])
            send_parent(ready=True)
            continue
        watch = Stopwatch()
        figures = side.step(batches[asked["batch"]])
        send_parent(**(watch.spent() | figures))
    os._exit(0)  # gloo's threads may abort the interpreter at its end


# The comparison -------------------------------------------------------------------------------------------------------


class Side:
    """The processes of one side."""

    def __init__(self, folder: Path, side: str, size: int, threads: int, arguments: argparse.Namespace) -> None:
        words = ["--folder", str(folder), "--budget", str(arguments.budget), "--size", str(size)]
        words += ["--threads", str(threads), *(["--slowed"] * arguments.slowed)]
        self.ranks = [Child("trainer", side, *words, "--rank", str(rank), threads=threads) for rank in range(size)]
        if side == "gcore":
            address = self.ranks[0].answer()["address"]
            for rank in self.ranks[1:]:
                rank.send(address=address)

    def begin(self, case: int) -> None:
        """Load the model again for this case."""
        for rank in self.ranks:
            rank.send(case=case)
        for rank in self.ranks:
            assert rank.answer()["ready"]

    def step(self, batch: int) -> dict[str, float]:
        """One step, on all ranks; the slowest's seconds, and the processor seconds of all."""
        for rank in self.ranks:
            rank.send(batch=batch)
        answers = [rank.answer() for rank in self.ranks]
        slowest = {name: max(answer[name] for answer in answers) for name in ("seconds", "own_seconds")}
        return answers[0] | slowest | {"cpu_seconds": sum(answer["cpu_seconds"] for answer in answers)}

    def end(self) -> None:
        """Stop its processes."""
        for rank in self.ranks:
            rank.end()


@contextmanager
def both(folder: Path, ranks: int, arguments: argparse.Namespace) -> Iterator[tuple[Side, Side]]:
    """The plain loop and gcore, with as many threads."""
    plain = Side(folder, "plain", 1, ranks, arguments)
    gcore = Side(folder, "gcore", ranks, 1, arguments)
    try:
        yield plain, gcore
    finally:
        plain.end()
        gcore.end()


def compare(plain: Side, gcore: Side, case: int, ranks: int, arguments: argparse.Namespace) -> Result:
    """One case: equal losses first, then pairs."""
    for side in (plain, gcore):
        side.begin(case)
    checked = [(plain.step(n % BATCHES)["loss"], gcore.step(n % BATCHES)["loss"]) for n in range(arguments.checked)]
    apart = max(abs(a - b) / max(abs(a), 1e-2) for a, b in checked)
    if apart > arguments.tolerance:
        raise SystemExit(f"the losses differ by {apart:.2e} (plain, gcore): {checked}")
    pairs = []
    for number in range(arguments.pairs):
        turns = (plain, gcore) if number % 2 == 0 else (gcore, plain)
        answers = {id(side): side.step(number % BATCHES) for side in turns}
        pairs.append((answers[id(plain)], answers[id(gcore)]))
    ratios = {name: spread([a[name] / b[name] for a, b in pairs]) for name in ("seconds", "own_seconds", "cpu_seconds")}
    tokens = sum(PROMPT + len(response) for response in make_batches(CASES[case])[0].responses)
    return {
        "case": CASES[case].name,
        "samples": CASES[case].samples,
        "tokens_of_the_first_batch": tokens,
        "ranks": ranks,
        "losses_apart_at_most": float(f"{apart:.2e}"),
        "ratio": ratios["seconds"],
        "own_ratio": ratios["own_seconds"],
        "cpu_ratio": ratios["cpu_seconds"],
        "plain_seconds": spread([a["seconds"] for a, _ in pairs]),
        "gcore_seconds": spread([b["seconds"] for _, b in pairs]),
        "gcore_saving_seconds": spread([b["saving_seconds"] for _, b in pairs]),
        "gcore_padding": spread([b["padding"] for _, b in pairs]),
        "pairs": [[round(a["seconds"], 4), round(b["seconds"], 4)] for a, b in pairs],
    }


def measure(arguments: argparse.Namespace, taken: Result) -> Result:
    """All cases, with each number of ranks; the processes of a number of ranks serve all cases."""
    cases = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, arguments.hidden, arguments.layers)
        for ranks in arguments.ranks:
            with both(folder, ranks, arguments) as (plain, gcore):
                for case in arguments.only:
                    found = cases[case, ranks] = compare(plain, gcore, case, ranks, arguments)
                    print(f"{found['case']}, {ranks} rank(s): ratio {found['ratio']}", flush=True)
    return taken | {
        "what": "plain loop's seconds through gcore's, an optimizer step on the same samples; threads equal",
        "model": f"qwen3, {arguments.layers} layers of {arguments.hidden}, vocabulary {VOCABULARY}, random weights",
        "micro_batch_tokens": arguments.budget,
        "cases": [cases[key] for key in sorted(cases)],
    }


def options(parser: argparse.ArgumentParser) -> None:
    """Sizes and cases."""
    parser.add_argument("--budget", type=int, default=2048, help="micro_batch_tokens, on both sides")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--checked", type=int, default=CHECKED, help="updates whose losses are compared first")
    parser.add_argument(
        "--slowed", action="store_true", help="gcore's updates take twice as long, to see that bounds notice"
    )
    parser.add_argument("--tolerance", type=float, default=1e-5, help="of the losses, relative")
    parser.add_argument("--only", type=int, nargs="*", default=range(len(CASES)), help="cases, by number")
    parser.add_argument("--ranks", type=int, nargs="*", default=(1, 2))


BENCHMARKS = (Benchmark("trainer", "trainer", measure, ("torch", "transformers", "deepspeed"), 20, options),)

if __name__ == "__main__":
    side_main()

"""An optimizer step of the trainer beside a plain PyTorch loop on the same samples.

    make bench-trainer          all cases; writes benchmarks/results/trainer.json

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
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import measured
import numpy as np

VOCABULARY, PROMPT, BATCHES, CHECKED = 512, 5, 4, 10
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


def make_model(folder: Path, hidden: int, layers: int) -> Path:
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
        from gcore.train.collective import Collective, Meeting, find_store, open_store
        from gcore.train.launch import RankLaunch
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
        launch = RankLaunch.model_validate(
            {
                "kind": "rank",
                "job_uid": "j",
                "world": "w",
                "lineage": 0,
                "rank": rank,
                "world_size": size,
                "spec": spec,
                "run_dir": str(folder / f"run-{size}"),
                "start": {"step": 0},
            }
        )
        models = load_models(launch, world.device, world.max, lambda: None)
        self.trainer = StepTrainer(launch, world, models, Saver(launch, models.policy), SystemClock(), Progress(0, 0))
        self.weight = attention_equals_at(json.loads((model / "config.json").read_text()))
        self.rank, self.size, self.number = rank, size, 0

    def step(self, batch: Batch) -> dict[str, float]:
        """Seconds are those of everything but saving."""
        work = self._work(batch)
        timer = Phases()
        began, busy = perf_counter(), process_time()
        result = self.trainer.run(work, timer.tell)
        seconds, busy = perf_counter() - began, process_time() - busy
        kept = ("loss", "grad_norm", "padding", "cut_seconds", "update_seconds", "saving_seconds")
        found = {"seconds": seconds - result.metrics["saving_seconds"], "cpu_seconds": busy - timer.saving()}
        return found | {name: result.metrics[name] for name in kept}

    def _work(self, batch: Batch) -> Any:
        from gcore.ledger.balance import balance
        from gcore.ledger.records import Seal, SealedGroup, SealState
        from gcore.train.feed_state import HeldGroup, HeldSample, Work
        from gcore.types import PromptRef, Version

        self.number += 1
        sealed, held = [], {}
        for group in range(len(batch.responses) // 8):
            rows = range(8 * group, 8 * group + 8)
            ref, digest = PromptRef(0, 0, group), f"{group:032x}"
            samples = {
                k: HeldSample(batch.responses[i], batch.logprobs[i], float(batch.rewards[i]))
                for k, i in enumerate(rows)
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
            lineage=0,
            step=self.number,
            attempt=1,
            state=SealState.READY,
            world="w",
            world_size=self.size,
            mini_batches=1,
            groups=tuple(sealed),
            attention_equals_at=self.weight,
        )
        return Work(seal, balance(seal), self.rank, held)


# The processes --------------------------------------------------------------------------------------------------------


def say(**message: Any) -> None:
    os.write(3, json.dumps(message).encode() + b"\n")


def hear() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(sys.stdin.readline())
    return found


def serve(arguments: argparse.Namespace) -> None:
    """A side: steps as it is told, until its input ends."""
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


class Side:
    """The processes of one side, seen from outside."""

    def __init__(self, folder: Path, case: int, budget: int, side: str, size: int, threads: int) -> None:
        self.processes, self.lines = [], []
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "CUDA_VISIBLE_DEVICES": "",
            "DS_ACCELERATOR": "cpu",
            "PYTHONWARNINGS": "ignore",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        for rank in range(size):
            out, theirs = os.pipe()
            command = [sys.executable, __file__, "--side", side, "--folder", str(folder), "--case", str(case)]
            command += ["--budget", str(budget), "--rank", str(rank), "--size", str(size), "--threads", str(threads)]
            # The child is told nothing else than these: descriptor 3 is where it answers.
            process = subprocess.Popen(
                ["bash", "-c", f'exec "$@" 3>&{theirs}', "bash", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
                bufsize=1,
                env=environment,
                pass_fds=(theirs,),
            )
            os.close(theirs)
            self.processes.append(process)
            self.lines.append(os.fdopen(out))
        if side == "gcore":
            address = self._answer(0)["address"]
            for rank in range(1, size):
                self._tell(rank, address=address)
        for rank in range(size):
            assert self._answer(rank)["ready"]

    def step(self, batch: int) -> dict[str, float]:
        """One step, on all ranks; the slowest's seconds, and the processor seconds of all."""
        for rank in range(len(self.processes)):
            self._tell(rank, batch=batch)
        answers = [self._answer(rank) for rank in range(len(self.processes))]
        cpu = sum(answer["cpu_seconds"] for answer in answers)
        return answers[0] | {"seconds": max(answer["seconds"] for answer in answers), "cpu_seconds": cpu}

    def end(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process, line in zip(self.processes, self.lines, strict=True):
            process.wait(60)
            line.close()

    def _tell(self, rank: int, **message: Any) -> None:
        stdin = self.processes[rank].stdin
        assert stdin is not None
        stdin.write(json.dumps(message) + "\n")
        stdin.flush()

    def _answer(self, rank: int) -> dict[str, Any]:
        line = self.lines[rank].readline()
        if not line:
            raise SystemExit("a side ended; its error stands above")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def both(folder: Path, case: int, budget: int, ranks: int) -> Iterator[tuple[Side, Side]]:
    plain = Side(folder, case, budget, "plain", 1, ranks)
    gcore = Side(folder, case, budget, "gcore", ranks, 1)
    try:
        yield plain, gcore
    finally:
        plain.end()
        gcore.end()


def measure(folder: Path, case: int, ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
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
        "ratio": measured.spread(ratios),
        "cpu_ratio": measured.spread([a["cpu_seconds"] / b["cpu_seconds"] for a, b in pairs]),
        "plain_seconds": measured.spread([a["seconds"] for a, _ in pairs]),
        "gcore_seconds": measured.spread([b["seconds"] for _, b in pairs]),
        "gcore_saving_seconds": measured.spread([b["saving_seconds"] for _, b in pairs]),
        "gcore_padding": measured.spread([b["padding"] for _, b in pairs]),
        "pairs": [[round(a["seconds"], 4), round(b["seconds"], 4)] for a, b in pairs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--budget", type=int, default=2048, help="micro_batch_tokens, on both sides")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tolerance", type=float, default=1e-5, help="of the losses, relative")
    parser.add_argument("--only", type=int, nargs="*", default=range(len(CASES)), help="cases, by number")
    parser.add_argument("--ranks", type=int, nargs="*", default=(1, 2))
    parser.add_argument("--out", default="trainer", help="the result's name")
    for name in ("--side", "--folder"):
        parser.add_argument(name, type=Path if name == "--folder" else str, help=argparse.SUPPRESS)
    for name in ("--case", "--rank", "--size", "--threads"):
        parser.add_argument(name, type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        serve(arguments)
        return
    result = measured.circumstances("torch", "transformers", "deepspeed") | {
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
                found = measure(folder, case, ranks, arguments)
                result["cases"].append(found)
                print(
                    f"{found['case']}, {ranks} rank(s): plain {found['plain_seconds']['median']:.3f} s, gcore "
                    f"{found['gcore_seconds']['median']:.3f} s, ratio {found['ratio']['median']:.3f} "
                    f"[{found['ratio']['least']:.2f}, {found['ratio']['most']:.2f}], of processor seconds "
                    f"{found['cpu_ratio']['median']:.3f}, padding "
                    f"{found['gcore_padding']['median']:.1%}, losses apart {found['losses_apart_at_most']:.1e}",
                    flush=True,
                )
    print(measured.write(arguments.out, result))


if __name__ == "__main__":
    main()

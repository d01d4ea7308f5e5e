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
from pathlib import Path
from typing import Any

import measured
from trainer_sides import BATCHES, CASES, PROMPT, VOCABULARY, make_batches

CHECKED = 10
"""Updates whose losses are compared before anything is measured."""
SIDES = Path(__file__).with_name("trainer_sides.py")


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
            command = [sys.executable, str(SIDES), side, "--folder", str(folder), "--case", str(case)]
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
    arguments = parser.parse_args()
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

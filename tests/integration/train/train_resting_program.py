"""Run by test_train_resting.py: train worlds that give their memory back between steps, beside such that never do.

python train_resting_program.py FOLDER

Each case is a world of two real ranks, trained once awake and once resting. What their memory was is written down with the losses.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import torch
from train_rank_program import GROUPS, SAMPLES, VOCABULARY, make_step

from gcore.ledger.balance import balance_samples
from gcore.system.clock import SystemClock
from gcore.testing.models import rank_launch
from gcore.train.checkpoint.run_files import BackgroundWriter
from gcore.train.rank.feed import StepInput
from gcore.train.rank.launch import OPTIMIZER, PARTS, RankLaunch
from gcore.train.rank.main import LoadedRank, RendezvousCalls, load_rank

STEPS, RANKS = 4, 2
PLAIN: dict[str, Any] = {"old_logprobs": "recompute", "mini_batches": GROUPS, "kl_coef": 0.1, "weight_decay": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "zero1": PLAIN | {"zero_stage": 1},
    "zero2": PLAIN | {"zero_stage": 2, "dtype": "bf16"},
    "zero3": PLAIN | {"zero_stage": 3, "advantage": "gae", "critic": {"learning_rate": 1e-2}, "packing": "packed"},
}
ORDERS: dict[str, tuple[frozenset[str], ...]] = {
    "awake": (),
    "resting": (frozenset({OPTIMIZER}), PARTS),
}
"""What is released after each step, one after the other."""


def make_model(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=128,
        initializer_range=0.05,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    (folder / "model" / "tokenizer.json").write_text("{}")


def launch_of(folder: Path, name: str, case: str, rank: int) -> RankLaunch:
    spec = {
        "name": "middling",
        "model": {"path": str(folder / "model")},
        "data": {"path": "none"},
        "flow": {"steps": 100, "groups_per_step": GROUPS, "samples_per_prompt": SAMPLES},
        "rollout": {"max_new_tokens": 12},
        "train": {"learning_rate": 1e-3, "micro_batch_tokens": 40, "copies_gb": 0} | CASES[case],
        "checkpoint": {"every": 1000},
    }
    return rank_launch(spec, folder / name, rank=rank, world_size=RANKS)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def rank_process(folder: Path, name: str, launch: RankLaunch, order: tuple[frozenset[str], ...]) -> None:
    """Load, train all steps, and leave what was found."""
    clock = SystemClock()
    address = folder / name / "address"

    def publish(found: str) -> None:
        address.with_suffix(".part").write_text(found)
        address.with_suffix(".part").rename(address)

    def find() -> str:
        began = clock.monotonic()
        while not address.exists():
            assert clock.monotonic() - began < 200
            threading.Event().wait(0.02)
        return address.read_text()

    loaded = load_rank(
        launch,
        RendezvousCalls(publish, find),
        clock,
        lambda phase: None,
        BackgroundWriter(launch.run_path, launch.world),
    )
    losses, memory = [], []
    for step in range(1, STEPS + 1):
        losses.append(train(loaded, launch, step))
        awake = resident()
        for what in order:
            loaded.rest(what, lambda phase: None)
            memory.append([step, sorted(what), awake, resident()])
    (folder / name / f"found-{launch.rank}.json").write_text(json.dumps({"losses": losses, "memory": memory}))
    loaded.leave()
    os._exit(0)  # gloo's threads can abort the interpreter on its way out


def train(loaded: LoadedRank, launch: RankLaunch, step: int) -> dict[str, float]:
    seal, held = make_step()
    cut = seal.model_copy(update={"world_size": RANKS, "mini_batches": GROUPS, "step": step})
    return dict(loaded.run(StepInput(cut, balance_samples(cut), launch.rank, held), lambda phase: None).metrics)


def main(folder: Path) -> None:
    import gcore.train.models  # noqa: F401

    warnings.filterwarnings("ignore")
    make_model(folder)
    gc.collect()
    gc.freeze()
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    for case in CASES:
        for how, order in ORDERS.items():
            name = f"{case}-{how}"
            (folder / name).mkdir()
            processes = [
                context.Process(
                    target=rank_process, args=(folder, name, launch_of(folder, name, case, rank), order), daemon=True
                )
                for rank in range(RANKS)
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
                if process.exitcode:
                    sys.exit(f"a rank of {name} ended with {process.exitcode}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

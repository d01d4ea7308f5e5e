"""Run by test_train_elastic.py and test_train_resting.py: train worlds of real ranks, each rank a process.

python train_worlds_program.py elastic|resting FOLDER

elastic: worlds of several sizes that resume from one another's copies. Each case runs once without an interruption, as one world of
two ranks, and once as three worlds, each of which is killed after two steps together with the memory of its nodes. No checkpoint
is written.

resting: worlds of two ranks that release their memory between steps, beside worlds that keep it. The output has the losses and
the memory use.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rank_splits import FSDP2, split_of
from safetensors.torch import load_file, save_file
from train_rank_program import GROUPS, SAMPLES, VOCABULARY, make_model, make_step

from gcore.errors import DataError
from gcore.ledger.balance import balance_samples
from gcore.ledger.records.chain import WorldState
from gcore.system.clock import SystemClock
from gcore.testing.models import rank_launch
from gcore.train.checkpoint.replicas import CopiesLost
from gcore.train.checkpoint.run_files import BackgroundWriter
from gcore.train.rank.feed import StepInput
from gcore.train.rank.launch import OPTIMIZER, PARTS, RankLaunch
from gcore.train.rank.main import RankTrainer, RendezvousCalls, load_rank

PLAIN: dict[str, Any] = {"old_logprobs": "recompute", "mini_batches": GROUPS, "kl_coef": 0.1, "weight_decay": 0.1}
GAE: dict[str, Any] = {"advantage": "gae", "critic": {"learning_rate": 1e-2}, "packing": "packed"}


def launch_of(
    folder: Path, run: Path, train: dict[str, Any], *, rank: int, world_size: int, start: Any = None
) -> RankLaunch:
    spec = {
        "name": "tiny",
        "model": {"path": str(folder / "model")},
        "data": {"path": "none"},
        "flow": {"steps": 100, "groups_per_step": GROUPS, "samples_per_prompt": SAMPLES},
        "rollout": {"max_new_tokens": 12},
        "train": {"micro_batch_tokens": 40} | train,
        "checkpoint": {"every": 1000},
    }
    return rank_launch(spec, run, rank=rank, world_size=world_size, start=start)


def load(run: Path, launch: RankLaunch) -> RankTrainer:
    """The rank, which meets the others of its world in the run's folder."""
    clock = SystemClock()
    address = run / f"address-{launch.world}"

    def publish(found: str) -> None:
        address.with_suffix(".part").write_text(found)
        address.with_suffix(".part").rename(address)

    def find() -> str:
        began = clock.monotonic()
        while not address.exists():
            assert clock.monotonic() - began < 200
            threading.Event().wait(0.02)
        return address.read_text()

    writer = BackgroundWriter(launch.run_path, launch.world)
    return load_rank(launch, RendezvousCalls(publish, find), clock, lambda phase: None, writer)


def train_step(loaded: RankTrainer, launch: RankLaunch, step: int) -> dict[str, float]:
    seal, held = make_step()
    more = {"world_size": launch.world_size, "mini_batches": GROUPS, "step": step, "lineage": launch.lineage}
    cut = seal.model_copy(update=more | {"sequence_parallel": launch.spec.train.sequence_parallel})
    return dict(loaded.run(StepInput(cut, balance_samples(cut), launch.rank, held), lambda phase: None).metrics)


def run_ranks(name: str, ranks: list[Callable[[], None]], exit_code: int) -> None:
    """All ranks of a world, each in a process, to their end with this code."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=rank, daemon=True) for rank in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode != exit_code:
            for other in processes:
                other.kill()
            sys.exit(f"a rank of {name} ended with {process.exitcode}")


def prepare(make: Callable[[Path], None], folder: Path) -> None:
    """Make the model and import what is heavy, before anything forks."""
    import gcore.train.models  # noqa: F401

    warnings.filterwarnings("ignore")
    make(folder)
    gc.collect()
    gc.freeze()
    torch.set_num_threads(1)


# Worlds that go on from copies ------------------------------------------------------------------------------------------

STEPS = 6
NO_MEMORY, NO_ROOM = 5, 6
"""Lineages of a world whose memory goes away once it serves, and of one that may take next to nothing."""
CASES: dict[str, dict[str, Any]] = {
    "zero1": PLAIN | {"zero_stage": 1},
    "half": PLAIN | {"zero_stage": 2, "dtype": "bf16"},
    "critic": PLAIN | GAE | {"zero_stage": 3},
    "fsdp2": PLAIN | GAE | split_of(FSDP2),
    "changed": PLAIN | {"zero_stage": 1},
    "adapters": PLAIN | {"zero_stage": 3, "lora": {"rank": 4}},
    "groups": PLAIN | GAE | {"zero_stage": 3, "sequence_parallel": 2},
    "adapters in groups": PLAIN | {"zero_stage": 2, "lora": {"rank": 4}, "sequence_parallel": 2, "packing": "packed"},
}


@dataclass(frozen=True)
class Part:
    """A world of the chain: its ranks' nodes, the last step it makes, and the nodes whose memory is lost with it."""

    nodes: tuple[str, ...]
    until: int
    lost: tuple[str, ...] = ()
    split: int = 0
    """How the model is split, if not as the case says."""


WORLDS = (Part(("a", "b"), 2, lost=("b",)), Part(("a",), 4), Part(("a", "b", "c"), STEPS))
SAME = (Part(("a", "b"), 2, lost=("a",)), Part(("a", "b"), 4, lost=("b",)), Part(("a", "b"), STEPS))
CHANGED = (WORLDS[0], replace(WORLDS[1], split=FSDP2), WORLDS[2])
GROUPS_CHANGED = (
    Part(("a", "b", "c", "d"), 2, lost=("b", "d")),
    Part(("a", "c"), 4, split=FSDP2),
    Part(("a", "b", "c", "d"), STEPS),
)
"""Two sequence groups, one, and two again."""
WORLDS_OF = dict.fromkeys(CASES, WORLDS) | {"half": SAME, "changed": CHANGED, "adapters": CHANGED}
WORLDS_OF |= {"groups": GROUPS_CHANGED, "adapters in groups": GROUPS_CHANGED}
"""In half precision other sums are other numbers, so that one case has worlds of the same size, and exactly the same losses."""


def elastic_launch(folder: Path, case: str, name: str, lineage: int, part: Part, rank: int, start: Any) -> RankLaunch:
    train = {"learning_rate": 5e-3, "schedule": "linear"} | CASES[case] | (split_of(part.split) if part.split else {})
    launch = launch_of(folder, folder / name, train, rank=rank, world_size=len(part.nodes), start=start)
    memory = folder / name / "memory" / part.nodes[rank]
    memory.mkdir(parents=True, exist_ok=True)
    if lineage == NO_ROOM:
        small = launch.spec.train.model_copy(update={"copies_gb": 1e-6})
        launch = launch.model_copy(update={"spec": launch.spec.model_copy(update={"train": small})})
    more = {"world": f"w{lineage}", "lineage": lineage, "nodes": part.nodes, "memory_dir": str(memory)}
    return launch.model_copy(update=more)


def elastic_rank(run: Path, launch: RankLaunch) -> None:
    """Load, train to the end of the part, and die."""
    try:
        loaded = load(run, launch)
    except (CopiesLost, DataError) as error:
        (run / f"refused-{launch.world}-{launch.rank}").write_text(str(error))
        os.kill(os.getpid(), signal.SIGKILL)
    if launch.lineage == NO_MEMORY:
        shutil.rmtree(launch.memory_dir)
    until = STEPS if run.name.endswith("whole") else launch.start.step + 2
    found = [train_step(loaded, launch, step) for step in range(launch.start.step + 1, until + 1)]
    (run / f"losses-{launch.world}-{launch.rank}.json").write_text(json.dumps(found))
    os.kill(os.getpid(), signal.SIGKILL)


def elastic_world(folder: Path, case: str, name: str, lineage: int, part: Part, start: dict[str, Any]) -> None:
    """A whole world, to its death."""
    launches = [elastic_launch(folder, case, name, lineage, part, rank, start) for rank in range(len(part.nodes))]
    ranks = [partial(elastic_rank, folder / name, launch) for launch in launches]
    run_ranks(f"{name}, lineage {lineage}", ranks, -signal.SIGKILL)
    for node in part.lost:
        shutil.rmtree(folder / name / "memory" / node)


def refused(folder: Path, case: str, start: dict[str, Any]) -> None:
    """Worlds that do not start: one that lacks a shard, and one that finds another damaged. And worlds without copies."""
    name, memory = f"{case}-parts", folder / f"{case}-parts" / "memory"
    elastic_world(folder, case, name, 3, Part(("a",), STEPS), start)
    (found,) = (memory / "a").glob("w2-2-6-1.0.data")
    data = bytearray(found.read_bytes())
    data[len(data) // 2] ^= 1
    found.write_bytes(data)
    elastic_world(folder, case, name, 4, Part(("a", "b"), STEPS), start)
    for lineage in (NO_MEMORY, NO_ROOM):
        elastic_world(folder, case, name, lineage, Part(("d",), STEPS), {"step": 0})


def refused_on_another_base(folder: Path, case: str, start: dict[str, Any]) -> None:
    """A world that does not start: the model has the layout of the one on which the adapters were trained, and other weights."""
    path = folder / "model" / "model.safetensors"
    own = path.read_bytes()
    save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    elastic_world(folder, case, f"{case}-parts", 3, Part(("a", "b"), STEPS), start)
    path.write_bytes(own)


def elastic(folder: Path) -> None:
    prepare(make_model, folder)
    for case in CASES:
        elastic_world(folder, case, f"{case}-whole", 0, Part(("a", "b"), STEPS), {"step": 0})
        start: dict[str, Any] = {"step": 0}
        for lineage, part in enumerate(WORLDS_OF[case]):
            elastic_world(folder, case, f"{case}-parts", lineage, part, start)
            state = WorldState(world=f"w{lineage}", lineage=lineage, step=part.until, attempt=1, shards=len(part.nodes))
            start = {"step": part.until, "state": state.model_dump()}
        if case == "zero1":
            refused(folder, case, start)
        if case == "adapters":
            refused_on_another_base(folder, case, start)


# Worlds that rest -------------------------------------------------------------------------------------------------------

RESTING_STEPS, RANKS = 4, 2
RESTING_CASES: dict[str, dict[str, Any]] = {
    "zero1": PLAIN | {"zero_stage": 1},
    "zero2": PLAIN | {"zero_stage": 2, "dtype": "bf16"},
    "zero3": PLAIN | GAE | {"zero_stage": 3},
    "fsdp2": PLAIN | GAE | split_of(FSDP2),
    "fsdp2-kept": PLAIN | {"backend": "fsdp2", "zero_stage": 1, "dtype": "bf16"},
}
ORDERS: dict[str, tuple[frozenset[str], ...]] = {
    "awake": (),
    "resting": (frozenset({OPTIMIZER}), PARTS),
}
"""What is released after each step, one after the other."""


def make_middling_model(folder: Path) -> None:
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


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def resting_rank(run: Path, launch: RankLaunch, order: tuple[frozenset[str], ...]) -> None:
    """Load, train all steps, and leave what was found."""
    loaded = load(run, launch)
    losses, memory = [], []
    for step in range(1, RESTING_STEPS + 1):
        losses.append(train_step(loaded, launch, step))
        awake = resident()
        for what in order:
            loaded.rest(what, lambda phase: None)
            memory.append([step, sorted(what), awake, resident()])
    (run / f"found-{launch.rank}.json").write_text(json.dumps({"losses": losses, "memory": memory}))
    loaded.leave()
    os._exit(0)  # gloo's threads can abort the interpreter on its way out


def resting(folder: Path) -> None:
    prepare(make_middling_model, folder)
    for case, options in RESTING_CASES.items():
        for how, order in ORDERS.items():
            run = folder / f"{case}-{how}"
            run.mkdir()
            train = {"learning_rate": 1e-3, "copies_gb": 0} | options
            launches = [launch_of(folder, run, train, rank=rank, world_size=RANKS) for rank in range(RANKS)]
            run_ranks(run.name, [partial(resting_rank, run, launch, order) for launch in launches], 0)


PROGRAMS = {"elastic": elastic, "resting": resting}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](Path(sys.argv[2]))

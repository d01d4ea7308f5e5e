"""Compare `gcore plan`'s estimates of GPU memory with torch's allocations: a rank of each ZeRO stage, and an engine.

Models are made from configurations, so nothing is downloaded. One rank, in this process: NCCL needs a device a rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_core import prompt, task
from ready_seals import ready_seal

from gcore.config import parse_spec
from gcore.engines.launch import EngineLaunch
from gcore.engines.torch.server import start_engine
from gcore.ledger.balance import balance_samples
from gcore.ledger.records.chain import SealedGroup
from gcore.system.clock import SystemClock
from gcore.testing.models import rank_launch
from gcore.train.backends.distributed import Collective, Rendezvous, open_store
from gcore.train.checkpoint.writer import CheckpointWriter, FolderPublisher, UpdateCounts
from gcore.train.models import load_models
from gcore.train.rank.feed import StepInput, TrainGroup, TrainSample
from gcore.train.step import StepTrainer
from gcore.types import PromptRef, Version
from placement.mapping.memory import engine_memory, rank_needs
from placement.mapping.workload import JobShapes, MeanLengths, Workload, make_workload, read_shape

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

PROMPT, RESPONSE, SAMPLES = 32, 224, 32
TOO_LITTLE, TOO_MUCH = -0.15, 0.4
"""An estimate that is too small ends in a job that runs out of memory; one that is too large only leaves some unused."""
CONFIG: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": None,
}


@pytest.fixture(scope="module")
def world() -> Iterator[Collective]:
    assert torch.cuda.is_available(), "no CUDA device: this is make test-gpu's business"
    meeting = Rendezvous(0, 1, "127.0.0.1")
    opened = open_store(meeting)
    world = Collective.join(meeting, opened.store)
    yield world
    world.leave()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**CONFIG))
    module.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def planned(model: Path, **train: Any) -> tuple[dict[str, Any], Workload]:
    """The job as a tree, and as the planner sees it."""
    tree = {
        "name": "gpu",
        "model": {"path": str(model)},
        "data": {"path": "none", "max_prompt_tokens": PROMPT},
        "flow": {"steps": 9, "groups_per_step": SAMPLES // 8, "samples_per_prompt": 8},
        "rollout": {"max_new_tokens": RESPONSE, "batch_slots": SAMPLES},
        "train": {"old_logprobs": "engine", "micro_batch_tokens": 4096} | train,
        "checkpoint": {"every": 9},
    }
    shape = read_shape(json.loads((model / "config.json").read_text()), where=str(model))
    return tree, make_workload(parse_spec(tree), JobShapes(shape, None, {}), MeanLengths(PROMPT, RESPONSE))


def ready(step: int) -> StepInput:
    """Samples of one length."""
    rng = np.random.default_rng(step)
    sealed, held = [], {}
    for number in range(SAMPLES // 8):
        digest = f"{step:016x}{number:016x}"
        samples = {
            index: TrainSample(
                rng.integers(0, 1000, RESPONSE).astype(np.int32),
                rng.normal(-10, 0.1, RESPONSE).astype(np.float32),
                float(index % 2),
            )
            for index in range(8)
        }
        ref = PromptRef(0, number, step)
        held[digest] = TrainGroup(ref, digest, rng.integers(0, 1000, PROMPT).astype(np.int32), samples)
        sealed.append(
            SealedGroup(
                ref=ref,
                digest=digest,
                prompt_tokens=PROMPT,
                response_tokens=(RESPONSE,) * 8,
                versions=(Version(0, 0),),
                holder="h",
            )
        )
    seal = ready_seal(sealed, step=step)
    return StepInput(seal, balance_samples(seal), 0, held)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_allocates_about_what_was_estimated(
    world: Collective, model: Path, tmp_path: Path, stage: int, dtype: str, *, checkpointed: bool
) -> None:
    tree, workload = planned(model, zero_stage=stage, dtype=dtype, activation_checkpointing=checkpointed)
    launch = rank_launch(tree, tmp_path)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    models = load_models(launch, world.device, world.max, lambda: None)
    saver = CheckpointWriter(launch, models.policy)
    publisher = FolderPublisher(launch, models.policy, saver.writer, saver.insisting, world.max)
    trainer = StepTrainer(launch, world, models, saver, publisher, SystemClock(), UpdateCounts(0, 0))
    trainer.run(ready(1), lambda phase: None)
    torch.cuda.reset_peak_memory_stats()
    trainer.run(ready(2), lambda phase: None)
    taken = torch.cuda.max_memory_allocated() - before
    needs = rank_needs(workload.training, 1, gpu=True)
    guess = sum(need.stays for need in needs) + max(need.works for need in needs)
    assert TOO_LITTLE <= guess / taken - 1 <= TOO_MUCH, (
        f"estimated {guess / 1e6:.0f} MB, allocated {taken / 1e6:.0f} MB"
    )


def test_an_engine_allocates_about_what_was_estimated(model: Path) -> None:
    _, workload = planned(model)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    launch = EngineLaunch(model=str(model), device="cuda", dtype="bfloat16", batch_slots=SAMPLES, cache_tokens=1 << 20)
    with torch.no_grad():
        core = start_engine(launch, None)
        core.submit([task(n, prompt(n, PROMPT, 1000), RESPONSE) for n in range(SAMPLES)])
        while core.can_work:
            core.cycle()
    taken = torch.cuda.max_memory_allocated() - before
    need = engine_memory(workload.rollout, size=1, rows=SAMPLES, gpu=True)
    guess = need.stays(need.wanted) + need.works
    assert TOO_LITTLE <= guess / taken - 1 <= 2 * TOO_MUCH, (
        f"estimated {guess / 1e6:.0f} MB, allocated {taken / 1e6:.0f} MB"
    )

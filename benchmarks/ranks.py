"""Train ranks without a cluster: a model with random weights, batches of samples, and sealed steps of these. For benchmarks of training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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


def ready_step(batch: Batch, *, step: int, rank: int, size: int, weight: int, lineage: int = 0) -> Any:
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
    from gcore.train.checkpoint.writer import CheckpointWriter, UpdateCounts
    from gcore.train.models import load_models
    from gcore.train.step import StepTrainer

    models = load_models(launch, world.device, world.max, lambda: None)
    saver = CheckpointWriter(launch, models.policy, models.critic)
    return LoadedRank(models, saver, StepTrainer(launch, world, models, saver, SystemClock(), UpdateCounts(0, 0)))

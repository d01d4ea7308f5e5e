"""Run by test_train_vision_gradients.py: steps with pictures, through the trainer and by a plain loop, all cases in one process.

python train_vision_program.py FOLDER

The models are tiny. The plain loop computes each sample alone in float64, with the model's own attention and positions. The same steps
then run through StepTrainer and every backend, on one and on two ranks, whose samples have unequal numbers of pictures.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rank_splits import FSDP2, split_of, vision_cases
from ready_seals import ready_seal
from safetensors.torch import save_file
from train_rank_program import join, run, written

from gcore.ledger.balance import balance_samples
from gcore.ledger.records.chain import Seal, SealedGroup
from gcore.models.vision import REPEATS, PictureProcessor, auto_class, media_token_ids, picture_arguments
from gcore.system.clock import SystemClock
from gcore.testing.models import rank_launch
from gcore.testing.vision_models import IMAGE, VISION_END, VISION_START, make_picture, make_tiny_vision_model
from gcore.train.backends.base import TensorKind
from gcore.train.rank.feed import StepInput, TrainGroup, TrainSample, remaining_parts
from gcore.types import Medium, PromptRef, Version

BETA1, SAMPLES = 0.9, 3
SIZES: dict[str, dict[str, tuple[int, int]]] = {
    "qwen3_vl": {"a": (32, 32), "b": (64, 48), "c": (32, 64)},
    "llava": {"a": (32, 32), "b": (32, 32), "c": (32, 32)},
}
"""Height and width of each picture by model family."""
ALL: dict[str, Any] = {"pictures": ("", "a", "ba", "c", "")}
CASES: dict[str, dict[str, Any]] = {
    "mixed": ALL,
    "rows": ALL | {"packing": "bucketed"},
    "again": ALL | {"activation_checkpointing": True},
    "lonely": {"pictures": ("", "b", ""), "masked": ((), (0, 2), ())},
    "text": {"pictures": ("", "", "")},
    "clip": ALL | {"family": "llava"},
    "frozen": ALL | {"freeze": ["vision"]},
    "frozen-both": {"pictures": ("", "b", ""), "masked": ((), (0, 2), ()), "freeze": ["projector", "vision"]},
    "parts": ALL | {"parts": (2, 1, 2)},
}
"""`pictures`: those of each group's prompt. `masked`: samples of each group that are not trained. `parts`: of a streamed step."""
KINDS: tuple[TensorKind, ...] = ("master", "exp_avg", "exp_avg_sq")
OWN = ("pictures", "masked", "parts", "family")
BUDGETS = {1: 40, 2: 60, 3: 1000, FSDP2: 50}
"""Tokens of a micro-batch, by stage: most have no picture, or one; one micro-batch has all."""


def family(case: str) -> str:
    return str(CASES[case].get("family", "qwen3_vl"))


def make_step(folder: Path, case: str) -> tuple[Seal, dict[str, TrainGroup]]:
    """A step whose prompts have different numbers of pictures."""
    rng = np.random.default_rng(3)
    listed = CASES[case]["pictures"]
    sealed, held = [], {}
    for number, names in enumerate(listed):
        prompt, media = [5, 9 + number], []
        for name in names:
            height, width = SIZES[family(case)][name]
            data = make_picture(height, width, seed=ord(name))
            sha256 = hashlib.sha256(data).hexdigest()
            (folder / "blobs" / sha256).write_bytes(data)
            media.append(Medium("picture", sha256, len(data), (height, width, 3), "uint8"))
            count = height * width // (64 if family(case) == "llava" else 256)
            prompt += [VISION_START, *[IMAGE] * count, VISION_END, 7]
        samples = {
            i: TrainSample(
                rng.integers(3, 40, n).astype(np.int32), np.full(n, -3.0, np.float32), float(rng.integers(0, 3))
            )
            for i, n in enumerate(rng.integers(2, 12, SAMPLES).tolist())
        }
        ref, digest = PromptRef(0, number, 0), f"{number:032x}"
        held[digest] = TrainGroup(ref, digest, np.array(prompt, np.int32), samples, media=tuple(media))
        sealed.append(
            SealedGroup(
                ref=ref,
                digest=digest,
                prompt_tokens=len(prompt),
                response_tokens=tuple(len(samples[i].token_ids) for i in range(SAMPLES)),
                versions=(Version(0, 0),),
                holder="h",
                masked=CASES[case].get("masked", ((),) * len(listed))[number],
            )
        )
    return ready_seal(sealed), held


def plain(folder: Path) -> None:
    """The models, and the gradient of each case's step by the definitions."""
    (folder / "blobs").mkdir()
    for name in SIZES:
        make_tiny_vision_model(folder / name, name)  # type: ignore[arg-type]
    for case in CASES:
        plain_step(folder, case)


def plain_step(folder: Path, case: str) -> None:
    path = folder / family(case)
    found = auto_class(json.loads((path / "config.json").read_text()))
    model = found.from_pretrained(path, dtype=torch.float64, attn_implementation="eager").eval()
    processor = PictureProcessor(path)
    seal, held = make_step(folder, case)
    losses = []
    for listed, group in zip(seal.groups, held.values(), strict=True):
        rewards = torch.tensor([group.samples[i].reward for i in range(SAMPLES)], dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        read = [processor.read(one.sha256, folder / "blobs" / one.sha256) for one in group.media]
        for i in sorted({*range(SAMPLES)} - {*listed.masked}):
            losses.append(-advantages[i] * logprobs(model, group, group.samples[i], read))
    loss = torch.cat(losses).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {
        name: (torch.zeros_like(one) if one.grad is None else one.grad).float()
        for name, one in model.named_parameters()
    }
    save_file(gradients, folder / f"plain-{case}.safetensors")


def logprobs(model: Any, group: TrainGroup, sample: TrainSample, read: list[Any]) -> torch.Tensor:
    """Log-probabilities of one response's tokens, without padding."""
    ids = torch.tensor([*group.prompt_ids.tolist(), *sample.token_ids.tolist()])[None]
    more: dict[str, Any] = {}
    if read:
        REPEATS.places = None
        more = picture_arguments(read, torch.device("cpu"))
        more["pixel_values"] = more["pixel_values"].double()
        if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
            more["mm_token_type_ids"] = (ids == IMAGE).long()
    logits = model(input_ids=ids, use_cache=False, **more).logits[0, len(group.prompt_ids) - 1 : -1]
    logits = logits.index_fill(1, torch.tensor(media_token_ids(model.config)), -torch.inf)
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.token_ids.tolist())[:, None])[:, 0]


def spec(folder: Path, case: str, stage: int) -> dict[str, Any]:
    train = {
        "learning_rate": 1e-3,
        "micro_batch_tokens": BUDGETS[stage],
        "max_grad_norm": 1e9,
        "betas": [BETA1, 0.999],
        "packing": "packed",
        "stream": "parts" in CASES[case],
        **split_of(stage),
    }
    return {
        "name": "tiny",
        "model": {"path": str(folder / family(case))},
        "data": {"path": "none"},
        "flow": {"steps": 1, "groups_per_step": len(CASES[case]["pictures"]), "samples_per_prompt": SAMPLES},
        "rollout": {"max_new_tokens": 12},
        "train": train | {name: value for name, value in CASES[case].items() if name not in OWN},
    }


def rank_process(folder: Path, rank: int, size: int) -> None:
    """Every case with every backend; leaves checkpoints, whose exp_avg is (1 - beta1) times the gradient."""
    from gcore.models.layout import Manifest
    from gcore.train.checkpoint.writer import CheckpointWriter, FolderPublisher, UpdateCounts, restore_optimizer
    from gcore.train.models import RankModels, load_models
    from gcore.train.step import StepTrainer

    world = join(folder, rank, size)
    writers = []

    def trainer_of(case: str, stage: int, at: Path, **start: Any) -> tuple[StepTrainer, RankModels]:
        launch = rank_launch(spec(folder, case, stage), at, rank=rank, world_size=size, **start)
        blobs = {"store": "http://127.0.0.1:1", "key": "", "folder": str(folder / "blobs")}
        launch = type(launch).model_validate(launch.model_dump() | {"blobs": blobs})
        models = load_models(launch, world.device, world.max, lambda: None)
        saver = CheckpointWriter(launch, models.policy, frozen=models.frozen)
        writers.append(saver.writer)
        publisher = FolderPublisher(
            launch, models.policy, saver.writer, saver.insisting, world.max, frozen=models.frozen
        )
        return StepTrainer(launch, world, models, saver, publisher, SystemClock(), UpdateCounts(0, 0)), models

    for stage in (1, 2, 3, FSDP2) if size > 1 else (2,):
        for case in vision_cases(stage, tuple(CASES), size):
            at = folder / f"{case}-{stage}-{size}"
            trainer, _ = trainer_of(case, stage, at)
            seal, held = make_step(folder, case)
            parts = CASES[case].get("parts", ())
            seal = seal.model_copy(update={"world_size": size, "parts": parts, "ready_parts": len(parts)})
            work = StepInput(seal, balance_samples(seal), rank, held)
            for part in list(remaining_parts(work))[:1]:
                trainer.accumulate(part, lambda phase: None)
            begun = min(1, len(parts))
            result = trainer.run(StepInput(seal, work.layout, rank, held, begun=begun), lambda phase: None)
            (at / f"metrics-{rank}.json").write_text(json.dumps(dict(result.metrics)))
    written(writers)
    for before, after in ((3, FSDP2), (FSDP2, 1)) if size > 1 else ():
        at = folder / f"frozen-{before}-{size}"
        start = {"step": 1, "checkpoint": "checkpoints/0-1"}
        _, models = trainer_of("frozen", after, at, start=start)
        saved = at / "checkpoints" / "0-1"
        restore_optimizer(models.policy, saved, Manifest.decode((saved / "manifest.json").read_bytes()))
        found = {kind: {one.name: one.tensor.clone() for one in models.policy.tensors(kind)} for kind in KINDS}
        if rank == 0:
            for kind, tensors in found.items():
                save_file(tensors, at / f"resumed-{kind}.safetensors")
    world.leave()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    run(Path(sys.argv[1]), plain, rank_process)

"""Two ranks that write checkpoints, a thread each, with a model of a few numbers: no world, no DeepSpeed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from gcore.models.publisher import NamedTensor
from gcore.testing.models import rank_launch
from gcore.train.checkpoint.writer import CheckpointWriter, FolderPublisher

SECONDS = 200.0
"""Nothing here takes so long, unless it hangs."""


class Model:
    """What a snapshot needs of a trained model. Its tensors are its own memory, as at ZeRO 1: a step changes them in place."""

    def __init__(self) -> None:
        self.values = {
            "a": torch.arange(6, dtype=torch.float32).reshape(3, 2),
            "b": torch.tensor(4.0),
            "c": torch.full((5,), 0.5, dtype=torch.bfloat16),
        }
        self.steps = torch.tensor([7], dtype=torch.int64)
        self.flag = torch.tensor([True, False, True])

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in self.values.items()}

    def tensors(self, kind: str) -> Iterator[NamedTensor]:
        for name, value in self.values.items():
            yield NamedTensor(name, value if kind == "master" else value * 2)

    def buffers(self) -> Iterator[NamedTensor]:
        yield NamedTensor("flag", self.flag)
        yield NamedTensor("steps", self.steps)


class Ranks:
    """Two ranks, a thread each; `highest` is their collective."""

    def __init__(self, folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        spec = {
            "name": "j",
            "model": {"path": str(folder / "model")},
            "data": {"path": "d"},
            "flow": {"steps": 9},
            "rollout": {"max_new_tokens": 4},
        }
        self.models = [Model(), Model()]
        self.savers = [
            CheckpointWriter(rank_launch(spec, folder / "run", rank=rank, world_size=2), model)  # type: ignore[arg-type]
            for rank, model in enumerate(self.models)
        ]
        self.publishers = [
            FolderPublisher(
                rank_launch(spec, folder / "run", rank=rank, world_size=2),
                model,  # type: ignore[arg-type]
                saver.writer,
                saver.insisting,
                partial(self.highest, rank),
            )
            for rank, (model, saver) in enumerate(zip(self.models, self.savers, strict=True))
        ]
        self._meet = threading.Barrier(2, timeout=SECONDS)
        self._brought: list[list[float]] = [[], []]

    def highest(self, rank: int, values: Sequence[float]) -> list[float]:
        self._brought[rank] = list(values)
        self._meet.wait()
        found = [max(pair) for pair in zip(*self._brought, strict=True)]
        self._meet.wait()
        return found

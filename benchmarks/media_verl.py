"""verl's `DataProto` through Ray, with workers that compute nothing: the other side of `benchmarks/media_memory.py`, run in an environment
of its own (`make verl-setup`). The argument is a JSON object; `stages.json` in its folder says what was reached, and when.

A step does what `RayPPOTrainer.fit` of verl's v0 trainer does with a batch, without its computations:

1. The driver has the pictures of the prompts, repeats each prompt for its samples, and sends the parts to the rollout workers.
2. Each rollout worker returns its samples with `multi_modal_inputs`: the group's picture, made for each sample as verl's processor does, and
   random bytes of the sample. The driver joins the parts and unites them with the batch.
3. The batch goes to the train workers twice, for old log-probabilities and for the update (no reference model, no critic).

verl's own `pixel_values` have 12 times the bytes of 8-bit pixels or more; here they have the bytes of the payload.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import ray
import torch
from tensordict import TensorDict
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

TOKENS = 1024
"""Of a prompt and of a response each, padded as verl pads them."""


def blob(size: int) -> torch.Tensor:
    """Random bytes."""
    return torch.from_numpy(np.frombuffer(os.urandom(size), dtype=np.uint8).copy())


def objects(values: list[Any]) -> np.ndarray:
    """An array of objects, as `DataProto` has them."""
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


def token_fields(count: int) -> TensorDict:
    """The tensors of samples."""
    whole = torch.ones(count, 2 * TOKENS, dtype=torch.int64)
    fields = {name: whole.clone() for name in ("input_ids", "attention_mask", "position_ids")}
    part = {name: whole[:, :TOKENS].clone() for name in ("prompts", "responses", "response_mask")}
    return TensorDict(fields | part, batch_size=count)


class AgentLoopWorker:
    """A rollout worker."""

    def __init__(self, sample_bytes: int) -> None:
        self._sample_bytes = sample_bytes

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Return samples with random bytes."""
        inputs = [
            {"picture": data["images"].clone(), "sample": blob(self._sample_bytes)}
            for data in prompts.non_tensor_batch["multi_modal_data"]
        ]
        return DataProto(token_fields(len(prompts)), {"multi_modal_inputs": objects(inputs)}, {})


class ActorWorker(Worker):
    """A train worker."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)  # type: ignore[untyped-decorator]
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Receive the samples; return a number for each token."""
        self.received = sum(one["sample"].numel() for one in data.non_tensor_batch["multi_modal_inputs"])
        values = torch.zeros(len(data), TOKENS)
        return DataProto.from_dict({"old_log_probs": values})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)  # type: ignore[untyped-decorator]
    def update_actor(self, data: DataProto) -> DataProto:
        """Receive the samples; return a number for each."""
        return DataProto.from_dict({"loss": torch.zeros(len(data))})


def main() -> None:
    """Run the steps."""
    task = json.loads(sys.argv[1])
    folder, stages, began = Path(task["folder"]), [], perf_counter()

    def reached(step: int, what: str) -> None:
        stages.append({"step": step, "stage": what, "s": round(perf_counter() - began, 1)})
        (folder / "stages.json").write_text(json.dumps(stages))

    workers = task["workers"]
    ray.init(
        num_cpus=2 * workers,
        object_store_memory=task["object_store_bytes"],
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(folder / "ray"),
    )
    rollout_worker: Any = ray.remote(num_cpus=0)(AgentLoopWorker)
    rollout = [rollout_worker.remote(task["sample_bytes"]) for _ in range(workers)]
    pool = RayResourcePool([workers], use_gpu=False, max_colocate_count=1)
    actors = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(ActorWorker)), device_name="cpu")
    reached(0, "workers started")
    for step in range(1, task["steps"] + 1):
        groups = task["groups"]
        batch = DataProto.from_single_dict(
            {
                "dummy_tensor": torch.zeros(groups, 1, dtype=torch.uint8),
                "uid": objects([str(number) for number in range(groups)]),
                "multi_modal_data": objects([{"images": blob(task["group_bytes"])} for _ in range(groups)]),
            }
        )
        prompts = batch.pop(non_tensor_batch_keys=["multi_modal_data"])
        prompts = prompts.repeat(repeat_times=task["samples"], interleave=True)
        reached(step, "prompts repeated")
        parts = prompts.chunk(workers)
        made = DataProto.concat(ray.get([w.generate_sequences.remote(p) for w, p in zip(rollout, parts, strict=True)]))
        del prompts, parts
        reached(step, "samples joined")
        batch = batch.repeat(repeat_times=task["samples"], interleave=True).union(made)
        del made
        batch.reorder(torch.arange(len(batch)))
        batch = batch.union(actors.compute_log_prob(batch))
        reached(step, "log-probabilities computed")
        actors.update_actor(batch)
        reached(step, "actor updated")
        del batch
    ray.shutdown()


if __name__ == "__main__":
    main()

"""verl's data path through Ray, with workers that compute nothing: the other side of `benchmarks/media_memory.py`, run in an environment
of its own (`make verl-setup`). The argument is a JSON object; `stages.json` in its folder says what was reached, and when.

With `trainer: v0` a step does what `RayPPOTrainer.fit` of verl's v0 trainer does with a batch (`DataProto`), without its computations:

1. The driver has the pictures of the prompts, repeats each prompt for its samples, and sends the parts to the rollout workers.
2. Each rollout worker returns its samples with `multi_modal_inputs`: the group's picture, made for each sample as verl's processor does, and
   random bytes of the sample. The driver joins the parts and unites them with the batch.
3. The batch goes to the train workers twice, for old log-probabilities and for the update (no reference model, no critic).

With `trainer: v1` it does what `PPOTrainer.step` of the v1 trainer does (TransferQueue with `SimpleStorage`):

1. The driver sends the prompts with their pictures to the rollout workers, each in one part.
2. Each rollout worker puts its samples into the queue one by one, with the same `multi_modal_inputs`. verl's worker does this for many samples
   at once, so that it holds more of them.
3. The driver has only keys. The train workers get all fields of their samples from the queue twice, and the driver gets and puts the
   log-probabilities.

verl's own `pixel_values` have 12 times the bytes of 8-bit pixels or more; here they have the bytes of the payload.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import ray
import torch
from tensordict import TensorDict
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import (
    Dispatch,
    collect_dp_compute_data_proto,
    dispatch_nd_compute_dataproto,
    register,
)
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.tensordict_utils import chunk_tensordict, get_tensordict, list_of_dict_to_tensordict

STORAGE_UNITS = 2
"""TransferQueue's default. verl's configuration has 8, each a process of 430 MB without any data."""
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


def _dispatch_keys(group: Any, *args: Any, **named: Any) -> Any:
    """Split keys between the train workers, as verl's dispatch to a data-parallel mesh does."""
    return dispatch_nd_compute_dataproto(list(range(group.world_size)), group.world_size, group, *args, **named)


def _collect_all(group: Any, output: Any) -> Any:
    """The results of all workers."""
    return output


KEYS = {"dispatch_fn": _dispatch_keys, "collect_fn": collect_dp_compute_data_proto}
KEYS_ONLY = {"dispatch_fn": _dispatch_keys, "collect_fn": _collect_all}


class AgentLoopWorkerTQ:
    """A rollout worker of the v1 trainer."""

    def __init__(self, sample_bytes: int, samples: int) -> None:
        import transfer_queue

        transfer_queue.init()
        self._queue = transfer_queue
        self._sample_bytes = sample_bytes
        self._samples = samples

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Put samples with random bytes into the queue."""
        whole = torch.ones(2 * TOKENS, dtype=torch.int64)
        for uid, data in zip(list(prompts["uid"]), list(prompts["multi_modal_data"]), strict=True):
            for session in range(self._samples):
                field = {name: whole.clone() for name in ("input_ids", "position_ids")}
                field |= {
                    name: whole[:TOKENS].clone() for name in ("prompts", "responses", "response_mask", "loss_mask")
                }
                inputs = {"picture": data["images"].clone(), "sample": blob(self._sample_bytes)}
                self._queue.kv_batch_put(
                    keys=[f"{uid}_{session}_0"],
                    fields=list_of_dict_to_tensordict([field | {"multi_modal_inputs": inputs}]),
                    tags=[{"status": "success", "seq_len": 2 * TOKENS}],
                    partition_id="train",
                )


class ActorWorkerTQ(Worker):
    """A train worker of the v1 trainer."""

    @register(dispatch_mode=KEYS)  # type: ignore[untyped-decorator]
    def compute_log_prob(self, data: TensorDict) -> TensorDict:
        """Receive the samples; return a number for each token."""
        self.received = sum(one["sample"].numel() for one in list(data["multi_modal_inputs"]))
        return TensorDict({"log_probs": torch.zeros(len(data), TOKENS)}, batch_size=len(data))

    @register(dispatch_mode=KEYS_ONLY)  # type: ignore[untyped-decorator]
    def update_actor(self, data: TensorDict) -> int:
        """Receive the samples; return their number."""
        return len(data)


def run_v1(task: dict[str, Any], pool: RayResourcePool, reached: Callable[[int, str], None]) -> None:
    """Run the steps as the v1 trainer does."""
    import transfer_queue
    from omegaconf import OmegaConf

    storage = {"total_storage_size": 100_000, "num_data_storage_units": STORAGE_UNITS}
    settings = {"backend": {"storage_backend": "SimpleStorage", "SimpleStorage": storage}}
    transfer_queue.init(OmegaConf.create(settings))
    workers, samples = task["workers"], task["samples"]
    rollout_worker: Any = ray.remote(num_cpus=0)(AgentLoopWorkerTQ)
    rollout = [rollout_worker.remote(task["sample_bytes"], samples) for _ in range(workers)]
    actors = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(ActorWorkerTQ)), device_name="cpu")
    reached(0, "workers started")
    for step in range(1, task["steps"] + 1):
        uids = [f"{step}-{number}" for number in range(task["groups"])]
        pictures = [{"images": blob(task["group_bytes"])} for _ in uids]
        prompts = get_tensordict({"uid": objects(list(uids)), "multi_modal_data": objects(pictures)})
        tags = [{"is_prompt": True, "status": "pending"} for _ in uids]
        transfer_queue.kv_batch_put(keys=uids, partition_id="train", tags=tags)
        parts = chunk_tensordict(prompts, workers)
        ray.get([worker.generate_sequences.remote(part) for worker, part in zip(rollout, parts, strict=True)])
        del prompts, parts, pictures
        keys = [f"{uid}_{session}_0" for uid in uids for session in range(samples)]
        batch = transfer_queue.KVBatchMeta(keys=keys, tags=[{} for _ in keys], partition_id="train")
        reached(step, "samples in the queue")
        actors.compute_log_prob(batch)
        fields = ["log_probs", "response_mask"]
        found = transfer_queue.kv_batch_get(keys=keys, partition_id="train", select_fields=fields)
        found["old_log_probs"] = found.pop("log_probs")
        transfer_queue.kv_batch_put(keys=keys, partition_id="train", fields=found.select("old_log_probs"))
        reached(step, "log-probabilities computed")
        assert sum(actors.update_actor(batch)) == len(keys)
        reached(step, "actor updated")
        transfer_queue.kv_clear(keys=[*uids, *keys], partition_id="train")
    transfer_queue.close()


def main() -> None:
    """Run the steps."""
    task = json.loads(sys.argv[1])
    folder, stages, began = Path(task["folder"]), [], perf_counter()

    def reached(step: int, what: str) -> None:
        stages.append({"step": step, "stage": what, "s": round(perf_counter() - began, 1)})
        (folder / "stages.json").write_text(json.dumps(stages))

    workers = task["workers"]
    ray.init(
        num_cpus=2 * workers + (STORAGE_UNITS + 1 if task["trainer"] == "v1" else 0),
        object_store_memory=task["object_store_bytes"],
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(folder / "ray"),
    )
    pool = RayResourcePool([workers], use_gpu=False, max_colocate_count=1)
    if task["trainer"] == "v1":
        run_v1(task, pool, reached)
    else:
        run_v0(task, pool, reached)
    ray.shutdown()


def run_v0(task: dict[str, Any], pool: RayResourcePool, reached: Callable[[int, str], None]) -> None:
    """Run the steps as the v0 trainer does."""
    workers = task["workers"]
    rollout_worker: Any = ray.remote(num_cpus=0)(AgentLoopWorker)
    rollout = [rollout_worker.remote(task["sample_bytes"]) for _ in range(workers)]
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


if __name__ == "__main__":
    main()

"""`python -m gcore.train.rank.selftest`: checks whether torch and the train backends work here; prints JSON, one object
per line.

The first object has torch's version and devices. The second says that one rank made an update with FSDP2 over gloo, and
the third has DeepSpeed's version, after such an update with it. An error ends the process with the exception on standard
error. `gcore doctor` runs this program, because it must not import these libraries itself.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    """Run the self-test and end the process."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.cuda.get_device_name(index) for index in range(count)]
    _say({"torch": torch.__version__, "cuda": torch.version.cuda, "devices": devices})
    _join()
    _say({"fsdp2": _update_fsdp2()})
    _say({"deepspeed": _update_deepspeed()})
    sys.stdout.flush()
    os._exit(0)  # collective libraries can abort during a normal exit


def _join() -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")


def _update_fsdp2() -> bool:
    """Make one update of a tiny model with FSDP2."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    module = torch.nn.Linear(4, 4)
    before = module.weight.detach().clone()
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert isinstance(module.weight, DTensor)
    if torch.equal(before, module.weight.full_tensor()):
        raise RuntimeError("the update did not change the weights")
    return True


def _update_deepspeed() -> str:
    """Make one update of a tiny model with DeepSpeed; returns DeepSpeed's version."""
    import deepspeed
    import torch
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    module = torch.nn.Linear(4, 4)
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=list(module.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
            "zero_optimization": {"stage": 1},
            "steps_per_print": None,
        },
    )
    before = module.weight.detach().clone()
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    if torch.equal(before, module.weight):
        raise RuntimeError("the update did not change the weights")
    return str(deepspeed.__version__)


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

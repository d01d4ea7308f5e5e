"""A rank releases its GPU memory to the device, where another process can use it, and restores it bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from gcore.config import parse_spec
from gcore.testing import FakeClock
from gcore.train.backends.base import forward_tensors
from gcore.train.backends.deepspeed import optimizer_tensors
from gcore.train.models import RankModels
from gcore.train.offload import MemoryOffloader
from gcore.train.rank.launch import PARTS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

WIDTH = 4096
MATRIX = 4 * WIDTH * WIDTH
SPEC = parse_spec(
    {
        "name": "j",
        "model": {"path": "m"},
        "data": {"path": "d"},
        "flow": {"steps": 3},
        "rollout": {"max_new_tokens": 4},
    }
)


class Wide:
    """As much of a trained model as resting looks at: weights, gradients, Adam's two."""

    def __init__(self) -> None:
        self.module = nn.Linear(WIDTH, WIDTH, bias=False, device="cuda")
        self.updater = torch.optim.AdamW(self.module.parameters(), lr=0.1, fused=True)
        self.learn()

    def learn(self) -> float:
        loss = self.module(torch.ones(4, WIDTH, device="cuda")).square().mean()
        self.updater.zero_grad()
        loss.backward()
        self.updater.step()
        return float(loss.detach())

    def forward_tensors(self) -> Iterator[torch.Tensor]:
        return forward_tensors(self.module)

    def optimizer_tensors(self) -> Iterator[torch.Tensor]:
        return optimizer_tensors(self.updater)

    def everything(self) -> list[torch.Tensor]:
        return [*self.module.state_dict().values(), *optimizer_tensors(self.updater)]


def test_the_device_has_the_memory_while_a_rank_rests_and_every_bit_comes_back() -> None:
    model = Wide()
    torch.cuda.empty_cache()
    before = [one.detach().clone().cpu() for one in model.everything()]
    rank = MemoryOffloader(RankModels(model, None), SPEC.train, torch.device("cuda", 0), FakeClock())  # type: ignore[arg-type]
    for _ in range(2):  # the second time its place in host memory is there already
        full = torch.cuda.mem_get_info()[0]
        rank.rest({"optimizer"}, lambda _: None)
        half = torch.cuda.mem_get_info()[0]
        rank.rest(PARTS, lambda _: None)
        empty = torch.cuda.mem_get_info()[0]
        assert half - full > 2.9 * MATRIX
        assert empty - half > 0.9 * MATRIX
        rank.rest((), lambda _: None)
        assert all(one.cpu().equal(other) for one, other in zip(model.everything(), before, strict=True))
    model.learn()
    assert model.module.weight.isfinite().all()

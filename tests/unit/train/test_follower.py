"""The network that follows the policy: its weights after each step, and what checkpoints and replicas read of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gcore.models.replicas import Extent
from gcore.train.batching import TokenFeeding
from gcore.train.denoising.follower import FollowingNetwork


class Policy:
    """Weights that a test sets."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def tensors(self, kind: str) -> Any:
        assert kind == "master"
        for name, one in self.module.named_parameters():
            yield type("Named", (), {"name": name, "tensor": one.detach()})

    def extents(self) -> Any:
        yield Extent(name="weight", start=2, numel=3)


@pytest.mark.parametrize("half", [False, True])
def test_it_keeps_its_share_and_takes_the_rest_from_the_policy(*, half: bool) -> None:
    policy, own = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
    before = own.weight.detach().clone()
    feeding = TokenFeeding("bucketed", 4, torch.device("cpu"))
    shares = {0: 0.0, 1: 0.25}
    follower = FollowingNetwork(own, feeding, Policy(policy), shares.__getitem__, half=half)  # type: ignore[arg-type]
    assert not any(p.requires_grad for p in own.parameters())
    assert own.weight.dtype == (torch.bfloat16 if half else torch.float32)
    (found,) = follower.tensors("master")
    assert torch.equal(found.tensor, before)
    follower.follow(0, lambda: None)
    (found,) = follower.tensors("served")
    assert torch.equal(found.tensor, policy.weight)
    kept = policy.weight.detach().clone()
    with torch.no_grad():
        policy.weight.add_(1.0)
    follower.follow(1, lambda: None)
    (found,) = follower.tensors("served")
    assert torch.allclose(found.tensor, 0.25 * kept + 0.75 * policy.weight)
    (piece,) = follower.pieces("master", follower.extents())
    assert torch.equal(piece, found.tensor.flatten()[2:5])
    assert [one.tensor.any().item() for one in follower.tensors("exp_avg")] == [False]

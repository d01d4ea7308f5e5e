"""The gradient of every loss against central differences in float64.

The differences hold fixed everything that a loss holds fixed (stop-gradients, detached weights): each case gives the plain
function of x whose derivative at x = `at` the paper means. Inputs are fixed samples from seeds, so that no kink is hit by chance.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple, get_args

import pytest
import torch
from torch import Tensor

from gcore.train.algorithms.losses import (
    Mode,
    cispo_loss,
    denominator,
    gspo_loss,
    icepop_weight,
    kl_estimate,
    loss_sum,
    mis_mask,
    nll_loss,
    ppo_loss,
    ratio_weight,
    tis_weight,
    value_loss,
)
from gcore.train.batching import token_logprobs

Function = Callable[[Tensor], Tensor]
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
STEP = 1e-6
SEEDS = range(4)
MODES: tuple[Mode, ...] = get_args(Mode)


def generic(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Drawn(NamedTuple):
    """Log-probabilities [3, 5] near each other, advantages [3, 1] of both signs, a mask [3, 5] with holes."""

    at: Tensor
    old: Tensor
    engine: Tensor
    ref: Tensor
    gain: Tensor
    mask: Tensor


def draw(seed: int) -> Drawn:
    old = generic(seed + 100, 3, 5) * 0.3 - 1
    mask = generic(seed + 400, 3, 5) > -0.8
    mask[:, 0] = True
    return Drawn(
        at=generic(seed, 3, 5) * 0.3 - 1,
        old=old,
        engine=old + generic(seed + 200, 3, 5) * 0.4,
        ref=generic(seed + 300, 3, 5) * 0.3 - 1,
        gain=torch.tensor([[1.5], [-0.7], [2.0]], dtype=torch.float64),
        mask=mask,
    )


def differences(function: Function, at: Tensor) -> Tensor:
    """The derivative of a scalar function, element by element."""
    found = torch.zeros_like(at)
    for place in range(at.numel()):
        aside = torch.zeros_like(at)
        aside.view(-1)[place] = STEP
        found.view(-1)[place] = (function(at + aside) - function(at - aside)) / (2 * STEP)
    return found


def agrees(loss: Function, meant: Function, at: Tensor) -> None:
    """The gradient of `loss` at `at` is the derivative of `meant` there."""
    x = at.clone().requires_grad_()
    loss(x).backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert bool(x.grad.any())
    torch.testing.assert_close(x.grad, differences(meant, at), atol=2e-8, rtol=1e-6)


def aggregated(token_loss: Tensor, mask: Tensor, mode: Mode) -> Tensor:
    tokens, sequences = int(mask.sum()), int(mask.any(dim=1).sum())
    return loss_sum(token_loss, mask, mode, 7.0) / denominator(mode, tokens=tokens, sequences=sequences, horizon=7.0)


def ppo(x: Tensor, drawn: Drawn) -> Tensor:
    return ppo_loss(x, drawn.old, drawn.gain, **CLIP)


LOSSES: dict[str, Callable[[Tensor, Drawn], Tensor]] = {
    "ppo": ppo,
    "dual clip": lambda x, d: ppo_loss(x, d.old, d.gain, **CLIP, dual_clip=1.4),
    "sft": lambda x, d: nll_loss(x),
    "value": lambda x, d: value_loss(x, d.ref, d.old, 0.2),
    "value without a clip": lambda x, d: value_loss(x, d.ref, d.old, None),
    "ppo and tis": lambda x, d: ppo(x, d) * tis_weight(d.old, d.engine, 1.2),
    "ppo and icepop": lambda x, d: ppo(x, d) * icepop_weight(d.old, d.engine, low=0.7, high=1.4),
    "decoupled ppo": lambda x, d: ratio_weight(d.old, d.engine) * ppo(x, d),
    "ppo and k1": lambda x, d: ppo(x, d) + 0.3 * kl_estimate(x, d.ref, "k1"),
    "ppo and k2": lambda x, d: ppo(x, d) + 0.3 * kl_estimate(x, d.ref, "k2"),
    "ppo and k3": lambda x, d: ppo(x, d) + 0.3 * kl_estimate(x, d.ref, "k3"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_gradient_of_a_loss_agrees_with_differences_of_its_value(name: str, mode: Mode, seed: int) -> None:
    drawn = draw(seed)

    def loss(x: Tensor) -> Tensor:
        return aggregated(LOSSES[name](x, drawn), drawn.mask, mode)

    agrees(loss, loss, drawn.at)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", SEEDS)
def test_mis_has_the_gradient_of_what_is_left(mode: Mode, seed: int) -> None:
    drawn = draw(seed)
    kept = mis_mask(drawn.old, drawn.engine, drawn.mask, low=0.7, high=1.4)
    assert 0 < int(kept.sum()) < int(drawn.mask.sum())
    ratio = (drawn.old - drawn.engine).exp()
    left = drawn.mask & (ratio >= 0.7) & (ratio <= 1.4)

    def meant(x: Tensor) -> Tensor:
        """The mean as it is spelled, over what is left."""
        rows = [ppo(x, drawn)[row][left[row]] for row in range(3) if bool(left[row].any())]
        match mode:
            case "token-mean":
                return torch.cat(rows).mean()
            case "seq-mean-token-mean":
                return torch.stack([row.mean() for row in rows]).mean()
            case "seq-mean-token-sum":
                return torch.stack([row.sum() for row in rows]).mean()
            case "seq-mean-token-sum-norm":
                return torch.stack([row.sum() / 7.0 for row in rows]).mean()

    agrees(lambda x: aggregated(ppo(x, drawn), kept, mode), meant, drawn.at)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", SEEDS)
def test_cispo_has_the_gradient_of_a_fixed_weight_times_the_log_probability(mode: Mode, seed: int) -> None:
    at, old, _, _, gain, mask = drawn = draw(seed)
    weight = (at - old).exp().clamp(0.8, 1.28)
    assert bool(((at - old).exp() != weight).any()), "the clip acts"
    agrees(
        lambda x: aggregated(cispo_loss(x, old, gain, **CLIP), mask, mode),
        lambda x: aggregated(-weight * gain * x, mask, mode),
        drawn.at,
    )


@pytest.mark.parametrize("clip", [{"clip_low": 0.9, "clip_high": 9.0}, CLIP, {"clip_low": 0.02, "clip_high": 0.02}])
@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_has_the_gradient_of_the_objective_over_sequences(seed: int, clip: dict[str, float]) -> None:
    """The token form is only a way to write it: one ratio a sequence, clipped, mean over sequences."""
    at, old, _, _, gain, mask = draw(seed)
    low, high = 1 - clip["clip_low"], 1 + clip["clip_high"]

    def meant(x: Tensor) -> Tensor:
        ratios = torch.stack([(x - old)[row][mask[row]].mean().exp() for row in range(3)])
        return torch.maximum(-gain[:, 0] * ratios, -gain[:, 0] * ratios.clamp(low, high)).mean()

    def loss(x: Tensor) -> Tensor:
        return aggregated(gspo_loss(x, old, gain, mask, **clip), mask, "seq-mean-token-mean")

    x = at.clone().requires_grad_()
    value = loss(x)
    torch.testing.assert_close(value.detach(), meant(at))
    value.backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, differences(meant, at), atol=2e-8, rtol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_k3_plus_has_the_gradient_of_k2(seed: int) -> None:
    at, _, _, ref, _, mask = draw(seed)
    agrees(
        lambda x: aggregated(kl_estimate(x, ref, "k3+"), mask, "token-mean"),
        lambda x: aggregated((x - ref).square() / 2, mask, "token-mean"),
        at,
    )


@pytest.mark.parametrize("tempered", [False, True], ids=["at temperature 1", "at several temperatures"])
@pytest.mark.parametrize("seed", SEEDS)
def test_log_probabilities_and_the_entropy_bonus_have_the_gradients_of_their_values(seed: int, tempered: bool) -> None:
    logits, targets = generic(seed, 4, 6) * 2, torch.tensor([0, 5, 2, 2])
    temperature = torch.tensor([0.7, 1.0, 1.3, 2.0], dtype=torch.float64) if tempered else None
    pull = generic(seed + 1, 4), generic(seed + 2, 4)

    def loss(x: Tensor) -> Tensor:
        logp, entropy = token_logprobs(x, targets, temperature, entropic=True)
        return (logp * pull[0] + entropy * pull[1]).sum()

    def meant(x: Tensor) -> Tensor:
        everything = torch.log_softmax(x if temperature is None else x / temperature[:, None], -1)
        entropy = -(everything.exp() * everything).sum(-1)
        return (everything.gather(1, targets[:, None])[:, 0] * pull[0] + entropy * pull[1]).sum()

    torch.testing.assert_close(loss(logits), meant(logits))
    agrees(loss, meant, logits)


def test_a_token_that_a_model_forbids_has_no_part_in_the_entropy_nor_in_its_gradient() -> None:
    logits = generic(3, 2, 5)
    logits[:, 4] = -torch.inf
    x = logits.clone().requires_grad_()
    logp, entropy = token_logprobs(x, torch.tensor([0, 1]), None, entropic=True)
    (logp.sum() + 0.5 * entropy.sum()).backward()  # type: ignore[no-untyped-call]
    short = logits[:, :4].clone().requires_grad_()
    logp, entropy = token_logprobs(short, torch.tensor([0, 1]), None, entropic=True)
    (logp.sum() + 0.5 * entropy.sum()).backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert short.grad is not None
    torch.testing.assert_close(x.grad[:, :4], short.grad)
    assert not x.grad[:, 4].any()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_small_step_against_the_gradient_lowers_the_loss(seed: int) -> None:
    """The sign: what is better than the others becomes likelier."""
    drawn = draw(seed)
    values = []
    at = drawn.old.clone()
    for _ in range(4):
        x = at.clone().requires_grad_()
        loss = aggregated(ppo(x, drawn), drawn.mask, "token-mean")
        values.append(float(loss.detach()))
        loss.backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert torch.equal(x.grad.sign() * drawn.mask, -drawn.gain.sign() * drawn.mask)
        at = at - 0.1 * x.grad
    assert all(later < earlier for earlier, later in pairwise(values))

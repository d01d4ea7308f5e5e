"""Denoising steps, advantages and losses against reference numbers of independent implementations in float64."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gcore.config.diffusion import DenoisingTraining
from gcore.config.train import TrainSpec
from gcore.ledger.balance import SampleSlot
from gcore.models.diffusion.steps import ddim_step, flow_step
from gcore.models.diffusion.windows import WindowSchedule
from gcore.train.algorithms.denoising import denoising_advantages, nft_loss, nft_weights, prediction_gap
from gcore.train.denoising.objectives import DenoisingPolicy
from gcore.train.denoising.rows import DenoisingBatch, DenoisingRows, StepScores
from gcore.train.objectives import OtherScores, Targets

CASES: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parents[2] / "data" / "diffusion" / "reference.json").read_text()
)


def cases(name: str) -> Any:
    return pytest.mark.parametrize("case", CASES[name], ids=range(len(CASES[name])))


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(actual, dtype=torch.float64), f64(expected), atol=1e-6, rtol=1e-7)


@cases("flow_sde")
def test_steps_of_flow_grpo(case: dict[str, Any]) -> None:
    first = case["sigma"] == 1.0
    sigmas = [1.0, case["sigma_next"]] if first else [1.0, case["sigma"], case["sigma_next"]]
    if first:
        assert case["sigma_max"] == case["sigma_next"]
    step = flow_step("sde", f64(case["x"]), f64(case["velocity"]), sigmas, 0 if first else 1, case["noise_level"])
    close(step.mean, case["mean"])
    close(step.diffusion, case["std_dev_t"])
    close(step.log_prob(f64(case["x_next"])), case["log_prob"])


@cases("cps")
def test_steps_that_preserve_coefficients(case: dict[str, Any]) -> None:
    sigmas = [1.0, case["sigma"], case["sigma_next"]]
    step = flow_step("cps", f64(case["x"]), f64(case["velocity"]), sigmas, 1, case["noise_level"])
    close(step.mean, case["mean"])
    close(step.std, case["std"])
    close(step.log_prob(f64(case["x_next"]), constants=False), case["log_prob_without_constants"])


@cases("dance_sde")
def test_steps_of_dance_grpo(case: dict[str, Any]) -> None:
    sigmas = [1.0, case["sigma"], case["sigma_next"]]
    step = flow_step("dance", f64(case["x"]), f64(case["velocity"]), sigmas, 1, case["eta"])
    close(step.mean, case["mean"])
    close(step.log_prob(f64(case["x_next"])), case["log_prob"])


@cases("ddim")
def test_steps_of_ddpo(case: dict[str, Any]) -> None:
    step = ddim_step(
        f64(case["x"]),
        f64(case["model_output"]),
        case["alpha_bar"],
        case["alpha_bar_prev"],
        case["eta"],
        case["prediction_type"],
    )
    close(step.log_prob(f64(case["x_next"])), case["log_prob"])


@cases("advantages")
def test_advantages(case: dict[str, Any]) -> None:
    group_index = torch.tensor([ord(one) for one in case["prompts"]])
    found = denoising_advantages(
        f64(case["rewards"]), group_index, std_of=case["std_of"], ddof=0, epsilon=1e-4, clip=None
    )
    close(found, case["advantages"])


def test_advantages_without_a_deviation_are_distances_from_the_mean() -> None:
    groups = torch.tensor([0, 0, 1, 1])
    found = denoising_advantages(f64([1.0, 3.0, 5.0, 5.0]), groups, std_of="none", ddof=0, epsilon=1.0, clip=0.5)
    close(found, [-0.5, 0.5, 0.0, 0.0])


def scores_of(log_prob: Tensor, values: Tensor, diffusion: float) -> StepScores:
    """Scores of one step of each sample."""
    each = torch.ones_like(log_prob.detach())
    return StepScores(log_prob[:, None], torch.zeros_like(each)[:, None], values, 0.1 * each, diffusion * each, -each)


def no_rows() -> DenoisingRows:
    raise AssertionError("these losses read no states")


@cases("loss_step")
def test_the_clipped_loss_with_kl(case: dict[str, Any]) -> None:
    log_prob, mean = f64(case["log_prob"]).requires_grad_(), f64(case["mean"]).requires_grad_()
    advantages = f64(case["advantages"]).clamp(-case["adv_clip_max"], case["adv_clip_max"])[:, None]
    count, old = len(log_prob), f64(case["old_log_prob"])[:, None]
    mask = torch.ones(count, 1, dtype=torch.bool)
    slots = tuple(SampleSlot(0, sample) for sample in range(count))
    batch = DenoisingBatch(slots, mask, mask, old, count, count, no_rows)
    scores = scores_of(log_prob, mean, case["std_dev_t"])
    reference = scores_of(old.flatten(), f64(case["mean_ref"]), case["std_dev_t"])
    targets = Targets(batch, advantages, old, None, mask, OtherScores(reference=reference))

    def objective(beta: float) -> DenoisingPolicy:
        train = TrainSpec(clip_low=case["clip_range"], clip_high=case["clip_range"], kl_coef=beta)
        return DenoisingPolicy(train, 1.0, denoising=DenoisingTraining())

    loss = objective(case["beta"]).loss(scores, targets) / count
    loss.backward()
    close(objective(0.0).loss(scores, targets).detach() / count, case["policy_loss"])
    close(objective(0.0).metrics(scores, targets)["kl_reference"] / count, case["kl"])
    close(loss.detach(), case["loss"])
    close(log_prob.grad, case["d_loss_d_log_prob"])
    close(mean.grad, case["d_loss_d_mean"])


@cases("nft")
def test_diffusion_nft(case: dict[str, Any]) -> None:
    velocity = f64(case["v"]).requires_grad_()
    level, clean = f64(case["t"]), f64(case["x0"])
    t = level.reshape(-1, 1, 1, 1)
    weights = nft_weights(f64(case["advantages"]), most=case["adv_clip_max"])
    close(weights, case["r"])
    loss = nft_loss(
        velocity,
        f64(case["v_old"]),
        (1 - t) * clean + t * f64(case["noise"]),
        clean,
        level,
        weights,
        beta=case["beta"],
        most=case["adv_clip_max"],
    )
    gap = prediction_gap(velocity, f64(case["v_ref"]))
    total = (loss + case["kl_beta"] * gap).mean()
    total.backward()
    close(loss.mean().detach(), case["policy_loss"])
    close(gap.mean().detach(), case["kl"])
    close(total.detach(), case["total_loss"])
    close(velocity.grad, case["d_total_loss_d_v"])


@cases("nft_old_decay")
def test_decay_of_the_old_weights(case: dict[str, Any]) -> None:
    average = (
        {"rise": 0.0},
        {"rise": 0.001, "most": 0.5},
        {"rise": 0.0075, "most": 0.999, "after": 75},
    )[case["decay_type"]]
    training = DenoisingTraining.model_validate({"average": average})
    assert training.kept_share(case["step"]) == pytest.approx(case["decay"])


@cases("mix_window")
def test_windows_of_mix_grpo(case: dict[str, Any]) -> None:
    given = case["settings"]
    schedule = WindowSchedule(
        given["group_size"], given["max_timesteps"], given["iters_per_group"], given["sample_strategy"]
    )
    assert [list(schedule.window(step)) for step in range(len(case["windows"]))] == case["windows"]
    assert list(schedule.window(len(case["windows"]))) == case["windows"][0]  # the reference goes on without steps


@pytest.mark.parametrize("strategy", ["progressive", "decay", "exp_decay", "random"])
@pytest.mark.parametrize("roll_back", [True, False])
@pytest.mark.parametrize("stride", [None, 1, 3])
def test_no_window_is_empty(strategy: Any, roll_back: bool, stride: int | None) -> None:
    schedule = WindowSchedule(4, 10, 3, strategy, stride, roll_back)
    for step in range(200):
        window = schedule.window(step)
        assert 1 <= len(window) <= 4
        assert set(window) <= set(range(10))
        assert window == WindowSchedule(4, 10, 3, strategy, stride, roll_back).window(step)


@pytest.mark.parametrize(
    ("strategy", "settings", "stays"),
    [
        # int(8·(1 - start/12) + 2·start/12) and ceil(8·exp(-0.5·max(0, start - 4))), as in MixGRPO's own code
        ("decay", {}, [(0, 8), (4, 6), (8, 4)]),
        ("decay", {"least_stay": 5}, [(0, 8), (4, 7), (8, 6)]),
        ("decay", {"stride": 5}, [(0, 8), (5, 5), (10, 3)]),
        ("exp_decay", {"decay_after": 4, "decay_rate": 0.5}, [(0, 8), (4, 8), (8, 2)]),
        ("progressive", {"stride": 3, "start": 2}, [(2, 8), (5, 8), (8, 8), (11, 8)]),
    ],
)
def test_a_window_stays_as_long_as_its_strategy_says(
    strategy: Any, settings: dict[str, Any], stays: list[tuple[int, int]]
) -> None:
    expected = [start for start, stay in stays for _ in range(stay)]
    rolled = WindowSchedule(4, 12, 8, strategy, **settings)
    last = WindowSchedule(4, 12, 8, strategy, **settings, roll_back=False)
    found = [rolled.window(step) for step in range(2 * len(expected))]
    assert [window.start for window in found] == 2 * expected
    assert all(window.stop == min(window.start + 4, 12) for window in found)
    ends = expected + [expected[-1]] * len(expected)
    assert [last.window(step).start for step in range(2 * len(expected))] == ends


def test_a_window_whose_stay_decays_to_nothing_stays_for_one_step() -> None:
    schedule = WindowSchedule(2, 6, 25, "exp_decay", start=2, decay_after=0, decay_rate=1e9)
    assert [list(schedule.window(step)) for step in range(3)] == [[2, 3], [4, 5], [2, 3]]


@pytest.mark.parametrize("wrong", [{"size": 0}, {"size": 11}, {"start": 10}, {"stay": 0}, {"stride": 0}])
def test_an_empty_window_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="window"):
        WindowSchedule(**({"size": 4, "steps": 10} | wrong))


def test_the_last_step_has_a_log_probability_far_from_all_others() -> None:
    """Therefore it is not trained by default: its deviation is nearly 0."""
    (case,) = [one for one in CASES["flow_sde"] if one["sigma_next"] == 0 and one["sigma"] < 0.005]
    assert min(case["log_prob"]) < -1_000
    others = [one for one in CASES["flow_sde"] if one is not case]
    assert min(min(one["log_prob"]) for one in others) > -10


def test_the_first_step_is_known_by_its_index_and_not_by_its_level() -> None:
    state, velocity = torch.ones(1, 2), torch.ones(1, 2)
    exact = flow_step("sde", state, velocity, [1.0, 0.9], 0, 0.7)
    rounded = flow_step("sde", state, velocity, [0.99999994, 0.9], 0, 0.7)
    assert rounded.std == pytest.approx(exact.std, rel=1e-6)
    assert math.isfinite(exact.std)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_of_low_precision_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="float32 or wider"):
        flow_step("sde", torch.ones(1, 2, dtype=dtype), torch.ones(1, 2, dtype=dtype), [1.0, 0.5, 0.0], 0, 0.7)


def test_groups_with_equal_rewards_get_exactly_zero() -> None:
    rewards, groups = f64([0.1] * 3 + [0.2, 0.3]), torch.tensor([0, 0, 0, 1, 1])
    for std_of, epsilon in (("batch", 1e-4), ("group", 1e-8)):
        found = denoising_advantages(rewards, groups, std_of=std_of, ddof=0, epsilon=epsilon, clip=5.0)  # type: ignore[arg-type]
        assert found[:3].tolist() == [0.0, 0.0, 0.0]
        assert found[3] < 0 < found[4]


def test_at_the_start_of_nft_the_gradient_is_not_zero() -> None:
    torch.manual_seed(0)
    velocity = torch.randn(1, 4, dtype=torch.float64, requires_grad=True)
    clean, noise, level = torch.randn(1, 4).double(), torch.randn(1, 4).double(), f64([0.5])
    state = 0.5 * clean + 0.5 * noise
    grads = {}
    for r in (0.5, 1.0, 0.0):
        velocity.grad = None
        nft_loss(velocity, velocity.detach(), state, clean, level, f64([r]), beta=1.0, most=5.0).sum().backward()
        assert velocity.grad is not None
        grads[r] = velocity.grad.clone()
    close(grads[0.5], torch.zeros(1, 4).tolist())
    close(grads[1.0], (-grads[0.0]).tolist())
    assert float(grads[1.0].abs().max()) > 0

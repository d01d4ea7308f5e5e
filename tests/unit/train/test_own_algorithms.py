"""Advantage estimators and losses from a user's package: named in a spec, tried at a rank's start, every result checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plug_in_package import Install, installer

from gcore.config import parse_spec, stored_spec
from gcore.config.train import TrainSpec
from gcore.errors import SpecError
from gcore.plugins import PluginFault
from gcore.testing.contracts import ContractBroken
from gcore.testing.training import check_advantage, check_loss
from gcore.train.objectives import PolicyGradient, Targets, find_plugin_advantage, find_plugin_loss

ESTIMATORS = """
import torch


def against_best(outcomes, groups, *, scale=1.0):
    best = torch.stack([outcomes[groups == group].max() for group in groups])
    return scale * (outcomes - best)


def first_counts(outcomes, groups):
    return outcomes - outcomes[0]


def too_few(outcomes, groups):
    return outcomes[:2]


def no_number(outcomes, groups):
    return outcomes / 0.0


def raises(outcomes, groups):
    return outcomes.no_such_thing()
"""
LOSSES = """
def reinforce(logp, old, advantages, mask, *, clip_low, clip_high, weight=1.0):
    return -weight * advantages * logp


def leans_on_neighbours(logp, old, advantages, mask, *, clip_low, clip_high):
    return -advantages * logp + logp.mean()


def constant(logp, old, advantages, mask, *, clip_low, clip_high):
    return -advantages * old


def a_number(logp, old, advantages, mask, *, clip_low, clip_high):
    return logp.sum()
"""


@pytest.fixture
def estimators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install: Install = installer(tmp_path, monkeypatch, "gcore.advantages")
    names = ("against_best", "first_counts", "too_few", "no_number", "raises")
    install("own_estimators", "\n".join(f"{name} = own_estimators:{name}" for name in names), ESTIMATORS)


@pytest.fixture
def losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install: Install = installer(tmp_path, monkeypatch, "gcore.losses")
    names = ("reinforce", "leans_on_neighbours", "constant", "a_number")
    install("own_losses", "\n".join(f"{name} = own_losses:{name}" for name in names), LOSSES)


def tree(**train: Any) -> dict[str, Any]:
    return {
        "name": "job",
        "model": {"path": "m"},
        "data": {"path": "d"},
        "flow": {"steps": 3},
        "rollout": {"max_new_tokens": 8},
        "train": train,
    }


@pytest.mark.usefixtures("estimators", "losses")
def test_a_spec_names_them_like_gcores_own() -> None:
    spec = parse_spec(tree(advantage="against_best", loss="reinforce", advantage_options={"scale": 2.0}))
    assert (spec.train.advantage, spec.train.loss) == ("against_best", "reinforce")
    with pytest.raises(SpecError, match=r"an entry point in gcore\.advantages \(got 'against_bets'\).*'against_best'"):
        parse_spec(tree(advantage="against_bets"))


def test_a_stored_spec_is_read_where_the_package_is_not_installed() -> None:
    assert stored_spec(tree(advantage="elsewhere", loss="also_elsewhere")).train.advantage == "elsewhere"
    with pytest.raises(SpecError, match=r"train\.advantage"):
        parse_spec(tree(advantage="elsewhere"))
    spec = stored_spec(tree(advantage="elsewhere"))
    with pytest.raises(PluginFault, match="no advantage estimator is called 'elsewhere'"):
        find_plugin_advantage(spec.train)  # a rank needs it


def test_options_are_for_those_of_ones_own() -> None:
    with pytest.raises(SpecError, match="advantage_options are for an estimator of your own; 'grpo' has none"):
        parse_spec(tree(advantage_options={"scale": 2}))
    with pytest.raises(SpecError, match="loss_options are for a loss of your own; 'ppo' has none"):
        parse_spec(tree(loss_options={"scale": 2}))


@pytest.mark.usefixtures("estimators")
def test_an_estimator_sees_the_outcomes_and_their_groups() -> None:
    estimate = find_plugin_advantage(TrainSpec(advantage="against_best", advantage_options={"scale": 2.0}))
    assert estimate is not None
    found = estimate(torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64), torch.tensor([7, 7, 2]))
    assert found.tolist() == [0.0, -2.0, 0.0]
    assert find_plugin_advantage(TrainSpec()) is None


@pytest.mark.usefixtures("losses")
def test_a_loss_is_summed_as_gcores_own_are() -> None:
    found = PolicyGradient(TrainSpec(loss="reinforce"), 8.0, "none", find_plugin_loss(TrainSpec(loss="reinforce")))
    logp = torch.tensor([[-1.0, -0.5], [-2.0, -3.0]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, False]])

    class Batch:
        pass

    class Scored:
        pass

    batch, scores = Batch(), Scored()
    batch.mask, scores.logp = mask, logp  # type: ignore[attr-defined]
    targets = Targets(batch, torch.tensor([[1.0], [-1.0]]), logp.detach(), None, mask)  # type: ignore[arg-type]
    total = found.loss(scores, targets)  # type: ignore[arg-type]
    total.backward()
    assert total.item() == pytest.approx(1.0 + 0.5 - 2.0)
    assert logp.grad is not None
    assert logp.grad.tolist() == [[-1.0, -1.0], [1.0, 0.0]]


@pytest.mark.usefixtures("estimators", "losses")
@pytest.mark.parametrize(
    ("kind", "name", "sentence"),
    [
        ("advantage", "too_few", r"'too_few' returned a tensor of shape \[2\], not a tensor of shape \[4\]"),
        ("advantage", "no_number", "returned an advantage that is not finite"),
        ("advantage", "raises", "raised AttributeError: 'Tensor' object has no attribute 'no_such_thing'"),
        ("loss", "constant", "has no gradient"),
        ("loss", "a_number", r"loss 'a_number' returned a tensor of shape \[\]"),
    ],
)
def test_plug_in_errors_are_reported_before_the_first_step(kind: str, name: str, sentence: str) -> None:
    load: Any = find_plugin_advantage if kind == "advantage" else find_plugin_loss
    with pytest.raises(PluginFault, match=sentence) as caught:
        load(TrainSpec(**{kind: name}))
    assert ("own_estimators" in caught.value.trace) == (name == "raises")


@pytest.mark.usefixtures("estimators", "losses")
def test_the_contract_kit_finds_what_depends_on_the_split() -> None:
    check_advantage("against_best", options={"scale": 3.0})
    check_loss("reinforce", options={"weight": 0.5})
    with pytest.raises(ContractBroken, match="depends on the samples' order"):
        check_advantage("first_counts")
    with pytest.raises(ContractBroken, match="of a row depends on other rows of the batch"):
        check_loss("leans_on_neighbours")


@pytest.mark.usefixtures("estimators", "losses")
def test_the_contract_kit_names_the_nearest_of_a_name_that_there_is_not() -> None:
    with pytest.raises(ContractBroken, match=r"train\.advantage: .*did you mean 'against_best'\?"):
        check_advantage("against_bets")
    with pytest.raises(ContractBroken, match=r"train\.loss: .*did you mean 'reinforce'\?"):
        check_loss("reinforc")

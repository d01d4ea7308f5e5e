"""The contract of `gcore.train.backends.base.TrainBackend`: DeepSpeed at every ZeRO stage and FSDP2, on one rank, and the fake.

A rank without a GPU runs on the CPU; `make test-gpu` runs the same cases on a CUDA device.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from gcore.models.publisher import NamedTensor
from gcore.system.torch_imports import leave_compiler_out
from gcore.testing.training import FakeTrainBackend
from gcore.train.backends.base import AdamKind, OptimizerSettings, TensorKind, TrainBackend
from gcore.train.backends.distributed import Collective, Rendezvous, open_store
from gcore.train.batching import TokenFeeding, make_dummy
from gcore.train.packing import Packing

VOCABULARY, BETAS, CLIP = 12, (0.9, 0.99), 0.5
ADAM: tuple[AdamKind, AdamKind] = ("exp_avg", "exp_avg_sq")
KINDS: tuple[TensorKind, ...] = ("served", "master", *ADAM)
CPU = torch.device("cpu")
FEEDING = TokenFeeding("bucketed", VOCABULARY, CPU)
Make = Callable[[], TrainBackend]


class Bigram(nn.Module):
    """Logits of the next token from the one before; a buffer that is saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Embedding(VOCABULARY, 5)
        self.last = nn.Linear(5, VOCABULARY)
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, input_ids: Tensor, logits_to_keep: Tensor, **_: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutput

        return CausalLMOutput(logits=self.last(self.first(input_ids).tanh())[:, logits_to_keep])


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """A world of this process alone, which DeepSpeed asks for."""
    before = dict(os.environ)
    leave_compiler_out()
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    meeting = Rendezvous(0, 1, "127.0.0.1")
    Collective.join(meeting, open_store(meeting).store)
    yield
    dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


REAL = ("zero1", "zero2", "zero3", "fsdp1", "fsdp3", "fsdp offloaded")


def made(
    name: str, weights: dict[str, Tensor] | None = None, frozen: Sequence[str] = (), *, half: bool = False
) -> TrainBackend:
    """The model as it is made, or with these weights, in a backend whose name ends with its stage. `frozen`: parameters."""
    module = Bigram()
    for parameter_name in frozen:
        module.get_parameter(parameter_name).requires_grad_(False)
    if weights is not None:
        module.load_state_dict(weights, strict=False)
    if name == "fake":
        from gcore.train.batching import logits_of

        return FakeTrainBackend(module, FEEDING, logits_of(module), betas=BETAS, max_grad_norm=CLIP)
    device = torch.device("cuda") if torch.cuda.is_available() else CPU
    feeding = TokenFeeding("bucketed", VOCABULARY, device)
    module.to(device)
    offload = name.endswith("offloaded")
    how = OptimizerSettings(3 if offload else int(name[-1]), half, BETAS, 0.0, CLIP, offload)
    if name.startswith("fsdp"):
        from gcore.train.backends.fsdp2 import Fsdp2Backend

        return Fsdp2Backend(module, how, feeding)
    from gcore.train.backends.deepspeed import DeepSpeedBackend

    return DeepSpeedBackend(module, how, feeding)


@pytest.fixture(params=["fake", *REAL])
def make(request: pytest.FixtureRequest) -> Make:
    if request.param != "fake":
        request.getfixturevalue("world")
    return partial(made, request.param)


@pytest.fixture
def backend(make: Make) -> TrainBackend:
    return make()


def loss_of(logits: Tensor, target: int = 1) -> Tensor:
    return -torch.log_softmax(logits.float(), dim=-1)[:, target].sum()


def learn(backend: TrainBackend, rate: float, target: int = 1) -> Any:
    backend.backward(loss_of(backend.outputs_of(make_dummy(backend.feeding).inputs), target), last=True)
    return backend.update(rate)


def everything(backend: TrainBackend, kind: TensorKind) -> dict[str, Tensor]:
    return {one.name: one.tensor.cpu().clone() for one in backend.tensors(kind)}


def plain_gradient(scale: float = 1.0) -> dict[str, Tensor]:
    """Of `loss_of` in the model as it is made."""
    from gcore.train.batching import logits_of

    module = Bigram()
    (scale * loss_of(logits_of(module)(make_dummy(FEEDING).inputs))).backward()
    return {name: one.grad for name, one in module.named_parameters() if one.grad is not None}


def applied_gradient(backend: TrainBackend) -> dict[str, Tensor]:
    """Of the one update that was made."""
    return {name: one / (1 - BETAS[0]) for name, one in everything(backend, "exp_avg").items()}


def norm_of(tensors: dict[str, Tensor]) -> float:
    return float(torch.cat([one.flatten() for one in tensors.values()]).norm())


def close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.allclose(found[name], one, rtol=1e-4, atol=1e-7) for name, one in wanted.items()
    )


def near(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    """After divisions by roots of small numbers."""
    return found.keys() == wanted.keys() and all(
        torch.allclose(found[name], one, rtol=1e-3, atol=1e-5) for name, one in wanted.items()
    )


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], one) for name, one in wanted.items())


def clipped(gradient: dict[str, Tensor]) -> dict[str, Tensor]:
    factor = min(1.0, CLIP / norm_of(gradient))
    return {name: one * factor for name, one in gradient.items()}


def test_tensors_are_whole_and_in_the_order_of_shapes(backend: TrainBackend) -> None:
    plain = Bigram()
    assert dict(backend.shapes) == {name: tuple(one.shape) for name, one in plain.named_parameters()}
    for kind in KINDS:
        found = everything(backend, kind)
        assert [(name, tuple(one.shape)) for name, one in found.items()] == list(backend.shapes.items())
    weights = {name: one.detach() for name, one in plain.named_parameters()}
    assert same(everything(backend, "served"), weights)
    assert same(everything(backend, "master"), weights)
    assert not any(one.any() for kind in ADAM for one in everything(backend, kind).values())
    assert [one.name for one in backend.buffers()] == ["table"]


@pytest.mark.usefixtures("world")
def test_a_model_without_layers_that_are_gathered_one_by_one_is_named(caplog: pytest.LogCaptureFixture) -> None:
    made("fsdp3")
    assert "Bigram has no layers that FSDP2 can gather one by one" in caplog.text


def test_an_update_applies_the_clipped_gradient_and_reports_its_norm(backend: TrainBackend) -> None:
    gradient = plain_gradient()
    result = learn(backend, 0.1)
    assert result.applied
    assert result.grad_norm == pytest.approx(norm_of(gradient), rel=1e-4)
    assert norm_of(gradient) > CLIP
    assert close(applied_gradient(backend), clipped(gradient))
    assert not same(everything(backend, "served"), {n: p.detach() for n, p in Bigram().named_parameters()})


def test_updates_are_those_of_adam_at_their_own_rates(backend: TrainBackend) -> None:
    from gcore.train.batching import logits_of

    plain = Bigram()
    adam = torch.optim.AdamW(plain.parameters(), betas=BETAS, weight_decay=0.0)
    for rate, target in ((0.1, 1), (0.02, 4)):
        adam.param_groups[0]["lr"] = rate
        adam.zero_grad()
        loss_of(logits_of(plain)(make_dummy(FEEDING).inputs), target).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        adam.step()
        learn(backend, rate, target)
    names = dict(plain.named_parameters())
    assert near(everything(backend, "master"), {name: one.detach() for name, one in names.items()})
    for kind in ADAM:
        assert near(everything(backend, kind), {name: adam.state[one][kind] for name, one in names.items()})


def test_losses_of_several_backwards_add_up(backend: TrainBackend) -> None:
    inputs = make_dummy(backend.feeding).inputs
    for share, last in ((0.25, False), (0.75, True)):
        backend.backward(share * loss_of(backend.outputs_of(inputs)), last=last)
    assert backend.update(0.1).applied
    assert close(applied_gradient(backend), clipped(plain_gradient()))


def test_gradients_that_wait_for_their_end_are_applied_after_a_flush(backend: TrainBackend) -> None:
    backend.backward(loss_of(backend.outputs_of(make_dummy(backend.feeding).inputs)), last=False)
    backend.flush()
    assert backend.update(0.1).applied
    assert close(applied_gradient(backend), clipped(plain_gradient()))


def test_scaled_gradients_are_those_of_the_scaled_loss(backend: TrainBackend) -> None:
    scale = 0.1 * CLIP / norm_of(plain_gradient())
    backend.backward(loss_of(backend.outputs_of(make_dummy(backend.feeding).inputs)), last=True)
    backend.scale_gradients(scale)
    assert backend.update(0.1).grad_norm == pytest.approx(0.1 * CLIP, rel=1e-4)
    assert close(applied_gradient(backend), plain_gradient(scale))


def test_a_gradient_that_is_no_number_changes_nothing(backend: TrainBackend) -> None:
    before = {kind: everything(backend, kind) for kind in KINDS}
    inputs = make_dummy(backend.feeding).inputs
    backend.backward(loss_of(backend.outputs_of(inputs)) * float("nan"), last=True)
    result = backend.update(0.1)
    assert (result.applied, result.grad_norm) == (False, float("inf"))
    assert all(same(everything(backend, kind), before[kind]) for kind in KINDS)
    assert learn(backend, 0.1).applied


def test_an_update_at_rate_0_moves_no_weight(backend: TrainBackend) -> None:
    before = everything(backend, "served")
    assert learn(backend, 0.0).applied
    assert same(everything(backend, "served"), before)


@pytest.mark.parametrize("by_file", [False, True])
def test_a_restored_optimizer_goes_on_as_the_one_before(make: Make, tmp_path: Path, by_file: bool) -> None:
    first = make()
    for target in (1, 2, 3):
        learn(first, 0.0, target)
    second = make()
    states = {kind: everything(first, kind) for kind in ADAM}
    if by_file:
        for kind, tensors in states.items():
            save_file({name: one.contiguous() for name, one in tensors.items()}, tmp_path / kind)
        second.restore_optimizer({kind: tmp_path / kind for kind in ADAM}, 3)
    else:
        for kind, tensors in states.items():
            second.restore(kind, [NamedTensor(name, one) for name, one in reversed(tensors.items())])
        second.count_updates(3)
    assert all(same(everything(second, kind), states[kind]) for kind in ADAM)
    for one in (first, second):
        learn(one, 0.1, 4)
    assert all(same(everything(second, kind), everything(first, kind)) for kind in KINDS)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(("first", "second"), [("zero1", "fsdp3"), ("fsdp1", "zero3"), ("fsdp offloaded", "zero2")])
def test_a_checkpoint_continues_in_another_backend_bit_for_bit(first: str, second: str, tmp_path: Path) -> None:
    before = made(first)
    for target in (1, 2, 3):
        learn(before, 0.01, target)
    for kind in ("master", *ADAM):
        save_file({name: one.contiguous() for name, one in everything(before, kind).items()}, tmp_path / kind)
    weights = everything(before, "master")
    after = made(second, weights)
    after.restore_optimizer({kind: tmp_path / kind for kind in ADAM}, 3)
    assert all(same(everything(after, kind), everything(before, kind)) for kind in KINDS)
    for one in (before, after):
        learn(one, 0.1, 4)
    assert all(near(everything(after, kind), everything(before, kind)) for kind in KINDS)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("name", ["fake", *REAL])
def test_a_frozen_parameter_is_not_trained_and_the_others_are_as_without_it(name: str) -> None:
    backend = made(name, frozen=["first.weight"])
    plain = plain_gradient()
    del plain["first.weight"]
    assert list(backend.shapes) == list(plain)
    before = Bigram().first.weight
    learn(backend, 0.1)
    assert close(applied_gradient(backend), clipped(plain))
    assert {one.name for one in backend.extents()} == set(plain)
    for kind in KINDS:
        assert list(everything(backend, kind)) == list(plain)
    frozen = [one for one in backend.forward_tensors() if one.numel() == before.numel()]
    assert any(torch.equal(one.cpu().flatten(), before.flatten()) for one in frozen), "its values are as they were"


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("name", ["zero2", "zero3", "fsdp1", "fsdp3"])
def test_a_frozen_parameter_takes_the_memory_of_the_forward_pass_dtype(name: str) -> None:
    backend = made(name, frozen=["first.weight"], half=True)
    before = Bigram().first.weight.bfloat16().flatten()
    learn(backend, 0.1)
    held = [one for one in backend.forward_tensors() if one.numel() == before.numel()]
    assert any(one.dtype == torch.bfloat16 and torch.equal(one.cpu().flatten(), before) for one in held)
    assert {one.tensor.dtype for one in backend.tensors("master")} == {torch.float32}


def test_one_rank_updates_every_part_of_every_parameter(backend: TrainBackend) -> None:
    learn(backend, 0.1)
    extents = list(backend.extents())
    assert [(one.name, one.start, one.numel) for one in extents] == [
        (name, 0, torch.Size(shape).numel()) for name, shape in backend.shapes.items()
    ]
    for kind in ("master", *ADAM):
        whole = everything(backend, kind)
        pieces = list(backend.pieces(kind, extents))
        assert all(
            torch.equal(piece.cpu(), whole[extent.name].flatten())
            for piece, extent in zip(pieces, extents, strict=True)
        )


def test_memory_of_forward_and_of_the_optimizer_can_be_told_apart(backend: TrainBackend) -> None:
    def storages(tensors: Iterator[Tensor]) -> dict[int, int]:
        return {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}

    learn(backend, 0.1)
    forward, optimizer = storages(backend.forward_tensors()), storages(backend.optimizer_tensors())
    weights = sum(4 * torch.Size(shape).numel() for shape in backend.shapes.values())
    assert sum(forward.values()) >= weights
    assert sum(size for key, size in optimizer.items() if key not in forward) >= 2 * weights


def test_the_module_is_fed_as_the_feeding_says(backend: TrainBackend) -> None:
    packing: Packing = "bucketed"
    assert (backend.feeding.packing, backend.feeding.vocabulary) == (packing, VOCABULARY)
    assert isinstance(backend.module, nn.Module)
    assert tuple(backend.outputs_of(make_dummy(backend.feeding).inputs).shape) == (1, VOCABULARY)

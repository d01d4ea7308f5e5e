"""Sequence parallelism without processes: a row is cut without loss, and attention over a group equals attention alone."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ready_seals import ready_seal
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from gcore.config.train import TrainSpec
from gcore.errors import DataError
from gcore.ledger.balance import balance_samples
from gcore.ledger.records.chain import SealedGroup
from gcore.testing.models import rank_launch
from gcore.train.backends.packed_attention import PackedAttention
from gcore.train.backends.sequence_parallel import ALONE, SequenceGroup
from gcore.train.batching import ModelInputs, TokenBatch, TokenFeeding, make_batch, make_dummy, score_batch
from gcore.train.models import choose_feeding
from gcore.train.packing import CutSettings, MicroPlan, Rectangle, plan_step
from gcore.train.rank.feed import StepInput, TrainGroup, TrainSample
from gcore.types import PromptRef, Version

VOCABULARY = 50


class Threads:
    """A group of threads that exchange tensors as the processes of a sequence group do."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._size = size
        self._sent: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)
        monkeypatch.setattr(dist, "all_to_all_single", self._all_to_all)
        monkeypatch.setattr(dist, "all_gather", self._all_gather)

    def run(self, rank: Callable[[SequenceGroup], Any]) -> list[Any]:
        """What `rank` returns on each rank of the group."""
        with ThreadPoolExecutor(self._size) as pool:
            return list(pool.map(rank, [SequenceGroup(index, self._size, index) for index in range(self._size)]))

    def _exchanged(self, index: int, tensor: Tensor) -> list[Tensor]:
        self._sent[index] = tensor.clone()
        self._barrier.wait(60)
        everything = list(self._sent)
        self._barrier.wait(60)
        return everything

    def _all_to_all(self, received: Tensor, parts: Tensor, group: int) -> None:
        received.copy_(torch.stack([one[group] for one in self._exchanged(group, parts)]))

    def _all_gather(self, found: list[Tensor], own: Tensor, group: int) -> None:
        for one, sent in zip(found, self._exchanged(group, own), strict=True):
            one.copy_(sent)


def work_of(lengths: Sequence[tuple[int, int]]) -> StepInput:
    """One sample for each pair of a prompt's and a response's length, the temperature of each another one."""
    rng = np.random.default_rng(3)
    sealed, held = [], {}
    for number, (prompt, response) in enumerate(lengths):
        ref, digest = PromptRef(0, 0, number), f"{number:032x}"
        logprobs = np.full(response, -1.0, np.float32)
        sample = TrainSample(rng.integers(0, VOCABULARY, response).astype(np.int32), logprobs, 0.0)
        prompt_ids = rng.integers(0, VOCABULARY, prompt).astype(np.int32)
        held[digest] = TrainGroup(ref, digest, prompt_ids, {0: sample}, 0.5 + number / 4)
        sealed.append(
            SealedGroup(
                ref=ref,
                digest=digest,
                prompt_tokens=prompt,
                response_tokens=(response,),
                versions=(Version(0, 0),),
                holder="h",
            )
        )
    seal = ready_seal(sealed)
    return StepInput(seal, balance_samples(seal), 0, held)


def batches_of(work: StepInput, size: int) -> tuple[TokenBatch, list[TokenBatch]]:
    """The only micro-batch of a step, alone and on each rank of a group."""
    plans = plan_step(work.seal, work.layout, 0, CutSettings(100_000, "packed"))
    micro = plans[0].micro_batches[0] if plans else MicroPlan()
    groups = [SequenceGroup(index, size) for index in range(size)]
    alone, *cut = (
        make_batch(work, micro, TokenFeeding("packed", VOCABULARY, torch.device("cpu"), group))
        for group in [ALONE, *groups]
    )
    return alone, cut


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), max_size=5), st.integers(1, 6))
def test_the_slices_of_a_row_are_equal_and_lose_no_token(lengths: list[tuple[int, int]], size: int) -> None:
    whole, cut = batches_of(work_of(lengths), size)
    lacking = whole.computed - sum(one.computed for one in cut[:1])
    assert -size < lacking <= 0
    assert all(one.inputs.tokens.shape[1] * size == one.computed for one in cut)
    for name in ("tokens", "positions"):
        joined = torch.cat([getattr(one.inputs, name) for one in cut], dim=1)[:, : whole.computed]
        assert torch.equal(joined, getattr(whole.inputs, name))
    assert all(sum(one.tokens for one in part.inputs.rectangles) == part.computed for part in cut)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), max_size=5), st.integers(1, 6))
def test_every_scored_token_is_scored_by_one_rank_at_its_place(lengths: list[tuple[int, int]], size: int) -> None:
    whole, cut = batches_of(work_of(lengths), size)
    length = cut[0].inputs.tokens.shape[1]
    assert cut[0].scored_by == tuple(len(one.targets) for one in cut)
    assert torch.equal(torch.cat([one.targets for one in cut]), whole.targets)
    columns = torch.cat([one.inputs.columns + index * length for index, one in enumerate(cut)])
    assert torch.equal(columns, whole.inputs.columns)
    assert all(torch.equal(one.places, whole.places) and torch.equal(one.mask, whole.mask) for one in cut)
    if whole.temperature is not None:
        assert torch.equal(
            torch.cat([one.temperature for one in cut if one.temperature is not None]), whole.temperature
        )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [
        pytest.param(4, 4, 2, id="as many KV heads as heads"),
        pytest.param(4, 2, 2, id="one KV head for each rank"),
        pytest.param(4, 1, 2, id="fewer KV heads than ranks"),
        pytest.param(4, 2, 4, id="a KV head for two ranks"),
        pytest.param(6, 3, 2, id="KV heads that the ranks do not divide"),
    ],
)
def test_attention_over_a_group_and_its_gradients_equal_those_of_one_rank(
    heads: int, kv_heads: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rectangles, dim = (Rectangle(2, 5), Rectangle(1, 2)), 3
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, n, 12, dim, generator=generator, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)]
    pull = torch.randn(1, 12, heads, dim, generator=generator, dtype=torch.float64)

    def attended(group: SequenceGroup) -> list[Tensor]:
        attention = PackedAttention()
        attention.group = group
        attention.lay(rectangles, torch.device("cpu"))
        own = group.slice_of(12)
        leaves = [one[:, :, own].clone().requires_grad_() for one in whole]
        out, _ = attention(nn.Identity(), leaves[0], leaves[1], leaves[2], None)
        gradients = torch.autograd.grad((out * pull[:, own]).sum(), leaves)
        return [out.detach(), *(one.transpose(1, 2) for one in gradients)]

    alone = attended(ALONE)
    parts = Threads(size, monkeypatch).run(attended)
    for number, expected in enumerate(alone):
        torch.testing.assert_close(torch.cat([part[number] for part in parts], dim=1), expected, rtol=0, atol=1e-12)


def test_scores_are_gathered_and_each_rank_gets_the_gradient_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    work = work_of([(3, 7), (2, 0), (5, 4)])
    whole, cut = batches_of(work, 3)
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def scored(batch: TokenBatch) -> list[Tensor]:
        own = table.clone().requires_grad_()
        scores = score_batch(lambda inputs: own[inputs.tokens[0, inputs.columns]], batch, entropic=True)
        loss = (scores.logp * scores.logp).sum() + scores.entropy.sum()  # every rank computes the whole loss
        return [scores.logp.detach(), scores.entropy.detach(), *torch.autograd.grad(loss, [own])]

    logp, entropy, gradient = scored(whole)
    micro = plan_step(work.seal, work.layout, 0, CutSettings(100_000, "packed"))[0].micro_batches[0]

    def on(group: SequenceGroup) -> list[Tensor]:
        return scored(make_batch(work, micro, TokenFeeding("packed", VOCABULARY, torch.device("cpu"), group)))

    found = Threads(3, monkeypatch).run(on)
    assert 0 in cut[0].scored_by or len(set(cut[0].scored_by)) > 1, "ranks score different numbers of tokens"
    assert all(torch.equal(one[0], logp) and torch.equal(one[1], entropy) for one in found)
    torch.testing.assert_close(sum(one[2] for one in found), gradient, rtol=0, atol=1e-12)


def model_of(heads: int, width: int = 24, **more: int) -> nn.Module:
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": heads}
    return LlamaForCausalLM(LlamaConfig(**{"vocab_size": VOCABULARY} | sizes | more)).eval()


def kept_bytes(model: Any, work: StepInput, micro: MicroPlan, group: SequenceGroup) -> tuple[int, Tensor]:
    """Bytes that a rank keeps for its backward pass, without the model's parameters; and its log-probabilities [b, w]."""
    model = copy.deepcopy(model)
    attention, name = PackedAttention(), f"packed {group.index} of {group.size}"
    attention.group = group
    AttentionInterface.register(name, attention)
    model.set_attn_implementation(name)
    batch = make_batch(work, micro, TokenFeeding("packed", VOCABULARY, torch.device("cpu"), group))
    attention.lay(batch.inputs.rectangles, torch.device("cpu"))

    def logits_of(inputs: ModelInputs) -> Tensor:
        more = {"position_ids": inputs.positions, "logits_to_keep": inputs.columns, "use_cache": False}
        return model(input_ids=inputs.tokens, **more).logits[0]

    parameters = {one.untyped_storage().data_ptr() for one in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = score_batch(logits_of, batch)
    return sum(one.nbytes() for one in kept.values()), scores.logp.detach()


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_keeps_its_share_of_the_activations(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    work = work_of([(1, 127), (1, 127)])
    (plan,) = plan_step(work.seal, work.layout, 0, CutSettings(100_000, "packed"))
    (micro,) = plan.micro_batches
    model = model_of(4, width=64, vocab_size=1024, num_key_value_heads=2, max_position_embeddings=256)
    alone, logp = kept_bytes(model, work, micro, ALONE)
    found = Threads(size, monkeypatch).run(lambda group: kept_bytes(model, work, micro, group))
    for kept, own in found:
        assert kept < 1.1 * alone / size
        torch.testing.assert_close(own, logp, rtol=0, atol=1e-5)


def test_a_dummy_reaches_the_ranks_without_a_scored_token_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradient(group: SequenceGroup) -> Tensor:
        batch = make_dummy(TokenFeeding("packed", VOCABULARY, torch.device("cpu"), group))
        own = torch.ones(VOCABULARY, VOCABULARY, requires_grad=True)
        scores = score_batch(lambda inputs: own[inputs.tokens[0, inputs.columns]], batch)
        return torch.autograd.grad(scores.logp.sum() * 0.0, [own])[0]

    assert all(not bool(one.any()) for one in Threads(4, monkeypatch).run(gradient))


def test_a_model_whose_heads_or_rows_cannot_be_divided_is_refused_by_name() -> None:
    def most(values: Sequence[float]) -> list[float]:
        return list(values)

    train = TrainSpec(sequence_parallel=2)
    assert choose_feeding(model_of(2), train, None, most).packing == "packed"
    with pytest.raises(
        DataError, match=r"train\.sequence_parallel: a llama has 3 attention heads, which 2 ranks cannot"
    ):
        choose_feeding(model_of(3), train, None, most)
    padded = model_of(2)
    padded._supports_attention_backend = False  # type: ignore[assignment]
    with pytest.raises(DataError, match=r"train\.sequence_parallel: a llama cannot be packed .*only packed rows"):
        choose_feeding(padded, train, None, most)


def test_a_world_of_ranks_that_form_no_whole_groups_does_not_start() -> None:
    spec = {
        "name": "tiny",
        "model": {"path": "m"},
        "data": {"path": "none"},
        "flow": {"steps": 1},
        "rollout": {"max_new_tokens": 4},
        "train": {"sequence_parallel": 2},
    }
    with pytest.raises(ValueError, match=r"a world of 3 ranks does not consist of whole sequence groups"):
        rank_launch(spec, "run", rank=0, world_size=3)  # type: ignore[arg-type]

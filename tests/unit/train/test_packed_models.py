"""Packed sequences and padded rows: the same log-probabilities and gradients as each sequence alone, for any architecture."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from ready_seals import ready_seal
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from gcore.config.train import TrainSpec
from gcore.errors import DataError
from gcore.ledger.balance import balance_samples
from gcore.ledger.records.chain import SealedGroup
from gcore.testing.models import rank_launch
from gcore.train import models
from gcore.train.backends.packed_attention import PACKED, PackedAttention
from gcore.train.batching import TokenFeeding, logits_of, make_batch, make_dummy, score_batch, token_logprobs
from gcore.train.hf_models import (
    OutOfMemory,
    checkpoint_activations,
    explain_memory_error,
    parameter_groups,
    set_evaluation_mode,
    vocabulary_of,
)
from gcore.train.metrics import TrainStepMetrics
from gcore.train.models import FeedingChoice, Reference, choose_feeding, packing_obstacle
from gcore.train.packing import CutSettings, MicroPlan, Rectangle, plan_step
from gcore.train.rank.feed import StepInput, TrainGroup, TrainSample
from gcore.types import PromptRef, Version

VOCABULARY = 96
CPU = torch.device("cpu")
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
COMMON = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 128, "num_key_value_heads": 2}
GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaConfig", COMMON, "packed"),
    "qwen3": ("Qwen3Config", {**COMMON, "head_dim": 16, "tie_word_embeddings": True}, "packed"),
    "gpt2": ("GPT2Config", GPT, "packed"),
    "mistral, window as long as the context": ("MistralConfig", {**COMMON, "sliding_window": 128}, "packed"),
    "mixtral": ("MixtralConfig", {**COMMON, "num_local_experts": 4, "sliding_window": None}, "packed"),
    "phi": ("PhiConfig", {**COMMON, "partial_rotary_factor": 0.5}, "packed"),
    "mistral, short window": ("MistralConfig", {**COMMON, "sliding_window": 5}, "bucketed"),
    "gemma2, soft caps": ("Gemma2Config", {**COMMON, "head_dim": 8, "sliding_window": 8}, "bucketed"),
    "bloom, positions in the attention": (
        "BloomConfig",
        {"vocab_size": VOCABULARY, **GPT, "hidden_size": 32},
        "bucketed",
    ),
    "mamba, a state": (
        "MambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
        "bucketed",
    ),
}


def alone(values: Sequence[float]) -> list[float]:
    """The largest over a world of one."""
    return list(values)


def make_model(name: str) -> Any:
    kind, settings, _ = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**settings)
    if hasattr(config, "initializer_range"):
        config.initializer_range = 0.2
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def make_work(lengths: Sequence[tuple[int, Sequence[int]]], masked: tuple[int, ...] = ()) -> StepInput:
    """Samples of these prompt and response lengths; group g at temperature 0.5 + g/2."""
    rng = np.random.default_rng(3)
    sealed, held = [], {}
    for number, (prompt, responses) in enumerate(lengths):
        ref, digest = PromptRef(0, 0, number), f"{number:032x}"
        samples = {
            i: TrainSample(rng.integers(0, VOCABULARY, n).astype(np.int32), np.zeros(n, np.float32), 0.0, i in masked)
            for i, n in enumerate(responses)
        }
        prompt_ids = rng.integers(0, VOCABULARY, prompt).astype(np.int32)
        held[digest] = TrainGroup(ref, digest, prompt_ids, samples, 0.5 + number / 2)
        sealed.append(
            SealedGroup(
                ref=ref,
                digest=digest,
                prompt_tokens=prompt,
                response_tokens=tuple(responses),
                versions=(Version(0, 0),),
                holder="h",
                masked=tuple(i for i in masked if i < len(responses)),
            )
        )
    seal = ready_seal(sealed)
    return StepInput(seal, balance_samples(seal), 0, held)


WORK = make_work([(3, (9, 1, 30)), (7, (12, 0, 12)), (1, (31, 5))])


def one_by_one(model: Any, work: StepInput) -> dict[tuple[int, int], Tensor]:
    """What the definition says, without batches of any kind."""
    found = {}
    for number, group in enumerate(work.groups.values()):
        for index, sample in group.samples.items():
            start = len(group.prompt_ids)
            ids = torch.tensor([*group.prompt_ids.tolist(), *sample.token_ids.tolist()])
            logits = model(input_ids=ids[None], use_cache=False).logits[0] / group.temperature
            logp = torch.log_softmax(logits.double(), -1)
            found[number, index] = logp[start - 1 : -1].gather(1, ids[start:, None])[:, 0]
    return found


def weighed_sum(found: dict[tuple[int, int], Tensor]) -> Tensor:
    return torch.stack([((1 + g + i) * logp.double()).sum() for (g, i), logp in sorted(found.items())]).sum()


def taken(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def in_batches(model: Any, work: StepInput, packing: Any) -> tuple[dict[tuple[int, int], Tensor], dict[str, Tensor]]:
    """Log-probabilities, and gradients as `gradients` takes them: each micro-batch backward right after its forward."""
    model.zero_grad()
    (plan,) = plan_step(work.seal, work.layout, 0, CutSettings(70, packing))
    found = {}
    for one in plan.micro_batches:
        batch = make_batch(work, one, TokenFeeding(packing, vocabulary_of(model), CPU))
        logp = score_batch(logits_of(model), batch).logp
        if bool(batch.scored.any()):
            assert not bool(logp[~batch.scored].any()), "nothing is said of padding"
        part = {(s.group, s.sample): logp[row][batch.scored[row]] for row, s in enumerate(batch.slots)}
        weighed_sum(part).backward()
        found |= {key: one.detach() for key, one in part.items()}
    return found, taken(model)


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_and_gradients_are_those_of_each_sequence_alone(name: str) -> None:
    model = make_model(name)
    expected = one_by_one(model, WORK)
    weighed_sum(expected).backward()
    wanted = taken(model)
    assert choose_feeding(model, TrainSpec(), None, alone).packing == MODELS[name][2]
    for packing in {MODELS[name][2], "bucketed"}:
        if packing == "bucketed":
            choose_feeding(model := make_model(name), TrainSpec(packing="bucketed"), None, alone)
        found, got = in_batches(model, WORK, packing)
        assert found.keys() == expected.keys()
        for key, logp in found.items():
            np.testing.assert_allclose(logp, expected[key].detach(), rtol=0, atol=1e-5)
        scale = max(float(one.abs().max()) for one in wanted.values())
        assert all(float((got[n] - wanted[n]).abs().max()) <= 1e-5 * scale for n in wanted)


def test_a_model_that_cannot_be_packed_is_bucketed_or_refused_when_packed_was_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make_model("mistral, short window")
    before = model.config._attn_implementation
    with caplog.at_level(logging.INFO, "gcore.train"):
        found = choose_feeding(model, TrainSpec(), None, alone)
    assert found == FeedingChoice("bucketed", "a sliding window of 5 tokens")
    assert "sequences are bucketed: a sliding window of 5 tokens" in caplog.text
    assert model.config._attn_implementation == before, "it attends as it did"
    with pytest.raises(DataError, match=r"train.packing: a mistral cannot be packed: a sliding window"):
        choose_feeding(model, TrainSpec(packing="packed"), None, alone)


def test_a_window_beyond_the_jobs_longest_sequence_is_none() -> None:
    assert packing_obstacle(make_model("mistral, short window"), 5) != "", "the proof's own sequences are longer"
    assert packing_obstacle(make_model("mistral, window as long as the context"), 64) == ""
    assert "window" in packing_obstacle(make_model("gemma2, soft caps"), 128) or "cap" in packing_obstacle(
        make_model("gemma2, soft caps"), 128
    )


def test_attention_that_looks_beyond_a_sequence_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaky(self: PackedAttention, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2)

    monkeypatch.setattr(PackedAttention, "_by_rectangle", leaky)
    reason = packing_obstacle(make_model("llama"), None)
    assert "log-probabilities differ by" in reason
    monkeypatch.undo()
    assert packing_obstacle(make_model("llama"), None) == ""


def test_no_rank_packs_when_another_cannot() -> None:
    model = make_model("llama")
    assert choose_feeding(model, TrainSpec(), None, lambda values: [1.0]) == FeedingChoice(
        "bucketed", "another rank cannot pack it"
    )


def test_the_kernel_of_a_model_before_is_not_used_in_the_trial_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_the_model_before(*_: object, **__: object) -> Tensor:
        raise RuntimeError("this kernel computes only in half precision on a GPU")

    monkeypatch.setattr(PACKED, "_varlen", of_the_model_before)
    assert choose_feeding(make_model("llama"), TrainSpec(), None, alone) == FeedingChoice("packed")


def test_rectangles_must_cover_the_row() -> None:
    model = make_model("llama")
    assert packing_obstacle(model, None) == ""
    PACKED.lay((Rectangle(1, 4),), CPU)
    with pytest.raises(Exception, match="queries"):
        model(input_ids=torch.zeros(1, 5, dtype=torch.long))


def test_masked_samples_are_not_computed_unless_asked_for_and_then_not_trained() -> None:
    work = make_work([(3, (9, 1, 30)), (7, (12, 0, 12))], masked=(0, 2))
    feeding = TokenFeeding("packed", VOCABULARY, CPU)
    for wanted, rows in ((False, 2), (True, 6)):
        (plan,) = plan_step(work.seal, work.layout, 0, CutSettings(1000, "packed", wanted))
        batches = [make_batch(work, one, feeding) for one in plan.micro_batches]
        assert sum(len(batch.slots) for batch in batches) == rows
        assert sum(int(batch.mask.sum()) for batch in batches) == plan.tokens == 1
        assert sum(int(batch.scored.sum()) for batch in batches) == (64 if wanted else 1)


@pytest.mark.parametrize("packing", ["packed", "bucketed"])
def test_a_dummy_reaches_every_parameter_and_trains_nothing(packing: Any) -> None:
    model = make_model("llama")
    assert choose_feeding(model, TrainSpec(packing=packing), None, alone).packing == packing
    batch = make_dummy(TokenFeeding(packing, VOCABULARY, CPU))
    assert (batch.real, batch.computed, int(batch.mask.sum())) == (0, 2, 0)
    logp = score_batch(logits_of(model), batch).logp
    torch.where(batch.mask, logp, torch.zeros_like(logp)).sum().backward()
    assert all(p.grad is not None and not bool(p.grad.any()) for p in model.parameters())


def test_only_empty_responses_make_a_batch_that_trains_nothing() -> None:
    work = make_work([(1, (0,))])
    batch = make_batch(
        work, MicroPlan(work.layout.of_rank(0), (Rectangle(1, 1),)), TokenFeeding("packed", VOCABULARY, CPU)
    )
    assert not bool(batch.mask.any())
    assert bool(
        score_batch(logits_of(make_model("gpt2")), make_dummy(TokenFeeding("bucketed", VOCABULARY, CPU)))
        .logp.isfinite()
        .all()
    )


@pytest.mark.parametrize("token", [-1, VOCABULARY, 10_000])
@pytest.mark.parametrize("where", ["prompt", "response"])
def test_a_token_that_the_model_does_not_know_is_one_clear_error(token: int, where: str) -> None:
    work = make_work([(3, (4, 4))])
    (group,) = work.groups.values()
    (group.prompt_ids if where == "prompt" else group.samples[1].token_ids)[1] = token
    (plan,) = plan_step(work.seal, work.layout, 0, CutSettings(100, "packed"))
    with pytest.raises(
        DataError, match=rf"token {token} in the {where} of sample \d is not in the model's vocabulary of {VOCABULARY}"
    ):
        make_batch(work, plan.micro_batches[0], TokenFeeding("packed", VOCABULARY, CPU))


@pytest.mark.parametrize("pieces", [1, 7, 1 << 22])
@pytest.mark.parametrize("temperature", [None, 0.7])
def test_log_probabilities_entropies_and_their_gradient(
    monkeypatch: pytest.MonkeyPatch, pieces: int, temperature: float | None
) -> None:
    monkeypatch.setattr("gcore.train.batching.PIECE", pieces * 6)
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(20, 6, generator=generator, dtype=torch.float64) * 3).requires_grad_()
    targets = torch.randint(0, 6, (20,), generator=generator)
    scale = None if temperature is None else torch.linspace(temperature, 2, 20)
    logp, entropy = token_logprobs(logits, targets, scale)
    scaled = logits if scale is None else logits / scale.double()[:, None]
    plain = torch.distributions.Categorical(logits=scaled)
    torch.testing.assert_close(logp, plain.log_prob(targets))
    torch.testing.assert_close(entropy, plain.entropy())
    weights = torch.arange(20, dtype=torch.float64)
    (found,) = torch.autograd.grad((logp * weights).sum(), logits)
    (expected,) = torch.autograd.grad((plain.log_prob(targets) * weights).sum(), logits)
    torch.testing.assert_close(found, expected)
    assert not entropy.requires_grad


def test_a_token_forbidden_by_the_model_leaves_the_entropy_finite() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf]], requires_grad=True)
    logp, entropy = token_logprobs(logits, torch.tensor([1]), None)
    plain = torch.distributions.Categorical(logits=logits.detach()[:, :2]).entropy()
    assert entropy.item() == pytest.approx(plain.item())
    logp.sum().backward()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "mistral, short window", "phi"])
def test_checkpointed_activations_give_the_same_gradients_though_the_model_has_dropout(
    name: str, tmp_path: Path
) -> None:
    plain, frugal = make_model(name), make_model(name)
    for model in (plain, frugal):
        for one in ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop"):
            if hasattr(model.config, one):
                setattr(model.config, one, 0.5)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.5
    packing = choose_feeding(plain, TrainSpec(), None, alone).packing
    assert choose_feeding(frugal, TrainSpec(), None, alone).packing == packing
    checkpoint_activations(frugal, tmp_path)
    frugal.train()
    set_evaluation_mode(frugal)
    calls = []
    for layer in frugal.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.register_forward_pre_hook(lambda *_: calls.append(1))
            inner = next(layer.children())
            inner.register_forward_pre_hook(lambda *_: calls.append(2))
    (_, wanted), (_, got) = (in_batches(model, WORK, packing) for model in (plain, frugal))
    assert calls.count(2) == 2 * calls.count(1) > 0, "what is inside a layer is computed twice"
    scale = max(float(one.abs().max()) for one in wanted.values())
    assert all(float((got[n] - wanted[n]).abs().max()) <= 1e-6 * scale for n in wanted)


def test_only_matrices_decay() -> None:
    model = make_model("gpt2")
    decaying, others = parameter_groups(model, 0.1)
    assert {p.ndim for p in decaying["params"]} == {2}
    assert {p.ndim for p in others["params"]} == {1}
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert len(decaying["params"]) + len(others["params"]) == len(list(model.parameters()))
    assert len(parameter_groups(model, 0.0)) == 1


def test_the_reference_is_the_model_as_it_was_and_never_changes() -> None:
    model = make_model("llama")
    feeding = TokenFeeding("bucketed", VOCABULARY, CPU)
    reference = Reference(make_model("llama"), TrainSpec(kl_coef=0.1), feeding)
    batch = make_dummy(TokenFeeding("bucketed", VOCABULARY, CPU))
    with reference.awake() as logits:
        torch.testing.assert_close(logits(batch.inputs), logits_of(model)(batch.inputs))
        assert not logits(batch.inputs).requires_grad


def test_at_the_first_start_the_models_files_are_read_once_and_later_the_reference_has_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read: list[Path] = []

    def reading(folder: Path, dtype: torch.dtype, *, trust_remote_code: bool) -> nn.Module:
        read.append(folder)
        return make_model("llama")

    monkeypatch.setattr(models, "load_module", reading)
    policy = make_model("llama")
    for checkpoint, expected in (("", []), ("checkpoints/0-4", [tmp_path / "model"])):
        spec = {
            "name": "x",
            "model": {"path": str(tmp_path / "model")},
            "data": {"path": "none"},
            "flow": {"steps": 9},
            "rollout": {"max_new_tokens": 4},
        }
        launch = rank_launch(spec, tmp_path, start={"step": 0, "checkpoint": checkpoint})
        original = models._original(launch, policy, "packed")
        assert original is not policy
        assert read == expected


def test_a_window_as_long_as_the_policys_context_is_packed_beside_a_critic_with_a_longer_one() -> None:
    policy = make_model("mistral, window as long as the context")
    critic = transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON | {"max_position_embeddings": 512})).eval()
    assert choose_feeding(policy, TrainSpec(), None, alone, beside=critic).packing == "packed"
    PACKED.lay((Rectangle(2, 8),), CPU)
    places = torch.arange(8).repeat(2)[None]
    policy(input_ids=places, position_ids=places, use_cache=False)  # its attention refuses a window below the context


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
    ids=["GPU", "CPU", "Python"],
)
def test_out_of_memory_names_the_fields_to_lower_in_the_order_to_try(error: BaseException) -> None:
    fields = ("micro_batch_tokens", "activation_checkpointing", "zero_stage", "offload_state", "sequence_parallel")
    with (
        pytest.raises(OutOfMemory, match="out of memory while update: a micro-batch of 3") as caught,
        explain_memory_error("update: a micro-batch of 3", TrainSpec(micro_batch_tokens=77), fields),
    ):
        raise error
    text = str(caught.value)
    places = [text.index(f"train.{field}") for field in fields]
    assert places == sorted(places)
    assert "now 77" in text
    done = TrainSpec(
        activation_checkpointing=True, zero_stage=3, backend="fsdp2", offload_state=True, packing="bucketed"
    )
    with pytest.raises(OutOfMemory) as caught, explain_memory_error("x", done, fields):
        raise error
    assert caught.value.fix == "Lower train.micro_batch_tokens (now 8192)"


@pytest.mark.parametrize(("lora", "fix"), [(None, "Set train.offload_reference: true"), ({}, "Use more train ranks")])
def test_a_reference_model_is_moved_only_where_there_is_one(lora: Any, fix: str) -> None:
    train = TrainSpec.model_validate({"kl_coef": 0.1, "offload_reference": False, "lora": lora})
    with pytest.raises(OutOfMemory) as caught, explain_memory_error("x", train, ("offload_reference",)):
        raise MemoryError
    assert str(caught.value.fix).startswith(fix)


def test_other_errors_are_left_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes"), explain_memory_error("x", TrainSpec(), ()):
        raise RuntimeError("shapes do not fit")


def test_a_mismatch_that_is_no_number_is_missing_and_not_zero() -> None:
    class Alone:
        def sum(self, values: Sequence[float]) -> list[float]:
            return list(values)

        max = sum

    def told(trainer: float) -> dict[str, float]:
        tally = TrainStepMetrics()
        batch: Any = SimpleNamespace(rollout_logp=torch.full((1, 2), -1.0), mask=torch.ones(1, 2, dtype=torch.bool))
        tally.mismatch(torch.tensor([[-1.0, trainer]]), batch)
        return {name: value for name, value in tally.metrics(Alone()).items() if name.startswith("mismatch")}

    assert told(-1.5)["mismatch_max"] == 0.5
    assert told(float("nan")) == {}

"""The trainer on a CUDA device: losses, checkpoints, staged weights, the reference's place, the varlen kernel.

Models are made from configurations, so nothing is downloaded. One rank, in this process: NCCL needs a device a rank.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from ready_seals import ready_seal
from safetensors.torch import load_file

from gcore.config.train import TrainSpec
from gcore.errors import GcoreError
from gcore.ledger.balance import balance_samples
from gcore.ledger.records.chain import SealedGroup
from gcore.rollout.api import FolderUpdate
from gcore.system.clock import SystemClock
from gcore.testing.models import rank_launch
from gcore.train.backends.adapters import BaseReference
from gcore.train.backends.distributed import Collective, Rendezvous, open_store
from gcore.train.backends.packed_attention import PACKED
from gcore.train.batching import TokenFeeding, make_dummy
from gcore.train.checkpoint.writer import (
    CheckpointWriter,
    FolderPublisher,
    UpdateCounts,
    restore_critic,
    restore_optimizer,
)
from gcore.train.hf_models import OutOfMemory, explain_memory_error, load_module
from gcore.train.models import RankModels, Reference, load_models
from gcore.train.packing import Rectangle
from gcore.train.rank.feed import StepInput, TrainGroup, TrainSample
from gcore.train.rank.launch import RankLaunch, StepResult
from gcore.train.rank.main import _manifest
from gcore.train.step import StepTrainer
from gcore.types import PromptRef, Version

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

VOCABULARY = 128
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.05,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**COMMON),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, head_dim=32, tie_word_embeddings=True),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=128, n_layer=2, n_head=4, n_positions=256),
    "mistral": lambda: transformers.MistralConfig(**COMMON, sliding_window=16),
}


BACKENDS = [("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3), ("fsdp2", 1), ("fsdp2", 3)]
OTHER = {"deepspeed": "fsdp2", "fsdp2": "deepspeed"}


@pytest.fixture(scope="module")
def world() -> Iterator[Collective]:
    assert torch.cuda.is_available(), "no CUDA device: this is make test-gpu's business"
    meeting = Rendezvous(0, 1, "127.0.0.1")
    opened = open_store(meeting)
    world = Collective.join(meeting, opened.store)
    assert world.device.type == "cuda"
    yield world
    world.leave()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config()).save_pretrained(folder / name)
        (folder / name / "tokenizer.json").write_text("{}")
    return folder


def make_work(step: int, mini_batches: int = 2) -> StepInput:
    rng = np.random.default_rng(step)
    sealed, held = [], {}
    for number in range(4):
        prompt = rng.integers(0, VOCABULARY, 3 + 5 * number).astype(np.int32)
        samples = {
            index: TrainSample(
                rng.integers(0, VOCABULARY, n).astype(np.int32),
                rng.normal(-4.8, 0.2, n).astype(np.float32),
                float(rng.integers(0, 3)),
            )
            for index, n in enumerate(rng.integers(1, 60, 4).tolist())
        }
        digest = f"{step:016x}{number:016x}"
        held[digest] = TrainGroup(PromptRef(0, number, step), digest, prompt, samples)
        sealed.append(
            SealedGroup(
                ref=PromptRef(0, number, step),
                digest=digest,
                prompt_tokens=len(prompt),
                response_tokens=tuple(len(samples[i].token_ids) for i in range(4)),
                versions=(Version(0, 0),),
                holder="h",
            )
        )
    seal = ready_seal(sealed, step=step, mini_batches=mini_batches)
    return StepInput(seal, balance_samples(seal), 0, held)


def launch_of(model: Path, run: Path, start: dict[str, Any] | None = None, **train: Any) -> RankLaunch:
    fixed = {"learning_rate": 1e-3, "micro_batch_tokens": 256, "mini_batches": 2, "old_logprobs": "engine"}
    spec = {
        "name": "gpu",
        "model": {"path": str(model)},
        "data": {"path": "none"},
        "flow": {"steps": 2, "groups_per_step": 4, "samples_per_prompt": 4},
        "rollout": {"max_new_tokens": 60},
        "train": fixed | train,
        "checkpoint": {"every": 1},
    }
    return rank_launch(spec, run, start=start)


def started(launch: RankLaunch, world: Collective) -> tuple[StepTrainer, RankModels]:
    manifest = _manifest(launch, lambda _: None)
    models = load_models(launch, world.device, world.max, lambda: None)
    progress = UpdateCounts(0, 0)
    if manifest is not None and launch.checkpoint_path is not None:
        restore_optimizer(models.policy, launch.checkpoint_path, manifest)
        if models.critic is not None:
            restore_critic(models.critic, launch.checkpoint_path, manifest)
        progress = UpdateCounts.of(manifest)
    saver = CheckpointWriter(launch, models.policy, models.critic)
    publisher = FolderPublisher(launch, models.policy, saver.writer, saver.insisting, world.max)
    return StepTrainer(launch, world, models, saver, publisher, SystemClock(), progress), models


def run(trainer: StepTrainer, step: int, mini_batches: int = 2) -> StepResult:
    """A step, and its checkpoint on the disk."""
    result = trainer.run(make_work(step, mini_batches), lambda phase: None)
    assert trainer._saver.writer.wait(60)
    return result


def staged_folder(run: Path, result: StepResult) -> Path:
    assert isinstance(result.weights, FolderUpdate)
    return run / result.weights.folder


def plain_losses(model: Path) -> float:
    """The mean loss of the first step's two updates on the CPU in float64, by the definition, with torch's optimizer."""
    module = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    groups = list(make_work(1).groups.values())
    for half in (groups[:2], groups[2:]):
        optimizer.zero_grad()
        parts = []
        for group in half:
            rewards = torch.tensor([group.samples[i].reward for i in range(4)], dtype=torch.float64)
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            if float(rewards.std()) <= 1e-6:
                advantages = torch.zeros_like(rewards)
            for index in range(4):
                sample, start = group.samples[index], len(group.prompt_ids)
                ids = torch.tensor([*group.prompt_ids.tolist(), *sample.token_ids.tolist()])
                logp = torch.log_softmax(module(input_ids=ids[None]).logits[0, start - 1 : -1], -1)
                own = logp.gather(1, ids[start:, None])[:, 0]
                ratio = (own - torch.tensor(sample.logprobs.tolist(), dtype=torch.float64)).exp()
                gain = advantages[index]
                parts.append(torch.maximum(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)))
        loss = torch.cat(parts).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return sum(losses) / len(losses)


@pytest.mark.parametrize(("backend", "stage"), BACKENDS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_has_the_loss_of_a_plain_loop(
    world: Collective, models: Path, tmp_path: Path, name: str, dtype: str, backend: str, stage: int
) -> None:
    launch = launch_of(models / name, tmp_path, dtype=dtype, backend=backend, zero_stage=stage)
    trainer, loaded = started(launch, world)
    assert isinstance(loaded.policy.feeding, TokenFeeding)
    assert loaded.policy.feeding.packing == ("bucketed" if name == "mistral" else "packed")
    metrics = run(trainer, 1).metrics
    assert metrics["loss"] == pytest.approx(plain_losses(models / name), abs=2e-4 if dtype == "fp32" else 3e-2)
    assert metrics["skipped_updates"] == 0
    assert metrics["padding"] < 0.05


@pytest.mark.parametrize("then", ["itself", "the other"])
@pytest.mark.parametrize(("backend", "stage"), [("deepspeed", 1), ("deepspeed", 3), ("fsdp2", 3)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_checkpoint_goes_on_where_it_was_and_staged_weights_are_the_policys(
    world: Collective, models: Path, tmp_path: Path, dtype: str, backend: str, stage: int, then: str
) -> None:
    fixed: dict[str, Any] = {"dtype": dtype}
    trainer, loaded = started(launch_of(models / "qwen3", tmp_path, backend=backend, zero_stage=stage, **fixed), world)
    first = run(trainer, 1)
    staged = load_file(staged_folder(tmp_path, first) / "model.safetensors")
    served = {one.name: one.tensor.float().cpu() for one in loaded.policy.tensors("served")}
    assert all(torch.equal(staged[name], served[name]) for name in served)
    published = load_module(staged_folder(tmp_path, first), torch.float32)
    assert all(torch.equal(one, served[name]) for name, one in published.named_parameters())
    second = run(trainer, 2)
    before = load_file(tmp_path / "checkpoints/0-2" / "model.safetensors")
    start = {"step": 1, "checkpoint": "checkpoints/0-1"}
    # Its own folder for what comes out, the same for what goes in.
    fixed["backend"] = backend if then == "itself" else OTHER[backend]
    again, _ = started(launch_of(models / "qwen3", tmp_path, start, zero_stage=4 - stage, **fixed), world)
    repeated = run(again, 2)
    assert repeated.metrics["loss"] == pytest.approx(second.metrics["loss"], abs=1e-5 if dtype == "fp32" else 1e-2)
    after = load_file(tmp_path / "checkpoints/0-2" / "model.safetensors")
    assert all(float((after[name] - before[name]).abs().max()) < 1e-4 for name in before if dtype == "fp32")


@pytest.mark.parametrize(("backend", "stage"), [("deepspeed", 1), ("deepspeed", 3), ("fsdp2", 3)])
def test_adapters_learn_and_the_base_model_keeps_its_bits(
    world: Collective, models: Path, tmp_path: Path, backend: str, stage: int
) -> None:
    settings: dict[str, Any] = {"lora": {"rank": 4}, "dtype": "bf16", "kl_coef": 0.1, "backend": backend}
    trainer, loaded = started(launch_of(models / "qwen3", tmp_path, zero_stage=stage, **settings), world)
    before = load_file(models / "qwen3" / "model.safetensors")
    original = _base_logits(loaded)
    first = run(trainer, 1, mini_batches=1)
    assert first.metrics["kl_reference"] == pytest.approx(0, abs=1e-6), "adapters begin as nothing"
    second = run(trainer, 2, mini_batches=1)
    assert second.metrics["kl_reference"] > 0
    assert torch.equal(_base_logits(loaded), original)
    adapters = {one.name: one.tensor.float().cpu() for one in loaded.policy.tensors("served")}
    assert all("lora_" in name for name in adapters)
    merged = load_file(staged_folder(tmp_path, second) / "model.safetensors")
    changed = [name for name in before if not torch.equal(merged[name], before[name])]
    assert changed
    assert all(name.rpartition(".")[0].endswith("_proj") for name in changed), "what adapters are on"


def _base_logits(loaded: RankModels) -> torch.Tensor:
    """Of the model with its adapters off."""
    assert isinstance(loaded.reference, BaseReference)
    with loaded.reference.awake() as logits_of, torch.no_grad():
        return logits_of(loaded.policy.feeding.dummy_inputs()).cpu()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_fsdp2_keeps_masters_and_moments_on_the_host_with_the_same_losses(
    world: Collective, models: Path, tmp_path: Path, dtype: str
) -> None:
    found = []
    for offload in (False, True):
        settings: dict[str, Any] = {"dtype": dtype, "backend": "fsdp2", "offload_state": offload}
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        trainer, loaded = started(launch_of(models / "qwen3", tmp_path / str(offload), **settings), world)
        losses = [run(trainer, step).metrics["loss"] for step in (1, 2)]
        places = {one.device.type for one in loaded.policy.optimizer_tensors()}
        found.append((losses, torch.cuda.memory_allocated() - before, places))
        del trainer, loaded
    assert found[1][0] == pytest.approx(found[0][0], abs=1e-5 if dtype == "fp32" else 1e-2)
    assert found[0][2] == {"cuda"}
    assert found[1][2] == {"cpu"}
    assert found[1][1] < 0.7 * found[0][1]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_critic_learns_beside_the_policy_and_both_go_on_from_a_checkpoint(
    world: Collective, models: Path, tmp_path: Path, dtype: str, stage: int
) -> None:
    settings: dict[str, Any] = {"advantage": "gae", "critic": {"learning_rate": 1e-2, "clip": None}, "dtype": dtype}
    trainer, loaded = started(launch_of(models / "qwen3", tmp_path, zero_stage=stage, **settings), world)
    assert loaded.critic is not None
    first = run(trainer, 1)
    assert first.metrics["value_mean"] == 0, "a new head says zero of everything"
    assert first.metrics["value_loss"] > 0
    assert first.metrics["critic_skipped_updates"] == 0
    second = run(trainer, 2)
    assert second.metrics["value_mean"] != 0
    start = {"step": 1, "checkpoint": "checkpoints/0-1"}
    again, _ = started(launch_of(models / "qwen3", tmp_path, start, zero_stage=4 - stage, **settings), world)
    repeated = run(again, 2)
    for name in ("loss", "value_loss", "value_mean"):
        close = pytest.approx(second.metrics[name], abs=1e-5 if dtype == "fp32" else 1e-2)
        assert repeated.metrics[name] == close


def test_checkpointed_activations_give_the_same_loss_and_gradient_norm_in_less_memory(
    world: Collective, models: Path, tmp_path: Path
) -> None:
    found = []
    for number, wanted in enumerate((False, True)):
        launch = launch_of(models / "llama", tmp_path / str(number), activation_checkpointing=wanted)
        trainer, _ = started(launch, world)
        torch.cuda.reset_peak_memory_stats()
        resting = torch.cuda.memory_allocated()
        metrics = run(trainer, 1).metrics
        found.append((metrics["loss"], metrics["grad_norm"], torch.cuda.max_memory_allocated() - resting))
        del trainer
    assert found[1][:2] == pytest.approx(found[0][:2], rel=1e-4)
    assert found[1][2] < found[0][2]


@pytest.mark.parametrize("offload", [True, False])
def test_the_reference_is_on_the_device_only_while_it_is_used(
    world: Collective, models: Path, *, offload: bool
) -> None:
    module: Any = load_module(models / "llama", torch.float32)
    plain = copy.deepcopy(module)
    feeding = TokenFeeding("bucketed", VOCABULARY, world.device)
    reference = Reference(module, TrainSpec(kl_coef=0.1, offload_reference=offload), feeding)
    places = lambda: {parameter.device.type for parameter in module.parameters()}  # noqa: E731
    assert places() == {"cpu" if offload else "cuda"}
    batch = make_dummy(feeding)
    with reference.awake() as logits_of:
        assert places() == {"cuda"}
        found = logits_of(batch.inputs).cpu()
    assert places() == {"cpu" if offload else "cuda"}
    expected = plain(input_ids=batch.inputs.tokens.cpu()).logits[0, :1]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_before_the_first_update_the_reference_scores_the_policys_own_numbers(
    world: Collective, models: Path, tmp_path: Path
) -> None:
    for stage in (1, 3):
        launch = launch_of(models / "qwen3", tmp_path / str(stage), kl_coef=0.1, zero_stage=stage)
        trainer, _ = started(launch, world)
        assert run(trainer, 1, mini_batches=1).metrics["kl_reference"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_variable_length_kernel_computes_what_the_plain_way_does_or_is_not_used(
    world: Collective, kv_heads: int
) -> None:
    config = transformers.LlamaConfig(**COMMON | {"num_key_value_heads": kv_heads})
    PACKED.use_fastest(config, torch.bfloat16, world.device)
    if PACKED._varlen is None:
        pytest.fail("torch has no variable-length attention for this device")
    shapes = (Rectangle(3, 17), Rectangle(1, 130), Rectangle(5, 2))
    PACKED.lay(shapes, world.device)
    tokens = sum(one.tokens for one in shapes)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, tokens, 32, device="cuda", dtype=torch.bfloat16) for n in (4, kv_heads, kv_heads))
    torch.testing.assert_close(
        PACKED._at_once(q, k, v, 32**-0.5), PACKED._by_rectangle(q, k, v, 32**-0.5), atol=2e-2, rtol=2e-2
    )
    PACKED.use_fastest(config, torch.float32, world.device)
    assert PACKED._varlen is None, "float32 has no such kernel"


def test_a_device_without_memory_names_the_field_to_lower(world: Collective) -> None:
    with (
        pytest.raises(GcoreError, match=r"train\.micro_batch_tokens") as caught,
        explain_memory_error("update", TrainSpec(), ("micro_batch_tokens",)),
    ):
        torch.empty(1 << 50, dtype=torch.uint8, device=world.device)
    assert isinstance(caught.value, OutOfMemory)

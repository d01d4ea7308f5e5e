"""Loads the models of a rank (policy, critic and reference) and prepares them for training.

The order matters, because each step changes the module for the next: load it, test how sequences can be laid out, copy
it for critic and reference while they are identical, enable activation checkpointing, pass it to the backend. Policy
and critic get the same micro-batches; if the critic is another model, both must support them.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gcore.config.train import CriticSpec, TrainSpec
from gcore.errors import DataError
from gcore.models.dtypes import model_dtype
from gcore.models.layout import critic_folder
from gcore.models.vision import (
    REPEATS,
    PictureProcessor,
    has_vision,
    media_token_ids,
    part_of,
    picture_arguments,
    set_text_attention,
    text_attention,
)
from gcore.train.backends.adapters import BaseReference, add_adapters, load_adapters
from gcore.train.backends.base import OptimizerSettings, TrainBackend, forward_tensors
from gcore.train.backends.packed_attention import NAME, PACKED, UnsupportedPackedAttention, attention_heads
from gcore.train.backends.sequence_parallel import ALONE, SequenceGroup
from gcore.train.batching import (
    Feeding,
    ModelInputs,
    OutputsOf,
    RowPictures,
    TokenFeeding,
    VisionFeeding,
    logits_of,
    token_positions,
)
from gcore.train.checkpoint.run_files import Highest
from gcore.train.critic import load_backbone, make_value_model
from gcore.train.denoising.follower import FollowingNetwork
from gcore.train.hf_models import (
    cast_parameters,
    check_names,
    checkpoint_activations,
    load_module,
    vocabulary_of,
)
from gcore.train.objectives import PolicyObjective
from gcore.train.packing import Packing, Rectangle
from gcore.train.rank.launch import RankLaunch


class Reference:
    """The job's initial model, for the KL to it. It is evaluated without gradients and never changes.

    Under ZeRO stages 1 and 2 every rank has a full copy: on its GPU or, with `train.offload_reference`, in host memory
    and on the GPU during the step's reference phase only. Under stage 3, where not even the policy fits on one GPU, it
    is partitioned over the ranks like the policy, and gathered layer by layer; with offloading, each rank's part stays
    in host memory. Without a GPU it is used in host memory.

    `awake` is a collective under stage 3, and so is every call of its result.
    """

    def __init__(self, module: nn.Module, train: TrainSpec, feeding: Feeding) -> None:
        cast_parameters(module, torch.bfloat16 if train.dtype == "bf16" else torch.float32)
        module.requires_grad_(False).eval()
        self._module = module
        self._device = device = feeding.device
        self._moves = train.offload_reference and train.zero_stage < 3 and device.type != "cpu"
        if train.zero_stage == 3:
            self._outputs_of = feeding.outputs_of(_split_frozen(module, train, device))
            return
        if not self._moves:
            module.to(device)
        self._outputs_of = feeding.outputs_of(module)

    def forward_tensors(self) -> Iterator[Tensor]:
        """Every tensor on this rank that its forward pass uses. Not a collective."""
        return forward_tensors(self._module)

    @contextlib.contextmanager
    def awake(self) -> Iterator[OutputsOf]:
        """What computes its outputs, valid within the block; the model is on the device meanwhile."""
        if not self._moves:
            yield self._outputs_of
            return
        self._module.to(self._device, non_blocking=True)
        try:
            yield self._outputs_of
        finally:
            self._module.to("cpu")
            torch.cuda.empty_cache()


log = logging.getLogger("gcore.train")

TOLERANCE = 1e-5
"""Largest difference of log-probabilities with which a model can be packed, relative to their size (if above 1)."""

ROWS = ((Rectangle(2, 9), (9, 8)), (Rectangle(2, 5), (5, 5)), (Rectangle(1, 3), (3,)))
"""Sequences for the packing test: rectangles, and the number of real tokens in each of their rows; the rest is padding.
"""


@dataclass(frozen=True, slots=True)
class FeedingChoice:
    """How the model's sequences are laid out. `reason`: why they are padded (bucketed) although packing was allowed."""

    packing: Packing
    reason: str = ""


def choose_feeding(
    module: nn.Module,
    train: TrainSpec,
    context: int | None,
    highest: Highest,
    *,
    beside: nn.Module | None = None,
    vision: VisionFeeding | None = None,
) -> FeedingChoice:
    """Test whether sequences can be packed end to end in one row for this model, and set the module's attention
    accordingly.

    A few short sequences go through the model one by one, with its own attention, and then together in one row of
    rectangles, with gcore's attention. Their log-probabilities must be equal. A model whose positions, attention or
    states reach beyond a sequence gives other numbers, so no table of supported models is needed. Differences that show
    only in long contexts are refused by the attention (sliding windows shorter than the context) or detected from the
    configuration (chunked attention).

    Runs in float32 in host memory, before the backend gets the module. If one rank cannot pack, no rank does.

    `context`: maximum sequence length in tokens, if the job has a limit. `highest`: maximum of each number over the ranks.
    `beside`: another model that gets the same micro-batches; the choice holds for both. `vision`: provides pictures; then
    some sequences of the test have pictures.

    Raises DataError if the model cannot be packed and the spec requires packing or sequence parallelism, and if the size of
    a sequence group does not divide the attention heads.
    """
    if train.packing == "bucketed":
        return FeedingChoice("bucketed")
    every: list[Any] = [module] if beside is None else [module, beside]
    before, longest = [text_attention(one) for one in every], _longest_sequence(every, context)
    unfit, reason = next(((one, why) for one in every if (why := packing_obstacle(one, longest, vision))), (module, ""))
    if any(highest([float(bool(reason))])):
        for one, own in zip(every, before, strict=True):
            if text_attention(one) != own:
                set_text_attention(one, own)
        reason = reason or "another rank cannot pack it"
        if train.sequence_parallel > 1:
            raise DataError(
                f"a {_kind(unfit)} cannot be packed ({reason}), and only packed rows can be divided between ranks",
                where="train.sequence_parallel",
                fix="Leave it out",
            )
        if train.packing == "packed":
            raise DataError(
                f"a {_kind(unfit)} cannot be packed: {reason}", where="train.packing", fix="Set it to auto or bucketed"
            )
        log.info("sequences are bucketed: %s", reason)
        return FeedingChoice("bucketed", reason)
    _check_heads(every, train.sequence_parallel)
    return FeedingChoice("packed")


def _longest_sequence(models: Sequence[Any], context: int | None) -> int | None:
    """The longest sequence in tokens that all of the models get; None: they state no limit. `context`: of the job, if any."""
    limits = (getattr(one.config.get_text_config(), "max_position_embeddings", None) for one in models)
    return min((int(one) for one in (context, *limits) if one), default=None)


def _check_heads(models: Sequence[Any], size: int) -> None:
    """Raise DataError if a sequence group of `size` ranks cannot share the heads of a model equally."""
    if size == 1:
        return
    for model in models:
        if (heads := attention_heads(model.config.get_text_config())[0]) % size:
            raise DataError(
                f"a {_kind(model)} has {heads} attention heads, which {size} ranks cannot share equally",
                where="train.sequence_parallel",
                fix=f"Use a number that divides {heads}, or leave it out",
            )


def packing_obstacle(module: nn.Module, context: int | None, vision: VisionFeeding | None = None) -> str:
    """Why the model cannot be packed; empty if it can. Sets gcore's attention if it can, else keeps the model's own.

    `context`: maximum sequence length in tokens; None: no limit. `vision`: provides pictures for the test.
    """
    model: Any = module
    config = model.config.get_text_config()
    if not getattr(model, "_supports_attention_backend", False):
        return f"the attention of a {_kind(module)} cannot be replaced"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"it has layers of type {', '.join(sorted(kinds))}"
    before = text_attention(model)
    limit = int(getattr(config, "max_position_embeddings", None) or 0)
    PACKED.register()
    PACKED.begin(min(context, limit) if context and limit else context or limit)
    try:
        error = _error(model, before, vision)
    except (
        UnsupportedPackedAttention,
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        IndexError,
    ) as problem:
        set_text_attention(model, before)
        return " ".join(str(problem).split())[:200]
    if error <= TOLERANCE:
        return ""
    set_text_attention(model, before)
    return f"its log-probabilities differ by {error:.3g}"


@dataclass(frozen=True, slots=True, eq=False)
class _TrialRow:
    """A sequence of the packing test: its tokens [n], with the padding behind them, and its pictures."""

    ids: Tensor
    padding: int
    pictures: RowPictures


def _trial_rows(vocabulary: int, vision: VisionFeeding | None) -> list[tuple[Rectangle, list[_TrialRow]]]:
    """The sequences of the packing test: random tokens, and if the job has pictures, sequences with one and with two
    pictures of unequal size. Tokens that stand for media appear only with pictures.
    """
    generator = torch.Generator().manual_seed(0)
    allowed = torch.arange(vocabulary)
    if vision is not None:
        allowed = allowed[~torch.isin(allowed, torch.tensor(vision.media_tokens))]
    rows = []
    for shape, reals in ROWS:
        block = allowed[torch.randint(0, len(allowed), (shape.rows, shape.length), generator=generator)]
        made = [_TrialRow(ids, shape.length - real, RowPictures()) for ids, real in zip(block, reals, strict=True)]
        rows.append((shape, made))
    if vision is None:
        return rows
    for pictures in vision.trials:
        around = allowed[torch.randint(0, len(allowed), (2 * len(pictures) + 3,), generator=generator)].tolist()
        ids = around[:2]
        for number, picture in enumerate(pictures):
            ids += [vision.image_token] * vision.count(picture) + around[2 + 2 * number : 4 + 2 * number]
        names = [str(id(picture)) for picture in pictures]
        found = vision.sequence(np.array(ids, dtype=np.int32), names, pictures, "the packing test")
        rows.append((Rectangle(1, len(ids) + 1), [_TrialRow(torch.tensor([*ids, around[-1]]), 1, found)]))
    return rows


@torch.no_grad()
def _error(model: Any, before: str, vision: VisionFeeding | None) -> float:
    """The largest difference between log-probabilities of packed and single sequences, relative to their size if above
    1.

    `before`: the model's own attention. Leaves the model with gcore's attention.
    """
    blocks = _trial_rows(vocabulary_of(model), vision)
    rows = [row for _, made in blocks for row in made]
    set_text_attention(model, before)
    alone = [_alone(model, row, vision) for row in rows]
    set_text_attention(model, NAME)
    every = torch.cat([row.ids for row in rows])
    shapes = tuple(shape for shape, _ in blocks)
    pictures = [row.pictures for row in rows]
    places = torch.from_numpy(token_positions(shapes, pictures, three=vision is not None and vision.three))
    given = None if vision is None else vision.inputs(pictures, every[None])
    inputs = ModelInputs(every[None], places.unsqueeze(-2), shapes, torch.arange(len(every)), None, given)
    logits, found, start = logits_of(model)(inputs), [], 0
    for row in rows:
        real = len(row.ids) - row.padding
        found.append(_logp(logits[start : start + real], row.ids[:real]))
        start += len(row.ids)
    return max(float(((a - b).abs() / b.abs().clamp(min=1)).max()) for a, b in zip(found, alone, strict=True))


def _alone(model: Any, row: _TrialRow, vision: VisionFeeding | None) -> Tensor:
    """The log-probabilities of one sequence by the model itself, with its own attention and positions."""
    ids = row.ids[None, : len(row.ids) - row.padding]
    more: dict[str, Any] = {}
    if row.pictures.pictures:
        assert vision is not None
        REPEATS.places = None
        more = picture_arguments(row.pictures.pictures, ids.device)
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in inspect.signature(model.forward).parameters:
                more[name] = (ids == vision.image_token).long()
    return _logp(model(input_ids=ids, use_cache=False, **more).logits[0], ids[0])


def _logp(logits: Tensor, tokens: Tensor) -> Tensor:
    return torch.log_softmax(logits[:-1].float(), dim=-1).gather(1, tokens[1:, None])[:, 0]


def _kind(module: nn.Module) -> str:
    model: Any = module
    return str(getattr(model.config, "model_type", type(module).__name__))


@dataclass(frozen=True, slots=True, eq=False)
class RankModels:
    """The models of one rank: policy, reference (if the KL to it has a weight), and critic (only for jobs that have
    one).
    """

    policy: TrainBackend
    """The model whose log-probabilities are trained and whose weights engines serve. Its outputs are logits."""
    reference: Reference | BaseReference | None
    critic: TrainBackend | None = None
    """Its outputs are values, one for each scored token."""
    follower: FollowingNetwork | None = None
    """A network that follows the policy: engines serve it in the policy's place, or evaluate it."""
    objective: PolicyObjective | None = None
    """The policy's objective, if it depends on the model's files; None: that of the spec alone."""
    frozen: Mapping[str, Tensor] = field(default_factory=dict)
    """On rank 0, the policy's parameters that are not trained (`train.freeze`), float32 in host memory. They never change."""


Fill = Callable[[str, nn.Module], None]
"""Replaces the weights of a complete module (name `policy` or `critic`) by those of a replicated state; a collective.
"""


def load_models(
    launch: RankLaunch,
    device: torch.device,
    highest: Highest,
    tell: Callable[[], None],
    fill: Fill | None = None,
    group: SequenceGroup = ALONE,
) -> RankModels:
    """Load all models of the job, ready for the first step. A collective.

    `highest`: maximum of each number over the ranks. `fill`: replaces the loaded weights, in a world that starts from
    in-memory replicas. `group`: the ranks that compute a packed row together. Raises DataError if a model cannot be
    loaded or trained.
    """
    train, model = launch.spec.train, launch.spec.model
    # With adapters a checkpoint has nothing else, so the model is the base.
    folder = launch.model_path if train.lora is not None else launch.checkpoint_path or launch.model_path
    module = load_module(folder, torch.float32, trust_remote_code=model.trust_remote_code)
    check_names(folder, module)
    tell()
    backbone = _other_backbone(launch, module)
    vision = _vision_feeding(launch, module)
    packing = choose_feeding(module, train, model.max_length, highest, beside=backbone, vision=vision).packing
    tell()
    original = _original(launch, module, packing) if train.kl_coef > 0 and train.lora is None else None
    if train.critic is not None and backbone is None:
        backbone = copy.deepcopy(module)
    if train.lora is not None:
        add_adapters(module, train.lora, launch.spec.seed, model_dtype(folder), folder)
        if launch.checkpoint_path is not None:
            load_adapters(module, launch.checkpoint_path)
    frozen = freeze_parts(module, train.freeze, folder)
    if fill is not None:
        fill("policy", module)
        tell()
    if train.activation_checkpointing:
        for one in (module, backbone):
            if one is not None:
                checkpoint_activations(one, folder)
    if packing == "packed":
        dtype = torch.bfloat16 if train.dtype == "bf16" else torch.float32
        PACKED.group = group
        configs: list[Any] = [one.config.get_text_config() for one in (module, backbone) if one is not None]  # type: ignore[operator, union-attr]
        PACKED.use_fastest(configs[0], dtype, device, beside=configs[1] if len(configs) > 1 else None)
    value_model = None if backbone is None else make_value_model(backbone, _head_folder(launch))
    # Policy and critic get the same tokens, so both must support them.
    every = [vocabulary_of(module), *([] if value_model is None else [value_model.vocabulary])]
    media = media_token_ids(module.config)
    forbidden = torch.tensor(media, device=device) if media else None
    feeding = TokenFeeding(packing, min(every), device, group, forbidden, vision)
    policy = _split(module, train, train, feeding)
    tell()
    reference = _reference(policy, original, train)
    tell()
    if value_model is None or train.critic is None:
        return RankModels(policy, reference, frozen=frozen if launch.rank == 0 else {})
    if fill is not None:
        fill("critic", value_model)
    critic = _split(value_model, train, train.critic, feeding)
    tell()
    return RankModels(policy, reference, critic, frozen=frozen if launch.rank == 0 else {})


def freeze_parts(module: nn.Module, parts: Sequence[str], folder: Path) -> dict[str, Tensor]:
    """Exclude these parts of a complete model (`train.freeze`) from training; returns their parameters by name.

    Raises DataError if the model lacks one. `folder`: of the model, for errors.
    """
    model: Any = module
    frozen = {}
    for part in parts:
        found = {name: one for name, one in module.named_parameters() if part_of(name) == part}
        if not has_vision(model.config) or not found:
            raise DataError(
                f"a {_kind(module)} has no part {part!r} that could be frozen",
                where=str(folder),
                fix="Leave train.freeze out",
            )
        for name, parameter in found.items():
            parameter.requires_grad_(False)
            frozen[name] = parameter.detach()
    return frozen


def _vision_feeding(launch: RankLaunch, module: nn.Module) -> VisionFeeding | None:
    """What provides the pictures of samples to the models; None for a job without pictures. Raises DataError."""
    if launch.blobs is None:
        return None
    if not has_vision(module.config):
        raise DataError(
            f"a {_kind(module)} has no vision tower, but the prompts have pictures",
            where=str(launch.model_path),
            fix="Use a vision-language model, or remove data.images",
        )
    return VisionFeeding(module, PictureProcessor(launch.model_path), Path(launch.blobs.folder))


def _reference(policy: TrainBackend, original: nn.Module | None, train: TrainSpec) -> Reference | BaseReference | None:
    if original is not None:
        return Reference(original, train, policy.feeding)
    return BaseReference(policy) if train.kl_coef > 0 else None


def _split(module: nn.Module, train: TrainSpec, own: TrainSpec | CriticSpec, feeding: Feeding) -> TrainBackend:
    """Split a model over the ranks, with the backend of the spec. `own`: the section with the model's own settings."""
    return import_backend(train.backend)(module, OptimizerSettings.of(train, own), feeding)


def import_backend(backend: str) -> Callable[[nn.Module, OptimizerSettings, Feeding], TrainBackend]:
    """Import the train backend of this name, and return its class. Raises DataError."""
    if backend == "fsdp2":
        from gcore.train.backends.fsdp2 import Fsdp2Backend

        return Fsdp2Backend
    try:
        from gcore.train.backends.deepspeed import DeepSpeedBackend
    except ImportError as error:
        raise DataError(
            f"DeepSpeed cannot be imported ({error})",
            where="train.backend",
            fix="Install gcore[train], or set it to fsdp2",
        ) from error

    return DeepSpeedBackend


def _split_frozen(module: nn.Module, train: TrainSpec, device: torch.device) -> Any:
    """Split a model without gradients over the ranks; returns what computes its outputs."""
    if train.backend == "fsdp2":
        from gcore.train.backends.fsdp2 import shard_frozen

        return shard_frozen(module, train, device)
    from gcore.train.backends.deepspeed import partition_module

    return partition_module(module, train)


def _other_backbone(launch: RankLaunch, policy: nn.Module) -> nn.Module | None:
    """The critic's language model if it differs from the policy's; None if the critic starts as a copy of the policy.

    Raises DataError if it supports shorter sequences than the policy gets.
    """
    critic = launch.spec.train.critic
    if critic is None or (launch.checkpoint_path is None and critic.path is None):
        return None
    folder = critic_folder(launch.checkpoint_path) if launch.checkpoint_path is not None else launch.critic_path
    module = load_backbone(folder, trust_remote_code=launch.spec.model.trust_remote_code)
    models: list[Any] = [module, policy]
    own, needed = (int(getattr(one.config.get_text_config(), "max_position_embeddings", None) or 0) for one in models)
    needed = min(filter(None, (needed, launch.spec.model.max_length)), default=0)
    if own and own < needed:
        raise DataError(
            f"the critic's model supports at most {own} tokens, but the policy's sequences have up to {needed}",
            where=str(folder),
            fix=f"Set model.max_length: {own}, or another model in train.critic.path",
        )
    return module


def _head_folder(launch: RankLaunch) -> Path | None:
    """The folder that may contain the critic's value head; None: it gets a new head."""
    if launch.checkpoint_path is not None:
        return critic_folder(launch.checkpoint_path)
    return None if launch.critic_path == launch.model_path else launch.critic_path


def _original(launch: RankLaunch, module: nn.Module, packing: Packing) -> nn.Module:
    """The job's initial model as reference: a copy of the policy if that is untrained, else loaded from its folder."""
    if launch.checkpoint_path is None:
        return copy.deepcopy(module)
    dtype = torch.bfloat16 if launch.spec.train.dtype == "bf16" else torch.float32
    found = load_module(launch.model_path, dtype, trust_remote_code=launch.spec.model.trust_remote_code)
    if packing == "packed":
        set_text_attention(found, NAME)
    return found

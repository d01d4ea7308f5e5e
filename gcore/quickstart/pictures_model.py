"""The models of the examples of generated pictures: a small pipeline like Stable Diffusion 3 and one like Stable Diffusion 1,
and their warm start.

Pipelines have no VAE: they generate pixels. Their text encoders know the words of the prompts only; they learn with the
network that denoises, and reinforcement learning leaves them as they are.

Uses one thread, so that results do not depend on the number of cores. Imports torch and diffusers, so preparations import
this module only when they need it.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gcore.models.diffusion.files import NETWORK_FOLDERS, pipeline_parts
from gcore.models.diffusion.networks import NETWORKS, Condition, DenoisingNetwork, Process
from gcore.models.diffusion.schedule import NoiseSchedule
from gcore.quickstart.folder import Reporter, TeachingProgress
from gcore.quickstart.pictures_task import COLOURS, PLACES, PROMPTS, SIDE, PicturePrompt, PictureShares
from gcore.quickstart.pretraining import deterministic_torch, quiet_saving

BATCH = 64
RATE, WARM_UP, FALL, LAST = 3e-3, 50, 0.5, 0.02
"""Learning rate, its warm-up in updates, from which share of the updates on it falls, and its last fraction."""

RIGHT_ONLY, CARELESS = 0.4, 0.85
"""Share of the updates with right pictures only, and share of careless pictures after that. A quarter of these is right, by
chance."""

SPREAD = 0.05
"""Standard deviation of the pixels of a drawn picture."""

STEPS = 10
"""Denoising steps by which the model is measured."""

EACH = 16
"""Pictures of each prompt by which the model is measured."""

MEASURED_EVERY = 50
"""Updates between two measurements in the last quarter; four times as many before."""

WIDTH = 32
"""Width of a text encoder; the transformer of Stable Diffusion 3 is twice as wide, for it gets both encoders' output side by
side."""

IMAGE_TOKENS = 4
"""Image tokens of a picture, one for each quadrant."""

KINDS: Mapping[Process, str] = {"flow": "StableDiffusion3Pipeline", "ddim": "StableDiffusionPipeline"}
"""Classes of the pipelines."""

ABSENT: Mapping[str, Mapping[str, Any]] = {
    "StableDiffusion3Pipeline": {"vae": None, "text_encoder_3": None, "tokenizer_3": None},
    "StableDiffusionPipeline": {
        "vae": None,
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    },
}
"""Parts that a pipeline lacks, by its class."""

BEGIN, END, PAD = "<|startoftext|>", "<|endoftext|>", "<pad>"
WORDS = (BEGIN, END, PAD, *COLOURS, *PLACES)
TOKENS = 4
"""Tokens of a prompt: its words between the special ones."""

WORD_SPREAD, POSITION_SPREAD = 1.0, 0.1
"""Standard deviations of the untrained embeddings of words and positions. With CLIP's own 0.02, words differ too little to
be told apart."""


@dataclass(frozen=True, slots=True)
class Painter:
    """A pipeline of diffusers, with its network that denoises and the levels of its scheduler."""

    pipeline: Any
    network: DenoisingNetwork
    schedule: NoiseSchedule

    @staticmethod
    def of(pipeline: Any) -> Painter:
        """A painter with this pipeline."""
        kind, scheduler = type(pipeline).__name__, pipeline.scheduler
        settings = {**scheduler.config, "_class_name": type(scheduler).__name__}
        alphas = scheduler.alphas_cumprod.tolist() if hasattr(scheduler, "alphas_cumprod") else ()
        network = NETWORKS[kind](getattr(pipeline, NETWORK_FOLDERS[kind]), 1.0)
        return Painter(pipeline, network, NoiseSchedule(settings, tuple(alphas)))

    @property
    def text_parts(self) -> tuple[tuple[Any, Any], ...]:
        """Its tokenizers and text encoders."""
        pipe = self.pipeline
        first = (pipe.tokenizer, pipe.text_encoder)
        return (first, (pipe.tokenizer_2, pipe.text_encoder_2)) if self.schedule.is_flow else (first,)

    @property
    def trained_parts(self) -> tuple[nn.Module, ...]:
        """The modules that the warm start trains."""
        return self.network.module, *(encoder for _, encoder in self.text_parts)

    def draw_levels(self, count: int) -> Tensor:
        """Random levels [count] for the warm start."""
        if self.schedule.is_flow:
            return torch.sigmoid(torch.randn(count))
        return torch.randint(len(self.schedule.alphas), (count,)).float()


@dataclass(frozen=True, slots=True)
class TaughtPainter:
    """A painter after its warm start, and what it can do."""

    painter: Painter
    shares: PictureShares


def new_painter(process: Process) -> Painter:
    """Return an untrained painter, initialized from torch's random state."""
    diffusers: Any = importlib.import_module("diffusers")  # parts of it have no types
    kind = KINDS[process]
    with _quiet_import():
        pipeline = getattr(diffusers, kind)
    made = _flow_parts(diffusers) if process == "flow" else _ddim_parts(diffusers)
    with _quiet_files():
        return Painter.of(pipeline(**made, **ABSENT[kind]))


def _flow_parts(diffusers: Any) -> dict[str, Any]:
    width = 2 * WIDTH
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=SIDE,
        patch_size=SIDE // 2,
        in_channels=3,
        out_channels=3,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=WIDTH,
        joint_attention_dim=width,
        caption_projection_dim=width,
        pooled_projection_dim=width,
        pos_embed_max_size=2,
    )
    return {
        "transformer": transformer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0),
        "text_encoder": _text_encoder(projects=True),
        "tokenizer": _tokenizer(),
        "text_encoder_2": _text_encoder(projects=True),
        "tokenizer_2": _tokenizer(),
    }


def _ddim_parts(diffusers: Any) -> dict[str, Any]:
    """With the noise of Stable Diffusion. The network predicts v: at the first level, ε says little about the picture."""
    unet = diffusers.UNet2DConditionModel(
        sample_size=SIDE,
        in_channels=3,
        out_channels=3,
        block_out_channels=(WIDTH // 2, WIDTH),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=WIDTH,
        attention_head_dim=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    scheduler = diffusers.DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        prediction_type="v_prediction",
    )
    return {
        "unet": unet,
        "scheduler": scheduler,
        "text_encoder": _text_encoder(projects=False),
        "tokenizer": _tokenizer(),
    }


def _text_encoder(*, projects: bool) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(WORDS),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=TOKENS,
        projection_dim=WIDTH,
        bos_token_id=WORDS.index(BEGIN),
        eos_token_id=WORDS.index(END),
        pad_token_id=WORDS.index(PAD),
    )
    encoder = (CLIPTextModelWithProjection if projects else CLIPTextModel)(config).eval()
    for module in encoder.modules():
        if isinstance(module, nn.Embedding):
            spread = WORD_SPREAD if module.num_embeddings == len(WORDS) else POSITION_SPREAD
            nn.init.normal_(module.weight, std=spread)
    return encoder


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=PAD))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A {END}", special_tokens=[(BEGIN, WORDS.index(BEGIN)), (END, WORDS.index(END))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        unk_token=PAD,
        model_max_length=TOKENS,
    )


@contextmanager
def _quiet_import() -> Iterator[None]:
    """Hide transformers' notes about packages that these models do not need, which it prints when diffusers first imports a
    pipeline."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def save_painter(painter: Painter, folder: Path) -> None:
    """Save the whole pipeline. Raises OSError."""
    with _quiet_files():
        painter.pipeline.save_pretrained(folder)


def load_painter(folder: Path) -> Painter:
    """Load a painter that `save_painter` saved. Raises DataError, OSError."""
    diffusers: Any = importlib.import_module("diffusers")
    kind = pipeline_parts(folder)["_class_name"]
    with _quiet_import():
        pipeline = getattr(diffusers, kind)
    with _quiet_files():
        return Painter.of(pipeline.from_pretrained(folder, local_files_only=True, **ABSENT[kind]))


@contextmanager
def _quiet_files() -> Iterator[None]:
    """Hide progress bars of loading and saving, and the notes of diffusers about absent parts."""
    from diffusers.utils import logging

    before, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with quiet_saving():
            yield
    finally:
        logging.set_verbosity(before)
        if shown:
            logging.enable_progress_bar()


def teach_painting(process: Process, updates: int, seed: int, reporter: Reporter) -> TaughtPainter:
    """Warm-start a painter: right pictures first, then also careless ones.

    Return it as it was at the last measurement in the last quarter whose shares are `fit`, or at the last one if none is.
    """
    with deterministic_torch(seed):
        painter = new_painter(process)
        trained = [one for part in painter.trained_parts for one in part.parameters()]
        optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.99), weight_decay=0.01)
        kept: tuple[PictureShares, list[dict[str, Tensor]]] | None = None
        accuracy: float | None = None
        for update in range(1, updates + 1):
            for group in optimizer.param_groups:
                group["lr"] = RATE * _share_of_rate(update, updates)
            loss = _matching_loss(painter, CARELESS if update > RIGHT_ONLY * updates else 0.0)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            is_late = 4 * update > 3 * updates
            if update == updates or update % (MEASURED_EVERY if is_late else 4 * MEASURED_EVERY) == 0:
                shares = measure_painter(painter)
                accuracy = shares.right
                if is_late and (shares.fit or kept is None or not kept[0].fit):
                    kept = shares, [copy.deepcopy(part.state_dict()) for part in painter.trained_parts]
            reporter.report(TeachingProgress(update, updates, accuracy))
        assert kept is not None
        for part, weights in zip(painter.trained_parts, kept[1], strict=True):
            part.load_state_dict(weights)
        return TaughtPainter(painter, kept[0])


def _share_of_rate(update: int, updates: int) -> float:
    """The learning rate of an update as a share of the highest one."""
    left = (updates - update) / ((1 - FALL) * updates)
    return min(1.0, update / WARM_UP, max(LAST, left))


def _matching_loss(painter: Painter, careless: float) -> Tensor:
    """Squared error of the network's predictions for a batch of random prompts. In half of the share `careless` of the pictures the colour is drawn at
    random, in the other half the place."""
    colours, places = torch.randint(len(COLOURS), (BATCH,)), torch.randint(len(PLACES), (BATCH,))
    chance = torch.rand(BATCH)
    other_colour, other_place = torch.randint(len(COLOURS), (BATCH,)), torch.randint(len(PLACES), (BATCH,))
    drawn = draw_pictures(
        torch.where(chance < careless / 2, other_colour, colours),
        torch.where((chance >= careless / 2) & (chance < careless), other_place, places),
    )
    levels, noise = painter.draw_levels(BATCH), torch.randn_like(drawn)
    condition = encode_prompts(painter, PROMPTS)
    asked = colours * len(PLACES) + places
    states = painter.schedule.noised(drawn, noise, levels)
    found = painter.network.predict(states, levels, [{name: one[asked] for name, one in condition.items()}])
    return ((found - painter.schedule.target(drawn, noise, levels)) ** 2).mean()


def draw_pictures(colours: Tensor, places: Tensor) -> Tensor:
    """Draw pictures [n, 3, SIDE, SIDE] with values in [-1, 1] of these numbers of colours and places [n]."""
    count, half = len(colours), SIDE // 2
    shades = torch.tensor(list(COLOURS.values()))[colours]
    cells = torch.zeros(count, 3, 2, half, 2, half)
    cells[torch.arange(count), :, places // 2, :, places % 2] = shades[:, :, None, None].expand(-1, -1, half, half)
    return cells.reshape(count, 3, SIDE, SIDE) + SPREAD * torch.randn(count, 3, SIDE, SIDE)


def encode_prompts(painter: Painter, prompts: Sequence[PicturePrompt]) -> Condition:
    """Embeddings of prompts as the pipeline's own `encode_prompt` makes them: tensors [n, ...] by name."""
    texts = [one.prompt for one in prompts]
    found = [
        encoder(torch.tensor(tokenizer(texts)["input_ids"]), output_hidden_states=True)
        for tokenizer, encoder in painter.text_parts
    ]
    if not painter.schedule.is_flow:
        return {"embeds": found[0].last_hidden_state}
    embeds = torch.cat([one.hidden_states[-2] for one in found], -1)
    absent = torch.zeros_like(embeds[:, :1])  # the token of the third text encoder
    return {"embeds": torch.cat([embeds, absent], 1), "pooled": torch.cat([one.text_embeds for one in found], -1)}


@torch.no_grad()
def generate_pictures(painter: Painter, prompts: Sequence[PicturePrompt], generator: torch.Generator) -> Tensor:
    """Generate a picture of each prompt without noise in the steps: [n, SIDE, SIDE, 3] uint8. `generator`: of the first
    states."""
    painter.network.module.eval()
    condition, levels = encode_prompts(painter, prompts), painter.schedule.levels(STEPS, IMAGE_TOKENS)
    states = torch.randn(len(prompts), 3, SIDE, SIDE, generator=generator)
    for index in range(STEPS):
        found = painter.network.predict(states, torch.full((len(prompts),), levels[index]), [condition])
        states = painter.schedule.step("ode", states, found, levels, index, 0.0).mean
    painter.network.module.train()
    return picture_bytes(states)


def picture_bytes(states: Tensor) -> Tensor:
    """Convert pictures [n, 3, SIDE, SIDE] with values in [-1, 1] to [n, SIDE, SIDE, 3], uint8."""
    return (((states + 1) / 2).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)


def measure_painter(painter: Painter, seed: int = 0) -> PictureShares:
    """Shares of `EACH` pictures of each prompt. `seed`: of their noise."""
    prompts = PROMPTS * EACH
    pictures = generate_pictures(painter, prompts, torch.Generator().manual_seed(seed))
    return PictureShares.of(pictures.numpy(), prompts)

"""Sizes and work of a pipeline whose policy generates pictures: the network that denoises, text encoders and decoder.

Engines hold all parts and no KV cache; the memory of a running picture takes its place. Train ranks hold the network only. The time
of a pass is a fixed part (kernel launches, reading the weights), and operations: linear and quadratic in the tokens that attend to
each other. A UNet computes at several resolutions. Each denoising step takes a pass, and with guidance another one, which has no
gradient in training.

Sizes come from `gcore.models.diffusion.sizes`. Counts of operations equal those that torch counts for diffusers' networks within a
tenth (`tests/unit/placement/test_mapping_pictures.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gcore.errors import DataError
from gcore.models.diffusion.sizes import PIPELINE, step_tokens

BLOCK_MATRICES = 12
"""Parameters of a transformer block that a token is multiplied with, in squares of the width: attention and feed-forward."""

BLOCK_KEPT = 24
"""Values that autograd keeps of a block for each token, in widths."""

BLOCK_HELD = 12
"""Values of a block that are in memory at once without gradients, for each token, in widths."""

UNET_KEPT, UNET_KEPT_OF_LAYER = 48, 76
"""Values that autograd keeps of a UNet at each resolution, for each position and channel: in any case, and for each layer of a block."""

UNET_HELD = 16
"""Values of a UNet that are in memory at once without gradients, for each position and channel."""

DECODER_MATRICES = 30.0 / 9.0
"""Parameters of a decoder's layer that a position is multiplied with, in squares of the channels and values of a kernel."""

DECODER_HELD = 8
"""Values of a decoder that are in memory at once, for each pixel and channel of the widest picture."""

STATE_HELD = 8
"""Float32 values that an engine keeps for each number of a running picture's state: states around a step, noise and predictions."""

FIX = "Download the whole pipeline, or name a folder of one (pipeline.save_pretrained)"


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers of a network that compute at one resolution. `tokens`: positions. `matrices`: parameters that each is multiplied
    with, in all layers. `columns`: of attention, in all layers. `kept`: values that autograd keeps of each. `held`: values of each
    that are in memory at once without gradients."""

    tokens: int
    matrices: float
    columns: float
    kept: float
    held: float

    @property
    def ops(self) -> float:
        """Operations of a forward pass of one picture."""
        return 2 * self.tokens * self.matrices + 4 * self.tokens * self.tokens * self.columns


@dataclass(frozen=True, slots=True)
class DenoiserShape:
    """Sizes of a pipeline. `parameters`: of the network. `encoders`, `decoder`: parameters of the text encoders and of the VAE.
    `layers`: of the network. `tokens`: image tokens of a picture. `text_tokens`: of a prompt's embeddings. `passes`: of the network
    for a step. `state`: numbers of a picture's state. `decoding`: operations to decode a picture. `drawing`: values that are in
    memory meanwhile. `trained`: trained steps of a picture, on average. `group_bytes`: of the blobs of a group."""

    parameters: int
    encoders: int
    decoder: int
    layers: int
    stages: tuple[Stage, ...]
    tokens: int
    text_tokens: int
    passes: int
    state: int
    height: int
    width: int
    decoding: float
    drawing: float
    trained: float
    group_bytes: int

    heads = kv_heads = 1
    """An engine does not span several slots."""
    tower = None
    """There is no vision tower."""

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer, on average."""
        return self.parameters // self.layers

    @property
    def served_parameters(self) -> int:
        """Parameters of all parts, which engines hold."""
        return self.parameters + self.encoders + self.decoder

    @property
    def context(self) -> int:
        """Maximum tokens of a prompt."""
        return self.text_tokens

    @property
    def step_tokens(self) -> int:
        """Image tokens that a trained step of a picture counts for."""
        return step_tokens(self.tokens, self.passes)

    @property
    def pass_ops(self) -> float:
        """Operations of a forward pass of one picture."""
        return sum(stage.ops for stage in self.stages)

    @property
    def kept_numbers(self) -> float:
        """Values that autograd keeps of one trained step."""
        return sum(stage.tokens * stage.kept for stage in self.stages)

    @property
    def held_numbers(self) -> float:
        """Values of one running picture that are in memory at once, while it is denoised or decoded."""
        return max(max(stage.tokens * stage.held for stage in self.stages), self.drawing)

    def frozen_parameters(self, parts: Collection[str]) -> int:
        """Parameters of frozen parts: the network has none."""
        return 0

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of adapters: the network has none."""
        return 0


def is_pipeline(sizes: Mapping[str, Any]) -> bool:
    """Whether these are the sizes of a pipeline, and not the configuration of a language model."""
    return sizes.get("model_type") == PIPELINE


def read_pipeline(sizes: Mapping[str, Any], *, where: str) -> DenoiserShape:
    """Read the shape of a pipeline from its sizes. Raises DataError if some are missing or not numbers."""
    read = _Sizes(sizes, where)
    tokens, text = read.size("tokens"), read.size("text_tokens")
    stages = tuple(_unet(read)) if "network.channels" in sizes else (_transformer(read, tokens + text),)
    layers = (
        4 * len(stages) * read.size("network.layers_per_block") if len(stages) > 1 else read.size("network.layers", 1)
    )
    height, width = read.size("height"), read.size("width")
    decoding = drawing = 0.0
    if "vae.channels" in sizes:
        channels, deep = read.sizes("vae.channels"), read.size("vae.layers")
        squares = sum(one * one * (height >> level) * (width >> level) for level, one in enumerate(channels))
        decoding = 2 * deep * DECODER_MATRICES * read.size("vae.taps") * squares
        drawing = float(DECODER_HELD * channels[0] * height * width)
    return DenoiserShape(
        parameters=read.parameters("network", "network that denoises"),
        encoders=read.parameters("text", "text encoders"),
        decoder=read.parameters("vae", "VAE"),
        layers=layers,
        stages=stages,
        tokens=tokens,
        text_tokens=text,
        passes=read.size("passes"),
        state=read.size("state"),
        height=height,
        width=width,
        decoding=decoding,
        drawing=drawing,
        trained=read.number("trained_steps"),
        group_bytes=read.size("group_bytes"),
    )


def _transformer(read: _Sizes, tokens: int) -> Stage:
    """All blocks of a transformer, in which image and text tokens attend to each other."""
    layers, width = read.size("network.layers"), read.size("network.width")
    return Stage(
        tokens,
        matrices=BLOCK_MATRICES * layers * width * width,
        columns=layers * width,
        kept=BLOCK_KEPT * layers * width,
        held=BLOCK_HELD * width,
    )


def _unet(read: _Sizes) -> Iterator[Stage]:
    """The resolutions of a UNet. A block on the way down has `layers_per_block` layers, and one on the way up one more, with twice
    the channels as input. Convolutions have kernels of 3 x 3; attention is followed by a gated feed-forward layer."""
    deep, tokens = read.size("network.layers_per_block"), read.size("tokens")
    attends = read.sizes("network.attends")
    for level, (channels, attending) in enumerate(zip(read.sizes("network.channels"), attends, strict=True)):
        convolutions = 18 * deep + 27 * (deep + 1)
        blocks = (2 * deep + 1) * attending
        yield Stage(
            max(1, tokens >> 2 * level),
            matrices=channels * channels * (convolutions + 20 * blocks),
            columns=channels * blocks,
            kept=channels * (UNET_KEPT + UNET_KEPT_OF_LAYER * deep),
            held=UNET_HELD * channels,
        )


MOST = 1 << 50
"""Largest size that is accepted, so that products of a few sizes stay printable."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Reads sizes of a pipeline. `where`: the pipeline, for error messages."""

    tree: Mapping[str, Any]
    where: str

    def size(self, name: str, least: int = 1) -> int:
        value = self.tree.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            said = "is missing" if value is None else f"is {str(value)[:40]!r}"
            raise DataError(f"the size {name} of the pipeline {said}", where=self.where, fix=FIX)
        return value

    def number(self, name: str) -> float:
        value = self.tree.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST:
            raise DataError(f"the number {name} of the pipeline is {str(value)[:40]!r}", where=self.where, fix=FIX)
        return float(value)

    def sizes(self, name: str) -> tuple[int, ...]:
        value = str(self.tree.get(name, ""))
        if not value or not all(one.isdecimal() and len(one) < 8 for one in value.split(",")):
            raise DataError(f"the sizes {name} of the pipeline are {value[:40]!r}", where=self.where, fix=FIX)
        return tuple(map(int, value.split(",")))

    def parameters(self, part: str, words: str) -> int:
        """Parameters of a part. Raises DataError if its weights were not there when sizes were read."""
        if f"{part}.parameters" not in self.tree:
            raise DataError(
                f"the size of the {words} is not known, because the weights are not on this machine",
                where=self.where,
                fix=FIX,
            )
        return self.size(f"{part}.parameters", 0)

"""Emulated generation of pictures: requests as the diffusers engine takes them, and answers with random arrays of the right sizes.

A picture is a sequence whose tokens are its denoising steps. All running pictures take a step together, whose duration is that of
`law.TimingModel`. The arrays are random bytes: states, embeddings, and a PNG file of random pixels, so that everything after the
engine stores, transfers and opens what it would from a real one. The same request gets the same arrays on every engine.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gcore.engines.emulated.law import EngineTimingModel, TimingModel, named_generator
from gcore.engines.emulated.responses import MEAN_LOGPROB, EmulatedResponse
from gcore.engines.request import Finish, OutputSpan, spans_of
from gcore.engines.serving.denoising import DenoisingRequest, PictureArrays
from gcore.models.diffusion.files import PipelineFiles
from gcore.models.diffusion.sizes import text_tokens
from gcore.models.diffusion.windows import kept_states

EMBEDDED_BYTES = 4
"""Bytes of a number of the embeddings."""


@dataclass(frozen=True)
class EmulatedPipeline:
    """What requests for pictures are checked against: the files of a pipeline, and the guidance of the job. `side`: height and
    width of the job's pictures. Levels are even, because no scheduler is loaded."""

    files: PipelineFiles
    guidance: float
    side: tuple[int, int]
    condition_bytes: int = field(init=False)
    """Size of a prompt's embeddings."""

    def __post_init__(self) -> None:
        numbers = (self.files.condition_width or 1) * text_tokens(self.files) * self.files.passes(self.guidance)
        object.__setattr__(self, "condition_bytes", EMBEDDED_BYTES * numbers)

    @staticmethod
    def read(folder: Path, guidance: float, height: int | None, width: int | None) -> EmulatedPipeline:
        """Read a pipeline's folder. `height`, `width`: of the job's pictures; None: the pipeline's. Raises DataError."""
        files = PipelineFiles.read(folder)
        return EmulatedPipeline(files, guidance, files.size(height, width))

    def timing(self, law: TimingModel) -> EngineTimingModel:
        """The parameters that differ between kinds of engines, for one that generates the job's pictures."""
        tokens = self.files.tokens(self.files.state_shape(*self.side))
        return law.of_pictures(tokens, self.files.passes(self.guidance))

    def levels(self, steps: int, shape: tuple[int, int, int]) -> tuple[float, ...]:
        """Even levels from 1 to 0."""
        return tuple(1 - index / steps for index in range(steps + 1))

    def tokens(self, prompt: str) -> tuple[int, ...]:
        """A token for each word. No tokenizer is loaded."""
        return tuple(zlib.crc32(word.encode()) >> 1 for word in prompt.split())

    def response(self, request: DenoisingRequest) -> EmulatedResponse:
        """The denoising steps of a picture as the tokens of a response, with random log-probabilities."""
        steps = len(request.levels) - 1
        drawn = named_generator("steps", request.seed, request.noise_seed, request.text)
        logprobs = MEAN_LOGPROB * drawn.standard_exponential(steps)
        return EmulatedResponse(tuple(range(steps)), tuple(map(float, logprobs)), Finish("stop"), restarts=True)

    def arrays(self, request: DenoisingRequest) -> PictureArrays:
        """Random arrays of a picture, with the sizes of real ones."""
        drawn = named_generator("picture", request.seed, request.noise_seed, request.text)
        states = len(kept_states(request.trained)) or 1
        channels, rows, columns = request.shape
        height, width = rows * self.files.scale, columns * self.files.scale
        count = states * channels * rows * columns if request.returns_states else 0
        condition = named_generator("embeds", request.text, request.negative).bytes(self.condition_bytes)
        return PictureArrays(
            states=drawn.standard_normal(count, dtype=np.float32).tobytes(),
            shape=(states, channels, rows, columns),
            picture=png_of(drawn.bytes(3 * height * width), height, width),
            height=height,
            width=width,
            condition=condition,
        )


def trained_spans(request: DenoisingRequest, spans: Sequence[OutputSpan], version: str) -> tuple[OutputSpan, ...]:
    """Which version computed which trained steps, from that of all steps; one empty span of `version` if there are none."""
    return spans_of((one.version for step in request.trained for one in spans if one.start <= step < one.end), version)


def png_of(pixels: bytes, height: int, width: int) -> bytes:
    """The PNG file of RGB pixels, without compression, which random pixels do not have."""
    row = 3 * width
    raw = b"".join(b"\0" + pixels[start : start + row] for start in range(0, row * height, row))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw, 0)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body

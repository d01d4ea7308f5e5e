"""Requests for pictures of a denoising policy: which steps are random and trained, seeds, sizes, and costs.

All of it is a function of the spec, the pipeline's files, the training step and the prompt, so that every controller decides
the same, also after a restart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from gcore.config.diffusion import FORWARD_LOSSES, DenoisingSpec
from gcore.config.rollout import picture_bytes
from gcore.config.spec import JobSpec
from gcore.errors import EngineError
from gcore.ledger.records.cluster import ConfigValue
from gcore.models.diffusion.files import TEXT_WIDTHS, PipelineFiles
from gcore.models.diffusion.sizes import pipeline_sizes, step_tokens
from gcore.models.diffusion.windows import WindowSchedule, kept_states
from gcore.rollout.api import DenoisingParams
from gcore.types import DenoisingTrajectory, Group, Sample, VersionSpan


@dataclass(frozen=True)
class PictureRequests:
    """Makes the parameters of requests for pictures. `files`: of the policy's pipeline on this node."""

    spec: JobSpec
    files: PipelineFiles

    @staticmethod
    def of(spec: JobSpec, folder: Path) -> PictureRequests | None:
        """Those of a job whose model is in `folder`; None if the policy writes texts. Raises DataError if the pipeline cannot
        be read."""
        return None if spec.rollout.diffusion is None else PictureRequests(spec, PipelineFiles.read(folder))

    @cached_property
    def diffusion(self) -> DenoisingSpec:
        """How pictures are generated."""
        assert self.spec.rollout.diffusion is not None
        return self.spec.rollout.diffusion

    @cached_property
    def _windows(self) -> WindowSchedule | None:
        window = self.diffusion.window
        if window is None:
            return None
        return WindowSchedule(
            size=window.size,
            steps=len(self._trainable),
            stay=window.stay,
            strategy=window.strategy,
            stride=window.stride,
            roll_back=window.roll_back,
            start=window.start,
            least_stay=window.least_stay,
            decay_after=window.decay_after,
            decay_rate=window.decay_rate,
            seed=self.spec.seed,
        )

    @cached_property
    def _trainable(self) -> range:
        return self.files.trainable_steps(self.diffusion.steps)

    @cached_property
    def size(self) -> tuple[int, int]:
        """Height and width of pictures in pixels."""
        return self.files.size(self.diffusion.height, self.diffusion.width)

    @property
    def _adds_noise(self) -> bool:
        """Whether training adds noise to finished pictures, so that no step of the sampler is trained."""
        return self.spec.train.loss in FORWARD_LOSSES

    def random_steps(self, step: int) -> range:
        """The random denoising steps in training step `step`, which counts from 0."""
        return self._trainable if self._windows is None else self._windows.window(step)

    def trained_steps(self, step: int, seed: int) -> tuple[int, ...]:
        """The trained denoising steps (or noise levels) of a prompt, ascending. `seed`: of the prompt's group."""
        steps = self.random_steps(step)
        share = self.diffusion.trained_share
        if share == 1:
            return tuple(steps)
        count = max(1, round(share * len(steps)))
        drawn = np.random.default_rng(seed).choice(np.array(steps), count, replace=False)
        return tuple(sorted(drawn.tolist()))

    def params(self, text: str, step: int, seeds: Sequence[int]) -> DenoisingParams:
        """The parameters of a request for the pictures of a group. `step`: the number of training steps before. `seeds`: of the
        samples. Raises EngineError if two are equal: their pictures would be."""
        if len(set(seeds)) < len(seeds):
            raise EngineError("two pictures of a group have equal noise", fix="The prompt is sampled again")
        forward, diffusion = self._adds_noise, self.diffusion
        height, width = self.size
        return DenoisingParams(
            text=text,
            steps=diffusion.steps,
            height=height,
            width=width,
            guidance=diffusion.guidance,
            negative=diffusion.negative,
            kind=diffusion.sampler,
            noise_level=diffusion.noise_level,
            random_steps=None if forward else tuple(self.random_steps(step)),
            kept_steps=None if forward or diffusion.trained_share == 1 else self.trained_steps(step, seeds[0]),
            constants=diffusion.constants,
            noise_seeds=(seeds[0],) * len(seeds) if diffusion.same_noise else (),
        )

    def evaluation(self, text: str) -> DenoisingParams:
        """The parameters of a request for a picture that is evaluated: by the ODE, without arrays for training."""
        diffusion = self.diffusion
        height, width = self.size
        return DenoisingParams(
            text=text,
            steps=diffusion.eval_steps or diffusion.steps,
            height=height,
            width=width,
            guidance=diffusion.guidance,
            negative=diffusion.negative,
            kind="ode",
            returns_states=False,
            averaged=self.spec.train.averages,
        )

    def finished(self, samples: Sequence[Sample], step: int, seeds: Sequence[int]) -> tuple[Sample, ...]:
        """The pictures of an engine with their trained noise levels, for losses that add noise to finished pictures."""
        if not self._adds_noise:
            return tuple(samples)
        steps = self.trained_steps(step, seeds[0])
        found = []
        for sample in samples:
            assert isinstance(sample.output, DenoisingTrajectory)
            spans = (VersionSpan(sample.spans[-1].version, 0, len(steps)),)
            output = sample.output._replace(steps=steps, logprobs=(0.0,) * len(steps), spans=spans)
            found.append(replace(sample, output=output))
        return tuple(found)

    @cached_property
    def state_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a picture's states."""
        return self.files.state_shape(*self.size)

    @cached_property
    def step_tokens(self) -> int:
        """Image tokens that a trained step of a picture counts for."""
        return step_tokens(self.files.tokens(self.state_shape), self.files.passes(self.diffusion.guidance))

    @cached_property
    def group_bytes(self) -> int:
        """Upper bound for the bytes of the blobs of a group: states, pictures and embeddings."""
        channels, rows, columns = self.state_shape
        most = max(len(kept_states(window)) for window, _ in self._places)
        states = 1 if self._adds_noise else most
        each = 4 * states * channels * rows * columns + picture_bytes(math.prod(self.size))
        numbers = self.files.passes(self.diffusion.guidance) * max(TEXT_WIDTHS.values()) * self.files.condition_width
        return self.spec.flow.samples_per_prompt * each + 4 * numbers

    @property
    def sizes(self) -> dict[str, ConfigValue]:
        """The sizes of the pipeline and of the job's pictures by which memory and times are planned. Raises DataError."""
        own = {"trained_steps": self.mean_trained_steps, "group_bytes": self.group_bytes}
        return pipeline_sizes(self.files, self.diffusion) | own

    @cached_property
    def mean_trained_steps(self) -> float:
        """Trained steps of a picture, on average over the training steps in which the window moves through all its places."""
        share = self.diffusion.trained_share
        counts = [(max(1, round(share * len(window))), stay) for window, stay in self._places]
        return sum(count * stay for count, stay in counts) / sum(stay for _, stay in counts)

    @cached_property
    def _places(self) -> tuple[tuple[range, int], ...]:
        """The random steps of each place of the window, and for how many training steps it stays there."""
        return ((self._trainable, 1),) if self._windows is None else self._windows.places()


def why_untrainable(group: Group) -> str | None:
    """Return why ranks could not train a group of pictures, which a flow returned; None if they can."""
    for index, sample in enumerate(group.samples):
        output = sample.output
        if not isinstance(output, DenoisingTrajectory):
            return f"the flow returned a text (sample {index}), but the policy generates pictures"
        if not output.steps or len(output.logprobs) != len(output.steps) or not output.spans:
            return (
                f"the flow returned a picture (sample {index}) with {len(output.steps)} trained steps, {len(output.logprobs)} "
                f"log-probabilities and {len(output.spans)} version spans; it needs steps, one log-probability for each, and spans"
            )
        kinds = sorted(medium.kind for medium in output.media)
        if kinds != ["decoded", "embeds", "trajectory"]:
            return f"the flow returned a picture (sample {index}) with the blobs {kinds} instead of states, picture and embeddings"
    return None

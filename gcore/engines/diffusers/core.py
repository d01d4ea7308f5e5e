"""Engine core of a pipeline: denoises all running samples together, one step a cycle, each at its own noise level.

Samples with equal shapes share a pass of the network, also if they began at different times. A sample's noise comes from
a generator of its own, so what it draws does not depend on the samples beside it: first the initial state, then one draw
for each random step. New weights take effect between two steps; `spans` of an output say which version computed which of
its trained steps.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gcore.engines.request import ABORTED, Finish, spans_of
from gcore.engines.serving.denoising import DenoisingOutput, DenoisingRequest, DenoisingResult
from gcore.engines.torch.engine import EngineBase
from gcore.engines.torch.kv_cache import CacheShape
from gcore.engines.torch.model import StagedWeights, apply_weights, explain_memory_error, stage_weights
from gcore.models.adapter_checks import BaseFiles
from gcore.models.diffusion.networks import Condition, condition_shape
from gcore.models.diffusion.pipeline import ImagePipeline
from gcore.models.diffusion.windows import kept_states
from gcore.models.layout import AVERAGE_FOLDER
from gcore.system.memory import is_out_of_memory, release_free_memory

ENGINE_NAME = "gcore diffusers engine"
"""Name of the engine in `/server_info`."""

MEMORY_FIX = "Lower rollout.batch_slots, or the pictures' height and width"


@dataclass(slots=True)
class _Row:
    """A running sample. `index`: the next step."""

    task: DenoisingRequest
    condition: Condition
    negative: Condition | None
    state: Tensor
    generator: torch.Generator
    index: int = 0
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    """By trained step: the version that computed it."""
    states: dict[int, Tensor] = field(default_factory=dict)

    @property
    def key(self) -> Any:
        """Rows with equal keys can share a pass of the network."""
        negative = None if self.negative is None else condition_shape(self.negative)
        return self.task.averaged, self.state.shape, condition_shape(self.condition), negative

    @property
    def step(self) -> Any:
        """Rows with equal values take the same step."""
        task = self.task
        random = self.index in task.steps
        return task.levels, self.index, task.kind if random else "ode", task.noise_level, task.constants


@dataclass(slots=True)
class ServedPipeline:
    """The network as `EngineBase` loads and offloads it. `folder`: of the network, whose weights are updated."""

    module: Any
    folder: Path
    shape: CacheShape
    base: BaseFiles | None = None
    asleep: bool = False


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StagedAverages(StagedWeights):
    """Weights, and the average of the trained weights beside them."""

    average: StagedWeights


class DiffusionCore(EngineBase[DenoisingRequest, DenoisingOutput]):
    """Engine core of a pipeline. `slots`: maximum number of running samples."""

    memory_fix = MEMORY_FIX
    takes_pictures = False

    def __init__(self, pipeline: ImagePipeline, *, slots: int, version: str, average: bool = False) -> None:
        """`average`: hold an average of the weights beside them, which a weight update brings too."""
        network = pipeline.network
        served = ServedPipeline(network.module, pipeline.files.network, CacheShape((), network.dtype, network.device))
        super().__init__(served, version=version)
        self.pipeline = pipeline
        self.slots = slots
        self._average = replace(served, module=copy.deepcopy(network.module)) if average else None
        self._waiting: deque[DenoisingRequest] = deque()
        self._rows: list[_Row] = []

    @property
    def averages(self) -> bool:
        """Whether requests may name the average of the weights."""
        return self._average is not None

    def stage_weights(self, folder: Path) -> StagedWeights:
        """Load a folder's weights, and the average beside them. See `EngineBase.stage_weights`."""
        staged = super().stage_weights(folder)
        if self._average is None or not (folder / AVERAGE_FOLDER).is_dir():
            return staged
        return StagedAverages(staged.tensors, average=stage_weights(self._average, folder / AVERAGE_FOLDER))

    def _apply_weights(self, staged: StagedWeights) -> None:
        super()._apply_weights(staged)
        if self._average is not None:
            # Weights that come without an average, such as those of the initial model, are their own.
            apply_weights(self._average, staged.average if isinstance(staged, StagedAverages) else staged)

    @property
    def facts(self) -> dict[str, Any]:
        """Name of the engine, and what a trainer must agree with: scheduler and guidance."""
        return {
            "engine": ENGINE_NAME,
            "scheduler": self.pipeline.schedule.fingerprint,
            "guidance": self.pipeline.network.guidance,
        }

    @property
    def rows(self) -> int:
        """Maximum number of samples that run at once."""
        return self.slots

    @property
    def running(self) -> int:
        """Number of running samples."""
        return len(self._rows)

    @property
    def waiting(self) -> int:
        """Number of waiting samples."""
        return len(self._waiting)

    def submit(self, tasks: list[DenoisingRequest]) -> None:
        """Queue checked requests."""
        self._waiting.extend(tasks)

    @torch.inference_mode()
    def cycle(self) -> None:
        """Admit waiting samples, take one step of every running sample, and finish those that have taken their last.

        Raises EngineError if memory runs out.
        """
        with explain_memory_error("while it was denoising", MEMORY_FIX):
            while self._waiting and len(self._rows) < self.slots:
                self._rows.append(self._begin(self._waiting[0]))
                self._waiting.popleft()
            for rows in _grouped(self._rows, lambda row: row.key):
                self._advance(rows)
            done = [row for row in self._rows if row.index == len(row.task.levels) - 1]
            for rows in _grouped(done, lambda row: row.state.shape):
                self._finish(rows)
        if done:
            ended = {row.task.number for row in done}
            self._rows = [row for row in self._rows if row.task.number not in ended]

    def _begin(self, task: DenoisingRequest) -> _Row:
        noise = torch.Generator().manual_seed(task.noise_seed)
        state = torch.randn(task.shape, generator=noise).to(self.pipeline.network.device)
        # The same seed again would give the first step the noise of the initial state.
        generator = noise if task.seed == task.noise_seed else torch.Generator().manual_seed(task.seed)
        negative = self.pipeline.condition(task.negative) if self.pipeline.network.needs_negative else None
        return _Row(task, self.pipeline.condition(task.text), negative, state, generator)

    def _advance(self, rows: Sequence[_Row]) -> None:
        """Take the next step of rows that share a pass."""
        device = self.pipeline.network.device
        states = torch.stack([row.state for row in rows])
        levels = torch.tensor([row.task.levels[row.index] for row in rows], dtype=torch.float32, device=device)
        negatives = [row.negative for row in rows if row.negative is not None]
        network = self.pipeline.network
        if rows[0].task.averaged and self._average is not None:
            network = network.calling(self._average.module)
        predictions = network.predict(states, levels, [row.condition for row in rows], negatives)
        self.generated_tokens += len(rows)
        for alike in _grouped(list(range(len(rows))), lambda place: rows[place].step):
            self._move([rows[place] for place in alike], states[alike], predictions[alike])

    def _move(self, rows: Sequence[_Row], states: Tensor, predictions: Tensor) -> None:
        """Put rows that take the same step into their next states."""
        levels, index, kind, noise_level, constants = rows[0].step
        step = self.pipeline.schedule.step(kind, states, predictions, levels, index, noise_level)
        if step.std == 0:
            for row, state in zip(rows, step.mean, strict=True):
                row.state, row.index = state, index + 1
            return
        noise = torch.stack([torch.randn(row.task.shape, generator=row.generator) for row in rows])
        following = step.sample(noise.to(states.device))
        logprobs: list[float] = step.log_prob(following, constants=constants).tolist()
        for row, before, after, logprob in zip(rows, states, following, logprobs, strict=True):
            if index in row.task.trained:
                row.logprobs.append(logprob)
                row.versions.append(self.version)
                if row.task.returns_states:
                    row.states[index], row.states[index + 1] = before, after
            row.state, row.index = after, index + 1

    def _finish(self, rows: Sequence[_Row]) -> None:
        states = torch.stack([row.state for row in rows])
        pictures = self.pipeline.decode(states)
        for row, state, picture in zip(rows, states, pictures, strict=True):
            self.outbox.append(self._output(row, state, picture))

    def _output(self, row: _Row, state: Tensor, picture: Tensor) -> DenoisingOutput:
        if not (torch.isfinite(state).all() and torch.isfinite(torch.tensor(row.logprobs)).all()):
            broken = "the network's predictions are not finite; lower train.learning_rate, or check the weights of model.path"
            return DenoisingOutput(row.task.number, self.version, Finish("abort", message=broken), broken=broken)
        kept = [row.states[number] for number in kept_states(row.task.trained)] if row.states else [state]
        spans, states = spans_of(row.versions, self.version), torch.stack(kept).cpu()
        result = DenoisingResult(tuple(row.logprobs), spans, states, picture, row.condition, row.negative)
        return DenoisingOutput(row.task.number, self.version, Finish("stop"), result)

    def abort(self, unwanted: Callable[[DenoisingRequest], bool], message: str = ABORTED) -> None:
        """End the requests for which `unwanted` is true. They have no picture."""
        ending = Finish("abort", message=message)
        gone = [row.task for row in self._rows if unwanted(row.task)]
        gone += [task for task in self._waiting if unwanted(task)]
        numbers = {task.number for task in gone}
        self._rows = [row for row in self._rows if row.task.number not in numbers]
        self._waiting = deque(task for task in self._waiting if task.number not in numbers)
        self.outbox += [DenoisingOutput(task.number, self.version, ending) for task in gone]

    def _retract(self) -> None:
        """Put running samples back into the queue. They begin again, with the same noise."""
        self._waiting.extendleft(row.task for row in reversed(self._rows))
        self._rows = []


def _grouped(items: Sequence[Any], key: Callable[[Any], Any]) -> list[list[Any]]:
    """Items with equal keys together, in order of their first."""
    found: dict[Any, list[Any]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.values())


def measure_slots(core: DiffusionCore, shape: tuple[int, int, int], free: int, most: int) -> int:
    """How many samples of `shape` fit into `free` bytes at once, at most `most` and at least 1, by the peak memory of
    passes with 1 and with 3 samples. On a CPU the measure is rough: of the process, in pages. Where the system does not
    tell it, `most`.
    """
    device = core.pipeline.network.device
    try:
        one = _peak_bytes(device, partial(_try, core, shape, 1))
        three = _peak_bytes(device, partial(_try, core, shape, 3))
    except OSError:
        return most
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return 1  # if not even one fits, its first request reports it
    each = (three - one) // 2
    return most if each <= 0 else max(1, min(most, int(free * SHARE) // each))


SHARE = 0.8
"""Share of the free memory that running samples may use."""


@torch.inference_mode()
def _try(core: DiffusionCore, shape: tuple[int, int, int], count: int) -> None:
    """One pass and one decoding of `count` samples."""
    pipeline, network = core.pipeline, core.pipeline.network
    condition = pipeline.condition("")
    states = torch.zeros(count, *shape, device=network.device)
    levels = torch.full((count,), pipeline.levels(2, shape)[0], device=network.device)
    negatives = [condition] * count if network.needs_negative else []
    pipeline.decode(network.predict(states, levels, [condition] * count, negatives))


def _peak_bytes(device: torch.device, action: Callable[[], None]) -> int:
    """The peak memory in bytes, of the device or of the process, while `action` runs. Raises OSError if a CPU's system does
    not tell it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        action()
        return int(torch.cuda.max_memory_allocated(device))
    release_free_memory()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    action()
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024

"""Denoising networks of diffusers: what each family's network receives for a state, a noise level and a condition.

Engines and train ranks call the same function, so that a rank that replays a step computes what the engine computed. All
states are [batch, channels, height, width] in float32, whatever layout the network has, and all predictions are too.

- A *condition* is what the text encoders made of one prompt: tensors by name, each with a leading dimension of 1. Engines
  compute it once, alone (in no batch), and send it with the sample; ranks need no text encoder.
- A *level* is σ of a flow-matching schedule, or the timestep of a DDIM schedule.
- Guidance (`guidance` above 1) needs the condition of the negative prompt and a second pass, whose prediction has no
  gradient. Flux and Qwen-Image networks with guidance embeddings take the number itself instead (`is_distilled`).
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from gcore.errors import DataError, one_line
from gcore.models.checks import check_loaded
from gcore.models.diffusion.files import NETWORK_FOLDERS, pipeline_parts

Condition = Mapping[str, Tensor]
"""Embeddings of one prompt: tensors [1, ...] by name."""

Process = Literal["flow", "ddim"]
"""How states are noised: linearly between data and noise, or by the variance-preserving process of DDPM."""


class DenoisingNetwork(ABC):
    """A network of diffusers, of one family. `module`: the network. `guidance`: of the sampler; also of the replay."""

    process: ClassVar[Process] = "flow"

    def __init__(self, module: Any, guidance: float, call: Callable[..., Any] | None = None) -> None:
        """`call`: what computes a pass, if that is an engine around the module."""
        self.module = module
        self.guidance = guidance
        self._call = module if call is None else call
        self.is_distilled = bool(module.config.get("guidance_embeds", False))

    def calling(self, call: Callable[..., Any]) -> Self:
        """The same network, whose passes `call` computes: an engine around the module, or another module of its kind."""
        return type(self)(self.module, self.guidance, call)

    def blank_condition(self) -> Condition:
        """A condition of zeros, in host memory."""
        config = self.module.config
        width = config.get("joint_attention_dim") or config.get("cross_attention_dim")
        found = {"embeds": torch.zeros(1, 2, int(width))}
        if pooled := config.get("pooled_projection_dim"):
            found["pooled"] = torch.zeros(1, int(pooled))
        return found

    @property
    def needs_negative(self) -> bool:
        """Whether a prediction needs the condition of the negative prompt, and a second pass."""
        return self.guidance > 1 and not self.is_distilled

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        found: torch.device = next(self.module.parameters()).device
        return found

    def predict(
        self,
        states: Tensor,
        levels: Tensor,
        conditions: Sequence[Condition],
        negatives: Sequence[Condition] = (),
    ) -> Tensor:
        """The guided velocity (or noise) of each state [batch, channels, height, width], in float32.

        `states` [batch, channels, height, width], float32. `levels` [batch]: σ, or the timestep. `conditions`,
        `negatives`: of each state's prompt and negative prompt, all of equal shapes (`condition_shape`). Raises ValueError.
        """
        given = stack_conditions(conditions)
        found = self._run(states, levels, given).float()
        if not self.needs_negative:
            return found
        if len(negatives) != len(states):
            raise ValueError(f"guidance of {self.guidance} needs the condition of a negative prompt for each state")
        with torch.no_grad():
            without = self._run(states, levels, stack_conditions(negatives)).float()
        return self._guide(found, without)

    def _guide(self, found: Tensor, without: Tensor) -> Tensor:
        return without + self.guidance * (found - without)

    def _distilled(self, states: Tensor) -> Tensor | None:
        """The guidance as an input [batch] of the network; None: it takes none."""
        return torch.full((len(states),), self.guidance, device=states.device) if self.is_distilled else None

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights, in which the network computes."""
        found: torch.dtype = next(self.module.parameters()).dtype
        return found

    @abstractmethod
    def _run(self, states: Tensor, levels: Tensor, condition: Condition) -> Tensor:
        """One pass of the network; the prediction has the shape of `states`."""


class Sd3Network(DenoisingNetwork):
    """The transformer of Stable Diffusion 3 and 3.5."""

    def _run(self, states: Tensor, levels: Tensor, condition: Condition) -> Tensor:
        found: Tensor = self._call(
            hidden_states=states.to(self.dtype),
            timestep=levels * 1000,
            encoder_hidden_states=condition["embeds"],
            pooled_projections=condition["pooled"],
            return_dict=False,
        )[0]
        return found


class FluxNetwork(DenoisingNetwork):
    """The transformer of Flux. It gets squares of 2 x 2 latents as tokens."""

    def _run(self, states: Tensor, levels: Tensor, condition: Condition) -> Tensor:
        rows, columns = states.shape[-2] // 2, states.shape[-1] // 2
        places = torch.zeros(rows, columns, 3, device=states.device)
        places[..., 1] += torch.arange(rows, device=states.device)[:, None]
        places[..., 2] += torch.arange(columns, device=states.device)
        found: Tensor = self._call(
            hidden_states=pack_squares(states).to(self.dtype),
            timestep=levels,
            guidance=self._distilled(states),
            pooled_projections=condition["pooled"],
            encoder_hidden_states=condition["embeds"],
            txt_ids=torch.zeros(condition["embeds"].shape[1], 3, device=states.device),
            img_ids=places.reshape(-1, 3),
            return_dict=False,
        )[0]
        return unpack_squares(found, rows, columns)


class QwenImageNetwork(FluxNetwork):
    """The transformer of Qwen-Image. Its guided velocity has the length of the conditional one, by token."""

    def _run(self, states: Tensor, levels: Tensor, condition: Condition) -> Tensor:
        rows, columns = states.shape[-2] // 2, states.shape[-1] // 2
        found: Tensor = self._call(
            hidden_states=pack_squares(states).to(self.dtype),
            timestep=levels,
            guidance=self._distilled(states),
            encoder_hidden_states=condition["embeds"],
            encoder_hidden_states_mask=condition.get("mask"),
            img_shapes=[[(1, rows, columns)]] * len(states),
            return_dict=False,
        )[0]
        return unpack_squares(found, rows, columns)

    def _guide(self, found: Tensor, without: Tensor) -> Tensor:
        rows, columns = found.shape[-2] // 2, found.shape[-1] // 2
        conditional = pack_squares(found)
        guided = pack_squares(super()._guide(found, without))
        lengths = conditional.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)
        return unpack_squares(guided * lengths, rows, columns)


class UNetNetwork(DenoisingNetwork):
    """The UNet of Stable Diffusion 1 and 2, which predicts noise or velocity at a whole timestep (DDPO)."""

    process = "ddim"

    def _run(self, states: Tensor, levels: Tensor, condition: Condition) -> Tensor:
        found: Tensor = self._call(
            states.to(self.dtype), levels.long(), encoder_hidden_states=condition["embeds"], return_dict=False
        )[0]
        return found


NETWORKS: Mapping[str, type[DenoisingNetwork]] = {
    "StableDiffusion3Pipeline": Sd3Network,
    "FluxPipeline": FluxNetwork,
    "QwenImagePipeline": QwenImageNetwork,
    "StableDiffusionPipeline": UNetNetwork,
}
"""The networks by the class of their pipeline."""


def load_part(folder: Path, part: str, dtype: torch.dtype) -> Any:
    """Load a network of a pipeline's folder, such as `transformer` or `text_encoder`, with the class that the pipeline
    names. Raises DataError for one that cannot be loaded completely."""
    library, name = pipeline_parts(folder)[part]
    return _load(library, name, folder / part, dtype)


def load_network_module(pipeline: Path, folder: Path) -> nn.Module:
    """Load the network that denoises from `folder`, which may be a checkpoint's, in float32 in host memory, with the class that
    the folder `pipeline` names. Raises DataError."""
    parts = pipeline_parts(pipeline)
    library, name = parts[NETWORK_FOLDERS[parts["_class_name"]]]
    found: nn.Module = _load(library, name, folder, torch.float32)
    return found


def _load(library: str, name: str, folder: Path, dtype: torch.dtype) -> Any:
    """Load a module of class `name`, in evaluation mode. Raises DataError for one that cannot be loaded completely."""
    try:
        module, report = getattr(importlib.import_module(library), name).from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, AttributeError, RuntimeError, TypeError, ImportError) as error:
        raise DataError(
            f"cannot load a part of this pipeline ({one_line(error)})",
            where=str(folder),
            fix="Check the folder's files",
        ) from error
    check_loaded(report["missing_keys"], folder)
    # Evaluation mode also in training: with dropout, a replayed step would have another log-probability.
    return module.eval()


def load_network(folder: Path, *, guidance: float, dtype: torch.dtype, device: torch.device | str) -> DenoisingNetwork:
    """Load the network of a pipeline's folder. Raises DataError."""
    name = pipeline_parts(folder)["_class_name"]
    return NETWORKS[name](load_part(folder, NETWORK_FOLDERS[name], dtype).to(device), guidance)


def condition_shape(condition: Condition) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Names and shapes of a condition's tensors. Conditions with equal shapes can share a pass."""
    return tuple(sorted((name, tuple(tensor.shape[1:])) for name, tensor in condition.items()))


def stack_conditions(conditions: Sequence[Condition]) -> dict[str, Tensor]:
    """One condition for a batch: tensors [batch, ...] by name. Raises ValueError if their shapes differ."""
    shapes = {condition_shape(one) for one in conditions}
    if len(shapes) != 1:
        raise ValueError(f"conditions of a batch must have equal shapes, not {sorted(shapes)}")
    return {name: torch.cat([one[name] for one in conditions]) for name in conditions[0]}


def pack_conditions(condition: Condition, negative: Condition | None) -> bytes:
    """The conditions of a sample as a safetensors file."""
    tensors = dict(condition) | {f"{_NEGATIVE}{name}": tensor for name, tensor in (negative or {}).items()}
    found: bytes = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
    return found


def unpack_conditions(data: bytes) -> tuple[Condition, Condition | None]:
    """The conditions of the prompt and of the negative prompt from `pack_conditions`. Raises DataError."""
    try:
        tensors = load(data)
    except (ValueError, SafetensorError) as error:
        raise DataError(f"the embeddings of a prompt cannot be read ({error})") from error
    negative = {name.removeprefix(_NEGATIVE): one for name, one in tensors.items() if name.startswith(_NEGATIVE)}
    return {name: one for name, one in tensors.items() if not name.startswith(_NEGATIVE)}, negative or None


_NEGATIVE = "negative."
"""Begins the names of the negative prompt's tensors."""


def pack_squares(states: Tensor) -> Tensor:
    """[batch, channels, height, width] as tokens of 2 x 2 latents: [batch, height/2 * width/2, 4 * channels]."""
    batch, channels, height, width = states.shape
    squares = states.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return squares.reshape(batch, (height // 2) * (width // 2), channels * 4)


def unpack_squares(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `pack_squares`. `rows`, `columns`: of squares."""
    batch, _, width = tokens.shape
    squares = tokens.view(batch, rows, columns, width // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return squares.reshape(batch, width // 4, rows * 2, columns * 2)

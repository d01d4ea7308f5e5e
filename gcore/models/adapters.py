"""Low-rank adapters (LoRA) in files: their names, PEFT's configuration, and the merge with the base model.

An adapter changes a linear layer's matrix W [out, in] to W + s·B·A, with A [rank, in], B [out, rank] and
s = alpha / rank (Hu et al. 2021, LoRA, section 4.1). A checkpoint of such a training has the adapters alone, in PEFT's
layout, so that its folder is itself a PEFT adapter.

Also reads the tensors of whole models in files, and checks that they fit a model that is served.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gcore.errors import DataError, EngineError, explain_os_errors
from gcore.models.adapter_checks import DOWN, UP, BaseFiles, check_pairs, check_sample, require_adapter_config
from gcore.models.checks import weight_files
from gcore.models.dtypes import CODES, FLOATS, model_dtype
from gcore.models.layout import ADAPTER_FILE, ADAPTER_PREFIX, hash_files
from gcore.models.publisher import NamedTensor
from gcore.models.tensors import TensorShape
from gcore.system.files import check_regular_file

_OWN = ".default."
"""Part of the name of an adapter's parameter in a module that its name in a file lacks."""


def stored_name(name: str) -> str:
    """The name of a module's parameter in a file; only the parameters of adapters have another one there."""
    return f"{ADAPTER_PREFIX}{name.replace(_OWN, '.')}" if ".lora_" in name else name


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What a checkpoint says of its adapters. `base`: the folder of the base model. `targets`: ends of the names of adapted
    layers, or a regular expression of PEFT.
    """

    base: str
    rank: int
    alpha: float
    targets: tuple[str, ...]

    def encode(self) -> bytes:
        """As the `adapter_config.json` that PEFT reads."""
        fields: dict[str, Any] = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": list(self.targets),
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        return json.dumps(fields, indent=2).encode()

    @classmethod
    def read(cls, folder: Path) -> AdapterConfig:
        """Read the configuration of the adapters in `folder`. Raises DataError, also for another kind than plain LoRA."""
        found = require_adapter_config(folder)
        targets = found.get("target_modules") or ()
        return cls(
            str(found.get("base_model_name_or_path") or ""),
            found["r"],
            float(found["lora_alpha"]),
            (targets,) if isinstance(targets, str) else tuple(targets),
        )


def stored_tensors(folder: Path) -> Iterator[NamedTensor]:
    """Yield the tensors of a model folder's safetensors files, in the order of the files. Raises DataError."""
    for path in weight_files(folder):
        try:
            check_regular_file(path)
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (a safetensors file is not a mapping)
                    yield NamedTensor(name, file.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise DataError(f"cannot read the weights ({error})", where=str(path), fix="Restore the model") from error


def stored_shapes(folder: Path) -> dict[str, TensorShape]:
    """Dtype and shape of each tensor in a model folder, in the order of `stored_tensors`. Raises DataError."""
    return {name: shape for path in weight_files(folder) for name, shape in file_shapes(path).items()}


def file_shapes(path: Path) -> dict[str, TensorShape]:
    """Dtype and shape of each tensor in a safetensors file. Raises DataError."""
    try:
        check_regular_file(path)
        with safe_open(path, framework="pt") as file:
            slices = ((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118
            return {name: TensorShape(one.get_dtype(), tuple(one.get_shape())) for name, one in slices}
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot read the tensors ({error})", where=str(path), fix="Restore the file") from error


def meta_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a model folder without their values: on the meta device, floating-point ones as float32, the
    others as int32. Raises EngineError.
    """
    try:
        stored = stored_shapes(folder)
    except DataError as error:
        raise EngineError(error.what, where=error.where, fix="Repeat the weight sync") from error
    return {
        name: torch.empty(one.shape, dtype=torch.float32 if one.dtype in FLOATS else torch.int32, device="meta")
        for name, one in stored.items()
    }


def same_kind(tensor: Tensor, own: Tensor) -> bool:
    """Whether `tensor` can replace `own`: both are floating-point, or neither. Integers in place of floats would be a
    quantized encoding, which is not supported.
    """
    return tensor.is_floating_point() == own.is_floating_point()


def check_fit(
    own: Mapping[str, Tensor], new: Mapping[str, Tensor], folder: Path, optional: Collection[str] = ()
) -> None:
    """Raise EngineError if the tensors `new` of a folder cannot replace those of the model (`own`).

    `optional`: names that the folder may have or lack, because other weights are tied to them.
    """
    both = sorted(own.keys() & new.keys())
    for names, what in (
        (sorted(own.keys() - new.keys() - set(optional)), "lacks"),
        (sorted(new.keys() - own.keys() - set(optional)), "has, unknown to the model,"),
        ([name for name in both if new[name].shape != own[name].shape], "has in another shape"),
        ([name for name in both if not same_kind(new[name], own[name])], "has as integers"),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise EngineError(
                f"the weights do not fit: the folder {what} {names[0]}{more}",
                where=str(folder),
                fix="Load weights of the model that the engine serves",
            )


def merged_tensors(
    base: Path, adapters: Mapping[str, Tensor], scale: float, dtype: torch.dtype
) -> Iterator[NamedTensor]:
    """Yield the base model's tensors with the adapters added: in float32, rounded once to `dtype`.

    `adapters`: A and B by their names in files. `scale`: alpha / rank. Raises DataError if an adapter belongs to no
    matrix of the base model.
    """
    left = {name for name in adapters if name.endswith(DOWN)}
    for one in stored_tensors(base):
        down = f"{ADAPTER_PREFIX}{one.name.removesuffix('.weight')}{DOWN}"
        if down not in adapters:
            yield NamedTensor(one.name, one.tensor.to(dtype) if one.tensor.is_floating_point() else one.tensor)
            continue
        left.discard(down)
        a, b = adapters[down].float(), adapters[down.removesuffix(DOWN) + UP].float()
        if (b.shape[0], a.shape[1]) != tuple(one.tensor.shape):
            raise _foreign(base, down)
        yield NamedTensor(one.name, (one.tensor.float() + scale * (b @ a)).to(dtype))
    if left:
        raise _foreign(base, min(left))


def adapted_tensors(base: Path, folder: Path, loaded: BaseFiles | None = None) -> Iterator[NamedTensor]:
    """Yield the base model's tensors with the adapters in `folder` added, bit for bit as a train rank publishes them.

    `loaded`: the base's files when the process loaded it; None: they may have changed. Raises DataError, also if the adapters
    are of another base model.
    """
    check_sample(folder, loaded)
    config, adapters = read_adapter(folder)
    yield from merged_tensors(base, adapters, config.alpha / config.rank, model_dtype(base))
    if loaded is not None:
        check_unchanged(loaded)


def check_unchanged(base: BaseFiles) -> None:
    """Raise DataError if a base model's files changed or are missing since a process loaded it."""
    with explain_os_errors("cannot read a file of the adapters' base model", DataError, fix="Restore the model"):
        base.check()


def describe_base(folder: Path, tick: Callable[[int], None] = lambda _: None) -> bytes:
    """The content of `BASE_FILE`: the SHA-256 of each weight file of the base model. Reads all of it. `tick`: as of
    `hash_files`. Raises OSError."""
    digests = hash_files(weight_files(folder), tick)
    return json.dumps({path.name: digest for path, digest in digests.items()}, indent=2).encode()


def served_shapes(stored: Mapping[str, TensorShape], dtype: torch.dtype) -> dict[str, TensorShape]:
    """The tensors of a model's files as engines get them: floating-point ones in `dtype`, the others as they are."""
    return {
        name: TensorShape(CODES[dtype] if one.dtype in FLOATS else one.dtype, one.shape) for name, one in stored.items()
    }


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in host memory, in order."""
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def read_adapter(folder: Path) -> tuple[AdapterConfig, dict[str, Tensor]]:
    """Read an adapter to add to a model: its configuration, and A and B by their names in files.

    Raises DataError unless it is plain LoRA and consists of pairs of A and B of its rank.
    """
    config = AdapterConfig.read(folder)
    check_pairs(file_shapes(folder / ADAPTER_FILE), config.rank, folder)
    return config, read_adapters(folder)


def read_adapters(folder: Path) -> dict[str, Tensor]:
    """Read the adapters of a checkpoint, by their names in files. Raises DataError."""
    path = folder / ADAPTER_FILE
    try:
        check_regular_file(path)
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot read the adapters ({error})", where=str(path), fix="Restore the adapter") from error


def _foreign(base: Path, name: str) -> DataError:
    return DataError(
        f"the adapter {name} fits no matrix of the base model", where=str(base), fix="Name the model it was trained on"
    )

"""Names of torch's dtypes in safetensors files and in a model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from gcore.models.tensors import Dtype
from gcore.system.files import read_json_file

CODES: Mapping[torch.dtype, Dtype] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The name of each dtype in a safetensors file."""

FLOATS = frozenset(CODES[dtype] for dtype in CODES if dtype.is_floating_point)
"""Names of the floating-point dtypes in files."""

NAMES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
"""torch's dtypes by their names in a model's config.json."""


def model_dtype(model: Path) -> torch.dtype:
    """The dtype that the config of the model in `model` states for its weights; float32 if it states none or an unknown
    one.
    """
    config = read_json_file(model / "config.json")
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    return NAMES.get(str(name), torch.float32)

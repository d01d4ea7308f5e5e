"""Checks of a low-rank adapter in PEFT's layout without torch: whether it is plain LoRA, fits a model, and was trained on it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gcore.config.train import OUTPUT_LAYER
from gcore.errors import DataError, explain_os_errors
from gcore.models.checks import matrix_shapes, weight_files
from gcore.models.hubs import ADAPTER_CONFIG
from gcore.models.layout import ADAPTER_FILE, ADAPTER_PREFIX, BASE_FILE, SAMPLE_FILE, hash_files
from gcore.models.tensors import TensorShape, check_weight_file
from gcore.system.files import read_json_file


def check_adapter(folder: Path, base: Path) -> None:
    """Raise DataError unless `folder` has a LoRA adapter in PEFT's layout that fits the model in `base`.

    Reads the headers of the weights; if the adapter says from which files its base was (gcore's own do), also all of the
    base's files.
    """
    config = require_adapter_config(folder)
    shapes = {name: shape for path in weight_files(base) for name, shape in matrix_shapes(path)}
    if not (folder / ADAPTER_FILE).exists():
        raise DataError(
            f"the folder has no weights of an adapter ({ADAPTER_FILE})",
            where=str(folder),
            fix="Name the folder of a PEFT adapter",
        )
    tensors = check_weight_file(folder / ADAPTER_FILE)
    check_pairs(tensors, config["r"], folder)
    for name in sorted(name for name in tensors if name.endswith(DOWN)):
        stem = name.removesuffix(DOWN)
        layer, down, up = stem.removeprefix(ADAPTER_PREFIX), tensors[name].shape, tensors[stem + UP].shape
        if layer.rpartition(".")[2] == OUTPUT_LAYER:
            raise DataError(
                f"the adapter changes the output layer ({layer}), which engines cannot adapt for single rows",
                where=str(folder),
                fix="Train an adapter of other layers, or merge it and give the judge the merged model",
            )
        own = shapes.get(layer)
        if own is None or (up[0], down[1]) != own:
            wants = "which the model does not have" if own is None else f"whose matrix is {list(own)}"
            raise DataError(
                f"the adapter does not fit the model: A {list(down)} and B {list(up)} are for layer {layer}, {wants}",
                where=str(folder),
                fix="Name an adapter of the policy's model",
            )
    if os.path.lexists(folder / BASE_FILE):
        check_same_base(base, folder, "Name an adapter of the policy's model")


DOWN, UP = ".lora_A.weight", ".lora_B.weight"
"""How the names of A and of B end in a file."""

ADAPTER_DTYPES = frozenset({"F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2"})
"""Dtypes that the matrices of an adapter may have in its file."""


def check_pairs(tensors: Mapping[str, TensorShape], rank: int, folder: Path) -> None:
    """Raise DataError unless the tensors of an adapter are pairs of A [rank, in] and B [out, rank], all floating-point.

    `tensors`: all of the file, by name. `rank`: of the configuration in `folder`.
    """
    path, fix = str(folder / ADAPTER_FILE), "Save the adapter again, as PEFT saves LoRA of linear layers"
    if not tensors:
        raise DataError("the adapter has no matrices", where=path, fix=fix)
    for name, tensor in sorted(tensors.items()):
        end, other = (UP, DOWN) if name.endswith(UP) else (DOWN, UP)
        pair = name.startswith(ADAPTER_PREFIX) and name.endswith(end)
        if not pair or name.removesuffix(end) + other not in tensors:
            raise DataError(f"the adapter's tensor {name} is no part of a pair of A and B", where=path, fix=fix)
        if tensor.dtype not in ADAPTER_DTYPES:
            raise DataError(
                f"the adapter's tensor {name} has dtype {tensor.dtype}, and matrices should be floating-point",
                where=path,
                fix=fix,
            )
        if len(tensor.shape) != 2 or tensor.shape[end == UP] != rank:
            raise DataError(
                f"the adapter's matrix {name} is {list(tensor.shape)}, and its configuration has rank {rank}",
                where=path,
                fix=fix,
            )


PLAIN_ADAPTER = {"peft_type": "LORA", "bias": "none", "use_dora": False, "use_rslora": False, "fan_in_fan_out": False}
"""Settings of PEFT that an adapter must have, if it has them: y = W·x + alpha / rank · B·A·x and nothing else."""

MORE_THAN_PLAIN = (
    *("rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias"),
    *("alora_invocation_tokens", "layer_replication", "trainable_token_indices", "target_parameters"),
    *("use_bdlora", "arrow_config", "kasa_config", "monteclora_config", "velora_config"),
)
"""Settings of PEFT that an adapter must not have: they change the base or the sum, or add tensors to A and B."""

STARTS_THAT_KEEP_THE_BASE = ("gaussian", "eva", "orthogonal")
"""Values of PEFT's `init_lora_weights` that leave the base model as it is. Others, such as pissa, change it."""


MAX_RANK = 2**31
"""Ranks are below this number, which is far above the width of any layer."""

MIN_ALPHA, MAX_ALPHA = 1e-30, 3e38
"""Smallest and largest amount of an adapter's alpha: matrices are scaled in float32, where alpha / rank must not be 0."""


def require_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the content of the folder's `adapter_config.json`. Raises DataError if it is missing, damaged, or of another
    kind of adapter than plain LoRA."""
    path, fix = folder / ADAPTER_CONFIG, "Name the folder of a PEFT adapter"
    try:
        with explain_os_errors("cannot read the adapter's configuration", DataError, where=path, fix=fix):
            config: dict[str, Any] = read_json_file(path)
        rank, alpha = config["r"], config["lora_alpha"]
    except (ValueError, LookupError, TypeError) as error:
        raise DataError("the file is no configuration of a LoRA adapter", where=str(path), fix=fix) from error
    for name, value, right in (
        ("r", rank, type(rank) is int and 0 < rank < MAX_RANK),
        ("lora_alpha", alpha, type(alpha) in (int, float) and MIN_ALPHA <= abs(alpha) <= MAX_ALPHA),
    ):
        if not right:
            wanted = "a whole number above 0" if name == "r" else "a finite number in float32, other than 0"
            raise DataError(f"the adapter's {name} should be {wanted} (got {value!r:.50})", where=str(path), fix=fix)
    targets = config.get("target_modules")
    names = [targets] if isinstance(targets, str) else targets
    if names is not None and not (type(names) is list and all(isinstance(one, str) and one for one in names)):
        raise DataError(
            f"the adapter's target_modules should be a list of names, or one expression (got {targets!r:.50})",
            where=str(path),
            fix=fix,
        )
    strange = [name for name, plain in PLAIN_ADAPTER.items() if config.get(name, plain) != plain]
    strange += [name for name in MORE_THAN_PLAIN if config.get(name)]
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start not in STARTS_THAT_KEEP_THE_BASE:
        strange.append("init_lora_weights")
    if strange:
        raise DataError(
            f"the adapter has {strange[0]}: {config[strange[0]]!r:.80}, and only plain LoRA adapters can be served",
            where=str(path),
            fix="Merge it into its model, and use the merged model",
        )
    return config


SAMPLED_BLOCKS, BLOCK_BYTES = 64, 4096
"""How many blocks of a weight file `BaseFiles.sample` reads, and their size in bytes."""

Stamp = tuple[int, int, int]
"""Size in bytes, time of the last change in nanoseconds, and inode of a file."""


@dataclass(frozen=True, slots=True)
class BaseFiles:
    """The weight files of a base model as they were when a process loaded it. Adapters belong to these files, and some steps
    read them again."""

    stamps: Mapping[Path, Stamp]

    @classmethod
    def of(cls, folder: Path) -> BaseFiles:
        """Look at the files of the model in `folder`. Raises OSError, and ModelError if files are missing."""
        return cls({path: _stamp(path) for path in weight_files(folder)})

    @classmethod
    def found(cls, folder: Path) -> BaseFiles | None:
        """Like `of`; None if files are missing, an error that loading the model reports."""
        try:
            return cls.of(folder)
        except (OSError, DataError):
            return None

    def check(self) -> None:
        """Raise DataError if a file was changed or replaced since then, and OSError if one is missing. Reads no file."""
        for path, stamp in self.stamps.items():
            if _stamp(path) != stamp:
                raise DataError(
                    "the base model of the adapters changed while the job runs",
                    where=str(path),
                    fix="Restore the file, and resume the job from its last checkpoint",
                )

    def sample(self) -> str:
        """Return the SHA-256 (hex) of each file's name, size and up to `SAMPLED_BLOCKS` blocks at equal distances, and of the
        model's configuration, because the same weights compute something else with another one.

        Training changes almost every weight, so other weights of the same layout have another sample. Equal samples do not
        prove that files are intact; `check_same_base` does. Raises OSError.
        """
        digest = hashlib.sha256()
        for path in sorted(self.stamps, key=lambda one: one.name):
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"{path.name}\0{size}\0".encode())
                for start in range(0, size, max(BLOCK_BYTES, -(-size // SAMPLED_BLOCKS))):
                    file.seek(start)
                    digest.update(file.read(BLOCK_BYTES))
        for folder in sorted({path.parent for path in self.stamps}):
            digest.update((folder / "config.json").read_bytes())
        return digest.hexdigest()


def check_sample(folder: Path, own: BaseFiles | None) -> None:
    """Raise DataError if the adapters in `folder` are of another base model than `own`, as far as a sample shows.

    Nothing is compared if the folder has no sample (`SAMPLE_FILE`) or `own` is unknown.
    """
    if own is None or not (folder / SAMPLE_FILE).is_file():
        return
    with explain_os_errors("cannot read the adapters' base model", DataError, where=folder, fix="Restore the model"):
        same = (folder / SAMPLE_FILE).read_bytes() == own.sample().encode()
    if not same:
        raise DataError(
            "the adapters are trained on another base model than the one that is served",
            where=", ".join(sorted({str(path.parent) for path in own.stamps})),
            fix="Copy the model of the train ranks to this node, and restart the engine",
        )


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


def _is_file_name(name: str) -> bool:
    """Whether this is the name of a file in a folder, in characters that every file system and message can have."""
    return Path(name).name == name and "\0" not in name and not any(0xD800 <= ord(one) < 0xE000 for one in name)


def check_same_base(folder: Path, adapter: Path, fix: str, tick: Callable[[int], None] = lambda _: None) -> None:
    """Raise DataError unless the weights in `folder` are those that an adapter of gcore names as its base (`BASE_FILE`),
    and no others. Reads all of them. `fix`: what the error advises. `tick`: as of `hash_files`."""
    if not (folder / "config.json").is_file():
        raise DataError("the adapter's base model is not here", where=str(folder), fix=fix)
    listed = adapter / BASE_FILE
    with explain_os_errors(
        "cannot read the list of the base model's files", DataError, where=listed, fix="Restore the adapter"
    ):
        try:
            names = read_json_file(listed)
            if type(names) is not dict or not all(map(_is_file_name, names)):
                raise ValueError("a name is no file's name")
        except ValueError as error:
            raise DataError(
                "the file does not list the files of a base model", where=str(listed), fix="Restore the adapter"
            ) from error
    try:
        found = hash_files([folder / name for name in names], tick)
    except OSError as error:
        what = f"cannot read a file of the adapter's base model ({error.strerror})"
        raise DataError(what, where=error.filename, fix=fix) from error
    wrong = [path for path, digest in found.items() if names[path.name] != digest]
    # Weights beside the listed ones may be those that transformers loads.
    wrong += [path for path in weight_files(folder) if path not in found]
    if wrong:
        raise DataError("the file is not that of the adapter's base model", where=str(wrong[0]), fix=fix)

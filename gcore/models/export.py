"""The export of a model from a checkpoint: a copy, or the base model with the checkpoint's adapters added."""

from __future__ import annotations

import shutil
from pathlib import Path

from gcore.errors import DataError, UsageError
from gcore.models.adapter_checks import check_same_base
from gcore.models.hubs import ADAPTER_CONFIG
from gcore.models.layout import (
    ADAPTER_FILE,
    BASE_FILE,
    EMULATED_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    TRAINING_FILES,
    CheckpointDamaged,
    TensorsFile,
    companion_files,
    manifest_digest,
    verify_checkpoint,
)
from gcore.system.files import replace_folder


def copy_model(
    checkpoint: Path, to: Path, digest: str = "", *, adapter: bool = False, base: Path | None = None
) -> None:
    """Copy the model out of a checkpoint atomically, without the optimizer state and files that the manifest does not
    list.

    Verifies every byte first. A checkpoint of adapters is merged with its base model, or with `adapter` copied as it is.
    `digest`: of the manifest that the job registered; empty if unknown. `base`: folder of the base model; None: where
    the checkpoint says that it is. Raises UsageError if `to` exists and is not an empty folder, or if `adapter` or
    `base` is given for a checkpoint without adapters; CheckpointDamaged; DataError if the checkpoint has no weights, or
    the base model is missing or another one.
    """
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise UsageError("the target exists and is not an empty folder", where=str(to), fix="Name a new folder")
    if (checkpoint / EMULATED_FILE).exists():
        raise DataError("the checkpoint has no weights, because emulated train ranks wrote it", where=str(checkpoint))
    proven = verify_checkpoint(checkpoint).files
    if digest and manifest_digest(checkpoint) != digest:
        raise CheckpointDamaged(
            "the folder's content differs from the registered checkpoint", where=str(checkpoint / MANIFEST_FILE)
        )
    merges = ADAPTER_FILE in proven and not adapter
    if ADAPTER_FILE not in proven and (adapter or base is not None):
        raise UsageError(
            "the checkpoint has a whole model and no adapter",
            where=str(checkpoint),
            fix="Leave --adapter and --base out",
        )
    weights = sorted(path.name for path in checkpoint.glob("*.safetensors*") if path.name not in TRAINING_FILES)
    beside = (ADAPTER_CONFIG, BASE_FILE) if adapter else ()
    names = [name for name in (*companion_files(checkpoint), *weights, *beside) if name in proven]
    if merges:
        names.remove(ADAPTER_FILE)
    to.parent.mkdir(parents=True, exist_ok=True)
    with replace_folder(to, owner="copy", durable=True) as temporary:
        for name in names:
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint / name, temporary / name)
        if merges:
            _write_merged(checkpoint, base, temporary / MODEL_FILE)


def _write_merged(checkpoint: Path, base: Path | None, path: Path) -> None:
    """Write the base model with the checkpoint's adapters added as one safetensors file.

    `base`: folder of the base model; None: the one that the checkpoint names. Raises DataError if it is missing or is
    not the model on which the adapters were trained, and OSError.
    """
    from gcore.models.adapters import (  # torch: seconds
        merged_tensors,
        read_adapter,
        served_shapes,
        stored_shapes,
        tensor_bytes,
    )
    from gcore.models.dtypes import model_dtype

    config, adapters = read_adapter(checkpoint)
    folder = Path(config.base) if base is None else base
    check_same_base(folder, checkpoint, "Name the base model with --base, or export the adapter alone with --adapter")
    dtype, shapes = model_dtype(checkpoint), stored_shapes(folder)
    scale = config.alpha / config.rank
    with TensorsFile(path, served_shapes(shapes, dtype), hashed=False) as file:
        for one in merged_tensors(folder, adapters, scale, dtype):
            file.write(one.name, tensor_bytes(one.tensor))

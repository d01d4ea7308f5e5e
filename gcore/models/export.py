"""The export of a model from a checkpoint: a copy, the base model with the checkpoint's adapters added, or a pipeline with the
checkpoint's network."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from gcore.errors import DataError, UsageError
from gcore.models.adapter_checks import check_same_base
from gcore.models.diffusion.files import is_pipeline, network_folder
from gcore.models.hubs import ADAPTER_CONFIG, NETWORK_FILE
from gcore.models.layout import (
    ADAPTER_FILE,
    BASE_FILE,
    EMULATED_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    PIPELINE_FILE,
    SERVED_FOLDER,
    TRAINING_FILES,
    WEIGHT_SUFFIXES,
    CheckpointDamaged,
    TensorsFile,
    companion_files,
    link_or_copy,
    manifest_digest,
    verify_checkpoint,
)
from gcore.system.files import read_json_file, replace_folder


def copy_model(
    checkpoint: Path, to: Path, digest: str = "", *, adapter: bool = False, base: Path | None = None
) -> None:
    """Copy the model out of a checkpoint atomically, without the optimizer state and files that the manifest does not
    list.

    Verifies every byte first. A checkpoint of adapters is merged with its base model, or with `adapter` copied as it is. The
    network of a pipeline is copied with the pipeline's other parts. `digest`: of the manifest that the job registered; empty
    if unknown. `base`: folder of the base model or pipeline; None: where the checkpoint says that it is. Raises UsageError if `to` exists and is not an empty folder, or if `adapter` or
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
    draws = PIPELINE_FILE in proven and not adapter
    merges = ADAPTER_FILE in proven and not adapter
    if ADAPTER_FILE not in proven and not draws and (adapter or base is not None):
        raise UsageError(
            "the checkpoint has a whole model and no adapter",
            where=str(checkpoint),
            fix="Leave --adapter and --base out",
        )
    if draws:
        _write_pipeline(checkpoint, proven, base, to)
        return
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


def _write_pipeline(checkpoint: Path, proven: Collection[str], base: Path | None, to: Path) -> None:
    """Write a pipeline with the network of a checkpoint, atomically: the one that engines served. The other parts are hard links
    to the pipeline from which the job started, or copies. `proven`: the checkpoint's verified files. `base`: as of `copy_model`.

    Raises DataError if the pipeline is missing or its network is of another kind, and OSError.
    """
    pipeline = Path(read_json_file(checkpoint / PIPELINE_FILE)["path"]) if base is None else base
    fix = "Name the folder of the pipeline with --base"
    if not is_pipeline(pipeline):
        raise DataError("the pipeline from which the job started is not here", where=str(pipeline), fix=fix)
    network = network_folder(pipeline)
    served = checkpoint / SERVED_FOLDER if f"{SERVED_FOLDER}/{NETWORK_FILE}" in proven else checkpoint
    if read_json_file(network / "config.json") != read_json_file(served / "config.json"):
        raise DataError("the network of this pipeline has another configuration", where=str(network), fix=fix)
    to.parent.mkdir(parents=True, exist_ok=True)
    with replace_folder(to, owner="copy", durable=True) as temporary:
        for path in sorted(pipeline.rglob("*")):
            name = path.relative_to(pipeline)
            hidden = any(part.startswith(".") for part in name.parts)
            if path.is_file() and not hidden and not (path.parent == network and path.name.endswith(WEIGHT_SUFFIXES)):
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(path, temporary / name)
        shutil.copyfile(served / NETWORK_FILE, temporary / network.name / NETWORK_FILE)


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

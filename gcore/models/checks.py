"""Checks of a model folder without torch: whether its weights are safe to read and complete, and which code it
contains.

A model's own code (`auto_map` in its configuration) would run in every engine and rank, so it runs only if the spec
allows it. A model that needs its code is otherwise rejected before anything starts, with the name of the file. Whether
a model needs it is looked up in the source of the installed transformers, without importing it. Weights in pickle files
are rejected, because reading a pickle can run code.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gcore.config.capabilities import PICTURE_CLASSIFIERS, PICTURE_SCORERS
from gcore.errors import DataError, SpecError
from gcore.models.hubs import ADAPTER_CONFIG, WHOLE, ModelError, weights_file
from gcore.models.tensors import check_weight_file
from gcore.system.files import read_json_file

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""File types of pickled weights."""

_WORKERS_LOAD = ("AutoConfig", "AutoModelForCausalLM")
"""Keys of `auto_map` whose classes engines and ranks load; the classes of other keys are never imported."""


def read_config(folder: Path) -> dict[str, Any]:
    """Return the model's `config.json`; empty if it is missing or not readable, which loading the model reports
    later.
    """
    return _optional_json(folder / "config.json")


def require_config(folder: Path) -> dict[str, Any]:
    """Return the content of the folder's `config.json`. Raises DataError if it is missing, or not a JSON object."""
    try:
        config = read_json_file(folder / "config.json")
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read the model's config.json ({error})", where=str(folder), fix="Name the folder of a model"
        ) from error
    return config


def check_loaded(missing: Collection[str], folder: Path) -> None:
    """Raise DataError if weights are `missing` in the folder of a model that was loaded: transformers and diffusers initialise
    them at random and only warn."""
    if missing:
        first, more = min(missing), f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DataError(
            f"the model's weights lack {first}{more}", where=str(folder), fix="Copy or save the model again"
        )


def _optional_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if it is missing or not readable."""
    try:
        tree = read_json_file(path)
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}


def remote_code_files(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the Python files that would run if the model's code were trusted, sorted.

    A file of another model's repository is returned as `REPO: FILE`.
    """
    table = config.get("auto_map")
    if not isinstance(table, dict):
        return ()
    found = set()
    for name in _WORKERS_LOAD:
        reference = table.get(name)
        if isinstance(reference, str) and "." in reference:
            repo, there, inner = reference.rpartition("--")
            file = inner.rpartition(".")[0].replace(".", "/") + ".py"
            found.add(f"{repo}: {file}" if there else file)
    return tuple(sorted(found))


def check_code(config: dict[str, Any], *, trusted: bool, where: str) -> tuple[str, ...]:
    """Return the model's Python files that engines and ranks will run: none unless `trusted`.

    `where`: the model's path, for errors. Raises ModelError if the model needs its code and it is not trusted, or if
    trusted code belongs to another model.
    """
    files = remote_code_files(config)
    foreign = [file for file in files if ": " in file]
    if trusted and foreign:
        raise ModelError(
            f"its code belongs to another model ({foreign[0]})",
            where=where,
            fix="Copy model and code into one folder, read the code, and name that folder in model.path",
        )
    if trusted or not files:
        return files
    if not is_known(str(config.get("model_type", ""))):
        raise ModelError(
            f"the model needs its own Python code ({', '.join(files)}), which the spec does not allow",
            where=where,
            fix="Read the code; if you trust it, set model.trust_remote_code: true",
        )
    return ()


def check_weights(names: Iterable[str], *, where: str) -> None:
    """Raise ModelError if the model has only pickled weights. `names`: its files. `where`: its path, for the error."""
    files = sorted(names)
    if any(name.endswith(".safetensors") for name in files):
        return
    pickled = [name for name in files if name.endswith(PICKLED) and name not in ("training_args.bin", "optimizer.pt")]
    if pickled:
        raise ModelError(
            f"its weights are a pickle ({pickled[0]}), which can run code when it is read",
            where=where,
            fix="Convert the weights to safetensors (save_pretrained does), or name a model with safetensors",
        )


def is_known(model_type: str) -> bool:
    """Return whether the installed transformers has a causal language model of this type; True if it is not
    installed.
    """
    table = _table_of_models()
    return table is None or f'("{model_type}",' in table


@functools.cache
def _table_of_models() -> str | None:
    # find_spec of a top-level package does not run its code.
    found = importlib.util.find_spec("transformers")
    if found is None or not found.submodule_search_locations:
        return None
    file = Path(found.submodule_search_locations[0]) / "models" / "auto" / "modeling_auto.py"
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return None
    begin = text.find("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = ")
    return text[begin : text.find("\n)\n", begin)] if begin >= 0 else None


_FIX = "Copy or download it again; it is incomplete"


def check_whole(folder: Path, weights: str = WHOLE) -> None:
    """Raise ModelError unless all weight files of a model folder are there, complete, and safetensors files. `weights`: name
    of the file, if there is one; its index has the same name with `.index.json`.

    The header of a safetensors file says where its last tensor ends. The check runs before anything starts; otherwise
    every engine and rank would fail. It needs no torch and does not read the tensors.
    """
    index = folder / f"{weights}.index.json"
    whole = index.is_file() or (folder / weights).is_file()
    if (folder / ADAPTER_CONFIG).is_file():
        raise ModelError(
            f"the folder has a model and {ADAPTER_CONFIG}, for which transformers loads another model"
            if whole
            else "the folder has an adapter and not the whole model",
            where=str(folder),
            fix=f"Remove {ADAPTER_CONFIG}"
            if whole
            else "Merge it with its base model: `gcore export` does for a job with train.lora",
        )
    if index.is_file():
        files = _files_of_index(index)
    else:
        files = [weights]
        if not (folder / weights).is_file():
            raise ModelError(
                f"the model folder has no weights ({weights})",
                where=str(folder),
                fix="Save the model with its weights (model.save_pretrained)",
            )
    for name in files:
        check_weight_file(folder / name)


EMBEDDING = re.compile(r"embed|(^|\.)w[tp]e$")
"""Matches names of layers whose matrix is a table, which is no linear layer."""


def check_adapters(folder: Path, targets: Iterable[str], rank: int) -> None:
    """Raise SpecError if a target of adapters matches no matrix of a local model, or the rank is above its width.

    A target is a layer's name or the end of it; "" stands for all matrices of numbered layers. The rank checks again
    when it has loaded the model, because files do not say which matrices are linear layers.
    """
    matrices = (one for path in weight_files(folder) for one in matrix_shapes(path))
    shapes = {name: shape for name, shape in matrices if not EMBEDDING.search(name)}
    widths: dict[str, int] = {}
    for target in targets:
        own = re.compile(rf"(.*\.)?{re.escape(target)}" if target else r".*\.\d+\..*")
        chosen = {name: one for name, one in shapes.items() if own.fullmatch(name)}
        if not chosen:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in shapes}))
            raise SpecError(
                f"no layer of the model is called {target!r}", where="train.lora.targets", fix=f"Name some of {known}"
            )
        widths |= {name: min(shape) for name, shape in chosen.items()}
    name = min(widths, key=widths.__getitem__)
    if rank > widths[name]:
        raise SpecError(
            f"rank {rank} is above the width of layer {name} ({widths[name]})",
            where="train.lora.rank",
            fix=f"Set it to {widths[name]} or less",
        )


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder from which transformers loads it: a single file goes before an index.

    Raises ModelError if the index cannot be read or files are missing.
    """
    whole = weights_file(folder)
    index = folder / f"{whole}.index.json"
    indexed = index.is_file() and not (folder / whole).is_file()
    names = _files_of_index(index) if indexed else [whole]
    return [folder / name for name in names]


def matrix_shapes(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the layers with a matrix in a safetensors file: name and shape. Raises ModelError as `check_weight_file`."""
    for name, one in check_weight_file(path).items():
        if name.endswith(".weight") and len(one.shape) == 2:
            yield name.removesuffix(".weight"), one.shape


def _files_of_index(index: Path) -> list[str]:
    try:
        named = read_json_file(index)["weight_map"].values()
        files = sorted({str(name) for name in named})
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError("cannot read the index of the weights", where=str(index), fix=_FIX) from error
    for name in files:
        if Path(name).name != name:
            raise ModelError(
                f"the index of the weights names a file in another folder ({name[:80]!r})",
                where=str(index),
                fix="Put the files next to the index and correct the names",
            )
    missing = [name for name in files if not (index.parent / name).is_file()]
    if missing or not files:
        raise ModelError(
            f"{len(missing)} of {len(files)} weight files are missing" + (f", first {missing[0]}" if missing else ""),
            where=str(index.parent),
            fix="Copy or download the model again",
        )
    return files


HEAD = "ForSequenceClassification"
"""End of the class names of Hugging Face models with a sequence-classification head."""

UNTOLD_LABELS = 2
"""Number of labels that transformers assumes if the configuration states none."""


def without_picture_head(config: Mapping[str, Any], *, where: str) -> ModelError:
    """Return the error for a classifier of a type that cannot see pictures. Arguments: as of `check_classifier`."""
    types = " and ".join(PICTURE_CLASSIFIERS)
    return ModelError(
        f"a classifier of the type {config.get('model_type')!r} cannot see pictures: of the types that gcore supports, "
        f"transformers has sequence-classification heads with pictures for {types} only",
        where=where,
        fix=f"Use a classifier of the type {' or '.join(PICTURE_CLASSIFIERS)}, or a judge with kind: generative",
    )


def check_classifier(config: Mapping[str, Any], *, where: str, pictures: bool = False) -> None:
    """Raise ModelError unless the model can serve as a reward model: a sequence-classification head with one label, or a
    scorer of pictures.

    `config`: the folder's config.json. `where`: the folder, for the error. `pictures`: whether it must see them. Relies on
    the configuration; loading the model checks the head's weights. Needs no torch.
    """
    if config.get("model_type") in PICTURE_SCORERS:
        _check_scorer(config, where=where, pictures=pictures)
        return
    if pictures and config.get("vision_config") is not None and config.get("model_type") not in PICTURE_CLASSIFIERS:
        raise without_picture_head(config, where=where)
    names = config.get("architectures")
    named = [str(name) for name in names] if isinstance(names, list) else []
    if not any(name.endswith(HEAD) for name in named):
        raise ModelError(
            f"the model has no sequence-classification head (config.json has {', '.join(named) or 'no architecture'})",
            where=where,
            fix="Name a model that was saved as ...ForSequenceClassification, or set kind: generative for the judge",
        )
    labels = count_labels(config)
    if labels != 1:
        raise ModelError(
            f"the model's head returns {labels} numbers, but a reward is one number",
            where=where,
            fix="Name a model with one label (num_labels: 1)",
        )


SCORER = "CLIPModel"
"""Class of transformers of a scorer of pictures."""


def _check_scorer(config: Mapping[str, Any], *, where: str, pictures: bool) -> None:
    """Raise ModelError unless a CLIP model can score pictures. Arguments: as of `check_classifier`."""
    if not pictures:
        raise ModelError(
            f"a model of the type {config.get('model_type')!r} scores pictures, and the judge sees none",
            where=where,
            fix="Set images: true for the judge, or name a model of another type",
        )
    names = config.get("architectures")
    if names is not None and names != [SCORER]:
        raise ModelError(
            f"the model is a {names}, and a scorer of pictures needs both parts of CLIP",
            where=where,
            fix=f"Save the whole model ({SCORER}.save_pretrained)",
        )


def count_labels(config: Mapping[str, Any]) -> int:
    """Return how many numbers the classification head returns according to the configuration."""
    table, count = config.get("id2label"), config.get("num_labels")
    if isinstance(table, dict) and table:
        return len(table)
    return count if isinstance(count, int) else UNTOLD_LABELS


def check_critic(path: str, *, trust_remote_code: bool) -> None:
    """Raise ModelError if a critic cannot start from the model in `path` (`train.critic.path`), as far as this shows
    without torch.

    It cannot if the folder or the model is missing, if weights are missing, cut off or a pickle, or if untrusted code
    would run. The train ranks check whether the model fits the policy (longest text, a head with one output) when they
    load both.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        missing = "the folder is not a model: it has no config.json" if folder.is_dir() else "the folder does not exist"
        raise ModelError(
            f"train.critic.path: {missing}",
            where=path,
            fix="Name the folder of a Hugging Face model in train.critic.path",
        )
    check_weights((file.name for file in folder.iterdir()), where=path)
    check_code(read_config(folder), trusted=trust_remote_code, where=path)
    check_whole(folder)

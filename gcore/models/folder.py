"""What can be said of a model's folder without torch: whether its weights are safe to read, and what code comes with it.

Code that comes with a model (`auto_map` in its configuration) runs in every engine and rank. So it runs only if the
spec says so; a model that cannot do without is refused before anything is started, by naming the file that would run.
Whether a model can do without is looked up in the installed transformers, by reading its table of models, not by
importing it. Weights in pickle files are refused: reading one runs code too.

Does not look into the weights; a cut-off safetensors file is found elsewhere.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gcore.models.names import ModelError

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_WORKERS_LOAD = ("AutoConfig", "AutoModelForCausalLM")
"""The classes that engines and ranks ask for; other entries of `auto_map` are never imported."""


def read_config(folder: Path) -> dict[str, Any]:
    """The model's `config.json`; empty if there is none that can be read (who loads the model says more)."""
    try:
        tree = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}


def code_of(config: dict[str, Any]) -> tuple[str, ...]:
    """The Python files that would run if the model's code were trusted, sorted; `REPO: FILE` if of another model."""
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
    """The files that will run: none unless `trusted`. Raises ModelError if the model needs code that must not run."""
    files = code_of(config)
    foreign = [file for file in files if ": " in file]
    if trusted and foreign:
        raise ModelError(
            f"its code is another model's ({foreign[0]})",
            where=where,
            fix="Copy model and code into one folder, read the code, and name that folder in model.path",
        )
    if trusted or not files:
        return files
    if not is_known(str(config.get("model_type", ""))):
        raise ModelError(
            f"the model needs Python code that comes with it ({', '.join(files)}), and code of others does not run unasked",
            where=where,
            fix="Read it, and if you trust it set model.trust_remote_code: true",
        )
    return ()


def check_weights(names: Iterable[str], *, where: str) -> None:
    """Raises ModelError if the only weights among the model's files are pickles."""
    files = sorted(names)
    if any(name.endswith(".safetensors") for name in files):
        return
    pickled = [name for name in files if name.endswith(PICKLED) and name not in ("training_args.bin", "optimizer.pt")]
    if pickled:
        raise ModelError(
            f"its weights are a pickle ({pickled[0]}), and reading one can run anything",
            where=where,
            fix="Convert them once to safetensors (save_pretrained does), or name a model that has them",
        )


def is_known(model_type: str) -> bool:
    """Whether the installed transformers has a causal language model of this type; True if there is no transformers."""
    table = _table_of_models()
    return table is None or f'("{model_type}",' in table


@functools.cache
def _table_of_models() -> str | None:
    # find_spec of a top-level package runs nothing of it.
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

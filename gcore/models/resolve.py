"""From `model.path` to a folder on this machine.

`resolve_model` is what a controller calls, off the event loop, once for each job on its node; workers get the folder.
For a model on a hub that may be a download into the hub's own cache; what is there is not fetched again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gcore.models.folder import check_code, check_weights, read_config
from gcore.models.names import ModelError, hub_model

Progress = Callable[[int, int], None]
"""Bytes that are here, and bytes in all."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this machine. `revision`: its commit on the hub, empty for a folder. `remote_code`: Python files that
    come with the model and will run in its engines and ranks; empty unless the spec trusts them."""

    folder: Path
    revision: str = ""
    remote_code: tuple[str, ...] = ()


def resolve_model(
    path: str,
    *,
    trust_remote_code: bool = False,
    revision: str = "",
    weights: bool = True,
    progress: Progress | None = None,
) -> ResolvedModel:
    """The folder of the model that `path` (`model.path` of a spec) names. Blocks; may download.

    `revision`: the commit that the job was created with; it wins over the one in `path`. `weights` False: configuration
    and tokenizer are enough. Raises ModelError (a DataError): no such model, no access, no hub; weights that are a
    pickle; code that would have to run and is not trusted.
    """
    if hub_model(path) is not None:
        raise ModelError("models of a hub cannot be fetched yet", where=path, fix="Download it and name its folder")
    folder = Path(path)
    if folder.is_dir():
        check_weights((file.name for file in folder.iterdir()), where=path)
    return ResolvedModel(folder, "", check_code(read_config(folder), trusted=trust_remote_code, where=path))

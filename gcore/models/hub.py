"""What a hub of models can be asked, whichever it is, and which of a model's files a job needs.

A hub keeps what it fetched in its own cache, so that other programs find it there and it is fetched once. Everything
here blocks; callers keep it off their event loop.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

from gcore.models.names import HubModel, ModelError

SMALL = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.safetensors.index.json",
)
"""Configuration, tokenizer and templates: what a controller itself reads. None of them is large."""
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
NO_ANSWER = (ValueError, TypeError, LookupError, AttributeError, AssertionError)
"""What the hubs' clients raise where an answer is not of the form that they expect."""


class HubUnreachable(ModelError):
    """The hub did not answer, or not to the end. It may be asked again."""


class HubOffline(ModelError):
    """The hub may not be asked, by the environment's word, and the cache does not have the model."""


def no_hub(who: str, model: HubModel, error: Exception) -> HubUnreachable:
    """What answers is no hub, or a broken one: often the page of a proxy that wants somebody to sign in."""
    said = " ".join(str(error).split())[:160] or type(error).__name__
    return HubUnreachable(
        f"{who} answers with something else than the model's files ({said})",
        where=str(model),
        fix="Check for a proxy in between, and the endpoint; or name the folder of a copy",
    )


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a model. `size` in bytes; 0 if the hub does not say."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Listing:
    """A model at one commit."""

    model: HubModel
    commit: str
    files: tuple[HubFile, ...]

    def small(self, *, code: bool) -> tuple[HubFile, ...]:
        """What is read before the weights; with `code` also the Python files that come with the model."""
        patterns = (*SMALL, "*.py") if code else SMALL
        return tuple(f for f in self.files if any(_matches(f.name, pattern) for pattern in patterns))

    def weights(self, folder: Path) -> tuple[HubFile, ...]:
        """The weights that loading reads. Some models carry a second copy under other names.

        `folder` holds the small files already: the index says which files belong together.
        """
        named = shards(folder)
        found = tuple(f for f in self.files if _matches(f.name, "*.safetensors"))
        return tuple(f for f in found if f.name in named) or found


class Hub(Protocol):
    """One hub."""

    @property
    def title(self) -> str:
        """Its name, for people."""
        ...

    def listing(self, model: HubModel, revision: str) -> Listing:
        """Ask what `revision` (empty: the default branch) is now. Raises HubUnreachable, ModelError."""
        ...

    def fetch(self, listing: Listing, names: Sequence[str]) -> Path:
        """Bring these files into the cache, but for those that are there; the model's folder in it.

        Raises HubUnreachable, ModelError.
        """
        ...

    def cached(self, model: HubModel, revision: str) -> tuple[Path, str] | None:
        """The folder in the cache and its commit, without asking the hub. Files may be missing in it."""
        ...

    def received(self, listing: Listing, names: Sequence[str]) -> int:
        """Bytes of these files that are on this machine now, also of those that are only half here."""
        ...


def shards(folder: Path) -> frozenset[str]:
    """The files that hold the weights of the model in `folder`, by its index or by convention."""
    try:
        table = json.loads((folder / INDEX).read_bytes())["weight_map"]
        return frozenset(str(name) for name in table.values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return frozenset({WHOLE})


def is_whole(folder: Path, *, weights: bool) -> bool:
    """Whether everything needed is in `folder`; what a hub's client puts under its name there is whole."""
    needed = {"config.json", "tokenizer.json"} | (shards(folder) if weights else frozenset())
    return all((folder / name).is_file() for name in needed)


def size_of(path: Path) -> int:
    """Bytes of a file; 0 for a folder, and for one that is not there, or was given another name just now."""
    try:
        found = path.stat()
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def total_size(files: Iterable[HubFile]) -> int:
    """Bytes in all."""
    return sum(file.size for file in files)


def _matches(name: str, pattern: str) -> bool:
    # A file in a folder of its own is another model's, or another format's; code may be a package.
    return fnmatchcase(name, pattern) and ("/" not in name or pattern == "*.py")

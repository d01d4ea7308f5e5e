"""What `model.path` names: a folder, or a model on a hub (`hf://OWNER/NAME[@REVISION]`, `ms://OWNER/NAME[@REVISION]`).

Pure; asks nobody whether the model exists.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from gcore.errors import DataError

Scheme = Literal["hf", "ms"]

_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")
_REVISION = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._/-]{0,198}[A-Za-z0-9_-])?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class ModelError(DataError):
    """A model cannot be used, or not be had."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on a hub. `revision`: a branch, a tag or a commit; empty: the hub's default branch."""

    scheme: Scheme
    owner: str
    name: str
    revision: str = ""

    @property
    def repo(self) -> str:
        """OWNER/NAME"""
        return f"{self.owner}/{self.name}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.repo}" + (f"@{self.revision}" if self.revision else "")


def hub_model(path: str) -> HubModel | None:
    """The hub's model that `model.path` names; None: it names a folder. Raises ModelError for a name that is none."""
    scheme, separator, rest = path.partition("://")
    if not separator or scheme not in ("hf", "ms"):
        return None
    repo, at, revision = rest.partition("@")
    owner, slash, name = repo.partition("/")
    wrong = ""
    if not slash or not name:
        wrong = "it names no owner, or no model"
    elif not all(_PART.fullmatch(part) and ".." not in part and "--" not in part for part in (owner, name)):
        wrong = "owner and name hold letters, digits, '.', '_' and '-' only, and a name has no further '/'"
    elif at and (not _REVISION.fullmatch(revision) or ".." in revision):
        wrong = f"{revision!r} is no revision"
    if wrong:
        raise ModelError(
            f"{path!r} is no model of a hub: {wrong}", where="model.path", fix=f"Write {scheme}://OWNER/NAME[@REVISION]"
        )
    return HubModel("hf" if scheme == "hf" else "ms", owner, name, revision)


def is_commit(revision: str) -> bool:
    """Whether it names one content for ever, as a branch or a tag does not."""
    return _COMMIT.fullmatch(revision) is not None

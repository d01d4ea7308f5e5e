"""ModelScope, through its own client, an optional extra; it honours MODELSCOPE_CACHE, _ENDPOINT and _API_TOKEN.

ModelScope names no commit for a branch. Its listing names one for each file, the last that changed it; the newest of
them is the commit that the branch stands at, but for a later one that only deletes files.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gcore.models.hub import NO_ANSWER, HubFile, HubUnreachable, Listing, no_hub, size_of
from gcore.models.names import HubModel, ModelError, is_commit

DEFAULT_BRANCH = "master"
PACKAGE = "modelscope_hub"


class ModelScope:
    """`endpoint` and `cache`: None for what the environment says. Raises ModelError if the client is not installed."""

    title = "ModelScope"

    def __init__(self, *, endpoint: str | None = None, cache: Path | None = None) -> None:
        try:
            client = importlib.import_module(PACKAGE)
            self._errors: Any = importlib.import_module(f"{PACKAGE}.errors")
        except ImportError as error:
            raise ModelError(
                "ModelScope's client is not installed",
                where="model.path",
                fix="Install it on every node: pip install 'gcore[modelscope]'",
            ) from error
        self._cache = cache or Path(os.environ.get("MODELSCOPE_CACHE") or Path.home() / ".cache" / "modelscope")
        self._api: Any = client.HubApi(endpoint=endpoint or os.environ.get("MODELSCOPE_ENDPOINT") or None)
        logging.getLogger(PACKAGE).setLevel(logging.ERROR)

    def listing(self, model: HubModel, revision: str) -> Listing:
        """See `Hub`."""
        branch = revision or DEFAULT_BRANCH
        with self._explained(model, branch):
            entries = self._api.legacy.list_repo_files(model.repo, "model", revision=branch)
            blobs = [e for e in entries if isinstance(e, dict) and e.get("Type", "blob") != "tree"]
            files = tuple(HubFile(str(e.get("Path") or e.get("Name")), int(e.get("Size") or 0)) for e in blobs)
        return Listing(model, branch if is_commit(branch) else _newest(blobs) or branch, files)

    def fetch(self, listing: Listing, names: Sequence[str]) -> Path:
        """See `Hub`."""
        with self._explained(listing.model, listing.commit):
            folder = self._api.download_repo(
                listing.model.repo,
                repo_type="model",
                revision=listing.commit,
                cache_dir=self._cache,
                allow_patterns=list(names),
            )
        return Path(folder)

    def cached(self, model: HubModel, revision: str) -> tuple[Path, str] | None:
        """See `Hub`. A branch is not known by its commit here, so only what was fetched under that very name counts."""
        commit = revision or DEFAULT_BRANCH
        folder = self._folder(model) / "snapshots" / commit
        return (folder, commit) if folder.is_dir() else None

    def received(self, listing: Listing, names: Sequence[str]) -> int:
        """See `Hub`."""
        folder = self._folder(listing.model) / "snapshots" / listing.commit
        # A file that is under way has a longer name, beside its place.
        there = [path for path in folder.rglob("*") if any(path.name.startswith(Path(n).name) for n in names)]
        return sum(size_of(path) for path in there)

    def _folder(self, model: HubModel) -> Path:
        return self._cache / "models" / f"{model.owner}--{model.name}"

    @contextlib.contextmanager
    def _explained(self, model: HubModel, revision: str) -> Iterator[None]:
        """The client's errors as gcore's, each with what to do."""
        errors, where = self._errors, str(model)
        try:
            yield
        except errors.NotExistError as error:
            raise ModelError(
                f"{self.title} has no such model, or it has no revision {revision!r}",
                where=where,
                fix="Correct the name; for a private model set MODELSCOPE_API_TOKEN",
            ) from error
        except (errors.AuthenticationError, errors.PermissionDeniedError) as error:
            raise ModelError(
                f"{self.title} does not let this account read it",
                where=where,
                fix="Set MODELSCOPE_API_TOKEN to a token that may, for the controllers too",
            ) from error
        except errors.HubError as error:
            raise self._away(model, error) from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
                raise ModelError(
                    f"it cannot be kept in {self._cache} ({error.strerror})",
                    where=where,
                    fix="Make room, or set MODELSCOPE_CACHE to another folder",
                ) from error
            raise self._away(model, error) from error
        except NO_ANSWER as error:
            raise no_hub(self.title, model, error) from error

    def _away(self, model: HubModel, error: Exception) -> HubUnreachable:
        said = " ".join(str(error).split())[:160]
        return HubUnreachable(
            f"{self.title} does not answer ({said})",
            where=str(model),
            fix="Check the network, or MODELSCOPE_ENDPOINT; or name the folder of a copy",
        )


def _newest(entries: Sequence[dict[str, Any]]) -> str:
    """The commit of the file that was changed last; empty if the listing does not say."""
    dated = [
        (int(entry.get("CommittedDate") or 0), str(entry["Revision"]))
        for entry in entries
        if is_commit(str(entry.get("Revision", ""))) and str(entry.get("CommittedDate", 0)).isdigit()
    ]
    return max(dated)[1] if dated else ""

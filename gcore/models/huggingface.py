"""The Hugging Face hub, through its own client, which honours HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE.

The client goes on with a transfer that breaks off; what it gives up on is tried again by `gcore.models.resolve`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)
from huggingface_hub.utils.tqdm import disable_progress_bars

from gcore.models.hub import NO_ANSWER, HubFile, HubOffline, HubUnreachable, Listing, no_hub, size_of
from gcore.models.names import HubModel, ModelError, is_commit
from gcore.nearest import did_you_mean

DEFAULT_BRANCH = "main"
ETAG_TIMEOUT_S = 30.0
ANSWER_S = 30.0
KNOWN = 200
"""Models of an owner that a mistyped name is compared with."""


class HuggingFace:
    """`endpoint`, `cache` and `offline`: None for what the environment says."""

    title = "the Hugging Face hub"

    def __init__(self, *, endpoint: str | None = None, cache: Path | None = None, offline: bool | None = None) -> None:
        self.endpoint = endpoint or constants.ENDPOINT
        self._cache = cache or Path(constants.HF_HUB_CACHE)
        self._offline = constants.is_offline_mode() if offline is None else offline
        self._api = HfApi(endpoint=self.endpoint)
        disable_progress_bars()
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)

    def listing(self, model: HubModel, revision: str) -> Listing:
        """See `Hub`."""
        with self._explained(model, revision):
            if self._offline:
                raise OfflineModeIsEnabled
            info = self._api.model_info(
                model.repo, revision=revision or None, files_metadata=True, timeout=ANSWER_S, token=None
            )
            if not is_commit(revision):  # so that the cache knows what the branch was, for when there is no hub
                self._api.resolve_revision(model.repo, revision=revision or DEFAULT_BRANCH, cache_dir=self._cache)
        files = tuple(HubFile(s.rfilename, s.size if isinstance(s.size, int) else 0) for s in info.siblings or ())
        if info.sha is None:
            raise ModelError("the hub names no commit", where=str(model), fix="Name one: hf://OWNER/NAME@COMMIT")
        return Listing(model, info.sha, files)

    def fetch(self, listing: Listing, names: Sequence[str]) -> Path:
        """See `Hub`."""
        with self._explained(listing.model, listing.commit):
            folder = snapshot_download(
                listing.model.repo,
                revision=listing.commit,
                cache_dir=self._cache,
                endpoint=self.endpoint,
                allow_patterns=[_literally(name) for name in names],
                etag_timeout=ETAG_TIMEOUT_S,
                max_workers=4,
            )
        return Path(folder)

    def cached(self, model: HubModel, revision: str) -> tuple[Path, str] | None:
        """See `Hub`."""
        commit = revision or DEFAULT_BRANCH
        if not is_commit(commit):
            try:
                commit = (self._folder(model) / "refs" / commit).read_text().strip()
            except OSError:
                return None
        folder = self._folder(model) / "snapshots" / commit
        return (folder, commit) if folder.is_dir() else None

    def received(self, listing: Listing, names: Sequence[str]) -> int:
        """See `Hub`."""
        folder = self._folder(listing.model)
        here = [folder / "snapshots" / listing.commit / name for name in names]
        # What is under way lies beside the blobs until it is whole.
        return sum(size_of(path) for path in (*here, *folder.glob("blobs/*.incomplete")))

    def _folder(self, model: HubModel) -> Path:
        return self._cache / f"models--{model.owner}--{model.name}"

    @contextlib.contextmanager
    def _explained(self, model: HubModel, revision: str) -> Iterator[None]:
        """The client's errors as gcore's, each with what to do."""
        where = str(model)
        try:
            yield
        except OfflineModeIsEnabled as error:
            raise HubOffline(
                f"it is not in the cache {self._cache} as a whole, and HF_HUB_OFFLINE forbids to fetch it",
                where=where,
                fix="Unset HF_HUB_OFFLINE, or bring it there, or name the folder of a copy",
            ) from error
        except GatedRepoError as error:
            raise ModelError(
                "the model is gated, and no token with access to it was given",
                where=where,
                fix="Accept its terms on its page, and set HF_TOKEN to a token of that account, for the controllers too",
            ) from error
        except RevisionNotFoundError as error:
            raise ModelError(
                f"the model has no revision {revision!r}{self._near_revision(model, revision)}",
                where=where,
                fix="Name a branch, a tag or a commit of it",
            ) from error
        except RepositoryNotFoundError as error:
            raise ModelError(
                f"{self.title} ({self.endpoint}) has no such model, or hides it from who asked{self._near_model(model)}",
                where=where,
                fix="Correct the name; for a private model set HF_TOKEN",
            ) from error
        except HfHubHTTPError as error:
            raise self._refused(model, error) from error
        except (httpx2.HTTPError, LocalEntryNotFoundError, RevisionResolutionError) as error:
            raise self._away(model, error) from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
                raise ModelError(
                    f"it cannot be kept in {self._cache} ({error.strerror})",
                    where=where,
                    fix="Make room, or set HF_HOME to another folder",
                ) from error
            raise self._away(model, error) from error  # the client's word for a transfer of the wrong size
        except NO_ANSWER as error:
            raise no_hub(f"{self.title} at {self.endpoint}", model, error) from error

    def _refused(self, model: HubModel, error: HfHubHTTPError) -> ModelError:
        code = error.response.status_code
        if code in (401, 403):
            return ModelError(
                f"{self.title} does not let this account read it ({code})",
                where=str(model),
                fix="Set HF_TOKEN to a token that may, for the controllers too",
            )
        return self._away(model, error)

    def _away(self, model: HubModel, error: Exception) -> HubUnreachable:
        cause = error.__cause__ or error
        said = " ".join(str(cause).split())[:160] or type(cause).__name__
        return HubUnreachable(
            f"{self.title} does not answer at {self.endpoint} ({said})",
            where=str(model),
            fix="Check the network, or set HF_ENDPOINT to a mirror, or HF_HUB_OFFLINE=1 to use what is in the cache",
        )

    def _near_model(self, model: HubModel) -> str:
        def known() -> list[str]:
            of_owner = self._api.list_models(author=model.owner, limit=KNOWN)
            return [m.id for m in (*of_owner, *self._api.list_models(search=model.name, limit=KNOWN))]

        return _near(model.repo, known)

    def _near_revision(self, model: HubModel, revision: str) -> str:
        def known() -> list[str]:
            refs = self._api.list_repo_refs(model.repo)
            return [ref.name for ref in (*refs.branches, *refs.tags)]

        return _near(revision, known)


def _near(wrong: str, known: Any) -> str:
    """`, did you mean ...?`, if the hub knows anything like it. Not worth an error of its own."""
    try:
        return did_you_mean(wrong, known())
    except (httpx2.HTTPError, OSError, ValueError, KeyError):
        return ""


def _literally(name: str) -> str:
    """A pattern that means this name alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)

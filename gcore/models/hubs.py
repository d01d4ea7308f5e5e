"""The Hugging Face hub, through its own client, which honours HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE.

The client goes on with a transfer that breaks off; what it gives up on is tried again by `gcore.models.resolve`.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from gcore.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError


Scheme = Literal["hf", "ms"]
_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")
_REVISION = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._/-]{0,198}[A-Za-z0-9_-])?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class ModelError(DataError):
    """A model cannot be used, or cannot be fetched."""


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


SMALL = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "*.spm",
    "*.vocab",
    "*.codes",
    "normalizer.json",
    "*processor_config.json",
    "chat_template*",
    "*.jinja",
    "additional_chat_templates/*.jinja",
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


def not_a_hub(who: str, model: HubModel, error: Exception) -> HubUnreachable:
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
class HubListing:
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
        named = weight_files(folder)
        found = tuple(f for f in self.files if _matches(f.name, "*.safetensors"))
        return tuple(f for f in found if f.name in named) or found


class Hub(Protocol):
    """One hub. It keeps what it fetched in its own cache, so that other programs find it there and it is fetched once.

    Its methods block; callers keep them off their event loop.
    """

    @property
    def title(self) -> str:
        """Its name, for people."""
        ...

    def listing(self, model: HubModel, revision: str) -> HubListing:
        """Ask what `revision` (empty: the default branch) is now. Raises HubUnreachable, ModelError."""
        ...

    def fetch(self, listing: HubListing, names: Sequence[str]) -> Path:
        """Bring these files into the cache, but for those that are there; the model's folder in it.

        Raises HubUnreachable, ModelError.
        """
        ...

    def cached(self, model: HubModel, revision: str) -> tuple[Path, str] | None:
        """The folder in the cache and its commit, without asking the hub. Files may be missing in it."""
        ...

    def received(self, listing: HubListing, names: Sequence[str]) -> int:
        """Bytes of these files that are on this machine now, also of those that are only half here."""
        ...


def weight_files(folder: Path) -> frozenset[str]:
    """The files that hold the weights of the model in `folder`, by its index or by convention."""
    try:
        table = json.loads((folder / INDEX).read_bytes())["weight_map"]
        return frozenset(str(name) for name in table.values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return frozenset({WHOLE})


def is_whole(folder: Path, *, weights: bool) -> bool:
    """Whether everything needed is in `folder`; what a hub's client puts under its name there is whole."""
    needed = {"config.json", "tokenizer.json"} | (weight_files(folder) if weights else frozenset())
    return all((folder / name).is_file() for name in needed)


def file_size(path: Path) -> int:
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
    return fnmatchcase(name, pattern) and ("/" not in name or "/" in pattern or pattern == "*.py")


HUGGINGFACE_BRANCH = "main"
ETAG_TIMEOUT_S = 30.0
ANSWER_S = 30.0

KNOWN = 200
"""Models of an owner that a mistyped name is compared with."""


class HuggingFace:
    """`endpoint`, `cache` and `offline`: None for what the environment says."""

    title = "the Hugging Face hub"

    def __init__(self, *, endpoint: str | None = None, cache: Path | None = None, offline: bool | None = None) -> None:
        from huggingface_hub import HfApi, constants
        from huggingface_hub.utils.tqdm import disable_progress_bars

        self.endpoint = endpoint or constants.ENDPOINT
        self._cache = cache or Path(constants.HF_HUB_CACHE)
        self._offline = constants.is_offline_mode() if offline is None else offline
        self._api = HfApi(endpoint=self.endpoint)
        disable_progress_bars()
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)

    def listing(self, model: HubModel, revision: str) -> HubListing:
        """See `Hub`."""
        from huggingface_hub.errors import OfflineModeIsEnabled

        with self._explained(model, revision):
            if self._offline:
                raise OfflineModeIsEnabled
            info = self._api.model_info(
                model.repo, revision=revision or None, files_metadata=True, timeout=ANSWER_S, token=None
            )
            if not is_commit(revision):  # so that the cache knows what the branch was, for when there is no hub
                self._api.resolve_revision(model.repo, revision=revision or HUGGINGFACE_BRANCH, cache_dir=self._cache)
        files = tuple(HubFile(s.rfilename, s.size if isinstance(s.size, int) else 0) for s in info.siblings or ())
        if info.sha is None:
            raise ModelError("the hub names no commit", where=str(model), fix="Name one: hf://OWNER/NAME@COMMIT")
        return HubListing(model, info.sha, files)

    def fetch(self, listing: HubListing, names: Sequence[str]) -> Path:
        """See `Hub`."""
        from huggingface_hub import snapshot_download

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
        commit = revision or HUGGINGFACE_BRANCH
        if not is_commit(commit):
            try:
                commit = (self._folder(model) / "refs" / commit).read_text().strip()
            except OSError:
                return None
        folder = self._folder(model) / "snapshots" / commit
        return (folder, commit) if folder.is_dir() else None

    def received(self, listing: HubListing, names: Sequence[str]) -> int:
        """See `Hub`."""
        folder = self._folder(listing.model)
        here = [folder / "snapshots" / listing.commit / name for name in names]
        # What is under way lies beside the blobs until it is whole.
        return sum(file_size(path) for path in (*here, *folder.glob("blobs/*.incomplete")))

    def _folder(self, model: HubModel) -> Path:
        return self._cache / f"models--{model.owner}--{model.name}"

    @contextlib.contextmanager
    def _explained(self, model: HubModel, revision: str) -> Iterator[None]:
        """The client's errors as gcore's, each with what to do."""
        import httpx2
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
            RevisionNotFoundError,
            RevisionResolutionError,
        )

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
            raise not_a_hub(f"{self.title} at {self.endpoint}", model, error) from error

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
    import httpx2

    try:
        return did_you_mean(wrong, known())
    except (httpx2.HTTPError, OSError, ValueError, KeyError):
        return ""


def _literally(name: str) -> str:
    """A pattern that means this name alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


MODELSCOPE_BRANCH = "master"
PACKAGE = "modelscope_hub"


class ModelScope:
    """ModelScope, through its own client, an optional extra; it honours MODELSCOPE_CACHE, _ENDPOINT and _API_TOKEN.

    `endpoint` and `cache`: None for what the environment says. Raises ModelError if the client is not installed.
    ModelScope names no commit for a branch. Its listing names one for each file, the last that changed it; the newest
    of them is the commit that the branch stands at, but for a later one that only deletes files.
    """

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

    def listing(self, model: HubModel, revision: str) -> HubListing:
        """See `Hub`."""
        branch = revision or MODELSCOPE_BRANCH
        with self._explained(model, branch):
            entries = self._api.legacy.list_repo_files(model.repo, "model", revision=branch)
            blobs = [e for e in entries if isinstance(e, dict) and e.get("Type", "blob") != "tree"]
            files = tuple(HubFile(str(e.get("Path") or e.get("Name")), int(e.get("Size") or 0)) for e in blobs)
        return HubListing(model, branch if is_commit(branch) else _newest(blobs) or branch, files)

    def fetch(self, listing: HubListing, names: Sequence[str]) -> Path:
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
        commit = revision or MODELSCOPE_BRANCH
        folder = self._folder(model) / "snapshots" / commit
        return (folder, commit) if folder.is_dir() else None

    def received(self, listing: HubListing, names: Sequence[str]) -> int:
        """See `Hub`."""
        folder = self._folder(listing.model) / "snapshots" / listing.commit
        # A file that is under way has a longer name, beside its place.
        there = [path for path in folder.rglob("*") if any(path.name.startswith(Path(n).name) for n in names)]
        return sum(file_size(path) for path in there)

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
            raise not_a_hub(self.title, model, error) from error

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

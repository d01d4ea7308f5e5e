"""Model hubs (Hugging Face, ModelScope), through their own clients.

The Hugging Face client respects HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE. The clients resume interrupted
transfers. If a client gives up, `gcore.models.resolve` retries.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
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
from gcore.system.files import read_json_file

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError


Scheme = Literal["hf", "ms"]
_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")
_REVISION = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._/-]{0,198}[A-Za-z0-9_-])?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class ModelError(DataError):
    """A model cannot be used or downloaded."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on a hub, as `model.path` names it.

    `revision`: a branch, tag or commit; empty: the hub's default branch.
    """

    scheme: Scheme
    owner: str
    name: str
    revision: str = ""

    @property
    def repo(self) -> str:
        """The repository's name on the hub: OWNER/NAME."""
        return f"{self.owner}/{self.name}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.repo}" + (f"@{self.revision}" if self.revision else "")


def hub_model(path: str) -> HubModel | None:
    """Parse `model.path` of a spec: return the hub model that it names, or None for a local folder.

    Raises ModelError for an invalid hub name.
    """
    scheme, separator, rest = path.partition("://")
    if not separator or scheme not in ("hf", "ms"):
        return None
    repo, at, revision = rest.partition("@")
    owner, slash, name = repo.partition("/")
    wrong = ""
    if not slash or not name:
        wrong = "the owner or the model name is missing"
    elif not all(_PART.fullmatch(part) and ".." not in part and "--" not in part for part in (owner, name)):
        wrong = "owner and name may contain only letters, digits, '.', '_' and '-', and the name no further '/'"
    elif at and (not _REVISION.fullmatch(revision) or ".." in revision):
        wrong = f"{revision!r} is not a valid revision"
    if wrong:
        raise ModelError(
            f"{path!r} is not a model on a hub: {wrong}",
            where="model.path",
            fix=f"Write {scheme}://OWNER/NAME[@REVISION]",
        )
    return HubModel("hf" if scheme == "hf" else "ms", owner, name, revision)


def is_commit(revision: str) -> bool:
    """Return whether the revision is a commit, which never changes, unlike a branch or a tag."""
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
"""Patterns of the small files that a controller reads itself: configuration, tokenizer, templates, index of the
weights.
"""

PIPELINE_INDEX = "model_index.json"
"""The file that makes a folder a pipeline of diffusers, whose parts are models in subfolders."""

PIPELINE_SMALL = (PIPELINE_INDEX, "*/*.json", "*/*.txt", "*/*.model")
"""Patterns of the small files of a pipeline."""

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
NETWORK_FILE = "diffusion_pytorch_model.safetensors"
"""The weights of a network of diffusers. Other names are other precisions."""
ADAPTER_CONFIG = "adapter_config.json"
"""The file that marks a folder with only an adapter (LoRA)."""

NO_ANSWER = (ValueError, TypeError, LookupError, AttributeError, AssertionError)
"""Exceptions that the hubs' clients raise for responses in an unexpected format."""


class HubUnreachable(ModelError):
    """The hub did not answer, or sent an incomplete or unexpected response. A retry may succeed."""


class HubOffline(ModelError):
    """The environment forbids access to the hub (HF_HUB_OFFLINE), and the cache does not have the complete model."""


def not_a_hub(who: str, model: HubModel, error: Exception) -> HubUnreachable:
    """Return the error for a response that is not a hub's, often the login page of a proxy. `who`: hub and endpoint."""
    said = " ".join(str(error).split())[:160] or type(error).__name__
    return HubUnreachable(
        f"{who} returned something other than the model's files ({said})",
        where=str(model),
        fix="Check the endpoint and any proxy in between, or name the folder of a copy",
    )


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a model on a hub. `size` in bytes; 0 if unknown."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class HubListing:
    """The names and sizes of a model's files on a hub at one commit."""

    model: HubModel
    commit: str
    files: tuple[HubFile, ...]

    @property
    def first(self) -> str:
        """The name of the file that says what the model is."""
        names = {file.name for file in self.files}
        return PIPELINE_INDEX if PIPELINE_INDEX in names and "config.json" not in names else "config.json"

    def small(self, *, code: bool) -> tuple[HubFile, ...]:
        """Files to download before the weights: `SMALL`, and with `code` also the model's Python files; of a pipeline
        `PIPELINE_SMALL`."""
        patterns: tuple[str, ...] = (*SMALL, "*.py") if code else SMALL
        if self.first == PIPELINE_INDEX:
            patterns = PIPELINE_SMALL
        return tuple(f for f in self.files if any(_matches(f.name, pattern) for pattern in patterns))

    def weights(self, folder: Path) -> tuple[HubFile, ...]:
        """Weight files that loading reads; second copies of the weights under other names are left out.

        `folder` already contains the small files, whose index lists the weight files.
        """
        named = weight_file_names(folder)
        if self.first == PIPELINE_INDEX:
            return tuple(f for f in self.files if f.name in named)
        found = tuple(f for f in self.files if _matches(f.name, "*.safetensors"))
        return tuple(f for f in found if f.name in named) or found


class Hub(Protocol):
    """A model hub and its client. Downloads go to the hub's own cache, which it shares with other programs.

    Methods block, so call them off the event loop.
    """

    @property
    def title(self) -> str:
        """Name of the hub for messages."""
        ...

    def listing(self, model: HubModel, revision: str) -> HubListing:
        """Return the names and sizes of the model's files at `revision` (empty: the default branch), and its current
        commit.

        Raises HubUnreachable, ModelError.
        """
        ...

    def fetch(self, listing: HubListing, names: Sequence[str]) -> Path:
        """Download the files `names` into the cache unless they are there; return the model's folder in the cache.

        Raises HubUnreachable, ModelError.
        """
        ...

    def cached(self, model: HubModel, revision: str) -> tuple[Path, str] | None:
        """Return the model's folder in the cache and its commit, without access to the hub; None if it was never
        downloaded.

        Files may be missing in the folder.
        """
        ...

    def received(self, listing: HubListing, names: Sequence[str]) -> int:
        """Return how many bytes of the files `names` are on this machine, including partial downloads."""
        ...


def weight_file_names(folder: Path) -> frozenset[str]:
    """Return the names of the weight files that the model in `folder` has: those in its index, or
    `model.safetensors`. Of a pipeline: those of its parts that are models.
    """
    if (folder / PIPELINE_INDEX).is_file():
        return frozenset(name for part in _parts_with_weights(folder) for name in _part_weights(folder, part))
    try:
        table = read_json_file(folder / INDEX)["weight_map"]
        return frozenset(str(name) for name in table.values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return frozenset({WHOLE})


def _parts_with_weights(folder: Path) -> Iterator[str]:
    """The subfolders of a pipeline's parts that are models, as its index names them: those with a configuration."""
    try:
        named = read_json_file(folder / PIPELINE_INDEX)
    except (OSError, ValueError):
        return
    for part, library in named.items() if isinstance(named, dict) else ():
        if isinstance(library, list) and library[-1] is not None and (folder / part / "config.json").is_file():
            yield part


def _part_weights(folder: Path, part: str) -> Iterator[str]:
    """The names of the weight files of one part, below the pipeline's folder."""
    whole = weights_file(folder / part)
    table = _read_object(folder / part / f"{whole}.index.json").get("weight_map")
    files = set(map(str, table.values())) if isinstance(table, dict) else {whole}
    for name in files:
        yield f"{part}/{name}"


def weights_file(model: Path) -> str:
    """Return the name of the file with the weights of the model in `model`, which may be a network of diffusers."""
    return NETWORK_FILE if "_diffusers_version" in _read_object(model / "config.json") else WHOLE


def _read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if it is missing or not readable."""
    try:
        found = read_json_file(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def is_whole(folder: Path, *, weights: bool) -> bool:
    """Return whether `folder` has all files that a job needs; with `weights` also the weight files.

    Hub clients rename only complete files into place, so the check is by name.
    """
    draws = (folder / PIPELINE_INDEX).is_file()
    needed = {PIPELINE_INDEX} if draws else {"config.json", "tokenizer.json"}
    needed |= weight_file_names(folder) if weights else frozenset()
    return all((folder / name).is_file() for name in needed)


def file_size(path: Path) -> int:
    """Return the size of a file in bytes; 0 for a folder, a missing file, or one that was just renamed."""
    try:
        found = path.stat()
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def total_size(files: Iterable[HubFile]) -> int:
    """Return the total size of the files in bytes."""
    return sum(file.size for file in files)


def _matches(name: str, pattern: str) -> bool:
    # Files in subfolders belong to another model or format, except code, which may be a package.
    return fnmatchcase(name, pattern) and ("/" not in name or "/" in pattern or pattern == "*.py")


HUGGINGFACE_BRANCH = "main"
ETAG_TIMEOUT_S = 30.0
"""Maximum seconds to wait for a file's metadata."""
ANSWER_S = 30.0
"""Maximum seconds to wait for the list of a model's files."""

KNOWN = 200
"""Maximum number of models that each query returns when a mistyped name is compared with existing ones."""


class HuggingFace:
    """The Hugging Face hub. `endpoint`, `cache`, `offline`: overrides; None: as the environment variables set it."""

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
        """Ask the hub for the model's files at `revision` and its commit; raises as `Hub.listing`, and HubOffline."""
        from huggingface_hub.errors import OfflineModeIsEnabled

        with self._explained(model, revision):
            if self._offline:
                raise OfflineModeIsEnabled
            info = self._api.model_info(
                model.repo, revision=revision or None, files_metadata=True, timeout=ANSWER_S, token=None
            )
            if not is_commit(revision):  # store the branch's commit in the cache, for use without the hub
                self._api.resolve_revision(model.repo, revision=revision or HUGGINGFACE_BRANCH, cache_dir=self._cache)
        files = tuple(HubFile(s.rfilename, s.size if isinstance(s.size, int) else 0) for s in info.siblings or ())
        if info.sha is None:
            raise ModelError("the hub returned no commit", where=str(model), fix="Name one: hf://OWNER/NAME@COMMIT")
        return HubListing(model, info.sha, files)

    def fetch(self, listing: HubListing, names: Sequence[str]) -> Path:
        """Download the files `names` into the cache; return the model's folder there. Raises as `Hub.fetch`."""
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
        """Return the model's folder in the cache and its commit, without access to the hub; None if there is none."""
        commit = revision or HUGGINGFACE_BRANCH
        if not is_commit(commit):
            try:
                commit = (self._folder(model) / "refs" / commit).read_text().strip()
            except OSError:
                return None
        folder = self._folder(model) / "snapshots" / commit
        return (folder, commit) if folder.is_dir() else None

    def received(self, listing: HubListing, names: Sequence[str]) -> int:
        """Return how many bytes of the files `names` are in the cache, including all partial downloads of the model."""
        folder = self._folder(listing.model)
        here = [folder / "snapshots" / listing.commit / name for name in names]
        # Partial downloads are next to the blobs until they are complete.
        return sum(file_size(path) for path in (*here, *folder.glob("blobs/*.incomplete")))

    def _folder(self, model: HubModel) -> Path:
        return self._cache / f"models--{model.owner}--{model.name}"

    @contextlib.contextmanager
    def _explained(self, model: HubModel, revision: str) -> Iterator[None]:
        """Convert the errors of the hub's client in the block to ModelErrors that say what to do."""
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
                f"the model is not complete in the cache {self._cache}, and HF_HUB_OFFLINE forbids a download",
                where=where,
                fix="Unset HF_HUB_OFFLINE, copy the model into the cache, or name the folder of a copy",
            ) from error
        except GatedRepoError as error:
            raise ModelError(
                "the model is gated, and there is no token with access to it",
                where=where,
                fix="Accept its terms on its page, and set HF_TOKEN to a token of that account, also for the controllers",
            ) from error
        except RevisionNotFoundError as error:
            raise ModelError(
                f"the model has no revision {revision!r}{self._near_revision(model, revision)}",
                where=where,
                fix="Name one of its branches, tags or commits",
            ) from error
        except RepositoryNotFoundError as error:
            raise ModelError(
                f"{self.title} ({self.endpoint}) has no such model, or hides it from this account{self._near_model(model)}",
                where=where,
                fix="Correct the name, or set HF_TOKEN for a private model",
            ) from error
        except HfHubHTTPError as error:
            raise self._refused(model, error) from error
        except (httpx2.HTTPError, LocalEntryNotFoundError, RevisionResolutionError) as error:
            raise self._away(model, error) from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
                raise ModelError(
                    f"cannot store the model in {self._cache} ({error.strerror})",
                    where=where,
                    fix="Free space, or set HF_HOME to another folder",
                ) from error
            raise self._away(model, error) from error  # the client raises OSError for a transfer of the wrong size
        except NO_ANSWER as error:
            raise not_a_hub(f"{self.title} at {self.endpoint}", model, error) from error

    def _refused(self, model: HubModel, error: HfHubHTTPError) -> ModelError:
        code = error.response.status_code
        if code in (401, 403):
            return ModelError(
                f"{self.title} denies this account access to the model ({code})",
                where=str(model),
                fix="Set HF_TOKEN to a token with access, also for the controllers",
            )
        return self._away(model, error)

    def _away(self, model: HubModel, error: Exception) -> HubUnreachable:
        cause = error.__cause__ or error
        said = " ".join(str(cause).split())[:160] or type(cause).__name__
        return HubUnreachable(
            f"{self.title} does not answer at {self.endpoint} ({said})",
            where=str(model),
            fix="Check the network, set HF_ENDPOINT to a mirror, or set HF_HUB_OFFLINE=1 to use the cache",
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
    """Return `, did you mean ...?` if the hub has a name similar to `wrong`, else "". Errors of the hub are ignored.

    `known`: returns the existing names.
    """
    import httpx2

    try:
        return did_you_mean(wrong, known())
    except (httpx2.HTTPError, OSError, ValueError, KeyError):
        return ""


def _literally(name: str) -> str:
    """Return a file name pattern that matches only this name."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


MODELSCOPE_BRANCH = "master"
PACKAGE = "modelscope_hub"


class ModelScope:
    """ModelScope, through its own client, an optional extra.

    The client respects MODELSCOPE_CACHE, MODELSCOPE_ENDPOINT and MODELSCOPE_API_TOKEN. `endpoint`, `cache`: overrides;
    None: as the environment variables set it. Raises ModelError if the client is not installed. ModelScope returns no
    commit for a branch, but a last commit for each file. The newest of them is taken as the branch's commit; it is
    wrong only if later commits did nothing but delete files.
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
        """Ask the hub for the model's files at `revision` and its commit; raises as `Hub.listing`."""
        branch = revision or MODELSCOPE_BRANCH
        with self._explained(model, branch):
            entries = self._api.legacy.list_repo_files(model.repo, "model", revision=branch)
            blobs = [e for e in entries if isinstance(e, dict) and e.get("Type", "blob") != "tree"]
            files = tuple(HubFile(str(e.get("Path") or e.get("Name")), int(e.get("Size") or 0)) for e in blobs)
        return HubListing(model, branch if is_commit(branch) else _newest(blobs) or branch, files)

    def fetch(self, listing: HubListing, names: Sequence[str]) -> Path:
        """Download the files `names` into the cache; return the model's folder there. Raises as `Hub.fetch`."""
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
        """Return the model's folder in the cache and its commit, without access to the hub; None if there is none.

        The commit of a branch is not stored in this cache, so only downloads under the same revision are found.
        """
        commit = revision or MODELSCOPE_BRANCH
        folder = self._folder(model) / "snapshots" / commit
        return (folder, commit) if folder.is_dir() else None

    def received(self, listing: HubListing, names: Sequence[str]) -> int:
        """Return how many bytes of the files `names` are in the cache, including partial downloads."""
        folder = self._folder(listing.model) / "snapshots" / listing.commit
        # A partial download has a longer name, next to its final path.
        there = [path for path in folder.rglob("*") if any(path.name.startswith(Path(n).name) for n in names)]
        return sum(file_size(path) for path in there)

    def _folder(self, model: HubModel) -> Path:
        return self._cache / "models" / f"{model.owner}--{model.name}"

    @contextlib.contextmanager
    def _explained(self, model: HubModel, revision: str) -> Iterator[None]:
        """Convert the errors of the hub's client in the block to ModelErrors that say what to do."""
        errors, where = self._errors, str(model)
        try:
            yield
        except errors.NotExistError as error:
            raise ModelError(
                f"{self.title} has no such model, or the model has no revision {revision!r}",
                where=where,
                fix="Correct the name, or set MODELSCOPE_API_TOKEN for a private model",
            ) from error
        except (errors.AuthenticationError, errors.PermissionDeniedError) as error:
            raise ModelError(
                f"{self.title} denies this account access to the model",
                where=where,
                fix="Set MODELSCOPE_API_TOKEN to a token with access, also for the controllers",
            ) from error
        except errors.HubError as error:
            raise self._away(model, error) from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
                raise ModelError(
                    f"cannot store the model in {self._cache} ({error.strerror})",
                    where=where,
                    fix="Free space, or set MODELSCOPE_CACHE to another folder",
                ) from error
            raise self._away(model, error) from error
        except NO_ANSWER as error:
            raise not_a_hub(self.title, model, error) from error

    def _away(self, model: HubModel, error: Exception) -> HubUnreachable:
        said = " ".join(str(error).split())[:160]
        return HubUnreachable(
            f"{self.title} does not answer ({said})",
            where=str(model),
            fix="Check the network and MODELSCOPE_ENDPOINT, or name the folder of a copy",
        )


def _newest(entries: Sequence[dict[str, Any]]) -> str:
    """Return the commit of the file that was changed last; empty if the listing has no commits."""
    dated = [
        (int(entry.get("CommittedDate") or 0), str(entry["Revision"]))
        for entry in entries
        if is_commit(str(entry.get("Revision", ""))) and str(entry.get("CommittedDate", 0)).isdigit()
    ]
    return max(dated)[1] if dated else ""

"""Resolve `model.path` of a spec to a folder on this machine; download a hub model if necessary.

A controller calls `resolve_model` off the event loop, once per job on its node; workers get the folder. A hub model is
downloaded into the hub's own cache, small files first, so that code and pickles are rejected before the large files.
Interrupted downloads are retried; a repeated download changes nothing. A model that is pinned to a commit and complete
in the cache needs no access to the hub.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tenacity

from gcore.models.checks import check_code, check_weights, read_config
from gcore.models.hubs import (
    INDEX,
    PIPELINE_INDEX,
    WHOLE,
    Hub,
    HubFile,
    HubListing,
    HubModel,
    HubOffline,
    HubUnreachable,
    HuggingFace,
    ModelError,
    ModelScope,
    Scheme,
    hub_model,
    is_commit,
    is_whole,
    total_size,
    weight_file_names,
)

Progress = Callable[[int, int], None]
"""Called with the bytes received so far and the total bytes of a download."""

FEW_TRIES = 2
"""Tries to reach a hub while a user waits at a prompt."""

MANY_TRIES = 8
"""Tries to reach a hub for a job that is starting: about two minutes, including pauses."""

LONGEST_PAUSE_S = 30.0
"""Maximum pause in seconds between two tries."""

LOOK_S = 1.0
"""Interval in seconds between two progress measurements of a download."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model in a folder on this machine.

    `revision`: its commit on the hub; empty for a local folder. `remote_code`: Python files from the model's folder
    that engines and ranks will run; empty unless the spec trusts them.
    """

    folder: Path
    revision: str = ""
    remote_code: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HubAnswer:
    """What a download of a model would transfer, and from where.

    `hub`: title of the hub. `files`: names and sizes in bytes. `here`: bytes of them that are already in the cache.
    """

    hub: str
    commit: str
    files: tuple[HubFile, ...]
    here: int

    @property
    def total(self) -> int:
        """Total size of the files in bytes."""
        return total_size(self.files)


def open_hub(scheme: Scheme) -> Hub:
    """Return the hub of a scheme (`hf`, `ms`). Imports its client now; raises ModelError if the client is not
    installed.
    """
    return ModelScope() if scheme == "ms" else HuggingFace()


def resolve_model(
    path: str,
    *,
    trust_remote_code: bool = False,
    revision: str = "",
    weights: bool = True,
    tries: int = FEW_TRIES,
    progress: Progress | None = None,
    hub: Hub | None = None,
) -> ResolvedModel:
    """Return the folder of the model in `path` (a spec's `model.path`). Blocks; downloads a hub model if necessary.

    `revision`: the commit at which the job was created; overrides the one in `path`. `weights` False: get only
    configuration and tokenizer. `tries`: attempts to reach the hub. `hub`: overrides the hub of `path`'s scheme. Raises
    ModelError (a DataError) if the model does not exist, access is missing, the hub does not answer, the weights are a
    pickle, or the model needs code that is not trusted.
    """
    model = hub_model(path)
    if model is None:
        folder = Path(path)
        if folder.is_dir():
            check_weights((file.name for file in folder.iterdir()), where=path)
        return ResolvedModel(folder, "", check_code(read_config(folder), trusted=trust_remote_code, where=path))
    hub = hub or open_hub(model.scheme)
    revision = revision or model.revision
    if is_commit(revision) and (found := hub.cached(model, revision)) is not None:
        folder, commit = found
        if is_whole(folder, weights=weights):
            code = check_code(read_config(folder), trusted=trust_remote_code, where=path)
            if all((folder / file).is_file() for file in code):
                return ResolvedModel(folder, commit, code)
    return _Fetching(hub, model, path, trust_remote_code, tries, progress).run(revision, weights=weights)


def ask_hub(path: str, *, trust_remote_code: bool = False, hub: Hub | None = None) -> HubAnswer | None:
    """Return what a download of `path` would transfer; None for a local folder.

    Downloads the small files, because the weight files are named in one of them. Raises ModelError.
    """
    model = hub_model(path)
    if model is None:
        return None
    hub = hub or open_hub(model.scheme)
    listing = _patient(FEW_TRIES)(hub.listing, model, model.revision)
    resolved = resolve_model(path, trust_remote_code=trust_remote_code, revision=listing.commit, weights=False, hub=hub)
    files = (*listing.small(code=bool(resolved.remote_code)), *listing.weights(resolved.folder))
    return HubAnswer(hub.title, listing.commit, files, hub.received(listing, [f.name for f in files]))


@dataclass(frozen=True, slots=True)
class _Fetching:
    hub: Hub
    model: HubModel
    path: str
    trusted: bool
    tries: int
    progress: Progress | None

    def run(self, revision: str, *, weights: bool) -> ResolvedModel:
        try:
            listing = _patient(self.tries)(self.hub.listing, self.model, revision)
        except (HubUnreachable, HubOffline):
            # Without the hub, use the branch's state at the last download.
            if (found := self._in_cache(revision, weights=weights)) is None:
                raise
            return found
        check_weights((file.name for file in listing.files), where=self.path)
        folder = self._fetch(listing, [f for f in listing.small(code=False) if f.name == listing.first])
        code = check_code(read_config(folder), trusted=self.trusted, where=self.path)
        small = listing.small(code=bool(code))
        self._fetch(listing, small)
        self._check_index(listing, folder)
        if weights:
            needed = listing.weights(folder)
            with self._watched(listing, (*small, *needed)):
                self._fetch(listing, needed)
        return ResolvedModel(folder, listing.commit, code)

    def _in_cache(self, revision: str, *, weights: bool) -> ResolvedModel | None:
        found = self.hub.cached(self.model, revision)
        if found is None or not is_whole(found[0], weights=weights):
            return None
        folder, commit = found
        return ResolvedModel(folder, commit, check_code(read_config(folder), trusted=self.trusted, where=self.path))

    def _fetch(self, listing: HubListing, files: Sequence[HubFile]) -> Path:
        if not files:
            raise ModelError(
                "the hub lists no config.json or no safetensors files for this model",
                where=self.path,
                fix="Name a model in the transformers format",
            )
        return _patient(self.tries)(self._brought, listing, [f.name for f in files])

    def _brought(self, listing: HubListing, names: Sequence[str]) -> Path:
        folder = self.hub.fetch(listing, names)
        lacking = [name for name in names if not (folder / name).is_file()]
        if lacking:  # clients store a different commit in a different folder
            raise HubUnreachable(
                f"{self.hub.title} listed {lacking[0]} at commit {listing.commit} but sent something else",
                where=self.path,
                fix="Try again later, or name the folder of a copy",
            )
        return folder

    def _check_index(self, listing: HubListing, folder: Path) -> None:
        """Raise ModelError if the index of the weights names files that the hub lacks, which means an incomplete
        upload.
        """
        there = {file.name for file in listing.files}
        missing = sorted(weight_file_names(folder) - there)
        if missing and (listing.first == PIPELINE_INDEX or (INDEX in there and WHOLE not in there)):
            raise ModelError(
                f"its index names weight files that the hub does not list (first {missing[0]}, {len(missing)} in all)",
                where=self.path,
                fix="Name another revision, or ask its owner to upload the rest",
            )

    @contextlib.contextmanager
    def _watched(self, listing: HubListing, files: Sequence[HubFile]) -> Iterator[None]:
        """Report the download's progress while the block runs, from the sizes of the files on disk, not from the hub's
        client.
        """
        progress = self.progress
        if progress is None:
            yield
            return
        names, total = [f.name for f in files], total_size(files)
        ended = threading.Event()

        def look() -> None:
            while not ended.is_set():
                progress(min(self.hub.received(listing, names), total), total)
                ended.wait(LOOK_S)

        watcher = threading.Thread(target=look, name="model progress", daemon=True)
        watcher.start()
        try:
            yield
            progress(total, total)
        finally:
            ended.set()
            watcher.join()


def _patient(tries: int) -> tenacity.Retrying:
    """Return a retry policy: up to `tries` tries while the hub does not answer, with growing pauses."""
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(HubUnreachable),
        stop=tenacity.stop_after_attempt(tries),
        wait=tenacity.wait_exponential(multiplier=1, max=LONGEST_PAUSE_S),
        reraise=True,
    )


def main() -> None:
    """`python -m gcore.models REQUEST`: download a model to this machine, in a separate process.

    A controller starts it, so that the hub's client, with its memory, threads and blocking calls, is not part of the
    controller. REQUEST is a JSON object; standard output gets one JSON object per line:

        {"done": 1200, "total": 3400}                                         progress in bytes
        {"folder": "...", "revision": "...", "remote_code": ["..."]}          the result
        {"error": "...", "where": "...", "fix": "..."}                        or an error
    """
    request = json.loads(sys.argv[1])
    try:
        found = resolve_model(
            request["path"],
            trust_remote_code=request["trust_remote_code"],
            revision=request["revision"],
            tries=request.get("tries", MANY_TRIES),
            progress=lambda done, total: _say({"done": done, "total": total}),
        )
    except ModelError as error:
        _say({"error": error.what, "where": error.where, "fix": error.fix})
        sys.exit(error.exit_code)
    _say({"folder": str(found.folder), "revision": found.revision, "remote_code": found.remote_code})


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()

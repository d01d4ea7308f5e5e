"""From `model.path` to a folder on this machine.

`resolve_model` is what a controller calls, off the event loop, once for each job on its node; workers get the folder.
A model of a hub is fetched into the hub's own cache, small files first, so that code and pickles are refused before
anything large moves. What breaks off is tried again: fetching twice is fetching once. A model that is pinned to a
commit and whole in the cache needs no hub.
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
    WHOLE,
    Hub,
    HubFile,
    HubListing,
    HubModel,
    HubOffline,
    HubUnreachable,
    ModelError,
    Scheme,
    hub_model,
    is_commit,
    is_whole,
    total_size,
    weight_files,
)

Progress = Callable[[int, int], None]
"""Bytes that are here, and bytes in all."""

FEW_TRIES = 2
"""For who waits at a prompt."""

MANY_TRIES = 8
"""For a job that is to begin: about two minutes, longest pauses included."""

LONGEST_PAUSE_S = 30.0

LOOK_S = 1.0
"""Between two looks at how much is here."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this machine. `revision`: its commit on the hub, empty for a folder. `remote_code`: Python files that
    come with the model and will run in its engines and ranks; empty unless the spec trusts them."""

    folder: Path
    revision: str = ""
    remote_code: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HubAnswer:
    """What fetching a model would mean. `files`: names with their sizes in bytes; `here`: bytes that are in the cache."""

    hub: str
    commit: str
    files: tuple[HubFile, ...]
    here: int

    @property
    def total(self) -> int:
        """Bytes in all."""
        return total_size(self.files)


def open_hub(scheme: Scheme) -> Hub:
    """The hub of a scheme; its client is imported only now. Raises ModelError if that is not installed."""
    if scheme == "ms":
        from gcore.models.hubs import ModelScope

        return ModelScope()
    from gcore.models.hubs import HuggingFace

    return HuggingFace()


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
    """The folder of the model that `path` (`model.path` of a spec) names. Blocks; may download.

    `revision`: the commit that the job was created with; it wins over the one in `path`. `weights` False: configuration
    and tokenizer are enough. `hub`: another than the one of `path`'s scheme. Raises ModelError (a DataError): no such
    model, no access, no hub; weights that are a pickle; code that would have to run and is not trusted.
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
    """What would be downloaded for `path`; None for a folder. Fetches the small files. Raises ModelError."""
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
            # Without the hub, what a branch was when it was fetched last is as good as an answer can be.
            if (found := self._in_cache(revision, weights=weights)) is None:
                raise
            return found
        check_weights((file.name for file in listing.files), where=self.path)
        folder = self._fetch(listing, [f for f in listing.small(code=False) if f.name == "config.json"])
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
                "the hub lists no config.json, or no safetensors, for it",
                where=self.path,
                fix="Name a model in the transformers format",
            )
        return _patient(self.tries)(self._brought, listing, [f.name for f in files])

    def _brought(self, listing: HubListing, names: Sequence[str]) -> Path:
        folder = self.hub.fetch(listing, names)
        lacking = [name for name in names if not (folder / name).is_file()]
        if lacking:  # clients keep what a hub calls another commit in another place
            raise HubUnreachable(
                f"{self.hub.title} listed {lacking[0]} at commit {listing.commit} and brought something else",
                where=self.path,
                fix="Try again later, or name the folder of a copy",
            )
        return folder

    def _check_index(self, listing: HubListing, folder: Path) -> None:
        """Raise ModelError if the index of the weights names files that the hub does not have: an upload broke off."""
        there = {file.name for file in listing.files}
        missing = sorted(weight_files(folder) - there)
        if INDEX in there and WHOLE not in there and missing:
            raise ModelError(
                f"its index names weights that the hub does not list ({missing[0]}, {len(missing)} in all)",
                where=self.path,
                fix="Name another revision, or ask its owner to upload the rest",
            )

    @contextlib.contextmanager
    def _watched(self, listing: HubListing, files: Sequence[HubFile]) -> Iterator[None]:
        """Report progress while the block runs: by looking at what lies on the disk, whatever the client does."""
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
    """Tries again what a hub that did not answer may be asked again."""
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(HubUnreachable),
        stop=tenacity.stop_after_attempt(tries),
        wait=tenacity.wait_exponential(multiplier=1, max=LONGEST_PAUSE_S),
        reraise=True,
    )


def main() -> None:
    """`python -m gcore.models REQUEST`: brings a model to this machine, in a process of its own.

    A controller starts it, so that neither a hub's client nor what it does with memory, threads and time is in the
    controller. REQUEST is a JSON object; standard output gets a JSON object a line:

        {"done": 1200, "total": 3400}                                         bytes, as it goes on
        {"folder": "...", "revision": "...", "remote_code": ["..."]}          at the end
        {"error": "...", "where": "...", "fix": "..."}                        or this
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

"""Samples kept for users in the run folder: which groups of a step are kept, their files, and how readers select them.

    samples/LINEAGE-STEP/INCARNATION.jsonl           KeptGroup, written by the controller that holds the groups
    samples/LINEAGE-STEP/advantages-RANK.jsonl       KeptAdvantage, written by the rank that computed them
    samples/LINEAGE-STEP/SHA256.png                  pictures of the groups: links to blobs of the node's store, or copies
    samples/evaluation-LINEAGE-STEP/SHA256.png       pictures that the policy generated for held-out prompts

The first two identify a group (all samples of one prompt) by its digest. Texts longer than the spec's limit are cut.
Every controller keeps a limited number of the groups that it holds, spread evenly over the step, because the first ones
would come from the first shards or have the shortest responses. Train ranks choose the same groups for advantages. Files
are written atomically. The writer keeps the newest steps and removes older ones.

Pictures have a bound of their own, `samples.picture_mib`: those of the oldest steps are deleted first, and then shown by
their SHA-256. Of generated pictures each controller keeps whole groups, in at most 1/8 of the bound per step, so that
several steps can be compared. Evaluations have at most half of the bound; those of the first, the newest and the best are
deleted last.

If samples cannot be written, they are missing, and the step is not affected. Reading and writing block on the disk, so
call them off the event loop.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, Literal, Protocol, TypeVar

from gcore.config.spec import SamplesSpec
from gcore.errors import UsageError
from gcore.ledger.records.chain import Head, Seal, SealedGroup
from gcore.ledger.records.job import KeptPicture
from gcore.ledger.selection import is_ancestor
from gcore.media.protocol import blob_path
from gcore.schema import Record, RecordPart, UnreadableRecord
from gcore.system.files import replace_file
from gcore.types import DenoisingTrajectory, FinishReason, Group, PromptRef, Range, Version


def choose_groups(seal: Seal, limit: int) -> tuple[SealedGroup, ...]:
    """Choose the groups of a step whose samples are kept: at most `limit` per holder (controller), spread evenly.

    In the seal's order.
    """
    places: dict[str, list[int]] = {}
    for place, group in enumerate(seal.groups):
        places.setdefault(group.holder, []).append(place)
    taken = sorted(place for its in places.values() for place in _spread(its, limit))
    return tuple(seal.groups[place] for place in taken)


def _spread(places: list[int], limit: int) -> list[int]:
    if len(places) <= limit:
        return places
    # n·len/limit grows by at least one, so no group is chosen twice.
    return [places[n * len(places) // limit] for n in range(limit)]


class KeptText(RecordPart):
    """A text that was cut to a maximum length. `more`: number of characters cut off at its end."""

    text: str
    more: int = 0

    @classmethod
    def of(cls, text: str, characters: int) -> KeptText:
        """Cut `text` to at most `characters` characters. Escapes lone surrogates, which UTF-8 files cannot contain."""
        kept = text[:characters].encode("utf-8", errors="backslashreplace").decode("utf-8")
        return cls(text=kept, more=max(0, len(text) - characters))


class KeptSample(RecordPart):
    """One kept response.

    `tokens`: its length. `parts`: name and value of the parts of its reward. `versions`: the policy versions that
    generated it. `observed`: character ranges [start, end) that the policy did not generate, such as tool output;
    `observed_tokens`: their number of tokens. `pictures`: those that tools returned, in their order.

    Of a policy that generates pictures, `picture` is the response and `steps` the number of its trained denoising steps;
    it has no text and no tokens.
    """

    came_with: ClassVar[Mapping[str, int]] = {"pictures": 3, "picture": 3, "steps": 3}

    response: KeptText
    tokens: int
    reward: float
    parts: tuple[tuple[str, float], ...] = ()
    finish_reason: FinishReason
    masked: bool = False
    versions: tuple[str, ...] = ()
    observed: tuple[Range, ...] = ()
    observed_tokens: int = 0
    pictures: tuple[KeptPicture, ...] = ()
    picture: KeptPicture | None = None
    steps: int = 0


class KeptGroup(Record):
    """A kept group: a prompt with all its responses. `answer`: expected answer in the dataset; empty if there is none.

    `holder`: incarnation of the controller that held the group. `pictures`: those of the prompt, in its order.
    """

    came_with: ClassVar[Mapping[str, int]] = {"pictures": 3}

    ref: PromptRef
    digest: str
    source: str
    prompt: KeptText
    prompt_tokens: int
    answer: str = ""
    temperature: float = 1.0
    holder: str
    samples: tuple[KeptSample, ...]
    pictures: tuple[KeptPicture, ...] = ()

    @property
    def all_pictures(self) -> tuple[KeptPicture, ...]:
        """The pictures of the prompt and of all responses."""
        return (*self.pictures, *(one for sample in self.samples for one in sample.pictures), *self.generated)

    @property
    def generated(self) -> tuple[KeptPicture, ...]:
        """The pictures that the policy generated, in the order of the samples."""
        return tuple(sample.picture for sample in self.samples if sample.picture is not None)

    @property
    def mean_reward(self) -> float:
        """Mean reward of the group's samples."""
        return math.fsum(sample.reward for sample in self.samples) / max(len(self.samples), 1)


class KeptAdvantage(Record):
    """Advantage of sample number `sample` of the group with this digest.

    `mean`: over its tokens. `least`, `most`: smallest and largest value, if tokens differ.
    """

    digest: str
    sample: int
    mean: float
    least: float | None = None
    most: float | None = None


def make_kept_group(group: Group, digest: str, prompt: str, answer: str, holder: str, characters: int) -> KeptGroup:
    """Build the record of `group`. `digest`: that of the group. `prompt`: text of its prompt. `answer`: see
    `KeptGroup`.

    `characters`: maximum length of each text.
    """
    samples = tuple(
        KeptSample(
            response=KeptText.of(sample.text, characters),
            tokens=len(sample.token_ids),
            reward=sample.reward,
            parts=sample.reward_parts,
            finish_reason=sample.finish_reason,
            masked=sample.masked,
            versions=tuple(sorted({str(span.version) for span in sample.spans})),
            observed=tuple((start, min(end, characters)) for start, end in sample.observed_text if start < characters),
            observed_tokens=sample.length - sample.own_tokens,
            pictures=KeptPicture.of(sample.media),
            picture=next(iter(KeptPicture.of(sample.media, "decoded")), None),
            steps=sample.length if isinstance(sample.output, DenoisingTrajectory) else 0,
        )
        for sample in group.samples
    )
    return KeptGroup(
        ref=group.ref,
        digest=digest,
        source=group.source,
        prompt=KeptText.of(prompt, characters),
        prompt_tokens=len(group.prompt_ids),
        answer=answer[:characters],
        temperature=group.temperature,
        holder=holder,
        samples=samples,
        pictures=KeptPicture.of(group.media),
    )


log = logging.getLogger(__name__)
R = TypeVar("R", bound=Record)
FOLDER = "samples"
ADVANTAGES = "advantages-"


def step_folder(run_dir: Path, version: Version) -> Path:
    """Return the folder with the samples of the step that led to `version`."""
    return run_dir / FOLDER / f"{version.lineage}-{version.step}"


def write_samples(run_dir: Path, version: Version, name: str, records: Iterable[Record]) -> None:
    """Write the records as the file `name`.jsonl of a step's folder, atomically. Raises OSError."""
    folder = step_folder(run_dir, version)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / f"{name}.jsonl", b"".join(record.encode() + b"\n" for record in records))


def advantages_name(rank: int) -> str:
    """Return the file name, without suffix, for the advantages that a rank computed."""
    return f"{ADVANTAGES}{rank}"


def kept_steps(run_dir: Path) -> list[Version]:
    """Return the versions of the steps of which groups are kept, oldest first. Raises OSError."""
    return [version for version in _step_folders(run_dir) if _files(run_dir, version, advantages=False)]


def prune_steps(run_dir: Path, keep: int) -> None:
    """Delete the samples of all steps but the newest `keep`. Raises OSError."""
    for version in _step_folders(run_dir)[:-keep]:
        shutil.rmtree(step_folder(run_dir, version), ignore_errors=True)


@dataclass(frozen=True, slots=True)
class GroupLine:
    """Where a kept group is in its file (`offset`, `length` in bytes), and the fields by which groups are selected.

    Without texts, so that all groups of a step fit into memory.
    """

    ref: PromptRef
    digest: str
    source: str
    mean_reward: float
    file: Path
    offset: int
    length: int


def list_groups(run_dir: Path, version: Version) -> list[GroupLine]:
    """List the kept groups of a step without their texts, ordered by ref (prompt). Raises OSError."""
    found: dict[str, GroupLine] = {}
    for file in _files(run_dir, version, advantages=False):
        for offset, line, group in _records(file, KeptGroup):
            digest, source, reward = group.digest, group.source, group.mean_reward
            found[digest] = GroupLine(group.ref, digest, source, reward, file, offset, len(line))
    return sorted(found.values(), key=lambda one: one.ref)


def read_group(where: GroupLine) -> KeptGroup:
    """Read a listed group. Raises OSError if it was removed, and UnreadableRecord if the file has changed."""
    with where.file.open("rb") as file:
        file.seek(where.offset)
        return KeptGroup.decode(file.read(where.length), f"{where.file}, byte {where.offset}")


def read_groups(run_dir: Path, version: Version) -> list[KeptGroup]:
    """Read all kept groups of a step with their texts, ordered by ref (prompt). Raises OSError."""
    files = _files(run_dir, version, advantages=False)
    groups = {group.digest: group for file in files for _, _, group in _records(file, KeptGroup)}
    return sorted(groups.values(), key=lambda group: group.ref)


def list_advantages(run_dir: Path, version: Version) -> dict[str, list[bytes]]:
    """Read the kept advantages of a step, as raw lines for `parse_advantages`, by the group's digest. Raises OSError."""
    found: dict[str, list[bytes]] = {}
    for file in _files(run_dir, version, advantages=True):
        for _, line, one in _records(file, KeptAdvantage):
            found.setdefault(one.digest, []).append(line)
    return found


def parse_advantages(lines: Iterable[bytes]) -> dict[int, KeptAdvantage]:
    """Parse the advantages of one group's samples, by the sample's index in the group."""
    return {one.sample: one for one in (KeptAdvantage.decode(line, ADVANTAGES) for line in lines)}


def _step_folders(run_dir: Path) -> list[Version]:
    return _folders(run_dir, "")


def _folders(run_dir: Path, prefix: str) -> list[Version]:
    """The versions of the folders PREFIX LINEAGE-STEP, ascending."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(run_dir / FOLDER):
            lineage, _, step = entry.name.removeprefix(prefix).partition("-")
            if entry.name.startswith(prefix) and lineage.isdigit() and step.isdigit():
                found.append(Version(int(lineage), int(step)))
    return sorted(found)


def _files(run_dir: Path, version: Version, *, advantages: bool) -> list[Path]:
    with contextlib.suppress(FileNotFoundError):  # the folder is being removed
        whole = step_folder(run_dir, version).glob("[!.]*.jsonl")
        return sorted(file for file in whole if file.name.startswith(ADVANTAGES) == advantages)
    return []


def _records(file: Path, kind: type[R]) -> Iterator[tuple[int, bytes, R]]:
    """Yield byte offset, raw line and decoded record of each readable line."""
    try:
        opened = file.open("rb")
    except FileNotFoundError:  # removed after its folder was listed
        return
    with opened:
        offset = 0
        for number, line in enumerate(opened, 1):
            begin, offset = offset, offset + len(line)
            try:
                yield begin, line, kind.decode(line, f"{file}:{number}")
            except UnreadableRecord as error:
                log.warning("%s", error)


PICTURE_SUFFIXES = (".png", ".jpg", ".webp")
"""Of the formats in which blob stores keep pictures."""

_CANNOT_LINK = frozenset({errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP})


STEP_SHARE, EVALUATION_SHARE = 8, 2
"""The generated pictures that a controller keeps of a step have at most 1/8 of the bound for pictures; those of all
evaluations, 1/2."""

EVALUATION = "evaluation-"


def evaluation_folder(run_dir: Path, version: Version) -> Path:
    """Return the folder with the pictures that `version` generated for held-out prompts."""
    return run_dir / FOLDER / f"{EVALUATION}{version.lineage}-{version.step}"


def evaluation_picture(run_dir: str, version: Version, sha256: str) -> str:
    """Return the path of a picture that `version` generated for a held-out prompt, if it is kept. Policies generate PNG
    files."""
    return str(evaluation_folder(Path(run_dir), version) / f"{sha256}.png")


def choose_pictures(groups: Sequence[KeptGroup], most_bytes: int) -> list[str]:
    """Choose the pictures of a step to keep, by their SHA-256. `most_bytes`: bound for the pictures of all steps.

    All without generated ones. Otherwise those of whole groups, spread evenly over the step, within the step's share of
    the bound, but at least one group.
    """
    chosen = list(range(len(groups)))
    if any(group.generated for group in groups):
        sizes = [sum({one.sha256: one.size for one in group.all_pictures}.values()) for group in groups]
        limit = most_bytes // STEP_SHARE * len(groups) // max(sum(sizes), 1)
        chosen = _spread(chosen, max(limit, 1))
    return list(dict.fromkeys(one.sha256 for at in chosen for one in groups[at].all_pictures))


def keep_pictures(folder: Path, sha256s: Iterable[str], blobs: Path) -> None:
    """Link pictures into the folder of a step or an evaluation, or copy them to another file system. `blobs`: folder of
    the job in the node's blob store. A picture that the store does not have is left out. Raises OSError.
    """
    for sha256 in dict.fromkeys(sha256s):
        blob = blobs / blob_path(sha256)
        if find_in(folder, sha256) is None and blob.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                _link(blob, folder / f"{sha256}{_suffix(blob)}")


def find_picture(run_dir: Path, version: Version, sha256: str) -> Path | None:
    """Return the file of a kept picture of a step; None if it was deleted."""
    return find_in(step_folder(run_dir, version), sha256)


def find_evaluation_picture(run_dir: Path, version: Version, sha256: str) -> Path | None:
    """Return the file of a kept picture of an evaluation; None if it was deleted."""
    return find_in(evaluation_folder(run_dir, version), sha256)


def find_in(folder: Path, sha256: str) -> Path | None:
    """Return the file of a picture in a folder of samples; None if it was deleted."""
    files = (folder / f"{sha256}{suffix}" for suffix in PICTURE_SUFFIXES)
    return next((file for file in files if file.is_file()), None)


def prune_pictures(run_dir: Path, most_bytes: int) -> None:
    """Delete pictures of the oldest steps until those of all steps and evaluations have at most `most_bytes` bytes. Raises
    OSError."""
    evaluations = [evaluation_folder(run_dir, version) for version in _folders(run_dir, EVALUATION)]
    room = most_bytes - sum(size for folder in evaluations for _, size in _pictures_in(folder))
    _prune([step_folder(run_dir, version) for version in reversed(kept_steps(run_dir))], room)


def prune_evaluations(run_dir: Path, most_bytes: int, spared: Sequence[Version]) -> None:
    """Delete pictures of evaluations until they have at most their share of `most_bytes`: the oldest first, and last those
    of `spared`, of which the first is the most important. Raises OSError.
    """
    others = [version for version in reversed(_folders(run_dir, EVALUATION)) if version not in spared]
    _prune((evaluation_folder(run_dir, version) for version in (*spared, *others)), most_bytes // EVALUATION_SHARE)
    for version in others:
        with contextlib.suppress(OSError):
            evaluation_folder(run_dir, version).rmdir()  # if it is empty


def _prune(folders: Iterable[Path], room: int) -> None:
    """Delete pictures so that those that are left have at most `room` bytes; those in the last folders first."""
    for folder in folders:
        for file, size in _pictures_in(folder):
            room -= size
            if room < 0:
                file.unlink(missing_ok=True)


def is_picture(name: str) -> bool:
    """Return whether a path below the run's folder is that of a kept picture."""
    return name.startswith(f"{FOLDER}/") and name.endswith(PICTURE_SUFFIXES)


def _pictures_in(folder: Path) -> Iterator[tuple[Path, int]]:
    """The pictures in a folder with their sizes in bytes."""
    for file in sorted(folder.glob("[!.]*")):
        if file.suffix in PICTURE_SUFFIXES:
            with contextlib.suppress(FileNotFoundError):  # another controller has deleted it
                yield file, file.stat().st_size


def _suffix(file: Path) -> str:
    with file.open("rb") as opened:
        head = opened.read(4)
    return {b"\x89PNG": ".png", b"RIFF": ".webp"}.get(head, ".jpg")


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copyfile(source, draft)
        draft.replace(target)


Order = Literal["stream", "best", "worst"]
Standing = Literal["committed", "under way", "cut off"]
SHOWN_RANGES = 12


class NoSamples(UsageError):
    """The requested samples do not exist. The message says why, and which samples exist."""


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A kept response with its index in the group, and its advantage if a rank kept it."""

    index: int
    sample: KeptSample
    advantage: KeptAdvantage | None


class SelectableGroup(Protocol):
    """The fields that `select_groups` uses: those of `GroupLine` and `KeptGroup`."""

    @property
    def ref(self) -> PromptRef: ...
    @property
    def source(self) -> str: ...
    @property
    def mean_reward(self) -> float: ...


G = TypeVar("G", bound=SelectableGroup)


@dataclass(frozen=True, slots=True)
class Selection(Generic[G]):
    """Result of `select_groups`: the groups in the requested order. `of`: number of groups that match without limit."""

    groups: tuple[G, ...]
    of: int


def step_status(head: Head, version: Version) -> Standing:
    """Return whether the step that led to `version` is committed on head's chain, under way, or discarded ("cut off")."""
    if is_ancestor(head, version):
        return "committed"
    return "under way" if version == Version(head.lineage, head.step + 1) else "cut off"


def find_version(
    kept: Sequence[Version], head: Head | None, spec: SamplesSpec, step: int | None, *, ended: bool = False
) -> Version:
    """Find the version whose samples a user means by `step`: that of the newest lineage with kept samples of this step.

    `kept`: versions with samples. `step` None: the newest committed step. `ended`: whether the job has ended, so that
    no more samples will come. Raises NoSamples with the reason.
    """
    if step is not None and step < 1:
        raise NoSamples(f"there is no step {step}; steps are counted from 1")
    if step is not None and (found := [version for version in kept if version.step == step]):
        return max(found)
    if spec.groups == 0:
        raise NoSamples(
            "the job keeps no samples, because samples.groups is 0", fix="Set samples.groups in the next job's spec"
        )
    if ended and not kept and (head is None or head.step == 0):
        raise NoSamples("the job ended before its first step was trained, so there are no samples")
    if head is None or (head.step == 0 and not kept):
        raise NoSamples("no step has been trained yet, so there are no samples", fix="Retry after the first step")
    if step is None:
        if not kept:
            raise NoSamples("the job has no samples", fix="The controllers' logs say why")
        return max((v for v in kept if is_ancestor(head, v)), default=max(kept))
    if step > head.step:
        what = f"step {step} has not been trained yet; the newest committed step is {head.step}"
        more = f"; steps after {head.step} are not committed" if any(v.step > head.step for v in kept) else ""
        raise NoSamples(what, fix=f"{_there(kept)}{more}")
    if not spec.due(step):
        raise NoSamples(f"the samples of step {step} are not kept: samples.every is {spec.every}", fix=_there(kept))
    if kept and step < min(version.step for version in kept):
        raise NoSamples(f"the samples of step {step} were removed: samples.keep is {spec.keep}", fix=_there(kept))
    raise NoSamples(
        f"step {step} has no samples: the nodes that held them died, or could not write them", fix=_there(kept)
    )


def find_kept(kept: Sequence[Version], step: int | None) -> Version:
    """Like `find_version`, for a run of which only the folder is known. Raises NoSamples."""
    if not kept:
        raise NoSamples("the run folder has no samples")
    if step is None:
        return max(kept)
    if not (found := [version for version in kept if version.step == step]):
        older = step < min(version.step for version in kept)
        why = "Samples of earlier steps are removed: samples.keep is the number of newest steps that are kept. "
        raise NoSamples(f"step {step} has no samples", fix=f"{why if older else ''}{_there(kept)}")
    return max(found)


def select_groups(groups: Iterable[G], *, source: str = "", order: Order = "stream", limit: int = 0) -> Selection[G]:
    """Select at most `limit` groups (0: all) of `source` ("": any).

    `order`: "stream" by ref, "best" and "worst" by mean reward. Raises NoSamples if no group matches.
    """
    every = sorted(groups, key=lambda group: group.ref)
    if not every:
        raise NoSamples("the samples of this step were removed or are being written", fix="Retry")
    fitting = [group for group in every if not source or group.source == source]
    if not fitting:
        names = ", ".join(sorted({repr(group.source) for group in every}))
        raise NoSamples(f"this step has no group of source {source!r}", fix=f"There are groups of {names}")
    if order != "stream":
        fitting.sort(key=lambda group: _sign(order) * group.mean_reward)
    return Selection(tuple(fitting[:limit] if limit else fitting), len(fitting))


def sort_responses(
    group: KeptGroup, advantages: Mapping[int, KeptAdvantage], order: Order = "stream"
) -> tuple[KeptResponse, ...]:
    """Return the group's responses; `order`: "stream" by index, "best" and "worst" by reward.

    `advantages`: by the sample's index.
    """
    found = [KeptResponse(i, sample, advantages.get(i)) for i, sample in enumerate(group.samples)]
    if order != "stream":
        found.sort(key=lambda response: _sign(order) * response.sample.reward)
    return tuple(found)


def _sign(order: Order) -> int:
    return -1 if order == "best" else 1


def _there(kept: Sequence[Version]) -> str:
    """Return a sentence that says of which steps samples exist: `There are samples of steps 1, 5-9`."""
    steps = sorted({version.step for version in kept})
    if not steps:
        return "There are no samples at all"
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], step]
        else:
            ranges.append([step])
    shown = ["-".join(map(str, one)) for one in ranges]
    if len(shown) > SHOWN_RANGES:
        shown = [*shown[: SHOWN_RANGES - 1], "...", shown[-1]]
    return f"There are samples of step{'s' if len(steps) > 1 else ''} {', '.join(shown)}"

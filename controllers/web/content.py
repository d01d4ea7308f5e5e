"""The JSON of the web page: the jobs of the cluster and one job in detail, from the store, this controller's runner and the run folder.

A caller sees only jobs of their namespaces. Responses, specs and logs are never shown. Curves come from the end of `metrics.jsonl`, without steps
that a rollback discarded; if there are too many points, they are thinned out evenly, and the newest is kept. Timelines come from the end of
the slot accounting, each node by its own clock. Pictures are those of some prompts of a step's kept samples, and of some held-out prompts.
All of them read a bounded part of the files and block on the disk.

`FileCache` caches file contents of the most recently viewed runs until the files change, so that several viewers of a job cause one read per step. If the
disk hangs, one thread blocks; other requests give up after `TURN_S` seconds, because the daemon has few threads.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import math
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from controllers.api.edge.access import current_caller, may_see
from controllers.api.edge.errors import NotFound
from controllers.api.job_messages import add_news, add_queue_positions, describe_job, list_jobs
from controllers.api.store_reader import StoreReader
from controllers.rules.waits import current_waits
from controllers.telemetry.events import Event, EventLog
from controllers.telemetry.step_stats import drop_token_stats
from gcore.api.v1 import jobs_pb2 as pb
from gcore.config.data import ACCURACY_OR_REWARD, NO_BEST
from gcore.config.node import EVERY_ADDRESS
from gcore.ledger.evaluation import evaluations_with_pictures
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.job import METRICS_FILE, Evaluation, KeptPicture, Move
from gcore.ledger.records.slot_accounting import FOLDER, AccountLine, parse_line
from gcore.observability import samples
from gcore.observability.metrics_file import Line, decode_line
from gcore.schema import UnreadableRecord
from gcore.store.keys import DEFAULT_NAMESPACE, JobKeys, full_name
from gcore.system.clock import Clock
from gcore.types import Version
from placement.moves import move_in_words, numbers_in_words, outcome_in_words

if TYPE_CHECKING:
    from controllers.job.runner import JobRunner

CURVES_MOST_BYTES = 4 << 20
"""Maximum bytes that are read from the end of `metrics.jsonl`."""

MOST_POINTS = 400
"""Maximum number of points of one curve."""

EVALUATED = {"accuracy": "accuracy", "held_out_reward": "reward"}
"""Curves that come from evaluations and not from steps, with their metric names in `metrics.jsonl`."""

NAMES = (
    "reward",
    "accuracy",
    "held_out_reward",
    "kl",
    "kl_reference",
    "entropy",
    "response_length",
    "clip_fraction",
    "grad_norm",
    "loss",
    "mismatch_kl",
    "staleness",
    "filter_rate",
    "tokens_per_second",
    "pictures_per_second",
    "seconds",
    "publish_s",
    "collect_s",
    "exchange_s",
    "train_s",
)

TIMELINES_MOST_BYTES = 512 << 10
"""Maximum bytes that are read from the end of a node's slot accounting."""

MOST_STEPS, MOST_LINES = 8, 128
"""Maximum number of steps per node, and of lines of all nodes together. With many nodes, fewer steps are drawn."""

MOST_NODES = 64

MOST_SLOTS = 256
"""Maximum number of rows of the timeline over all nodes."""

MOST_CACHED = 16
"""Maximum number of runs, or of steps of runs, in a cache."""

TURN_S = 1.0
"""Seconds that a request waits for another one to finish reading a file."""

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

MOST_PROMPT = 200
"""Maximum characters of a prompt."""

MOST_JOBS = 200

MOST_EVENTS = 200

MOST_SAID = 2000
"""Maximum characters of an event's message."""

LIST_ANEW_S = 5.0
"""Seconds for which a list of jobs is cached, because it needs the records of each job."""

Tree = dict[str, Any]


@dataclass
class Curves:
    """The learning curves of a run. `points`: (step, value) by name of the curve, ascending. `newest`: the last step;
    `partial`: whether early steps are missing, because only the end of the file was read."""

    points: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    newest: int = 0
    partial: bool = False


def read_curves(run_dir: Path, most_bytes: int = CURVES_MOST_BYTES) -> Curves:
    """Read the curves of a run folder; empty if there is no metrics file yet. Raises OSError."""
    try:
        with (run_dir / METRICS_FILE).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - most_bytes, 0))
            lines = file.read(most_bytes).split(b"\n")
    except FileNotFoundError:
        return Curves()
    partial = size > most_bytes
    return build_curves((line for one in lines[partial:] if (line := decode_line(one)) is not None), partial=partial)


def curves_stamp(run_dir: Path) -> object:
    """A value that changes when `metrics.jsonl` has new content: its size; None if there is no file. Raises OSError."""
    try:
        return (run_dir / METRICS_FILE).stat().st_size
    except FileNotFoundError:
        return None


def build_curves(lines: Iterable[Line], *, partial: bool = False) -> Curves:
    """Build the curves from the lines of a metrics file, without steps that a rollback discarded. `partial`: whether
    early lines are missing."""
    steps: dict[int, dict[str, float]] = {}
    evals: dict[int, dict[str, float]] = {}
    for line in lines:
        kind, step = line["kind"], line.get("step", 0)
        if kind == "rollback":
            steps = {at: one for at, one in steps.items() if at <= step}
            evals = {at: one for at, one in evals.items() if at <= step}
        elif kind == "step":
            steps[step] = drop_token_stats(_numbers(line))
        elif kind == "eval":
            evals[step] = _numbers(line)
    curves = Curves(newest=max(steps, default=0), partial=partial)
    for name in NAMES:
        of, key = (evals, EVALUATED[name]) if name in EVALUATED else (steps, name)
        points = [(at, one[key]) for at, one in sorted(of.items()) if key in one]
        if points:
            curves.points[name] = thin_points(points)
    return curves


def _numbers(line: Line) -> dict[str, float]:
    metrics: Any = line.get("metrics")
    numbers = metrics if isinstance(metrics, dict) else {}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def thin_points(points: Sequence[tuple[int, float]], most: int = MOST_POINTS) -> list[tuple[int, float]]:
    """Thin out points evenly to at most `most`, keeping the last."""
    every = -(-len(points) // most)
    return list(points[(len(points) - 1) % every :: every]) if every > 1 else list(points)


@dataclass
class TimelineRow:
    """The timeline of one slot. `spans`: (begin, end, state), in seconds since the epoch by the clock of its node; an
    empty state is unknown."""

    node: str
    slot: str
    spans: list[tuple[float, float, str]] = field(default_factory=list)


@dataclass
class SlotTimelines:
    """The states of slots in the newest steps. `rows`: one per slot. `steps`: (begin, end, step) in seconds since the
    epoch, by the clock of the first node. `more`: number of slots without a row."""

    rows: list[TimelineRow] = field(default_factory=list)
    steps: list[tuple[float, float, int]] = field(default_factory=list)
    more: int = 0

    def tree(self) -> dict[str, object]:
        """The timelines as a JSON tree."""
        return asdict(self)


def read_timelines(run_dir: Path) -> SlotTimelines:
    """Read the timelines of a job's slots in the newest steps from the slot accounting in its run folder. Raises
    OSError."""
    found = SlotTimelines()
    books = sorted((run_dir / FOLDER).glob("*.jsonl"))[:MOST_NODES]
    steps = max(min(MOST_STEPS, MOST_LINES // max(len(books), 1)), 1)
    for path in books:
        _add(found, list(_newest(path, steps)))
    return found


def timelines_stamp(run_dir: Path) -> object:
    """A value that changes when the slot accounting of a run has new content: the sizes of its files. Raises OSError."""
    return [(path.name, path.stat().st_size) for path in sorted((run_dir / FOLDER).glob("*.jsonl"))[:MOST_NODES]]


def _newest(path: Path, steps: int) -> Iterator[AccountLine]:
    """Read the slot accounting of the newest `steps` steps from the file of one node."""
    with path.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - TIMELINES_MOST_BYTES, 0))
        texts = file.read(TIMELINES_MOST_BYTES).decode(errors="replace").splitlines()
    yield from (line for text in texts[-steps:] if (line := parse_line(text)) is not None)


def _add(found: SlotTimelines, lines: list[AccountLine]) -> None:
    """Add the rows of one node to `found`, up to `MOST_SLOTS` rows in all."""
    rows: dict[str, TimelineRow] = {}
    for line in lines:
        began = line.book.began
        for slot, spans in sorted(line.spans.items()):
            row = rows.setdefault(slot, TimelineRow(line.node, slot))
            row.spans += [(round(began + one.begin, 3), round(began + one.end, 3), one.most) for one in spans]
        if not found.rows:
            found.steps.append((round(began, 3), round(line.until, 3), line.book.version.step))
    room = MOST_SLOTS - len(found.rows)
    found.rows += list(rows.values())[:room]
    found.more += max(len(rows) - room, 0)


MOST_PICTURES = 8
"""Maximum number of prompts whose pictures are shown, of pictures of one prompt, and of those in its responses."""

PICTURE_MOST_BYTES, GENERATED_MOST_BYTES = 64 << 10, 8 << 10
"""Maximum size of a picture of a prompt or tool, and of a generated one, that is sent within the JSON. A larger one has a URL."""

SERVED_MOST_BYTES = 8 << 20
"""Maximum size of a picture that is sent; of a larger one the page shows the SHA-256."""

MOST_PICTURE_STEPS = 400
"""Maximum number of steps to choose from: the newest."""

MEDIA_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".webp": "image/webp"}


@dataclass
class ShownPicture:
    """A picture. `url`: a data URL, or a path below that of the job; empty if the file was deleted or is too large.
    `height`: in pixels. `reward`: of a generated picture."""

    sha256: str
    url: str
    height: int
    reward: float | None = None


@dataclass
class ShownPrompt:
    """A prompt with pictures, and the mean reward of its responses. `of_tools`: pictures that tools returned in its
    responses. `generated`: its responses, if the policy generates pictures."""

    prompt: str
    mean_reward: float
    pictures: list[ShownPicture] = field(default_factory=list)
    of_tools: list[ShownPicture] = field(default_factory=list)
    generated: list[ShownPicture] = field(default_factory=list)


@dataclass
class ShownPictures:
    """Pictures of some prompts of step `step`. `steps`: the steps that have samples."""

    step: int = 0
    steps: list[int] = field(default_factory=list)
    prompts: list[ShownPrompt] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PicturesKey:
    """Names the pictures of a step in a run folder. `step` None: of the newest one that is kept."""

    run_dir: Path
    step: int | None = None


def read_pictures(key: PicturesKey) -> ShownPictures:
    """Read the pictures of the first prompts of a step; of the newest one if it is not kept. Raises OSError and
    UnreadableRecord."""
    kept = samples.kept_steps(key.run_dir)
    version = _version_of(kept, key.step)
    if version is None:
        return ShownPictures()
    found = ShownPictures(version.step, sorted({one.step for one in kept})[-MOST_PICTURE_STEPS:])
    folder = samples.step_folder(key.run_dir, version)
    for line in samples.list_groups(key.run_dir, version):
        group = samples.read_group(line)
        if group.all_pictures and len(found.prompts) < MOST_PICTURES:
            of_tools = [one for sample in group.samples for one in sample.pictures]
            shown = ShownPrompt(group.prompt.text[:MOST_PROMPT], group.mean_reward)
            shown.pictures, shown.of_tools = (_distinct(folder, one) for one in (group.pictures, of_tools))
            responses = [(one.picture, one.reward) for one in group.samples if one.picture is not None]
            shown.generated = [_shown(folder, *one, most=GENERATED_MOST_BYTES) for one in responses[:MOST_PICTURES]]
            found.prompts.append(shown)
    return found


def _version_of(kept: Sequence[Version], step: int | None) -> Version | None:
    """The newest version of `step`, or of all if that is not kept; None if there is none."""
    return max((one for one in kept if one.step == step), default=max(kept, default=None))


def pictures_stamp(key: PicturesKey) -> object:
    """A value that changes when a step has newer samples: the kept steps, and the files of this one. Raises OSError."""
    kept = samples.kept_steps(key.run_dir)
    version = _version_of(kept, key.step)
    return kept, [] if version is None else _sizes(samples.step_folder(key.run_dir, version))


def _sizes(folder: Path) -> list[tuple[str, int]]:
    return [(str(file), file.stat().st_size) for file in sorted(folder.glob("[!.]*"))]


def _distinct(folder: Path, pictures: Iterable[KeptPicture]) -> list[ShownPicture]:
    each = list({one.sha256: one for one in pictures}.values())[:MOST_PICTURES]
    return [_shown(folder, one) for one in each]


def _shown(
    folder: Path, picture: KeptPicture, reward: float | None = None, *, most: int = PICTURE_MOST_BYTES
) -> ShownPicture:
    """A kept picture, with its bytes if it has at most `most`."""
    url = ""
    file = samples.find_in(folder, picture.sha256)
    with contextlib.suppress(FileNotFoundError):
        if file is not None and file.stat().st_size <= most:
            url = f"data:{MEDIA_TYPES[file.suffix]};base64,{base64.b64encode(file.read_bytes()).decode()}"
        elif file is not None and file.stat().st_size <= SERVED_MOST_BYTES:
            url = f"pictures/{folder.name}/{picture.sha256}"
    return ShownPicture(picture.sha256, url, picture.height, reward)


@dataclass(frozen=True, slots=True)
class ServedPicture:
    """The bytes of a picture."""

    media_type: str
    data: bytes


@dataclass(frozen=True, slots=True)
class PictureKey:
    """Names a picture in a folder of samples."""

    folder: Path
    sha256: str


def picture_stamp(key: PictureKey) -> object:
    """A value that changes when a picture is kept or deleted: its file."""
    return samples.find_in(key.folder, key.sha256)


def read_picture(key: PictureKey) -> ServedPicture | None:
    """Read a kept picture; None if it was deleted, is too large, or has other bytes than its name says, as a link to
    another file. Raises OSError."""
    file = samples.find_in(key.folder, key.sha256)
    if file is None or file.stat().st_size > SERVED_MOST_BYTES:
        return None
    data = file.read_bytes()
    return ServedPicture(MEDIA_TYPES[file.suffix], data) if hashlib.sha256(data).hexdigest() == key.sha256 else None


@dataclass
class ShownHeldOut:
    """A held-out prompt, and its picture in each of the shown evaluations. `right`: whether each reward reaches the threshold;
    None without a score."""

    prompt: str
    pictures: list[ShownPicture | None] = field(default_factory=list)
    right: list[bool | None] = field(default_factory=list)


@dataclass
class ShownEvaluations:
    """Held-out pictures of the first, the best and the newest evaluation. `steps`: after which the evaluations were."""

    steps: list[int] = field(default_factory=list)
    prompts: list[ShownHeldOut] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class HeldOutKey:
    """Names evaluations of a run. `evaluations`: by ascending step."""

    run_dir: Path
    versions: tuple[Version, ...]
    evaluations: tuple[Evaluation, ...] = field(compare=False, default=())


def read_held_out(key: HeldOutKey) -> ShownEvaluations:
    """Read the pictures of the first held-out prompts. Raises OSError."""
    found = ShownEvaluations([version.step for version in key.versions])
    cards: dict[tuple[str, str, int], ShownHeldOut] = {}
    for place, evaluation in enumerate(key.evaluations):
        folder = samples.evaluation_folder(key.run_dir, evaluation.version)
        seen: Counter[tuple[str, str]] = Counter()
        for sample in evaluation.samples:
            name = (sample.source, sample.prompt)
            seen[name] += 1
            full = (*name, seen[name])
            if sample.picture is None or (full not in cards and len(cards) == MOST_PICTURES):
                continue
            empty = ShownHeldOut(sample.prompt[:MOST_PROMPT], [None] * len(key.versions), [None] * len(key.versions))
            card = cards.setdefault(full, empty)
            card.pictures[place] = _shown(folder, sample.picture, sample.reward, most=GENERATED_MOST_BYTES)
            card.right[place] = None if sample.unscored else sample.correct
    found.prompts = list(cards.values())
    return found


def held_out_stamp(key: HeldOutKey) -> object:
    """A value that changes when pictures of the evaluations are kept or deleted. Raises OSError."""
    return [_sizes(samples.evaluation_folder(key.run_dir, version)) for version in key.versions]


def held_out_key(mirror: JobMirror) -> HeldOutKey:
    """Choose the first, the best and the newest evaluation with pictures on the job's chain."""
    best = mirror.job_record.spec.get("checkpoint", {}).get("best")
    every = [stored.record for stored in mirror.evaluations.values()]
    metric = None if best == NO_BEST else best or ACCURACY_OR_REWARD
    chosen = evaluations_with_pictures(mirror.head.record, every, metric) if mirror.head is not None else []
    return HeldOutKey(mirror.run_dir, tuple(one.version for one in chosen), tuple(chosen))


class FileCache(Generic[K, T]):
    """Caches what `read` returns for the `most` most recently viewed keys, such as run folders.

    `stamp`: returns a value that changes when the files have new content; then `read` is called again. Their errors
    pass through.
    """

    def __init__(self, stamp: Callable[[K], object], read: Callable[[K], T], most: int = MOST_CACHED) -> None:
        self._most = most
        self._stamp = stamp
        self._read = read
        self._known: OrderedDict[K, tuple[object, T]] = OrderedDict()
        self._turn = threading.Lock()

    def of(self, key: K) -> T:
        """Return the content for a key. Raises TimeoutError (an OSError) if an earlier read does not finish in
        `TURN_S` seconds."""
        if not self._turn.acquire(timeout=TURN_S):
            raise TimeoutError(f"{key} was not read: an earlier read has not finished; the disk may hang")
        try:
            now = self._stamp(key)
            known = self._known.get(key)
            if known is None or known[0] != now:
                known = self._known[key] = now, self._read(key)
            self._known.move_to_end(key)
            while len(self._known) > self._most:
                self._known.popitem(last=False)
            return known[1]
        finally:
            self._turn.release()


class PageContent:
    """Builds the JSON of the page on one controller. `runner`: returns the runner of a job that this controller serves,
    else None.

    Methods raise NotFound and StoreUnavailable.
    """

    def __init__(self, node: str, jobs: StoreReader, runner: Callable[[str], JobRunner | None], clock: Clock) -> None:
        self._node = node
        self._jobs = jobs
        self._runner = runner
        self._clock = clock
        self._listed: dict[frozenset[str] | None, tuple[float, pb.ListJobsReply]] = {}
        self._listing = asyncio.Lock()
        self._curves = FileCache(curves_stamp, read_curves)
        self._timelines = FileCache(timelines_stamp, read_timelines)
        self._pictures = FileCache(pictures_stamp, read_pictures)
        self._held_out = FileCache(held_out_stamp, read_held_out)
        self._served = FileCache(picture_stamp, read_picture, most=1)

    async def cluster(self) -> Tree:
        """The jobs that the caller may see, newest first, and the nodes of the cluster."""
        listing, known = await asyncio.gather(self._jobs.cluster(), self._list())
        return {
            "node": self._node,
            "time": self._clock.wall(),
            "nodes": [{"name": node.name, "slots": len(node.slots)} for node in listing.nodes],
            "jobs": [_job_tree(one) for one in known.jobs],
            "more": bool(known.next_page_token),
        }

    async def targets(self) -> list[Tree]:
        """The metrics addresses of all controllers, in the format of Prometheus (`http_sd_configs`)."""
        nodes = (await self._jobs.cluster()).nodes
        return [
            {"targets": [reachable_address(one.metrics_address, one.address)], "labels": {"node": one.name}}
            for one in nodes
            if one.metrics_address
        ]

    async def _list(self) -> pb.ListJobsReply:
        """The newest jobs that the caller may see, cached for `LIST_ANEW_S`."""
        mine = current_caller().namespaces
        async with self._listing:
            now = self._clock.monotonic()
            self._listed = {one: known for one, known in self._listed.items() if now - known[0] < LIST_ANEW_S}
            if mine not in self._listed:
                self._listed[mine] = now, await list_jobs(self._jobs, pb.ListJobsRequest(page_size=MOST_JOBS))
            return self._listed[mine][1]

    async def job(self, uid: str, after: int) -> Tree:
        """One job, with its newest events after a sequence number."""
        mirror = await self._mirror(uid)
        message = await self._standing(add_news(describe_job(mirror), mirror))
        folder = mirror.run_dir
        drawn: Mapping[str, Any] = {}
        with contextlib.suppress(OSError):
            drawn = asdict(await asyncio.to_thread(self._curves.of, folder))
        return {
            **_job_tree(message),
            "node": self._node,
            "time": self._clock.wall(),
            "waiting": self._waiting(uid),
            "warnings": [{"sentence": one.sentence, "node": one.node, "time": one.time} for one in message.warnings],
            "curves": drawn,
            "split": _split(mirror),
            "moves": [_move(one) for one in reversed(mirror.moves.moves)],
            "events": [_event(one) for one in (await self._events(uid, after))[-MOST_EVENTS:]],
        }

    async def _standing(self, message: pb.Job) -> pb.Job:
        """Add the job's slots and its position in the queue to its message."""
        await add_queue_positions(self._jobs, [message], await self._jobs.shares())
        return message

    async def slots(self, uid: str) -> Tree:
        """The states of a job's slots in the newest steps."""
        mirror = await self._mirror(uid)
        try:
            found = await asyncio.to_thread(self._timelines.of, mirror.run_dir)
        except OSError:
            found = SlotTimelines()
        return found.tree()

    async def pictures(self, uid: str, step: int | None = None) -> Tree:
        """Pictures of some prompts of a step whose samples are kept, None: of the newest one, and held-out pictures."""
        mirror = await self._mirror(uid)
        found, held_out = ShownPictures(), ShownEvaluations()
        with contextlib.suppress(OSError, UnreadableRecord):
            found = await asyncio.to_thread(self._pictures.of, PicturesKey(mirror.run_dir, step))
        with contextlib.suppress(OSError):
            held_out = await asyncio.to_thread(self._held_out.of, held_out_key(mirror))
        return asdict(found) | {"held_out": asdict(held_out)}

    async def picture(self, uid: str, folder: str, sha256: str) -> ServedPicture:
        """The bytes of a kept picture. `folder`: its folder of samples."""
        mirror = await self._mirror(uid)
        key = PictureKey(mirror.run_dir / samples.FOLDER / folder, sha256)
        with contextlib.suppress(OSError):
            if (found := await asyncio.to_thread(self._served.of, key)) is not None:
                return found
        raise NotFound(
            f"there is no picture {sha256} in {folder[:40]!r}", fix="It was deleted, or is too large for the page"
        )

    async def _mirror(self, uid: str) -> JobMirror:
        """The records of a job, from its runner or else from the store. Raises NotFound if the caller may not see the
        job."""
        runner = self._runner(uid)
        known = runner is not None and runner.mirror.job is not None and runner.mirror.status is not None
        mirror = runner.mirror if runner is not None and known else await self._jobs.mirror(uid)
        if mirror.job is None or not may_see(mirror.job.record.namespace):
            raise NotFound(
                f"there is no job {uid[:40]!r}", fix="Choose a job from the list on the page, or from `gcore list`"
            )
        return mirror

    def _waiting(self, uid: str) -> list[Tree]:
        runner = self._runner(uid)
        if runner is None or not runner.is_working:
            return []
        now, since = self._clock.monotonic(), runner.waits.since
        waits = current_waits(runner.look())
        return [{"what": wait.what, "seconds": round(now - since.get(wait.key, now), 1)} for wait in waits]

    async def _events(self, uid: str, after: int) -> list[Event]:
        runner = self._runner(uid)
        if runner is not None:
            return runner.telemetry.events.after(after)
        keys = JobKeys(uid)
        batch = await self._jobs.batch(uid)
        history = EventLog(keys)
        history.note(JobMirror(keys), batch, JobMirror(keys).fold(batch), 0.0)
        return history.after(after)


def reachable_address(listens: str, address: str) -> str:
    """The address under which other machines reach a server that listens on `listens` (host:port).

    If it listens on all addresses, use the host of the daemon's `address`.
    """
    host, _, port = listens.rpartition(":")
    return f"{address.rpartition(':')[0]}:{port}" if host.strip("[]") in EVERY_ADDRESS else listens


def _job_tree(message: pb.Job) -> Tree:
    accuracy = [one.accuracy for one in message.sources if one.HasField("accuracy")]
    return {
        "uid": message.uid,
        "name": full_name(message.name, message.namespace or DEFAULT_NAMESPACE),
        "state": pb.JobState.Name(message.state).removeprefix("JOB_STATE_").replace("UNSPECIFIED", "UNREADABLE"),
        "reason": message.reason[:MOST_SAID],
        "created": message.created,
        "ended": message.ended,
        "step": message.step,
        "steps": message.steps,
        "lineage": message.lineage,
        "slots": message.slots,
        "place": message.queue_position,
        "accuracy": accuracy[0] if len(accuracy) == 1 else None,
        "shares": {share.node: len(share.shards) for share in message.shares},
    }


def _split(mirror: JobMirror) -> Tree:
    if mirror.plan is None:
        return {}
    places: dict[str, int] = {"train": len(mirror.plan.record.ranks)}
    for place in mirror.plan.record.engines:
        if not place.asleep:
            pool = "reward" if place.judge else "rollout"
            places[pool] = places.get(pool, 0) + 1
    return places


def _move(move: Move) -> Tree:
    return {
        "time": move.time,
        "step": move.step,
        "state": move.state,
        "said": move_in_words(move),
        "expected": numbers_in_words(move),
        "outcome": outcome_in_words(move),
    }


def _event(event: Event) -> Tree:
    return {"sequence": event.sequence, "time": event.time, "kind": event.kind, "message": event.message[:MOST_SAID]}

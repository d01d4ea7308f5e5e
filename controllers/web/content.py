"""The JSON of the web page: the jobs of the cluster and one job in detail, from the store, this controller's runner and the run folder.

A caller sees only jobs of their namespaces. Responses, specs and logs are never shown. Curves come from the end of `metrics.jsonl`, without steps
that a rollback discarded; if there are too many points, they are thinned out evenly, and the newest is kept. Timelines come from the end of
the slot accounting, each node by its own clock. Pictures are those of some prompts of the newest kept samples. All of them read a bounded
part of the files and block on the disk.

`FileCache` caches file contents of the most recently viewed runs until the files change, so that several viewers of a job cause one read per step. If the
disk hangs, one thread blocks; other requests give up after `TURN_S` seconds, because the daemon has few threads.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from controllers.api.edge.access import current_caller, may_see
from controllers.api.edge.errors import NotFound
from controllers.api.job_messages import add_news, add_queue_positions, describe_job, list_jobs
from controllers.api.store_reader import StoreReader
from controllers.rules.waits import current_waits
from controllers.telemetry.events import Event, EventLog
from gcore.api.v1 import jobs_pb2 as pb
from gcore.config.node import EVERY_ADDRESS
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.job import METRICS_FILE, Move
from gcore.ledger.records.slot_accounting import FOLDER, AccountLine, parse_line
from gcore.observability import samples
from gcore.observability.metrics_file import Line, decode_line
from gcore.schema import UnreadableRecord
from gcore.store.keys import DEFAULT_NAMESPACE, JobKeys, full_name
from gcore.system.clock import Clock
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

MOST_RUNS = 16
"""Maximum number of runs in a cache."""

TURN_S = 1.0
"""Seconds that a request waits for another one to finish reading a file."""

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
            steps[step] = _numbers(line)
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
"""Maximum number of prompts whose pictures are shown, of pictures of one prompt, and of those of tools in its responses."""

PICTURE_MOST_BYTES = 64 << 10
"""Maximum size of a picture that is shown; of a larger one the page shows the SHA-256."""

MEDIA_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".webp": "image/webp"}


@dataclass
class ShownPrompt:
    """A prompt with pictures, and the mean reward of its responses. `pictures`: SHA-256 and data URL of each; the URL is
    empty if the file was deleted or is too large. `of_tools`: the same of pictures that tools returned in its responses."""

    prompt: str
    mean_reward: float
    pictures: list[tuple[str, str]] = field(default_factory=list)
    of_tools: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class ShownPictures:
    """Pictures of some prompts of step `step`."""

    step: int = 0
    prompts: list[ShownPrompt] = field(default_factory=list)


def read_pictures(run_dir: Path) -> ShownPictures:
    """Read the pictures of the first prompts of the newest kept step. Raises OSError and UnreadableRecord."""
    kept = samples.kept_steps(run_dir)
    if not kept:
        return ShownPictures()
    version = kept[-1]
    found = ShownPictures(version.step)
    for line in samples.list_groups(run_dir, version):
        group = samples.read_group(line)
        if group.all_pictures and len(found.prompts) < MOST_PICTURES:
            shown = []
            for pictures in (group.pictures, [one for sample in group.samples for one in sample.pictures]):
                names = list(dict.fromkeys(one.sha256 for one in pictures))[:MOST_PICTURES]
                shown.append([(name, _data_url(samples.find_picture(run_dir, version, name))) for name in names])
            found.prompts.append(ShownPrompt(group.prompt.text[:MOST_PROMPT], group.mean_reward, *shown))
    return found


def pictures_stamp(run_dir: Path) -> object:
    """A value that changes when there are newer samples: the files of the newest kept step. Raises OSError."""
    return [
        (str(file), file.stat().st_size)
        for version in samples.kept_steps(run_dir)[-1:]
        for file in sorted(samples.step_folder(run_dir, version).glob("[!.]*"))
    ]


def _data_url(file: Path | None) -> str:
    with contextlib.suppress(FileNotFoundError):
        if file is not None and file.stat().st_size <= PICTURE_MOST_BYTES:
            return f"data:{MEDIA_TYPES[file.suffix]};base64,{base64.b64encode(file.read_bytes()).decode()}"
    return ""


class FileCache(Generic[T]):
    """Caches what `read` returns for the most recently viewed run folders.

    `stamp`: returns a value that changes when the files have new content; then `read` is called again. Their errors
    pass through.
    """

    def __init__(self, stamp: Callable[[Path], object], read: Callable[[Path], T]) -> None:
        self._stamp = stamp
        self._read = read
        self._known: OrderedDict[Path, tuple[object, T]] = OrderedDict()
        self._turn = threading.Lock()

    def of(self, run_dir: Path) -> T:
        """Return the content for a run folder. Raises TimeoutError (an OSError) if an earlier read does not finish in
        `TURN_S` seconds."""
        if not self._turn.acquire(timeout=TURN_S):
            raise TimeoutError(f"{run_dir} was not read: an earlier read has not finished; the disk may hang")
        try:
            now = self._stamp(run_dir)
            known = self._known.get(run_dir)
            if known is None or known[0] != now:
                known = self._known[run_dir] = now, self._read(run_dir)
            self._known.move_to_end(run_dir)
            while len(self._known) > MOST_RUNS:
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

    async def pictures(self, uid: str) -> Tree:
        """Pictures of some prompts of the newest step whose samples are kept."""
        mirror = await self._mirror(uid)
        try:
            found = await asyncio.to_thread(self._pictures.of, mirror.run_dir)
        except (OSError, UnreadableRecord):
            found = ShownPictures()
        return asdict(found)

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

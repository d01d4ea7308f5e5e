"""Process pool that scores responses with a job's function rewards, and recovers from hangs and crashes.

Each response is scored in a call of its own. Exception: a batch reward (`gcore.reward.api.batch_reward`) gets all
responses to one prompt in one call, in one process, with one timeout.

Rewards are foreign code, and rules process arbitrary text, so they do not run in the controller. A few processes
(`scoring.workers`) take responses from a queue. Fast rewards get batches and slow ones single responses, so that no
process idles while another has a queue. If a response takes longer than its `reward.timeout_s`, its process is killed
and replaced. The response then fails (or gets `reward.timeout_value`), and the responses behind it go to another
process. A reward's first call in a process has a longer timeout, because it may load a library. A process that dies is
replaced too. An earlier response may have caused the crash, so the current response is retried once, alone in a fresh
process, before it fails.

`warm` starts the processes before the first step and raises an error for rewards that cannot be loaded. The pool sends
a batch only to a free process; other responses wait in the pool's queue. Responses of a process that died are scored
again, so a reward must be pure.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from gcore.config.reward import RewardSpec, ScoringSpec
from gcore.errors import DataError, GcoreError
from gcore.media.pictures import blank_png
from gcore.plugins import PluginFault
from gcore.reward.api import (
    OpenReward,
    PictureFile,
    Response,
    RewardError,
    RewardResult,
    Scored,
    ScoringCall,
    score_responses,
)
from gcore.system.clock import Clock, SystemClock
from gcore.system.process import CannotStart
from gcore.types import PictureRef
from gcore.worker.sandbox.child import encode_line
from gcore.worker.sandbox.pool import WAIT_S, PoolStatus, ProcessStarter, SandboxProgram
from gcore.worker.sandbox.process import ProcessEnded, SandboxProcess


class FunctionScorer(Protocol):
    """Scores responses with function rewards (Python code, as opposed to judges).

    A response that cannot be scored does not affect the others of its group: each gets a result or an error.
    """

    async def warm(self) -> None:
        """Load the rewards. Raises SpecError for one that cannot be loaded."""
        ...

    async def score(
        self, spec: RewardSpec, fields: Mapping[str, Any], responses: Sequence[Response]
    ) -> tuple[Scored, ...]:
        """Score each of the responses to one prompt, in order. `fields`: the prompt's entry (its row of the data)."""
        ...


class DirectScorer:
    """Scores in the calling process, without limits on time or memory: for tests and small programs."""

    def __init__(self) -> None:
        self._open: list[tuple[RewardSpec, OpenReward]] = []

    async def warm(self) -> None:
        """Do nothing: a reward is loaded at first use."""

    async def score(
        self, spec: RewardSpec, fields: Mapping[str, Any], responses: Sequence[Response]
    ) -> tuple[Scored, ...]:
        """See `FunctionScorer`. Raises SpecError for a reward that cannot be loaded."""
        reward = next((found for known, found in self._open if known == spec), None)
        if reward is None:
            reward = OpenReward.of(spec)
            self._open.append((spec, reward))
        return tuple(score_responses(reward, responses, fields, group=reward.is_batch))


def setup_line(sources: Sequence[str], specs: Sequence[RewardSpec], memory_mb: int) -> bytes:
    """Encode the first line to a scoring process: the rewards to load, and its memory limit in MiB.

    `sources`: for each of `specs`, the name of its data source, which error messages show.
    """
    rewards = [[source, spec.model_dump(mode="json")] for source, spec in zip(sources, specs, strict=True)]
    return encode_line({"rewards": rewards, "memory_mb": memory_mb})


_ToldResponse = tuple[Any, ...]
"""A response as it is sent: text, length in tokens, whether it was truncated, reward of its environment or agent; and if
there are any, the pictures of its prompt, those of tools, and the one that the policy generated (`PictureFile`)."""


def batch_line(calls: Sequence[ScoringCall]) -> bytes:
    """Encode calls as one line to a scoring process.

    Consecutive calls with the same reward and prompt entry share one item, so that the entry is sent once.
    """
    items: list[tuple[int, Mapping[str, Any], list[_ToldResponse | None], bool]] = []
    for reward, fields, responses, group in calls:
        if group or not items or items[-1][3] or items[-1][0] != reward or items[-1][1] is not fields:
            items.append((reward, fields, [], group))
        items[-1][2].extend(None if one is None else _told(one) for one in responses)
    return encode_line(items)


def _told(response: Response) -> _ToldResponse:
    told = (response, response.tokens, response.truncated, response.environment)
    if response.picture_file is not None:
        return (*told, response.files, response.tool_files, response.picture_file)
    if response.tool_files:
        return (*told, response.files, response.tool_files)
    return (*told, response.files) if response.files else told


def parse_answer(value: Any, count: int = 1) -> list[Scored]:
    """Parse a scoring process's answer to a call with `count` responses: a result or an error for each.

    Inverse of `gcore.reward.__main__.answer_line`. Raises ValueError for other input.
    """
    if not isinstance(value, list) or len(value) != count:
        raise ValueError(f"the reward process returned {value!r}, not a list of {count} results")
    return [_parse_scored(one) for one in value]


def _parse_scored(value: Any) -> Scored:
    match value:
        case [float() | int() as number, list() as parts]:
            return RewardResult(float(number), tuple((str(name), float(part)) for name, part in parts))
        case {"what": str(what), "where": where, "fix": fix, "trace": str(trace)}:
            return RewardError(what, where=where, fix=fix, trace=trace)
    raise ValueError(f"the reward process returned {value!r}, which is neither a result nor an error")


BATCH_S = 0.02
"""Target duration of a batch in seconds, so that slow responses are spread over the processes."""


@dataclass(eq=False, slots=True)
class ScoringRequest:
    """One call of `RewardPool.score`.

    `results`: one per response, None until it is scored. `done`: completes with the last result. `reward`: index of the
    reward. `missing`: number of responses without a result.
    """

    results: list[Scored | None]
    done: asyncio.Future[None]
    reward: int
    missing: int = 0


@dataclass(eq=False, slots=True)
class ScoringItem:
    """One call of a reward: a single response, or with `group` all responses of the request.

    A response of None stands for a check of the prompt's entry (`fields`). `reward`: index of the reward.
    """

    request: ScoringRequest
    place: int
    """Index of the call's first response in the request."""
    reward: int
    fields: Mapping[str, Any]
    responses: tuple[Response | None, ...]
    group: bool
    tried: bool = False
    """Whether a process died during this call. The call is then retried before all others, alone in a fresh process."""


@dataclass(eq=False, slots=True)
class ProcessSlot:
    """The pool's record of one process. `process`: None while none runs.

    `answered`: indexes of the rewards that have completed a call in this process.
    """

    process: SandboxProcess | None = None
    answered: set[int] = field(default_factory=set)
    seconds: float = BATCH_S
    """Moving average of seconds per call; the initial value gives batches of one call."""


FACTOR = 10.0
SLOW_IN_A_ROW = 3

LEAST_S = 0.05
"""Seconds per response below which a reward never counts as slow."""

SETTLED = 8
"""Number of first measurements that only build the average; later ones are compared with it."""

WEIGHT = 0.05
"""Weight of a new measurement in the moving average."""


@dataclass(frozen=True, slots=True)
class LatencyTrend:
    """Compares a reward's current latency with its usual latency, to report a slowdown before responses time out.

    A measurement is the seconds of a slow response, or seconds per response of a fast batch. `usual` is their moving
    average. `SLOW_IN_A_ROW` measurements of at least `FACTOR` times `usual` and at least `LEAST_S` are a slowdown;
    `usual` is not updated meanwhile. A measurement below a third of `FACTOR` times `usual` ends the slowdown. `newest`:
    the last measurement. `streak`: number of consecutive slow measurements. `slow`: whether a slowdown is in progress.
    """

    usual: float = 0.0
    newest: float = 0.0
    count: int = 0
    streak: int = 0
    slow: bool = False

    def note(self, seconds: float) -> LatencyTrend:
        """Return the trend after one more measurement, in seconds per response."""
        if self.count < SETTLED:
            average = (self.usual * self.count + seconds) / (self.count + 1)
            return replace(self, usual=average, newest=seconds, count=self.count + 1)
        if seconds >= max(FACTOR * self.usual, LEAST_S):
            streak = self.streak + 1
            return replace(self, newest=seconds, streak=streak, slow=self.slow or streak >= SLOW_IN_A_ROW)
        if self.slow and seconds >= FACTOR / 3 * self.usual:
            return replace(self, newest=seconds, streak=0)
        usual = (1 - WEIGHT) * self.usual + WEIGHT * seconds
        return replace(self, usual=usual, newest=seconds, count=self.count + 1, streak=0, slow=False)

    def news(self, before: LatencyTrend, name: str) -> str:
        """Return a sentence if the reward `name` became slow or recovered since the trend `before`; otherwise empty."""
        if self.slow and not before.slow:
            times = self.newest / max(self.usual, 1e-9)
            usual = f"{times:.0f} times the usual {self.usual:.2g} s"
            return f"reward {name!r} takes {self.newest:.2g} s per response, {usual}"
        if before.slow and not self.slow:
            return f"reward {name!r} is back to its usual speed, {self.newest:.2g} s per response"
        return ""


log = logging.getLogger(__name__)

FIRST_ROOM = 4.0
"""Extra time for a first call beyond `reward.timeout_s`, as a multiple of the longest first call so far."""

LARGEST_BATCH = 64
"""Maximum number of calls per batch."""

TIMED_OUT, KILLED = "timed_out", "killed"
"""The reward parts that say why a response got `reward.timeout_value`."""


class RewardPool:
    """Scores responses for a job (`FunctionScorer`). Belongs to one event loop; close it after use."""

    def __init__(
        self,
        rewards: Mapping[str, RewardSpec],
        scoring: ScoringSpec,
        clock: Clock,
        on_fault: Callable[[RewardError | PluginFault], None] = lambda error: None,
        on_pace: Callable[[str], None] = lambda sentence: None,
        group: str = "",
    ) -> None:
        """`rewards`: all rewards that `score` will be called with, by the data source that error messages name.

        `on_fault` is called with each error that has a traceback of the reward's own code, even if the caller gets a
        substitute value. `on_pace` is called with a sentence when a reward becomes much slower or recovers.
        `group`: folder of the control group (cgroup) of the processes; empty: that of this process.
        """
        self._specs = tuple(rewards.values())
        self._scoring = scoring
        setup = setup_line(tuple(rewards), self._specs, scoring.memory_mb)
        self._starter = ProcessStarter(
            SandboxProgram("gcore.reward", setup, "the rewards", "scoring", scoring.start_timeout_s, group), clock
        )
        self._clock = clock
        self._on_fault = on_fault
        self._on_pace = on_pace
        self._paces = [LatencyTrend() for _ in self._specs]
        self._first_s: dict[int, float] = {}
        """By index of the reward: its longest successful first call in any process so far, in seconds."""
        self._scored = 0
        self._batch_rewards: frozenset[int] = frozenset()
        """Indexes of the batch rewards, as the most recently started process reported them."""
        self._queue: deque[ScoringItem] = deque()
        self._requests: set[ScoringRequest] = set()
        self._news = asyncio.Condition()
        self._slots: list[ProcessSlot] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._warming = asyncio.Lock()
        self._broken: GcoreError | None = None
        self._lacks = ""
        """Why no process can be started at the moment."""

    async def warm(self) -> None:
        """Start every process and wait until it has loaded the rewards.

        Raises PluginFault (a SpecError), with the reward's own traceback, for a reward that cannot be loaded.
        """
        async with self._warming:
            if not self._tasks and self._specs:  # without function rewards no process is needed
                await self._warm()

    async def _warm(self) -> None:
        slots = [ProcessSlot() for _ in range(self._scoring.workers)]
        starting = [asyncio.create_task(self._starter.started()) for _ in slots]
        try:
            done, _ = await asyncio.wait(starting, return_when=asyncio.FIRST_EXCEPTION)
            made = [task.result() for task in done]
        except BaseException as error:
            if isinstance(error, PluginFault) and error.trace:
                self._on_fault(error)
            for task in starting:
                task.cancel()
            for started in await asyncio.gather(*starting, return_exceptions=True):
                if isinstance(started, SandboxProcess):
                    await started.end()
            raise
        for slot, process in zip(slots, made, strict=True):
            slot.process = process
            self._note_facts(process)
        self._slots = slots
        self._tasks = [asyncio.create_task(self._serve(slot), name="rewards") for slot in self._slots]

    async def score(
        self, spec: RewardSpec, fields: Mapping[str, Any], responses: Sequence[Response | None]
    ) -> tuple[Scored, ...]:
        """Score each response, in order. For None, check the prompt's entry instead: the result is 0, or the error.

        Raises SpecError if the rewards can no longer be loaded.
        """
        await self.warm()
        if self._broken is not None:
            raise self._broken
        reward = self._specs.index(spec)
        request = ScoringRequest(
            [None] * len(responses), asyncio.get_running_loop().create_future(), reward, len(responses)
        )
        if not responses:
            return ()
        group = reward in self._batch_rewards and None not in responses
        calls = [tuple(responses)] if group else [(one,) for one in responses]
        for place, call in enumerate(calls):
            self._queue.append(ScoringItem(request, place, reward, fields, call, group))
        self._requests.add(request)
        request.done.add_done_callback(lambda _: self._requests.discard(request))
        await self._notify()
        await request.done
        return tuple(result for result in request.results if result is not None)

    async def close(self) -> None:
        """End every process and drop pending responses."""
        self._give_up(GcoreError("the reward pool of this job is closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def scoring(self) -> PoolStatus:
        """Number of waiting responses and of scored ones, and a sentence that says which rewards the responses wait
        for.
        """
        waiting = sum(request.missing for request in self._requests)
        names = " and ".join(sorted({f"{self._specs[request.reward].shown_as!r}" for request in self._requests}))
        count = "1 response waits" if waiting == 1 else f"{waiting} responses wait"
        return PoolStatus(waiting, self._scored, f"{count} to be scored by reward {names}{self._lacks}")

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the running processes."""
        return tuple(slot.process.pid for slot in self._slots if slot.process is not None)

    async def _serve(self, slot: ProcessSlot) -> None:
        """Send batches to the process in `slot`, and replace it when it ends. Runs until cancelled."""
        try:
            while True:
                batch = await self._take(slot)
                try:
                    # The process ended while idle, or wrote output that would be read as the next response's result.
                    if slot.process is not None and (slot.process.has_ended or slot.process.says_more):
                        await self._end(slot)
                    if slot.process is None:
                        slot.process = await self._starter.started()
                        self._note_facts(slot.process)
                        self._lacks = ""
                except GcoreError as error:
                    self._queue.extendleft(reversed(batch))
                    if not isinstance(error, CannotStart):
                        raise
                    # The machine lacks a resource, probably memory. Pending responses wait instead of failing.
                    self._lacks = f" ({error})"
                    log.warning("cannot start a reward process, trying again: %s", error)
                    await self._clock.sleep(WAIT_S)
                    continue
                await self._through(slot, slot.process, batch)
        except GcoreError as error:
            log.error("rewards can no longer be loaded: %s", error)
            self._give_up(error)
        finally:
            self._give_up(
                GcoreError("the reward pool has stopped", fix="See the controller's log")
            )  # reached only through a defect of the pool
            process, slot.process = slot.process, None
            if process is not None:
                await process.end()

    def _note_facts(self, process: SandboxProcess) -> None:
        self._batch_rewards = frozenset(process.facts.get("batch_rewards", ()))

    async def _take(self, slot: ProcessSlot) -> list[ScoringItem]:
        async with self._news:
            while True:
                while self._queue and self._queue[0].request.done.done():  # its caller was cancelled
                    self._queue.popleft()
                if self._queue:
                    break
                await self._news.wait()
        if self._queue[0].tried:
            alone = [self._queue.popleft()]
            await self._end(slot)  # this process may have the same defect as the one that died
            return alone
        fair = -(-len(self._queue) // len(self._slots))
        room = max(1, min(LARGEST_BATCH, fair, int(BATCH_S / max(slot.seconds, 1e-9))))
        batch: list[ScoringItem] = []
        # One reward per batch: a result may wait for the next one, so both need the same timeout.
        reward = self._queue[0].reward
        while self._queue and len(batch) < room and not self._queue[0].tried and self._queue[0].reward == reward:
            call = self._queue.popleft()
            if not call.request.done.done():
                batch.append(call)
        return batch

    async def _through(self, slot: ProcessSlot, process: SandboxProcess, batch: list[ScoringItem]) -> None:
        """Score a batch in `process`. If it dies or times out, its other unfinished calls go back to the queue's front."""
        if not batch:
            return
        began = self._clock.monotonic()
        process.send_batch(batch_line([(call.reward, call.fields, call.responses, call.group) for call in batch]))
        for number, call in enumerate(batch):
            asked = self._clock.monotonic()
            first = call.reward not in slot.answered
            limit = self._limit(call.reward, first=first)
            try:
                self._settle(call, parse_answer(await process.answer(limit), len(call.responses)))
            except (TimeoutError, ProcessEnded, ValueError) as error:
                # Results before this one may have been lost in transit; they are computed again.
                place = max(number, min(process.begun, len(batch) - 1))
                late = limit if isinstance(error, TimeoutError) else None
                await self._lost(slot, batch[place], late, first=first)
                await self._back(batch[number:place] + batch[place + 1 :])
                return
            if first:
                slot.answered.add(call.reward)
                took = self._clock.monotonic() - asked
                self._first_s[call.reward] = max(took, self._first_s.get(call.reward, 0.0))
            elif (slow := self._clock.monotonic() - asked) >= LEAST_S:
                # Report a slow call before its batch has finished.
                self._note_pace(call.reward, slow / len(call.responses))
        taken = (self._clock.monotonic() - began) / len(batch)
        slot.seconds = 0.8 * slot.seconds + 0.2 * taken
        if taken < LEAST_S:
            self._note_pace(batch[0].reward, taken * len(batch) / sum(len(call.responses) for call in batch))

    def _limit(self, reward: int, *, first: bool) -> float:
        """Timeout of a call in seconds.

        The first call in a process may load a library. Its timeout is `start_timeout_s` until one such call succeeded
        in any process; later it depends on the longest such call.
        """
        limit, start = self._specs[reward].timeout_s, self._scoring.start_timeout_s
        if not first:
            return limit
        known = self._first_s.get(reward)
        return max(limit, start) if known is None else limit + min(start, FIRST_ROOM * known)

    def _note_pace(self, reward: int, seconds: float) -> None:
        """Record the seconds per response of `reward`."""
        before, spec = self._paces[reward], self._specs[reward]
        self._paces[reward] = before.note(seconds)
        if news := self._paces[reward].news(before, spec.shown_as):
            self._on_pace(news)

    async def _lost(self, slot: ProcessSlot, call: ScoringItem, late: float | None, *, first: bool) -> None:
        """End a process that timed out or died during `call`; fail the call, or queue its only retry.

        `late`: the timeout in seconds; None if the process died. `first`: whether it was the process's first call of
        this reward.
        """
        how = await self._end(slot)
        if late is not None:
            limit = self._specs[call.reward].timeout_s
            own = f"took longer than {limit:g} s (reward.timeout_s)"
            told = f"took longer than {late:.3g} s in its first call in a process; load libraries in `start`"
            self._blame(call, TIMED_OUT, told if first and late >= limit + LEAST_S else own)
        elif call.tried:
            self._blame(call, KILLED, f"ended its process, which was {how}")
        else:
            call.tried = True
            self._queue.appendleft(call)

    async def _back(self, calls: Sequence[ScoringItem]) -> None:
        """Put calls back at the front of the queue, but behind a call that waits for its retry."""
        first = [self._queue.popleft()] if self._queue and self._queue[0].tried else []
        self._queue.extendleft(reversed(calls))
        self._queue.extendleft(first)
        await self._notify()

    def _settle(self, call: ScoringItem, scored: Sequence[Scored]) -> None:
        told = [one for one in scored if isinstance(one, RewardError) and one.trace]
        for error in {str(one): one for one in told}.values():  # all responses of a group have the same error
            self._on_fault(error)
        request = call.request
        for place, one in enumerate(scored, call.place):
            if request.results[place] is None:
                request.results[place] = one
                request.missing -= 1
                self._scored += 1
        if request.missing == 0 and not request.done.done():
            request.done.set_result(None)

    def _blame(self, call: ScoringItem, part: str, how: str) -> None:
        spec = self._specs[call.reward]
        what = f"reward {spec.shown_as!r} {how}"
        log.warning("%s; the response began with %r", what, (call.responses[0] or "")[:100])
        scored: Scored = RewardError(what, fix="Correct the reward, or set reward.timeout_value")
        if spec.timeout_value is not None:
            scored = RewardResult(spec.timeout_value, ((part, 1.0),))
        self._settle(call, [scored] * len(call.responses))

    async def _end(self, slot: ProcessSlot) -> str:
        process, slot.process = slot.process, None
        slot.answered.clear()
        return "" if process is None else await process.end()

    def _give_up(self, error: GcoreError) -> None:
        """Fail all pending and later requests with `error`; the first error counts."""
        self._broken = self._broken or error
        for request in self._requests:
            if not request.done.done():
                request.done.set_exception(self._broken)
        self._queue.clear()

    async def _notify(self) -> None:
        async with self._news:
            self._news.notify_all()


ENTRIES_AT_ONCE = 256


def _batched(entries: Iterable[Mapping[str, Any]], size: int) -> Iterator[list[Mapping[str, Any]]]:
    """Split `entries` into lists of `size`; the last may be shorter."""
    left = iter(entries)
    while some := list(islice(left, size)):
        yield some


def trial_response(pictures: Iterable[PictureRef], size: tuple[int, int] | None, folder: Path) -> Response:
    """Return an empty response for a trial of rewards. It has copies of the prompt's `pictures`, so that no reward can change
    the data, and a grey picture if the policy generates pictures.

    `size`: height and width in pixels of what the policy generates; None: it writes text. `folder`: gets the files, which
    are named by their SHA-256 as in a blob store. Raises DataError.
    """
    files = []
    for one in pictures:
        target = folder / one.sha256
        try:
            shutil.copyfile(one.path, target)
        except OSError as error:
            raise DataError(f"cannot copy the picture ({error.strerror})", where=one.path) from error
        files.append(PictureFile(str(target), one.sha256))
    if size is None:
        return Response("", 0, environment=0.0, files=files)
    content = blank_png(*size)
    name = hashlib.sha256(content).hexdigest()
    (folder / name).write_bytes(content)
    return Response("", files=files, picture_file=PictureFile(str(folder / name), name, *size))


class RewardTrial:
    """Loads a job's rewards in a process before the job exists; a context manager.

    It detects rewards that cannot be loaded, misspelt options, answers of the wrong type, and a sandbox that does not
    work. Calls block; do not use it in an event loop.
    """

    def __init__(self, rewards: Mapping[str, RewardSpec], scoring: ScoringSpec) -> None:
        """`rewards`: by the data source that error messages name. `scoring`: limits; one process is used in any case."""
        self._pool = RewardPool(rewards, scoring.model_copy(update={"workers": 1}), SystemClock())
        self._runner = asyncio.Runner()

    def __enter__(self) -> RewardTrial:
        """Load the rewards.

        Raises PluginFault for a reward that cannot be loaded, CannotStart if no process can be started.
        """
        try:
            self._runner.run(self._pool.warm())
        except BaseException:
            self._runner.close()
            raise
        return self

    def score(self, spec: RewardSpec, fields: Mapping[str, Any], response: Response) -> Scored:
        """Score a group of `response` and a copy of it; returns the first error, else the first result. Raises
        SpecError.
        """
        results = self._runner.run(self._pool.score(spec, fields, (response, response)))
        return next((one for one in results if isinstance(one, RewardError)), results[0])

    def first_bad_entry(self, spec: RewardSpec, entries: Iterable[Mapping[str, Any]]) -> tuple[int, RewardError] | None:
        """Return the index and the error of the first entry that the reward's own check rejects; None if it accepts all.

        No response to such an entry could be scored. Raises SpecError.
        """
        place = 0
        for some in _batched(entries, ENTRIES_AT_ONCE):
            for result in self._runner.run(self._check(spec, some)):
                if isinstance(result, RewardError):
                    return place, result
                place += 1
        return None

    async def _check(self, spec: RewardSpec, entries: Sequence[Mapping[str, Any]]) -> list[Scored]:
        work = [self._pool.score(spec, fields, (None,)) for fields in entries]
        return [result for (result,) in await asyncio.gather(*work)]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._runner.run(self._pool.close())
        finally:
            self._runner.close()

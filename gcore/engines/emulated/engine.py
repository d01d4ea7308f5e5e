"""Emulated engine in an asyncio event loop: it accepts requests, and responds when the simulated device finishes them.

Its slot (`LiveSlot`), which several engines may share, advances the simulation in real time. Requests are checked as by
the torch engine. A weight update excludes requests in the same way (`serving.engine.UpdateLock`) and takes the time
that the timing model (`law`) defines. A sleeping engine accepts requests and lets them wait; its weights cannot be
changed. A stream reports responses as they grow and when they end. Of the pictures of a prompt only the sizes are
read, to expand their placeholders. Requests that an emulated engine cannot serve are refused with an explanation.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from gcore.config.reward import VerdictSpec
from gcore.engines.detokenizer import Detokenizer
from gcore.engines.emulated.device import EmulatedDevice, EmulatedSlot
from gcore.engines.emulated.launch import HostLaunch
from gcore.engines.emulated.law import ReplicaTiming
from gcore.engines.emulated.responses import (
    EmulatedResponse,
    EmulatedVerdict,
    ResponseModel,
    Vocabulary,
    find_emulated_verdict,
    make_response,
    random_blob,
)
from gcore.engines.request import (
    ABORTED,
    GenerationRequest,
    PauseMode,
    RequestOutput,
    RequestSampling,
    check_token_ids,
    check_version,
)
from gcore.engines.serving.engine import ServedEngine
from gcore.engines.serving.io_struct import GenerateCall, LogprobRequest, SamplingBody, word_sample
from gcore.errors import DataError, EngineError, GcoreError
from gcore.media.pictures import inspect_picture
from gcore.media.placeholders import PictureRule, Size, SmartResizeRule
from gcore.models.diffusion.files import is_pipeline
from gcore.rollout.engine_time import EngineTimeSums
from gcore.system.clock import Clock
from gcore.system.concurrency import gather_or_cancel
from gcore.types import Version

if TYPE_CHECKING:
    from gcore.engines.emulated.pictures import EmulatedPipeline
    from gcore.engines.serving.denoising import AnswerWriter, DenoisingBody, DenoisingRequest
    from gcore.media.client import BlobClient

KIND = "gcore emulated engine: it computes nothing, for tests and benchmarks only"
UNTOLD = "an emulated engine computes nothing and cannot report {}"


@dataclass(frozen=True, slots=True)
class EmulatedModel:
    """What emulated engines need of a model's folder. All engines of a process with this model share it."""

    path: str
    words: Vocabulary
    text: Detokenizer | None
    longest: int | None = None
    """Maximum number of tokens of a response that the job requests; None: not known."""
    verdict: EmulatedVerdict | None = None
    """The verdicts with which responses end, if the model is a judge."""
    rule: PictureRule | None = None
    """How placeholders of pictures are expanded; None: the model takes no pictures."""
    pipeline: EmulatedPipeline | None = None
    """Generates pictures; None: the model writes texts."""

    def expand(self, tokens: tuple[int, ...], pictures: Sequence[Any]) -> tuple[int, ...]:
        """Replace the placeholder of each picture by its tokens. `pictures`: paths of blobs. Raises EngineError."""
        if self.rule is None:
            if pictures:
                raise EngineError(
                    "this engine takes no pictures", fix="Serve a vision-language model with its processor"
                )
            return tokens
        if not all(isinstance(one, str) and one.startswith("/") for one in pictures):
            raise EngineError("an emulated engine reads pictures only from paths", fix="Send paths of blobs")
        try:
            return self.rule.expand_request(tokens, [_picture_size(one) for one in pictures])
        except DataError as error:
            raise EngineError(error.what, where=error.where, fix=error.fix) from error


@functools.lru_cache(maxsize=4096)
def _picture_size(path: str) -> Size:
    """Return height and width of a blob, which never changes. Raises PictureError."""
    facts = inspect_picture(path)
    return facts.height, facts.width


def check_prompt(
    model: EmulatedModel,
    prompt: str | list[int],
    params: SamplingBody,
    asked: LogprobRequest,
    pictures: Sequence[Any] = (),
) -> tuple[int, ...]:
    """Check a request and return the tokens of its prompt, with all placeholders of its pictures.

    Raises EngineError if the model does not accept the request (unknown tokens, too long, other pictures than
    placeholders), or if it asks for something that an emulated engine cannot report (stop strings, log-probabilities of
    anything but the response).
    """
    words, text = model.words, model.text
    tokens: tuple[int, ...]
    if isinstance(prompt, str):
        if text is None:
            raise EngineError("the model folder has no tokenizer.json", fix="Send input_ids")
        tokens = text.encode(prompt)
    else:
        tokens = tuple(prompt)
    check_token_ids(tokens, words.size)
    tokens = model.expand(tokens, pictures)
    if len(tokens) + (params.max_new_tokens or 0) > words.context or len(tokens) >= words.context:
        raise EngineError(
            f"a prompt of {len(tokens)} tokens and max_new_tokens {params.max_new_tokens} exceed "
            f"the context of {words.context} tokens",
            fix="Shorten the prompt or lower max_new_tokens",
        )
    if params.stop_strings:
        raise EngineError(UNTOLD.format("the position of a stop string"), fix="Use stop_token_ids")
    if asked.top or asked.named or (asked.prompt_from is not None and asked.prompt_from < len(tokens)):
        raise EngineError(UNTOLD.format("log-probabilities of anything but the response"))
    return tokens


class EmulatedModels:
    """Loads the models of one process, each once. They are named by the judge that they serve; the policy is ""."""

    def __init__(self) -> None:
        self._read: dict[str, EmulatedModel] = {}

    def of(self, launch: HostLaunch, judge: str) -> EmulatedModel:
        """Return the model of judge `judge` of `launch`, or of the policy for "". Blocks the first time.

        Raises DataError, also if a judge's verdict parser cannot be loaded.
        """
        if judge not in self._read:
            self._read[judge] = _judge(launch, judge) if judge else _policy(launch)
        return self._read[judge]


NO_WORDS = Vocabulary(0, (), (), 0)
"""The vocabulary of a model that generates pictures."""


def _policy(launch: HostLaunch) -> EmulatedModel:
    folder = Path(launch.model)
    if is_pipeline(folder):
        from gcore.engines.emulated.pictures import EmulatedPipeline  # slow to import

        pipeline = EmulatedPipeline.read(folder, launch.guidance, launch.height, launch.width)
        return EmulatedModel(str(folder), NO_WORDS, None, pipeline=pipeline)
    text = Detokenizer.load(folder)
    return EmulatedModel(str(folder), Vocabulary.load(folder, text), text, launch.longest, rule=_picture_rule(folder))


def _judge(launch: HostLaunch, name: str) -> EmulatedModel:
    judge = launch.judge(name)
    folder = Path(judge.model)
    text = Detokenizer.load(folder)
    words = Vocabulary.load(folder, text)
    try:
        spec = VerdictSpec.model_validate(judge.verdict)
    except ValidationError as error:
        raise DataError(f"the verdict parser of judge {name!r} cannot be loaded ({error})") from error
    verdict = find_emulated_verdict(name, spec, words, text)
    return EmulatedModel(str(folder), words, text, judge.longest, verdict, _picture_rule(folder))


def _picture_rule(folder: Path) -> PictureRule | None:
    """Load the picture rule of a model's folder; None: the model takes no pictures, or has no usable processor."""
    try:
        rule = PictureRule.load(folder)
        if isinstance(rule, SmartResizeRule):  # blobs have their final size, whatever the job's bounds are
            return PictureRule.load(folder, min_pixels=1, max_pixels=sys.maxsize)
    except DataError:
        return None
    return rule


class ResponseBlobs:
    """Stores a blob of random bytes with each response, as an engine does whose samples have arrays. `size`: in bytes.
    `client`: of the store on the engine's node. Belongs to one event loop.
    """

    def __init__(self, size: int, client: BlobClient) -> None:
        self._size = size
        self._client = client
        self._turns = asyncio.Semaphore(BLOBS_AT_ONCE)

    async def store_for(self, task: GenerationRequest) -> dict[str, Any]:
        """Store the blob of a response. Return its medium as the response names it. Raises EngineError."""
        async with self._turns:
            data = await asyncio.to_thread(random_blob, self._size, task.prompt, task.sampling.seed)
            try:
                blob = await self._client.put_bytes(data)
            except GcoreError as error:
                raise EngineError(f"the blob of a response cannot be stored: {error}", fix=error.fix) from error
        return {"kind": "trajectory", "sha256": blob.sha256, "size": blob.size, "shape": [self._size], "dtype": "uint8"}


BLOBS_AT_ONCE = 2
"""Number of responses of an engine whose blobs are generated and stored at once, because they are in memory."""

Deliver = Callable[[list[RequestOutput]], None]


class LiveSlot:
    """Runs an `EmulatedSlot` in real time, in an event loop.

    It has one timer, set for the next end of a sample on any of its devices; nothing runs in between. Belongs to the
    event loop in which it is first used. `speedup`: emulated seconds per real second.
    """

    def __init__(self, clock: Clock, speedup: float) -> None:
        self._clock = clock
        self._speedup = speedup
        self._slot = EmulatedSlot()
        self._deliver: dict[EmulatedDevice, Deliver] = {}
        self._alarm: asyncio.TimerHandle | None = None

    def now(self) -> float:
        """Return the time in emulated seconds."""
        return self._clock.monotonic() * self._speedup

    def add(self, device: EmulatedDevice, deliver: Deliver, on: tuple[str, ...] = ("",)) -> None:
        """Add a device that is resident on the slots `on`. `deliver`: called with outputs that have ended."""
        now = self.now()
        self._advance(now)
        self._deliver[device] = deliver
        self._slot.add(device, now, on)

    def remove(self, device: EmulatedDevice) -> None:
        """Remove a device. Its requests never end."""
        now = self.now()
        self._advance(now)
        del self._deliver[device]
        self._slot.remove(device, now)
        self._set_alarm()

    def do(self, device: EmulatedDevice, deed: Callable[[float], list[RequestOutput] | None]) -> None:
        """Advance the simulation to the present, and call `deed` (a method of `device`) with the present time.

        Delivers the outputs that it returns. Does nothing if the device was removed.
        """
        now = self.now()
        self._advance(now)
        if (deliver := self._deliver.get(device)) is not None:
            deliver(deed(now) or [])
        self._slot.share(now)
        self._set_alarm()

    def _advance(self, now: float) -> None:
        for device, ended in self._slot.advance(now):
            self._deliver[device](ended)

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        at = self._slot.wake_at()
        if at is not None:
            delay = max(0.0, at - self.now()) / self._speedup
            self._alarm = asyncio.get_running_loop().call_later(delay, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        now = self.now()
        self._advance(now)
        self._slot.share(now)
        self._set_alarm()


def _names_of(given: Sequence[str] | None, count: int) -> Sequence[str]:
    """The request IDs of so many pictures: those that are given, or new ones."""
    return [uuid.uuid4().hex for _ in range(count)] if given is None else given


LEAST_S = 0.05
"""Minimum of real seconds between two checks whether a streamed response has grown."""


@dataclass(frozen=True, slots=True)
class PendingAnswer:
    """A request for one sample that has not ended, and what is needed to build its response.

    `ended`: future of the output. `since`: arrival time on the monotonic clock, in seconds. `returns_prompt`: whether
    the response has the prompt's tokens.
    """

    task: GenerationRequest
    params: SamplingBody
    asked: LogprobRequest
    ended: asyncio.Future[RequestOutput]
    since: float
    returns_prompt: bool = False


@dataclass(frozen=True, slots=True)
class PendingPicture:
    """A request for one picture that has not ended. `task`: as the device runs it. The other fields are as of `PendingAnswer`."""

    task: GenerationRequest
    request: DenoisingRequest
    ended: asyncio.Future[RequestOutput]
    since: float


class EmulatedEngine(ServedEngine[Path]):
    """One emulated engine, with the interface that the HTTP routes use (`ServedEngine`).

    `rows`: maximum number of running sequences. `slot`: the simulation of the slot on which it is resident; None: it
    has a slot of its own. `spans`: names of its slots in that simulation. `blobs`: stores the blobs of responses; None:
    they have none. `writer`: stores the arrays of generated pictures. Belongs to the event loop of its first request. New weights
    are only a folder's path; nothing is loaded.
    """

    kind = "an emulated engine"
    alternative = "Use a real engine"

    def __init__(
        self,
        name: str,
        model: EmulatedModel,
        timing: ReplicaTiming,
        clock: Clock,
        *,
        rows: int,
        version: str,
        slot: LiveSlot | None = None,
        spans: tuple[str, ...] = ("",),
        blobs: ResponseBlobs | None = None,
        writer: AnswerWriter | None = None,
    ) -> None:
        description = {
            "model_path": model.path,
            "tokenizer_path": model.path,
            "engine": KIND,
            "context_length": model.words.context,
            "vocab_size": model.words.size,
            "is_generation": True,
        }
        self._writer = writer
        self._drawn: dict[int, DenoisingRequest] = {}
        """The pictures that are under way, by number."""
        self.device = EmulatedDevice(timing, self._response, rows=rows, version=version)
        super().__init__(clock, self.device, description)
        self.time_scale = 1.0 / timing.law.speedup
        self.name = name
        self.model = model
        self.timing = timing
        self._speedup = timing.law.speedup
        self._voice = ResponseModel(timing.law, model.words, model.longest, model.verdict)
        self._slot = slot or LiveSlot(clock, timing.law.speedup)
        self._slot.add(self.device, self._deliver, spans)
        self._blobs = blobs
        self._tickets: dict[int, PendingAnswer | PendingPicture] = {}
        self._next = 0
        self._storing = asyncio.Semaphore(BLOBS_AT_ONCE)
        self._moving = asyncio.Lock()
        """Held while memory is released or restored."""
        self._follow(version)

    def admit(self, request: GenerateCall) -> list[PendingAnswer]:
        """Check a client's request and split it into samples, in the order of the prompts. Starts nothing.

        Raises EngineError if it cannot be served.
        """
        if self.model.pipeline is not None:
            raise EngineError("this engine generates pictures", fix="Send /rollout/generate")
        names = request.rids or tuple(uuid.uuid4().hex for _ in request.prompts)
        self.check_names(set(names))
        request.adapter_numbers({})
        tickets = []
        every = request.pictures or ((),) * len(names)
        for prompt, params, asked, name, pictures in zip(
            request.prompts, request.params, request.asked, names, every, strict=True
        ):
            tokens = check_prompt(self.model, prompt, params, asked, pictures)
            for index in range(params.n):
                ticket = self._ticket(tokens, params, asked, name if params.n == 1 else f"{name}_{index}", index)
                tickets.append(replace(ticket, returns_prompt=request.returns_prompt))
        return tickets

    def admit_pictures(self, body: DenoisingBody) -> list[PendingPicture]:
        """Check a client's request for pictures and split it. Starts nothing. Raises EngineError, DataError."""
        from gcore.engines.serving.denoising import admit_pictures  # slow to import

        pipeline = self.model.pipeline
        if pipeline is None:
            raise EngineError("this engine writes texts", fix="Send /generate")
        numbers = itertools.count(self._next)
        found = admit_pictures(
            body, pipeline, pipeline.side, averages=True, number=lambda: next(numbers), names=_names_of
        )
        self._next += len(found)
        self.check_names({request.rid for request in found})
        loop, now = asyncio.get_running_loop(), self.clock.monotonic()
        return [
            PendingPicture(
                GenerationRequest(
                    one.number, one.rid, one.prompt or (0,), RequestSampling(len(one.levels) - 1, one.seed)
                ),
                one,
                loop.create_future(),
                now,
            )
            for one in found
        ]

    async def pictures(self, tickets: Sequence[PendingPicture], *, with_condition: bool) -> list[dict[str, Any]]:
        """Generate pictures, and return the answers in order. A cancellation aborts those that run. Raises BlobError."""
        self._drawn |= {ticket.task.number: ticket.request for ticket in tickets}
        try:
            async with self._under_way(tickets):
                ended = await asyncio.gather(*(ticket.ended for ticket in tickets))
                return await gather_or_cancel(
                    self._picture(ticket, output, with_condition=with_condition)
                    for ticket, output in zip(tickets, ended, strict=True)
                )
        finally:
            for ticket in tickets:
                del self._drawn[ticket.task.number]

    async def _picture(self, ticket: PendingPicture, output: RequestOutput, *, with_condition: bool) -> dict[str, Any]:
        from gcore.engines.emulated.pictures import trained_spans  # slow to import
        from gcore.engines.serving.denoising import answer_numbers

        request, ending, pipeline = ticket.request, output.ending, self.model.pipeline
        assert ending is not None
        assert pipeline is not None
        assert self._writer is not None
        latency_s, version = self.clock.monotonic() - ticket.since, output.spans[-1].version
        if ending.kind == "abort":
            return answer_numbers(request, ending, (), (), version, latency_s)
        logprobs = [output.logprobs[step] for step in request.trained]
        spans = trained_spans(request, output.spans, version)
        answer = answer_numbers(request, ending, logprobs, spans, version, latency_s)
        async with self._storing:
            arrays = await asyncio.to_thread(pipeline.arrays, request)
            return answer | await self._writer.arrays(request, arrays, with_condition=with_condition)

    async def answers(self, tickets: Sequence[PendingAnswer]) -> list[dict[str, Any]]:
        """Start the samples, wait for all, and return the responses in order. A cancellation aborts those that run."""
        async with self._under_way(tickets):
            ended = await asyncio.gather(*(ticket.ended for ticket in tickets))
            return await gather_or_cancel(
                self._whole(ticket, delivery) for ticket, delivery in zip(tickets, ended, strict=True)
            )

    def advance(self) -> None:
        """Advance the simulation to the present, and deliver the outputs that have ended."""
        self._slot.do(self.device, self.device.advance)

    async def stream(self, tickets: Sequence[PendingAnswer]) -> AsyncIterator[dict[str, Any]]:
        """Start the samples and yield their responses as they grow: the tokens so far every `stream_interval` tokens,
        and the complete response when it ends. `index` of a response is its position in `tickets`.
        """
        async with self._under_way(tickets):
            waiting = {ticket.ended: place for place, ticket in enumerate(tickets)}
            sent = [0] * len(tickets)
            while waiting:
                done, _ = await asyncio.wait(
                    waiting, timeout=self._grown_in(tickets), return_when=asyncio.FIRST_COMPLETED
                )
                for place, future in sorted((waiting.pop(future), future) for future in done):
                    yield {**await self._whole(tickets[place], future.result()), "index": place}
                self.advance()
                for place in waiting.values():
                    ticket = tickets[place]
                    part = self.device.so_far(ticket.task.number)
                    if part is not None and len(part.tokens) - sent[place] >= ticket.params.stream_interval:
                        sent[place] = len(part.tokens)
                        yield {**self._word(ticket, part), "index": place}

    def _grown_in(self, tickets: Sequence[PendingAnswer]) -> float:
        """Return the real seconds after which one of these responses may have grown by its `stream_interval`."""
        every = min(ticket.params.stream_interval for ticket in tickets)
        return max(every * self.device.step_s / self._speedup, LEAST_S)

    @contextlib.asynccontextmanager
    async def _under_way(self, tickets: Sequence[PendingAnswer | PendingPicture]) -> AsyncIterator[None]:
        names = {ticket.task.rid for ticket in tickets}
        async with self.gate.passing():
            self._names |= names
            self._tickets |= {ticket.task.number: ticket for ticket in tickets}
            self.requests += len(tickets)
            self.prompt_tokens += sum(len(ticket.task.prompt) for ticket in tickets)
            try:
                tasks = [ticket.task for ticket in tickets]
                self._slot.do(self.device, lambda now: self.device.submit(tasks, now))
                yield
            finally:
                self._names -= names
                left = {t.task.number for t in tickets if self._tickets.pop(t.task.number, None) is not None}
                if left:
                    self._abort(lambda task: task.number in left)

    @property
    def alive(self) -> bool:
        """Always True: when an emulated engine ends, its port is closed."""
        return True

    @property
    def generated_tokens(self) -> int:
        """Number of tokens generated until now."""
        return self.device.tokens(self.now())

    def time_sums(self) -> EngineTimeSums:
        """How the engine's time until now was spent, in emulated seconds."""
        self.advance()
        return self.device.sums(self.now())

    def _abort(self, unwanted: Callable[[GenerationRequest], bool]) -> None:
        self._slot.do(self.device, lambda now: self.device.abort(unwanted, now))

    async def abort(self, unwanted: Callable[[Any], bool], message: str = ABORTED) -> None:
        """End the requests for which `unwanted` is true, with the tokens that they have so far.

        `message` is ignored: the device has its own.
        """
        self._abort(unwanted)

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating tokens. `mode`: see `EmulatedDevice.pause`."""
        self._slot.do(self.device, lambda now: self.device.pause(mode, now))

    async def resume(self) -> None:
        """Generate tokens again."""
        self._slot.do(self.device, self.device.resume)

    async def flush(self) -> bool:
        """Return whether a real engine could drop its prefix cache now: no request uses it. There is no cache here."""
        device = self.device
        return not (device.running or (device.waiting and not device.paused))

    async def release(self, tags: frozenset[str]) -> None:
        """Release the memory named by `tags` ("weights", "kv_cache"), after the simulated time for it.

        Raises EngineError while requests run.
        """
        async with self._moving:
            if self.device.running:
                raise EngineError("requests are running", fix="Abort or pause them first")
            # First, so that no request starts while memory is released.
            self._slot.do(self.device, lambda now: self.device.release(tags, now))
            self.gate.recheck()
            await self.take(self.timing.sleep())

    async def wake(self, tags: frozenset[str]) -> None:
        """Restore the memory named by `tags`, after the simulated time for it.

        Raises EngineError if it was not released.
        """
        async with self._moving:
            if not tags <= self.device.asleep:
                raise EngineError(f"the memory of {', '.join(sorted(tags - self.device.asleep))} was not released")
            await self.take(self.timing.wake())
            self._slot.do(self.device, lambda now: self.device.wake(tags, now))

    def follow_step(self, step: int) -> None:
        """Tell a judge engine the job's step, on which its speed may depend.

        Ignored by engines of the policy, which know the step from the version of their weights.
        """
        if self.model.verdict is not None:
            self.timing.step = step

    def remove(self) -> None:
        """Remove the engine from its slot. Its requests never end."""
        self._slot.remove(self.device)

    async def stage_weights(self, folder: Path) -> Path:
        """Check that new weights could be loaded: `folder` is a model folder and the weights are not released.

        Loads nothing and returns `folder`. Raises EngineError.
        """
        if not (folder / "config.json").is_file():
            raise EngineError(f"{folder} has no config.json, so it is not a model folder")
        if "weights" in self.device.asleep:
            raise EngineError("the weights are released", fix="Call /resume_memory_occupation first")
        return folder

    async def install_weights(self, staged: Path, version: str | None, *, flush: bool) -> None:
        """Wait for the simulated time of a weight update, then generate with `version` (None: the present one)."""
        await self.take(self.timing.publish())
        self._call_weights(version if version is not None else self.device.version)

    async def rename(self, version: str, *, abort: bool) -> None:
        """Set the version name of the served weights. `abort`: end all requests first. Raises EngineError for an older
        version.
        """
        check_version(version, self.device.version)
        if abort:
            self._abort(lambda _: True)
        self._call_weights(version)

    def _call_weights(self, version: str) -> None:
        self._slot.do(self.device, lambda now: self.device.call_weights(version, now))
        self._follow(version)

    def _follow(self, version: str) -> None:
        """Set the step on which durations depend from the version of the policy's weights. A judge gets the step from
        `follow_step`.
        """
        if self.model.verdict is None:
            with contextlib.suppress(ValueError):
                self.timing.step = Version.parse(version).step

    async def take(self, emulated_s: float) -> None:
        """Wait until this many emulated seconds have passed."""
        await self.clock.sleep(emulated_s / self._speedup)

    def now(self) -> float:
        """Return the time in emulated seconds."""
        return self.clock.monotonic() * self._speedup

    def _response(self, task: GenerationRequest, version: str) -> EmulatedResponse:
        if self.model.pipeline is not None:
            return self.model.pipeline.response(self._drawn[task.number])
        return make_response(self._voice, task.prompt, task.sampling, version, self.timing.step)

    def _ticket(
        self, tokens: tuple[int, ...], params: SamplingBody, asked: LogprobRequest, rid: str, index: int
    ) -> PendingAnswer:
        words = self.model.words
        sampling = params.sampling(
            index=index,
            drawn_seed=uuid.uuid4().int >> 65,
            end_tokens=words.end_tokens,
            room=words.context - len(tokens),
            vocabulary=words.size,
            asked=asked,
        )
        task = GenerationRequest(self._next, rid, tokens, sampling)
        self._next += 1
        ended: asyncio.Future[RequestOutput] = asyncio.get_running_loop().create_future()
        return PendingAnswer(task, params, asked, ended, self.clock.monotonic())

    def _deliver(self, deliveries: Iterable[RequestOutput]) -> None:
        for delivery in deliveries:
            ticket = self._tickets.pop(delivery.number, None)
            if ticket is not None and not ticket.ended.done():
                ticket.ended.set_result(delivery)

    async def _whole(self, ticket: PendingAnswer, delivery: RequestOutput) -> dict[str, Any]:
        """Return a response that has ended, with its blob in the node's store. Raises EngineError."""
        answer = self._word(ticket, delivery)
        if self._blobs is not None and delivery.ending is not None and delivery.ending.kind != "abort":
            answer["meta_info"]["media"] = [await self._blobs.store_for(ticket.task)]
        return answer

    def _word(self, ticket: PendingAnswer, delivery: RequestOutput) -> dict[str, Any]:
        latency = self.clock.monotonic() - ticket.since
        worded = word_sample(
            delivery, ticket.task, ticket.params, ticket.asked, text=self.model.text, latency_s=latency
        )
        return worded | ({"prompt_token_ids": list(ticket.task.prompt)} if ticket.returns_prompt else {})

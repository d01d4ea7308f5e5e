"""Discrete-event simulation of engines: which sequences wait and run, when each sample ends, how engines on one slot
slow each other down.

All times are emulated seconds. The caller passes the present time (`now`), which never decreases. Weights are only a
version name here.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gcore.engines.emulated.law import ReplicaTiming
from gcore.engines.emulated.responses import EmulatedResponse
from gcore.engines.request import Finish, GenerationRequest, PauseMode, RequestOutput, SequenceState
from gcore.engines.torch.scheduler import WaitingQueue
from gcore.rollout.engine_time import EngineTimeMeter, EngineTimeSums, current_activity

ALMOST = 1e-9
"""Tolerance for rounding: in steps; and if engines share a slot, in seconds between two moments that count as one."""


@dataclass(slots=True)
class _Row:
    """A running sequence: it had `made` output tokens when it joined at decode step `joined`.

    `entry`: identifies its entry in the heap of ends.
    """

    work: SequenceState
    joined: float
    made: int
    entry: int


class EmulatedDevice:
    """Simulation of one engine. `rows`: maximum number of running sequences.

    `respond`: returns the complete response to a request with the weights of a version; the simulation only decides
    when its tokens appear.

    All running sequences generate one token per decode step, and the duration of a step depends on their number. So
    there is one counter of steps: a sequence that joined at step j and has n tokens left ends at step j + n, regardless
    of other sequences. Nothing needs to be computed between two moments at which a sequence joins or ends, so one
    process can emulate a thousand engines. The prefill of a prompt delays the steps, unless a sequence with the same
    prompt is running.

    The caller passes the number of engines that compute on the slot (`shared_by`), which scales all durations. This
    class does not know HTTP or its clients.
    """

    def __init__(
        self,
        timing: ReplicaTiming,
        respond: Callable[[GenerationRequest, str], EmulatedResponse],
        *,
        rows: int,
        version: str,
    ) -> None:
        self._timing = timing
        self._respond = respond
        self._rows = rows
        self.version = version
        self.paused = False
        self.asleep: frozenset[str] = frozenset()
        self.generated_tokens = 0
        self._now = 0.0
        self._steps = 0.0
        self._shared = 1.0
        """Factor on all durations because of other engines on the slot."""
        self._alone_s = timing.decode_step(1)
        """Duration of a decode step if no other engine computes on the slot."""
        self._held_until = 0.0
        self._waiting = WaitingQueue()
        self._running: dict[int, _Row] = {}
        self._ends: list[tuple[float, int, int]] = []
        """Heap of: step at which a row ends, its entry, its task's number. Entries of removed rows remain."""
        self._entries = itertools.count()
        self._responses: dict[int, EmulatedResponse] = {}
        self._meter: EngineTimeMeter | None = None
        """Set at the first action on the engine, whose time is the start of its accounting."""

    @property
    def running(self) -> int:
        """Number of decoding sequences."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of sequences that wait for a row."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether the engine computes now, and therefore slows down other engines on its slot."""
        return bool(self._running) and not self.still

    @property
    def still(self) -> bool:
        """Whether the engine is paused or asleep, so that it generates no tokens even if requests wait."""
        return self.paused or bool(self.asleep)

    def submit(self, tasks: Sequence[GenerationRequest], now: float) -> list[RequestOutput]:
        """Add requests. Returns the outputs of requests that ended until `now`, as most methods below do."""
        ended = self.advance(now)
        self._waiting.put([SequenceState(task) for task in tasks])
        self._join(now)
        return ended

    def advance(self, now: float) -> list[RequestOutput]:
        """Advance the simulation to `now`. Returns the outputs of requests that ended until then."""
        ended: list[RequestOutput] = []
        while not self.still and (step := self._next_end()) is not None:
            begin = max(self._now, self._held_until)
            at = begin + (step - self._steps) * self.step_s
            if at > now:
                self._steps += max(0.0, now - begin) / self.step_s
                break
            self._now, self._steps = at, step
            ended += self._end_rows()
            self._join(at)
        self._now = max(self._now, now)
        self._note(now)
        return ended

    def tokens(self, now: float) -> int:
        """Return the total number of tokens generated until `now`, including unfinished sequences."""
        begin = max(self._now, self._held_until)
        passed = 0.0 if self.still else max(0.0, now - begin) / self.step_s
        running = sum(self._made(row, self._steps + passed) for row in self._running.values())
        return (
            self.generated_tokens + running + sum(len(work.tokens) for work in self._waiting.peek(len(self._waiting)))
        )

    def sums(self, now: float) -> EngineTimeSums:
        """Return how the engine's time until `now` was spent."""
        self._note(now)
        assert self._meter is not None
        return self._meter.read(now)

    def _note(self, now: float) -> None:
        """Account for the time until `now`. Call it whenever the number of requests or the activity changes."""
        if self._meter is None:
            self._meter = EngineTimeMeter(self._rows, now)
        doing = current_activity(paused=self.paused, asleep=bool(self.asleep))
        self._meter.note(doing, len(self._running) + len(self._waiting), now)

    def shared_by(self, count: int, now: float) -> None:
        """Set the number of engines that compute on the slot, counting this one. Scales all durations from `now` on.

        Call `advance` to `now` before.
        """
        shared = count * (1.0 + self._timing.law.shared_loss * (count - 1))
        left = self._held_until - now
        if left > 0:
            self._held_until = now + left * shared / self._shared
        self._shared = shared

    def wake_at(self) -> float | None:
        """Return the time at which the next sample ends if nothing happens before; None: never."""
        step = None if self.still else self._next_end()
        return None if step is None else max(self._now, self._held_until) + (step - self._steps) * self.step_s

    def abort(self, unwanted: Callable[[GenerationRequest], bool], now: float) -> list[RequestOutput]:
        """End the requests for which `unwanted` is true, with the tokens that they have so far."""
        ended = self.advance(now)
        ending = Finish("abort", message="Aborted by a request")
        for work in self._waiting.drop(unwanted):
            ended.append(self._delivery(work, len(work.tokens), ending))
        for number, row in list(self._running.items()):
            if unwanted(row.work.task):
                del self._running[number]
                ended.append(self._delivery(row.work, self._made(row), ending))
        self._join(now)
        return ended

    def pause(self, mode: PauseMode, now: float) -> list[RequestOutput]:
        """Stop generating tokens. `mode`: abort all requests, preempt them ("retract"), or keep them in place."""
        ended = self.abort(lambda _: True, now) if mode == "abort" else self.advance(now)
        if mode == "retract":
            self._waiting.put_back([self._retracted(row) for row in self._running.values()])
            self._running.clear()
        self.paused = True
        self._note(now)
        return ended

    def resume(self, now: float) -> None:
        """Generate tokens again after `pause`."""
        self.advance(now)
        self.paused = False
        self._join(now)

    def release(self, tags: frozenset[str], now: float) -> list[RequestOutput]:
        """Release the memory named by `tags` ("weights", "kv_cache"): the engine sleeps. No request may be running."""
        ended = self.advance(now)
        self.asleep |= tags
        self._note(now)
        return ended

    def wake(self, tags: frozenset[str], now: float) -> None:
        """Restore the memory named by `tags`. The engine continues once nothing is released any more."""
        self.advance(now)
        self.asleep -= tags
        self._join(now)

    def call_weights(self, version: str, now: float) -> list[RequestOutput]:
        """Set the version of the weights, which generate all tokens from the next one on."""
        ended = self.advance(now)
        self.version = version
        for row in self._running.values():
            row.work.mark(version, self._made(row))
        return ended

    def so_far(self, number: int) -> RequestOutput | None:
        """Return the output so far of the request `number`; None if it does not run. Call `advance` before."""
        row = self._running.get(number)
        if row is None:
            return None
        response, count = self._responses[number], self._made(row)
        cached = row.work.cached_tokens
        return RequestOutput(
            number, response.tokens[:count], response.logprobs[:count], row.work.spans(count), cached, ending=None
        )

    @property
    def step_s(self) -> float:
        """Present duration of a decode step, for the running sequences and the engines that share the slot."""
        return self._alone_s * self._shared

    def _next_end(self) -> float | None:
        while self._ends:
            step, entry, number = self._ends[0]
            row = self._running.get(number)
            if row is not None and row.entry == entry:
                return step
            heapq.heappop(self._ends)
        return None

    def _end_rows(self) -> list[RequestOutput]:
        """End the running sequences whose last token is that of the present step."""
        ended = []
        while (step := self._next_end()) is not None and step <= self._steps + ALMOST:
            row = self._running.pop(heapq.heappop(self._ends)[2])
            response = self._responses[row.work.task.number]
            ended.append(self._delivery(row.work, len(response.tokens), response.ending))
        return ended

    def _join(self, now: float) -> None:
        """Start waiting sequences while rows are free. The prefill of new prompts delays all decode steps."""
        if self.still:
            return
        read = {row.work.task.key for row in self._running.values() if not row.made} if self._waiting else set()
        unread = begun = 0
        for work in self._waiting.take(self._rows - len(self._running)):
            task = work.task
            if task.number not in self._responses:
                self._responses[task.number] = self._respond(task, self.version)
            made = len(work.tokens)
            if made or task.key not in read:
                unread += len(task.prompt) + made
                read.add(task.key)
            else:
                work.cached_tokens = len(task.prompt) - 1
            work.mark(self.version, made)
            begun += 1
            entry = next(self._entries)
            self._running[task.number] = _Row(work, self._steps, made, entry)
            end = self._steps + len(self._responses[task.number].tokens) - made
            heapq.heappush(self._ends, (end, entry, task.number))
        if begun:
            self._held_until = max(self._held_until, now) + self._timing.begin(unread, begun) * self._shared
        self._alone_s = self._timing.decode_step(max(1, len(self._running)))
        self._note(now)

    def _made(self, row: _Row, steps: float | None = None) -> int:
        """Return the number of output tokens of a row at decode step `steps`; None: at the present one."""
        since = (self._steps if steps is None else steps) - row.joined
        return min(row.made + int(since + ALMOST), len(self._responses[row.work.task.number].tokens))

    def _retracted(self, row: _Row) -> SequenceState:
        work, made = row.work, self._made(row)
        response = self._responses[work.task.number]
        work.tokens = [] if response.restarts else list(response.tokens[:made])
        work.retractions += 1
        return work

    def _delivery(self, work: SequenceState, count: int, ending: Finish) -> RequestOutput:
        response = self._responses.pop(work.task.number, None)
        tokens = () if response is None else response.tokens[:count]
        logprobs = () if response is None else response.logprobs[:count]
        self.generated_tokens += count
        spans = work.spans(count) if work.marks else work.never_joined(self.version)
        return RequestOutput(
            work.task.number, tokens, logprobs, spans, work.cached_tokens, ending, retractions=work.retractions
        )


class EmulatedSlot:
    """The engines that are resident on one emulated slot, or on adjacent slots that engines span, and their speeds.

    The caller passes the present time. To act on a device, call `advance`, act, and call `share`, all with the same
    time.

    Sleeping devices use nothing. Awake devices with sequences to decode share the slot: of two that compute at once
    each runs at half the speed, and when one of them has no more work, the other has the slot alone. A device over
    several slots is limited by the slot with the most computing devices. Copies (weights, released and restored memory)
    take their own time in addition.

    Train ranks are separate processes and are not included. At staleness 0 they compute only when no engine does, by
    the order of the step. At a staleness above 0 a rank and an engine on one slot are emulated as if each had the slot
    alone.
    """

    def __init__(self) -> None:
        self._devices: dict[EmulatedDevice, tuple[str, ...]] = {}

    def add(self, device: EmulatedDevice, now: float, on: tuple[str, ...] = ("",)) -> None:
        """Add a device that is resident on the slots `on`."""
        device.advance(now)
        self._devices[device] = on
        self.share(now)

    def remove(self, device: EmulatedDevice, now: float) -> None:
        """Remove a device. Its requests never end."""
        del self._devices[device]
        self.share(now)

    def advance(self, now: float) -> list[tuple[EmulatedDevice, list[RequestOutput]]]:
        """Advance all devices to `now`. Returns the outputs that ended until then, by device.

        The end of a device's work changes the speed of the others, so ends are processed in order of time.
        """
        found: list[tuple[EmulatedDevice, list[RequestOutput]]] = []
        while len(self._devices) > 1 and (at := self.wake_at()) is not None and at < now - ALMOST:
            found += self._to(at)
            self.share(at)
        return found + self._to(now)

    def share(self, now: float) -> None:
        """Recompute the speed of each device, after the set of computing devices may have changed."""
        busy = Counter(slot for device, on in self._devices.items() if device.busy for slot in on)
        for device, on in self._devices.items():
            most = max(busy[slot] for slot in on)
            device.shared_by(max(1, most if device.busy else most + 1), now)

    def wake_at(self) -> float | None:
        """Return the time at which the next sample of any device ends if nothing happens before; None: never."""
        return min((at for device in self._devices if (at := device.wake_at()) is not None), default=None)

    def _to(self, now: float) -> list[tuple[EmulatedDevice, list[RequestOutput]]]:
        return [(device, ended) for device in self._devices if (ended := device.advance(now))]

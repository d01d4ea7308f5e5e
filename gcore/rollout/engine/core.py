"""What the engine does between two looks at its mailbox: make way, read, step, finish; and the changes that others ask for.

A cycle takes rows away where the memory has grown too small for all of them, admits what fits, reads a portion of the
waiting prompts, and makes one token for every row (`schedule` decides each of these). A change of weights, a pause or an
abort takes effect between cycles. What is running then goes on: after a change of weights with `flush` its keys and values
are made anew by the new weights, without it they stay as they are; either way its spans tell which version made which
tokens.

Single-threaded and without a clock; the runner's thread calls it. What has ended, or streams, is collected in `outbox`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gcore.errors import EngineError
from gcore.free_memory import give_back_free_memory
from gcore.rollout.engine.decoder import Decoder, Made
from gcore.rollout.engine.lane import Lane
from gcore.rollout.engine.memory import memory_error_explained
from gcore.rollout.engine.model import Model
from gcore.rollout.engine.reading import plan
from gcore.rollout.engine.schedule import IDLE_TOKENS, Size, Want, admissible, longest_alone, outgrown
from gcore.rollout.engine.served import ABORTED, PauseMode
from gcore.rollout.engine.tasks import Delivery, Ending, Task, Waiting, Work, is_older
from gcore.rollout.engine.text import Text, tail_length
from gcore.rollout.engine.weights import Bed, Staged, check_awake, install


@dataclass(frozen=True, slots=True)
class Limits:
    """Rows at once, tokens in the cache (the budget), and prompt tokens read between two steps."""

    slots: int
    cache_tokens: int
    prefill_chunk_tokens: int = 512


class Core:
    """A model that serves. `version`: the served weights' name."""

    def __init__(self, model: Model, text: Text | None, lane: Lane, limits: Limits, *, version: str) -> None:
        self.model = model
        self.limits = limits
        self.lane = lane
        self.version = version
        self.paused = False
        self.asleep: frozenset[str] = frozenset()
        """What of "weights" and "kv_cache" has been released."""
        self.outbox: list[Delivery] = []
        self.generated_tokens = 0
        self.retractions = 0
        self.longest = longest_alone(model.context, budget=limits.cache_tokens, footprint=lane.footprint)
        """Tokens, prompt and response, of the longest request that can be served."""
        self._text = text
        self._bed = Bed(model)
        self._decoder = Decoder(model, lane, limits.slots)
        self._waiting = Waiting()
        self._reading: list[Work] = []
        """Admitted, their prompts not yet read to the end."""

    @property
    def rows(self) -> int:
        """Sequences that have one at once, at most."""
        return self.limits.slots

    @property
    def running(self) -> int:
        """Sequences with a row."""
        return self._decoder.rows.active

    @property
    def waiting(self) -> int:
        """Sequences without one."""
        return len(self._waiting) + len(self._reading)

    @property
    def can_work(self) -> bool:
        """Whether a cycle would do anything."""
        return not self.paused and not self.asleep and (self.running > 0 or self.waiting > 0)

    def check(self, prompt_tokens: int, max_new_tokens: int) -> None:
        """Raises EngineError for a request that the cache could never hold. May be called from any thread."""
        if prompt_tokens + max_new_tokens > self.longest:
            raise EngineError(
                f"a prompt of {prompt_tokens} tokens and max_new_tokens {max_new_tokens} exceed the {self.longest} tokens "
                f"of one request that a cache of {self.limits.cache_tokens} holds",
                fix="Shorten the request, or raise rollout.cache_tokens",
            )

    def submit(self, tasks: list[Task]) -> None:
        """Tasks that have been checked. They wait for a row."""
        self._waiting.put(Work(task) for task in tasks)

    def cycle(self) -> None:
        """Make way, read a portion, and make one token for all that run. Raises EngineError when memory runs out."""
        with memory_error_explained("while it was generating"):
            self._make_way()
            if self.waiting:
                self._read()
            if self.running:
                self._after(self._decoder.step())

    def _held(self) -> list[int]:
        reading = [len(self._decoder.ids(work)) + 1 for work in self._reading]
        return [*self._decoder.rows.lengths.tolist(), *reading]

    def _make_way(self) -> None:
        """The youngest leave when the rows have outgrown the memory."""
        lengths, footprint = self._held(), self.lane.footprint
        if footprint(Size.of(lengths)) <= self.limits.cache_tokens:
            return
        rows = self.running
        ages = [work.task.number for work in (*self._decoder.rows.works, *self._reading)]
        gone = outgrown(lengths, ages, budget=self.limits.cache_tokens, footprint=footprint)
        back = [self._reading[i - rows] for i in gone if i >= rows]
        self._reading = [work for work in self._reading if work not in back]
        self._put_back([*self._decoder.leave([i for i in gone if i < rows]), *back])
        self._decoder.drop_prompts(self._reading)

    def _put_back(self, works: Sequence[Work]) -> None:
        for work in works:
            work.retractions += 1
        self.retractions += len(works)
        self._waiting.put_back(sorted(works, key=lambda work: work.task.number))

    def _read(self) -> None:
        """Admit what fits, read a portion of the prompts, and let join whose prompt is done."""
        decoder, works = self._decoder, [*self._reading, *self._admissible()]
        if not works:
            return
        known = decoder.known()
        needs = [None if decoder.key(work) in known else decoder.prompt(work) for work in works]
        portion = self.limits.prefill_chunk_tokens
        planned = plan(needs, budget=portion if self.running else max(IDLE_TOKENS, portion), grid=self.lane.grid)
        works, needs = works[: planned.works], needs[: planned.works]
        self._waiting.take(max(0, len(works) - len(self._reading)))
        decoder.drop_prompts(works)
        decoder.read(planned.chunks)
        self._reading = [work for work, prompt in zip(works, needs, strict=True) if prompt is not None and prompt.left]
        joining = [work for work, prompt in zip(works, needs, strict=True) if prompt is None or not prompt.left]
        if joining:
            self._prepare(joining)
            self._after(decoder.join(joining))

    def _admissible(self) -> list[Work]:
        free = self.limits.slots - self.running - len(self._reading)
        first = self._waiting.peek(free)
        if not first:
            return []
        count = admissible(
            [Want(len(w.task.prompt) + len(w.tokens), w.task.sampling.max_new_tokens - len(w.tokens)) for w in first],
            Size.of(self._held()),
            free=free,
            budget=self.limits.cache_tokens,
            footprint=self.lane.footprint,
        )
        return first[:count]

    def _prepare(self, works: Sequence[Work]) -> None:
        rows = self._decoder.rows
        rows.forget_stop_strings()
        for work in works:
            stop = work.task.sampling.stop
            if not rows.knows_stop_strings(stop):
                assert self._text is not None
                rows.know_stop_strings(stop, self._text.suspects(stop, self.model.vocabulary))
            work.mark(self.version, len(work.tokens))

    def _after(self, made: Made) -> None:
        """Let go what has ended with these tokens, and tell those who stream."""
        rows = self._decoder.rows
        self.generated_tokens += rows.active - made.first - made.ended.replayed
        endings: dict[int, Ending] = {row: Ending("length") for row in made.ended.by_count.tolist()}
        for row in made.ended.by_token.tolist():
            endings[row] = Ending("stop", matched=rows.tail(row, 1)[0])
        for row in made.ended.suspects.tolist():
            stop = rows.works[row].task.sampling.stop
            assert self._text is not None
            if (met := self._text.met(stop, rows.tail(row, tail_length(stop)))) is not None:
                endings[row] = Ending("stop", matched=met)
        for row in made.broken:
            endings[row] = Ending("abort", message="the model's output is not finite; its weights may be broken")
        if rows.streaming:
            for row in range(made.first, rows.active):
                if rows.works[row].task.streams and row not in endings and not rows.replays(row):
                    self._deliver(rows.save(row), None)
        if endings:
            for row, work in zip(endings, self._decoder.leave(list(endings)), strict=True):
                if row in made.broken:
                    work.drop_last()
                self._deliver(work, endings[row])

    def _deliver(self, work: Work, ending: Ending | None) -> None:
        self.outbox.append(
            Delivery(
                work.task.number,
                tuple(work.tokens),
                tuple(work.logprobs),
                work.spans(len(work.tokens)) if work.marks else work.never_joined(self.version),
                work.cached_tokens,
                ending,
                tuple(work.tops),
                tuple(work.named),
                work.prompt_logprobs,
                work.retractions,
            )
        )

    def abort(self, unwanted: Callable[[Task], bool], message: str = ABORTED) -> None:
        """End these now, with the tokens they have."""
        rows = self._decoder.rows
        leaving = [row for row, work in enumerate(rows.works) if unwanted(work.task)]
        unread = [work for work in self._reading if unwanted(work.task)]
        if unread:
            self._reading = [work for work in self._reading if not unwanted(work.task)]
            self._decoder.drop_prompts(self._reading)
        for work in [*self._decoder.leave(leaving), *unread, *self._waiting.drop(unwanted)]:
            self._deliver(work, Ending("abort", message=message))

    def abort_all(self, message: str = ABORTED) -> None:
        """End everything now."""
        self.abort(lambda task: True, message)

    def pause(self, mode: PauseMode) -> None:
        """Make no more tokens: end what runs, take its rows away, or leave it as it stands."""
        self.paused = True
        if mode == "abort":
            self.abort_all("aborted by a pause")
        elif mode == "retract":
            self._retract()

    def resume(self) -> None:
        """Go on."""
        self.paused = False

    def _retract(self) -> None:
        works = [*self._decoder.leave(range(self.running)), *self._reading]
        self._reading = []
        self._decoder.drop_prompts()
        self._put_back(works)

    def flush(self) -> None:
        """Forget the cache. Raises EngineError while sequences run, whose cache it is."""
        if self.running:
            raise EngineError(
                f"{self.running} requests are running", fix="Pause with mode retract, or abort them, first"
            )
        self._retract()
        self.lane.release()

    def check_version(self, version: str | None) -> None:
        """Raises EngineError for a version older than what is served."""
        if version is not None and is_older(version, self.version):
            raise EngineError(f"version {version} is older than {self.version}, which is served")

    def change_weights(self, staged: Staged, version: str | None, *, flush: bool, abort: bool) -> None:
        """Serve these weights from the next token on. Raises EngineError; then nothing has changed."""
        self.check_version(version)
        check_awake(self.model)
        if abort:
            self.abort_all("aborted by a change of weights")
        install(self.model, staged)
        self._decoder.distrust_prompts()
        if flush:
            self._retract()
        self.rename(version or self.version)

    def rename(self, version: str) -> None:
        """Call the served weights so. Raises EngineError for an older version."""
        self.check_version(version)
        self.version = version
        rows = self._decoder.rows
        for row, work in enumerate(rows.works):
            work.mark(version, rows.made(row))

    def release(self, tags: frozenset[str]) -> None:
        """Give memory back ("weights", "kv_cache"). Raises EngineError unless nothing runs."""
        if self.running:
            raise EngineError(f"{self.running} requests are running", fix="Pause or abort them first")
        if "kv_cache" in tags:
            self._retract()
            self.lane.release()
        if "weights" in tags - self.asleep:
            self._bed.put_to_sleep()
        self.asleep |= tags
        give_back_free_memory()

    def wake(self, tags: frozenset[str]) -> None:
        """Take memory again; the cache grows by itself."""
        if "weights" in tags & self.asleep:
            with memory_error_explained("while the weights came back"):
                self._bed.wake()
        self.asleep -= tags

"""What the engine does between two looks at its mailbox: admit, step, finish; and the changes that others ask for.

Rows that are free are given to what waits, in order, before each step. A change of weights, a pause or an abort takes
effect between steps. What is running then goes on: after a change of weights with `flush` its keys and values are made
anew by the new weights, without it they stay as they are; either way its spans tell which version made which tokens.

Single-threaded and without a clock; the runner's thread calls it. What has ended, or streams, is collected in `outbox`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from gcore.errors import EngineError
from gcore.rollout.engine.decoder import Decoder, Made
from gcore.rollout.engine.model import Model, Staged, install, put_to_sleep, wake
from gcore.rollout.engine.tasks import Delivery, Ending, Task, Waiting, Work, is_older
from gcore.rollout.engine.text import Text, tail_length

PauseMode = Literal["abort", "retract", "in_place"]
ABORTED = "aborted on request"


class Core:
    """A model that serves. `version`: the served weights' name."""

    def __init__(self, model: Model, text: Text | None, *, slots: int, version: str) -> None:
        self.model = model
        self.version = version
        self.paused = False
        self.asleep: frozenset[str] = frozenset()
        """What of "weights" and "kv_cache" has been released."""
        self.outbox: list[Delivery] = []
        self.generated_tokens = 0
        self._text = text
        self._decoder = Decoder(model, slots)
        self._waiting = Waiting()

    @property
    def running(self) -> int:
        """Sequences with a row."""
        return self._decoder.rows.active

    @property
    def waiting(self) -> int:
        """Sequences without one."""
        return len(self._waiting)

    @property
    def can_work(self) -> bool:
        """Whether a cycle would do anything."""
        return not self.paused and not self.asleep and (self.running > 0 or self.waiting > 0)

    def submit(self, tasks: list[Task]) -> None:
        """Tasks that have been checked. They wait for a row."""
        self._waiting.put(Work(task) for task in tasks)

    def cycle(self) -> None:
        """Admit what fits, and make one token for all that run."""
        if self._decoder.free and self.waiting:
            works = self._waiting.take(self._decoder.free)
            for work in works:
                self._prepare(work)
            self._after(self._decoder.join(works))
        if self.running:
            self._after(self._decoder.step())

    def _prepare(self, work: Work) -> None:
        stop = work.task.sampling.stop
        if not self._decoder.rows.knows_stop_strings(stop):
            assert self._text is not None
            self._decoder.rows.know_stop_strings(stop, self._text.suspects(stop, self.model.vocabulary))
        work.mark(self.version, len(work.tokens))

    def _after(self, made: Made) -> None:
        """Let go what has ended with these tokens, and tell those who stream."""
        rows = self._decoder.rows
        self.generated_tokens += rows.active - made.first
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
                if rows.works[row].task.streams and row not in endings:
                    self._deliver(rows.save(row), None)
        if endings:
            for row, work in zip(endings, self._decoder.leave(list(endings)), strict=True):
                if row in made.broken:
                    del work.tokens[-1], work.logprobs[-1]
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
            )
        )

    def abort(self, unwanted: Callable[[Task], bool], message: str = ABORTED) -> None:
        """End these now, with the tokens they have."""
        rows = self._decoder.rows
        leaving = [row for row, work in enumerate(rows.works) if unwanted(work.task)]
        for work in [*self._decoder.leave(leaving), *self._waiting.drop(unwanted)]:
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
        self._waiting.put_back(self._decoder.leave(range(self.running)))

    def flush(self) -> None:
        """Forget the cache. Raises EngineError while sequences run, whose cache it is."""
        if self.running:
            raise EngineError(
                f"{self.running} requests are running", fix="Pause with mode retract, or abort them, first"
            )
        self._decoder.cache.release()

    def check_version(self, version: str | None) -> None:
        """Raises EngineError for a version older than what is served."""
        if version is not None and is_older(version, self.version):
            raise EngineError(f"version {version} is older than {self.version}, which is served")

    def change_weights(self, staged: Staged, version: str | None, *, flush: bool, abort: bool) -> None:
        """Serve these weights from the next token on. Raises EngineError; then nothing has changed."""
        self.check_version(version)
        if "weights" in self.asleep:
            raise EngineError("the weights are released", fix="Call /resume_memory_occupation first")
        if abort:
            self.abort_all("aborted by a change of weights")
        install(self.model, staged)
        self._decoder.forget_prompts()
        if flush:
            self._retract()
        self.rename(version or self.version)

    def rename(self, version: str) -> None:
        """Call the served weights so. Raises EngineError for an older version."""
        self.check_version(version)
        self.version = version
        rows = self._decoder.rows
        for row, work in enumerate(rows.works):
            work.mark(version, int(rows.counts[row]))

    def release(self, tags: frozenset[str]) -> None:
        """Give memory back ("weights", "kv_cache"). Raises EngineError unless nothing runs."""
        if self.running:
            raise EngineError(f"{self.running} requests are running", fix="Pause or abort them first")
        if "kv_cache" in tags:
            self._decoder.cache.release()
        if "weights" in tags - self.asleep:
            put_to_sleep(self.model)
        self.asleep |= tags

    def wake(self, tags: frozenset[str]) -> None:
        """Take memory again; the cache grows by itself."""
        if "weights" in tags & self.asleep:
            wake(self.model)
        self.asleep -= tags

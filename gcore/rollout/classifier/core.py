"""What a classifier does between two looks at its mailbox: one batch of the questions that wait, through the model.

A pass is whole: nothing stands half done between cycles, so a pause has nothing to take back, and changes of weights, aborts
and sleep concern only what waits. Single-threaded and without a clock; the runner's thread calls it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from gcore.errors import EngineError
from gcore.free_memory import give_back_free_memory
from gcore.rollout.classifier.batches import WINDOW, batch
from gcore.rollout.classifier.model import Classifier
from gcore.rollout.engine.memory import memory_error_explained
from gcore.rollout.engine.schedule import IDLE_TOKENS
from gcore.rollout.engine.served import ABORTED, PauseMode
from gcore.rollout.engine.tasks import Ending, is_older
from gcore.rollout.engine.weights import Bed, Staged, check_awake, install

FIX = "Lower serving.batch_slots (questions at once), or show the judge less"


@dataclass(frozen=True, slots=True)
class Question:
    """One question. `number` is the engine's own name for it, unique in its life; `rid` the client's."""

    number: int
    rid: str
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scored:
    """What became of a question. `score` None: it was aborted. `version`: of the weights."""

    number: int
    score: float | None
    version: str
    ending: Ending


class ClassifierCore:
    """A model that says one number of a question. `version`: the served weights' name."""

    generated_tokens = 0

    def __init__(self, model: Classifier, *, slots: int, chunk: int, version: str) -> None:
        self.model = model
        self.version = version
        self.paused = False
        self.asleep: frozenset[str] = frozenset()
        self.outbox: list[Scored] = []
        self.running = 0
        """Questions in the pass that goes on."""
        self.rows = slots if model.pads else 1
        """Questions in one pass, at most."""
        self._tokens = max(IDLE_TOKENS, chunk)
        self._waiting: deque[Question] = deque()
        self._bed = Bed(model)

    @property
    def waiting(self) -> int:
        """Questions that wait."""
        return len(self._waiting)

    @property
    def can_work(self) -> bool:
        """Whether a cycle would do anything."""
        return not self.paused and not self.asleep and bool(self._waiting)

    def submit(self, questions: list[Question]) -> None:
        """Questions that have been checked."""
        self._waiting.extend(questions)

    def cycle(self) -> None:
        """One batch. Raises EngineError when memory runs out."""
        first = list(islice(self._waiting, WINDOW))
        places = batch([len(question.prompt) for question in first], slots=self.rows, tokens=self._tokens)
        chosen = [first[place] for place in places]
        self.running = len(chosen)
        try:
            with memory_error_explained("while it was scoring", FIX):
                scores = self.model.scores([question.prompt for question in chosen])
        finally:
            self.running = 0
        for place in sorted(places, reverse=True):
            del self._waiting[place]
        ending = Ending("stop")
        self.outbox += [
            Scored(question.number, score, self.version, ending) for question, score in zip(chosen, scores, strict=True)
        ]

    def abort(self, unwanted: Callable[[Question], bool], message: str = ABORTED) -> None:
        """End these now, without a score."""
        ending = Ending("abort", message=message)
        gone = [question for question in self._waiting if unwanted(question)]
        if gone:
            numbers = {question.number for question in gone}
            self._waiting = deque(question for question in self._waiting if question.number not in numbers)
        self.outbox += [Scored(question.number, None, self.version, ending) for question in gone]

    def abort_all(self, message: str = ABORTED) -> None:
        """End everything now."""
        self.abort(lambda question: True, message)

    def pause(self, mode: PauseMode) -> None:
        """Score nothing more; with `abort` what waits ends too."""
        self.paused = True
        if mode == "abort":
            self.abort_all("aborted by a pause")

    def resume(self) -> None:
        """Go on."""
        self.paused = False

    def flush(self) -> None:
        """There is no cache."""

    def check_version(self, version: str | None) -> None:
        """Raises EngineError for a version older than what is served."""
        if version is not None and is_older(version, self.version):
            raise EngineError(f"version {version} is older than {self.version}, which is served")

    def change_weights(self, staged: Staged, version: str | None, *, flush: bool, abort: bool) -> None:
        """Serve these weights from the next pass on. Raises EngineError; then nothing has changed."""
        self.check_version(version)
        check_awake(self.model)
        if abort:
            self.abort_all("aborted by a change of weights")
        install(self.model, staged)
        self.rename(version or self.version)

    def rename(self, version: str) -> None:
        """Call the served weights so. Raises EngineError for an older version."""
        self.check_version(version)
        self.version = version

    def release(self, tags: frozenset[str]) -> None:
        """Give memory back ("weights"; of "kv_cache" there is none)."""
        if "weights" in tags - self.asleep:
            self._bed.put_to_sleep()
        self.asleep |= tags
        give_back_free_memory()

    def wake(self, tags: frozenset[str]) -> None:
        """Take memory again."""
        if "weights" in tags & self.asleep:
            with memory_error_explained("while the weights came back", FIX):
                self._bed.wake()
        self.asleep -= tags

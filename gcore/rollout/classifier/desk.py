"""Between HTTP and the model's thread: turns checked requests into questions, and scores into SGLang's answers.

Lives on the event loop. What depends on the model (token ids, its context) is checked here, before anything reaches the
thread. A request whose client has gone away is aborted.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from typing import Any

from gcore.clock import Clock
from gcore.errors import EngineError
from gcore.rollout.classifier.body import Classify
from gcore.rollout.classifier.core import ClassifierCore, Question, Scored
from gcore.rollout.engine.answers import finite
from gcore.rollout.engine.post import Post
from gcore.rollout.engine.text import Text


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request's questions."""

    questions: tuple[Question, ...]
    since: float


class ClassifierDesk(Post[Question, Scored]):
    """Takes requests. `open` it before the first."""

    def __init__(self, core: ClassifierCore, text: Text | None, *, clock: Clock) -> None:
        super().__init__(core, clock)
        self._core = core
        self._text = text

    def encoded(self, request: Classify) -> Classify:
        """With tokens for texts. May be called from any thread: a long text takes seconds."""
        if (text := self._text) is None:
            return request
        return replace(
            request, questions=tuple(list(text.encode(q)) if isinstance(q, str) else q for q in request.questions)
        )

    def admit(self, request: Classify) -> Admitted:
        """The questions of an encoded request. Raises EngineError for what cannot be served."""
        checked = [self._tokens(question) for question in request.questions]
        names = request.rids or tuple(uuid.uuid4().hex for _ in checked)
        self.check_names(set(names))
        questions = (Question(self.number(), name, tokens) for name, tokens in zip(names, checked, strict=True))
        return Admitted(tuple(questions), self.clock.monotonic())

    def _tokens(self, question: str | list[int]) -> tuple[int, ...]:
        model = self._core.model
        if isinstance(question, str):
            raise EngineError("the model folder has no tokenizer.json", fix="Send input_ids")
        if not question:
            raise EngineError("a question has no tokens")
        wrong = next((token for token in (min(question), max(question)) if not 0 <= token < model.vocabulary), None)
        if wrong is not None:
            raise EngineError(f"token id {wrong} is not in the vocabulary of {model.vocabulary}")
        if len(question) >= model.context:
            raise EngineError(
                f"a question of {len(question)} tokens does not fit into the context of {model.context} tokens",
                fix=f"Ask with at most {model.context - 1} tokens",
            )
        return tuple(question)

    async def answers(self, admitted: Admitted) -> list[dict[str, Any]]:
        """Wait for all, and word the answers in order."""
        questions = admitted.questions
        scored = await self.ended(list(questions), {question.rid for question in questions})
        latency = self.clock.monotonic() - admitted.since
        return [_answer(question, scored[question.number], latency) for question in questions]


def _answer(question: Question, scored: Scored, latency_s: float) -> dict[str, Any]:
    reason: dict[str, Any] = {"type": "stop"}
    if scored.score is None:
        reason = {"type": "abort", "message": scored.ending.message, "status_code": None, "err_type": None}
    return {
        "embedding": [] if scored.score is None else [finite(scored.score)],
        "meta_info": {
            "id": question.rid,
            "finish_reason": reason,
            "prompt_tokens": len(question.prompt),
            "cached_tokens": 0,
            "weight_version": scored.version,
            "e2e_latency": latency_s,
        },
    }

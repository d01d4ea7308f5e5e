"""Scores from the engines of a judge of `kind: classifier`.

Questions of the same moment go as one request, of at most as many as an engine takes through its model at once: a group is
judged together, and a request costs more than a question. So one request's fate is that of several questions: if its engine is
lost, all of them are asked again; if it is refused, each is asked for itself, for only one of them need be what was refused.
Which engine is asked, and what becomes of one that does not answer, is the book's (`controllers.engines`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from controllers.children import FIRST_WEIGHTS
from controllers.engines import EngineBook
from gcore.config.spec import JudgeSpec
from gcore.errors import DataError, EngineError, EngineGaveUp, EngineUnreachable
from gcore.prompts.long_texts import TooLong, aside, check_length
from gcore.prompts.render import PromptRenderer
from gcore.reward.generative.asking import Valued
from gcore.reward.generative.errors import JudgeError, unanswered


@dataclass(frozen=True, slots=True)
class _Question:
    text: str
    score: asyncio.Future[Valued]


Tokens = tuple[int, ...]


class EngineValue:
    """Puts the questions of one judge to its engines. Implements `gcore.reward.generative.asking.Value`."""

    def __init__(
        self,
        judge: JudgeSpec,
        book: EngineBook,
        renderer: PromptRenderer,
        limit: int | None,
        new_rid: Callable[[], str],
    ) -> None:
        """`limit`: the judge's context, in tokens."""
        self._book = book
        self._renderer = renderer
        self._limit = limit
        self._new_rid = new_rid
        self._most = judge.serving.batch_slots
        self._waiting: list[_Question] = []
        """Put at this moment."""
        self._requests: set[asyncio.Task[None]] = set()

    async def __call__(self, question: str) -> Valued:
        """The number, and how many tokens the question has; waits for an engine. Raises JudgeAway, JudgeError."""
        loop = asyncio.get_running_loop()
        put = _Question(question, loop.create_future())
        if not self._waiting:
            loop.call_soon(self._send)  # when all that can be put now has been
        self._waiting.append(put)
        return await put.score

    def _send(self) -> None:
        put, self._waiting = self._waiting, []
        for first in range(0, len(put), self._most):
            self._request(put[first : first + self._most])

    def _request(self, asked: Sequence[_Question]) -> None:
        task = asyncio.get_running_loop().create_task(self._ask(asked), name=f"classify {len(asked)}")
        self._requests.add(task)
        task.add_done_callback(partial(self._ended, asked))
        for question in asked:
            question.score.add_done_callback(lambda _: _given_up(task, asked))

    async def _ask(self, put: Sequence[_Question]) -> None:
        texts = [question.text for question in put]
        found = await aside(sum(map(len, texts)), lambda: [self._tokens(text) for text in texts])
        asked, tokens = list[_Question](), list[Tokens]()
        for question, made in zip(put, found, strict=True):
            if question.score.done():
                continue
            if isinstance(made, JudgeError):
                question.score.set_exception(made)
            else:
                asked.append(question)
                tokens.append(made)
        if asked:
            await self._request_scores(asked, tokens)

    async def _request_scores(self, asked: Sequence[_Question], tokens: Sequence[Tokens]) -> None:
        try:
            scores = await self._book.classify(FIRST_WEIGHTS, tokens, self._new_rid())
        except (EngineUnreachable, EngineGaveUp) as error:
            _fail(asked, partial(unanswered, error))
        except EngineError as error:
            if len(asked) == 1:
                _fail(asked, partial(JudgeError, error.what, where=error.where, fix=error.fix))
                return
            for question in asked:
                if not question.score.done():
                    self._request([question])
        else:
            for question, its, score in zip(asked, tokens, scores, strict=True):
                if not question.score.done():
                    question.score.set_result(Valued(score, len(its)))

    def _ended(self, asked: Sequence[_Question], task: asyncio.Task[None]) -> None:
        self._requests.discard(task)
        if task.cancelled():
            for question in asked:
                question.score.cancel()
        elif (error := task.exception()) is not None:  # a defect: whoever asked must hear of it
            _fail(asked, lambda: error)

    def _tokens(self, question: str) -> Tokens | JudgeError:
        """Those of a question, or why it is not asked. May run in a thread."""
        try:
            text = self._renderer.render(question)
            check_length(text, self._limit, self._renderer.encode)
            tokens = self._renderer.encode(text)
        except DataError as error:
            return JudgeError(error.what, where=error.where, fix=error.fix)
        except TooLong as error:
            return self._unheld(str(error))
        if not tokens:  # SGLang's scheduler dies of such a question
            return JudgeError("the question has no tokens", fix="Let its template show more than the response")
        if self._limit is not None and len(tokens) >= self._limit:
            return self._unheld(f"{len(tokens)} tokens")
        return tokens

    def _unheld(self, has: str) -> JudgeError:
        return JudgeError(
            f"the question has {has}, which do not fit into the judge's context of {self._limit}",
            fix="Shorten what its template shows, or take a judge with a longer context",
        )


def _fail(asked: Sequence[_Question], error: Callable[[], BaseException]) -> None:
    for question in asked:
        if not question.score.done():
            question.score.set_exception(error())


def _given_up(task: asyncio.Task[None], asked: Sequence[_Question]) -> None:
    """Nobody waits for any of them any more."""
    if all(question.score.done() for question in asked):
        task.cancel()  # which does nothing to one that has answered them

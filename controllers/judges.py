"""The judges of a job on one controller, opened: each with what it is shown, and with what puts its questions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from controllers.external_judges import ExternalJudges
from controllers.judge_counts import JudgeCounts
from controllers.judge_engines import JudgeEngines
from gcore.clock import Clock
from gcore.config import JobSpec
from gcore.config.spec import JudgeSpec
from gcore.errors import DataError
from gcore.prompts.render import PromptRenderer
from gcore.reward.generative.asking import Answer, Ask, Value, Valued
from gcore.reward.generative.judge import Judge


def open_judges(
    spec: JobSpec, engines: JudgeEngines, counts: JudgeCounts, clock: Clock, external: ExternalJudges | None = None
) -> Mapping[str, Judge]:
    """By name. `spec` names the models' folders on this node. `external`: asks those judges that others serve, if there are any.

    Blocks. Raises SpecError, DataError.
    """
    return {
        judge.name: Judge.of(
            judge,
            _opened(number, judge, engines, counts, external),
            counts,
            clock,
            where=f"judges.{number}",
        )
        for number, judge in enumerate(spec.judges)
    }


def renderer_of(number: int, judge: JudgeSpec) -> PromptRenderer:
    """How questions become tokens, for judge `number`, which the cluster serves. Blocks. Raises DataError."""
    assert judge.model is not None
    with named(number, judge):
        return PromptRenderer.load(Path(judge.model.path), chat=judge.chat, system=judge.system)


@contextmanager
def named(number: int, judge: JudgeSpec) -> Iterator[None]:
    """What is wrong with its model is told of judge `number`, by the keys of its own section: whoever finds it speaks of the policy's."""
    try:
        yield
    except DataError as error:
        where = f"judges.{number} ({judge.name!r})" + (f", {_own(number, error.where)}" if error.where else "")
        raise type(error)(error.what, where=where, fix=_own(number, error.fix or "") or None) from error


def _own(number: int, text: str) -> str:
    """`text` with the keys of judge `number` for those of the policy."""
    text = text.replace("or name one in `template`", "or take another model")
    text = re.sub(r"(?<![\w.])model\.chat\b", f"judges.{number}.chat", text)
    return re.sub(r"(?<![\w.])model\.(path|trust_remote_code|max_length)\b", rf"judges.{number}.model.\1", text)


def _opened(
    number: int, judge: JudgeSpec, engines: JudgeEngines, counts: JudgeCounts, external: ExternalJudges | None
) -> Ask | Value:
    if judge.kind == "classifier":
        assert judge.model is not None
        renderer = renderer_of(number, judge)
        valuer = engines.valuer(judge, renderer, judge.model.max_length or renderer.max_length)
        return OpenValue(valuer, judge.name, counts)
    return Open(_asker(number, judge, engines, external), judge.name, counts)


def _asker(number: int, judge: JudgeSpec, engines: JudgeEngines, external: ExternalJudges | None) -> Ask:
    if judge.model is None:
        assert external is not None
        return external.asker(number, judge)
    renderer = renderer_of(number, judge)
    return engines.asker(judge, renderer, judge.model.max_length or renderer.max_length)


class Open:
    """Counts the questions that are open. Implements `Ask`."""

    def __init__(self, ask: Ask, judge: str, counts: JudgeCounts) -> None:
        self._ask = ask
        self._judge = judge
        self._counts = counts

    async def __call__(self, question: str, seeds: Sequence[int]) -> tuple[Answer, ...]:
        """As what it counts."""
        self._counts.begun(self._judge)
        try:
            return await self._ask(question, seeds)
        finally:
            self._counts.ended(self._judge)


class OpenValue:
    """The same of a classifier. Implements `Value`."""

    def __init__(self, value: Value, judge: str, counts: JudgeCounts) -> None:
        self._value = value
        self._judge = judge
        self._counts = counts

    async def __call__(self, question: str) -> Valued:
        """As what it counts."""
        self._counts.begun(self._judge)
        try:
            return await self._value(question)
        finally:
            self._counts.ended(self._judge)

"""An external judge over real HTTP: the fake that tests use, and the torch engine, which has the same routes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engine_processes import engine_process
from fake_openai import FakeFailure, FakeOpenAI

from gcore.config.reward import JudgeSpec
from gcore.reward.judges.external import ExternalJudgeClient
from gcore.reward.judges.rate_limit import Cause, RateLimiter
from gcore.reward.judges.types import JudgeAway, JudgeError, JudgeLate
from gcore.system.clock import SystemClock

KEY = "sk-of-the-test"
LONGEST = 4
LATER_S = 0.3


@dataclass
class Book:
    """A budget without a limit, and a record of the judge's reports."""

    paid: list[tuple[int, int]] = field(default_factory=list)
    causes: set[Cause] = field(default_factory=set)
    troubles: list[str] = field(default_factory=list)

    def overdrawn(self, judge: str) -> str:
        return ""

    def note(self, judge: str, tokens_in: int, tokens_out: int) -> None:
        self.paid.append((tokens_in, tokens_out))

    def held(self, judge: str, cause: Cause, seconds: float) -> None:
        self.causes.add(cause)

    def waits(self, judge: str, why: str) -> None:
        """Of no concern here."""

    def trouble(self, judge: str, topic: str, sentence: str) -> None:
        self.troubles.append(sentence)


def said(body: Mapping[str, Any]) -> str:
    """What the fake answers: another text to another seed."""
    return f"{body['messages'][-1]['content']} is {body['seed']} and more than is wanted"


@contextlib.asynccontextmanager
async def asking(url: str, book: Book, *, key: str | None = KEY, **more: Any) -> AsyncIterator[ExternalJudgeClient]:
    outside = {"url": url, "model": "any", "requests_per_s": 1000.0} | more.pop("external", {})
    tree = {"name": "x", "template": "{{ response }}", "external": outside, "system": "add", "temperature": 1.0}
    spec = JudgeSpec.model_validate(tree | {"max_new_tokens": LONGEST, "timeout_s": 60} | more)
    assert spec.external is not None
    clock = SystemClock()
    ask = ExternalJudgeClient(spec, key, RateLimiter("x", spec.external, book, book, clock), book, book, clock)
    try:
        yield ask
    finally:
        await ask.close()


@pytest.fixture(params=["fake", "torch"])
async def url(request: pytest.FixtureRequest, engine_folders: tuple[Path, Path]) -> AsyncIterator[str]:
    if request.param == "fake":
        async with FakeOpenAI(said, key=KEY) as fake:
            yield fake.url
    else:
        with engine_process(engine_folders[0]) as engine:
            yield f"{engine}/v1"


async def test_a_judge_answers_each_seed_and_is_paid_by_tokens_and_answers_the_same_again(url: str) -> None:
    book = Book()
    async with asking(url, book) as ask:
        first, second = await ask("1+2=", (2**62 + 1, 2))
        assert first.text != second.text
        assert first.truncated
        assert first.tokens_out == second.tokens_out == LONGEST
        assert 0 < first.tokens_in == second.tokens_in
        assert book.paid == [(first.tokens_in, LONGEST)] * 2
        assert await ask("1+2=", (2**62 + 1, 2)) == (first, second)
        # Whatever is not taken is told in the server's words, and not asked again.
        with pytest.raises(JudgeError) as raised:
            async with asking(url.removesuffix("/v1"), book) as lost:
                await lost("1+2=", (1,))
        assert not isinstance(raised.value, JudgeAway)
        assert "status 404" in str(raised.value)


@pytest.mark.parametrize(
    ("failing", "error"),
    [
        pytest.param(FakeFailure(429, {"retry-after": str(LATER_S)}), JudgeAway, id="too many"),
        pytest.param(FakeFailure(500), JudgeAway, id="broken"),
        pytest.param(FakeFailure(None), JudgeAway, id="closed"),
        pytest.param(FakeFailure(body=b"<html>"), JudgeAway, id="a page"),
        pytest.param(FakeFailure(slow_s=30), JudgeLate, id="slow"),
        pytest.param(FakeFailure(400), JudgeError, id="refused"),
        pytest.param(FakeFailure(302, {"location": "http://127.0.0.1:1/"}), JudgeError, id="elsewhere"),
    ],
)
async def test_next_request_succeeds_after_a_server_failure(failing: FakeFailure, error: type[JudgeError]) -> None:
    book, began = Book(), SystemClock().monotonic()
    async with FakeOpenAI(said, key=KEY) as fake, asking(fake.url, book, timeout_s=3.0) as ask:
        fake.script = [failing]
        with pytest.raises(error):
            await ask("1+2=", (7,))
        (answer,) = await ask("1+2=", (7,))
        assert answer.text.startswith("1+2= is 7")
        assert len(fake.asked) == 2
    if "retry-after" in failing.headers:
        assert SystemClock().monotonic() - began >= LATER_S
        assert "server" in book.causes


async def test_unreachable_judge_raises_judge_away() -> None:
    async with FakeOpenAI(said) as fake:
        gone = fake.url
    async with asking(gone, Book()) as ask:
        with pytest.raises(JudgeAway, match="did not answer"):
            await ask("1+2=", (1,))


async def test_no_more_requests_are_open_than_may_be_and_all_are_answered() -> None:
    async with FakeOpenAI(said, key=KEY) as fake, asking(fake.url, Book(), external={"in_flight": 3}) as ask:
        fake.script = [FakeFailure(slow_s=0.05)] * 30
        answers = await asyncio.gather(*(ask(f"{i}", (i,)) for i in range(30)))
        assert [one.text.split()[0] for (one,) in answers] == [str(i) for i in range(30)]
        assert fake.most_open == 3


async def test_with_a_wrong_key_questions_wait_and_none_fails() -> None:
    book = Book()
    async with FakeOpenAI(said, key=KEY) as fake, asking(fake.url, book, key="sk-of-another") as ask:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await asyncio.gather(*(ask(f"{i}", (i,)) for i in range(20)))
        assert fake.asked == []
        assert 1 <= fake.refused <= 20
        assert "key" in book.causes
        (trouble,) = book.troubles
        assert "set external.key_env to its environment variable" in trouble
        assert "sk-of-another" not in trouble


async def test_a_server_without_usage_is_told_once() -> None:
    book = Book()
    async with FakeOpenAI(said, key=KEY) as fake, asking(fake.url, book) as ask:
        fake.script = [FakeFailure(usage=False), FakeFailure(usage=False)]
        await ask("1+2=", (1, 2))
    assert book.paid == [(0, 0), (0, 0)]
    assert book.troubles == ["judge 'x' does not report token counts"]

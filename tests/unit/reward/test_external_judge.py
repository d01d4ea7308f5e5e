"""An external judge: its requests, its answers, and a server without answers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_judges import RecordingObserver
from hypothesis import given
from hypothesis import strategies as st

from gcore.config.reward import JudgeSpec
from gcore.errors import DataError
from gcore.reward.api import PictureFile
from gcore.reward.judges.external import (
    LARGEST_ANSWER_BYTES,
    MOST_AWAY,
    MOST_DENIED,
    MOST_TOKENS,
    ExternalJudgeClient,
    InvalidCompletion,
    classify_status,
    completion_request,
    error_text,
    judge_key,
    parse_completion,
    retry_after_s,
)
from gcore.reward.judges.judge import Judge, Judgement
from gcore.reward.judges.rate_limit import FIRST_AWAY_S, KEY_AGAIN_S, LONGEST_HOLD_S, Cause, RateLimiter
from gcore.reward.judges.types import IMAGE_MARK, Answer, JudgeAway, JudgeError, JudgeLate
from gcore.testing import FakeClock
from gcore.types import PictureRef, Prompt, PromptRef

KEY = "sk-a-secret"


def judge(external: dict[str, Any] | None = None, **more: Any) -> JudgeSpec:
    outside = {"url": "https://api.example.com/v1/", "model": "big", "requests_per_s": 1000.0, **(external or {})}
    tree = {"name": "x", "template": "{{ response }}", "external": outside, "votes": 2, "temperature": 1.0}
    return JudgeSpec.model_validate(tree | more)


def said(text: str = "7", **more: Any) -> httpx.Response:
    message = {"role": "assistant", "content": text}
    tree = {
        "choices": [{"message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 1},
    }
    return httpx.Response(200, json=tree | more)


class Shop:
    """An ask with a server of the test's own behind it: it answers from a list, then well."""

    def __init__(self, spec: JudgeSpec, *answers: httpx.Response | Exception | float, key: str | None = KEY) -> None:
        self.clock, self.spec = FakeClock(), spec
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []
        self.paid: list[tuple[int, int]] = []
        self.troubles: list[str] = []
        assert spec.external is not None
        self.gate = RateLimiter(spec.name, spec.external, self, self, self.clock)
        transport = httpx.MockTransport(self._answer)
        self.ask = ExternalJudgeClient(spec, key, self.gate, self, self, self.clock, transport)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0) if self.answers else said()
        if isinstance(answer, float):
            await self.clock.sleep(answer)
            return said()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def asked(self, seeds: tuple[int, ...] = (1,), question: str = "good?") -> tuple[Answer, ...]:
        return await self.clock.run(self.ask(question, seeds))

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(request.content) for request in self.requests]

    def overdrawn(self, judge: str) -> str:
        return ""

    def note(self, judge: str, tokens_in: int, tokens_out: int) -> None:
        self.paid.append((tokens_in, tokens_out))

    def held(self, judge: str, cause: Cause, seconds: float) -> None:
        """Of no concern here."""

    def waits(self, judge: str, why: str) -> None:
        """Of no concern here."""

    def trouble(self, judge: str, topic: str, sentence: str) -> None:
        self.troubles.append(sentence)


async def test_each_vote_is_a_request_with_its_own_seed_of_31_bits_and_the_key_in_its_header() -> None:
    shop = Shop(judge(system="be strict", stop=["\n"], max_new_tokens=9, top_p=0.5), said("7"), said("8"))
    answers = await shop.asked((2**63 - 1, 5))
    assert answers == (Answer("7", 5, 1, truncated=False), Answer("8", 5, 1, truncated=False))
    assert [str(request.url) for request in shop.requests] == ["https://api.example.com/v1/chat/completions"] * 2
    assert {request.headers["authorization"] for request in shop.requests} == {f"Bearer {KEY}"}
    assert [body["seed"] for body in shop.bodies] == [2**31 - 1, 5]
    assert {k: v for k, v in shop.bodies[0].items() if k != "seed"} == {
        "model": "big",
        "messages": [{"role": "system", "content": "be strict"}, {"role": "user", "content": "good?"}],
        "temperature": 1.0,
        "top_p": 0.5,
        "max_tokens": 9,
        "stop": ["\n"],
        "stream": False,
    }
    assert shop.paid == [(5, 1), (5, 1)]


@given(seed=st.integers(0, 2**63 - 1), question=st.text())
def test_a_request_holds_nothing_that_json_cannot(seed: int, question: str) -> None:
    spec = judge()
    assert spec.external is not None
    body = completion_request(spec, spec.external, question, seed)
    assert 0 <= body["seed"] < 2**31
    assert "stop" not in body
    json.dumps(body)


@pytest.mark.parametrize(
    ("answer", "text", "truncated"),
    [
        pytest.param(said("cut"), "cut", False, id="well"),
        pytest.param(said(choices=[{"message": {"content": "a"}, "finish_reason": "length"}]), "a", True, id="cut off"),
        pytest.param(said(choices=[{"message": {"content": None, "refusal": "I will not"}}]), "", False, id="refusal"),
        pytest.param(said(choices=[{"message": {"role": "assistant"}}]), "", False, id="no content"),
    ],
)
async def test_answers_give_text_and_truncation(answer: httpx.Response, text: str, truncated: bool) -> None:
    (told,) = await Shop(judge(), answer).asked()
    assert (told.text, told.truncated) == (text, truncated)


@pytest.mark.parametrize("status", [400, 404, 413, 422, 302])
async def test_refused_request_is_not_retried_and_the_servers_message_is_reported(status: int) -> None:
    shop = Shop(judge(), httpx.Response(status, json={"error": {"message": "context too long " * 100}}))
    with pytest.raises(JudgeError, match=rf"refuses the request \(status {status}: context too long") as raised:
        await shop.asked()
    assert not isinstance(raised.value, JudgeAway)
    assert len(str(raised.value)) < 600
    assert len(shop.requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(httpx.Response(429), id="too many"),
        pytest.param(httpx.Response(500, text="oh"), id="broken"),
        pytest.param(httpx.Response(503), id="busy"),
        pytest.param(httpx.Response(403), id="forbidden"),
        pytest.param(httpx.Response(408), id="too slow to read"),
        pytest.param(httpx.ConnectError("no route"), id="no connection"),
        pytest.param(httpx.RemoteProtocolError("broke off"), id="broke off"),
        pytest.param(httpx.Response(200, text="<html>"), id="a page"),
        pytest.param(httpx.Response(200, json=[]), id="a list"),
        pytest.param(httpx.Response(200, json={"choices": []}), id="no choice"),
        pytest.param(said(choices=[{"message": {"content": ["7"]}}]), id="no text"),
    ],
)
async def test_a_server_that_gives_no_answer_is_away(answer: httpx.Response | Exception) -> None:
    shop = Shop(judge(), answer)
    with pytest.raises(JudgeAway):
        await shop.asked()
    assert shop.paid == []
    assert (await shop.asked())[0].text == "7"


async def test_an_answer_that_does_not_come_in_time_is_late_by_the_clock_that_is_given() -> None:
    shop = Shop(judge(timeout_s=30), 31.0)
    began = shop.clock.monotonic()
    with pytest.raises(JudgeLate, match="did not answer within 30 s"):
        await shop.asked()
    assert shop.clock.monotonic() - began == pytest.approx(30)


async def test_time_at_the_gate_is_nobodys_silence() -> None:
    shop = Shop(judge(timeout_s=5, verdict={"most": 10}))
    shop.gate.hold(50)
    heard = RecordingObserver()
    court = Judge.of(shop.spec, shop.ask, heard, shop.clock)
    told = await shop.clock.run(court.value(Prompt(PromptRef(0, 0, 0), "p", (1,), {}), "a response"))
    assert (told.value, told.votes, heard.failures) == (7.0, 2, [])


async def test_each_way_to_fail_is_counted_as_what_it_is_and_tried_again_as_often_as_the_judge_says() -> None:
    shop = Shop(judge(timeout_s=5, verdict={"most": 10}, votes=1), 6.0, httpx.Response(500))
    heard = RecordingObserver()
    court = Judge.of(shop.spec, shop.ask, heard, shop.clock)
    await shop.clock.run(court.value(Prompt(PromptRef(0, 0, 0), "p", (1,), {}), "a response"))
    assert heard.failures == ["timeout", "away"]
    shop.answers = [httpx.Response(400)]
    with pytest.raises(JudgeError):
        await shop.clock.run(court.value(Prompt(PromptRef(0, 0, 0), "p", (1,), {}), "another"))
    assert heard.failures[2:] == ["refused"]


async def test_a_server_is_left_alone_as_long_as_it_asks() -> None:
    shop = Shop(judge(), httpx.Response(429, headers={"Retry-After": "20"}))
    with pytest.raises(JudgeAway, match="status 429"):
        await shop.asked()
    began = shop.clock.monotonic()
    await shop.asked(question="another?")
    assert shop.clock.monotonic() - began == pytest.approx(20)


@pytest.mark.parametrize(
    "outage",
    [
        pytest.param(lambda: httpx.ConnectError("refused"), id="no connection"),
        pytest.param(lambda: httpx.Response(500), id="broken"),
        pytest.param(lambda: httpx.Response(429), id="too many"),
        pytest.param(lambda: httpx.Response(200, text="<html>"), id="a page"),
    ],
)
async def test_a_server_that_is_away_for_long_fails_no_question_and_is_told_once(
    outage: Callable[[], httpx.Response | Exception],
) -> None:
    shop = Shop(judge(votes=1, tries=2, verdict={"most": 10}), *[outage() for _ in range(40)])
    court = Judge.of(shop.spec, shop.ask, RecordingObserver(), shop.clock)
    prompt, began = Prompt(PromptRef(0, 0, 0), "p", (1,), {}), shop.clock.monotonic()
    judged = await shop.clock.run(court.values(prompt, [f"response {number}" for number in range(5)]))
    assert [one.value for one in judged if isinstance(one, Judgement)] == [7.0] * 5
    assert shop.clock.monotonic() - began > 20 * LONGEST_HOLD_S, "it is asked less and less often"
    gone, back = shop.troubles
    assert gone.endswith("; no request succeeds, and all wait until one does")
    assert back == "judge 'x' answers again"
    assert len(shop.requests) == 45


async def test_a_judge_with_a_fallback_waits_for_no_server() -> None:
    shop = Shop(judge(on_error={"fallback": "exact"}), *[httpx.Response(500)] * 10)
    for number in range(10):
        with pytest.raises(JudgeAway):
            await shop.asked(question=str(number))
    assert not shop.gate.is_away


async def test_a_server_that_is_soon_back_is_told_to_nobody() -> None:
    shop = Shop(judge(), *[httpx.Response(500)] * 4)
    for number in range(MOST_AWAY - 1):
        with pytest.raises(JudgeAway):
            await shop.asked(question=str(number))
    await shop.asked(question="the last")
    assert (shop.troubles, len(shop.requests)) == ([], 5)


async def test_a_question_that_a_server_always_breaks_at_is_given_up_and_holds_nobody_back() -> None:
    shop = Shop(judge(), *[httpx.Response(500)] * 10)
    for _ in range(10):
        with pytest.raises(JudgeAway):
            await shop.asked()
    began = shop.clock.monotonic()
    await shop.asked(question="another?")
    assert shop.clock.monotonic() - began < FIRST_AWAY_S


async def test_a_server_that_says_anything_is_not_away() -> None:
    broken, refused = httpx.Response(500), httpx.Response(400)
    shop = Shop(judge(), *[broken, broken, refused] * 3)
    for number in range(9):
        with pytest.raises(JudgeError):
            await shop.asked(question=str(number))
    assert not shop.gate.is_away


async def test_a_wrong_key_fails_no_question_and_is_told_once_without_the_key() -> None:
    echo = {"error": {"message": f"Incorrect API key provided: {KEY}"}}
    shop = Shop(judge({"key_env": "THE_KEY"}), *[httpx.Response(401, json=echo) for _ in range(3)])
    began = shop.clock.monotonic()
    assert (await shop.asked())[0].text == "7"
    assert shop.clock.monotonic() - began >= 3 * KEY_AGAIN_S
    first, second = shop.troubles
    assert "rejects the key (status 401: Incorrect API key provided: ***); set THE_KEY for the controllers" in first
    assert second == "judge 'x' accepts the key again"
    assert KEY not in str(shop.troubles)


async def test_a_403_may_be_about_one_question_but_several_in_a_row_are_about_the_key() -> None:
    shop = Shop(judge(), *[httpx.Response(403) for _ in range(MOST_DENIED * 3 - 1)])
    questions = ["the same"] * (MOST_DENIED * 2) + [str(number) for number in range(MOST_DENIED - 1)]
    for question in questions:
        assert shop.troubles == [], question
        with pytest.raises(JudgeAway):
            await shop.asked(question=question)
    assert len(shop.troubles) == 1
    began = shop.clock.monotonic()
    await shop.asked()
    assert shop.clock.monotonic() - began >= KEY_AGAIN_S - 1


async def test_an_error_never_holds_the_key() -> None:
    for status in (400, 429, 500):
        shop = Shop(judge(), httpx.Response(status, text=f"your key {KEY} is odd"))
        with pytest.raises(JudgeError) as raised:
            await shop.asked()
        assert KEY not in str(raised.value)
        assert "***" in str(raised.value)


async def test_a_server_that_does_not_say_how_many_tokens_there_are_is_told_once() -> None:
    shop = Shop(judge({"most_cost": 5.0, "price_in": 1.0}), said(usage=None), said(usage={"prompt_tokens": "many"}))
    await shop.asked((1, 2))
    assert shop.paid == [(0, 0), (0, 0)]
    assert shop.troubles == [
        "judge 'x' does not report token counts; its cost is not counted, and most_cost has no effect"
    ]


@pytest.mark.parametrize("count", [MOST_TOKENS + 1, 10**400, -1, True, 1.5])
async def test_more_tokens_than_a_request_can_have_are_not_counted(count: object) -> None:
    shop = Shop(judge(), said(usage={"prompt_tokens": count, "completion_tokens": 1}))
    await shop.asked()
    assert shop.paid == [(0, 1)]
    assert shop.troubles == ["judge 'x' does not report token counts"]


@pytest.mark.parametrize(
    "error",
    [
        httpx.InvalidURL("Invalid port"),
        UnicodeError("label empty"),
        OverflowError("getaddrinfo"),
        ExceptionGroup("all failed", [OSError()]),
    ],
)
async def test_an_address_that_fails_in_words_of_its_own_is_a_judge_that_does_not_answer(error: Exception) -> None:
    with pytest.raises(JudgeAway, match=r"judge 'x' did not answer at [a-z0-9.:]+ \("):
        await Shop(judge(), error).asked()


async def test_half_a_surrogate_pair_in_a_question_is_spelt_out() -> None:
    shop = Shop(judge())
    await shop.asked(question="a \ud800 b")
    assert json.loads(shop.requests[0].content)["messages"][-1]["content"] == "a \\ud800 b"


async def test_an_answer_that_is_too_large_is_refused_before_it_is_all_there() -> None:
    shop = Shop(judge(), httpx.Response(200, content=b" " * (LARGEST_ANSWER_BYTES + 1)))
    with pytest.raises(JudgeError, match="returned a response of more than 1048576 bytes"):
        await shop.asked()


async def test_votes_that_have_come_are_not_asked_for_again() -> None:
    shop = Shop(judge(), said("1"), httpx.Response(500), said("3"), said("2"))
    with pytest.raises(JudgeAway):
        await shop.asked((11, 12, 13))
    assert [answer.text for answer in await shop.asked((11, 12, 13))] == ["1", "2", "3"]
    assert [body["seed"] for body in shop.bodies] == [11, 12, 13, 12]
    await shop.asked((11,))
    assert len(shop.requests) == 5, "they were kept only until their question was answered"


async def test_those_who_ask_the_same_side_by_side_each_have_all_answers_whoever_is_first() -> None:
    shop = Shop(judge(verdict={"most": 10}, tries=1), said("7"), httpx.Response(500))
    court = Judge.of(shop.spec, shop.ask, RecordingObserver(), shop.clock)
    prompt = Prompt(PromptRef(0, 0, 0), "p", (1,), {})
    first, *others = await shop.clock.run(court.values(prompt, ["same"] * 3))
    assert isinstance(first, JudgeAway)
    assert [(one.value, one.votes) for one in others if isinstance(one, Judgement)] == [(7.0, 2)] * 2


async def test_a_question_that_is_given_up_ends_its_requests() -> None:
    shop = Shop(judge(), 100.0, 100.0)
    asking = asyncio.ensure_future(shop.ask("good?", (1, 2)))
    await shop.clock.advance(1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert shop.clock.next_wake() is None
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        pytest.param({}, "the environment variable THE_KEY is not set here", id="missing"),
        pytest.param({"THE_KEY": "  "}, "the environment variable THE_KEY is not set here", id="blank"),
        pytest.param({"THE_KEY": "sk-\nx"}, "characters not allowed in a header", id="two lines"),
        pytest.param({"THE_KEY": "sk-ü"}, "characters not allowed in a header", id="not ascii"),
    ],
)
def test_a_key_that_is_not_there_is_told_with_its_variable_and_never_with_what_it_holds(
    environ: dict[str, str], message: str
) -> None:
    with pytest.raises(DataError, match=message) as raised:
        judge_key(judge({"key_env": "THE_KEY"}), environ, "judges.0")
    assert raised.value.where == "judges.0.external.key_env"
    assert "sk-" not in str(raised.value)


def test_a_key_is_read_from_its_variable_and_a_judge_may_need_none() -> None:
    assert judge_key(judge({"key_env": "THE_KEY"}), {"THE_KEY": f" {KEY}\n"}, "judges.0") == KEY
    assert judge_key(judge(), {}, "judges.0") is None


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("3", 3.0),
        ("0.5", 0.5),
        ("-1", 0.0),
        ("nan", None),
        ("inf", None),
        ("soon", None),
        (None, None),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 90.0),
        ("Thu, 01 Jan 1970 00:00:01 GMT", 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str | None, seconds: float | None) -> None:
    assert retry_after_s(value, wall=10.0) == seconds


@given(st.text())
def test_retry_after_gives_finite_seconds_or_nothing(value: str) -> None:
    seconds = retry_after_s(value, wall=10.0)
    assert seconds is None or 0 <= seconds < float("inf")


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["choices", "message", "content", "usage", "error"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(JSON)
def test_response_is_a_completion_or_invalid_with_an_error_text(tree: Any) -> None:
    assert isinstance(error_text(tree, "text"), str)
    with contextlib.suppress(InvalidCompletion):
        assert isinstance(parse_completion(tree).answer.text, str)


def test_every_status_has_a_fate() -> None:
    fates: Callable[[int], str] = classify_status
    assert {fates(status) for status in range(200, 300)} == {"answered"}
    assert {fates(status) for status in range(500, 600)} == {"away"}
    assert {status for status in range(100, 600) if fates(status) == "key"} == {401, 402}


PNG, JPEG = b"\x89PNG\r\n\x1a\nsmall", b"\xff\xd8\xffsmall"


def stored(folder: Path, content: bytes) -> PictureFile:
    name = hashlib.sha256(content).hexdigest()
    (folder / name).write_bytes(content)
    return PictureFile(str(folder / name), name, 8, 16)


def as_question(*files: PictureFile) -> tuple[PictureRef, ...]:
    return tuple(PictureRef(one.path, one.sha256, 8, 16, 8, 16) for one in files)


class Gallery(Shop):
    """A shop whose questions have pictures. `held`: number of questions whose pictures are kept."""

    def __init__(self, *answers: httpx.Response | Exception | float) -> None:
        super().__init__(judge(votes=1, images=True), *answers)
        self.held = 0
        self.ask._open_pictures = self.open

    @contextlib.asynccontextmanager
    async def open(self, pictures: tuple[PictureRef, ...]) -> AsyncIterator[tuple[PictureFile, ...]]:
        self.held += 1
        yield tuple(PictureFile(one.path, one.sha256, one.height, one.width) for one in pictures)
        self.held -= 1

    async def shown(self, question: str, *files: PictureFile) -> tuple[Answer, ...]:
        return await self.ask(question, (1,), as_question(*files))


def url_of(kind: str, content: bytes) -> dict[str, Any]:
    url = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize(
    ("question", "parts"),
    [
        (f"A: {IMAGE_MARK} B: {IMAGE_MARK} Which?", ["A: ", 0, " B: ", 1, " Which?"]),
        (f"{IMAGE_MARK}\n{IMAGE_MARK}", [0, 1]),
    ],
)
async def test_pictures_are_sent_in_their_places_as_data_urls(
    tmp_path: Path, question: str, parts: list[str | int]
) -> None:
    shop = Gallery()
    await shop.shown(question, stored(tmp_path, PNG), stored(tmp_path, JPEG))
    (body,) = shop.bodies
    urls = [url_of("png", PNG), url_of("jpeg", JPEG)]
    assert body["messages"] == [
        {
            "role": "user",
            "content": [{"type": "text", "text": one} if isinstance(one, str) else urls[one] for one in parts],
        }
    ]
    assert shop.requests[0].headers["content-type"] == "application/json"
    assert shop.held == 0


async def test_answers_about_one_picture_are_not_those_about_another(tmp_path: Path) -> None:
    shop = Gallery(said("1"), httpx.ReadError("gone"))
    one, other = as_question(stored(tmp_path, PNG)), as_question(stored(tmp_path, JPEG))
    with pytest.raises(JudgeAway):
        await shop.ask(IMAGE_MARK, (1, 2), one)
    assert [answer.text for answer in await shop.ask(IMAGE_MARK, (1, 2), other)] == ["7", "7"]
    assert sorted(answer.text for answer in await shop.ask(IMAGE_MARK, (1, 2), one)) == ["1", "7"]
    assert len(shop.requests) == 2 + 2 + 1, "the paid answer about the first picture was kept"


async def test_questions_about_different_pictures_are_different_questions_for_an_outage(tmp_path: Path) -> None:
    shop = Gallery(*(httpx.ConnectError("no") for _ in range(MOST_AWAY)))
    outages: list[str] = []
    shop.gate.away = outages.append  # type: ignore[method-assign]
    for number in range(MOST_AWAY):
        assert not outages
        with pytest.raises(JudgeAway):
            await shop.shown(IMAGE_MARK, stored(tmp_path, PNG + bytes([number])))
    assert len(outages) == 1


@pytest.mark.parametrize(
    ("damage", "why"), [(Path.unlink, "cannot read a picture"), (lambda file: file.write_bytes(b"x"), "other bytes")]
)
async def test_a_picture_that_is_lost_is_no_failure_of_the_server(
    tmp_path: Path, damage: Callable[[Path], object], why: str
) -> None:
    shop = Gallery()
    for number in range(2 * MOST_AWAY):
        file = stored(tmp_path, PNG + bytes([number]))
        damage(Path(file.path))
        with pytest.raises(JudgeAway, match=why):
            await shop.shown(IMAGE_MARK, file)
    assert not shop.requests
    assert not shop.gate.is_away

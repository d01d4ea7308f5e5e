"""The endpoint for an agent, over real HTTP: answers, refusals, and the fate of its response."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import pytest
from documents import ROOT, blocks

from gcore.errors import EngineError
from gcore.rollout.agents.api import AgentFault, AgentRequestRefused, AgentRollout, call_agent
from gcore.rollout.agents.chat_protocol import SamplingRules
from gcore.rollout.agents.server import MOST_BODY, AgentHttpServer
from gcore.rollout.agents.session import AgentSession, DialogueLimits
from gcore.testing import FakeClock
from gcore.types import Sample, Version, VersionSpan

EOS = 0
CHAT = "/chat/completions"
HUGE = b"1" + b"0" * 400
"""A whole number that no float holds."""


class Letters:
    """A token is a character; 0 ends an answer. Messages stand behind each other, each of them ended."""

    chat = True

    def render(self, value: Sequence[Any], fields: Any = None) -> str:
        return "".join(f"{m['role'][0]}:{m['content']}\n" for m in value) + "a:"

    def continued(self, messages: Sequence[Any], answer: int, fields: Any, *, said: Sequence[int]) -> str:
        return "\n" + self.render(messages[answer + 1 :])

    def behind(self, messages: Any, fields: Any, *, said: Sequence[int]) -> str:
        raise NotImplementedError

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def encode_behind(self, before: Sequence[int], text: str) -> tuple[int, ...]:
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(one) for one in ids if one != EOS)


class Policy:
    """Says the same number again and again, each time one more."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, tuple[str, ...], int]] = []
        self.words: list[str] = []
        self.holds: asyncio.Event | None = None
        self.gone = 0
        self.fails: Exception | None = None

    async def __call__(self, tokens: tuple[int, ...], most: int, stop: tuple[str, ...], made: int) -> Sample:
        self.asked.append((Letters().decode(tokens), most, stop, made))
        if self.holds is not None:
            try:
                await self.holds.wait()
            except asyncio.CancelledError:
                self.gone += 1
                raise
        if self.fails is not None:
            raise self.fails
        text = self.words.pop(0) if self.words else f"n{len(self.asked)}"
        ids = (*map(ord, text), EOS)
        cut = len(ids) > most
        ids = ids[:most]
        span = VersionSpan(Version(0, 1), 0, len(ids))
        return Sample(ids, (-0.5,) * len(ids), "", "length" if cut else "stop", (span,))


class Talk:
    """A response that is served, and a client of it."""

    def __init__(self, endpoint: AgentHttpServer, http: httpx.AsyncClient) -> None:
        self.endpoint, self.http = endpoint, http
        self.policy, self.clock = Policy(), FakeClock()
        self.refusals: list[AgentRequestRefused] = []
        self.served: AgentSession
        self.token = ""
        self.url = ""
        self.messages: list[dict[str, Any]] = []

    async def begin(self, *, restarts: bool = False, stop: tuple[str, ...] = (), **limits: Any) -> Talk:
        bounds = DialogueLimits(**{"turns": 4, "own": 12, "room": 60, "context": 200, "own_s": 10.0} | limits)
        rules = SamplingRules((1.0,), (1.0,), bounds.own)
        self.served = AgentSession(
            Letters(),
            self.policy,
            rules,
            bounds,
            self.clock,
            restarts=restarts,
            stop=stop,
            refused=self.refusals.append,
        )
        self.token = await self.endpoint.begin(self.served)
        self.url = self.endpoint.base_url(self.token)
        return self

    async def post(self, raw: Any = None, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
        content = raw if raw is not None else json.dumps({"model": "any", "messages": self.messages, **more})
        return await self.http.post(self.url + CHAT, content=content, headers=headers)

    async def say(self, content: str, **more: Any) -> dict[str, Any]:
        """One turn, as agents take it: the answer is appended as it came."""
        self.messages.append({"role": "user", "content": content})
        response = await self.post(**more)
        assert response.status_code == 200, response.text
        told: dict[str, Any] = response.json()
        self.messages.append(told["choices"][0]["message"])
        return told


@pytest.fixture
async def talk() -> AsyncIterator[Talk]:
    endpoint = AgentHttpServer()
    async with httpx.AsyncClient(trust_env=False, timeout=10) as http:
        yield Talk(endpoint, http)
    await endpoint.close()


def code_of(response: httpx.Response) -> tuple[int, str]:
    assert response.headers["x-should-retry"] == "false", "OpenAI's client would repeat 409, 429 and 503"
    return response.status_code, response.json()["error"]["code"]


async def until(there: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not there():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_turns_are_one_sequence_and_answers_have_openais_fields(talk: Talk) -> None:
    await talk.begin()
    first = await talk.say("one", model="gpt-4o", temperature=1.0, max_tokens=5)
    second = await talk.say("two")
    assert first["model"] == "gpt-4o"
    assert first["choices"][0]["message"] == {"role": "assistant", "content": "n1", "refusal": None}
    assert first["choices"][0]["finish_reason"] == "stop"
    assert first["usage"] == {"prompt_tokens": 8, "completion_tokens": 3, "total_tokens": 11}
    assert first["id"] != second["id"]
    assert [(asked[0], asked[3]) for asked in talk.policy.asked] == [("u:one\na:", 0), ("u:one\na:n1\nu:two\na:", 3)]
    assert [asked[1] for asked in talk.policy.asked] == [5, 9]
    sample = talk.served.sample()
    assert sample.prompt_ids == Letters().encode("u:one\na:")
    assert (sample.text, sample.observed, sample.finish_reason) == ("n1\nu:two\na:n2", ((3, 12),), "stop")
    assert sample.logprobs == (-0.5,) * 3 + (0.0,) * 9 + (-0.5,) * 3
    models = (await talk.http.get(talk.url + "/models")).json()
    assert [one["id"] for one in models["data"]] == ["policy"]


async def test_a_stream_tells_the_same(talk: Talk) -> None:
    await talk.begin()
    talk.messages = [{"role": "user", "content": "one"}]
    response = await talk.post(stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"] == "text/event-stream"
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:2]]
    assert "".join(delta.get("content", "") for delta in deltas) == "n1"
    assert json.loads(lines[2])["usage"]["completion_tokens"] == 3
    assert lines[-1] == "[DONE]"


async def test_a_text_that_ends_an_answer_is_not_sent_and_stays_among_the_tokens(talk: Talk) -> None:
    await talk.begin(stop=("##",))
    talk.policy.words = ["a!b"]
    told = await talk.say("one", stop="!")
    assert talk.policy.asked[0][2] == ("##", "!")
    assert (told["choices"][0]["message"]["content"], told["choices"][0]["finish_reason"]) == ("a", "stop")
    await talk.say("two")
    assert talk.policy.asked[1][0] == "u:one\na:a!b\nu:two\na:"


# Bad agents.


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        (b"garbage", 400, "not_json"),
        (b'{"messages": []}', 400, "bad_messages"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 3}', 400, "unsupported_parameter"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 13}', 400, "unsupported_parameter"),
        (b'{"messages": [{"role": "user", "content": "' + b"x" * 150 + b'"}]}', 400, "context_length_exceeded"),
        (b" " * (MOST_BODY + 1), 413, "too_large"),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "temperature": ' + HUGE + b"}",
            400,
            "unsupported_parameter",
        ),
        (b'{"messages": [{"role": "user", "content": "x"}], "top_p": -' + HUGE + b"}", 400, "unsupported_parameter"),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": ' + HUGE + b"}",
            400,
            "unsupported_parameter",
        ),
        (b'{"messages": [{"role": "user", "content": "x"}], "stop": ["\\ud800"]}', 400, "unsupported_parameter"),
    ],
)
async def test_a_request_that_cannot_be_answered_is_refused_and_nothing_is_recorded(
    talk: Talk, raw: bytes, status: int, code: str
) -> None:
    await talk.begin()
    assert code_of(await talk.post(raw)) == (status, code)
    assert not talk.served.asked
    assert not talk.policy.asked
    assert len(talk.refusals) == (status == 400)
    await talk.say("one")
    assert talk.served.sample().text == "n1"


async def test_only_the_rollouts_own_routes_are_answered_and_only_while_it_lasts(talk: Talk) -> None:
    await talk.begin()
    assert code_of(await talk.http.get(talk.url + CHAT)) == (405, "wrong_method")
    assert code_of(await talk.http.post(talk.url + "/embeddings")) == (404, "no_such_route")
    other = talk.url.replace(talk.token, "0" * 32)
    assert code_of(await talk.http.post(other + CHAT, content=b"{}")) == (404, "no_such_rollout")
    await talk.endpoint.end(talk.token)
    assert code_of(await talk.post(b"{}")) == (404, "no_such_rollout")


async def test_an_edited_history_is_refused_and_the_response_goes_on_as_it_was(talk: Talk) -> None:
    await talk.begin()
    await talk.say("one")
    kept = list(talk.messages)
    talk.messages[0] = {"role": "user", "content": "another"}
    talk.messages.append({"role": "user", "content": "two"})
    assert code_of(await talk.post()) == (409, "history_changed")
    assert "message 0 differs" in talk.refusals[0].what
    talk.messages = kept
    await talk.say("two")
    assert talk.served.sample().text == "n1\nu:two\na:n2"


async def test_with_history_last_a_new_conversation_begins_and_is_what_is_trained(talk: Talk) -> None:
    await talk.begin(restarts=True, own=6)
    await talk.say("one")
    talk.messages = []
    await talk.say("fresh")
    sample = talk.served.sample()
    assert (sample.prompt_ids, sample.text) == (Letters().encode("u:fresh\na:"), "n2")
    talk.messages = [{"role": "user", "content": "third"}]
    assert code_of(await talk.post()) == (429, "rollout_limit")
    assert talk.served.sample().text == "n2", "limits count over all conversations"


@pytest.mark.parametrize(
    ("limits", "words"),
    [({"turns": 1}, "max_turns"), ({"own": 3}, "max_new_tokens"), ({"room": 12}, "agent.max_tokens")],
)
async def test_request_beyond_a_limit_gets_an_error_and_truncates_the_response(
    talk: Talk, limits: dict[str, int], words: str
) -> None:
    await talk.begin(**limits)
    await talk.say("one")
    assert talk.served.sample().finish_reason == "stop"
    talk.messages.append({"role": "user", "content": "two"})
    response = await talk.post()
    assert code_of(response) == (429, "rollout_limit")
    assert words in response.json()["error"]["message"]
    assert talk.served.cut
    assert (talk.served.sample().finish_reason, talk.served.sample().text) == ("length", "n1")
    assert not talk.refusals, "a limit is no mistake of anybody's"


async def test_an_answer_that_the_limit_ends_is_told_as_openai_tells_it(talk: Talk) -> None:
    await talk.begin(own=4)
    talk.policy.words = ["abcdefgh", "abcdefgh"]
    told = await talk.say("one", max_tokens=2)
    assert (told["choices"][0]["finish_reason"], talk.served.cut) == ("length", False), "so short was its own wish"
    told = await talk.say("two")
    assert (told["choices"][0]["finish_reason"], talk.served.cut) == ("length", True)
    assert talk.served.sample().own_tokens == 4


async def test_one_question_at_a_time(talk: Talk) -> None:
    await talk.begin()
    talk.policy.holds = asyncio.Event()
    first = asyncio.create_task(talk.say("one"))
    await until(lambda: talk.policy.asked)
    assert code_of(await talk.post()) == (409, "busy")
    talk.policy.holds.set()
    await first
    assert talk.served.sample().text == "n1"


async def test_a_client_that_goes_away_takes_its_question_with_it_and_asks_again_in_vain_of_nobody(talk: Talk) -> None:
    await talk.begin()
    talk.policy.holds = asyncio.Event()
    talk.messages = [{"role": "user", "content": "one"}]
    with pytest.raises(httpx.ReadTimeout):
        await talk.http.post(talk.url + CHAT, json={"messages": talk.messages}, timeout=0.1)
    await until(lambda: talk.policy.gone)
    talk.policy.holds = None
    response = await talk.post(headers={"x-stainless-retry-count": "1"})
    again = await talk.post(headers={"x-stainless-retry-count": "2"})
    assert response.json() == again.json(), "who says that he repeats is told the same"
    assert talk.served.sample().text == "n2"
    assert code_of(await talk.post()) == (409, "history_changed"), "who does not edits"


@pytest.mark.parametrize("slow_s", [0.0, 0.5])
async def test_a_client_that_has_said_its_last_and_still_listens_is_answered(talk: Talk, slow_s: float) -> None:
    await talk.begin()
    talk.policy.holds = asyncio.Event()
    asyncio.get_running_loop().call_later(slow_s, talk.policy.holds.set)
    host, _, path = talk.url.removeprefix("http://").partition("/")
    reader, writer = await asyncio.open_connection(*host.split(":"))
    body = json.dumps({"messages": [{"role": "user", "content": "one"}]})
    writer.write(f"POST /{path}{CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
    writer.write_eof()
    heard = (await asyncio.wait_for(reader.read(), 10)).decode()
    writer.close()
    *before, answer = heard.split("\r\n\r\nHTTP/1.1 ")
    assert set(before) <= {"HTTP/1.1 100 ", "100 "}, "which clients pass over"
    assert answer.removeprefix("HTTP/1.1 ").startswith("200 ")
    assert '"n1"' in answer
    assert talk.policy.gone == 0


async def test_an_engine_that_fails_is_not_the_agents_doing(talk: Talk) -> None:
    await talk.begin()
    talk.policy.fails = EngineError("it broke")
    assert code_of(await talk.post(b'{"messages": [{"role": "user", "content": "x"}]}')) == (503, "engine_failed")
    with pytest.raises(EngineError, match="it broke"):
        await talk.served.watch()


async def test_gcores_own_mistake_is_answered_too(talk: Talk) -> None:
    await talk.begin()
    talk.policy.fails = ZeroDivisionError()
    assert code_of(await talk.post(b'{"messages": [{"role": "user", "content": "x"}]}')) == (500, "defect")


async def test_a_response_that_is_over_cuts_off_what_is_under_way(talk: Talk) -> None:
    await talk.begin()
    talk.policy.holds = asyncio.Event()
    talk.messages = [{"role": "user", "content": "one"}]
    asking = asyncio.create_task(talk.post())
    await until(lambda: talk.policy.asked)
    await talk.endpoint.end(talk.token)
    assert talk.policy.gone == 1
    with pytest.raises(httpx.TransportError):
        await asking


async def test_an_agents_time_runs_only_while_it_is_not_waiting_for_the_policy(talk: Talk) -> None:
    await talk.begin(own_s=10.0)
    talk.policy.holds = asyncio.Event()
    talk.served.start()
    watching = asyncio.create_task(talk.served.watch())
    await talk.clock.advance(6.0)
    asking = asyncio.create_task(talk.say("one"))
    await until(lambda: talk.policy.asked)
    await talk.clock.advance(1000.0)
    talk.policy.holds.set()
    await asking
    await talk.clock.advance(3.0)
    assert not watching.done()
    await talk.clock.advance(1.5)
    with pytest.raises(AgentFault, match="longer than 10 s without the policy's time"):
        await watching


async def test_garbage_that_is_no_http_closes_the_connection_and_nothing_else(talk: Talk) -> None:
    await talk.begin()
    port = int(talk.url.split(":")[2].split("/")[0])
    for sent in (b"\x00\xff\xfe garbage\r\n\r\n", b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n", b"G" * 200_000):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        with contextlib.suppress(ConnectionResetError):
            assert b"200" not in await asyncio.wait_for(reader.read(), 5)
        writer.close()
    await talk.say("one")


async def test_the_agent_of_the_guide_works(talk: Talk) -> None:
    (block,) = (
        one for one in blocks(ROOT / "docs" / "use" / "environments.md", "python") if "AGENT" in one.text.upper()
    )
    names: dict[str, Any] = {}
    exec(
        compile(
            block.text,
            "docs/use/environments.md#agents",
            "exec",
            dont_inherit=True,
        ),
        names,
    )
    await talk.begin(own=60, room=160, context=None)
    talk.policy.words = ["it is 3", "it is 4"]
    rollout = AgentRollout(talk.url, talk.token, {"prompt": "2+2", "answer": "4"}, {"tries": 3}, 7)
    assert await asyncio.to_thread(call_agent, names["solver"], rollout) == {"reward": 0.5}
    assert talk.served.sample().text == "it is 3\nu:That is wrong. Try again.\na:it is 4"


async def test_a_message_of_megabytes_is_refused_while_the_event_loop_goes_on(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await talk.begin()
    seen, encode = list[tuple[int, bool]](), Letters.encode

    def slow(self: Letters, text: str) -> tuple[int, ...]:
        seen.append((len(text), threading.current_thread() is threading.main_thread()))
        return encode(self, text)

    monkeypatch.setattr(Letters, "encode", slow)
    long = {"role": "user", "content": "1" * 1_000_000}
    first = await talk.post(json.dumps({"messages": [long]}))
    assert (first.status_code, first.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "the first request has more than" in first.json()["error"]["message"]
    await talk.say("hi")
    later = await talk.post(json.dumps({"messages": [*talk.messages, long]}))
    assert (later.status_code, later.json()["error"]["code"]) == (429, "rollout_limit")
    assert "exceeds 60 tokens (agent.max_tokens)" in later.json()["error"]["message"]
    assert talk.served.sample().finish_reason == "length"
    assert [length for length, main in seen if not main] == [4096, 4096], "of each the beginning, in a thread"
    assert sum(length for length, main in seen if main) < 100

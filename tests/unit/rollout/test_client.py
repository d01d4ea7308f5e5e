"""The client's handling of an engine's answers, and of engines that do not answer."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from gcore.errors import EngineError, EngineUnreachable
from gcore.rollout.client import BIG_ANSWER_BYTES, EngineClient, ProgressCallback, SamplingParams
from gcore.types import Medium, Sample, Version, VersionSpan

PARAMS = SamplingParams(temperature=0.7, max_new_tokens=9, top_k=3, stop=("x",))


def engine(answer: Callable[[httpx.Request], httpx.Response]) -> EngineClient:
    return EngineClient("http://engine", timeout_s=5, transport=httpx.MockTransport(answer))


def sample(count: int = 2, **meta: Any) -> dict[str, Any]:
    return {
        "text": "ab",
        "output_ids": list(range(count)),
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": 1},
            "weight_version": "0.3",
            "output_token_logprobs": [[-0.1 * i, i, None] for i in range(count)],
            **meta,
        },
    }


def with_logprob(written: str) -> bytes:
    """An answer whose second token has this log-probability."""
    return (
        json.dumps([sample(output_token_logprobs=[[-0.1, 0, None], ["HERE", 1, None]])])
        .replace('"HERE"', written)
        .encode()
    )


async def test_a_group_is_one_request_with_a_seed_and_a_name_for_each_sample() -> None:
    asked: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/generate"
        asked.append(json.loads(request.content))
        return httpx.Response(200, json=[sample(), sample()])

    samples = await engine(answer).generate((5, 6), PARAMS, seeds=(7, 8), rid="r")
    (body,) = asked
    assert body["input_ids"] == [[5, 6], [5, 6]]
    assert body["rid"] == ["r-0", "r-1"]
    assert [p["sampling_seed"] for p in body["sampling_params"]] == [7, 8]
    assert body["sampling_params"][0] | {"sampling_seed": 0} == {
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 3,
        "max_new_tokens": 9,
        "stop": ["x"],
        "sampling_seed": 0,
    }
    assert len(samples) == 2
    assert samples[0].token_ids == (0, 1)
    assert samples[0].spans == (VersionSpan(Version(0, 3), 0, 2),)
    assert samples[0].reward == 0.0


async def test_per_source_sampling_parameters_are_sent() -> None:
    asked: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        return httpx.Response(200, json=[sample()])

    params = SamplingParams(temperature=1.0, max_new_tokens=4, min_p=0.1, min_new_tokens=2, stop_token_ids=(3, 5))
    await engine(answer).generate((5,), params, seeds=(7,), rid="r")
    sent = asked[0]["sampling_params"][0]
    assert {name: sent[name] for name in ("min_p", "min_new_tokens", "stop_token_ids")} == {
        "min_p": 0.1,
        "min_new_tokens": 2,
        "stop_token_ids": [3, 5],
    }


async def test_log_probabilities_are_rounded_to_what_a_float32_holds() -> None:
    (one,) = await engine(lambda _: httpx.Response(200, json=[sample()])).generate((1,), PARAMS, seeds=(1,), rid="r")
    assert one.logprobs == (0.0, -0.10000000149011612)
    one.digest()


async def test_spans_are_taken_as_the_engine_tells_them() -> None:
    told = [{"version": "0.2", "start": 0, "end": 1}, {"version": "0.3", "start": 1, "end": 2}]
    client = engine(lambda _: httpx.Response(200, json=[sample(weight_versions=told)]))
    (one,) = await client.generate((1,), PARAMS, seeds=(1,), rid="r")
    assert one.spans == (VersionSpan(Version(0, 2), 0, 1), VersionSpan(Version(0, 3), 1, 2))
    assert one.oldest == Version(0, 2)


MEDIUM = {"kind": "trajectory", "sha256": "ab" * 32, "size": 6, "shape": [3], "dtype": "uint16"}


async def test_a_response_names_the_blobs_that_the_engine_has_stored() -> None:
    client = engine(lambda _: httpx.Response(200, json=[sample(media=[MEDIUM]), sample()]))
    one, other = await client.generate((1,), PARAMS, seeds=(1, 2), rid="r")
    assert one.media == (Medium("trajectory", "ab" * 32, 6, (3,), "uint16"),)
    assert other.media == ()
    assert one.digest() != other.digest()


async def test_no_seed_is_no_request() -> None:
    def never(_: httpx.Request) -> httpx.Response:
        raise AssertionError("nothing was to be asked")

    assert await engine(never).generate((1,), PARAMS, seeds=(), rid="r") == ()


async def test_a_big_answer_is_read_like_a_small_one() -> None:
    count = BIG_ANSWER_BYTES // 10
    client = engine(lambda _: httpx.Response(200, json=[sample(count)]))
    (one,) = await client.generate((1,), PARAMS, seeds=(1,), rid="r")
    assert len(one.token_ids) == len(one.logprobs) == count


@pytest.mark.parametrize(
    "response",
    [
        pytest.param(httpx.Response(200, json=[]), id="too few samples"),
        pytest.param(httpx.Response(200, json={"text": "a"}), id="one answer for a batch"),
        pytest.param(httpx.Response(200, json=[{"text": "a"}]), id="no meta information"),
        pytest.param(httpx.Response(200, json=[sample(finish_reason={"type": "tired"})]), id="an unknown reason"),
        pytest.param(httpx.Response(200, json=[sample(weight_version="default")]), id="an unknown version"),
        pytest.param(httpx.Response(200, json=[sample(media=[MEDIUM | {"kind": "sound"}])]), id="an unknown medium"),
        pytest.param(httpx.Response(200, json=[sample(media=[MEDIUM | {"sha256": "ab"}])]), id="half a SHA-256"),
        pytest.param(httpx.Response(200, json=[sample(media=[MEDIUM | {"size": 0}])]), id="an empty blob"),
        pytest.param(httpx.Response(200, json=[sample(output_token_logprobs=[])]), id="no log-probabilities"),
        pytest.param(httpx.Response(200, content=with_logprob("null")), id="null as log-probability"),
        pytest.param(httpx.Response(200, content=with_logprob("NaN")), id="NaN as log-probability"),
        pytest.param(httpx.Response(200, content=with_logprob("-Infinity")), id="an infinite log-probability"),
        pytest.param(httpx.Response(200, content=with_logprob("-1e300")), id="a log-probability beyond float32"),
        pytest.param(httpx.Response(200, content=b"<html>"), id="no JSON"),
        pytest.param(httpx.Response(400, json={"error": {"message": "too long"}}), id="a refusal"),
    ],
)
async def test_an_answer_that_is_not_the_samples_is_an_engine_error(response: httpx.Response) -> None:
    with pytest.raises(EngineError) as caught:
        await engine(lambda _: response).generate((1,), PARAMS, seeds=(1,), rid="r")
    assert not isinstance(caught.value, EngineUnreachable)
    assert "http://engine" in str(caught.value)


STREAM = {"content-type": "text/event-stream"}
DONE = b"data: [DONE]\n\n"
WHOLE = {"type": "length", "length": 2}


class Told(httpx.AsyncByteStream):
    """A body in these chunks."""

    def __init__(self, *chunks: bytes) -> None:
        self._chunks = chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk


def word(text: str, count: int, ending: dict[str, Any] | None = None, place: int = 0) -> bytes:
    """One event, as both engines write it: what JSON need not escape is as it is."""
    part = {**sample(count, finish_reason=ending), "text": text, "index": place}
    return b"data: " + json.dumps(part, ensure_ascii=False).encode() + b"\n\n"


async def streamed(
    *chunks: bytes, count: int = 1, told: list[tuple[int, Sample]] | None = None, headers: dict[str, str] = STREAM
) -> tuple[Sample, ...]:
    """The client's result for a streamed answer."""
    heard = [] if told is None else told
    growing = ProgressCallback(1, lambda place, one: heard.append((place, one)))
    client = engine(lambda _: httpx.Response(200, headers=headers, stream=Told(*chunks)))
    return await client.generate_each([(1,)] * count, PARAMS, seeds=range(count), rid="r", growing=growing)


@pytest.mark.parametrize(
    "odd", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r", "é中😀"], ids=ascii
)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
async def test_a_response_may_hold_every_character_however_the_stream_is_cut(odd: str, end: bytes) -> None:
    told: list[tuple[int, Sample]] = []
    body = (b": a comment\n\n" + word(f"a{odd}", 1) + word(f"a{odd}b", 2, WHOLE) + DONE).replace(b"\n", end)
    for chunks in ((body,), tuple(body[i : i + 1] for i in range(len(body)))):
        told.clear()
        (one,) = await streamed(*chunks, told=told)
        assert one.text == f"a{odd}b"
        assert [part.text for _, part in told] == [f"a{odd}", f"a{odd}b"]


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param((word("a", 1),), id="its last word has no end"),
        pytest.param((word("a", 1), DONE), id="and it says that it is done"),
        pytest.param((word("a", 1), word("ab", 2, WHOLE)[:-20]), id="in a word"),
        pytest.param((DONE,), id="it told nothing"),
    ],
)
async def test_a_stream_that_ends_while_a_response_grows_is_of_a_lost_engine(chunks: tuple[bytes, ...]) -> None:
    with pytest.raises(EngineUnreachable, match="0 of 1 samples"):
        await streamed(*chunks)


async def test_nothing_that_comes_late_takes_the_place_of_a_whole_response() -> None:
    told: list[tuple[int, Sample]] = []
    late = (word("a", 1), word("", 0, {"type": "abort", "status_code": 503, "message": "late"}))
    first, second = await streamed(word("ab", 2, WHOLE), *late, word("c", 1, WHOLE, 1), DONE, count=2, told=told)
    assert (first.text, second.text) == ("ab", "c")
    assert [(place, one.text) for place, one in told] == [(0, "ab"), (1, "c")]


@pytest.mark.parametrize(("status", "kind"), [(503, EngineUnreachable), (500, EngineUnreachable), (400, EngineError)])
async def test_streamed_failure_equals_the_unstreamed_one(status: int, kind: type[EngineError]) -> None:
    """SGLang has begun its answer with status 200 by then: it is said in a response's end."""
    ending = {"type": "abort", "status_code": status, "message": "The request queue is full."}
    with pytest.raises(EngineError, match=r"/generate .*queue is full") as caught:
        await streamed(word("a", 1), word("", 0, ending, 1), DONE, count=2)
    plain = engine(lambda _: httpx.Response(status, json={"detail": "The request queue is full."}))
    with pytest.raises(EngineError) as expected:
        await plain.generate((1,), PARAMS, seeds=(1,), rid="r")
    assert type(caught.value) is type(expected.value) is kind
    assert caught.value.what == expected.value.what


@pytest.mark.parametrize("status", [{}, {"status_code": None}])
async def test_a_response_that_was_aborted_on_request_comes_with_its_tokens(status: dict[str, Any]) -> None:
    (one,) = await streamed(word("ab", 2, {"type": "abort", "message": "Aborted", **status}), DONE)
    assert (one.finish_reason, one.token_ids) == ("abort", (0, 1))


@pytest.mark.parametrize("body", [b"null", b"true", b"5", b"{}", b'"ab"', b"[]", b"[null]"])
async def test_an_answer_that_is_neither_a_stream_nor_the_samples_is_an_engine_error(body: bytes) -> None:
    with pytest.raises(EngineError):
        await streamed(body, headers={"content-type": "application/json"})


@pytest.mark.parametrize(
    "body",
    [{"error": {"message": "why"}}, {"error": "why"}, {"success": False, "message": "why"}, {"detail": "why"}],
    ids=["an object", "a text", "an administrative answer", "a framework's"],
)
async def test_a_refusal_is_told_in_the_engines_words_in_each_of_its_shapes(body: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="why"):
        await engine(lambda _: httpx.Response(400, json=body)).update_weights("/folder", Version(0, 1))


@pytest.mark.parametrize("status", [200, 400, 500])
async def test_weights_are_changed_between_a_pause_and_its_end_whatever_comes_of_it(status: int) -> None:
    asked: list[tuple[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.url.path, json.loads(request.content)))
        changes = request.url.path == "/update_weights_from_disk"
        return httpx.Response(status if changes else 200, json={"success": True, "message": "said"})

    change = engine(answer).update_weights("/folder", Version(0, 1))
    if status == 200:
        await change
    else:
        with pytest.raises(EngineError, match="/update_weights_from_disk"):
            await change
    assert [path for path, _ in asked] == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    assert asked[0][1] == {"mode": "retract"}
    assert asked[1][1] == {"model_path": "/folder", "weight_version": "0.1", "flush_cache": True}


async def test_a_weight_change_that_is_given_up_does_not_leave_the_engine_paused() -> None:
    asked: list[str] = []
    changing = asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if request.url.path == "/update_weights_from_disk":
            changing.set()
            await asyncio.Event().wait()
        return httpx.Response(200, json={})

    client = EngineClient("http://engine", timeout_s=5, transport=httpx.MockTransport(answer))
    change = asyncio.create_task(client.update_weights("/folder", Version(0, 1)))
    await changing.wait()
    change.cancel()
    with pytest.raises(asyncio.CancelledError):
        await change
    assert asked[-1] == "/continue_generation"


async def test_a_weight_change_that_did_not_succeed_is_an_error_even_with_status_200() -> None:
    client = engine(lambda _: httpx.Response(200, json={"success": False, "message": "no"}))
    with pytest.raises(EngineError, match=r"0\.1"):
        await client.update_weights("/folder", Version(0, 1))


@pytest.mark.parametrize("status", [500, 503])
async def test_a_server_error_means_that_another_engine_may_be_asked(status: int) -> None:
    with pytest.raises(EngineUnreachable):
        await engine(lambda _: httpx.Response(status)).info()


@pytest.mark.parametrize(
    ("weights", "metrics", "expected"),
    [
        pytest.param("1.2", (404, ""), (Version(1, 2), None, None), id="without metrics"),
        pytest.param("default", (404, ""), (None, None, None), id="weights that no commit made"),
        pytest.param(
            "0.0",
            (
                200,
                '# x\nsglang:num_running_reqs{rank="0"} 2.0\nsglang:num_running_reqs{rank="1"} 3\nsglang:num_queue_reqs 1\n',
            ),
            (Version(0, 0), 5, 1),
            id="of several schedulers",
        ),
    ],
)
async def test_an_engine_tells_its_version_and_load(
    weights: str, metrics: tuple[int, str], expected: tuple[Version | None, int | None, int | None]
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(metrics[0], text=metrics[1])
        return httpx.Response(200, json={"weight_version": weights})

    info = await engine(answer).info()
    assert (info.version, info.running, info.waiting) == expected


async def test_an_abort_names_every_sample() -> None:
    aborted: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        aborted.append(json.loads(request.content)["rid"])
        return httpx.Response(200)

    await engine(answer).abort("r", 3)
    assert sorted(aborted) == ["r-0", "r-1", "r-2"]


async def test_an_engine_that_is_not_there_is_unreachable_and_not_well() -> None:
    async with server(lambda reader, writer: asyncio.sleep(0)) as (url, _):
        pass
    client = EngineClient(url, timeout_s=5)
    with pytest.raises(EngineUnreachable, match="did not answer"):
        await client.info()
    assert not await client.health()


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


@asynccontextmanager
async def server(handle: Handler) -> AsyncIterator[tuple[str, list[asyncio.StreamWriter]]]:
    """A listener on loopback; its URL, and the connections it got."""
    connections: list[asyncio.StreamWriter] = []
    tasks: list[asyncio.Task[None]] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        try:
            await handle(reader, writer)
        except (asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", connections
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)


async def next_request(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


def answering(*parts: bytes, times: int = 1000) -> Handler:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(times):
            await next_request(reader)
            writer.writelines(parts)
            await writer.drain()

    return handle


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


async def test_connections_are_used_again() -> None:
    async with server(answering(OK)) as (url, connections):
        client = EngineClient(url, timeout_s=5)
        for _ in range(5):
            assert await client.health()
        assert len(connections) == 1
        assert all(await asyncio.gather(*(client.health() for _ in range(8))))
        assert len(connections) == 8
        await client.close()


@pytest.mark.parametrize(
    ("parts", "times"),
    [
        pytest.param(
            [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"3\r\n{}\n\r\n0\r\n\r\n"], 2, id="in chunks"
        ),
        pytest.param([b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}"], 1, id="and closes"),
        pytest.param([b"HTTP/1.0 200 OK\r\n\r\n{}"], 1, id="until it closes"),
    ],
)
async def test_every_way_of_ending_an_answer_is_understood(parts: list[bytes], times: int) -> None:
    async with server(answering(*parts, times=times)) as (url, _):
        client = EngineClient(url, timeout_s=5)
        assert await client.health()
        assert await client.health()
        await client.close()


async def test_a_connection_that_the_server_closed_while_idle_is_not_used_again() -> None:
    async with server(answering(OK, times=1)) as (url, connections):
        client = EngineClient(url, timeout_s=5)
        for _ in range(3):
            assert await client.health()
            await asyncio.sleep(0.01)
        assert len(connections) == 3
        await client.close()


@pytest.mark.parametrize(
    "parts",
    [[], [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"], [b"nonsense\r\n\r\n"]],
    ids=["at once", "midway", "badly"],
)
async def test_an_answer_that_breaks_off_is_unreachable(parts: list[bytes]) -> None:
    async with server(answering(*parts, times=1)) as (url, _):
        with pytest.raises(EngineUnreachable):
            await EngineClient(url, timeout_s=5).resume()


async def test_an_engine_that_is_silent_is_unreachable_when_the_time_is_up() -> None:
    async with server(lambda reader, writer: reader.read()) as (url, _):
        with pytest.raises(EngineUnreachable, match="time"):
            await EngineClient(url, timeout_s=0.05).resume()


async def test_a_request_that_is_given_up_closes_its_connection() -> None:
    arrived, closed = asyncio.Event(), asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next_request(reader)
        arrived.set()
        await reader.read()
        closed.set()

    async with server(handle) as (url, _):
        task = asyncio.create_task(EngineClient(url, timeout_s=60).resume())
        await arrived.wait()
        task.cancel()
        await closed.wait()


@pytest.mark.parametrize("status", [b"200 OK", b"400 Bad Request", b"503 Unavailable"])
async def test_a_stream_that_is_given_up_before_its_body_comes_closes_its_connection(status: bytes) -> None:
    """Of a refusal too, whose words it waits for."""
    arrived, closed = asyncio.Event(), asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next_request(reader)
        writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-type: text/event-stream\r\ncontent-length: 100\r\n\r\n{")
        await writer.drain()
        arrived.set()
        await reader.read()
        closed.set()

    async with server(handle) as (url, _):
        client = EngineClient(url, timeout_s=60)
        growing = ProgressCallback(1, lambda place, one: None)
        task = asyncio.create_task(client.generate_each([(1,)], PARAMS, seeds=(1,), rid="r", growing=growing))
        await arrived.wait()
        await asyncio.sleep(0.05)  # its head is read
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)  # held, and with it all that was under way
        await asyncio.wait_for(closed.wait(), 5)
        assert isinstance(outcome, asyncio.CancelledError)

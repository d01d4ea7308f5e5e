"""The client of an engine, SGLang's or the torch engine: tokens in, samples out.

One HTTP request a group: the prompt's token ids once per sample, each with its own seed and its own rid, so that what a
sample draws depends on its seed alone and can be aborted alone. Only routes and fields of SGLang's native API are used.

An engine that does not answer (no connection, time-out, a server error) raises `EngineUnreachable`: the request may go to
another. One that refuses raises `EngineError` with the engine's own sentence. Nothing is retried here, and nothing is
known of which engine to use. Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from gcore.api.tls import PLAIN, Connector
from gcore.errors import EngineError, EngineGaveUp, EngineLate, EngineMemoryUnknown, EngineUnreachable
from gcore.rollout.api import Engine, PauseMode
from gcore.rollout.api import ProgressCallback as ProgressCallback
from gcore.rollout.api import SamplingParams as SamplingParams
from gcore.rollout.transport import STREAMED, EngineTransport, split_lines
from gcore.types import FinishReason, Sample, Version, VersionSpan


def sampling_body(params: SamplingParams, seed: int) -> dict[str, Any]:
    """How one response is drawn, with its seed: the JSON of SGLang's native API."""
    body: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": -1 if params.top_k is None else params.top_k,
        "max_new_tokens": params.max_new_tokens,
        "stop": list(params.stop),
        "sampling_seed": seed,
    }
    # What is as if it were not there is not sent: a server of another version may not know it.
    if params.min_p > 0:
        body["min_p"] = params.min_p
    if params.min_new_tokens > 0:
        body["min_new_tokens"] = params.min_new_tokens
    if params.stop_token_ids:
        body["stop_token_ids"] = list(params.stop_token_ids)
    return body


def parse_sample(answer: Mapping[str, Any]) -> Sample:
    """What an answer tells of one response; of one that still grows the finish reason is "abort".

    Raises KeyError, TypeError, ValueError, IndexError for what is no such answer.
    """
    meta = answer["meta_info"]
    triples = meta["output_token_logprobs"]
    tokens = tuple(int(token) for token in answer["output_ids"])
    count = len(tokens)
    if len(triples) != count:
        raise ValueError(f"{count} tokens came with {len(triples)} log-probabilities")
    logprobs = _as_float32([triple[0] for triple in triples])
    ending = meta["finish_reason"]  # of one that still grows there is none
    reason: FinishReason = "abort" if ending is None else ending["type"]
    if reason not in ("stop", "length", "abort"):
        raise ValueError(f"finish reason {reason!r}")
    return Sample(tokens, logprobs, str(answer["text"]), reason, _spans(meta, count))


def parse_score(answer: Mapping[str, Any]) -> float | None:
    """What an answer of a classifier tells: one number; None: it was told to give up.

    Raises KeyError, TypeError, ValueError for what is no such answer.
    """
    ending = answer["meta_info"].get("finish_reason") or {}
    if ending.get("type") == "abort":
        return None
    numbers = answer["embedding"]
    if not isinstance(numbers, list) or len(numbers) != 1:
        count = len(numbers) if isinstance(numbers, list) else "no list of"
        raise ValueError(f"a classifier gave {count} numbers, and a score is one")
    (score,) = _as_float32(numbers, "a score")
    return score


def is_partial(answer: Any) -> bool:
    """Whether more words on this response are to come."""
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    return isinstance(meta, dict) and meta.get("finish_reason", "") is None


def parse_failure(answer: Any) -> tuple[int, str] | None:
    """The HTTP status and the sentence of a response that the engine could not serve, once its stream had begun with status 200.

    One that was aborted on request has no status.
    """
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    ending = meta.get("finish_reason") if isinstance(meta, dict) else None
    if not isinstance(ending, dict) or ending.get("type") != "abort":
        return None
    status = ending.get("status_code")
    return (status, error_text(ending)) if isinstance(status, int) and status >= 400 else None


def _as_float32(numbers: Sequence[float], what: str = "a log-probability") -> tuple[float, ...]:
    """Raises ValueError for what no rank takes: a group with such a number would be fed, and refused, for ever."""
    form = f"<{len(numbers)}f"
    try:
        rounded = struct.unpack(form, struct.pack(form, *numbers))
    except (struct.error, OverflowError) as error:  # null is what SGLang's JSON makes of NaN
        raise ValueError(f"{what} is no number ({error})") from error
    if not all(map(math.isfinite, rounded)):
        raise ValueError(f"{what} is not finite")
    return rounded


def _spans(meta: Mapping[str, Any], count: int) -> tuple[VersionSpan, ...]:
    """Which version made which tokens; an engine that tells no spans made all with the one it names."""
    told = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": count}]
    return tuple(VersionSpan(Version.parse(str(s["version"])), int(s["start"]), int(s["end"])) for s in told)


def error_text(answer: Any) -> str:
    """The engine's own sentence, in whichever of its shapes."""
    if isinstance(answer, dict):
        error = answer.get("error", answer.get("message", answer.get("detail", answer)))
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)
    return str(answer)[:300]


BIG_ANSWER_BYTES = 256 * 1024
"""An answer from this size on is parsed off the event loop."""

CONNECT_S = 5.0
CONTINUE = "/continue_generation"

ASLEEP = "asleep"
"""What the weights of an engine that sleeps are called, by which everybody who asks it can tell, whoever put it to sleep."""

FALLING_ASLEEP, WAKING, WOKEN = "falling-asleep", "waking", "woken"
"""The same of an engine that does not report its memory, as SGLang: while its memory is released, while it is taken again, and between that
and the next weights. Released or taken twice, SGLang's server ends."""

MEMORY = {"tags": ["kv_cache", "weights"]}
"""All that an engine gives back."""

EVENT, DONE = b"data: ", b"[DONE]"

QUICK_S = 15.0
"""For what an engine answers off hand, whatever it is at: which weights it serves."""

MOST_WORDS = 300
"""Characters of what an engine says of a failure."""

MOST_GENERATING = 512
"""Requests for samples that one client has open at a time; further ones wait for their turn."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Version that an engine serves, and its load.

    `version` None: it serves weights that no commit made. `running` and `waiting` are sequences; None where the engine
    keeps no metrics.
    """

    version: Version | None
    running: int | None
    waiting: int | None


class EngineClient:
    """One engine. `base_url` is "http://host:port"; `timeout_s` is the longest wait for any answer."""

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float,
        transport: httpx.AsyncBaseTransport | None = None,
        key: str | None = None,
    ) -> None:
        """`key`: what the engine asks of whoever asks it, if it does."""
        self.base_url = base_url
        # Not httpx.AsyncClient: redirects, cookies, proxies and joining URLs are half of what a request costs, and an engine
        # has none of them. A controller of 64 engines sends hundreds of requests a step.
        self._transport = transport or EngineTransport()
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._urls: dict[str, httpx.URL] = {}
        self._limit = _limits(timeout_s)
        self._quick = _limits(min(QUICK_S, timeout_s))
        self._closed = False
        # Aborts and pauses do not queue behind what they are meant to end: only samples take turns.
        self._turns = asyncio.Semaphore(MOST_GENERATING)

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, seeds: Sequence[int], rid: str
    ) -> tuple[Sample, ...]:
        """Several samples of one prompt, one a seed, in order. See `generate_each`."""
        return await self.generate_each([prompt_ids] * len(seeds), params, seeds=seeds, rid=rid)

    async def generate_each(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        seeds: Sequence[int],
        rid: str,
        growing: ProgressCallback | None = None,
    ) -> tuple[Sample, ...]:
        """One sample a prompt, as one request, each with its seed; as many seeds as prompts, answers in their order.

        `params`: of all, or of each. `growing`: who is told of samples as they grow, by their places.
        Sample `i` is called f"{rid}-{i}" there. Raises EngineError, EngineUnreachable. An aborted sample comes back with the tokens it has and finish reason "abort". Log-probabilities are float32
        values, as floats.
        """
        if not seeds:
            return ()
        each = [params] * len(seeds) if isinstance(params, SamplingParams) else params
        body: dict[str, Any] = {
            "input_ids": [list(prompt_ids) for prompt_ids in prompts],
            "sampling_params": [sampling_body(one, seed) for one, seed in zip(each, seeds, strict=True)],
            "rid": _rids(rid, len(seeds)),
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": False,
        }
        async with self._turns:
            if growing is None:
                answers = await self._parsed(await self._call("POST", "/generate", body))
            else:
                answers = await self._streamed(body, len(seeds), growing)
        if not isinstance(answers, list) or len(answers) != len(seeds):
            raise EngineError(f"the engine did not answer with {len(seeds)} samples", where=self.base_url)
        try:
            return tuple(parse_sample(answer) for answer in answers)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineError(f"the engine's answer cannot be read ({error!r})", where=self.base_url) from error

    async def _streamed(self, body: dict[str, Any], count: int, growing: ProgressCallback) -> Any:
        """The last word on each of `count` samples, in order; before that `growing` is told of them."""
        body["stream"] = True
        for one in body["sampling_params"]:
            one["stream_interval"] = growing.every
        last: dict[int, Any] = {}
        response = await self._call("POST", "/generate", body, streamed=True)
        try:
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                await response.aread()  # a server that does not stream answers at the end
                return await self._parsed(response)
            async for line in split_lines(response.aiter_bytes()):
                if not line.startswith(EVENT) or line == EVENT + DONE:
                    continue
                answer = await self._read(line.removeprefix(EVENT))
                place = answer.get("index") if isinstance(answer, dict) else None
                if not isinstance(place, int) or place not in range(count):
                    raise EngineError(f"the engine broke off ({error_text(answer)})", where=self.base_url)
                if place in last and not is_partial(last[place]):
                    continue  # nothing comes after the end
                if (failure := parse_failure(answer)) is not None:
                    raise self._failed("/generate", *failure)
                last[place] = answer
                with contextlib.suppress(KeyError, TypeError, ValueError, IndexError):
                    growing.tell(place, parse_sample(answer))
        except httpx.HTTPError as error:
            raise self._unreachable("/generate", error) from error
        finally:
            await response.aclose()
        ended = sum(not is_partial(answer) for answer in last.values())
        if ended < count:
            raise EngineUnreachable(f"the engine ended after {ended} of {count} samples", where=self.base_url)
        return [last[place] for place in range(count)]

    async def classify(self, questions: Sequence[Sequence[int]], *, rid: str) -> tuple[float, ...]:
        """What a classifier gives for each of `questions`, in their order, by one request. Finite float32, as floats.

        Raises EngineError, EngineUnreachable; EngineGaveUp if one of them was aborted.
        """
        if not questions:
            return ()
        body = {"input_ids": [list(question) for question in questions], "rid": _rids(rid, len(questions))}
        async with self._turns:
            answers = await self._parsed(await self._call("POST", "/classify", body))
        if not isinstance(answers, list) or len(answers) != len(questions):
            raise EngineError(f"the engine did not answer with {len(questions)} scores", where=self.base_url)
        try:
            found = [parse_score(answer) for answer in answers]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineError(f"the engine's answer cannot be read ({error})", where=self.base_url) from error
        scores = tuple(score for score in found if score is not None)
        if len(scores) < len(found):
            raise EngineGaveUp("the engine gave up on a question", where=self.base_url, fix="It is asked again")
        return scores

    async def abort(self, rid: str, count: int) -> None:
        """End the `count` samples of the request called `rid`; they come back with the tokens they have."""
        calls = (self._call("POST", "/abort_request", {"rid": name}) for name in _rids(rid, count))
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def abort_all(self) -> None:
        """End everything that the engine runs or has waiting."""
        await self._call("POST", "/abort_request", {"rid": "", "abort_all": True})

    async def update_weights(self, path: str, version: Version) -> None:
        """Serve the weights in folder `path`, called `version`, from the next token on. Raises EngineError if refused.

        What runs is taken back into the queue meanwhile, and goes on under the new weights with its tokens so far: an
        engine that is not paused lets everything run to its end first, and a cache of the old weights would be wrong. That
        nothing of one's own runs there says nothing about others, so it is paused always.
        After a refusal the engine may hold a mixture of weights; it is not to be used before another update succeeds.
        """
        body = {"model_path": path, "weight_version": str(version), "flush_cache": True}
        try:
            await self.pause("retract")
            answer = await self._parsed(await self._call("POST", "/update_weights_from_disk", body))
        except BaseException:
            # Whatever went wrong, it must not stay paused; and what went wrong is what is told.
            with contextlib.suppress(EngineError):
                await self.resume()
            raise
        await self.resume()
        if not (isinstance(answer, dict) and answer.get("success") is True):
            raise EngineError(f"the engine did not take version {version} ({answer})", where=self.base_url)

    async def call_weights(self, version: Version) -> None:
        """Call the weights that are served `version`; they stay as they are. Raises EngineError."""
        await self._name(str(version))

    async def pause(self, mode: PauseMode = "in_place") -> None:
        """Make no more tokens: end what runs, take it back into the queue, or leave it as it stands."""
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Go on after a pause. Also after `close`: whoever has paused an engine lets it go on, even if it is another's by now."""
        await self._call("POST", CONTINUE, {})

    async def sleep(self) -> None:
        """Give the memory of cache and weights back. What is under way comes back with the tokens it has ("abort"), and nothing
        more is made until `wake`. Doing it twice does no harm. Raises EngineError."""
        await self.pause("abort")
        reported = await self._reported_release()
        if not (await self._named_release() if reported is None else reported):
            if reported is None:
                await self._name(FALLING_ASLEEP)
            await self._call("POST", "/release_memory_occupation", MEMORY)
        await self._name(ASLEEP)

    async def take_memory(self) -> None:
        """Allocate the memory that `sleep` released. A second call does nothing. The weights are undefined: `sleeps` is still true, and no tokens
        are generated before `wake` or `update_weights`. Raises EngineError."""
        reported = await self._reported_release()
        if not (await self._named_release() if reported is None else reported):
            return
        if reported is None:
            await self._name(WAKING)
        await self._call("POST", "/resume_memory_occupation", MEMORY)
        if reported is None:
            await self._name(WOKEN)

    async def wake(self, version: Version) -> None:
        """The same of an engine whose weights never change, and go on being called `version`. Raises EngineError."""
        await self.take_memory()
        await self.call_weights(version)
        await self.resume()

    async def sleeps(self) -> bool:
        """Whether it was put to sleep, and has no weights since. One request. Raises EngineError."""
        return await self._called() in (ASLEEP, FALLING_ASLEEP, WAKING, WOKEN)

    async def released(self) -> bool:
        """Whether any of its memory is given back. Raises EngineError; EngineMemoryUnknown where that cannot be known."""
        reported = await self._reported_release()
        return await self._named_release() if reported is None else reported

    async def _named_release(self) -> bool:
        """The same of an engine that does not report it, by what its weights are called."""
        called = await self._called()
        if called in (FALLING_ASLEEP, WAKING):
            raise EngineMemoryUnknown(
                f"the engine was left {called}, and whether it has its memory is not known",
                where=self.base_url,
                fix="Wait until the other controller is done, or end the engine",
            )
        return called == ASLEEP

    async def _name(self, weights: str) -> None:
        await self._call("POST", "/update_weight_version", {"new_version": weights, "abort_all_requests": False})

    async def _reported_release(self) -> bool | None:
        """Whether its memory is given back, as its scheduler says; None where that says nothing about it."""
        states = (await self.scheduler_state()).get("internal_states")
        first = states[0] if isinstance(states, list) and states else None
        released = first.get("released") if isinstance(first, dict) else None
        return bool(released) if isinstance(released, list) else None

    async def load(self) -> tuple[int | None, int | None]:
        """Sequences that run, and that wait; None where the engine keeps no metrics. One request. Raises EngineError."""
        load = await self._metrics()
        return load.get("num_running_reqs"), load.get("num_queue_reqs")

    async def info(self) -> EngineInfo:
        """The served version and the load. Raises EngineError, EngineUnreachable."""
        version, load = await asyncio.gather(self.served(), self._metrics())
        return EngineInfo(version, load.get("num_running_reqs"), load.get("num_queue_reqs"))

    async def served(self) -> Version | None:
        """The served version; None for weights that no commit made. One request. Raises EngineError, EngineUnreachable."""
        try:
            return Version.parse(await self._called())
        except ValueError:
            return None

    async def _called(self) -> str:
        """What the engine calls its weights."""
        answer = await self._parsed(await self._call("GET", "/model_info", quick=True))
        return str(answer.get("weight_version") if isinstance(answer, dict) else None)

    async def scheduler_state(self) -> Mapping[str, Any]:
        """What the engine's scheduler says of itself, between two steps of the model: an answer shows that it gets on.

        Raises EngineError, EngineUnreachable.
        """
        answer = await self._parsed(await self._call("GET", "/server_info"))
        return answer if isinstance(answer, dict) else {}

    async def health(self) -> bool:
        """Whether it answers, and calls itself well."""
        try:
            await self._call("GET", "/health")
        except EngineError:
            return False
        return True

    async def close(self) -> None:
        """Close all connections, that of a request under way once it has its answer; nothing more is asked."""
        self._closed = True
        await self._transport.aclose()

    async def metrics(self) -> str:
        """What it tells Prometheus; nothing where it exports no metrics. Raises EngineUnreachable."""
        try:
            return (await self._call("GET", "/metrics", quick=True)).text
        except EngineUnreachable:
            raise
        except EngineError:
            return ""

    async def _metrics(self) -> Mapping[str, int]:
        """SGLang's gauges by name, summed over its schedulers; empty when it exports none."""
        found: dict[str, int] = {}
        for line in (await self.metrics()).splitlines():
            if line.startswith("sglang:num_"):
                name, _, value = line.removeprefix("sglang:").rpartition(" ")
                name = name.partition("{")[0]
                found[name] = found.get(name, 0) + int(float(value))
        return found

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        quick: bool = False,
        streamed: bool = False,
    ) -> httpx.Response:
        """The answer; of one that is `streamed` and no refusal, what comes is for the caller to read, and to close."""
        if self._closed and path != CONTINUE:
            raise EngineUnreachable(f"the line to the engine is closed ({path})", where=self.base_url)
        url = self._urls.get(path) or self._urls.setdefault(path, httpx.URL(self.base_url + path))
        limit = self._quick if quick else self._limit
        request = httpx.Request(
            method, url, headers=self._headers, json=body, extensions={"timeout": limit, STREAMED: streamed}
        )
        try:
            response = await self._transport.handle_async_request(request)
            if not streamed or response.status_code >= 400:
                try:
                    await response.aread()
                except BaseException:
                    await response.aclose()
                    raise
        except httpx.HTTPError as error:
            raise self._unreachable(path, error) from error
        if response.status_code >= 400:
            raise self._failed(path, response.status_code, _reason(response))
        return response

    def _failed(self, path: str, status: int, words: str) -> EngineError:
        said = f": {words[:MOST_WORDS]}" if words else ""
        if status >= 500:
            return EngineUnreachable(f"the engine failed at {path} (status {status}){said}", where=self.base_url)
        return EngineError(f"the engine refused {path} (status {status}){said}", where=self.base_url)

    def _unreachable(self, path: str, error: httpx.HTTPError) -> EngineUnreachable:
        # An engine to which there is no connection is away, however long that took to see.
        late = isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout)
        return (EngineLate if late else EngineUnreachable)(
            f"the engine did not answer {path} ({str(error) or type(error).__name__})", where=self.base_url
        )

    async def _parsed(self, response: httpx.Response) -> Any:
        return await self._read(response.content)

    async def _read(self, raw: bytes) -> Any:
        try:
            return json.loads(raw) if len(raw) < BIG_ANSWER_BYTES else await asyncio.to_thread(json.loads, raw)
        except ValueError as error:
            raise EngineError(f"the engine's answer is not JSON ({error})", where=self.base_url) from error


def _limits(seconds: float) -> dict[str, float | None]:
    """For any answer; a connection is there sooner."""
    return httpx.Timeout(seconds, connect=min(CONNECT_S, seconds)).as_dict()


def _rids(rid: str, count: int) -> list[str]:
    return [f"{rid}-{i}" for i in range(count)]


def _reason(response: httpx.Response) -> str:
    """The engine's own sentence, in whichever of its shapes."""
    try:
        answer = response.json()
    except ValueError:
        return response.text
    return error_text(answer)


class EngineReach(Protocol):
    """Makes a client of the engine that registered as `instance`, and answers at `url` (http://host:port): with TLS and its key
    where the cluster has them.
    """

    def __call__(self, url: str, *, timeout_s: float, instance: str) -> Engine: ...


def engine_reach(connector: Connector) -> EngineReach:
    """Over the connections of `connector`."""

    def reach(url: str, *, timeout_s: float, instance: str) -> Engine:
        key = connector.engine_key(instance)
        if not connector.secure:
            return EngineClient(url, timeout_s=timeout_s, key=key)
        transport = EngineTransport(lambda: connector.http)
        secure = url.replace("http://", "https://", 1)
        return EngineClient(secure, timeout_s=timeout_s, transport=transport, key=key)

    return reach


plain_reach: EngineReach = engine_reach(PLAIN)
"""On loopback, without keys."""

"""HTTP client of an engine (an SGLang server or gcore's torch engine): sends token ids, gets samples.

A group (all samples of one prompt) is one HTTP request: it has the prompt's token ids once per sample, each with its
own seed and request id (rid). A sample's randomness then depends only on its seed, and each sample can be aborted
alone. Only routes and fields of SGLang's native API are used.

An engine that does not respond (no connection, timeout, server error) raises `EngineUnreachable`; the request may go to
another engine. An engine that refuses raises `EngineError` with the engine's message. The client does not retry and
does not choose engines. It does not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, get_args

import httpx

from gcore.api.tls import PLAIN, Connector
from gcore.errors import EngineError, EngineGaveUp, EngineLate, EngineMemoryUnknown, EngineUnreachable
from gcore.rollout.api import DenoisingParams, Engine, PauseMode
from gcore.rollout.api import ProgressCallback as ProgressCallback
from gcore.rollout.api import RequestPictures as RequestPictures
from gcore.rollout.api import SamplingParams as SamplingParams
from gcore.rollout.transport import STREAMED, EngineTransport, split_lines
from gcore.types import (
    DenoisingTrajectory,
    FinishReason,
    Medium,
    MediumKind,
    Sample,
    TokenOutput,
    Version,
    VersionSpan,
)

SHA256_BYTES = 32


def sampling_body(params: SamplingParams, seed: int) -> dict[str, Any]:
    """Sampling parameters of one response with its seed, as JSON of SGLang's native API."""
    body: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": -1 if params.top_k is None else params.top_k,
        "max_new_tokens": params.max_new_tokens,
        "stop": list(params.stop),
        "sampling_seed": seed,
    }
    # Defaults are not sent, because a server of another version may not know the field.
    if params.min_p > 0:
        body["min_p"] = params.min_p
    if params.min_new_tokens > 0:
        body["min_new_tokens"] = params.min_new_tokens
    if params.stop_token_ids:
        body["stop_token_ids"] = list(params.stop_token_ids)
    return body


def parse_sample(answer: Mapping[str, Any]) -> Sample:
    """Parse one sample of a `/generate` response; an unfinished one gets the finish reason "abort".

    Raises KeyError, TypeError, ValueError or IndexError for other input.
    """
    meta = answer["meta_info"]
    triples = meta["output_token_logprobs"]
    tokens = tuple(int(token) for token in answer["output_ids"])
    count = len(tokens)
    if len(triples) != count:
        raise ValueError(f"{count} tokens came with {len(triples)} log-probabilities")
    logprobs = _as_float32([triple[0] for triple in triples])
    ending = meta["finish_reason"]  # None for an unfinished sample
    reason: FinishReason = "abort" if ending is None else ending["type"]
    if reason not in ("stop", "length", "abort"):
        raise ValueError(f"its finish reason is {reason!r}, not stop, length or abort")
    media = tuple(_medium(one) for one in meta.get("media", ()))
    output = TokenOutput(tokens, logprobs, str(answer["text"]), _spans(meta, count), media=media)
    return Sample(output=output, finish_reason=reason)


def denoising_body(params: DenoisingParams, seeds: Sequence[int], rid: str) -> dict[str, Any]:
    """A request for one picture per seed, with the fields of SGLang's diffusion server and gcore's own."""
    body: dict[str, Any] = {
        "prompt": params.text,
        "negative_prompt": params.negative,
        "seed": list(seeds),
        "rid": _rids(rid, len(seeds)),
        "height": params.height,
        "width": params.width,
        "num_inference_steps": params.steps,
        "guidance_scale": params.guidance,
        "rollout_sde_type": params.kind,
        "rollout_noise_level": params.noise_level,
        "rollout_log_prob_no_const": not params.constants,
        "rollout_return_denoising_env": params.returns_states,
        "rollout_return_dit_trajectory": params.returns_states,
    }
    if params.averaged:
        body["use_average"] = True
    if params.blob_holder:
        body["blob_holder"] = params.blob_holder
    if params.noise_seeds:
        body["noise_seed"] = list(params.noise_seeds)
    if params.random_steps is not None:
        body["rollout_sde_step_indices"] = list(params.random_steps)
    if params.kept_steps is not None:
        body["rollout_return_step_indices"] = list(params.kept_steps)
    return body


def parse_picture(answer: Mapping[str, Any]) -> Sample:
    """Parse one picture of a `/rollout/generate` response. An aborted one has no media and the finish reason "abort".

    Raises KeyError, TypeError or ValueError for other input.
    """
    meta = answer["meta_info"]
    steps = tuple(int(step) for step in answer["rollout_step_indices"])
    logprobs = _as_float32(answer["rollout_log_probs"])
    reason: FinishReason = meta["finish_reason"]["type"]
    if reason not in ("stop", "abort"):
        raise ValueError(f"its finish reason is {reason!r}, not stop or abort")
    if reason == "stop" and len(logprobs) != len(steps):
        raise ValueError(f"{len(steps)} steps came with {len(logprobs)} log-probabilities")
    levels = _as_float32(answer["sigmas"], "a noise level")
    if any(second >= first for first, second in itertools.pairwise(levels)):
        raise ValueError("its noise levels do not fall")
    named = (answer.get(name) for name in ("dit_trajectory", "generated_output", "denoising_env"))
    media = tuple(_medium(one) for one in named if one is not None)
    if any(one.kind == "trajectory" and one.dtype != "float32" for one in media):
        raise ValueError("its states are not float32, in which their log-probabilities were computed")
    output = DenoisingTrajectory(steps, levels, logprobs, _spans(meta, len(logprobs)), int(answer["seed"]), media)
    return Sample(output=output, finish_reason=reason)


def _medium(named: Mapping[str, Any]) -> Medium:
    """Parse the name of a blob that an engine has put into the store of its node."""
    kind, sha256, size = named["kind"], str(named["sha256"]), int(named["size"])
    if kind not in get_args(MediumKind) or len(bytes.fromhex(sha256)) != SHA256_BYTES or size < 1:
        raise ValueError(f"its medium has kind {kind!r}, SHA-256 {sha256!r} and {size} bytes")
    return Medium(kind, sha256, size, tuple(map(int, named["shape"])), str(named["dtype"]))


def _broken_picture(answer: Any) -> str | None:
    """Why the engine could not finish a picture; None if it did, or if the request was aborted."""
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    ending = meta.get("finish_reason") if isinstance(meta, dict) else None
    return ending.get("broken") if isinstance(ending, dict) else None


def parse_score(answer: Mapping[str, Any]) -> float | None:
    """Parse one score of a `/classify` response; None if the request was aborted.

    Raises KeyError, TypeError or ValueError for other input.
    """
    ending = answer["meta_info"].get("finish_reason") or {}
    if ending.get("type") == "abort":
        return None
    numbers = answer["embedding"]
    if not isinstance(numbers, list) or len(numbers) != 1:
        count = len(numbers) if isinstance(numbers, list) else "no list of"
        raise ValueError(f"the classifier returned {count} numbers instead of one score")
    (score,) = _as_float32(numbers, "a score")
    return score


def is_partial(answer: Any) -> bool:
    """Whether a streamed sample is unfinished, so that more of it will follow."""
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    return isinstance(meta, dict) and meta.get("finish_reason", "") is None


def parse_failure(answer: Any) -> tuple[int, str] | None:
    """HTTP status and message of a response that failed after its stream had begun with status 200, or None.

    A response that was aborted on request has no status.
    """
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    ending = meta.get("finish_reason") if isinstance(meta, dict) else None
    if not isinstance(ending, dict) or ending.get("type") != "abort":
        return None
    status = ending.get("status_code")
    return (status, error_text(ending)) if isinstance(status, int) and status >= 400 else None


def _as_float32(numbers: Sequence[float], what: str = "a log-probability") -> tuple[float, ...]:
    """Round to float32.

    Raises ValueError for NaN and infinity, because train ranks refuse such a group: it would be sent and refused
    forever.
    """
    form = f"<{len(numbers)}f"
    try:
        rounded = struct.unpack(form, struct.pack(form, *numbers))
    except (struct.error, OverflowError) as error:  # SGLang encodes NaN as null
        raise ValueError(f"{what} is not a number ({error})") from error
    if not all(map(math.isfinite, rounded)):
        raise ValueError(f"{what} is not finite")
    return rounded


def _spans(meta: Mapping[str, Any], count: int) -> tuple[VersionSpan, ...]:
    """Version of the weights behind each range of tokens. An engine that reports no ranges used one version for all."""
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": count}]
    return tuple(VersionSpan(Version.parse(str(s["version"])), int(s["start"]), int(s["end"])) for s in spans)


def error_text(answer: Any) -> str:
    """Find the error message in an engine's parsed response, in any of its formats."""
    if isinstance(answer, dict):
        error = answer.get("error", answer.get("message", answer.get("detail", answer)))
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)
    return str(answer)[:300]


BIG_ANSWER_BYTES = 256 * 1024
"""A response of at least this size is parsed in a thread, so that it does not block the event loop."""

CONNECT_S = 5.0
"""Maximum timeout of a connection attempt, in seconds."""

CONTINUE = "/continue_generation"

ASLEEP = "asleep"
"""Version name that a client gives to the weights of a sleeping engine, so that every client sees that it sleeps."""

FALLING_ASLEEP, WAKING, WOKEN = "falling-asleep", "waking", "woken"
"""Version names that a client gives to the weights of an engine that does not report its memory state, such as SGLang:
while memory is released, while it is allocated, and from then until the next weight update. They prevent a second release
or allocation, which would end SGLang's server."""

MEMORY = {"tags": ["kv_cache", "weights"]}
"""Request body that names all memory that an engine can release."""

EVENT, DONE = b"data: ", b"[DONE]"

QUICK_S = 15.0
"""Timeout in seconds of requests that an engine answers immediately in any state, such as that for its version."""

MOST_WORDS = 300
"""Maximum length of an engine's error message, in characters."""

MOST_GENERATING = 512
"""Maximum number of concurrent sampling requests per client; further requests wait."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Version that an engine serves, and its load.

    `version` None: weights that no training step produced. `running` and `waiting`: numbers of sequences; None if the
    engine exports no metrics.
    """

    version: Version | None
    running: int | None
    waiting: int | None


class EngineClient:
    """HTTP client of one engine. `base_url` is "http://host:port"; `timeout_s` is the timeout of any response."""

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float,
        transport: httpx.AsyncBaseTransport | None = None,
        key: str | None = None,
    ) -> None:
        """`key`: the engine's API key, if it has one."""
        self.base_url = base_url
        # Not httpx.AsyncClient: redirects, cookies, proxies and URL joining are half of the cost of a request, and an
        # engine needs none of them. A controller of 64 engines sends hundreds of requests per step.
        self._transport = transport or EngineTransport()
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._urls: dict[str, httpx.URL] = {}
        self._limit = _limits(timeout_s)
        self._quick = _limits(min(QUICK_S, timeout_s))
        self._closed = False
        # Only sampling requests are limited: aborts and pauses must not queue behind the requests that they end.
        self._turns = asyncio.Semaphore(MOST_GENERATING)

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, seeds: Sequence[int], rid: str
    ) -> tuple[Sample, ...]:
        """Generate several samples of one prompt, one per seed, in the order of the seeds. See `generate_each`."""
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
        """Generate one sample per prompt in one request, each with its seed; results in the order of the prompts.

        `params`: for all prompts, or one per prompt. `growing`: called with unfinished samples and their indexes.
        Sample `i` has the request id f"{rid}-{i}". Raises EngineError, EngineUnreachable. An aborted sample returns its
        tokens so far with finish reason "abort". Log-probabilities are float32 values, as floats.
        """
        if not seeds:
            return ()
        each = [params] * len(seeds) if isinstance(params, SamplingParams) else params
        if each[0].denoising is not None:
            return await self._denoise(each[0].denoising, seeds, rid)
        body: dict[str, Any] = {
            "input_ids": [list(prompt_ids) for prompt_ids in prompts],
            "sampling_params": [sampling_body(one, seed) for one, seed in zip(each, seeds, strict=True)],
            "rid": _rids(rid, len(seeds)),
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": False,
        }
        if any(one.adapter is not None for one in each):
            body["lora_path"] = [one.adapter for one in each]
        seeing = any(one.pictures is not None for one in each)
        if seeing:
            body["image_data"] = [[] if one.pictures is None else one.pictures.paths for one in each]
            body["return_prompt_token_ids"] = True
        async with self._turns:
            if growing is None:
                answers = await self._parsed(await self._call("POST", "/generate", body))
            else:
                answers = await self._streamed(body, len(seeds), growing)
        if not isinstance(answers, list) or len(answers) != len(seeds):
            raise EngineError(f"the engine's response does not have {len(seeds)} samples", where=self.base_url)
        if seeing:
            for prompt_ids, one, answer in zip(prompts, each, answers, strict=True):
                self._check_expansion(prompt_ids, one.pictures, answer)
        try:
            return tuple(parse_sample(answer) for answer in answers)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineError(f"the engine's response is invalid ({error!r})", where=self.base_url) from error

    async def _denoise(self, params: DenoisingParams, seeds: Sequence[int], rid: str) -> tuple[Sample, ...]:
        """Generate one picture per seed of one prompt, in one request. Raises EngineError."""
        async with self._turns:
            answers = await self._parsed(
                await self._call("POST", "/rollout/generate", denoising_body(params, seeds, rid))
            )
        if not isinstance(answers, list) or len(answers) != len(seeds):
            raise EngineError(f"the engine's response does not have {len(seeds)} pictures", where=self.base_url)
        for answer in answers:
            if (why := _broken_picture(answer)) is not None:
                raise EngineError(f"a picture failed: {why}", where=self.base_url)
        try:
            return tuple(parse_picture(answer) for answer in answers)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineError(f"the engine's response is invalid ({error!r})", where=self.base_url) from error

    def _check_expansion(self, prompt_ids: Sequence[int], pictures: RequestPictures | None, answer: Any) -> None:
        """Raise EngineError if the engine ran on other prompt tokens than those that the controller computed."""
        if pictures is None:
            return
        expected = pictures.expanded(prompt_ids)
        found = answer.get("prompt_token_ids") if isinstance(answer, dict) else None
        if found == expected:
            return
        if not isinstance(found, list):
            what = "the engine does not report the prompt tokens on which it ran"
        elif len(found) != len(expected):
            what = f"the engine ran on {len(found)} prompt tokens instead of {len(expected)}"
        else:
            place = next(i for i, (own, other) in enumerate(zip(expected, found, strict=True)) if own != other)
            what = f"prompt token {place} of the engine is {found[place]} instead of {expected[place]}"
        raise EngineError(
            f"{what}: it expands pictures differently",
            where=self.base_url,
            fix="Use the image processor of the same model folder in engine and controller",
        )

    async def _streamed(self, body: dict[str, Any], count: int, growing: ProgressCallback) -> Any:
        """Send a streamed request; return the final JSON of each of `count` samples, in order.

        Reports unfinished samples to `growing` meanwhile.
        """
        body["stream"] = True
        for one in body["sampling_params"]:
            one["stream_interval"] = growing.every
        last: dict[int, Any] = {}
        response = await self._call("POST", "/generate", body, streamed=True)
        try:
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                await response.aread()  # a server without streaming responds at the end
                return await self._parsed(response)
            async for line in split_lines(response.aiter_bytes()):
                if not line.startswith(EVENT) or line == EVENT + DONE:
                    continue
                answer = await self._read(line.removeprefix(EVENT))
                place = answer.get("index") if isinstance(answer, dict) else None
                if not isinstance(place, int) or place not in range(count):
                    raise EngineError(f"the engine ended the stream ({error_text(answer)})", where=self.base_url)
                if place in last and not is_partial(last[place]):
                    continue  # the sample is already complete
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

    async def classify(
        self, questions: Sequence[Sequence[int]], *, rid: str, pictures: Sequence[RequestPictures | None] = ()
    ) -> tuple[float, ...]:
        """Score each of `questions` (token ids) with a classifier model, in order, in one request.

        `pictures`: those of each question; empty: no question has any. Scores are finite float32 values, as floats.

        Raises EngineError, EngineUnreachable; EngineGaveUp if one of them was aborted.
        """
        if not questions:
            return ()
        body: dict[str, Any] = {
            "input_ids": [list(question) for question in questions],
            "rid": _rids(rid, len(questions)),
        }
        if seeing := any(one is not None for one in pictures):
            body["image_data"] = [[] if one is None else one.paths for one in pictures]
            body["return_prompt_token_ids"] = True
        async with self._turns:
            answers = await self._parsed(await self._call("POST", "/classify", body))
        if not isinstance(answers, list) or len(answers) != len(questions):
            raise EngineError(f"the engine's response does not have {len(questions)} scores", where=self.base_url)
        if seeing:
            for question, its, answer in zip(questions, pictures, answers, strict=True):
                self._check_expansion(question, its, answer)
        try:
            found = [parse_score(answer) for answer in answers]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineError(f"the engine's response is invalid ({error})", where=self.base_url) from error
        scores = tuple(score for score in found if score is not None)
        if len(scores) < len(found):
            raise EngineGaveUp("the engine aborted a request", where=self.base_url, fix="The request is retried")
        return scores

    async def abort(self, rid: str, count: int) -> None:
        """Abort the `count` samples of the request `rid`; they return their tokens so far."""
        calls = (self._call("POST", "/abort_request", {"rid": name}) for name in _rids(rid, count))
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def abort_all(self) -> None:
        """Abort everything that the engine runs or has queued."""
        await self._call("POST", "/abort_request", {"rid": "", "abort_all": True})

    async def update_weights(self, path: str, version: Version) -> None:
        """Load the weights in folder `path` as `version` and use them from the next token on.

        Raises EngineError if refused.

        The engine is always paused first. Running requests go back into the queue and continue under the new weights
        with their tokens so far. An engine that is not paused would finish them first, and a cache of the old weights
        would be wrong. Other clients may have requests there, so the engine is paused even if this client has none.
        After a refusal the engine may hold a mixture of weights; do not use it before another update succeeds.
        """
        body = {"model_path": path, "weight_version": str(version), "flush_cache": True}
        try:
            await self.pause("retract")
            answer = await self._parsed(await self._call("POST", "/update_weights_from_disk", body))
        except BaseException:
            # Never leave the engine paused, and report the first error.
            with contextlib.suppress(EngineError):
                await self.resume()
            raise
        await self.resume()
        if not (isinstance(answer, dict) and answer.get("success") is True):
            raise EngineError(f"the engine did not load version {version} ({answer})", where=self.base_url)

    async def call_weights(self, version: Version) -> None:
        """Rename the served weights to `version` without changing them. Raises EngineError."""
        await self._name(str(version))

    async def pause(self, mode: PauseMode = "in_place") -> None:
        """Stop generating: abort running requests, put them back into the queue, or keep them in place."""
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Continue to generate after `pause`.

        Works also after `close`: the client that paused an engine must resume it, even if another client uses it by
        then.
        """
        await self._call("POST", CONTINUE, {})

    async def sleep(self) -> None:
        """Release the memory of KV cache and weights.

        Running requests return their tokens so far ("abort"), and nothing is generated until `wake`. Idempotent. Raises
        EngineError.
        """
        await self.pause("abort")
        reported = await self._reported_release()
        if not (await self._named_release() if reported is None else reported):
            if reported is None:
                await self._name(FALLING_ASLEEP)
            await self._call("POST", "/release_memory_occupation", MEMORY)
        await self._name(ASLEEP)

    async def take_memory(self) -> None:
        """Allocate the memory that `sleep` released.

        Idempotent. The weights are undefined: `sleeps` is still true, and no tokens are generated before `wake` or
        `update_weights`. Raises EngineError.
        """
        reported = await self._reported_release()
        if not (await self._named_release() if reported is None else reported):
            return
        if reported is None:
            await self._name(WAKING)
        await self._call("POST", "/resume_memory_occupation", MEMORY)
        if reported is None:
            await self._name(WOKEN)

    async def wake(self, version: Version) -> None:
        """Undo `sleep` for an engine whose weights never change, such as a judge's; its weights keep the name `version`.

        Raises EngineError.
        """
        await self.take_memory()
        await self.call_weights(version)
        await self.resume()

    async def sleeps(self) -> bool:
        """Whether the engine was put to sleep and has got no weights since. One request. Raises EngineError."""
        return await self._called() in (ASLEEP, FALLING_ASLEEP, WAKING, WOKEN)

    async def released(self) -> bool:
        """Whether any of the engine's memory is released. Raises EngineError; EngineMemoryUnknown if that is unknown."""
        reported = await self._reported_release()
        return await self._named_release() if reported is None else reported

    async def _named_release(self) -> bool:
        """Whether memory is released, concluded from the name of the weights: for an engine that does not report it.

        Raises EngineMemoryUnknown while memory is being released or allocated.
        """
        called = await self._called()
        if called in (FALLING_ASLEEP, WAKING):
            raise EngineMemoryUnknown(
                f"the engine is {called!r}, so its memory state is unknown",
                where=self.base_url,
                fix="Wait until the other controller has finished, or restart the engine",
            )
        return called == ASLEEP

    async def _name(self, weights: str) -> None:
        await self._call("POST", "/update_weight_version", {"new_version": weights, "abort_all_requests": False})

    async def _reported_release(self) -> bool | None:
        """Whether memory is released according to the engine's scheduler; None if the scheduler does not report it."""
        states = (await self.scheduler_state()).get("internal_states")
        first = states[0] if isinstance(states, list) and states else None
        released = first.get("released") if isinstance(first, dict) else None
        return bool(released) if isinstance(released, list) else None

    async def load(self) -> tuple[int | None, int | None]:
        """Number of running and of waiting sequences; None if the engine exports no metrics.

        One request. Raises EngineError.
        """
        load = await self._metrics()
        return load.get("num_running_reqs"), load.get("num_queue_reqs")

    async def info(self) -> EngineInfo:
        """Read the served version and the load. Raises EngineError, EngineUnreachable."""
        version, load = await asyncio.gather(self.served(), self._metrics())
        return EngineInfo(version, load.get("num_running_reqs"), load.get("num_queue_reqs"))

    async def served(self) -> Version | None:
        """Version of the weights that the engine serves; None for weights that no training step produced.

        One request. Raises EngineError, EngineUnreachable.
        """
        try:
            return Version.parse(await self._called())
        except ValueError:
            return None

    async def _called(self) -> str:
        """The name under which the engine serves its weights: a version, or one such as `ASLEEP`."""
        answer = await self._parsed(await self._call("GET", "/model_info", quick=True))
        return str(answer.get("weight_version") if isinstance(answer, dict) else None)

    async def scheduler_state(self) -> Mapping[str, Any]:
        """State of the engine's scheduler between two steps of the model: a response shows that the scheduler makes
        progress.

        Raises EngineError, EngineUnreachable.
        """
        answer = await self._parsed(await self._call("GET", "/server_info"))
        return answer if isinstance(answer, dict) else {}

    async def health(self) -> bool:
        """Whether the engine responds and reports that it is healthy."""
        try:
            await self._call("GET", "/health")
        except EngineError:
            return False
        return True

    async def close(self) -> None:
        """Close all connections; a pending request's connection closes after its response. Later requests fail."""
        self._closed = True
        await self._transport.aclose()

    async def metrics(self) -> str:
        """Metrics in Prometheus text format; empty if the engine exports none. Raises EngineUnreachable."""
        try:
            return (await self._call("GET", "/metrics", quick=True)).text
        except EngineUnreachable:
            raise
        except EngineError:
            return ""

    async def _metrics(self) -> Mapping[str, int]:
        """Read SGLang's gauges `num_*`, by name, summed over its schedulers; empty if the engine exports none."""
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
        """Send a request. For a successful `streamed` one the caller reads and closes the response."""
        if self._closed and path != CONTINUE:
            raise EngineUnreachable(f"the client of the engine is closed ({path})", where=self.base_url)
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
        # A connect timeout means that the engine is unreachable, not late.
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
            raise EngineError(f"the engine's response is not JSON ({error})", where=self.base_url) from error


def _limits(seconds: float) -> dict[str, float | None]:
    """Timeouts of a request, as httpx names them. The connection has at most `CONNECT_S`."""
    return httpx.Timeout(seconds, connect=min(CONNECT_S, seconds)).as_dict()


def _rids(rid: str, count: int) -> list[str]:
    return [f"{rid}-{i}" for i in range(count)]


def _reason(response: httpx.Response) -> str:
    """Find the error message in an engine's response, in any of its formats."""
    try:
        answer = response.json()
    except ValueError:
        return response.text
    return error_text(answer)


class EngineReach(Protocol):
    """Creates a client of the engine that registered as `instance` and listens at `url` (http://host:port), with TLS
    and its key if the cluster uses them.
    """

    def __call__(self, url: str, *, timeout_s: float, instance: str) -> Engine: ...


def engine_reach(connector: Connector) -> EngineReach:
    """Return a function that creates engine clients with the TLS settings and keys of `connector`."""

    def reach(url: str, *, timeout_s: float, instance: str) -> Engine:
        key = connector.engine_key(instance)
        if not connector.secure:
            return EngineClient(url, timeout_s=timeout_s, key=key)
        transport = EngineTransport(lambda: connector.http)
        secure = url.replace("http://", "https://", 1)
        return EngineClient(secure, timeout_s=timeout_s, transport=transport, key=key)

    return reach


plain_reach: EngineReach = engine_reach(PLAIN)
"""Creates engine clients without TLS and keys, for loopback."""

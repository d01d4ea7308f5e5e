"""A client of one engine: SGLang's native HTTP routes, so that it speaks to SGLang and to the torch engine alike.

One group is one request: a batch of the same prompt, one seed and one request id a sample. Answers that are large are
parsed off the event loop. It routes nothing and repeats nothing: whoever calls decides where a request goes next.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from gcore.errors import EngineError, EngineUnreachable
from gcore.types import FinishReason, Sample, Version, VersionSpan

LARGE_BYTES = 1 << 18
CONTROL_TIMEOUT_S = 60.0
_LIMITS = httpx.Limits(max_connections=2048, max_keepalive_connections=256)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How responses are drawn. `temperature` 0 is greedy."""

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int | None = None
    stop: tuple[str, ...] = ()

    def body(self, seed: int) -> dict[str, Any]:
        """SGLang's sampling parameters for one sample."""
        body: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_new_tokens": self.max_new_tokens,
            "sampling_seed": seed,
        }
        if self.top_k is not None:
            body["top_k"] = self.top_k
        if self.stop:
            body["stop"] = list(self.stop)
        return body


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of itself; `version` None: weights that no commit made."""

    version: Version | None


class EngineClient:
    """One engine at `base_url`."""

    def __init__(self, base_url: str, *, timeout_s: float) -> None:
        self.base_url = base_url
        # trust_env: an engine is never behind the user's web proxy.
        self._http = httpx.AsyncClient(base_url=base_url, timeout=timeout_s, limits=_LIMITS, trust_env=False)

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, seeds: Sequence[int], rid: str
    ) -> tuple[Sample, ...]:
        """One sample a seed. Log-probabilities are those of the engine, as float32. Raises EngineError."""
        body = {
            "input_ids": [list(prompt_ids)] * len(seeds),
            "sampling_params": [params.body(seed) for seed in seeds],
            "rid": _rids(rid, len(seeds)),
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        answers = await self._post("/generate", body)
        if not isinstance(answers, list) or len(answers) != len(seeds):
            raise EngineError(
                f"{len(seeds)} samples were asked for, and the answer is not as many", where=self.base_url
            )
        return tuple(_sample(answer, self.base_url) for answer in answers)

    async def abort(self, rid: str, count: int) -> None:
        """Give up the request `rid` of `count` samples; it is answered with the tokens so far. Raises EngineError."""
        for one in _rids(rid, count):
            await self._post("/abort_request", {"rid": one}, timeout=CONTROL_TIMEOUT_S)

    async def update_weights(self, path: str, version: Version) -> None:
        """Load the weights in a folder the engine sees; requests under way go on with them. Raises EngineError."""
        body = {"model_path": path, "weight_version": str(version), "flush_cache": False, "abort_all_requests": False}
        await self._admin("/update_weights_from_disk", body)

    async def pause(self, mode: str = "in_place") -> None:
        """Stop generating; requests stay. Raises EngineError."""
        await self._post("/pause_generation", {"mode": mode}, timeout=CONTROL_TIMEOUT_S)

    async def resume(self) -> None:
        """Go on generating. Raises EngineError."""
        await self._post("/continue_generation", {}, timeout=CONTROL_TIMEOUT_S)

    async def info(self) -> EngineInfo:
        """What it serves. Raises EngineError."""
        answer = await self._request("GET", "/model_info", None, CONTROL_TIMEOUT_S)
        text = str(answer.get("weight_version", "")) if isinstance(answer, dict) else ""
        try:
            return EngineInfo(Version.parse(text))
        except ValueError:
            return EngineInfo(None)

    async def health(self) -> bool:
        """Whether it answers."""
        try:
            return (await self._http.get("/health", timeout=CONTROL_TIMEOUT_S)).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    async def close(self) -> None:
        """Close the connections; what is under way fails."""
        await self._http.aclose()

    async def _admin(self, path: str, body: Mapping[str, Any]) -> None:
        answer = await self._post(path, body, timeout=CONTROL_TIMEOUT_S)
        if not isinstance(answer, dict) or not answer.get("success"):
            message = answer.get("message") if isinstance(answer, dict) else answer
            raise EngineError(f"{path} was refused: {message}", where=self.base_url)

    async def _post(self, path: str, body: Mapping[str, Any], *, timeout: float | None = None) -> Any:
        return await self._request("POST", path, body, timeout)

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float | None) -> Any:
        wait = httpx.USE_CLIENT_DEFAULT if timeout is None else timeout
        try:
            reply = await self._http.request(method, path, json=body, timeout=wait)
        except httpx.HTTPError as error:
            raise EngineUnreachable(
                f"no answer to {path} ({type(error).__name__})", where=self.base_url, fix="It is asked elsewhere"
            ) from error
        if reply.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
            raise EngineUnreachable(f"{path} answered {reply.status_code}", where=self.base_url)
        if not reply.content and reply.status_code == httpx.codes.OK:
            return None
        parse = asyncio.to_thread(json.loads, reply.content) if len(reply.content) > LARGE_BYTES else None
        try:
            answer = await parse if parse is not None else json.loads(reply.content)
        except ValueError as error:
            raise EngineError(f"{path} answered what is no JSON", where=self.base_url) from error
        if reply.status_code != httpx.codes.OK:
            raise EngineError(f"{path} was refused: {_message(answer)}", where=self.base_url)
        return answer


def _rids(rid: str, count: int) -> list[str]:
    return [f"{rid}-{index}" for index in range(count)]


def _message(answer: Any) -> str:
    if isinstance(answer, dict):
        error = answer.get("error", answer.get("message", answer))
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)
    return str(answer)


def _sample(answer: Mapping[str, Any], where: str) -> Sample:
    try:
        meta = answer["meta_info"]
        pairs = meta["output_token_logprobs"]
        token_ids = tuple(int(token) for token in answer["output_ids"])
        logprobs = tuple(np.asarray([pair[0] for pair in pairs], dtype=np.float32).tolist())
        reason: FinishReason = meta["finish_reason"]["type"]
        spans = tuple(
            VersionSpan(Version.parse(span["version"]), int(span["start"]), int(span["end"]))
            for span in meta.get("weight_versions") or ()
        ) or (VersionSpan(Version.parse(meta["weight_version"]), 0, len(token_ids)),)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(f"an answer lacks what a sample needs ({error!r})", where=where) from error
    if len(logprobs) != len(token_ids):
        raise EngineError(f"{len(token_ids)} tokens came with {len(logprobs)} log-probabilities", where=where)
    return Sample(token_ids, logprobs, str(answer.get("text", "")), reason, spans)

"""Shared parts of the engine contract's tests: engines, prompts, and the reference model."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from gcore.rollout.client import EngineClient
from gcore.testing.models import VOCABULARY

CONTEXT = 40_000
SLOTS = 5
"""So few that the torch engine's cache has to move all the time."""
FIRST = "0.0"
"""The version of an engine's first weights."""
ENDLESS = {"max_new_tokens": 10_000, "ignore_eos": True}
"""Many seconds of work: nothing waits for its end. Five of them fit into the cache of the real SGLang together."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:{{ message['content'] }}/{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TOLERANCE = {"torch": 1e-5, "hf": 1e-5, "sglang": 1e-4, "vllm": 1e-4}
OF_VLLM = pytest.param("vllm", marks=pytest.mark.vllm)
OF_SGLANG = pytest.param("sglang", marks=pytest.mark.sglang)
TORCH_ONLY = pytest.mark.parametrize("serving", ["torch"], indirect=True)
SLEEPERS = pytest.mark.parametrize("serving", ["torch", "hf", OF_SGLANG], indirect=True)
"""The engines that do not refuse to sleep on a CPU."""
HELD = pytest.mark.parametrize("serving", ["torch", "hf"], indirect=True)
"""The engines whose weights gcore itself holds: it shows them by name, and releases them on a CPU."""
FRONT_END = pytest.mark.parametrize("serving", ["torch", "hf", OF_VLLM], indirect=True)
"""The engines behind gcore's own HTTP front end."""


@dataclass(frozen=True)
class Serving:
    """An engine, and the folders with the weights it may serve; it starts with the first."""

    kind: str
    url: str
    weights: tuple[Path, Path]

    @property
    def is_sglang(self) -> bool:
        """Whether it is the real one."""
        return self.kind == "sglang"

    @property
    def tolerance(self) -> float:
        """How far a log-probability may be from the plain model's."""
        return TOLERANCE[self.kind]


def prompt(number: int, length: int) -> list[int]:
    """Without the vocabulary's last token: where SGLang tells a prompt's tokens, it calls that one 0."""
    return [(number * 31 + i * 7) % (VOCABULARY - 4) + 3 for i in range(length)]


@cache
def plain_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def plain_logits(folder: Path, ids: list[int]) -> torch.Tensor:
    """[token, vocabulary] from one forward pass of the plain model."""
    with torch.inference_mode():
        logits: torch.Tensor = plain_model(folder)(torch.tensor([ids])).logits[0]
    return logits


def plain_logprobs(folder: Path, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[token, vocabulary]: row `i` is of what follows token `i`."""
    return torch.log_softmax(plain_logits(folder, ids) / (temperature or 1.0), -1)


def chosen(table: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """Of `plain_logprobs(ids)`: of each token but the first, given those before it."""
    return table[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def error_of(folder: Path, prompt_ids: list[int], answer: dict[str, Any], temperature: float = 1.0) -> float:
    """The answer's largest distance from the plain model's log-probabilities."""
    return span_error(folder, prompt_ids, answer, 0, len(answer["output_ids"]), temperature)


def span_error(
    folder: Path, prompt_ids: list[int], answer: dict[str, Any], start: int, end: int, temperature: float = 1.0
) -> float:
    """The same of tokens [start, end) of the output."""
    told = answer["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in told] == answer["output_ids"]
    ids = prompt_ids + answer["output_ids"]
    plain = chosen(plain_logprobs(folder, ids, temperature), ids)[len(prompt_ids) - 1 :]
    difference = (plain - torch.tensor([logprob for logprob, _, _ in told]))[start:end]
    return float(difference.abs().max()) if len(difference) else 0.0


async def generate(http: httpx.AsyncClient, **body: Any) -> Any:
    """The answer, which must be one."""
    response = await http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def post(http: httpx.AsyncClient, path: str, **body: Any) -> Any:
    """The answer of a route that must succeed."""
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json() if response.content else None


async def until(client: EngineClient, **expected: int) -> None:
    """Until the engine's numbers of running and waiting sequences are these; SGLang's are late, and come."""
    while True:
        info = await client.info()
        if all(getattr(info, name) == value for name, value in expected.items()):
            return
        await asyncio.sleep(0.002)


async def until_generating(client: EngineClient, beside: Streaming, running: int) -> None:
    """Until `running` sequences, `beside` one of them, run and each has a token: `beside` gets some after that."""
    await until(client, running=running)
    assert beside.task is not None
    assert not beside.task.done()
    await beside.until(len(beside.parts[-1]["output_ids"]) + 60)


async def parts_of(http: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    """A stream's parts, which must end as a stream ends."""
    return await (await begin(http, interval=1, **body)).ended()


@dataclass
class Streaming:
    """A request under way of which the first token has come."""

    parts: list[dict[str, Any]] = field(default_factory=list)
    more: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    async def read(self, http: httpx.AsyncClient, body: dict[str, Any]) -> None:
        last = ""
        try:
            async with http.stream("POST", "/generate", json={**body, "stream": True}) as response:
                assert response.status_code == 200
                async for line in response.aiter_lines():
                    if line:
                        last = line
                        if line.startswith("data: {"):
                            self.parts.append(json.loads(line.removeprefix("data: ")))
                            self.more.set()
        finally:
            self.more.set()
        assert last == "data: [DONE]"

    async def until(self, tokens: int) -> None:
        """Until so many tokens are there, or it has ended."""
        assert self.task is not None
        while not self.task.done() and (not self.parts or len(self.parts[-1]["output_ids"]) < tokens):
            self.more.clear()
            await self.more.wait()

    async def ended(self) -> list[dict[str, Any]]:
        assert self.task is not None
        await self.task
        return self.parts

    async def last(self) -> dict[str, Any]:
        return (await self.ended())[-1]


async def begin(http: httpx.AsyncClient, *, interval: int = 20, **body: Any) -> Streaming:
    """Ask for a stream with a part every `interval` tokens; returns when it has begun."""
    sampling = body.get("sampling_params")
    if isinstance(sampling, dict):
        body["sampling_params"] = {**sampling, "stream_interval": interval}
    streaming = Streaming()
    streaming.task = asyncio.create_task(streaming.read(http, body))
    await streaming.until(1)
    return streaming


def mixed_error(folders: tuple[Path, Path], prompt_ids: list[int], answer: dict[str, Any], change: int) -> float:
    """The same of the tokens after `change`, made by the second weights over keys and values of the first.

    What the first weights had read by then is all but the last token that they made; that one the second weights read.
    """
    told = answer["meta_info"]["output_token_logprobs"][change:]
    ids = torch.tensor([prompt_ids + answer["output_ids"]])
    read = len(prompt_ids) + change - 1
    with torch.inference_mode():
        cache_ = plain_model(folders[0])(ids[:, :read], use_cache=True).past_key_values
        logits = plain_model(folders[1])(ids[:, read:], past_key_values=cache_).logits[0]
    plain = torch.log_softmax(logits, -1)[:-1].gather(-1, ids[0, read + 1 :, None])[:, 0]
    return float((plain - torch.tensor([logprob for logprob, _, _ in told])).abs().max())


def reason(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["meta_info"]["finish_reason"]
    return found


def spans(answer: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(s["version"], s["start"], s["end"]) for s in answer["meta_info"]["weight_versions"]]

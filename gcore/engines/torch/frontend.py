"""HTTP side of the generating engine: converts requests and outputs, and has the routes of SGLang and OpenAI.

Error responses have SGLang's formats (`engines.serving.http`). Routes of SGLang that this engine does not support exist
and refuse with an explanation. Nothing here blocks the event loop on the model.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from gcore.data.renderer import PromptRenderer
from gcore.engines.detokenizer import Detokenizer, stable_text
from gcore.engines.request import GenerationRequest, PicturesOfPrompt, RequestOutput, check_token_ids, prompt_key
from gcore.engines.serving import openai
from gcore.engines.serving.http import (
    ApiKeys,
    BodyRefused,
    BodyTooBig,
    error_event,
    error_response,
    read_body,
)
from gcore.engines.serving.io_struct import (
    GenerateCall,
    LogprobRequest,
    SamplingBody,
    count_answer_entries,
    count_entries,
    generate_body,
    word_sample,
)
from gcore.engines.serving.routes import (
    CLIENT_CLOSED_REQUEST,
    STREAM_END,
    bind_engine,
    encode_event,
    health,
    run_unless_disconnected,
)
from gcore.engines.torch.async_engine import AsyncEngine
from gcore.engines.torch.engine import GeneratorBase
from gcore.engines.torch.weight_routes import engine_app
from gcore.errors import EngineError, GcoreError
from gcore.system.clock import Clock
from gcore.system.concurrency import limit_time

BIG_ANSWER_TOKENS = 16_384
"""From this number of list entries (tokens, log-probabilities) on, a response is composed off the event loop."""


@dataclass(frozen=True, slots=True)
class _Ticket:
    """A request for one sample, and what is needed to compose its response.

    `name`: request ID of the client's request, before it is numbered for `n`. `since`: arrival time on the monotonic
    clock, in seconds.
    """

    task: GenerationRequest
    name: str
    params: SamplingBody
    asked: LogprobRequest
    since: float
    returns_prompt: bool = False


class RequestHandler(AsyncEngine[GenerationRequest, RequestOutput]):
    """Turns checked requests into requests for samples, and outputs into response bodies. Call `open` before the first.

    Runs on the event loop. Checks that depend on the model (token IDs, context length, stop strings without a
    tokenizer) are made here, before a request reaches the model's thread. A request whose client has disconnected is
    aborted. `seeds`: source of seeds for requests without one.
    """

    def __init__(
        self,
        core: GeneratorBase,
        text: Detokenizer | None,
        *,
        clock: Clock,
        seeds: np.random.Generator,
        description: dict[str, Any],
    ) -> None:
        super().__init__(core, text, clock, {**description, "is_generation": True})
        self._generator = core
        self._seeds = seeds

    @property
    def context(self) -> int:
        """Context length of the model in tokens."""
        return self._generator.model.context

    def encoded(self, request: GenerateCall) -> GenerateCall:
        """Return the request with its texts tokenized and its pictures read. May be called from any thread: a long text
        takes seconds. Raises EngineError for what is not a picture.
        """
        read: tuple[Any, ...] = ()
        if request.pictures:
            read = tuple(self._generator.read_pictures(pictures) for pictures in request.pictures)
        return replace(request, prompts=self.encode(request.prompts), pictures=read)

    def admit(self, request: GenerateCall) -> list[_Ticket]:
        """Check a tokenized request and split it into samples, in the order of the prompts. Starts nothing.

        Raises EngineError if it cannot be served.
        """
        pairs = list(zip(request.prompts, request.params, request.asked, strict=True))
        read: Sequence[Any] = request.pictures or [()] * len(pairs)
        placed = [
            self._generator.place_pictures(prompt, pictures)  # type: ignore[arg-type]  # texts were tokenized
            for (prompt, _, _), pictures in zip(pairs, read, strict=True)
        ]
        prompts = [self._tokens(list(ids), params) for (ids, _), (_, params, _) in zip(placed, pairs, strict=True)]
        adapters = request.adapter_numbers(self._generator.adapters)
        names = self.names(request.rids, len(prompts))
        return [
            ticket
            for tokens, (_, pictures), (_, params, asked), name, adapter in zip(
                prompts, placed, pairs, names, adapters, strict=True
            )
            for ticket in self._tickets(
                tokens,
                params,
                self._placed(asked, tokens),
                name,
                streams=request.stream,
                adapter=adapter,
                pictures=pictures,
                returns_prompt=request.returns_prompt,
            )
        ]

    def _tickets(
        self,
        prompt: tuple[int, ...],
        params: SamplingBody,
        asked: LogprobRequest,
        name: str,
        *,
        streams: bool,
        adapter: int,
        pictures: PicturesOfPrompt | None,
        returns_prompt: bool,
    ) -> list[_Ticket]:
        model, now = self._generator.model, self.clock.monotonic()
        key = prompt_key(prompt) + (b"" if pictures is None else pictures.key)
        tickets = []
        for index in range(params.n):
            sampling = params.sampling(
                index=index,
                drawn_seed=int(self._seeds.integers(2**63)),
                end_tokens=model.end_tokens,
                room=self._generator.longest - len(prompt),
                vocabulary=model.vocabulary,
                asked=asked,
            )
            rid = name if params.n == 1 else f"{name}_{index}"
            task = GenerationRequest(
                self.number(),
                rid,
                prompt,
                sampling,
                streams=streams and params.makes_tokens,
                adapter=adapter,
                pictures=pictures,
                key=key,
            )
            tickets.append(_Ticket(task, name, params, asked, now, returns_prompt))
        return tickets

    def _placed(self, asked: LogprobRequest, prompt: tuple[int, ...]) -> LogprobRequest:
        """Check the requested log-probabilities against the prompt. Raises EngineError for positions that do not exist."""
        start = asked.prompt_from
        if asked.top > self._generator.model.vocabulary:
            raise EngineError(
                f"top_logprobs_num is {asked.top}, but the vocabulary has {self._generator.model.vocabulary} tokens"
            )
        if start is not None and start > len(prompt):
            raise EngineError(f"logprob_start_len is {start}, but the prompt has {len(prompt)} tokens")
        return replace(asked, prompt_from=None) if start == len(prompt) else asked

    def _tokens(self, prompt: str | list[int], params: SamplingBody) -> tuple[int, ...]:
        model = self._generator.model
        if self._text is None and (isinstance(prompt, str) or params.stop_strings):
            raise EngineError("the model folder has no tokenizer.json", fix="Send input_ids, and no stop strings")
        assert not isinstance(prompt, str)
        tokens = tuple(prompt)
        check_token_ids(tokens, model.vocabulary)
        if len(tokens) >= model.context:
            raise EngineError(
                f"a prompt of {len(tokens)} tokens leaves no room in the context of {model.context} tokens"
            )
        if len(tokens) + (params.max_new_tokens or 0) > model.context:
            raise EngineError(
                f"a prompt of {len(tokens)} tokens and max_new_tokens {params.max_new_tokens} exceed "
                f"the context of {model.context} tokens",
                fix="Shorten the prompt or lower max_new_tokens",
            )
        # Without a limit it is what the cache holds, which must be at least one token.
        self._generator.check(len(tokens), 1 if params.max_new_tokens is None else params.max_new_tokens)
        return tokens

    def _deliveries(self, tickets: Sequence[_Ticket]) -> AsyncIterator[list[RequestOutput]]:
        return self.deliveries([ticket.task for ticket in tickets], {ticket.name for ticket in tickets})

    async def answers(self, tickets: Sequence[_Ticket]) -> list[dict[str, Any]]:
        """Start the samples, wait for all, and return the response bodies in order."""
        ended = await self.ended([ticket.task for ticket in tickets], {ticket.name for ticket in tickets})
        now = self.clock.monotonic()

        def word() -> list[dict[str, Any]]:
            return [self._word(ticket, ended[ticket.task.number], now) for ticket in tickets]

        if sum(count_entries(ended[t.task.number], t.asked) for t in tickets) < BIG_ANSWER_TOKENS:
            return word()
        return await asyncio.to_thread(word)

    async def stream(self, tickets: Sequence[_Ticket]) -> AsyncIterator[list[dict[str, Any]]]:
        """Start the samples and yield their response bodies as they grow; each contains all tokens so far.

        `index` of a body is the sample's position in `tickets`. A body is sent for the first token of a sample, then
        after at least `stream_interval` further tokens, and at the end.
        """
        place = {ticket.task.number: i for i, ticket in enumerate(tickets)}
        sent = [0] * len(tickets)
        stream = self._deliveries(tickets)
        try:
            async for arrived in stream:
                now = self.clock.monotonic()
                pairs = []
                for delivery in arrived:
                    i = place[delivery.number]
                    grown = len(delivery.tokens) - sent[i]
                    if delivery.ending is not None or not sent[i] or grown >= tickets[i].params.stream_interval:
                        sent[i] += grown
                        pairs.append((i, delivery))

                def word(pairs: list[tuple[int, RequestOutput]] = pairs, now: float = now) -> list[dict[str, Any]]:
                    return [{**self._word(tickets[i], d, now), "index": i} for i, d in pairs]

                if sum(count_entries(d, tickets[i].asked) for i, d in pairs) < BIG_ANSWER_TOKENS:
                    yield word()
                else:
                    yield await asyncio.to_thread(word)
        finally:
            await stream.aclose()  # type: ignore[attr-defined]  # it is a generator

    def _word(self, ticket: _Ticket, delivery: RequestOutput, now: float) -> dict[str, Any]:
        worded = word_sample(
            delivery, ticket.task, ticket.params, ticket.asked, text=self._text, latency_s=now - ticket.since
        )
        return worded | ({"prompt_token_ids": list(ticket.task.prompt)} if ticket.returns_prompt else {})


class OpenAIRoutes:
    """OpenAI's routes: `/v1/models`, `/v1/completions`, `/v1/chat/completions`.

    All error responses have the first format of `error_response`. Chat needs a chat template in the model's folder,
    which is loaded at the first request.
    """

    def __init__(self, desk: RequestHandler, folder: Path, context: int) -> None:
        self._desk = desk
        self._folder = folder
        self._context = context
        self._renderer: PromptRenderer | None = None
        self._started = int(desk.clock.wall())

    def routes(self) -> list[Route]:
        """Return the routes for the application."""
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
        ]

    async def models(self, request: Request) -> Response:
        """List the one model."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """Describe the model that the path names; 404 if it is not the served one."""
        name = request.path_params["name"]
        if name in (self._desk.model_path, self._desk.model_path.lstrip("/")):
            return JSONResponse(self._card())
        error = {"type": "invalid_request_error", "param": "model", "code": "model_not_found"}
        return JSONResponse({"error": {"message": f"The model {name!r} does not exist", **error}}, 404)

    def _card(self) -> dict[str, Any]:
        name = self._desk.model_path
        card = {"id": name, "object": "model", "created": self._started, "owned_by": "gcore", "root": name}
        return {**card, "parent": None, "max_model_len": self._context}

    async def completions(self, request: Request) -> Response:
        """Complete a text."""
        return await self._answered(request, openai.parse_completion)

    async def chat_completions(self, request: Request) -> Response:
        """Complete a chat."""
        return await self._answered(request, lambda value: openai.parse_chat(value, self._render))

    async def _answered(self, request: Request, check: Callable[[Any], openai.CompletionRequest]) -> Response:
        try:
            # The first chat loads files; and a template is foreign code that may be slow.
            value = await read_body(request, lambda value: value)
            asking = await asyncio.to_thread(lambda: self._encoded(check(value)))
            tickets = self._desk.admit(asking.request)
            wording = openai.CompletionWriter(asking, name=uuid.uuid4().hex, created=int(self._desk.clock.wall()))
            if asking.request.stream:
                return StreamingResponse(self._events(tickets, wording), media_type="text/event-stream")
            answers = await _answers(self._desk, request, tickets)
            return JSONResponse(wording.whole(answers)) if answers else Response(status_code=CLIENT_CLOSED_REQUEST)
        except GcoreError as error:
            known = isinstance(error, (BodyRefused, BodyTooBig))
            return error_response(error if known else BodyRefused(str(error)))

    def _encoded(self, asking: openai.CompletionRequest) -> openai.CompletionRequest:
        return replace(asking, request=self._desk.encoded(asking.request))

    async def _events(self, tickets: Any, wording: openai.CompletionWriter) -> AsyncIterator[bytes]:
        stream = self._desk.stream(tickets)
        try:
            async for parts in stream:
                for part in parts:
                    for chunk in wording.parts(part):
                        yield encode_event(chunk)
        finally:
            await stream.aclose()  # type: ignore[attr-defined]  # it is a generator
        for chunk in wording.usage():
            yield encode_event(chunk)
        yield STREAM_END

    def _render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> list[int]:
        if self._renderer is None:
            self._renderer = PromptRenderer.load(self._folder, chat=True)
        text = self._renderer.render(messages, variables=variables)
        ids = list(self._renderer.encode(text))
        if not ids:
            raise EngineError("the messages have no tokens")
        return ids


HEALTH_GENERATE_S = 20.0

UNSERVED = (
    "/encode",
    "/classify",
    "/update_weights_from_tensor",
    "/update_weights_from_ipc",
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/open_session",
    "/close_session",
)
"""SGLang's routes that this engine refuses."""


def generator_app(desk: RequestHandler, tokenizer_folder: Path, keys: ApiKeys) -> ASGIApp:
    """Return the ASGI application of a generating engine: SGLang's and OpenAI's routes, protected by the API keys."""
    routes = [
        Route("/generate", bind_engine(lambda _: desk, generate), methods=["POST", "PUT"]),
        Route("/health_generate", bind_engine(lambda _: desk, health_generate), methods=["GET"]),
        *OpenAIRoutes(desk, tokenizer_folder, desk.context).routes(),
    ]
    return engine_app(desk, routes, UNSERVED, keys)


async def generate(desk: RequestHandler, request: Request) -> Response:
    """Handle `/generate`: generate samples, and respond with one body or a stream."""
    body = await read_body(request, generate_body)
    if body.pictures:  # decoding takes long
        body = await asyncio.to_thread(desk.encoded, body)
    else:
        body = desk.encoded(body)
    if body.stream:
        return StreamingResponse(_events(desk, body), media_type="text/event-stream")
    answers = await _answers(desk, request, desk.admit(body))
    if body.prompts and not answers:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    whole = answers if body.is_list else answers[0]
    if sum(count_answer_entries(a, body.asked_by(i)) for i, a in enumerate(answers)) < BIG_ANSWER_TOKENS:
        return JSONResponse(whole)
    return await asyncio.to_thread(JSONResponse, whole)


async def health_generate(desk: RequestHandler, request: Request) -> Response:
    """Respond with 200 if the engine generates tokens: generates one to find out, unless it is paused or asleep."""
    if desk.state.paused or desk.state.asleep:
        return await health(desk, request)
    body = generate_body({"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}})
    made = desk.generated_tokens
    try:
        async with limit_time(HEALTH_GENERATE_S):
            await desk.answers(desk.admit(body))
    except TimeoutError:
        # With a long queue this request may still wait; then others have made progress.
        return Response(status_code=200 if desk.generated_tokens > made else 503)
    return Response()


async def _answers(desk: RequestHandler, request: Request, tickets: list[_Ticket]) -> list[dict[str, Any]]:
    """Return the response bodies; empty if the client disconnects first, which aborts the samples."""
    return await run_unless_disconnected(request, desk.answers(tickets)) or []


async def _events(desk: RequestHandler, body: GenerateCall) -> AsyncIterator[bytes]:
    """Yield server-sent events. An error is an event too, because the status 200 has been sent."""
    try:
        stream = desk.stream(desk.admit(body))
    except EngineError as error:
        yield encode_event(error_event(error))
    else:
        try:
            async for parts in stream:
                for part in parts:
                    asked = body.asked_by(part["index"])
                    if part["meta_info"]["finish_reason"] is None:
                        params = body.params[part["index"] // body.params[0].n]
                        part["text"] = stable_text(part["text"], params.stop_strings)
                    if not body.is_list:
                        del part["index"]
                    big = count_answer_entries(part, asked) >= BIG_ANSWER_TOKENS
                    yield await asyncio.to_thread(encode_event, part) if big else encode_event(part)
        finally:
            await stream.aclose()  # type: ignore[attr-defined]  # it is a generator
    yield STREAM_END

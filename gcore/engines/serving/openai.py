"""OpenAI's completions and chat completions on top of the engine, with a subset of the fields.

A request becomes one `/generate` request, whose response is converted, complete or as a stream. Text only: no
tools, images, grammars, penalties or echo. Unknown fields are refused, and so are OpenAI's fields that the engine does
not support, unless they have the default value. `model` may have any value, because there is one model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gcore.engines.detokenizer import stable_text
from gcore.engines.serving.http import checked_body
from gcore.engines.serving.io_struct import GenerateCall, LogprobRequest, SamplingBody, SamplingFields

NonNegativeCount = Annotated[int, Field(ge=0)]
SOME = Field(min_length=1, fail_fast=True)
Ids = Annotated[list[int], SOME]

Render = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], list[int]]
"""Renders chat messages with variables of the chat template, and returns the prompt's tokens."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "parallel_tool_calls": (True, False),
    "store": (False,),
}
"""OpenAI's fields that this engine does not support, and the values with which they have no effect (as null)."""


class StreamOptions(BaseModel):
    """OpenAI's `stream_options`: whether the last part of a stream reports token counts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    include_usage: bool = False


class _Asking(SamplingFields):
    """Fields that completions and chat completions share."""

    model: str = "default"
    stream: bool = False
    stream_options: StreamOptions | None = None
    min_tokens: int = 0
    seed: int | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_fields(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kept = {}
        for name, given in value.items():
            if given is None or (name in NEUTRAL and given in NEUTRAL[name]):
                continue
            if name in NEUTRAL:
                raise ValueError(f"{name} is not supported by this engine; remove it")
            kept[name] = given
        return kept

    def sampling(self, max_new_tokens: int | None) -> SamplingBody:
        """Convert to the sampling parameters of `/generate`. Raises EngineError for an invalid value."""
        params = SamplingBody(
            **{name: getattr(self, name) for name in SamplingFields.model_fields},
            max_new_tokens=max_new_tokens,
            min_new_tokens=self.min_tokens,
            sampling_seed=self.seed,
        )
        params.check()
        return params


class CompletionBody(_Asking):
    """POST /v1/completions."""

    prompt: str | Annotated[list[str], SOME] | Ids | Annotated[list[Ids], SOME]
    max_tokens: int = 16
    logprobs: NonNegativeCount | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list: texts or lists of token IDs."""
        one: Any = self.prompt
        return [one] if isinstance(one, str) or isinstance(one[0], int) else list(one)


class ContentPart(BaseModel):
    """A text part of a message's content."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One chat message, with any further fields. The chat template gets it unchanged."""

    model_config = ConfigDict(extra="allow", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], SOME]


class ChatBody(_Asking):
    """POST /v1/chat/completions. `chat_template_kwargs`: variables of the chat template, named as in SGLang."""

    messages: Annotated[list[ChatMessage], SOME]
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: NonNegativeCount = 0


def parse_chat(value: Any, render: Render) -> CompletionRequest:
    """Check a chat completion's JSON body and render its messages. Raises BodyRefused, EngineError, what `render`
    raises.
    """
    body = checked_body(ChatBody, value)
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    asked = LogprobRequest(output=True, top=body.top_logprobs, text=True) if body.logprobs else LogprobRequest()
    ids = render([message.model_dump() for message in body.messages], body.chat_template_kwargs)
    return _asking(body, [ids], body.sampling(most), asked, chat=True)


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request of either route, converted to a `/generate` request.

    `chat`: whether it is a chat completion. `wants_logprobs`: whether choices contain log-probabilities.
    """

    request: GenerateCall
    model: str
    chat: bool
    wants_logprobs: bool
    include_usage: bool


def parse_completion(value: Any) -> CompletionRequest:
    """Check a completion's JSON body. Raises BodyRefused, EngineError."""
    body = checked_body(CompletionBody, value)
    asked = LogprobRequest() if body.logprobs is None else LogprobRequest(output=True, top=body.logprobs, text=True)
    return _asking(body, body.prompts, body.sampling(body.max_tokens), asked, chat=False)


def _asking(
    body: _Asking, prompts: list[Any], params: SamplingBody, asked: LogprobRequest, *, chat: bool
) -> CompletionRequest:
    request = GenerateCall(
        prompts=tuple(prompts),
        params=(params,) * len(prompts),
        asked=(asked,) * len(prompts),
        rids=None,
        stream=body.stream,
        is_list=True,
        adapters=(None,) * len(prompts),
    )
    options = body.stream_options
    return CompletionRequest(request, body.model, chat, asked.output, options is not None and options.include_usage)


class CompletionWriter:
    """Converts responses of `/generate` to OpenAI's format, for one request.

    `name`: ID of the response. `created`: seconds since 1970. Both are the same in each part of a stream.
    """

    def __init__(self, asking: CompletionRequest, *, name: str, created: int) -> None:
        self._asking = asking
        self._head = {"id": name, "created": created, "model": asking.model}
        self._progress: dict[int, _ChoiceProgress] = {}
        self._newest: dict[int, Mapping[str, Any]] = {}

    def whole(self, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return OpenAI's complete response. `answers`: complete responses of `/generate`, in order."""
        chat = self._asking.chat
        choices = []
        for index, answer in enumerate(answers):
            text = answer["text"]
            said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            choices.append({"index": index, **said, **self._end(answer, self._logprobs(answer, 0))})
        return {
            **self._head,
            "object": "chat.completion" if chat else "text_completion",
            "choices": choices,
            "usage": _usage(answers, self._asking),
            "metadata": {name: answers[0]["meta_info"][name] for name in ("weight_version", "weight_versions")},
        }

    def parts(self, part: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the parts of the stream to send now. `part`: the newest response of `/generate` for one sample."""
        index = part["index"]
        self._newest[index] = part
        found: list[dict[str, Any]] = []
        progress = self._progress.get(index)
        if progress is None:
            progress = self._progress[index] = _ChoiceProgress()
            if self._asking.chat:
                found.append(self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None, None))
        ended = part["meta_info"]["finish_reason"] is not None
        text = part["text"]
        if not ended:
            text = stable_text(text, self._asking.request.params[0].stop_strings)
        new = text[len(progress.text) :] if text.startswith(progress.text) else ""
        if not new and not ended:
            return found
        logprobs = self._logprobs(part, progress.tokens)
        progress.text, progress.tokens = progress.text + new, len(part["output_ids"])
        said: dict[str, Any] = {"delta": {"content": new}} if self._asking.chat else {"text": new}
        return [*found, self._chunk(index, said, logprobs, part if ended else None)]

    def usage(self) -> list[dict[str, Any]]:
        """Return the last part of the stream, with token counts, if the client requests it; else an empty list."""
        if not self._asking.include_usage:
            return []
        answers = [self._newest[index] for index in sorted(self._newest)]
        return [{**self._head, "object": self._kind, "choices": [], "usage": _usage(answers, self._asking)}]

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self._asking.chat else "text_completion"

    def _chunk(
        self, index: int, said: Mapping[str, Any], logprobs: Any, ended: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        end = {"logprobs": logprobs, "finish_reason": None, "matched_stop": None}
        if ended is not None:
            end = self._end(ended, logprobs)
        return {**self._head, "object": self._kind, "choices": [{"index": index, **said, **end}], "usage": None}

    def _end(self, answer: Mapping[str, Any], logprobs: Any) -> dict[str, Any]:
        reason = answer["meta_info"]["finish_reason"]
        return {"logprobs": logprobs, "finish_reason": reason["type"], "matched_stop": reason.get("matched")}

    def _logprobs(self, answer: Mapping[str, Any], start: int) -> dict[str, Any] | None:
        if not self._asking.wants_logprobs:
            return None
        meta = answer["meta_info"]
        entries = meta["output_token_logprobs"][start:]
        tops = meta.get("output_top_logprobs", [])[start:]
        if self._asking.chat:
            rows = tops or [[]] * len(entries)
            content = [
                {**_token(e), "top_logprobs": [_token(t) for t in row]} for e, row in zip(entries, rows, strict=True)
            ]
            return {"content": content}
        return {
            "tokens": [text for _, _, text in entries],
            "token_logprobs": [logprob for logprob, _, _ in entries],
            "top_logprobs": [{text: logprob for logprob, _, text in row} for row in tops],
            # As in SGLang, text offsets are not reported.
            "text_offset": [-1] * len(entries),
        }


@dataclass
class _ChoiceProgress:
    """How much of a choice was already sent: its text, and its number of tokens."""

    text: str = ""
    tokens: int = 0


def _token(entry: Sequence[Any]) -> dict[str, Any]:
    logprob, _, text = entry
    return {"token": text, "bytes": list(text.encode()), "logprob": logprob}


def _usage(answers: Sequence[Mapping[str, Any]], asking: CompletionRequest) -> dict[str, Any]:
    """Return OpenAI's token counts. Each prompt counts once, regardless of its number of samples."""
    metas = [answer["meta_info"] for answer in answers]
    prompt = sum(meta["prompt_tokens"] for meta in metas[:: asking.request.params[0].n])
    made = sum(meta["completion_tokens"] for meta in metas)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made, "reasoning_tokens": 0}

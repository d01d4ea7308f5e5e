"""Requests, sequences and outputs of an engine, and the checks that need nothing else: no torch, no thread, no HTTP.

A `GenerationRequest` is one sample to be made, a `SequenceState` its progress, a `RequestOutput` the tokens so far. Versions that
read "lineage.step" only ever rise.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from gcore.errors import EngineError
from gcore.types import Version

EndKind = Literal["stop", "length", "abort"]
PauseMode = Literal["abort", "retract", "in_place"]
ABORTED = "aborted on request"


class NumberedRequest(Protocol):
    """A request to any engine core."""

    @property
    def number(self) -> int:
        """The engine's own name for it, unique in the engine's life."""
        ...

    @property
    def rid(self) -> str:
        """The client's name for it."""
        ...

    @property
    def prompt(self) -> tuple[int, ...]:
        """Its tokens."""
        ...


class NumberedOutput(Protocol):
    """Output of an engine core for one request, by its number."""

    @property
    def number(self) -> int:
        """Of its request."""
        ...

    @property
    def ending(self) -> Finish | None:
        """None while more is to come."""
        ...


@dataclass(frozen=True, slots=True)
class RequestSampling:
    """How the tokens of a task are drawn. `seed` keys its Philox stream (128 bits); temperature 0 is greedy."""

    max_new_tokens: int
    seed: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the sample, the model's own end tokens among them unless they are to be ignored."""
    top_logprobs: int = 0
    """How many of the likeliest tokens are told at each position of the output (and of the prompt, where asked for)."""
    named_tokens: tuple[int, ...] = ()
    """Tokens whose log-probabilities are told at each of these positions too, whether they are likely or not."""
    prompt_logprobs_from: int | None = None
    """Log-probabilities of the prompt's tokens are told from this position on; None: of none."""


Top = tuple[tuple[float, int], ...]
"""The likeliest tokens of one position, best first: (log-probability, token)."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """What the model thinks of a prompt's tokens from position `start` on, each given those before it.

    `values[i]` belongs to token `start + i`: of the untempered softmax; None for the prompt's very first token, before
    which there is nothing. `tops` has the likeliest tokens of the same positions, `named` the log-probabilities of the
    named ones; each is empty when none were asked for.
    """

    start: int
    values: tuple[float | None, ...]
    tops: tuple[Top | None, ...]
    named: tuple[tuple[float, ...] | None, ...] = ()


def prompt_key(prompt: Sequence[int]) -> bytes:
    """Names the prompt's content."""
    return array("q", prompt).tobytes()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sample to be made. `number` is the engine's own name for it, unique in its life; `rid` the client's."""

    number: int
    rid: str
    prompt: tuple[int, ...]
    sampling: RequestSampling
    streams: bool = False
    """Whether every token is delivered as soon as it is there."""
    key: bytes = field(default=b"", repr=False, compare=False)
    """Names the prompt's content; samples of one prompt share it. Bytes, because they remember their hash and tuples do not."""

    def __post_init__(self) -> None:
        if not self.key:
            object.__setattr__(self, "key", prompt_key(self.prompt))


@dataclass(frozen=True, slots=True)
class OutputSpan:
    """Tokens [start, end) were made with the weights called `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Reason for which a sample ended. `matched`: the stop string or token; `message`: why it was aborted."""

    kind: EndKind
    matched: str | int | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What a task has so far. `ending` is None while it goes on (only tasks that stream hear of that)."""

    number: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[OutputSpan, ...]
    cached_tokens: int
    ending: Finish | None
    tops: tuple[Top, ...] = ()
    """By output token, when `top_logprobs` were asked for."""
    named: tuple[tuple[float, ...], ...] = ()
    """By output token: log-probabilities of the `named_tokens`, when there are any."""
    prompt_logprobs: PromptLogprobs | None = None
    retractions: int = 0
    """How often it had to give its row back."""


@dataclass(frozen=True, slots=True)
class SpanStart:
    """The beginning of a span."""

    version: str
    start: int


@dataclass(slots=True)
class SequenceState:
    """A task and how far it has come, between joining, giving its row back, and the end.

    While it runs, its tokens stand in its row; `tokens` and `logprobs` are what it had when it joined.
    """

    task: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    marks: list[SpanStart] = field(default_factory=list)
    cached_tokens: int = 0
    tops: list[Top] = field(default_factory=list)
    named: list[tuple[float, ...]] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    retractions: int = 0

    def mark(self, version: str, count: int) -> None:
        """From token `count` on, `version` makes them."""
        while self.marks and self.marks[-1].start >= count:
            self.marks.pop()
        if not self.marks or self.marks[-1].version != version:
            self.marks.append(SpanStart(version, count))

    def drop_last(self) -> None:
        """Its last token is not to be told."""
        del self.tokens[-1], self.logprobs[-1], self.tops[len(self.tokens) :], self.named[len(self.tokens) :]

    def never_joined(self, version: str) -> tuple[OutputSpan, ...]:
        """Spans of what ended before it began: none of the tokens by `version`."""
        return (OutputSpan(version, 0, 0),)

    def spans(self, count: int) -> tuple[OutputSpan, ...]:
        """The spans of its first `count` tokens; never empty once it has joined: at least one, of no tokens."""
        marks = [m for i, m in enumerate(self.marks) if m.start < count or i == 0]
        ends = [m.start for m in marks[1:]] + [count]
        return tuple(OutputSpan(m.version, m.start, end) for m, end in zip(marks, ends, strict=True))


def check_token_ids(tokens: Sequence[int], vocabulary: int, what: str = "the prompt") -> None:
    """Raises EngineError for no tokens at all, and for a token that the vocabulary does not have."""
    if not tokens:
        raise EngineError(f"{what} has no tokens")
    wrong = next((token for token in (min(tokens), max(tokens)) if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise EngineError(f"token id {wrong} is not in the vocabulary of {vocabulary}")


def is_older(offered: str, served: str) -> bool:
    """Whether `offered` is an older version than `served`; False unless both read "lineage.step"."""
    try:
        return Version.parse(offered) < Version.parse(served)
    except ValueError:
        return False


def check_version(offered: str | None, served: str) -> None:
    """Raises EngineError for a version older than the served one."""
    if offered is not None and is_older(offered, served):
        raise EngineError(f"version {offered} is older than {served}, which is served")

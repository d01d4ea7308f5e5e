"""Requests, sequences and outputs of an engine, and the checks that need neither torch nor threads nor HTTP.

A `GenerationRequest` asks for one sample, a `SequenceState` is its progress, a `RequestOutput` has the tokens so far.
Versions of the form "lineage.step" never decrease.
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
        """The engine's own number of the request, unique for the life of the engine."""
        ...

    @property
    def rid(self) -> str:
        """The client's name of the request."""
        ...

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens of its prompt."""
        ...


class NumberedOutput(Protocol):
    """Output of an engine core for one request."""

    @property
    def number(self) -> int:
        """The number of its request."""
        ...

    @property
    def ending(self) -> Finish | None:
        """How it ended; None while more output will follow."""
        ...


@dataclass(frozen=True, slots=True)
class RequestSampling:
    """Sampling parameters of a request. `seed` is the key of its Philox stream (128 bits). Temperature 0 is greedy."""

    max_new_tokens: int
    seed: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the sample, including the model's own end tokens unless they are ignored."""
    top_logprobs: int = 0
    """Number of most likely tokens reported at each position of the output, and of the prompt if requested."""
    named_tokens: tuple[int, ...] = ()
    """Tokens whose log-probabilities are also reported at each of these positions."""
    prompt_logprobs_from: int | None = None
    """First prompt position whose log-probability is reported; None: no prompt position."""


Top = tuple[tuple[float, int], ...]
"""The most likely tokens of one position, best first: (log-probability, token)."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens from position `start` on, each given the preceding tokens.

    `values[i]` belongs to token `start + i`, from the softmax at temperature 1; None for the first token of the prompt.
    `tops` has the most likely tokens of the same positions, `named` the log-probabilities of the named tokens; each is
    empty if not requested.
    """

    start: int
    values: tuple[float | None, ...]
    tops: tuple[Top | None, ...]
    named: tuple[tuple[float, ...] | None, ...] = ()


def prompt_key(prompt: Sequence[int]) -> bytes:
    """Return a digest of the prompt's content."""
    return array("q", prompt).tobytes()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for one sample. `number`: the engine's own number, unique for its life. `rid`: the client's name."""

    number: int
    rid: str
    prompt: tuple[int, ...]
    sampling: RequestSampling
    streams: bool = False
    """Whether every token is delivered as soon as it is sampled."""
    key: bytes = field(default=b"", repr=False, compare=False)
    """Digest of the prompt's content, the same for all samples of one prompt. Bytes cache their hash; tuples do not."""

    def __post_init__(self) -> None:
        if not self.key:
            object.__setattr__(self, "key", prompt_key(self.prompt))


@dataclass(frozen=True, slots=True)
class OutputSpan:
    """Tokens [start, end) were generated with the weights `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sample ended. `matched`: the stop string or token. `message`: why it was aborted."""

    kind: EndKind
    matched: str | int | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The output of a request so far. `ending` is None while it continues (only reported for streaming requests)."""

    number: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[OutputSpan, ...]
    cached_tokens: int
    ending: Finish | None
    tops: tuple[Top, ...] = ()
    """By output token, if `top_logprobs` were requested."""
    named: tuple[tuple[float, ...], ...] = ()
    """By output token: log-probabilities of the `named_tokens`, if there are any."""
    prompt_logprobs: PromptLogprobs | None = None
    retractions: int = 0
    """How often the sequence was preempted."""


@dataclass(frozen=True, slots=True)
class SpanStart:
    """The beginning of a span."""

    version: str
    start: int


@dataclass(slots=True)
class SequenceState:
    """A request and its progress when it joins, is preempted, or ends.

    While it runs, the row has its tokens; `tokens` and `logprobs` are those from before it joined.
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
        """Record that `version` generates the tokens from `count` on."""
        while self.marks and self.marks[-1].start >= count:
            self.marks.pop()
        if not self.marks or self.marks[-1].version != version:
            self.marks.append(SpanStart(version, count))

    def drop_last(self) -> None:
        """Remove its last token, which must not be reported."""
        del self.tokens[-1], self.logprobs[-1], self.tops[len(self.tokens) :], self.named[len(self.tokens) :]

    def never_joined(self, version: str) -> tuple[OutputSpan, ...]:
        """Return the spans of a request that ended before it started: no tokens, by `version`."""
        return (OutputSpan(version, 0, 0),)

    def spans(self, count: int) -> tuple[OutputSpan, ...]:
        """Return the spans of its first `count` tokens. Never empty after it has joined: at least one span without
        tokens."""
        marks = [m for i, m in enumerate(self.marks) if m.start < count or i == 0]
        ends = [m.start for m in marks[1:]] + [count]
        return tuple(OutputSpan(m.version, m.start, end) for m, end in zip(marks, ends, strict=True))


def check_token_ids(tokens: Sequence[int], vocabulary: int, what: str = "the prompt") -> None:
    """Raises EngineError for an empty list, and for a token outside the vocabulary."""
    if not tokens:
        raise EngineError(f"{what} has no tokens")
    wrong = next((token for token in (min(tokens), max(tokens)) if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise EngineError(f"token id {wrong} is not in the vocabulary of {vocabulary}")


def is_older(offered: str, served: str) -> bool:
    """Whether `offered` is an older version than `served`; False unless both have the form "lineage.step"."""
    try:
        return Version.parse(offered) < Version.parse(served)
    except ValueError:
        return False


def check_version(offered: str | None, served: str) -> None:
    """Raises EngineError for a version older than the served one."""
    if offered is not None and is_older(offered, served):
        raise EngineError(f"version {offered} is older than the served version {served}")

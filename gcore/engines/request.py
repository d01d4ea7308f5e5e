"""Requests, sequences and outputs of an engine, and the checks that need neither torch nor threads nor HTTP.

A `GenerationRequest` asks for one sample, a `SequenceState` is its progress in the engine, and a `RequestOutput` has
the tokens so far. Weights are named by a version; versions of the form "lineage.step" never decrease.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from gcore.errors import EngineError
from gcore.types import Version

EndKind = Literal["stop", "length", "abort"]
PauseMode = Literal["abort", "retract", "in_place"]
ABORTED = "aborted on request"


class NumberedRequest(Protocol):
    """A request to an engine core: generation or classification."""

    @property
    def number(self) -> int:
        """Number that the engine gave the request; unique while the engine lives."""
        ...

    @property
    def rid(self) -> str:
        """Request ID that the client gave."""
        ...

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token IDs of the prompt."""
        ...


class NumberedOutput(Protocol):
    """Output of an engine core for one request."""

    @property
    def number(self) -> int:
        """Number of the request (`NumberedRequest.number`)."""
        ...

    @property
    def ending(self) -> Finish | None:
        """How the request ended; None while more output will follow."""
        ...


@dataclass(frozen=True, slots=True)
class RequestSampling:
    """Sampling parameters of a request.

    `seed`: 128-bit key of the request's own Philox random stream. `temperature` 0: greedy.
    """

    max_new_tokens: int
    seed: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the sample, including the model's own end tokens unless the client ignores them."""
    top_logprobs: int = 0
    """Number of most likely tokens reported at each position of the output, and of the prompt if requested."""
    named_tokens: tuple[int, ...] = ()
    """Tokens whose log-probabilities are reported at each position, whether or not they are likely."""
    prompt_logprobs_from: int | None = None
    """First prompt position whose log-probability is reported; None: no prompt position."""


Top = tuple[tuple[float, int], ...]
"""The most likely tokens of one position, best first: (log-probability, token)."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens from position `start` on, each given the preceding tokens.

    `values[i]` belongs to token `start + i`, from the softmax at temperature 1; None for the first token of the prompt.
    `tops` has the most likely tokens of the same positions, `named` the log-probabilities of
    `RequestSampling.named_tokens`; each is empty if not requested.
    """

    start: int
    values: tuple[float | None, ...]
    tops: tuple[Top | None, ...]
    named: tuple[tuple[float, ...] | None, ...] = ()


def prompt_key(prompt: Sequence[int]) -> bytes:
    """Return bytes that identify the prompt's content, for use as a dictionary key: its tokens as 64-bit integers."""
    return array("q", prompt).tobytes()


class PicturesOfPrompt(Protocol):
    """The pictures of a prompt, as the engine core keeps them (`gcore.engines.pictures.PreparedPictures`)."""

    shift: int

    @property
    def key(self) -> bytes:
        """Bytes that identify the pictures."""
        ...


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for one sample. `number`: given by the engine, unique while it lives. `rid`: given by the client."""

    number: int
    rid: str
    prompt: tuple[int, ...]
    sampling: RequestSampling
    streams: bool = False
    """Whether every token is delivered as soon as it is sampled."""
    adapter: int = 0
    """Number of the adapter (`gcore.models.row_adapters`); 0: the policy."""
    pictures: PicturesOfPrompt | None = field(default=None, repr=False, compare=False)
    """The prompt's pictures; its tokens have all their placeholders. None: it has none."""
    key: bytes = field(default=b"", repr=False, compare=False)
    """`key_of` the prompt, the same for all samples of one prompt. Bytes cache their hash; tuples do not."""

    def __post_init__(self) -> None:
        if not self.key:
            object.__setattr__(self, "key", self.key_of(self.prompt))

    def key_of(self, tokens: Sequence[int]) -> bytes:
        """Return bytes that identify `tokens` with this prompt's pictures: equal placeholders may mean other pictures."""
        return prompt_key(tokens) + (b"" if self.pictures is None else self.pictures.key)


@dataclass(frozen=True, slots=True)
class OutputSpan:
    """Says that output tokens [start, end) were generated with the weights `version`."""

    version: str
    start: int
    end: int


def spans_of(versions: Iterable[str], last: str) -> tuple[OutputSpan, ...]:
    """Spans of outputs that were generated with these `versions`, one each; one empty span of `last` if there are none."""
    found: list[OutputSpan] = []
    for place, version in enumerate(versions):
        start = found.pop().start if found and found[-1].version == version else place
        found.append(OutputSpan(version, start, place + 1))
    return tuple(found) or (OutputSpan(last, 0, 0),)


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sample ended. `matched`: the stop string or end token that it reached. `message`: why it was aborted."""

    kind: EndKind
    matched: str | int | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The output of a request so far.

    `spans`: which weights generated which tokens. `cached_tokens`: prompt tokens found in the prefix cache. `ending`:
    None while generation continues, which is reported only for streaming requests.
    """

    number: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[OutputSpan, ...]
    cached_tokens: int
    ending: Finish | None
    tops: tuple[Top, ...] = ()
    """The most likely tokens at each output position, if `top_logprobs` were requested."""
    named: tuple[tuple[float, ...], ...] = ()
    """Log-probabilities of the `named_tokens` at each output position, if there are any."""
    prompt_logprobs: PromptLogprobs | None = None
    retractions: int = 0
    """How often the sequence was preempted."""


@dataclass(frozen=True, slots=True)
class SpanStart:
    """Says that weights `version` generate the output tokens from index `start` on."""

    version: str
    start: int


@dataclass(slots=True)
class SequenceState:
    """A request and its progress, updated when it joins the running batch, is preempted, or ends.

    While it runs, the batch's row has its new tokens; `tokens` and `logprobs` are those from before it joined. `marks`:
    which weights generate its tokens. `retractions`: how often it was preempted.
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
        """Record that weights `version` generate the output tokens from index `count` on."""
        while self.marks and self.marks[-1].start >= count:
            self.marks.pop()
        if not self.marks or self.marks[-1].version != version:
            self.marks.append(SpanStart(version, count))

    def drop_last(self) -> None:
        """Remove the last token, which must not be reported."""
        del self.tokens[-1], self.logprobs[-1], self.tops[len(self.tokens) :], self.named[len(self.tokens) :]

    def output(self, version: str, ending: Finish | None) -> RequestOutput:
        """Return what the request has so far. `version`: served weights, reported if it never joined the batch."""
        return RequestOutput(
            self.task.number,
            tuple(self.tokens),
            tuple(self.logprobs),
            self.spans(len(self.tokens)) if self.marks else self.never_joined(version),
            self.cached_tokens,
            ending,
            tuple(self.tops),
            tuple(self.named),
            self.prompt_logprobs,
            self.retractions,
        )

    def never_joined(self, version: str) -> tuple[OutputSpan, ...]:
        """Return the spans of a request that ended while it waited: one span without tokens, of weights `version`."""
        return (OutputSpan(version, 0, 0),)

    def spans(self, count: int) -> tuple[OutputSpan, ...]:
        """Return which weights generated the first `count` output tokens.

        Never empty after the request has joined the batch: without tokens it is one empty span.
        """
        marks = [m for i, m in enumerate(self.marks) if m.start < count or i == 0]
        ends = [m.start for m in marks[1:]] + [count]
        return tuple(OutputSpan(m.version, m.start, end) for m, end in zip(marks, ends, strict=True))


def check_token_ids(tokens: Sequence[int], vocabulary: int, what: str = "the prompt") -> None:
    """Raise EngineError if `tokens` is empty or has an ID outside [0, `vocabulary`). `what`: subject of the error."""
    if not tokens:
        raise EngineError(f"{what} has no tokens")
    wrong = next((token for token in (min(tokens), max(tokens)) if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise EngineError(f"token id {wrong} is not in the vocabulary of {vocabulary}")


def is_older(offered: str, served: str) -> bool:
    """Whether weights `offered` are older than `served`. False unless both versions have the form "lineage.step"."""
    try:
        return Version.parse(offered) < Version.parse(served)
    except ValueError:
        return False


def check_version(offered: str | None, served: str) -> None:
    """Raise EngineError if weights `offered` are older than the `served` ones. None: not named, accepted."""
    if offered is not None and is_older(offered, served):
        raise EngineError(f"version {offered} is older than the served version {served}")

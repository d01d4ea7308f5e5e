"""Responses of an emulated engine: random tokens from the request's seed, with lengths from the timing model (`law`).

The same request gets the same response on every engine at any time, as from a real engine that honours seeds. A
response is a function of seed and prompt, and its length also of the step of the weights. A greedy response is a
function of the prompt and the version of the weights. Tokens are ordinary ones of the model's vocabulary without
meaning. A response shorter than its maximum ends with an end token, if there is one. Log-probabilities are random too,
as if sampled from a distribution with a few nats of entropy.

The length of a response depends on its prompt and its first tokens together. An engine may continue a response that
another engine began; the tokens so far are then the end of the prompt. The continued response ends at the same total
length as it would have on the first engine. The engine detects a continuation in two ways: fewer tokens are requested
than the job's longest response has, and two of the first tokens (marks) are a function of the question and the first.

A judge's response consists of such tokens too, and ends with the best or the worst verdict. The question and the first
tokens determine which, in the same way as the length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gcore.config.reward import VerdictSpec
from gcore.data.tokenizer import end_tokens
from gcore.engines.detokenizer import Detokenizer
from gcore.engines.emulated.law import ResponseLengths, TimingModel, named_generator
from gcore.engines.request import Finish, RequestSampling, prompt_key
from gcore.errors import DataError, GcoreError
from gcore.models.checks import require_config
from gcore.reward.judges.parsers import find_parser

MOST_ORDINARY = 4096
"""Maximum number of distinct tokens in responses: the first ones of the vocabulary that have a text."""

MEAN_LOGPROB = -0.8

HEAD, MARKS = 4, 2
"""Number of first tokens that determine the length of a response, and how many of them (the marks) are a function of
the question and the first token.
"""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What emulated responses need of a model: vocabulary size, tokens with a text, end tokens, context length."""

    size: int
    ordinary: tuple[int, ...]
    end_tokens: tuple[int, ...]
    context: int

    @classmethod
    def load(cls, folder: Path, text: Detokenizer | None) -> Vocabulary:
        """Load from a model's folder. Raises DataError."""
        config = require_config(folder)
        written = config.get("text_config")  # of a vision-language model
        config = config | written if isinstance(written, dict) else config
        size = config.get("vocab_size")
        if not isinstance(size, int):
            raise DataError("the model's configuration has no vocab_size", where=str(folder / "config.json"))
        ends = end_tokens(folder, config, lambda token: None if text is None else text.token_id(token))
        ordinary: list[int] = []
        for token in range(size):
            if token not in ends and (text is None or text.decode([token], skip_special_tokens=True)):
                ordinary.append(token)
            if len(ordinary) == MOST_ORDINARY:
                break
        if not ordinary:
            raise DataError("no token of the model's vocabulary has a text", where=str(folder))
        context = config.get("max_position_embeddings")
        return cls(size, tuple(ordinary), ends, int(context) if isinstance(context, int) else 32_768)


@dataclass(frozen=True, slots=True)
class EmulatedResponse:
    """A complete response, and how it ends."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ending: Finish
    restarts: bool = False
    """Whether it begins again if it is preempted, as a picture does."""


@dataclass(frozen=True, slots=True)
class EmulatedVerdict:
    """The best and the worst verdict with which a judge's response may end, as tokens."""

    best: tuple[int, ...]
    worst: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ResponseModel:
    """What determines the responses of an emulated engine.

    `longest`: maximum tokens of a response that the job requests, needed to detect continued responses; None: these are
    not detected. `verdict`: verdicts of a judge; None: the engine serves the policy.
    """

    law: TimingModel
    words: Vocabulary
    longest: int | None = None
    verdict: EmulatedVerdict | None = None

    @property
    def lengths(self) -> ResponseLengths:
        """The distribution of response lengths."""
        return (self.law.of_policy if self.verdict is None else self.law.of_judges).lengths


def make_response(
    voice: ResponseModel, prompt: Sequence[int], sampling: RequestSampling, version: str, step: int = 0
) -> EmulatedResponse:
    """Generate the complete response to a prompt.

    `version`: that of the weights, which determines greedy responses. `step`: that of the weights, which determines
    lengths.
    """
    words, most = voice.words, sampling.max_new_tokens
    made = _made_before(voice, prompt, most)
    whole = len(prompt) - made
    draws = _draws(prompt, sampling, version)
    question = prompt_key(prompt[:whole]).hex()
    head = _head(words, question, prompt[whole:], draws)
    ends = tuple(token for token in sampling.stop_token_ids if 0 <= token < words.size)
    said = _said(voice, question, head)
    length = _length(voice, question, head, step)
    if said:  # it ends with its verdict if there is room
        length = min(max(length, HEAD + len(said) + len(ends[:1])), made + most - bool(ends))
    count = min(max(length - made, sampling.min_new_tokens, 1), most) if ends else most
    stops = bool(ends) and max(length - made, sampling.min_new_tokens) < most
    tokens = [*head[made:], *_drawn(words, draws, max(count - len(head[made:]), 0))][:count]
    tail = (*said, ends[0]) if stops else said
    if tail:
        behind = tail[-count:]
        tokens[len(tokens) - len(behind) :] = behind
    spread = -MEAN_LOGPROB * draws.standard_exponential(count, dtype=np.float32)
    logprobs = tuple(float(-value) for value in spread)
    ending = Finish("stop", matched=tokens[-1]) if stops else Finish("length")
    return EmulatedResponse(tuple(tokens), logprobs, ending)


def random_blob(size: int, prompt: Sequence[int], seed: int | None) -> bytes:
    """Generate the bytes of a response's blob; the same for the same request."""
    return named_generator("blob", seed, prompt_key(prompt).hex()).bytes(size)


def _made_before(voice: ResponseModel, prompt: Sequence[int], most: int) -> int:
    """Return how many tokens at the end of the prompt are the beginning of a response that another engine generated."""
    made = (voice.longest or 0) - most
    if not 0 < made < len(prompt):
        return 0
    begun = prompt[len(prompt) - made :]
    marks = _marks(voice.words, prompt_key(prompt[: len(prompt) - made]).hex(), begun[0])
    return made if tuple(begun[1 : 1 + len(marks)]) == marks[: len(begun) - 1] else 0


def _draws(prompt: Sequence[int], sampling: RequestSampling, version: str) -> np.random.Generator:
    about = prompt_key(prompt).hex()
    if sampling.temperature == 0.0:
        return named_generator("greedy", about, version)
    return named_generator("sample", sampling.seed, about)


def _drawn(words: Vocabulary, draws: np.random.Generator, count: int) -> list[int]:
    return [words.ordinary[i] for i in draws.integers(len(words.ordinary), size=count)]


def _marks(words: Vocabulary, question: str, first: int) -> tuple[int, ...]:
    """Return the marks: tokens after a response's first token, by which an engine recognises a continued response."""
    return tuple(_drawn(words, named_generator("marks", question, first), MARKS))


def _head(words: Vocabulary, question: str, begun: Sequence[int], draws: np.random.Generator) -> tuple[int, ...]:
    """Return the first `HEAD` tokens of a response: those in `begun`, and random ones."""
    first, *last = _drawn(words, draws, HEAD - MARKS)
    first = begun[0] if begun else first
    head = (first, *_marks(words, question, first), *last)
    return (*begun[:HEAD], *head[len(begun) :])


def _said(voice: ResponseModel, question: str, head: Sequence[int]) -> tuple[int, ...]:
    """Choose a judge's verdict from the question and the first tokens; empty for the policy."""
    if voice.verdict is None:
        return ()
    positive = named_generator("verdict", voice.law.seed, question, *head).random() < voice.law.judge_positive
    return voice.verdict.best if positive else voice.verdict.worst


def _length(voice: ResponseModel, question: str, head: Sequence[int], step: int) -> int:
    """Sample a response's length in tokens (log-normal). Lengths of responses to one prompt are correlated."""
    lengths, seed = voice.lengths, voice.law.seed
    common = float(named_generator("length", seed, question).standard_normal())
    own = float(named_generator("own length", seed, question, *head).standard_normal())
    deviation = math.sqrt(lengths.likeness) * common + math.sqrt(1.0 - lengths.likeness) * own
    return max(1, round(lengths.median_at(step) * math.exp(lengths.spread * deviation)))


BETWEEN = (" ", "\n", "", ". ")
"""Separators that are tried before a verdict, so that it is not read as part of the preceding word or number."""

TRIED_BEHIND = 64
"""Number of meaningless tokens after each of which the verdict parser must find a verdict."""


def find_emulated_verdict(
    judge: str, spec: VerdictSpec, words: Vocabulary, text: Detokenizer | None
) -> EmulatedVerdict:
    """Find the best and the worst verdict of a judge, as tokens that the job's verdict parser accepts.

    Candidates come from the spec's section `verdict`: its words, its bounds, a number or a word in a JSON object, the
    settings of a custom parser. Each is encoded after some meaningless tokens, and parsed by the parser itself.
    `judge`: name, for errors. Raises DataError if the parser accepts none, for a model without a tokenizer, and for an
    unknown parser.
    """
    if text is None:
        raise DataError(
            f"the model of judge {judge!r} has no tokenizer.json, which is needed because verdicts are text"
        )
    parse = find_parser(spec.parser)
    for between in BETWEEN:
        found: dict[tuple[int, ...], float] = {}
        for body in _bodies(spec):
            tokens = _spelt(f"{between}{spec.after or ''}{between if spec.after else ''}{body}", text)
            if tokens is None:
                continue
            try:
                values = {
                    parse(text.decode((*words.ordinary[:2], last, *tokens), skip_special_tokens=True), spec)
                    for last in words.ordinary[:TRIED_BEHIND]
                }
            except GcoreError:
                continue
            if len(values) == 1:
                found[tokens] = values.pop()
        if found:
            return EmulatedVerdict(max(found, key=found.__getitem__), min(found, key=found.__getitem__))
    raise DataError(
        f"parser {spec.parser!r} accepts no verdict that judge {judge!r} can express in its tokens",
        fix="Emulated judges support the parsers words, number and json; use a tokenizer with the needed characters",
    )


def _bodies(spec: VerdictSpec) -> Iterator[str]:
    """Yield the texts that may be verdicts according to the section `verdict` of the spec."""
    yield from spec.words
    numbers = [f"{bound:g}" for bound in (spec.most, spec.least) if math.isfinite(bound)]
    yield from numbers
    for value in (*map(json.dumps, spec.words), *numbers):
        yield f"{{{json.dumps(spec.field)}: {value}}}"
    yield from (value for value in spec.options.values() if isinstance(value, str))


def _spelt(said: str, text: Detokenizer) -> tuple[int, ...] | None:
    """Return tokens that decode to the text `said`, without tokens that the tokenizer adds by itself; None if
    impossible.
    """
    try:
        encoded = text.encode(said)
    except Exception:  # noqa: BLE001 - the tokenizers library raises it bare for a character that it has no token for
        return None
    tokens = tuple(t for t in encoded if text.decode((t,), skip_special_tokens=True))
    back = text.decode(tokens, skip_special_tokens=True)
    return tokens if tokens and back.strip() == said.strip() else None

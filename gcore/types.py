"""The vocabulary as types: what a prompt, a sample, a group, a version and a token are.

Frozen and small. Nothing here knows the store, an engine or torch.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

LARGEST_REWARD = 3.4e38
"""Rewards travel as float32."""

_set = object.__setattr__  # of frozen classes that make their fields themselves
_NO_FIELDS = (None,) * 6

ServingPool = Literal["rollout", "reward"]
Pool = Literal[ServingPool, "train"]
"""What slots do, and the role of a worker on them."""


class PromptRef(NamedTuple):
    """The identity of a prompt, for ever: which epoch of the data, which shard, which place in that shard's order."""

    data_epoch: int
    shard: int
    seq: int

    def __str__(self) -> str:
        return f"{self.data_epoch}/{self.shard}/{self.seq}"

    @classmethod
    def parse(cls, text: str) -> PromptRef:
        """Inverse of `str`; raises ValueError on anything else."""
        epoch, shard, seq = text.split("/")
        return cls(int(epoch), int(shard), int(seq))


class Version(NamedTuple):
    """A policy version: the lineage and the step of the last commit whose weights are meant."""

    lineage: int
    step: int

    def __str__(self) -> str:
        return f"{self.lineage}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """Inverse of `str`; raises ValueError on anything else."""
        lineage, step = text.split(".")
        return cls(int(lineage), int(step))


CHECKPOINTS = "checkpoints"
"""The folder of all checkpoints, in a run's folder."""


def checkpoint_file(version: Version) -> str:
    """Where the checkpoint made at `version` lies, below the run's folder."""
    return f"{CHECKPOINTS}/{version.lineage}-{version.step}"


class Token(NamedTuple):
    """Names one attempt at one step, for ranks and holders. A higher attempt of the same step replaces a lower."""

    lineage: int
    step: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.lineage}.{self.step}.{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> Token:
        """Inverse of `str`; raises ValueError on anything else."""
        lineage, step, attempt = text.split(".")
        return cls(int(lineage), int(step), int(attempt))


OutcomeKind = Literal["trained", "filtered", "failed"]


FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a prompt ref ended. Terminal: a ref has exactly one along the final lineage."""

    kind: OutcomeKind
    reason: str = ""


class TextPart(NamedTuple):
    """A piece of a prompt as text."""

    text: str


ContentPart = TextPart
"""A piece of a prompt. Only the renderer, the batches of the trainer and the engine's dialect look inside one."""


@dataclass(frozen=True, slots=True, init=False)
class Prompt:
    """One entry of the dataset, tokenized.

    `content` is what the model is shown (the template applied); `fields` is the entry's JSON object, from which rewards
    take the answer.
    """

    ref: PromptRef
    content: tuple[ContentPart, ...]
    token_ids: tuple[int, ...]
    fields: dict[str, Any]
    source: str
    """The name of the source it comes from."""

    __match_args__ = ("ref", "text", "token_ids", "fields", "source")

    def __init__(
        self,
        ref: PromptRef,
        text: str | None = None,
        token_ids: tuple[int, ...] | None = None,
        fields: dict[str, Any] | None = None,
        source: str = "",
        *,
        content: tuple[ContentPart, ...] | None = None,
    ) -> None:
        """`text`: in place of `content`, which is then this one part. Raises TypeError."""
        if text is not None:
            content = (TextPart(text),)
        if content is None or token_ids is None or fields is None:
            raise TypeError("a Prompt needs text or content, token_ids and fields")
        _set(self, "ref", ref)
        _set(self, "content", content)
        _set(self, "token_ids", token_ids)
        _set(self, "fields", fields)
        _set(self, "source", source)

    @property
    def text(self) -> str:
        """All its text, as one."""
        return "".join(part.text for part in self.content)


def entry_value(entry: Mapping[str, Any], path: str) -> Any:
    """The value of field `path` of a data entry: a field of that very name, or else, where it has dots, a field of a nested object.

    None if there is none: of {"a": {"b": "2"}} the path a.b is "2".
    """
    if path in entry:
        return entry[path]
    name, dot, rest = path.partition(".")
    inner = entry.get(name) if dot else None
    return entry_value(inner, rest) if isinstance(inner, Mapping) else None


def entry_text(entry: Mapping[str, Any], path: str) -> str:
    """The value of a field as text, for people and demonstrations: text as it is, anything else as JSON writes it, nothing for null."""
    value = entry_value(entry, path)
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


Range = tuple[int, int]
"""[start, end) of a response's tokens or characters."""


def range_problem(ranges: Sequence[Range], length: int) -> str:
    """Why `ranges` are not ascending parts of [0, length), each of at least one and apart from the next; or nothing."""
    end = -1
    for number, (first, last) in enumerate(ranges):
        if not (end < first < last <= length):
            return f"range {number} is [{first}, {last}) of {length}; ranges ascend, and do not touch"
        end = last
    return ""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of a response were made with `version`."""

    version: Version
    start: int
    end: int


class TokenOutput(NamedTuple):
    """A response made of tokens.

    `logprobs[i]` is the engine's log-probability of `token_ids[i]` under the temperature-scaled, untruncated softmax.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    spans: tuple[VersionSpan, ...]
    observed: tuple[Range, ...] = ()
    """Of `token_ids`: what the policy did not make but was told, by a tool or an environment, between its turns. Ascending, apart
    from each other, none empty. `logprobs` are 0 there, and a span holds them like all others."""
    observed_text: tuple[Range, ...] = ()
    """The same in `text`, by characters, for people and rewards."""


@dataclass(frozen=True, slots=True, init=False)
class Sample:
    """One response to a prompt: what was made (`output`), and what became of it."""

    output: TokenOutput
    finish_reason: FinishReason
    reward: float
    reward_parts: tuple[tuple[str, float], ...]
    masked: bool
    """Whether its tokens are left out of the loss; its reward still counts for the group's baseline."""
    prompt_ids: tuple[int, ...] | None
    """What stands in front of it, where that is not its prompt's own tokens: an agent's own words. Only until it is in a group
    (`gcore.rollout.postprocess`)."""

    __match_args__ = (
        *("token_ids", "logprobs", "text", "finish_reason", "spans", "reward", "reward_parts", "masked"),
        *("observed", "observed_text", "prompt_ids"),
    )

    def __init__(
        self,
        token_ids: tuple[int, ...] | None = None,
        logprobs: tuple[float, ...] | None = None,
        text: str | None = None,
        finish_reason: FinishReason | None = None,
        spans: tuple[VersionSpan, ...] | None = None,
        reward: float = 0.0,
        reward_parts: tuple[tuple[str, float], ...] = (),
        masked: bool = False,
        observed: tuple[Range, ...] | None = None,
        observed_text: tuple[Range, ...] | None = None,
        prompt_ids: tuple[int, ...] | None = None,
        *,
        output: TokenOutput | None = None,
    ) -> None:
        """Of an output, or of the fields of a `TokenOutput`; of both, the fields replace the output's. Raises TypeError."""
        if output is None:
            if token_ids is None or logprobs is None or text is None or spans is None:
                raise TypeError("a Sample needs output, or token_ids, logprobs, text and spans")
            output = TokenOutput(token_ids, logprobs, text, spans, observed or (), observed_text or ())
        else:
            given = (token_ids, logprobs, text, spans, observed, observed_text)
            if given != _NO_FIELDS:
                output = TokenOutput._make(old if new is None else new for old, new in zip(output, given, strict=True))
        if finish_reason is None:
            raise TypeError("a Sample needs finish_reason")
        _set(self, "output", output)
        _set(self, "finish_reason", finish_reason)
        _set(self, "reward", reward)
        _set(self, "reward_parts", reward_parts)
        _set(self, "masked", masked)
        _set(self, "prompt_ids", prompt_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of its output."""
        return self.output.token_ids

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Of its output."""
        return self.output.logprobs

    @property
    def text(self) -> str:
        """Of its output."""
        return self.output.text

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """Of its output."""
        return self.output.spans

    @property
    def observed(self) -> tuple[Range, ...]:
        """Of its output."""
        return self.output.observed

    @property
    def observed_text(self) -> tuple[Range, ...]:
        """Of its output."""
        return self.output.observed_text

    @property
    def own_tokens(self) -> int:
        """How many tokens the policy made: those that count, wherever tokens of responses are counted."""
        return len(self.token_ids) - sum(end - start for start, end in self.observed)

    @property
    def oldest(self) -> Version:
        """The oldest policy version that made a token of it."""
        return min(span.version for span in self.spans)

    def digest(self) -> bytes:
        """SHA-256 over what training uses: token ids, log-probabilities, reward, whether it is masked, and what of it was
        observed, if anything was (little-endian)."""
        h = hashlib.sha256()
        n = len(self.token_ids)
        h.update(struct.pack(f"<I{n}i{n}ff?", n, *self.token_ids, *self.logprobs, self.reward, self.masked))
        h.update(struct.pack(f"<{2 * len(self.observed)}i", *(edge for range_ in self.observed for edge in range_)))
        return h.digest()


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one prompt, as its holder keeps them."""

    ref: PromptRef
    prompt_ids: tuple[int, ...]
    samples: tuple[Sample, ...]
    source: str = ""
    """The name of the source its prompt comes from."""
    temperature: float = 1.0
    """At which it was sampled; the trainer divides its logits by it."""
    baseline: float | None = None
    """What a flow found its samples' rewards should be held against, such as the greedy answer's reward; float32."""

    @property
    def versions(self) -> tuple[Version, ...]:
        """Every policy version that made a token of the group, oldest first."""
        return tuple(sorted({span.version for s in self.samples for span in s.spans}))

    def digest(self) -> str:
        """Names the content: SHA-256 over ref, temperature, baseline, prompt tokens and the samples' digests; 32 hex digits."""
        samples = [sample.digest() for sample in self.samples]
        return group_digest(self.ref, self.prompt_ids, samples, self.temperature, self.baseline)


def group_digest(
    ref: PromptRef,
    prompt_ids: tuple[int, ...],
    sample_digests: list[bytes],
    temperature: float = 1.0,
    baseline: float | None = None,
) -> str:
    """The digest of a group from its samples' digests, so that who holds only some samples can check it too."""
    h = hashlib.sha256()
    h.update(struct.pack(f"<3qfI{len(prompt_ids)}i", *ref, temperature, len(prompt_ids), *prompt_ids))
    h.update(b"" if baseline is None else struct.pack("<cf", b"b", baseline))
    for digest in sample_digests:
        h.update(digest)
    return h.hexdigest()[:32]

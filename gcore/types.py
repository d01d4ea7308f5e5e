"""Basic types: prompt references, prompts, samples, groups, policy versions, fencing tokens.

All are small and frozen. This module does not depend on the store, engines or torch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

LARGEST_REWARD = 3.4e38
"""Maximum absolute value of a reward: rewards are sent as float32."""

_set = object.__setattr__  # for frozen classes with their own __init__
_NO_FIELDS = (None,) * 6

ServingPool = Literal["rollout", "reward"]
Pool = Literal[ServingPool, "train"]
"""The pool that a slot (accelerator) serves, which is also the role of its worker."""


class PromptRef(NamedTuple):
    """Permanent identity of one prompt in one data epoch (a *ref*): epoch, shard, and position in the shard's order."""

    data_epoch: int
    shard: int
    seq: int

    def __str__(self) -> str:
        return f"{self.data_epoch}/{self.shard}/{self.seq}"

    @classmethod
    def parse(cls, text: str) -> PromptRef:
        """Parse "EPOCH/SHARD/SEQ". Raises ValueError."""
        epoch, shard, seq = text.split("/")
        return cls(int(epoch), int(shard), int(seq))


class Version(NamedTuple):
    """A policy version: lineage (training branch) and step of the commit that produced the weights."""

    lineage: int
    step: int

    def __str__(self) -> str:
        return f"{self.lineage}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """Parse "LINEAGE.STEP". Raises ValueError."""
        lineage, step = text.split(".")
        return cls(int(lineage), int(step))


CHECKPOINTS = "checkpoints"
"""Name of the checkpoints folder in a run folder."""


def checkpoint_file(version: Version) -> str:
    """Return the path of the checkpoint of `version`, relative to the run folder."""
    return f"{CHECKPOINTS}/{version.lineage}-{version.step}"


class Token(NamedTuple):
    """Fencing token of one attempt at a step. A higher attempt of the same step replaces a lower one."""

    lineage: int
    step: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.lineage}.{self.step}.{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> Token:
        """Parse "LINEAGE.STEP.ATTEMPT". Raises ValueError."""
        lineage, step, attempt = text.split(".")
        return cls(int(lineage), int(step), int(attempt))


OutcomeKind = Literal["trained", "filtered", "failed"]


FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The final state of a prompt: trained, filtered or failed, and why. A ref has exactly one outcome in a job."""

    kind: OutcomeKind
    reason: str = ""


MediumKind = Literal["picture", "trajectory", "embeds", "decoded"]
"""What a blob contains: a picture as a file, latents of a diffusion trajectory, embeddings of a prompt, or a picture
that the policy generated."""


class Medium(NamedTuple):
    """A picture or another large array that belongs to a prompt or a sample. Its bytes are in blob stores
    (`gcore.media`); everything else refers to it by this value.
    """

    kind: MediumKind
    sha256: str
    """SHA-256 of the blob's bytes: 64 hex digits."""
    size: int
    """Size of the blob in bytes."""
    shape: tuple[int, ...]
    """Shape of the decoded array. Of a picture: height, width, 3."""
    dtype: str
    """Data type of the decoded array in numpy's notation, such as uint8."""


_MEDIA_TAG = b"\xff\xff\xff\xffmedia"
"""Begins the media in a digest. What precedes it, such as observed ranges, cannot contain it: they are not negative."""


def media_bytes(media: Sequence[Medium]) -> bytes:
    """Encode media for a digest: empty without media, else a tag, their number, and each as length-prefixed kind,
    SHA-256, size, length-prefixed shape and length-prefixed dtype; integers are little-endian.
    """
    if not media:
        return b""
    parts = [_MEDIA_TAG, struct.pack("<I", len(media))]
    for one in media:
        kind, dtype = one.kind.encode(), one.dtype.encode()
        parts.append(struct.pack(f"<I{len(kind)}s32sQ", len(kind), kind, bytes.fromhex(one.sha256), one.size))
        parts.append(struct.pack(f"<I{len(one.shape)}Q", len(one.shape), *one.shape))
        parts.append(struct.pack(f"<I{len(dtype)}s", len(dtype), dtype))
    return b"".join(parts)


class TextPart(NamedTuple):
    """A text part of a prompt."""

    text: str


class PictureRef(NamedTuple):
    """A picture of a prompt before it is a blob: a file of the data, and the size to which it is resized."""

    path: str
    """Absolute path of the file."""
    sha256: str
    """SHA-256 of the file: 64 hex digits. The blob has another one if the picture is converted or resized."""
    height: int
    """Height in pixels, after the EXIF rotation."""
    width: int
    target_height: int
    """Height in pixels that the model's processor uses."""
    target_width: int
    size: int = 0
    """Expected size of its blob in bytes: of the file, or of uncompressed pixels if it is resized."""


ContentPart = TextPart
"""A part of a prompt. Only the renderer, the trainer's batches and the engine adapters read its content."""


@dataclass(frozen=True, slots=True, init=False)
class Prompt:
    """A dataset entry that was rendered and tokenized.

    `content`: the model's input after the chat template. `fields`: the entry's JSON object, from which rewards read the
    expected answer.
    """

    ref: PromptRef
    content: tuple[ContentPart, ...]
    token_ids: tuple[int, ...]
    fields: dict[str, Any]
    source: str
    """Name of the source (dataset) that contains the entry."""
    media: tuple[Medium, ...]
    """The prompt's pictures, in the order of their placeholders in `token_ids`."""
    request_ids: tuple[int, ...]
    """`token_ids` with one image token for each picture, as engines receive them; empty for a prompt without pictures."""
    pictures: tuple[PictureRef, ...]
    """The files of the prompt's pictures, in the order of their placeholders."""

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
        media: tuple[Medium, ...] = (),
        request_ids: tuple[int, ...] = (),
        pictures: tuple[PictureRef, ...] = (),
    ) -> None:
        """Create a prompt. `text` may be given instead of `content`, and becomes the only part. Raises TypeError."""
        if text is not None:
            content = (TextPart(text),)
        if content is None or token_ids is None or fields is None:
            raise TypeError("a Prompt needs text or content, token_ids and fields")
        _set(self, "ref", ref)
        _set(self, "content", content)
        _set(self, "token_ids", token_ids)
        _set(self, "fields", fields)
        _set(self, "source", source)
        _set(self, "media", media)
        _set(self, "request_ids", request_ids)
        _set(self, "pictures", pictures)

    @property
    def text(self) -> str:
        """The text of all parts, joined."""
        return "".join(part.text for part in self.content)


def entry_value(entry: Mapping[str, Any], path: str) -> Any:
    """Return the value of the field `path` of a dataset entry; None if it does not exist.

    Looks for a field with this exact name first, then follows dots into nested objects: in {"a": {"b": "2"}}, a.b is
    "2".
    """
    if path in entry:
        return entry[path]
    name, dot, rest = path.partition(".")
    inner = entry.get(name) if dot else None
    return entry_value(inner, rest) if isinstance(inner, Mapping) else None


def entry_text(entry: Mapping[str, Any], path: str) -> str:
    """Return the value of the field `path` as text: strings unchanged, other values as JSON; "" for null or no field."""
    value = entry_value(entry, path)
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


Range = tuple[int, int]
"""A half-open range [start, end) of a response's tokens or characters."""


def range_problem(ranges: Sequence[Range], length: int) -> str:
    """Return what is wrong with `ranges`, which must be ascending, not empty, not touching, and within [0, `length`).

    Empty if they are valid.
    """
    end = -1
    for number, (first, last) in enumerate(ranges):
        if not (end < first < last <= length):
            return f"range {number} is [{first}, {last}) of {length}; ranges must ascend and must not touch"
        end = last
    return ""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Says that tokens [start, end) of a response were generated with policy version `version`."""

    version: Version
    start: int
    end: int


class TokenOutput(NamedTuple):
    """A response as tokens.

    `logprobs[i]` is the engine's log-probability of `token_ids[i]` under the temperature-scaled, untruncated softmax.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    spans: tuple[VersionSpan, ...]
    observed: tuple[Range, ...] = ()
    """Ranges of `token_ids` that the policy did not generate, but read from a tool or an environment between its turns.
    Ascending, not touching, not empty. Their `logprobs` are 0. `spans` cover them too."""
    observed_text: tuple[Range, ...] = ()
    """The same ranges in `text`, in characters, for display and rewards."""
    media: tuple[Medium, ...] = ()
    """Pictures of the response, as from a tool, in the order of their placeholders in `token_ids`; or the arrays of a
    diffusion sample."""


class DenoisingTrajectory(NamedTuple):
    """A picture that a denoising policy generated, as the numbers of its trained steps. Its arrays are blobs.

    `logprobs[i]` is the engine's log-probability of step `steps[i]`, a mean over the dimensions of the state
    (`gcore.models.diffusion.steps`).
    """

    steps: tuple[int, ...]
    """Trained denoising steps, ascending. Step i goes from level `sigmas[i]` to `sigmas[i + 1]`."""
    sigmas: tuple[float, ...]
    """All noise levels of the schedule, as the engine's scheduler has them: one more than its steps."""
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    """Which versions computed which of `steps`, by place."""
    seed: int
    """From which the engine drew the noise of the steps."""
    media: tuple[Medium, ...]
    """The states around the trained steps, the picture, and the embeddings of the prompt: `trajectory`, `decoded` and
    `embeds`."""


_DENOISING_TAG = struct.pack("<I", 2**32 - 1) + b"denoising"
"""Begins the digest of a trajectory. No response has so many tokens, with whose number other digests begin."""


@dataclass(frozen=True, slots=True, init=False)
class Sample:
    """One response to a prompt, with its finish reason and reward.

    A response is a text (`TokenOutput`) or a picture (`DenoisingTrajectory`). A picture has no tokens and no text.

    `reward_parts`: name and value of each part of the reward.
    """

    output: TokenOutput | DenoisingTrajectory
    finish_reason: FinishReason
    reward: float
    reward_parts: tuple[tuple[str, float], ...]
    masked: bool
    """Whether the sample is excluded from the loss. Its reward still counts in the group's baseline."""
    prompt_ids: tuple[int, ...] | None
    """Token IDs before the response, if they differ from those of the prompt because an agent wrote its own messages.
    Set only until the sample is in a group (`gcore.rollout.postprocess`).
    """

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
        output: TokenOutput | DenoisingTrajectory | None = None,
    ) -> None:
        """Create a sample from `output`, or from the fields of a `TokenOutput`. Fields replace those of `output`.

        Raises TypeError.
        """
        if output is None:
            if token_ids is None or logprobs is None or text is None or spans is None:
                raise TypeError("a Sample needs output, or token_ids, logprobs, text and spans")
            output = TokenOutput(token_ids, logprobs, text, spans, observed or (), observed_text or ())
        else:
            given = (token_ids, logprobs, text, spans, observed, observed_text)
            if given != _NO_FIELDS:
                if isinstance(output, DenoisingTrajectory):
                    raise TypeError("a picture has no fields of a TokenOutput")
                pairs = zip(output, (*given, None), strict=True)
                output = TokenOutput._make(old if new is None else new for old, new in pairs)
        if finish_reason is None:
            raise TypeError("a Sample needs finish_reason")
        _set(self, "output", output)
        _set(self, "finish_reason", finish_reason)
        _set(self, "reward", reward)
        _set(self, "reward_parts", reward_parts)
        _set(self, "masked", masked)
        _set(self, "prompt_ids", prompt_ids)

    @property
    def token_output(self) -> TokenOutput:
        """The output of a text. Raises TypeError for a picture."""
        if not isinstance(self.output, TokenOutput):
            raise TypeError("a picture has no tokens")
        return self.output

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the output; none of a picture."""
        return self.output.token_ids if isinstance(self.output, TokenOutput) else ()

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Log-probabilities of the output."""
        return self.output.logprobs

    @property
    def text(self) -> str:
        """Text of the output; empty for a picture."""
        return self.output.text if isinstance(self.output, TokenOutput) else ""

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """Version spans of the output."""
        return self.output.spans

    @property
    def observed(self) -> tuple[Range, ...]:
        """Observed token ranges of the output."""
        return self.output.observed if isinstance(self.output, TokenOutput) else ()

    @property
    def observed_text(self) -> tuple[Range, ...]:
        """Observed character ranges of the output."""
        return self.output.observed_text if isinstance(self.output, TokenOutput) else ()

    @property
    def media(self) -> tuple[Medium, ...]:
        """Media of the output."""
        return self.output.media

    @property
    def length(self) -> int:
        """Number of trained positions: tokens, observed ones included, or trained denoising steps."""
        return len(self.output.token_ids if isinstance(self.output, TokenOutput) else self.output.steps)

    @property
    def own_tokens(self) -> int:
        """Number of tokens that the policy generated, without observed ones. This is what gcore calls response length. Of a
        picture: its trained steps."""
        return self.length - sum(end - start for start, end in self.observed)

    @property
    def own_token_ids(self) -> tuple[int, ...]:
        """The tokens that the policy generated."""
        if not self.observed:
            return self.token_ids
        edges = [0, *(edge for range_ in self.observed for edge in range_), len(self.token_ids)]
        return tuple(itertools.chain(*(self.token_ids[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True))))

    @property
    def oldest(self) -> Version:
        """The oldest policy version that generated a token of the sample."""
        return min(span.version for span in self.spans)

    def digest(self) -> bytes:
        """SHA-256 over what training uses of the sample, little-endian: token IDs, log-probabilities, reward, mask,
        observed ranges if there are any, and media if there are any (`media_bytes`). Of a picture: a tag, steps,
        log-probabilities, reward, mask, levels and media."""
        h = hashlib.sha256()
        if isinstance(self.output, DenoisingTrajectory):
            steps, levels = self.output.steps, self.output.sigmas
            numbers = (struct.pack(f"<{len(steps)}i", *steps), _floats(self.logprobs), _floats(levels))
            return picture_digest(*numbers, self.reward, masked=self.masked, media=self.media)
        n = len(self.token_ids)
        h.update(struct.pack(f"<I{n}i{n}ff?", n, *self.token_ids, *self.logprobs, self.reward, self.masked))
        h.update(struct.pack(f"<{2 * len(self.observed)}i", *(edge for range_ in self.observed for edge in range_)))
        h.update(media_bytes(self.media))
        return h.digest()


def _floats(numbers: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def picture_digest(
    steps: bytes, logprobs: bytes, sigmas: bytes, reward: float, *, masked: bool, media: Sequence[Medium]
) -> bytes:
    """Compute `Sample.digest` of a generated picture from the encoded numbers of its trajectory."""
    h = hashlib.sha256(_DENOISING_TAG)
    for numbers in (steps, logprobs, sigmas):
        h.update(struct.pack("<I", len(numbers) // 4))
        h.update(numbers)
    h.update(struct.pack("<f?", reward, masked))
    h.update(media_bytes(media))
    return h.digest()


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one prompt (as in GRPO), as the controller that generated them holds them."""

    ref: PromptRef
    prompt_ids: tuple[int, ...]
    samples: tuple[Sample, ...]
    source: str = ""
    """Name of the prompt's source."""
    temperature: float = 1.0
    """Sampling temperature. The trainer divides its logits by it."""
    baseline: float | None = None
    """Baseline for the samples' rewards, if the flow computed one, such as the greedy response's reward; float32."""
    media: tuple[Medium, ...] = ()
    """The prompt's pictures, in the order of their placeholders in `prompt_ids`."""

    @property
    def versions(self) -> tuple[Version, ...]:
        """All policy versions that generated a token of the group, oldest first."""
        return tuple(sorted({span.version for s in self.samples for span in s.spans}))

    def digest(self) -> str:
        """Digest of the content: 32 hex digits of SHA-256 over ref, temperature, prompt tokens, baseline, the prompt's
        media if there are any, and samples."""
        samples = [sample.digest() for sample in self.samples]
        return group_digest(self.ref, self.prompt_ids, samples, self.temperature, self.baseline, self.media)

    @property
    def all_media(self) -> tuple[Medium, ...]:
        """The media of the prompt and of all samples."""
        return (*self.media, *(medium for sample in self.samples for medium in sample.media))


def group_digest(
    ref: PromptRef,
    prompt_ids: tuple[int, ...],
    sample_digests: list[bytes],
    temperature: float = 1.0,
    baseline: float | None = None,
    media: Sequence[Medium] = (),
) -> str:
    """Compute `Group.digest` from the samples' digests, so that a rank that has only some of the samples can verify it."""
    h = hashlib.sha256()
    h.update(struct.pack(f"<3qfI{len(prompt_ids)}i", *ref, temperature, len(prompt_ids), *prompt_ids))
    h.update(b"" if baseline is None else struct.pack("<cf", b"b", baseline))
    h.update(media_bytes(media))
    for digest in sample_digests:
        h.update(digest)
    return h.hexdigest()[:32]

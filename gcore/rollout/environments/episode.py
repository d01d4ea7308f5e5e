"""Runs one response with an environment, turn by turn, until the environment ends it or it reaches a limit.

The caller passes the function that generates a turn.

    limits       `environment.max_turns`; the policy's own tokens (`max_new_tokens`); all tokens (`environment.max_tokens`).
                 A response that reaches a limit ends after its current turn, as truncated
    an error     an environment that raises, times out or returns an invalid observation raises EnvironmentFault
    pictures     an observation may have pictures of tools. Their placeholders are observed tokens, their blobs are media of
                 the response. A response that would have more than `environment.tools.max_pictures` ends as truncated

Observations are never truncated: if one does not fit, the response ends before it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from gcore.config.rollout import picture_bytes
from gcore.data.tokenizer import TextTooLong, check_length, run_by_size
from gcore.errors import DataError
from gcore.media.placeholders import PictureRule
from gcore.rollout.environments.api import (
    ENVIRONMENT,
    PICTURE,
    CheckedEnvironment,
    Done,
    EnvironmentFault,
    Observation,
    Turn,
)
from gcore.system.clock import Clock
from gcore.system.concurrency import Pausable, TaskHung, wait_within
from gcore.types import FinishReason, Medium, PictureRef, Range, Sample, TokenOutput, Version, VersionSpan

if TYPE_CHECKING:
    from gcore.data.renderer import PromptRenderer  # code that only displays a response needs no templates

PICTURE_FIX = "Correct the tool: it may return whole PNG, JPEG and WebP files, at most environment.tools.max_pictures"

TOLD = ("⟦", "⟧")
"""Marks around observed text in displayed responses."""


def mark_observed(text: str, observed: Iterable[Range]) -> str:
    """Put marks around the ranges of `text` that a tool or an environment produced (`observed`, in characters)."""
    parts, at = [], 0
    for start, end in observed:
        parts += [text[at:start], TOLD[0], text[start:end], TOLD[1]]
        at = end
    return "".join([*parts, text[at:]])


@dataclass
class Transcript:
    """A multi-turn response, token by token: generated tokens, and the observations between them. Grows turn by turn.

    Nothing is tokenized again: generated tokens stay as the engine returned them, and each observation is tokenized
    once. Observed tokens have log-probability 0 and are listed in `observed`. Their version is that of the previous
    turn, or of the next one if there is none before.
    """

    token_ids: tuple[int, ...] = ()
    request_ids: tuple[int, ...] = ()
    """`token_ids` with one image token for each picture, as engines receive them."""
    media: tuple[Medium, ...] = ()
    """The blobs of the pictures, in the order of their placeholders."""
    logprobs: tuple[float, ...] = ()
    text: str = ""
    turns: int = 0
    _spans: list[VersionSpan] = field(default_factory=list)
    _observed: list[Range] = field(default_factory=list)
    _observed_text: list[Range] = field(default_factory=list)

    @property
    def own_tokens(self) -> int:
        """Number of tokens that the model generated, without observations."""
        return len(self.token_ids) - sum(end - start for start, end in self._observed)

    def turn(self, sample: Sample, text: str) -> None:
        """Append a turn of the model: `sample`, which has at least one token and decodes to `text`."""
        before = len(self.token_ids)
        if before and not self._spans:  # observations before the first turn get the turn's version
            self._made(sample.spans[0].version, 0, before)
        for span in sample.spans:
            self._made(span.version, span.start + before, span.end + before)
        self.token_ids += sample.token_ids
        self.request_ids += sample.token_ids
        self.logprobs += sample.logprobs
        self.text += text
        self.turns += 1

    def observe(self, shown: ShownTokens, media: Sequence[Medium] = ()) -> None:
        """Append an observation of a tool or environment, which is never trained. `media`: blobs of its pictures."""
        if not shown.token_ids:
            return
        before, letters = len(self.token_ids), len(self.text)
        self.token_ids += shown.token_ids
        self.request_ids += shown.request_ids
        self.media += tuple(media)
        self.logprobs += (0.0,) * len(shown.token_ids)
        self.text += shown.text
        _extend(self._observed, before, len(self.token_ids))
        if shown.text:
            _extend(self._observed_text, letters, len(self.text))
        if self._spans:
            self._made(self._spans[-1].version, before, len(self.token_ids))

    def sample(self, finish_reason: FinishReason) -> Sample:
        """Return the whole response as a training sample. Needs at least one turn."""
        output = TokenOutput(
            self.token_ids,
            self.logprobs,
            self.text,
            tuple(self._spans),
            tuple(self._observed),
            tuple(self._observed_text),
            self.media,
        )
        return Sample(output=output, finish_reason=finish_reason)

    def _made(self, version: Version, start: int, end: int) -> None:
        if start == end:
            return
        if self._spans and self._spans[-1].version == version and self._spans[-1].end == start:
            self._spans[-1] = replace(self._spans[-1], end=end)
        else:
            self._spans.append(VersionSpan(version, start, end))


def _extend(ranges: list[Range], start: int, end: int) -> None:
    """Append a range of positions, merged with the last one if they touch."""
    if ranges and ranges[-1][1] == start:
        start, _ = ranges.pop()
    ranges.append((start, end))


log = logging.getLogger(__name__)
T = TypeVar("T")


Say = Callable[[Transcript, int], Awaitable[Sample]]
"""Generates the next turn with an engine. Arguments: the response so far, and the maximum number of new tokens."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of one response.

    `turns`: turns of the model. `own`: generated tokens. `room`: generated and observed tokens. `step_s`: timeout of
    each call to the environment, in seconds.
    """

    turns: int
    own: int
    room: int
    step_s: float


@dataclass(frozen=True, slots=True)
class EpisodePictures:
    """How the pictures of observations become tokens and blobs. `rule`: of the model. `most`: maximum number of pictures in a
    response. `most_pixels`: maximum height x width of one, in the size that the model uses. `store`: makes the blob of a
    picture, and keeps it as long as the response needs it; raises DataError if the file is damaged, and EngineError if the
    store cannot.
    """

    rule: PictureRule
    most: int
    most_pixels: int
    store: Callable[[PictureRef], Awaitable[Medium]]


@dataclass(frozen=True, slots=True)
class EpisodeSetting:
    """Inputs of `play_episode` besides the environment and the engine.

    `prompt_ids`: tokens of the prompt, with one image token for each picture. `fields`: its entry. `hold`: stops the
    environment's timeout while it waits for a tool process. `pictures`: None for a job without pictures.
    """

    prompt_ids: tuple[int, ...]
    fields: Mapping[str, Any]
    renderer: PromptRenderer
    limits: EpisodeLimits
    clock: Clock
    hold: Pausable | None = None
    pictures: EpisodePictures | None = None


async def play_episode(environment: CheckedEnvironment, say: Say, scene: EpisodeSetting) -> Sample:
    """Run a whole response and return it as a training sample.

    The environment's reward becomes its reward part `environment`. Finish reason "length": it reached a limit; "abort":
    the engine aborted it. Raises EnvironmentFault, and what `say` raises.
    """
    try:
        return await _played(environment, say, scene)
    finally:
        await _closed(environment, scene)


async def _played(environment: CheckedEnvironment, say: Say, scene: EpisodeSetting) -> Sample:
    limits, whole = scene.limits, Transcript()
    shown = await _encoded(await _in_time(environment.reset(), scene), whole, scene, said=())
    if shown is None or len(shown.token_ids) >= limits.room:
        has = f"more than {limits.room}" if shown is None else len(shown.token_ids)
        raise EnvironmentFault(
            f"the observation before the first turn has {has} tokens, but a response has at most {limits.room}",
            where="environment.max_tokens",
            fix="Raise it, or shorten the observation",
        )
    while True:
        whole.observe(shown, await _stored(shown, scene))
        left = min(limits.own - whole.own_tokens, limits.room - len(whole.token_ids))
        made = await say(whole, left)
        text = decode_suffix(made.token_ids, whole.request_ids or scene.prompt_ids, scene.renderer)
        whole.turn(made, text)
        if made.finish_reason != "stop":
            return whole.sample(made.finish_reason)
        turn = Turn(text, len(made.token_ids), made.finish_reason, whole.turns)
        found = await _in_time(environment.step(turn, chat=scene.renderer.chat), scene)
        if isinstance(found, Done):
            return _worth(whole.sample("stop"), found.reward)
        shown = await _encoded(found, whole, scene, said=made.token_ids)
        if shown is None or _is_cut_off(whole, len(shown.token_ids), limits):
            cut: FinishReason = "length"
            return whole.sample(cut)


def _is_cut_off(whole: Transcript, shown: int, limits: EpisodeLimits) -> bool:
    """Whether a limit allows no further turn after an observation of `shown` tokens."""
    return whole.turns >= limits.turns or whole.own_tokens >= limits.own or len(whole.token_ids) + shown >= limits.room


def _worth(sample: Sample, reward: float | None) -> Sample:
    return sample if reward is None else replace(sample, reward_parts=((ENVIRONMENT, reward),))


class ShownTokens(NamedTuple):
    """An observation as text and as tokens. `request_ids`: with one image token for each of `pictures`."""

    token_ids: tuple[int, ...]
    text: str
    request_ids: tuple[int, ...]
    pictures: tuple[PictureRef, ...] = ()


async def _encoded(
    found: Observation, whole: Transcript, scene: EpisodeSetting, *, said: tuple[int, ...]
) -> ShownTokens | None:
    """Render and tokenize an observation, a long one in a thread. None if it is far too long for the response, or has too
    many pictures.

    `said`: tokens of the model's last turn.
    """
    before, room, shown = whole.request_ids, scene.limits.room - len(whole.token_ids), len(found.pictures)
    if shown and (scene.pictures is None or not scene.pictures.most):
        raise EnvironmentFault(
            "the environment shows a picture, but the job allows none",
            where="environment.tools.max_pictures",
            fix="Set it to the number of pictures in a response",
        )
    if scene.pictures is not None and len(whole.media) + shown > scene.pictures.most:
        return None
    try:
        return await run_by_size(_characters(found), lambda: _shown(found, before, room, scene, said=said))
    except TextTooLong:
        return None
    except DataError as error:
        raise EnvironmentFault(f"the observation cannot be rendered ({error.what})", fix=error.fix) from error


def _shown(
    found: Observation, made: tuple[int, ...], room: int, scene: EpisodeSetting, *, said: tuple[int, ...]
) -> ShownTokens:
    """Render and tokenize an observation. `made`: the response so far, with one image token for each picture. Raises
    DataError, also if the text has another number of placeholders than pictures, and TextTooLong.
    """
    renderer, before, pictures = scene.renderer, scene.prompt_ids + made, scene.pictures
    text = renderer.behind(found.messages, scene.fields, said=said) if found.messages else found.text
    if pictures is not None and found.pictures and not found.messages:
        text = text.replace(PICTURE, pictures.rule.picture_text)
    if not text:
        return ShownTokens((), "", ())
    check_length(text, room, lambda part: renderer.encode_behind(before, part))
    request_ids = ids = short_ids = renderer.encode_behind(before, text)
    if pictures is not None:
        sizes = [(one.height, one.width) for one in found.pictures]
        ids, request_ids = pictures.rule.expand(short_ids, sizes), pictures.rule.request_ids(short_ids, sizes)
    plain = not found.messages and not found.pictures
    return ShownTokens(
        ids, text if plain else decode_suffix(request_ids, before, renderer), request_ids, tuple(found.pictures)
    )


async def _stored(shown: ShownTokens, scene: EpisodeSetting) -> list[Medium]:
    """Make the blobs of an observation's pictures. Raises EnvironmentFault for one that is too large or damaged, and
    EngineError if the store cannot.
    """
    made: list[Medium] = []
    for number, picture in enumerate(shown.pictures, 1):
        assert scene.pictures is not None
        height, width = scene.pictures.rule.target_size(picture.height, picture.width)
        most = scene.pictures.most_pixels
        what = ""
        if height * width > most:
            what = f"the model would see {width}x{height} = {height * width} pixels; at most {most} are allowed"
        elif (height, width) == picture[2:4] and picture.size > picture_bytes(most):
            # Without the file's size: events report each text once, and files have many sizes.
            what = f"its file of {width}x{height} pixels has more than {picture_bytes(most)} bytes, the limit for {most} pixels"
        if what:
            raise EnvironmentFault(
                f"picture {number} of a tool is too large: {what}",
                where="environment.tools.max_pixels",
                fix="Raise it, or return smaller pictures",
            )
        try:
            made.append(await scene.pictures.store(picture._replace(target_height=height, target_width=width)))
        except DataError as error:
            raise EnvironmentFault(
                f"picture {number} of a tool cannot be used: {error.what}", where="environment.tools", fix=PICTURE_FIX
            ) from error
    return made


def _characters(found: Observation) -> int:
    return len(found.text) + sum(len(str(message)) for message in found.messages)


def decode_suffix(ids: Sequence[int], before: Sequence[int], renderer: PromptRenderer) -> str:
    """Decode `ids` as the continuation of `before`, because some tokenizers drop a space at the start of decoded text."""
    near = tuple(before[-16:])
    begin, both = renderer.decode(near), renderer.decode((*near, *ids))
    return both.removeprefix(begin) if both.startswith(begin) else renderer.decode(ids)


async def _in_time(answer: Coroutine[Any, Any, T], scene: EpisodeSetting) -> T:
    seconds = scene.limits.step_s
    try:
        return await wait_within(answer, seconds, scene.clock, scene.hold)
    except TaskHung:
        raise hung_environment(seconds) from None
    except TimeoutError:
        raise EnvironmentFault(
            f"the environment took longer than {seconds:g} s",
            where="environment.step_timeout_s",
            fix="Raise it, or make the environment faster",
        ) from None


def hung_environment(seconds: float) -> EnvironmentFault:
    """Error for an environment that timed out and suppresses its cancellation. It keeps running."""
    return EnvironmentFault(
        f"the environment took longer than {seconds:g} s, and does not end when it is cancelled",
        where="environment.step_timeout_s",
        fix="Do not catch asyncio.CancelledError: a bare `except` or `except BaseException` catches it",
    )


async def _closed(environment: CheckedEnvironment, scene: EpisodeSetting) -> None:
    """Close the environment. Errors are only logged, because the response is complete."""
    try:
        await _in_time(environment.close(), scene)
    except EnvironmentFault as error:
        log.warning("%s", error)

"""One response with an environment: turn after turn, until it is done or a limit is met. Asks its engine through its caller.

    limits       `environment.max_turns`; the policy's own tokens (`max_new_tokens`); all tokens (`environment.max_tokens`). Who meets one
                 is cut off: the response ends with the turn that it has, as one that was cut off at its longest length
    an error     an environment that raises, takes too long or shows what cannot be shown raises EnvironmentFault

What the model is shown is cut nowhere: where it does not fit, the response ends in front of it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from gcore.data.tokenizer import TextTooLong, check_length, run_by_size
from gcore.errors import DataError
from gcore.rollout.environments.api import (
    ENVIRONMENT,
    CheckedEnvironment,
    Done,
    EnvironmentFault,
    Observation,
    Turn,
)
from gcore.system.clock import Clock
from gcore.system.concurrency import Pausable, TaskHung, wait_within
from gcore.types import FinishReason, Range, Sample, Version, VersionSpan

if TYPE_CHECKING:
    from gcore.data.renderer import PromptRenderer  # who only shows a response needs no templates

TOLD = ("⟦", "⟧")
"""Around what of a response was observed, where people read it."""


def mark_observed(text: str, observed: Iterable[Range]) -> str:
    """`text` with marks around what a tool or an environment said."""
    parts, at = [], 0
    for start, end in observed:
        parts += [text[at:start], TOLD[0], text[start:end], TOLD[1]]
        at = end
    return "".join([*parts, text[at:]])


@dataclass
class Transcript:
    """A response of several turns, token by token: what the model made, and between that what it was shown. Grows turn by turn.

    Nothing is tokenized anew: a turn's tokens stand as the engine gave them, an observation's as the tokenizer made
    them of its words alone. What was shown has log-probability 0 and is named in `observed`; the version of its
    tokens is that of the turn before, or of the one that follows where there is none before.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    text: str = ""
    turns: int = 0
    _spans: list[VersionSpan] = field(default_factory=list)
    _observed: list[Range] = field(default_factory=list)
    _observed_text: list[Range] = field(default_factory=list)

    @property
    def own_tokens(self) -> int:
        """How many the model made."""
        return len(self.token_ids) - sum(end - start for start, end in self._observed)

    def turn(self, sample: Sample, text: str) -> None:
        """The model said `sample`, which reads `text`. Of at least one token."""
        before = len(self.token_ids)
        if before and not self._spans:  # what was shown before the first turn is of its version
            self._made(sample.spans[0].version, 0, before)
        for span in sample.spans:
            self._made(span.version, span.start + before, span.end + before)
        self.token_ids += sample.token_ids
        self.logprobs += sample.logprobs
        self.text += text
        self.turns += 1

    def observe(self, token_ids: tuple[int, ...], text: str) -> None:
        """The model was shown `text`."""
        if not token_ids:
            return
        before, letters = len(self.token_ids), len(self.text)
        self.token_ids += token_ids
        self.logprobs += (0.0,) * len(token_ids)
        self.text += text
        _extend(self._observed, before, len(self.token_ids))
        if text:
            _extend(self._observed_text, letters, len(self.text))
        if self._spans:
            self._made(self._spans[-1].version, before, len(self.token_ids))

    def sample(self, finish_reason: FinishReason) -> Sample:
        """The whole, as it is trained. At least one turn."""
        return Sample(
            self.token_ids,
            self.logprobs,
            self.text,
            finish_reason,
            tuple(self._spans),
            observed=tuple(self._observed),
            observed_text=tuple(self._observed_text),
        )

    def _made(self, version: Version, start: int, end: int) -> None:
        if start == end:
            return
        if self._spans and self._spans[-1].version == version and self._spans[-1].end == start:
            self._spans[-1] = replace(self._spans[-1], end=end)
        else:
            self._spans.append(VersionSpan(version, start, end))


def _extend(ranges: list[Range], start: int, end: int) -> None:
    """One more range, joined with the one that it touches."""
    if ranges and ranges[-1][1] == start:
        start, _ = ranges.pop()
    ranges.append((start, end))


log = logging.getLogger(__name__)
T = TypeVar("T")


Say = Callable[[tuple[int, ...], int, int], Awaitable[Sample]]
"""One turn of the model behind the response so far: its tokens, the most that may come, the number of the turn."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """What one response may take. `own`: tokens that the policy makes, `room`: all of them."""

    turns: int
    own: int
    room: int
    step_s: float


@dataclass(frozen=True, slots=True)
class EpisodeSetting:
    """Where a response takes place. `prompt_ids`: what stands in front of it; `fields`: the prompt's entry; `hold`: time that does not
    count as the environment's, while it waits for a tool's process."""

    prompt_ids: tuple[int, ...]
    fields: Mapping[str, Any]
    renderer: PromptRenderer
    limits: EpisodeLimits
    clock: Clock
    hold: Pausable | None = None


async def play_episode(environment: CheckedEnvironment, say: Say, scene: EpisodeSetting) -> Sample:
    """The whole response; what the environment says it is worth is its part `environment`.

    One with finish reason "abort" was given up by its engine. Raises EnvironmentFault, and what `say` raises.
    """
    try:
        return await _played(environment, say, scene)
    finally:
        await _closed(environment, scene)


async def _played(environment: CheckedEnvironment, say: Say, scene: EpisodeSetting) -> Sample:
    limits, whole = scene.limits, Transcript()
    shown = await _encoded(await _in_time(environment.reset(), scene), whole, scene, said=())
    if shown is None or len(shown[0]) >= limits.room:
        has = f"more than {limits.room}" if shown is None else len(shown[0])
        raise EnvironmentFault(
            f"what is shown before the first turn has {has} tokens, and a response {limits.room} at most",
            where="environment.max_tokens",
            fix="Raise it, or show less",
        )
    while True:
        whole.observe(*shown)
        left = min(limits.own - whole.own_tokens, limits.room - len(whole.token_ids))
        made = await say(whole.token_ids, left, whole.turns + 1)
        text = decode_suffix(made.token_ids, whole.token_ids or scene.prompt_ids, scene.renderer)
        whole.turn(made, text)
        if made.finish_reason != "stop":
            return whole.sample(made.finish_reason)
        turn = Turn(text, len(made.token_ids), made.finish_reason, whole.turns)
        found = await _in_time(environment.step(turn, chat=scene.renderer.chat), scene)
        if isinstance(found, Done):
            return _worth(whole.sample("stop"), found.reward)
        shown = await _encoded(found, whole, scene, said=made.token_ids)
        if shown is None or _is_cut_off(whole, len(shown[0]), limits):
            cut: FinishReason = "length"
            return whole.sample(cut)


def _is_cut_off(whole: Transcript, shown: int, limits: EpisodeLimits) -> bool:
    """Whether no turn follows, behind an observation of so many tokens."""
    return whole.turns >= limits.turns or whole.own_tokens >= limits.own or len(whole.token_ids) + shown >= limits.room


def _worth(sample: Sample, reward: float | None) -> Sample:
    return sample if reward is None else replace(sample, reward_parts=((ENVIRONMENT, reward),))


Shown = tuple[tuple[int, ...], str]
"""The tokens and the text of an observation behind what there is."""


async def _encoded(
    found: Observation, whole: Transcript, scene: EpisodeSetting, *, said: tuple[int, ...]
) -> Shown | None:
    """None if there is no room for it by far. A long one is tokenized in a thread."""
    before, room = whole.token_ids, scene.limits.room - len(whole.token_ids)
    try:
        return await run_by_size(_characters(found), lambda: _shown(found, before, room, scene, said=said))
    except TextTooLong:
        return None
    except DataError as error:
        raise EnvironmentFault(f"what is to be shown cannot be ({error.what})", fix=error.fix) from error


def _shown(
    found: Observation, made: tuple[int, ...], room: int, scene: EpisodeSetting, *, said: tuple[int, ...]
) -> Shown:
    """Raises DataError, TextTooLong."""
    renderer, before = scene.renderer, scene.prompt_ids + made
    text = renderer.behind(found.messages, scene.fields, said=said) if found.messages else found.text
    if not text:
        return (), ""
    check_length(text, room, lambda part: renderer.encode_behind(before, part))
    ids = renderer.encode_behind(before, text)
    return ids, decode_suffix(ids, before, renderer) if found.messages else text


def _characters(found: Observation) -> int:
    return len(found.text) + sum(len(str(message)) for message in found.messages)


def decode_suffix(ids: Sequence[int], before: Sequence[int], renderer: PromptRenderer) -> str:
    """What `ids` say behind `before`: some tokenizers leave out a space at the beginning of what they decode."""
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
            f"the environment took longer than {seconds:g} s to answer",
            where="environment.step_timeout_s",
            fix="Raise it, or make the environment quicker",
        ) from None


def hung_environment(seconds: float) -> EnvironmentFault:
    """Of one that keeps its cancellation to itself. It is left to itself, and may do harm yet."""
    return EnvironmentFault(
        f"the environment took longer than {seconds:g} s to answer, and does not end when it is told to",
        where="environment.step_timeout_s",
        fix="Let asyncio.CancelledError through: an `except` that names no exception, or BaseException, catches it",
    )


async def _closed(environment: CheckedEnvironment, scene: EpisodeSetting) -> None:
    """What goes wrong while it ends harms no response: it is over."""
    try:
        await _in_time(environment.close(), scene)
    except EnvironmentFault as error:
        log.warning("%s", error)

"""Rewards: the plug-in interface, lookup by name, options, and composition of several rewards.

A reward is a plug-in: a function under the entry-point group `gcore.rewards`. It gets one response, the prompt's entry
and the spec's reward section, and returns a number with its parts. `find_reward` wraps it so that each result is
checked. A number that is not finite, a result of another type, or an exception becomes a `RewardError`; the prompt then
ends as failed and the job continues. A hang, a crash or excessive memory use is contained by the process in which the
reward runs (`gcore.reward.pool`).

A reward decorated with `batch_reward` gets all responses of a group in one call. An error of the call, or a list of another
length than the group, counts for each response of the group.

A composed reward is a weighted sum, a gate, a minimum, or a weighted sum of parts that are standardised within the group. Every part is computed for every response, even if it cannot
change the value, because users read the parts. If a part cannot score a response, the whole reward fails; no value is
substituted. Exception: a judge's part without weight is left out if the judge fails. The parts of a part are named
"LABEL.NAME".
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from inspect import Parameter
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from gcore.config.base import shorten_text
from gcore.config.reward import RewardPart, RewardSpec
from gcore.errors import TracedError
from gcore.plugins import (
    RAISED,
    PluginFault,
    PluginKind,
    describe_result,
    error_sentence,
    find_plugin,
    plugin_trace,
    shown_name,
)
from gcore.types import LARGEST_REWARD, entry_value

REWARDS = PluginKind("reward", "gcore.rewards", "reward.name")

MOST_PARTS, LONGEST_PART = 64, 64
"""Maximum number of parts of a result, and maximum length of a part's name; both are stored for every response."""


class RewardError(TracedError):
    """A response could not be scored. Its prompt ends as failed, with this message as the reason.

    `trace`: the traceback of the plug-in's own code, or empty. It is shown in the event, not in the reason.
    """


class PictureFile(NamedTuple):
    """A file with a picture of a prompt, of a tool or of the policy, on this machine. `sha256`: of its bytes, 64 hex digits;
    empty: not known. `height`, `width`: in pixels; 0: not known."""

    path: str
    sha256: str = ""
    height: int = 0
    width: int = 0


class Response(str):
    """A response's text without special tokens, plus its length in tokens and other facts.

    Rewards that need only the text can use it as a plain string. The response of a policy that generates pictures is a
    picture, and its text is empty.
    """

    __slots__ = ("environment", "files", "picture_file", "tokens", "tool_files", "truncated")
    files: tuple[PictureFile, ...]
    """The pictures of its prompt, which `pictures` checks."""
    tool_files: tuple[PictureFile, ...]
    """The pictures that tools returned in it, which `tool_pictures` checks."""
    picture_file: PictureFile | None
    """The picture that the policy generated, which `picture` checks; None if the policy writes text."""
    tokens: int | None
    """Length in tokens, including the end token; None if unknown, or if the response is a picture."""
    truncated: bool
    """Whether the response reached its maximum length."""
    environment: float | None
    """Reward that the response's environment or agent returned; None if there is none."""

    def __new__(
        cls,
        text: str,
        tokens: int | None = None,
        truncated: bool = False,
        environment: float | None = None,
        files: Iterable[Sequence[Any]] = (),
        tool_files: Iterable[Sequence[Any]] = (),
        picture_file: Sequence[Any] | None = None,
    ) -> Response:
        """Create a response from `text` and what else is known about it. `files`, `tool_files`, `picture_file`: as
        `PictureFile`."""
        response = super().__new__(cls, text)
        response.tokens, response.truncated, response.environment = tokens, truncated, environment
        response.files = tuple(PictureFile(*one) for one in files)
        response.tool_files = tuple(PictureFile(*one) for one in tool_files)
        response.picture_file = None if picture_file is None else PictureFile(*picture_file)
        return response

    @property
    def picture(self) -> Path:
        """The file of the picture that the policy generated, a PNG file of 8-bit RGB, on this machine; do not write to it.

        Each access reads it and compares its bytes with the SHA-256. Raises RewardError if it is missing or has changed, and
        for the response of a policy that writes text.
        """
        if self.picture_file is None:
            raise RewardError(
                "the policy writes text, so its response is no picture",
                fix="Read the response as text, or use a policy that generates pictures",
            )
        return _checked_files((self.picture_file,), "the policy")[0]

    @property
    def pictures(self) -> tuple[Path, ...]:
        """The files of the prompt's pictures on this machine, in the order of the prompt; do not write to them.

        Each access reads them and compares their bytes with the SHA-256. Raises RewardError if one is missing or has
        changed.
        """
        return _checked_files(self.files, "the prompt")

    @property
    def tool_pictures(self) -> tuple[Path, ...]:
        """The files of the pictures that tools returned in this response, in the order in which the policy saw them. As
        `pictures` otherwise.
        """
        return _checked_files(self.tool_files, "a tool")


def _checked_files(files: Sequence[PictureFile], whose: str) -> tuple[Path, ...]:
    for path, sha256, *_ in files:
        try:
            found = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        except OSError as error:
            raise RewardError(f"cannot read a picture of {whose} ({error.strerror})", where=path) from error
        if sha256 and found != sha256:
            raise RewardError(f"a picture of {whose} has other bytes than its SHA-256 says", where=path)
    return tuple(Path(one.path) for one in files)


def is_picture(response: str) -> bool:
    """Whether a response is a picture that the policy generated."""
    return isinstance(response, Response) and response.picture_file is not None


@dataclass(frozen=True, slots=True)
class RewardResult:
    """Reward of one response, and its parts (name and number) for display."""

    value: float
    parts: tuple[tuple[str, float], ...] = ()


Scored = RewardResult | RewardError
"""Result for one response: its reward, or why it could not be scored."""


class Reward(Protocol):
    """Scores one response."""

    def __call__(self, response: str, fields: Mapping[str, Any], spec: RewardSpec) -> RewardResult:
        """Score a response. `response`: text without special tokens; `fields`: the prompt's entry. Raises RewardError."""
        ...


F = TypeVar("F", bound=Callable[..., Any])

BATCH_NAMES = ("responses", "completions", "prompts", "fields", "spec")
"""Parameters of a batch reward with a meaning of their own. A field of the entry with such a name is read from `fields`."""


def batch_reward(function: F) -> F:
    """Decorate a reward that scores all responses of a group in one call.

    The function gets lists, by name, and returns a list with one result per response:

        responses, completions    the responses (`Response`)
        prompts                   the field `prompt` of the entry, for each response
        fields                    the entry, for each response
        spec                      the reward's section of the spec; not a list
        any other name            the field of the entry with this name, for each response
        **kwargs                  all of these that are not named

    A group is what one call of `peer.score` passes: the responses to one prompt. Groups finish one by one, so no call waits for a step.
    """
    function.batch = True  # type: ignore[attr-defined]
    return function


def is_batch_reward(function: Callable[..., Any]) -> bool:
    """Whether `function` was decorated with `batch_reward` and gets all responses of a group in one call."""
    return getattr(function, "batch", False) is True


def call_batch_reward(
    name: str, function: Callable[..., Any], responses: Sequence[str], fields: Mapping[str, Any], spec: RewardSpec
) -> list[Any]:
    """Call a batch reward; returns its unchecked result for each response. Raises RewardError, and what the function raises."""
    given = _arguments(name, function, responses, fields, spec)
    found = function(**given)
    if not isinstance(found, list | tuple) and callable(to_list := getattr(found, "tolist", None)):
        found = to_list()  # an array or a tensor
    if not isinstance(found, list | tuple):
        raise RewardError(
            f"batch reward {name!r} returned {describe_result(found)}, not a list", fix="Return one number per response"
        )
    if len(found) != len(responses):
        raise RewardError(
            f"batch reward {name!r} returned {len(found)} results for {len(responses)} responses",
            fix="Return one number per response",
        )
    return list(found)


def _arguments(
    name: str, function: Callable[..., Any], responses: Sequence[str], fields: Mapping[str, Any], spec: RewardSpec
) -> dict[str, Any]:
    count = len(responses)
    known: dict[str, Any] = {key: [value] * count for key, value in fields.items() if key not in BATCH_NAMES}
    known |= {"responses": list(responses), "completions": list(responses), "fields": [fields] * count, "spec": spec}
    if "prompt" in fields:
        known["prompts"] = [fields["prompt"]] * count
    given: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is Parameter.VAR_KEYWORD:
            return known | given
        if parameter.kind is Parameter.POSITIONAL_ONLY:
            raise RewardError(
                f"batch reward {name!r} takes {parameter.name!r} by position, but arguments are passed by name",
                fix="Remove the / from its parameters",
            )
        if parameter.kind is Parameter.VAR_POSITIONAL:
            continue
        if parameter.name in known:
            given[parameter.name] = known[parameter.name]
        elif parameter.default is Parameter.empty:
            missing = "prompt" if parameter.name == "prompts" else parameter.name
            raise RewardError(
                f"batch reward {name!r} has the parameter {parameter.name!r}, and the entry has no field {missing!r}",
                fix=f"Name a field ({shorten_text(', '.join(fields)) or 'there is none'}) or one of {', '.join(BATCH_NAMES)}",
            )
    return given


def find_reward(name: str) -> CheckedReward:
    """Find a reward by entry-point name and wrap it with result checks.

    Raises PluginFault, with the nearest name if there is none.
    """
    found = find_plugin(REWARDS, name)
    return CheckedReward(name, found if is_batch_reward(found) else with_all_arguments(found))


def with_all_arguments(reward: Callable[..., Any]) -> Reward:
    """Wrap a reward whose parameters are (response) or (response, fields), so that it accepts (response, fields, spec).

    Other rewards are returned unchanged.
    """
    try:
        kinds = [one.kind for one in inspect.signature(reward).parameters.values()]
    except (TypeError, ValueError):  # a callable without a signature
        return reward
    positional = sum(kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
    if Parameter.VAR_POSITIONAL in kinds or not 1 <= positional <= 2:
        return reward

    @functools.wraps(reward)
    def call(response: str, fields: Mapping[str, Any], spec: RewardSpec) -> Any:
        return reward(*(response, fields)[:positional])

    for hook in ("start", "check"):
        if (method := getattr(reward, hook, None)) is not None:
            setattr(call, hook, method)
    return call


class CheckedReward:
    """Wraps a plug-in reward and checks its results. `is_batch`: whether it scores a group in one call."""

    def __init__(self, name: str, reward: Callable[..., Any]) -> None:
        self._name = shown_name(name)
        self._reward = reward
        self.is_batch = is_batch_reward(reward)

    def start(self, spec: RewardSpec) -> None:
        """Run the reward's own `start`, if it has one, once before its first response. Raises RewardError."""
        start: Callable[[RewardSpec], object] | None = getattr(self._reward, "start", None)
        if start is None:
            return
        try:
            start(spec)
        except RewardError:
            raise
        except RAISED as error:  # foreign code
            raise self._raised(error, "in start") from error

    def check(self, fields: Mapping[str, Any], spec: RewardSpec) -> None:
        """Run the reward's own `check`, if it has one, on an entry before a job begins. Raises only RewardError."""
        check: Callable[[Mapping[str, Any], RewardSpec], object] | None = getattr(self._reward, "check", None)
        if check is None:
            return
        try:
            check(fields, spec)
        except RewardError:
            raise
        except RAISED as error:  # foreign code
            raise self._raised(error, "in check") from error

    def __call__(self, response: str, fields: Mapping[str, Any], spec: RewardSpec) -> RewardResult:
        """Score a response and check the result. Raises only RewardError."""
        (scored,) = self.score_group((response,), fields, spec)
        if isinstance(scored, RewardError):
            raise scored
        return scored

    def score_group(self, responses: Sequence[str], fields: Mapping[str, Any], spec: RewardSpec) -> list[Scored]:
        """Score the responses to one prompt; returns a result or an error for each."""
        if not self.is_batch:
            return [self._scored(one, self._reward, one, fields, spec) for one in responses]
        try:
            results = call_batch_reward(self._name, self._reward, responses, fields, spec)
        except RewardError as error:
            return [error] * len(responses)
        except RAISED as error:  # foreign code
            return [self._raised_on(responses, error)] * len(responses)
        return [
            self._scored(response, lambda result: result, result)
            for response, result in zip(responses, results, strict=True)
        ]

    def _scored(self, response: str, reward: Callable[..., Any], *given: Any) -> Scored:
        """The checked result of `reward` with the arguments `given`, or the error about `response`."""
        try:
            return self._checked(reward(*given))
        except RewardError as error:
            return error
        except RAISED as error:  # foreign code: one bad response or result must not end the process
            return self._raised_on((response,), error)

    def _raised_on(self, responses: Sequence[str], error: BaseException) -> RewardError:
        """The error of a reward that raised `error` about one of these responses."""
        if isinstance(error, KeyError) or not any(map(is_picture, responses)):  # a field of the prompt is missing
            return self._raised(error)
        raised = self._raised(error, "on a generated picture, which has no text")
        return RewardError(raised.what, fix="Open response.picture, or correct the reward", trace=raised.trace)

    def _checked(self, result: Any) -> RewardResult:
        """Convert a plug-in's result to a RewardResult of plain floats and text. Raises RewardError for an invalid
        result.
        """
        if hasattr(type(result), "__float__"):  # also True, False, and numbers of numpy and torch
            result = RewardResult(result)
        if not isinstance(result, RewardResult):
            raise RewardError(
                f"reward {self._name!r} returned {describe_result(result)}, neither a number nor a RewardResult",
                fix="Correct the reward",
            )
        value = self._number("value", result.value)
        return RewardResult(
            value, tuple((self._part(part), self._number(str(part), n)) for part, n in self._parts(result))
        )

    def _raised(self, error: BaseException, when: str = "") -> RewardError:
        said = " ".join(word for word in (f"reward {self._name!r} raised", error_sentence(error), when) if word)
        return RewardError(said, fix="Correct the reward", trace=plugin_trace(error))

    def _parts(self, result: RewardResult) -> list[tuple[Any, Any]]:
        try:
            pairs = [(name, number) for name, number in result.parts]
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"reward {self._name!r} returned parts that are not pairs of a name and a number",
                fix="Correct the reward",
            ) from error
        if len(pairs) > MOST_PARTS:
            raise RewardError(
                f"reward {self._name!r} returned {len(pairs)} parts; the maximum is {MOST_PARTS}",
                fix="Correct the reward",
            )
        return pairs

    def _part(self, name: Any) -> str:
        text = str(name)
        if len(text) > LONGEST_PART:
            raise RewardError(
                f"reward {self._name!r} returned a part name of {len(text)} characters; the maximum is {LONGEST_PART}",
                fix="Correct the reward",
            )
        return text

    def _number(self, what: str, value: Any) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            shown = shorten_text(repr(value))
            raise RewardError(
                f"reward {self._name!r} returned {shown} as {what}, which is not a number", fix="Correct the reward"
            ) from error
        if not math.isfinite(number) or abs(number) > LARGEST_REWARD:
            raise RewardError(
                f"reward {self._name!r} returned {number} as {what}, which is not finite in float32",
                fix="Correct the reward",
            )
        return number


def refuse_unknown(spec: RewardSpec, known: Sequence[str]) -> None:
    """Raise RewardError if `reward.options` has a name that is not in `known`."""
    unknown = sorted(set(spec.options) - set(known))
    if unknown:
        raise RewardError(
            f"reward {spec.name!r} has no option {unknown[0]!r}", fix=f"Known options: {', '.join(known) or 'none'}"
        )


def word_option(spec: RewardSpec, name: str, default: str, words: Sequence[str]) -> str:
    """Read the option `name` of a reward, which must be one of `words`. Raises RewardError."""
    word = spec.options.get(name, default)
    if word not in words or not isinstance(word, str):
        raise RewardError(f"reward.options.{name} is {word!r}", fix=f"Set it to one of {', '.join(words)}")
    return word


def number_option(spec: RewardSpec, name: str, default: float, *, least: float, whole: bool = False) -> float:
    """Read the option `name` of a reward, a finite number of at least `least`; with `whole` an integer. Raises
    RewardError.
    """
    number = spec.options.get(name, default)
    good = isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)
    if not good or float(number) < least or (whole and float(number) != int(number)):
        kind = "a whole number" if whole else "a number"
        raise RewardError(f"reward.options.{name} is {number!r}", fix=f"Set it to {kind} of at least {least:g}")
    return float(number)


def truth_option(spec: RewardSpec, name: str, default: bool) -> bool:
    """Read the option `name` of a reward, which must be true or false. Raises RewardError."""
    truth = spec.options.get(name, default)
    if not isinstance(truth, bool):
        raise RewardError(f"reward.options.{name} is {truth!r}", fix="Set it to true or false")
    return truth


AnswerType = type[str] | type[int] | type[float] | type[bool]


def accepted_answers(fields: Mapping[str, Any], spec: RewardSpec, types: Sequence[AnswerType]) -> list[Any]:
    """Read the accepted answers from the answer field of the prompt's entry: its value, or each item of a list.

    Raises RewardError for an answer of another type than `types`, and without an answer.
    """
    answer = answer_field(fields, spec)
    answers = answer if isinstance(answer, list) else [answer]
    if not answers:
        raise RewardError(f"field {spec.answer!r} is an empty list of answers", fix="Write at least one answer")
    for one in answers:
        if type(one) not in types:
            raise RewardError(f"field {spec.answer!r} {_type_problem(one, spec)}", fix=_type_fix(one, spec))
    return answers


def decimal_text(number: float) -> str:
    """Write a number with all its decimal digits and without an exponent."""
    return format(Decimal(repr(number)), "f")


def _type_problem(answer: Any, spec: RewardSpec) -> str:
    kinds = {dict: "an object", list: "a list within a list", bool: "true or false", type(None): "null"}
    return f"holds {kinds.get(type(answer), 'a number')}, which reward {spec.name!r} cannot compare"


def _type_fix(answer: Any, spec: RewardSpec) -> str:
    if not isinstance(answer, dict) or not answer:
        return "Write text or a number, or name another field in reward.answer"
    inner = [name for name, value in answer.items() if not isinstance(value, dict | list)] or list(answer)
    named = next(
        (name for name in inner if name in ("ground_truth", "answer", "solution", "label", "target")), inner[0]
    )
    return f"Name a field within it, such as reward.answer: {spec.answer}.{named}"


def answer_field(fields: Mapping[str, Any], spec: RewardSpec) -> Any:
    """Read the field of the prompt's entry that `reward.answer` names. Raises RewardError if it is missing."""
    answer = entry_value(fields, spec.answer)
    if answer is None:
        raise RewardError(
            f"the prompt's entry has no answer in field {spec.answer!r}", fix="Set reward.answer to the right field"
        )
    return answer


class OpenReward:
    """The loaded and started reward of a spec section, with all of its parts. Create it with `OpenReward.of`."""

    def __init__(self, spec: RewardSpec, parts: tuple[tuple[RewardSpec, CheckedReward], ...]) -> None:
        self._spec = spec
        self._parts = parts

    @classmethod
    def of(cls, spec: RewardSpec) -> OpenReward:
        """Find and start the rewards that the spec names. Raises SpecError (PluginFault) or RewardError."""
        told = [spec.of_part(part) for part in spec.parts] or [spec]
        found = []
        for number, one in enumerate(told):
            try:
                reward = find_reward(one.name)
            except PluginFault as fault:
                if not spec.parts:
                    raise
                where = f"reward.parts.{number}.name"
                raise PluginFault(fault.what, where=where, fix=fault.fix, trace=fault.trace) from fault
            reward.start(one)
            found.append((one, reward))
        return cls(spec, tuple(found))

    @property
    def is_batch(self) -> bool:
        """Whether the reward, or one of its parts, scores a group in one call."""
        return self._spec.compares_group or any(reward.is_batch for _, reward in self._parts)

    def __call__(self, response: str, fields: Mapping[str, Any]) -> RewardResult:
        """Score a response; returns the reward and its parts. Raises RewardError."""
        (scored,) = self.score_group((response,), fields)
        if isinstance(scored, RewardError):
            raise scored
        return scored

    def score_group(self, responses: Sequence[str], fields: Mapping[str, Any]) -> list[Scored]:
        """Score the responses to one prompt; returns a result or an error for each."""
        by_part = [reward.score_group(responses, fields, spec) for spec, reward in self._parts]
        if not self._spec.parts:
            return by_part[0]
        return compose_group(self._spec, [self._known(results) for results in zip(*by_part, strict=True)])

    def check(self, fields: Mapping[str, Any]) -> None:
        """Check a prompt's entry with the rewards' own checks. Raises RewardError if no response to it could be scored."""
        for number, (spec, reward) in enumerate(self._parts):
            try:
                reward.check(fields, spec)
            except RewardError as error:
                raise (blame_part(self._spec.parts[number], error) if self._spec.parts else error) from error

    def _known(self, results: Sequence[Scored]) -> list[RewardResult | None] | RewardError:
        known: list[RewardResult | None] = []
        for part, result in zip(self._spec.parts, results, strict=True):
            if isinstance(result, RewardError):
                return blame_part(part, result)
            known.append(result)
        return known


def blame_part(part: RewardPart, error: RewardError) -> RewardError:
    """Return the error of a part of a reward with the part's name in its message."""
    return RewardError(f"part {part.shown_as!r}: {error.what}", fix=error.fix, trace=error.trace)


def is_display_only(spec: RewardSpec, part: RewardPart) -> bool:
    """Whether `part` is a judge whose weight 0 never changes the reward, so that its number is only displayed."""
    return part.judge is not None and part.weight == 0 and spec.compose != "min"


PartResults = Sequence[RewardResult | None]
"""Results of the parts of a reward for one response. None: a display-only part (`is_display_only`) without a result."""


def compose_group(spec: RewardSpec, group: Sequence[PartResults | RewardError], *, alone: bool = False) -> list[Scored]:
    """Combine the results of parts into the rewards of a group, in order. A response with an error keeps it.

    `alone`: whether each response is scored by itself, so that parts are summed up instead of standardised. A value that is
    not finite in float32 is an error of its response.
    """
    known = [results for results in group if not isinstance(results, RewardError)]
    values = [[0.0 if result is None else result.value for result in results] for results in known]
    if spec.compose == "standardised" and not alone:
        numbers = [
            [None if result is None else result.value for result in of_part] for of_part in zip(*known, strict=True)
        ]
        columns = [standardise(of_part, spec.std_ddof, spec.std_eps) for of_part in numbers]
        values = [list(of_response) for of_response in zip(*columns, strict=True)]
    composed = iter([_composed(spec, *one) for one in zip(known, values, strict=True)])
    return [results if isinstance(results, RewardError) else next(composed) for results in group]


def standardise(values: Sequence[float | None], ddof: int, eps: float) -> list[float]:
    """Return (value - mean) / (deviation + eps) for each value of a group; 0 for None, which has no part in the others.

    The deviation is sqrt(sum of (value - mean)^2 / (n - ddof)). All are 0 if the values are equal or too few. With several
    reward models, GRPO's advantage is the weighted sum of these numbers over the models, as in G-Core and DanceGRPO
    (arXiv 2505.07818), which have ddof 1 and eps 1e-8.
    """
    there = [value for value in values if value is not None]
    if len(there) <= ddof or min(there) == max(there):
        return [0.0] * len(values)
    mean = math.fsum(there) / len(there)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in there) / (len(there) - ddof))
    return [0.0 if value is None else (value - mean) / (deviation + eps) for value in values]


def _composed(spec: RewardSpec, results: PartResults, values: Sequence[float]) -> Scored:
    """The reward with these values of its parts. `results`: those of the parts, which are kept for display."""
    value = _value(spec, values)
    if not math.isfinite(value) or abs(value) > LARGEST_REWARD:
        return RewardError(
            f"the parts of the reward sum up to {value}, which is not finite in float32", fix="Lower their weights"
        )
    known = [(part.shown_as, one) for part, one in zip(spec.parts, results, strict=True) if one is not None]
    shown = [(label, result.value) for label, result in known]
    inner = [(f"{label}.{name}", number) for label, result in known for name, number in result.parts]
    return RewardResult(value, (*shown, *inner))


def _value(spec: RewardSpec, values: Sequence[float]) -> float:
    weighted = [part.weight * value for part, value in zip(spec.parts, values, strict=True)]
    if spec.compose == "min":
        return min(weighted)
    if spec.compose == "gate":
        return math.fsum(weighted[1:]) if values[0] > 0 else 0.0
    return math.fsum(weighted)


ScoringCall = tuple[int, Mapping[str, Any], tuple[Response | None, ...], bool]
"""One call: index of the reward, the prompt's entry, the responses (None: check the entry), and whether they are scored
as a group."""


def score_responses(
    reward: OpenReward, responses: Sequence[Response | None], fields: Mapping[str, Any], *, group: bool
) -> list[Scored]:
    """Score each response, in order: a result or an error. For None the entry is checked; the result is 0 if it is valid.

    `group`: score the responses in one call of the reward.
    """
    shown = [response for response in responses if response is not None]
    if group and len(shown) == len(responses):
        return reward.score_group(shown, fields)
    return [_score_response(reward, response, fields) for response in responses]


def _score_response(reward: OpenReward, response: Response | None, fields: Mapping[str, Any]) -> Scored:
    try:
        if response is None:
            reward.check(fields)
            return RewardResult(0.0)
        return reward(response, fields)
    except RewardError as error:
        return error

"""Filters: plug-ins that drop groups (all samples of one prompt) from training, and say why.

A filter is found by name under the entry-point group `gcore.filters`.

A filter gets a scored group and returns None to keep it, or the reason to drop it:

    def two_ways(group: Group, fields: Mapping[str, Any], options: Mapping[str, Option]) -> str | None:
        texts = {sample.text for sample in group.samples}
        return None if len(texts) > 1 else "all its responses are the same"

A spec lists filters in `flow.filters`; the first one that refuses a group determines the reason. Filters are plug-ins
that run in the controller's event loop, so they must be fast, must not block, and must be pure, because a group may be
filtered again on another controller. If a filter raises, or returns anything but None or text, the prompt fails with
that reason, and the plug-in's traceback is reported in the job's events. gcore includes `signal`, `reward_band` and
`length`.

A custom flow may create and score its groups itself. The controller detects a group that cannot be
trained: its prompt then fails, instead of the training processes of the whole job.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, get_args

from gcore.config.base import Option
from gcore.config.train import FilterSpec, TrainSpec
from gcore.errors import GcoreError, SpecError
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
from gcore.types import (
    LARGEST_REWARD,
    Group,
    Outcome,
    OutcomeKind,
    PromptRef,
    Sample,
    Version,
    VersionSpan,
    range_problem,
)

FILTERS = PluginKind("filter", "gcore.filters", "flow.filters")

CONSTANT_REWARD_STD = 1e-6
"""Standard deviation up to which a group's rewards count as equal. `gcore.train.algorithms.advantages` then computes zero
advantages."""


class FilterError(GcoreError):
    """A filter raised an error or returned an invalid result. The prompt fails with this reason."""


class Filter(Protocol):
    """A filter plug-in: decides whether a scored group is trained."""

    def __call__(self, group: Group, fields: Mapping[str, Any], options: Mapping[str, Option]) -> str | None:
        """Return None to keep the group, else the reason to drop it.

        `fields`: the prompt's entry. `options`: the filter's options in the spec. Raises FilterError, also for invalid
        options.
        """
        ...


@dataclass(frozen=True, slots=True)
class CheckedFilter:
    """A plug-in filter with its options from the spec; checks what the plug-in returns."""

    name: str
    function: Filter
    options: Mapping[str, Option]

    def refuses(self, group: Group, fields: Mapping[str, Any]) -> str | None:
        """Return why the filter drops the group; None if it keeps it. Raises only FilterError."""
        try:
            reason: Any = self.function(group, fields, self.options)
        except FilterError:
            raise
        except RAISED as error:  # foreign code: one bad group must not end the controller
            raise FilterError(
                f"filter {shown_name(self.name)!r} raised {error_sentence(error)}", fix="Correct the filter"
            ) from error
        if reason is None:
            return None
        if not isinstance(reason, str) or not reason.strip():
            shown = repr(reason) if isinstance(reason, str | bool | int | float) else describe_result(reason)
            raise FilterError(
                f"filter {shown_name(self.name)!r} returned {shown}, neither None nor a sentence",
                fix="Correct the filter",
            )
        return reason


def find_filters(specs: Sequence[FilterSpec]) -> tuple[CheckedFilter, ...]:
    """Load the filters that a spec names, in order. Raises PluginFault, with the nearest known name for an unknown one."""
    return tuple(CheckedFilter(spec.name, find_plugin(FILTERS, spec.name), spec.options) for spec in specs)


def apply_filters(filters: Sequence[CheckedFilter], group: Group, fields: Mapping[str, Any]) -> Group | Outcome:
    """Return the group, or a filtered outcome with the reason of the first filter that drops it. Raises FilterError."""
    for one in filters:
        reason = one.refuses(group, fields)
        if reason is not None:
            return Outcome("filtered", reason)
    return group


def try_filters(filters: Sequence[CheckedFilter], samples: int, fields: Mapping[str, Any]) -> None:
    """Check the filters before a job begins, because invalid options would fail all groups.

    Applies each filter to an artificial group of `samples` responses with alternating rewards 0 and 1. `fields`: an
    entry of the data. Raises PluginFault.
    """
    spans = (VersionSpan(Version(0, 0), 0, 1),)
    made = (Sample((0,), (0.0,), "", "stop", spans, reward=float(index % 2)) for index in range(samples))
    group = Group(PromptRef(0, 0, 0), (0,), tuple(made))
    for one in filters:
        try:
            one.refuses(group, fields)
        except FilterError as error:
            raise PluginFault(error.what, where=FILTERS.where, fix=error.fix, trace=plugin_trace(error)) from error
        if one.function is signal and samples < 2:
            raise PluginFault(
                f"filter {one.name!r} compares the samples of a group, but flow.samples_per_prompt is {samples}",
                where=FILTERS.where,
                fix="Set it to at least 2, or remove the filter",
            )


def signal(group: Group, fields: Mapping[str, Any], options: Mapping[str, Option]) -> str | None:
    """Filter `signal`: drops a group whose rewards are equal up to rounding, as DAPO does.

    Equal means a standard deviation of at most 1e-6, in float64. Rewards of masked samples count, because they are part of
    the group's baseline. A group of one sample is dropped.
    """
    _known(options, "signal")
    return None if has_signal(group) else "all its rewards are the same"


def reward_band(group: Group, fields: Mapping[str, Any], options: Mapping[str, Option]) -> str | None:
    """Filter `reward_band`: drops a group whose mean reward is below `low` or above `high` (prompts too hard or too easy).

    Options: `low`, `high`; one may be left out.
    """
    _known(options, "reward_band", "low", "high")
    low, high = _band(options, "reward_band", "low", "high")
    mean = math.fsum(sample.reward for sample in group.samples) / len(group.samples)
    if mean < low:
        return f"its mean reward is below {low:g}"
    return f"its mean reward is above {high:g}" if mean > high else None


def length(group: Group, fields: Mapping[str, Any], options: Mapping[str, Option]) -> str | None:
    """Filter `length`: drops a group with a response shorter than `least` or longer than `most` tokens.

    Counts the tokens that the policy generated. Options: `least`, `most`; one may be left out.
    """
    _known(options, "length", "least", "most")
    least, most = _band(options, "length", "least", "most")
    lengths = [sample.own_tokens for sample in group.samples]
    if min(lengths) < least:
        return f"a response is shorter than {least:g} tokens"
    return f"a response is longer than {most:g} tokens" if max(lengths) > most else None


def has_signal(group: Group) -> bool:
    """Whether the group's rewards differ by more than rounding, in float64; False for a single sample."""
    rewards = [float(sample.reward) for sample in group.samples]
    return len(rewards) > 1 and statistics.stdev(rewards) > CONSTANT_REWARD_STD


def _known(options: Mapping[str, Option], name: str, *known: str) -> None:
    for option in options:
        if option not in known:
            raise FilterError(
                f"filter {name!r} has no option {option!r}", fix=f"Known options: {', '.join(known) or 'none'}"
            )


def _band(options: Mapping[str, Option], name: str, low: str, high: str) -> tuple[float, float]:
    if not options:
        raise FilterError(f"filter {name!r} has no bound", fix=f"Set options.{low}, options.{high} or both")
    ends = []
    for option, default in ((low, -math.inf), (high, math.inf)):
        value = options.get(option, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise FilterError(
                f"option {option!r} of filter {name!r} is {value!r}, which is not a number", fix="Set it to a number"
            )
        ends.append(float(value))
    if ends[0] > ends[1]:
        raise FilterError(f"filter {name!r} keeps nothing: {low} is above {high}", fix="Correct the options")
    return ends[0], ends[1]


WITHOUT_GROUP = tuple(kind for kind in get_args(OutcomeKind) if kind != "trained")
"""Kinds of the outcomes that a flow may return in place of a group."""


def check_production(result: object, ref: PromptRef) -> Group | Outcome:
    """Check what a flow's coroutine returned for the prompt `ref`.

    Raises SpecError unless it is the prompt's group, or an outcome without a group.

    An outcome "trained" cannot be committed. After a group of another prompt, this prompt would be sampled forever.
    """
    if isinstance(result, Group):
        if result.ref == ref:
            return result
        what = f"a group of prompt {result.ref}"
    elif isinstance(result, Outcome):
        if result.kind in WITHOUT_GROUP and isinstance(result.reason, str):
            return result
        what = f"{result!r:.200}"
    else:
        what = "None" if result is None else f"a {type(result).__name__}"
    kinds = " or ".join(f"Outcome({kind!r}, reason)" for kind in WITHOUT_GROUP)
    fix = f"Let the coroutine for batch.start() return the prompt's Group, {kinds}"
    raise SpecError(f"the flow returned {what} for prompt {ref}", where="flow.name", fix=fix)


def untrainable_reason(group: Group, train: TrainSpec, media_tokens: frozenset[int] = frozenset()) -> str | None:
    """Say why the train ranks (training processes) could not train the group; None if they can. `media_tokens`: IDs that
    stand for media in the model, to which ranks give no probability."""
    if not group.samples:
        return "the flow returned a group without samples"
    for index, sample in enumerate(group.samples):
        if not sample.length or not sample.spans or len(sample.logprobs) != sample.length:
            return (
                f"the flow returned a response (sample {index}) of {sample.length} tokens, {len(sample.logprobs)} "
                f"log-probabilities and {len(sample.spans)} version spans; it needs tokens, one log-probability for each, and spans"
            )
        if why := range_problem(sample.observed, sample.length):
            return f"the flow returned a response (sample {index}) whose observed tokens are misplaced: {why}"
        if sample.prompt_ids is not None:
            return (
                f"the flow returned a response (sample {index}) of an agent without determining its prompt; "
                "use peer.score to make the group"
            )
        if not sample.own_tokens:
            return f"the flow returned a response (sample {index}) without a token generated by the policy"
        if media_tokens and (found := media_tokens.intersection(sample.own_token_ids)):
            return (
                f"a response (sample {index}) has token {min(found)}, which stands for media and cannot be trained; the "
                "engine must not sample it"
            )
    if train.loss != "sft":
        if len(group.samples) < 2 and train.compares_group:
            return (
                f"the flow returned a group of one sample, but train.advantage {train.advantage!r} compares the samples of "
                "a group; at least 2 are needed"
            )
        if train.advantage == "remax" and group.baseline is None:
            return "the flow returned a group without a baseline, which train.advantage 'remax' needs"
    for what, value in (("baseline", group.baseline), *(("reward", sample.reward) for sample in group.samples)):
        if value is not None and (not math.isfinite(value) or abs(value) > LARGEST_REWARD):
            return f"the flow returned a {what} of {value}, which is not finite in float32"
    return None

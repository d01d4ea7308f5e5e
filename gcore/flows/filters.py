"""Filters: which groups are not trained, and why; found by name under the entry-point group `gcore.filters`.

A filter looks at a scored group and returns None to keep it, or a sentence why it is filtered:

    def two_ways(group: Group, fields: Mapping[str, Any], options: Mapping[str, Option]) -> str | None:
        texts = {sample.text for sample in group.samples}
        return None if len(texts) > 1 else "all its responses are the same"

A spec names them in `flow.filters`, in order; the first that refuses a group names the reason. They are plug-ins and run on
the controller's event loop, so they must be quick and wait for nothing, and pure: a group may be filtered again elsewhere.
What one raises, or returns that is neither None nor a sentence, ends its prompt as failed, with the reason, and the plug-in's
traceback goes into the job's events. gcore's own are `signal`, `reward_band` and `length`.

A flow of one's own may build and score its groups itself. What such a group lacks for training is found where the group is
made: it is the failure of its prompt and not of the train world.
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
from gcore.plugins import RAISED, PluginFault, PluginKind, error_sentence, find_plugin, plugin_trace
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
"""As `gcore.train.algorithms.advantages` has it: such a group has advantages of zero."""


class FilterError(GcoreError):
    """A filter could not say. The prompt's outcome is failed, with this as the reason."""


class Filter(Protocol):
    """Says of a scored group whether it is trained."""

    def __call__(self, group: Group, fields: Mapping[str, Any], options: Mapping[str, Option]) -> str | None:
        """None to keep it, else why not. `fields`: the prompt's entry. Raises FilterError, also for options it lacks."""
        ...


@dataclass(frozen=True, slots=True)
class CheckedFilter:
    """A filter with its options, whose every result is checked."""

    name: str
    function: Filter
    options: Mapping[str, Option]

    def refuses(self, group: Group, fields: Mapping[str, Any]) -> str | None:
        """Why the group is not trained, or None. Raises FilterError and nothing else."""
        try:
            reason: Any = self.function(group, fields, self.options)
        except FilterError:
            raise
        except RAISED as error:  # the edge to foreign code: one odd group must not end the controller
            raise FilterError(
                f"filter {self.name!r} raised {error_sentence(error)}", fix="Correct the filter"
            ) from error
        if reason is None:
            return None
        if not isinstance(reason, str) or not reason.strip():
            raise FilterError(
                f"filter {self.name!r} returned {reason!r}, neither None nor a sentence", fix="Correct the filter"
            )
        return reason


def find_filters(specs: Sequence[FilterSpec]) -> tuple[CheckedFilter, ...]:
    """The filters of a spec, in its order. Raises PluginFault, with the nearest name if there is none."""
    return tuple(CheckedFilter(spec.name, find_plugin(FILTERS, spec.name), spec.options) for spec in specs)


def apply_filters(filters: Sequence[CheckedFilter], group: Group, fields: Mapping[str, Any]) -> Group | Outcome:
    """The group, or that it is filtered, and why. Raises FilterError."""
    for one in filters:
        reason = one.refuses(group, fields)
        if reason is not None:
            return Outcome("filtered", reason)
    return group


def try_filters(filters: Sequence[CheckedFilter], samples: int, fields: Mapping[str, Any]) -> None:
    """Ask each filter about a made-up group with rewards 0 and 1 in turn: what is wrong with its options fails all groups.

    `fields`: an entry of the data. Raises PluginFault.
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
                f"filter {one.name!r} compares the samples of a group, and flow.samples_per_prompt is {samples}",
                where=FILTERS.where,
                fix="Use at least 2, or leave the filter out",
            )


def signal(group: Group, fields: Mapping[str, Any], options: Mapping[str, Option]) -> str | None:
    """Refuses a group whose rewards are the same up to rounding (deviation at most 1e-6, in float64), as DAPO does.

    A masked sample's reward counts: it stands in the group's baseline. A single sample is compared with nothing.
    """
    _known(options, "signal")
    return None if has_signal(group) else "all its rewards are the same"


def reward_band(group: Group, fields: Mapping[str, Any], options: Mapping[str, Option]) -> str | None:
    """Refuses a group whose mean reward is below `low` or above `high`: prompts that are too hard, or known by heart.

    Options: `low`, `high`; one may be left out.
    """
    _known(options, "reward_band", "low", "high")
    low, high = _band(options, "reward_band", "low", "high")
    mean = math.fsum(sample.reward for sample in group.samples) / len(group.samples)
    if mean < low:
        return f"its mean reward is below {low:g}"
    return f"its mean reward is above {high:g}" if mean > high else None


def length(group: Group, fields: Mapping[str, Any], options: Mapping[str, Option]) -> str | None:
    """Refuses a group one of whose responses is shorter than `least` or longer than `most`, in tokens that the policy made."""
    _known(options, "length", "least", "most")
    least, most = _band(options, "length", "least", "most")
    lengths = [sample.own_tokens for sample in group.samples]
    if min(lengths) < least:
        return f"a response is shorter than {least:g} tokens"
    return f"a response is longer than {most:g} tokens" if max(lengths) > most else None


def has_signal(group: Group) -> bool:
    """False if the rewards are the same up to rounding, in float64, or if there is only one."""
    rewards = [float(sample.reward) for sample in group.samples]
    return len(rewards) > 1 and statistics.stdev(rewards) > CONSTANT_REWARD_STD


def _known(options: Mapping[str, Option], name: str, *known: str) -> None:
    for option in options:
        if option not in known:
            raise FilterError(f"filter {name!r} has no option {option!r}", fix=f"Known: {', '.join(known) or 'none'}")


def _band(options: Mapping[str, Option], name: str, low: str, high: str) -> tuple[float, float]:
    if not options:
        raise FilterError(f"filter {name!r} has no bound", fix=f"Give options.{low}, options.{high} or both")
    ends = []
    for option, default in ((low, -math.inf), (high, math.inf)):
        value = options.get(option, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise FilterError(f"option {option!r} of filter {name!r} is {value!r}, no number", fix="Write a number")
        ends.append(float(value))
    if ends[0] > ends[1]:
        raise FilterError(f"filter {name!r} keeps nothing: {low} is above {high}", fix="Correct the options")
    return ends[0], ends[1]


WITHOUT_GROUP = tuple(kind for kind in get_args(OutcomeKind) if kind != "trained")


def check_production(result: object, ref: PromptRef) -> Group | Outcome:
    """What the production of prompt `ref` came to. Raises SpecError if it is neither its group nor a way to end without one.

    Nobody could commit an outcome "trained"; a group of another prompt leaves this one to be issued again, for ever.
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
    fix = f"Let what batch.start() is given return the prompt's Group, {kinds}"
    raise SpecError(f"the flow gave {what} for prompt {ref}", where="flow.name", fix=fix)


def untrainable_reason(group: Group, train: TrainSpec) -> str | None:
    """Why no rank could train the group as it is, or None."""
    if not group.samples:
        return "the flow gave a group without samples"
    for index, sample in enumerate(group.samples):
        if not sample.token_ids or not sample.spans or len(sample.logprobs) != len(sample.token_ids):
            return (
                f"the flow gave a response (sample {index}) of {len(sample.token_ids)} tokens, {len(sample.logprobs)} "
                f"log-probabilities and {len(sample.spans)} version spans; it needs tokens, one of the second for each, and spans"
            )
        if why := range_problem(sample.observed, len(sample.token_ids)):
            return f"the flow gave a response (sample {index}) whose observed tokens are misplaced: {why}"
        if sample.prompt_ids is not None:
            return (
                f"the flow gave a response (sample {index}) that an agent made, and nobody has looked what its prompt is; "
                "let peer.score make the group"
            )
        if not sample.own_tokens:
            return f"the flow gave a response (sample {index}) of which the policy made no token"
    if train.loss != "sft":
        if len(group.samples) < 2 and train.compares_group:
            return (
                f"the flow gave a group of one sample, and train.advantage {train.advantage!r} compares the samples of a "
                "group; at least 2 are needed"
            )
        if train.advantage == "remax" and group.baseline is None:
            return "the flow gave a group without a baseline, which train.advantage 'remax' holds its rewards against"
    for what, value in (("baseline", group.baseline), *(("reward", sample.reward) for sample in group.samples)):
        if value is not None and (not math.isfinite(value) or abs(value) > LARGEST_REWARD):
            return f"the flow gave a {what} of {value}, which is not finite in float32"
    return None

"""Which of the kept samples somebody wants to see, and in which words they are not there. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from gcore.config.reading import SamplesSpec
from gcore.errors import UsageError
from gcore.ledger.ancestry import is_ancestor
from gcore.ledger.records import Head
from gcore.samples.records import KeptAdvantage, KeptGroup, KeptSample
from gcore.types import PromptRef, Version

Order = Literal["stream", "best", "worst"]
Standing = Literal["committed", "under way", "cut off"]
SHOWN_RANGES = 12


class NoSamples(UsageError):
    """There are none of what was asked for; the sentence says why, and which there are."""


@dataclass(frozen=True, slots=True)
class Response:
    """A kept sample, its index in its group, and its advantage if a rank kept it."""

    index: int
    sample: KeptSample
    advantage: KeptAdvantage | None


class Kept(Protocol):
    """What groups are picked by."""

    @property
    def ref(self) -> PromptRef: ...
    @property
    def source(self) -> str: ...
    @property
    def mean_reward(self) -> float: ...


G = TypeVar("G", bound=Kept)


@dataclass(frozen=True, slots=True)
class Selection(Generic[G]):
    """`groups`, in the order asked for, of `of` that fit."""

    groups: tuple[G, ...]
    of: int


def standing(head: Head, version: Version) -> Standing:
    """How the step that led to `version` stands on head's chain."""
    if is_ancestor(head, version):
        return "committed"
    return "under way" if version == Version(head.lineage, head.step + 1) else "cut off"


def find_version(
    kept: Sequence[Version], head: Head | None, spec: SamplesSpec, step: int | None, *, ended: bool = False
) -> Version:
    """The version of `step`, in the newest lineage that has it; by default the newest committed one. Raises NoSamples.

    `ended`: whether the job has, so that nothing more is to come.
    """
    if step is not None and step < 1:
        raise NoSamples(f"there is no step {step}; steps are counted from 1")
    if step is not None and (found := [version for version in kept if version.step == step]):
        return max(found)
    if spec.groups == 0:
        raise NoSamples(
            "no samples are kept of this job: samples.groups is 0", fix="Set it in the spec of the next one"
        )
    if ended and not kept and (head is None or head.step == 0):
        raise NoSamples("the job ended before its first step was trained, so there are no samples")
    if head is None or (head.step == 0 and not kept):
        raise NoSamples("no step has been trained yet, so there are no samples", fix="Ask again after the first step")
    if step is None:
        if not kept:
            raise NoSamples("no samples were kept of this job", fix="The controllers' logs say why")
        return max((v for v in kept if is_ancestor(head, v)), default=max(kept))
    if step > head.step:
        what = f"step {step} has not been trained yet; the newest that is committed is {head.step}"
        more = f"; what is after {head.step} is not committed" if any(v.step > head.step for v in kept) else ""
        raise NoSamples(what, fix=f"{_there(kept)}{more}")
    if not spec.due(step):
        raise NoSamples(f"the samples of step {step} are not kept: samples.every is {spec.every}", fix=_there(kept))
    if kept and step < min(version.step for version in kept):
        raise NoSamples(f"the samples of step {step} were removed: samples.keep is {spec.keep}", fix=_there(kept))
    raise NoSamples(f"no samples of step {step} are there: who held them died, or could not write", fix=_there(kept))


def find_kept(kept: Sequence[Version], step: int | None) -> Version:
    """As `find_version`, of a run of which its folder alone is known: in the newest lineage that has it. Raises NoSamples."""
    if not kept:
        raise NoSamples("no samples were kept of this job")
    if step is None:
        return max(kept)
    if not (found := [version for version in kept if version.step == step]):
        raise NoSamples(f"no samples of step {step} are kept", fix=_there(kept))
    return max(found)


def select(groups: Iterable[G], *, source: str = "", order: Order = "stream", limit: int = 0) -> Selection[G]:
    """At most `limit` groups (0: all) of `source` ("": any), in `order`. Raises NoSamples for a source that has none."""
    every = sorted(groups, key=lambda group: group.ref)
    if not every:
        raise NoSamples("the samples of this step are gone, or being written", fix="Ask again")
    fitting = [group for group in every if not source or group.source == source]
    if not fitting:
        names = ", ".join(sorted({repr(group.source) for group in every}))
        raise NoSamples(f"no group of this step is of source {source!r}", fix=f"There are groups of {names}")
    if order != "stream":
        fitting.sort(key=lambda group: _sign(order) * group.mean_reward)
    return Selection(tuple(fitting[:limit] if limit else fitting), len(fitting))


def responses_of(
    group: KeptGroup, advantages: Mapping[int, KeptAdvantage], order: Order = "stream"
) -> tuple[Response, ...]:
    """Its responses in `order`; `advantages`: by the sample's index."""
    found = [Response(i, sample, advantages.get(i)) for i, sample in enumerate(group.samples)]
    if order != "stream":
        found.sort(key=lambda response: _sign(order) * response.sample.reward)
    return tuple(found)


def _sign(order: Order) -> int:
    return -1 if order == "best" else 1


def _there(kept: Sequence[Version]) -> str:
    """`There are those of steps 1, 5-9`"""
    steps = sorted({version.step for version in kept})
    if not steps:
        return "There are none at all"
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], step]
        else:
            ranges.append([step])
    shown = ["-".join(map(str, one)) for one in ranges]
    if len(shown) > SHOWN_RANGES:
        shown = [*shown[: SHOWN_RANGES - 1], "...", shown[-1]]
    return f"There are those of step{'s' if len(steps) > 1 else ''} {', '.join(shown)}"

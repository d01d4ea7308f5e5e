"""Curricula: another order of a data epoch's prompts, found by name under the entry-point group `gcore.curricula`.

A curriculum is a function of a `CurriculumView` (the seed, the epoch, its options, and what was committed until the epoch
began) that returns a key, or None for the usual order. The key gives every entry a number; within each shard the smallest
come first, and where they are equal the keyed permutation stands. What it may not look at is a clock, a random number or
anything on this machine: every controller computes the order for itself, and all must find the same. The statistics are
fixed once for all of them (`gcore.ledger.statistics`).

    def short_first(view: CurriculumView) -> Key | None:
        if view.epoch >= 2:
            return None                         # by then everything in the usual order
        return lambda source, fields: len(str(fields["prompt"]))

The key is foreign code: what it raises, and what is no finite number, ends the job with a sentence. An entry's fields are
read when the key asks for them, so that one that looks at the source only reads nothing. Which prompts an epoch holds,
and that each comes exactly once, no curriculum can change; nor the order in which shards take turns.

gcore's own are `easy_first`, by a number in each entry, and `hard_sources_first`, by what was committed before the epoch began.
The spec says which epochs they order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gcore.config.base import Option
from gcore.data.order import ShardOrder
from gcore.data.stream import PromptStream
from gcore.errors import GcoreError, UsageError
from gcore.plugins import RAISED, PluginKind, find_plugin

CURRICULA = PluginKind("curriculum", "gcore.curricula", "data.curriculum")

LARGEST = 3.4e38
"""Keys are compared as float32."""


class CurriculumError(UsageError):
    """A curriculum gave no order: its options, its code or the data are wrong.

    The job cannot go on: another order than the one asked for is not what was asked for.
    """


@dataclass(frozen=True, slots=True)
class SourceStatistics:
    """What came of a source's prompts. Means are over its trained groups; None while there are none."""

    kept: int = 0
    filtered: int = 0
    failed: int = 0
    mean_reward: float | None = None
    """Of groups, each the mean of its samples."""
    mean_length: float | None = None
    """Of responses, in tokens."""
    truncated: float | None = None
    """Share of responses that were cut off, 0 to 1."""

    @property
    def prompts(self) -> int:
        """Prompts with an outcome."""
        return self.kept + self.filtered + self.failed


@dataclass(frozen=True, slots=True)
class CurriculumView:
    """All that the order of an epoch may depend on, beside the entries. Every source is in every mapping."""

    seed: int
    epoch: int
    """From 0."""
    options: Mapping[str, Option]
    sources: tuple[str, ...]
    """In the order of the spec."""
    so_far: Mapping[str, SourceStatistics]
    """Of everything committed until the epoch began; empty counts in epoch 0."""
    latest: Mapping[str, SourceStatistics]
    """Of what was committed since the epoch before began."""


Key = Callable[[str, Mapping[str, Any]], float]
"""(source, fields of the entry) to a number; smaller ones come first."""


class Curriculum(Protocol):
    """Orders an epoch."""

    def __call__(self, view: CurriculumView) -> Key | None:
        """The key of the epoch, or None for the usual order. Raises CurriculumError for options it does not understand."""
        ...


def find_curriculum(name: str) -> Curriculum:
    """The curriculum of that entry-point name. Raises PluginFault, with the nearest name if there is none."""
    curriculum: Curriculum = find_plugin(CURRICULA, name)
    return CheckedCurriculum(name, curriculum)


class CheckedCurriculum:
    """A curriculum whose every result is checked."""

    def __init__(self, name: str, curriculum: Curriculum) -> None:
        self._name = name
        self._curriculum = curriculum

    def __call__(self, view: CurriculumView) -> Key | None:
        """As the curriculum. Raises CurriculumError and nothing else, and so does the key."""
        try:
            key = self._curriculum(view)
        except CurriculumError:
            raise
        except RAISED as error:  # the edge to foreign code
            raise CurriculumError(
                f"curriculum {self._name!r} raised {error!r} for epoch {view.epoch}", fix="Correct it"
            ) from error
        if key is None:
            return None
        if not callable(key):
            raise CurriculumError(f"curriculum {self._name!r} gave {key!r} in place of a key", fix="Return a function")
        return self._checked(key)

    def _checked(self, key: Key) -> Key:
        def number(source: str, fields: Mapping[str, Any]) -> float:
            try:
                value = float(key(source, fields))
            except GcoreError:
                raise
            except RAISED as error:  # the edge to foreign code
                raise CurriculumError(
                    f"the key of curriculum {self._name!r} raised {error!r}", fix="Correct it, or the data"
                ) from error
            if not math.isfinite(value) or abs(value) > LARGEST:
                raise CurriculumError(
                    f"the key of curriculum {self._name!r} is {value}, which is not finite in float32", fix="Correct it"
                )
            return value

        return number


class ArrangedOrder:
    """An order that was computed whole. `places` [length] uint32: the place in the shard that comes `seq`-th."""

    def __init__(self, places: npt.NDArray[np.uint32]) -> None:
        self._places = places

    def index(self, seq: int) -> int:
        """The place in the shard that comes `seq`-th. Raises IndexError outside range(length)."""
        if not 0 <= seq < len(self._places):
            raise IndexError(f"place {seq} of a shard of {len(self._places)}")
        return int(self._places[seq])


def arrange_shard(seed: int, data_epoch: int, shard: int, keys: npt.NDArray[np.float32]) -> ArrangedOrder:
    """The order of a shard by its keys [length], by place; equal ones stay as the keyed permutation has them."""
    usual = ShardOrder(seed, data_epoch, shard, len(keys))
    places = np.fromiter((usual.index(seq) for seq in range(len(keys))), dtype=np.uint32, count=len(keys))
    return ArrangedOrder(places[np.argsort(keys[places], kind="stable")])


def shard_keys(
    stream: PromptStream, key: Key, data_epoch: int, shard: int, *, stopped: Callable[[], bool] = lambda: False
) -> npt.NDArray[np.float32] | None:
    """The keys of a shard's entries [length], by place; None if `stopped` said so meanwhile. Four bytes an entry.

    Blocks: it reads the entries, if the key looks at them. Raises CurriculumError, DataError.
    """
    keys = np.zeros(stream.shape.lengths[shard], dtype=np.float32)
    for place in range(len(keys)):
        if place % 256 == 0 and stopped():
            return None
        keys[place] = entry_key(stream, key, data_epoch, shard, place)
    return keys


def entry_key(stream: PromptStream, key: Key, data_epoch: int, shard: int, place: int) -> float:
    """The key of one entry. Raises CurriculumError naming the entry, DataError."""
    opened, entry = stream.at(data_epoch, shard, place)
    try:
        return key(opened.name, LazyFields(lambda: opened.dataset.entry(entry)))
    except CurriculumError as error:
        raise CurriculumError(error.what, where=opened.dataset.name_of(entry), fix=error.fix) from error


@dataclass
class LazyFields(Mapping[str, Any]):
    """An entry's fields, read when the first of them is asked for."""

    read: Callable[[], Mapping[str, Any]]
    _fields: Mapping[str, Any] | None = field(default=None, init=False)

    def _there(self) -> Mapping[str, Any]:
        if self._fields is None:
            self._fields = self.read()
        return self._fields

    def __getitem__(self, name: str) -> Any:
        return self._there()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._there())

    def __len__(self) -> int:
        return len(self._there())


def easy_first(view: CurriculumView) -> Key | None:
    """Entries by their difficulty, the easiest first.

    Options: `field`, the numeric field of an entry that holds its difficulty (default "difficulty"); `epochs`, the first
    so many epochs are ordered (default: all).
    """
    options = _options(view, "easy_first", "field", "epochs")
    name = options.get("field", "difficulty")
    if not isinstance(name, str) or not name:
        raise CurriculumError(
            f"easy_first: field is {name!r}, not the name of a field", where="data.curriculum_options"
        )
    if not _ordered(view, options):
        return None

    def difficulty(source: str, fields: Mapping[str, Any]) -> float:
        value = fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CurriculumError(
                f"{name!r} is {value!r}, not a number" if name in fields else f"the entry has no field {name!r}",
                fix=f"Give every entry a number there, or name another field in data.curriculum_options.field (source {source!r})",
            )
        return float(value)

    return difficulty


def hard_sources_first(view: CurriculumView) -> Key | None:
    """Sources by the mean reward of their groups since the epoch before began, the lowest first.

    A source of which nothing was trained comes first: nothing is known of it. Equal sources stay mixed, as in the usual
    order. Options: `epochs`, the first so many epochs are ordered (default: all).
    """
    options = _options(view, "hard_sources_first", "epochs")
    if view.epoch == 0 or len(view.sources) < 2 or not _ordered(view, options):
        return None
    rewards = {source: _mean_reward(view, source) for source in view.sources}
    known = sorted({reward for reward in rewards.values() if reward is not None})
    ranks = {source: 0.0 if reward is None else 1.0 + known.index(reward) for source, reward in rewards.items()}
    return lambda source, _fields: ranks[source]


def _mean_reward(view: CurriculumView, source: str) -> float | None:
    latest = view.latest[source].mean_reward
    return latest if latest is not None else view.so_far[source].mean_reward


def _options(view: CurriculumView, name: str, *known: str) -> Mapping[str, Any]:
    for option in view.options:
        if option not in known:
            raise CurriculumError(
                f"{name} has no option {option!r}", where="data.curriculum_options", fix=f"Known: {', '.join(known)}"
            )
    return view.options


def _ordered(view: CurriculumView, options: Mapping[str, Any]) -> bool:
    epochs = options.get("epochs")
    if epochs is None:
        return True
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise CurriculumError(
            f"epochs is {epochs!r}, not a whole number from 1 on", where="data.curriculum_options", fix="Correct it"
        )
    return view.epoch < epochs

"""Curricula: plug-ins that order a data epoch's prompts, found by name in the entry-point group `gcore.curricula`.

A curriculum is a function of a `CurriculumView` (seed, epoch, options, and statistics of what was trained before the
epoch). It returns a key function, or None for the default order. The key maps every entry to a number. Within each
shard, entries with smaller numbers come first; equal numbers keep the default order. A curriculum must not depend on a
clock, random numbers or the machine, because every controller computes the order itself and all must agree. The
statistics are fixed once for all controllers (`gcore.ledger.statistics`).

    def short_first(view: CurriculumView) -> Key | None:
        if view.epoch >= 2:
            return None                         # default order from the third epoch on
        return lambda source, fields: len(str(fields["prompt"]))

The key is foreign code. If it raises or returns a number that is not finite, the job fails with that reason. An entry's
fields are read only if the key accesses them. A curriculum cannot change which prompts an epoch contains, that each
comes exactly once, or to which shard an entry belongs.

Built in are `easy_first` (by a number in each entry) and `hard_sources_first` (by statistics of earlier epochs). The
spec says which epochs they order.
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
from gcore.plugins import RAISED, PluginKind, describe_result, find_plugin, shown_name

CURRICULA = PluginKind("curriculum", "gcore.curricula", "data.curriculum")

LARGEST = 3.4e38
"""Maximum absolute value of a key: keys are compared as float32."""


class CurriculumError(UsageError):
    """A curriculum failed: its options, its code or the data are wrong.

    The job fails, because it must not train in another order than the requested one.
    """


@dataclass(frozen=True, slots=True)
class SourceStatistics:
    """Statistics of a source's prompts, for curricula. `kept`, `filtered`, `failed`: number of prompts by outcome.

    Means are over the trained groups; None if there are none.
    """

    kept: int = 0
    filtered: int = 0
    failed: int = 0
    mean_reward: float | None = None
    """Mean over groups of the mean reward of their samples."""
    mean_length: float | None = None
    """Mean length of responses, in tokens."""
    truncated: float | None = None
    """Share of truncated responses, 0 to 1."""

    @property
    def prompts(self) -> int:
        """Number of prompts that are trained, filtered or failed."""
        return self.kept + self.filtered + self.failed


@dataclass(frozen=True, slots=True)
class CurriculumView:
    """Input of a curriculum: what an epoch's order may depend on besides the entries. Every mapping has every source."""

    seed: int
    epoch: int
    """The data epoch to order, counted from 0."""
    options: Mapping[str, Option]
    sources: tuple[str, ...]
    """Names of the sources, in the order of the spec."""
    so_far: Mapping[str, SourceStatistics]
    """Statistics of everything committed before the epoch; zero in epoch 0."""
    latest: Mapping[str, SourceStatistics]
    """Statistics of what was committed since the previous epoch began."""


Key = Callable[[str, Mapping[str, Any]], float]
"""Key function of a curriculum: maps (source, fields of the entry) to a number. Smaller numbers come first."""


class Curriculum(Protocol):
    """Interface of a curriculum: a function that orders a data epoch."""

    def __call__(self, view: CurriculumView) -> Key | None:
        """Return the epoch's key function, or None for the default order. Raises CurriculumError for unknown options."""
        ...


def find_curriculum(name: str) -> Curriculum:
    """Return the curriculum with this entry-point name. Raises PluginFault with the nearest name if it is unknown."""
    curriculum: Curriculum = find_plugin(CURRICULA, name)
    return CheckedCurriculum(name, curriculum)


class CheckedCurriculum:
    """Wraps a curriculum, and checks its result and the numbers of its key function."""

    def __init__(self, name: str, curriculum: Curriculum) -> None:
        self._name = shown_name(name)
        self._curriculum = curriculum

    def __call__(self, view: CurriculumView) -> Key | None:
        """Call the curriculum and return its key function, wrapped to check its numbers. Raises CurriculumError.

        The key function raises CurriculumError too, and passes on errors of reading the entry.
        """
        try:
            key = self._curriculum(view)
        except CurriculumError:
            raise
        except RAISED as error:  # foreign code
            raise CurriculumError(
                f"curriculum {self._name!r} raised {error!r} for epoch {view.epoch}", fix="Correct it"
            ) from error
        if key is None:
            return None
        if not callable(key):
            raise CurriculumError(
                f"curriculum {self._name!r} returned {describe_result(key)}, not a key function",
                fix="Return a function or None",
            )
        return self._checked(key)

    def _checked(self, key: Key) -> Key:
        def number(source: str, fields: Mapping[str, Any]) -> float:
            try:
                value = float(key(source, fields))
            except GcoreError:
                raise
            except RAISED as error:  # foreign code
                raise CurriculumError(
                    f"the key of curriculum {self._name!r} raised {error!r}", fix="Correct it, or the data"
                ) from error
            if not math.isfinite(value) or abs(value) > LARGEST:
                raise CurriculumError(
                    f"the key of curriculum {self._name!r} returned {value}, which is not finite in float32",
                    fix="Correct it",
                )
            return value

        return number


class ArrangedOrder:
    """A precomputed order of a shard. `places` [length] uint32: place in the shard, by position in the order."""

    def __init__(self, places: npt.NDArray[np.uint32]) -> None:
        self._places = places

    def index(self, seq: int) -> int:
        """Return the place in the shard that comes at position `seq`. Raises IndexError outside range(length)."""
        if not 0 <= seq < len(self._places):
            raise IndexError(f"the shard has {len(self._places)} prompts, so there is no position {seq}")
        return int(self._places[seq])


def arrange_shard(seed: int, data_epoch: int, shard: int, keys: npt.NDArray[np.float32]) -> ArrangedOrder:
    """Order a shard by the keys of its entries. `keys` [length]: by place. Equal keys keep the default order."""
    usual = ShardOrder(seed, data_epoch, shard, len(keys))
    places = np.fromiter((usual.index(seq) for seq in range(len(keys))), dtype=np.uint32, count=len(keys))
    return ArrangedOrder(places[np.argsort(keys[places], kind="stable")])


def shard_keys(
    stream: PromptStream, key: Key, data_epoch: int, shard: int, *, stopped: Callable[[], bool] = lambda: False
) -> npt.NDArray[np.float32] | None:
    """Compute the keys of all entries of a shard. Returns [length] float32, by place; None if `stopped` returns true.

    Blocks: reads the entries if the key function accesses them. Raises CurriculumError, DataError.
    """
    keys = np.zeros(stream.shape.lengths[shard], dtype=np.float32)
    for place in range(len(keys)):
        if place % 256 == 0 and stopped():
            return None
        keys[place] = entry_key(stream, key, data_epoch, shard, place)
    return keys


def entry_key(stream: PromptStream, key: Key, data_epoch: int, shard: int, place: int) -> float:
    """Compute the key of the entry at a place of a shard. Raises CurriculumError with the entry's name, and DataError."""
    opened, entry = stream.at(data_epoch, shard, place)
    try:
        return key(opened.name, LazyFields(lambda: opened.dataset.entry(entry)))
    except CurriculumError as error:
        raise CurriculumError(error.what, where=opened.dataset.name_of(entry), fix=error.fix) from error


@dataclass
class LazyFields(Mapping[str, Any]):
    """The fields of a dataset entry, read with `read` at the first access."""

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
    """Order entries by difficulty, easiest first.

    Options: `field`, the numeric field with the difficulty (default "difficulty"); `epochs`, how many of the first
    epochs to order (default: all).
    """
    options = _options(view, "easy_first", "field", "epochs")
    name = options.get("field", "difficulty")
    if not isinstance(name, str) or not name:
        raise CurriculumError(
            f"easy_first: field is {name!r}, which is not a field name", where="data.curriculum_options"
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
    """Order sources by the mean reward of their groups since the previous epoch began, lowest first.

    Sources without trained groups come first. Sources with equal means stay mixed as in the default order. Options:
    `epochs`, how many of the first epochs to order (default: all).
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
            f"epochs is {epochs!r}, not a whole number above 0", where="data.curriculum_options", fix="Correct it"
        )
    return view.epoch < epochs

"""The curricula that come with gcore.

`easy_first` goes by a number in each entry; `hard_sources_first` by what was committed before the epoch began. Both leave
the first and the last word to the spec: which epochs they order, and the usual order for all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gcore.prompts.curriculum import CurriculumError, CurriculumView, Key


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

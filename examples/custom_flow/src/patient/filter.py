"""Two answers: a group whose responses are all the same text has nothing to compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gcore.flows import FilterError
from gcore.types import Group


def two_answers(group: Group, fields: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
    """Keeps a group with at least `least` (2) different responses."""
    for option in options:
        if option != "least":
            raise FilterError(f"there is no option {option!r}", fix="The only one is 'least'")
    different = len({sample.text for sample in group.samples})
    return None if different >= int(options.get("least", 2)) else f"its responses are {different} text"

"""The ways in which an answer is printed: a table for people, JSON or YAML for programs, which get all of it."""

from __future__ import annotations

import json
import math
from enum import StrEnum
from typing import Any


class Output(StrEnum):
    """How an answer is printed."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"

    @property
    def is_for_programs(self) -> bool:
        """Whether all of an answer goes out, with the names of the API."""
        return self is not Output.TABLE

    def text(self, tree: Any) -> str:
        """A tree as a program reads it."""
        return as_yaml(tree) if self is Output.YAML else as_json(tree)


def as_json(tree: Any) -> str:
    """Indented, in the order given. What is no number (NaN, infinity), for which JSON has no word, is null."""
    try:
        return json.dumps(tree, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(tree), indent=2, ensure_ascii=False, allow_nan=False)


def as_yaml(tree: Any) -> str:
    """The same in YAML, without a line end behind it."""
    import yaml

    text = yaml.safe_dump(
        _plain(_finite(tree)), sort_keys=False, allow_unicode=True, default_flow_style=False, width=1000
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _plain(tree: Any) -> Any:
    """Of dicts, lists and what stands in them: YAML writes a subclass of text as what it is."""
    match tree:
        case dict():
            return {str(key): _plain(value) for key, value in tree.items()}
        case list():
            return [_plain(value) for value in tree]
        case StrEnum():
            return tree.value
    return tree


def _finite(tree: Any) -> Any:
    match tree:
        case float():
            return tree if math.isfinite(tree) else None
        case dict():
            return {key: _finite(value) for key, value in tree.items()}
        case list() | tuple():
            return [_finite(value) for value in tree]
    return tree

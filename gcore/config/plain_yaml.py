"""YAML for documents that people write: plain values only, and nothing that grows when it is read."""

from __future__ import annotations

from typing import Any

import yaml


class NotPlain(ValueError):
    """A text that is no such document: what is wrong, and where in it (":line:column", or nothing)."""

    def __init__(self, problem: str, place: str) -> None:
        self.problem = problem
        self.place = place
        super().__init__(problem)


class PlainLoader(yaml.SafeLoader):
    """YAML without aliases (a bomb is built of them), tags (`!!int x` makes PyYAML stumble) and doubled keys."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """As SafeLoader's; refuses what is no plain value."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        problem = None
        if isinstance(event, yaml.AliasEvent):
            problem = "aliases (*name) are not allowed"
        elif getattr(event, "tag", None) is not None:
            problem = "tags (!name) are not allowed"
        if problem is not None:
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As SafeLoader's; a key that stands twice is an error, not the last one's."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | bool | None):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_plain(text: str) -> Any:
    """The document. Raises NotPlain."""
    try:
        # A SafeLoader subclass: builds plain values only.
        return yaml.load(text, Loader=PlainLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"
        problem = getattr(error, "problem", None) or next(iter(str(error).splitlines()), type(error).__name__)
        raise NotPlain("nested too deep" if isinstance(error, RecursionError) else str(problem), place) from error

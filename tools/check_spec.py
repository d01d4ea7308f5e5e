"""Check the job spec's documentation: each section and each field says what it is; the example clusters are valid."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml
from pydantic import BaseModel

from gcore.config import JobSpec
from gcore.config.base import Section
from gcore.errors import GcoreError
from placement.mapping.cluster import parse_cluster
from tools.problem import Problem, line_of, main, relative


def check(root: Path) -> Iterator[Problem]:
    yield from spec_is_documented(JobSpec, root)
    yield from example_clusters_are_valid(root)


def sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """(prefix of its fields, section) of the spec and each section in it."""
    yield prefix, model
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from sections(field.annotation, f"{prefix}{name}.")


def spec_is_documented(spec: type[BaseModel], root: Path) -> Iterator[Problem]:
    described = _described(spec)
    for prefix, section in sections(spec):
        path, text, first = _source(section, root)
        name = section.__name__
        if not issubclass(section, Section):
            yield Problem(path, first, f"{name} is no Section: derive it from gcore's base of all sections")
        if not section.model_config.get("frozen"):
            yield Problem(path, first, f"{name} is not frozen: freeze it")
        if section.model_config.get("extra") != "forbid":
            yield Problem(path, first, f"{name} accepts unknown keys: forbid them")
        if not section.__doc__:
            yield Problem(path, first, f"{name} has no docstring: say what the section is")
        for field, info in section.model_fields.items():
            if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
                continue
            line = first + _line_in(text, field)
            said = info.description or ""
            if not said:
                yield Problem(path, line, f"{prefix}{field} has no description: write one")
            elif said[0].isalpha() and not said[0].isupper():
                yield Problem(
                    path, line, f"the description of {prefix}{field} begins in lower case: begin with a capital"
                )
            elif prefix and field not in described:
                yield Problem(path, line, f"the JSON schema does not describe {prefix}{field}: describe it there")


def _described(spec: type[BaseModel]) -> set[str]:
    """The names of the fields that the JSON schema describes in a section."""
    return {
        name
        for section in spec.model_json_schema().get("$defs", {}).values()
        for name, field in section.get("properties", {}).items()
        if "description" in field
    }


def _source(section: type[BaseModel], root: Path) -> tuple[str, str, int]:
    lines, first = inspect.getsourcelines(section)
    return relative(Path(inspect.getfile(section)), root), "".join(lines), first


def _line_in(text: str, field: str) -> int:
    found = re.search(rf"^ +{field}\s*:", text, re.MULTILINE)
    return line_of(text, found.group()) - 1 if found else 0


def example_clusters_are_valid(root: Path) -> Iterator[Problem]:
    for file in sorted((root / "deploy" / "local" / "clusters").glob("*.yaml")):
        try:
            slots = parse_cluster(yaml.safe_load(file.read_text()), where=file.name).slots
        except GcoreError as error:
            yield Problem(relative(file, root), 1, f"{error}: correct the example")
        else:
            if not slots:
                yield Problem(relative(file, root), 1, "the cluster has no slots: give it some")


if __name__ == "__main__":
    sys.exit(main({"spec": check}, __doc__))

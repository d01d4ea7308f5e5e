"""Deferred validators of records and sections all build: otherwise a faulty class fails only at its first use."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator

from documents import ROOT
from pydantic import BaseModel

from gcore.config.base import Section
from gcore.schema import RecordPart

OF_THEM = re.compile(r"^class \w+\(.*\b(Section|Record|RecordPart)\b", re.MULTILINE)


def below(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for one in kind.__subclasses__():
        yield one
        yield from below(one)


def test_each_can_be_built() -> None:
    for package in ("gcore", "controllers", "placement"):
        for file in (ROOT / package).rglob("*.py"):
            if OF_THEM.search(file.read_text()):
                importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    kinds = [*below(Section), *below(RecordPart)]
    assert len(kinds) > 100
    for kind in kinds:
        kind.model_rebuild(force=True)
        assert kind.__pydantic_complete__, kind

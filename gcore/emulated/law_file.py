"""Reads the law that an emulated device goes by: the file that `GCORE_EMULATED_LAW` names, else the default."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from gcore.emulated.launch import LAW_FILE
from gcore.emulated.law import Law
from gcore.errors import UsageError


def read_law(environment: Mapping[str, str]) -> Law:
    """Raises UsageError for a file that holds none."""
    name = environment.get(LAW_FILE)
    if not name:
        return Law()
    try:
        return Law.model_validate_json(Path(name).read_bytes())
    except OSError as error:
        raise UsageError(f"the law cannot be read ({error.strerror or error})", where=name) from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the document"
        raise UsageError(f"no law: {field}: {first['msg']}", where=name, fix="See gcore.emulated.law") from error

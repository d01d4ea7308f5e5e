"""Reads the law that an emulated device goes by: the file that `GCORE_EMULATED_LAW` names, else the default.

As a program it says whether a file holds one, for whoever brings a cluster up: what forecasts must not know the law, so it asks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from gcore.emulated.launch import LAW_FILE
from gcore.emulated.law import Law
from gcore.errors import UsageError


def read_law(environment: Mapping[str, str]) -> Law:
    """Raises UsageError for a file that holds none, and for one whose path depends on where one stands."""
    name = environment.get(LAW_FILE)
    if not name:
        return Law()
    if not Path(name).is_absolute():
        fix = "Name it by its whole path, or bring the cluster up by `gcore up` or `gcore run`, which do"
        raise UsageError("a worker does not stand where this path begins", where=f"{LAW_FILE}={name}", fix=fix)
    try:
        return Law.model_validate_json(Path(name).read_bytes())
    except OSError as error:
        raise UsageError(f"the law cannot be read ({error.strerror or error})", where=name) from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the document"
        raise UsageError(f"no law: {field}: {first['msg']}", where=name, fix="See gcore.emulated.law") from error


def main() -> None:
    """Ends with 2 and one sentence if the file that is named holds no law."""
    try:
        read_law({LAW_FILE: sys.argv[1]})
    except UsageError as error:
        sys.stdout.write(str(error))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()

"""atheris: random bytes as a spec file, and as the spec in a request. The answer is a spec or one error sentence: `make fuzz`."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["gcore.config", "yaml"]):
    from gcore.config import load_spec, new_spec
    from gcore.errors import GcoreError

FILE = Path(tempfile.mkdtemp(prefix="gcore-fuzz-")) / "spec.yaml"


def one(data: bytes) -> None:
    """Raises what is a defect."""
    FILE.write_bytes(data)
    with contextlib.suppress(GcoreError):
        load_spec(FILE, [data.decode(errors="replace")[:40]] if data[:1] == b"-" else [])
    with contextlib.suppress(ValueError, RecursionError):
        tree = json.loads(data)
        if isinstance(tree, dict):
            with contextlib.suppress(GcoreError):
                new_spec(tree)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()

"""`python -m gcore.models REQUEST`: brings a model to this machine, in a process of its own.

A controller starts it, so that neither a hub's client nor what it does with memory, threads and time is in the
controller. REQUEST is a JSON object; standard output gets a JSON object a line:

    {"done": 1200, "total": 3400}                                         bytes, as it goes on
    {"folder": "...", "revision": "...", "remote_code": ["..."]}          at the end
    {"error": "...", "where": "...", "fix": "..."}                        or this
"""

from __future__ import annotations

import json
import sys
from typing import Any

from gcore.models.names import ModelError
from gcore.models.resolve import MANY_TRIES, resolve_model


def main() -> None:
    """The process."""
    request = json.loads(sys.argv[1])
    try:
        found = resolve_model(
            request["path"],
            trust_remote_code=request["trust_remote_code"],
            revision=request["revision"],
            tries=request.get("tries", MANY_TRIES),
            progress=lambda done, total: _say({"done": done, "total": total}),
        )
    except ModelError as error:
        _say({"error": error.what, "where": error.where, "fix": error.fix})
        sys.exit(error.exit_code)
    _say({"folder": str(found.folder), "revision": found.revision, "remote_code": found.remote_code})


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

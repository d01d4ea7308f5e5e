"""The client of the job API. It calls whichever controller answers.

`Client` and `AsyncClient` (of `gcore`) are for people, in a script or a notebook; `JobsClient` has the API's own messages, and is what they and
the command line use. The names are imported when they are first used: gRPC takes a while, and most commands need none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gcore.client.calls import ENDED, MAX_ANSWER_BYTES, WaitPolicy, job_state_name
    from gcore.client.jobs import JobsClient

__all__ = ["ENDED", "MAX_ANSWER_BYTES", "JobsClient", "WaitPolicy", "job_state_name"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("gcore.client.jobs" if name == "JobsClient" else "gcore.client.calls"), name)

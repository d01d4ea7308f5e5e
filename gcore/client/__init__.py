"""Python clients of the job API of a cluster. They call any controller that answers.

`Client` and `AsyncClient` (exported by `gcore`) are for scripts and notebooks. `JobsClient` returns the API's protobuf
messages; the command line and the other clients use it. Names are imported at first use, because importing gRPC is slow
and most commands do not need it.
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

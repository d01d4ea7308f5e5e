"""Whether the nodes that are there can run a job at all, before anything of it is written."""

from __future__ import annotations

from collections.abc import Sequence

from gcore.config import JobSpec
from gcore.errors import SpecError
from gcore.ledger.job import NodeRecord
from gcore.rollout.sglang.environment import HOW, find_python


def check_engine(spec: JobSpec, nodes: Sequence[NodeRecord]) -> None:
    """Whether the nodes have the engine that the job wants: each of them runs some. Raises SpecError."""
    without = sorted(node.name for node in nodes if not node.sglang)
    if spec.rollout.engine == "sglang" and (without or not nodes):
        which = "no node has SGLang" if len(without) == len(nodes) else f"SGLang is missing on {', '.join(without)}"
        raise SpecError(
            which, where="rollout.engine", fix=f"{HOW}, and start the nodes again; or set rollout.engine: torch"
        )


def missing_here(spec: JobSpec) -> str | None:
    """What a job wants that this machine does not have, as a warning: it may be there on the machines that run it."""
    if spec.rollout.engine == "sglang" and find_python() is None:
        return f"warning: rollout.engine is sglang, and SGLang was not found on this machine. {HOW}"
    return None

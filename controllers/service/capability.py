"""Whether the cluster can run a job at all, before anything of it is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gcore.config import JobSpec, NodeConfig
from gcore.config.cluster import LocalCluster
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


def check_ranks(spec: JobSpec, most: int | None) -> None:
    """Whether as many train ranks will ever fit. `most`: the slots of a cluster that cannot grow; None: more nodes may come.

    What does not fit yet is waited for (`controllers.forming.short_of_slots`). Raises SpecError.
    """
    ranks = spec.train.ranks
    if most is not None and ranks is not None and ranks > most:
        raise SpecError(
            f"{ranks} train ranks do not fit on {most} slots",
            where="train.ranks",
            fix="Lower train.ranks, or start the cluster anew with more --slots",
        )


def check_copies(spec: JobSpec, *, local: bool) -> None:
    """Whether nodes that are to share no folder can have one each. `local`: it is the cluster of `gcore up`. Raises SpecError."""
    if local and spec.storage.copies is not None:
        raise SpecError(
            "the nodes of a local cluster share one folder, where what lies once would count as several copies",
            where="storage.copies",
            fix="Leave it out, or submit the job to a cluster whose nodes have a run_root each",
        )


def most_slots(config: NodeConfig) -> int | None:
    """The slots that there will ever be: a local cluster is as large as it was started, any other may grow (None)."""
    local = LocalCluster.load(Path(config.home)) if config.local_cluster else None
    return None if local is None else len(local.slots)


def missing_here(spec: JobSpec) -> str | None:
    """What a job wants that this machine does not have, as a warning: it may be there on the machines that run it."""
    if spec.rollout.engine == "sglang" and find_python() is None:
        return f"warning: rollout.engine is sglang, and SGLang was not found on this machine. {HOW}"
    return None

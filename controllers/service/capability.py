"""Whether the cluster can run a job at all, before anything of it is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gcore.config import JobSpec, NodeConfig
from gcore.config.cluster import LocalCluster
from gcore.emulated.launch import is_emulated
from gcore.errors import SpecError
from gcore.ledger.job import JUDGES_CAME, SLEEP_CAME, NodeRecord
from gcore.ledger.records import PARTS_CAME, OfferedGroup
from gcore.rollout.sglang.environment import HOW, find_python
from gcore.schema import spoken
from placement.plan import counted

OBSERVED_CAME = OfferedGroup.came_with["observed"]
"""The schema version from which on nodes know what of a response the policy did not make."""


def check_engine(spec: JobSpec, nodes: Sequence[NodeRecord]) -> None:
    """Whether the nodes have the engine that the job wants: each of them runs some. Emulated slots have every engine. Raises SpecError."""
    without = sorted(node.name for node in nodes if not node.sglang and not all(map(is_emulated, node.slots)))
    where = next(iter(wants_sglang(spec)), None)
    if where is not None and (without or not nodes):
        which = "no node has SGLang" if len(without) == len(nodes) else f"SGLang is missing on {', '.join(without)}"
        raise SpecError(which, where=where, fix=f"{HOW}, and start the nodes again; or set {where}: torch")


def wants_sglang(spec: JobSpec) -> tuple[str, ...]:
    """The settings of a spec that ask for SGLang."""
    judges = enumerate(spec.judges)
    wanted = ["rollout.engine"] * (spec.rollout.engine == "sglang")
    return (*wanted, *(f"judges.{number}.serving.engine" for number, one in judges if one.serving.engine == "sglang"))


def check_served(spec: JobSpec, nodes: Sequence[NodeRecord]) -> None:
    """Whether every node knows judges, and has slots that can serve them. Raises SpecError."""
    if spec.judges and spoken() < JUDGES_CAME:
        raise SpecError(
            f"judge {spec.judges[0].name!r} needs nodes of this version, and some are older",
            where="judges",
            fix="Submit it when all nodes are upgraded",
        )
    classifiers = [judge.name for judge in spec.served_judges if judge.kind == "classifier"]
    emulated = sorted(node.name for node in nodes if any(map(is_emulated, node.slots)))
    if classifiers and emulated:
        raise SpecError(
            f"judge {classifiers[0]!r} is a classifier, and the emulated slots of {', '.join(emulated)} serve judges that write only",
            where="judges",
            fix="Take a judge of kind: generative there",
        )


def check_environment(spec: JobSpec) -> None:
    """Whether every node knows responses of several turns. Raises SpecError."""
    if (spec.environment or spec.agent) is not None and spoken() < OBSERVED_CAME:
        what, where = ("an environment", "environment") if spec.agent is None else ("an agent", "agent")
        raise SpecError(
            f"{what} needs nodes of this version, and some are older",
            where=where,
            fix="Submit it when all nodes are upgraded",
        )


def check_streamed(spec: JobSpec) -> None:
    """Whether every node knows steps that come in parts. Raises SpecError."""
    if spec.train.stream and spoken() < PARTS_CAME:
        raise SpecError(
            "steps that come in parts need nodes of this version, and some are older",
            where="train.stream",
            fix="Submit it when all nodes are upgraded, or leave it out",
        )


def check_moving(spec: JobSpec) -> None:
    """Whether every node knows engines that sleep. Raises SpecError."""
    if spec.placement.is_live and spoken() < SLEEP_CAME:
        raise SpecError(
            f"policy: {spec.placement.policy} puts engines to sleep, which needs nodes of this version, and some are older",
            where="placement.policy",
            fix="Submit it when all nodes are upgraded, or with policy: colocated",
        )
    if spec.placement.memory == "in_turns" and spoken() < SLEEP_CAME:
        raise SpecError(
            "engines that sleep while ranks train need nodes of this version, and some are older",
            where="placement.memory",
            fix="Submit it when all nodes are upgraded, or with memory: kept",
        )


def check_ranks(spec: JobSpec, most: int | None) -> None:
    """Whether as many train ranks, and as many slots, will ever be there. `most`: the slots of a cluster that cannot grow; None: more nodes may come.

    What does not fit yet is waited for (`controllers.forming.short_of_slots`). Raises SpecError.
    """
    ranks = spec.train.ranks
    if most is not None and ranks is not None and ranks > most:
        raise SpecError(
            f"{counted(ranks, 'train rank')} do not fit on {counted(most, 'slot')}",
            where="train.ranks",
            fix="Lower train.ranks, or start the cluster anew with more --slots",
        )
    least = spec.scheduling.slots_min
    if most is not None and least > most:
        raise SpecError(
            f"{counted(least, 'slot')} are the fewest to run on, and there are {counted(most, 'slot')}",
            where="scheduling.slots_min",
            fix="Lower it, or start the cluster anew with more --slots",
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
    if (wanted := wants_sglang(spec)) and find_python() is None:
        return f"warning: {wanted[0]} is sglang, and SGLang was not found on this machine. {HOW}"
    return None

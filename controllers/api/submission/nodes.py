"""Checks of a spec against the nodes of its cluster: engines, packages, slots, memory that sleeps, and blob stores.

A controller runs them before it creates a job, and `gcore validate` runs those that need no cluster. They read records and no files of models,
but for the sizes of pictures that a policy generates.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement

from gcore.config.capabilities import ENGINES
from gcore.config.spec import JobSpec, uses_blobs, uses_pictures
from gcore.data.stream import PromptSource
from gcore.engines.emulated.launch import is_emulated
from gcore.engines.environments import ENVIRONMENTS
from gcore.errors import SpecError
from gcore.ledger.records.job import NodeRecord
from gcore.models.diffusion.requests import PictureRequests
from gcore.system.slots import is_cpu
from placement.slots import count_noun


def check_engine(spec: JobSpec, nodes: Sequence[NodeRecord]) -> None:
    """Check that the nodes have the engines that the job needs, and that these can do it there. Emulated slots have every
    engine. Raises SpecError."""
    real = [node for node in nodes if not all(map(is_emulated, node.slots))]
    for where, engine in wanted_engines(spec):
        name = ENVIRONMENTS[engine].name
        without = sorted(node.name for node in real if not node.has_engine(engine))
        if without or not nodes:
            which = (
                f"no node has {name}" if len(without) == len(nodes) else f"{name} is missing on {', '.join(without)}"
            )
            fix = f"{ENVIRONMENTS[engine].how}, and restart the nodes. Or set {where}: {ENVIRONMENTS[engine].own}"
            raise SpecError(which, where=where, fix=fix)
    check_sleep(spec, {node.name: node.slots for node in real})


def check_sleep(spec: JobSpec, slots: Mapping[str, Iterable[str]]) -> None:
    """Check that the engines can release their memory on these slots (by node) if the job wants it. Raises SpecError."""
    cpus = sorted(node for node, own in slots.items() if any(map(is_cpu, own)))
    for where, engine in wanted_engines(spec):
        if "CPU" not in ENGINES[engine].sleeps_on and spec.placement.memory == "in_turns" and cpus:
            raise SpecError(
                f"{ENVIRONMENTS[engine].name} cannot release its memory on the CPU slots of {', '.join(cpus)}",
                where="placement.memory",
                fix=f"Set it to kept, or set {where}: {ENVIRONMENTS[engine].own}",
            )


def wanted_engines(spec: JobSpec) -> tuple[tuple[str, str], ...]:
    """The settings with which a spec requests engines that have an environment of their own, and these engines."""
    judges = ((f"judges.{number}.serving.engine", one.serving.engine) for number, one in enumerate(spec.judges))
    return tuple(one for one in (("rollout.engine", spec.rollout.engine), *judges) if one[1] in ENVIRONMENTS)


def local_warning(spec: JobSpec) -> str | None:
    """A warning if this machine lacks something that the job needs. The machines that run the job may have it."""
    for where, engine in wanted_engines(spec):
        environment = ENVIRONMENTS[engine]
        if environment.find() is None:
            return (
                f"warning: {where} is {engine}, and {environment.name} was not found on this machine. {environment.how}"
            )
    return None


def check_served_judges(spec: JobSpec, nodes: Sequence[NodeRecord]) -> None:
    """Check that every node has slots that can serve the judges. Raises SpecError."""
    classifiers = [judge.name for judge in spec.served_judges if judge.kind == "classifier"]
    emulated = sorted(node.name for node in nodes if any(map(is_emulated, node.slots)))
    if spec.judge_adapters and emulated:
        raise SpecError(
            f"judge {min(spec.judge_adapters)!r} is an adapter, which the emulated slots of {', '.join(emulated)} do not serve",
            where="judges",
            fix="Give the judge a model on emulated slots",
        )
    if classifiers and emulated:
        raise SpecError(
            f"judge {classifiers[0]!r} is a classifier, and the emulated slots of {', '.join(emulated)} serve only generative judges",
            where="judges",
            fix="Use a judge with kind: generative on emulated slots",
        )


def check_spans(spec: JobSpec, nodes: Sequence[NodeRecord]) -> None:
    """Check that the engine size divides the number of slots of each node, because a replica must fit on one node. Nodes that join later
    with another number of slots are used as far as possible (`placement.slots`). Raises SpecError."""
    for _, where, size in wide_engines(spec):
        odd = next((node for node in sorted(nodes, key=lambda one: one.name) if len(node.slots) % size), None)
        if odd is not None:
            raise SpecError(
                f"{size} slots per engine do not divide the {count_noun(len(odd.slots), 'slot')} of node {odd.name}",
                where=where,
                fix="Use a size that divides the slots of every node, or start the controllers with other --slots",
            )


def wide_engines(spec: JobSpec) -> Iterator[tuple[str, str, int]]:
    """Yield each engine size of the spec that is greater than one slot: the judge (empty for the policy), the field and
    the size."""
    if spec.rollout.slots_per_engine > 1:
        yield "", "rollout.slots_per_engine", spec.rollout.slots_per_engine
    for number, judge in enumerate(spec.judges):
        if judge.serving.slots_per_engine > 1:
            yield judge.name, f"judges.{number}.serving.slots_per_engine", judge.serving.slots_per_engine


def check_ranks(spec: JobSpec, most: int | None) -> None:
    """Check that the cluster can ever have enough slots for the train ranks. Raises SpecError.

    `most`: the slots of a cluster that cannot grow. None: nodes may join, so the job waits for slots.
    """
    ranks = spec.train.ranks
    if most is not None and ranks is not None and ranks > most:
        raise SpecError(
            f"{count_noun(ranks, 'train rank')} do not fit on {count_noun(most, 'slot')}",
            where="train.ranks",
            fix="Lower train.ranks, or restart the cluster with more --slots",
        )
    together = spec.train.sequence_parallel
    if most is not None and ranks is None and together > most:
        raise SpecError(
            f"a sequence group of {together} ranks does not fit on {count_noun(most, 'slot')}",
            where="train.sequence_parallel",
            fix="Lower it, or restart the cluster with more --slots",
        )
    least = spec.scheduling.slots_min
    if most is not None and least > most:
        raise SpecError(
            f"the job needs at least {count_noun(least, 'slot')}, and the cluster has {count_noun(most, 'slot')}",
            where="scheduling.slots_min",
            fix="Lower it, or restart the cluster with more --slots",
        )


BACKEND_EXTRAS = {"deepspeed": "train", "fsdp2": "fsdp2"}
"""Extras of gcore with the packages of each train backend."""


def check_backend(spec: JobSpec, nodes: Sequence[NodeRecord]) -> None:
    """Check that the packages that train the model are installed here, in versions that gcore supports.

    Emulated slots need none. Raises SpecError.
    """
    if nodes and all(is_emulated(slot) for node in nodes for slot in node.slots):
        return
    backend = spec.train.backend
    other = ", or set train.backend: fsdp2" if backend == "deepspeed" else ""
    _check_packages(BACKEND_EXTRAS[backend], "train.backend", other)
    if spec.train.lora is not None:
        _check_packages("lora", "train.lora")
    if spec.rollout.diffusion is not None:
        _check_packages("diffusion", "rollout.engine")


def _check_packages(extra: str, where: str, other: str = "") -> None:
    """Check the packages of an extra of gcore on this machine. `other`: what else a user may do. Raises SpecError."""
    fix = f"Install gcore[{extra}] on every node{other}"
    for one in map(Requirement, importlib.metadata.requires("gcore") or ()):
        if one.marker is None or not one.marker.evaluate({"extra": extra}):
            continue
        try:
            version = importlib.metadata.version(one.name)
        except importlib.metadata.PackageNotFoundError as error:
            raise SpecError(f"the package {one.name} is not installed here", where=where, fix=fix) from error
        if not one.specifier.contains(version, prereleases=True):
            raise SpecError(
                f"{one.name} {version} is installed here, and gcore supports {one.specifier}", where=where, fix=fix
            )


def check_offload(spec: JobSpec, slots: Iterable[str]) -> None:
    """Check that the job gets GPUs if it moves its train state to host memory. Emulated slots need none. Raises SpecError."""
    named = tuple(slots)
    if spec.train.offload_state and named and all(map(is_cpu, named)):
        raise SpecError(
            "offload_state moves the train state from a GPU to host memory, and all slots are CPU slots",
            where="train.offload_state",
            fix="Leave it out, or use slots with GPUs (--slots cuda:N)",
        )


def check_copies(spec: JobSpec, *, local: bool) -> None:
    """Check that nodes of a job without a shared folder can each have their own. `local`: the cluster of `gcore up`. Raises SpecError."""
    if local and spec.storage.copies is not None:
        raise SpecError(
            "the nodes of a local cluster share one folder, so one file would count as several copies",
            where="storage.copies",
            fix="Leave it out, or submit the job to a cluster where each node has its own run_root",
        )


def check_blob_stores(spec: JobSpec, nodes: Sequence[NodeRecord]) -> None:
    """Check that every node has a blob store, for a job with pictures. Raises SpecError."""
    if not uses_blobs(spec):
        return
    without = sorted(node.name for node in nodes if not node.blobs)
    if without:
        where, extra = ("data.images", "vision") if uses_pictures(spec) else ("rollout.engine", "diffusion")
        raise SpecError(
            f"{', '.join(without)} cannot store pictures",
            where=where,
            fix=f"Install gcore[{extra}] on every node, upgrade older nodes, and restart their daemons",
        )


def check_blob_room(spec: JobSpec, nodes: Sequence[NodeRecord], sources: Iterable[PromptSource], folder: Path) -> None:
    """Check that the blob stores have room for the pictures of all groups that may be generated and not trained yet.

    `sources`: of training prompts. `folder`: of the model. A prompt counts with the mean size of its source's pictures per prompt, because equal
    pictures are stored once, and with all blobs that may be made for its responses. Raises SpecError.
    """
    seeing = [(one.pictures.total_size, len(one)) for one in sources if one.pictures is not None]
    total, entries = sum(size for size, _ in seeing), sum(count for _, count in seeing)
    room = sum(node.blob_bytes for node in nodes)
    made = PictureRequests.of(spec, folder)
    each = spec.tool_picture_bytes if made is None else made.group_bytes
    if not (total or each) or not room or not all(node.blob_bytes for node in nodes):
        return
    rollout = spec.rollout
    quotas = rollout.staleness + 1 if rollout.over_provision is None else rollout.over_provision
    sealed = 1 if rollout.staleness else 0  # the step that is trained meanwhile
    groups = math.ceil(spec.flow.groups_per_step * (quotas + sealed))
    needed = min(total, groups * -(-total // max(entries, 1))) + groups * each
    if needed > room:
        raise SpecError(
            f"the pictures of {groups} groups ({quotas:g} steps ahead and {sealed} in training) take about {needed:,} bytes, and the "
            f"blob stores of {count_noun(len(nodes), 'node')} have {room:,}",
            where="flow.groups_per_step",
            fix="Lower it, rollout.staleness or the size of pictures, or raise blob_gib of the nodes",
        )

"""What would make a job fit that does not: the largest part of what is too much, and the field of the spec that bounds it. Pure.

Of the way that is nearest to fitting. One field alone may not be enough, and then the plan says what is the largest after that. Whether a
single field is enough is tried elsewhere (`placement.mapping.search`, its hints).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from placement.mapping.cluster import Cluster
from placement.mapping.fitting import Memory, gib, judge_replicas
from placement.mapping.memory import engine_need, micro_tokens, rank_needs, trained
from placement.mapping.search import Misfits
from placement.mapping.ways import Way
from placement.mapping.workload import Served, Workload
from placement.plan import counted

LARGER = "Use more accelerators, larger ones, or a smaller model"


@dataclass(frozen=True, slots=True)
class Term:
    """A part of what a slot would hold, in bytes, and what to do about it."""

    what: str
    size: float
    fix: str


def advice(workload: Workload, cluster: Cluster, misfit: Misfits | None) -> str:
    """What to change first."""
    if misfit is None:
        return LARGER
    memory = Memory.of(cluster)
    if misfit.excess.where.startswith("SGLang"):
        return _of_share(_named(workload, misfit), memory)
    if misfit.excess.where:
        return f"Use nodes with more host memory, fewer ranks a node, or a smaller model; {gib(misfit.excess.memory)} are there"
    names = misfit.excess.names
    terms = [*_trained(workload, misfit.way, names, memory), *_served(workload, misfit.way, names, memory)]
    if not terms:
        return LARGER
    largest = max(terms, key=lambda term: term.size)
    return f"The largest part is {largest.what}, {gib(largest.size)}: {largest.fix}"


def _named(workload: Workload, misfit: Misfits) -> Served:
    """Whose share it is: the excess names it with what it is asked."""
    return max(
        (one for one in workload.served if misfit.excess.names[0].startswith(one.name)),
        key=lambda one: len(one.name),
        default=workload.rollout,
    )


def _trained(workload: Workload, way: Way, names: tuple[str, ...], memory: Memory) -> Iterator[Term]:
    training = workload.training
    stage = "" if training.stage == 3 else "train.zero_stage: 3, "
    shared = f"{stage}more ranks, or a smaller model" if stage else "use more ranks, or a smaller model"
    for name, shape in training.models.items():
        if name not in names:
            continue
        parts = trained(shape, training, way.ranks, gpu=memory.gpu)
        state = parts.weights + parts.gradients + parts.optimizer
        yield Term(
            f"weights, gradients and optimizer of {name} on {counted(way.ranks, 'rank')}", state, f"set {shared}"
        )
        tokens = micro_tokens(training, way.ranks)
        fixes = [] if training.recomputes else ["set train.activation_checkpointing: true"]
        if tokens > training.longest:
            fixes.append(
                f"lower train.micro_batch_tokens (now {training.micro_tokens:,}; a sample has up to {training.longest:,})"
            )
        else:
            fixes.append(f"lower rollout.max_new_tokens (a sample has up to {training.longest:,} tokens)")
        what = f"activations of {name} for a micro-batch of {tokens:,} tokens"
        yield Term(what, parts.activations, ", and ".join(fixes))
    for need in rank_needs(training, way.ranks, gpu=memory.gpu):
        if need.name == "reference" and need.name in names:
            yield Term("the reference model", need.stays + need.works, f"set {shared}")


def _served(workload: Workload, way: Way, names: tuple[str, ...], memory: Memory) -> Iterator[Term]:
    for served in workload.served:
        if served.name not in names:
            continue
        if memory.gpu and served.share is not None:
            yield Term(f"the share that SGLang takes for {served.name}", served.share * memory.all_of_it, _less(served))
            continue
        policy = served is workload.rollout
        size = way.rollout_size if policy else way.reward_size
        replicas = way.split.rollout // size if policy else judge_replicas(served, way)
        rows = max(1, min(served.rows, -(-served.requests // max(1, replicas))))
        need = engine_need(served, size=size, rows=rows, gpu=memory.gpu)
        where, longest = _section(served), "rollout.max_new_tokens" if policy else f"max_new_tokens of {served.name}"
        yield Term(f"weights of {served.name}", need.weights, "use larger accelerators, or a smaller model")
        yield Term(f"cache of {served.name} for one longest request", need.cell * need.least, f"lower {longest}")
        yield Term(f"what {served.name} works with", need.works, f"lower {where}.batch_slots or {longest}")


def _of_share(served: Served, memory: Memory) -> str:
    share = served.share or 0.0
    return f"SGLang takes {share:g} of {gib(memory.all_of_it)} for {served.name}: {_raise(served)}"


def _section(served: Served) -> str:
    return "rollout" if served.name == "rollout" else f"serving of {served.name}"


def _flag(served: Served) -> str:
    where = "rollout.engine_args" if served.name == "rollout" else f"serving.engine_args of {served.name}"
    return f"{where}: [--mem-fraction-static, SHARE]"


def _less(served: Served) -> str:
    return f"lower it with {_flag(served)} (now {served.share or 0.0:g})"


def _raise(served: Served) -> str:
    return f"raise it with {_flag(served)}, or lower the longest answer"

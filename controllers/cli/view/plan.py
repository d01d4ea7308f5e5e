"""Tables and JSON of `gcore plan`: models, placements that fit, why others do not fit, and what to change.

`placement_section` says a placement as a spec says it. `advice` names the largest part of the memory that the nearest placement lacks,
and the field of the spec that bounds it; the hints of `placement.mapping.search` say whether one field alone is enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from controllers.cli.output import printable_text, rows_table
from gcore.config.spec import JobSpec
from placement.mapping.cluster import GIB, ClusterSpec
from placement.mapping.memory import (
    MemoryNeed,
    SlotMemory,
    engine_memory,
    format_gib,
    judge_replicas,
    micro_tokens,
    rank_needs,
    train_memory,
)
from placement.mapping.search import FittingLayout, RejectedLayouts
from placement.mapping.workload import EngineWorkload, PoolLayout, Workload
from placement.slots import count_noun, sizes_of

if TYPE_CHECKING:
    from placement.mapping.search import LayoutSearchResult
    from placement.mapping.workload import JobShapes, MeanLengths


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What was planned for, and what was found."""

    spec: JobSpec
    cluster: ClusterSpec
    shapes: JobShapes
    lengths: MeanLengths
    workload: Workload
    found: LayoutSearchResult

    def begins(self, way: PoolLayout) -> bool:
        """Whether the job can begin so. A policy that moves slots knows all slots in turn with one world only: that of the spec, or the
        largest that has a sample for each rank."""
        if not way.starts or way.split.mode == "coexisting" or not self.spec.placement.is_live:
            return way.starts
        training = self.workload.training
        largest = max(min(self.cluster.slots, training.samples // training.mini_batches), 1)
        return way.ranks == (self.spec.train.ranks or largest)

    @property
    def first(self) -> FittingLayout | None:
        """The best that the job can begin with, once the spec says so."""
        return next((fit for fit in self.found.fits if self.begins(fit.way)), None)

    @property
    def stands(self) -> FittingLayout | None:
        """What the job would begin with as its spec stands; None if that is none of those that fit. A policy that moves slots, and is told no
        sizes, finds the best by itself."""
        placement = self.spec.placement
        fits = (fit for fit in self.found.fits if self._spans(fit.way))
        if placement.is_live and placement.train is None:
            return next((fit for fit in fits if self.begins(fit.way)), None)
        return next((fit for fit in fits if fit.way.starts and self._is_said(fit.way)), None)

    @property
    def one_rank_a_node(self) -> bool:
        """Whether the spec leaves the number of ranks to the number of nodes."""
        placement = self.spec.placement
        return self.spec.train.ranks is None and placement.train is None and not placement.is_live

    def _spans(self, way: PoolLayout) -> bool:
        from placement.slots import sizes_of

        sizes = sizes_of(self.spec)
        return (way.rollout_size, way.reward_size) == (sizes.rollout, sizes.reward)

    def _is_said(self, way: PoolLayout) -> bool:
        said, split = self.spec.placement, way.split
        if said.train is not None:
            reward = split.reward if said.reward is None else said.reward
            return (split.mode, split.train, split.reward) == ("coexisting", said.train, reward)
        ranks = self.cluster.node_count if self.one_rank_a_node else self.spec.train.ranks
        asleep = self.cluster.device.is_gpu if said.memory is None else said.memory == "in_turns"
        return (split.mode, way.ranks, way.asleep) == ("colocated", ranks, asleep)


MOST_MISFITS = 8
"""Sentences about what does not fit that a table shows; JSON has all."""

LONG = 500
"""Characters of a sentence that are shown."""


def plan_tree(planned: PlanReport, show: int) -> dict[str, Any]:
    """For JSON; memory in GiB, times in seconds. `show`: placements in it."""
    found, cluster, device = planned.found, planned.cluster, planned.cluster.device
    first = planned.first
    return {
        "job": planned.spec.name,
        "cluster": {
            "nodes": cluster.node_count,
            "slots": cluster.slots,
            "memory_gib": round(SlotMemory.of(cluster).all_of_it / GIB, 2),
            "tflops": device.tflops,
            "bandwidth_gb_s": device.bandwidth_gb_s,
            "link_gb_s": device.link_gb_s,
            "alike": cluster.alike,
            "source": device.source,
        },
        "lengths": {"prompt_tokens": planned.lengths.prompt, "response_tokens": planned.lengths.response},
        "models": list(model_rows(planned)),
        "fitting": len(found.fits),
        "placements": [layout_tree(fit, starts=planned.begins(fit.way)) for fit in found.fits[:show]],
        "as_it_stands": None if planned.stands is None else layout_tree(planned.stands, starts=True),
        "start": None if first is None else placement_section(planned.spec, first),
        "warnings": [] if first is None else list(cache_hints(first)),
        "misfits": [{"placement": str(one.way), "why": str(one.excess), "count": one.count} for one in found.misfits],
        "hints": list(found.hints),
    }


def layout_tree(fit: FittingLayout, *, starts: bool) -> dict[str, Any]:
    """One placement. `starts`: whether the job can begin so."""
    split, times = fit.way.split, fit.times
    return {
        "placement": str(fit.way),
        "mode": split.mode,
        "rollout": split.rollout,
        "reward": split.reward,
        "train": split.train,
        "slots_of_a_rollout_engine": fit.way.rollout_size,
        "slots_of_a_judge": fit.way.reward_size,
        "asleep": fit.way.asleep,
        "can_be_started": starts,
        "memory_gib": {pool: round(used / GIB, 2) for pool, used in fit.room.used},
        "rows": dict(fit.room.rows),
        "cache_tokens": dict(fit.room.cells),
        "less_cache_than_wanted": list(fit.room.bound),
        "seconds": {
            "step": times.step,
            "rollout": times.rollout,
            "judging": times.judging,
            "training": times.training,
            "publishing": times.publishing,
            "switching": times.switching,
        },
    }


def model_rows(planned: PlanReport) -> Iterator[dict[str, Any]]:
    """What each model takes of one slot by itself, with as many ranks as the best placement has."""
    workload, gpu = planned.workload, planned.cluster.device.is_gpu
    best = planned.first or next(iter(planned.found.fits), None)
    ranks = planned.cluster.slots if best is None else best.way.ranks
    for served in workload.served:
        engine = engine_memory(served, size=1, rows=served.rows, gpu=gpu)
        yield _model(
            served.name,
            served.shape.parameters,
            {"weights": engine.weights, "cache": engine.cell * engine.wanted, "working": engine.works},
        )
    for need in rank_needs(workload.training, ranks, gpu=gpu):
        shape = workload.training.models.get(need.name, workload.rollout.shape)
        yield _model(
            f"{need.name}{_of_ranks(need, ranks)}", shape.parameters, {"weights": need.stays, "working": need.works}
        )


def _of_ranks(need: MemoryNeed, ranks: int) -> str:
    return f", a rank of {ranks}" if need.name != "reference" else ""


def _model(name: str, parameters: int, parts: dict[str, int]) -> dict[str, Any]:
    sizes = {f"{part}_gib": round(size / GIB, 3) for part, size in ({"cache": 0} | parts).items()}
    return {"model": name, "parameters": parameters, **sizes, "total_gib": round(sum(parts.values()) / GIB, 3)}


def print_tables(planned: PlanReport, show: int, console: Console) -> None:
    """For people."""
    found, cluster = planned.found, planned.cluster
    weakest = "" if cluster.alike else "; nodes differ, and the weakest of each figure is planned with"
    console.print(
        f"{planned.spec.name} on {count_noun(cluster.slots, 'slot')} of {count_noun(cluster.node_count, 'node')}, "
        f"{SlotMemory.of(cluster).all_of_it / GIB:.4g} GiB each{weakest}; prompts of {planned.lengths.prompt:.4g} and responses of "
        f"{planned.lengths.response:.4g} tokens.\n",
        highlight=False,
    )
    console.print(_models_table(planned))
    console.print(f"\n{_counted(planned)}\n", highlight=False)
    if found.fits:
        console.print(_fits_table(planned, show))
    if (first := planned.first) is not None:
        console.print(f"\n{_begins(planned, first)}", highlight=False, soft_wrap=True)
        for line in cache_hints(first):
            console.print(f"{printable_text(line, LONG)}.", highlight=False, soft_wrap=True)
    if found.misfits:
        console.print("\nWhat does not fit, the nearest first:", highlight=False)
        for one in found.misfits[:MOST_MISFITS]:
            more = f" (and {one.count - 1} alike)" if one.count > 1 else ""
            console.print(
                f"  {printable_text(str(one.way), LONG)}: {printable_text(str(one.excess), LONG)}{more}",
                highlight=False,
                soft_wrap=True,
            )
        if len(found.misfits) > MOST_MISFITS:
            console.print(f"  and {len(found.misfits) - MOST_MISFITS} kinds more (-o json has all)", highlight=False)
    for hint in found.hints:
        console.print(f"\n{printable_text(hint, LONG)}.", highlight=False, soft_wrap=True)


def _begins(planned: PlanReport, first: FittingLayout) -> str:
    """What the spec says now, and what to write instead."""
    stands, how = planned.stands, "-o yaml prints that for the spec"
    alone = ""
    if planned.one_rank_a_node:
        alone = " (a rank on each node, for train.ranks says nothing)"
    if stands == first:
        return f"As the spec stands, the job begins with {first.way}{alone}; {how}."
    if stands is None:
        now = "What the spec says now is not among what fits."
    else:
        now = (
            f"As the spec stands, the job begins with {stands.way}{alone}, predicted to take "
            f"{stands.times.step:.3g} s a step."
        )
    return f"{now} To begin with {first.way}, at a predicted {first.times.step:.3g} s: {how}."


def cache_hints(fit: FittingLayout) -> tuple[str, ...]:
    """Of judges whose engines would take more than there is for them, what to write against that; the policy's is written with the rest."""
    return tuple(
        f"{name} has room for {cells:,} tokens of cache; set its serving.cache_tokens, or it may take more"
        for name, cells in fit.room.cells
        if name in fit.room.bound and name != "rollout"
    )


def _counted(planned: PlanReport) -> str:
    found = planned.found
    fail = sum(one.count for one in found.misfits)
    fit = f"{count_noun(len(found.fits), 'placement')} fit{'s' * (len(found.fits) == 1)}, {fail} do not"
    if found.fits and planned.first is None:
        return f"{fit}; of those that fit none can be started. The best of them, by predicted time of a step:"
    return f"{fit}. The best, by predicted time of a step:" if found.fits else f"{fit}."


def _models_table(planned: PlanReport) -> Table:
    headings = ("MODEL, BY ITSELF", "PARAMETERS", "WEIGHTS GiB", "CACHE GiB", "WORKING GiB", "TOTAL GiB")
    sizes = ("weights_gib", "cache_gib", "working_gib", "total_gib")
    rows = (
        (printable_text(row["model"]), f"{row['parameters']:,}", *(f"{row[size]:.2f}" for size in sizes))
        for row in model_rows(planned)
    )
    return rows_table(headings, rows, right=headings[1:])


def _fits_table(planned: PlanReport, show: int) -> Table:
    headings = ("PLACEMENT", "STEP s", "ROLLOUT", "JUDGES", "TRAIN", "PUBLISH", "SWITCH", "FULLEST SLOT GiB", "STARTS")
    shown = list(planned.found.fits[:show])
    if planned.first is not None and planned.first not in shown:
        shown.append(planned.first)
    rows = []
    for fit in shown:
        times = fit.times
        parts = (times.step, times.rollout, times.judging, times.training, times.publishing, times.switching)
        fullest = max(used for _, used in fit.room.used) / GIB
        rows.append((str(fit.way), *(f"{part:.3g}" for part in parts), f"{fullest:.1f}", _starts(planned, fit.way)))
    return rows_table(headings, rows, right=headings[1:])


def _starts(planned: PlanReport, way: PoolLayout) -> str:
    if planned.begins(way):
        return "yes"
    return f"not with {planned.spec.placement.policy}" if way.starts else "with sglang"


YamlSection = dict[str, dict[str, Any]]

JUDGES = "judges"
"""In a section: by the judge's name, what to write into its `serving`."""


def placement_section(spec: JobSpec, fit: FittingLayout) -> YamlSection:
    """What to write into the spec so that the job begins so. A policy that moves slots keeps its name, and begins with these sizes; all
    slots in turn have none, for it knows one world only there."""
    policy, split = spec.placement.policy, fit.way.split
    live = spec.placement.is_live
    section: YamlSection = {"placement": {"policy": policy}}
    if split.mode == "coexisting":
        reward = {"reward": split.reward} if split.reward else {}
        section["placement"] = {"policy": policy if live else "static", "train": split.train} | reward
    elif not live:
        section["placement"] = {"policy": "colocated"}
        section["train"] = {"ranks": split.train}
    if split.mode == "colocated":
        section["placement"]["memory"] = "in_turns" if fit.way.asleep else "kept"
    sizes, way = sizes_of(spec), fit.way
    if way.rollout_size != sizes.rollout:
        section["rollout"] = {"slots_per_engine": way.rollout_size}
    # An engine that is left to itself would fill what the ranks beside it need.
    if "rollout" in fit.room.bound:
        section["rollout"] = section.get("rollout", {}) | {"cache_tokens": dict(fit.room.cells)["rollout"]}
    if way.reward_size != sizes.reward:
        section[JUDGES] = {judge.name: {"slots_per_engine": way.reward_size} for judge in spec.served_judges}
    return section


def paste_section(section: YamlSection) -> tuple[YamlSection, tuple[str, ...]]:
    """The section as it is pasted by hand, and what is to be set besides: judges stand in a list."""
    fields = [
        f"set serving.{key}: {value} of judge {name}"
        for name, serving in section.get(JUDGES, {}).items()
        for key, value in serving.items()
    ]
    return {name: fields for name, fields in section.items() if name != JUDGES}, tuple(fields)


def lines_to_delete(spec: JobSpec, section: YamlSection) -> tuple[str, ...]:
    """What to delete of the spec where the section is pasted: what it says of another split."""
    placement, wanted = spec.placement, section["placement"]
    gone = [
        f"placement.{key}" for key in ("train", "reward") if key not in wanted and getattr(placement, key) is not None
    ]
    if wanted.get("policy") == "static" and placement.memory is not None:
        gone.append("placement.memory")
    if "train" in wanted and spec.train.ranks is not None:
        gone.append("train.ranks")
    return (f"delete {' and '.join(gone)}, which the spec says of another placement",) if gone else ()


LARGER = "Use more accelerators, larger ones, or a smaller model"


@dataclass(frozen=True, slots=True)
class MemoryTerm:
    """A part of what a slot would hold, in bytes, and what to do about it."""

    what: str
    size: float
    fix: str


def advice(workload: Workload, cluster: ClusterSpec, misfit: RejectedLayouts | None) -> str:
    """What to change first."""
    if misfit is None:
        return LARGER
    memory = SlotMemory.of(cluster)
    if misfit.excess.where.startswith("SGLang"):
        return _of_share(_named(workload, misfit), memory)
    if misfit.excess.where:
        return f"Use nodes with more host memory, fewer ranks a node, or a smaller model; {format_gib(misfit.excess.memory)} are there"
    names = misfit.excess.names
    terms = [*_trained(workload, misfit.way, names, memory), *_engine_terms(workload, misfit.way, names, memory)]
    if not terms:
        return LARGER
    largest = max(terms, key=lambda term: term.size)
    return f"The largest part is {largest.what}, {format_gib(largest.size)}: {largest.fix}"


def _named(workload: Workload, misfit: RejectedLayouts) -> EngineWorkload:
    """Whose share it is: the excess names it with what it is asked."""
    return max(
        (one for one in workload.served if misfit.excess.names[0].startswith(one.name)),
        key=lambda one: len(one.name),
        default=workload.rollout,
    )


def _trained(workload: Workload, way: PoolLayout, names: tuple[str, ...], memory: SlotMemory) -> Iterator[MemoryTerm]:
    training = workload.training
    stage = "" if training.stage == 3 else "train.zero_stage: 3, "
    shared = f"{stage}more ranks, or a smaller model" if stage else "use more ranks, or a smaller model"
    for name, shape in training.models.items():
        if name not in names:
            continue
        parts = train_memory(shape, training, way.ranks, gpu=memory.gpu)
        state = parts.weights + parts.gradients + parts.optimizer
        yield MemoryTerm(
            f"weights, gradients and optimizer of {name} on {count_noun(way.ranks, 'rank')}", state, f"set {shared}"
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
        yield MemoryTerm(what, parts.activations, ", and ".join(fixes))
    for need in rank_needs(training, way.ranks, gpu=memory.gpu):
        if need.name == "reference" and need.name in names:
            yield MemoryTerm("the reference model", need.stays + need.works, f"set {shared}")


def _engine_terms(
    workload: Workload, way: PoolLayout, names: tuple[str, ...], memory: SlotMemory
) -> Iterator[MemoryTerm]:
    for served in workload.served:
        if served.name not in names:
            continue
        if memory.gpu and served.share is not None:
            yield MemoryTerm(
                f"the share that SGLang takes for {served.name}", served.share * memory.all_of_it, _less(served)
            )
            continue
        policy = served is workload.rollout
        size = way.rollout_size if policy else way.reward_size
        replicas = way.split.rollout // size if policy else judge_replicas(served, way)
        rows = max(1, min(served.rows, -(-served.requests // max(1, replicas))))
        need = engine_memory(served, size=size, rows=rows, gpu=memory.gpu)
        where, longest = _section(served), "rollout.max_new_tokens" if policy else f"max_new_tokens of {served.name}"
        yield MemoryTerm(f"weights of {served.name}", need.weights, "use larger accelerators, or a smaller model")
        yield MemoryTerm(f"cache of {served.name} for one longest request", need.cell * need.least, f"lower {longest}")
        yield MemoryTerm(f"what {served.name} works with", need.works, f"lower {where}.batch_slots or {longest}")


def _of_share(served: EngineWorkload, memory: SlotMemory) -> str:
    share = served.share or 0.0
    return f"SGLang takes {share:g} of {format_gib(memory.all_of_it)} for {served.name}: {_raise(served)}"


def _section(served: EngineWorkload) -> str:
    return "rollout" if served.name == "rollout" else f"serving of {served.name}"


def _flag(served: EngineWorkload) -> str:
    where = "rollout.engine_args" if served.name == "rollout" else f"serving.engine_args of {served.name}"
    return f"{where}: [--mem-fraction-static, SHARE]"


def _less(served: EngineWorkload) -> str:
    return f"lower it with {_flag(served)} (now {served.share or 0.0:g})"


def _raise(served: EngineWorkload) -> str:
    return f"raise it with {_flag(served)}, or lower the longest answer"

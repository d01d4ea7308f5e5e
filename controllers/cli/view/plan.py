"""Tables and JSON of `gcore plan`: memory per model, layouts that fit, why others do not fit, and what to change.

`placement_section` writes a layout as a section of the spec. `advice` names the largest memory consumer of the closest layout that does not
fit, and the field of the spec that bounds it. The hints of `placement.mapping.search` tell whether changing one field is sufficient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from controllers.cli.output import printable_text
from controllers.cli.terminal import Rows, display, rows_table, say
from gcore.config.capabilities import ENGINES, having
from gcore.config.spec import JobSpec
from placement.mapping.cluster import GIB, ClusterSpec
from placement.mapping.memory import (
    MemoryNeed,
    SlotMemory,
    engine_memory,
    format_gib,
    judge_replicas,
    micro_tokens,
    most_patches,
    rank_needs,
    train_memory,
)
from placement.mapping.pictures import DenoiserShape
from placement.mapping.search import FittingLayout, LayoutSearchResult, RejectedLayouts
from placement.mapping.workload import (
    SHARE_OPTIONS,
    EngineWorkload,
    JobShapes,
    MeanLengths,
    ModelShape,
    PoolLayout,
    TrainWorkload,
    Workload,
)
from placement.slots import count_noun, sizes_of


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The inputs of a search for layouts (slots per pool and per engine), and its result (`found`)."""

    spec: JobSpec
    cluster: ClusterSpec
    shapes: JobShapes
    lengths: MeanLengths
    workload: Workload
    found: LayoutSearchResult

    def begins(self, way: PoolLayout) -> bool:
        """Whether the job can start with the layout `way`. A policy that moves slots starts a time-shared layout only
        with one number of train ranks: that of the spec, or the largest with at least one sample per rank."""
        if not way.starts or way.split.mode == "coexisting" or not self.spec.placement.is_live:
            return way.starts
        training = self.workload.training
        groups = min(self.cluster.slots // training.together, training.samples // training.mini_batches)
        return way.ranks == (self.spec.train.ranks or max(groups, 1) * training.together)

    @property
    def first(self) -> FittingLayout | None:
        """The recommended layout: the one with the shortest predicted step that the job can start with, if need be
        after a change of its spec."""
        return next((fit for fit in self.found.fits if self.begins(fit.way)), None)

    @property
    def stands(self) -> FittingLayout | None:
        """The layout that the job would start with if the spec is not changed; None if it does not fit into memory. If
        the spec gives no pool sizes, a policy that moves slots chooses the best layout."""
        placement = self.spec.placement
        fits = (fit for fit in self.found.fits if self._spans(fit.way))
        if placement.is_live and placement.train is None:
            return next((fit for fit in fits if self.begins(fit.way)), None)
        return next((fit for fit in fits if fit.way.starts and self._is_said(fit.way)), None)

    @property
    def one_rank_a_node(self) -> bool:
        """Whether the job gets one train rank per node, because the spec does not set the number."""
        placement = self.spec.placement
        return self.spec.train.ranks is None and placement.train is None and not placement.is_live

    def _spans(self, way: PoolLayout) -> bool:
        """Whether the layout has the slots per engine and per judge that the spec sets."""
        sizes = sizes_of(self.spec)
        return (way.rollout_size, way.reward_size) == (sizes.rollout, sizes.reward)

    def _is_said(self, way: PoolLayout) -> bool:
        """Whether the layout has the pool sizes, or the number of train ranks, that the spec sets or implies."""
        said, split = self.spec.placement, way.split
        if said.train is not None:
            reward = split.reward if said.reward is None else said.reward
            return (split.mode, split.train, split.reward) == ("coexisting", said.train, reward)
        together = self.workload.training.together
        by_node = max(self.cluster.node_count // together, 1) * together
        ranks = by_node if self.one_rank_a_node else self.spec.train.ranks
        asleep = self.cluster.device.is_gpu if said.memory is None else said.memory == "in_turns"
        return (split.mode, way.ranks, way.asleep) == ("colocated", ranks, asleep)


MOST_MISFITS = 8
"""Maximum number of rejected layouts in the table; JSON has all."""

LONG = 500
"""Maximum characters of a displayed sentence."""


def plan_tree(planned: PlanReport, show: int) -> dict[str, Any]:
    """The report as a JSON object; memory in GiB, times in seconds. `show`: maximum number of fitting layouts in it."""
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
        "lengths": lengths_tree(planned),
        "models": list(model_rows(planned)),
        "fitting": len(found.fits),
        "placements": [layout_tree(fit, starts=planned.begins(fit.way)) for fit in found.fits[:show]],
        "as_it_stands": None if planned.stands is None else layout_tree(planned.stands, starts=True),
        "start": None if first is None else placement_section(planned.spec, first),
        "warnings": [] if first is None else list(cache_hints(first)),
        "misfits": [{"placement": str(one.way), "why": str(one.excess), "count": one.count} for one in found.misfits],
        "hints": list(found.hints),
    }


def lengths_tree(planned: PlanReport) -> dict[str, Any]:
    """The mean lengths as a JSON object, or the sizes of generated pictures."""
    drawn = planned.shapes.policy
    if not isinstance(drawn, DenoiserShape):
        return {"prompt_tokens": planned.lengths.prompt, "response_tokens": planned.lengths.response}
    return {
        "height": drawn.height,
        "width": drawn.width,
        "image_tokens": drawn.tokens,
        "text_tokens": drawn.text_tokens,
        "denoising_steps": planned.lengths.response,
        "trained_steps": drawn.trained,
        "blob_bytes_of_a_step": planned.workload.blob_bytes,
    }


def layout_tree(fit: FittingLayout, *, starts: bool) -> dict[str, Any]:
    """A layout with its memory (GiB per slot) and predicted times (seconds) as a JSON object. `starts`: whether the job
    can start with it."""
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
            "transferring": times.transferring,
        },
    }


def model_rows(planned: PlanReport) -> Iterator[dict[str, Any]]:
    """Yield a row for each model: its memory on one slot as an engine, or as one of the train ranks of the best layout."""
    workload, gpu = planned.workload, planned.cluster.device.is_gpu
    best = planned.first or next(iter(planned.found.fits), None)
    ranks = planned.cluster.slots if best is None else best.way.ranks
    for served in workload.served:
        engine = engine_memory(served, size=1, rows=served.rows, gpu=gpu)
        cache, working = engine.cell * engine.wanted, engine.works
        if isinstance(served.shape, DenoiserShape):  # running pictures have no cache
            cache, working = 0, working + cache
        yield _model(served.name, served.parameters, {"weights": engine.weights, "cache": cache, "working": working})
    for need in rank_needs(workload.training, ranks, gpu=gpu):
        shape = workload.training.models.get(need.name, workload.rollout.shape)
        yield _model(
            f"{need.name}{_of_ranks(need, ranks)}", shape.parameters, {"weights": need.stays, "working": need.works}
        )


def _of_ranks(need: MemoryNeed, ranks: int) -> str:
    return f", 1 of {count_noun(ranks, 'rank')}" if need.name.endswith("training") else ""


def _model(name: str, parameters: int, parts: dict[str, int]) -> dict[str, Any]:
    sizes = {f"{part}_gib": round(size / GIB, 3) for part, size in ({"cache": 0} | parts).items()}
    return {"model": name, "parameters": parameters, **sizes, "total_gib": round(sum(parts.values()) / GIB, 3)}


def print_tables(planned: PlanReport, show: int) -> None:
    """Print the report for people."""
    found, cluster = planned.found, planned.cluster
    weakest = "" if cluster.alike else " (nodes differ; the lowest value of each figure is used)"
    say(
        f"{planned.spec.name} on {count_noun(cluster.slots, 'slot')} of {count_noun(cluster.node_count, 'node')}, "
        f"{SlotMemory.of(cluster).all_of_it / GIB:.4g} GiB each{weakest}; {_lengths_line(planned)}.\n",
    )
    display(_models_table(planned))
    say(f"\n{_counted(planned)}\n")
    if found.fits:
        display(_fits_table(planned, show))
    if (first := planned.first) is not None:
        say(f"\n{_begins(planned, first)}")
        for line in cache_hints(first):
            say(f"{printable_text(line, LONG)}.")
    if found.misfits:
        say("\nPlacements that do not fit, closest first:")
        for one in found.misfits[:MOST_MISFITS]:
            more = f" (and {one.count - 1} similar)" if one.count > 1 else ""
            say(
                f"  {printable_text(str(one.way), LONG)}: {printable_text(str(one.excess), LONG)}{more}",
                indent="    ",
            )
        if len(found.misfits) > MOST_MISFITS:
            say(f"  and {len(found.misfits) - MOST_MISFITS} more kinds (-o json has all)")
    for hint in found.hints:
        say(f"\n{printable_text(hint, LONG)}.")


def _lengths_line(planned: PlanReport) -> str:
    drawn, lengths = planned.shapes.policy, planned.lengths
    if not isinstance(drawn, DenoiserShape):
        return f"mean prompt {lengths.prompt:.4g} tokens, mean response {lengths.response:.4g} tokens"
    guided = " with two passes each" if drawn.passes > 1 else ""
    return (
        f"pictures of {drawn.width} x {drawn.height} pixels ({count_noun(drawn.tokens, 'image token')}), {lengths.response:.4g} denoising "
        f"steps{guided}, of which {drawn.trained:.4g} are trained; blobs of a step take up to {format_gib(planned.workload.blob_bytes)}"
    )


def _begins(planned: PlanReport, first: FittingLayout) -> str:
    """Say with which layout the job starts under the current spec, and which one is recommended (`first`)."""
    stands, how = planned.stands, "-o yaml prints the section for the spec"
    alone = ""
    if planned.one_rank_a_node:
        whole = ", in whole sequence groups" if planned.workload.training.together > 1 else ""
        alone = f" (one train rank per node{whole}, because train.ranks is not set)"
    if stands == first:
        return f"With the current spec, the job starts with {first.way}{alone}; {how}."
    if stands is None:
        now = "The placement of the current spec does not fit."
    else:
        now = (
            f"With the current spec, the job starts with {stands.way}{alone}; the predicted step time is "
            f"{stands.times.step:.3g} s."
        )
    return f"{now} To start with {first.way} (predicted step time {first.times.step:.3g} s): {how}."


def cache_hints(fit: FittingLayout) -> tuple[str, ...]:
    """Advice for judges whose KV cache must be limited so that the layout fits. The policy's own limit is part of the
    placement section."""
    return tuple(
        f"{name}: memory suffices for {cells:,} tokens of KV cache; set its serving.cache_tokens, because its default may use more"
        for name, cells in fit.room.cells
        if name in fit.room.bound and name != "rollout"
    )


def _counted(planned: PlanReport) -> str:
    found = planned.found
    fail = sum(one.count for one in found.misfits)
    fit = f"{count_noun(len(found.fits), 'placement')} fit{'s' * (len(found.fits) == 1)}, {fail} do not"
    if found.fits and planned.first is None:
        return f"{fit}; the job can start with none of those that fit. The best of them, by predicted step time:"
    return f"{fit}. The best, by predicted step time:" if found.fits else f"{fit}."


def _models_table(planned: PlanReport) -> Rows:
    headings = ("MODEL", "PARAMETERS", "WEIGHTS GiB", "CACHE GiB", "WORKING GiB", "TOTAL GiB")
    sizes = ("weights_gib", "cache_gib", "working_gib", "total_gib")
    rows = (
        (printable_text(row["model"]), f"{row['parameters']:,}", *(f"{row[size]:.2f}" for size in sizes))
        for row in model_rows(planned)
    )
    return rows_table(headings, rows, right=headings[1:])


def _fits_table(planned: PlanReport, show: int) -> Rows:
    sends = any(fit.times.transferring for fit in planned.found.fits)
    parts_of = ("STEP s", "ROLLOUT", "JUDGES", *(["TRANSFER"] if sends else []), "TRAIN", "SYNC", "SWITCH")
    headings = ("PLACEMENT", *parts_of, "FULLEST SLOT GiB", "CAN START")
    shown = list(planned.found.fits[:show])
    if planned.first is not None and planned.first not in shown:
        shown.append(planned.first)
    rows = []
    for fit in shown:
        times = fit.times
        sent = (times.transferring,) if sends else ()
        parts = (times.step, times.rollout, times.judging, *sent, times.training, times.publishing, times.switching)
        fullest = max(used for _, used in fit.room.used) / GIB
        rows.append((str(fit.way), *(f"{part:.3g}" for part in parts), f"{fullest:.1f}", _starts(planned, fit.way)))
    return rows_table(headings, rows, right=headings[1:])


def _starts(planned: PlanReport, way: PoolLayout) -> str:
    if planned.begins(way):
        return "yes"
    if way.starts:
        return f"not with {planned.spec.placement.policy}"
    return f"only with {having(ENGINES, 'several_slots')}"


YamlSection = dict[str, dict[str, Any]]

JUDGES = "judges"
"""Key of a section with the `serving` fields by judge name."""


def placement_section(spec: JobSpec, fit: FittingLayout) -> YamlSection:
    """The section of the spec that makes the job start with this layout.

    A policy that moves slots keeps its name and gets the initial sizes. It gets none for a time-shared layout, which has only one world size.
    """
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
    # Without a limit, the engine would use memory that the train ranks on the same slot need.
    if "rollout" in fit.room.bound:
        cells, rows = dict(fit.room.cells), dict(fit.room.rows)
        bound = {"cache_tokens": cells["rollout"]} if "rollout" in cells else {"batch_slots": rows["rollout"]}
        section["rollout"] = section.get("rollout", {}) | bound
    if way.reward_size != sizes.reward:
        section[JUDGES] = {judge.name: {"slots_per_engine": way.reward_size} for judge in spec.served_judges}
    return section


def paste_section(section: YamlSection) -> tuple[YamlSection, tuple[str, ...]]:
    """Divide a section into the part that a user can paste into the spec, and sentences about fields of judges, which
    are a list and must be set by hand."""
    fields = [
        f"set serving.{key}: {value} of judge {name}"
        for name, serving in section.get(JUDGES, {}).items()
        for key, value in serving.items()
    ]
    return {name: fields for name, fields in section.items() if name != JUDGES}, tuple(fields)


def lines_to_delete(spec: JobSpec, section: YamlSection) -> tuple[str, ...]:
    """Sentences about fields to delete from the spec, because they contradict the section."""
    placement, wanted = spec.placement, section["placement"]
    gone = [
        f"placement.{key}" for key in ("train", "reward") if key not in wanted and getattr(placement, key) is not None
    ]
    if wanted.get("policy") == "static" and placement.memory is not None:
        gone.append("placement.memory")
    if "train" in wanted and spec.train.ranks is not None:
        gone.append("train.ranks")
    return (
        (f"delete {' and '.join(gone)} of the spec, which contradict{'s' * (len(gone) == 1)} this placement",)
        if gone
        else ()
    )


LARGER = "Use more or larger accelerators, or a smaller model"


@dataclass(frozen=True, slots=True)
class MemoryTerm:
    """One use of a slot's memory. `what`: its name in the advice; `size`: bytes; `fix`: how to reduce it."""

    what: str
    size: float
    fix: str


def advice(workload: Workload, cluster: ClusterSpec, misfit: RejectedLayouts | None) -> str:
    """Say what to change first so that a layout fits: reduce the largest memory part of the closest layout (`misfit`)."""
    if misfit is None:
        return LARGER
    memory = SlotMemory.of(cluster)
    if misfit.excess.where.startswith("the engine"):
        return _of_share(_named(workload, misfit), memory)
    if misfit.excess.where:
        return f"Use nodes with more host memory (now {format_gib(misfit.excess.memory)}), fewer ranks per node, or a smaller model"
    names = misfit.excess.names
    terms = [*_trained(workload, misfit.way, names, memory), *_engine_terms(workload, misfit.way, names, memory)]
    if not terms:
        return LARGER
    largest = max(terms, key=lambda term: term.size)
    return f"The largest part is {largest.what}, {format_gib(largest.size)}: {largest.fix}"


def _named(workload: Workload, misfit: RejectedLayouts) -> EngineWorkload:
    """The engine (rollout or a judge) whose memory is the reason why the layout does not fit."""
    return max(
        (one for one in workload.served if misfit.excess.names[0].startswith(one.name)),
        key=lambda one: len(one.name),
        default=workload.rollout,
    )


def _trained(workload: Workload, way: PoolLayout, names: tuple[str, ...], memory: SlotMemory) -> Iterator[MemoryTerm]:
    """The memory parts of a train rank: state, activations and reference model. Only of the models in `names`."""
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
        if isinstance(shape, DenoiserShape):
            yield _drawn(parts.activations, name, tokens // training.longest, training)
            continue
        fixes = [] if training.recomputes else ["set train.activation_checkpointing: true"]
        if tokens > training.longest:
            fixes.append(
                f"lower train.micro_batch_tokens (now {training.micro_tokens:,}; a sample has up to {training.longest:,} tokens)"
            )
        else:
            fixes.append(f"lower rollout.max_new_tokens (a sample has up to {training.longest:,} tokens)")
        what = f"activations of {name} for a micro-batch of {tokens:,} tokens"
        if patches := most_patches(shape, training, way.ranks):
            what += f" and {patches:,} patches of pictures"
            fixes.append(f"lower train.micro_batch_patches (now {training.patches:,})")
        yield MemoryTerm(what, parts.activations, ", and ".join(fixes))
    for need in rank_needs(training, way.ranks, gpu=memory.gpu):
        if need.name == "reference" and need.name in names:
            yield MemoryTerm("the reference model", need.stays + need.works, f"set {shared}")


def _drawn(size: float, name: str, rows: int, training: TrainWorkload) -> MemoryTerm:
    """The activations of trained denoising steps."""
    fix = "use smaller pictures (rollout.diffusion.height and width)"
    if rows > 1:
        fix = f"lower train.micro_batch_tokens (now {training.micro_tokens:,}; a denoising step has {training.longest:,} image tokens)"
    return MemoryTerm(f"activations of {name} for {count_noun(rows, 'denoising step')}", size, fix)


def _engine_terms(
    workload: Workload, way: PoolLayout, names: tuple[str, ...], memory: SlotMemory
) -> Iterator[MemoryTerm]:
    """The memory parts of the engines: weights, KV cache and working memory. Only of the engines in `names`."""
    for served in workload.served:
        if served.name not in names:
            continue
        if memory.gpu and served.share is not None:
            yield MemoryTerm(
                f"the memory that the engine reserves for {served.name}", served.share * memory.all_of_it, _less(served)
            )
            continue
        policy = served is workload.rollout
        size = way.rollout_size if policy else way.reward_size
        replicas = way.split.rollout // size if policy else judge_replicas(served, way)
        rows = max(1, min(served.rows, -(-served.requests // max(1, replicas))))
        need = engine_memory(served, size=size, rows=rows, gpu=memory.gpu)
        where, longest = _section(served), "rollout.max_new_tokens" if policy else f"max_new_tokens of {served.name}"
        yield MemoryTerm(f"weights of {served.name}", need.weights, "use larger accelerators, or a smaller model")
        if not isinstance(served.shape, ModelShape):
            smaller = "use smaller pictures (rollout.diffusion.height and width)"
            yield MemoryTerm(f"a running picture of {served.name}", need.cell * need.least, smaller)
            continue
        yield MemoryTerm(
            f"KV cache of {served.name} for the longest request", need.cell * need.least, f"lower {longest}"
        )
        yield MemoryTerm(f"working memory of {served.name}", need.works, f"lower {where}.batch_slots or {longest}")


def _of_share(served: EngineWorkload, memory: SlotMemory) -> str:
    share = served.share or 0.0
    return f"the engine reserves {share:g} of {format_gib(memory.all_of_it)} for {served.name}: {_raise(served)}"


def _section(served: EngineWorkload) -> str:
    return "rollout" if served.name == "rollout" else f"serving of {served.name}"


def _flag(served: EngineWorkload) -> str:
    where = "rollout.engine_args" if served.name == "rollout" else f"serving.engine_args of {served.name}"
    return f"{where}: [{SHARE_OPTIONS[served.engine]}, SHARE]"


def _less(served: EngineWorkload) -> str:
    return f"lower it with {_flag(served)} (now {served.share or 0.0:g})"


def _raise(served: EngineWorkload) -> str:
    return f"raise it with {_flag(served)}, or lower the maximum response length"

"""What `gcore plan` shows: the models, the placements that fit, and why others do not; as tables, and as a tree for JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from controllers.cli.view_text import visible
from placement.mapping.devices import GIB
from placement.mapping.fitting import Memory
from placement.mapping.memory import Need, engine_need, rank_needs
from placement.mapping.search import Fit
from placement.plan import counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from controllers.cli.plan_verb import Planned
    from placement.mapping.ways import Way

MOST_MISFITS = 8
"""Sentences about what does not fit that a table shows; JSON has all."""
LONG = 500
"""Characters of a sentence that are shown."""


def tree_of(planned: Planned, show: int) -> dict[str, Any]:
    """For JSON; memory in GiB, times in seconds. `show`: placements in it."""
    from controllers.cli.plan_written import section_of

    found, cluster, device = planned.found, planned.cluster, planned.cluster.device
    first = planned.first
    return {
        "job": planned.spec.name,
        "cluster": {
            "nodes": cluster.node_count,
            "slots": cluster.slots,
            "memory_gib": round(Memory.of(cluster).all_of_it / GIB, 2),
            "tflops": device.tflops,
            "bandwidth_gb_s": device.bandwidth_gb_s,
            "link_gb_s": device.link_gb_s,
            "alike": cluster.alike,
            "source": device.source,
        },
        "lengths": {"prompt_tokens": planned.lengths.prompt, "response_tokens": planned.lengths.response},
        "models": list(models(planned)),
        "fitting": len(found.fits),
        "placements": [fit_tree(fit, starts=planned.begins(fit.way)) for fit in found.fits[:show]],
        "as_it_stands": None if planned.stands is None else fit_tree(planned.stands, starts=True),
        "start": None if first is None else section_of(planned.spec, first),
        "warnings": [] if first is None else list(less_cache(first)),
        "misfits": [{"placement": str(one.way), "why": str(one.excess), "count": one.count} for one in found.misfits],
        "hints": list(found.hints),
    }


def fit_tree(fit: Fit, *, starts: bool) -> dict[str, Any]:
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


def models(planned: Planned) -> Iterator[dict[str, Any]]:
    """What each model takes of one slot by itself, with as many ranks as the best placement has."""
    workload, gpu = planned.workload, planned.cluster.device.is_gpu
    best = planned.first or next(iter(planned.found.fits), None)
    ranks = planned.cluster.slots if best is None else best.way.ranks
    for served in workload.served:
        engine = engine_need(served, size=1, rows=served.rows, gpu=gpu)
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


def _of_ranks(need: Need, ranks: int) -> str:
    return f", a rank of {ranks}" if need.name != "reference" else ""


def _model(name: str, parameters: int, parts: dict[str, int]) -> dict[str, Any]:
    sizes = {f"{part}_gib": round(size / GIB, 3) for part, size in ({"cache": 0} | parts).items()}
    return {"model": name, "parameters": parameters, **sizes, "total_gib": round(sum(parts.values()) / GIB, 3)}


def print_tables(planned: Planned, show: int, console: Console) -> None:
    """For people."""
    found, cluster = planned.found, planned.cluster
    weakest = "" if cluster.alike else "; nodes differ, and the weakest of each figure is planned with"
    console.print(
        f"{planned.spec.name} on {counted(cluster.slots, 'slot')} of {counted(cluster.node_count, 'node')}, "
        f"{Memory.of(cluster).all_of_it / GIB:.4g} GiB each{weakest}; prompts of {planned.lengths.prompt:.4g} and responses of "
        f"{planned.lengths.response:.4g} tokens.\n",
        highlight=False,
    )
    console.print(_models_table(planned))
    console.print(f"\n{_counted(planned)}\n", highlight=False)
    if found.fits:
        console.print(_fits_table(planned, show))
    if (first := planned.first) is not None:
        console.print(f"\n{_begins(planned, first)}", highlight=False, soft_wrap=True)
        for line in less_cache(first):
            console.print(f"{visible(line, LONG)}.", highlight=False, soft_wrap=True)
    if found.misfits:
        console.print("\nWhat does not fit, the nearest first:", highlight=False)
        for one in found.misfits[:MOST_MISFITS]:
            more = f" (and {one.count - 1} alike)" if one.count > 1 else ""
            console.print(
                f"  {visible(str(one.way), LONG)}: {visible(str(one.excess), LONG)}{more}",
                highlight=False,
                soft_wrap=True,
            )
        if len(found.misfits) > MOST_MISFITS:
            console.print(f"  and {len(found.misfits) - MOST_MISFITS} kinds more (-o json has all)", highlight=False)
    for hint in found.hints:
        console.print(f"\n{visible(hint, LONG)}.", highlight=False, soft_wrap=True)


def _begins(planned: Planned, first: Fit) -> str:
    """What the spec says now, and what to write instead."""
    stands, how = planned.stands, "-o yaml prints that for the spec, --write FILE writes it"
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


def less_cache(fit: Fit) -> tuple[str, ...]:
    """Of judges whose engines would take more than there is for them, what to write against that; the policy's is written with the rest."""
    return tuple(
        f"{name} has room for {cells:,} tokens of cache; set its serving.cache_tokens, or it may take more"
        for name, cells in fit.room.cells
        if name in fit.room.bound and name != "rollout"
    )


def _counted(planned: Planned) -> str:
    found = planned.found
    fail = sum(one.count for one in found.misfits)
    fit = f"{counted(len(found.fits), 'placement')} fit{'s' * (len(found.fits) == 1)}, {fail} do not"
    if found.fits and planned.first is None:
        return f"{fit}; of those that fit none can be started. The best of them, by predicted time of a step:"
    return f"{fit}. The best, by predicted time of a step:" if found.fits else f"{fit}."


def _models_table(planned: Planned) -> Table:
    table = _table(("MODEL, BY ITSELF", "PARAMETERS", "WEIGHTS GiB", "CACHE GiB", "WORKING GiB", "TOTAL GiB"))
    for row in models(planned):
        sizes = (row["weights_gib"], row["cache_gib"], row["working_gib"], row["total_gib"])
        table.add_row(visible(row["model"]), f"{row['parameters']:,}", *(f"{size:.2f}" for size in sizes))
    return table


def _fits_table(planned: Planned, show: int) -> Table:
    table = _table(
        ("PLACEMENT", "STEP s", "ROLLOUT", "JUDGES", "TRAIN", "PUBLISH", "SWITCH", "FULLEST SLOT GiB", "STARTS")
    )
    shown = list(planned.found.fits[:show])
    if planned.first is not None and planned.first not in shown:
        shown.append(planned.first)
    for fit in shown:
        times = fit.times
        parts = (times.step, times.rollout, times.judging, times.training, times.publishing, times.switching)
        fullest = max(used for _, used in fit.room.used) / GIB
        table.add_row(str(fit.way), *(f"{part:.3g}" for part in parts), f"{fullest:.1f}", _starts(planned, fit.way))
    return table


def _starts(planned: Planned, way: Way) -> str:
    if planned.begins(way):
        return "yes"
    return f"not with {planned.spec.placement.policy}" if way.starts else "with sglang"


def _table(headings: tuple[str, ...]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    return table

"""`gcore plan`: where the pools of a job would lie on a cluster that is described in a file, before there is a job."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controllers.cli.answers import as_json, console
from controllers.cli.options import Set, SpecFile
from gcore.errors import DataError, UsageError

if TYPE_CHECKING:
    from gcore.config import JobSpec
    from placement.mapping.cluster import Cluster
    from placement.mapping.search import Fit, Found
    from placement.mapping.shapes import ModelShape
    from placement.mapping.ways import Way
    from placement.mapping.workload import Lengths, Shapes, Workload

PLAN_EXAMPLES = """
[bold]Examples[/bold]

gcore plan grpo.yaml --cluster examples/clusters/eight-h100.yaml

[dim]What to write into the spec:[/dim]  gcore plan grpo.yaml --cluster mine.yaml -o yaml

[dim]Write it there:[/dim]  gcore plan grpo.yaml --cluster mine.yaml --write grpo.yaml

[dim]With what is known of the lengths:[/dim]  gcore plan grpo.yaml --cluster mine.yaml --prompt-tokens 180 --response-tokens 700
"""
MOST_CLUSTER_BYTES = 1 << 16
MOST_TOKENS = 1 << 24


class PlanOutput(StrEnum):
    """How the answer is printed."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


@dataclass(frozen=True, slots=True)
class Planned:
    """What was planned for, and what was found."""

    spec: JobSpec
    cluster: Cluster
    shapes: Shapes
    lengths: Lengths
    workload: Workload
    found: Found

    def begins(self, way: Way) -> bool:
        """Whether the job can begin so. A policy that moves slots knows all slots in turn with one world only: that of the spec, or the
        largest that has a sample for each rank."""
        if not way.starts or way.split.mode == "coexisting" or not self.spec.placement.is_live:
            return way.starts
        training = self.workload.training
        largest = max(min(self.cluster.slots, training.samples // training.mini_batches), 1)
        return way.ranks == (self.spec.train.ranks or largest)

    @property
    def first(self) -> Fit | None:
        """The best that the job can begin with, once the spec says so."""
        return next((fit for fit in self.found.fits if self.begins(fit.way)), None)

    @property
    def stands(self) -> Fit | None:
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

    def _spans(self, way: Way) -> bool:
        from placement.replicas import sizes_of

        sizes = sizes_of(self.spec)
        return (way.rollout_size, way.reward_size) == (sizes.rollout, sizes.reward)

    def _is_said(self, way: Way) -> bool:
        said, split = self.spec.placement, way.split
        if said.train is not None:
            reward = split.reward if said.reward is None else said.reward
            return (split.mode, split.train, split.reward) == ("coexisting", said.train, reward)
        ranks = self.cluster.node_count if self.one_rank_a_node else self.spec.train.ranks
        asleep = self.cluster.device.is_gpu if said.memory is None else said.memory == "in_turns"
        return (split.mode, way.ranks, way.asleep) == ("colocated", ranks, asleep)


def plan(
    spec: SpecFile,
    cluster: Annotated[Path, typer.Option("--cluster", help="The nodes, a YAML file; see examples/clusters.")],
    set_: Set = None,
    prompt_tokens: Annotated[
        float | None,
        typer.Option(min=1, max=MOST_TOKENS, help="Mean tokens of a prompt; default: half of the longest."),
    ] = None,
    response_tokens: Annotated[
        float | None,
        typer.Option(min=1, max=MOST_TOKENS, help="Mean tokens of a response; default: half of the longest."),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option("--write", help="Write the spec with the best placement to this file, beside the spec."),
    ] = None,
    show: Annotated[int, typer.Option(min=1, max=1000, help="Placements that are shown.")] = 5,
    output: Annotated[
        PlanOutput, typer.Option("--output", "-o", help="How the answer is printed; yaml: what to write into the spec.")
    ] = PlanOutput.TABLE,
) -> None:
    """Where a job's pools should lie: what each model takes, the ways that fit, the best first, and why others do not fit.

    Memory and times are estimated from the models' configurations and the devices' figures; nothing is started.
    """
    from controllers.cli.plan_text import less_cache, print_tables, tree_of
    from controllers.cli.plan_written import left_standing, pasted, section_of, write_spec

    planned = look(spec, cluster, set_, prompt_tokens, response_tokens)
    first = planned.first
    if output is PlanOutput.JSON:
        typer.echo(as_json(tree_of(planned, show)))
    elif output is PlanOutput.TABLE:
        print_tables(planned, show, console())
    if first is None:
        raise _nothing_fits(planned, cluster)
    section = section_of(planned.spec, first)
    if output is PlanOutput.YAML:
        import yaml

        by_hand, besides = pasted(section)
        typer.echo(yaml.safe_dump(by_hand, sort_keys=False).rstrip())
        for line in (*besides, *less_cache(first), *left_standing(planned.spec, section)):
            typer.echo(f"# {line}.")
    if write is not None:
        write_spec(spec, write, section, set_ or ())
        typer.echo(f"{write} has {first.way}.", err=True)
        for line in less_cache(first):
            typer.echo(f"{line}.", err=True)


def look(
    spec: Path,
    cluster: Path,
    set_: list[str] | None = None,
    prompt_tokens: float | None = None,
    response_tokens: float | None = None,
) -> Planned:
    """Read everything and search. Raises UsageError."""
    from gcore.config import load_spec
    from placement.mapping.cluster import cluster_of
    from placement.mapping.search import search
    from placement.mapping.workload import Lengths, workload_of

    loaded = load_spec(spec, set_ or ())
    nodes = cluster_of(_tree(cluster), where=str(cluster))
    shapes = _shapes(loaded)
    lengths = Lengths.guessed(loaded, shapes.policy, prompt_tokens, response_tokens)
    workload = workload_of(loaded, shapes, lengths)
    found = search(workload, nodes)
    return Planned(loaded, nodes, shapes, lengths, workload, found)


def _nothing_fits(planned: Planned, cluster: Path) -> UsageError:
    from controllers.cli.plan_lacking import advice

    misfits = sorted(planned.found.misfits, key=lambda one: not planned.begins(one.way))
    nearest = f"; the nearest to it: {misfits[0].way}; {misfits[0].excess}" if misfits else ""
    which = "placement of" if not planned.found.fits else "placement that can be begun with of"
    what = f"no {which} job {planned.spec.name!r} fits{nearest}"
    enough = (hint for hint in planned.found.hints if hint.startswith("With "))
    fix = next(enough, None) or advice(planned.workload, planned.cluster, next(iter(misfits), None))
    return UsageError(what, where=str(cluster), fix=fix)


def _tree(path: Path) -> dict[str, Any]:
    """The cluster's file as a tree. Raises UsageError."""
    import yaml

    try:
        with path.open("rb") as file:
            raw = file.read(MOST_CLUSTER_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"the cluster's file cannot be read ({error.strerror or error})",
            where=str(path),
            fix="Name a YAML file of nodes; examples/clusters has some",
        ) from error
    try:
        if len(raw) > MOST_CLUSTER_BYTES:
            raise ValueError(f"more than {MOST_CLUSTER_BYTES} bytes")
        tree = yaml.safe_load(raw)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"this is no YAML ({reason})", where=str(path), fix="See examples/clusters") from error
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise UsageError("a cluster's file is a mapping with nodes", where=str(path), fix="See examples/clusters")
    return tree


def _shapes(spec: JobSpec) -> Shapes:
    from placement.mapping.workload import Shapes

    trusted = spec.model.trust_remote_code
    critic = spec.train.critic.path if spec.train.critic is not None else None
    return Shapes(
        policy=_shape("model.path", spec.model.path, trusted=trusted),
        critic=None if critic is None else _shape("train.critic.path", critic, trusted=trusted),
        judges={
            judge.name: _shape(f"judges.{number}.model.path", judge.model.path, trusted=judge.model.trust_remote_code)
            for number, judge in enumerate(spec.judges)
            if judge.model is not None
        },
    )


def _shape(key: str, path: str, *, trusted: bool) -> ModelShape:
    """Raises DataError."""
    from gcore.models.folder import read_config
    from gcore.models.resolve import resolve_model
    from placement.mapping.shapes import shape_of

    folder = resolve_model(path, trust_remote_code=trusted, weights=False).folder
    if not (folder / "config.json").is_file():
        missing = "no model is here: there is no config.json" if folder.is_dir() else "the folder does not exist"
        raise DataError(f"{key}: {missing}", where=path, fix=f"Name the folder of a Hugging Face model in {key}")
    return shape_of(read_config(folder), where=str(folder))

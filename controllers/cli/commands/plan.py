"""`gcore plan` and `gcore simulate`: recommend a placement for a spec, and run placement policies in simulated time.

`plan` estimates memory and step times of a spec on a cluster that a file describes. `simulate` simulates a scenario, or replays a recorded run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controllers.cli.options import DEFAULT_HOME, FILES, Format, Home, Set, SpecFile, command
from controllers.cli.output import Output, as_json, printable_text
from controllers.cli.terminal import display, rows_table, say
from gcore.errors import DataError, UsageError, explain_os_errors

if TYPE_CHECKING:
    from controllers.api.submission.checks import CheckProgress
    from controllers.cli.view.plan import PlanReport
    from gcore.config.spec import JobSpec
    from placement.mapping.pictures import DenoiserShape
    from placement.mapping.workload import JobShapes, ModelShape
    from placement.simulator.job import SimulatedJob
    from placement.simulator.replay import ReplayScenario
    from placement.simulator.run import JobRun


DEFAULT_COST_S = 5.0
MOST_COST_S = 1e6

MOST_SLOTS, MOST_STEPS = 4096, 100_000
"""Same as in `placement.simulator.scenario`, which takes long to import."""

MOST_SEED = 2**63 - 1

MOST_SHOWN = 2000
"""Maximum characters of a scenario's name and description."""


@command(
    "simulate",
    FILES,
    "gcore simulate benchmarks/scenarios/judge-slow-apart.yaml",
    "gcore simulate benchmarks/scenarios/growing.yaml --cost 20 --policy dynamic --policy static",
    "[dim]A finished run with 16 slots and all policies:[/dim]",
    "gcore simulate --run arithmetic-judge --slots 16",
    "gcore simulate --run .gcore/runs/arithmetic-judge-26559b7ecc10 -o json",
)
def simulate(
    scenario: Annotated[Path | None, typer.Argument(help="Scenario file (YAML).", show_default=False)] = None,
    run: Annotated[
        str | None, typer.Option("--run", help="Replay a finished run instead: job name, uid or run folder.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Policy to simulate: one of gcore's or your own. Repeatable. Default: all of gcore's."),
    ] = None,
    slots: Annotated[
        int | None, typer.Option(help="Number of slots. Default: as in the scenario or run.", min=2, max=MOST_SLOTS)
    ] = None,
    cost: Annotated[
        float | None,
        typer.Option(
            help="Seconds to move engines to another pool. Resizing the train world costs twice that.",
            min=0,
            max=MOST_COST_S,
        ),
    ] = None,
    staleness: Annotated[
        int | None,
        typer.Option(
            help="Steps that rollout may be ahead of training. Default: as in the scenario or run.",
            min=0,
            max=MOST_STEPS,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.", min=0, max=MOST_SEED)] = 0,
    home: Home = DEFAULT_HOME,
    output: Format = Output.TABLE,
) -> None:
    """Simulate a job under placement policies, and compare them with the best static split and the best split for each step.

    For a run, response lengths, engine speeds and training times are read from its folder. The result shows how long the run would have
    taken with another policy or with more slots.
    """
    from controllers.cli.view.data import progress_bar
    from placement.simulator.job import SimulatedJob
    from placement.simulator.replay import ReplayedJob, read_run
    from placement.simulator.scenario import read_scenario
    from placement.slots import SINGLE, count_noun, feasible_splits, sizes_of

    if (scenario is None) == (run is None):
        raise UsageError("gcore simulate takes either a scenario file or --run", fix="Give one of them")
    if cost is not None and math.isnan(cost):
        raise UsageError(f"--cost {cost} is not a number of seconds", fix=f"Give 0 to {MOST_COST_S:,.0f}")
    replay: ReplayScenario | None = None
    job: SimulatedJob
    if run is not None:
        folder = _folder(home, run)
        spec = _spec(folder)
        ahead = staleness if staleness is not None else 0 if spec is None else spec.rollout.staleness
        sizes = SINGLE if spec is None else sizes_of(spec)
        replay = read_run(folder, slots=slots, staleness=ahead, sizes=sizes)
        job = ReplayedJob(replay, seed)
    else:
        assert scenario is not None
        told = read_scenario(scenario)
        changes = {key: value for key, value in (("slots", slots), ("staleness", staleness)) if value is not None}
        job = SimulatedJob(told.changed(**changes), seed)
    fewest = min(job.scenario.slots_at(step) for step in range(job.scenario.steps))
    if not feasible_splits(job.scenario.bounds_of(fewest)):
        raise UsageError(
            f"{count_noun(fewest, 'slot')} cannot hold a train world and an engine of each pool",
            where="--slots",
            fix="Give more slots",
        )
    known = replay.lend_s if replay is not None else None
    move_s = cost if cost is not None else known if known is not None else DEFAULT_COST_S
    with progress_bar() as tell:
        found = _played(job, move_s, policy or [], tell)
        tree = _result_tree(job, move_s, replay, found, tell)
    if output.is_for_programs:
        typer.echo(output.text(tree))
    else:
        _show(tree)


def _folder(home: Path, run: str) -> Path:
    """The folder of the run: `run` itself if it is a run folder, else that of the newest finished run of that name."""
    if (Path(run) / "metrics.jsonl").is_file():
        return Path(run)
    from controllers.cli.view.summary import find_summary

    found = find_summary(home / "runs", run)
    if found is None:
        raise UsageError(
            f"{run!r} is neither a finished run in {home} nor a run folder",
            where="--run",
            fix="Give a job that has ended, or the folder with its metrics.jsonl",
        )
    return Path(found["folder"])


def _spec(folder: Path) -> JobSpec | None:
    """The spec of a run, from the copy of the job's records in its folder; None if there is no copy."""
    from gcore.config.load import stored_spec
    from gcore.ledger import archive

    copy = archive.read_copy(folder)
    return None if copy is None else stored_spec(copy.job.spec)


def _played(job: SimulatedJob, move_s: float, wanted: Sequence[str], tell: CheckProgress) -> dict[str, JobRun]:
    """Simulate `job` under each policy in `wanted` (empty: all of gcore's) and return the runs by policy name: gcore's
    first, then other packages'."""
    from placement.simulator.run import play_policy, policies

    own = list(policies(job.scenario, job.seed))
    names = [name for name in own if not wanted or name in wanted]
    names += [name for name in dict.fromkeys(wanted) if name not in own]
    found: dict[str, JobRun] = {}
    for name in names:
        tell("simulating policies", len(found), len(names))
        found[name] = (play_policy if name in own else _played_foreign)(job, name, move_s)
    tell("simulating policies", len(found), len(names))
    return found


def _played_foreign(job: SimulatedJob, name: str, move_s: float) -> JobRun:
    """Simulate a policy of another package. Raises UsageError if it does not exist or raises an error."""
    from gcore.plugins import RAISED, PluginFault, error_sentence
    from placement.simulator.run import play_policy

    try:
        return play_policy(job, name, move_s)
    except PluginFault as error:
        raise UsageError(error.what, where="--policy", fix=error.fix) from error
    except RAISED as error:  # A policy of another package may raise anything.
        raise UsageError(
            f"policy {name!r} failed in the simulator ({error_sentence(error)})",
            where="--policy",
            fix="Correct the policy",
        ) from error


def _oracles(job: SimulatedJob, move_s: float, found: dict[str, JobRun], tell: CheckProgress) -> list[dict[str, Any]]:
    """Result rows of the best splits (slots per pool) in hindsight: one fixed split, and the best split for each step.

    Empty without numba, because the search would take minutes.
    """
    from placement.simulator.kernel import COMPILES
    from placement.simulator.run import best_each_step, best_static, switch_costs

    if not COMPILES:
        return []
    costs = switch_costs(job.scenario, job.seed, move_s)
    searching = "searching for the best splits"
    tell(searching, 0, 2)
    known = {"best split for each step": best_each_step(job, costs, found.values())}
    tell(searching, 1, 2)
    known["best static split"] = best_static(job, costs)
    tell(searching, 2, 2)
    return [
        {
            "policy": name,
            "seconds": best.seconds,
            "first": str(best.splits[0]),
            "moves": [
                {
                    "step": step,
                    "to": str(after),
                    "cost_s": costs.of(before, after),
                    "reason": "computed in hindsight",
                }
                for step, (before, after) in enumerate(pairwise(best.splits), 1)
                if before != after
            ],
        }
        for name, best in known.items()
    ]


def _result_tree(
    job: SimulatedJob, move_s: float, replay: ReplayScenario | None, found: dict[str, JobRun], tell: CheckProgress
) -> dict[str, Any]:
    """The results of `gcore simulate` as a JSON object: one row per policy and per best split in hindsight. `move_s`:
    assumed seconds of a move."""
    rows, steps = _oracles(job, move_s, found, tell), job.scenario.steps
    best = min((row["seconds"] for row in rows), default=None)
    rows += [
        {
            "policy": name,
            "seconds": run.seconds,
            "first": str(run.splits[0]),
            "moves": [
                {
                    "step": one.step,
                    "to": str(one.decision.split),
                    "cost_s": one.cost_s,
                    "gain_s": round(one.decision.gain_s, 3),
                    "expected_s": one.decision.expected_s,
                    "reason": one.decision.reason,
                }
                for one in run.moves[1:]
            ],
        }
        for name, run in found.items()
    ]
    for row in rows:
        row["step_s"] = row["seconds"] / steps
        row["behind_best"] = None if best is None else row["seconds"] / best - 1
    return {
        "scenario": job.scenario.name,
        "what": job.scenario.what,
        "slots": job.scenario.slots,
        "steps": steps,
        "staleness": job.scenario.staleness,
        "switch_s": move_s,
        "recorded_s": None if replay is None else sum(replay.taken_s),
        "rows": rows,
    }


def _regime(staleness: int) -> str:
    """Say how far generation may run ahead of training, in the words of the simulator's documentation. `staleness`: in
    steps."""
    if not staleness:
        return "strict (staleness 0: a batch is generated after the previous one is trained)"
    return f"one step ahead (staleness {staleness}: a batch is generated while the previous one is trained)"


def _show(tree: dict[str, Any]) -> None:
    said = printable_text(f"{tree['scenario']}: {tree['what']}", MOST_SHOWN)
    say(said)
    say(
        f"{tree['steps']} steps on {tree['slots']} slots, {_regime(tree['staleness'])}; moving engines takes {tree['switch_s']:.3g} s"
    )
    if tree["recorded_s"] is not None:
        say(f"the recorded run took {tree['recorded_s']:.1f} s for these steps")
    rows, numbers = [], ("seconds", "s/step", "behind the best", "moves")
    for row in tree["rows"]:
        behind = "" if row["behind_best"] is None else f"{row['behind_best']:.1%}"
        figures = (f"{row['seconds']:.1f}", f"{row['step_s']:.2f}", behind, f"{len(row['moves'])}")
        rows.append((row["policy"], *figures, row["first"]))
    display(rows_table(("policy", *numbers, "initial split"), rows, right=numbers))
    if any(row["behind_best"] is None for row in tree["rows"]):
        say("the best splits are not computed without numba: `pip install 'gcore[simulate]'`")


MOST_CLUSTER_BYTES = 1 << 16
MOST_TOKENS = 1 << 24


@command(
    "plan",
    FILES,
    "gcore plan grpo.yaml --cluster deploy/local/clusters/eight-h100.yaml",
    "[dim]Print the section for the spec:[/dim]  gcore plan grpo.yaml --cluster mine.yaml -o yaml",
    "[dim]With known mean lengths:[/dim]  gcore plan grpo.yaml --cluster mine.yaml --prompt-tokens 180 --response-tokens 700",
)
def plan(
    spec: SpecFile,
    cluster: Annotated[
        Path, typer.Option("--cluster", help="Nodes of the cluster (YAML file); see deploy/local/clusters.")
    ],
    set_: Set = None,
    prompt_tokens: Annotated[
        float | None,
        typer.Option(min=1, max=MOST_TOKENS, help="Mean tokens of a prompt. Default: half of the maximum."),
    ] = None,
    response_tokens: Annotated[
        float | None,
        typer.Option(min=1, max=MOST_TOKENS, help="Mean tokens of a response. Default: half of the maximum."),
    ] = None,
    show: Annotated[int, typer.Option(min=1, max=1000, help="Number of placements to show.")] = 5,
    output: Annotated[
        Output, typer.Option("--output", "-o", help="Output format; yaml prints the placement section for the spec.")
    ] = Output.TABLE,
) -> None:
    """Recommend a placement: memory per model, the layouts that fit, ranked by expected step time, and why others do not fit.

    Memory and times are estimated from the configurations of the models and the data of the devices. Nothing is started.
    """
    from controllers.cli.view.plan import (
        cache_hints,
        lines_to_delete,
        paste_section,
        placement_section,
        plan_tree,
        print_tables,
    )

    planned = make_plan(spec, cluster, set_, prompt_tokens, response_tokens)
    first = planned.first
    if output is Output.JSON:
        typer.echo(as_json(plan_tree(planned, show)))
    elif output is Output.TABLE:
        print_tables(planned, show)
    if first is None:
        raise _nothing_fits(planned, cluster)
    if output is Output.YAML:
        import yaml

        section = placement_section(planned.spec, first)
        by_hand, besides = paste_section(section)
        typer.echo(yaml.safe_dump(by_hand, sort_keys=False).rstrip())
        for line in (*besides, *cache_hints(first), *lines_to_delete(planned.spec, section)):
            typer.echo(f"# {line}.")


def make_plan(
    spec: Path,
    cluster: Path,
    set_: list[str] | None = None,
    prompt_tokens: float | None = None,
    response_tokens: float | None = None,
) -> PlanReport:
    """Read the spec, the cluster file and the configurations of the models, and search for layouts that fit.

    `set_`: overrides of the spec. `prompt_tokens`, `response_tokens`: mean lengths; None: half of the maximum. Raises
    UsageError.
    """
    from controllers.cli.view.plan import PlanReport
    from gcore.config.load import load_spec
    from placement.mapping.cluster import parse_cluster
    from placement.mapping.search import search_layouts
    from placement.mapping.workload import MeanLengths, make_workload

    loaded = load_spec(spec, set_ or ())
    if response_tokens is not None and loaded.rollout.diffusion is not None:
        raise UsageError(
            "a picture has no tokens, and its denoising steps are those of the spec",
            where="--response-tokens",
            fix="Leave it out",
        )
    nodes = parse_cluster(_read_yaml(cluster), where=str(cluster))
    shapes = _shapes(loaded)
    lengths = MeanLengths.guessed(loaded, shapes.policy, prompt_tokens, response_tokens)
    workload = make_workload(loaded, shapes, lengths)
    found = search_layouts(workload, nodes)
    return PlanReport(loaded, nodes, shapes, lengths, workload, found)


def _nothing_fits(planned: PlanReport, cluster: Path) -> UsageError:
    """The error if no layout fits: the one that is closest to fit, and what to change."""
    from controllers.cli.view.plan import advice

    misfits = sorted(planned.found.misfits, key=lambda one: not planned.begins(one.way))
    nearest = f". The closest is {misfits[0].way}: {misfits[0].excess}" if misfits else ""
    which = "placement of" if not planned.found.fits else "initial placement of"
    what = f"no {which} job {planned.spec.name!r} fits{nearest}"
    enough = (hint for hint in planned.found.hints if hint.startswith("With "))
    fix = next(enough, None) or advice(planned.workload, planned.cluster, next(iter(misfits), None))
    return UsageError(what, where=str(cluster), fix=fix)


def _read_yaml(path: Path) -> dict[str, Any]:
    """Read the YAML file that describes a cluster. Raises UsageError if it cannot be read or is not a mapping."""
    import yaml

    fix = "Give a YAML file of nodes; deploy/local/clusters has examples"
    with (
        explain_os_errors("the cluster file cannot be read", UsageError, where=path, fix=fix),
        path.open("rb") as file,
    ):
        raw = file.read(MOST_CLUSTER_BYTES + 1)
    try:
        if len(raw) > MOST_CLUSTER_BYTES:
            raise ValueError(f"more than {MOST_CLUSTER_BYTES} bytes")
        tree = yaml.safe_load(raw)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"the file is not YAML ({reason})", where=str(path), fix="See deploy/local/clusters"
        ) from error
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise UsageError(
            "the cluster file must be a mapping with nodes", where=str(path), fix="See deploy/local/clusters"
        )
    return tree


def _shapes(spec: JobSpec) -> JobShapes:
    """Read the dimensions of all models that the spec names: policy, critic and judges."""
    from placement.mapping.workload import JobShapes

    trusted = spec.model.trust_remote_code
    critic = spec.train.critic.path if spec.train.critic is not None else None
    return JobShapes(
        policy=_shape("model.path", spec.model.path, trusted=trusted)
        if spec.rollout.diffusion is None
        else _pipeline(spec),
        critic=None if critic is None else _shape("train.critic.path", critic, trusted=trusted),
        judges={
            judge.name: _shape(f"judges.{number}.model.path", judge.model.path, trusted=judge.model.trust_remote_code)
            for number, judge in enumerate(spec.judges)
            if judge.model is not None
        },
    )


def _pipeline(spec: JobSpec) -> DenoiserShape:
    """Read the sizes of the pipeline that generates the job's pictures. Raises DataError, SpecError."""
    from gcore.models.diffusion.files import check_kind
    from gcore.models.diffusion.requests import PictureRequests
    from gcore.models.resolve import resolve_model
    from placement.mapping.pictures import read_pipeline

    folder = resolve_model(spec.model.path, trust_remote_code=False, weights=False).folder
    check_kind(spec, folder, weights=False)
    requests = PictureRequests.of(spec, folder)
    assert requests is not None
    return read_pipeline(requests.sizes, where=str(folder))


def _shape(key: str, path: str, *, trusted: bool) -> ModelShape:
    """Read the dimensions of a model from its configuration. `key`: the field of the spec that names it, for messages.
    Raises DataError."""
    from gcore.models.checks import read_config
    from gcore.models.resolve import resolve_model
    from placement.mapping.workload import read_shape

    folder = resolve_model(path, trust_remote_code=trusted, weights=False).folder
    if not (folder / "config.json").is_file():
        missing = "the folder has no config.json" if folder.is_dir() else "the folder does not exist"
        raise DataError(f"{key}: {missing}", where=path, fix=f"Set {key} to the folder of a Hugging Face model")
    return read_shape(read_config(folder), where=str(folder))

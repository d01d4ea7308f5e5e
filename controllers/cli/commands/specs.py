"""Commands about files: `gcore init`, `validate`, `schema` and `prepare`.

`init` creates a project in a hidden folder next to the target and renames it when it is complete, so that an error or Ctrl-C leaves no
partial project. The next `init` removes leftovers of a killed one. Existing files are never overwritten. `gcore.quickstart.starter`
has the contents of the files.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controllers.cli.options import (
    DEFAULT_CONTROLLERS,
    DEFAULT_HOME,
    DEFAULT_SLOTS,
    FILES,
    RUN,
    Controllers,
    Format,
    Home,
    Set,
    Slots,
    SpecFile,
    command,
    was_given,
)
from controllers.cli.output import PREPARED, Output, as_json
from controllers.cli.terminal import display, rows_table, say
from gcore.errors import SpecError, UsageError, explain_os_errors
from gcore.quickstart import NAMES
from gcore.system.process import identify_process

if TYPE_CHECKING:
    from controllers.api.submission.checks import CheckedJob
    from gcore.config.spec import JobSpec, ModelSpec
    from gcore.config.train import FlowSpec
    from gcore.ledger.records.cluster import ModelConfigs
    from gcore.models.resolve import HubAnswer
    from gcore.quickstart.starter import StarterTask, UserModel
    from placement.slots import NodeSlots

SEED = 0


@command(
    "init",
    RUN,
    "gcore init sorting",
    "gcore init backwards --task reverse",
    "[dim]With a model of your own:[/dim]  gcore init mine --model hf://Qwen/Qwen2.5-0.5B-Instruct",
)
def init(
    name: Annotated[Path, typer.Argument(metavar="NAME", help="Name of the project and of its new folder.")],
    task: Annotated[str, typer.Option(help="Task that the model learns: sort or reverse.")] = "sort",
    model: Annotated[
        str | None,
        typer.Option(help="Model folder, hf://OWNER/NAME or ms://OWNER/NAME. Default: create a small model."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Use an existing folder if it is empty.")] = False,
) -> None:
    """Create a project: a spec, data, a reward function with its test, and a small model to start from.

    Training the small model on one core takes most of the time. Nothing is downloaded.
    """
    from gcore.quickstart.starter import TASKS, package_name

    if task not in TASKS:
        raise UsageError(f"there is no task {task!r}", where="--task", fix=f"Use one of {', '.join(TASKS)}")
    target = _absolute(name)
    _refuse_occupied(target, force=force)
    package_name(target.name)
    own = None if model is None else _own_model(model)
    with explain_os_errors(
        "the project cannot be written here", UsageError, where=target, fix="Choose a folder that can be created"
    ):
        accuracy = _write(target, TASKS[task], own, force=force)
    if accuracy is not None:
        say(f"{name} is ready. The accuracy of its model on held-out prompts is {accuracy:.0%}. Next:\n")
    else:
        say(f"{name} is ready. Next:\n")
    for line in (
        f"cd {shlex.quote(str(name))}",
        "pip install --no-build-isolation --no-deps --editable .",
        "pytest",
        "gcore run grpo.yaml",
    ):
        typer.echo(f"  {line}")


def _write(target: Path, task: StarterTask, own: UserModel | None, *, force: bool) -> float | None:
    """Write all files into `target`. Returns the accuracy of the starter model, if one was created."""
    from gcore.quickstart.folder import Reporter
    from gcore.quickstart.starter import StarterModel, project_files, write_data, write_model
    from gcore.system.files import replace_folder

    _sweep(target)
    accuracy = None
    with replace_folder(target, owner=f"init-{os.getpid()}", durable=False) as draft:
        if own is None:
            reporter = Reporter.for_terminal(True)
            with reporter:
                accuracy = write_model(task, draft / "model", seed=SEED, report=reporter.report)
        model = StarterModel(accuracy) if accuracy is not None else own
        assert model is not None
        for path, text in project_files(target.name, task, model, seed=SEED).items():
            file = draft / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        (draft / "data").mkdir()
        write_data(task, draft / "data", seed=SEED, spelt_out=own is not None)
        _refuse_occupied(target, force=force)  # It may have been created meanwhile.
    return accuracy


def _refuse_occupied(target: Path, *, force: bool) -> None:
    if not target.exists() and not target.is_symlink():
        return
    if target.is_symlink() or not target.is_dir():
        raise UsageError("the path exists and is not a folder", where=str(target), fix="Choose another name")
    if any(target.iterdir()):
        raise UsageError(
            "the folder is not empty", where=str(target), fix="Choose another name; init never overwrites files"
        )
    if not force:
        raise UsageError("the folder exists", where=str(target), fix="Choose another name, or give --force")


def _own_model(given: str) -> UserModel:
    """The model that the user gave with `--model`: a folder or the name of a model on a hub. Raises UsageError."""
    from controllers.cli.local import count_gpus
    from gcore.models.hubs import hub_model
    from gcore.quickstart.starter import UserModel

    gpu = count_gpus() != 0  # If the number is unknown (WSL), assume that there is a GPU.
    if hub_model(given) is not None:
        return UserModel(given, chat=True, gpu=gpu)
    if "://" in given:
        raise UsageError(
            f"{given!r} is neither a folder nor a model of a hub", where="--model", fix="Write hf://OWNER/NAME"
        )
    folder = _absolute(Path(given))
    if not (folder / "config.json").is_file():
        raise UsageError(
            "the folder has no config.json, so it is not a model", where=str(folder), fix="Choose a model folder"
        )
    return UserModel(str(folder), chat=_has_chat_template(folder), gpu=gpu)


def _absolute(path: Path) -> Path:
    """The absolute path, with `~` expanded. Raises UsageError."""
    try:
        return Path(os.path.abspath(path.expanduser()))
    except (RuntimeError, OSError) as error:  # There is no such user, or the working directory was removed.
        raise UsageError(
            f"the path is invalid ({' '.join(str(error).split()).rstrip('.')})",
            where=str(path),
            fix="Give the full path",
        ) from error


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        return '"chat_template"' in (folder / "tokenizer_config.json").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def _sweep(target: Path) -> None:
    """Remove the leftovers of killed `init` commands for this name."""
    for remnant in target.parent.glob(f".{target.name}.init-*.tmp"):
        pid = remnant.name.removesuffix(".tmp").rpartition("-")[2]
        if pid.isdigit() and identify_process(int(pid)) is None:
            shutil.rmtree(remnant, ignore_errors=True)


def download_sentence(path: str, answer: HubAnswer) -> str:
    """Describe the download of a model: `hf://own/tiny is commit 0123456789ab on ...: 7 files, 3.4 GB, of which 1.2 GB are cached here`."""
    return (
        f"{path} is commit {answer.commit[:12]} on {answer.hub}: {len(answer.files)} files, {format_bytes(answer.total)}, "
        f"of which {format_bytes(answer.here)} are cached here. Each node downloads the rest into its cache."
    )


def download_tree(answer: HubAnswer) -> dict[str, Any]:
    """The files to download for a model as a JSON object; sizes in bytes. `here`: bytes that are cached already."""
    return {
        "hub": answer.hub,
        "commit": answer.commit,
        "files": {file.name: file.size for file in answer.files},
        "bytes": answer.total,
        "here": answer.here,
    }


def warn_of_trust(model: ModelSpec) -> None:
    """Print a warning on standard error if the spec trusts code that comes with a model."""
    if model.trust_remote_code:
        warning = (
            f"warning: model.trust_remote_code is set. Python code that comes with {model.path} runs in every engine "
            "and train rank, with all permissions of your account."
        )
        say(warning, err=True)


def format_bytes(size: int) -> str:
    """Format a size in bytes: `3.4 GB`, `120 kB`. Decimal units, as on the model hubs."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"


def planned_processes(spec: JobSpec, controllers: int, slots: str, models: ModelConfigs | None) -> list[dict[str, str]]:
    """The processes that `gcore run` would start, each with its node and slots. The placement code of the controllers
    computes them.

    `models`: configurations of the models, for estimates of memory; None: not read.
    """
    from controllers.cli.local import deal_slots, memory_share_gib
    from controllers.cluster.registration import node_facts
    from gcore.engines.emulated.launch import is_emulated
    from placement.initial import make_initial_plan
    from placement.slots import NodeSlots, Snapshot

    shares = deal_slots(slots, controllers)
    of_all = sum(map(len, shares))

    async def nodes_here() -> tuple[NodeSlots, ...]:
        looks = spec.placement.is_live and models is not None
        facts = [await node_facts(s, memory_share_gib(len(s), of_all)) if looks else None for s in shares]
        return tuple(NodeSlots(f"node-{i}", share, facts[i]) for i, share in enumerate(shares))

    nodes = asyncio.run(nodes_here())
    plan = make_initial_plan(Snapshot(nodes), spec, models).plan
    rows = [{"process": "etcd", "node": "this machine", "slot": "-"}]
    rows += [{"process": "controller", "node": n.node, "slot": " ".join(n.slots)} for n in nodes]
    kinds = {slot: "emulated" if is_emulated(slot) else spec.rollout.engine for n in nodes for slot in n.slots}
    served_by = {judge.name: judge.serving.engine for judge in spec.judges}
    rows += [
        {
            "process": (f"judge {e.judge} ({served_by[e.judge]})" if e.judge else f"rollout engine ({kinds[e.slot]})")
            + ", asleep" * e.asleep,
            "node": e.node,
            "slot": " ".join(e.slots),
        }
        for e in plan.engines
    ]
    rows += [
        {"process": f"train rank {r.rank}{' (emulated)' * is_emulated(r.slot)}", "node": r.node, "slot": r.slot}
        for r in plan.ranks
    ]
    return rows


def run_length(flow: FlowSpec, prompts: int) -> str:
    """Say how long a run will be: `20 steps`, or `2 data epochs, 24 steps`. `prompts`: number of prompts of a data
    epoch.

    If the number of steps depends on how many prompts are filtered, the text gives the maximum.
    """
    from placement.slots import count_noun

    steps = flow.last_step(prompts)
    if flow.epochs is None:
        return count_noun(steps or 0, "step")
    if steps is not None:
        return f"{count_noun(flow.epochs, 'data epoch')}, {count_noun(steps, 'step')}"
    most = -(-flow.epochs * prompts // flow.groups_per_step)
    return f"{count_noun(flow.epochs, 'data epoch')}, at most {count_noun(most, 'step')}, fewer if prompts are filtered"


PREPARED_UNDER = Path(PREPARED)


@command(
    "validate",
    FILES,
    "gcore validate examples/arithmetic/grpo.yaml",
    "gcore validate grpo.yaml --set train.ranks=4 --controllers 4 --slots cuda:8 -o json",
)
def validate(
    context: typer.Context,
    spec: SpecFile,
    set_: Set = None,
    controllers: Controllers = DEFAULT_CONTROLLERS,
    slots: Slots = DEFAULT_SLOTS,
    home: Home = DEFAULT_HOME,
    sample: Annotated[
        int | None, typer.Option(min=2, help="Number of prompts of each source to tokenize. Default: all.")
    ] = None,
    output: Format = Output.TABLE,
) -> None:
    """Check a spec and its files. Print the resolved spec, statistics of its data, and the processes that `gcore run` would start."""
    import yaml

    from controllers.api.submission.nodes import check_offload, check_sleep, local_warning
    from controllers.cli.local import deal_slots
    from controllers.cli.view.data import (
        data_notes,
        first_prompt,
        histogram,
        lengths_title,
        source_tree,
        sources_table,
    )
    from gcore.config.load import load_spec
    from gcore.models.resolve import ask_hub

    loaded = load_spec(spec, set_ or ())
    planned_processes(loaded, controllers, slots, None)  # Report too few slots before the data are read.
    shares = deal_slots(slots, controllers)
    try:
        check_offload(loaded, (slot for share in shares for slot in share))
        check_sleep(loaded, {f"node-{number}": share for number, share in enumerate(shares)})
    except SpecError as wrong:
        if was_given(context, "slots"):
            raise
        say(f"warning: 'gcore run' would refuse the spec on its default slots, {slots}: {wrong}", err=True)
    checked = check_files(loaded, home, sample)
    processes = planned_processes(loaded, controllers, slots, checked.models)
    prompts = checked.prompts.prompts
    answer = ask_hub(loaded.model.path, trust_remote_code=loaded.model.trust_remote_code)
    warn_of_trust(loaded.model)
    if (missing := local_warning(loaded)) is not None:
        say(missing, err=True)
    tree = loaded.model_dump(mode="json")
    if output.is_for_programs:
        download = download_tree(answer) if answer is not None else None
        sources = [source_tree(source) for source in checked.sources]
        shown = {"spec": tree, "processes": processes, "prompts": prompts, "sources": sources, "download": download}
        typer.echo(output.text(shown))
        return
    typer.echo(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
    display(sources_table(checked.sources))
    typer.echo()
    for note in data_notes(checked.sources):
        say(note)
    for source in checked.sources:
        typer.echo(f"{first_prompt(source)}\n")
        typer.echo(lengths_title(source))
        for line in histogram(source.lengths):
            typer.echo(f"  {line}")
        typer.echo()
    rows = ((process["process"], process["node"], process["slot"]) for process in processes)
    display(rows_table(("PROCESS", "NODE", "SLOT"), rows))
    if answer is not None:
        say(f"\n{download_sentence(loaded.model.path, answer)}")
    say(f"\n{spec} is valid: {prompts} prompts, {run_length(loaded.flow, prompts)}.")


@command("schema", FILES, "gcore schema > job.schema.json")
def schema() -> None:
    """Print the JSON schema of a job spec: every field with its meaning, unit and default."""
    from gcore.config.spec import job_schema

    typer.echo(as_json(job_schema()))


@command(
    "prepare",
    FILES,
    "gcore prepare arithmetic --to .cache/examples/arithmetic",
    "[dim]A judge for its responses:[/dim]  gcore prepare arithmetic-judge",
    "[dim]The judge as an adapter:[/dim]  gcore prepare arithmetic-judge-adapter",
    "[dim]A model that can call a calculator:[/dim]  gcore prepare calculator",
    "[dim]Pictures, and a model that sees:[/dim]  gcore prepare counting",
    "[dim]A judge that sees them:[/dim]  gcore prepare counting-judge",
    "[dim]A model that generates pictures:[/dim]  gcore prepare pictures",
    "[dim]The same with a DDIM scheduler:[/dim]  gcore prepare pictures-ddim",
    "[dim]A judge of generated pictures:[/dim]  gcore prepare pictures-judge",
    "[dim]A model that can look closer:[/dim]  gcore prepare zoom",
)
def prepare(
    example: Annotated[str, typer.Argument(metavar="EXAMPLE", help="Example to prepare: " + ", ".join(NAMES) + ".")],
    to: Annotated[Path | None, typer.Option(help="Target folder. Default: .cache/examples/EXAMPLE.")] = None,
) -> None:
    """Create the data and the warm-started model of an example, or the judge model of one. Does nothing if they exist."""
    # This is the only command that needs the train extra: it trains a small model.
    from gcore.quickstart.__main__ import EXAMPLES

    if example not in EXAMPLES:
        raise UsageError(f"there is no example {example!r}", where="prepare", fix=f"Use one of {', '.join(EXAMPLES)}")
    folder = to or PREPARED_UNDER / example
    say(f"Preparing {example} in {folder} ...")
    there = EXAMPLES[example](folder, 0)
    say(f"{example} is prepared in {folder}: {there}.")


def check_files(spec: JobSpec, home: Path, sample: int | None) -> CheckedJob:
    """Run the checks that a controller makes when a job is submitted, and count all prompts.

    `home`: home folder, whose cache of data is used if it exists. `sample`: number of prompts of each source to
    tokenize; None: all.
    """
    from controllers.api.submission.checks import check_submission
    from controllers.api.submission.nodes import check_backend
    from controllers.cli.view.data import progress_bar

    with tempfile.TemporaryDirectory(prefix="gcore-validate-") as scratch, progress_bar() as progress:
        # Keep the index in an existing home folder; do not create a home folder only for a check.
        folder = home if home.is_dir() else Path(scratch)
        check_backend(spec, ())
        return check_submission(spec, folder / "runs", folder / "cache", sample=sample, progress=progress)

"""`gcore init`: a new project in a folder of its own, whole or not at all.

Everything is made in a hidden folder beside the target, which gets its name when it is complete; so neither an error nor
Ctrl-C leaves a half-made project, and what a killed `init` left is removed by the next. Nothing that is there already is
ever written over. What the files say is `gcore.prepare.project`'s business.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gcore.errors import UsageError
from gcore.worker.process import identify

if TYPE_CHECKING:
    from gcore.prepare.project import OwnModel
    from gcore.prepare.starter_tasks import StarterTask

SEED = 0

INIT_EXAMPLES = """
[bold]Examples[/bold]

gcore init sorting

gcore init backwards --task reverse

[dim]With a model of your own:[/dim]  gcore init mine --model hf://Qwen/Qwen2.5-0.5B-Instruct
"""


def init(
    name: Annotated[Path, typer.Argument(metavar="NAME", help="The project, and the new folder it is written to.")],
    task: Annotated[str, typer.Option(help="What the model learns: sort or reverse.")] = "sort",
    model: Annotated[
        str | None,
        typer.Option(help="A model folder, hf://OWNER/NAME or ms://OWNER/NAME; default: a small one is made here."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Also into a folder that exists, if it is empty.")] = False,
) -> None:
    """Write a project that learns: spec, data, a reward of its own with its test, and a small model to begin with.

    Most of the time goes into training the small model, on one core. Nothing is downloaded.
    """
    from gcore.prepare.project import package_of
    from gcore.prepare.starter_tasks import TASKS

    if task not in TASKS:
        raise UsageError(f"there is no task {task!r}", where="--task", fix=f"Known: {', '.join(TASKS)}")
    target = _absolute(name)
    _refuse_occupied(target, force=force)
    package_of(target.name)
    own = None if model is None else _own_model(model)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it, too, leaves nothing half-made
    try:
        accuracy = _write(target, TASKS[task], own, force=force)
    except OSError as error:
        raise UsageError(
            f"the project cannot be written here ({error.strerror or error})",
            where=str(target),
            fix="Name a folder that can be made",
        ) from error
    if accuracy is not None:
        typer.echo(f"{name} is ready. Its model is right on {accuracy:.0%} of the held-out prompts. Next:\n")
    else:
        typer.echo(f"{name} is ready. Next:\n")
    for command in (
        f"cd {shlex.quote(str(name))}",
        "pip install --no-build-isolation --no-deps --editable .",
        "pytest",
        "gcore run grpo.yaml",
    ):
        typer.echo(f"  {command}")


def _write(target: Path, task: StarterTask, own: OwnModel | None, *, force: bool) -> float | None:
    """Everything, into `target`; the starter model's accuracy, if one was made."""
    from gcore.atomic import whole_folder
    from gcore.prepare.progress import Reporter
    from gcore.prepare.project import StarterModel, files
    from gcore.prepare.starter import write_data, write_model

    _sweep(target)
    accuracy = None
    with whole_folder(target, owner=f"init-{os.getpid()}", durable=False) as draft:
        if own is None:
            reporter = Reporter.for_terminal(True)
            with reporter:
                accuracy = write_model(task, draft / "model", seed=SEED, report=reporter.report)
        model = StarterModel(accuracy) if accuracy is not None else own
        assert model is not None
        for path, text in files(target.name, task, model, seed=SEED).items():
            file = draft / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        (draft / "data").mkdir()
        write_data(task, draft / "data", seed=SEED, spelt_out=own is not None)
        _refuse_occupied(target, force=force)  # somebody may have made it meanwhile
    return accuracy


def _refuse_occupied(target: Path, *, force: bool) -> None:
    if not target.exists() and not target.is_symlink():
        return
    if target.is_symlink() or not target.is_dir():
        raise UsageError("this exists, and is no folder", where=str(target), fix="Choose another name")
    if any(target.iterdir()):
        raise UsageError(
            "the folder is not empty", where=str(target), fix="Choose another name; nothing is overwritten"
        )
    if not force:
        raise UsageError("the folder exists", where=str(target), fix="Choose another name, or use it with --force")


def _own_model(given: str) -> OwnModel:
    """What `--model` names. Raises UsageError."""
    from gcore.models.names import hub_model
    from gcore.prepare.project import OwnModel

    if hub_model(given) is not None:
        return OwnModel(given, chat=True)
    if "://" in given:
        raise UsageError(
            f"{given!r} is neither a folder nor a hub's model", where="--model", fix="Write hf://OWNER/NAME"
        )
    folder = _absolute(Path(given))
    if not (folder / "config.json").is_file():
        raise UsageError("this is no model folder: it has no config.json", where=str(folder), fix="Name another")
    return OwnModel(str(folder), chat=_has_chat_template(folder))


def _absolute(path: Path) -> Path:
    """Raises UsageError."""
    try:
        return Path(os.path.abspath(path.expanduser()))
    except (RuntimeError, OSError) as error:  # no such user; the folder that we are in was removed
        raise UsageError(
            f"this is no path ({' '.join(str(error).split()).rstrip('.')})", where=str(path), fix="Write it in full"
        ) from error


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        return '"chat_template"' in (folder / "tokenizer_config.json").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def _sweep(target: Path) -> None:
    """Remove what an `init` of this name left that was killed and is no longer running."""
    for remnant in target.parent.glob(f".{target.name}.init-*.tmp"):
        pid = remnant.name.removesuffix(".tmp").rpartition("-")[2]
        if pid.isdigit() and identify(int(pid)) is None:
            shutil.rmtree(remnant, ignore_errors=True)

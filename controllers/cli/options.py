"""The options that several verbs share, each defined once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from controllers.cli.answers import Output
from controllers.cli.completing import complete_job, complete_node
from gcore.errors import UsageError


def utf8(word: str | None) -> str | None:
    """The word, if it can be sent to a controller. Raises UsageError: the shell may hand over any bytes."""
    try:
        (word or "").encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{word!a} is not UTF-8 text", fix="Type it again, or copy it from `gcore list`") from error
    return word


Home = Annotated[Path, typer.Option(envvar="GCORE_HOME", help="Folder of the local cluster: its state, logs and runs.")]
Address = Annotated[
    str | None,
    typer.Option(
        envvar="GCORE_ADDRESS",
        help="host:port of a controller, or several with commas; default: those of the local cluster that is up, else of the context.",
    ),
]
Controllers = Annotated[int, typer.Option(help="Daemons on this machine.")]
Slots = Annotated[
    str,
    typer.Option(
        help="Slots of this machine, dealt out to the daemons: cpu:N or cuda:N. emulated:N computes nothing; for tests and benchmarks only."
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Replace a field: section.field=value. Repeatable. A path is relative to the spec's folder, as in the spec.",
    ),
]
New = Annotated[bool, typer.Option("--new", help="Always a new job; one of that name that has not ended is ended.")]
Plain = Annotated[bool, typer.Option("--plain", help="Lines instead of the live view.")]
Format = Annotated[Output, typer.Option("--output", "-o", help="How the answer is printed.")]
SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="A job spec, a YAML file.")]
JobName = Annotated[
    str,
    typer.Argument(
        metavar="JOB", help="A job's name, NAMESPACE/NAME or uid.", callback=utf8, autocompletion=complete_job
    ),
]
NodeName = Annotated[
    str, typer.Argument(metavar="NODE", help="A node's name.", callback=utf8, autocompletion=complete_node)
]
Namespace = Annotated[str, typer.Option("--namespace", "-n", help="Only this one; default: all that you may see.")]

SglangPython = Annotated[
    Path | None,
    typer.Option(
        envvar="GCORE_SGLANG_PYTHON",
        help="Python that has SGLang, or its environment's folder, for rollout.engine: sglang; default: .venv-sglang.",
    ),
]

DEFAULT_HOME = Path(".gcore")
DEFAULT_CONTROLLERS = 2
DEFAULT_SLOTS = "cpu:2"

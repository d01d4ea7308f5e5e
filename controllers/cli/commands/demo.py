"""`gcore demo`: make the arithmetic example and run it, also where there is no clone of gcore's repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from controllers.cli.options import DEFAULT_HOME, RUN, Home, Plain, command
from gcore.errors import GcoreError, explain_os_errors

SPEC = "arithmetic.yaml"
"""In the installed package; in a clone it is examples/arithmetic/grpo.yaml."""


@command("demo", RUN, "gcore demo", "[dim]A shorter one:[/dim]  gcore demo --steps 10 --home /tmp/gcore-demo")
def demo(
    steps: Annotated[int, typer.Option(help="Steps to train.", min=1)] = 40,
    home: Home = DEFAULT_HOME,
    plain: Plain = False,
) -> None:
    """Train a small model to add numbers, on two controllers of this machine. Data and model are made first, in half a minute.

    The same command continues an interrupted demo, and trains further with more steps.
    """
    from controllers.cli.commands.run import run
    from gcore.quickstart.__main__ import EXAMPLES

    folder = home / "demo"
    typer.echo(f"Preparing the example in {folder} ...")
    EXAMPLES["arithmetic"](folder, 0)
    spec = folder / "grpo.yaml"
    with explain_os_errors("cannot write the spec", GcoreError, where=spec, fix="Choose another --home"):
        spec.write_text(demo_spec(), encoding="utf-8")
    run(spec, set_=[f"flow.steps={steps}"], home=home, plain=plain)


def demo_spec() -> str:
    """The spec of the arithmetic example, with data and model beside it."""
    import gcore.quickstart

    installed = Path(gcore.quickstart.__file__).with_name(SPEC)
    clone = installed.parents[2] / "examples" / "arithmetic" / "grpo.yaml"
    file = installed if installed.exists() else clone
    with explain_os_errors("cannot read the demo's spec", GcoreError, where=file, fix="Reinstall gcore"):
        text = file.read_text(encoding="utf-8")
    return re.sub(r"\.\./\.\./\.cache/examples/arithmetic/", "", text)

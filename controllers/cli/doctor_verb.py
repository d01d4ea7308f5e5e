"""`gcore doctor`: one table of what was looked at, how it is, and what to do about it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controllers.cli.answers import Output, console
from controllers.cli.options import DEFAULT_HOME, DEFAULT_SLOTS, Format, Home, SglangPython, Slots

if TYPE_CHECKING:
    from controllers.cli.doctor_checks import Check
    from controllers.cli.doctor_seen import Wanted

DOCTOR_EXAMPLES = """
[bold]Examples[/bold]

gcore doctor

[dim]Before a job on four GPUs with a model from a hub:[/dim]  gcore doctor --slots cuda:4 --online

[dim]For a script; ends with 1 if anything fails:[/dim]  gcore doctor -o json
"""

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    home: Home = DEFAULT_HOME,
    slots: Slots = DEFAULT_SLOTS,
    online: Annotated[bool, typer.Option("--online", help="Ask the hubs of models, too.")] = False,
    sglang_python: SglangPython = None,
    output: Format = Output.TABLE,
) -> None:
    """Look at this machine and at what is up on it: what works, what does not, and what to do. Changes nothing.

    Ends with 1 if anything fails.
    """
    import asyncio

    from rich.table import Table
    from rich.text import Text

    from controllers.cli.doctor_checks import State
    from controllers.cli.doctor_seen import Wanted
    from controllers.cli.local import deal_slots

    wanted = Wanted(slots.partition(":")[0], len(deal_slots(slots, 1)[0]))
    if output is Output.TABLE:
        typer.echo("Looking; torch and etcd are started for a moment, which takes some seconds ...", err=True)
    checks = asyncio.run(_look(home, wanted, online=online, sglang_python=sglang_python))
    if output.is_for_programs:
        rows = [{"check": c.name, "state": c.state.value, "seen": c.seen, "fix": c.fix} for c in checks]
        typer.echo(output.text({"checks": rows, "failed": sum(c.state is State.FAIL for c in checks)}))
    else:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in ("CHECK", "STATE", "SEEN", "WHAT TO DO"):
            table.add_column(heading, no_wrap=heading in ("CHECK", "STATE"), overflow="fold")
        for check in checks:
            state = Text(check.state.value, style=_COLOURS[check.state.value])
            table.add_row(Text(check.name), state, Text(check.seen), Text(check.fix))
        console().print(table)
    if any(check.state is State.FAIL for check in checks):
        raise typer.Exit(1)


async def _look(home: Path, wanted: Wanted, *, online: bool, sglang_python: Path | None) -> list[Check]:
    """Everything at once, for most of it is waiting; in the order in which a person wants to read it."""
    import asyncio
    import os

    from controllers.cli import doctor_checks as judge
    from controllers.cli import doctor_facts as facts
    from controllers.cli import doctor_reach as reach
    from gcore.clock import SystemClock

    clock = SystemClock()
    probe, etcd, place, sglang, hubs, cluster = await asyncio.gather(
        facts.probe(devices=wanted.kind == "cuda"),
        facts.try_etcd(clock),
        asyncio.to_thread(facts.home, home, clock),
        reach.sglang(sglang_python),
        reach.hubs() if online else _nothing(),
        reach.cluster(home, clock),
    )
    machine = facts.machine(clock)
    return [
        judge.python_version(sys.version_info[:3]),
        *judge.packages(facts.packages()),
        *judge.torch_build(probe, wanted),
        judge.deepspeed_starts(probe),
        *judge.etcd(etcd),
        *judge.home(place),
        judge.clock(machine, place),
        judge.processors(machine, wanted),
        judge.memory(machine, wanted),
        *judge.limits(machine, wanted),
        judge.threads(os.environ, machine.cpus),
        sglang,
        *judge.hubs(hubs),
        *judge.cluster(cluster),
    ]


async def _nothing() -> tuple[()]:
    return ()

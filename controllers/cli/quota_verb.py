"""`gcore quota`: the most slots that the jobs of each namespace may have together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from controllers.cli.answers import Output
from controllers.cli.fleet_verbs import table
from controllers.cli.job_verbs import call
from controllers.cli.options import DEFAULT_HOME, Address, Format, Home
from controllers.cli.view_text import visible
from gcore.errors import UsageError

if TYPE_CHECKING:
    from gcore.api.v1 import jobs_pb2 as pb

QUOTA_EXAMPLES = """
[bold]Examples[/bold]

gcore quota

[dim]At most 8 slots for all jobs of a namespace:[/dim]  gcore quota research 8

[dim]As many as there are:[/dim]  gcore quota research none
"""
NO_LIMIT = "none"


def quota(
    namespace: Annotated[str, typer.Argument(help="Whose quota is set; without it, all are shown.")] = "",
    slots: Annotated[str, typer.Argument(help="Slots that its jobs may have together, or none for no limit.")] = "",
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """What namespaces may have of the slots, and have; or set it. What is too much is given back at the jobs' next commits."""
    if not namespace:
        found = call(lambda client: client.get_quotas(), address, home)
    else:
        most = slots_given(namespace, slots)
        found = call(lambda client: client.set_quota(namespace, most), address, home)
    if output.is_for_programs:
        typer.echo(output.text([quota_tree(one) for one in found]))
        return
    rows = [
        (visible(one.namespace), str(one.slots) if one.HasField("slots") else "-", str(one.used), str(one.jobs))
        for one in found
    ]
    table(("NAMESPACE", "QUOTA", "USED", "JOBS"), rows, numbers=3)


def slots_given(namespace: str, text: str) -> int | None:
    """What a person wrote for the slots; None for no limit. Raises UsageError."""
    if text == NO_LIMIT:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise UsageError(
            f"{text!r} is no number of slots"
            if text
            else f"how many slots namespace {namespace!r} may have is not said",
            where="SLOTS",
            fix=f"Say a number, or {NO_LIMIT}: gcore quota {namespace} 8",
        )
    return int(text)


def quota_tree(one: pb.Quota) -> dict[str, Any]:
    """For JSON."""
    return {
        "namespace": one.namespace,
        "slots": one.slots if one.HasField("slots") else None,
        "used": one.used,
        "jobs": one.jobs,
    }

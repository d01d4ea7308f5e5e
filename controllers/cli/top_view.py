"""What `gcore top` shows of a job: its newest booked step on every node, slots by state, pools, and what holds steps up. Pure.

A node books a step a moment after it is committed, so what is shown is the newest step that each has booked, never a guess about the
one that goes on. Shares are of the slots' time: `2.1 slots` is the time of that many in the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from controllers.cli.view_text import seconds, visible
from gcore.ledger.books import EngineSums, StepBook, engines_of
from placement.books import added

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

HOLDS = {
    "barrier": "training: the batch is closed, and nothing may begin before its weights are there",
    "waiting_weights": "publication: engines wait for the weights of the newest step",
    "tail": "the tail: everything is begun, and the last responses and verdicts are not there yet",
    "back_pressure": "admission: no more may be begun (judges, rollout.concurrency or rollout.staleness)",
    "no_work": "generation: there is nothing yet to work on",
}
"""What a cause of idle slots says of the job."""
BAR = 30


@dataclass(frozen=True)
class Top:
    """A job at a moment. `books`: the newest of each node; `folder`: that of a run that ended, if that is where it was read."""

    name: str
    uid: str
    state: str
    step: int
    steps: str
    books: Mapping[str, StepBook]
    folder: str = ""

    @property
    def slots(self) -> int:
        """That the nodes have booked."""
        return sum(book.slots for book in self.books.values())

    @property
    def by_state(self) -> dict[str, float]:
        """Slots by state: the time of that many."""
        total: dict[str, float] = {}
        for book in self.books.values():
            if book.seconds > 0:
                total = added(total, {state: told / book.seconds for state, told in book.booked.items()})
                total = added(total, {"unbooked": book.unbooked / book.seconds} if book.unbooked else {})
        return total

    @property
    def step_s(self) -> float:
        """Seconds of the newest step."""
        return max((book.seconds for book in self.books.values()), default=0.0)

    @property
    def error(self) -> float:
        """The share of all slots' time that is not accounted for."""
        total = sum(book.seconds * book.slots for book in self.books.values())
        return sum(book.error * book.seconds * book.slots for book in self.books.values()) / total if total else 0.0

    @property
    def engines(self) -> dict[str, EngineSums]:
        """By pool, of all nodes."""
        return engines_of(self.books.values())

    @property
    def bottleneck(self) -> str:
        """What most idle slots wait for; empty if none is."""
        causes: dict[str, float] = {}
        for state, slots in self.by_state.items():
            if state.startswith("idle "):
                cause = state.rpartition(" ")[2]
                causes[cause] = causes.get(cause, 0.0) + slots
        return max(causes, key=lambda cause: (causes[cause], cause), default="")


def rows(top: Top) -> Iterable[tuple[str, str]]:
    """The job in words."""
    yield "job", f"{top.name} {top.state}"
    yield (
        "step",
        f"{top.step}/{top.steps}" + (f", the newest booked one took {seconds(top.step_s)}" if top.books else ""),
    )
    yield "slots", f"{top.slots} on {len(top.books)} nodes; {top.error:.2%} of their time is not accounted for"
    if top.bottleneck:
        idle = sum(slots for state, slots in top.by_state.items() if state.startswith("idle "))
        yield "idle", f"{idle:.1f} slots, most of them for {HOLDS[top.bottleneck]}"
    for pool, sums in sorted(top.engines.items()):
        if sums.active_s > 0:
            speed = sums.tokens / top.step_s if top.step_s else 0.0
            yield pool, f"{sums.running_s / sums.active_s:.1f} requests at a time in an engine, {speed:,.0f} tokens/s"
    if top.folder:
        yield "told from", f"{visible(top.folder)}, for no cluster is up"
        yield "see also", f"`gcore trace {top.uid} --step N`, `gcore placement explain {top.uid}`"


def states_table(top: Top) -> Table:
    """Slots by state, the most first."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_row(*(Text(word, style="dim") for word in ("state", "slots", "")))
    for state, slots in sorted(top.by_state.items(), key=lambda item: (-item[1], item[0])):
        share = slots / top.slots if top.slots else 0.0
        table.add_row(
            Text(state), Text(f"{slots:.1f}", justify="right"), Text("█" * round(share * BAR) + f" {share:.0%}")
        )
    return table


def shown(top: Top) -> Group:
    """All of it."""
    from rich.console import Group
    from rich.text import Text

    from controllers.cli.answers import pairs_table

    parts: list[Any] = [pairs_table(dict(rows(top)))]
    if top.books:
        parts += [Text(""), states_table(top)]
    else:
        parts.append(Text(f"No node has booked a step{'' if top.folder else ' yet'}.", style="dim"))
    return Group(*parts)


def tree(top: Top) -> dict[str, Any]:
    """As JSON."""
    return {
        "job": top.name,
        "state": top.state,
        "step": top.step,
        "slots": top.slots,
        "step_seconds": top.step_s,
        "by_state": {state: round(slots, 4) for state, slots in sorted(top.by_state.items())},
        "error": round(top.error, 6),
        "bottleneck": top.bottleneck,
        "engines": {pool: sums.model_dump(mode="json") for pool, sums in sorted(top.engines.items())},
        "nodes": {node: book.model_dump(mode="json") for node, book in sorted(top.books.items())},
    }

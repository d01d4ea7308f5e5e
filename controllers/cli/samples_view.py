"""Groups of samples on a terminal: a prompt, and its responses side by side; in a pipe, one response after the other.

All that models and datasets wrote goes through `readable`, which keeps line breaks and spells out whatever else could move
the cursor, hide text or colour it. A long text is shown to a bound; the JSON has all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from controllers.cli.view_text import visible
from gcore.environments.transcript import bracketed

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from gcore.api.v1 import jobs_pb2 as pb

PROMPT_CHARACTERS, RESPONSE_CHARACTERS = 2000, 1500
COLUMN_WIDTH = 36
"""The least that a response needs beside another."""
STANDINGS = {2: ", being trained on now", 3: ", cut off by a rollback"}


def readable(text: str, limit: int, more: int = 0) -> str:
    """`text`, its lines kept, at most `limit` characters; `more`: those that were not even kept."""
    shown = "\n".join(visible(line, limit) for line in text[:limit].split("\n"))
    left = max(0, len(text) - limit) + more
    return f"{shown}… ({left} characters more)" if left else shown


def groups_tree(groups: Sequence[pb.SampleGroup]) -> dict[str, Any]:
    """For JSON. At least one group."""
    first = groups[0]
    return {
        "step": first.step,
        "lineage": first.lineage,
        "standing": _standing(first),
        "of": first.of,
        "groups": [_group_tree(group) for group in groups],
    }


def show_groups(console: Console, groups: Sequence[pb.SampleGroup]) -> None:
    """Print them, at least one, with what they are."""
    first = groups[0]
    note = STANDINGS.get(first.standing, "")
    head = f"step {first.step}, lineage {first.lineage}{note}: {len(groups)} of {first.of} prompts that are kept"
    console.print(head, style="bold", markup=False, highlight=False)
    for group in groups:
        if console.is_terminal:
            console.print(_panel(group, console.width))
        else:
            console.print(_plain(group), markup=False, highlight=False, soft_wrap=True)


def figures(response: pb.SampleResponse) -> str:
    """Reward and advantage."""
    return f"reward {_number(response.reward)}, advantage {_advantage(response)}"


def particulars(response: pb.SampleResponse) -> str:
    """What the reward is made of, and how the response ended."""
    parts = [f"{visible(part.name, 40)} {_number(part.value)}" for part in response.parts]
    told = [f"{response.observed_tokens} of them observed"] if response.observed_tokens else []
    masked = ["masked"] if response.masked else []
    ending = [visible(response.finish_reason), f"{response.tokens} tokens", *told, *masked]
    return ", ".join([*parts, *ending, f"by {'/'.join(map(visible, response.versions))}"])


def marked(response: pb.SampleResponse) -> str:
    """Its text, with marks around what a tool or an environment said."""
    return bracketed(response.text.text, ((told.start, told.end) for told in response.observed))


def _panel(group: pb.SampleGroup, width: int) -> RenderableType:
    from rich import box
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    side_by_side = max(1, min(len(group.responses), (width - 4) // COLUMN_WIDTH))
    table = Table(box=box.SIMPLE_HEAD, show_header=False, expand=True, show_lines=True, pad_edge=False)
    for _ in range(side_by_side):
        table.add_column(ratio=1, overflow="fold")
    cells = [_cell(response) for response in group.responses]
    for first in range(0, len(cells), side_by_side):
        row = cells[first : first + side_by_side]
        table.add_row(*row, *[Text()] * (side_by_side - len(row)))
    prompt = Text(readable(group.prompt.text, PROMPT_CHARACTERS, group.prompt.more))
    answer = Text(f"answer: {readable(group.answer, 300)}", style="dim") if group.answer else Text()
    return Panel(Group(prompt, answer, table), title=Text(_title(group)), title_align="left")


def _cell(response: pb.SampleResponse) -> RenderableType:
    from rich.text import Text

    colour = "green" if response.reward > 0 else "red" if response.reward < 0 else "yellow"
    return Text.assemble(
        (f"{figures(response)}\n", f"bold {colour}"),
        (f"{particulars(response)}\n", "dim"),
        readable(marked(response), RESPONSE_CHARACTERS, response.text.more),
    )


def _plain(group: pb.SampleGroup) -> str:
    lines = [
        f"--- {_title(group)}",
        _indented("prompt", readable(group.prompt.text, PROMPT_CHARACTERS, group.prompt.more)),
    ]
    if group.answer:
        lines.append(_indented("answer", readable(group.answer, 300)))
    for response in group.responses:
        lines.append(f"  response {response.index}: {figures(response)}; {particulars(response)}")
        lines.append(_indented("", readable(marked(response), RESPONSE_CHARACTERS, response.text.more)))
    return "\n".join(lines)


def _indented(name: str, text: str) -> str:
    body = text.replace("\n", "\n    ")
    return f"  {name}: {body}" if name else f"    {body}"


def _title(group: pb.SampleGroup) -> str:
    node = visible(group.holder.rpartition(".")[0] or group.holder)
    return f"prompt {visible(group.ref)} of {visible(group.source or 'the data')}, {group.prompt_tokens} tokens, held by {node}"


def _number(value: float) -> str:
    return f"{value:.4g}"


def _advantage(response: pb.SampleResponse) -> str:
    if not response.HasField("advantage"):
        return "not kept"
    mean = f"{response.advantage:+.3f}"
    if not response.HasField("advantage_least"):
        return mean
    return f"{mean} ({response.advantage_least:+.3f} to {response.advantage_most:+.3f})"


def _standing(group: pb.SampleGroup) -> str:
    return {1: "committed", 2: "under way", 3: "cut off"}.get(group.standing, "unknown")


def _group_tree(group: pb.SampleGroup) -> dict[str, Any]:
    return {
        "ref": group.ref,
        "source": group.source,
        "holder": group.holder,
        "digest": group.digest,
        "prompt": group.prompt.text,
        "prompt_more": group.prompt.more,
        "prompt_tokens": group.prompt_tokens,
        "answer": group.answer,
        "temperature": group.temperature,
        "responses": [_response_tree(response) for response in group.responses],
    }


def _response_tree(response: pb.SampleResponse) -> dict[str, Any]:
    has = response.HasField
    return {
        "index": response.index,
        "text": response.text.text,
        "more": response.text.more,
        "tokens": response.tokens,
        "reward": response.reward,
        "parts": {part.name: part.value for part in response.parts},
        "advantage": response.advantage if has("advantage") else None,
        "advantage_least": response.advantage_least if has("advantage_least") else None,
        "advantage_most": response.advantage_most if has("advantage_most") else None,
        "finish_reason": response.finish_reason,
        "masked": response.masked,
        "observed": [[told.start, told.end] for told in response.observed],
        "observed_tokens": response.observed_tokens,
        "versions": list(response.versions),
    }

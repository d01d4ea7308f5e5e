"""Draw docs/images/processes.svg and docs/images/step.svg: `python -m tools.draw_architecture`, after a change here.

`make lint` compares the files with `drawings()`. The colours follow the reader's light or dark theme.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from tools.problem import ROOT

WIDTH = 960
STYLE = """\
svg { --ground: #ffffff; --ink: #1f2328; --dim: #59636e; --box: #f6f8fa; --edge: #8c959f; --band: #eef2f6; --call: #0969da }
@media (prefers-color-scheme: dark) {
svg { --ground: #0d1117; --ink: #e6edf3; --dim: #9198a1; --box: #1c2129; --edge: #656c76; --band: #161b22; --call: #58a6ff }
}
text { font: 13px system-ui, sans-serif; fill: var(--ink) }
.title { font-weight: 600 }
.dim { fill: var(--dim); font-size: 12px }
.ground { fill: var(--ground) }
.band { fill: var(--band) }
.box { fill: var(--box); stroke: var(--edge) }
.node { fill: none; stroke: var(--edge); stroke-dasharray: 5 4 }
.lane { stroke: var(--edge); stroke-dasharray: 2 4 }
.call { fill: none; stroke: var(--call); stroke-width: 1.5 }
.head { fill: var(--call) }"""
MARKER = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
    'orient="auto-start-reverse"><path class="head" d="M0 0 8 4 0 8z"/></marker>'
)


def picture(height: int, says: str, parts: Iterable[str]) -> str:
    """The document. `says`: for readers who do not see it."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    ground = f'<rect class="ground" width="{WIDTH}" height="{height}"/>'
    top = [head, f"<title>{escape(says)}</title>", f"<style>\n{STYLE}\n</style>", f"<defs>{MARKER}</defs>", ground]
    return "\n".join([*top, *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, title: str, lines: Sequence[str] = ()) -> list[str]:
    """A box with its title and smaller lines, centred."""
    first = y + height / 2 + 5 - 8 * len(lines)
    return [
        f'<rect class="box" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"/>',
        text(x + width / 2, first, title, "title"),
        *(text(x + width / 2, first + 16 * number, line, "dim") for number, line in enumerate(lines, 1)),
    ]


def arrow(*points: tuple[float, float], both: bool = False) -> str:
    path = " ".join(f"{x:g} {y:g}" for x, y in points)
    start = ' marker-start="url(#head)"' if both else ""
    return f'<path class="call" d="M{path}"{start} marker-end="url(#head)"/>'


def processes() -> str:
    """The processes of two nodes, and what they call."""
    parts = [
        *box(150, 16, 240, 44, "gcore command, Python client"),
        *box(570, 16, 240, 44, "Prometheus, browser"),
        arrow((270, 60), (270, 118)),
        text(280, 82, "gRPC; every controller answers", "dim", "start"),
        arrow((690, 60), (690, 118)),
        text(680, 82, "HTTP: metrics, page", "dim", "end"),
        *box(412, 108, 136, 76, "etcd", ["records; every write", "compares first"]),
        arrow((380, 146), (412, 146), both=True),
        arrow((548, 146), (580, 146), both=True),
    ]
    for x, name in ((20, "node 1"), (560, "node 2")):
        parts += [
            f'<rect class="node" x="{x}" y="96" width="380" height="340" rx="8"/>',
            text(x + 20, 113, name, "dim", "start"),
            *box(x + 20, 118, 340, 56, "gcore-controller", ["decides and writes; one per node, all equal"]),
            *box(x + 20, 222, 160, 92, "inference engine", ["policy or judge", "own supervisor,", "own lease"]),
            *box(x + 200, 222, 160, 92, "train rank", ["one per training slot", "own supervisor,", "own lease"]),
            *box(
                x + 20, 356, 340, 58, "rewards, tools, agents, trackers", ["foreign code; children of the controller"]
            ),
            arrow((x + 100, 174), (x + 100, 222)),
            text(x + 108, 202, "HTTP", "dim", "start"),
            arrow((x + 280, 174), (x + 280, 222)),
            text(x + 288, 202, "gRPC", "dim", "start"),
            arrow((x + 190, 174), (x + 190, 356)),
            text(x + 198, 349, "pipes", "dim", "start"),
            arrow((x + 10, 478), (x + 10, 268), (x + 20, 268)),
            text(x + 16, 462, "loads weights", "dim", "start"),
            arrow((x + 360, 268), (x + 370, 268), (x + 370, 478)),
            text(x + 364, 462, "writes weights, checkpoints", "dim", "end"),
        ]
    parts += [
        arrow((370, 174), (370, 200), (640, 200), (640, 222)),
        text(480, 218, "calls engines and", "dim"),
        text(480, 234, "ranks of every node", "dim"),
        arrow((380, 298), (480, 298), (480, 330), (840, 330), (840, 314), both=True),
        text(480, 290, "process group", "dim"),
    ]
    parts += box(
        20, 478, 920, 52, "run folder", ["log, checkpoints, staged weights, metrics; on a shared disk, or on each node"]
    )
    says = "Processes: clients call any controller; controllers agree through etcd and call engines and train ranks."
    return picture(546, says, parts)


LANES = (("controller 1", 150), ("controller 2", 330), ("etcd", 510), ("engines", 690), ("train ranks", 860))
PHASES: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (
    (
        "1 produce",
        (
            ("controller 1", "engines", "requests for a prompt (HTTP)"),
            ("engines", "controller 1", "samples; then score, filter, group"),
        ),
    ),
    (
        "2 offer",
        (
            ("controller 1", "etcd", "offer: names of groups, no tokens"),
            ("controller 2", "etcd", "offer"),
        ),
    ),
    ("3 seal", (("controller 2", "etcd", "seal: names the groups"),)),
    (
        "4 exchange",
        (
            ("controller 1", "train ranks", "samples that a rank needs (gRPC)"),
            ("controller 2", "train ranks", "samples that a rank needs (gRPC)"),
            ("controller 1", "etcd", "READY: every rank has its part"),
        ),
    ),
    (
        "5 train",
        (
            ("controller 1", "train ranks", "apply the seal; receipt and weights go to the run folder"),
            ("train ranks", "controller 2", "state: applied"),
        ),
    ),
    ("6 commit", (("controller 2", "etcd", "head and log entry"),)),
    ("7 publish", (("controller 1", "engines", "load the weights of the new version"),)),
)


def step() -> str:
    """One step, from top to bottom."""
    places, parts, y = dict(LANES), [], 52
    arrows: list[str] = []
    for number, (name, calls) in enumerate(PHASES):
        height = 30 * len(calls) + 12
        if number % 2 == 0:
            parts.append(f'<rect class="band" x="0" y="{y}" width="{WIDTH}" height="{height}"/>')
        arrows.append(text(12, y + 26, name, "title", "start"))
        for row, (caller, called, words) in enumerate(calls):
            at, start, end = y + 30 * row + 28, places[caller], places[called]
            arrows += [arrow((start, at), (end, at)), text(min(start, end) + 16, at - 6, words, "dim", "start")]
        y += height
    lanes = [f'<path class="lane" d="M{x} 44 {x} {y}"/>' for _, x in LANES]
    heads = [part for name, x in LANES for part in box(x - 62, 12, 124, 32, name)]
    says = "One step: produce, offer, seal, exchange, train, commit, publish; which controller calls whom."
    return picture(y + 8, says, [*parts, *lanes, *heads, *arrows])


def drawings() -> dict[str, str]:
    """The content of each drawing by its path from the root of the repository."""
    return {"docs/images/processes.svg": processes(), "docs/images/step.svg": step()}


def main(root: Path = ROOT) -> int:
    for path, content in drawings().items():
        (root / path).write_text(content, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

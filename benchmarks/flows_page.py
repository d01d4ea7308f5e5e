"""Writes the table of docs/flows.md and the curves of docs/flows.svg from benchmarks/results/flows.json.

    python benchmarks/flows_page.py       (make bench-flows does it after its runs)

No figure there is typed by hand; a test compares both with the result.
"""

from __future__ import annotations

import json

from measured import RESULTS, ROOT
from page_form import Result, renewed, table

PAGE = ROOT / "docs" / "flows.md"
PICTURE = ROOT / "docs" / "flows.svg"
RESULT = RESULTS / "flows.json"
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 400, 56, 20, 130, 44
COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#edae49", "#6a4c93", "#444444", "#b8672a")


def rows(result: Result) -> str:
    """The table: what each flow reached."""
    lines = [
        [
            f"[`{run['flow']}`](../examples/arithmetic/{run['flow']}.yaml)",
            str(run["steps"]),
            f"{run['accuracy_before']:.1%}",
            f"{run['accuracy_after']:.1%}",
            f"{100 * (run['accuracy_after'] - run['accuracy_before']):+.1f}",
            f"{run['seconds']:.0f}",
            run["date"][:10],
            f"`{run['commit']}`",
        ]
        for run in result["runs"]
    ]
    made = table(["flow", "steps", "before", "after", "points", "s", "taken", "commit"], lines)
    machines = sorted({run["machine"] for run in result["runs"]})
    return f"{made}\n\n*{result['what']}. {'; '.join(machines)}.*"


def page(text: str, result: Result) -> str:
    """The page with its table made anew."""
    return renewed(text, "flows", f"\n\n{rows(result)}\n\n", PAGE)


def picture(result: Result) -> str:
    """The curves: held-out accuracy by step, one line a flow, its name at its end."""
    runs = result["runs"]
    last = max((step for run in runs for step, _ in run["curve"]), default=1) or 1
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(step: float, accuracy: float) -> tuple[float, float]:
        return round(LEFT + across * step / last, 1), round(TOP + down * (1 - accuracy), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        "<title>Held-out accuracy of each built-in flow on the arithmetic example, by step</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tenth in range(0, 11, 2):
        x, y = place(0, tenth / 10)
        parts.append(f'<line x1="{x}" y1="{y}" x2="{LEFT + across}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 8}" y="{y + 4}" text-anchor="end" fill="#555">{tenth * 10} %</text>')
    for step in sorted({step for run in runs for step, _ in run["curve"]}):
        x, y = place(step, 0)
        parts.append(f'<text x="{x}" y="{y + 18}" text-anchor="middle" fill="#555">{step}</text>')
    parts.append(f'<text x="{LEFT + across / 2}" y="{HEIGHT - 6}" text-anchor="middle" fill="#555">step</text>')
    ends = _apart([place(*run["curve"][-1])[1] if run["curve"] else TOP for run in runs])
    for run, colour, end in zip(runs, COLOURS, ends, strict=False):
        points = [place(step, accuracy) for step, accuracy in run["curve"]]
        line = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in points]
        x = points[-1][0] if points else LEFT + across
        parts.append(f'<text x="{x + 10}" y="{round(end + 4, 1)}" fill="{colour}">{run["flow"]}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _apart(places: list[float], gap: float = 14.0) -> list[float]:
    """The same places in the same order, moved down so that no two names lie on each other."""
    moved = list(places)
    least = float("-inf")
    for index in sorted(range(len(places)), key=lambda index: places[index]):
        moved[index] = least = max(places[index], least + gap)
    return moved


def main() -> None:
    """Write both."""
    result = json.loads(RESULT.read_text())
    PAGE.write_text(page(PAGE.read_text(), result))
    PICTURE.write_text(picture(result))
    print(f"{PAGE}, {PICTURE}")


if __name__ == "__main__":
    main()

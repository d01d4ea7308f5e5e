"""Curves, bars and maps out of characters, and text that is safe to show. Pure strings; colours are `view_live`'s.

What models and datasets wrote may hold control characters, which would move the cursor or worse: everything from there
goes through `visible`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile

from controllers.cli.view_points import SourceFigures
from gcore.config.evaluation import OF_PART

LEVELS = " ▁▂▃▄▅▆▇█"
SHADES = " ░▒▓█"


def visible(text: str, limit: int = 60) -> str:
    """`text` on one line, at most `limit` characters, with every control or invisible character spelt out."""
    shown = "".join(c if c == " " or _harmless(c) else _spelt(c) for c in text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def told_apart(texts: Sequence[str], limit: int = 60) -> list[str]:
    """Each of `texts` as `visible` shows it. Where one is too long, the words that all begin with (a system message, say)
    give way to "…", so that what is left tells them apart."""
    alike = takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False)) if len(texts) > 1 else ()
    end = max((n + 1 for n, column in enumerate(alike) if column[0].isspace()), default=0)
    if not end or all(len(text) <= limit for text in texts):
        return [visible(text, limit) for text in texts]
    return ["…" + visible(text[end:], limit - 1) for text in texts]


def _harmless(character: str) -> bool:
    return unicodedata.category(character)[0] not in "CZ"


def _spelt(character: str) -> str:
    return character.encode("unicode_escape", errors="backslashreplace").decode()


def seconds(value: float) -> str:
    """A duration for people: 0.42s, 12s, 3m05s, 2h07m."""
    if value < 10:
        return f"{value:.2f}s"
    whole = round(value)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def columns(points: Sequence[tuple[float, float]], width: int) -> tuple[float | None, ...]:
    """`(place, value)`, places from 0 to 1, gathered into `width` columns by their mean; None where there is none."""
    sums = [0.0] * width
    counts = [0] * width
    for place, value in points:
        column = min(width - 1, max(0, int(place * width)))
        sums[column] += value
        counts[column] += 1
    return tuple(s / n if n else None for s, n in zip(sums, counts, strict=True))


def held(values: Sequence[float | None], end: int) -> tuple[float | None, ...]:
    """Each gap filled with the value before it, up to column `end`: for what is measured now and then."""
    result: list[float | None] = []
    last: float | None = None
    for column, value in enumerate(values):
        last = value if value is not None else last
        result.append(value if value is not None else last if column <= end else None)
    return tuple(result)


def chart(values: Sequence[float | None], *, height: int, low: float, high: float) -> tuple[str, ...]:
    """A column chart, top line first. A value at or below `low` still shows its lowest mark."""
    steps = height * (len(LEVELS) - 1)
    span = (high - low) or 1.0
    filled = [None if v is None else max(1, min(steps, round((v - low) / span * steps))) for v in values]
    lines = []
    for row in range(height - 1, -1, -1):
        base = row * (len(LEVELS) - 1)
        lines.append("".join(" " if f is None else LEVELS[max(0, min(len(LEVELS) - 1, f - base))] for f in filled))
    return tuple(lines)


def parts(amounts: Mapping[str, float], width: int) -> dict[str, int]:
    """`width` cells dealt out in proportion to `amounts`; largest remainders first, so that they sum to `width`."""
    total = sum(amounts.values())
    if total <= 0:
        return {}
    exact = {name: amount / total * width for name, amount in amounts.items()}
    cells = {name: int(share) for name, share in exact.items()}
    for name in sorted(exact, key=lambda n: cells[n] - exact[n])[: width - sum(cells.values())]:
        cells[name] += 1
    return cells


def strip(owned: Collection[int], count: int, width: int) -> str:
    """A map of shards 0 to `count`-1 in at most `width` cells; the fuller a cell, the more of its shards are owned.

    Every cell stands for the same number of shards, but for the last.
    """
    mine = frozenset(owned)
    line = []
    for cell in _cells(count, width):
        share = sum(shard in mine for shard in cell) / len(cell)
        line.append("·" if share == 0 else SHADES[max(1, round(share * (len(SHADES) - 1)))])
    return "".join(line)


def moved_cells(moved: Collection[int], count: int, width: int) -> frozenset[int]:
    """The cells of `strip` in which a moved shard lies."""
    return frozenset(index for index, cell in enumerate(_cells(count, width)) if any(s in moved for s in cell))


def _cells(count: int, width: int) -> tuple[range, ...]:
    if count <= 0:
        return ()
    each = -(-count // width)
    return tuple(range(first, min(count, first + each)) for first in range(0, count, each))


def measure(metric: str, value: float) -> str:
    """`accuracy 98.5%`, `pass@4 71.2%`; `mean@4 0.712`, because rewards need not be shares. A part's mean is read beside the
    accuracy, and looks like it where it can: `judged 95.3%`; `stars 3.214`."""
    if metric.startswith(OF_PART):
        return f"{metric.removeprefix(OF_PART)} {f'{value:.1%}' if 0 <= value <= 1 else f'{value:.3f}'}"
    number = f"{value:.3f}" if metric.rpartition("/")[2].startswith("mean@") else f"{value:.1%}"
    return f"{metric} {number}"


def measures(metrics: Mapping[str, float], accuracy: float | None) -> list[str]:
    """What a set's metrics say beside its accuracy, which pass@1 is, and the mean reward too where rewards are 0 and 1."""

    def place(metric: str) -> tuple[str, int]:
        name, _, number = metric.partition("@")
        return name, int(number) if number.isdecimal() else 0

    told = {m: v for m, v in metrics.items() if m != "pass@1" and not (m.startswith("mean@") and v == accuracy)}
    return [measure(metric, told[metric]) for metric in sorted(told, key=place)]


def part_measures(metrics: Mapping[str, float]) -> list[str]:
    """What a set's metrics say of the parts of its reward: also where one is what the accuracy is, for that they agree is news too."""
    return [measure(metric, value) for metric, value in sorted(metrics.items()) if metric.startswith(OF_PART)]


def source_line(source: SourceFigures) -> str:
    """`120 trained, 3 filtered, 0 failed; reward 0.531, length 3.1, 4% cut off; accuracy 75.0%`."""
    words = [f"{source.trained} trained, {source.filtered} filtered, {source.failed} failed"]
    means = []
    if source.mean_reward is not None:
        means.append(f"reward {source.mean_reward:.3f}")
    if source.mean_length is not None:
        means.append(f"length {source.mean_length:.1f}")
    if source.truncated is not None:
        means.append(f"{source.truncated:.0%} cut off")
    if means:
        words.append(", ".join(means))
    if source.accuracy is not None:
        told = [f"accuracy {source.accuracy:.1%}", *measures(source.metrics, source.accuracy)]
        if source.eval_unscored:
            told.append(f"{source.eval_unscored} responses not scored")
        words.append(", ".join(told))
    return "; ".join(words)

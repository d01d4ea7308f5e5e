"""Plug-ins (flows, rewards, filters, curricula, verdict parsers, ...), found by name through Python entry points.

A spec names a plug-in, and `find_plugin` loads it. An unknown name raises an error with the nearest known name. A name that two packages
provide, a plug-in that raises on import, and one that is not callable raise errors with their location. The caller handles a plug-in that
raises while it runs; `plugin_trace` returns the plug-in's own traceback, without gcore's frames, for the event that reports it
(`PluginFault`).

This module does not know what a kind of plug-in takes or returns.
"""

from __future__ import annotations

import traceback
from asyncio import CancelledError
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import TracebackType
from typing import Any

from gcore.errors import GcoreError, SpecError, TracedError, did_you_mean

MAX_SENTENCE = 500
"""Most characters of an error's text in sentences, records and pipes. Some errors put a whole page into one line."""

MAX_TRACE = 4000
"""Characters of a traceback to keep, from its end, where the error is."""

RAISED = (Exception, SystemExit)
"""What plug-ins raise. sys.exit in a plug-in ends the plug-in, not the controller that runs it."""

_OURS = ("gcore", "controllers", "placement", "importlib", "asyncio")
"""Packages whose frames precede a plug-in's own."""


@dataclass(frozen=True, slots=True)
class PluginKind:
    """`noun`: name in sentences. `group`: entry-point group. `where`: the spec key that names a plug-in."""

    noun: str
    group: str
    where: str


class PluginFault(TracedError, SpecError):
    """A plug-in cannot be loaded or is invalid. `trace`: the traceback of its own code, or empty."""


def find_plugin(kind: PluginKind, name: str) -> Callable[..., Any]:
    """Load the entry point `name` of this kind. Raises PluginFault."""
    known = entry_points(group=kind.group)
    points = [point for point in known if point.name == name]
    if not points:
        raise _unknown(kind, name, {point.name for point in known})
    targets = sorted({point.value for point in points})
    if len(targets) > 1:
        raise PluginFault(
            f"{kind.noun} {name!r} is provided more than once, by {' and '.join(targets)}",
            where=kind.where,
            fix="Uninstall all but one of the packages",
        )
    return _loaded(kind, name, points[0])


def check_plugin(kind: PluginKind, name: str) -> None:
    """Check that an entry point `name` of this kind exists, without loading it. Raises PluginFault."""
    names = {point.name for point in entry_points(group=kind.group)}
    if name not in names:
        raise _unknown(kind, name, names)


def error_sentence(error: BaseException) -> str:
    """Return the error's type and the first line of its text, at most MAX_SENTENCE characters."""
    try:
        first = next(iter(str(error).splitlines()), "")
    except Exception:  # noqa: BLE001  foreign code: even str() of an error may raise
        first = ""
    first = first if len(first) <= MAX_SENTENCE else f"{first[: MAX_SENTENCE - 1]}…"
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def plugin_trace(error: BaseException | None) -> str:
    """Return the traceback of the plug-in's own code, from `error` or its cause. Empty if there is none.

    Keeps the last MAX_TRACE characters.
    """
    if error is None:
        return ""
    told = getattr(error, "trace", None)
    if isinstance(told, str):
        return told[-MAX_TRACE:]
    if isinstance(error, GcoreError):  # an error of gcore's own needs no traceback
        return plugin_trace(error.__cause__)
    lines = traceback.format_exception(type(error), error, _theirs(error.__traceback__), chain=False)
    return "".join(lines).strip()[-MAX_TRACE:]


def _unknown(kind: PluginKind, name: str, names: set[str]) -> PluginFault:
    hint = did_you_mean(name, names)
    known = ", ".join(sorted(names)) or "none"
    return PluginFault(
        f"no {kind.noun} is called {name!r}{hint}",
        where=kind.where,
        fix=f"Known: {known}. To use your own, install its package where controllers run",
    )


def _loaded(kind: PluginKind, name: str, point: EntryPoint) -> Callable[..., Any]:
    try:
        found = point.load()
    except (*RAISED, CancelledError) as error:  # foreign code: importing it may raise anything
        raise PluginFault(
            f"{kind.noun} {name!r} cannot be loaded from {point.value} ({error_sentence(error)}){_place_of(error)}",
            where=kind.where,
            fix="Correct or reinstall the package that provides it",
            trace=plugin_trace(error),
        ) from error
    if not callable(found):
        raise PluginFault(
            f"{kind.noun} {name!r} at {point.value} is a {type(found).__name__}, which is not callable",
            where=kind.where,
            fix="Point the entry point to a function",
        )
    return found  # type: ignore[no-any-return]


def _place_of(error: BaseException) -> str:
    """Return `, raised at FILE:LINE` for the last line of the plug-in's own code; empty if none of it ran."""
    place, frame = "", error.__traceback__
    while frame is not None:
        if not _is_ours(frame):
            place = f", raised at {frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
        frame = frame.tb_next
    return place


def _theirs(trace: TracebackType | None) -> TracebackType | None:
    """Return the part from the first frame outside gcore and Python's import system; all of it if there is none."""
    frame = trace
    while frame is not None and _is_ours(frame):
        frame = frame.tb_next
    return frame or trace


def _is_ours(frame: TracebackType) -> bool:
    return str(frame.tb_frame.f_globals.get("__name__", "")).partition(".")[0] in _OURS

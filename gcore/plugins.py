"""Plug-ins: flows, rewards, filters, curricula, verdict parsers, found by name through Python entry points.

A spec names a plug-in; whoever runs it asks here. A name that nobody provides is answered with the nearest one that
somebody does; one that two packages provide, that raises while it is imported, or that cannot be called is refused in a
sentence that says where. A plug-in that raises while it *works* is its caller's business; `plugin_trace` gives the plug-in's own
traceback, without the frames of gcore that called it, for the event that reports it (`PluginFault`).

Nothing here knows what a plug-in of some kind takes or returns.
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
"""Characters of what an error says that are told: some put a whole page into a line. It goes into records and over pipes."""

MAX_TRACE = 4000
"""Characters of a traceback that are kept: its end, where the error is."""

RAISED = (Exception, SystemExit)
"""What plug-ins raise. Who calls sys.exit means the plug-in's end, not that of the controller it runs in."""

_OURS = ("gcore", "controllers", "placement", "importlib", "asyncio")
"""Packages whose frames come before a plug-in's own."""


@dataclass(frozen=True, slots=True)
class PluginKind:
    """`noun`: what people call it; `group`: its entry points; `where`: the key of the spec that names one."""

    noun: str
    group: str
    where: str


class PluginFault(TracedError, SpecError):
    """A plug-in cannot be had, or is not what it should be. `trace`: the traceback of its own code, or empty."""


def find_plugin(kind: PluginKind, name: str) -> Callable[..., Any]:
    """What the entry point `name` of that kind gives. Raises PluginFault."""
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
    """Whether somebody provides an entry point `name` of that kind. Loads nothing. Raises PluginFault."""
    names = {point.name for point in entry_points(group=kind.group)}
    if name not in names:
        raise _unknown(kind, name, names)


def error_sentence(error: BaseException) -> str:
    """The error's type and the first line of what it says, at most MAX_SENTENCE characters of it."""
    try:
        first = next(iter(str(error).splitlines()), "")
    except Exception:  # noqa: BLE001  the edge to foreign code: an error may even fail to say what it is
        first = ""
    first = first if len(first) <= MAX_SENTENCE else f"{first[: MAX_SENTENCE - 1]}…"
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def plugin_trace(error: BaseException | None) -> str:
    """The traceback of the plug-in's own code: of `error`, or of what it says it was raised from. Empty if there is none.

    At most MAX_TRACE characters, the last ones.
    """
    if error is None:
        return ""
    told = getattr(error, "trace", None)
    if isinstance(told, str):
        return told[-MAX_TRACE:]
    if isinstance(error, GcoreError):  # what a plug-in says in gcore's own words needs no traceback
        return plugin_trace(error.__cause__)
    lines = traceback.format_exception(type(error), error, _theirs(error.__traceback__), chain=False)
    return "".join(lines).strip()[-MAX_TRACE:]


def _unknown(kind: PluginKind, name: str, names: set[str]) -> PluginFault:
    hint = did_you_mean(name, names)
    known = ", ".join(sorted(names)) or "none"
    return PluginFault(
        f"no {kind.noun} is called {name!r}{hint}",
        where=kind.where,
        fix=f"Known: {known}; one of your own once its package is installed where controllers run",
    )


def _loaded(kind: PluginKind, name: str, point: EntryPoint) -> Callable[..., Any]:
    try:
        found = point.load()
    except (*RAISED, CancelledError) as error:  # the edge to foreign code: importing it may raise anything
        raise PluginFault(
            f"{kind.noun} {name!r} cannot be loaded from {point.value} ({error_sentence(error)}){_place_of(error)}",
            where=kind.where,
            fix="Correct or reinstall the package that provides it",
            trace=plugin_trace(error),
        ) from error
    if not callable(found):
        raise PluginFault(
            f"{kind.noun} {name!r} at {point.value} is a {type(found).__name__}, which cannot be called",
            where=kind.where,
            fix="Let the entry point name a function",
        )
    return found  # type: ignore[no-any-return]


def _place_of(error: BaseException) -> str:
    """`, raised at FILE:LINE`: the last line of the plug-in's own code, if any of it ran."""
    place, frame = "", error.__traceback__
    while frame is not None:
        if not _is_ours(frame):
            place = f", raised at {frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
        frame = frame.tb_next
    return place


def _theirs(trace: TracebackType | None) -> TracebackType | None:
    """The part that begins with the first frame outside gcore and Python's import; all of it if there is none."""
    frame = trace
    while frame is not None and _is_ours(frame):
        frame = frame.tb_next
    return frame or trace


def _is_ours(frame: TracebackType) -> bool:
    return str(frame.tb_frame.f_globals.get("__name__", "")).partition(".")[0] in _OURS

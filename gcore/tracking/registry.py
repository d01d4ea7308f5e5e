"""Trackers by name, and what can be known to be wrong with a spec's before the job runs. Opens none."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from gcore.config.reading import TrackerSpec
from gcore.errors import SpecError
from gcore.nearest import did_you_mean
from gcore.plugins import PluginKind, find_plugin
from gcore.tracking.api import TrackerKind

TRACKERS = PluginKind("tracker", "gcore.trackers", "tracking")


def find_tracker(name: str) -> TrackerKind:
    """The tracker of that entry-point name. Raises SpecError, with the nearest name if there is none."""
    found = find_plugin(TRACKERS, name)
    return found if isinstance(found, TrackerKind) else TrackerKind(found)


def check_trackers(trackers: Iterable[TrackerSpec]) -> None:
    """Raises SpecError for a tracker that is unknown, not installed here, or given an option that it does not have."""
    for tracker in trackers:
        kind = find_tracker(tracker.name)
        if kind.module and find_spec(kind.module) is None:
            raise SpecError(
                f"tracker {tracker.name!r} needs the Python package {kind.module}, which is not installed",
                where="tracking",
                fix=f"Where controllers run: pip install '{kind.install}'",
            )
        for option in sorted(tracker.options):
            if kind.options is not None and option not in kind.options:
                known = sorted(kind.options)
                hint = did_you_mean(option, known)
                raise SpecError(
                    f"tracker {tracker.name!r} has no option {option!r}{hint}",
                    where="tracking",
                    fix=f"It has: {', '.join(known)}",
                )

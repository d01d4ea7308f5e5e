"""When a rank may give its memory back. Pure, and without torch; what that memory is, `gcore.train.resting` knows.

Only between two steps: not from Apply to its end, and not once parts of a streamed step were begun, whose gradients are there
already. Who names another step than the last that is done is late, or early, and is refused: a rank must not be put to rest by a
word that was meant for the pause before the step that comes.
"""

from __future__ import annotations

from collections.abc import Collection

from gcore.errors import GcoreError
from gcore.train.feed_state import FeedState, Refused

OPTIMIZER, WEIGHTS = "optimizer", "weights"
PARTS = frozenset({OPTIMIZER, WEIGHTS})
"""All that a rank can release."""


class CannotRest(GcoreError):
    """There is no room to put aside what a rank holds; it is as it was."""


def unknown(what: Collection[str]) -> str:
    """What of `what` no rank has, in one sentence; empty if there is nothing."""
    strange = sorted(set(what) - PARTS)
    return f"a rank has no part {strange[0]!r}; it releases {' and '.join(sorted(PARTS))}" if strange else ""


def refuse_release(state: FeedState, step: int) -> Refused | None:
    """Why nothing may be released now, by a caller who knows `step` as the last that is done."""
    if state.applying is not None:
        return Refused(f"token {state.applying} is being applied, which needs all of the rank's memory")
    if state.begun:
        return Refused(f"parts of step {state.done + 1} were begun, and their gradients stay in memory")
    if step != state.done:
        return Refused(f"step {state.done} is the last that is done here, not {step}")
    return None


def refuse_restore(state: FeedState) -> Refused | None:
    """Why there is nothing to restore by hand now."""
    if state.applying is not None:
        return Refused(f"token {state.applying} is being applied, which takes the rank's memory by itself")
    return None

"""Why a job's train world was replaced or lost engines: the stored reasons of rollback entries and plans, and sentences for people.

A stored reason begins with fixed words (`GAVE_BACK`, `LEFT`, ...) by which programs recognize it; they never change. Details for people
follow, separated by "; ". Entries of earlier versions have fewer details. `restart_sentence` turns a stored reason into a sentence.
"""

from __future__ import annotations

import re

GAVE_BACK = "slots go to other jobs"
LEFT = "its slots are given back"
HAS_AGAIN = "it has slots again"

OF_SHARES = (GAVE_BACK, LEFT, HAS_AGAIN)
"""Prefixes of the reasons of planned rollbacks."""

CHANGED = f"{LEFT}: the job's settings were changed"

PAUSED = f"{LEFT}: the job is paused"
SMALLER = f"{LEFT}: its share is smaller now"
CONTINUED = "continued after its end"
PLACED = "placement"
RESTORED = "etcd was restored from a backup"

_THEN = "; then "
"""Separates the reason of a plan and that of the engines that were removed from it."""

_REMOVED = re.compile(r"(\d+) engines? (?:was|were) removed: (.+)")

_OLDER = "etcd was restored from an older backup"
_TAKEN = re.compile(r"(\d+ slots?) goe?s? to (.+)")
_LOST_SLOTS = re.compile(r"\d+ slots? (?:is|are) on a .+|it may use at most \d+ slots?")

_WORDS = (
    (re.compile(re.escape(HAS_AGAIN)), "resumed, or its slots are available again"),
    (re.compile(re.escape(PAUSED)), "paused by `gcore pause`, or because `gcore run` was interrupted"),
    (re.compile(re.escape(CHANGED)), "its settings were changed"),
    (re.compile(rf"{re.escape(CONTINUED)}: (\d+) (\w+) in place of (\d+)"), r"the goal was raised from \3 to \1 \2"),
    (re.compile(rf"{PLACED}: "), "the placement policy changed the train world: "),
    (
        re.compile(r"(\d+) ranks instead of (\d+) save"),
        r"the train world grows from \2 to \1 ranks: they save",
    ),
    (re.compile(r"rank (\d+) on (\S+) is gone: \S+ is lost"), r"node \2 was lost with train rank \1"),
    (
        re.compile(r"rank (\d+) on (\S+) is gone"),
        r"the worker of train rank \1 on node \2 disappeared without a report",
    ),
    (re.compile(r"(\S+), which should run rank (\d+), is gone"), r"node \1 was lost before it started train rank \2"),
    (re.compile(r"(\S+) lost (slot \S+), which should run rank (\d+)"), r"node \1 lost \2 of train rank \3"),
    (re.compile(r"rank (\d+) on (\S+) failed"), r"train rank \1 on node \2 failed"),
    (re.compile(rf"(.+?): {re.escape(RESTORED)} of step (\d+)"), rf"{_OLDER}, of step \2: \1"),
)
"""The beginning of a stored reason, and the words for it. The rest follows as it is."""


def node_lost_reason(rank: int, node: str) -> str:
    """The stored reason if the node of a train rank is no longer registered."""
    return f"rank {rank} on {node} is gone: {node} is lost"


def slots_taken(count: int, job: str) -> str:
    """The detail of a stored reason that names the job which gets `count` slots."""
    return f"{_slots(count)} {'goes' if count == 1 else 'go'} to {job}"


def slots_unusable(count: int, node: str, *, draining: bool) -> str:
    """The detail of a stored reason that names the draining node of `count` slots, or the node on which they are unhealthy."""
    if draining:
        return f"{_slots(count)} {'is' if count == 1 else 'are'} on a draining node: {node}"
    return f"{_slots(count)} {'is' if count == 1 else 'are'} on a node where {_they(count)} unhealthy: {node}"


def slots_limited(most: int) -> str:
    """The detail of a stored reason that names the job's maximum number of slots."""
    return f"it may use at most {_slots(most)}"


def slots_gone(count: int, node: str) -> str:
    """The detail of a stored reason that names the node of `count` slots, which is not registered any more."""
    return f"{_slots(count)} {'is' if count == 1 else 'are'} on a node that is gone: {node}"


def engines_removed(plan_reason: str, count: int, why: str) -> str:
    """The stored reason of a plan that was made for `plan_reason` and loses `count` engines, because of `why`."""
    made_for = plan_reason.partition(_THEN)[0]
    return f"{made_for}{_THEN}{count} engine{'s were' if count > 1 else ' was'} removed: {why}"


def newest_reason(plan_reason: str) -> str:
    """Why a plan was last changed, from its stored reason: the cause in words if engines were removed from it."""
    newest = plan_reason.rpartition(_THEN)[2]
    found = _REMOVED.fullmatch(newest)
    return newest if found is None else f"{newest[: found.start(2)]}{cause_in_words(found[2])}"


def removal_cause(plan_reason: str) -> str | None:
    """Why engines were removed from a plan, in words, from its stored reason; None if its last change was another."""
    found = _REMOVED.fullmatch(plan_reason.rpartition(_THEN)[2])
    return None if found is None else cause_in_words(found[2])


def _slots(count: int) -> str:
    return f"{count} slot{'s' * (count != 1)}"


def _they(count: int) -> str:
    return "it is" if count == 1 else "they are"


def is_restart(reason: str) -> bool:
    """Whether the entry repeats or interrupts training. A pause, the start after waiting for slots, and a raised goal do not."""
    return not reason.startswith((HAS_AGAIN, CONTINUED)) and not _is_end(reason)


def _is_end(reason: str) -> bool:
    """Whether a user stopped the job: it is paused, or it ends."""
    return reason.startswith(LEFT) and not reason.startswith(SMALLER)


def restart_sentence(step: int, lineage: int, reason: str, lost: int | None = None) -> str:
    """`restarted from checkpoint 44 (attempt 2): preempted, 1 slot went to job 7f3a; no step is lost`.

    `step`, `lineage`, `reason`: of the log entry. `lost`: steps that are discarded; None: unknown.
    """
    source = f"checkpoint {step}" if step else "the initial model"
    if reason.startswith(CONTINUED):
        return f"continued from {source} (attempt {lineage + 1}): {cause_in_words(reason)}"
    verb = "stopped at" if _is_end(reason) else "restarted from"
    sentence = f"{verb} {source} (attempt {lineage + 1}): {cause_in_words(reason)}"
    if lost is None or lost < 0:
        return sentence
    return f"{sentence}; {lost or 'no'} step{'s are' if lost > 1 else ' is'} lost"


def cause_in_words(reason: str) -> str:
    """The cause that a stored reason names, in words: preempted, node lost, restored from a backup, ..."""
    first, restored, evidence = reason.rstrip(".").partition(f"; {RESTORED}: ")
    if restored:
        cause = cause_in_words(first)
        return f"{cause}; {evidence}" if cause.startswith(_OLDER) else f"{_OLDER}: {evidence}; {cause}"
    if first.startswith((GAVE_BACK, SMALLER)):
        return _share_in_words(first)
    for pattern, words in _WORDS:
        if found := pattern.match(first):
            return found.expand(words) + first[found.end() :]
    return first.removeprefix(f"{LEFT}: ") if first.startswith(LEFT) else first


def _share_in_words(reason: str) -> str:
    """The cause of a smaller share: preempted, or a node, a slot or a limit that took slots away."""
    _, _, rest = reason.partition(": ")
    why, *details = rest.split("; ")
    taken = [f"{found[1]} went to {found[2]}" for one in details if (found := _TAKEN.fullmatch(one))]
    other = [one for one in details if _LOST_SLOTS.fullmatch(one)]
    more = [one for one in details if not _TAKEN.fullmatch(one) and one not in other]
    if taken:
        cause = ", ".join(["preempted", *taken, *other])
    elif other:
        cause = ", ".join(other)
    elif reason.startswith(GAVE_BACK):
        cause = "preempted, its slots went to other jobs" + (f" ({why})" if why else "")
    else:
        cause = "its share of the slots became smaller"
    return "; ".join([cause, *more])

"""What people change of a job's claim to slots, and how a job stands that has none: queued, paused, about to end.

A claim is a record of its own, which the daemons share the slots out by (`placement.shares`): nothing here moves a slot. What a job's own
records say of it (PENDING, RUNNING) says nothing of slots; both together are what the API tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from controllers.service.refusals import BadFields, bad_field
from gcore.api.v1 import jobs_pb2 as pb
from gcore.config.scheduling import HIGHEST_PRIORITY, MOST_SLOTS
from gcore.ledger.claims import NOTHING, Claim, Queued, Shares, slots_of
from gcore.nearest import did_you_mean
from gcore.rpc_status import Violation

MOST_TOLD = 2**31 - 1
"""What the API has room for."""
UPDATABLE = ("priority", "slots_min", "slots_max")
SECTION = "scheduling."
"""Fields may be named as in the spec, too."""
Change = Callable[[Claim], Claim]
NO_QUEUE: Mapping[str, Queued] = MappingProxyType({})
_GOES_ON = (pb.JOB_STATE_PENDING, pb.JOB_STATE_RUNNING)


def paused(*, yes: bool) -> Change:
    """The job has no slots until it is resumed, or may have some again."""
    return lambda claim: claim.model_copy(update={"paused": yes})


def ending(reason: str) -> Change:
    """The job ends as soon as it has given its slots back."""
    return lambda claim: claim if claim.ends else claim.model_copy(update={"ends": reason})


def updated(request: pb.UpdateJobRequest) -> Change:
    """What the mask names is as the request says. Raises BadFields."""
    paths = [path.removeprefix(SECTION) for path in request.update_mask.paths]
    if not paths:
        raise bad_field("update_mask", "names nothing that is to change", f"Name some of {', '.join(UPDATABLE)}")
    wrong = [
        Violation("update_mask", f"{path[:60]!r} cannot be changed while a job runs{did_you_mean(path, UPDATABLE)}")
        for path in dict.fromkeys(paths)
        if path not in UPDATABLE
    ]
    if "priority" in paths and not -HIGHEST_PRIORITY <= request.priority <= HIGHEST_PRIORITY:
        wrong.append(
            Violation("priority", f"{request.priority} is not within -{HIGHEST_PRIORITY} and {HIGHEST_PRIORITY}")
        )
    if "slots_min" in paths and not 1 <= request.slots_min <= MOST_SLOTS:
        wrong.append(Violation("slots_min", f"{request.slots_min} is no number of slots"))
    if "slots_max" in paths and not 0 <= request.slots_max <= MOST_SLOTS:
        wrong.append(Violation("slots_max", f"{request.slots_max} is no number of slots; 0: all there are"))
    if wrong:
        raise BadFields(wrong)

    def change(claim: Claim) -> Claim:
        new: dict[str, int | None] = {}
        if "priority" in paths:
            new["priority"] = request.priority
        if "slots_min" in paths:
            new["least"] = _in_units(request.slots_min, claim.unit)
        if "slots_max" in paths:
            new["most"] = request.slots_max or None
        made = claim.model_copy(update=new)
        if made.most is not None and made.most < made.least:
            raise bad_field(
                "slots_max" if "slots_max" in paths else "slots_min",
                f"the job would take {made.most} slots at most and not run on fewer than {made.least}",
                "Lower slots_min, or raise slots_max",
            )
        return made

    return change


def _in_units(slots: int, unit: int) -> int:
    """Slots of whole engines."""
    return -(-slots // unit) * unit


def with_claim(
    message: pb.Job, claim: Claim | None, shares: Shares | None, queue: Mapping[str, Queued] = NO_QUEUE
) -> pb.Job:
    """The job, with what it claims and has. `claim` None: it has ended, and claims nothing. `shares` None: nobody shares slots out, as
    long as a daemon of an earlier version is there."""
    if claim is None:
        return message
    # A claim of an earlier version may say any number, and one that has no room in the message would hide every job of a list.
    least, most = min(claim.least, MOST_TOLD), min(claim.most or 0, MOST_TOLD)
    message.priority, message.slots_min, message.slots_max = claim.priority, least, most
    if shares is None:
        return message
    share = shares.jobs.get(message.uid, NOTHING)
    granted, held = len(slots_of(share.granted)), len(slots_of(share.held))
    message.slots = granted
    if message.state not in _GOES_ON:
        return message
    waits = queue.get(message.uid) if not granted else None
    message.queue_position = waits.position if waits is not None else 0
    why = waits.reason if waits is not None else ""
    message.state, message.reason = standing(message.state, message.reason, claim, why, granted, held)
    return message


def waits_for_slots(claim: Claim | None, shares: Shares | None, uid: str) -> bool:
    """Whether a job is one of those that wait for slots: only then it is worth while to work out where it stands among them."""
    if claim is None or shares is None or not claim.wants:
        return False
    return not slots_of(shares.jobs.get(uid, NOTHING).granted)


def standing(
    state: pb.JobState, reason: str, claim: Claim, why: str, granted: int, held: int
) -> tuple[pb.JobState, str]:
    """How a job that has not ended stands, and why."""
    leaves = f"; {held} slots are being given back" if held else ""
    if claim.ends:
        return state, f"it ends at its next commit ({claim.ends}){leaves}"
    if claim.paused:
        return (state if held else pb.JOB_STATE_PAUSED), (f"it pauses at its next commit{leaves}" if held else "paused")
    if not granted and not held:
        return pb.JOB_STATE_QUEUED, why or f"it waits for {claim.least} {'slot' if claim.least == 1 else 'slots'}"
    if not granted:
        return state, f"its slots go to other jobs at its next commit{leaves}"
    return state, reason


def node_uses(shares: Shares, namespaces: Mapping[str, str], sees: Callable[[str], bool]) -> dict[str, dict[str, str]]:
    """By node and slot: the job that has it, or nothing where that is not the caller's business."""
    found: dict[str, dict[str, str]] = {}
    for uid, share in shares.jobs.items():
        shown = uid if sees(namespaces.get(uid, "")) else ""
        for node, slot in slots_of(share.held):
            found.setdefault(node, {})[slot] = shown
    return found

"""What a job's placement is, as people are told, and what a person fixes of it. Who fixes nothing that can be is told why."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from controllers.service.refusals import Conflict
from gcore.api.v1 import jobs_pb2
from gcore.config import stored_spec
from gcore.errors import StoreUnavailable, UsageError
from gcore.ledger import transactions
from gcore.ledger.guarded import Ledger, TxnOutcome
from gcore.ledger.job import JobRecord
from gcore.ledger.mirror import JobMirror
from gcore.ledger.placing import Pin
from placement.replicas import Pool, sizes_of

TRIES = 5
POOLS: tuple[Pool, ...] = ("rollout", "reward", "train")


def placement_of(mirror: JobMirror, nodes: frozenset[str]) -> jobs_pb2.PlacementReply:
    """How a job's slots are shared out. `nodes`: those that are there."""
    assert mirror.job is not None
    record, plan = mirror.job.record, mirror.plan
    placement = stored_spec(record.spec).placement
    leader = mirror.leader
    return jobs_pb2.PlacementReply(
        uid=record.uid,
        name=record.name,
        policy=placement.policy,
        dry_run=placement.dry_run,
        lends=placement.is_live and placement.lends,
        step=mirror.head.record.step if mirror.head is not None else 0,
        leader=leader.record.node if leader is not None else "",
        plan=plan.record.encode() if plan is not None else b"",
        moves=mirror.moves.encode(),
        pin=mirror.pin.encode(),
        away=sorted(plan.record.nodes - nodes) if plan is not None else [],
        folder=record.run_dir,
    )


def pin_of(
    request: jobs_pb2.PinPlacementRequest, known: Pin, job: JobRecord, slots: int, node: str, time: float
) -> Pin:
    """What is to be fixed. Raises UsageError, Conflict."""
    spec = stored_spec(job.spec)
    placement, spans = spec.placement, sizes_of(spec)
    sizes = {pool: getattr(request, pool) for pool in POOLS if request.HasField(pool)}
    if not placement.is_live:
        raise Conflict(
            f"policy: {placement.policy} of job {job.name!r} moves nothing, so there is nothing to fix",
            fix="Submit it with another placement.policy, such as dynamic",
        )
    if request.release and (sizes or request.freeze):
        raise UsageError("to release lets everything go, and nothing else can be fixed with it", fix="Give one of them")
    if not request.release and not sizes and not request.freeze:
        raise UsageError(
            "nothing is said that is to be fixed", fix="Give --freeze, --rollout, --reward, --train or --release"
        )
    if request.release:
        return Pin(by=node, time=time)
    if wrong := next((pool for pool, size in sizes.items() if size < 1), None):
        raise UsageError(f"{wrong} cannot have {sizes[wrong]} slots", fix="Give it at least one")
    judged = bool(spec.served_judges)
    if "reward" in sizes and not judged:
        raise UsageError("reward can have no slots: the cluster serves no judge of this job", fix="Leave --reward out")
    if parted := next((pool for pool in POOLS if sizes.get(pool, 0) % spans.of(pool)), None):
        what = f"{parted} {sizes[parted]} is no number of whole engines, which span {spans.of(parted)} slots each"
        raise UsageError(what, fix=f"Use a multiple of {spans.of(parted)}")
    together = known.sizes | sizes
    apart = "rollout" in together or "reward" in together
    # Whoever has slots of its own leaves others an engine's, or a rank's.
    least = {"rollout": apart * spans.rollout, "reward": (apart and judged) * spans.reward, "train": int(apart)}
    others = {pool: size for pool, size in least.items() if size and pool not in together}
    if sum(together.values()) + sum(others.values()) > slots:
        said = ", ".join(f"{pool} {together[pool]}" for pool in POOLS if pool in together)
        leaves = [f"{'one' if size == 1 else size} for {pool}" for pool, size in others.items()]
        more = f", with {' and '.join(leaves)}," if leaves and sum(together.values()) <= slots else ""
        fix = "Lower one of them" if len(together) > 1 else f"Lower {next(iter(together))}, or release what is fixed"
        raise UsageError(f"{said}{more} are more than the {slots} slots there are", fix=fix)
    return Pin.model_validate({"frozen": known.frozen or request.freeze, "by": node, "time": time, **together})


async def write_pin(
    ledger: Ledger,
    look: Callable[[], Awaitable[JobMirror]],
    request: jobs_pb2.PinPlacementRequest,
    slots: int,
    node: str,
    time: float,
) -> None:
    """Fix it. `look`: reads the job's records anew. Raises GcoreError."""
    for _ in range(TRIES):
        mirror = await look()
        assert mirror.job is not None
        if mirror.status is not None and mirror.status.record.phase.ended:
            raise Conflict(f"job {mirror.job.record.name!r} has ended", fix="There is nothing left to place")
        new = pin_of(request, mirror.pin, mirror.job.record, slots, node, time)
        known = mirror.written(mirror.keys.pin, mirror.pins.get(""))
        report = await ledger.run(transactions.pin(mirror.keys, known, new))
        if report.outcome is TxnOutcome.WON:
            return
        if report.outcome is TxnOutcome.UNKNOWN:
            raise StoreUnavailable("the store did not answer, so it is not known whether it was fixed", fix="Ask again")
    raise StoreUnavailable("others fix the same job's placement at the same time", fix="Ask again")

"""Views of a running job, made by hand: two members, a world of two ranks that serve, nothing offered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from controllers.rules.decide import shard_assignment
from controllers.rules.view import JobView, RankView
from gcore.config import parse_spec
from gcore.data.order import shard_lengths
from gcore.ledger import chain
from gcore.ledger.balance import balance_samples
from gcore.ledger.chain import ChainWriter
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Checkpoint, Checkpoints, Member, OfferedGroup, Seal
from gcore.ledger.records.job import JobPhase, JobStatus, Plan, RankClaim, RankPlace
from gcore.ledger.selection import SealStep, StreamRules, refs_in_order, sealed_group
from gcore.ledger.transactions import Versioned
from gcore.store.keys import JobKeys
from gcore.types import Version
from gcore.worker.records import WorkerRecord

ME, PEER = "node-0.aaaa", "node-1.bbbb"
KEYS = JobKeys("u")
RULES = StreamRules(shard_lengths(40, 4), 8, 4, steps=3)
SPEC = parse_spec(
    {
        "name": "j",
        "model": {"path": "m"},
        "data": {"path": "d", "shards": 4, "window": 8},
        "flow": {"steps": 3, "groups_per_step": 4, "samples_per_prompt": 2},
        "rollout": {"max_new_tokens": 4},
    }
)


def stored(record: Any) -> Versioned[Any]:
    """As read at some revision."""
    return Versioned(record, 5)


def running_job() -> JobView:
    """Nobody waits for anything but groups."""
    base = chain.base_entry(4, "w", ChainWriter(ME, "n"))
    ranks = tuple(RankPlace(rank=i, node=f"node-{i}", slot="cpu:0") for i in range(2))
    mirror = JobMirror(
        KEYS,
        status=stored(JobStatus(phase=JobPhase.RUNNING)),
        head=stored(base.head),
        assign=stored(shard_assignment([ME, PEER], 4, None)),
        checkpoints=stored(Checkpoints(entries=(Checkpoint(lineage=0, step=0, seq=0, file=""),))),
        plan=stored(Plan(generation=1, world="w", ranks=ranks, engines=())),
        members={m: stored(Member(incarnation=m, node=m.split(".")[0], address="a:1")) for m in (ME, PEER)},
        log={0: stored(base.entry)},
        claims={KEYS.world_rank("w", i): stored(RankClaim(instance=f"t{i}")) for i in range(2)},
    )
    more = {"slot": "cpu:0", "pid": 1, "pid_started": 1, "state": "serving", "address": "h:1", "job_uid": "u"}
    workers = {
        f"t{i}": WorkerRecord.model_validate(
            {"instance": f"t{i}", "role": "train", "node": f"node-{i}", "world": "w", "rank": i} | more
        )
        for i in range(2)
    }
    return JobView(SPEC, RULES, mirror, ME, "node-0", {}, workers, ranks={i: RankView(i) for i in range(2)})


def sealed_job(*, ready: bool = False, fed: tuple[int, ...] = ()) -> JobView:
    """The first step is sealed; the ranks in `fed` hold their parts."""
    view = running_job()
    refs = list(refs_in_order(RULES, view.head, ()))[:4]
    groups = tuple(
        OfferedGroup(ref=ref, digest=f"d{ref}", prompt_tokens=3, response_tokens=(2, 2), versions=(Version(0, 0),))
        for ref in refs
    )
    chosen = SealStep(tuple(sealed_group(group, PEER) for group in groups), ())
    seal = chain.seal_slot(None, view.head, chosen, world_size=2, mini_batches=1, sealer=ME)
    seal = Seal.decode((chain.ready_slot(seal) if ready else seal).encode())
    ranks = dict(view.ranks)
    for rank in fed:
        held: dict[str, set[int]] = {}
        for slot in balance_samples(seal).of_rank(rank):
            held.setdefault(seal.groups[slot.group].digest, set()).add(slot.sample)
        ranks[rank] = RankView(rank, holding=seal.token, held={d: frozenset(s) for d, s in held.items()})
    return replace(view, ranks=ranks, mirror=replace(view.mirror, seals={1: stored(seal)}))

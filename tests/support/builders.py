"""Builds specs, records, seals, groups and views of jobs for tests.

`running_job`: two members, a world of two ranks that serve, nothing offered. `bare_job`: a plan of which nothing runs yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from controllers.rules.decide import shard_assignment
from controllers.rules.view import JobView, RankView
from gcore.config import JobSpec, parse_spec
from gcore.data.order import shard_lengths
from gcore.ledger import chain
from gcore.ledger.balance import SampleSlot, StepLayout, balance_samples
from gcore.ledger.chain import ChainWriter
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Checkpoint, Checkpoints, Member, OfferedGroup, Seal, SealedGroup, SealState
from gcore.ledger.records.job import EnginePlace, JobPhase, JobRecord, JobStatus, NodeRecord, Plan, RankClaim, RankPlace
from gcore.ledger.selection import SealStep, StreamRules, refs_in_order, sealed_group
from gcore.ledger.transactions import Transaction, TxnKind, TxnOutcome, TxnReport, Versioned
from gcore.store.keys import JobKeys
from gcore.store.types import Put
from gcore.types import PromptRef, Version
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


def stored(record: Any, revision: int = 5) -> Versioned[Any]:
    """As read at some revision."""
    return Versioned(record, revision)


def offered_group(ref: PromptRef, *versions: Version) -> OfferedGroup:
    """A group of two short samples; without `versions` of the first one."""
    of = versions or (Version(0, 0),)
    return OfferedGroup(ref=ref, digest=f"d{ref}", prompt_tokens=3, response_tokens=(2, 2), versions=of)


def worker_record(instance: str, role: str, node: str, **more: Any) -> WorkerRecord:
    """A worker of the job that serves."""
    fields = {"slot": "cpu:0", "pid": 1, "pid_started": 1, "state": "serving", "address": "h:1", "job_uid": "u"}
    return WorkerRecord.model_validate({"instance": instance, "role": role, "node": node} | fields | more)


def node_record(name: str, incarnation: str, address: str = "a:1") -> NodeRecord:
    """A node with one slot."""
    return NodeRecord(name=name, incarnation=incarnation, address=address, slots=("cpu:0",), pid=1)


def two_node_plan(*, engines: bool = True) -> Plan:
    """A rank of the world `w` on each of two nodes, and an engine."""
    return Plan(
        generation=1,
        world="w",
        ranks=tuple(RankPlace(rank=i, node=f"node-{i}", slot="cpu:0") for i in range(2)),
        engines=tuple(EnginePlace(node=f"node-{i}", slot="cpu:0") for i in range(2)) if engines else (),
    )


def job_record() -> JobRecord:
    """Of the job that `KEYS` name."""
    return JobRecord(uid="u", name="j", spec={}, run_dir="run", created=1.0, prompts=4)


def bare_job(
    spec: JobSpec, nodes: Mapping[str, NodeRecord] | None = None, workers: Mapping[str, WorkerRecord] | None = None
) -> JobView:
    """A job of two shards with a plan and its base checkpoint, seen by member `a` on `node-0`: no rank has a claim."""
    base = chain.base_entry(2, "w", ChainWriter("a", "n"))
    mirror = JobMirror(
        KEYS,
        job=stored(job_record()),
        head=stored(base.head, 1),
        log={0: stored(base.entry, 1)},
        plan=stored(two_node_plan(), 1),
        checkpoints=stored(Checkpoints(entries=(Checkpoint(lineage=0, step=0, seq=0, file=""),)), 1),
    )
    rules = StreamRules(shard_lengths(4, 2), 8, 2)
    return JobView(spec, rules, mirror, "a", "node-0", dict(nodes or {}), dict(workers or {}))


def running_job(spec: JobSpec = SPEC, *, engines: bool = False) -> JobView:
    """Nobody waits for anything but groups. `engines`: the plan has one on each node."""
    base = chain.base_entry(4, "w", ChainWriter(ME, "n"))
    mirror = JobMirror(
        KEYS,
        job=stored(job_record()),
        status=stored(JobStatus(phase=JobPhase.RUNNING)),
        head=stored(base.head),
        assign=stored(shard_assignment([ME, PEER], 4, None)),
        checkpoints=stored(Checkpoints(entries=(Checkpoint(lineage=0, step=0, seq=0, file=""),))),
        plan=stored(two_node_plan(engines=engines)),
        members={m: stored(Member(incarnation=m, node=m.split(".")[0], address="a:1")) for m in (ME, PEER)},
        log={0: stored(base.entry)},
        claims={KEYS.world_rank("w", i): stored(RankClaim(instance=f"t{i}")) for i in range(2)},
    )
    workers = {f"t{i}": worker_record(f"t{i}", "train", f"node-{i}", world="w", rank=i) for i in range(2)}
    return JobView(spec, RULES, mirror, ME, "node-0", {}, workers, ranks={i: RankView(i) for i in range(2)})


def with_mirror(view: JobView, **changes: Any) -> JobView:
    """The view with other records of the job."""
    return replace(view, mirror=replace(view.mirror, **changes))


def with_sealed_step(view: JobView, *, holder: str = PEER, ready: bool = False) -> tuple[JobView, Seal]:
    """The view, its first step sealed from the first four groups, and the seal."""
    refs = list(refs_in_order(RULES, view.head, ()))[:4]
    chosen = SealStep(tuple(sealed_group(offered_group(ref), holder) for ref in refs), ())
    seal = chain.seal_slot(None, view.head, chosen, world_size=2, mini_batches=1, sealer=ME)
    seal = Seal.decode((chain.ready_slot(seal) if ready else seal).encode())
    return with_mirror(view, seals={1: stored(seal)}), seal


def with_fed_ranks(view: JobView, seal: Seal, ranks: Iterable[int] = (0, 1)) -> JobView:
    """The view, where these ranks hold their parts of the seal."""
    views = dict(view.ranks)
    for rank in ranks:
        held: dict[str, set[int]] = {}
        for slot in balance_samples(seal).of_rank(rank):
            held.setdefault(seal.groups[slot.group].digest, set()).add(slot.sample)
        views[rank] = RankView(rank, holding=seal.token, held={d: frozenset(s) for d, s in held.items()})
    return replace(view, ranks=views)


def sealed_job(*, ready: bool = False, fed: tuple[int, ...] = ()) -> JobView:
    """The first step is sealed; the ranks in `fed` hold their parts."""
    return with_fed_ranks(*with_sealed_step(running_job(), ready=ready), fed)


def seal_of_lengths(
    lengths: Sequence[Sequence[int]],
    prompt_tokens: int | Sequence[int] = 5,
    *,
    world_size: int,
    mini_batches: int = 1,
    masked: tuple[int, ...] = (),
    attention_equals_at: int = 24_576,
    state: SealState = SealState.SEALED,
    patches: Sequence[int] = (),
    holders: Sequence[str] = ("a",),
    media_bytes: Sequence[int] = (0,),
    near: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> Seal:
    """A seal of groups with these response lengths. `masked`: these samples of each group that has them. `patches`: of the groups'
    pictures, in turn; a patch costs as much as half a token. `holders`, `media_bytes`: of the groups, in turn.
    """
    prompts = [prompt_tokens] * len(lengths) if isinstance(prompt_tokens, int) else prompt_tokens
    groups = tuple(
        SealedGroup(
            ref=PromptRef(0, 0, number),
            digest=f"{number:032x}",
            prompt_tokens=prompt,
            response_tokens=tuple(responses),
            versions=(Version(0, 0),),
            holder=holders[number % len(holders)],
            media_bytes=media_bytes[number % len(media_bytes)],
            masked=tuple(sample for sample in masked if sample < len(responses)),
            patches=patches[number % len(patches)] if patches else 0,
            picture_tokens=patches[number % len(patches)] // 2 if patches else 0,
        )
        for number, (prompt, responses) in enumerate(zip(prompts, lengths, strict=True))
    )
    return Seal(
        lineage=0,
        step=1,
        attempt=1,
        state=state,
        world="w",
        world_size=world_size,
        mini_batches=mini_batches,
        groups=groups,
        attention_equals_at=attention_equals_at,
        near=dict(near),
    )


def sample_slots(seal: Seal) -> list[SampleSlot]:
    """Every sample of a seal, in its order."""
    return [SampleSlot(g, s) for g, group in enumerate(seal.groups) for s in range(len(group.response_tokens))]


def samples_by_group(layout: StepLayout, rank: int) -> dict[int, tuple[int, ...]]:
    """The samples that `rank` takes of each group of which it takes any; groups and samples ascend."""
    slots = layout.of_rank(rank)
    return {slot.group: tuple(s.sample for s in slots if s.group == slot.group) for slot in slots}


class RecordingLedger:
    """A ledger that wins every transaction, or has the given outcomes. `watch` is called for each transaction."""

    def __init__(self, outcome: TxnOutcome = TxnOutcome.WON, watch: Callable[[], None] = lambda: None) -> None:
        self.made: list[Transaction] = []
        self._outcome = outcome
        self._watch = watch

    @property
    def kinds(self) -> list[TxnKind]:
        return [txn.kind for txn in self.made]

    async def run(self, txn: Transaction) -> TxnReport:
        self._watch()
        self.made.append(txn)
        return TxnReport(self._outcome, 9)

    def written(self, kind: TxnKind, key: str) -> bytes:
        """What the only transaction of that kind puts under the key."""
        (txn,) = (one for one in self.made if one.kind is kind)
        (put,) = (one for one in txn.writes if isinstance(one, Put) and one.key == key)
        return put.value

"""The rules of the step protocol that are decided or written in one place, one by one: with the production records,
transactions and decisions, over the store in memory.

The tests list each transaction's compares again, apart from the code, and show that each matters: if one of the compared keys
has changed since the writer read it, the transaction writes nothing.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from mutations import COMPARED, kind_of
from stored_job import RULES, StoredJob

from controllers.api.submission.spec_changes import (
    changed_settings,
    extend_transaction,
    find_last_state,
    settings_transaction,
)
from controllers.flow.group_buffer import REASON_BYTES, GroupBuffer, clip_reason
from controllers.rules.actions import PublishWeights, PutOffer
from controllers.rules.step import offer_groups, publish_weights
from controllers.rules.view import EngineView, JobView
from gcore.config import parse_spec
from gcore.config.rollout import EnvironmentSpec
from gcore.data.order import Cursors, ShardCursor, shard_lengths
from gcore.ledger import chain, collectives, transactions
from gcore.ledger import retention as sweeping
from gcore.ledger import transactions as share_transactions
from gcore.ledger.evaluation import ask, record_evaluation, record_part
from gcore.ledger.records.chain import (
    Assignment,
    Checkpoint,
    EndedRef,
    EpochRecord,
    Head,
    Lineage,
    LogEntry,
    Member,
    NodeCopies,
    NodeFolder,
    Offer,
    RaisedGoal,
    Seal,
    SealedGroup,
    SealState,
)
from gcore.ledger.records.cluster import Claim, KnownShare, Quotas, Share, Shares
from gcore.ledger.records.job import (
    EvalAsked,
    EvalPart,
    Evaluation,
    JobPhase,
    JobRecord,
    JobStatus,
    Leader,
    Moves,
    Pin,
    Trouble,
)
from gcore.ledger.selection import (
    MOST_BYTES,
    MOST_OUTCOMES,
    OffersView,
    SealStep,
    choose_seal,
    due_refs,
    is_acceptable,
    is_ancestor,
    refs_in_order,
    refuse_seal,
    resumable_checkpoints,
    seal_bytes,
    sealed_group,
    sealed_refs,
)
from gcore.ledger.transactions import OpenSlots, Transaction, TxnOutcome, Versioned
from gcore.ledger.usage import NodeSpent, spend
from gcore.store.keys import ROOT as STORE
from gcore.store.types import Delete, Put, check_transaction
from gcore.testing import FakeClock, MemoryCluster, MemoryStore
from gcore.types import Group, PromptRef, Sample, Version, VersionSpan

SPEC = parse_spec(
    {
        "name": "j",
        "model": {"path": "m"},
        "data": {"path": "d", "shards": 2, "window": 8},
        "flow": {"steps": 9, "groups_per_step": 2, "samples_per_prompt": 2},
        "rollout": {"max_new_tokens": 4},
    }
)


@pytest.fixture
async def job() -> StoredJob:
    """One step is committed, with its cursors; the next is SEALED."""
    job = StoredJob(MemoryStore(MemoryCluster(FakeClock())), "u", "a")
    await job.create()
    await job.won(transactions.assign(job.keys, None, Assignment(members=("a",), owners=(0, 0))))
    await job.step(keep_cursors=True)
    await job.won(job.sealing())
    return job


def head_of(job: StoredJob) -> Head:
    return job.slots.head.record


# What each transaction compares. The names are those of the records; `slots` are all steps that may be open.


async def emptied(job: StoredJob) -> None:
    await job.won(transactions.reseal(job.keys, job.slots, 2, "a"))


async def readied(job: StoredJob) -> None:
    await job.won(transactions.ready(job.keys, job.slots, 2))


async def parted(job: StoredJob) -> None:
    """A part of the step is being exchanged."""
    await emptied(job)
    await job.won(job.parting())


async def partly_ready(job: StoredJob) -> None:
    await parted(job)
    await readied(job)


async def joined(job: StoredJob) -> None:
    await job.won(joining(job))


async def marked(job: StoredJob) -> None:
    await job.won(deleting(job))


async def without_record(job: StoredJob) -> None:
    await job.store.transact((), (Delete(job.keys.job),))


async def without_head(job: StoredJob) -> None:
    await job.store.transact((), (Delete(job.keys.head),))


async def nothing(job: StoredJob) -> None:
    """As the fixture leaves it."""


def registering(job: StoredJob) -> Transaction:
    head, checkpoints = job.mirror.head, job.mirror.checkpoints
    assert head is not None
    assert checkpoints is not None
    checkpoint = Checkpoint(lineage=0, step=1, seq=1, file="c")
    return transactions.register(job.keys, head, checkpoints, job.mirror.log[1], checkpoint)


def retaining(job: StoredJob) -> Transaction:
    head, checkpoints = job.mirror.head, job.mirror.checkpoints
    assert head is not None
    assert checkpoints is not None
    return transactions.retain(job.keys, head, checkpoints, checkpoints.record.entries)


def pruning(job: StoredJob) -> Transaction:
    head, checkpoints = job.mirror.head, job.mirror.checkpoints
    assert head is not None
    assert checkpoints is not None
    return transactions.prune(job.keys, head, checkpoints, [1])


def sweeping_out(job: StoredJob) -> Transaction:
    head, checkpoints = job.mirror.head, job.mirror.checkpoints
    assert head is not None
    assert checkpoints is not None
    return sweeping.sweep(job.keys, head, checkpoints, sweeping.SweptKeys(worlds=("of old",)))


def forgetting(job: StoredJob) -> Transaction:
    head, checkpoints = job.mirror.head, job.mirror.checkpoints
    assert head is not None
    assert checkpoints is not None
    return sweeping.forget_evaluations(job.keys, head, checkpoints, ["0.0"])


def answering(job: StoredJob) -> Transaction:
    part = EvalPart(
        version=Version(0, 1), number=0, parts=2, source="data", first=0, samples=1, correct=(1,), reward=1.0
    )
    return record_part(job.keys, part)


def beginning(job: StoredJob) -> Transaction:
    head, checkpoints = job.mirror.head, job.mirror.checkpoints
    assert head is not None
    assert checkpoints is not None
    record = EpochRecord(epoch=1, version=head.record.version)
    return transactions.begin_epoch(job.keys, head, checkpoints, None, record, [])


def assigning(job: StoredJob) -> Transaction:
    return transactions.assign(job.keys, job.mirror.assign, Assignment(members=("b",), owners=(0, 0)))


def deleting(job: StoredJob) -> Transaction:
    assert job.mirror.head is not None
    assert job.mirror.status is not None
    ended = Versioned(JobStatus(phase=JobPhase.CANCELLED), job.mirror.status.revision)
    return transactions.delete_job(job.keys, job.mirror.head, ended)


async def succeeded(job: StoredJob) -> None:
    """Its record names a spec, and it has a checkpoint."""
    await begun(job, JobPhase.SUCCEEDED)


async def begun(job: StoredJob, phase: JobPhase = JobPhase.RUNNING) -> None:
    await job.won(registering(job))
    record = job.mirror.job_record.model_copy(update={"spec": SPEC.model_dump(mode="json")})
    done = JobStatus(phase=phase)
    await job.store.transact((), (Put(job.keys.job, record.encode()), Put(job.keys.state, done.encode())))
    await job.look()
    NAMED[job.keys.uid] = (await job.store.list(f"{STORE}names/")).kvs[0].mod_revision


NAMED: dict[str, int] = {}
"""By job: the revision of the key by which its name means it."""


def extending(job: StoredJob) -> Transaction:
    ended, _, entry = find_last_state(job.mirror, NAMED[job.keys.uid])
    raised = RaisedGoal(what="steps", before=9, after=12)
    return extend_transaction(job.keys, ended, entry, raised, by="a", time=1.0)


def changing_settings(job: StoredJob) -> Transaction:
    stored, _, entry = find_last_state(job.mirror, NAMED[job.keys.uid], ended=False)
    train = SPEC.train.model_copy(update={"backend": "fsdp2"})
    changed = changed_settings(stored.job.record, SPEC.model_copy(update={"train": train}))
    assert changed is not None
    return settings_transaction(job.keys, stored, entry, changed, by="a")


def replanning(job: StoredJob) -> Transaction:
    assert job.mirror.plan is not None
    return transactions.replan(job.keys, job.mirror.plan, job.mirror.plan.record)


LEADER = Leader(node="n0", incarnation="n0.a")


def leading(job: StoredJob) -> Transaction:
    return transactions.lead(job.keys, job.mirror.leader, LEADER, 0)


async def led(job: StoredJob) -> None:
    await job.run(leading(job))


def placing(job: StoredJob) -> Transaction:
    plan, leader = job.mirror.plan, job.mirror.leader
    assert plan is not None
    assert leader is not None
    moved = plan.record.model_copy(update={"generation": plan.record.generation + 1})
    return transactions.place(job.keys, leader, plan, moved, job.mirror.moves_revision, Moves(total=1), None)


def telling(job: StoredJob) -> Transaction:
    assert job.mirror.leader is not None
    return transactions.tell_moves(job.keys, job.mirror.leader, job.mirror.moves_revision, Moves(total=1))


def pinning(job: StoredJob) -> Transaction:
    return transactions.pin(job.keys, job.mirror.pins.get(""), Pin(frozen=True))


def ending(job: StoredJob) -> Transaction:
    assert job.mirror.status is not None
    failed = JobStatus(phase=JobPhase.FAILED, reason="why")
    return transactions.set_status(job.keys, job.mirror.status, failed, job.slots)


def creating(job: StoredJob) -> Transaction:
    """Under another name."""
    record = JobRecord(uid="u", name="new", spec={}, run_dir="/r", created=0.0, prompts=40, request_id="r")
    return transactions.create(job.keys, record, JobStatus(phase=JobPhase.PENDING), 0)


def starting(job: StoredJob) -> Transaction:
    assert job.mirror.status is not None
    advance = chain.base_entry(2, "w", job.writer())
    return transactions.start(job.keys, job.mirror.status, advance, job.plan("w", 1), JobStatus(phase=JobPhase.RUNNING))


def joining(job: StoredJob) -> Transaction:
    return transactions.join(job.keys, Member(incarnation="a", node="n0", address="h:1"), 0)


def leaving(job: StoredJob) -> Transaction:
    return transactions.leave(job.keys, job.mirror.members["a"], 0)


def withdrawing(job: StoredJob) -> Transaction:
    return transactions.withdraw(job.keys, "a", "n0")


def warning(job: StoredJob) -> Transaction:
    return transactions.warn(job.keys, None, Trouble(topic="disk", node="n0", sentence="full"))


def taking_stock(job: StoredJob) -> Transaction:
    return transactions.take_stock(job.keys, None, NodeCopies(node="n0", by="a", seq=0), 0)


def saying_folder(job: StoredJob) -> Transaction:
    return transactions.say_folder(job.keys, None, NodeFolder(node="n0", by="a"), 0)


def spending(job: StoredJob) -> Transaction:
    gone = {"n1": Versioned(NodeSpent(node="n1", by="b"), 0)}
    return spend(job.keys, None, NodeSpent(node="n0", by="a"), gone)


def clearing(job: StoredJob) -> Transaction:
    assert job.mirror.head is not None
    assert job.mirror.status is not None
    ended = Versioned(JobStatus(phase=JobPhase.CANCELLED), job.mirror.status.revision)
    return transactions.delete_rest(job.keys, job.mirror.head, ended, {})


def evaluated(job: StoredJob) -> Transaction:
    assert job.mirror.head is not None
    return record_evaluation(job.keys, job.mirror.head, Evaluation(version=Version(0, 1), accuracy=0.5, count=2))


def giving(job: StoredJob) -> Transaction:
    return collectives.give(job.keys, None, collectives.Part(incarnation="a", at=Version(0, 1)), 0)


def agreeing(job: StoredJob) -> Transaction:
    return collectives.agree(job.keys, collectives.Agreed(version=Version(0, 1), name="x", values={}), ())


def giving_back(job: StoredJob) -> Transaction:
    share = Share(held={"n0": ("cpu:0",)})
    known = KnownShare(job.keys.uid, Shares(jobs={job.keys.uid: share}), 0)
    return share_transactions.give_back(job.keys, job.mirror.plan, known, share.surplus)


def asking(job: StoredJob) -> Transaction:
    assert job.mirror.head is not None
    asked = EvalAsked(step=job.mirror.head.record.step + 1, by="me", time=0.0)
    return ask(job.keys, job.mirror.head, None, asked)


async def unclaimed(job: StoredJob) -> None:
    await job.store.transact((), (Delete(job.keys.active),))


def sharing(job: StoredJob) -> Transaction:
    """Of shares in which a job has slots that has ended."""
    known = Versioned(Shares(jobs={job.keys.uid: Share(held={"n0": ("cpu:0",)})}), 0)
    return share_transactions.share_out(job.keys, known, Shares())


def limiting(job: StoredJob) -> Transaction:
    return share_transactions.set_quotas(job.keys, None, Quotas())


CLAIMS: dict[str, Versioned[Claim]] = {}


async def claimed(job: StoredJob) -> None:
    there = await job.store.get(job.keys.active)
    assert there is not None
    CLAIMS[job.keys.uid] = Versioned(Claim.decode(there.value, there.key), there.mod_revision)


async def head_lost(job: StoredJob) -> None:
    await claimed(job)
    await job.store.transact((), (Delete(job.keys.head),))


def failing(job: StoredJob) -> Transaction:
    """For want of head."""
    failed = JobStatus(phase=JobPhase.FAILED, reason="why")
    lost = job.mirror.lost_keys()
    return transactions.fail_lost(job.keys, job.mirror.status, CLAIMS[job.keys.uid], lost, failed)


def claiming(job: StoredJob) -> Transaction:
    return share_transactions.set_claim(job.keys, CLAIMS[job.keys.uid], Claim(paused=True))


def step_two(transaction: Callable[..., Transaction]) -> Callable[[StoredJob], Transaction]:
    return lambda job: transaction(job.keys, job.slots, 2, *(["a"] if transaction is transactions.reseal else []))


Prepare = Callable[[StoredJob], object]
TABLE = [
    pytest.param("create", without_record, creating, {"names/new", "job", "requests/r"}, id="create"),
    pytest.param("start", without_head, starting, {"state", "head"}, id="start"),
    pytest.param("join", nothing, joining, {"member/a"}, id="join"),
    pytest.param("leave", joined, leaving, {"member/a"}, id="leave"),
    pytest.param("withdraw", joined, withdrawing, set(), id="withdraw"),
    pytest.param("assign", nothing, assigning, {"assign"}, id="assign"),
    pytest.param("offer", nothing, lambda job: job.offering(0), {"offer/a"}, id="offer"),
    pytest.param("seal", emptied, lambda job: job.sealing(), {"head", "seal/2"}, id="seal of an OPEN slot"),
    pytest.param("reseal", nothing, step_two(transactions.reseal), {"head", "seal/2"}, id="reseal"),
    pytest.param("ready", nothing, step_two(transactions.ready), {"head", "seal/2"}, id="ready"),
    pytest.param("seal", emptied, lambda job: job.parting(), {"head", "seal/2"}, id="seal of a part"),
    pytest.param("seal", partly_ready, lambda job: job.parting(), {"head", "seal/2"}, id="seal of one more part"),
    pytest.param("seal", partly_ready, lambda job: job.sealing(), {"head", "seal/2"}, id="seal of the rest"),
    pytest.param("reseal", parted, step_two(transactions.reseal), {"head", "seal/2"}, id="reseal of a part"),
    pytest.param("ready", parted, step_two(transactions.ready), {"head", "seal/2"}, id="ready of a part"),
    pytest.param("account", partly_ready, lambda job: job.accounting(), {"head", "seal/2"}, id="account beside parts"),
    pytest.param("commit", readied, lambda job: job.committing(), {"head", "seal/2"}, id="commit"),
    pytest.param("account", nothing, lambda job: job.accounting(), {"head", "seal/2"}, id="account"),
    pytest.param("register", nothing, registering, {"head", "ckpts", "log/1"}, id="register checkpoint"),
    pytest.param("rollback", nothing, lambda job: job.rolling_back(), {"head", "ckpts", "plan"}, id="rollback"),
    pytest.param(
        "rollback",
        nothing,
        lambda job: job.rolling_back(slots_as_seen=True),
        {"head", "ckpts", "plan", "seal/2"},
        id="rollback of a world that is well",
    ),
    pytest.param("retain", nothing, retaining, {"head", "ckpts"}, id="retain"),
    pytest.param("prune", nothing, pruning, {"head", "ckpts"}, id="prune"),
    pytest.param("sweep", nothing, sweeping_out, {"head", "ckpts"}, id="sweep"),
    pytest.param("forget_evaluations", nothing, forgetting, {"head", "ckpts"}, id="forget evaluations"),
    pytest.param("record_part", nothing, answering, {"eval/0.1", "evalpart/0.1/000000"}, id="part of an evaluation"),
    pytest.param("record_evaluation", nothing, evaluated, {"eval/0.1", "head"}, id="evaluation"),
    pytest.param("give", nothing, giving, {"part/a"}, id="give"),
    pytest.param("agree", nothing, agreeing, {"agreed/0.1/x"}, id="agree"),
    pytest.param("warn", nothing, warning, {"trouble/disk"}, id="warn"),
    pytest.param("take_stock", nothing, taking_stock, {"copies/n0"}, id="take stock"),
    pytest.param("say_folder", nothing, saying_folder, {"folder/n0"}, id="say folder"),
    pytest.param("spend", nothing, spending, {"spent/n0", "spent/n1"}, id="spend"),
    pytest.param(
        "extend", succeeded, extending, {"state", "job", "head", "ckpts", "plan", "names/u"}, id="go on after the end"
    ),
    pytest.param(
        "change_settings",
        begun,
        changing_settings,
        {"state", "job", "head", "ckpts", "plan", "names/u"},
        id="change of settings",
    ),
    pytest.param("delete_job", nothing, deleting, {"head", "state"}, id="delete job"),
    pytest.param("delete_rest", marked, clearing, {"head", "state"}, id="delete the rest"),
    pytest.param("replan", nothing, replanning, {"plan"}, id="replan"),
    pytest.param("lead", nothing, leading, {"placement/leader"}, id="lead"),
    pytest.param("place", led, placing, {"placement/leader", "placement/moves", "placement/pin", "plan"}, id="place"),
    pytest.param("tell_moves", led, telling, {"placement/leader", "placement/moves"}, id="tell moves"),
    pytest.param("pin", nothing, pinning, {"placement/pin"}, id="pin"),
    pytest.param("begin_epoch", nothing, beginning, {"head", "ckpts", "epoch/1"}, id="begin epoch"),
    pytest.param("ask", nothing, asking, {"head", "evalask"}, id="ask for an evaluation"),
    pytest.param("share_out", unclaimed, sharing, {"shares", "active/"}, id="share out"),
    pytest.param("set_quotas", nothing, limiting, {"pool/quotas"}, id="set quotas"),
    pytest.param("give_back", nothing, giving_back, {"shares", "plan"}, id="give back"),
    pytest.param("set_claim", claimed, claiming, {"active/"}, id="set claim"),
    pytest.param("set_status", nothing, ending, {"state", "head", "seal/2"}, id="end at head"),
    pytest.param("fail_lost", head_lost, failing, {"state", "active/", "head"}, id="fail for lost records"),
]
"""The function that makes the transaction, how the job comes to where it is made, a maker, and what is compared."""


def key_of(job: StoredJob, name: str) -> str:
    kind, _, rest = name.partition("/")
    match kind:
        case "seal":
            return job.keys.seal(int(rest))
        case "log":
            return job.keys.log(int(rest))
        case "epoch":
            return job.keys.epoch(int(rest))
        case "names" | "requests" | "shares" | "pool":
            return f"{STORE}{name}"
        case "active":
            return job.keys.active
    return f"{job.keys.prefix}{name}"


@pytest.mark.parametrize(("maker", "prepare", "make", "names"), TABLE)
async def test_a_transaction_compares_what_the_protocol_says_and_each_compare_decides(
    job: StoredJob, maker: str, prepare: Prepare, make: Callable[[StoredJob], Transaction], names: set[str]
) -> None:
    await prepare(job)  # type: ignore[misc]
    await job.look()
    txn = make(job)
    assert {compare.key for compare in txn.compares} == {key_of(job, name) for name in names}
    for name in sorted(names):
        # Somebody writes the same record once more; nothing else changes.
        key = key_of(job, name)
        there = await job.store.get(key)
        await job.store.transact((), (Put(key, there.value if there is not None else b"{}"),))
        before = (await job.store.list(STORE)).kvs
        assert (await job.run(txn)).outcome is TxnOutcome.STALE, name
        assert (await job.store.list(STORE)).kvs == before
        if there is None:
            await job.store.transact(
                (), (Delete(key),)
            )  # what is absent is compared as that, however often it was there
            continue
        others = {compare.key: compare for compare in txn.compares}
        written = await job.store.get(key)
        assert written is not None
        others[key] = replace(others[key], mod_revision=written.mod_revision)
        txn = replace(txn, compares=tuple(others.values()))
    assert (await job.run(txn)).outcome is TxnOutcome.WON


async def test_each_compare_that_is_tried_has_a_mutation_and_each_that_is_mutated_is_tried(job: StoredJob) -> None:
    tried: dict[str, set[str]] = {}
    for maker, _, _, names in (row.values for row in TABLE):
        assert isinstance(names, set)
        tried.setdefault(str(maker), set()).update(kind_of(job.keys, key_of(job, name)) for name in names)
    assert tried == {maker: set(kinds) for maker, kinds in COMPARED.items()}, "see tests/support/mutations.py"


async def test_a_seal_of_an_absent_slot_compares_that_it_is_absent(job: StoredJob) -> None:
    await readied(job)
    await job.won(job.committing())
    late = StoredJob(job.store, "u", "b")
    await late.look()
    txn = late.sealing()
    assert {(c.key, c.mod_revision == 0) for c in txn.compares} == {(job.keys.head, False), (job.keys.seal(3), True)}
    await job.won(job.sealing())
    assert (await late.run(txn)).outcome is TxnOutcome.STALE


# Rule 1


async def test_a_seal_refuses_what_is_terminal_what_is_sealed_and_what_comes_twice(job: StoredJob) -> None:
    head, seals = head_of(job), job.slots.seals
    terminal = job.mirror.log[1].record.delta[0].ref
    sealed = next(iter(sealed_refs(seals)))
    fresh = job.due()[0]

    def refusal(*refs: PromptRef, outcomes: tuple[PromptRef, ...] = ()) -> str | None:
        ended = tuple(EndedRef(ref=ref, kind="failed") for ref in outcomes)
        return refuse_seal(
            RULES, head, seals, SealStep(tuple(sealed_group(job.group(ref), "a") for ref in refs), ended)
        )

    assert refusal(fresh) is None
    assert "already has an outcome" in str(refusal(fresh, terminal))
    assert "already sealed" in str(refusal(fresh, sealed))
    assert "already sealed" in str(refusal(fresh, fresh))
    assert "already sealed" in str(refusal(fresh, outcomes=(fresh,)))
    assert "already has an outcome" in str(refusal(fresh, outcomes=(terminal,)))
    assert "no group" in str(refusal(outcomes=(fresh,)))


def test_an_outcome_that_an_open_seal_holds_is_neither_issued_nor_sealed_again() -> None:
    """It ends with the seal's commit; head does not know of it yet."""
    head = chain.base_entry(2, "w", chain.ChainWriter("a", "n")).head
    ended, due = itertools.islice(refs_in_order(RULES, head, ()), 2)
    seal = Seal(
        lineage=0, step=1, attempt=1, state=SealState.READY, world="w", world_size=1, mini_batches=1,
        outcomes=(EndedRef(ref=ended, kind="filtered", reason="constant"),),
    )  # fmt: skip
    assert sealed_refs([seal]) == {ended}
    assert next(refs_in_order(RULES, head, [seal])) == due
    again = SealStep((), (EndedRef(ref=ended, kind="failed"),))
    assert f"{ended} is already sealed" in str(refuse_seal(RULES, head, [seal], again))


# Rules 2, 3, 7


async def test_only_a_sealed_step_is_given_up_and_only_a_ready_one_is_committed(job: StoredJob) -> None:
    with pytest.raises(ValueError, match="does not follow"):
        job.committing()
    await readied(job)
    for make in (step_two(transactions.reseal), step_two(transactions.ready), lambda job: job.sealing()):
        with pytest.raises(ValueError, match="READY"):
            make(job)
    await job.won(job.committing())
    assert head_of(job).step == 2


async def test_a_step_that_was_given_up_carries_nothing_but_its_attempt_which_goes_on(job: StoredJob) -> None:
    first = job.mirror.seals[2].record
    await emptied(job)
    emptied_slot = job.mirror.seals[2].record
    assert (emptied_slot.state, emptied_slot.groups, emptied_slot.outcomes) == (SealState.OPEN, (), ())
    await job.won(job.sealing())
    again = job.mirror.seals[2].record
    assert [first.attempt, emptied_slot.attempt, again.attempt] == [1, 2, 3]
    assert first.token < emptied_slot.token < again.token


async def test_a_commit_is_a_pure_function_of_head_and_seal_whoever_makes_it(job: StoredJob) -> None:
    await readied(job)
    other = StoredJob(job.store, "u", "b")
    await other.look()
    one, two = job.committing(), other.committing()

    def written(txn: Transaction) -> Head:
        put = txn.writes[0]
        assert isinstance(put, Put)
        return Head.decode(put.value)

    mine, theirs = written(one), written(two)
    same = {"nonce": "", "digest": ""}
    assert mine.model_copy(update=same) == theirs.model_copy(update=same)
    assert mine.nonce != theirs.nonce
    await other.won(two)  # the holder of its groups need not be there
    assert {e.holder for e in other.mirror.log[2].record.delta} == {"a"}


async def test_a_commit_ends_what_was_filtered_and_failed_too_whoever_noted_it(job: StoredJob) -> None:
    await emptied(job)
    assert job.slots.seals[0].outcomes == job.slots.seals[0].groups == ()
    refs = job.due()
    failed = EndedRef(ref=refs[1], kind="failed", reason="why")
    chosen = SealStep((sealed_group(job.group(refs[0]), "a"),), (failed,))
    assert job.mirror.plan is not None
    await job.won(transactions.seal(job.keys, job.slots, chosen, job.mirror.plan.record, 1, "a"))
    await readied(job)
    other = StoredJob(job.store, "u", "b")
    await other.look()
    await other.won(other.committing())  # it has never heard of the prompt that failed
    assert failed in other.mirror.log[2].record.delta
    assert [head_of(other).cursors.is_terminal(RULES.shape, ref) for ref in refs] == [True, True]


# Rules 5, 6, 9


async def test_due_refs_are_recomputed_after_a_rollback_and_after_an_abandoned_step(job: StoredJob) -> None:
    def wanted() -> tuple[PromptRef, ...]:
        return due_refs(RULES, head_of(job), job.slots.seals, OffersView({}, {}))

    held = sealed_refs(job.slots.seals)
    assert not held & set(wanted())
    await emptied(job)
    assert set(wanted()) == held
    trained = {ended.ref for ended in job.mirror.log[1].record.delta}
    await job.won(job.rolling_back())
    assert set(wanted()) == trained


async def test_any_holders_groups_are_sealed_and_of_two_holders_one(job: StoredJob) -> None:
    await emptied(job)
    head, refs = head_of(job), job.due()
    stranger, another = StoredJob(job.store, "u", "s"), StoredJob(job.store, "u", "t")
    stranger.mirror = another.mirror = job.mirror
    offers = [Offer(incarnation=one.name, groups=tuple(one.group(ref) for ref in refs)) for one in (stranger, another)]
    chosen = choose_seal(RULES, head, job.slots.seals, OffersView.collect(RULES, head, offers))
    assert isinstance(chosen, SealStep)
    assert [group.ref for group in chosen.groups] == refs
    assert {group.holder for group in chosen.groups} == {"s"}  # the shards are all a's
    assert refuse_seal(RULES, head, job.slots.seals, chosen) is None


async def test_nothing_is_due_while_the_whole_cluster_holds_a_quota(job: StoredJob) -> None:
    await emptied(job)
    head, refs = head_of(job), job.due()
    halves = [Offer(incarnation=f"c{i}", groups=(job.group(ref),)) for i, ref in enumerate(refs)]
    for count in range(len(refs) + 1):
        offered = OffersView.collect(RULES, head, halves[:count])
        assert list(due_refs(RULES, head, job.slots.seals, offered)) == refs[count:]


# Rules 10, 11


@pytest.mark.parametrize("prepare", [nothing, emptied, readied], ids=["SEALED", "OPEN", "READY"])
async def test_a_rollback_deletes_every_open_step_and_begins_a_lineage_and_a_world(
    job: StoredJob, prepare: Prepare
) -> None:
    await prepare(job)  # type: ignore[misc]
    before = head_of(job)
    await job.won(job.rolling_back())
    head = head_of(job)
    assert job.mirror.seals == {}
    assert (head.lineage, head.step, head.seq) == (before.lineage + 1, 0, before.seq + 1)
    assert head.world != before.world
    assert job.mirror.plan is not None
    assert job.mirror.plan.record.world == head.world
    assert head.cursors.terminal_count == 0
    assert head.lineages[-1] == Lineage(number=1, base_step=0)
    await job.step()
    assert job.mirror.log.keys() == {0, 1, 2, 3}  # no entry was overwritten


def chain_with(*lineages: tuple[int, int], step: int) -> Head:
    head = chain.base_entry(2, "w", chain.ChainWriter("a", "n")).head
    numbered = tuple(Lineage(number=number, base_step=base) for number, base in ((0, 0), *lineages))
    return head.model_copy(update={"lineages": numbered, "lineage": numbered[-1].number, "step": step})


@pytest.mark.parametrize(
    ("version", "ancestor"),
    [
        pytest.param(Version(0, 2), True, id="below both rollbacks"),
        pytest.param(Version(0, 3), False, id="cut off by the second"),
        pytest.param(Version(0, 5), False, id="step 5 of a lineage that was cut off"),
        pytest.param(Version(1, 2), True, id="where the second began"),
        pytest.param(Version(1, 4), False, id="after the second began"),
        pytest.param(Version(2, 5), True, id="step 5 of this lineage"),
        pytest.param(Version(2, 6), False, id="to come"),
        pytest.param(Version(3, 1), False, id="of a lineage to come"),
    ],
)
def test_a_version_is_told_apart_by_its_lineage(version: Version, ancestor: bool) -> None:
    head = chain_with((1, 4), (2, 2), step=5)
    assert is_ancestor(head, version) is ancestor
    assert is_acceptable(head, 6, (version,), 9) is ancestor
    assert not is_acceptable(head, 6, (), 9)


@pytest.mark.parametrize(("step", "staleness", "fresh"), [(3, 2, True), (2, 2, False), (5, 0, True), (4, 0, False)])
def test_tokens_may_be_so_many_steps_old_and_no_more(step: int, staleness: int, fresh: bool) -> None:
    head = chain_with(step=5)
    assert is_acceptable(head, 6, (Version(0, 5), Version(0, step)), staleness) is fresh


def test_an_outcome_needs_ancestry_and_may_be_of_any_age() -> None:
    head = chain_with((1, 2), step=5)
    old = EndedRef(ref=PromptRef(0, 0, 1), kind="filtered", versions=(Version(0, 1),))
    cut_off = EndedRef(ref=PromptRef(0, 1, 1), kind="filtered", versions=(Version(0, 4),))
    offered = OffersView.collect(RULES, head, [Offer(incarnation="a", outcomes=(old, cut_off))])
    assert set(offered.outcomes) == {old.ref}


# Rule 12


async def test_weights_that_are_staged_go_to_engines_only_when_their_step_is_committed(job: StoredJob) -> None:
    await readied(job)
    ahead, committed = Version(0, 2), Version(0, 1)

    def published() -> list[Version]:
        engines = {"e": EngineView("e", "h:1", Version(0, 0))}
        seen = JobView(
            SPEC, RULES, job.mirror, "a", "n0", {}, {}, engines=engines, staged=frozenset({ahead, committed})
        )
        return [intent.action.version for intent in publish_weights(seen) if isinstance(intent.action, PublishWeights)]

    assert published() == [committed]
    await job.won(job.committing())
    assert published() == [ahead]
    await job.won(job.rolling_back())
    assert published() == []  # no weights of the new lineage are staged, and none of the old one are let in


# Rule 13


def test_only_checkpoints_on_heads_chain_are_gone_back_to_newest_first_and_the_base_always() -> None:
    known = [
        Checkpoint(lineage=li, step=st, seq=sq, file=f"{li}-{st}") for li, st, sq in ((0, 2, 2), (0, 4, 4), (1, 3, 7))
    ]
    base = Checkpoint(lineage=0, step=0, seq=0, file="")
    found = resumable_checkpoints(chain_with((1, 2), step=5), [base, *known])
    assert [(c.lineage, c.step) for c in found] == [(1, 3), (0, 2), (0, 0)]


async def test_a_rollback_takes_cursors_and_tally_from_the_entry_of_the_checkpoint_whose_weights_it_takes(
    job: StoredJob,
) -> None:
    await job.won(registering(job))
    entry = job.mirror.log[1].record
    assert job.mirror.checkpoints is not None
    assert job.mirror.plan is not None
    await readied(job)
    await job.won(job.committing())
    advance = chain.rollback_entry(head_of(job), entry, "w9", job.writer(), "why")
    txn = transactions.rollback(
        job.keys, job.slots, job.mirror.checkpoints, advance, job.mirror.plan, job.plan("w9", 2)
    )
    await job.won(txn)
    head = head_of(job)
    assert (head.step, head.parent, head.cursors, head.tally) == (1, 1, entry.cursors, entry.tally)
    assert not any(head.cursors.is_terminal(RULES.shape, ref) for ref in job.due())


# Rule 16


def group_of(ref: PromptRef, version: Version) -> Group:
    span = (VersionSpan(version, 0, 1),)
    return Group(ref, (1,), (Sample((1,), (-0.5,), "", "stop", span),))


def test_a_holder_keeps_what_may_still_be_trained_and_drops_the_rest_when_head_changes() -> None:
    rules = replace(RULES, staleness=1)
    head = chain_with((1, 3), step=5)
    refs = list(refs_in_order(rules, head, ()))[:5]
    versions = [Version(1, 5), Version(1, 4), Version(1, 3), Version(0, 4), Version(1, 5)]
    buffer = GroupBuffer()
    for ref, version in zip(refs, versions, strict=True):
        buffer.add_group(group_of(ref, version))
    after = head.model_copy(update={"cursors": head.cursors.union(rules.shape, refs[4:])})
    buffer.prune(rules, after)
    assert set(buffer.offers) == set(refs[:2])
    assert buffer.went_stale == {refs[2]}  # it counts as issued in vain; of a lineage that was cut off nothing counts


async def test_sealed_groups_are_held_until_head_has_them(job: StoredJob) -> None:
    seal: Seal = job.mirror.seals[2].record
    buffer = GroupBuffer()
    for one in seal.groups:
        buffer.add_group(group_of(one.ref, head_of(job).version))
    buffer.prune(RULES, head_of(job))
    assert set(buffer.offers) == {one.ref for one in seal.groups}
    await readied(job)
    buffer.prune(RULES, head_of(job))
    assert len(buffer.offers) == len(seal.groups)
    await job.won(job.committing())
    buffer.prune(RULES, head_of(job))
    assert not buffer.offers


# Bounds


@pytest.mark.parametrize(
    "text",
    ["", "a", "why " * 99, "ü" * 999, "😀" * 999, "\ud800" * 999, '"\\\n' * 99],
    ids=["nothing", "a letter", "a sentence", "letters", "pictures", "half characters", "quoted"],
)
def test_a_reason_takes_a_bounded_place_whatever_it_is_written_in(text: str) -> None:
    kept = clip_reason(text)
    assert text.startswith(kept)
    assert len(json.dumps(kept)) <= REASON_BYTES
    assert len(kept) >= min(len(text), 18)


def worst(holder: str) -> tuple[EndedRef, ...]:
    """As many outcomes as one entry takes, each as long as can be."""
    source, reason = "s" * 63, clip_reason("\x00" * 999)
    return tuple(
        EndedRef(
            ref=PromptRef(10**6, i % 1024, 10**9 + i),
            kind="filtered",
            reason=reason,
            holder=holder,
            versions=(Version(10**4, 10**6),),
            source=source,
            reward=-1 / 3,
            length=1e5 / 3,
        )
        for i in range(MOST_OUTCOMES)
    )


@pytest.mark.parametrize(
    ("samples", "environment"), [(1, None), (8, None), (64, None), (64, EnvironmentSpec(name="tools"))]
)
async def test_the_largest_step_that_is_let_in_is_sealed_and_committed_with_the_most_outcomes(
    samples: int, environment: EnvironmentSpec | None
) -> None:
    """By size alone: nothing that a controller writes for it is more than the store takes."""
    flow = SPEC.flow.model_copy(update={"samples_per_prompt": samples})
    spec = SPEC.model_copy(update={"flow": flow, "environment": environment})
    quota = MOST_BYTES * spec.flow.groups_per_step // seal_bytes(spec)
    job = StoredJob(MemoryStore(MemoryCluster(FakeClock())), "u" * 12, "n" * 63 + ".12345678")
    await job.create()
    head = job.mirror.head
    assert head is not None
    assert job.mirror.plan is not None
    ragged = Cursors(tuple(ShardCursor(10**9, (1 << 256) - 2) for _ in range(1024)))
    version = Version(10**4, 10**6)
    group = SealedGroup(
        ref=PromptRef(10**6, 1023, 10**9),
        digest="d" * 64,
        prompt_tokens=10**5,
        response_tokens=(10**5,) * samples,
        versions=(version,),
        reward=-1 / 3,
        truncated=samples,
        observed=(10**5,) * samples if environment is not None else (),
        source="s",
        holder=job.name,
    )
    chosen = SealStep((group,) * quota, worst(job.name), last=True, planned=10**6)
    stored = Versioned(
        head.record.model_copy(update={"cursors": ragged, "lineage": 10**4, "step": 10**6}), head.revision
    )
    slots = OpenSlots(stored, {})
    seal = transactions.seal(job.keys, slots, chosen, job.mirror.plan.record, 1, job.name)
    check_transaction(seal.compares, seal.writes)
    put = seal.writes[0]
    assert isinstance(put, Put)
    delta = chain.ended_refs(Seal.decode(put.value))
    entry = LogEntry(
        seq=10**9, parent=1, kind="train", lineage=1, step=1, world="w", nonce="n" * 16, delta=delta, cursors=ragged
    )
    check_transaction(
        seal.compares, (Put(job.keys.head, stored.record.encode()), Put(job.keys.log(10**9), entry.encode()))
    )
    offer = Offer(incarnation=job.name, groups=chosen.groups, outcomes=chosen.outcomes)
    check_transaction((), (Put(job.keys.offer(job.name), offer.encode(), lease=1),))


async def test_of_very_many_outcomes_an_offer_names_the_first_and_is_written_once(job: StoredJob) -> None:
    """The state after a long outage of the store in which prompts were filtered and not recorded."""
    rules = replace(RULES, shape=shard_lengths(40_000, 2), window=2000)
    head = head_of(job)
    refs = list(itertools.islice(refs_in_order(rules, head, ()), MOST_OUTCOMES + 300))
    held = {ref: EndedRef(ref=ref, kind="filtered", versions=(head.version,)) for ref in reversed(refs)}

    def offers() -> list[Offer]:
        seen = JobView(SPEC, rules, job.mirror, "a", "n0", {}, {}, outcomes=held)
        return [intent.action.offer for intent in offer_groups(seen) if isinstance(intent.action, PutOffer)]

    (first,) = offers()
    assert {ended.ref for ended in first.outcomes} == set(refs[:MOST_OUTCOMES])
    await job.won(transactions.offer(job.keys, job.mirror.offers.get("a"), first, 0))
    assert offers() == []
    for ref in refs[:MOST_OUTCOMES]:
        del held[ref]  # they were written down
    (then,) = offers()
    assert {ended.ref for ended in then.outcomes} == set(refs[MOST_OUTCOMES:])

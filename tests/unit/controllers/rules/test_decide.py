"""A controller's decisions, rule by rule, from hand-made views."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import (
    KEYS,
    ME,
    PEER,
    RULES,
    node_record,
    offered_group,
    running_job,
    stored,
    with_fed_ranks,
    with_mirror,
    with_sealed_step,
    worker_record,
)

from controllers.rules import view as view_module
from controllers.rules.actions import (
    AssignShards,
    BeginEpoch,
    CommitStep,
    FeedRank,
    FindBlobs,
    GiveUpBatch,
    JoinJob,
    MakeSeal,
    MarkBatchReady,
    PostWarning,
    PruneLog,
    PublishWeights,
    PutOffer,
    RegisterCheckpoint,
    RetainCheckpoints,
    Rollback,
    SetPhase,
    StartJob,
    TrainBatch,
)
from controllers.rules.decide import decide
from controllers.rules.retention import KEEP_LOG, PRUNE_AT, register_and_forget_checkpoints, warn_of_disks
from controllers.rules.step import COALESCE_S, EXCHANGE_LIMIT_S, GROUPS_S, OUTCOME_S, waits_for_others
from controllers.rules.view import (
    SETTLE_S,
    TURN_SECONDS,
    CheckpointProgress,
    EngineView,
    JobView,
    Memo,
    RankView,
    SavedCheckpoint,
    Timers,
    turn_of,
    turn_order,
)
from controllers.rules.waits import current_waits, ranks_text, weights_text
from controllers.rules.world import MAX_FRUITLESS_ROLLBACKS, NODE_GRACE_S, note_rank_failures, world_loss
from gcore.config import parse_spec
from gcore.ledger import chain
from gcore.ledger.balance import content_sha256
from gcore.ledger.chain import ChainWriter
from gcore.ledger.collectives import Agreed, Part
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import (
    Checkpoint,
    Checkpoints,
    EndedRef,
    EpochRecord,
    Head,
    Lineage,
    LogEntry,
    Member,
    Offer,
    Seal,
    SourceTally,
)
from gcore.ledger.records.job import (
    EvalPart,
    Evaluation,
    JobPhase,
    JobRecord,
    JobStatus,
    ModelFetch,
    Trouble,
)
from gcore.ledger.selection import SealStep, refs_in_order, sealed_group
from gcore.ledger.transactions import Versioned
from gcore.train.rank.feed import Fetching
from gcore.types import PromptRef, Token, Version

SPEC = parse_spec(
    {
        "name": "j",
        "model": {"path": "m"},
        "data": {"path": "d", "shards": 4, "window": 8},
        "flow": {"steps": 3, "groups_per_step": 4, "samples_per_prompt": 2},
        "rollout": {"max_new_tokens": 4},
        "checkpoint": {"every": 2},
    }
)


def running(**changes: Any) -> JobView:
    """Two members, a world of two ranks that serve, nothing offered."""
    nodes = {name: node_record(name, f"{name}.x") for name in ("node-0", "node-1")}
    return replace(running_job(SPEC, engines=True), nodes=nodes, **changes)


def actions(view: JobView) -> list[Any]:
    return [intent.action for intent in decide(view)]


def kinds(view: JobView) -> set[type]:
    return {type(action) for action in actions(view)}


def test_a_pending_job_is_started() -> None:
    view = with_mirror(running(), status=stored(JobStatus(phase=JobPhase.PENDING)), head=None)
    assert actions(view) == [StartJob()]


def test_a_pending_job_waits_for_nodes_that_are_still_to_come_and_says_how_many_slots_are_missing() -> None:
    """After a restart they come one by one; a job that would fit on all of them must not fail for that."""
    pending = with_mirror(running(), status=stored(JobStatus(phase=JobPhase.PENDING)), head=None)
    wanting = replace(
        pending, spec=SPEC.model_copy(update={"train": SPEC.train.model_copy(update={"ranks": len(pending.nodes) + 1})})
    )
    assert actions(wanting) == []
    assert "the job continues when 1 more is available" in waits(wanting)["start"]
    assert ", ".join(sorted(pending.nodes)) in waits(wanting)["start"]
    first = next(iter(pending.nodes.values()))
    more = first.model_copy(update={"name": "node-9", "incarnation": "node-9.a"})
    came = replace(wanting, nodes={**wanting.nodes, "node-9": more})
    assert actions(came) == [StartJob()]
    assert waits(came)["start"] == "the job is starting"


def test_a_lost_world_that_has_no_room_says_so() -> None:
    view = replace(running(), workers={})
    cramped = replace(view, spec=SPEC.model_copy(update={"train": SPEC.train.model_copy(update={"ranks": 9})}))
    said = [wait.what for wait in current_waits(cramped) if wait.cause == "train_world"]
    assert any(what.startswith("rank 0 on node-0 is gone: 9 train ranks need as many slots") for what in said)
    assert not any("slots" in wait.what for wait in current_waits(view))


def test_an_engine_that_is_still_brought_older_weights_is_given_the_next_when_it_has_them() -> None:
    """Else the end of the one publication would let it go on in the midst of the other."""
    engines = {name: EngineView(name, "h:1", None) for name in ("quick", "slow")}
    view = running(engines=engines, staged=frozenset({Version(0, 0)}))
    slow = replace(view, under_way=frozenset({"publish slow 0.7"}))
    assert [action.instance for action in actions(slow) if isinstance(action, PublishWeights)] == ["quick"]
    assert {action.instance for action in actions(view) if isinstance(action, PublishWeights)} == {"quick", "slow"}


def test_non_member_joins_before_anything_else() -> None:
    view = running()
    view = with_mirror(view, members={PEER: view.mirror.members[PEER]})
    assert actions(view) == [JoinJob()]


def test_an_ended_job_is_left_alone() -> None:
    assert actions(with_mirror(running(), status=stored(JobStatus(phase=JobPhase.FAILED)))) == []


def test_a_quiet_running_job_wants_nothing() -> None:
    assert actions(running()) == []


def test_shards_of_a_dead_member_are_given_away() -> None:
    view = running()
    view = with_mirror(view, members={ME: view.mirror.members[ME]})
    (action,) = actions(view)
    assert isinstance(action, AssignShards)
    assert action.assignment.shards_of(ME) == (0, 1, 2, 3)


def test_a_member_whose_node_the_plan_gives_no_engine_gets_no_shards() -> None:
    view = running()
    late = "node-2.cccc"
    members = {**view.mirror.members, late: stored(Member(incarnation=late, node="node-2", address="a:1"))}
    assert actions(with_mirror(view, members=members)) == []


def test_held_groups_are_offered_once() -> None:
    refs = list(refs_in_order(RULES, running().mirror.head.record, ()))[:2]
    view = running(holdings={ref: offered_group(ref) for ref in refs})
    (action,) = actions(view)
    assert isinstance(action, PutOffer)
    assert [g.ref for g in action.offer.groups] == refs
    assert actions(with_mirror(view, offers={ME: stored(action.offer)})) == []


def test_an_offer_of_what_was_dropped_and_may_be_sealed_again_is_taken_back() -> None:
    ref = next(refs_in_order(RULES, running().mirror.head.record, ()))
    view = with_mirror(running(), offers={ME: stored(Offer(incarnation=ME, groups=(offered_group(ref),)))})
    (action,) = actions(view)
    assert action == PutOffer(Offer(incarnation=ME))


def test_an_outcome_of_a_cut_off_lineage_in_the_offer_does_not_stand_for_the_one_that_came_after_it() -> None:
    """Otherwise no peer would be notified of the new one, and the step would wait for it forever."""
    ref = next(refs_in_order(RULES, running().mirror.head.record, ()))
    old = EndedRef(ref=ref, kind="filtered", reason="signal", holder=ME, versions=(Version(0, 1),))
    new = old.model_copy(update={"versions": (Version(1, 0),)})
    view = with_mirror(running(outcomes={ref: new}), offers={ME: stored(Offer(incarnation=ME, outcomes=(old,)))})
    (action,) = actions(view)
    assert isinstance(action, PutOffer)
    assert action.offer.outcomes == (new,)


def test_actions_under_way_are_not_repeated_before_the_job_runs() -> None:
    alone = with_mirror(running(under_way=frozenset({"join"})), members={})
    assert actions(alone) == []
    pending = replace(
        running(under_way=frozenset({"start"})), mirror=JobMirror(KEYS, status=stored(JobStatus(phase="PENDING")))
    )
    assert actions(pending) == []


def test_an_offer_of_what_is_terminal_is_left_alone() -> None:
    view = running()
    head = view.mirror.head.record
    ref = next(refs_in_order(RULES, head, ()))
    done = head.model_copy(update={"cursors": head.cursors.union(RULES.shape, [ref])})
    offers = {ME: stored(Offer(incarnation=ME, groups=(offered_group(ref),)))}
    assert actions(with_mirror(view, head=stored(done), offers=offers)) == []


def test_an_incomplete_offer_waits_for_more() -> None:
    ref = next(refs_in_order(RULES, running().mirror.head.record, ()))
    (intent,) = decide(running(holdings={ref: offered_group(ref)}, busy=True))
    assert intent.after == GROUPS_S


def test_an_incomplete_offer_of_a_share_of_what_lacks_waits_a_moment_only() -> None:
    refs = list(refs_in_order(RULES, running().mirror.head.record, ()))
    assert len(running().mirror.members) == 2
    (intent,) = decide(running(holdings={ref: offered_group(ref) for ref in refs[: RULES.quota // 2]}, busy=True))
    assert intent.after == COALESCE_S
    offers = {PEER: stored(Offer(incarnation=PEER, groups=tuple(map(offered_group, refs[1 : RULES.quota - 1]))))}
    (intent,) = decide(with_mirror(running(holdings={refs[0]: offered_group(refs[0])}, busy=True), offers=offers))
    assert intent.after == COALESCE_S  # two lack, and this is one


def test_an_incomplete_offer_with_an_outcome_waits_less_long_than_one_of_groups() -> None:
    ref = next(refs_in_order(RULES, running().mirror.head.record, ()))
    ended = EndedRef(ref=ref, kind="filtered", reason="signal", holder=ME)
    (intent,) = decide(running(outcomes={ref: ended}, busy=True))
    assert COALESCE_S < intent.after == OUTCOME_S < GROUPS_S


def test_a_full_quota_is_sealed() -> None:
    refs = list(refs_in_order(RULES, running().mirror.head.record, ()))[:4]
    offers = {PEER: stored(Offer(incarnation=PEER, groups=tuple(map(offered_group, refs))))}
    (action,) = actions(with_mirror(running(), offers=offers))
    assert isinstance(action, MakeSeal)
    assert [g.ref for g in action.chosen.groups] == refs


def test_a_seal_whose_holder_is_gone_is_given_up() -> None:
    view, _ = with_sealed_step(running(), holder="node-7.gone")
    assert GiveUpBatch in kinds(view)


def test_a_seal_of_a_group_i_no_longer_hold_is_given_up() -> None:
    view, _ = with_sealed_step(running(), holder=ME)
    assert GiveUpBatch in kinds(view)
    assert FeedRank not in kinds(view)


def test_each_arrival_restarts_the_transfer_timeout() -> None:
    """A batch is given up for its slowness only when nothing of it arrives any more."""
    view, seal = with_sealed_step(running(), holder=PEER)

    def overdue(held: JobView) -> set[str]:
        return {intent.condition for intent in decide(held) if intent.after == EXCHANGE_LIMIT_S}

    none, first, all_but = (
        overdue(view),
        overdue(with_fed_ranks(view, seal, ranks=(0,))),
        overdue(with_fed_ranks(view, seal)),
    )
    assert len(none) == len(first) == 1
    assert none != first
    assert all_but == set()


def test_my_groups_are_fed_to_every_rank_that_lacks_them() -> None:
    view, seal = with_sealed_step(running(), holder=ME)
    view = replace(view, holdings={g.ref: offered_group(g.ref) for g in seal.groups})
    with_one = with_fed_ranks(view, seal, (0,))
    assert {a.rank for a in actions(view) if isinstance(a, FeedRank)} == {0, 1}
    assert {a.rank for a in actions(with_one) if isinstance(a, FeedRank)} == {1}


def with_fetching_ranks(view: JobView, seal: Seal, fetched: int, unavailable: frozenset[str] = frozenset()) -> JobView:
    """Every rank has received all samples of the seal, without all their blobs."""
    fetching = {
        group.digest: Fetching(frozenset(range(len(group.response_tokens))), 100, fetched, unavailable)
        for group in seal.groups
    }
    ranks = {
        rank: RankView(rank, holding=seal.token, fetching=fetching, fetched_bytes=fetched)
        for rank in range(seal.world_size)
    }
    return replace(view, ranks=ranks)


def test_samples_whose_blobs_a_rank_fetches_are_not_sent_again_and_not_ready() -> None:
    view, seal = with_sealed_step(running(), holder=ME)
    view = replace(view, holdings={g.ref: offered_group(g.ref) for g in seal.groups})
    assert not {FeedRank, FindBlobs, MarkBatchReady} & kinds(with_fetching_ranks(view, seal, 10))


def test_a_node_knows_the_bytes_that_its_own_ranks_lack() -> None:
    view, seal = with_sealed_step(running(), holder=PEER)
    fetching = with_fetching_ranks(view, seal, 10)
    nodes = [place.node for place in view.plan.ranks]
    assert {node: fetching.lacking_bytes(node) for node in {*nodes, "other"}} == {
        node: 90 * len(seal.groups) * nodes.count(node) for node in {*nodes, "other"}
    }
    assert view.lacking_bytes(nodes[0]) == 0


def test_ranks_lack_no_bytes_of_groups_that_are_not_in_the_seal() -> None:
    """A rank keeps the samples of an earlier attempt if steps come in parts, also of a group that was dropped since."""
    view, seal = with_sealed_step(running(), holder=PEER)
    fetching = with_fetching_ranks(view, seal, 10)
    node, digest = view.plan.ranks[0].node, seal.groups[0].digest
    others = {
        rank: replace(known, fetching={"dropped": Fetching(frozenset({0}), 100, 0, frozenset({"ab" * 32}))})
        for rank, known in fetching.ranks.items()
    }
    assert fetching.fetching(seal, 0)[digest].fetched == 10
    assert replace(view, ranks=others).fetching(seal, 0) == {}
    assert replace(view, ranks=others).lacking_bytes(node) == 0


@pytest.mark.parametrize("absent", ["head", "plan"])
def test_ranks_lack_no_bytes_before_the_first_placement_of_a_job(absent: str) -> None:
    view, seal = with_sealed_step(running(), holder=PEER)
    early = replace(with_fetching_ranks(view, seal, 10), mirror=replace(view.mirror, **{absent: None}))
    assert {early.lacking_bytes(place.node) for place in view.plan.ranks} == {0}


def test_a_held_group_is_a_duplicate_if_a_seal_takes_its_prompt_from_another_peer() -> None:
    view, seal = with_sealed_step(running(), holder=PEER)
    ours, theirs = (offered_group(group.ref) for group in seal.groups[:2])
    spare = offered_group(PromptRef(0, 0, 99))
    theirs = theirs.model_copy(update={"digest": "other"})
    view = replace(view, holdings={group.ref: group for group in (ours, theirs, spare)})
    assert ours.digest == seal.groups[0].digest
    assert view.duplicates == (theirs,)
    assert view.unsealed == (spare,)


def test_each_fetched_byte_restarts_the_transfer_timeout() -> None:
    view, seal = with_sealed_step(running(), holder=PEER)
    conditions = [
        {
            intent.condition
            for intent in decide(with_fetching_ranks(view, seal, fetched))
            if intent.after == EXCHANGE_LIMIT_S
        }
        for fetched in (0, 10)
    ]
    assert [len(one) for one in conditions] == [1, 1]
    assert conditions[0] != conditions[1]


def test_the_holder_looks_for_a_blob_that_a_rank_finds_in_no_store() -> None:
    lost = frozenset({"ab" * 32})
    view, seal = with_sealed_step(running(), holder=ME)
    mine = replace(view, holdings={g.ref: offered_group(g.ref) for g in seal.groups})
    found = {a.rank for a in actions(with_fetching_ranks(mine, seal, 10, lost)) if isinstance(a, FindBlobs)}
    assert found == set(range(seal.world_size))
    theirs, seal = with_sealed_step(running(), holder=PEER)
    assert FindBlobs not in kinds(with_fetching_ranks(theirs, seal, 10, lost))


def test_a_lost_holder_does_no_harm_once_every_rank_holds_its_part() -> None:
    view, seal = with_sealed_step(running(), holder="node-7.gone")
    assert kinds(with_fed_ranks(view, seal)) == {MarkBatchReady}


@pytest.mark.parametrize("ranks", [(), (0,), (1,)], ids=["no rank", "the first", "the second"])
def test_a_batch_is_not_ready_while_a_rank_lacks_its_part(ranks: tuple[int, ...]) -> None:
    view, seal = with_sealed_step(running(), holder=PEER)
    assert MarkBatchReady not in kinds(with_fed_ranks(view, seal, ranks))


def test_a_ready_seal_is_applied_then_committed_and_never_given_up() -> None:
    view, seal = with_sealed_step(running(), holder="node-7.gone", ready=True)
    assert kinds(view) == {TrainBatch}
    done = replace(view, ranks={i: RankView(i, applied=seal.token) for i in range(2)})
    assert actions(done) == [CommitStep(1)]


def test_a_dead_rank_means_rollback() -> None:
    view = running()
    (action,) = actions(replace(view, workers={"t0": view.workers["t0"]}))
    assert isinstance(action, Rollback)
    assert "rank 1" in action.reason


def test_a_failed_rank_means_rollback_with_its_reason() -> None:
    view = running()
    failed = worker_record("t1", "train", "node-1", world="w", rank=1, state="failed", reason="no progress")
    (action,) = actions(replace(view, workers={**view.workers, "t1": failed}))
    assert isinstance(action, Rollback)
    assert "no progress" in action.reason
    assert not action.slots_as_seen, "what it holds is given up with it"


def test_ranks_that_are_further_than_a_store_that_was_put_back_mean_rollback() -> None:
    """They drop the request as outdated, so the wait would never end."""
    view = running()

    def with_rank_at(token: Token) -> JobView:
        return replace(view, ranks={0: RankView(0, applied=token), 1: RankView(1)})

    for step in (1, 2):
        (action,) = actions(with_rank_at(Token(0, step, 1)))
        assert isinstance(action, Rollback)
        assert f"step {step}" in action.reason
        assert "restored from a backup of step 0" in action.reason
        assert action.slots_as_seen, "who has not heard of the seal yet must not think so"
    assert actions(with_rank_at(Token(1, 9, 1))) == []  # of another world than head's
    ready, seal = with_sealed_step(view, ready=True)
    one_ahead = replace(ready, ranks={0: RankView(0, applied=seal.token), 1: RankView(1)})
    assert Rollback not in kinds(one_ahead), "trained, and not committed yet"


def test_others_stand_by_after_they_have_fed_their_part() -> None:
    members = {
        f"node-{i}.x": stored(Member(incarnation=f"node-{i}.x", node=f"node-{i}", address="a:1")) for i in range(8)
    }
    view, seal = with_sealed_step(with_mirror(running(), members=members), holder="node-3.x")
    topics = (f"ready {seal.token}", f"exchange {seal.token}")
    first = {turn_order(members, topic)[0] for topic in topics}
    assert {me for me in members if not waits_for_others(replace(view, me=me))} == {*first, "node-3.x"}, (
        "it has not fed yet"
    )
    fed = with_fed_ranks(view, seal, ranks=(0,))
    assert not waits_for_others(replace(fed, me="node-3.x"))
    whole = with_fed_ranks(view, seal)
    assert {me for me in members if not waits_for_others(replace(whole, me=me))} == first
    assert not any(
        waits_for_others(replace(whole, me=me, under_way=frozenset({f"feed 0 {seal.token}"}))) for me in members
    )
    assert not any(waits_for_others(replace(with_sealed_step(view, ready=True)[0], me=me)) for me in members)
    assert not waits_for_others(running()), "nothing is sealed"
    assert not waits_for_others(with_mirror(running(), head=None)), "nothing has begun"


def test_wait_report_names_what_keeps_an_engine_from_its_weights() -> None:
    view = running(engines={"e": EngineView("e", "h:1", None, trouble="the engine did not answer /pause_generation")})
    (wait,) = [wait for wait in current_waits(view) if wait.cause == "engines"]
    assert wait.what.endswith("(none is ready); e: the engine did not answer /pause_generation")


def test_a_rank_that_trained_another_batch_under_the_same_token_means_rollback() -> None:
    """A store that was restored to one commit earlier issues the same token again, for other groups."""
    view, seal = with_sealed_step(running(), ready=True)

    def trained(content: bytes) -> JobView:
        return replace(view, ranks={rank: RankView(rank, applied=seal.token, content=content) for rank in range(2)})

    assert CommitStep in map(type, actions(trained(content_sha256(seal))))
    assert CommitStep in map(type, actions(trained(b""))), "one that does not say"
    (action,) = actions(trained(content_sha256(seal.model_copy(update={"groups": ()}))))
    assert isinstance(action, Rollback)
    assert "differs from its seal" in action.reason
    assert action.slots_as_seen


def test_a_rank_that_has_not_started_yet_is_waited_for() -> None:
    view = with_mirror(running(), claims={})
    assert actions(replace(view, workers={})) == []


def test_a_rank_whose_node_is_away_is_waited_for_a_while() -> None:
    view = with_mirror(running(), claims={})
    (intent,) = decide(replace(view, workers={}, nodes={"node-0": view.nodes["node-0"]}))
    assert isinstance(intent.action, Rollback)
    assert intent.after >= NODE_GRACE_S


def test_worlds_that_keep_dying_end_the_job() -> None:
    view = running()
    log = {
        i: stored(LogEntry(seq=i, parent=0, kind="rollback", lineage=i, step=0, world="w", nonce="n"))
        for i in range(1, MAX_FRUITLESS_ROLLBACKS + 1)
    }
    job = JobRecord(uid="u", name="j", spec={}, run_dir="/run", created=0.0, prompts=4)
    view = with_mirror(view, log=log, job=stored(job))
    (intent,) = decide(replace(view, workers={}))
    action = intent.action
    assert isinstance(action, SetPhase)
    assert action.phase is JobPhase.FAILED
    assert intent.after >= SETTLE_S, "a claim may be seen before the worker of the same transaction"
    claim = view.mirror.claim(view.head.world, 0)
    assert claim is not None
    assert action.reason.endswith(f"rank 0 on node-0 is gone (its log: /run/logs/{claim.instance}.log)")


def test_the_reason_of_a_failed_rank_outlasts_its_registration() -> None:
    view = running()
    claim = view.mirror.claim(view.head.world, 0)
    assert claim is not None
    failed = view.workers[claim.instance].model_copy(update={"state": "failed", "reason": "the base changed"})
    known = note_rank_failures({"of an older world": "x"}, view.mirror, {claim.instance: failed})
    assert known == {claim.instance: "the base changed"}
    later = note_rank_failures(known, view.mirror, {})
    lost = world_loss(replace(view, workers={}, rank_failures=later, remembered=Memo()))
    assert lost is not None
    assert lost.why == "rank 0 on node-0 failed: the base changed"


def test_engines_get_committed_weights_that_are_staged() -> None:
    view = running(engines={"e": EngineView("e", "h:1", None)})
    assert actions(view) == []
    assert actions(replace(view, staged=frozenset({Version(0, 0)}))) == [PublishWeights("e", Version(0, 0))]


def test_a_complete_job_succeeds() -> None:
    view = running()
    head = view.mirror.head.record.model_copy(update={"step": 3})
    entries = (Checkpoint(lineage=0, step=0, seq=0, file=""), Checkpoint(lineage=0, step=3, seq=3, file="c"))
    view = with_mirror(view, head=stored(head), checkpoints=stored(Checkpoints(entries=entries)))
    (action,) = actions(view)
    assert isinstance(action, SetPhase)
    assert action.phase is JobPhase.SUCCEEDED
    assert action.at_head
    assert action.reason == "all 3 steps were trained"


def test_a_job_that_succeeded_says_how_many_prompts_failed() -> None:
    view = running()
    tally = view.mirror.head.record.tally.model_copy(
        update={"sources": {"a": SourceTally(failed=60), "b": SourceTally(failed=6)}}
    )
    head = view.mirror.head.record.model_copy(update={"step": 3, "tally": tally})
    entries = (Checkpoint(lineage=0, step=0, seq=0, file=""), Checkpoint(lineage=0, step=3, seq=3, file="c"))
    (action,) = actions(with_mirror(view, head=stored(head), checkpoints=stored(Checkpoints(entries=entries))))
    assert isinstance(action, SetPhase)
    assert action.reason == "all 3 steps were trained; 66 prompts failed (see the job's events for the reasons)"


def test_a_saved_checkpoint_is_registered_but_not_one_older_than_what_is_registered() -> None:
    view = running()
    head = view.mirror.head.record.model_copy(update={"step": 2, "seq": 2})
    entry = LogEntry(seq=2, parent=1, kind="train", lineage=0, step=2, world="w", nonce="n", cursors=head.cursors)
    view = with_mirror(view, head=stored(head), log={2: stored(entry)})
    view = replace(view, saved={Version(0, 2): SavedCheckpoint(Version(0, 2), "c2", "d")})
    wanted = Checkpoint(lineage=0, step=2, seq=2, file="c2", digest="d")
    assert actions(view) == [RegisterCheckpoint(wanted)]
    base = Checkpoint(lineage=0, step=0, seq=0, file="")
    later = Checkpoint(lineage=0, step=2, seq=2, file="other")
    assert actions(with_mirror(view, checkpoints=stored(Checkpoints(entries=(base, later))))) == []


def writing(step: int, error: str, *, over: bool) -> JobView:
    """As rank 0 shows it."""
    shown = CheckpointProgress(Version(0, step), total=100, written=0, error=error, over=over)
    return running(ranks={0: RankView(0, writing=shown), 1: RankView(1)})


def told(view: JobView) -> list[str]:
    return [intent.action.sentence for intent in warn_of_disks(view) if isinstance(intent.action, PostWarning)]


def test_a_checkpoint_that_the_disk_did_not_take_is_told_once_with_its_reason() -> None:
    assert told(running()) == []
    assert told(writing(2, "", over=False)) == []
    view = writing(2, "no room to write it (No space left on device)", over=True)
    (sentence,) = told(view)
    assert sentence == (
        "the checkpoint of step 2 could not be written (no room to write it (No space left on device)); "
        "the next due checkpoint is the next attempt"
    )
    known = stored(Trouble(topic="checkpoint", node="node-1", sentence=sentence))
    assert told(with_mirror(view, troubles={"checkpoint": known})) == []
    (other,) = told(with_mirror(writing(4, "Input/output error", over=False), troubles={"checkpoint": known}))
    assert other.endswith("(Input/output error); the write is retried until it succeeds")
    assert any(isinstance(action, PostWarning) for action in actions(view)), "it is one of the rules"


def test_disk_error_of_a_step_is_reported_once() -> None:
    view = running(ranks={0: RankView(0), 1: RankView(1)})
    sentence = "the weights of step 1 cannot be written (No space left on device): /runs/j/weights"
    hindered = replace(view, ranks={rank: replace(known, trouble=sentence) for rank, known in view.ranks.items()})
    assert told(view) == []
    assert told(hindered) == [sentence]
    known = stored(Trouble(topic="folder", node="node-1", sentence=sentence))
    assert told(with_mirror(hindered, troubles={"folder": known})) == []


def test_wait_for_the_disk_reports_its_progress() -> None:
    shown = CheckpointProgress(Version(0, 2), total=120_000_000, written=30_000_000, error="", over=False)
    view, seal = with_sealed_step(running(), holder=ME, ready=True)
    ranks = {0: RankView(0, phase="checkpoint", writing=shown), 1: RankView(1, applied=seal.token)}
    (what,) = [wait.what for wait in current_waits(replace(view, ranks=ranks)) if wait.cause == "train"]
    assert what == (
        "train rank 0 trains step 1 (checkpoint); waiting for the previous checkpoint: the checkpoint of step 2 is being written (30 of 120 MB)"
    )
    over = running(ranks={0: RankView(0, writing=shown)})
    head = over.mirror.head.record.model_copy(update={"step": 3})
    (wait,) = [wait for wait in current_waits(with_mirror(over, head=stored(head))) if wait.cause == "finish"]
    assert wait.what == "all steps are trained; the checkpoint of step 2 is being written (30 of 120 MB)"
    failing = replace(shown, error="No space left on device")
    ranks = {0: RankView(0, writing=failing)}
    (wait,) = [
        wait
        for wait in current_waits(with_mirror(replace(over, ranks=ranks), head=stored(head)))
        if wait.cause == "finish"
    ]
    assert wait.what.endswith("the checkpoint of step 2 cannot be written and is retried (No space left on device)")


def test_the_entry_of_a_checkpoint_that_is_being_written_stays_in_the_store() -> None:
    head = running().mirror.head.record
    log = {
        seq: LogEntry(
            seq=seq,
            parent=seq - 1,
            kind="train",
            lineage=0,
            step=seq,
            world="w",
            nonce="n",
            cursors=head.cursors if seq % 10 == 0 else None,
        )
        for seq in range(1, 101)
    }
    at = head.model_copy(update={"seq": 100, "step": 100})
    base = Checkpoint(lineage=0, step=0, seq=0, file="")
    kept = log.keys() - set(chain.prunable_entries(at, [base], log, keep=5))
    assert kept == {90, 96, 97, 98, 99, 100}, "of 90 and 100 the checkpoints may still come; of 10 to 80 they failed"
    done = Checkpoint(lineage=0, step=90, seq=90, file="c90")
    kept = log.keys() - set(chain.prunable_entries(at, [base, done], log, keep=5))
    assert kept == {90, 96, 97, 98, 99, 100}
    later = Checkpoint(lineage=0, step=100, seq=100, file="c100")
    assert 90 in chain.prunable_entries(at, [base, later], log, keep=5)


def test_a_long_log_is_pruned_many_entries_at_a_time() -> None:
    view = running()
    old = {
        seq: stored(LogEntry(seq=seq, parent=seq - 1, kind="account", lineage=0, step=0, world="w", nonce="n"))
        for seq in range(1, KEEP_LOG + PRUNE_AT)
    }
    head = view.mirror.head.record
    log = {0: view.mirror.log[0], **old}
    nearly = with_mirror(view, head=stored(head.model_copy(update={"seq": KEEP_LOG + PRUNE_AT - 1})), log=log)
    assert actions(nearly) == []
    long = with_mirror(view, head=stored(head.model_copy(update={"seq": KEEP_LOG + PRUNE_AT})), log=log)
    assert actions(long) == [PruneLog(tuple(range(1, PRUNE_AT + 1)))]


def test_a_deleted_job_is_left_alone() -> None:
    view = running()
    deleted = view.mirror.head.record.model_copy(update={"deleted": True})
    assert actions(with_mirror(view, head=stored(deleted), members={})) == []


def kept_after(accuracies: dict[int, float], head: Head, known: tuple[Checkpoint, ...]) -> list[int]:
    """The steps whose checkpoints a controller would keep, with one of the newest."""
    evaluations = {
        f"0.{step}": stored(Evaluation(version=Version(0, step), accuracy=accuracy, count=9))
        for step, accuracy in accuracies.items()
    }
    view = with_mirror(
        running(), head=stored(head), checkpoints=stored(Checkpoints(entries=known)), evaluations=evaluations
    )
    spec = view.spec.model_copy(
        update={
            "checkpoint": view.spec.checkpoint.model_copy(update={"keep": 1}),
            "eval": view.spec.eval.model_copy(update={"path": "e"}),
        }
    )
    intents = [
        i.action
        for i in register_and_forget_checkpoints(replace(view, spec=spec))
        if isinstance(i.action, RetainCheckpoints)
    ]
    return [c.step for c in (intents[0].kept if intents else known)]


def test_only_evaluations_on_heads_chain_tell_which_checkpoint_is_the_best() -> None:
    first = running().mirror.head.record
    known = tuple(Checkpoint(lineage=0, step=s, seq=s, file=f"c{s}" if s else "") for s in (0, 2, 4, 6))
    head = first.model_copy(update={"step": 6})
    assert kept_after({2: 0.5, 4: 0.75, 6: 0.5}, head, known) == [0, 4, 6]
    assert kept_after({2: 0.75, 4: 0.75, 6: 0.5}, head, known) == [0, 2, 6], "the earlier of equal ones"
    assert kept_after({}, head, known) == [0, 6]
    cut_off = head.model_copy(
        update={"lineage": 1, "step": 3, "lineages": (*first.lineages, Lineage(number=1, base_step=2))}
    )
    assert kept_after({2: 0.5, 4: 0.75}, cut_off, known[:3]) == [0, 2], "step 4 is no state of this chain"


def test_an_evaluation_that_is_due_is_waited_for_in_words() -> None:
    view = running()
    view = replace(view, spec=view.spec.model_copy(update={"eval": view.spec.eval.model_copy(update={"path": "e"})}))

    def waits(**changes: Any) -> list[str]:
        return [wait.what for wait in current_waits(with_mirror(view, **changes)) if wait.cause == "evaluation"]

    assert waits() == ["the evaluation of the initial weights has no part yet"]
    part = EvalPart(
        version=Version(0, 0), number=2, parts=5, source="data", first=0, samples=1, correct=(1,), reward=1.0
    )
    assert waits(eval_parts={"0.0/000002": stored(part)}) == ["the evaluation of the initial weights has 1 of 5 parts"]
    made = Evaluation(version=Version(0, 0), accuracy=1.0, count=1)
    assert waits(evaluations={"0.0": stored(made)}) == []


def test_old_checkpoints_are_forgotten_however_often_new_ones_are_written() -> None:
    def conditions(steps: range) -> set[str]:
        known = tuple(Checkpoint(lineage=0, step=s, seq=s, file=f"c{s}" if s else "") for s in steps)
        head = running().mirror.head.record.model_copy(update={"step": steps[-1], "seq": steps[-1]})
        view = with_mirror(running(), head=stored(head), checkpoints=stored(Checkpoints(entries=known)))
        return {
            intent.condition
            for intent in register_and_forget_checkpoints(view)
            if isinstance(intent.action, RetainCheckpoints)
        }

    few, more = (conditions(range(count)) for count in (6, 9))
    assert few == more != set(), "a condition that changes with every checkpoint never holds for long"


def test_actions_under_way_are_not_decided_again() -> None:
    view, seal = with_sealed_step(running(), holder=ME, ready=True)
    under_way = frozenset(f"apply {rank} {seal.token}" for rank in range(2))
    assert actions(replace(view, under_way=under_way)) == []


def test_one_peer_goes_first_and_the_others_follow() -> None:
    members = [f"n{i}.x" for i in range(5)]
    assert sorted(turn_of(members, m, "topic") for m in members) == list(range(5))
    waits = Timers({}).note(["c"], 10.0)
    assert waits.ripe("c", 0, 10.0)
    assert not waits.ripe("c", 1, 10.0)
    assert waits.note(["c"], 11.0).ripe("c", 1, 10.0 + TURN_SECONDS)


def test_a_condition_that_broke_begins_anew() -> None:
    waits = Timers({}).note(["c"], 10.0).note([], 11.0).note(["c"], 12.0)
    assert waits.since["c"] == 12.0


def ended_refs(view: JobView, epochs: int, kind: str = "filtered") -> JobView:
    """With every ref of the first epochs ended without a group."""
    refs = [PromptRef(e, s, q) for e in range(epochs) for s in range(4) for q in range(10)]
    ended = tuple(EndedRef(ref=ref, kind=kind, reason="too long", source="data") for ref in refs)  # type: ignore[arg-type]
    advance = chain.account_entry(view.mirror.head.record, ended, RULES.shape, ChainWriter(ME, "n1"))
    return with_mirror(view, head=stored(advance.head), log={**view.mirror.log, 1: stored(advance.entry)})


def test_a_job_whose_whole_epoch_brought_nothing_fails_with_the_counts_and_the_commonest_reason() -> None:
    (phase,) = [action for action in actions(ended_refs(running(), 1)) if isinstance(action, SetPhase)]
    assert phase.phase is JobPhase.FAILED
    assert phase.reason == (
        "no prompt of data epoch 0 could be trained (40 were filtered, 0 failed); most common reason (40 times): too long"
    )
    (phase,) = [action for action in actions(ended_refs(running(), 2, "failed")) if isinstance(action, SetPhase)]
    assert phase.reason.startswith("no prompt of data epoch 1 could be trained (0 were filtered, 40 failed)")


def test_a_job_that_has_trained_something_of_the_epoch_goes_on() -> None:
    view = ended_refs(running(), 1)
    head = view.mirror.head.record
    trained = head.model_copy(update={"tally": head.tally.model_copy(update={"trained_epoch": 0})})
    assert SetPhase not in kinds(with_mirror(view, head=stored(trained)))


def test_a_job_with_a_group_of_the_next_epoch_offered_or_sealed_does_not_despair() -> None:
    view = ended_refs(running(), 1)
    later = offered_group(PromptRef(1, 0, 0))
    offered = with_mirror(view, offers={PEER: stored(Offer(incarnation=PEER, groups=(later,)))})
    assert SetPhase not in kinds(offered)
    head = view.mirror.head.record
    chosen = SealStep((sealed_group(later, PEER),), ())
    seal = chain.seal_slot(None, head, chosen, world_size=2, mini_batches=1, sealer=ME)
    assert SetPhase not in kinds(with_mirror(view, seals={1: stored(seal)}))
    gone = with_mirror(view, seals={1: stored(chain.reseal_slot(seal, ME))})
    assert SetPhase in kinds(gone)


def by_epochs(view: JobView, **more: Any) -> JobView:
    """The job goes once through its forty prompts."""
    flow = SPEC.flow.model_copy(update={"steps": None, "epochs": 1})
    return replace(
        view, spec=SPEC.model_copy(update={"flow": flow}), rules=replace(RULES, steps=None, epochs=1, **more)
    )


def all_filtered(view: JobView, count: int) -> JobView:
    """The first prompts of the order are offered as filtered."""
    refs = list(refs_in_order(view.rules, view.mirror.head.record, ()))[:count]
    ended = tuple(EndedRef(ref=ref, kind="filtered", reason="all the same", versions=(Version(0, 0),)) for ref in refs)
    return with_mirror(view, offers={PEER: stored(Offer(incarnation=PEER, outcomes=ended))})


def test_a_step_that_has_used_up_its_prompts_without_a_group_fails_the_job_with_a_sentence() -> None:
    limited = replace(RULES, limit=12)
    assert SetPhase not in kinds(replace(all_filtered(running(), 11), rules=limited))
    (failed,) = actions(replace(all_filtered(running(), 12), rules=limited))
    assert isinstance(failed, SetPhase)
    assert (failed.phase, failed.at_head) == (JobPhase.FAILED, True)
    assert failed.reason.startswith("step 1 has used up its 12 prompts (flow.max_prompts_per_step) with 0 of 4 groups")
    assert "most common reason (12 times): all the same" in failed.reason


def test_a_job_by_epochs_is_done_when_each_prompt_has_its_outcome_and_the_last_step_its_checkpoint() -> None:
    view = by_epochs(ended_refs(running(), 1))
    head = view.mirror.head.record.model_copy(update={"step": 7})
    view = with_mirror(view, head=stored(head))
    assert SetPhase not in kinds(view), "its last checkpoint is not there"
    entries = (Checkpoint(lineage=0, step=0, seq=0, file=""), Checkpoint(lineage=0, step=7, seq=1, file="c"))
    (done,) = actions(with_mirror(view, checkpoints=stored(Checkpoints(entries=entries))))
    assert isinstance(done, SetPhase)
    assert (done.phase, done.reason) == (
        JobPhase.SUCCEEDED,
        "every prompt of the data epoch was processed, in 7 steps",
    )


def test_a_job_by_epochs_of_which_nothing_was_trained_fails() -> None:
    (failed,) = actions(by_epochs(ended_refs(running(), 1)))
    assert isinstance(failed, SetPhase)
    assert failed.phase is JobPhase.FAILED
    assert "no prompt of data epoch 0 could be trained" in failed.reason


def test_beyond_its_epochs_nothing_is_due() -> None:
    view = by_epochs(ended_refs(running(), 1))
    assert ended_refs(running(), 1).due
    assert view.due == ()


def test_failure_derived_from_head_applies_only_at_that_head() -> None:
    (failed,) = [action for action in actions(ended_refs(running(), 1)) if isinstance(action, SetPhase)]
    assert failed.at_head


def curriculum(view: JobView) -> JobView:
    data = SPEC.data.model_copy(update={"curriculum": "easy_first"})
    return replace(view, spec=SPEC.model_copy(update={"data": data}))


def past_the_first_epoch(view: JobView) -> JobView:
    view = ended_refs(view, 1)
    head = view.mirror.head.record
    return with_mirror(
        view, head=stored(head.model_copy(update={"tally": head.tally.model_copy(update={"trained_epoch": 0})}))
    )


def test_with_a_curriculum_the_next_epoch_begins_when_it_is_needed_and_only_then() -> None:
    assert BeginEpoch not in kinds(curriculum(running()))
    view = past_the_first_epoch(curriculum(running()))
    (begin,) = [action for action in actions(view) if isinstance(action, BeginEpoch)]
    assert (begin.record.epoch, begin.record.version, begin.forgotten) == (1, Version(0, 0), ())
    assert begin.record.so_far["data"].filtered == 40
    begun = with_mirror(view, epochs={1: stored(begin.record)})
    assert BeginEpoch not in kinds(begun)


def test_an_epoch_whose_record_was_cut_off_begins_again() -> None:
    view = past_the_first_epoch(curriculum(running()))
    old = EpochRecord(epoch=1, version=Version(0, 2))
    assert BeginEpoch in kinds(with_mirror(view, epochs={1: stored(old)}))


def test_without_a_curriculum_no_epoch_is_written_down() -> None:
    assert BeginEpoch not in kinds(past_the_first_epoch(running()))


def waits(view: JobView) -> dict[str, str]:
    """What is waited for, in words, by cause; an engine serves what head says."""
    served = {"e": EngineView("e", "h:1", view.mirror.head.record.version)} if view.mirror.head else {}
    return {wait.cause: wait.what for wait in current_waits(replace(view, engines=view.engines or served))}


def test_wait_reports_are_sentences_without_internal_numbers() -> None:
    pending = with_mirror(running(), status=stored(JobStatus(phase=JobPhase.PENDING)), head=None)
    assert waits(pending) == {"start": "the job is starting"}
    sealed_view, seal = with_sealed_step(running())
    assert waits(sealed_view) == {"exchange": "the responses of step 1 are being sent to train ranks 0 and 1"}
    one_left, _ = with_sealed_step(running())
    assert waits(with_fed_ranks(one_left, seal, ranks=(0,)))["exchange"].endswith("to train rank 1")
    ready, _ = with_sealed_step(running(), ready=True)
    ready = replace(ready, ranks={i: RankView(i, phase="update") for i in range(2)})
    assert waits(ready) == {"train": "train ranks 0 and 1 train step 1 (update)"}


def test_a_job_says_which_ranks_and_engines_it_waits_for() -> None:
    view = running()
    starting = {"t0": view.workers["t0"].model_copy(update={"state": "starting"})}
    said = [wait.what for wait in current_waits(replace(view, workers=starting))]
    assert "train rank 0 on node-0 is starting" in said
    assert "train rank 1 on node-1 has no process yet" in said
    assert "no engine of node-0 has loaded the initial weights yet (none is ready)" in said
    unknown = replace(view, engines={"e": EngineView("e", "h:1", None)})
    assert waits(unknown)["engines"] == "no engine of node-0 has loaded the initial weights yet (none is ready)"


def test_a_node_that_cannot_work_on_a_job_says_why() -> None:
    said = waits(replace(running(), missing_input="d.jsonl: cannot read the file. Name an existing, readable file"))
    assert said == {
        "material": "node-0 cannot work on the job: d.jsonl: cannot read the file. Name an existing, readable file"
    }


def test_a_node_that_has_joined_is_not_waited_for_whatever_was_last_heard_of_its_model() -> None:
    view = running()
    fetch = ModelFetch(node="node-1", path="hf://o/n", done=1_000_000, total=4_000_000)
    fetching = with_mirror(view, fetches={"node-1": stored(fetch)})
    assert "model" not in waits(fetching)
    alone = {ME: view.mirror.members[ME]}
    assert waits(with_mirror(fetching, members=alone))["model"] == (
        "node-1 is downloading model hf://o/n, 1.0 of 4.0 MB"
    )


def test_ranks_and_weights_are_named_as_people_count_them() -> None:
    assert [ranks_text(range(n)) for n in (1, 2, 3, 8)] == [
        "train rank 0",
        "train ranks 0 and 1",
        "train ranks 0, 1 and 2",
        "8 train ranks",
    ]
    assert weights_text(Version(0, 0)) == "the initial weights"
    assert weights_text(Version(0, 7)) == "the weights of step 7"
    assert weights_text(Version(2, 7)) == "the weights of step 7 in lineage 2"


def test_member_missing_from_a_collective_is_named() -> None:
    view = running()
    at = view.mirror.head.record.version  # type: ignore[union-attr]
    mine = Part(incarnation=ME, at=at, given={"tried": 3})
    waiting = replace(view, mirror=replace(view.mirror, parts={ME: Versioned(mine, 9)}))
    (wait,) = [w for w in current_waits(waiting) if w.cause == "peers"]
    assert (
        wait.what
        == f"step {at.step + 1}: node-1 has not contributed to collective 'tried' yet (the flow there has not reached it)"
    )
    past = Part(incarnation=PEER, at=Version(at.lineage, at.step + 1))
    gone_on = replace(view, mirror=replace(view.mirror, parts={ME: Versioned(mine, 9), PEER: Versioned(past, 10)}))
    assert not [w for w in current_waits(gone_on) if w.cause == "peers"]
    agreed = Agreed(version=at, name="tried", values={ME: 3})
    done = replace(view, mirror=replace(waiting.mirror, agreed={f"{at}/tried": Versioned(agreed, 11)}))
    assert not [w for w in current_waits(done) if w.cause == "peers"]


def test_a_look_at_records_that_are_the_same_works_nothing_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    worked: list[str] = []

    def noting(name: str, work: Any) -> Any:
        def noted(*args: Any, **named: Any) -> Any:
            worked.append(name)
            return work(*args, **named)

        return noted

    for name in ("balance_samples", "choose_seal"):
        monkeypatch.setattr(f"controllers.rules.view.{name}", noting(name, getattr(view_module, name)))
    producing = running(busy=True)
    view, _ = with_sealed_step(producing)
    for look in range(3):  # another view each time, as after a response or a rank's word
        decide(replace(producing, busy=bool(look % 2)))
        decide(replace(view, ranks={**view.ranks, 0: RankView(0, progress=look)}))
    assert sorted(worked) == ["balance_samples", "choose_seal"]
    decide(with_mirror(view, seals={1: stored(view.mirror.seals[1].record.model_copy())}))
    assert sorted(worked) == ["balance_samples", "balance_samples", "choose_seal"]

"""Responses that outlive a step on a controller with staleness: recorded, continued, abandoned."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from engine_workers import ServingEngine

from controllers.changes import ChangeSignal
from controllers.flow.group_buffer import GroupBuffer, InFlightPrompts
from controllers.flow.step import JobStep
from controllers.inference.pool import EnginePool
from controllers.inference.rules import VersionFollower
from controllers.rules.actions import GiveUpPrompt, Intent, MakeSeal, PutOffer
from controllers.rules.decide import decide
from controllers.rules.step import COALESCE_S, EVALUATION_PATIENCE_S, STRANDED_PATIENCE_S, give_up_stale_prompts
from controllers.rules.view import EngineView, JobView
from controllers.rules.waits import current_waits
from controllers.telemetry.gauges import show_in_flight
from gcore.config import parse_spec
from gcore.data.order import shard_lengths
from gcore.errors import EngineError
from gcore.ledger import chain
from gcore.ledger.chain import ChainWriter
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import (
    Assignment,
    Checkpoint,
    Checkpoints,
    Head,
    InFlightRef,
    Member,
    Offer,
    OfferedGroup,
)
from gcore.ledger.records.job import EnginePlace, EvalPart, Evaluation, JobPhase, JobStatus, Plan
from gcore.ledger.selection import StreamRules, refs_in_order
from gcore.ledger.transactions import Versioned
from gcore.observability.metrics import Metrics
from gcore.rollout.client import SamplingParams
from gcore.store.keys import JobKeys
from gcore.testing import FakeClock
from gcore.types import Group, Outcome, Prompt, PromptRef, Sample, Version, VersionSpan

ME = "node-0.aaaa"
DOCUMENT: dict[str, Any] = {
    "name": "j",
    "model": {"path": "m"},
    "data": {"path": "d", "shards": 4, "window": 8},
    "flow": {"steps": 9, "groups_per_step": 4, "samples_per_prompt": 2, "max_reissues": 1},
    "rollout": {"max_new_tokens": 4, "staleness": 1, "correction": "tis", "timeout_s": 30},
}
SPEC = parse_spec(DOCUMENT)
RULES = StreamRules(shard_lengths(40, 4), 8, 4, staleness=1, steps=9)
REF = PromptRef(0, 0, 0)
OLD, NEW = Version(0, 1), Version(0, 2)


def at(step: int) -> Head:
    return chain.base_entry(4, "w", ChainWriter(ME, "n")).head.model_copy(update={"step": step})


def group(ref: PromptRef, *versions: Version) -> OfferedGroup:
    return OfferedGroup(ref=ref, digest=f"d{ref}", prompt_tokens=3, response_tokens=(2, 2), versions=versions or (NEW,))


def view_of(step: int = 2, offer: Offer | None = None, **changes: Any) -> JobView:
    """One member, at `step`; what stands in its offer."""
    mirror = JobMirror(
        JobKeys("u"),
        status=Versioned(JobStatus(phase=JobPhase.RUNNING), 1),
        head=Versioned(at(step), 1),
        checkpoints=Versioned(Checkpoints(entries=(Checkpoint(lineage=0, step=0, seq=0, file=""),)), 1),
        plan=Versioned(Plan(generation=1, world="w", ranks=(), engines=()), 1),
        members={ME: Versioned(Member(incarnation=ME, node="node-0", address="a:1"), 1)},
        offers={} if offer is None else {ME: Versioned(offer, 1)},
    )
    return replace(JobView(SPEC, RULES, mirror, ME, "node-0", {}, {}), **changes)


def offers(view: JobView) -> list[Offer]:
    return [intent.action.offer for intent in decide(view) if isinstance(intent.action, PutOffer)]


def given_up(view: JobView) -> list[Intent]:
    return [intent for intent in give_up_stale_prompts(view) if isinstance(intent.action, GiveUpPrompt)]


def test_in_flight_refs_are_offered_once() -> None:
    (written,) = offers(view_of(in_flight={REF: OLD}))
    assert written.in_flight == (InFlightRef(ref=REF, version=OLD),)
    assert offers(view_of(offer=written, in_flight={REF: OLD})) == []


def test_new_in_flight_refs_are_offered_after_the_coalescing_delay() -> None:
    (intent,) = (i for i in decide(view_of(in_flight={REF: NEW}, busy=True)) if isinstance(i.action, PutOffer))
    assert intent.after == COALESCE_S
    assert intent.action.offer.in_flight == (InFlightRef(ref=REF, version=NEW),)


def test_refs_no_longer_in_flight_leave_the_offer_unless_they_ended() -> None:
    named = Offer(incarnation=ME, in_flight=(InFlightRef(ref=REF, version=OLD),))
    (written,) = offers(view_of(offer=named))
    assert written.in_flight == ()
    view = view_of(offer=named)
    head = at(2)
    ended = head.model_copy(update={"cursors": head.cursors.union(RULES.shape, [REF])})
    assert offers(replace(view, mirror=replace(view.mirror, head=Versioned(ended, 1)))) == []


def test_at_staleness_0_nothing_in_flight_is_named_or_given_up() -> None:
    view = view_of(in_flight={REF: OLD}, rules=replace(RULES, staleness=0))
    assert offers(view) == []
    assert given_up(view) == []
    assert [wait.cause for wait in current_waits(view)].count("in_flight") == 0


def test_refs_that_a_seal_waits_for_are_abandoned_after_a_timeout() -> None:
    refs = list(refs_in_order(RULES, at(2), ()))
    named = Offer(
        incarnation=ME,
        groups=tuple(map(group, refs[1:5])),
        in_flight=(InFlightRef(ref=REF, version=OLD), InFlightRef(ref=refs[6], version=NEW)),
    )
    (intent,) = given_up(view_of(offer=named, in_flight={REF: OLD, refs[6]: NEW}))
    assert intent.action == GiveUpPrompt(REF, "the next step waited 30 s for it", stale=True)
    assert intent.after == 30.0


def test_untrainable_refs_are_abandoned_at_once_and_counted_only_if_stale() -> None:
    cut_off = Version(3, 1)
    intents = given_up(view_of(step=3, in_flight={REF: OLD, PromptRef(0, 1, 0): cut_off}))
    assert [(i.action.ref, i.action.stale, i.after) for i in intents if isinstance(i.action, GiveUpPrompt)] == [
        (REF, True, 0.0),
        (PromptRef(0, 1, 0), False, 0.0),
    ]


@pytest.mark.parametrize("case", ["plan", "shard", "engine", ""])
def test_prompts_without_an_engine_here_are_left_to_the_shards_owner(case: str) -> None:
    """The plan gave this node's engines to other places while the prompt was in flight."""
    other = "node-1.bbbb"
    engines = tuple(EnginePlace(node=node, slot="cpu:0") for node in ("node-0", "node-1")[case != "plan" :])
    owners = (0, 1) if case == "shard" else (1, 1)
    view = view_of(in_flight={REF: NEW}, engines={"e": EngineView("e", "a:1", NEW, asleep=case != "engine")})
    mirror = replace(
        view.mirror,
        plan=Versioned(Plan(generation=1, world="w", ranks=(), engines=engines), 1),
        assign=Versioned(Assignment(members=(ME, other), owners=owners), 1),
    )
    intents = given_up(replace(view, mirror=mirror))
    expected = GiveUpPrompt(REF, "this node has no engine any more, and the shard belongs to another peer", stale=False)
    assert [(intent.action, intent.after) for intent in intents] == ([] if case else [(expected, STRANDED_PATIENCE_S)])


def test_a_batch_of_what_was_carried_is_not_closed_before_the_weights_are_evaluated() -> None:
    refs = list(refs_in_order(RULES, at(2), ()))
    full = Offer(incarnation=ME, groups=tuple(map(group, refs[:4])))
    spec = parse_spec(DOCUMENT | {"eval": {"path": "e", "every": 2}})
    view = view_of(offer=full, spec=spec)
    assert [i.after for i in decide(view) if isinstance(i.action, MakeSeal)] == [EVALUATION_PATIENCE_S]
    part = EvalPart(version=NEW, number=0, parts=2, source="data", first=0, samples=1, correct=(1,), reward=1.0)
    going_on = replace(view, mirror=replace(view.mirror, eval_parts={"0.2/000000": Versioned(part, 1)}))
    conditions = {i.condition for v in (view, going_on) for i in decide(v) if isinstance(i.action, MakeSeal)}
    assert len(conditions) == 2, "each part that comes begins the wait anew"
    evaluations = {"0.2": Versioned(Evaluation(version=NEW, accuracy=0.5, count=1, by=ME), 1)}
    view = replace(view, mirror=replace(view.mirror, evaluations=evaluations))
    assert [i.after for i in decide(view) if isinstance(i.action, MakeSeal)] == [0.0]


def test_wait_report_names_off_policy_groups_and_in_flight_prompts() -> None:
    refs = list(refs_in_order(RULES, at(2), ()))
    named = Offer(incarnation=ME, groups=tuple(map(group, refs[1:5])), in_flight=(InFlightRef(ref=REF, version=OLD),))
    told = {wait.cause: wait.what for wait in current_waits(view_of(offer=named, in_flight={REF: OLD}))}
    assert told["groups"].endswith(
        "(oldest: 0/0/0); it was started with the weights of step 1 and would exceed the staleness limit in a later step"
    )
    assert told["in_flight"] == (
        "1 prompt of earlier steps still in flight on node-0; the oldest, 0/0/0, was started with the weights of step 1"
    )


def test_the_age_of_the_oldest_in_flight_is_a_metric_in_seconds_and_steps() -> None:
    metrics, buffer = Metrics(), GroupBuffer()
    mirror: Any = SimpleNamespace(job=SimpleNamespace(record=SimpleNamespace(full_name="j")), head=Versioned(at(3), 1))
    buffer.in_flight.begin(REF, NEW, 10.0)
    buffer.in_flight.note_version(REF, NEW)
    buffer.in_flight.begin(PromptRef(0, 1, 0), Version(0, 3), 14.0)
    versions = buffer.in_flight.versions(mirror.head.record).values()
    show_in_flight(metrics, mirror, versions, len(buffer.offers), buffer.in_flight.oldest_s(15.5))
    values = {
        name: metrics.registry.get_sample_value(f"gcore_{name}", {"job": "j"})
        for name in ("groups_in_flight", "oldest_in_flight_seconds", "oldest_in_flight_steps")
    }
    assert values == {"groups_in_flight": 2.0, "oldest_in_flight_seconds": 5.5, "oldest_in_flight_steps": 1.0}
    metrics.forget_job("j")
    assert metrics.registry.get_sample_value("gcore_oldest_in_flight_steps", {"job": "j"}) is None


def test_a_flight_that_has_no_token_yet_is_as_old_as_heads_weights_unless_its_lineage_was_cut_off() -> None:
    flights = InFlightPrompts()
    flights.begin(REF, OLD, 0.0)
    assert flights.versions(at(4)) == {REF: Version(0, 4)}
    flights.note_version(REF, NEW)
    flights.note_version(REF, Version(0, 3))
    assert flights.versions(at(4)) == {REF: NEW}
    later = PromptRef(0, 1, 0)
    flights.begin(later, Version(0, 9), 0.0)
    assert flights.versions(at(4))[later] == Version(0, 9)


class Peer:
    """What a step needs of its peer; `head` may be moved."""

    def __init__(self, staleness: int = 1) -> None:
        self.head = at(1)
        self.buffer = GroupBuffer()
        self.changes = ChangeSignal()
        self.clock = FakeClock()
        self.faults = SimpleNamespace(note=lambda what, trace="": None)
        rollout = SimpleNamespace(staleness=staleness)
        flow = SimpleNamespace(max_reissues=1)
        spec = SimpleNamespace(rollout=rollout, flow=flow, train=SPEC.train)
        self.data = SimpleNamespace(spec=spec, why_untrainable=lambda group: None)
        self.rules = replace(RULES, staleness=staleness)

    def look(self) -> Any:
        mirror = SimpleNamespace(head=SimpleNamespace(record=self.head), has_ended=False)
        return SimpleNamespace(head=self.head, me=ME, rules=self.rules, mirror=mirror, seal=None)

    def check_filtered(self, group: Group) -> None:
        return None


def made(ref: PromptRef, *versions: Version) -> Group:
    spans = tuple(VersionSpan(version, i, i + 1) for i, version in enumerate(versions))
    sample = Sample((1,) * len(spans), (0.0,) * len(spans), "a", "stop", spans)
    return Group(ref, (1,), (sample, sample), "data")


async def begun(peer: Any, answer: asyncio.Future[Group]) -> JobStep:
    """A step whose batch is over while its only production is under way."""

    async def produce() -> Group | Outcome:
        return await answer

    step = JobStep(peer, peer.head.version)
    async with step.collect() as batch:
        step.hand_out(Prompt(REF, "1", (1,), {}, "data"))
        peer.buffer.in_flight.note_version(REF, peer.head.version)
        batch.start(produce())
        await asyncio.sleep(0)
    return step


async def settled(peer: Any) -> None:
    await peer.changes.until(lambda: REF not in peer.buffer.in_flight)


async def test_a_production_outlives_its_step_and_its_group_is_held_for_a_later_one() -> None:
    peer, answer = Peer(), asyncio.get_running_loop().create_future()
    await begun(peer, answer)
    assert REF in peer.buffer.in_flight
    peer.head = at(2)
    answer.set_result(made(REF, OLD, NEW))
    await settled(peer)
    assert peer.buffer.offers[REF].versions == (OLD, NEW)
    assert peer.buffer.reissues == {}


async def test_at_staleness_0_what_is_in_flight_ends_with_its_step() -> None:
    peer, answer = Peer(staleness=0), asyncio.get_running_loop().create_future()
    await begun(peer, answer)
    assert answer.cancelled()
    assert REF not in peer.buffer.in_flight
    assert not peer.buffer.knows(REF)


async def test_a_prompt_that_is_given_up_too_often_has_failed_as_stale() -> None:
    peer = Peer()
    for tries in (1, 2):
        answer: asyncio.Future[Group] = asyncio.get_running_loop().create_future()
        await begun(peer, answer)
        peer.buffer.in_flight.give_up(REF, stale=True)
        await settled(peer)
        assert peer.buffer.reissues[REF] == tries
        assert peer.buffer.knows(REF) == (tries == 2)
    ended = peer.buffer.outcomes[REF]
    assert ended.kind == "failed"
    assert ended.reason == "stale: sampled 2 times; the last attempt exceeded rollout.staleness"


async def test_a_prompt_whose_lineage_was_cut_off_was_not_issued_in_vain() -> None:
    peer, answer = Peer(), asyncio.get_running_loop().create_future()
    await begun(peer, answer)
    peer.buffer.in_flight.give_up(REF, stale=False)
    await settled(peer)
    assert peer.buffer.reissues == {}


async def test_a_group_that_is_too_old_when_it_is_finished_counts_as_issued_in_vain() -> None:
    peer, answer = Peer(), asyncio.get_running_loop().create_future()
    await begun(peer, answer)
    peer.head = at(3)
    answer.set_result(made(REF, OLD, Version(0, 3)))
    await settled(peer)
    assert not peer.buffer.knows(REF)
    assert peer.buffer.reissues == {REF: 1}


async def test_a_group_with_tokens_of_a_cut_off_lineage_is_issued_again_and_does_not_count() -> None:
    peer, answer = Peer(), asyncio.get_running_loop().create_future()
    await begun(peer, answer)
    head = at(2)
    base = chain.base_entry(len(head.cursors.shards), "w", ChainWriter(ME, "n")).entry
    kept = base.model_copy(update={"step": 1, "cursors": head.cursors, "tally": head.tally})
    peer.head = chain.rollback_entry(head, kept, "w2", ChainWriter(ME, "m"), "died").head
    answer.set_result(made(REF, OLD, NEW))
    await settled(peer)
    assert not peer.buffer.knows(REF)
    assert peer.buffer.reissues == {}


def test_a_held_group_that_becomes_too_old_counts_as_issued_in_vain() -> None:
    buffer = GroupBuffer()
    buffer.add_group(made(REF, OLD))
    buffer.prune(RULES, at(2))
    assert buffer.knows(REF)
    buffer.prune(RULES, at(3))
    assert not buffer.knows(REF)
    assert buffer.reissues == {REF: 1}
    assert buffer.went_stale == {REF}
    buffer.count_reissue(REF)
    assert buffer.went_stale == set()


@pytest.mark.parametrize("defect", [ZeroDivisionError("a plug-in's"), SystemExit("a plug-in's")], ids=repr)
async def test_a_defect_of_a_production_that_outlived_its_step_ends_the_flow(defect: BaseException) -> None:
    peer, answer = Peer(), asyncio.get_running_loop().create_future()
    await begun(peer, answer)
    answer.set_exception(defect)
    await settled(peer)
    await asyncio.sleep(0)
    with pytest.raises(type(defect), match="a plug-in's"):
        peer.buffer.in_flight.raise_defect()


async def test_nothing_is_left_under_way_when_everything_is_given_up() -> None:
    peer, answer = Peer(), asyncio.get_running_loop().create_future()
    await begun(peer, answer)
    await peer.buffer.in_flight.give_up_all()
    assert len(peer.buffer.in_flight) == 0
    assert answer.cancelled()


class Engine(ServingEngine):
    """Serves one version, and answers with spans of others."""

    def __init__(self, *versions: Version) -> None:
        super().__init__(versions[0])
        self.versions = versions

    async def generate_each(
        self, prompts: Any, params: Any, *, seeds: Any, rid: str, growing: Any = None
    ) -> tuple[Sample, ...]:
        return made(REF, *self.versions).samples[: len(seeds)]


PARAMS = SamplingParams(temperature=1.0, max_new_tokens=4)


async def book_of(engine: Engine, tmp_path: Any) -> EnginePool:
    book = EnginePool(ChangeSignal(), timeout_s=1.0, connect=lambda *_, **__: engine)  # type: ignore[arg-type, return-value]
    await book.aim({"e": SimpleNamespace(address="h:1", node="n")})  # type: ignore[dict-item]
    await book.publish("e", engine.version, tmp_path)
    return book


async def test_an_answer_may_go_on_with_newer_weights_but_not_begin_with_older_ones(tmp_path: Any) -> None:
    began: list[Version] = []
    follow = VersionFollower(lambda: OLD, began.append)
    book = await book_of(Engine(OLD, NEW), tmp_path)
    (sample,) = await book.generate(OLD, [(1,)], PARAMS, (0,), "r", follow)
    assert [span.version for span in sample.spans] == [OLD, NEW]
    assert began == [OLD]
    book = await book_of(Engine(OLD, Version(0, 0)), tmp_path)
    with pytest.raises(EngineError, match=r"weights 0\.0, not 0\.1"):
        await book.generate(OLD, [(1,)], PARAMS, (0,), "r", follow)
    book = await book_of(Engine(OLD, NEW), tmp_path)
    with pytest.raises(EngineError, match=r"weights 0\.2, not 0\.1"):
        await book.generate(OLD, [(1,)], PARAMS, (0,), "r")


async def test_a_request_that_waits_for_a_seat_takes_what_is_served_when_there_is_one(tmp_path: Any) -> None:
    wanted, began = [OLD], []  # type: ignore[var-annotated]
    engine = Engine(NEW)
    changes = ChangeSignal()
    book = EnginePool(changes, timeout_s=1.0, connect=lambda *_, **__: engine)  # type: ignore[arg-type, return-value]
    await book.aim({"e": SimpleNamespace(address="h:1", node="n")})  # type: ignore[dict-item]
    asking = asyncio.create_task(
        book.generate(OLD, [(1,)], PARAMS, (0,), "r", VersionFollower(lambda: wanted[0], began.append))
    )
    await asyncio.sleep(0)
    assert not asking.done()
    wanted[0] = NEW
    await book.publish("e", NEW, tmp_path)
    assert len(await asking) == 1
    assert began == [NEW]

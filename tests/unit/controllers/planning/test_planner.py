"""Planning: when the policy is called, how its decision becomes a proposal, and limits for third-party policies."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import ME, running_job, stored
from told_nodes import QWEN
from told_nodes import node as told

from controllers.changes import ChangeSignal
from controllers.planning import planner as next_split
from controllers.planning.history import NAME, MovesFile, StepHistory, read_lines_by_number, read_moves
from controllers.planning.planner import POLL_S, Planner
from controllers.rules.view import JobView
from controllers.rules.world import placement_snapshot
from gcore.config import parse_spec
from gcore.ledger.records.chain import Checkpoint, Checkpoints, LogEntry, Seal, SealState
from gcore.ledger.records.cluster import ModelConfigs
from gcore.ledger.records.job import JobRecord, Leader, Move, MoveKind, Moves, NodeRecord, Pin, Plan, RankPlace
from gcore.ledger.records.slot_accounting import EngineSums, NodeAccounts, StepAccount
from gcore.testing import FakeClock
from gcore.types import Version
from placement.assign import assign_split, split_of
from placement.lending import EngineLoad, JobLoads, PoolSpeed, PoolSpeeds
from placement.moves import move_in_words, split_from, split_part
from placement.policies.base import Decision, Situation
from placement.slots import NodeSlots, ReplicaSizes, Snapshot, Split

NODES = {
    name: NodeRecord(name=name, incarnation=f"{name}.x", address="", slots=("cpu:0", "cpu:1", "cpu:2"), pid=1)
    for name in ("node-0", "node-1")
}
SNAPSHOT = Snapshot(tuple(NodeSlots(one.name, one.slots) for one in NODES.values()))
FIRST, SECOND = Split("coexisting", 4, 1, 1), Split("coexisting", 3, 2, 1)


def spec_of(**placement: Any) -> Any:
    judge = {
        "name": "tutor",
        "model": {"path": "m"},
        "template": "{{ prompt }}{{ response }}",
        "max_new_tokens": 8,
        "verdict": {"parser": "number"},
    }
    return parse_spec(
        {
            "name": "j",
            "model": {"path": "m"},
            "data": {"path": "d", "shards": 4, "window": 8},
            "flow": {"steps": 9, "groups_per_step": 4, "samples_per_prompt": 2},
            "rollout": {"max_new_tokens": 4},
            "judges": [judge],
            "reward": {"judge": "tutor"},
            "placement": {"policy": "of_tests", "train": 1, "reward": 1, **placement},
        }
    )


class Told:
    """The reported warnings."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def hold(self, topic: str, sentence: str) -> None:
        self.said.append(sentence)


class Job:
    """A job after its first step, led by this controller."""

    uid, node, me = "u", "node-0", ME

    def __init__(self, **placement: Any) -> None:
        self.changes, self.warnings = ChangeSignal(), Told()
        view = running_job()
        plan = assign_split(FIRST, None, SNAPSHOT, ("tutor",), world="w", generation=1)
        assert plan is not None
        assert view.mirror.head is not None
        head = view.mirror.head.record.model_copy(update={"step": 1, "seq": 1})
        stats = {"seconds": 3.0, "samples": 8.0}
        entry = LogEntry(kind="train", step=1, lineage=0, seq=1, parent=0, world="w", nonce="n", stats=stats)
        self.view: JobView = replace(
            view,
            spec=spec_of(**placement),
            nodes=NODES,
            mirror=replace(
                view.mirror,
                head=stored(head),
                plan=stored(plan),
                log={**view.mirror.log, 1: stored(entry)},
                leaders={"": stored(Leader(node="node-0", incarnation=ME))},
            ),
        )

    @property
    def mirror(self) -> Any:
        return self.view.mirror

    def change(self, **more: Any) -> None:
        self.view = replace(self.view, mirror=replace(self.view.mirror, **more))

    def step(self, step: int) -> None:
        """Another one is committed."""
        stats = {"seconds": 3.0}
        entry = LogEntry(
            kind="train", step=step, lineage=0, seq=step, parent=step - 1, world="w", nonce="n", stats=stats
        )
        head = self.mirror.head.record.model_copy(update={"step": step, "seq": step})
        self.change(head=stored(head), log={**self.mirror.log, step: stored(entry)})

    def look(self) -> JobView:
        return self.view

    def look_anew(self) -> None:
        """Nothing is remembered here."""


class Scripted:
    """A policy with scripted decisions."""

    def __init__(self, *decisions: Decision | Exception) -> None:
        self.decisions = list(decisions)
        self.asked: list[Situation] = []
        self.again = threading.Event()

    def plan(self, situation: Situation) -> Decision:
        self.asked.append(situation)
        self.again.set()
        found = self.decisions.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def make(policy: Scripted, job: Job) -> Planner:
        monkeypatch.setattr("controllers.planning.planner.find_policy", lambda name: lambda start: policy)
        return Planner(job, job.view.spec, FakeClock(), tmp_path)  # type: ignore[arg-type]

    async def nobody(self: Any, nodes: Any) -> JobLoads:
        return JobLoads((), {})

    monkeypatch.setattr("controllers.planning.lender.LoadPoller.loads", nobody)
    monkeypatch.setattr("controllers.planning.planner.ACCOUNTS_WAIT_S", 0.0)
    return make


async def test_the_policy_is_asked_once_after_each_commit_and_what_it_wants_is_proposed(made: Any) -> None:
    job, policy = Job(), Scripted(Decision(SECOND, "rollout was idle"), Decision(FIRST, "back"))
    planner = made(policy, job)
    await planner._turn()
    assert planner.proposal is not None
    assert planner.proposal.plan is not None
    assert split_of(planner.proposal.plan) == SECOND
    assert planner.proposal.move.reason == "rollout was idle"
    (situation,) = policy.asked
    assert (situation.now, situation.steps_left, situation.bounds.slots) == (FIRST, 8, 6)
    assert [one.step for one in situation.history] == [1]
    await planner._turn()
    assert len(policy.asked) == 1


async def test_splits_that_exceed_memory_are_not_offered_to_the_policy(made: Any) -> None:
    bounds = []
    for memory in (24.0, 400.0):
        job, policy = Job(memory="kept"), Scripted(Decision(FIRST, "it is good"))
        models = ModelConfigs(policy=QWEN, judges={"tutor": QWEN | {"num_hidden_layers": 300}})
        record = JobRecord(uid="u", name="j", spec={}, run_dir="/r", created=0.0, prompts=40, models=models)
        job.change(job=stored(record))
        there = {name: told(name, memory, memory, memory, host=2000.0) for name in NODES}
        nodes = {n: NODES[n].model_copy(update={"slots": one.slots, "facts": one.facts}) for n, one in there.items()}
        job.view = replace(job.view, nodes=nodes)
        await made(policy, job)._turn()
        bounds.append(policy.asked[0].bounds)
    little, much = bounds
    assert much.colocated
    assert not little.colocated, "the judge does not fit beside a rank"
    assert 1 in little.train_sizes


async def test_a_rollback_to_the_same_step_asks_nobody_again(made: Any) -> None:
    """Nothing more is measured, and a world of another size is formed by one."""
    job, policy = Job(), Scripted(Decision(FIRST, "well"), Decision(FIRST, "well"))
    planner = made(policy, job)
    await planner._turn()
    job.change(head=stored(job.mirror.head.record.model_copy(update={"lineage": 1, "seq": 2})))
    await planner._turn()
    assert len(policy.asked) == 1
    job.step(2)
    await planner._turn()
    assert len(policy.asked) == 2


async def test_a_pin_that_cannot_be_had_is_told_of_and_moves_nothing(made: Any) -> None:
    job = Job()
    job.change(pins={"": stored(Pin(rollout=6))})
    planner = made(Scripted(Decision(SECOND, "why")), job)
    await planner._turn()
    assert planner.proposal is None
    assert "rollout has 6, which is not possible on 6 slots" in job.warnings.said[-1]


async def test_a_split_for_which_the_ranks_lie_in_the_way_of_whole_engines_is_told_of_for_as_long_as_it_is_wanted(
    made: Any,
) -> None:
    job, sizes = Job(train=2), ReplicaSizes(4, 1)
    slots = tuple(f"cuda:{number}" for number in range(8))
    nodes = {name: one.model_copy(update={"slots": slots}) for name, one in NODES.items()}
    wide = {"engine": "sglang", "slots_per_engine": 4, "max_new_tokens": 4}
    spec = parse_spec(job.view.spec.model_dump(mode="json") | {"rollout": wide})
    ranks = tuple(RankPlace(rank=rank, node=f"node-{rank}", slot="cuda:0") for rank in range(2))
    there = Snapshot(tuple(NodeSlots(name, slots) for name in nodes))
    bare = Plan(generation=1, world="w", ranks=ranks, engines=())
    now, wanted = Split("coexisting", 8, 6, 2), Split("coexisting", 12, 2, 2)
    plan = assign_split(now, bare, there, ("tutor",), world="w", generation=2, sizes=sizes)
    assert plan is not None
    job.view = replace(job.view, spec=spec, nodes=nodes)
    job.change(plan=stored(plan))
    planner = made(Scripted(Decision(wanted, "more"), Decision(now, "well")), job)
    await planner._turn()
    assert planner.proposal is None
    (said,) = job.warnings.said
    assert "no node has enough adjacent slots for the engines" in said
    job.step(2)
    await planner._turn()
    assert job.warnings.said == [said, ""]


async def test_plan_change_by_joining_and_leaving_nodes_is_reported_as_a_move(made: Any) -> None:
    job = Job()
    planner = made(Scripted(Decision(SECOND, "well")), job)
    await planner._turn()
    before = job.mirror
    other = assign_split(SECOND, before.plan.record, SNAPSHOT, ("tutor",), world="w", generation=2)
    assert other is not None
    job.change(plan=stored(other.model_copy(update={"reason": "a; then engines on 2 slots of node-1"})))
    planner.note(before, job.mirror)
    await planner._turn()
    assert planner.move_report is not None
    move = planner.move_report.moves.newest
    assert (move.kind, move.generation, split_from(move.after)) == (MoveKind.MEND, 2, SECOND)
    assert move.reason == "engines on 2 slots of node-1"
    job.change(movings={"": stored(planner.move_report.moves)})
    await planner._turn()
    assert planner.move_report is None


async def test_a_world_of_another_size_is_only_wanted(made: Any) -> None:
    job = Job()
    saved = Checkpoint(lineage=0, step=1, seq=1, file="checkpoints/0-1", digest="d")
    job.change(checkpoints=stored(Checkpoints(entries=(saved,))))
    planner = made(Scripted(Decision(Split("coexisting", 3, 1, 2), "train was late")), job)
    await planner._turn()
    assert planner.proposal is not None
    assert planner.proposal.plan is None
    assert (planner.proposal.move.kind, planner.proposal.move.state) == (MoveKind.WORLD, "wanted")


async def test_follower_proposes_nothing_and_calls_no_policy(made: Any) -> None:
    job, policy = Job(), Scripted()
    job.change(leaders={"": stored(Leader(node="node-1", incarnation="node-1.bbbb"))})
    planner = made(policy, job)
    await planner._turn()
    assert planner.proposal is None
    assert policy.asked == []


async def test_frozen_placement_is_not_planned(made: Any) -> None:
    job, policy = Job(), Scripted()
    job.change(pins={"": stored(Pin(frozen=True))})
    planner = made(policy, job)
    await planner._turn()
    assert planner.proposal is None
    assert policy.asked == []


async def test_pin_overrides_the_policys_split(made: Any) -> None:
    job = Job()
    job.change(pins={"": stored(Pin(reward=3))})
    planner = made(Scripted(Decision(SECOND, "why")), job)
    await planner._turn()
    assert planner.proposal is not None
    assert planner.proposal.plan is not None
    assert split_of(planner.proposal.plan).reward == 3
    assert "as requested" in planner.proposal.move.reason


async def test_slow_planning_runs_outside_the_event_loop(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job, where = Job(), {}
    job.change(pins={"": stored(Pin(reward=3))})

    def noted(name: str) -> Any:
        own = getattr(next_split, name)

        def called(*args: Any, **more: Any) -> Any:
            where[name] = threading.current_thread()
            return own(*args, **more)

        return called

    for name in ("apply_pin", "assign_split", "propose_move"):
        monkeypatch.setattr(next_split, name, noted(name))
    await made(Scripted(Decision(SECOND, "why")), job)._turn()
    assert where.keys() == {"apply_pin", "assign_split", "propose_move"}
    assert threading.main_thread() not in where.values()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        pytest.param(RuntimeError("no idea"), "failed, so nothing moves: RuntimeError: no idea", id="it raises"),
        pytest.param(
            Decision(Split("coexisting", 40, 1, 1), "more"), "which is not possible on 6 slots", id="too much"
        ),
    ],
)
async def test_a_policy_that_fails_moves_nothing_and_is_told_of(made: Any, said: Any, told: str) -> None:
    job = Job()
    planner = made(Scripted(said), job)
    await planner._turn()
    assert planner.proposal is None
    assert told in job.warnings.said[0]


async def test_with_dry_run_the_same_is_told_once(made: Any) -> None:
    job = Job(dry_run=True)
    planner = made(Scripted(Decision(SECOND, "why"), Decision(SECOND, "why")), job)
    await planner._turn()
    assert planner.proposal is not None
    assert planner.proposal.plan is None
    moves = Moves().plus(planner.proposal.move)
    head = job.mirror.head.record.model_copy(update={"step": 2, "seq": 2})
    job.change(movings={"": stored(moves)}, head=stored(head))
    await planner._turn()
    assert planner.proposal is None


async def test_outcomes_of_moves_are_reported_and_written_to_the_runs_folder(made: Any, tmp_path: Path) -> None:
    job = Job()
    move = Move(generation=1, step=0, kind=MoveKind.SPLIT, before=split_part(SECOND), after=split_part(FIRST))
    job.change(movings={"": stored(Moves().plus(move))})
    planner = made(Scripted(Decision(FIRST, "it is well")), job)
    await planner._turn()
    await planner._turn()
    assert planner.move_report is not None
    assert planner.move_report.moves.moves == (move,)  # the step at whose beginning it was made paid for it
    assert [(one.since, one.step, one.reason) for one in planner.move_report.moves.stays] == [(1, 1, "it is well")]
    assert read_moves(tmp_path / NAME) == [move]
    job.change(movings={"": stored(planner.move_report.moves)})
    await planner._turn()
    assert planner.move_report is None


def test_the_file_of_moves_has_each_once_and_again_when_more_is_known(tmp_path: Path) -> None:
    move = Move(generation=2, step=1, kind=MoveKind.SPLIT, before=split_part(FIRST), after=split_part(SECOND))
    moves = Moves(moves=(move,), total=7)
    file = MovesFile(tmp_path)
    file.keep(moves)
    file.keep(moves)
    MovesFile(tmp_path).keep(moves)  # another controller leads now
    assert len((tmp_path / NAME).read_text().splitlines()) == 1
    known = move.model_copy(update={"state": "lapsed"})
    file.keep(Moves(moves=(known,), total=7))
    with (tmp_path / NAME).open("a") as more:
        more.write('{"number": 8, "mo')  # a line that was cut off
    assert list(read_lines_by_number(tmp_path / NAME)) == [6]
    assert read_moves(tmp_path / NAME) == [known]
    assert read_moves(tmp_path / "none") == []
    MovesFile(tmp_path / "no" / "folder").keep(moves)  # holds nothing up


def test_steps_are_remembered_with_their_lengths_and_what_the_books_say_later() -> None:
    job, history = Job(), StepHistory()
    before = replace(job.mirror, head=stored(job.mirror.head.record.model_copy(update={"step": 0, "seq": 0})))
    history.note(before, job.mirror, lambda: placement_snapshot(job.look()))
    (step,) = history.steps(job.mirror)
    assert (step.step, step.split, step.speed) == (1, FIRST, ())
    sums = EngineSums(active_s=10.0, running_s=40.0, tokens=400)
    book = StepAccount(
        version=Version(0, 1), began=0.0, seconds=3.0, slots=3, engines={"rollout": sums}, loads={"rollout": (sums,)}
    )
    job.change(books={"node-0": stored(NodeAccounts(node="node-0", steps=(book,)))})
    (step,) = history.steps(job.mirror)
    assert [(one.pool, one.running, one.token_s) for one in step.speed] == [("rollout", 4.0, 0.1)]
    assert [(one.step, one.seconds) for one in history.committed(job.mirror)] == [(1, 3.0)]


async def test_a_policy_that_is_cancelled_where_it_is_made_is_told_of_and_the_planner_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A task that ends with this error looks cancelled: planning would stop silently."""

    def find(name: str) -> Any:
        raise asyncio.CancelledError("in the making")

    monkeypatch.setattr("controllers.planning.planner.find_policy", find)
    monkeypatch.setattr("controllers.planning.planner.ACCOUNTS_WAIT_S", 0.0)
    job = Job()
    await Planner(job, job.view.spec, FakeClock(), tmp_path)._turn()  # type: ignore[arg-type]
    (said,) = job.warnings.said
    assert said.endswith("failed, so nothing moves: CancelledError: in the making")


async def test_several_judges_of_a_slot_count_as_one_engine_that_has_the_rows_of_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else a slot with two judges is taken for half of what it is, and each forecast of another split is off by that."""
    job, rows = Job(), []
    own = job.view.spec.judges[0]
    tutor = own.model_copy(update={"serving": own.serving.model_copy(update={"batch_slots": 8})})
    critic = tutor.model_copy(update={"name": "critic", "serving": own.serving.model_copy(update={"batch_slots": 24})})
    job.view = replace(job.view, spec=job.view.spec.model_copy(update={"judges": [tutor, critic]}))
    policy = Scripted(Decision(FIRST, "well"))

    def find(name: str) -> Any:
        return lambda start: rows.append(start.reward_rows) or policy

    monkeypatch.setattr("controllers.planning.planner.find_policy", find)
    monkeypatch.setattr("controllers.planning.planner.ACCOUNTS_WAIT_S", 0.0)
    sums = EngineSums(active_s=10.0, running_s=40.0, tokens=400, requests=8)
    pools = {"rollout": sums, "reward": sums}
    loads = dict.fromkeys(pools, (sums,))
    book = StepAccount(version=Version(0, 1), began=0.0, seconds=3.0, slots=3, engines=pools, loads=loads)
    job.change(books={"node-0": stored(NodeAccounts(node="node-0", steps=(book,)))})
    await Planner(job, job.view.spec, FakeClock(), tmp_path)._turn()  # type: ignore[arg-type]
    assert rows == [32]
    ((step,),) = (situation.history for situation in policy.asked)
    found = {one.pool: (one.running, one.token_s) for one in step.speed}
    assert found == {"rollout": (4.0, 0.1), "reward": (8.0, 0.1)}


def test_classifier_speed_is_measured_in_questions() -> None:
    """Without it their speed is unknown: nothing is lent to them, and no forecast sees that a step waits for them."""
    job, sums = Job(), EngineSums(active_s=10.0, running_s=40.0, tokens=0, requests=32)
    book = StepAccount(
        version=Version(0, 1), began=0.0, seconds=3.0, slots=6, engines={"reward": sums}, loads={"reward": (sums,)}
    )
    job.change(books={"node-0": stored(NodeAccounts(node="node-0", steps=(book,)))})
    (blind,), (step,) = (StepHistory(scores=scores).steps(job.mirror) for scores in (False, True))
    assert blind.speed == ()
    assert [(one.pool, one.running, one.token_s) for one in step.speed] == [("reward", 4.0, 1.25)]
    assert step.judged
    assert {told / step.asked_per_response for told in step.judged} == {1.0}


def test_a_controller_that_has_just_begun_takes_its_steps_from_the_log() -> None:
    job = Job()
    assert [one.step for one in StepHistory().steps(job.mirror)] == [1]


async def test_it_looks_at_once_when_there_is_another_step(made: Any) -> None:
    job, policy = Job(), Scripted(Decision(FIRST, "well"), Decision(FIRST, "well"))
    planner = made(policy, job)
    task = asyncio.create_task(planner.run())
    assert await asyncio.to_thread(policy.again.wait, 5.0)
    policy.again.clear()
    job.step(2)
    job.changes.notify()
    assert await asyncio.to_thread(policy.again.wait, POLL_S - 0.1)
    task.cancel()


def all_as(job: Job) -> JobLoads:
    """Every engine is as the plan says."""
    places = job.mirror.plan.record.engines
    return JobLoads(
        tuple(EngineLoad(p.node, p.slot, p.judge, 0, 0, ready=not p.asleep, asleep=p.asleep) for p in places), {}
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[JobLoads]:
    """What nodes tell, the newest last, once for each time they are asked."""
    told: list[JobLoads] = []

    async def tell(self: Any, nodes: Any) -> JobLoads:
        told.append(told[-1] if told else JobLoads((), {}))
        return told[-1]

    monkeypatch.setattr("controllers.planning.lender.LoadPoller.loads", tell)
    return told


async def test_without_lending_nobody_is_asked_once_the_plan_has_taken_effect(made: Any, asked: list[JobLoads]) -> None:
    job = Job(lend=False)
    planner = made(Scripted(Decision(FIRST, "well")), job)
    planner.note(replace(job.mirror, plan=None), job.mirror)
    await planner._turn()
    await planner._turn()
    assert len(asked) == 1, "no engine was known to be as the plan says"
    asked.append(all_as(job))
    await planner._turn()
    heard = len(asked)
    await planner._turn()
    await planner._turn()
    assert len(asked) == heard
    assert planner._lender.took == {}, "who came after a plan does not know how long it took"


async def test_with_lending_nodes_are_asked_for_as_long_as_the_job_runs(made: Any, asked: list[JobLoads]) -> None:
    job = Job(lend=True)
    planner = made(Scripted(Decision(FIRST, "well")), job)
    planner.note(replace(job.mirror, plan=None), job.mirror)
    asked.append(all_as(job))
    for _ in range(4):
        await planner._turn()
    assert len(asked) == 4


async def test_how_long_a_move_took_is_known_to_who_heard_it_written(made: Any, asked: list[JobLoads]) -> None:
    job = Job(lend=False)
    planner = made(Scripted(Decision(FIRST, "well")), job)
    before = job.mirror
    moved = assign_split(SECOND, before.plan.record, SNAPSHOT, ("tutor",), world="w", generation=2)
    assert moved is not None
    move = Move(generation=2, step=1, kind=MoveKind.SPLIT, before=split_part(FIRST), after=split_part(SECOND))
    await planner._turn()
    job.change(plan=stored(moved), movings={"": stored(Moves().plus(move))})
    planner.note(before, job.mirror)
    asked.append(all_as(job))
    await planner._turn()
    assert planner._lender.took == {2: 0.0}


async def test_new_leader_does_not_count_the_time_before_it_led_as_move_time(made: Any, asked: list[JobLoads]) -> None:
    """A leader that was killed leaves its lease to run out: that is no cost of the move."""
    job = Job(lend=False)
    planner = made(Scripted(Decision(SECOND, "well")), job)
    other = {"": stored(Leader(node="node-1", incarnation="node-1.bbbb"))}
    job.change(leaders=other)
    before = job.mirror
    moved = assign_split(SECOND, before.plan.record, SNAPSHOT, ("tutor",), world="w", generation=2)
    assert moved is not None
    move = Move(generation=2, step=1, kind=MoveKind.SPLIT, before=split_part(FIRST), after=split_part(SECOND))
    job.change(plan=stored(moved), movings={"": stored(Moves().plus(move))})
    planner.note(before, job.mirror)
    await planner._clock.advance(20.0)
    before = job.mirror
    job.change(leaders={"": stored(Leader(node="node-0", incarnation=ME))})
    planner.note(before, job.mirror)
    asked.append(all_as(job))
    await planner._turn()
    await planner._turn()
    assert not planner._lender.is_settling
    assert planner._lender.took == {}


async def test_a_plan_has_taken_effect_although_a_node_came_back_with_fewer_slots(
    made: Any, asked: list[JobLoads]
) -> None:
    """Else each move would be taken to cost a minute, and no loan would be worth that."""
    job = Job(lend=False)
    planner = made(Scripted(Decision(FIRST, "well")), job)
    planner.note(replace(job.mirror, plan=None), job.mirror)
    gone = next(place for place in job.mirror.plan.record.engines if place.node == "node-1")
    there = all_as(job)
    asked.append(JobLoads(tuple(one for one in there.engines if (one.node, one.slot) != (gone.node, gone.slot)), {}))
    await planner._turn()
    await planner._turn()
    assert planner._lender.is_settling
    fewer = tuple(slot for slot in NODES["node-1"].slots if slot != gone.slot)
    job.view = replace(job.view, nodes={**NODES, "node-1": NODES["node-1"].model_copy(update={"slots": fewer})})
    await planner._turn()
    assert not planner._lender.is_settling


async def test_a_loan_that_only_a_guess_forbids_is_made_once_that_has_cost_as_much(
    made: Any, asked: list[JobLoads], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the cost of changes is never measured, and a guess that is too high stays for the whole job."""
    speed = PoolSpeed(alone_s=0.05, saturating=8.0, tokens=30.0, residual=15.0, rows=8)
    monkeypatch.setattr("controllers.planning.lender.Lender._speeds", lambda self, history: PoolSpeeds(speed, speed))
    job = Job(lend=True)
    planner = made(Scripted(*[Decision(FIRST, "well")] * 9), job)
    planner.note(replace(job.mirror, plan=None), job.mirror)
    engines = tuple(
        replace(one, running=8, waiting=16) if one.judge and one.ready else one for one in all_as(job).engines
    )
    asked.append(replace(all_as(job), engines=engines))
    proposals = []
    for step in range(2, 7):
        await planner._turn()
        await planner._clock.advance(20.0)
        await planner._turn()
        proposals.append(planner.proposal)
        job.step(step)
    gains = [one.move.gain_s for one in proposals if one is not None]
    assert proposals[0] is None
    assert gains
    assert gains[0] < 10.0, "no loan was worth what changes are taken to cost"
    made_at = next(one for one in proposals if one is not None)
    assert (made_at.move.kind, made_at.move.cost_s) == (MoveKind.LEND, 10.0)
    assert made_at.move.reason.endswith("the missed gains have reached the estimate")


async def test_with_dry_run_a_loan_is_told_once_in_a_step_whatever_was_told_before_that(
    made: Any, asked: list[JobLoads], monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = PoolSpeed(alone_s=0.05, saturating=8.0, tokens=300.0, residual=150.0, rows=8)
    monkeypatch.setattr("controllers.planning.lender.Lender._speeds", lambda self, history: PoolSpeeds(speed, speed))
    job = Job(lend=True, dry_run=True)
    planner = made(Scripted(Decision(SECOND, "well")), job)
    planner.note(replace(job.mirror, plan=None), job.mirror)
    busy = (replace(one, running=8, waiting=90) if one.judge and one.ready else one for one in all_as(job).engines)
    asked.append(replace(all_as(job), engines=tuple(busy)))
    told = Moves()
    for _ in range(6):
        await planner._turn()
        await planner._clock.advance(20.0)
        if planner.proposal is not None:
            assert planner.proposal.plan is None
            told = told.plus(planner.proposal.move)
            job.change(movings={"": stored(told)})
    assert [(one.kind, one.within) for one in told.moves] == [(MoveKind.SPLIT, False), (MoveKind.LEND, True)]


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judges have so much to do that slots are lent to them, if they may be."""
    speed = PoolSpeed(alone_s=0.05, saturating=8.0, tokens=300.0, residual=150.0, rows=8)
    monkeypatch.setattr("controllers.planning.lender.Lender._speeds", lambda self, history: PoolSpeeds(speed, speed))


def with_much_to_judge(job: Job) -> JobLoads:
    loads = all_as(job)
    return replace(
        loads,
        engines=tuple(replace(one, running=8, waiting=90) if one.judge and one.ready else one for one in loads.engines),
    )


async def wanting_a_world(job: Job, planner: Planner) -> Move:
    """A policy wants one of two ranks; so much time is over since the plan was made that slots may be lent."""
    saved = Checkpoint(lineage=0, step=1, seq=1, file="checkpoints/0-1", digest="d")
    job.change(checkpoints=stored(Checkpoints(entries=(saved,))))
    planner.note(replace(job.mirror, plan=None), job.mirror)
    await planner._turn()
    assert planner.proposal is not None
    await planner._clock.advance(20.0)  # type: ignore[attr-defined]
    return planner.proposal.move


async def test_while_a_train_world_is_wanted_nothing_is_lent(made: Any, asked: list[JobLoads], behind: None) -> None:
    job = Job(lend=True)
    planner = made(Scripted(Decision(Split("coexisting", 3, 1, 2), "train was late")), job)
    asked.append(with_much_to_judge(job))
    wish = await wanting_a_world(job, planner)
    job.change(movings={"": stored(Moves().plus(wish))})
    for _ in range(3):
        await planner._turn()
        await planner._clock.advance(20.0)
        assert planner.proposal is None, "another plan would take its place"
    job.change(
        seals={2: stored(Seal.model_construct(step=2, lineage=0, groups=(), state=SealState.PARTIAL, parts=(1,)))}
    )
    job.change(checkpoints=stored(Checkpoints(entries=())))
    for _ in range(3):
        await planner._turn()
        await planner._clock.advance(20.0)
    assert planner.proposal is not None, "it cannot be formed any more before the next step"
    assert planner.proposal.move.kind is MoveKind.LEND


@pytest.mark.parametrize(
    ("wanted", "kind"),
    [
        pytest.param(Split("coexisting", 3, 1, 2), MoveKind.WORLD, id="a world"),
        pytest.param(SECOND, MoveKind.SPLIT, id="a split"),
    ],
)
async def test_proposal_stays_until_the_store_has_taken_it(
    made: Any, asked: list[JobLoads], behind: None, wanted: Split, kind: MoveKind
) -> None:
    """A store that takes longer than until the next look would be given a loan in its place, or nothing at all."""
    job = Job(lend=True)
    planner = made(Scripted(Decision(wanted, "why")), job)
    asked.append(with_much_to_judge(job))
    wish = await wanting_a_world(job, planner)
    assert wish.kind is kind
    for _ in range(3):
        await planner._turn()
        assert planner.proposal is not None
        assert planner.proposal.move == wish
    job.change(movings={"": stored(Moves().plus(wish))})
    await planner._turn()
    assert planner.proposal is None or planner.proposal.move != wish


async def test_lent_slots_return_while_ranks_train(made: Any, asked: list[JobLoads]) -> None:
    job = Job(lend=True)
    lent = assign_split(SECOND, job.mirror.plan.record, SNAPSHOT, ("tutor",), world="w", generation=2)
    assert lent is not None
    move = Move(generation=2, step=1, kind=MoveKind.LEND, before=split_part(FIRST), after=split_part(SECOND))
    lent = lent.model_copy(update={"lent_from": split_part(FIRST)})
    job.change(plan=stored(lent), movings={"": stored(Moves().plus(move))})
    planner = made(Scripted(Decision(SECOND, "well")), job)
    planner._decided = (0, 1)
    asked.append(all_as(job))
    await planner._turn()
    assert planner.proposal is None, "the batch is open, and nothing more is known"
    assert not planner._is_news()
    job.change(seals={2: stored(Seal.model_construct(step=2, lineage=0, groups=(), state=SealState.PARTIAL))})
    assert not planner._is_news(), "only a part of it is closed"
    job.change(seals={2: stored(Seal.model_construct(step=2, lineage=0, groups=(), state=SealState.SEALED))})
    assert planner._is_news()
    await planner._turn()
    assert planner.proposal is not None
    assert planner.proposal.plan is not None
    assert planner.proposal.move.kind is MoveKind.RETURN
    assert split_of(planner.proposal.plan) == FIRST


async def test_while_who_holds_a_rank_is_away_nobody_is_asked(made: Any) -> None:
    """Or the policy would plan on a split without a train world, and have another formed though this one is alive."""
    job, policy = Job(), Scripted(Decision(FIRST, "well"))
    (rank,) = job.mirror.plan.record.ranks
    job.view = replace(job.view, nodes={name: one for name, one in NODES.items() if name != rank.node})
    planner = made(policy, job)
    await planner._turn()
    assert policy.asked == []
    assert planner.proposal is None


async def test_new_leader_does_not_decide_again_on_a_decided_step(made: Any) -> None:
    job, policy = Job(), Scripted(Decision(SECOND, "again"), Decision(SECOND, "now"))
    move = Move(generation=1, step=1, seq=1, kind=MoveKind.SPLIT, before=split_part(SECOND), after=split_part(FIRST))
    job.change(movings={"": stored(Moves().plus(move))})
    planner = made(policy, job)
    await planner._turn()
    assert policy.asked == []
    job.step(2)
    await planner._turn()
    assert len(policy.asked) == 1


@pytest.mark.parametrize("staleness", [0, 1])
async def test_lent_slots_return_when_a_pin_is_set(made: Any, staleness: int) -> None:
    job = Job(lend=True)
    spec = job.view.spec
    spec = spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"staleness": staleness})})
    lent = assign_split(SECOND, job.mirror.plan.record, SNAPSHOT, ("tutor",), world="w", generation=2)
    assert lent is not None
    job.change(
        plan=stored(lent.model_copy(update={"lent_from": split_part(FIRST)})), pins={"": stored(Pin(frozen=True))}
    )
    job.view = replace(job.view, spec=spec)
    planner = made(Scripted(), job)
    planner._decided = Version(0, 1)
    await planner._turn()
    assert planner.proposal is not None
    assert planner.proposal.plan is not None
    assert split_of(planner.proposal.plan) == FIRST


async def test_moves_that_were_written_just_before_the_end_stand_in_the_runs_folder_too(
    made: Any, tmp_path: Path
) -> None:
    job = Job()
    first = Move(generation=1, step=1, kind=MoveKind.SPLIT, before=split_part(SECOND), after=split_part(FIRST))
    job.change(movings={"": stored(Moves().plus(first))})
    planner = made(Scripted(), job)
    task = asyncio.create_task(planner.run())
    while planner._kept is None:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0.01)
    last = first.model_copy(update={"generation": 2, "kind": MoveKind.RETURN})
    job.change(movings={"": stored(Moves().plus(first).plus(last))})
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert read_moves(tmp_path / NAME) == [first, last]


async def test_outcome_of_the_last_step_is_in_the_runs_folder_after_the_planner_stops(
    made: Any, tmp_path: Path
) -> None:
    job = Job()
    move = Move(generation=1, step=0, kind=MoveKind.SPLIT, before=split_part(SECOND), after=split_part(FIRST))
    job.change(movings={"": stored(Moves().plus(move))})
    planner = made(Scripted(Decision(FIRST, "well")), job)
    task = asyncio.create_task(planner.run())
    while planner._kept is None:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0.01)
    before = job.mirror
    job.step(2)
    planner.note(before, job.mirror)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    (told,) = read_moves(tmp_path / NAME)
    assert told.outcome is not None
    assert (told.outcome.steps, told.outcome.step_s) == (1, 3.0)


async def test_a_world_that_was_lost_is_told_of_with_why_and_what_had_to_be_made_again(made: Any) -> None:
    """Although the slots are the same: otherwise the long step would have no explanation."""
    job = Job()
    planner = made(Scripted(Decision(FIRST, "well"), Decision(FIRST, "well")), job)
    await planner._turn()
    job.step(2)
    before = job.mirror
    plan = before.plan.record.model_copy(update={"generation": 2, "world": "x"})
    entry = LogEntry(
        kind="rollback", step=1, lineage=1, seq=3, parent=1, world="x", nonce="n", reason="rank 0 on node-1 is gone"
    )
    head = before.head.record.model_copy(update={"step": 1, "seq": 3, "lineage": 1, "world": "x"})
    job.change(plan=stored(plan), head=stored(head), log={**before.log, 3: stored(entry)})
    planner.note(before, job.mirror)
    await planner._turn()
    assert planner.move_report is not None
    move = planner.move_report.moves.newest
    assert (move.kind, move.before, move.after) == (MoveKind.MEND, split_part(FIRST), split_part(FIRST))
    assert move_in_words(move) == (
        f"nodes or workers came or went, and they were placed again, {FIRST} as before, because "
        "rank 0 on node-1 is gone; 1 step had to be repeated"
    )

"""Resized worlds and engines for new nodes: decisions and their criteria."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.job.effects import plan_world
from controllers.rules import world as forming
from controllers.rules.actions import ChangePlan, Intent, ReportCopies, Rollback
from controllers.rules.decide import decide
from controllers.rules.view import JobView, RankView
from controllers.rules.waits import current_waits
from controllers.rules.world import (
    AWAY_S,
    HOLD_S,
    MAX_TRIES_FROM_COPIES,
    STOCK_PATIENCE_S,
    growth_delay_s,
    state_at_hand,
)
from gcore.config import parse_spec
from gcore.data.order import shard_lengths
from gcore.ledger import chain
from gcore.ledger.chain import ChainWriter
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import (
    Checkpoint,
    Checkpoints,
    HeldState,
    LogEntry,
    Member,
    NodeCopies,
    SealedGroup,
    SealState,
    WorldState,
)
from gcore.ledger.records.job import (
    EnginePlace,
    JobPhase,
    JobStatus,
    ModelFetch,
    NodeRecord,
    Plan,
    RankClaim,
    RankPlace,
)
from gcore.ledger.selection import SealStep, StreamRules
from gcore.ledger.transactions import Versioned
from gcore.store.keys import JobKeys
from gcore.types import PromptRef, Token, Version
from gcore.worker.records import WorkerRecord
from placement.placer import GrowthMeasurements, fill_plan, first_plan, worth_forming
from placement.request import PlacementRequest
from placement.slots import NodeSlots, Snapshot

KEYS = JobKeys("u")
STATE = WorldState(world="w", lineage=0, step=2, attempt=1, shards=2)
SPEC: dict[str, Any] = {
    "name": "j",
    "model": {"path": "m"},
    "data": {"path": "d", "shards": 2},
    "flow": {"steps": 1000},
    "rollout": {"max_new_tokens": 4},
}


def stored(record: Any) -> Versioned[Any]:
    return Versioned(record, 5)


def node(name: str) -> NodeRecord:
    return NodeRecord(name=name, incarnation=f"{name}.x", address="a:1", slots=("cpu:0",), pid=1)


def stock(name: str, *shards: int, seq: int = 2, by: str = "", state: WorldState = STATE) -> NodeCopies:
    return NodeCopies(node=name, by=by or f"{name}.x", seq=seq, held=(HeldState(state=state, shards=shards),))


def view(*stocks: NodeCopies, nodes: int = 2, lost: bool = True, **more: Any) -> JobView:
    """Two members, head at step 2; of the world's two ranks the second is gone, if `lost`."""
    base = chain.base_entry(2, "w", ChainWriter("a", "n"))
    head = base.head.model_copy(update={"seq": 2, "parent": 1, "step": 2})
    stats = {"train_s": 10.0, "start_seconds": 5.0}
    entry = LogEntry(
        seq=2,
        parent=1,
        kind="train",
        lineage=0,
        step=2,
        world="w",
        nonce="n",
        token=Token(0, 2, 1),
        stats=stats,
    )
    names = [f"node-{i}" for i in range(2)]
    plan = Plan(
        generation=1,
        world="w",
        ranks=tuple(RankPlace(rank=i, node=name, slot="cpu:0") for i, name in enumerate(names)),
        engines=tuple(EnginePlace(node=name, slot="cpu:0") for name in names),
    )
    running = {
        f"t{i}": WorkerRecord(
            instance=f"t{i}",
            node=name,
            role="train",
            job_uid="u",
            slot="cpu:0",
            pid=1,
            pid_started=1,
            state="serving",
            address="h:1",
            world="w",
            rank=i,
        )
        for i, name in enumerate(names)
    }
    mirror = JobMirror(
        KEYS,
        status=stored(JobStatus(phase=JobPhase.RUNNING)),
        head=stored(head),
        log={2: stored(entry)},
        plan=stored(plan),
        checkpoints=stored(Checkpoints(entries=(Checkpoint(lineage=0, step=0, seq=0, file=""),))),
        members={
            f"{n}.x": stored(Member(incarnation=f"{n}.x", node=n, address="a:1"))
            for n in (f"node-{i}" for i in range(max(nodes, 2)))
        },
        claims={KEYS.world_rank("w", i): stored(RankClaim(instance=f"t{i}")) for i in range(2)},
        copies={one.node: stored(one) for one in stocks},
    )
    rules = StreamRules(shard_lengths(400, 2), 8, 2, steps=1000)
    there = {f"node-{i}": node(f"node-{i}") for i in range(nodes)}
    workers = {"t0": running["t0"]} if lost else running
    made = JobView(parse_spec(SPEC), rules, mirror, "node-0.x", "node-0", there, workers)
    return replace(made, **more)


def intents(seen: JobView, kind: type) -> list[Intent]:
    return [intent for intent in decide(seen) if isinstance(intent.action, kind)]


def with_mirror(seen: JobView, **changes: Any) -> JobView:
    return replace(seen, mirror=replace(seen.mirror, **changes))


class TestAWorldThatIsLost:
    """Each node says what lies in its memory; then the new world goes on from there, or from a checkpoint."""

    def test_copies_are_not_reported_while_the_world_is_well(self) -> None:
        assert intents(view(lost=False), ReportCopies) == []

    def test_each_node_says_once_what_it_has_for_each_head_and_each_life_of_its_controller(self) -> None:
        assert [intent.action for intent in intents(view(), ReportCopies)] == [ReportCopies(2)]
        assert intents(view(stock("node-0", 0)), ReportCopies) == []
        assert intents(view(stock("node-0", 0, seq=1)), ReportCopies), "head has moved since"
        assert intents(view(stock("node-0", 0, by="node-0.dead")), ReportCopies), "it is under a lease that ends"

    def test_a_rollback_waits_a_little_for_nodes_that_have_not_said_what_they_have(self) -> None:
        (early,) = intents(view(stock("node-0", 0)), Rollback)
        (heard,) = intents(view(stock("node-0", 0), stock("node-1", 1)), Rollback)
        assert early.after >= STOCK_PATIENCE_S
        assert heard.after < STOCK_PATIENCE_S
        assert early.condition == heard.condition, "the wait is not begun anew"

    def test_heads_state_is_at_hand_when_the_nodes_of_the_new_world_have_all_of_it(self) -> None:
        seen = view(stock("node-0", 0), stock("node-1", 1))
        assert state_at_hand(seen, frozenset({"node-0", "node-1"})) == STATE
        assert state_at_hand(seen, frozenset({"node-0"})) is None

    @pytest.mark.parametrize(
        "strange",
        [
            stock("node-1", 1, seq=1),
            stock("node-1", 1, state=STATE.model_copy(update={"step": 1})),
            stock("node-1", 1, state=STATE.model_copy(update={"step": 3})),
            stock("node-1", 1, state=STATE.model_copy(update={"world": "zombie"})),
        ],
        ids=["of an older look", "of the step before", "of a step that was not committed", "of another world"],
    )
    def test_copies_of_another_state_than_head_do_not_count(self, strange: NodeCopies) -> None:
        assert state_at_hand(view(stock("node-0", 0), strange), frozenset({"node-0", "node-1"})) is None

    def test_after_some_worlds_that_died_a_checkpoint_is_gone_back_to(self) -> None:
        seen = view(stock("node-0", 0, 1, seq=9))
        log = dict(seen.mirror.log)
        for number in range(MAX_TRIES_FROM_COPIES):
            seq = 3 + number
            log[seq] = stored(
                LogEntry(
                    seq=seq,
                    parent=seq - 1,
                    kind="rollback",
                    lineage=seq,
                    step=2,
                    world="w",
                    nonce="n",
                    state=STATE,
                )
            )
            head = seen.head.model_copy(update={"seq": seq, "lineage": seq})
            seen = with_mirror(
                seen, head=stored(head), log=log, copies={"node-0": stored(stock("node-0", 0, 1, seq=seq))}
            )
            wanted = STATE if number < MAX_TRIES_FROM_COPIES - 1 else None
            assert state_at_hand(seen, frozenset({"node-0"})) == wanted

    def test_a_job_without_copies_takes_no_stock_and_waits_for_none(self) -> None:
        off = parse_spec(SPEC | {"train": {"copies_gb": 0}})
        assert intents(view(spec=off), ReportCopies) == []
        (intent,) = intents(view(spec=off), Rollback)
        assert intent.after < STOCK_PATIENCE_S


class TestANodeThatComes:
    """Engines at once; a larger world between two steps, if that is worth it."""

    SEEN = view(stock("node-0", 0, 1), stock("node-1", 1, 0), stock("node-2"), nodes=3, lost=False)

    def test_it_gets_engines_and_the_world_stays(self) -> None:
        ((intent),) = intents(self.SEEN, ChangePlan)
        assert isinstance(intent.action, ChangePlan)
        new, old = intent.action.plan, self.SEEN.mirror.plan
        assert old is not None
        assert [place.node for place in new.engines] == ["node-0", "node-1", "node-2"]
        assert (new.ranks, new.world, new.generation) == (old.record.ranks, "w", 2)

    def test_plan_with_engines_on_every_node_is_not_changed(self) -> None:
        assert intents(view(lost=False), ChangePlan) == []
        assert intents(view(lost=False, nodes=1), ChangePlan) == []

    def test_a_judge_whose_node_stays_away_is_moved_after_a_while(self) -> None:
        judge = {"name": "j", "model": {"path": "p"}, "template": "{{ response }}", "serving": {"replicas": 1}}
        spec = parse_spec(SPEC | {"judges": [judge], "reward": {"judge": "j"}})
        seen = view(lost=False, spec=spec)
        assert seen.mirror.plan is not None
        plan = seen.mirror.plan.record
        away = EnginePlace(node="node-7", slot="cpu:0", judge="j")
        seen = with_mirror(seen, plan=stored(plan.model_copy(update={"engines": (*plan.engines, away)})))
        (intent,) = intents(seen, ChangePlan)
        assert intent.after == AWAY_S
        assert isinstance(intent.action, ChangePlan)
        assert [p.node for p in intent.action.plan.engines if p.judge] == ["node-0"]
        assert intents(replace(seen, nodes={**seen.nodes, "node-7": node("node-7")}), ChangePlan) == []

    def test_the_world_grows_between_two_steps_from_exactly_heads_state(self) -> None:
        (intent,) = intents(self.SEEN, Rollback)
        assert isinstance(intent.action, Rollback)
        assert intent.action.between_steps
        assert "3 ranks instead of 2" in intent.action.reason

    def test_it_does_not_grow_while_a_step_is_trained(self) -> None:
        head = self.SEEN.head
        group = SealedGroup(
            ref=PromptRef(0, 0, 0),
            digest="d",
            prompt_tokens=1,
            response_tokens=(1,),
            versions=(Version(0, 2),),
            holder="node-0.x",
        )
        seal = chain.seal_slot(None, head, SealStep((group,), ()), world_size=2, mini_batches=1, sealer="a")
        for state, grows in ((SealState.SEALED, True), (SealState.READY, False)):
            seen = with_mirror(self.SEEN, seals={3: stored(seal.model_copy(update={"state": state}))})
            assert bool(intents(seen, Rollback)) == grows
        held = RankView(0, holding=seal.token, held={"d": frozenset({0})})
        waiting = replace(with_mirror(self.SEEN, seals={3: stored(seal)}), ranks={0: held, 1: replace(held, rank=1)})
        assert any("a larger train world will be formed" in wait.what for wait in current_waits(waiting))

    def test_a_batch_waits_a_little_for_a_larger_world_and_not_where_none_can_be_formed_now(self) -> None:
        assert growth_delay_s(self.SEEN) == HOLD_S
        nothing = {name: stored(stock(name)) for name in ("node-0", "node-1", "node-2")}
        assert growth_delay_s(with_mirror(self.SEEN, copies=nothing)) == 0.0, "it would go back to a checkpoint"
        assert growth_delay_s(with_mirror(self.SEEN, copies={})) == HOLD_S, "nobody has said yet what there is"
        assert growth_delay_s(view(lost=False)) == 0.0

    def test_it_does_not_grow_when_a_step_would_be_lost_by_it(self) -> None:
        seen = view(stock("node-0", 0), stock("node-1", 0), nodes=3, lost=False)
        assert intents(seen, Rollback) == []
        saved = Checkpoint(lineage=0, step=2, seq=2, file="checkpoints/0-2")
        known = with_mirror(seen, checkpoints=stored(Checkpoints(entries=(saved,))))
        assert intents(known, Rollback), "a checkpoint of head's step does as well"

    def test_it_does_not_grow_twice_without_a_step_between(self) -> None:
        on = chain.reform_entry(self.SEEN.head, STATE, "w2", ChainWriter("a", "m"), "3 ranks instead of 2")
        log = {**self.SEEN.mirror.log, 3: stored(on.entry)}
        assert forming.growth_reason(with_mirror(self.SEEN, head=stored(on.head), log=log)) == ""

    def test_it_does_not_grow_onto_a_node_that_does_not_work_on_the_job_yet(self) -> None:
        members = {name: one for name, one in self.SEEN.mirror.members.items() if name != "node-2.x"}
        assert intents(with_mirror(self.SEEN, members=members), Rollback) == []

    def test_a_world_is_not_placed_on_a_node_that_still_fetches_the_model(self) -> None:
        members = {name: one for name, one in self.SEEN.mirror.members.items() if name != "node-2.x"}
        fetch = ModelFetch(node="node-2", path="hf://a/b", done=1, total=9)
        seen = with_mirror(self.SEEN, members=members, fetches={"node-2": stored(fetch)})
        assert {rank.node for rank in plan_world(seen, "w2", generation=2).ranks} == {"node-0", "node-1"}
        done = with_mirror(seen, fetches={"node-2": stored(fetch.model_copy(update={"done": 9}))})
        assert {rank.node for rank in plan_world(done, "w2", generation=2).ranks} == {"node-0", "node-1", "node-2"}

    def test_a_job_whose_number_of_ranks_is_given_does_not_grow(self) -> None:
        fixed = parse_spec(SPEC | {"train": {"ranks": 2}})
        assert intents(replace(self.SEEN, spec=fixed), Rollback) == []


class TestWhatALargerWorldIsWeighedBy:
    """The seconds that it saves in the steps that are left, against the seconds that its start takes."""

    @pytest.mark.parametrize(
        ("growth", "worth"),
        [
            pytest.param(
                GrowthMeasurements(2, 3, train_s=10.0, start_s=5.0, steps_left=100), True, id="many steps left"
            ),
            pytest.param(GrowthMeasurements(2, 3, train_s=10.0, start_s=5.0, steps_left=2), False, id="few steps left"),
            pytest.param(
                GrowthMeasurements(2, 3, train_s=0.01, start_s=60.0, steps_left=100), False, id="training is short"
            ),
            pytest.param(
                GrowthMeasurements(3, 3, train_s=10.0, start_s=1.0, steps_left=100), False, id="as large already"
            ),
            pytest.param(GrowthMeasurements(3, 2, train_s=10.0, start_s=1.0, steps_left=100), False, id="smaller"),
            pytest.param(
                GrowthMeasurements(2, 3, train_s=None, start_s=5.0, steps_left=100), False, id="no step measured"
            ),
            pytest.param(
                GrowthMeasurements(2, 3, train_s=10.0, start_s=None, steps_left=100), False, id="no start measured"
            ),
            pytest.param(
                GrowthMeasurements(2, 3, train_s=10.0, start_s=5.0, steps_left=None), True, id="its end is not known"
            ),
        ],
    )
    def test_it_is_worth_it_only_when_it_saves_well_more_than_it_costs(
        self, growth: GrowthMeasurements, worth: bool
    ) -> None:
        assert bool(worth_forming(growth)) == worth

    @given(
        st.integers(1, 8),
        st.integers(1, 8),
        st.floats(0, 100),
        st.floats(0.01, 100),
        st.integers(0, 1000),
    )
    def test_more_steps_left_never_make_it_less_worth(
        self, now: int, wanted: int, train_s: float, start_s: float, left: int
    ) -> None:
        few = worth_forming(GrowthMeasurements(now, wanted, train_s=train_s, start_s=start_s, steps_left=left))
        many = worth_forming(GrowthMeasurements(now, wanted, train_s=train_s, start_s=start_s, steps_left=left + 1))
        assert not few or many


SLOTS = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 3), min_size=1)


@given(SLOTS, SLOTS)
def test_every_present_slot_keeps_one_engine_and_the_world_stays_when_nodes_change(
    before: dict[str, int], after: dict[str, int]
) -> None:
    def there(nodes: dict[str, int]) -> Snapshot:
        return Snapshot(tuple(NodeSlots(name, tuple(f"cpu:{i}" for i in range(n))) for name, n in nodes.items()))

    old = first_plan(there(before), PlacementRequest(), world="w", generation=1)
    new = fill_plan(old, there(after), PlacementRequest()) or old
    places = [(place.node, place.slot) for place in new.engines]
    assert len(places) == len(set(places))
    assert {(name, f"cpu:{i}") for name, n in after.items() for i in range(n)} <= set(places)
    assert {(place.node, place.slot) for place in old.engines} <= set(places)
    assert (new.world, new.ranks) == (old.world, old.ranks)
    assert fill_plan(new, there(after), PlacementRequest()) is None

"""The first placement of a job with dynamic placement, and its explanation for users."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from builders import running_job, stored
from hypothesis import given
from hypothesis import strategies as st
from mapped_jobs import JUDGE, spec
from told_nodes import QWEN, node

from controllers.cli.view.placement import history_table, placement_story
from controllers.job.executor import apply_action
from controllers.rules.actions import StartJob
from gcore.config import JobSpec
from gcore.ledger.records.cluster import ModelConfigs
from gcore.ledger.records.job import JobPhase, JobRecord, JobStatus, MoveKind, Moves, NodeRecord, Pin, Plan
from gcore.ledger.transactions import Transaction, TxnKind, TxnOutcome, TxnReport
from gcore.store.types import Put
from gcore.testing import FakeClock
from placement.assign import split_of
from placement.initial import make_initial_plan
from placement.moves import CommittedStep, add_outcomes
from placement.placer import find_bounds, movable_request
from placement.slots import NodeSlots, Snapshot, Split, feasible

LARGE = QWEN | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
SMALL_MODELS = ModelConfigs(policy=QWEN, judges={"right": QWEN})
LARGE_MODELS = ModelConfigs(policy=LARGE, judges={"right": QWEN})


def job(**placement: Any) -> JobSpec:
    return spec(judges=[JUDGE], reward={"judge": "right"}, placement={"policy": "dynamic", **placement})


def gpus(count: int = 8, memory: float = 79.6, nodes: int = 1) -> Snapshot:
    return Snapshot(tuple(node(f"n{i}", *[memory] * count, host=2000.0) for i in range(nodes)))


def test_the_way_that_is_predicted_to_take_least_is_what_the_job_begins_with_and_the_plan_says_so() -> None:
    found = make_initial_plan(gpus(), job(), SMALL_MODELS)
    split = split_of(found.plan)
    assert split == found.beginning.split
    assert found.plan.reason.startswith(f"{split} of 8 slots on 1 node; nothing is measured yet: of ")
    assert " ways that fit it is predicted to take least, " in found.plan.reason
    assert found.beginning.expected_s is not None
    assert found.beginning.warning == ""


def test_where_all_models_do_not_fit_on_a_slot_together_pools_have_slots_of_their_own() -> None:
    tight, roomy = (
        make_initial_plan(gpus(memory=memory), job(memory="kept"), LARGE_MODELS) for memory in (80.0, 1000.0)
    )
    assert split_of(roomy.plan).mode == "colocated"
    assert split_of(tight.plan).mode == "coexisting"
    limits = find_bounds(gpus(memory=80.0), movable_request(job(memory="kept"), LARGE_MODELS))
    assert not limits.colocated, "and it is no choice for the policy later"


@pytest.mark.parametrize(
    ("snapshot", "models", "why"),
    [
        pytest.param(gpus(), None, "the configurations of the job's models were not recorded", id="a job of before"),
        pytest.param(
            Snapshot((NodeSlots("n0", ("cuda:0", "cuda:1", "cuda:2")),)),
            SMALL_MODELS,
            "n0 reports no memory",
            id="a node of the version before",
        ),
        pytest.param(
            Snapshot((*gpus().nodes, NodeSlots("old", ("cuda:0",)))), SMALL_MODELS, "old reports no memory", id="mixed"
        ),
    ],
)
def test_where_something_is_not_known_a_job_begins_with_all_slots_in_turn_and_says_what(
    snapshot: Snapshot, models: ModelConfigs | None, why: str
) -> None:
    found = make_initial_plan(snapshot, job(), models)
    assert split_of(found.plan).mode == "colocated"
    assert found.plan.reason.endswith(f"; nothing is measured yet, and nothing can be predicted: {why}")
    assert found.beginning.warning == ""


def test_of_devices_that_are_not_known_the_first_way_that_fits_is_taken() -> None:
    nodes = Snapshot((node("n0", *[80.0] * 8, device="NVIDIA X", host=2000.0),))
    found = make_initial_plan(nodes, job(memory="kept"), LARGE_MODELS)
    assert "the speed of NVIDIA X is not known: " in found.plan.reason
    assert split_of(found.plan).mode == "coexisting", "all slots in turn would not fit"
    assert found.beginning.expected_s is None


def test_explicit_placement_is_not_searched() -> None:
    said = make_initial_plan(gpus(), job(train=2, reward=3), SMALL_MODELS)
    assert split_of(said.plan) == Split("coexisting", 3, 3, 2)
    assert said.plan.reason.endswith("; the spec sets it")
    fixed = make_initial_plan(gpus(), job(), SMALL_MODELS, pin=Pin(train=2))
    assert len(fixed.plan.ranks) == 2
    assert fixed.plan.reason.endswith("; train has 2, as requested")


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        pytest.param(Pin(rollout=3), "rollout has 3, as requested", id="one pool"),
        pytest.param(Pin(reward=4, train=2), "reward has 4, train has 2, as requested", id="other than the spec says"),
        pytest.param(Pin(rollout=9), "rollout has 9, which is not possible now", id="more than there is"),
    ],
)
def test_a_job_begins_with_what_a_person_fixed_and_only_then_says_so(pin: Pin, said: str) -> None:
    for asked in (job(), job(train=1, reward=2)):
        found = make_initial_plan(gpus(), asked, SMALL_MODELS, pin=pin)
        assert found.plan.reason.endswith(f"; {said}")
        assert (pin.off(split_of(found.plan)) == 0) == said.endswith("as requested")


def test_a_job_in_which_nothing_is_to_move_begins_with_what_is_predicted_to_be_best() -> None:
    frozen, free = (make_initial_plan(gpus(), job(), SMALL_MODELS, pin=Pin(frozen=frozen)) for frozen in (True, False))
    assert frozen.plan == free.plan
    assert frozen.beginning.expected_s is not None


def test_a_job_that_fits_nowhere_begins_all_the_same_and_says_who_exceeds_what() -> None:
    found = make_initial_plan(gpus(memory=8.0), job(), LARGE_MODELS)
    assert found.plan.ranks
    assert found.beginning.warning.startswith("by estimate no placement fits; the closest is co-")
    assert " exceeds 8 GiB on " in found.beginning.warning or " exceed 8 GiB on " in found.beginning.warning


def test_an_engine_that_would_take_more_for_its_cache_than_there_is_is_warned_of() -> None:
    asked = spec(placement={"policy": "dynamic", "memory": "kept"}, rollout={"batch_slots": 4096}, train={"ranks": 1})
    found = make_initial_plan(gpus(count=1, memory=30.0), asked, ModelConfigs(policy=QWEN))
    assert found.beginning.expected_s is not None
    said = re.fullmatch(
        r"rollout has room for a cache of (\d+) tokens and by default takes more memory than that: set rollout\.cache_tokens: (\d+)",
        found.beginning.warning,
    )
    assert said is not None, found.beginning
    told = make_initial_plan(
        gpus(count=1, memory=30.0),
        asked.model_copy(update={"rollout": asked.rollout.model_copy(update={"cache_tokens": int(said[1])})}),
        ModelConfigs(policy=QWEN),
    )
    assert told.beginning.warning == "", "and as it was told, so it fits"


sizes = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@given(sizes, st.sampled_from([4.0, 24.0, 80.0, 400.0]), st.sampled_from([SMALL_MODELS, LARGE_MODELS]), st.booleans())
def test_first_split_is_one_that_the_policy_may_choose(
    slots: list[int], memory: float, models: ModelConfigs, kept: bool
) -> None:
    nodes = Snapshot(tuple(node(f"n{i}", *[memory] * n, host=2000.0) for i, n in enumerate(slots)))
    asked = job(memory="kept") if kept else job()
    found = make_initial_plan(nodes, asked, models)
    assert found.plan == make_initial_plan(nodes, asked, models).plan
    assert split_of(found.plan) in set(feasible(find_bounds(nodes, movable_request(asked, models))))


class Writing:
    """A ledger that keeps its writes, and reports a win or the given outcome."""

    def __init__(self, outcome: TxnOutcome) -> None:
        self.made: list[TxnKind] = []
        self.written: dict[str, bytes] = {}
        self._outcome = outcome

    async def run(self, txn: Transaction) -> TxnReport:
        self.made.append(txn.kind)
        self.written |= {write.key: write.value for write in txn.writes if isinstance(write, Put)}
        return TxnReport(self._outcome, 9)


async def started(asked: JobSpec, memory: float, outcome: TxnOutcome = TxnOutcome.WON) -> tuple[Writing, list[str]]:
    """A job that is started on eight GPUs: its writes, and the messages for users."""
    record = JobRecord(uid="u", name="j", spec={}, run_dir="/r", created=0.0, prompts=40, models=LARGE_MODELS)
    seen = running_job()
    place = gpus(memory=memory).nodes[0]
    nodes = {
        "n0": NodeRecord(name="n0", incarnation="n0.x", address="", slots=place.slots, pid=1, facts=place.facts),
    }
    mirror = replace(
        seen.mirror, job=stored(record), status=stored(JobStatus(phase=JobPhase.PENDING)), head=None, plan=None
    )
    ledger, told = Writing(outcome), list[str]()
    hands: Any = type("Hands", (), {})()
    hands.ledger, hands.clock, hands.tell = ledger, FakeClock(), lambda topic, sentence: told.append(sentence)
    done = await apply_action(StartJob(), replace(seen, spec=asked, nodes=nodes, mirror=mirror), hands)
    assert (done.outcome, ledger.made) == (outcome, [TxnKind.START])
    return ledger, told


async def test_first_placement_and_its_reason_are_the_first_move() -> None:
    ledger, told = await started(job(), 79.6)
    moves = Moves.decode(next(value for key, value in ledger.written.items() if key.endswith("placement/moves")))
    plan = Plan.decode(next(value for key, value in ledger.written.items() if key.endswith("/plan")))
    (move,) = moves.moves
    assert (move.kind, move.generation, move.step, moves.total) == (MoveKind.BEGIN, plan.generation, 0, 1)
    assert plan.reason.endswith(move.reason)
    assert told == []
    steps = [CommittedStep(step, step, seconds) for step, seconds in ((1, 90.0), (2, 30.0), (3, 32.0))]
    known = add_outcomes(moves, steps, {}, 3, plan)
    lines = "\n".join(placement_story("j", None, known.moves, 0))
    assert f"at the start: began with {split_of(plan)}, because nothing is measured yet: of " in lines
    assert "Expected: a step was to take " in lines
    assert "Measured: the 2 steps after it took 31.0 s each; this is " in lines
    assert len(history_table(known.moves).rows) == 1


async def test_a_job_whose_slots_do_not_move_has_no_move_to_begin_with() -> None:
    ledger, told = await started(spec(), 79.6)
    assert not any(key.endswith("placement/moves") for key in ledger.written)
    assert told == []


@pytest.mark.parametrize("outcome", [TxnOutcome.WON, TxnOutcome.STALE])
async def test_placement_that_does_not_fit_is_reported_by_the_starter_of_the_job(outcome: TxnOutcome) -> None:
    _, told = await started(job(), 8.0, outcome)
    assert [sentence.partition(";")[0] for sentence in told] == (
        ["by estimate no placement fits"] if outcome is TxnOutcome.WON else []
    )

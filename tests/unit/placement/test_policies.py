"""Every policy returns valid splits, is deterministic, and stays when nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.forecast import Forecast, LengthProfile, PoolLimits, drain_times, shapes_of
from placement.laws import (
    DecodeLaw,
    PaceTracker,
    TrainLaw,
    fit_decode_law,
    fit_train_law,
    pace_start,
    since_jump,
    slope,
)
from placement.lending import replicas_to_lend
from placement.measurements import EngineSpeed, MeasuredStep
from placement.policies.base import Policy, Situation, SwitchCosts
from placement.policies.corrections import ForecastErrors, list_choices
from placement.policies.dynamic import DynamicPolicy
from placement.policies.simple import (
    ColocatedPolicy,
    HillClimbPolicy,
    StaticPolicy,
    new_threshold_policy,
    utilisation,
)
from placement.slots import Split, SplitBounds, even_split, feasible, feasible_splits, nearest_split

COSTS = SwitchCosts(5.0, 10.0)


def policy_of(name: str, bounds: SplitBounds) -> Policy:
    """One that begins with what a person would write."""
    first, pools = even_split(bounds), PoolLimits(bounds.rollout_size, bounds.reward_size)
    makers: dict[str, Callable[[], Policy]] = {
        "static": lambda: StaticPolicy(first),
        "colocated": lambda: ColocatedPolicy(first),
        "hill_climb": lambda: HillClimbPolicy(first),
        "threshold": lambda: new_threshold_policy(first),
        "dynamic": lambda: DynamicPolicy(pools, first),
    }
    return makers[name]()


POLICIES = st.sampled_from(("static", "colocated", "hill_climb", "threshold", "dynamic"))


@st.composite
def bounded(draw: st.DrawFn) -> SplitBounds:
    """Bounds that some split keeps to."""
    bounds = SplitBounds(
        draw(st.integers(3, 24)),
        draw(st.sampled_from((1, 2, 4))),
        draw(st.sampled_from((1, 2, 4))),
        tuple(sorted(draw(st.sets(st.sampled_from((1, 2, 4, 8)), min_size=1)))),
        draw(st.booleans()),
        draw(st.booleans()),
    )
    if not list(feasible(bounds)):
        return SplitBounds(draw(st.integers(3, 24)), 1, 1, (1, 2))
    return bounds


def step_of(
    step: int, split: Split, draw: np.random.Generator, *, judged: bool = True, missing: float = 0.2
) -> MeasuredStep:
    """What might be measured of a step on a split; anything may be missing."""
    lengths = tuple(np.ceil(draw.lognormal(5.0, 0.8, 24)).tolist())
    missed = draw.random(4) < missing
    speeds = tuple(
        EngineSpeed(pool, load, 0.02 + 0.001 * load) for pool in ("rollout", "reward") for load in (1.0, 9.0)
    )
    return MeasuredStep(
        step=step,
        split=split,
        lengths=lengths,
        judged=tuple(np.ceil(draw.lognormal(3.0, 0.3, 24)).tolist()) if judged else (),
        train_tokens=sum(lengths),
        produce_s=None if missed[0] else float(draw.uniform(5, 90)),
        train_s=None if missed[1] else float(draw.uniform(1, 60)),
        other_s=None if missed[2] else float(draw.uniform(0, 9)),
        speed=() if missed[3] else speeds,
        busy={pool: float(draw.uniform(0, 50)) for pool in ("rollout", "reward", "train")},
    )


def run_of(name: str, first: SplitBounds, then: SplitBounds, seed: int, steps: int = 12) -> list[Split]:
    """The splits a policy chooses, when slots change half way."""
    draw, policy = np.random.default_rng(seed), policy_of(name, first)
    now: Split | None = None
    history: list[MeasuredStep] = []
    found = []
    for step in range(steps):
        bounds = first if step < steps // 2 else then
        situation = Situation(bounds, now, tuple(history), COSTS, steps - step, bool(seed % 2), bool(seed % 3))
        now = policy.plan(situation).split
        found.append(now)
        history.append(step_of(step, now, draw, judged=bounds.judged))
    return found


@given(POLICIES, bounded(), bounded(), st.integers(0, 999))
def test_policies_choose_feasible_splits_for_any_measurements_and_slots(
    name: str, first: SplitBounds, then: SplitBounds, seed: int
) -> None:
    splits = run_of(name, first, then, seed)
    assert all(split in set(feasible(first)) for split in splits[:6])
    assert all(split in set(feasible(then)) for split in splits[6:])


@given(bounded())
def test_a_feasible_split_uses_no_slot_twice_and_breaks_no_constraint(bounds: SplitBounds) -> None:
    for split in feasible(bounds):
        assert split.train in bounds.train_sizes
        assert split.rollout % bounds.rollout_size == 0
        assert split.reward % bounds.reward_size == 0
        assert split.rollout >= bounds.rollout_size
        assert (split.reward >= bounds.reward_size) == bounds.judged
        if split.mode == "colocated":
            assert bounds.colocated
            assert max(split.rollout, split.reward, split.train) <= bounds.slots
        else:
            assert split.rollout + split.reward + split.train <= bounds.slots


@st.composite
def near(draw: st.DrawFn, bounds: SplitBounds) -> Split:
    """A split that may be feasible."""
    if draw(st.booleans()):
        return draw(st.sampled_from(feasible_splits(bounds)))
    sizes = [draw(st.integers(0, bounds.slots + 1)) for _ in range(3)]
    return Split(draw(st.sampled_from(("coexisting", "colocated"))), *sizes)


@given(st.data(), bounded())
def test_whether_a_split_is_allowed_is_whether_it_is_one_of_those_there_are(
    data: st.DataObject, bounds: SplitBounds
) -> None:
    split = data.draw(near(bounds))
    assert bounds.allows(split) == (split in set(feasible(bounds)))


@given(bounded(), st.integers(0, 999), st.tuples(st.floats(0, 60), st.floats(0, 60)))
def test_vectorized_values_equal_those_of_each_split(
    bounds: SplitBounds, seed: int, costs: tuple[float, float]
) -> None:
    draw, there, told, errors = np.random.default_rng(seed), list_choices(bounds), SwitchCosts(*costs), ForecastErrors()
    assert there.splits == tuple(feasible(bounds))
    for step in range(24):
        errors.add(step, there.splits[int(draw.integers(min(len(there.splits), 4)))], float(draw.normal(0.2, 0.5)))
    now = there.splits[seed % len(there.splits)]
    assert there.cost(told, now).tolist() == [told.of(now, split) for split in there.splits]
    assert errors.factors(there).tolist() == [errors.factor(split) for split in there.splits]
    beside = (now, *(split for split in there.splits if split.train == now.train))
    assert there.beside(now).tolist() == shapes_of(beside).tolist()


@given(POLICIES, bounded(), st.integers(0, 999))
def test_the_same_questions_get_the_same_answers(name: str, bounds: SplitBounds, seed: int) -> None:
    assert run_of(name, bounds, bounds, seed) == run_of(name, bounds, bounds, seed)


@given(st.sampled_from(("static", "colocated", "dynamic")), bounded(), st.integers(0, 999))
def test_a_policy_that_is_asked_again_with_nothing_new_moves_nothing(name: str, bounds: SplitBounds, seed: int) -> None:
    draw, policy = np.random.default_rng(seed), policy_of(name, bounds)
    first = policy.plan(Situation(bounds, None, (), COSTS, None)).split
    history = tuple(step_of(step, first, draw, judged=bounds.judged, missing=0.0) for step in range(6))
    now = first
    for _ in range(8):  # whatever it wants to change, it has changed by then
        now = policy.plan(Situation(bounds, now, history, COSTS, None)).split
    for _ in range(8):
        assert policy.plan(Situation(bounds, now, history, COSTS, None)).split == now


@given(bounded(), st.integers(0, 99))
def test_a_change_that_cannot_pay_in_the_steps_that_are_left_is_not_made(bounds: SplitBounds, seed: int) -> None:
    draw, policy = np.random.default_rng(seed), policy_of("dynamic", bounds)
    now = feasible_splits(bounds)[seed % len(feasible_splits(bounds))]
    history = tuple(step_of(step, now, draw, judged=bounds.judged) for step in range(9))
    assert policy.plan(Situation(bounds, now, history, SwitchCosts(1e6, 1e6), 3)).split == now


def test_a_move_says_what_idled_what_it_gains_and_what_it_costs() -> None:
    bounds = SplitBounds(8, 1, 1, (1, 2, 4), True, False)
    policy, now = policy_of("dynamic", bounds), Split("coexisting", 1, 5, 2)
    draw = np.random.default_rng(1)
    history: list[MeasuredStep] = []
    for step in range(8):
        one = step_of(step, now, draw, missing=0.0)
        history.append(one)
        decision = policy.plan(Situation(bounds, now, history, COSTS, 100))
        if decision.split != now:
            break
    assert decision.split.rollout > 1
    assert decision.expected_s is not None
    assert decision.before_s is not None
    assert decision.expected_s < decision.before_s
    assert decision.cost_s == COSTS.of(now, decision.split)
    assert decision.gain_s > decision.cost_s
    assert set(decision.idle) == {"rollout", "reward", "train"}
    assert "saves" in decision.reason
    assert "costs" in decision.reason


def test_the_utilisation_rules_move_one_unit_from_the_idle_pool_to_the_busy_one() -> None:
    bounds, now = SplitBounds(8, 1, 1, (1, 2, 4)), Split("coexisting", 4, 2, 2)
    step = MeasuredStep(0, now, (1.0,), (1.0,), 1.0, 8.0, 2.0, 0.0, (), {"rollout": 38.0, "reward": 2.0, "train": 12.0})
    assert utilisation(step) == pytest.approx({"rollout": 0.95, "reward": 0.1, "train": 0.6})
    situation = Situation(bounds, now, (step,), COSTS, None)
    assert HillClimbPolicy(now).plan(situation).split == Split("coexisting", 5, 1, 2)
    assert new_threshold_policy(now).plan(situation).split == Split("coexisting", 5, 1, 2)
    middling = MeasuredStep(
        0, now, (1.0,), (1.0,), 1.0, 8.0, 2.0, 0.0, (), {"rollout": 26.0, "reward": 9.0, "train": 12.0}
    )
    assert new_threshold_policy(now).plan(Situation(bounds, now, (middling,), COSTS, None)).split == now


@given(
    st.floats(0, 60),
    st.integers(0, 12),
    st.floats(0, 500),
    st.floats(0, 300),
    st.integers(0, 12),
    st.floats(0, 500),
    st.floats(0, 300),
)
def test_lending_leaves_each_pool_that_owes_anything_a_replica(
    cost: float, rollout: int, owed: float, left: float, reward: int, asked: float, judged: float
) -> None:
    count = replicas_to_lend(cost, rollout, owed, 20.0, left, reward, asked, 20.0, judged)
    assert -reward <= count <= rollout
    if owed > 0 and rollout > 0 and reward > 0:
        assert rollout - count >= 1
    if asked > 0 and reward > 0 and rollout > 0:
        assert reward + count >= 1


@given(st.integers(1, 12), st.floats(1, 300), st.integers(1, 12), st.floats(1, 300))
def test_loan_that_takes_longer_than_the_rest_of_the_step_is_not_made(
    rollout: int, left: float, reward: int, judged: float
) -> None:
    assert replicas_to_lend(max(left, judged), rollout, 50.0, 20.0, left, reward, 50.0, 20.0, judged) == 0


def test_idle_slots_are_lent_to_the_pool_that_is_behind() -> None:
    assert replicas_to_lend(1.0, 6, 4.0, 20.0, 5.0, 1, 200.0, 20.0, 90.0) > 0
    assert replicas_to_lend(1.0, 1, 200.0, 20.0, 90.0, 6, 204.0, 200.0, 5.0) < 0


def test_a_line_through_exact_measurements_is_found() -> None:
    split = Split("coexisting", 2, 1, 2)
    speeds = tuple(EngineSpeed("rollout", load, 0.02 + 0.001 * load) for load in (1.0, 8.0, 30.0))
    steps = [
        MeasuredStep(i, split, (1.0,), (), 1000.0 * 2**i, 1.0, 3.0 + 0.002 * 1000 * 2**i / 2, 0.0, speeds, {})
        for i in range(4)
    ]
    law, train = fit_decode_law(steps, "rollout", 64), fit_train_law(steps)
    assert (law.token_s, law.sequence_s) == pytest.approx((0.02, 0.001))
    assert (train.fixed_s, train.slot_s) == pytest.approx((3.0, 0.002))
    assert fit_decode_law(steps, "reward", 64).token_s > 0  # the prior


@given(st.floats(-0.05, 0.05), st.integers(8, 32))
def test_a_trend_without_noise_is_the_trend(rise: float, count: int) -> None:
    assert slope(np.arange(count) * rise) == pytest.approx(rise, abs=1e-6)


def test_a_jump_is_seen_and_noise_is_none() -> None:
    draw = np.random.default_rng(3)
    calm = draw.normal(6.0, 0.1, 30)
    assert sum(since_jump(calm[:end].tolist()) > 0 for end in range(8, 30)) <= 1
    assert since_jump([*calm.tolist(), 7.8]) == 30
    assert since_jump([*calm.tolist(), 7.8, 7.7, 7.9]) >= 30


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 999))
def test_a_forecast_is_no_longer_with_more_of_every_pool(rollout: int, reward: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    lengths = np.ceil(draw.lognormal(5.0, 0.8, 60))
    batch = LengthProfile.made(lengths, 40.0, float(lengths.sum()))
    told = DecodeLaw(0.02, 0.001, 64), DecodeLaw(0.02, 0.001, 64), TrainLaw(1.0, 1e-3)
    forecast = Forecast(PoolLimits(), *told, (batch,), np.ones(1), np.ones(1), 1.0, 3.0, False, None)
    pair = Split("coexisting", rollout, reward, 2), Split("coexisting", 2 * rollout, 2 * reward, 4)
    less, more = forecast.seconds(shapes_of(pair))
    assert more <= less + 1e-9


def test_the_nearest_split_is_itself_where_it_is_feasible() -> None:
    bounds = SplitBounds(8, 1, 1, (1, 2, 4))
    assert all(nearest_split(bounds, split) == split for split in feasible(bounds))


def test_books_that_come_after_the_decision_count_in_the_next_one() -> None:
    bounds, draw = SplitBounds(8, 1, 1, (1, 2, 4), True, False), np.random.default_rng(4)
    now = Split("coexisting", 1, 5, 2)
    whole = [step_of(step, now, draw, missing=0.0) for step in range(8)]
    bare = [replace(one, judged=(), speed=(), busy={}) for one in whole]
    late, prompt = policy_of("dynamic", bounds), policy_of("dynamic", bounds)
    assert isinstance(late, DynamicPolicy)
    assert isinstance(prompt, DynamicPolicy)
    for step in range(1, 9):
        late.plan(Situation(bounds, now, [*whole[: step - 1], bare[step - 1]], COSTS, 100))
        prompt.plan(Situation(bounds, now, whole[:step], COSTS, 100))
    assert late._steps[:-1] == prompt._steps[:-1]
    assert [one.judgement for one in late._batches[1:-1]] == [one.judgement for one in prompt._batches[1:-1]]
    assert late._batches[-1].judgement == late._batches[-2].judgement  # the newest's is not known yet


def test_a_step_that_was_made_anew_takes_the_place_of_the_one_that_was_rolled_back() -> None:
    bounds, draw = SplitBounds(8, 1, 1, (1, 2, 4)), np.random.default_rng(4)
    policy, now = policy_of("dynamic", bounds), Split("coexisting", 3, 3, 2)
    assert isinstance(policy, DynamicPolicy)
    first = [step_of(step, now, draw) for step in range(6)]
    again = [*first[:4], step_of(4, now, draw)]
    policy.plan(Situation(bounds, now, first, COSTS, 100))
    policy.plan(Situation(bounds, now, again, COSTS, 100))
    assert policy._steps[4] is again[4]


def test_of_a_long_history_the_newest_steps_are_taken_in_once() -> None:
    bounds, draw = SplitBounds(8, 1, 1, (1, 2, 4)), np.random.default_rng(4)
    policy, now = policy_of("dynamic", bounds), Split("coexisting", 3, 3, 2)
    assert isinstance(policy, DynamicPolicy)
    history = [step_of(step, now, draw) for step in range(100)]
    for _ in range(2):
        policy.plan(Situation(bounds, now, history, COSTS, 100))
        assert [one.step for one in policy._steps] == list(range(36, 100))


def paced(times: list[float], loads: list[float], noise: float = 0.0, seed: int = 0) -> list[MeasuredStep]:
    """Steps whose judges take so many times what they should, at these loads."""
    draw, now = np.random.default_rng(seed), Split("coexisting", 3, 3, 2)
    told = []
    for step, (slower, load) in enumerate(zip(times, loads, strict=True)):
        took = (0.01 + 0.004 * load) * slower * float(np.exp(draw.normal(0.0, noise)))
        told.append(replace(step_of(step, now, draw, missing=0.0), speed=(EngineSpeed("reward", load, took),)))
    return told


@given(st.lists(st.floats(1, 16), min_size=2, max_size=24), st.floats(0.1, 10))
def test_another_load_is_no_other_pace(loads: list[float], pace: float) -> None:
    assert pace_start(paced([pace] * len(loads), loads), "reward", 0) == 0


@given(st.integers(4, 20), st.integers(1, 3), st.floats(2.0, 8.0), st.booleans(), st.integers(0, 99))
def test_judges_that_become_slow_are_known_by_their_next_steps(
    calm: int, since: int, times: float, faster: bool, seed: int
) -> None:
    pace = 1 / times if faster else times
    history = paced([1.0] * calm + [pace] * since, [4.0] * (calm + since), 0.02, seed)
    found = pace_start(history, "reward", 0)
    assert calm <= found < calm + since
    law = fit_decode_law(history, "reward", 64, found)
    assert law.at(np.array([4.0]))[0] == pytest.approx(0.026 * pace, rel=0.1)


def test_how_much_a_request_adds_is_still_known_after_a_jump_of_the_pace() -> None:
    history = paced([1.0] * 8 + [6.0], [1.0, 2.0, 4.0, 8.0, 1.0, 2.0, 4.0, 8.0, 4.0])
    law = fit_decode_law(history, "reward", 64, 8)
    assert (law.token_s, law.sequence_s) == (pytest.approx(0.06), pytest.approx(0.024))


def test_dynamic_gives_judges_that_became_slow_more_slots_when_it_has_seen_it() -> None:
    bounds = SplitBounds(16, 1, 1, (2,), True, False)
    now, lengths = Split("coexisting", 8, 6, 2), (100.0,) * 64
    policy, history, found = DynamicPolicy(PoolLimits(), now), [], []
    for step in range(12):
        slow = 5.0 if step >= 6 else 1.0
        loads = 64 / now.rollout, 64 / now.reward
        rollout, reward = 0.01 + 0.004 * loads[0], (0.01 + 0.004 * loads[1]) * slow
        ends = EngineSpeed("rollout", 1.0, 0.014), EngineSpeed("reward", 1.0, 0.014 * slow)  # of the tail
        speed = (EngineSpeed("rollout", loads[0], rollout), EngineSpeed("reward", loads[1], reward), *ends)
        produce = 100 * max(rollout, reward)
        step_told = MeasuredStep(step, now, lengths, lengths, 6400.0, produce, 2.0, 1.0, speed, {})
        history.append(step_told)
        now = policy.plan(Situation(bounds, now, tuple(history), SwitchCosts(0.5, 5.0), 100)).split
        found.append(now.reward)
    assert max(found[:6]) <= 8 < min(found[9:])


def test_an_engine_that_one_node_has_more_than_another_is_worth_nothing() -> None:
    batch = LengthProfile.made(np.linspace(10, 500, 60), 40.0, 6000.0)
    told = DecodeLaw(0.02, 0.001, 64), DecodeLaw(0.02, 0.001, 64), TrainLaw(1.0, 1e-3)
    forecast = Forecast(PoolLimits(), *told, (batch,), np.ones(1), np.ones(1), 1.0, 3.0, False, None, nodes=4)
    found = forecast.seconds(shapes_of([Split("coexisting", rollout, 8, 4) for rollout in (3, 8, 9, 11, 12)]))
    assert found[1] == found[2] == found[3]
    assert found[4] < found[1] < found[0]


def test_an_engine_that_leaves_no_other_with_a_group_less_is_worth_nothing() -> None:
    """Of 16 groups a node five engines have four at most, as four have."""
    batch = LengthProfile.made(np.linspace(10, 500, 256), 40.0, 6000.0)
    told = DecodeLaw(0.02, 0.001, 64), DecodeLaw(0.02, 0.001, 64), TrainLaw(1.0, 1e-3)
    forecast = Forecast(PoolLimits(), *told, (batch,), np.ones(1), np.ones(1), 1.0, 3.0, False, None, nodes=4, group=4)
    found = forecast.seconds(shapes_of([Split("coexisting", rollout, 8, 4) for rollout in (16, 20, 24, 28, 32)]))
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[4] < found[2] < found[1]


def one_by_one(lengths: list[float], rows: int, law: DecodeLaw) -> list[float]:
    """When each ends on one replica that has `rows` rows, first come first served."""
    waiting, running, now, ends = list(lengths), list[float](), 0.0, list[float]()
    while waiting or running:
        while waiting and len(running) < rows:
            running.append(waiting.pop(0))
        least = min(running)
        now += least * (law.token_s + law.sequence_s * len(running))
        ends += [now] * sum(one - least < 1e-9 for one in running)
        running = [one - least for one in running if one - least >= 1e-9]
    return ends


@pytest.mark.parametrize("spread", [0.1, 0.4, 0.8])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_drain_times_match_a_simulated_queue(spread: float, replicas: int) -> None:
    draw, law = np.random.default_rng(3), DecodeLaw(0.01, 0.004, 8)
    lengths = np.round(np.exp(draw.normal(np.log(60), spread, 256))).clip(1)
    true = sorted(end for r in range(replicas) for end in one_by_one(lengths[r::replicas].tolist(), 8, law))
    batch = LengthProfile.made(lengths, 0.0, float(lengths.sum()))
    found = drain_times(batch, 1.0, np.array([replicas]), law)[0]
    assert (np.diff(found) >= -1e-9).all()
    ended = 256 - batch.after
    for share in (0.25, 0.5, 0.75, 0.9):
        assert np.interp(share * 256, ended, found) == pytest.approx(true[int(share * 256) - 1], rel=0.12)


@pytest.mark.parametrize(("count", "replicas"), [(8, 1), (64, 3), (64, 16), (128, 7), (128, 40)])
def test_pictures_of_equally_many_steps_end_in_batches(count: int, replicas: int) -> None:
    law, lengths = DecodeLaw(0.01, 0.004, 4), np.full(count, 10.0)
    true = sorted(end for r in range(replicas) for end in one_by_one(lengths[r::replicas].tolist(), 4, law))
    batch = LengthProfile.made(lengths, 0.0, 1.0)
    found = drain_times(batch, 1.0, np.array([replicas]), law)[0]
    assert np.isfinite(found).all()
    assert found[-1] == pytest.approx(true[-1], rel=0.15)


def test_paces_are_known_though_the_jump_is_long_ago_and_forgotten_with_the_steps_that_told_of_it() -> None:
    history = paced([1.0] * 8 + [6.0] * 12, [2.0] * 20)
    paces = PaceTracker()
    paces.see(history)
    assert paces.since("reward") == history[8].step
    paces.see(history[:6])
    assert paces.since("reward") == 0

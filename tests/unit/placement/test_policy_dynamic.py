"""The policy `dynamic` over the steps of a job: it moves slots when the estimated gain exceeds the cost, and returns when the load does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from gcore.ledger.records.chain import LogEntry
from gcore.ledger.records.slot_accounting import EngineSums, StepAccount
from gcore.types import Version
from placement.forecast import Forecast, LengthProfile, PoolLimits, shapes_of
from placement.laws import DecodeLaw, TrainLaw
from placement.measurements import EngineSpeed, MeasuredStep, measure_step
from placement.policies.base import Decision, Situation, SwitchCosts
from placement.policies.dynamic import DynamicPolicy, _said
from placement.slots import Split, SplitBounds, feasible

LENGTHS = tuple(float(n) for n in range(20, 340, 5))
BOUNDS = SplitBounds(8, 1, 1, (2,), True, False)
FREE = SwitchCosts(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Truth:
    """A job whose steps take what a forecast says, `times` what it says of production. `slower`: its judges' tokens. `held_up`: by what engines
    take longer for a token where all slots are had in turn, and production with them."""

    train_s: float = 2.0
    held_up: float = 1.0
    times: Callable[[int, Split], float] = lambda step, split: 1.0
    slower: Callable[[int], float] = lambda step: 1.0

    def produce_s(self, step: int, split: Split) -> float:
        rollout, reward = DecodeLaw(0.02, 0.002, 64), self.law(step)
        batch = LengthProfile.made(np.array(LENGTHS), 60.0, sum(LENGTHS))
        forecast = Forecast(
            PoolLimits(), rollout, reward, TrainLaw(0.0, 0.0), (batch,), np.ones(1), np.ones(1), 0.0, 0.0, False, None
        )
        return float(forecast.produce_s(shapes_of((split,)))[0, 0]) * self.times(step, split) * self.holding_up(split)

    def law(self, step: int) -> DecodeLaw:
        return DecodeLaw(0.02 * self.slower(step), 0.002 * self.slower(step), 64)

    def holding_up(self, split: Split) -> float:
        return self.held_up if split.mode == "colocated" else 1.0

    def speed(self, step: int, split: Split) -> tuple[EngineSpeed, ...]:
        laws = {"rollout": DecodeLaw(0.02, 0.002, 64), "reward": self.law(step)}
        return tuple(
            EngineSpeed(pool, n, (law.token_s + law.sequence_s * n) * self.holding_up(split))
            for pool, law in laws.items()
            for n in (1.0, 4.0, 16.0)
        )

    def step(self, step: int, split: Split) -> MeasuredStep:
        """As it is measured."""
        return MeasuredStep(
            step=step,
            split=split,
            lengths=LENGTHS,
            judged=(60.0,) * len(LENGTHS),
            train_tokens=sum(LENGTHS),
            produce_s=self.produce_s(step, split),
            train_s=self.train_s,
            other_s=0.5,
            speed=self.speed(step, split),
            busy={},
        )


def asked(
    policy: DynamicPolicy,
    history: list[MeasuredStep],
    now: Split,
    costs: SwitchCosts = FREE,
    bounds: SplitBounds = BOUNDS,
) -> Decision:
    return policy.plan(Situation(bounds, now, tuple(history), costs, 100))


def lived(
    truth: Truth, first: Split, steps: int, costs: SwitchCosts = FREE, bounds: SplitBounds = BOUNDS
) -> list[Split]:
    """The splits that a job's steps have."""
    policy, history, now, found = DynamicPolicy(PoolLimits(), first), list[MeasuredStep](), first, []
    for step in range(steps):
        found.append(now)
        history.append(truth.step(step, now))
        now = asked(policy, history, now, costs, bounds).split
    return found


def changes(splits: list[Split]) -> list[int]:
    return [step for step in range(1, len(splits)) if splits[step] != splits[step - 1]]


def best(truth: Truth, step: int = 0) -> list[Split]:
    """The best first."""
    return sorted(feasible(BOUNDS), key=lambda split: truth.produce_s(step, split))


def test_a_split_is_kept_for_three_steps_however_bad_it_is() -> None:
    truth = Truth()
    worst = best(truth)[-1]
    found = lived(truth, worst, 8)
    assert found[:3] == [worst] * 3
    assert found[3] == best(truth)[0]


def test_a_split_that_was_just_changed_is_kept_though_judges_become_slow() -> None:
    truth = Truth(slower=lambda step: 8.0 if step >= 3 else 1.0)
    found = lived(truth, best(truth)[-1], 12)
    assert found[3:6] == [best(truth)[0]] * 3
    assert found[6].reward > found[5].reward


def test_a_change_must_save_more_than_forecasts_are_wrong_by() -> None:
    better, now = best(Truth())[:2]

    def uneven(step: int, split: Split) -> float:
        return float(np.exp(0.8 * (-1) ** step))

    calm, noisy = Truth(), Truth(times=uneven)
    saved = 1 - (calm.produce_s(0, better) + 2.5) / (calm.produce_s(0, now) + 2.5)
    assert 0.02 < saved < 0.1
    assert better in lived(calm, now, 12)
    assert set(lived(noisy, now, 12)) == {now}


@pytest.mark.parametrize("times", [1.4, 1.8, 2.7])
def test_harmful_move_is_reverted_soon_and_not_retried(times: float) -> None:
    better, now = best(Truth())[:2]
    truth = Truth(times=lambda step, split: times if split == better else 1.0)
    found = lived(truth, now, 60)
    assert better in found[:10]
    went, came = changes(found)
    assert came - went <= 6
    assert found[-40:] == [now] * 40


@pytest.mark.parametrize("held_up", [1.6, 2.0, 3.0])
def test_all_slots_in_turn_are_left_again_soon_where_engines_on_one_slot_hold_one_another_up(held_up: float) -> None:
    bounds = replace(BOUNDS, colocated=True)
    found = lived(Truth(held_up=held_up), best(Truth())[0], 60, bounds=bounds)
    assert found[3].mode == "colocated", "it looks better than it is"
    assert [split.mode for split in found[9:]] == ["coexisting"] * 51


@pytest.mark.parametrize("times", [1.3, 1.4, 1.8])
def test_all_slots_in_turn_are_left_again_soon_where_they_are_slower_than_their_engines_say(times: float) -> None:
    truth = Truth(times=lambda step, split: times if split.mode == "colocated" else 1.0)
    found = lived(truth, best(Truth())[0], 60, bounds=replace(BOUNDS, colocated=True))
    assert found[3].mode == "colocated", "it looks better than it is"
    assert [split.mode for split in found[6:]] == ["coexisting"] * 54


def test_all_slots_in_turn_are_kept_where_they_are_as_good_as_they_look() -> None:
    found = lived(Truth(), best(Truth())[0], 30, bounds=replace(BOUNDS, colocated=True))
    assert [split.mode for split in found[3:]] == ["colocated"] * 27


def test_judges_that_become_slow_are_seen_where_engines_hold_one_another_up_too() -> None:
    truth = Truth(held_up=2.0, slower=lambda step: 6.0 if step >= 30 else 1.0)
    found = lived(truth, best(Truth())[0], 60, bounds=replace(BOUNDS, colocated=True))
    assert found[-1].reward > found[29].reward


def test_a_wish_that_never_came_to_be_may_be_wished_again_at_once() -> None:
    truth = Truth()
    now, policy, history = best(truth)[-1], DynamicPolicy(PoolLimits(), best(truth)[-1]), list[MeasuredStep]()
    for step in range(3):
        history.append(truth.step(step, now))
        wish = asked(policy, history, now)
    assert wish.split == best(truth)[0]
    history.append(truth.step(3, now))  # the move was withdrawn, or the step began first
    assert asked(policy, history, now).split == best(truth)[0]


def test_steps_that_were_given_up_count_no_more_and_those_made_anew_are_learned_from() -> None:
    now = best(Truth())[0]
    longer = tuple(8 * tokens for tokens in LENGTHS)
    first = [Truth().step(step, now) for step in range(10)]
    gone = [replace(Truth().step(step, now), lengths=longer, train_s=9.0) for step in range(10, 20)]
    anew = [replace(Truth().step(step, now), train_s=2.1) for step in range(10, 14)]
    policy, fresh = DynamicPolicy(PoolLimits(), now), DynamicPolicy(PoolLimits(), now)
    for end in range(1, 21):
        asked(policy, [*first, *gone][:end], now)
    for end in range(10, 15):
        before = policy._errors._of_split["coexisting", now.rollout, now.reward].weight
        told = asked(policy, [*first, *anew][:end], now)
        assert [one.step for one in policy._steps] == list(range(end))
        if end > 10:
            assert policy._errors._of_split["coexisting", now.rollout, now.reward].weight != before
    for end in range(1, 15):
        expected = asked(fresh, [*first, *anew][:end], now).expected_s
    assert policy._stretch == fresh._stretch == 14
    assert policy._errors.factor(now) == pytest.approx(fresh._errors.factor(now))
    assert policy._errors.spread == pytest.approx(fresh._errors.spread)
    assert [one.length for one in policy._batches] == [one.length for one in fresh._batches]
    assert told.expected_s == pytest.approx(expected, rel=0.2)


def test_steps_made_anew_while_nobody_asked_take_the_place_of_those_that_were_given_up() -> None:
    now, policy = best(Truth())[0], DynamicPolicy(PoolLimits(), best(Truth())[0])
    longer = tuple(8 * tokens for tokens in LENGTHS)
    first = [Truth().step(step, now) for step in range(8)]
    gone = [replace(Truth().step(step, now), lengths=longer, train_s=9.0) for step in range(8, 12)]
    anew = [Truth().step(step, now) for step in range(8, 14)]
    for end in range(1, 13):
        asked(policy, [*first, *gone][:end], now)
    assert policy._stretch == 4
    asked(policy, [*first, *anew], now)
    assert all(one is other for one, other in zip(policy._steps, [*first, *anew], strict=True))
    assert policy._stretch == 14


def ahead(truth: Truth, step: int, split: Split) -> MeasuredStep:
    """As a live job's steps are measured whose batches are made one step ahead."""
    rest = truth.train_s * 2 / split.train + 0.2
    seconds = max(truth.produce_s(step, split), rest + 0.03)
    stats = {
        "staleness": 1.0,
        "seconds": seconds,
        "publish_s": 0.0,
        "collect_s": seconds - rest,
        "exchange_s": 0.2,
        "train_s": truth.train_s * 2 / split.train,
        "tokens": sum(LENGTHS),
    }
    entry = LogEntry(seq=step, parent=None, kind="train", lineage=0, step=step, world="w", nonce="n", stats=stats)
    active = {"rollout": EngineSums(active_s=0.8 * min(truth.produce_s(step, split), seconds) * split.rollout)}
    book = StepAccount(version=Version(0, step), began=0.0, seconds=seconds, slots=12, engines=active)
    told = measure_step((book,), entry, None, split)
    return replace(told, lengths=LENGTHS, judged=(60.0,) * len(LENGTHS), speed=truth.speed(step, split))


@pytest.mark.parametrize(
    ("train_s", "off", "most"),
    [
        pytest.param(4.0, 1.0, 2, id="production_holds_it_up"),
        pytest.param(9.0, 1.0, 2, id="ranks_hold_it_up"),
        pytest.param(6.0, 1.3, 3, id="production_is_slower_than_forecast"),
        pytest.param(12.0, 0.8, 2, id="production_is_faster_than_forecast_and_ranks_hold_it_up"),
    ],
)
def test_one_step_ahead_it_finds_a_good_split_and_stays_there(train_s: float, off: float, most: int) -> None:
    """After `most` changes: where forecasts are always too short, another split is tried once, and left."""
    bounds = SplitBounds(12, 1, 1, (1, 2, 4, 6), True, False)
    truth = Truth(train_s=train_s, times=lambda step, split: off)
    now = Split("coexisting", 6, 4, 2)
    policy, history, found = DynamicPolicy(PoolLimits(), now), list[MeasuredStep](), []
    for step in range(100):
        history.append(ahead(truth, step, now))
        found.append(now)
        now = policy.plan(Situation(bounds, now, tuple(history), SwitchCosts(0.2, 1.0), 100, overlaps=True)).split
    taken = {split: ahead(truth, 0, split).seconds or 0.0 for split in feasible(bounds)}
    assert found[-20:] == [now] * 20
    assert len(changes(found)) <= most
    assert taken[now] <= 1.03 * min(taken.values())


def test_a_reason_names_who_gives_and_who_gets_with_what_each_of_them_idled() -> None:
    now, then = Split("coexisting", 6, 1, 1), Split("coexisting", 4, 3, 1)
    idle = {"rollout": 0.83, "reward": 0.4, "train": 0.86}
    assert _said(idle, now, then) == (
        "rollout gives 2 (idle for 83% of the newest step) and reward gets 2 (idle for 40% of the newest step): "
    )
    assert "train" not in _said(idle, now, then)
    assert _said({}, now, then) == ""
    turns = Split("colocated", 8, 8, 8)
    assert _said({"rollout": 0.5, "reward": 0.7, "train": 0.9}, turns, then) == (
        "rollout was idle for 50%, reward was idle for 70%, train was idle for 90% of the newest step: "
    )


def test_for_no_steps_that_are_left_nothing_is_changed_and_where_nobody_knows_how_many_it_is() -> None:
    truth, costs = Truth(), SwitchCosts(0.1, 0.1)
    worst = best(truth)[-1]
    history = [truth.step(step, worst) for step in range(4)]

    def last_of(steps_left: int | None) -> Split:
        policy, now = DynamicPolicy(PoolLimits(), worst), worst
        for step in range(1, 5):
            now = policy.plan(Situation(BOUNDS, worst, tuple(history[:step]), costs, steps_left)).split
        return now

    assert last_of(0) == worst
    assert last_of(None) == last_of(100) == best(truth)[0]


@pytest.mark.parametrize(("judged", "changes_of_turn"), [(True, 3), (False, 2)])
def test_all_slots_in_turn_take_a_turn_for_the_judges_only_where_there_are_any(
    judged: bool, changes_of_turn: int
) -> None:
    bounds, costs = SplitBounds(8, 1, 1, (2,), judged, True), SwitchCosts(1.0, 1.0, 4.0)
    split = Split("coexisting", 6 - 2 * judged, 2 * judged, 2)
    policy, situation = (
        DynamicPolicy(PoolLimits(), split),
        Situation(bounds, split, (Truth().step(0, split),), costs, 100),
    )
    policy.plan(situation)
    forecast = policy._forecast(situation, 1, 1.0)
    assert forecast.together_s - forecast.apart_s == pytest.approx(4.0 * changes_of_turn)

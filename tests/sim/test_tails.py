"""Over-provisioning and reordering cause no bias: trained responses are as long as sampled ones, ref by ref.

Many seeds of `race_simulation`, with a longer tail of lengths than in the field. Two samples of one distribution
fail the test of Kolmogorov and Smirnov at level 0.01 once in a hundred times; so one seed of a case may fail, and all of
them together must not.
"""

from __future__ import annotations

import itertools

import pytest
from race_simulation import Race, largest_gap, largest_gap_by_chance

from gcore.data.order import shard_lengths
from gcore.ledger.selection import StreamRules

QUOTA, STEPS, SEEDS = 8, 40, 8
PLAYED = {(1, 2.0, 0.5), (4, 1.0, 0.0)}
"""The extremes, which `make test` plays; `make test-large` plays all."""
CASES = [
    pytest.param(
        staleness,
        over,
        filtered,
        id=f"staleness {staleness}, {over:g} times, {filtered:.0%} filtered",
        marks=[pytest.mark.large] * ((staleness, over, filtered) not in PLAYED),
    )
    for staleness, over, filtered in itertools.product((1, 2, 4), (1.0, 1.5, 2.0), (0.0, 0.5))
]


def rules(staleness: int, over_provision: float | None, *, quota: int = QUOTA) -> StreamRules:
    return StreamRules(
        shard_lengths(4000, 16),
        window=64,
        quota=quota,
        staleness=staleness,
        issue_cap=4.0,
        over_provision=over_provision,
    )


def account_for(race: Race) -> None:
    """Each prompt that was issued was trained or filtered once, or has its turn within the staleness that is left."""
    trainable = {ref for racer in race.racers for ref in (*racer.groups, *racer.flights)}
    told = {ref for racer in race.racers for ref in racer.outcomes}
    ended = {ref for ref, one in race.ended.items() if one.kind in ("trained", "filtered")}
    assert not any(one.kind == "failed" for one in race.ended.values())
    if not race.losses:
        assert set(race.lengths) == ended | trainable | told
        assert all(len(lengths) == 1 for lengths in race.lengths.values())
        assert all(race.head.step - race.first_issued[ref] <= race.rules.staleness for ref in trainable - ended)
    assert set(race.lengths) - ended - trainable - told <= set(race.losses)
    assert race.passed_over == 0
    assert race.beyond_bound <= 0


def is_biased(trained: list[int], issued: list[int]) -> bool:
    return largest_gap(trained, issued) > largest_gap_by_chance(trained, issued)


@pytest.mark.parametrize(("staleness", "over_provision", "filtered"), CASES)
def test_long_responses_are_trained_at_any_over_provision(
    staleness: int, over_provision: float, filtered: float
) -> None:
    trained: list[int] = []
    issued: list[int] = []
    biased = 0
    for seed in range(SEEDS):
        race = Race(seed, rules(staleness, over_provision), filtered=filtered)
        race.run(STEPS)
        account_for(race)
        assert not race.losses  # what is carried is never begun twice
        assert len(race.trained) == STEPS * QUOTA
        biased += is_biased(race.trained, race.issued)
        trained += race.trained
        issued += race.issued
    assert biased <= 1
    assert not is_biased(trained, issued)


@pytest.mark.parametrize(
    "over_provision", [1.5, *(pytest.param(over, marks=pytest.mark.large) for over in (1.0, None))]
)
def test_controllers_that_are_killed_change_nothing_in_that(over_provision: float | None) -> None:
    trained: list[int] = []
    issued: list[int] = []
    for seed in range(SEEDS):
        race = Race(seed, rules(2, over_provision), filtered=0.3, kill_every=2000.0)
        race.run(STEPS)
        account_for(race)
        trained += race.trained
        issued += race.issued
    assert not is_biased(trained, issued)


@pytest.mark.parametrize("staleness", [0, *(pytest.param(most, marks=pytest.mark.large) for most in (1, 2))])
@pytest.mark.parametrize("over_provision", [1.0, None])
@pytest.mark.parametrize("seats", [2, pytest.param(None, marks=pytest.mark.large)])
def test_the_longest_first_changes_when_a_prompt_is_begun_and_not_what_is_trained(
    staleness: int, over_provision: float | None, seats: int | None
) -> None:
    """Few seats for many due prompts: if short ones could be passed over forever, it would happen here."""
    trained: list[int] = []
    issued: list[int] = []
    for seed in range(SEEDS):
        race = Race(seed, rules(staleness, over_provision), seats=seats, longest_first=True)
        race.run(STEPS)
        account_for(race)
        assert not race.losses
        trained += race.trained
        issued += race.issued
    assert not is_biased(trained, issued)


def test_strictly_on_policy_the_same_prompts_are_trained_in_the_same_steps_in_either_order() -> None:
    """A seal takes them in their order in the stream and waits for each, whenever they were begun."""
    for seed in range(SEEDS):
        races = [Race(seed, rules(0, None), seats=2, longest_first=first) for first in (True, False)]
        for race in races:
            race.run(STEPS)
        assert list(races[0].ended) == list(races[1].ended)


def test_more_in_flight_shortens_steps() -> None:
    """The point of it: with a long tail a step that may take what is finished is much shorter."""
    seconds = []
    for over_provision in (1.0, 1.5, 2.0):
        races = [Race(seed, rules(1, over_provision)) for seed in range(SEEDS // 2)]
        for race in races:
            race.run(STEPS)
        seconds.append(sum(race.now for race in races))
    assert seconds[1] < 0.85 * seconds[0]
    assert seconds[2] < 0.95 * seconds[1]


def test_a_rule_that_gives_up_what_a_step_leaves_over_fails_the_same_test() -> None:
    race = Race(1, rules(0, None), take_first=True)
    race.run(2 * STEPS)
    assert is_biased(race.trained, race.issued)

"""Trained responses are as long as sampled ones, at any staleness; and no prompt waits forever.

Fixed seeds, virtual time (`race_simulation`). The two-sample test is that of Kolmogorov and Smirnov at level 0.01.
"""

from __future__ import annotations

import pytest
from race_simulation import Race, largest_gap, largest_gap_by_chance

from gcore.data.order import shard_lengths
from gcore.ledger.selection import StreamRules

STEPS, QUOTA = 150, 8


def rules(staleness: int, *, prompts: int = 4000, issue_cap: float = 4.0) -> StreamRules:
    return StreamRules(shard_lengths(prompts, 16), window=64, quota=QUOTA, staleness=staleness, issue_cap=issue_cap)


def is_biased(race: Race) -> bool:
    return largest_gap(race.trained, race.issued) > largest_gap_by_chance(race.trained, race.issued)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_trained_lengths_equal_sampled_lengths(staleness: int) -> None:
    race = Race(1, rules(staleness))
    race.run(STEPS)
    assert len(race.trained) == STEPS * QUOTA
    assert not is_biased(race)
    assert race.oldest_trained == staleness
    assert (race.mixed > 0) == (staleness > 0)
    assert race.beyond_bound <= 0
    assert not any(one.kind == "failed" for one in race.ended.values())


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_nor_is_it_shorter_where_most_groups_are_filtered_and_more_are_issued(staleness: int) -> None:
    race = Race(1, rules(staleness), filtered=0.7)
    race.run(60)
    assert len(race.issued) > 2 * len(race.trained)
    assert not is_biased(race)
    assert race.beyond_bound <= 0


def test_a_rule_that_takes_what_finishes_first_and_gives_up_the_rest_fails_the_same_test() -> None:
    race = Race(1, rules(0), take_first=True)
    race.run(STEPS)
    assert is_biased(race)
    assert sum(race.trained) / len(race.trained) < 0.5 * sum(race.issued) / len(race.issued)


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_no_prompt_starves_though_controllers_are_killed(staleness: int, seed: int) -> None:
    """Every prompt is trained within k steps, and k + 2 more for each time it was lost."""
    race = Race(seed, rules(staleness, prompts=160), kill_every=1000.0, filtered=0.2)
    race.run(60)
    assert race.losses
    assert race.beyond_bound <= 0
    assert race.oldest_trained <= staleness


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_prompt_that_never_ends_is_given_up_and_holds_nobody_up_for_ever(staleness: int) -> None:
    race = Race(3, rules(staleness), hanging=0.02)
    race.run(60)
    failed = [one for one in race.ended.values() if one.kind == "failed"]
    assert failed
    assert {one.reason for one in failed} == {"stale"}
    assert all(race.losses[one.ref] == race.max_reissues + 1 for one in failed)
    assert race.beyond_bound <= 0
    assert not is_biased(race)

"""The simulator: exact on cases with a closed form, the same with and without a compiler, and never below a lower bound."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from placement_bounds import LendingTimes, best_schedule, compare_lending, compare_policies, lower_bound, within_bound

from gcore.errors import SpecError
from placement.laws import PaceTracker
from placement.lending import response_tail
from placement.policies.base import SwitchCosts
from placement.policies.simple import StaticPolicy
from placement.simulator.job import (
    UNKNOWN,
    LendingKnowledge,
    LendingSetup,
    SimulatedBatch,
    SimulatedJob,
    estimated_knowledge,
    true_knowledge,
)
from placement.simulator.kernel import ALONE_S, BY_RULE, BY_SCHEDULE, NEVER, play_batch
from placement.simulator.run import (
    best_each_step,
    best_static,
    choose_start,
    new_policy,
    play_job,
    play_policy,
    policies,
    switch_costs,
)
from placement.simulator.scenario import Scenario, read_scenario
from placement.slots import Split, feasible

SCENARIOS = sorted((Path(__file__).parents[3] / "benchmarks" / "scenarios").glob("*.yaml"))
LAWS, MOST = np.array([[0.02, 0.001], [0.03, 0.002]]), np.array([4, 4])
NOTHING, NO_MOVES = np.zeros(0), np.zeros(0, np.int64)
NOBODY_KNOWS = UNKNOWN.pools, UNKNOWN.tail


def end(
    lengths: list[float], judged: list[float], rollout: int, replicas: int, how: int = NEVER, cost: float = 0.0
) -> float:
    """When the last request has ended."""
    work = np.array(lengths), np.array(judged, dtype=np.float64), np.ones(replicas), rollout, LAWS, MOST
    return float(play_batch(*work, how, cost, 1.0, *known(lengths, judged), NO_MOVES, 0, 0.0)[0])


def known(lengths: Iterable[float], judged: Iterable[float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The input of a rule with perfect knowledge."""
    tokens = [list(lengths), list(judged)]
    means = [float(np.mean(each)) if each else 0.0 for each in tokens]
    pools = np.array([[LAWS[i, 0], LAWS[i, 0] / LAWS[i, 1], mean, mean / 2] for i, mean in enumerate(means)])
    return pools, np.array(response_tail([tokens[0]])).T


def small(**fields: object) -> Scenario:
    """A job that is played in no time."""
    told = {"name": "small", "what": "small", "slots": 6, "steps": 8, "groups": 4, "samples": 4}
    return Scenario.model_validate({**told, "training": {"sizes": [1, 2]}, "lengths": {"mean": 200}, **fields})


def small_batch(seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Lengths and judgements of eight responses."""
    draw = np.random.default_rng(seed)
    return np.ceil(draw.lognormal(4.5, 0.8, 8)), np.ceil(draw.lognormal(5.0, 0.5, 8))


def small_case(seed: int, cost: float, rollout: int) -> LendingTimes:
    """What lending in three moments makes of such a batch on three replicas."""
    lengths, judged = small_batch(seed)
    told = LendingKnowledge(*known(lengths, judged))
    return compare_lending(lengths, judged, np.ones(3), rollout, LAWS, MOST, told=told, cost_s=cost, moments=3)


def test_one_request_takes_its_tokens_at_the_pace_of_one() -> None:
    assert end([100.0], [], 1, 1) == pytest.approx(100 * 0.021)


def test_two_requests_on_one_replica_slow_each_other_until_the_shorter_has_ended() -> None:
    assert end([100.0, 300.0], [], 1, 1) == pytest.approx(100 * 0.022 + 200 * 0.021)


def test_requests_beyond_the_rows_wait() -> None:
    assert end([100.0] * 5, [], 1, 1) == pytest.approx(100 * 0.024 + 100 * 0.021)


def test_a_response_is_judged_when_it_is_whole() -> None:
    assert end([100.0], [50.0], 1, 2) == pytest.approx(100 * 0.021 + 50 * 0.032)


def test_requests_of_a_lent_replica_continue_elsewhere_from_their_tokens() -> None:
    told = np.array([100.0]), np.array([50.0]), np.ones(3), 2, LAWS, MOST
    # The idle replica of the two is lent after a second: nothing changes.
    one = play_batch(*told, BY_SCHEDULE, 0.5, 1.0, *NOBODY_KNOWS, np.array([0, 1], np.int64), 0, 0.0)
    assert one[0] == pytest.approx(100 * 0.021 + 50 * 0.032)
    assert one[4:] == (1, 0.0), "it is lent at the end, and has changed over"
    # All of them are, and one comes back: for one second and two changes nobody generates.
    both = play_batch(*told, BY_SCHEDULE, 0.5, 1.0, *NOBODY_KNOWS, np.array([0, 2, -2], np.int64), 0, 0.0)
    assert both[0] == pytest.approx(100 * 0.021 + 50 * 0.032 + 1.5)


def test_a_replica_that_is_still_to_come_back_serves_nobody_until_then() -> None:
    told = np.array([100.0, 100.0]), NOTHING, np.ones(2), 2, LAWS, MOST
    alone = 100 * 0.021
    assert play_batch(*told, BY_RULE, 0.5, 1.0, *NOBODY_KNOWS, NO_MOVES, 1, 1.0)[0] == pytest.approx(1.0 + alone)
    assert play_batch(*told, BY_RULE, 0.5, 1.0, *NOBODY_KNOWS, NO_MOVES, 2, 1.0)[0] == pytest.approx(1.0 + alone)
    spans = play_batch(*told, BY_RULE, 0.5, 1.0, *NOBODY_KNOWS, NO_MOVES, 1, 1.0)[2]
    assert spans[0, 1] == pytest.approx(2 * alone), "while it is not there it is not at work"
    judged = np.array([100.0]), np.array([50.0]), np.ones(2), 1, LAWS, MOST
    assert play_batch(*judged, BY_RULE, 0.5, 1.0, *NOBODY_KNOWS, NO_MOVES, -1, 5.0)[0] == pytest.approx(
        5.0 + 50 * 0.032
    )


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=24),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from((0.0, 0.5, 5.0)),
)
def test_a_batch_ends_neither_before_its_bound_nor_after_it_was_served_one_by_one(
    lengths: list[int], rollout: int, reward: int, cost: float
) -> None:
    told, judged = [float(one) for one in lengths], [float(1 + one % 60) for one in lengths]
    for how in (NEVER, BY_RULE):
        seconds = end(told, judged, rollout, rollout + reward, how, cost)
        assert seconds >= within_bound(np.array(told), np.array(judged), LAWS, MOST, rollout + reward) * (1 - 1e-9)
        if how == NEVER:
            assert seconds <= sum(told) * 0.021 + sum(judged) * 0.032 + 1e-6


@given(st.integers(0, 2**16), st.sampled_from((0.0, 0.5, 2.0)), st.integers(1, 2))
def test_the_best_lending_on_a_small_case_is_between_its_bound_and_what_the_rule_reaches_in_the_same_moments(
    seed: int, cost: float, rollout: int
) -> None:
    found = small_case(seed, cost, rollout)
    lengths, judged = small_batch(seed)
    assert within_bound(lengths, judged, LAWS, MOST, 3) <= found.best.seconds + 1e-9
    assert found.best.seconds <= found.by_rule + 1e-9
    assert found.best.seconds <= found.never + 1e-9


def test_the_rule_gains_something_by_lending_and_not_always_all_that_can_be() -> None:
    """So that it is between the two says something of it."""
    found = [small_case(seed, 0.0, 2) for seed in range(40)]
    assert any(one.by_rule < one.never for one in found)
    assert any(one.best.seconds < one.known - 1e-6 for one in found)
    assert any(sum(map(abs, one.best.moves)) > 0 and one.best.seconds > one.by_rule - 1e-6 for one in found)


def test_the_best_lending_is_what_trying_all_of_it_finds() -> None:
    lengths, judged = np.array([60.0, 90.0, 400.0]), np.array([300.0, 300.0, 300.0])
    told = lengths, judged, np.ones(3), 2, LAWS, MOST
    every = [
        play_batch(*told, BY_SCHEDULE, 0.5, 2.0, *NOBODY_KNOWS, np.array(moves, np.int64), 0, 0.0)[0]
        for moves in product((-1, 0, 1), repeat=3)
    ]
    assert best_schedule(*told, cost_s=0.5, every_s=2.0, moments=3).seconds == pytest.approx(min(every))


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("cost", [0.0, 0.5, 20.0])
def test_no_policy_beats_the_oracle_and_the_oracle_does_not_beat_the_bound(staleness: int, cost: float) -> None:
    job = SimulatedJob(small(staleness=staleness, steps=16), 5)
    costs = switch_costs(job.scenario, job.seed, cost)
    best, fixed = best_each_step(job, costs).seconds, best_static(job, costs).seconds  # he was told of no run
    assert lower_bound(job) <= best <= fixed + 1e-9
    without = {
        name: play_job(job, new_policy(name, job.scenario, job.seed), costs, costs).seconds
        for name in policies(job.scenario, job.seed)
    }
    assert min(without.values()) >= best - 1e-9
    assert without["static"] >= fixed - 1e-9
    assert len(set(without.values())) > 1


def test_reference_schedule_has_no_step_longer_than_the_run_had() -> None:
    """The rule may do better by luck with estimates than with the truth."""
    job = SimulatedJob(small(steps=16, judging={"tokens": 600}), 5)
    rows = {row.policy: row for row in compare_policies(job, 0.5)}
    costs, run = switch_costs(job.scenario, job.seed, 0.5), play_policy(job, "dynamic", 0.5)
    luckier = replace(run, step_s=tuple(seconds / 2 for seconds in run.step_s))
    moved = sum(move.cost_s for move in run.moves)
    assert best_each_step(job, costs, [luckier]).seconds <= sum(luckier.step_s) + moved + 1e-9
    assert best_each_step(job, costs, [luckier]).seconds < best_each_step(job, costs).seconds
    assert rows["dynamic"].regret == pytest.approx(rows["dynamic"].seconds / rows["best each step"].seconds - 1)


def test_the_best_split_for_each_step_is_what_trying_all_of_them_finds() -> None:
    scenario = small(slots=4, steps=3, training={"sizes": [1, 2]})
    job, costs = SimulatedJob(scenario, 3), SwitchCosts(2.0, 4.0)
    table = np.minimum(job.table(), job.table(2.0))
    tried = min(
        sum(float(table[step, one]) for step, one in enumerate(path))
        + sum(costs.of(job.splits[one], job.splits[after]) for one, after in pairwise(path))
        for path in product(range(len(job.splits)), repeat=3)
    )
    assert best_each_step(job, costs).seconds == pytest.approx(tried)


def test_the_best_static_split_is_what_trying_all_of_them_finds() -> None:
    job, costs = SimulatedJob(small(losses=[{"at": 2, "until": 5, "slots": 2}]), 3), SwitchCosts(1.0, 2.0)
    tried = {split: play_job(job, StaticPolicy(split), costs, costs).seconds for split in job.splits}
    assert len(set(tried.values())) > 4
    assert best_static(job, costs).seconds == pytest.approx(min(tried.values()))


def test_the_rule_within_a_step_is_told_what_was_measured_until_then_and_nothing_at_first() -> None:
    scenario = small(steps=40, judging={"tokens": 300, "paced": 5, "slow_from": 20, "slow_until": 40})
    job, split, paces = SimulatedJob(scenario, 1), Split("coexisting", 3, 2, 1), PaceTracker()
    assert estimated_knowledge([], scenario, paces) is UNKNOWN
    history, told = [], []
    for step in range(40):
        history.append(job.measured(step, split))
        paces.see(history)
        told.append(estimated_knowledge(history, scenario, paces).pools)
    truth = [true_knowledge(step, scenario, job.work(step)).pools for step in range(40)]
    assert not np.allclose(told[10], truth[10], rtol=1e-3), "it has the errors of what is measured"
    assert np.allclose(told[18], truth[18], rtol=0.5), "but it is near"
    assert truth[21][1, ALONE_S] == pytest.approx(5 * truth[19][1, ALONE_S])
    assert told[19][1, ALONE_S] < 2 * truth[19][1, ALONE_S], "that judges will become slow nobody knows before"
    assert np.allclose(told[39][1], truth[39][1], rtol=0.5), "later it is seen"


def test_before_anything_was_measured_nothing_is_lent() -> None:
    job, split = SimulatedJob(small(judging={"tokens": 600}), 2), Split("coexisting", 4, 1, 1)
    assert job.produced(3, split, LendingSetup(0.1, true_knowledge(3, job.scenario, job.work(3)))).moves > 0
    assert job.produced(3, split, LendingSetup(0.1, UNKNOWN)).moves == 0
    assert job.produced(3, split, LendingSetup(0.1, UNKNOWN)).seconds == job.produced(3, split).seconds


@pytest.mark.parametrize("staleness", [0, 1])
def test_lent_slots_return_while_ranks_train_or_in_the_next_production(staleness: int) -> None:
    job, split = SimulatedJob(small(staleness=staleness, judging={"tokens": 600}), 2), Split("coexisting", 4, 1, 1)
    truth = true_knowledge(3, job.scenario, job.work(3))
    quick, slow = (replace(job.produced(3, split, LendingSetup(0.1, truth)), back_s=cost) for cost in (0.1, 1000.0))
    assert quick.away > 0
    train_s = job.phases(3, split, quick).train_s
    assert job.seconds(3, split, quick) == job.seconds(3, split, replace(quick, back_s=0.0))
    if staleness == 0:
        assert job.seconds(3, split, slow) - job.seconds(3, split, quick) == pytest.approx(1000.0 - train_s)
        return
    assert job.seconds(3, split, slow) == job.seconds(3, split, quick)
    late = job.produced(4, split, LendingSetup(5.0, truth, quick.away, 5.0))
    assert late.seconds > job.produced(4, split, LendingSetup(5.0, truth)).seconds


class Watched(SimulatedJob):
    """Keeps how replicas are lent in each step."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        super().__init__(scenario, seed)
        self.lends: list[LendingSetup] = []

    def produced(self, step: int, split: Split, lend: LendingSetup | None = None) -> SimulatedBatch:
        if lend is not None:
            self.lends.append(lend)
        return super().produced(step, split, lend)


def test_one_step_ahead_a_run_has_what_was_lent_a_change_later() -> None:
    job, costs = Watched(small(staleness=1, steps=12, judging={"tokens": 900}), 2), SwitchCosts(0.5, 1.0)
    play_job(job, StaticPolicy(Split("coexisting", 4, 1, 1)), costs, costs, lends=True)
    assert len(job.lends) == 12
    assert job.lends[0].late == 0
    assert any(one.late > 0 and one.late_s >= 0.5 for one in job.lends[1:])


def test_the_same_seed_is_the_same_job_and_another_seed_another() -> None:
    one, same, other = (SimulatedJob(small(), seed).table() for seed in (7, 7, 8))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def test_where_nothing_was_lent_at_a_low_cost_a_higher_one_gives_the_same() -> None:
    job, fresh = SimulatedJob(small(), 2), SimulatedJob(small(), 2)
    for cost in (0.0, 0.5, 5.0, 60.0):
        job.table(cost)
    assert np.array_equal(job.table(60.0), fresh.table(60.0))


def test_measurements_have_errors_and_are_missing_now_and_then() -> None:
    job = SimulatedJob(small(steps=200), 1)
    split = Split("coexisting", 3, 1, 2)
    seen = [job.measured(step, split) for step in range(200)]
    missing = [one for one in seen if one.seconds is None]
    assert 5 < len(missing) < 45
    off = [one.seconds / job.seconds(one.step, split) for one in seen if one.seconds is not None]
    assert 0.05 < float(np.std(off)) < 0.2


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_scenario_can_be_read_and_begins_with_a_split_that_it_allows(path: Path) -> None:
    scenario = read_scenario(path)
    assert scenario.name == path.stem
    assert scenario.steps >= 200
    assert choose_start(scenario, 1000) in list(feasible(scenario.bounds(0)))


def test_a_scenario_that_is_not_one_is_refused_with_its_key(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("name: a\nwhat: b\nlengths: {meen: 3}\n")
    with pytest.raises(SpecError, match=r"unknown key 'lengths\.meen', did you mean 'mean'\?"):
        read_scenario(wrong)
    wrong.write_text("name: a\nwhat: b\nlosses: [{ad: 3}]\nslotz: 3\n")
    with pytest.raises(SpecError, match=r"'losses\.0\.at' is missing"):
        read_scenario(wrong)
    wrong.write_text("name: a\nwhat: b\nslotz: 3\n")
    with pytest.raises(SpecError, match="unknown key 'slotz', did you mean 'slots'"):
        read_scenario(wrong)
    wrong.write_text("name: a\nwhat: b\nslots: none\n")
    with pytest.raises(SpecError, match="slots: input should be a valid integer"):
        read_scenario(wrong)
    wrong.write_text("{")
    with pytest.raises(SpecError, match="not valid YAML"):
        read_scenario(wrong)
    with pytest.raises(SpecError, match="cannot read"):
        read_scenario(tmp_path / "none.yaml")


@pytest.mark.large  # what it tells changes with the kernel only, and compiling takes 17 s
def test_without_a_compiler_the_results_are_the_same() -> None:
    script = """
import os, sys
if os.environ["NUMBA_DISABLE_JIT"] == "1":
    sys.modules["numba"] = None
from placement.simulator import kernel as compiled
from placement.simulator.job import SimulatedJob
from placement.simulator.scenario import Scenario
job = SimulatedJob(Scenario.model_validate_json(sys.argv[1]), 11)
print(compiled.COMPILES)
print([[float(x).hex() for x in row] for cost in (None, 0.0, 0.5) for row in job.table(cost)])
"""
    pytest.importorskip("numba")
    sizes = {"slots": 5, "steps": 4, "groups": 4, "samples": 4}
    told = Scenario.model_validate({"name": "a", "what": "b", "staleness": 1, "judging": {"tokens": 300}, **sizes})
    command = [sys.executable, "-c", script, told.model_dump_json()]
    plain, compiled = (
        subprocess.run(
            command, env={**os.environ, "NUMBA_DISABLE_JIT": off}, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for off in ("1", "0")
    )
    assert (plain[0], compiled[0]) == ("False", "True")
    assert plain[1] == compiled[1]
    assert "inf" not in plain[1]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_slots_move_to_a_judge_that_becomes_dearer_than_generating_pictures(seed: int) -> None:
    """All pictures have equally many denoising steps, so only the pools' speeds say where a slot helps. The benchmark plays the whole
    scenario; this is a smaller one."""
    scenario = read_scenario(SCENARIOS[0].parent / "pictures" / "judge-slow.yaml")
    assert scenario.judging is not None
    slow = scenario.judging.model_copy(update={"slow_from": 20, "slow_until": 50})
    training = scenario.training.model_copy(update={"sizes": (1, 2, 4)})
    smaller = scenario.changed(steps=60, slots=8, groups=16, samples=4, judging=slow, training=training)
    job = SimulatedJob(smaller, seed)
    run, fixed = play_policy(job, "dynamic", 5.0), best_static(job, switch_costs(job.scenario, seed, 5.0))
    assert run.seconds < 0.95 * fixed.seconds
    before, during, after = (run.splits[step].reward for step in (19, 30, 59))
    assert before < during > after

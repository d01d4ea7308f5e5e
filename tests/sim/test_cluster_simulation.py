"""Whole clusters in simulated time (`simulated_cluster`): under every fault, no prompt is lost and none is trained twice."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from simulated_cluster import Story, tell_story
from simulated_pictures import WAYS

from controllers.rules.actions import Intent
from controllers.rules.decide import decide
from controllers.rules.view import JobView, Memo
from controllers.rules.waits import current_waits
from gcore.train.rank import feed as feed_state
from gcore.types import Medium, PromptRef

FIRST = int(os.environ.get("GCORE_SIM_FIRST", "0"))
CLUSTERS = int(os.environ.get("GCORE_SIM_CLUSTERS", "2"))
"""`make test-large` runs 16, `make sim` any number."""
SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.parametrize("seed", range(FIRST, FIRST + CLUSTERS))
def test_job_completes_with_correct_accounts_under_random_faults(seed: int) -> None:
    ended = tell_story(Story.of(seed))
    assert not ended.wrong, ended.why
    assert ended.steps > 0


@pytest.mark.parametrize("seed", range(FIRST + 1, FIRST + max(2, CLUSTERS // 8)))
def test_job_on_nodes_without_a_shared_folder_completes_with_correct_accounts(seed: int) -> None:
    """Now and then one of them is lost with its disk, and another comes under its name."""
    ended = tell_story(replace(Story.of(seed), copies=2 + seed % 2))
    assert not ended.wrong, ended.why
    assert ended.steps > 0


def test_the_same_seed_is_the_same_history_in_any_process() -> None:
    """A failing seed can be looked at again."""
    seed = 5
    here = tell_story(Story.of(seed)).history
    assert any("* " in line for line in here)
    again = "\n".join(tell_story(Story.of(seed)).history)
    assert again == "\n".join(here)
    program = (
        "import logging; logging.disable(logging.CRITICAL)\n"
        "from simulated_cluster import Story, tell_story\n"
        f"print('\\n'.join(tell_story(Story.of({seed})).history))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(SUPPORT)}
    there = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=100
    )
    assert there.stdout.rstrip("\n") == "\n".join(here)


def test_a_history_tells_who_did_what_and_what_happened_to_them() -> None:
    ended = tell_story(Story(seed=3, nodes=2, steps=4, faults=("kill_daemon",), fault_every_s=4.0))
    assert not ended.wrong, ended.why
    told = "\n".join(ended.history)
    assert "* kill -9 of n" in told
    assert "head 1 at 0.1" in told
    assert "seal 0.1.1 SEALED by n" in told
    assert "has applied 0.1.1" in told


KINDS = {
    "stops": ("stop_daemon", "stop_worker"),
    "cuts": ("cut", "cut_one_way", "compact"),
    "kills": ("kill_daemon", "kill_worker", "kill_node", "kill_all"),
    "comes and goes": ("join", "leave"),
    "store": ("outage", "new_leader", "compact", "jump", "damage"),
}


@pytest.mark.parametrize("kinds", KINDS.values(), ids=list(KINDS))
def test_each_kind_of_fault_alone_is_lived_through(kinds: tuple[str, ...]) -> None:
    """Each seed has rare events, such as a stop for three lease times, or a one-way partition while the store compacts."""
    ended = tell_story(Story(seed=7, nodes=3, steps=12, faults=kinds, fault_every_s=3.0, faults_s=60.0))
    assert not ended.wrong, ended.why
    assert ended.steps == 12
    assert ended.faults >= 3


@pytest.mark.parametrize("room", [None, 1.0])
def test_pictures_of_tools_are_trained_while_stores_lose_blobs_and_restart(
    room: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a store has room for the pictures of one step only."""
    trained: list[Medium] = []
    add_blobs = feed_state.add_blobs

    def note(state: feed_state.FeedState, blobs: list[str]) -> feed_state.FeedState:
        held = add_blobs(state, blobs)
        trained.extend(m for group in held.groups.values() for one in group.samples.values() for m in one.media)
        return held

    monkeypatch.setattr(feed_state, "add_blobs", note)
    faults = ("lose_blobs", "restart_blobs", "kill_daemon", "cut_one_way", "kill_worker")
    story = Story(seed=1, pictures=True, shown=2, room=room, faults=faults, fault_every_s=3.0, faults_s=40.0)
    ended = tell_story(story)
    assert not ended.wrong, ended.why
    assert ended.steps == 8
    assert trained
    assert any("lose" in line and "blobs" in line for line in ended.history)


@pytest.mark.parametrize("way", WAYS)
def test_generated_pictures_are_trained_while_stores_lose_blobs_and_restart(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a store has room for the blobs of one step only: states, pictures and embeddings of all samples. Samples
    with equal noise and weights would have equal pictures."""
    pictures: dict[str, set[tuple[PromptRef, int]]] = {}
    add_blobs = feed_state.add_blobs

    def note(state: feed_state.FeedState, blobs: list[str]) -> feed_state.FeedState:
        held = add_blobs(state, blobs)
        for group in held.groups.values():
            for index, sample in group.samples.items():
                made = next(one.sha256 for one in sample.media if one.kind == "decoded")
                pictures.setdefault(made, set()).add((group.ref, index))
        return held

    monkeypatch.setattr(feed_state, "add_blobs", note)
    faults = ("lose_blobs", "restart_blobs", "kill_daemon", "cut_one_way", "kill_worker")
    room = {"all": 1.0, "share": 2.0}.get(way)
    story = Story(seed=1, generates=way, room=room, faults=faults, fault_every_s=3.0, faults_s=40.0)
    ended = tell_story(story)
    assert not ended.wrong, ended.why
    assert ended.steps == 8
    assert len(pictures) > 8
    assert all(len(samples) == 1 for samples in pictures.values())


def test_engines_put_blobs_into_the_room_that_is_reserved_for_them() -> None:
    """Otherwise the reservation of one step's blobs keeps them out of a store that has room for no more."""
    with_bound, without = (
        tell_story(Story(seed=1, nodes=1, generates="all", room=room, faults_s=0.0)) for room in (1.0, None)
    )
    assert not with_bound.wrong, with_bound.why
    assert with_bound.steps == without.steps == 8
    assert with_bound.seconds < 4 * without.seconds


@pytest.mark.parametrize("seed", [722, 3499, 5433])
def test_a_rank_gets_room_for_blobs_of_another_node(seed: int) -> None:
    """The store of its own node is full of groups in no seal (722), of duplicates of sealed ones (3499), or of
    a reservation for a group that was dropped (5433)."""
    ended = tell_story(Story.of(seed))
    assert not ended.wrong, ended.why


def test_a_daemon_that_is_asked_to_end_hands_over_in_a_simulation_too() -> None:
    """What production's daemon does with the jobs it works on, the simulated one does with its own: it knows them."""
    ended = tell_story(Story(seed=7, nodes=3, steps=6, faults=("leave",), fault_every_s=3.0, faults_s=60.0))
    assert not ended.wrong, ended.why
    assert any("leave: won" in line for line in ended.history)


@pytest.mark.parametrize("seed", [5, 6])
def test_cached_decisions_equal_recomputed_ones(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rule's cache gives the same decisions as an empty one."""
    looks = 0

    def both(view: JobView) -> tuple[Intent, ...]:
        nonlocal looks
        looks += 1
        intents, waits = decide(view), list(current_waits(view))
        afresh = replace(view, remembered=Memo())
        assert decide(afresh) == intents
        assert list(current_waits(afresh)) == waits
        return intents

    monkeypatch.setattr("controllers.job.reconciler.decide", both)
    ended = tell_story(replace(Story.of(seed), staleness=(0, 2)[seed % 2], copies=(None, 2)[seed // 2 % 2]))
    assert not ended.wrong, ended.why
    assert looks > 100


@pytest.mark.parametrize("seed", range(FIRST + 1, FIRST + max(2, CLUSTERS // 4)))
def test_job_on_time_shared_slots_completes_with_correct_accounts(seed: int) -> None:
    """Engines and ranks pass a slot's memory to each other, while any process involved may be stopped, partitioned or dead."""
    ended = tell_story(replace(Story.of(seed), staleness=0, part=None, turns=True, copies=(None, None, 2)[seed % 3]))
    assert not ended.wrong, ended.why
    assert ended.steps > 0
    assert any("gave its memory back" in line for line in ended.history)


def test_where_nothing_happens_no_engine_has_its_memory_while_the_rank_beside_it_has_its_own() -> None:
    ended = tell_story(Story(seed=5, nodes=3, steps=8, prompts=40, faults_s=0.0, turns=True))
    assert not ended.wrong, ended.why
    told = "\n".join(ended.history)
    assert told.count("has its memory again") == 3 * ended.steps == 24
    assert "at the same time" not in told

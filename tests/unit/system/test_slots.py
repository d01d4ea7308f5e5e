"""Slot names, their meaning, and invalid combinations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.system.slots import bound_cores, count_threads, is_cpu, is_cuda, slot_problem, slots_problem, worker_cores


@pytest.mark.parametrize(
    ("slot", "cores"),
    [
        pytest.param("cpu:0-3", {0, 1, 2, 3}, id="a range"),
        pytest.param("cpu:0-1,8-9,12", {0, 1, 8, 9, 12}, id="several ranges"),
        pytest.param("cpu:5-5", {5}, id="one core that is named"),
        pytest.param("cpu:5", set(), id="one core, whichever"),
        pytest.param("cuda:0", set(), id="a GPU"),
        pytest.param("cuda:GPU-8f6d2c1e-0000-1111-2222-333344445555", set(), id="a GPU by its name"),
        pytest.param("cuda:MIG-8f6d2c1e-0000-1111-2222-333344445555", set(), id="a part of a GPU"),
        pytest.param("emulated:31", set(), id="none"),
    ],
)
def test_a_slot_binds_to_the_cores_that_it_names_and_to_no_others(slot: str, cores: set[int]) -> None:
    assert slot_problem(slot) == ""
    assert bound_cores(slot) == cores


@pytest.mark.parametrize(
    ("slot", "said"),
    [
        pytest.param("gpu:0", "is not a slot", id="another kind"),
        pytest.param("cuda:0-7", "is not a slot", id="a range of GPUs"),
        pytest.param("cpu:", "is not a slot", id="no number"),
        pytest.param("cpu:01", "is not a slot", id="a leading zero"),
        pytest.param("cpu:0,1", "is not a slot", id="no range at the beginning"),
        pytest.param("cpu:3-0", "write 0-3", id="counts down"),
        pytest.param("cpu:0-3,2", "names a core twice", id="twice"),
        pytest.param("cpu:0-5000", "a core above 4095", id="too many"),
        pytest.param("cpu:0-99999999999999999999", "a core above 4095", id="far too many"),
        pytest.param("x" * 5000, "is not a slot", id="long"),
    ],
)
def test_invalid_slot_is_reported_in_one_sentence(slot: str, said: str) -> None:
    problem = slot_problem(slot)
    assert said in problem
    assert len(problem) < 250
    assert bound_cores(slot) == frozenset()


@pytest.mark.parametrize(
    ("slots", "said"),
    [
        pytest.param(("cuda:0", "cuda:0"), "is listed twice", id="twice"),
        pytest.param(("cpu:0-3", "cpu:3-5"), "both contain core 3", id="a core in two"),
        pytest.param(("cpu:0-3", "cpu:9"), "for all CPU slots, or for none", id="named and not"),
        pytest.param(("cpu:0", "nothing"), "'nothing' is not a slot", id="one that is none"),
        pytest.param(tuple(f"cpu:{n}" for n in range(4097)), "but a node may have at most", id="too many"),
    ],
)
def test_incompatible_slots_of_a_node_are_reported(slots: tuple[str, ...], said: str) -> None:
    assert said in slots_problem(slots)


@pytest.mark.parametrize(
    "slots", [("cuda:0", "cuda:1", "cpu:0-3", "cpu:4-7"), ("cpu:0", "cpu:1"), ("emulated:0",)], ids=lambda s: s[0]
)
def test_compatible_slots_are_no_problem(slots: tuple[str, ...]) -> None:
    assert slots_problem(slots) == ""


def test_a_worker_runs_on_all_cores_of_its_slots_with_a_thread_for_each() -> None:
    assert worker_cores(("cpu:4-5", "cpu:0-1")) == (0, 1, 4, 5)
    assert count_threads(("cpu:4-5", "cpu:0-1")) == 4
    assert count_threads(("cpu:0", "cpu:1")) == 2
    assert count_threads(("cuda:0", "cuda:1")) == 1
    assert worker_cores(("cpu:0", "cuda:0")) == ()


@given(st.lists(st.integers(0, 4095), min_size=1, max_size=40, unique=True))
def test_every_set_of_cores_has_a_name_that_means_it(cores: list[int]) -> None:
    first, *rest = cores
    slot = f"cpu:{first}-{first}" + "".join(f",{core}" for core in rest)
    assert slots_problem((slot,)) == ""
    assert bound_cores(slot) == frozenset(cores)
    assert count_threads((slot,)) == len(cores)


@given(st.text(max_size=60))
def test_any_text_is_a_slot_or_says_why_not(text: str) -> None:
    known = is_cuda(text) or is_cpu(text) or text.startswith("emulated:")
    assert known or slot_problem(text)
    assert all(0 <= core < 4096 for core in bound_cores(text))

"""A train world resumes from copies in its nodes' memory, at another size, with the losses of an uninterrupted run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rank_worlds import run_worlds

PROGRAM = Path(__file__).with_name("train_worlds_program.py")
STEPS = 6
SIZES = {"zero1": (2, 1, 3), "half": (2, 2, 2), "critic": (2, 1, 3), "fsdp2": (2, 1, 3), "changed": (2, 1, 3)}
SIZES["adapters"] = (2, 1, 3)
SIZES |= {"groups": (4, 2, 4), "adapters in groups": (4, 2, 4)}
"""Of the worlds, by case: of ZeRO stage 1, 2 and 3, of FSDP2, and of ZeRO, FSDP2 and ZeRO again, whole and with adapters, and in
sequence groups of two. Beside them runs a world of two ranks: of one group."""
NUMBERS = ("loss", "grad_norm", "kl_mean", "value_loss", "critic_grad_norm", "learning_rate")

pytestmark = [
    pytest.mark.chaos,  # many worlds of real ranks; the pieces have tests of their own
    pytest.mark.timeout(600),  # everything is run once, for the first test
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything run once."""
    folder = tmp_path_factory.mktemp("elastic")
    run_worlds(PROGRAM, folder, "elastic", limit_s=560)
    return folder


def losses(folder: Path, world: str, rank: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / f"losses-{world}-{rank}.json").read_text())
    return found


@pytest.mark.parametrize("case", SIZES)
def test_worlds_of_other_sizes_go_on_from_copies_with_the_losses_of_an_uninterrupted_run(
    folder: Path, case: str
) -> None:
    whole = losses(folder / f"{case}-whole", "w0", 0)
    parts = [one for lineage in range(3) for one in losses(folder / f"{case}-parts", f"w{lineage}", 0)]
    assert len(whole) == len(parts) == STEPS
    assert len({round(one["loss"], 6) for one in whole}) == STEPS, "a run whose loss stands still proves nothing"
    exact = len(set(SIZES[case])) == 1
    for step, (expected, found) in enumerate(zip(whole, parts, strict=True), start=1):
        for number in NUMBERS:
            if number in expected:
                wanted = expected[number] if exact else pytest.approx(expected[number], rel=1e-4, abs=1e-5)
                assert found[number] == wanted, f"{number} of step {step}"
    if case in ("critic", "fsdp2", "groups"):
        assert "value_loss" in whole[0]
    assert not list((folder / f"{case}-parts").glob("checkpoints/*")), "nothing came from a checkpoint"


@pytest.mark.parametrize("case", SIZES)
def test_every_rank_of_a_world_reports_the_same(folder: Path, case: str) -> None:
    for lineage, size in enumerate(SIZES[case]):
        reports = [losses(folder / f"{case}-parts", f"w{lineage}", rank) for rank in range(size)]
        assert all(report == reports[0] for report in reports)


@pytest.mark.parametrize("case", SIZES)
def test_two_states_lie_in_memory_at_most_and_each_shard_of_them_on_two_nodes(folder: Path, case: str) -> None:
    size = SIZES[case][2]
    files = {path.name for path in (folder / f"{case}-parts" / "memory").rglob("*")} - set("abcd")
    assert {name.split(".")[0] for name in files} == {"w2-2-5-1", "w2-2-6-1"}
    for shard in range(size):
        nodes = list((folder / f"{case}-parts" / "memory").glob(f"*/w2-2-6-1.{shard}.json"))
        assert len(nodes) == 2


def test_a_step_whose_state_finds_no_room_in_memory_is_trained_all_the_same(folder: Path) -> None:
    gone, small = (losses(folder / "zero1-parts", world, 0) for world in ("w5", "w6"))
    assert [one["copied_bytes"] for one in gone] == [0, 0]
    assert all("copied_bytes" not in one for one in small), "they are not tried at all"
    assert [one["loss"] for one in gone] == [one["loss"] for one in small]


def test_a_state_that_is_not_there_whole_or_is_damaged_is_refused_by_every_rank_with_a_sentence(folder: Path) -> None:
    lacking = (folder / "zero1-parts" / "refused-w3-0").read_text()
    assert "no node of this world has shard 1 of 3 of step 6 of world w2 in memory" in lacking
    for rank in range(2):
        damaged = (folder / "zero1-parts" / f"refused-w4-{rank}").read_text()
        assert "the replicas of shard 0 of step 6 of world w2 are damaged" in damaged


def test_ranks_refuse_replicas_with_adapters_of_another_base_model(folder: Path) -> None:
    for rank in range(2):
        said = (folder / "adapters-parts" / f"refused-w3-{rank}").read_text()
        assert "the in-memory replicas have adapters of another base model" in said
        assert str(folder / "model") in said

"""The outputs of an emulated rank: receipts like a real rank's, staged folders, complete checkpoints without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ready_seals import ready_seal

from gcore.engines.emulated.law import ReplicaTiming, TimingModel
from gcore.engines.emulated.rank import STAGED, EmulatedTrainer
from gcore.errors import DataError
from gcore.ledger.balance import balance_samples
from gcore.ledger.records.chain import SealedGroup
from gcore.models.export import copy_model
from gcore.models.layout import receipts_file, verify_checkpoint, weights_folder
from gcore.system.clock import SystemClock
from gcore.testing.models import rank_launch
from gcore.train.checkpoint.run_files import BackgroundWriter, RetryingWriter
from gcore.train.rank.feed import StepInput
from gcore.train.rank.launch import StepResult
from gcore.types import PromptRef, Version

LAW = TimingModel(speedup=1e6, event_noise=0.0, replica_noise=0.0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


class Rank:
    """One rank that has loaded."""

    def __init__(self, tmp_path: Path, model: Path, rank: int = 0, ranks: int = 2, start: dict[str, Any] | None = None):
        spec = {
            "name": "j",
            "model": {"path": str(model)},
            "data": {"path": "d"},
            "flow": {"steps": 6, "groups_per_step": 4, "samples_per_prompt": 2},
            "rollout": {"max_new_tokens": 4},
            "checkpoint": {"every": 2},
        }
        self.run_dir, self.rank, self.ranks = tmp_path / "run", rank, ranks
        self.told: list[str] = []
        self.writer = BackgroundWriter(self.run_dir, "w")
        launch = rank_launch(spec, self.run_dir, rank=rank, world_size=ranks, start=start)
        self.trainer = EmulatedTrainer(launch, ReplicaTiming(LAW, f"rank {rank}"), self.writer, SystemClock())
        self.trainer.load(self.told.append)

    def step(self, number: int) -> StepResult:
        groups = [
            SealedGroup(
                ref=PromptRef(0, shard, number),
                digest=f"{shard}-{number}",
                prompt_tokens=3,
                response_tokens=(2, 4),
                versions=(Version(0, number - 1),),
                holder="n",
            )
            for shard in range(4)
        ]
        seal = ready_seal(groups, step=number, ranks=self.ranks)
        result = self.trainer.run(StepInput(seal, balance_samples(seal), self.rank, {}), self.told.append)
        assert self.writer.wait(30)
        return result


def test_a_step_leaves_a_receipt_of_the_ranks_share_and_tells_no_loss(tmp_path: Path, model: Path) -> None:
    for rank in (0, 1):
        one = Rank(tmp_path, model, rank)
        result = one.step(1)
        assert result.metrics["emulated"] == 1.0
        assert "loss" not in result.metrics
        assert result.metrics["start_seconds"] > 0
        (line,) = receipts_file(one.run_dir, "w", rank).read_text().splitlines()
        receipt = json.loads(line)
        assert (receipt["token"], receipt["rank"], receipt["loss"]) == ("0.1.1", rank, None)
        assert sum(len(samples) for _, _, samples in receipt["groups"]) == 4
        assert {"loading", "update", "saving"} <= set(one.told)


def test_only_the_first_rank_stages_and_only_the_newest_versions_stay(tmp_path: Path, model: Path) -> None:
    second = Rank(tmp_path, model, 1)
    second.step(1)
    assert not (second.run_dir / "weights").exists()
    first = Rank(tmp_path, model, 0)
    for number in range(1, 6):
        first.step(number)
    staged = sorted(path.name for path in (first.run_dir / "weights").iterdir())
    assert staged == [f"0-{number}" for number in range(6 - STAGED, 6)]
    folder = weights_folder(first.run_dir, Version(0, 5))
    assert (folder / "config.json").is_file()
    assert not (folder / "model.safetensors").exists()


def test_a_disk_that_takes_nothing_is_tried_again(tmp_path: Path, model: Path) -> None:
    one = Rank(tmp_path, model)
    weights, shown = one.run_dir / "weights", list[str]()
    weights.rename(tmp_path / "aside")
    weights.write_text("a file where the folder should be")

    def mend(trouble: str) -> None:
        shown.append(trouble)
        if trouble:
            weights.unlink()
            (tmp_path / "aside").rename(weights)

    one.trainer._insisting = RetryingWriter(mend, 60.0, again_s=0.01)
    one.step(1)
    assert shown[0].startswith("the weights of step 1 cannot be written (Not a directory)")
    assert shown[1:] == [""]
    assert (weights / "0-1").is_dir()


def test_a_checkpoint_that_is_due_is_whole_and_another_world_goes_on_from_it(tmp_path: Path, model: Path) -> None:
    one = Rank(tmp_path, model)
    one.step(1)
    assert one.writer.saved is None
    one.step(2)
    assert one.writer.saved is not None
    folder = one.run_dir / one.writer.saved.file
    assert verify_checkpoint(folder).step == 2
    again = Rank(tmp_path, model, start={"step": 2, "checkpoint": one.writer.saved.file})
    again.step(3)
    with pytest.raises(DataError, match="has no weights"):
        copy_model(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()

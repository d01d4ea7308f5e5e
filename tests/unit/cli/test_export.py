"""`gcore export` without a cluster: it names the job of the copied model, and reports a folder that it cannot create."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from controllers.cli.commands.checkpoints import export
from gcore.errors import Unreachable, UsageError
from gcore.models.layout import MANIFEST_FILE, CheckpointDamaged, Manifest, file_entry


def make_checkpoint(run_dir: Path, step: int, config: dict[str, Any]) -> Path:
    folder = run_dir / "checkpoints" / f"0-{step}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("model", "exp_avg", "exp_avg_sq"):
        (folder / f"{name}.safetensors").write_bytes(b"weights")
    files = {path.name: file_entry(path) for path in folder.iterdir()}
    manifest = Manifest(job_uid="u", world="w", lineage=0, step=step, updates=step, files=files)
    (folder / MANIFEST_FILE).write_bytes(manifest.encode())
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Two finished runs of one name; the second is the newer."""
    for age, uid in enumerate(("u1", "u2")):
        run = tmp_path / "home" / "runs" / f"sums-{uid}"
        checkpoint = make_checkpoint(run, 40, {"uid": uid})
        summary = run / "summary.json"
        summary.write_text(json.dumps({"job": "sums", "uid": uid, "checkpoint": str(checkpoint)}))
        os.utime(summary, (age, age))
    return tmp_path / "home"


@pytest.mark.parametrize(("job", "uid"), [("sums", "u2"), ("u1", "u1")], ids=["a name: the newest", "a uid"])
def test_an_export_names_the_job_and_the_checkpoint(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], job: str, uid: str
) -> None:
    export(job, tmp_path / "to", home)
    assert json.loads((tmp_path / "to" / "config.json").read_text()) == {"uid": uid}
    said = capsys.readouterr().out
    assert f"job sums ({uid}), found in {home / 'runs'} because no cluster is running, is in {tmp_path / 'to'}" in said
    assert f"sums-{uid}/checkpoints/0-40" in said


def test_a_name_whose_newest_job_has_not_finished_does_not_mean_an_older_one(home: Path, tmp_path: Path) -> None:
    for uid, age in (("u3", 2), ("u0", 0)):  # interrupted just now; given up long ago
        run = home / "runs" / f"sums-{uid}"
        run.mkdir()
        (run / "events.jsonl").write_text("")
        os.utime(run / "events.jsonl", (age, age))
    with pytest.raises(Unreachable, match=r"the newest job 'sums' \(u3\) has not finished.*by its uid: u2"):
        export("sums", tmp_path / "to", home)
    assert not (tmp_path / "to").exists()
    export("u2", tmp_path / "to", home)
    assert json.loads((tmp_path / "to" / "config.json").read_text()) == {"uid": "u2"}


def test_a_job_that_was_given_up_before_the_last_one_finished_is_in_nobodys_way(home: Path, tmp_path: Path) -> None:
    for name in ("sums-u0", "sums-more-u9"):  # the second is of another name
        (home / "runs" / name).mkdir()
        (home / "runs" / name / "events.jsonl").write_text("")
    os.utime(home / "runs" / "sums-u0" / "events.jsonl", (0, 0))
    export("sums", tmp_path / "to", home)
    assert json.loads((tmp_path / "to" / "config.json").read_text()) == {"uid": "u2"}


@pytest.mark.parametrize("best", [False, True])
def test_in_a_home_that_was_copied_or_moved_its_own_checkpoint_is_exported(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], best: bool
) -> None:
    give_best(home, "u1", 32, str(make_checkpoint(home / "runs" / "sums-u1", 32, {"uid": "u1"})))
    there = tmp_path / "copied"
    shutil.copytree(home, there)
    for config in home.glob("runs/*/checkpoints/*/config.json"):
        config.write_text("damaged since")
    export("u1", tmp_path / "to", there, best=best)
    assert json.loads((tmp_path / "to" / "config.json").read_text()) == {"uid": "u1"}
    assert f"is {there / 'runs' / 'sums-u1' / 'checkpoints'}" in capsys.readouterr().out.replace("\n", "")
    shutil.rmtree(there / "runs" / "sums-u1" / "checkpoints")
    with pytest.raises(UsageError, match="the checkpoint is not on this machine"):
        export("u1", tmp_path / "other", there, best=best)


@pytest.mark.parametrize("gone", [MANIFEST_FILE, "exp_avg.safetensors"])
def test_a_checkpoint_that_cannot_be_proved_whole_is_not_handed_out(home: Path, tmp_path: Path, gone: str) -> None:
    (home / "runs" / "sums-u1" / "checkpoints" / "0-40" / gone).unlink()
    with pytest.raises(CheckpointDamaged):
        export("u1", tmp_path / "to", home)
    assert not (tmp_path / "to").exists()


def give_best(home: Path, uid: str, step: int, checkpoint: str) -> None:
    """What the run's evaluations found best."""
    file = home / "runs" / f"sums-{uid}" / "summary.json"
    best = {"step": step, "metric": "accuracy", "value": 0.985, "checkpoint": checkpoint, "lineage": 0}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"best": best}))


def test_the_best_checkpoint_is_exported_in_place_of_the_newest(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = make_checkpoint(home / "runs" / "sums-u1", 32, {"best": True})
    give_best(home, "u1", 32, str(checkpoint))
    export("u1", tmp_path / "to", home, best=True)
    assert json.loads((tmp_path / "to" / "config.json").read_text()) == {"best": True}
    assert f"its best checkpoint (step 32, accuracy 98.5%) is {checkpoint}" in capsys.readouterr().out


def test_a_best_that_is_not_there_to_be_exported_is_a_sentence(home: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"has no best checkpoint: none of its steps was evaluated, or .* without --best"
    ):
        export("u1", tmp_path / "to", home, best=True)
    give_best(home, "u1", 0, "")
    with pytest.raises(UsageError, match=r"has no checkpoint \(step 0, accuracy 98\.5%: the initial model\)"):
        export("u1", tmp_path / "to", home, best=True)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("to", ["file/to", "/proc/gcore/to"], ids=["below a file", "where nothing can be made"])
def test_a_folder_that_cannot_be_made_is_a_sentence(home: Path, tmp_path: Path, to: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="the model cannot be written here"):
        export("sums", tmp_path / to, home)


def test_a_job_that_nobody_knows_is_not_found(home: Path, tmp_path: Path) -> None:
    with pytest.raises(
        Unreachable,
        match=r"no local cluster is running, and there is no finished job 'other' \(finished jobs: 'sums'\)",
    ):
        export("other", tmp_path / "to", home)
    with pytest.raises(Unreachable, match=r"no finished job 'other'\. Start"):
        export("other", tmp_path / "to", tmp_path / "empty")

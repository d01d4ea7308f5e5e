"""Suggested commands work on the user's machine, and missing GPUs are reported early."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
from builders import SPEC
from typer.testing import CliRunner

from controllers.cli.local import check_gpus, check_timing_model, count_gpus
from controllers.cli.main import app
from controllers.cli.output import prepare_hint
from controllers.cli.terminal import program_name, with_program_name
from gcore.config.data import EvalSpec
from gcore.config.reward import RewardSpec
from gcore.engines.emulated.launch import LAW_FILE
from gcore.engines.emulated.law import read_timing_model
from gcore.errors import GcoreError, UsageError
from gcore.quickstart import NAMES
from gcore.quickstart.__main__ import EXAMPLES


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A gcore in a virtual environment of the current folder, and none on PATH."""
    path = tmp_path / ".venv" / "bin" / "gcore"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("sys.argv", [str(path), "run"])
    return path


def test_off_the_path_the_program_is_named_as_it_was_called(script: Path) -> None:
    assert program_name() == ".venv/bin/gcore"
    assert with_program_name("Start one with `gcore up`, or go on") == "Start one with `.venv/bin/gcore up`, or go on"


def test_from_another_folder_it_is_named_in_full(
    script: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert program_name() == str(script)


def test_on_the_path_the_program_is_gcore(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(script.parent))
    assert program_name() == "gcore"


def test_another_gcore_on_the_path_is_not_the_one_that_was_called(
    script: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "other" / "gcore"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(other.parent))
    assert program_name() == ".venv/bin/gcore"


def test_the_demonstration_calls_the_script_so_that_what_it_tells_to_type_works(tmp_path: Path) -> None:
    demo = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "demo.py"))
    script = Path(demo["run_command"](tmp_path / "spec.yaml", tmp_path)[0])
    assert (script.name, script.parent) == ("gcore", Path(sys.executable).parent)
    assert script.exists()
    assert demo["best_constant"](["1", "0", "1", "2"]) == ("1", 0.5)


def test_the_demonstration_says_nothing_about_constant_answers_to_prompts_without_answers(tmp_path: Path) -> None:
    demo = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "demo.py"))
    (tmp_path / "eval.jsonl").write_text('{"prompt": "red northwest", "colour": "red"}\n')
    (tmp_path / "answered.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    answered = "The best constant answer, '2', is right for 100.0% of the 1 held-out prompts."
    for file, reward, said in (("eval", "length", ""), ("answered", "exact", answered)):
        evaluated = EvalSpec(path=str(tmp_path / f"{file}.jsonl"))
        spec = SPEC.model_copy(update={"eval": evaluated, "reward": RewardSpec(name=reward)})
        assert demo["describe_best_constant"](spec, tmp_path) == said


def test_gpus_are_counted_by_the_driver_s_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert count_gpus(tmp_path) == 2
    check_gpus(2, tmp_path)
    with pytest.raises(UsageError, match=r"needs 3 GPUs, but this machine has 2 GPUs.*cuda:2"):
        check_gpus(3, tmp_path)


def test_gpus_that_are_not_there_are_refused_with_what_to_use_instead(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--slots: cuda:1 needs 1 GPU, but this machine has no GPU.*cpu:2"):
        check_gpus(1, tmp_path)


def test_where_it_cannot_be_told_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dxg").touch()
    check_gpus(8, tmp_path)
    check_gpus(8, tmp_path / "absent")


def test_the_law_of_emulated_devices_gets_its_whole_path_and_one_that_is_none_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "law.json").write_text('{"speedup": 4.0}')
    (tmp_path / "none.json").write_text('{"sped": 1}')
    environment = {LAW_FILE: "law.json"}
    check_timing_model(environment)
    assert environment == {LAW_FILE: str(tmp_path / "law.json")}
    check_timing_model({})
    with pytest.raises(UsageError, match=r"GCORE_EMULATED_LAW: .*/none\.json: invalid timing model: sped"):
        check_timing_model({LAW_FILE: "none.json"})
    with pytest.raises(UsageError, match=r"GCORE_EMULATED_LAW=law\.json: the path is relative.*absolute path"):
        read_timing_model({LAW_FILE: "law.json"})


def test_an_error_about_an_examples_file_that_is_not_there_says_what_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = tmp_path / ".cache" / "examples"
    lost = f"{here}/arithmetic-judge/model: the model folder does not exist"
    assert prepare_hint(lost) == ". Create it with `gcore prepare arithmetic-judge`"
    away = f"{tmp_path}/x/.cache/examples/arithmetic"
    assert (
        prepare_hint(f"{away}/train.jsonl: cannot read") == f". Create it with `gcore prepare arithmetic --to {away}`"
    )
    (here / "arithmetic-judge").mkdir(parents=True)
    assert prepare_hint(lost) == "", "it was prepared, and is damaged"
    assert prepare_hint("/models/m: the model folder does not exist") == ""
    assert prepare_hint(lost.replace("judge", "judgex")) == "", "there is no such example"


def test_the_help_of_prepare_names_every_example() -> None:
    assert tuple(EXAMPLES) == NAMES
    shown = CliRunner().invoke(app, ["prepare", "--help"]).stdout
    assert all(re.search(rf"gcore prepare {name}\b", shown) for name in NAMES)
    assert all(name in shown.partition("Options")[0] for name in NAMES)


def test_a_home_that_is_a_link_to_itself_is_named_in_a_sentence(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.symlink_to(home)
    ended = CliRunner().invoke(app, ["down", "--home", str(home)])
    assert (ended.exit_code, ended.output) == (0, f"No cluster was running in {home}.\n")
    begun = CliRunner().invoke(app, ["up", "--home", str(home)])
    assert isinstance(begun.exception, GcoreError)
    assert str(home) in str(begun.exception)

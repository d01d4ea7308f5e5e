"""`gcore init`: it writes valid files, changes no existing one, and leaves nothing partial."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.cli.commands.specs import init
from gcore.config import load_spec
from gcore.data.dataset import Dataset
from gcore.errors import GcoreError, UsageError
from gcore.quickstart import starter
from gcore.quickstart.starter import TASKS, StarterModel, StarterTask, UserModel, package_name, project_files

SORT = TASKS["sort"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """In an empty folder, with a warm start of a few updates: its model is right on nothing."""
    monkeypatch.chdir(tmp_path)
    write = starter.write_model

    def few_updates(*arguments, **options):  # type: ignore[no-untyped-def]
        return write(*arguments, **options, updates=2, must_fit=False)

    monkeypatch.setattr(starter, "write_model", few_updates)
    return tmp_path


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """In an empty folder, with a file in place of the model."""

    def write_file(task: StarterTask, folder: Path, **options: object) -> float:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").touch()
        return 0.3

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(starter, "write_model", write_file)
    return tmp_path


@pytest.mark.parametrize("task", TASKS)
def test_the_project_is_whole_and_its_spec_names_what_is_there(quick: Path, task: str) -> None:
    init(Path("mine"), task=task)
    assert [path.name for path in quick.iterdir()] == ["mine"]
    spec = load_spec(quick / "mine" / "grpo.yaml")
    assert (spec.name, spec.reward.name) == ("mine", "mine")
    assert spec.data.path is not None
    assert spec.eval.path is not None
    assert (Path(spec.model.path) / "model.safetensors").is_file()
    for path, count in ((spec.data.path, 2000), (spec.eval.path, 200)):
        with Dataset.open(Path(path), prompt_field="prompt", answer_fields=("answer",), cache_dir=quick) as data:
            assert len(data) == count
    assert spec.rollout.max_new_tokens == TASKS[task].longest_answer + 1
    toml = tomllib.loads((quick / "mine" / "pyproject.toml").read_text())
    assert toml["project"]["entry-points"]["gcore.rewards"] == {"mine": "mine.reward:score"}
    for file in (quick / "mine").rglob("*.py"):
        compile(file.read_text(), str(file), "exec")


def test_the_projects_tests_pass_with_plain_pytest(untrained: Path) -> None:
    init(Path("some-name"))
    project = untrained / "some-name"
    info = project / "src" / "some_name-0.1.0.dist-info"  # as pip would leave it
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-name\nVersion: 0.1.0\n")
    toml = tomllib.loads((project / "pyproject.toml").read_text())
    ((name, value),) = toml["project"]["entry-points"]["gcore.rewards"].items()
    (info / "entry_points.txt").write_text(f"[gcore.rewards]\n{name} = {value}\n")
    environment = os.environ | {"PYTHONPATH": f"{project / 'src'}{os.pathsep}{Path(__file__).parents[3]}"}
    command = [sys.executable, "-m", "pytest", "-q"]
    ended = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "10 passed" in ended.stdout


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Sorting", "not a valid project name"),
        ("9lives", "not a valid project name"),
        ("a b", "not a valid project name"),
        ("ends-", "not a valid project name"),
        ("x" * 41, "not a valid project name"),
        ("class", "Python already has a keyword or module"),
        ("match", "Python already has a keyword or module"),
        ("json", "Python already has a keyword or module"),
        ("gcore", "already installed"),
        ("torch", r"already installed \(.*\). Choose another name$"),
        ("numeric", "gcore already provides a reward 'numeric'"),
    ],
)
def test_a_name_that_cannot_be_is_refused_before_anything_is_made(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        init(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@given(st.from_regex(r"[a-z]([a-z0-9_-]{0,38}[a-z0-9])?", fullmatch=True))
def test_every_name_that_is_taken_makes_a_package_and_a_job(name: str) -> None:
    try:
        package = package_name(name)
    except UsageError:  # Python, or a package that is installed, is called so
        return
    assert package.isidentifier()
    assert f"name: {name}\n" in project_files(name, SORT, StarterModel(0.3), seed=0)["grpo.yaml"]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("kind", ["a file", "a folder with something in it", "a link", "a dangling link"])
def test_existing_paths_are_never_changed(tmp_path: Path, kind: str, force: bool) -> None:
    target = tmp_path / "mine"
    if kind == "a file":
        target.write_text("precious")
    elif kind == "a folder with something in it":
        target.mkdir()
        (target / "precious").write_text("precious")
    else:
        target.symlink_to(tmp_path / "elsewhere")
        if kind == "a link":
            (tmp_path / "elsewhere").mkdir()
    before = sorted(p.name for p in tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="Choose another name"):
        init(target, force=force)
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_an_empty_folder_is_taken_with_force_and_only_then(untrained: Path) -> None:
    (untrained / "mine").mkdir()
    with pytest.raises(UsageError, match="--force"):
        init(Path("mine"))
    init(Path("mine"), force=True)
    assert (untrained / "mine" / "grpo.yaml").is_file()


def test_a_folder_that_somebody_makes_meanwhile_is_left_alone(untrained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile(*arguments, **options):  # type: ignore[no-untyped-def]
        (untrained / "mine").mkdir()
        (untrained / "mine" / "precious").write_text("precious")
        return 0.3

    monkeypatch.setattr(starter, "write_model", meanwhile)
    with pytest.raises(UsageError, match="not empty"):
        init(Path("mine"))
    assert [p.name for p in untrained.rglob("*")] == ["mine", "precious"]


def test_an_error_in_the_middle_leaves_nothing(untrained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments, **options):  # type: ignore[no-untyped-def]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(starter, "write_data", full)
    with pytest.raises(GcoreError, match="the disk is full"):
        init(Path("mine"))
    assert list(untrained.iterdir()) == []


def test_a_place_where_nothing_can_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written here"):
        init(tmp_path / "file" / "mine")


INTERRUPTED = (
    "import sys; from controllers.cli.main import main; from gcore.quickstart import folder; "
    "folder.PLAIN_LINES = 1000; sys.argv = ['gcore', 'init', 'mine']; main()"
)
"""It reports each update, the first soon after its imports."""


@pytest.mark.parametrize(
    "sent",
    [pytest.param(signal.SIGINT, id="Ctrl-C"), pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.large)],
)
def test_an_interrupted_init_leaves_nothing_and_ends_with_130(tmp_path: Path, sent: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("warm start"), "it is in the middle of making the model"
    assert list(tmp_path.glob(".mine.init-*"))
    process.send_signal(sent)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert said.splitlines()[-1] == "gcore: interrupted"
    assert list(tmp_path.iterdir()) == []


def test_a_home_that_is_nobodys_is_a_sentence() -> None:
    with pytest.raises(UsageError, match="the path is invalid"):
        init(Path("~nobody-of-that-name/mine"))


def test_a_full_disk_is_told_while_the_model_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import SafetensorError

    from gcore.quickstart.pretraining import SmallModel, save_model

    class Model:
        def save_pretrained(self, folder: Path) -> None:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    alphabet: Any = None
    with pytest.raises(OSError, match="No space left on device") as caught:
        save_model(SmallModel(Model(), alphabet), tmp_path)
    assert caught.value.errno == 28


def test_leftovers_of_a_killed_init_are_removed_although_it_is_a_zombie(untrained: Path) -> None:
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    (untrained / f".mine.init-{zombie.pid}.tmp").mkdir()
    init(Path("mine"))
    zombie.wait()
    assert [p.name for p in untrained.iterdir()] == ["mine"]


def test_leftovers_of_a_killed_init_are_removed_and_those_of_a_running_one_stay(untrained: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (untrained / f".mine.init-{ended.pid}.tmp").mkdir()
    (untrained / f".mine.init-{os.getppid()}.tmp").mkdir()
    init(Path("mine"))
    assert sorted(p.name for p in untrained.iterdir()) == [f".mine.init-{os.getppid()}.tmp", "mine"]


def test_a_model_of_ones_own_is_named_in_the_spec_and_none_is_made(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    init(tmp_path / "plain", model=str(model))
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    init(tmp_path / "chatty", model=str(model))
    init(tmp_path / "far", model="hf://Qwen/Qwen2.5-0.5B-Instruct@main", task="reverse")
    specs = {name: load_spec(tmp_path / name / "grpo.yaml") for name in ("plain", "chatty", "far")}
    assert {name: spec.model.chat for name, spec in specs.items()} == {"plain": False, "chatty": True, "far": True}
    assert specs["plain"].model.path == str(model)
    assert specs["far"].model.path == "hf://Qwen/Qwen2.5-0.5B-Instruct@main"
    assert not (tmp_path / "plain" / "model").exists()
    first = json.loads((tmp_path / "far" / "data" / "train.jsonl").read_text().splitlines()[0])
    assert first["prompt"].startswith("Write this word backwards")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"task": "dance"}, "no task 'dance'.*sort, reverse"),
        ({"model": "nowhere"}, "no config.json"),
        ({"model": "hf://Qwen"}, "the owner or the model name is missing"),
        ({"model": "s3://bucket/model"}, "neither a folder nor a model of a hub"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path: Path, options: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        init(tmp_path / "mine", **options)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("gpu", "dtype", "rate", "steps", "tokens"), [(True, "bf16", 1e-6, 200, 64), (False, "fp32", 1e-5, 40, 32)]
)
def test_a_project_with_ones_own_model_fits_the_machine(
    tmp_path: Path, gpu: bool, dtype: str, rate: float, steps: int, tokens: int
) -> None:
    files = project_files("mine", SORT, UserModel("hf://a/b", chat=True, gpu=gpu), seed=0)
    (tmp_path / "grpo.yaml").write_text(files["grpo.yaml"])
    spec = load_spec(tmp_path / "grpo.yaml")
    assert (spec.train.dtype, spec.train.learning_rate) == (dtype, rate)
    assert (spec.flow.steps, spec.rollout.max_new_tokens) == (steps, tokens)
    assert ("without a GPU" in files["README.md"]) is not gpu


def test_texts_of_the_user_are_quoted_where_they_are_written() -> None:
    odd = 'hf://a/b"\n# {{ x }}'
    spec = project_files("mine", SORT, UserModel(odd, chat=True, gpu=False), seed=0)["grpo.yaml"]
    import yaml

    assert yaml.safe_load(spec)["model"]["path"] == odd


def test_the_command_line_starts_without_what_init_needs() -> None:
    code = "import sys, controllers.cli.main; sys.exit('gcore.quickstart.starter' in sys.modules or 'jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""Preparing the arithmetic example: the same bytes every time, fast the second time, and never partial."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gcore.data.dataset import Dataset
from gcore.data.renderer import PromptRenderer
from gcore.errors import DataError
from gcore.quickstart import __main__ as command
from gcore.quickstart import arithmetic
from gcore.quickstart import folder as prepared_folder
from gcore.quickstart.arithmetic import ArithmeticManifest, prepare_arithmetic
from gcore.quickstart.folder import PreparedFolder

UPDATES = 3


def make(to: Path, *, seed: int = 0, must_fit: bool = False) -> PreparedFolder[ArithmeticManifest]:
    return prepare_arithmetic(to, seed=seed, progress=False, warm_updates=UPDATES, must_fit=must_fit)


def bytes_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> PreparedFolder[ArithmeticManifest]:
    return make(tmp_path_factory.mktemp("prepared") / "arithmetic")


@pytest.fixture
def copied(example: PreparedFolder[ArithmeticManifest], monkeypatch: pytest.MonkeyPatch) -> None:
    """A preparation copies `example` instead of training a model."""

    def copy(draft: Path, *_: object, **__: object) -> ArithmeticManifest:
        shutil.copytree(example.folder, draft, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json"))
        return example.manifest

    monkeypatch.setattr(arithmetic, "_fill_arithmetic", copy)


def test_another_seed_gives_another_model(example: PreparedFolder[ArithmeticManifest], tmp_path: Path) -> None:
    other = bytes_of(make(tmp_path / "other", seed=1).folder)
    assert other["model/model.safetensors"] != bytes_of(example.folder)["model/model.safetensors"]


def test_same_seed_gives_the_same_bytes_with_any_number_of_threads_and_leaves_torchs_random_state_alone(
    example: PreparedFolder[ArithmeticManifest], tmp_path: Path
) -> None:
    import torch

    before, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(2)
    try:
        made = make(tmp_path / "threads")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.get_rng_state(), state)
    assert bytes_of(made.folder) == bytes_of(example.folder)


def test_a_second_call_finds_what_the_first_has_made(
    example: PreparedFolder[ArithmeticManifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared_folder, "_make", None)
    again = make(example.folder)
    assert again.cached
    assert not example.cached
    assert again.manifest.greedy_accuracy == example.manifest.greedy_accuracy


@pytest.mark.usefixtures("copied")
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda folder: (folder / "eval.jsonl").unlink(), id="a file is gone"),
        pytest.param(lambda folder: (folder / "train.jsonl").write_text("x"), id="a file is shorter"),
        pytest.param(lambda folder: flip_a_byte(folder / "model/model.safetensors"), id="one byte is another"),
        pytest.param(lambda folder: edit_manifest(folder, recipe=0), id="an older recipe made it"),
        pytest.param(lambda folder: edit_manifest(folder, schema_version=99), id="a newer gcore made it"),
    ],
)
def test_damaged_example_is_rebuilt(example: PreparedFolder[ArithmeticManifest], tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    shutil.copytree(example.folder, tmp_path / "arithmetic")
    (tmp_path / ".arithmetic.lock").touch()
    good = bytes_of(tmp_path / "arithmetic")
    assert make(tmp_path / "arithmetic").cached
    damage(tmp_path / "arithmetic")
    again = make(tmp_path / "arithmetic")
    assert not again.cached
    assert bytes_of(again.folder) == good
    assert sorted(path.name for path in tmp_path.iterdir()) == [".arithmetic.lock", "arithmetic"]


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def edit_manifest(folder: Path, **fields: int) -> None:
    file = folder / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


INTERRUPTED = """
import os, signal, sys
from pathlib import Path
from gcore.quickstart import arithmetic
from gcore.system import files
def fill(draft, *arguments, **options):
    (draft / "train.jsonl").write_text("")
    return arithmetic.ArithmeticManifest(
        recipe=1, seed=0, threads=1, torch="2", warm_updates=1, greedy_accuracy=0.4, pass_at_8=0.5
    )
arithmetic._fill_arithmetic = fill
files._take_name = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
arithmetic.prepare_arithmetic(Path(sys.argv[1]), progress=False, warm_updates=1, must_fit=False)
"""


@pytest.mark.usefixtures("copied")
def test_a_killed_preparation_leaves_nothing_that_is_taken_for_done(tmp_path: Path) -> None:
    folder = tmp_path / "arithmetic"
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED, str(folder)], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ended.returncode == -signal.SIGKILL
    assert not folder.exists()
    assert list(tmp_path.glob(".arithmetic.making.tmp")), "it was killed in the middle"
    assert not make(folder).cached
    assert sorted(path.name for path in tmp_path.iterdir()) == [".arithmetic.lock", "arithmetic"]


def test_a_failed_preparation_leaves_nothing_at_all(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not on 38% to 48%.*another seed"):
        make(tmp_path / "arithmetic", must_fit=True)
    assert [path.name for path in tmp_path.iterdir()] == [".arithmetic.lock"]


@pytest.mark.parametrize("kind", ["a file", "a foreign folder", "a link"])
def test_existing_paths_of_the_user_are_left_alone(tmp_path: Path, kind: str) -> None:
    to = tmp_path / "mine"
    if kind == "a file":
        to.write_text("precious")
    elif kind == "a link":
        (tmp_path / "elsewhere").mkdir()
        to.symlink_to(tmp_path / "elsewhere")
    else:
        to.mkdir()
        (to / "precious").write_text("precious")
    with pytest.raises(DataError, match="Name a folder that does not exist yet"):
        make(to)
    assert to.is_symlink() or to.read_text() == "precious" if kind != "a foreign folder" else (to / "precious").exists()


@pytest.mark.usefixtures("copied")
def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "arithmetic").mkdir()
    assert (make(tmp_path / "arithmetic").model / "config.json").is_file()


def test_the_data_is_a_dataset_gcore_reads(example: PreparedFolder[ArithmeticManifest], tmp_path: Path) -> None:
    for file, count in ((example.folder / "train.jsonl", 1234), (example.folder / "eval.jsonl", 206)):
        with Dataset.open(file, prompt_field="prompt", answer_fields=("answer",), cache_dir=tmp_path) as data:
            assert len(data) == count
            entry = data.entry(0)
            left, right = entry["prompt"].rstrip("=").split("+")
            assert int(entry["answer"]) == int(left) + int(right)


def test_the_tokenizer_round_trips_in_transformers_and_in_tokenizers(
    example: PreparedFolder[ArithmeticManifest],
) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    slow, quick = (
        AutoTokenizer.from_pretrained(example.model),
        Tokenizer.from_file(str(example.model / "tokenizer.json")),
    )
    for text in ("47+8=", "8+47=", "108", "0123456789+="):
        ids = quick.encode(text).ids
        assert ids == slow(text)["input_ids"]
        assert len(ids) == len(text)
        assert quick.decode(ids) == slow.decode(ids) == text
        assert quick.decode([*ids, slow.eos_token_id]) == text
    assert (slow.eos_token, slow.pad_token) == ("<eos>", "<pad>")
    assert slow.eos_token_id != slow.pad_token_id
    assert PromptRenderer.load(example.model, chat=False).max_length == 64


def test_the_model_comes_back_as_a_qwen3_of_about_a_million_parameters(
    example: PreparedFolder[ArithmeticManifest],
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(example.model)
    assert model.config.model_type == "qwen3"
    assert 0.95e6 < sum(p.numel() for p in model.parameters()) < 1.05e6
    tokenizer = AutoTokenizer.from_pretrained(example.model)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id


def test_the_command_says_in_one_sentence_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert command.main(["arithmetic", "--to", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command_line_does_not_import_torch() -> None:
    code = "import sys\nimport gcore.quickstart.__main__; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

"""Folders are complete or absent, and damaged checkpoints are found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from gcore.errors import UsageError
from gcore.models.export import copy_model
from gcore.models.layout import (
    MANIFEST_FILE,
    CheckpointDamaged,
    Manifest,
    TensorsFile,
    checkpoint_folder,
    companion_files,
    copy_companions,
    file_entry,
    hash_files,
    manifest_digest,
    read_manifest,
    sweep_unfinished,
    verify_checkpoint,
)
from gcore.models.tensors import TensorShape
from gcore.system.files import DiskFull, replace_folder, sweep_drafts
from gcore.types import Version

SHAPE = {"a": TensorShape("F32", (3, 2)), "empty": TensorShape("F32", (0,)), "b": TensorShape("F32", ())}
VALUES = {
    "a": np.arange(6, dtype=np.float32).reshape(3, 2),
    "empty": np.zeros(0, np.float32),
    "b": np.float32(4).reshape(()),
}


def write_tensors(path: Path) -> None:
    with TensorsFile(path, SHAPE) as file:
        for name, value in VALUES.items():
            file.write(name, memoryview(value.tobytes()))
    assert file.entry == file_entry(path)


def make_checkpoint(run_dir: Path, step: int) -> Path:
    target = checkpoint_folder(run_dir, Version(0, step))
    with replace_folder(target, owner="w", durable=True) as folder:
        for name in ("model", "exp_avg", "exp_avg_sq"):
            write_tensors(folder / f"{name}.safetensors")
        (folder / "config.json").write_text("{}")
        (folder / "tokenizer.json").write_text("{}")
        files = {path.name: file_entry(path) for path in folder.iterdir()}
        manifest = Manifest(job_uid="j", world="w", lineage=0, step=step, updates=step, files=files)
        (folder / MANIFEST_FILE).write_bytes(manifest.encode())
    return target


def test_hashing_files_reports_the_bytes_that_it_has_read(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(20)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * (number << 16))
    read: list[int] = []
    assert hash_files(paths, read.append) == {path: file_entry(path).sha256 for path in paths}
    assert sum(read) == sum(path.stat().st_size for path in paths)
    for number, unreadable in enumerate((tmp_path / "missing", tmp_path)):
        with pytest.raises(OSError, match=r"No such file|not a regular file") as caught:
            hash_files([*paths, unreadable])
        assert caught.value.filename == str(unreadable), number

    def give_up(count: int) -> None:
        raise DiskFull(f"after {count} bytes")

    with pytest.raises(DiskFull):
        hash_files(paths, give_up)


def test_a_tensors_file_is_what_the_library_reads(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x.safetensors")
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == VALUES.keys()
    for name, value in VALUES.items():
        assert np.array_equal(found[name], value)


@pytest.mark.parametrize(
    ("name", "size"), [pytest.param("b", 4, id="another tensor"), pytest.param("a", 20, id="too short")]
)
def test_a_tensor_that_is_not_due_is_an_error(tmp_path: Path, name: str, size: int) -> None:
    file = TensorsFile(tmp_path / "x.safetensors", SHAPE)
    with pytest.raises(ValueError, match="expected a with 24"):
        file.write(name, memoryview(bytes(size)))


def test_a_file_that_lacks_a_tensor_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="never written"), TensorsFile(tmp_path / "x.safetensors", SHAPE):
        pass


def test_a_whole_checkpoint_is_verified_and_named_by_its_manifest(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 5)
    assert verify_checkpoint(folder).version == Version(0, 5)
    assert manifest_digest(folder) == file_entry(folder / MANIFEST_FILE).sha256


@pytest.mark.parametrize(
    "name", ["model.safetensors", "exp_avg.safetensors", "exp_avg_sq.safetensors", "config.json", "manifest.json"]
)
def test_a_file_cut_off_at_any_byte_is_found_and_named(tmp_path: Path, name: str) -> None:
    folder = make_checkpoint(tmp_path, 5)
    whole = (folder / name).read_bytes()
    for size in range(len(whole)):
        (folder / name).write_bytes(whole[:size])
        with pytest.raises(CheckpointDamaged, match=name.replace(".", r"\.")):
            verify_checkpoint(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointDamaged, match=name.replace(".", r"\.")):
        verify_checkpoint(folder)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 5)
    path = folder / "exp_avg.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointDamaged, match="content"):
        verify_checkpoint(folder)


def test_a_manifest_that_names_too_little_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 5)
    fields = json.loads((folder / MANIFEST_FILE).read_bytes())
    del fields["files"]["exp_avg.safetensors"]
    (folder / MANIFEST_FILE).write_text(json.dumps(fields))
    with pytest.raises(CheckpointDamaged, match="exp_avg"):
        verify_checkpoint(folder)


def test_a_writer_that_dies_leaves_the_one_before_and_nothing_else(tmp_path: Path) -> None:
    before = make_checkpoint(tmp_path, 5)
    digest = manifest_digest(before)
    target = checkpoint_folder(tmp_path, Version(0, 6))

    def write() -> None:
        with replace_folder(target, owner="w", durable=True) as folder:
            write_tensors(folder / "model.safetensors")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert [path.name for path in target.parent.iterdir()] == ["0-5"]
    verify_checkpoint(before)
    assert manifest_digest(before) == digest


def test_draft_of_a_killed_writer_is_hidden_and_swept(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 5)
    left = tmp_path / "checkpoints" / ".0-6.w.tmp"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    assert not checkpoint_folder(tmp_path, Version(0, 6)).exists()
    sweep_drafts(tmp_path / "checkpoints")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["0-5"]


def test_a_world_that_was_given_up_sweeps_nothing_of_a_later_one(tmp_path: Path) -> None:
    for parent in ("weights", "checkpoints"):
        for name in (".1-6.old.tmp", ".2-7.w.tmp", ".2-7.w.old.tmp", ".3-7.newer.tmp", ".10-8.newer.tmp", "1-5"):
            (tmp_path / parent / name).mkdir(parents=True)
    sweep_unfinished(tmp_path, lineage=2)
    for parent in ("weights", "checkpoints"):
        assert {path.name for path in (tmp_path / parent).iterdir()} == {".3-7.newer.tmp", ".10-8.newer.tmp", "1-5"}
    sweep_unfinished(tmp_path / "none", lineage=2)


def test_a_full_disk_leaves_nothing_half_written_and_says_so(tmp_path: Path) -> None:
    before = make_checkpoint(tmp_path, 5)
    target = checkpoint_folder(tmp_path, Version(0, 6))

    def write() -> None:
        with replace_folder(target, owner="w", durable=True) as folder:
            (folder / "model.safetensors").symlink_to("/dev/full")
            write_tensors(folder / "model.safetensors")

    with pytest.raises(DiskFull, match="the disk is full"):
        write()
    assert list(target.parent.iterdir()) == [before]


def test_a_folder_that_is_written_again_is_replaced(tmp_path: Path) -> None:
    for text in ("old", "new"):
        with replace_folder(tmp_path / "x", owner="w", durable=False) as folder:
            (folder / text).write_text(text)
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_copied_model_is_the_model_alone(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 5)
    (tmp_path / "to").mkdir()
    copy_model(folder, tmp_path / "to")
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_a_copy_goes_over_nothing_that_is_there(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 5)
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "mine").write_text("mine")
    with pytest.raises(UsageError, match="not an empty folder"):
        copy_model(folder, tmp_path / "to")
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["mine"]


def test_a_damaged_checkpoint_is_not_copied(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 5)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointDamaged):
        copy_model(folder, tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_a_checkpoint_without_its_manifest_is_not_copied_for_nobody_can_say_that_it_is_whole(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 5)
    (folder / MANIFEST_FILE).unlink()
    with pytest.raises(CheckpointDamaged, match="cannot read the manifest"):
        copy_model(folder, tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_a_whole_checkpoint_that_is_not_the_registered_one_is_not_copied(tmp_path: Path) -> None:
    folder, other = make_checkpoint(tmp_path, 5), make_checkpoint(tmp_path, 6)
    with pytest.raises(CheckpointDamaged, match="differs from the registered checkpoint"):
        copy_model(folder, tmp_path / "to", manifest_digest(other))
    assert not (tmp_path / "to").exists()
    copy_model(folder, tmp_path / "to", manifest_digest(folder))


def test_files_outside_the_manifest_are_not_copied(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 5)
    (folder / "more.safetensors").write_bytes(b"?")
    (folder / "more.json").write_text("{}")
    copy_model(folder, tmp_path / "to")
    assert not list((tmp_path / "to").glob("more*"))


NESTED = ("additional_chat_templates/tool_use.jinja", "code/modeling.py", "vocabularies/de/words.txt")
"""What belongs to a model and lies in a folder of its own."""


def model_with_folders(folder: Path) -> Path:
    """A model whose tokenizer and code have folders, beside what belongs to no model."""
    (folder / "model").mkdir()
    others = (
        "original/weights.pth",
        ".git/config.json",
        "other/config.json",
        "onnx/graph.onnx",
        "critic/tokenizer.json",
    )
    for name in ("config.json", "tokenizer.json", "LICENSE", *NESTED, *others):
        path = folder / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    return folder / "model"


def test_companions_are_also_the_tokenizer_s_and_the_code_s_files_in_folders(tmp_path: Path) -> None:
    model = model_with_folders(tmp_path)
    expected = tuple(sorted(("LICENSE", "config.json", "tokenizer.json", *NESTED)))
    assert companion_files(model) == expected
    assert copy_companions(model, tmp_path / "to") == expected
    assert sorted(
        str(path.relative_to(tmp_path / "to")) for path in (tmp_path / "to").rglob("*") if path.is_file()
    ) == list(expected)


def test_a_copied_model_has_its_templates_in_folders(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 5)
    template = folder / NESTED[0]
    template.parent.mkdir()
    template.write_text("{{ messages }}")
    manifest = read_manifest(folder)
    files = {**manifest.files, NESTED[0]: file_entry(template)}
    (folder / MANIFEST_FILE).write_bytes(manifest.model_copy(update={"files": files}).encode())
    copy_model(folder, tmp_path / "to")
    assert (tmp_path / "to" / NESTED[0]).read_text() == "{{ messages }}"

"""`gcore checkpoints` and `gcore export --step`: the list, the reason that each is kept, and its layout on the disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest

from controllers.api.jobs import JobsService
from controllers.api.run_reader import checkpoints_of_folder, list_checkpoints
from controllers.api.store_reader import StoreReader
from controllers.cli.commands import checkpoints as checkpoints_verb
from controllers.cli.commands.checkpoints import CheckpointListing, checkpoints, export, format_size, select_checkpoint
from controllers.cli.output import Output
from gcore.api.v1 import jobs_pb2 as pb
from gcore.api.v1 import jobs_pb2_grpc
from gcore.client import JobsClient
from gcore.config import parse_spec
from gcore.errors import UsageError
from gcore.ledger import archive as store_copy
from gcore.ledger import chain
from gcore.ledger.chain import ChainWriter
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Checkpoint, Checkpoints
from gcore.ledger.records.job import Evaluation, JobRecord
from gcore.ledger.transactions import Versioned
from gcore.models.layout import MANIFEST_FILE, CheckpointDamaged, Manifest, file_entry, manifest_digest
from gcore.store.keys import JobKeys
from gcore.store.keys import name as names
from gcore.store.types import KeyListing, KeyValue, Put
from gcore.system.clock import SystemClock
from gcore.testing import FakeClock, MemoryCluster, MemoryStore
from gcore.types import Version

SPEC = parse_spec(
    {
        "name": "sums",
        "model": {"path": "m"},
        "data": {"path": "d"},
        "flow": {"steps": 40},
        "rollout": {"max_new_tokens": 4},
        "eval": {"path": "e", "every": 4},
        "checkpoint": {"every": 4, "keep": 1, "keep_every": 8},
    }
)


def make_checkpoint(run_dir: Path, step: int, lineage: int = 0) -> Checkpoint:
    folder = run_dir / "checkpoints" / f"{lineage}-{step}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"step": step}))
    for name in ("model.safetensors", "exp_avg.safetensors", "exp_avg_sq.safetensors"):
        (folder / name).write_bytes(b"1234")
    files = {path.name: file_entry(path) for path in folder.iterdir()}
    manifest = Manifest(job_uid="u", world="w", lineage=lineage, step=step, updates=step, files=files)
    (folder / MANIFEST_FILE).write_bytes(manifest.encode())
    return Checkpoint(lineage=lineage, step=step, seq=step, file=f"checkpoints/{lineage}-{step}")


def mirror_of(run_dir: Path, *entries: Checkpoint) -> JobMirror:
    """Head at step 20; the evaluation of step 12 was the best."""
    head = chain.base_entry(2, "w", ChainWriter("a", "n")).head.model_copy(update={"step": 20, "seq": 20})
    tree = SPEC.model_dump(mode="json")
    job = JobRecord(uid="u", name="sums", spec=tree, run_dir=str(run_dir), created=0.0, prompts=9)
    evaluations = {
        f"0.{step}": Versioned(Evaluation(version=Version(0, step), accuracy=accuracy, count=9), 1)
        for step, accuracy in ((12, 0.9), (20, 0.8))
    }
    base = Checkpoint(lineage=0, step=0, seq=0, file="")
    return JobMirror(
        JobKeys("u"),
        job=Versioned(job, 1),
        head=Versioned(head, 1),
        checkpoints=Versioned(Checkpoints(entries=(base, *entries)), 1),
        evaluations=evaluations,
    )


def size_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


async def test_each_is_listed_with_its_size_and_why_it_is_kept(tmp_path: Path) -> None:
    reply = await list_checkpoints(mirror_of(tmp_path, *(make_checkpoint(tmp_path, n) for n in (4, 8, 12, 16, 20))))
    assert (reply.uid, reply.name) == ("u", "sums")
    assert {one.step: list(one.kept) for one in reply.checkpoints} == {
        20: ["newest"],
        16: ["every"],
        12: ["best"],
        8: ["every"],
        4: [],
    }
    assert [one.step for one in reply.checkpoints] == [20, 16, 12, 8, 4], "the newest first"
    first = reply.checkpoints[0]
    assert first.folder == str(tmp_path / "checkpoints" / "0-20")
    assert first.bytes == size_on_disk(tmp_path / "checkpoints" / "0-20")
    assert first.written > 0
    assert not first.problem


async def test_visible_damage_of_checkpoints_is_reported(tmp_path: Path) -> None:
    entries = [make_checkpoint(tmp_path, n) for n in (4, 8, 12)]
    (tmp_path / entries[0].file / "exp_avg.safetensors").write_bytes(b"1")
    (tmp_path / entries[1].file / "config.json").unlink()
    (tmp_path / entries[2].file / MANIFEST_FILE).unlink()
    problems = {one.step: one.problem for one in (await list_checkpoints(mirror_of(tmp_path, *entries))).checkpoints}
    assert problems[4] == "exp_avg.safetensors has 1 bytes, not 4"
    assert problems[8].startswith("config.json cannot be read")
    assert "cannot read the manifest" in problems[12]


async def test_a_damaged_one_shows_the_size_of_all_that_lies_there(tmp_path: Path) -> None:
    entries = [make_checkpoint(tmp_path, n) for n in (4, 8)]
    (tmp_path / entries[0].file / "config.json").write_bytes(b"1")
    (tmp_path / entries[1].file / MANIFEST_FILE).unlink()
    for one in (await list_checkpoints(mirror_of(tmp_path, *entries))).checkpoints:
        assert one.problem
        assert one.bytes == size_on_disk(Path(one.folder))


async def test_any_controller_answers_for_a_job_by_its_name(tmp_path: Path) -> None:
    mirror, keys = mirror_of(tmp_path, make_checkpoint(tmp_path, 20)), JobKeys("u")
    store = MemoryStore(MemoryCluster(FakeClock()))
    assert mirror.job is not None
    assert mirror.head is not None
    assert mirror.checkpoints is not None
    records = {keys.job: mirror.job, keys.head: mirror.head, keys.checkpoints: mirror.checkpoints}
    puts = [Put(key, stored.record.encode()) for key, stored in records.items()]
    await store.transact((), (Put(names("sums"), b"u"), *puts))
    service: Any = JobsService(StoreReader(store), None, lambda uid: None, FakeClock())  # type: ignore[arg-type]
    server = grpc.aio.server()
    jobs_pb2_grpc.add_JobsServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with JobsClient([f"127.0.0.1:{port}"], clock=SystemClock()) as client:
        found = await client.list_checkpoints("sums")
        with pytest.raises(UsageError, match="there is no job 'other'"):
            await client.list_checkpoints("other")
    await server.stop(None)
    assert [(one.step, list(one.kept)) for one in found.checkpoints] == [(20, ["newest"])]


async def test_a_job_that_has_not_started_has_none(tmp_path: Path) -> None:
    mirror = JobMirror(JobKeys("u"), job=mirror_of(tmp_path).job)
    assert list((await list_checkpoints(mirror)).checkpoints) == []


def test_those_of_an_ended_run_are_read_from_its_folder(tmp_path: Path) -> None:
    for step, lineage in ((4, 0), (8, 0), (8, 1)):
        make_checkpoint(tmp_path, step, lineage)
    (tmp_path / "checkpoints" / ".0-9.w.tmp").mkdir()
    reply = checkpoints_of_folder(tmp_path, "sums", "u")
    assert [(one.lineage, one.step) for one in reply.checkpoints] == [(1, 8), (0, 8), (0, 4)]
    assert list(checkpoints_of_folder(tmp_path / "nothing", "sums", "u").checkpoints) == []


def leave_copy(run_dir: Path, mirror: JobMirror) -> None:
    """Of the mirror's records, as a controller leaves it when a job has ended."""
    assert mirror.job is not None
    assert mirror.head is not None
    assert mirror.checkpoints is not None
    keys = mirror.keys
    records = {keys.job: mirror.job, keys.head: mirror.head, keys.checkpoints: mirror.checkpoints}
    records |= {keys.evaluation(version): stored for version, stored in mirror.evaluations.items()}
    kvs = tuple(KeyValue(key, stored.record.encode(), 1, 1) for key, stored in records.items())
    store_copy.write_copy(run_dir, "n0.x", "u", KeyListing(kvs, 7))


def test_the_copy_of_the_records_says_why_each_of_an_ended_run_was_kept_and_which_are_gone(tmp_path: Path) -> None:
    entries = [make_checkpoint(tmp_path, n) for n in (4, 8, 12, 16, 20)]
    leave_copy(tmp_path, mirror_of(Path("/where/it/was/then"), *entries))
    make_checkpoint(tmp_path, 18, lineage=3)  # no record names it
    for gone in (entries[0], entries[2]):  # the first was to go
        shutil.rmtree(tmp_path / gone.file)
    found = checkpoints_of_folder(tmp_path, "sums", "u").checkpoints
    assert [(one.step, list(one.kept), one.problem) for one in found] == [
        (20, ["newest"], ""),
        (18, [], ""),
        (16, ["every"], ""),
        (12, ["best"], "its folder is missing"),
        (8, ["every"], ""),
    ]
    assert all(one.folder.startswith(str(tmp_path)) for one in found)


def test_a_copy_that_is_damaged_or_of_another_job_says_nothing(tmp_path: Path) -> None:
    leave_copy(tmp_path, mirror_of(tmp_path, make_checkpoint(tmp_path, 20)))
    assert [list(one.kept) for one in checkpoints_of_folder(tmp_path, "sums", "other").checkpoints] == [[]]
    (copy,) = (tmp_path / store_copy.COPY_FOLDER).iterdir()
    copy.write_bytes(copy.read_bytes()[:100])
    assert [list(one.kept) for one in checkpoints_of_folder(tmp_path, "sums", "u").checkpoints] == [[]]


@pytest.mark.parametrize("step", [None, 4])
def test_a_checkpoint_that_is_not_the_registered_one_is_not_exported(
    home: Path, tmp_path: Path, step: int | None
) -> None:
    run = home / "runs" / "sums-u"
    registered = manifest_digest(run / "checkpoints" / "0-4")
    entry = Checkpoint(lineage=0, step=4, seq=4, file="checkpoints/0-4", digest=registered)
    leave_copy(run, mirror_of(run, entry))
    export("sums", tmp_path / "to", home, step=step)
    file = run / "checkpoints" / "0-4" / MANIFEST_FILE
    file.write_bytes(Manifest.decode(file.read_bytes()).model_copy(update={"updates": 99}).encode())
    with pytest.raises(CheckpointDamaged, match="differs from the registered checkpoint"):
        export("sums", tmp_path / "other", home, step=step)
    assert not (tmp_path / "other").exists()


def found(*steps: tuple[int, int, list[str]]) -> CheckpointListing:
    """Of (step, lineage, why it is kept)."""
    infos = [pb.CheckpointInfo(step=s, lineage=number, kept=kept, folder=f"f{number}-{s}") for s, number, kept in steps]
    return CheckpointListing(pb.ListCheckpointsReply(uid="u", name="sums", checkpoints=infos))


def test_of_several_of_a_step_the_one_that_is_kept_is_meant() -> None:
    assert select_checkpoint(found((8, 0, ["every"]), (8, 1, [])), 8).folder == "f0-8"
    assert select_checkpoint(found((8, 0, []), (8, 1, [])), 8).folder == "f1-8"


def test_a_step_without_one_is_a_sentence_that_names_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"no checkpoint of step 5; it has checkpoints of steps 4, 8"):
        select_checkpoint(found((8, 0, []), (4, 0, [])), 5)
    with pytest.raises(UsageError, match="it has none yet"):
        select_checkpoint(found(), 5)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A finished run, of which no cluster knows any more."""
    run = tmp_path / "home" / "runs" / "sums-u"
    for step in (4, 8):
        make_checkpoint(run, step)
    (run / "summary.json").write_text(json.dumps({"job": "sums", "uid": "u", "checkpoint": f"{run}/checkpoints/0-4"}))
    return tmp_path / "home"


def test_the_table_and_the_json_say_the_same(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "runs" / "sums-u" / "checkpoints" / "0-4" / "config.json").write_text("")
    checkpoints("sums", home)
    table = capsys.readouterr().out
    assert table.splitlines()[0].split() == ["STEP", "LINEAGE", "SIZE", "AGE", "KEPT", "FOLDER"]
    assert "damaged: config.json has 0 bytes" in table
    checkpoints("sums", home, output=Output.JSON)
    tree: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert [one["step"] for one in tree] == [8, 4]
    assert tree[0].keys() == {"step", "lineage", "folder", "bytes", "written", "kept", "problem", "nodes"}


def test_a_job_without_any_says_so(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints_verb, "find_checkpoints", lambda *_: found())
    checkpoints("sums", home)
    assert capsys.readouterr().out == "Job sums (u) has no checkpoint yet.\n"


def test_the_model_of_a_step_is_exported(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export("sums", tmp_path / "to", home, step=4)
    assert json.loads((tmp_path / "to" / "config.json").read_text()) == {"step": 4}
    assert "its checkpoint of step 4 is" in capsys.readouterr().out
    with pytest.raises(UsageError, match="exclude each other"):
        export("sums", tmp_path / "other", home, step=4, best=True)
    with pytest.raises(UsageError, match="no checkpoint of step 5"):
        export("sums", tmp_path / "other", home, step=5)


def test_an_exported_adapter_is_called_one(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gcore.models.export.copy_model", lambda *_, **__: None)
    for adapter, word in ((True, "adapter"), (False, "model")):
        export("sums", tmp_path / "to", home, adapter=adapter)
        assert capsys.readouterr().out.startswith(f"The {word} of job sums (u)")


def test_a_base_model_is_named_only_for_a_merge_and_never_empty(home: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--adapter and --base exclude each other"):
        export("sums", tmp_path / "to", home, adapter=True, base=str(tmp_path))
    with pytest.raises(UsageError, match="--base is empty"):
        export("sums", tmp_path / "to", home, base="")
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "-"), (900, "0.9 KB"), (12_340_000, "12.3 MB"), (84e9, "84.0 GB"), (2e12, "2.0 TB")]
)
def test_a_size_is_shown_as_people_say_it(count: int, shown: str) -> None:
    assert format_size(count) == shown

"""The facts about a job's data from its creation on."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from plug_in_package import installer
from stored_job import StoredJob

from controllers.api.store_reader import StoreReader
from controllers.api.submission.checks import (
    MIN_FREE_BYTES,
    MOST_FOR_EVER,
    check_kept_checkpoints,
    check_picture_model,
    check_submission,
)
from controllers.api.submission.nodes import check_backend, check_blob_stores, check_ranks
from controllers.api.submission.submit import Submitter
from controllers.daemon.daemon import most_slots
from controllers.job.preparation import check_unchanged
from gcore.config import JobSpec, NodeConfig, new_spec, parse_spec
from gcore.config.load import apply_flow_settings
from gcore.config.local_cluster import FILE_NAME, LocalClusterState
from gcore.data.dataset import DataChanged
from gcore.data.stream import DataIdentity, identify_data
from gcore.errors import GcoreError, SpecError, UsageError
from gcore.ledger.records.job import JobPhase, JobRecord, JobStatus, NodeRecord
from gcore.plugins import PluginFault
from gcore.store.reference import StoreRef
from gcore.store.types import Put
from gcore.testing import FakeClock, MemoryCluster, MemoryStore

GOLDEN = Path(__file__).parents[3] / "golden" / "records_of_version_2"
LINES = [f'{{"prompt": "{i}+1=", "answer": "{i + 1}"}}' for i in range(4)]


def opened(path: Path, lines: list[str], held_out: list[str] | None = None) -> DataIdentity:
    path.write_text("\n".join(lines) + "\n")
    spec = {"name": "j", "model": {"path": "m"}, "data": {"path": str(path), "shards": 2}}
    spec |= {"flow": {"steps": 1}, "rollout": {"max_new_tokens": 4}}
    if held_out is not None:
        evaluated = path.with_suffix(".held.jsonl")
        evaluated.write_text("\n".join(held_out) + "\n")
        spec |= {"eval": {"path": str(evaluated)}}
    return identify_data(parse_spec(spec), path.parent)


def job_on(data: DataIdentity, **more: str) -> JobRecord:
    return JobRecord(uid="u", name="j", spec={}, run_dir="r", created=0.0, prompts=data.prompts, **more)


@pytest.mark.parametrize(
    "lines", [LINES[:3], [*LINES, LINES[0]], [*LINES[:3], LINES[0]]], ids=["shorter", "longer", "another prompt"]
)
def test_a_job_does_not_go_on_with_other_data_than_it_began_with(tmp_path: Path, lines: list[str]) -> None:
    before = opened(tmp_path / "before.jsonl", LINES)
    job = job_on(before, data_digest=before.digest)
    check_unchanged(job, opened(tmp_path / "copy.jsonl", LINES))
    with pytest.raises(DataChanged, match="have changed since the job was created"):
        check_unchanged(job, opened(tmp_path / "after.jsonl", lines))


def test_a_job_does_not_go_on_with_other_held_out_prompts_because_its_accuracies_would_be_of_other_questions(
    tmp_path: Path,
) -> None:
    before = opened(tmp_path / "before.jsonl", LINES, LINES[:2])
    job = job_on(before, data_digest=before.digest, held_out_digest=before.held_out)
    check_unchanged(job, opened(tmp_path / "copy.jsonl", LINES, LINES[:2]))
    with pytest.raises(DataChanged, match=r"after\.held\.jsonl: the held-out prompts have changed since the job"):
        check_unchanged(job, opened(tmp_path / "after.jsonl", LINES, LINES[1:3]))
    earlier = job_on(before, data_digest=before.digest)  # of a gcore that did not note it
    check_unchanged(earlier, opened(tmp_path / "other.jsonl", LINES, LINES[1:3]))


def test_a_job_that_noted_no_digest_still_knows_the_number_of_its_prompts(tmp_path: Path) -> None:
    before = opened(tmp_path / "before.jsonl", LINES)
    check_unchanged(job_on(before), opened(tmp_path / "other.jsonl", [*LINES[:3], LINES[0]]))
    with pytest.raises(DataChanged):
        check_unchanged(job_on(before), opened(tmp_path / "shorter.jsonl", LINES[:3]))


def test_an_engine_argument_that_gcore_chooses_is_refused_before_anything_is_read_or_written(tmp_path: Path) -> None:
    spec = {"name": "j", "model": {"path": "nowhere"}, "data": {"path": "nowhere"}, "flow": {"steps": 1}}
    spec |= {"rollout": {"max_new_tokens": 4, "engine": "sglang", "engine_args": ["--port=80"]}}
    with pytest.raises(UsageError, match="--port is set by gcore"):
        check_submission(parse_spec(spec), tmp_path / "runs", tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []


def test_more_groups_than_an_offer_has_room_for_are_refused_before_anything_is_read_or_written(tmp_path: Path) -> None:
    spec = {"name": "j", "model": {"path": "nowhere"}, "data": {"path": "nowhere"}}
    spec |= {"flow": {"steps": 1, "groups_per_step": 256}}
    spec |= {"rollout": {"max_new_tokens": 4, "correction": "tis", "staleness": 64}}
    with pytest.raises(SpecError, match=r"rollout.staleness 64 a controller may offer 65 steps of 256 groups"):
        check_submission(parse_spec(spec), tmp_path / "runs", tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("data", "where"),
    [
        ({"shards": 500_000}, "data.shards"),
        ({"window": 1 << 62}, "data.window"),
        ({"shards": 2048, "window": 4096}, "data.window"),
    ],
)
def test_more_shards_or_wider_windows_than_the_store_has_room_for_are_refused(
    tmp_path: Path, data: dict[str, int], where: str
) -> None:
    tree = {"name": "j", "model": {"path": "nowhere"}, "data": {"path": "nowhere", **data}}
    tree |= {"flow": {"steps": 1}, "rollout": {"max_new_tokens": 4}}
    with pytest.raises(SpecError, match="the cursors may take about") as caught:
        check_submission(parse_spec(tree), tmp_path / "runs", tmp_path / "cache")
    assert caught.value.where == where
    assert list(tmp_path.iterdir()) == []


def test_a_disk_with_too_little_room_is_told_with_how_much_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(free=MIN_FREE_BYTES - 1)
    monkeypatch.setattr("controllers.api.submission.checks.shutil.disk_usage", lambda path: free)
    spec = {"name": "j", "model": {"path": "nowhere"}, "data": {"path": "nowhere"}, "flow": {"steps": 1}}
    spec |= {"rollout": {"max_new_tokens": 4}}
    with pytest.raises(GcoreError, match="only 63 MiB are free on the disk, and a job needs at least 64 MiB to start"):
        check_submission(parse_spec(spec), tmp_path / "runs", tmp_path / "cache")


@pytest.mark.parametrize(("ranks", "most"), [(2, 2), (9, None), (None, 1)])
def test_ranks_that_fit_or_may_fit_once_more_nodes_are_there_are_let_in(ranks: int | None, most: int | None) -> None:
    check_ranks(spec_of_ranks(ranks), most)


def test_ranks_that_will_never_fit_are_refused() -> None:
    with pytest.raises(SpecError, match=r"train\.ranks: 3 train ranks do not fit on 2 slots"):
        check_ranks(spec_of_ranks(3), 2)


@pytest.mark.parametrize(
    ("train", "package", "version", "said"),
    [
        ({}, "deepspeed", None, r"train\.backend: the package deepspeed is not installed here\. Install gcore\[train\] .*fsdp2"),
        ({}, "deepspeed", "0.15.4", r"train\.backend: deepspeed 0\.15\.4 is installed here, and gcore supports >=0\.16\."),
        ({"backend": "fsdp2"}, "torch", "2.5.1+cpu", r"train\.backend: torch .*>=2\.6\. Install gcore\[fsdp2\] on every node$"),
        ({"backend": "fsdp2", "lora": {}}, "peft", None, r"train\.lora: the package peft .* Install gcore\[lora\] on every node$"),
        ({"lora": {}}, "peft", "0.14.0", r"train\.lora: peft 0\.14\.0 is installed here, and gcore supports >=0\.15"),
    ],
)  # fmt: skip
def test_a_backend_whose_package_is_missing_or_too_old_is_refused(
    monkeypatch: pytest.MonkeyPatch, train: dict[str, object], package: str, version: str | None, said: str
) -> None:
    def installed(name: str) -> str:
        if name == package and version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version if name == package and version is not None else "1000"

    monkeypatch.setattr(importlib.metadata, "version", installed)
    spec = parse_spec(spec_of_ranks(None).model_dump(mode="json") | {"train": train})
    with pytest.raises(SpecError, match=said):
        check_backend(spec, ())
    check_backend(spec, [NodeRecord(name="n", incarnation="i", address="h:1", slots=("emulated:0",), pid=1)])
    monkeypatch.undo()
    check_backend(spec, ())


def test_an_engine_that_serves_no_pictures_of_a_model_is_refused_by_the_models_type(tmp_path: Path) -> None:
    tree = {"name": "j", "model": {"path": "m"}, "data": {"path": "d", "images": "images"}, "flow": {"steps": 1}}
    spec = parse_spec(tree | {"rollout": {"max_new_tokens": 4, "engine": "sglang"}})
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    check_picture_model(spec, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "smolvlm"}')
    with pytest.raises(SpecError, match=r"rollout\.engine: the engine sglang serves pictures only .* not smolvlm"):
        check_picture_model(spec, tmp_path)
    check_picture_model(parse_spec(tree | {"rollout": {"max_new_tokens": 4}}), tmp_path)
    check_picture_model(spec, tmp_path / "missing")  # which loading the model reports


def test_a_job_with_pictures_is_refused_while_a_node_is_of_an_earlier_release() -> None:
    tree = {"name": "j", "model": {"path": "m"}, "flow": {"steps": 1}, "rollout": {"max_new_tokens": 4}}
    seeing = parse_spec(tree | {"data": {"path": "d", "images": "images"}})
    old = NodeRecord.decode((GOLDEN / "gcore.ledger.records.job.NodeRecord.json").read_bytes())
    new = old.model_copy(update={"name": "new", "blobs": "http://127.0.0.1:1"})
    check_blob_stores(seeing, [new])
    check_blob_stores(parse_spec(tree | {"data": {"path": "d"}}), [new, old])
    with pytest.raises(SpecError, match=rf"data\.images: {old.name} cannot store pictures.*upgrade older nodes"):
        check_blob_stores(seeing, [new, old])
    generates = {"rollout": {"diffusion": {"steps": 4}}, "reward": {"name": "/r.py:r"}}
    generating = parse_spec(
        apply_flow_settings(tree | generates | {"data": {"path": "d"}, "flow": {"name": "flow_grpo", "steps": 1}})
    )
    check_blob_stores(generating, [new])
    said = rf"rollout\.engine: {old.name} cannot store pictures. Install gcore\[diffusion\]"
    with pytest.raises(SpecError, match=said):
        check_blob_stores(generating, [new, old])


def spec_of_ranks(ranks: int | None) -> JobSpec:
    spec = {"name": "j", "model": {"path": "m"}, "data": {"path": "d"}, "flow": {"steps": 1}, "train": {"ranks": ranks}}
    return parse_spec(spec | {"rollout": {"max_new_tokens": 4}})


@pytest.mark.parametrize("local", [True, False])
def test_only_a_local_cluster_is_as_large_as_it_will_ever_be(tmp_path: Path, local: bool) -> None:
    config = NodeConfig(
        node="node-0",
        home=str(tmp_path),
        etcd=StoreRef(endpoints=("127.0.0.1:1",)),
        slots=("cpu:0",),
        run_root=str(tmp_path),
        local_cluster=local,
    )
    assert most_slots(config) is None, "nobody has said yet how large it is"
    process = {"pid": 1, "started": 1}
    etcd = {**process, "endpoint": "h:1", "data_dir": "d", "client_port": 1, "peer_port": 2, "binary": "b"}
    daemon = {**process, "address": "h:1", "metrics_address": "h:2", "config_file": "c"}
    daemons = [{**daemon, "name": f"node-{i}", "slots": ("cpu:0", "cpu:1")} for i in range(2)]
    document = LocalClusterState.model_validate({"home": str(tmp_path), "etcd": etcd, "controllers": daemons})
    (tmp_path / FILE_NAME).write_text(document.model_dump_json())
    assert most_slots(config) == (4 if local else None)


BROKEN = "def helper():\n    return {}['nothing']\n\n\nhelper()\n"


def test_a_flow_that_raises_at_import_is_refused_with_its_place_and_carries_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installer(tmp_path / "packages", monkeypatch, "gcore.flows")("broken_flow", "broken = broken_flow:flow", BROKEN)
    tree = {"name": "j", "model": {"path": "m"}, "data": {"path": "d"}, "flow": {"steps": 1, "name": "broken"}}
    tree |= {"rollout": {"max_new_tokens": 4}}
    with pytest.raises(PluginFault, match=r"KeyError: 'nothing'\), raised at .*broken_flow\.py:2") as caught:
        new_spec(tree)  # what `gcore validate`, `run` and `submit` read a spec with, and CreateJob too
    assert "in helper" in caught.value.trace
    with pytest.raises(PluginFault, match="broken_flow"):
        check_submission(parse_spec(tree), tmp_path / "runs", tmp_path / "cache")


@pytest.mark.parametrize(
    ("filters", "said"),
    [
        pytest.param(
            [{"name": "signall"}], "no filter is called 'signall', did you mean 'signal'", id="no such filter"
        ),
        pytest.param([{"name": "broken"}], "cannot be loaded from broken_filter:f .*KeyError", id="raises at import"),
    ],
)
def test_a_filter_that_cannot_be_had_is_refused_before_anything_is_read_or_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filters: list[dict[str, str]], said: str
) -> None:
    installer(tmp_path / "packages", monkeypatch, "gcore.filters")("broken_filter", "broken = broken_filter:f", BROKEN)
    tree = {"name": "j", "model": {"path": "m"}, "data": {"path": "d"}, "flow": {"steps": 1, "filters": filters}}
    tree |= {"rollout": {"max_new_tokens": 4}}
    with pytest.raises(PluginFault, match=said):
        check_submission(parse_spec(tree), tmp_path / "runs", tmp_path / "cache")
    assert not (tmp_path / "runs").exists()


def test_a_file_that_several_held_out_sets_share_is_named_once(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text("\n".join(LINES) + "\n")
    sets = [{"name": name, "path": str(file)} for name in ("greedy", "drawn")]
    spec = {"name": "j", "model": {"path": "m"}, "data": {"path": str(file), "shards": 2}, "flow": {"steps": 1}}
    found = identify_data(parse_spec(spec | {"rollout": {"max_new_tokens": 4}, "eval": {"sources": sets}}), tmp_path)
    assert found.where_held_out == str(file)


@pytest.mark.parametrize(
    ("flow", "keep_every", "wrong"),
    [
        pytest.param({"steps": 100}, 100, "", id="the last"),
        pytest.param({"steps": 100}, 150, "the job has at most 100 steps, so it would keep no checkpoint", id="none"),
        pytest.param({"steps": 50 * MOST_FOR_EVER}, 50, "", id="as many as there may be"),
        pytest.param(
            {"steps": 50 * MOST_FOR_EVER + 50}, 50, f"1001 checkpoints .* the limit is {MOST_FOR_EVER}", id="more"
        ),
        pytest.param({"epochs": 2, "groups_per_step": 8}, 50, "", id="by epochs"),
        pytest.param({"epochs": 2, "groups_per_step": 8}, 100, "the job has at most 50 steps", id="none by epochs"),
    ],
)
def test_number_of_permanently_kept_checkpoints_is_bounded(flow: dict[str, int], keep_every: int, wrong: str) -> None:
    tree = {"name": "j", "model": {"path": "m"}, "data": {"path": "d"}, "flow": flow, "rollout": {"max_new_tokens": 4}}
    spec = parse_spec(tree | {"checkpoint": {"every": 50, "keep_every": keep_every}})
    if not wrong:
        check_kept_checkpoints(spec, prompts=200)
        return
    with pytest.raises(SpecError, match=wrong) as raised:
        check_kept_checkpoints(spec, prompts=200)
    assert raised.value.where == "checkpoint.keep_every"
    assert raised.value.fix


def test_a_submission_that_would_keep_nothing_is_refused_before_anything_is_read_or_written(tmp_path: Path) -> None:
    tree = {"name": "j", "model": {"path": "nowhere"}, "data": {"path": "nowhere"}, "flow": {"steps": 100}}
    tree |= {"rollout": {"max_new_tokens": 4}, "checkpoint": {"every": 50, "keep_every": 500}}
    with pytest.raises(SpecError, match="it would keep no checkpoint"):
        check_submission(parse_spec(tree), tmp_path / "runs", tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []


async def test_a_job_of_which_a_record_is_damaged_can_be_ended(tmp_path: Path) -> None:
    clock = FakeClock()
    store = MemoryStore(MemoryCluster(clock))
    job = StoredJob(store, "u", "n0.me")
    await job.create()
    await store.transact((), (Put(job.keys.plan, b"{"),))
    submissions = Submitter(store, StoreReader(store), tmp_path, tmp_path, clock)
    await submissions.cancel("u", "cancelled on request")
    await submissions.cancel("u", "again")  # stays as it is
    found = await store.get(job.keys.state)
    assert found is not None
    status = JobStatus.decode(found.value)
    assert (status.phase, status.reason) == (JobPhase.CANCELLED, "cancelled on request")
    assert await store.get(job.keys.active) is None  # no daemon works on it, and its workers are stopped

"""Only the owner of a local cluster may submit a spec with plug-in files; the files are copied into the run's folder."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from controllers.api.edge.errors import Conflict, Forbidden
from controllers.api.store_reader import StoreReader
from controllers.api.submission import submit
from controllers.api.submission.checks import CheckedJob
from controllers.api.submission.submit import Submitter
from gcore.config.local_cluster import KEY_FILE, read_owner_key, write_owner_key
from gcore.ledger.records.job import JobRecord
from gcore.plugins import file_digest, parse_plugin_file
from gcore.store.keys import JobKeys
from gcore.testing import FakeClock, MemoryCluster, MemoryStore

KEY = "k" * 64
SCORE = "def score(response):\n    return 1.0\n"


@pytest.fixture
def reward(tmp_path: Path) -> Path:
    file = tmp_path / "reward.py"
    file.write_text(SCORE)
    file.chmod(0o600)
    return file


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Model and data are not looked at."""
    from types import SimpleNamespace

    prompts = SimpleNamespace(prompts=9, digest="d", picture_settings="", identity=SimpleNamespace(held_out=""))
    model = SimpleNamespace(revision="", remote_code=())
    job: Any = SimpleNamespace(prompts=prompts, model=model, judges={}, attention_equals_at=8, models=None)

    async def check(self: Submitter, spec: Any) -> tuple[Path, CheckedJob]:
        return self._run_root, job

    monkeypatch.setattr(Submitter, "_checked", check)
    monkeypatch.setattr(
        submit, "identify_data", lambda spec, cache: SimpleNamespace(prompts=9, digest="d", held_out="")
    )


def submitter(tmp_path: Path, store: MemoryStore, key: str = KEY) -> Submitter:
    return Submitter(
        store, StoreReader(store), tmp_path / "runs", tmp_path / "cache", FakeClock(), local=True, owner_key=key
    )


def spec(reward: Path, **sections: Any) -> str:
    least = {"name": "own", "model": {"path": "/m"}, "data": {"path": "/d"}, "rollout": {"max_new_tokens": 4}}
    return json.dumps(least | {"flow": {"steps": 1}, "reward": {"file": f"{reward}:score"}} | sections)


def change(reward: Path) -> None:
    reward.write_text(SCORE.replace("1.0", "2.0"))


async def stored(store: MemoryStore, uid: str) -> JobRecord:
    kv = await store.get(JobKeys(uid).job)
    assert kv is not None
    return JobRecord.decode(kv.value, kv.key)


@pytest.mark.usefixtures("checked")
async def test_the_stored_spec_names_a_copy_in_the_runs_folder_by_its_digest(tmp_path: Path, reward: Path) -> None:
    store = MemoryStore(MemoryCluster(FakeClock()))
    uid = await submitter(tmp_path, store).create("r1", spec(reward), anew=False, owner_key=KEY)
    record = await stored(store, uid)
    file = parse_plugin_file(record.spec["reward"]["name"])
    assert file is not None
    assert file.path == Path(record.run_dir) / "code" / file_digest(SCORE.encode()) / "reward.py"
    assert file.path.read_text() == SCORE
    assert file.path.stat().st_mode & 0o077 == 0


@pytest.mark.usefixtures("checked")
async def test_the_same_file_goes_on_with_its_job_and_a_changed_one_does_not(tmp_path: Path, reward: Path) -> None:
    store = MemoryStore(MemoryCluster(FakeClock()))
    submissions = submitter(tmp_path, store)
    uid = await submissions.create("r1", spec(reward), anew=False, owner_key=KEY)
    assert await submissions.create("r2", spec(reward), anew=False, owner_key=KEY) == uid
    change(reward)
    with pytest.raises(Conflict, match=r"its spec differs \(reward.name\)"):
        await submissions.create("r3", spec(reward), anew=False, owner_key=KEY)


@pytest.mark.usefixtures("checked")
async def test_a_job_that_changes_its_adapters_is_referred_to_an_export(tmp_path: Path, reward: Path) -> None:
    store = MemoryStore(MemoryCluster(FakeClock()))
    submissions = submitter(tmp_path, store)
    await submissions.create("r1", spec(reward, train={"lora": {"rank": 8}}), anew=False, owner_key=KEY)
    for train in ({"lora": {"rank": 4}}, {}):
        with pytest.raises(Conflict, match=r"its spec differs \(train.lora.*export it \(gcore export\).*model\.path"):
            await submissions.create("r2", spec(reward, train=train), anew=False, owner_key=KEY)


@pytest.mark.usefixtures("checked")
async def test_a_submission_that_another_one_overtakes_leaves_no_run_folder(tmp_path: Path, reward: Path) -> None:
    store = MemoryStore(MemoryCluster(FakeClock()))
    both = [submitter(tmp_path, store).create(f"r{n}", spec(reward), anew=False, owner_key=KEY) for n in range(2)]
    first, second = await asyncio.gather(*both)
    assert first == second
    assert os.listdir(tmp_path / "runs") == [Path((await stored(store, first)).run_dir).name]


@pytest.mark.parametrize(
    ("own", "shown", "said"),
    [
        pytest.param(KEY, "", "only the owner", id="no key"),
        pytest.param(KEY, "x" * 64, "only the owner", id="another key"),
        pytest.param("", KEY, "this cluster runs no plug-in files", id="a cluster with users, or none of gcore up"),
    ],
)
async def test_nothing_is_read_or_written_for_anybody_else(
    tmp_path: Path, reward: Path, own: str, shown: str, said: str
) -> None:
    store = MemoryStore(MemoryCluster(FakeClock()))
    with pytest.raises(Forbidden, match=said):
        await submitter(tmp_path, store, own).create("r1", spec(reward), anew=False, owner_key=shown)
    assert not (await store.list("")).kvs
    assert os.listdir(tmp_path) == ["reward.py"]


def test_a_key_that_others_can_read_is_none_and_is_made_anew(tmp_path: Path) -> None:
    write_owner_key(tmp_path)
    first = read_owner_key(tmp_path)
    assert len(first) == 64
    write_owner_key(tmp_path)
    assert read_owner_key(tmp_path) == first
    (tmp_path / KEY_FILE).chmod(0o644)
    assert read_owner_key(tmp_path) == ""
    write_owner_key(tmp_path)
    assert read_owner_key(tmp_path) not in ("", first)

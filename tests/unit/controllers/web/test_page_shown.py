"""The jobs on the web page: for which users, and with which details."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from heard_cluster import heard
from stored_job import StoredJob

from controllers.api.edge.access import Caller, Role, acting_as
from controllers.api.edge.errors import NotFound
from controllers.api.store_reader import StoreReader
from controllers.web.content import MOST_EVENTS, PageContent, ServedPicture
from gcore.config import parse_spec
from gcore.ledger.records.cluster import Claim, Shares
from gcore.ledger.records.job import (
    EvalSample,
    Evaluation,
    KeptPicture,
    Move,
    MoveKind,
    Moves,
    NodeRecord,
    SplitPart,
    Trouble,
)
from gcore.observability.samples import (
    KeptGroup,
    KeptSample,
    KeptText,
    evaluation_folder,
    step_folder,
    write_samples,
)
from gcore.store import keys
from gcore.store.types import Put
from gcore.testing import FakeClock, MemoryCluster, MemoryStore
from gcore.types import PromptRef, Version

SPEC = {
    "name": "u",
    "model": {"path": "m"},
    "data": {"path": "d"},
    "flow": {"steps": 9},
    "rollout": {"max_new_tokens": 4},
}
SECRET = "a secret of the spec"
ANN = Caller("ann", Role.VIEWER, frozenset({"research"}))
BOB = Caller("bob", Role.VIEWER, frozenset({"default"}))


async def a_job(run_dir: Path, namespace: str = "default") -> tuple[StoredJob, PageContent]:
    clock = FakeClock()
    store = MemoryStore(MemoryCluster(clock))
    job = StoredJob(store, "u", "n0.me")
    await job.create()
    assert job.mirror.job is not None
    tree = parse_spec({**SPEC, "model": {"path": SECRET}}).model_dump(mode="json")
    changes = {"spec": tree, "run_dir": str(run_dir), "namespace": namespace}
    record = job.mirror.job.record.model_copy(update=changes)
    node = NodeRecord(
        name="n0",
        incarnation="n0.me",
        address="10.0.0.7:1",
        metrics_address="0.0.0.0:9090",
        slots=("cpu:0",),
        pid=1,
        started=0.0,
    )
    puts = [Put(job.keys.job, record.encode()), Put(keys.request("u"), b"u"), Put(keys.node("n0"), node.encode())]
    await store.transact((), tuple(puts))
    await job.look()
    return job, PageContent("n0", StoreReader(store), lambda uid: None, clock)


async def test_the_list_has_the_jobs_and_the_nodes(tmp_path: Path) -> None:
    _, shown = await a_job(tmp_path)
    tree = await shown.cluster()
    assert [(one["name"], one["state"], one["step"], one["steps"]) for one in tree["jobs"]] == [("u", "RUNNING", 0, 9)]
    assert (tree["nodes"], tree["node"], tree["more"]) == ([{"name": "n0", "slots": 1}], "n0", False)
    assert json.loads(json.dumps(tree)) == tree


async def test_prometheus_is_told_where_nodes_are_reached(tmp_path: Path) -> None:
    _, shown = await a_job(tmp_path)
    assert await shown.targets() == [{"targets": ["10.0.0.7:9090"], "labels": {"node": "n0"}}]


async def test_jobs_of_a_foreign_namespace_are_hidden(tmp_path: Path) -> None:
    _, shown = await a_job(tmp_path, "research")
    with acting_as(BOB):
        assert (await shown.cluster())["jobs"] == []
        for asked in (shown.job("u", -1), shown.slots("u"), shown.pictures("u"), shown.picture("u", "0-1", "ab" * 32)):
            with pytest.raises(NotFound, match="there is no job 'u'"):
                await asked
    with acting_as(ANN):
        assert [one["name"] for one in (await shown.cluster())["jobs"]] == ["research/u"]
        assert (await shown.job("u", -1))["name"] == "research/u"
    with pytest.raises(NotFound):
        await shown.job("nobody", -1)


async def test_a_job_is_shown_with_its_curves_moves_warnings_and_events_and_nothing_of_its_spec(tmp_path: Path) -> None:
    job, shown = await a_job(tmp_path)
    steps = [{"kind": "step", "lineage": 0, "step": at, "metrics": {"reward": at / 4}} for at in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))
    before, after = (SplitPart(mode="coexisting", rollout=n, reward=4 - n, train=1) for n in (3, 2))
    move = Move(
        generation=2,
        step=1,
        kind=MoveKind.SPLIT,
        before=before,
        after=after,
        reason="judges lag",
        time=5.0,
        expected_s=2.0,
        before_s=3.0,
    )
    trouble = Trouble(topic="t", node="n0", sentence="s" * 5000, time=1.0)
    puts = (Put(job.keys.moves, Moves().plus(move).encode()), Put(job.keys.trouble("t"), trouble.encode()))
    await job.store.transact((), puts)
    tree: dict[str, Any] = await shown.job("u", -1)
    assert tree["curves"]["points"]["reward"] == [(1, 0.25), (2, 0.5)]
    (told,) = tree["moves"]
    assert "because judges lag" in told["said"]
    assert told["expected"].startswith("a step was to take 2.0 s instead of 3.0 s")
    assert tree["split"]["train"] == 2
    assert len(tree["warnings"][0]["sentence"]) == 2000
    kinds = [event["kind"] for event in tree["events"]]
    assert {"state", "warning", "placement"} <= set(kinds)
    assert all(len(event["message"]) <= 2000 for event in tree["events"])
    assert SECRET not in json.dumps(tree)
    newest = tree["events"][-1]["sequence"]
    assert (await shown.job("u", newest))["events"] == []
    assert len((await shown.job("u", newest - 1))["events"]) == 1
    assert len(tree["events"]) <= MOST_EVENTS


async def test_a_folder_that_cannot_be_read_leaves_the_rest_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "books").write_text("no folder")
    _, shown = await a_job(tmp_path)
    assert (await shown.job("u", -1))["curves"] == {}
    assert (await shown.slots("u"))["rows"] == []


async def test_pictures_of_the_newest_samples_are_shown_and_deleted_ones_by_their_sha256(tmp_path: Path) -> None:
    _, shown = await a_job(tmp_path)
    assert (await shown.pictures("u"))["prompts"] == []
    kept, gone = "ab" * 32, "cd" * 32
    pictures = tuple(KeptPicture(sha256=name, size=8, height=2, width=2) for name in (kept, gone))
    group = KeptGroup(
        ref=PromptRef(0, 0, 0),
        digest="d",
        source="s",
        prompt=KeptText.of("p" * 500, 500),
        prompt_tokens=1,
        holder="n0.a",
        samples=tuple(
            KeptSample(response=KeptText.of("r", 9), tokens=1, reward=0.0, finish_reason="stop", pictures=pictures[:n])
            for n in (0, 2, 1)
        ),
        pictures=pictures,
    )
    write_samples(tmp_path, Version(0, 3), "n0.a", [group])
    (step_folder(tmp_path, Version(0, 3)) / f"{kept}.png").write_bytes(b"\x89PNG")
    tree = await shown.pictures("u")
    assert (tree["step"], len(tree["prompts"])) == (3, 1)
    assert tree["prompts"][0]["prompt"] == "p" * 200
    assert tree["prompts"][0]["pictures"] == [
        {"sha256": kept, "url": "data:image/png;base64,iVBORw==", "height": 2, "reward": None},
        {"sha256": gone, "url": "", "height": 2, "reward": None},
    ]
    assert tree["prompts"][0]["of_tools"] == tree["prompts"][0]["pictures"], "each once"
    assert tree["prompts"][0]["generated"] == []
    assert tree["held_out"] == {"steps": [], "prompts": []}


def a_picture(folder: Path, size: int, *, number: int = 0) -> KeptPicture:
    """A picture of `size` bytes in a folder of samples."""
    data = b"\x89PNG" + number.to_bytes(4, "big") + bytes(size - 8)
    picture = KeptPicture(sha256=hashlib.sha256(data).hexdigest(), size=size, height=512, width=512)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{picture.sha256}.png").write_bytes(data)
    return picture


def write_generated(run_dir: Path, version: Version, *pictures: KeptPicture) -> None:
    samples = tuple(
        KeptSample(response=KeptText(text=""), tokens=0, reward=number / 4, finish_reason="stop", picture=one, steps=5)
        for number, one in enumerate(pictures)
    )
    group = KeptGroup(
        ref=PromptRef(0, 0, 0), digest="d", source="s", prompt=KeptText(text="red"), prompt_tokens=1, holder="n0.a",
        samples=samples,
    )  # fmt: skip
    write_samples(run_dir, version, "n0.a", [group])


async def test_generated_pictures_are_shown_by_step_with_their_rewards(tmp_path: Path) -> None:
    _, shown = await a_job(tmp_path)
    for step in (1, 3):
        version = Version(0, step)
        sizes = (100, 20_000, (8 << 20) + 1)
        pictures = [a_picture(step_folder(tmp_path, version), size, number=step) for size in sizes]
        write_generated(tmp_path, version, *pictures)
    newest, first = await shown.pictures("u"), await shown.pictures("u", 1)
    assert [(one["step"], one["steps"]) for one in (newest, first)] == [(3, [1, 3]), (1, [1, 3])]
    assert await shown.pictures("u", 2) == newest
    (prompt,) = first["prompts"]
    assert [one["reward"] for one in prompt["generated"]] == [0.0, 0.25, 0.5]
    small, large, too_large = (one["url"] for one in prompt["generated"])
    assert small.startswith("data:image/png;base64,")
    assert large == f"pictures/0-1/{prompt['generated'][1]['sha256']}"
    assert too_large == ""
    assert (prompt["pictures"], prompt["of_tools"]) == ([], [])


async def test_a_picture_is_sent_if_its_bytes_are_those_of_its_name(tmp_path: Path) -> None:
    _, shown = await a_job(tmp_path)
    folder = step_folder(tmp_path, Version(0, 1))
    kept, large = a_picture(folder, 20_000), a_picture(folder, (8 << 20) + 1)
    assert await shown.picture("u", "0-1", kept.sha256) == ServedPicture(
        "image/png", (folder / f"{kept.sha256}.png").read_bytes()
    )
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    (folder / f"{'ee' * 32}.png").symlink_to(secret)
    for name in (large.sha256, "ee" * 32, "00" * 32):
        with pytest.raises(NotFound, match=f"there is no picture {name} in '0-1'"):
            await shown.picture("u", "0-1", name)
    (folder / f"{kept.sha256}.png").unlink()
    with pytest.raises(NotFound):
        await shown.picture("u", "0-1", kept.sha256)


async def test_held_out_pictures_of_the_first_the_best_and_the_newest_evaluation_are_side_by_side(
    tmp_path: Path,
) -> None:
    job, shown = await a_job(tmp_path)
    puts, kept = [], {}
    for step, accuracy in {0: 0.1, 1: 0.2, 2: 0.9, 3: 0.5}.items():
        version = Version(0, step)
        kept[step] = [a_picture(evaluation_folder(tmp_path, version), 100, number=10 * step + n) for n in range(12)]
        samples = tuple(
            EvalSample(
                prompt="red", response="", answer="", reward=step / 4, correct=step > 1, picture=one, source="s",
                unscored="odd" if step == 3 else "",
            )
            for one in kept[step]
        )  # fmt: skip
        made = Evaluation(version=version, accuracy=accuracy, count=12, samples=samples)
        puts.append(Put(job.keys.evaluation(str(version)), made.encode()))
    assert job.mirror.head is not None
    puts.append(Put(job.keys.head, job.mirror.head.record.model_copy(update={"step": 3}).encode()))
    await job.store.transact((), tuple(puts))
    found = (await shown.pictures("u"))["held_out"]
    assert (found["steps"], len(found["prompts"])) == ([0, 2, 3], 8)
    for number, card in enumerate(found["prompts"]):
        assert card["prompt"] == "red", "equal prompts are compared by their order"
        assert [one["sha256"] for one in card["pictures"]] == [kept[step][number].sha256 for step in (0, 2, 3)]
        assert [one["reward"] for one in card["pictures"]] == [0.0, 0.5, 0.75]
        assert card["right"] == [False, True, None]
        assert all(one["url"].startswith("data:") for one in card["pictures"])
    assert json.loads(json.dumps(found)) == found


async def test_a_job_that_waits_for_slots_says_so(tmp_path: Path) -> None:
    job, _ = await a_job(tmp_path)
    claim, shares = Claim(name="u", least=4), Shares()
    await job.store.transact((), (Put(job.keys.active, claim.encode()), Put(keys.SHARES, shares.encode())))
    cluster = await heard(job.store)
    shown = PageContent("n0", StoreReader(job.store, cluster=lambda: cluster), lambda uid: None, FakeClock())
    tree = await shown.job("u", -1)
    assert (tree["state"], tree["slots"], tree["place"]) == ("QUEUED", 0, 1)
    (listed,) = (await shown.cluster())["jobs"]
    assert (listed["state"], listed["place"]) == ("QUEUED", 1)

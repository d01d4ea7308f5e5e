"""The media of a job's prompts: made once, pinned while held, and errors as outcomes understand them."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from picture_models import write_picture_model
from prometheus_client import generate_latest

from controllers.api.submission.nodes import check_blob_room
from controllers.changes import ChangeSignal
from controllers.flow.group_buffer import GroupBuffer
from controllers.flow.job_data import JobData
from controllers.flow.peer import STALLED_S, JobPeer
from controllers.workers.blobs import SLOW_S, TROUBLE_S, WORLDS, NodeBlobs, StoreProblems, counter_increase
from controllers.workers.job_media import RENEW_S, REPORT_S, JobMedia
from gcore.config import JobSpec, parse_spec
from gcore.config.node import NodeConfig
from gcore.config.train import TrainSpec
from gcore.errors import DataError, EngineError, EngineUnreachable, GcoreError, NotAllowed, SpecError
from gcore.ledger.records.job import NodeRecord
from gcore.media.blobs import BlobStore
from gcore.media.client import BlobFetch
from gcore.media.pictures import PictureError
from gcore.media.placeholders import PictureRule
from gcore.media.protocol import (
    TRANSFERS,
    Blob,
    BlobMissing,
    BlobTooLarge,
    StoreDiskFull,
    StoreFailed,
    StoreFull,
    StoreUnreachable,
)
from gcore.observability.metrics import Metrics
from gcore.reward.api import PictureFile
from gcore.rollout.api import PicturesUnavailable
from gcore.system.clock import Clock
from gcore.system.concurrency import cancel_all
from gcore.system.network import listen
from gcore.testing import FakeClock, MemoryCluster, MemoryStore, PerfectNetwork
from gcore.types import Group, Medium, PictureRef, Prompt, PromptRef, Sample, TokenOutput, Version, VersionSpan

PICTURE = PictureRef("/data/a.png", "ab" * 32, 32, 48, 32, 48)
MEDIUM = Medium("picture", "cd" * 32, 100, (32, 48, 3), "uint8")


class StoreClient:
    """Stands for the client of the node's store."""

    def __init__(self) -> None:
        self.made: list[PictureRef] = []
        self.pinned: list[Sequence[str]] = []
        self.unpinned: list[Sequence[str]] = []
        self.error: Exception | None = None
        self.bound, self.used, self.reserved, self.for_transfers = 250, 0, 0, 0
        """Bytes of the whole store, of stored blobs, reserved by the controller, and for transfers to ranks."""
        self.fetched = BlobFetch(frozenset({MEDIUM.sha256}), frozenset(), {}, "/away/job")
        self.asked: list[tuple[Sequence[Blob], Sequence[str]]] = []
        self.holders: list[str] = []
        """The owner of the reservation that each fetch uses up."""
        self.located: dict[str, Collection[str]] = {}

    async def fetch(self, blobs: Sequence[Blob], nodes: Sequence[str], *, holder: str = TRANSFERS) -> BlobFetch:
        if self.error is not None:
            raise self.error
        self.asked.append((blobs, nodes))
        self.holders.append(holder)
        return self.fetched

    async def make_picture(self, picture: PictureRef, incarnation: str, ttl_s: float) -> Medium:
        if self.error is not None:
            raise self.error
        self.made.append(picture)
        self.used += 100
        return MEDIUM._replace(sha256=f"{len(self.made):02x}" * 32) if picture != PICTURE else MEDIUM

    async def pin(self, incarnation: str, sha256s: Sequence[str], ttl_s: float) -> None:
        self.pinned.append(sha256s)

    async def unpin(self, incarnation: str, sha256s: Sequence[str], *, ends_grace: bool = False) -> None:
        self.unpinned.append(sha256s)
        if ends_grace:
            self.used -= 100 * len(sha256s)

    async def reserve(self, holder: str, size: int, ttl_s: float) -> bool:
        before, others = self.reserved, self.for_transfers
        if holder == TRANSFERS:
            before, others = others, before
        if self.used + size + others > self.bound and size >= before:
            return False
        if holder == TRANSFERS:
            self.for_transfers = size
        else:
            self.reserved = size
        return True


class Blobs:
    """Stands for the stores of two nodes, this one and "away"."""

    node = "here"

    def __init__(self, client: StoreClient, away: StoreClient | None = None) -> None:
        self._client = client
        self.swept: list[Collection[str]] = []
        self.trouble = ""
        self.lost: set[str] = set()
        """SHA-256 of blobs that the folder of the store does not have any more."""
        self._away = away

    async def client(self, job: str, address: str = "") -> Any:
        return self._client

    async def sweep_worlds(self, job: str, needed: Callable[[], Collection[str]]) -> None:
        self.swept.append(needed())

    async def client_of(self, job: str, node: str) -> Any:
        if self._away is None:
            raise StoreUnreachable(f"node {node} has no blob store")
        return self._away

    def job_folder(self, job: str) -> Path:
        return Path("/here") / job

    async def locate(self, job: str, blobs: Sequence[str]) -> dict[str, Collection[str]]:
        return self._client.located

    async def find_lost(self, job: str, media: Sequence[Medium]) -> str | None:
        return next((one.sha256 for one in media if one.sha256 in self.lost), None)

    def nodes_with_stores(self) -> list[str]:
        return ["away", "here"]


def prompt(number: int = 0) -> Prompt:
    ids = (5, 7, 7, 7, 7, 6)
    return Prompt(PromptRef(0, 0, number), "?", ids, {}, "data", request_ids=(5, 7, 6), pictures=(PICTURE,))


def media_of(client: StoreClient, held: set[PromptRef], clock: FakeClock, away: StoreClient | None = None) -> JobMedia:
    blobs: Any = Blobs(client, away)
    return JobMedia(blobs, "job", "node.1", lambda: held, frozenset, ChangeSignal(), str, clock)


async def test_prompts_with_equal_pictures_share_their_blobs() -> None:
    client = StoreClient()
    media = media_of(client, set(), FakeClock())
    asked = await media.in_request(prompt(0), trained=True)
    assert asked == await media.in_request(prompt(1), trained=True)
    assert client.made == [PICTURE]
    assert asked.media == (MEDIUM,)
    assert asked.expanded((5, 7, 6, 9)) == [5, 7, 7, 7, 7, 6, 9]
    assert await media.of(prompt(0)) == (MEDIUM,)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (DataError("the picture changed", where="/data/a.png"), PictureError),
        (StoreUnreachable("no answer"), EngineUnreachable),
        (StoreFull("no room"), EngineUnreachable),
        (StoreDiskFull("no space"), EngineUnreachable),
        (BlobTooLarge("too large"), EngineError),
    ],
)
async def test_an_error_of_the_store_says_whether_the_prompt_is_sampled_again(
    error: Exception, kind: type[Exception]
) -> None:
    client = StoreClient()
    client.error = error
    media = media_of(client, set(), FakeClock())
    with pytest.raises(kind) as caught:
        await media.in_request(prompt(), trained=True)
    assert caught.type is kind, "a request waits before it is sent again if the engine is unreachable"
    client.error = None
    assert await media.of(prompt()) == (MEDIUM,)


def node_blobs(tmp_path: Path, clock: Clock) -> NodeBlobs:
    config = NodeConfig.model_validate(
        {
            "node": "n",
            "home": str(tmp_path),
            "etcd": {"endpoints": ["127.0.0.1:1"]},
            "slots": ["cpu:0"],
            "run_root": str(tmp_path / "runs"),
        }
    )
    return NodeBlobs(config, clock, dict, Metrics())


async def test_blobs_of_jobs_that_ended_while_the_daemon_did_not_run_are_deleted(tmp_path: Path) -> None:
    for job in ("ended", "active"):
        for folder in (tmp_path / "blobs" / "n" / job / "cd", tmp_path / WORLDS / job / "w-0"):
            folder.mkdir(parents=True)
            (folder / MEDIUM.sha256).write_bytes(b"x")
    (tmp_path / "blobs" / "n" / ".incoming").mkdir()
    blobs = node_blobs(tmp_path, FakeClock())
    (tmp_path / "blobs" / "n" / "new").mkdir()  # of a job whose records this node has not seen yet
    await blobs.forget_ended({"active"})
    left = {str(one.relative_to(tmp_path)) for parent in ("blobs/n", WORLDS) for one in (tmp_path / parent).iterdir()}
    assert left == {"blobs/n/active", "blobs/n/.incoming", "blobs/n/new", f"{WORLDS}/active"}


async def test_the_blobs_of_an_ended_job_are_deleted_also_if_the_store_does_not_run(tmp_path: Path) -> None:
    blobs = node_blobs(tmp_path, FakeClock())
    (blobs.job_folder("job") / "cd").mkdir(parents=True)
    await blobs.forget("job")
    assert not blobs.job_folder("job").exists()


def test_the_port_of_a_store_stays_the_same(tmp_path: Path) -> None:
    first, again = (node_blobs(tmp_path, FakeClock()).address for _ in range(2))
    assert first == again != ""


def test_a_store_gets_another_port_if_a_process_has_taken_that_of_its_last_run(
    tmp_path: Path,
) -> None:
    """Otherwise it would never start, and all jobs with pictures would wait."""
    first = node_blobs(tmp_path, FakeClock()).address
    with listen("127.0.0.1", int(first.rpartition(":")[2])):
        last = BlobStore(tmp_path / "blobs" / "n", 100, FakeClock())
        assert node_blobs(tmp_path, FakeClock()).address == first, "the store of the last run is still ending"
        last.close()
        other = node_blobs(tmp_path, FakeClock()).address
    assert other not in ("", first)
    assert node_blobs(tmp_path, FakeClock()).address == other


@pytest.mark.parametrize(
    "error", [StoreFailed("status 500"), NotAllowed("status 401"), StoreUnreachable("no answer"), BlobMissing("none")]
)
async def test_a_store_that_cannot_send_a_blob_is_left_out_when_it_is_located(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: GcoreError
) -> None:
    """Otherwise the error would end the job's session, and no holder would drop the group."""

    class Store:
        def __init__(self, address: str) -> None:
            self.address = address

        async def stat(self, sha256: str) -> int:
            if self.address == "broken" and sha256 == "a":
                raise error
            return 7

    async def client(job: str, address: str) -> Store:
        return Store(address)

    blobs = node_blobs(tmp_path, FakeClock())
    monkeypatch.setattr(blobs, "client", client)
    monkeypatch.setattr(blobs, "_nodes", lambda: {name: SimpleNamespace(blobs=name) for name in ("broken", "good", "")})
    found = await blobs.locate("job", ["a", "b"])
    assert found["a"] == {"good"}
    assert found["b"] == ({"good"} if isinstance(error, StoreUnreachable) else {"good", "broken"})


async def test_the_folders_of_worlds_that_no_rank_needs_are_deleted(tmp_path: Path) -> None:
    worlds = tmp_path / "worlds" / "job"
    for name in ("old-0", "now-0", "now-1"):
        (worlds / name).mkdir(parents=True)
        (worlds / name / "blob").touch()

    def needed() -> Collection[str]:  # called after the folders were listed
        (worlds / "new-0").mkdir()
        return {"now"}

    await node_blobs(tmp_path, FakeClock()).sweep_worlds("job", needed)
    assert sorted(folder.name for folder in worlds.iterdir()) == ["new-0", "now-0", "now-1"]


async def test_worlds_are_swept_whenever_a_rank_has_ended() -> None:
    client, clock, changes, needed = StoreClient(), FakeClock(), ChangeSignal(), set[str]()
    blobs: Any = Blobs(client)
    media = JobMedia(blobs, "job", "node.1", list, lambda: frozenset(needed), changes, str, clock)
    running = asyncio.create_task(media.run())
    try:
        for worlds in ({"old"}, {"old"}, {"old", "new"}, {"new"}):
            needed.clear()
            needed.update(worlds)
            changes.notify()
            await clock.advance(0.1)
        assert blobs.swept == [{"old"}, {"old", "new"}, {"new"}]  # nothing while no world is known
    finally:
        running.cancel()


async def test_a_job_reports_problems_of_the_blob_store_until_they_end() -> None:
    clock, said = FakeClock(), list[str]()
    blobs: Any = Blobs(StoreClient())
    media = JobMedia(blobs, "job", "node.1", list, frozenset, ChangeSignal(), said.append, clock)
    running = asyncio.create_task(media.run())
    try:
        for trouble in ("", "it is full", ""):
            blobs.trouble = trouble
            await clock.advance(REPORT_S)
        assert [sentence for before, sentence in pairwise(["", *said]) if sentence != before] == ["it is full", ""]
    finally:
        running.cancel()


COUNTERS = {"bound": 4_000_000, "pinned": 3_000_000, "held": 3_500_000, "stored": 3_600_000, "incoming": 100_000}
COUNTERS |= {"reserved": 200_000, "fetches": 2, "fetch_ms": 1500, "bytes_fetched": 700}
COUNTERS |= dict.fromkeys(("refused_full", "failed_disk", "blobs_damaged"), 0)


@pytest.mark.parametrize(
    ("counters", "took_s", "said"),
    [
        (
            {"refused_full": 3},
            0.0,
            "the blob store is full and refused 3 requests: of 4 MB, 3 MB are pinned and 0 MB reserved",
        ),
        ({"failed_disk": 1}, 0.0, "the disk of the blob store failed 1 requests"),
        ({"blobs_damaged": 2}, 0.0, "the blob store removed 2 blobs whose bytes had changed"),
        ({}, SLOW_S + 2, "the blob store took 7 s to answer"),
        ({}, 0.0, ""),
    ],
)
def test_a_full_failing_damaged_or_slow_store_is_a_problem(counters: dict[str, int], took_s: float, said: str) -> None:
    problems, now = StoreProblems(), COUNTERS | counters
    problems.note_counters(now, counter_increase(COUNTERS, now), took_s, 0.0)
    assert problems.sentence(0.0).startswith(said)
    assert bool(problems.sentence(0.0)) == bool(said)


def test_a_problem_that_lasts_is_one_sentence_and_ends_when_it_is_not_seen_any_more() -> None:
    problems = StoreProblems()
    problems.note("slow", "it took 7 s to answer", 0.0)
    problems.note("slow", "it took 9 s to answer", TROUBLE_S - 1)
    assert problems.sentence(2 * TROUBLE_S - 2) == "it took 7 s to answer"
    assert problems.sentence(2 * TROUBLE_S) == ""


def test_the_counters_of_a_restarted_store_count_from_0() -> None:
    assert counter_increase({"a": 5, "b": 5}, {"a": 7, "b": 2, "c": 1}) == {"a": 2, "b": 2, "c": 1}


def test_metrics_of_a_blob_store() -> None:
    metrics = Metrics()
    metrics.show_blobs(COUNTERS, COUNTERS, world_bytes=50)
    metrics.count_blob_store_end()
    text = generate_latest(metrics.registry).decode()
    for line in (
        'gcore_blob_bytes{kind="free",where="store"} 200000.0',
        'gcore_blob_bytes{kind="pinned",where="store"} 3e+06',
        'gcore_blob_bytes{kind="stored",where="worlds"} 50.0',
        "gcore_blob_fetch_seconds_total 1.5",
        'gcore_blob_store_errors_total{kind="gone"} 1.0',
    ):
        assert line in text


async def test_the_key_of_a_rank_is_known_when_the_wait_for_the_secret_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()

    async def serve(self: NodeBlobs) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(NodeBlobs, "_run_once", serve)
    blobs = node_blobs(tmp_path, clock)
    waiting = asyncio.create_task(blobs.wait_for_secret())
    await asyncio.sleep(0)
    assert not waiting.done()
    running = asyncio.create_task(blobs.run(MemoryStore(MemoryCluster(clock), network=PerfectNetwork(clock))))
    try:
        while not waiting.done():
            await clock.advance(0.1)
        assert blobs.of_rank("job", "world", 0).key
    finally:
        await cancel_all([running])


async def test_pins_are_renewed_while_a_prompt_is_held_and_end_with_it() -> None:
    client, clock, held = StoreClient(), FakeClock(), {PromptRef(0, 0, 0)}
    media = media_of(client, held, clock)
    await media.in_request(prompt(0), trained=True)
    running = asyncio.create_task(media.run())
    try:
        await clock.advance(RENEW_S + 1)
        assert client.pinned == [[MEDIUM.sha256]]
        held.clear()
        await clock.advance(RENEW_S + 1)
        assert client.unpinned == [[MEDIUM.sha256]]
        assert len(client.pinned) == 1
    finally:
        running.cancel()


@pytest.mark.parametrize(("freeze", "passes"), [((), 3), (("vision",), 1), (("projector",), 3)])
def test_an_offer_names_the_patches_of_distinct_pictures_and_what_they_cost(
    tmp_path: Path, freeze: tuple[str, ...], passes: int
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}
    folder = write_picture_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] |= sizes
    config["text_config"] |= {**sizes, "num_hidden_layers": 6}
    (folder / "config.json").write_text(json.dumps(config))
    opened = SimpleNamespace(rule=PictureRule.load(folder))
    stream: Any = SimpleNamespace(found=lambda ref: (opened, 0))
    spec: Any = SimpleNamespace(train=TrainSpec(freeze=freeze))
    data = JobData(spec, "j", stream, {}, (), {})
    other = MEDIUM._replace(sha256="ef" * 32, shape=(64, 64, 3))
    sample = Sample((1,), (0.0,), "a", "stop", (VersionSpan(Version(0, 0), 0, 1),))
    group = Group(PromptRef(0, 0, 0), (5, 6), (sample,), "data", media=(MEDIUM, MEDIUM, other))
    work = data.picture_work(group)
    assert work.patches == 4 * 6 + 8 * 8
    assert work.tokens == math.ceil(work.patches * passes / 3 * 2 / 6)
    buffer = GroupBuffer()
    buffer.add_group(group, *work)
    assert (buffer.offers[group.ref].patches, buffer.offers[group.ref].picture_tokens) == work[:2]


async def test_an_engine_of_this_node_reads_the_blobs_of_this_nodes_store() -> None:
    client = StoreClient()
    asked = await media_of(client, set(), FakeClock()).in_request(prompt(), trained=True)
    assert (await asked.at_node("here")).paths == [f"/here/job/cd/{MEDIUM.sha256}"]
    assert not client.asked


async def test_blobs_that_this_nodes_store_has_lost_are_made_again() -> None:
    """Otherwise each new try of the prompt would fail at an engine of this node, and then the prompt itself."""
    client = StoreClient()
    blobs = Blobs(client)
    stores: Any = blobs
    media = JobMedia(stores, "job", "node.1", set, frozenset, ChangeSignal(), str, FakeClock())
    asked = await media.in_request(prompt(), trained=True)
    blobs.lost.add(MEDIUM.sha256)
    with pytest.raises(EngineError, match=f"the blob store of here has lost picture {MEDIUM.sha256}"):
        await asked.at_node("here")
    blobs.lost.clear()
    assert (await (await media.in_request(prompt(), trained=True)).at_node("here")).folder == "/here/job"
    assert client.made == [PICTURE] * 2
    blobs.lost.add(MEDIUM.sha256)
    async with media.files(prompt()) as files:
        assert [one.sha256 for one in files] == [MEDIUM.sha256]
    assert client.made == [PICTURE] * 3, "a reward function gets files that exist"


async def test_a_blob_that_is_gone_or_has_another_size_is_lost(tmp_path: Path) -> None:
    blobs = node_blobs(tmp_path, FakeClock())
    file = blobs.job_folder("job") / "cd" / MEDIUM.sha256
    assert await blobs.find_lost("job", [MEDIUM]) == MEDIUM.sha256
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(MEDIUM.size))
    assert await blobs.find_lost("job", [MEDIUM]) is None
    file.write_bytes(bytes(MEDIUM.size - 1))
    assert await blobs.find_lost("job", [MEDIUM]) == MEDIUM.sha256


async def test_the_store_of_an_engines_node_pins_and_fetches_the_blobs_of_a_request() -> None:
    client, away = StoreClient(), StoreClient()
    asked = await media_of(client, set(), FakeClock(), away).in_request(prompt(), trained=True)
    assert (await asked.at_node("away")).paths == [f"/away/job/cd/{MEDIUM.sha256}"]
    assert away.pinned == [[MEDIUM.sha256]]
    assert away.asked == [([Blob(MEDIUM.sha256, MEDIUM.size)], ["here"])]


async def test_blobs_that_do_not_reach_the_engines_node_are_an_error_that_names_them() -> None:
    client, away = StoreClient(), StoreClient()
    media = media_of(client, set(), FakeClock(), away)
    asked = await media.in_request(prompt(), trained=True)
    away.fetched = replace(away.fetched, failed={MEDIUM.sha256: "no route"})
    with pytest.raises(EngineError, match=rf"away could not fetch picture {MEDIUM.sha256} \(no route\)"):
        await asked.at_node("away")
    assert client.made == [PICTURE]
    away.fetched = replace(away.fetched, failed={}, unavailable=frozenset({MEDIUM.sha256}))
    with pytest.raises(EngineError, match="here does not have it"):
        await asked.at_node("away")
    assert await media.of(prompt()) == (MEDIUM,)
    assert client.made == [PICTURE, PICTURE], "this node's store makes the lost blob again"


@pytest.mark.parametrize(
    ("error", "kind"), [(StoreUnreachable("no answer"), EngineUnreachable), (StoreFull("no room"), EngineError)]
)
async def test_a_store_that_does_not_answer_sends_the_request_to_another_engine(
    error: Exception, kind: type[Exception]
) -> None:
    away, clock = StoreClient(), FakeClock()
    asked = await media_of(StoreClient(), set(), clock, away).in_request(prompt(), trained=True)
    away.error = error
    request = asyncio.create_task(asked.at_node("away"))
    await clock.advance(60)
    with pytest.raises(kind, match="the blob store of the engine's node away"):
        await request
    request = asyncio.create_task(asked.at_node("away"))
    await clock.advance(0.01)
    away.error = None  # the store is back before the last try
    await clock.advance(60)
    if isinstance(error, StoreUnreachable):
        assert (await request).folder == "/away/job"
    else:
        with pytest.raises(kind):
            await request


async def test_pins_last_while_pictures_are_in_use() -> None:
    client, clock = StoreClient(), FakeClock()
    media = media_of(client, set(), clock)
    running = asyncio.create_task(media.run())
    try:
        async with media.in_use((PICTURE,)) as made:
            assert made == (MEDIUM,)
            await clock.advance(RENEW_S + 1)
            assert (client.pinned, client.unpinned) == ([[MEDIUM.sha256]], [])
        await clock.advance(RENEW_S + 1)
        assert client.unpinned == [[MEDIUM.sha256]]
    finally:
        running.cancel()


async def test_the_files_of_a_prompt_are_blobs_of_this_node_that_are_in_use() -> None:
    client, clock = StoreClient(), FakeClock()
    media = media_of(client, set(), clock)
    running = asyncio.create_task(media.run())
    try:
        async with media.files(prompt()) as files:
            assert files == (PictureFile(f"/here/job/cd/{MEDIUM.sha256}", MEDIUM.sha256, 32, 48),)
            await clock.advance(RENEW_S + 1)
            assert not client.unpinned
    finally:
        running.cancel()


async def test_pictures_of_responses_are_fetched_again_and_stay_while_they_are_in_use() -> None:
    client, clock = StoreClient(), FakeClock()
    media = media_of(client, set(), clock)
    blob = Blob(MEDIUM.sha256, MEDIUM.size)
    running = asyncio.create_task(media.run())
    try:
        async with media.stored((MEDIUM, MEDIUM)):
            assert client.pinned == [[MEDIUM.sha256]]
            assert [(list(blobs), nodes) for blobs, nodes in client.asked] == [([blob], [])]
            await clock.advance(RENEW_S + 1)
            assert client.pinned == [[MEDIUM.sha256]] * 2
        await clock.advance(RENEW_S + 1)
        assert len(client.pinned) == 2
    finally:
        running.cancel()


async def test_a_picture_of_a_response_that_no_store_has_is_an_error_that_names_it() -> None:
    client = StoreClient()
    media = media_of(client, set(), FakeClock())
    client.fetched = BlobFetch(frozenset(), frozenset({MEDIUM.sha256}), {}, "/here/job")
    client.located = {MEDIUM.sha256: ["away", "further"]}
    with pytest.raises(
        PicturesUnavailable, match=rf"picture {MEDIUM.sha256} of a response was lost \(no store has it\)"
    ):
        async with media.stored((MEDIUM,)):
            raise AssertionError("it was not found")
    assert [nodes for _, nodes in client.asked] == [[], ["away", "further"]]
    client.error = StoreUnreachable("no answer")
    with pytest.raises(EngineUnreachable, match="the blob store of this node: no answer"):
        async with media.stored((MEDIUM,)):
            raise AssertionError("it did not answer")
    async with media.stored(()):
        pass


async def test_a_lost_picture_of_a_tool_makes_a_judge_unavailable_and_a_damaged_one_of_the_data_is_final() -> None:
    client = StoreClient()
    media = media_of(client, set(), FakeClock())
    (file,) = media.picture_files((MEDIUM, MEDIUM._replace(kind="trajectory")))
    assert file == PictureFile(f"/here/job/cd/{MEDIUM.sha256}", MEDIUM.sha256, 32, 48)
    client.error = DataError("the picture does not exist")
    for path, kind in ((file.path, EngineUnreachable), ("/data/a.png", PictureError)):
        with pytest.raises(kind, match="the picture does not exist"):
            async with media.in_use((PICTURE._replace(path=path),)):
                raise AssertionError("it does not exist")


def test_a_response_has_one_generated_picture() -> None:
    media = media_of(StoreClient(), set(), FakeClock())
    drawn, states = MEDIUM._replace(kind="decoded"), MEDIUM._replace(kind="trajectory")
    file = media.generated_picture((states, drawn))
    assert file == PictureFile(f"/here/job/cd/{MEDIUM.sha256}", MEDIUM.sha256, 32, 48)
    for wrong in ((states,), (drawn, drawn)):
        with pytest.raises(EngineError, match="pictures for a response, instead of 1"):
            media.generated_picture(wrong)


def of_picture(number: int) -> Prompt:
    """A prompt with a picture of its own, whose blob has 100 bytes."""
    picture = PICTURE._replace(path=f"/data/{number}.png", sha256=f"{number:02x}" * 32, size=100)
    return replace(prompt(number), pictures=(picture,)) if number else replace(prompt(0), pictures=(picture,))


async def test_room_is_reserved_until_the_blobs_are_stored() -> None:
    client = StoreClient()
    media = media_of(client, set(), FakeClock())
    first, second, third = map(of_picture, range(3))
    assert await media.reserve(first)
    assert await media.reserve(second)
    assert (client.reserved, client.used) == (200, 0)
    assert not await media.reserve(third)
    assert client.reserved == 200
    await media.in_request(first, trained=True)
    assert (client.reserved, client.used) == (100, 100)
    assert await media.reserve(first), "its blobs are there"
    client.error = StoreFull("no room")
    with pytest.raises(EngineError):
        await media.in_request(second, trained=True)
    assert client.reserved == 0


async def test_a_reservation_that_is_raised_is_not_lowered_by_one_that_ends_meanwhile() -> None:
    """Otherwise the store gives the room of the new prompt to others."""

    class SlowStore(StoreClient):
        answers = asyncio.Event()

        async def reserve(self, holder: str, size: int, ttl_s: float) -> bool:
            granted = await super().reserve(holder, size, ttl_s)
            if size == 200:  # with the room of the second prompt
                await self.answers.wait()
            return granted

    client, clock = SlowStore(), FakeClock()
    media = media_of(client, set(), clock)
    first, second = of_picture(1), of_picture(2)
    assert await media.reserve(first)
    raising = asyncio.create_task(media.reserve(second))
    await clock.advance(0.01)
    making = asyncio.create_task(media.of(first))
    await clock.advance(0.01)
    client.answers.set()
    assert await raising
    await making
    assert client.reserved == 100, "of the second prompt"


@pytest.mark.parametrize("sampled", [True, False])
async def test_room_stays_reserved_for_prompts_that_are_going_to_be_sampled(sampled: bool) -> None:
    client, clock = StoreClient(), FakeClock()
    first = of_picture(0)
    media = media_of(client, {first.ref} if sampled else set(), clock)
    assert await media.reserve(first)
    running = asyncio.create_task(media.run())
    try:
        await clock.advance(RENEW_S + 1)
        assert client.reserved == (100 if sampled else 0)
    finally:
        running.cancel()


TOOL_PICTURE = PICTURE._replace(path="/tmp/tool.png", sha256="ee" * 32)


def media_with_tools(client: StoreClient, held: set[PromptRef], clock: FakeClock) -> JobMedia:
    blobs: Any = Blobs(client)
    return JobMedia(blobs, "job", "node.1", lambda: held, frozenset, ChangeSignal(), str, clock)


async def test_room_for_pictures_of_tools_is_reserved_until_all_responses_are_finished() -> None:
    client = StoreClient()
    media = media_with_tools(client, set(), FakeClock())
    first, second = of_picture(0), of_picture(1)
    assert await media.reserve(first, 120)
    assert client.reserved == 100 + 120
    assert not await media.reserve(second, 120)
    await media.in_request(first, trained=True)
    assert client.reserved == 120
    stored = await media.store_for(first.ref, TOOL_PICTURE)
    assert client.made == [*first.pictures, TOOL_PICTURE]
    assert client.reserved == 120 - stored.size
    await media.end_sampling(first.ref)
    assert client.reserved == 0


async def test_a_prompt_without_pictures_has_room_for_those_of_tools() -> None:
    client = StoreClient()
    media = media_with_tools(client, set(), FakeClock())
    plain = replace(prompt(), pictures=())
    assert await media.reserve(plain, 120)
    assert client.reserved == 120
    await media.release(plain.ref)
    assert client.reserved == 0


async def test_blobs_of_tools_stay_pinned_while_their_prompt_is_held() -> None:
    client, clock = StoreClient(), FakeClock()
    held = {prompt().ref}
    media = media_with_tools(client, held, clock)
    asked = await media.in_request(prompt(), trained=True)
    stored = await media.store_for(prompt().ref, TOOL_PICTURE)
    names = sorted(one.sha256 for one in (*asked.media, stored))
    running = asyncio.create_task(media.run())
    try:
        await clock.advance(RENEW_S + 1)
        assert client.pinned == [names]
        held.clear()
        await clock.advance(RENEW_S + 1)
        assert client.unpinned == [names]
    finally:
        running.cancel()


async def test_the_blobs_of_tools_are_released_with_a_dropped_group() -> None:
    client = StoreClient()
    media = media_with_tools(client, set(), FakeClock())
    await media.in_request(prompt(0), trained=True)
    await media.in_request(prompt(1), trained=True)  # with the same picture
    stored = await media.store_for(prompt(0).ref, TOOL_PICTURE)
    await media.release(prompt(0).ref)
    assert client.unpinned == [[stored.sha256]]


async def test_the_blob_of_a_tool_that_a_judge_has_seen_is_released_with_the_group() -> None:
    class OneBlob(StoreClient):
        async def make_picture(self, picture: PictureRef, incarnation: str, ttl_s: float) -> Medium:
            return MEDIUM

    client, ref = OneBlob(), PromptRef(0, 0, 0)
    media = media_of(client, {ref}, FakeClock())
    medium = await media.store_for(ref, PICTURE)
    (file,) = media.picture_files((medium,))
    seen = PictureRef(file.path, file.sha256, file.height, file.width, file.height, file.width)
    async with media.in_use((seen,)) as shown:
        assert shown == (medium,)
        await media.release(ref)
        assert not client.unpinned, "the judge still reads it"
    media.keep(ref, (PICTURE,))
    await media.of(replace(prompt(), pictures=(PICTURE,)))
    await media.release(ref)
    assert client.unpinned == [[MEDIUM.sha256]]


class Holder:
    """A peer that holds groups of these prompts, which are in no seal."""

    def __init__(self, media: JobMedia, held: Sequence[int]) -> None:
        self.media, self.buffer, self.changes = media, GroupBuffer(), SimpleNamespace(notify=lambda: None)
        self.clock, self.lacking, self.duplicates = FakeClock(), 0, set[int]()
        self.data = SimpleNamespace(made_bytes=0)
        """`lacking`: bytes of blobs that ranks of this node lack. `duplicates`: prompts whose group is taken from another peer."""
        self.warnings: list[str] = []
        self._warnings = SimpleNamespace(hold=lambda topic, sentence: self.warnings.append(sentence))
        sample = Sample((1,), (0.0,), "a", "stop", (VersionSpan(Version(0, 0), 0, 1),))
        for number in held:
            self.buffer.add_group(Group(PromptRef(0, 0, number), (5, 6), (sample,), "data"))

    def look(self) -> Any:
        shape = SimpleNamespace(position=lambda ref: ref.seq)
        return SimpleNamespace(
            unsealed=tuple(one for ref, one in self.buffer.offers.items() if ref.seq not in self.duplicates),
            duplicates=tuple(one for ref, one in self.buffer.offers.items() if ref.seq in self.duplicates),
            rules=SimpleNamespace(shape=shape),
            me="here.1",
            lacking_bytes=lambda node: self.lacking if node == "here" else 0,
        )

    _duplicate: Any = JobPeer._duplicate
    _youngest_unsealed: Any = JobPeer._youngest_unsealed
    _give_up_room: Any = JobPeer._give_up_room
    make_room_for_ranks: Any = JobPeer.make_room_for_ranks

    async def has_room(self, number: int, *due: int) -> bool:
        peer: Any = self
        return await JobPeer._has_room(peer, of_picture(number), [PromptRef(0, 0, one) for one in due])

    @property
    def held(self) -> set[int]:
        return {ref.seq for ref in self.buffer.offers}


async def test_the_oldest_due_prompt_gets_the_room_of_the_youngest_group() -> None:
    client = StoreClient()
    media = media_of(client, set(), FakeClock())
    for number in (2, 3):
        await media.in_request(of_picture(number), trained=True)
    peer = Holder(media, [2, 3])
    assert not await peer.has_room(1, 0, 1), "it is not the oldest"
    assert not await peer.has_room(4, 4), "all groups are older"
    assert peer.held == {2, 3}
    assert all("no room" in said for said in peer.warnings)
    assert await peer.has_room(1, 1, 4)
    assert peer.held == {2}
    assert not peer.buffer.reissues, "the dropped prompt has not failed"
    assert peer.warnings[-1] == ""
    assert (client.used, client.reserved) == (100, 100)


async def test_a_rank_without_room_for_blobs_of_other_nodes_gets_that_of_the_youngest_groups() -> None:
    """Otherwise its step would never end, and be sealed again and again."""
    client = StoreClient()
    media = media_of(client, set(), FakeClock())
    for number in (2, 3):
        await media.in_request(of_picture(number), trained=True)
    peer = Holder(media, [2, 3])
    running = asyncio.create_task(peer.make_room_for_ranks())
    try:
        for peer.lacking in (140, 130, 120):  # something arrives
            await peer.clock.advance(STALLED_S - 1)
        assert peer.held == {2, 3}
        await peer.clock.advance(2)
        assert peer.held == {2}
        assert (client.used, client.for_transfers) == (100, 120)
        assert not await peer.has_room(4, 4), "a new prompt does not get this room"
        peer.lacking = 0
        await peer.clock.advance(1)
        assert client.for_transfers == 0
        peer.lacking = 100  # there is room, but the transfer is slow
        await peer.clock.advance(3 * STALLED_S)
        assert peer.held == {2}
    finally:
        running.cancel()


async def holder_of_a_duplicate() -> Holder:
    """A peer whose store has room for two groups, of which the older one is a duplicate."""
    media = media_of(StoreClient(), set(), FakeClock())
    for number in (2, 3):
        await media.in_request(of_picture(number), trained=True)
    peer = Holder(media, [2, 3])
    peer.duplicates = {2}
    return peer


async def test_a_prompt_gets_the_room_of_a_duplicate_of_a_sealed_group() -> None:
    peer = await holder_of_a_duplicate()
    assert await peer.has_room(4, 4), "also one that is younger than all groups"
    assert peer.held == {3}
    assert not peer.buffer.reissues


async def test_a_rank_gets_the_room_of_a_duplicate_before_that_of_other_groups() -> None:
    peer = await holder_of_a_duplicate()
    peer.lacking = 100
    running = asyncio.create_task(peer.make_room_for_ranks())
    try:
        await peer.clock.advance(STALLED_S + 2)
        assert peer.held == {3}
    finally:
        running.cancel()


def test_a_job_whose_pictures_cannot_fit_is_refused_with_both_numbers() -> None:
    def spec(**rollout: Any) -> JobSpec:
        flow = {"steps": 1, "groups_per_step": 10}
        tree = {"name": "j", "model": {"path": "m"}, "data": {"path": "d", "images": "images"}, "flow": flow}
        more = {"rollout": {"max_new_tokens": 4, **rollout}, "train": {"old_logprobs": "engine"}}
        return parse_spec(tree | more)

    class Source(list[int]):
        pictures = SimpleNamespace(total_size=100_000)

    def nodes(*room: int) -> list[NodeRecord]:
        listed = enumerate(room)
        common: dict[str, Any] = {
            "incarnation": "i",
            "address": "a",
            "slots": ("cpu:0",),
            "pid": 1,
            "blobs": "http://x",
        }
        return [NodeRecord(name=f"n{number}", blob_bytes=size, **common) for number, size in listed]

    sources: Any = [Source(range(100))]
    check_blob_room(spec(), nodes(5_000, 5_000), sources, Path("model"))
    with pytest.raises(SpecError, match=r"pictures of 10 groups .* about 10,000 bytes, .* 2 nodes have 9,999"):
        check_blob_room(spec(), nodes(5_000, 4_999), sources, Path("model"))
    with pytest.raises(SpecError, match=r"30 groups .2 steps ahead and 1 in training. take about 30,000 bytes"):
        check_blob_room(spec(staleness=1), nodes(29_999), sources, Path("model"))
    with pytest.raises(SpecError, match=r"25 groups .1\.5 steps ahead"):
        check_blob_room(spec(staleness=1, over_provision=1.5), nodes(24_999), sources, Path("model"))
    check_blob_room(spec(staleness=20), nodes(100_000), sources, Path("model"))  # the whole data
    check_blob_room(spec(), nodes(0, 1), sources, Path("model"))  # of an older node nothing is known


def test_a_job_has_room_for_as_many_pictures_of_tools_as_its_responses_may_have() -> None:
    tools = {"names": ["crop"], "max_pictures": 2, "max_pixels": 1000}
    tree = {
        "name": "j",
        "model": {"path": "m"},
        "data": {"path": "d", "images": "images"},
        "flow": {"steps": 1, "groups_per_step": 10, "samples_per_prompt": 8},
        "rollout": {"max_new_tokens": 4},
        "environment": {"name": "tools", "tools": tools},
    }
    spec, each = parse_spec(tree), 2 * (4 * 1000 + 65_536)
    assert spec.tool_picture_bytes == 8 * each
    node = {"incarnation": "i", "address": "a", "slots": ("cpu:0",), "pid": 1, "blobs": "http://x", "name": "n"}
    records = [NodeRecord.model_validate({**node, "blob_bytes": 10 * 8 * each - less}) for less in (0, 1)]
    check_blob_room(spec, records[:1], [], Path("model"))
    with pytest.raises(SpecError, match=f"about {80 * each:,} bytes"):
        check_blob_room(spec, records[1:], [], Path("model"))


MADE = Medium("trajectory", "ef" * 32, 1000, (1000,), "uint8")


async def test_blobs_that_an_engine_made_for_responses_stay_pinned_while_their_prompt_is_held() -> None:
    client, clock, held = StoreClient(), FakeClock(), {PromptRef(0, 0, 0), PromptRef(0, 0, 1)}
    client.fetched = BlobFetch(frozenset({MADE.sha256}), frozenset(), {}, "/here/job")
    media = media_of(client, held, clock)
    await media.keep_made(PromptRef(0, 0, 0), [])
    assert client.pinned == [], "a response without blobs costs no call"
    for number in range(2):
        await media.keep_made(PromptRef(0, 0, number), [MADE])
    assert client.pinned == [[MADE.sha256]] * 2
    assert client.asked[0] == ([Blob(MADE.sha256, 1000)], ["away", "here"]), (
        "an engine elsewhere has it in its own store"
    )
    running = asyncio.create_task(media.run())
    try:
        held.remove(PromptRef(0, 0, 0))
        await clock.advance(RENEW_S + 1)
        assert (len(client.pinned), client.unpinned) == (3, [])
        held.clear()
        await clock.advance(RENEW_S + 1)
        assert (len(client.pinned), client.unpinned) == (3, [[MADE.sha256]])
    finally:
        running.cancel()


async def test_blobs_that_an_engine_made_take_the_room_that_is_reserved_for_them() -> None:
    client = StoreClient()
    client.bound, client.fetched = 5000, BlobFetch(frozenset({MADE.sha256}), frozenset(), {}, "/here/job")
    media, ref = media_of(client, {PromptRef(0, 0, 0)}, FakeClock()), PromptRef(0, 0, 0)
    assert await media.reserve(replace(prompt(), ref=ref, pictures=()), 3000)
    await media.keep_made(ref, [MADE, MADE])
    assert client.holders == ["node.1"], "a transfer from the store of the engine's node uses it up"
    assert client.reserved == 2000, "these bytes are stored now, and not also reserved"
    await media.end_sampling(ref)
    assert client.reserved == 0


async def test_the_blobs_of_a_dropped_group_lose_their_pins() -> None:
    client = StoreClient()
    client.fetched = BlobFetch(frozenset({MADE.sha256}), frozenset(), {}, "/here/job")
    media = media_of(client, {PromptRef(0, 0, 0)}, FakeClock())
    await media.keep_made(PromptRef(0, 0, 0), [MADE])
    await media.release(PromptRef(0, 0, 0))
    assert client.unpinned == [[MADE.sha256]]


@pytest.mark.parametrize("error", [None, StoreUnreachable("no answer")])
async def test_a_response_whose_blob_no_store_has_is_sampled_again(error: Exception | None) -> None:
    client = StoreClient()
    client.error, client.fetched = error, BlobFetch(frozenset(), frozenset({MADE.sha256}), {}, "/here/job")
    with pytest.raises(EngineError, match="blob store"):
        await media_of(client, set(), FakeClock()).keep_made(PromptRef(0, 0, 0), [MADE])


async def test_a_node_that_has_fetched_pictures_counts_as_near_and_is_a_source_for_others() -> None:
    client, away = StoreClient(), StoreClient()
    asked = await media_of(client, set(), FakeClock(), away).in_request(prompt(), trained=True)
    assert asked.nodes() == {"here"}
    await asked.at_node("away")
    assert asked.nodes() == {"here", "away"}
    await asked.at_node("third")
    assert away.asked[1] == ([Blob(MEDIUM.sha256, MEDIUM.size)], ["away", "here"])
    away.fetched = replace(away.fetched, present=frozenset(), unavailable=frozenset({MEDIUM.sha256}))
    with pytest.raises(EngineError):
        await asked.at_node("away")
    assert asked.nodes() == {"here"}


def test_an_offer_names_the_bytes_of_distinct_blobs() -> None:
    buffer = GroupBuffer()
    spans = (VersionSpan(Version(0, 0), 0, 1),)
    samples = [Sample(output=TokenOutput((1,), (0.0,), "a", spans, media=(MADE,)), finish_reason="stop")] * 2
    buffer.add_group(Group(PromptRef(0, 0, 0), (5,), tuple(samples), "data", media=(MEDIUM, MEDIUM)))
    buffer.add_group(Group(PromptRef(0, 0, 1), (5,), (Sample((1,), (0.0,), "a", "stop", spans),), "data"))
    assert [offer.media_bytes for offer in buffer.offers.values()] == [1100, 0]

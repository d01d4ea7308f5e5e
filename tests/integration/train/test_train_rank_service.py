"""The gRPC service of a train rank over a real channel, without torch: a fake trainer records its calls."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc
import pytest
from ready_seals import ready_seal

from gcore.api.v1 import train_pb2 as pb
from gcore.api.v1 import train_pb2_grpc
from gcore.ledger.balance import balance_samples, content_sha256
from gcore.ledger.records.chain import Seal, SealedGroup, SealState
from gcore.rollout.api import FolderUpdate
from gcore.schema import SCHEMA_VERSION
from gcore.system.clock import Clock, SystemClock
from gcore.testing import FakeClock
from gcore.train.checkpoint.run_files import WriteProgress
from gcore.train.rank.feed import FeedState, StepInput, StepPartInput, WorldName
from gcore.train.rank.launch import PARTS, CannotOffload, StepResult
from gcore.train.rank.service import COALESCE_S, PARTS_S, RankStatus, TrainRankService
from gcore.types import Group, PromptRef, Sample, Version, VersionSpan

ME = pb.WorldId(job_uid="j", world="w", lineage=0)
OTHERS = {
    "job": pb.WorldId(job_uid="x", world="w", lineage=0),
    "world": pb.WorldId(job_uid="j", world="x", lineage=0),
    "lineage": pb.WorldId(job_uid="j", world="w", lineage=1),
}
TOKEN = pb.StepToken(lineage=0, step=1, attempt=1)


@dataclass
class Served:
    stub: train_pb2_grpc.TrainRankStub
    board: RankStatus
    begun: list[StepInput]
    parts: list[StepPartInput]
    rested: list[frozenset[str]]
    """What was to be released, time after time."""


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with service(SystemClock()) as served:
        yield served


@asynccontextmanager
async def service(clock: Clock, *, full: bool = False) -> AsyncIterator[Served]:
    """`full`: there is no room to put memory aside."""
    board = RankStatus(FeedState(WorldName("j", "w", 0), 0, 1, 0), clock)
    begun: list[StepInput] = []
    parts: list[StepPartInput] = []
    rested: list[frozenset[str]] = []

    async def rest(what: Collection[str]) -> None:
        rested.append(frozenset(what))
        if full:
            raise CannotOffload("the weights cannot be put aside (No space left on device)", where="/tmp")
        board.released = frozenset(what)

    server = grpc.aio.server()
    train_pb2_grpc.add_TrainRankServicer_to_server(TrainRankService(board, begun.append, parts.append, rest), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Served(train_pb2_grpc.TrainRankStub(channel), board, begun, parts, rested)
    await server.stop(None)


def make_group(tokens: int = 3) -> Group:
    span = (VersionSpan(Version(0, 0), 0, tokens),)
    samples = tuple(Sample((n,) * tokens, (-1.0,) * tokens, "", "stop", span, float(n)) for n in range(2))
    return Group(PromptRef(0, 0, 0), (1, 2), samples)


def make_seal(group: Group) -> Seal:
    sealed = SealedGroup(
        ref=group.ref,
        digest=group.digest(),
        prompt_tokens=len(group.prompt_ids),
        response_tokens=tuple(len(sample.token_ids) for sample in group.samples),
        versions=group.versions,
        holder="h",
    )
    return ready_seal((sealed,))


def payload(group: Group, samples: tuple[int, ...] = (0, 1)) -> bytes:
    def pack(kind: str, values: tuple[float, ...]) -> bytes:
        return struct.pack(f"<{len(values)}{kind}", *values)

    part = pb.GroupPart(
        ref=pb.PromptRef(),
        digest=group.digest(),
        prompt_ids=pack("i", group.prompt_ids),
        sample_digests=[sample.digest() for sample in group.samples],
        temperature=group.temperature,
        samples=[
            pb.SamplePart(
                index=i,
                token_ids=pack("i", group.samples[i].token_ids),
                logprobs=pack("f", group.samples[i].logprobs),
                reward=group.samples[i].reward,
            )
            for i in samples
        ],
    )
    return pb.FeedPayload(groups=[part]).SerializeToString()


async def chunks(
    data: bytes, world: pb.WorldId = ME, size: int = 1 << 20, total: int | None = None, share: int = 0
) -> AsyncIterator[pb.FeedChunk]:
    header = pb.FeedHeader(
        schema_version=SCHEMA_VERSION,
        world=world,
        token=TOKEN,
        sender="s",
        total_bytes=len(data) if total is None else total,
        sha256=hashlib.sha256(data).digest(),
        share=share,
    )
    yield pb.FeedChunk(header=header, data=data[:size])
    for start in range(size, len(data), size):
        yield pb.FeedChunk(data=data[start : start + size])


def apply_request(seal: bytes, world: pb.WorldId = ME) -> pb.ApplyRequest:
    return pb.ApplyRequest(schema_version=SCHEMA_VERSION, world=world, token=TOKEN, seal=seal)


async def test_samples_fed_in_many_chunks_and_calls_are_held_and_trained(served: Served) -> None:
    group = make_group(tokens=200_000)
    first = await served.stub.Feed(chunks(payload(group, (0,)), size=700_000))
    assert [list(one.samples) for one in first.held] == [[0]]
    second = await served.stub.Feed(chunks(payload(group, (1,))))
    assert [list(one.samples) for one in second.held] == [[0, 1]]
    for _ in range(3):
        await served.stub.Apply(apply_request(make_seal(group).encode()))
    assert len(served.begun) == 1
    assert served.begun[0].layout == balance_samples(make_seal(group))


async def test_parts_of_a_step_are_begun_once_and_its_end_begins_the_rest(served: Served) -> None:
    group = make_group()
    served.board.state = replace(served.board.state, streams=True)
    await served.stub.Feed(chunks(payload(group)))
    seal = make_seal(group)
    part = seal.model_copy(update={"parts": (1,), "ready_parts": 1, "state": SealState.OPEN})
    for _ in range(3):
        await served.stub.Accumulate(apply_request(part.encode()))
    assert [one.number for one in served.parts] == [0]
    message = served.board.message()
    assert (message.streaming.step, message.begun) == (1, 1)
    whole = seal.model_copy(update={"parts": (1, 0), "ready_parts": 2})
    await served.stub.Apply(apply_request(whole.encode()))
    assert [work.begun for work in served.begun] == [1]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Accumulate(apply_request(part.encode(), OTHERS["world"]))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("who", OTHERS)
async def test_calls_for_another_world_are_refused(served: Served, who: str) -> None:
    world = OTHERS[who]
    group = make_group()
    calls = [
        served.stub.Feed(chunks(payload(group), world)),
        served.stub.Apply(apply_request(make_seal(group).encode(), world)),
        served.stub.Watch(pb.WatchRequest(world=world)).read(),
    ]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert served.board.state.holding is None
    assert not served.begun


async def test_a_wrong_digest_is_refused_and_nothing_of_it_is_held(served: Served) -> None:
    data = payload(make_group()).replace(b"\x01\x00\x00\x00\x01", b"\x01\x00\x00\x00\x09", 1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Feed(chunks(data))
    assert caught.value.code() is grpc.StatusCode.DATA_LOSS
    assert served.board.state.holding is None


@pytest.mark.parametrize(
    ("size", "total", "code"),
    [
        pytest.param(3 << 20, None, grpc.StatusCode.INVALID_ARGUMENT, id="a chunk too large"),
        pytest.param(1 << 20, 100, grpc.StatusCode.INVALID_ARGUMENT, id="more than was announced"),
        pytest.param(1 << 20, 9_000_000, grpc.StatusCode.DATA_LOSS, id="less than was announced"),
        pytest.param(1 << 20, 1 << 40, grpc.StatusCode.INVALID_ARGUMENT, id="more than can be"),
    ],
)
async def test_a_feed_that_is_not_as_the_protocol_says_is_refused(
    served: Served, size: int, total: int | None, code: grpc.StatusCode
) -> None:
    said = grpc.StatusCode.INTERNAL
    for _ in range(20):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stub.Feed(chunks(payload(make_group(tokens=200_000)), size=size, total=total))
        said = caught.value.code()
        # grpc's own client says INTERNAL in place of the answer if it comes while a message is on its way.
        if said is not grpc.StatusCode.INTERNAL:
            break
    assert said is code
    assert served.board.state.holding is None


async def test_a_seal_that_cannot_be_read_is_refused(served: Served) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Apply(apply_request(b"{}"))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_watchers_see_the_state_at_once_and_every_change_up_to_the_end(served: Served) -> None:
    group = make_group()
    stream = served.stub.Watch(pb.WatchRequest(world=ME))
    first = await stream.read()
    assert (first.phase, first.world_size, first.HasField("holding")) == ("waiting", 1, False)
    await served.stub.Feed(chunks(payload(group)))
    second = await stream.read()
    assert second.holding == TOKEN
    assert [one.digest for one in second.held] == [group.digest()]
    await served.stub.Apply(apply_request(make_seal(group).encode()))
    await stream.read()
    served.board.reported(
        StepResult({"loss": 0.5}, FolderUpdate(Version(0, 1), "weights/0-1")), content_sha256(make_seal(group))
    )
    fourth = await stream.read()
    assert fourth.applied == TOKEN
    assert fourth.report.metrics["loss"] == 0.5
    assert fourth.report.weights_file == "weights/0-1"
    served.board.failed("the disk is full")
    fifth = await stream.read()
    assert (fifth.phase, fifth.error) == ("failed", "the disk is full")
    assert await stream.read() is grpc.aio.EOF


async def test_a_slow_watcher_gets_the_newest_state_and_holds_nobody_up(served: Served) -> None:
    stream = served.stub.Watch(pb.WatchRequest(world=ME))
    await stream.read()
    for progress in range(1, 1001):
        served.board.progress = progress
        served.board.show()
    last = await stream.read()
    while last.progress < 1000:
        last = await asyncio.wait_for(stream.read(), 10)
    assert last.progress == 1000


async def test_watchers_hear_of_a_failure_even_if_the_training_thread_still_tells_how_far_it_is() -> None:
    clock = FakeClock()
    board = RankStatus(FeedState(WorldName("j", "w", 0), 0, 1, 0), clock)
    heard: list[tuple[str, str]] = []

    async def watch() -> None:
        heard.extend([(message.phase, message.error) async for message in board.messages()])

    watching = asyncio.create_task(watch())
    await clock.settle()
    board.phase = "update"
    board.show()
    await clock.settle()
    board.failed("the disk has a defect")
    board.phase = "update"  # the training thread knows of nothing
    board.show()
    await clock.advance(1.0)
    await watching
    assert heard[-1] == ("failed", "the disk has a defect")


async def test_a_new_watcher_is_told_what_was_not_worth_a_message_to_the_others() -> None:
    board = RankStatus(FeedState(WorldName("j", "w", 0), 0, 1, 0), FakeClock())
    await anext(board.messages())
    board.writing = WriteProgress(Version(0, 3), 100, 60)
    message = await anext(board.messages())
    assert message.writing.written == 60


async def test_changes_that_come_together_are_one_message() -> None:
    clock = FakeClock()
    board = RankStatus(FeedState(WorldName("j", "w", 0), 0, 1, 0), clock)
    messages = board.messages()
    assert (await anext(messages)).progress == 0
    for progress in (1, 2, 3):
        board.progress = progress
        board.show()
    heard = asyncio.ensure_future(anext(messages))
    await clock.settle()
    assert not heard.done()
    await clock.advance(COALESCE_S)
    assert (await heard).progress == 3


async def test_parts_of_a_batch_are_told_together_and_at_once_when_it_is_whole() -> None:
    clock, group = FakeClock(), make_group()
    async with service(clock) as served:
        messages = served.board.messages()
        await anext(messages)
        heard = asyncio.ensure_future(anext(messages))
        await served.stub.Feed(chunks(payload(group, (0,)), share=2))
        await clock.advance(COALESCE_S)
        assert not heard.done()
        await served.stub.Feed(chunks(payload(group, (1,)), share=2))
        await clock.settle()
        assert heard.done()
        assert [list(one.samples) for one in (await heard).held] == [[0, 1]]


async def test_a_part_is_told_of_soon_though_no_other_follows() -> None:
    clock, group = FakeClock(), make_group()
    async with service(clock) as served:
        messages = served.board.messages()
        await anext(messages)
        heard = asyncio.ensure_future(anext(messages))
        await served.stub.Feed(chunks(payload(group, (0,)), share=2))
        await clock.advance(PARTS_S)
        assert heard.done()
        assert [list(one.samples) for one in (await heard).held] == [[0]]


async def test_a_part_is_told_of_at_once_to_whoever_does_not_say_how_many_there_are() -> None:
    clock, group = FakeClock(), make_group()
    async with service(clock) as served:
        messages = served.board.messages()
        await anext(messages)
        heard = asyncio.ensure_future(anext(messages))
        await served.stub.Feed(chunks(payload(group, (0,))))
        await clock.advance(COALESCE_S)
        assert heard.done()


def release_request(*what: str, step: int = 0, world: pb.WorldId = ME) -> pb.ReleaseRequest:
    return pb.ReleaseRequest(world=world, step=step, what=what)


async def test_memory_is_released_part_by_part_and_restored_and_whoever_watches_sees_it(served: Served) -> None:
    assert list((await served.stub.Release(release_request("optimizer"))).released) == ["optimizer"]
    assert list((await served.stub.Release(release_request("weights"))).released) == ["optimizer", "weights"]
    async for state in served.stub.Watch(pb.WatchRequest(world=ME)):
        assert list(state.released) == ["optimizer", "weights"]
        break
    for _ in range(2):
        assert list((await served.stub.Restore(pb.RestoreRequest(world=ME))).released) == []
    await served.stub.Release(release_request())
    assert served.rested == [{"optimizer"}, PARTS, frozenset(), frozenset(), PARTS]


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        pytest.param(release_request("cache"), grpc.StatusCode.INVALID_ARGUMENT, "no part 'cache'", id="unknown part"),
        pytest.param(release_request(step=3), grpc.StatusCode.FAILED_PRECONDITION, "not 3", id="another step"),
        pytest.param(
            release_request(world=OTHERS["world"]), grpc.StatusCode.FAILED_PRECONDITION, "world x", id="another world"
        ),
    ],
)
async def test_a_release_that_is_not_meant_is_refused(
    served: Served, request_: pb.ReleaseRequest, code: grpc.StatusCode, words: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await served.stub.Release(request_)
    assert refused.value.code() is code
    assert words in (refused.value.details() or "")
    assert served.rested == []


async def test_while_a_step_trains_memory_is_neither_released_nor_restored(served: Served) -> None:
    group = make_group()
    await served.stub.Feed(chunks(payload(group)))
    await served.stub.Apply(apply_request(make_seal(group).encode()))
    for call in (
        served.stub.Release(release_request()),
        served.stub.Restore(pb.RestoreRequest(world=ME)),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "being applied" in (refused.value.details() or "")
    assert served.rested == []


async def test_a_rank_at_rest_takes_samples_and_the_step_that_follows(served: Served) -> None:
    await served.stub.Release(release_request())
    group = make_group()
    await served.stub.Feed(chunks(payload(group)))
    await served.stub.Apply(apply_request(make_seal(group).encode()))
    assert len(served.begun) == 1


async def test_memory_that_finds_no_room_is_told_so_and_stays() -> None:
    async with service(SystemClock(), full=True) as served:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await served.stub.Release(release_request())
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "No space left" in (refused.value.details() or "")
        assert served.board.released == frozenset()

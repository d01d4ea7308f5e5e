"""Files of a run from peer to peer: only existing files under the served paths, and only whole."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from peer_folder import UID, checkpoint, serving

from controllers.api import peers as files
from controllers.api.peers import FilesService, list_files, parse_path
from controllers.storage.peer_files import DRAFTS, FetchFailed, PeerFiles, fetch_from_first
from controllers.storage.replication import verify_files
from gcore.api.v1 import files_pb2 as pb
from gcore.api.v1 import files_pb2_grpc
from gcore.errors import GcoreError, UsageError
from gcore.models.layout import CheckpointDamaged


def mine(folder: Path, **more: Any) -> PeerFiles:
    return PeerFiles(UID, folder, owner="me", **more)


BAD = [
    "",
    "/etc/passwd",
    "..",
    "checkpoints/../../secret",
    "checkpoints//0-3",
    "checkpoints/0-3/.hidden",
    "checkpoints/\x000-3",
    "logs/train.log",
    ".nodes/a",
    "store/copy.json",
    "checkpoints/0-3/",
    "CHECKPOINTS",
]


@pytest.mark.parametrize("path", BAD)
async def test_a_path_that_is_not_served_is_refused_in_both_calls(tmp_path: Path, path: str) -> None:
    with pytest.raises(UsageError, match="is not served"):
        parse_path(path)
    async with serving(tmp_path) as address, grpc.aio.insecure_channel(address) as channel:
        stub: Any = files_pb2_grpc.FilesStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError) as listing:
            await stub.List(pb.ListFilesRequest(job_uid=UID, folder=path))
        with pytest.raises(grpc.aio.AioRpcError) as reading:
            async for _ in stub.Read(pb.ReadFileRequest(job_uid=UID, file=path)):
                pass
    assert {listing.value.code(), reading.value.code()} == {grpc.StatusCode.INVALID_ARGUMENT}


@pytest.mark.parametrize("link", ["a file", "its folder", "the folder above"])
async def test_nothing_is_read_through_a_link(tmp_path: Path, link: str) -> None:
    outside, run_dir = tmp_path / "outside", tmp_path / "run"
    (outside / "0-3").mkdir(parents=True)
    (outside / "0-3" / "model.safetensors").write_text("secret")
    run_dir.mkdir()
    if link == "the folder above":
        (run_dir / "checkpoints").symlink_to(outside)
    else:
        (run_dir / "checkpoints").mkdir()
        if link == "its folder":
            (run_dir / "checkpoints" / "0-3").symlink_to(outside / "0-3")
        else:
            (run_dir / "checkpoints" / "0-3").mkdir()
            (run_dir / "checkpoints" / "0-3" / "model.safetensors").symlink_to(outside / "0-3" / "model.safetensors")
    async with serving(run_dir) as address:
        fetcher = mine(tmp_path / "mine")
        with contextlib.suppress(FetchFailed):
            assert await fetcher.list(address, "checkpoints") == {}
        with pytest.raises(FetchFailed):
            await fetcher.folder(address, "checkpoints/0-3", durable=False)
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = files_pb2_grpc.FilesStub(channel)  # type: ignore[no-untyped-call]
            with pytest.raises(grpc.aio.AioRpcError):
                async for _ in stub.Read(pb.ReadFileRequest(job_uid=UID, file="checkpoints/0-3/model.safetensors")):
                    pass


async def test_special_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    os.mkfifo(tmp_path / "weights" / "pipe")
    async with serving(tmp_path) as address, grpc.aio.insecure_channel(address) as channel:
        stub: Any = files_pb2_grpc.FilesStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in stub.Read(pb.ReadFileRequest(job_uid=UID, file="weights/pipe")):
                pass
    assert list_files(tmp_path, ("weights",)) == {}


async def test_a_job_that_is_not_known_and_a_folder_that_is_not_there(tmp_path: Path) -> None:
    async with serving(tmp_path) as address:
        assert await mine(tmp_path).list(address, "checkpoints/0-3") == {}
        with pytest.raises(FetchFailed, match="there is no job"):
            await PeerFiles("other", tmp_path, owner="me").list(address, "checkpoints")


async def test_a_checkpoint_comes_whole_with_folders_in_it_and_without_drafts(tmp_path: Path) -> None:
    digest = checkpoint(tmp_path / "theirs")
    (tmp_path / "theirs" / "checkpoints" / ".0-6.w.tmp").mkdir()
    (tmp_path / "theirs" / "checkpoints" / ".0-6.w.tmp" / "model.safetensors").write_text("half")
    fetcher = mine(tmp_path / "mine")
    async with serving(tmp_path / "theirs") as address:
        assert set(await fetcher.list(address, "checkpoints")) == {
            f"0-3/{name}"
            for name in (
                *("model.safetensors", "exp_avg.safetensors", "exp_avg_sq.safetensors", "config.json"),
                *("critic/model.safetensors", "manifest.json"),
            )
        }
        await fetcher.folder(address, "checkpoints/0-3", lambda draft: verify_files(draft, digest), durable=True)
    verify_files(tmp_path / "mine" / "checkpoints" / "0-3", digest)
    assert list((tmp_path / "mine" / DRAFTS).iterdir()) == []


async def test_weights_and_a_checkpoint_of_one_version_are_fetched_at_the_same_time(tmp_path: Path) -> None:
    digest = checkpoint(tmp_path / "theirs")
    weights = tmp_path / "theirs" / "weights" / "0-3"
    weights.mkdir(parents=True)
    (weights / "model.safetensors").write_bytes(os.urandom(3 << 20))
    fetcher = mine(tmp_path / "mine")
    async with serving(tmp_path / "theirs") as address:
        await asyncio.gather(
            fetcher.folder(address, "checkpoints/0-3", lambda draft: verify_files(draft, digest), durable=True),
            fetcher.folder(address, "weights/0-3", durable=False),
        )
    verify_files(tmp_path / "mine" / "checkpoints" / "0-3", digest)
    (file,) = (tmp_path / "mine" / "weights" / "0-3").iterdir()
    assert file.read_bytes() == (weights / "model.safetensors").read_bytes()


@pytest.mark.parametrize("harm", ["a byte", "cut off", "another checkpoint", "no manifest"])
async def test_file_damaged_at_the_peer_is_not_installed_here(tmp_path: Path, harm: str) -> None:
    digest = checkpoint(tmp_path / "theirs")
    model = tmp_path / "theirs" / "checkpoints" / "0-3" / "model.safetensors"
    data = bytearray(model.read_bytes())
    match harm:
        case "a byte":
            data[1 << 20] ^= 1
            model.write_bytes(data)
        case "cut off":
            model.write_bytes(data[:100])
        case "another checkpoint":
            digest = "0" * 64
        case _:
            (model.parent / "manifest.json").unlink()
    fetcher = mine(tmp_path / "mine")
    async with serving(tmp_path / "theirs") as address:
        with pytest.raises(CheckpointDamaged):
            await fetcher.folder(address, "checkpoints/0-3", lambda draft: verify_files(draft, digest), durable=True)
    assert not (tmp_path / "mine" / "checkpoints").exists()
    assert list((tmp_path / "mine" / DRAFTS).iterdir()) == []


class Breaking(FilesService):
    """A peer that dies, or is wrong, in the middle of the largest file."""

    how = "dies"

    async def Read(self, request: pb.ReadFileRequest, context: Any) -> AsyncIterator[pb.FileChunk]:
        sent = 0
        async for chunk in super().Read(request, context):
            if sent and self.how == "dies":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "killed")
            if sent and self.how == "hangs":
                await asyncio.Event().wait()
            if self.how == "lies" and chunk.data:
                chunk = pb.FileChunk(data=chunk.data[:-1] + bytes([chunk.data[-1] ^ 1]))
            if self.how == "stops" and chunk.sha256:
                return
            sent += 1
            yield chunk


@pytest.mark.parametrize("how", ["dies", "hangs", "lies", "stops"])
async def test_a_peer_that_breaks_off_leaves_nothing_and_the_next_one_gives_it(tmp_path: Path, how: str) -> None:
    digest = checkpoint(tmp_path / "theirs")
    hasty, patient = mine(tmp_path / "mine", silent_s=0.3), mine(tmp_path / "mine")

    def broken(folder_of: Any) -> FilesService:
        service = Breaking(folder_of)
        service.how = how
        return service

    async with serving(tmp_path / "theirs", broken) as first, serving(tmp_path / "theirs") as second:
        with pytest.raises(FetchFailed):
            await hasty.folder(first, "checkpoints/0-3", durable=True)
        assert not (tmp_path / "mine" / "checkpoints").exists()
        assert list((tmp_path / "mine" / DRAFTS).iterdir()) == []

        async def fetch(address: str) -> None:
            fetcher = hasty if address == first else patient
            await fetcher.folder(address, "checkpoints/0-3", lambda draft: verify_files(draft, digest), durable=True)

        fetched = await fetch_from_first({"a": first, "b": second}, ("away", "a", "b"), fetch)
    assert (fetched.source, list(fetched.wrong)) == ("b", ["a"])
    verify_files(tmp_path / "mine" / "checkpoints" / "0-3", digest)


async def test_a_peer_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as address:
        pass
    with pytest.raises(FetchFailed):
        await mine(tmp_path).list(address, "checkpoints")


async def test_a_file_that_grows_is_continued_by_whole_lines(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs" / "receipts", tmp_path / "mine" / "receipts"
    theirs.mkdir(parents=True)
    (theirs / "w-0.jsonl").write_text('{"n":1}\n{"n":2')
    fetcher = mine(tmp_path / "mine")
    async with serving(tmp_path / "theirs") as address:
        assert await fetcher.grown(address, "receipts") == 8
        assert (ours / "w-0.jsonl").read_text() == '{"n":1}\n'
        assert await fetcher.grown(address, "receipts") == 0
        # What was being written is taken back, and another line stands in its place.
        (theirs / "w-0.jsonl").write_text('{"n":1}\n{"m":3}\n')
        (theirs / "w-1.jsonl").write_text('{"n":9}\n')
        assert await fetcher.grown(address, "receipts") == 16
        assert (ours / "w-0.jsonl").read_text() == '{"n":1}\n{"m":3}\n'
        assert (ours / "w-1.jsonl").read_text() == '{"n":9}\n'


async def test_a_file_of_which_more_lies_here_is_left_alone(tmp_path: Path) -> None:
    for name, text in (("theirs", "a\n"), ("mine", "a\nb\n")):
        (tmp_path / name / "log").mkdir(parents=True)
        (tmp_path / name / "log" / "x.jsonl").write_text(text)
    async with serving(tmp_path / "theirs") as address:
        assert await mine(tmp_path / "mine").grown(address, "log") == 0
    assert (tmp_path / "mine" / "log" / "x.jsonl").read_text() == "a\nb\n"


async def test_a_line_that_was_cut_off_here_by_a_crash_is_completed(tmp_path: Path) -> None:
    for name, text in (("theirs", "one\ntwo\nthree\n"), ("mine", "one\ntw")):
        (tmp_path / name / "log").mkdir(parents=True)
        (tmp_path / name / "log" / "x.jsonl").write_text(text)
    async with serving(tmp_path / "theirs") as address:
        await mine(tmp_path / "mine").grown(address, "log")
    assert (tmp_path / "mine" / "log" / "x.jsonl").read_text() == "one\ntwo\nthree\n"


async def test_a_growing_file_whose_peer_breaks_off_is_as_it_was(tmp_path: Path) -> None:
    for name, text in (("theirs", "one\n" + "x" * (3 << 20) + "\n"), ("mine", "one\n")):
        (tmp_path / name / "log").mkdir(parents=True)
        (tmp_path / name / "log" / "x.jsonl").write_text(text)
    async with serving(tmp_path / "theirs", Breaking) as address:
        with pytest.raises(FetchFailed):
            await mine(tmp_path / "mine").grown(address, "log")
    assert (tmp_path / "mine" / "log" / "x.jsonl").read_text() == "one\n"


async def test_a_file_that_grows_while_it_is_read_ends_where_it_ended_when_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "theirs" / "log"
    log.mkdir(parents=True)
    (log / "x.jsonl").write_text("a\n")
    read = files._read

    def grows(*args: Any) -> bytes:
        with (log / "x.jsonl").open("a") as file:
            file.write("b\n")
        return read(*args)

    monkeypatch.setattr(files, "_read", grows)
    async with serving(tmp_path / "theirs") as address:
        assert await mine(tmp_path / "mine").grown(address, "log") == 2
    assert (tmp_path / "mine" / "log" / "x.jsonl").read_text() == "a\n"


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", ".hidden", ""])
async def test_a_peer_cannot_make_us_write_elsewhere(tmp_path: Path, name: str) -> None:
    class Hostile(FilesService):
        async def List(self, request: pb.ListFilesRequest, context: Any) -> pb.ListFilesReply:
            return pb.ListFilesReply(files=[pb.FileInfo(name=name, size=1)])

        async def Read(self, request: pb.ReadFileRequest, context: Any) -> AsyncIterator[pb.FileChunk]:
            yield pb.FileChunk(data=b"x")

    async with serving(tmp_path / "theirs", Hostile) as address:
        fetcher = mine(tmp_path / "mine")
        with pytest.raises(GcoreError):
            await fetcher.folder(address, "weights/0-1", durable=False)
        with pytest.raises(GcoreError):
            await fetcher.grown(address, "log")
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "mine" / "x").exists()


async def test_pictures_of_samples_are_fetched_as_a_whole_and_once(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs" / "samples" / "0-1", tmp_path / "mine" / "samples" / "0-1"
    theirs.mkdir(parents=True)
    picture = b"\x89PNG" + b"a line\nand a part"
    (theirs / "ab.png").write_bytes(picture)
    fetcher = mine(tmp_path / "mine")
    async with serving(tmp_path / "theirs") as address:
        assert await fetcher.grown(address, "samples") == len(picture)
        assert (ours / "ab.png").read_bytes() == picture
        assert await fetcher.grown(address, "samples") == 0
    assert [file.name for file in ours.iterdir()] == ["ab.png"]

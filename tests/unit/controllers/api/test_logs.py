"""Reading a worker's log line by line while it is rotated, truncated or deleted."""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from builders import KEYS, stored
from hypothesis import given
from hypothesis import strategies as st

from controllers.api import logs as log_lines
from controllers.api.edge.errors import BadFields, NodeNotFound, WorkerNotFound
from controllers.api.logs import (
    MOST_CHARACTERS,
    LogPosition,
    LogReader,
    LogStream,
    PositionedLine,
    WorkerLog,
    check_log_names,
    check_log_request,
    line_time,
    log_names,
    select_logs,
)
from gcore.api.v1 import jobs_pb2 as pb
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.job import JobPhase, JobStatus, RankClaim
from gcore.testing import FakeClock
from gcore.worker.records import WorkerRecord


def read_all(reader: LogReader, *, last: bool = True) -> list[str]:
    found: list[str] = []
    more = True
    while more:
        lines, more = reader.read(last=last)
        found += [line.text for line in lines]
    return found


def texts(found: tuple[list[PositionedLine], bool]) -> tuple[list[str], bool]:
    lines, more = found
    return [line.text for line in lines], more


@given(
    st.lists(st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), max_size=40), max_size=30),
    st.integers(1, 40),
    st.integers(1, 17),
)
def test_the_last_lines_are_the_last_lines_however_little_is_read_at_once(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], tail: int, at_once: int
) -> None:
    file = tmp_path_factory.mktemp("log") / "x.log"
    file.write_bytes(b"".join(line.encode() + b"\n" for line in lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_lines, "READ_BYTES", at_once)
        assert read_all(LogReader(file)) == lines
        assert read_all(LogReader(file, tail=tail)) == lines[-tail:]


def test_a_line_without_its_end_is_told_when_the_log_is_not_followed_further(tmp_path: Path) -> None:
    file = tmp_path / "x.log"
    file.write_text("one\ntw")
    reader = LogReader(file)
    assert texts(reader.read()) == (["one"], False)
    with file.open("a") as more:
        more.write("o\nthree")
    assert texts(reader.read()) == (["two"], False)
    assert texts(reader.read(last=True)) == (["three"], False)


def test_a_line_of_any_length_is_cut_and_takes_no_more_memory_than_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_lines, "READ_BYTES", 4096)
    file = tmp_path / "x.log"
    file.write_text("a" * 500_000 + "\nshort\n" + "b" * (MOST_CHARACTERS + 1) + "\n")
    reader = LogReader(file)
    found: list[str] = []
    more = True
    while more:
        lines, more = reader.read(last=True)
        found += [line.text for line in lines]
        assert len(reader._rest) <= 5 * MOST_CHARACTERS
    assert [len(line) for line in found] == [MOST_CHARACTERS, 5, MOST_CHARACTERS]
    assert found[0].endswith("a ...")


def test_a_log_that_was_cut_short_is_read_from_its_beginning(tmp_path: Path) -> None:
    file = tmp_path / "x.log"
    file.write_text("old old old\n")
    reader = LogReader(file)
    assert read_all(reader) == ["old old old"]
    file.write_text("new\n")
    assert read_all(reader) == ["new"]
    file.unlink()
    assert reader.read() == ([], False)


@given(
    st.lists(st.binary(max_size=30).map(lambda data: data.replace(b"\n", b" ")), max_size=20),
    st.lists(st.integers(0, 3), max_size=20),
    st.integers(1, 17),
    st.binary(max_size=9),
)
def test_resumed_reader_gets_exactly_the_remaining_lines(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], breaks: list[int], at_once: int, rest: bytes
) -> None:
    """However long the lines, however often it is gone on, and however much is read at once."""
    file = tmp_path_factory.mktemp("log") / "x.log"
    file.write_bytes(b"".join(piece + b"\n" for piece in pieces) + rest.replace(b"\n", b" "))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_lines, "READ_BYTES", at_once)
        patch.setattr(log_lines, "MOST_CHARACTERS", 5)
        patch.setattr(log_lines, "HEAD_BYTES", 8)
        whole, told, place = read_all(LogReader(file)), list[str](), LogPosition()
        for taken in [*breaks, len(whole)]:
            reader, more = LogReader(file, begin=place), True
            some: list[PositionedLine] = []
            while more and len(some) < taken:
                lines, more = reader.read(last=True)
                some += lines
            some = some[:taken]
            told += [line.text for line in some]
            place = some[-1].behind if some else place
        assert told == whole


def test_where_a_tail_begins_is_gone_on_from_also_before_its_first_line(tmp_path: Path) -> None:
    file = tmp_path / "x.log"
    file.write_text("one\ntwo\nthree\n")
    place = LogReader(file, tail=1).start()
    assert place is not None
    with file.open("a") as more:
        more.write("four\n")
    assert read_all(LogReader(file, begin=place)) == ["three", "four"]


def test_a_log_that_was_begun_anew_is_not_gone_on_with_but_told_from_its_beginning(tmp_path: Path) -> None:
    file = tmp_path / "x.log"
    file.write_text("old one\nold two\n")
    (first, _), _ = LogReader(file).read()
    for new in ("new\n", "new and longer than what was there before\n"):
        file.write_text(new)
        assert read_all(LogReader(file, begin=first.behind)) == [new.rstrip()]


def test_a_log_that_another_node_sees_shorter_is_waited_for(tmp_path: Path) -> None:
    """A shared folder may show changes to one node later than to another; no line is sent twice because of that."""
    file = tmp_path / "x.log"
    file.write_text("a" * 300 + "\ntwo\nthree\n")
    (_, second, _), _ = LogReader(file).read()
    for seen in (100, 303):
        file.write_text(("a" * 300 + "\ntwo\n")[:seen])
        reader = LogReader(file, begin=second.behind)
        assert reader.read() == ([], False)
        assert reader.start() is None
        file.write_text("a" * 300 + "\ntwo\nthree\n")
        assert read_all(reader, last=False) == ["three"]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret\n")
    (tmp_path / "x.log").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic links"):
        LogReader(tmp_path / "x.log").read()


def test_bytes_that_are_no_text_are_told_as_far_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_bytes(b"\xff\xfe ok\x00\r\n")
    assert read_all(LogReader(tmp_path / "x.log")) == ["\ufffd\ufffd ok\x00"]


NOON = datetime(2026, 11, 23, 12, 0, 0, tzinfo=UTC).timestamp()
TIMES = {
    "with a zone": ("2026-11-23T12:00:00Z x", NOON),
    "with another zone": ("2026-11-23 13:00:00.5+01:00 x", NOON + 0.5),
    "as JSON": (f'{{"time": {NOON}, "message": "x"}}', NOON),
    "as JSON with words": ('{"time": "2026-11-23T12:00:00Z"}', NOON),
    "none": ("hello", 0.0),
    "no month": ("2026-13-23 12:00:00 x", 0.0),
    "JSON without": ('{"a": 1}', 0.0),
    "broken JSON": ('{"time": ', 0.0),
}


@pytest.mark.parametrize(("line", "time"), TIMES.values(), ids=TIMES)
def test_when_a_line_was_written_is_what_it_says(line: str, time: float) -> None:
    assert line_time(line) == pytest.approx(time)


def test_without_a_zone_it_is_this_machines_time() -> None:
    assert line_time("2026-11-23 12:00:00,250 INFO x") == datetime(2026, 11, 23, 12).timestamp() + 0.25


@given(st.text(max_size=60))
def test_no_line_breaks_the_look_at_its_time(line: str) -> None:
    line_time(line)
    line_time(f"2026-{line}")


NAMES = [
    "rollout-node-0-aaaaaaaa.log",
    "train-node-0-bbbbbbbb.log",
    "train-node-1-cccccccc.log",
    "reward-node-1-dddddddd.log",
    "something.log",
    "train-node-0-bbbbbbbb.txt",
]


def worker(instance: str, role: str, rank: int | None = None, uid: str = "u") -> WorkerRecord:
    return WorkerRecord(
        instance=instance,
        node="n",
        role=role,
        job_uid=uid,
        slot="cpu:0",
        pid=1,
        pid_started=1,
        world="w" if rank is not None else None,
        rank=rank,
    )


def chosen(phase: JobPhase = JobPhase.RUNNING, **ask: object) -> list[tuple[str, int | None]]:
    mirror = JobMirror(
        KEYS,
        status=stored(JobStatus(phase=phase)),
        claims={KEYS.world_rank("w0", 1): stored(RankClaim(instance="train-node-1-cccccccc"))},
    )
    living = [worker("rollout-node-0-aaaaaaaa", "rollout"), worker("train-node-0-bbbbbbbb", "train", 0)]
    workers = {} if phase.ended else {one.instance: one for one in living}
    request = pb.StreamLogsRequest(job="u", **ask)  # type: ignore[arg-type]
    return [(log.instance, log.rank) for log in select_logs(NAMES, Path("/r"), mirror, workers, request)]


ROLLOUT, RANK_0 = ("rollout-node-0-aaaaaaaa", None), ("train-node-0-bbbbbbbb", 0)
RANK_1, REWARD = ("train-node-1-cccccccc", 1), ("reward-node-1-dddddddd", None)


def test_logs_are_of_those_who_are_there_or_of_those_who_are_gone() -> None:
    assert chosen() == [ROLLOUT, RANK_0]
    assert chosen(previous=True) == [REWARD, RANK_1]
    assert chosen(JobPhase.FAILED) == [REWARD, ROLLOUT, ("train-node-0-bbbbbbbb", None), RANK_1]


def test_resumed_request_includes_logs_of_workers_that_have_ended_since() -> None:
    after = [pb.LogPlace(instance="reward-node-1-dddddddd")]
    assert chosen(after=after) == [REWARD, ROLLOUT, RANK_0]
    assert chosen(after=after, role="train") == [RANK_0]


def test_logs_are_chosen_by_role_rank_node_and_instance() -> None:
    assert chosen(role="train") == [RANK_0]
    assert chosen(role="train", rank=1) == []
    assert chosen(previous=True, rank=1) == [RANK_1]
    assert chosen(previous=True, node="node-1", role="reward") == [REWARD]
    assert chosen(instance="train-node-0-bbbbbbbb") == [RANK_0]
    assert chosen(instance="../../etc/passwd") == []


NODES, WORKERS = ("node-0", "node-1"), ("train-node-0-bbbbbbbb", "reward-node-0-eeeeeeee")


@pytest.mark.parametrize(
    "ask",
    [
        {},
        {"node": "node-0"},
        {"node": "node-1"},
        {"instance": "train-node-1-cccccccc"},
        {"instance": "reward-node-0-eeeeeeee"},
    ],
)
def test_registered_workers_and_logged_workers_are_known(ask: dict[str, object]) -> None:
    request = pb.StreamLogsRequest(job="u", **ask)  # type: ignore[arg-type]
    check_log_names(request, ["node-0"], WORKERS, names=NAMES, whole=True)


def test_a_node_and_a_worker_that_nobody_knows_are_not_there() -> None:
    with pytest.raises(NodeNotFound, match="there is no node 'node-9', did you mean 'node-0'"):
        check_log_names(pb.StreamLogsRequest(node="node-9"), ["node-0"], WORKERS, names=(), whole=True)
    with pytest.raises(WorkerNotFound, match="no worker 'train-node-0-bbbbbbbc', did you mean 'train-node-0-bbbbbbbb'"):
        check_log_names(pb.StreamLogsRequest(instance="train-node-0-bbbbbbbc"), NODES, WORKERS, names=NAMES, whole=True)
    # Its log may lie on a node that was not looked at.
    check_log_names(pb.StreamLogsRequest(instance="train-node-0-bbbbbbbc"), NODES, WORKERS, names=(), whole=False)


WRONG = {
    "an unknown role": ({"role": "judge"}, "role"),
    "a negative rank": ({"rank": -1}, "rank"),
    "a rank of an engine": ({"rank": 0, "role": "rollout"}, "rank"),
    "a time that is none": ({"since": float("nan")}, "since"),
    "a time before all": ({"since": -1.0}, "since"),
    "too many lines": ({"tail": 10**9}, "tail"),
    "a place before the first": ({"after": [pb.LogPlace(offset=-1)]}, "after"),
    "a place at no time": ({"after": [pb.LogPlace(time=float("inf"))]}, "after"),
    "following those who are gone": ({"previous": True, "follow": True}, "previous"),
}


@pytest.mark.parametrize(("ask", "field"), WRONG.values(), ids=WRONG)
def test_invalid_requests_name_the_field(ask: dict[str, object], field: str) -> None:
    with pytest.raises(BadFields) as error:
        check_log_request(pb.StreamLogsRequest(job="u", **ask))  # type: ignore[arg-type]
    assert [one.field for one in error.value.violations] == [field]


async def test_logs_that_are_followed_bring_what_is_written_and_new_workers_until_the_job_has_ended(
    tmp_path: Path,
) -> None:
    (tmp_path / "logs").mkdir()
    first = tmp_path / "logs" / "train-n-aaaaaaaa.log"
    first.write_text("2026-11-23T11:00:00Z before\n2026-11-23T12:00:01Z one\n  more of it\n")
    over = False

    async def look() -> tuple[list[WorkerLog], bool]:
        names = sorted(log_names(tmp_path))
        return [WorkerLog(tmp_path / "logs" / name, name.removesuffix(".log"), "n", "train", 0) for name in names], over

    clock = FakeClock()
    lines = LogStream(look, pb.StreamLogsRequest(follow=True, since=NOON), clock).lines()
    assert [(await anext(lines)).text for _ in range(2)] == ["2026-11-23T12:00:01Z one", "  more of it"]
    waiting = asyncio.ensure_future(anext(lines))
    await clock.settle()
    with first.open("a") as more:
        more.write("2026-11-23T12:00:02Z two\n")
    while not waiting.done():
        await clock.advance(0.5)
        await asyncio.sleep(0.01)
    assert waiting.result().text.endswith("two")
    (tmp_path / "logs" / "train-n-bbbbbbbb.log").write_text("2026-11-23T12:00:03Z three\nno end")
    over = True
    rest: list[str] = []

    async def finish() -> None:
        rest.extend([line.text async for line in lines])

    task = asyncio.create_task(finish())
    while not task.done():
        await clock.advance(0.5)
        await asyncio.sleep(0.01)
    assert rest == ["2026-11-23T12:00:03Z three", "no end"]


async def test_a_stream_that_is_gone_on_with_tells_what_the_first_did_not(tmp_path: Path) -> None:
    """Wherever it breaks: also of what was written at no time that is said, and of workers that came meanwhile."""
    (tmp_path / "logs").mkdir()
    first = tmp_path / "logs" / "train-n-aaaaaaaa.log"
    old, new = "2026-11-23T11:00:00Z before\n", "2026-11-23T12:00:01Z one\n  more\n  and more\n"
    first.write_text(old + new + "2026-11-23T11:00:00Z before\n  it, too\n2026-11-23T12:00:02Z two\n")

    async def look() -> tuple[list[WorkerLog], bool]:
        names = sorted(log_names(tmp_path))
        return [WorkerLog(tmp_path / "logs" / name, name.removesuffix(".log"), "n", "train", 0) for name in names], True

    async def told(**ask: Any) -> list[pb.LogLine]:
        return [line async for line in LogStream(look, pb.StreamLogsRequest(**ask), FakeClock()).lines()]

    for ask in ({"since": NOON}, {"tail": 5}, {}):
        whole = await told(places=True, **ask)
        lines = [line.text for line in whole if not line.mark]
        (tmp_path / "logs" / "train-n-bbbbbbbb.log").write_text("2026-11-23T12:00:03Z three\nfour\n")
        for broken in range(1, len(whole) + 1):
            known = whole[:broken]
            rest = await told(places=True, after=[known[-1].place], **ask)
            found = [line.text for line in [*known, *rest] if not line.mark]
            assert found == [*lines, "2026-11-23T12:00:03Z three", "four"]
        (tmp_path / "logs" / "train-n-bbbbbbbb.log").unlink()
        assert not any(line.mark or line.HasField("place") for line in await told(**ask)), "which nobody asked for"


def test_a_folder_that_is_not_there_has_no_logs(tmp_path: Path) -> None:
    assert log_names(tmp_path / "nowhere") == []
    os.close(os.open(tmp_path / "logs", os.O_CREAT | os.O_WRONLY))
    assert log_names(tmp_path) == []

"""`gcore trace` and `gcore top`: displayed times equal the accounted ones, and Perfetto opens the trace."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from controllers.accounting.states import IdleCause
from controllers.cli.commands import placement as top_verb
from controllers.cli.commands import placement as trace_verb
from controllers.cli.commands.placement import collect_moves
from controllers.cli.view.placement import HOLDS, JobTop, build_trace, render_top, top_rows, top_tree
from controllers.planning.history import MovesFile
from gcore.api.v1 import jobs_pb2 as pb
from gcore.errors import GcoreError, Unreachable
from gcore.ledger.records.job import Move, MoveKind, Moves, SplitPart
from gcore.ledger.records.slot_accounting import (
    AccountLine,
    EngineSums,
    Span,
    StepAccount,
    append_line,
    encode_line,
    newest_line,
    parse_line,
    read_lines,
    read_step_lines,
)
from gcore.types import Version

SPLIT = SplitPart(mode="coexisting", rollout=2, reward=1, train=1)


def line(node: str = "a", step: int = 3, lineage: int = 0, began: float = 100.0) -> AccountLine:
    booked = {"busy rollout": 4.0, "idle rollout tail": 2.0, "busy train": 1.0, "unallocated": 1.0}
    engines = {"rollout": EngineSums(active_s=4.0, running_s=12.0, tokens=800, requests=8)}
    book = StepAccount(
        version=Version(lineage, step),
        began=began,
        seconds=5.0,
        slots=2,
        booked=booked,
        unbooked=2.0,
        engines=engines,
    )
    spans = {
        "cpu:0": (Span(0.0, 4.0, {"busy rollout": 3.0, "idle rollout tail": 1.0}), Span(4.0, 5.0, {})),
        "cpu:1": (Span(0.0, 5.0, {"busy train": 5.0}),),
    }
    return AccountLine(node, book, (Span(0.0, 4.0, {"collect": 4.0}), Span(4.0, 5.0, {"train": 1.0})), spans)


def move(time: float) -> Move:
    return Move(
        generation=7,
        step=2,
        kind=MoveKind.LEND,
        before=SPLIT,
        after=SPLIT,
        reason="judges are behind",
        gain_s=3.5,
        time=time,
    )


def test_a_trace_has_a_track_a_slot_its_phases_and_the_moves_of_the_step_with_their_reasons() -> None:
    found = build_trace("j", {"a": line("a"), "b": line("b", began=101.0)}, [move(102.0), move(50.0)])
    events = found["traceEvents"]
    tracks = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert tracks == {(1, "moves")} | {(pid, name) for pid in (2, 3) for name in ("phases", "cpu:0", "cpu:1")}
    slices = [(e["pid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert (2, "busy rollout", 0.0, 4e6) in slices
    assert (2, "unbooked", 4e6, 1e6) in slices
    assert (3, "busy train", 1e6, 5e6) in slices
    assert (3, "generate", 1e6, 4e6) in slices
    (told,) = [e for e in events if e["ph"] == "i"]
    assert (told["ts"], told["args"]["reason"], told["args"]["gain_s"]) == (2e6, "judges are behind", 3.5)


FORMAT = {"M": {"args"}, "X": {"tid", "ts", "dur", "cat"}, "C": {"ts", "args"}, "i": {"tid", "ts", "s"}}
"""What the Trace Event Format wants of an event of that phase, beside its name and process."""
EDGES = st.lists(st.floats(0.0, 1e5, allow_nan=False), min_size=2, max_size=8, unique=True).map(sorted)


@given(edges=EDGES, began=st.floats(1.6e9, 2e9))
def test_a_trace_is_of_the_trace_event_format_and_slices_of_a_track_do_not_overlap(
    edges: list[float], began: float
) -> None:
    spans = tuple(Span(begin, end, {"busy rollout": end - begin}) for begin, end in pairwise(edges))
    one, other = line("a", began=1.6e9), line("b", began=began)
    lines = {"a": replace(one, phases=spans), "b": replace(other, spans={**other.spans, "cpu:0": spans})}
    found = json.loads(json.dumps(build_trace("j", lines, [move(1.6e9), move(began)])))
    assert found["displayTimeUnit"] in ("ms", "ns")
    named: set[tuple[str, int, int]] = set()
    ends: dict[tuple[int, int], int] = {}
    for event in found["traceEvents"]:
        assert FORMAT[event["ph"]] | {"name", "pid"} <= event.keys()
        assert event["pid"] > 0
        assert event.get("ts", 0) >= 0
        track = event["pid"], event.get("tid", 0)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
            named.add((event["name"], *track))
        if event["ph"] in "Xi":
            assert {("process_name", event["pid"], 0), ("thread_name", *track)} <= named
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["ts"] >= ends.get(track, 0), "it begins before the one before it has ended"
            ends[track] = event["ts"] + event["dur"]
        assert event.get("s", "t") in ("g", "p", "t")


def test_the_counter_beside_a_slot_is_how_much_of_it_was_busy() -> None:
    events = build_trace("j", {"a": line()}, [])["traceEvents"]
    busy = [e["args"]["busy"] for e in events if e["ph"] == "C" and e["name"] == "busy cpu:0"]
    assert busy == [0.75, 0.0, 0.0]


def test_a_step_is_found_in_its_newest_lineage_and_lines_that_are_cut_off_are_passed_over(tmp_path: Path) -> None:
    for one in (line("a", 3), line("a", 4), line("a", 3, lineage=1), line("b", 3, lineage=1), line("a", 13)):
        append_line(tmp_path, one)
    with (tmp_path / "books" / "a.jsonl").open("a") as file:
        file.write(encode_line(line("a", 3, lineage=2))[:80])
    found = list(read_step_lines(tmp_path, 3))
    assert [(one.node, one.book.version) for one in found] == [("a", Version(1, 3)), ("b", Version(1, 3))]
    assert len(list(read_lines(tmp_path))) == 5
    assert list(read_step_lines(tmp_path, 5)) == []
    assert parse_line("{}") is None
    last = newest_line(tmp_path, "a")
    assert last is not None
    assert (last.book.version, last.until) == (Version(0, 13), 105.0)
    assert newest_line(tmp_path, "c") is None
    assert parse_line(encode_line(line())) == parse_line(encode_line(line()))


def top(**books: StepAccount) -> JobTop:
    return JobTop("j", "u", "RUNNING", 3, "~40", books)


def test_top_displays_the_newest_accounted_step_of_every_node() -> None:
    found = top(a=line("a").book, b=line("b").book)
    assert found.slots == 4
    assert found.by_state["busy rollout"] == pytest.approx(1.6)
    assert sum(found.by_state.values()) == pytest.approx(4.0)
    assert found.error == pytest.approx(0.2)
    assert found.bottleneck == "tail"
    said = dict(top_rows(found))
    assert said["step"] == "3/~40, the newest recorded step took 5.00s"
    assert "the tail" in said["idle"]
    assert said["rollout"] == "3.0 concurrent requests per engine, 320 tokens/s"
    assert json.loads(json.dumps(top_tree(found)))["nodes"].keys() == {"a", "b"}
    render_top(found)


def test_top_counts_denoising_steps_of_engines_that_generate_pictures() -> None:
    said = dict(top_rows(replace(top(a=line("a").book, b=line("b").book), pictures=True)))
    assert said["rollout"] == "3.0 concurrent requests per engine, 320 denoising steps/s"


def test_before_anything_is_booked_top_says_so() -> None:
    assert top_tree(top())["by_state"] == {}
    assert "idle" not in dict(top_rows(top()))
    render_top(top())


def test_every_cause_is_told_in_words() -> None:
    assert set(get_args(IdleCause)) == HOLDS.keys()


class Cluster:
    """A job that has ended when it is looked at for the second time."""

    def __init__(self) -> None:
        self.looks = 0

    async def list_jobs(self) -> list[pb.Job]:
        ended, running = pb.JOB_STATE_SUCCEEDED, pb.JOB_STATE_RUNNING
        jobs = [("newest", ended), ("u", running), ("older", running), ("oldest", ended)]  # in the order of the API
        return [pb.Job(uid=uid, state=state) for uid, state in jobs]

    async def get_job(self, job: str) -> pb.Job:
        self.looks += 1
        assert job == "u"
        state = pb.JOB_STATE_RUNNING if self.looks < 2 else pb.JOB_STATE_SUCCEEDED
        return pb.Job(uid="u", name="j", state=state, step=3, steps=40)

    async def get_books(self, job: str, step: int | None = None) -> list[pb.BookOfNode]:
        return [pb.BookOfNode(node="a", step=3, book_json=line("a").book.model_dump_json())]


@pytest.mark.parametrize("terminal", [True, False], ids=["again and again", "once where nobody looks"])
def test_top_looks_at_the_job_that_runs_until_it_has_ended(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    cluster, shown_on = Cluster(), StringIO()
    monkeypatch.setattr(top_verb, "stdout_console", lambda: Console(file=shown_on, force_terminal=terminal, width=100))
    monkeypatch.setattr(top_verb, "call_cluster", lambda what, address, home: asyncio.run(what(cluster)))
    monkeypatch.setattr(top_verb, "LOOK_S", 0.01)
    top_verb.top()
    assert cluster.looks == (2 if terminal else 1)
    assert "busy rollout" in shown_on.getvalue()
    assert ("SUCCEEDED" in shown_on.getvalue()) is terminal


@pytest.mark.parametrize("job", ["j", "u", None], ids=["by its name", "by its uid", "the last one"])
def test_top_of_a_run_that_ended_shows_its_last_step_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str | None
) -> None:
    folder, shown_on = tmp_path / "runs" / "j-u", StringIO()
    for one in (line("a", 3), line("b", 3), line("a", 4), line("c", 4)):
        append_line(folder, one)
    (folder / "summary.json").write_text('{"job": "j", "uid": "u", "checkpoint": ""}')

    def nobody(*_: object) -> None:
        raise Unreachable("no cluster is up in this home")

    monkeypatch.setattr(top_verb, "stdout_console", lambda: Console(file=shown_on, width=200))
    monkeypatch.setattr(top_verb, "call_cluster", nobody)
    top_verb.top(job, home=tmp_path)
    told = shown_on.getvalue()
    assert "4/4, the newest recorded step took 5.00s" in told
    assert "4 on 2 nodes" in told
    assert "because no cluster is running" in told
    assert "`gcore trace u --step N`" in told
    with pytest.raises(Unreachable):
        top_verb.top("other", home=tmp_path)


def test_top_of_a_job_whose_daemons_are_gone_is_read_from_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(Cluster):
        async def get_job(self, job: str) -> pb.Job:
            return pb.Job(uid="u", name="j", state=pb.JOB_STATE_SUCCEEDED, step=3, steps=3, ended=5.0)

        async def get_books(self, job: str, step: int | None = None) -> list[pb.BookOfNode]:
            return [] if step is None else [pb.BookOfNode(node="a", step=step, book_json=encode_line(line()))]

    found = asyncio.run(top_verb.fetch_top(Later(), "u"))  # type: ignore[arg-type]
    assert found.by_state["busy rollout"] == pytest.approx(0.8)


class Placed:
    """A job that goes on, whose store keeps one move of two."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def get_books(self, job: str, step: int | None = None) -> list[pb.BookOfNode]:
        return [pb.BookOfNode(node="a", step=3, book_json=encode_line(line("a")))]

    async def get_placement(self, job: str) -> pb.PlacementReply:
        newest = Moves(total=2, moves=(move(999.0),))
        return pb.PlacementReply(name="j", folder=str(self.folder), moves=newest.encode())


def test_a_trace_of_a_step_long_ago_has_the_moves_that_the_store_keeps_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    MovesFile(tmp_path).keep(Moves(total=1, moves=(move(102.0),)))
    monkeypatch.setattr(trace_verb, "call_cluster", lambda what, address, home: asyncio.run(what(Placed(tmp_path))))
    trace_verb.trace("j", 3, to=tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert [e["ts"] for e in events if e["ph"] == "i"] == [2e6]


def test_missing_step_of_a_finished_run_names_the_available_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "j-u"
    for one in (line("a", 3), line("b", 3), line("a", 4)):
        append_line(folder, one)
    (folder / "summary.json").write_text('{"job": "j", "uid": "u", "checkpoint": ""}')

    def nobody(*_: object) -> None:
        raise Unreachable("no cluster is up in this home")

    monkeypatch.setattr(trace_verb, "call_cluster", nobody)
    with pytest.raises(GcoreError, match=r"the run in .* has no slot accounting of step 9.*Choose a step from 3 to 4"):
        trace_verb.trace("j", 9, home=tmp_path)


def test_a_file_of_moves_that_cannot_be_read_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "moves.jsonl").mkdir()
    monkeypatch.setattr(trace_verb, "call_cluster", lambda what, address, home: asyncio.run(what(Placed(tmp_path))))
    with pytest.raises(GcoreError, match="the history of moves cannot be read"):
        trace_verb.trace("j", 3, to=tmp_path / "step.json")
    with pytest.raises(GcoreError, match="the history of moves cannot be read"):
        collect_moves(asyncio.run(Placed(tmp_path).get_placement("j")))

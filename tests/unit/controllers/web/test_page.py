"""The web page: its HTTP requests, its rendering, and escaping of untrusted text."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.api.edge.access import NOBODY_IS_TOLD_APART, Caller, Role, current_caller
from controllers.api.edge.errors import NotFound
from controllers.web import content as curves
from controllers.web import content as kept_runs
from controllers.web import content as timeline
from controllers.web.app import MOST_AT_ONCE, PageApp, content_security_policy, load_page, parse_number
from controllers.web.content import MOST_CACHED, FileCache, ServedPicture, reachable_address
from gcore.errors import GcoreError, StoreUnavailable
from gcore.ledger.records.slot_accounting import AccountLine, Span, StepAccount, append_line
from gcore.types import Version

FINITE = st.floats(-1e6, 1e6)


class Told:
    """A stand-in for the page's content. It raises a given error."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.asked: list[tuple[str, int]] = []
        self.callers: list[Caller] = []
        self.going = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()

    async def cluster(self) -> dict[str, Any]:
        self.callers.append(current_caller())
        self.going.set()
        await asyncio.to_thread(self.may_end.wait, 30)
        if self.error is not None:
            raise self.error
        return {"jobs": []}

    async def job(self, uid: str, after: int) -> dict[str, Any]:
        self.asked.append((uid, after))
        return {"uid": uid}

    async def targets(self) -> list[dict[str, Any]]:
        return [{"targets": ["127.0.0.1:9090"], "labels": {"node": "node-1"}}]

    async def slots(self, uid: str) -> dict[str, Any]:
        self.asked.append((uid, -2))
        return {"rows": []}

    async def pictures(self, uid: str, step: int | None) -> dict[str, Any]:
        return {"step": step, "prompts": []}

    async def picture(self, uid: str, folder: str, sha256: str) -> ServedPicture:
        self.asked.append((f"{uid} {folder} {sha256}", -3))
        return ServedPicture("image/png", b"\x89PNG")


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def get(app: PageApp, path: str, query: str = "") -> tuple[str, dict[str, str], bytes]:
    environ: dict[str, Any] = {"PATH_INFO": path, "QUERY_STRING": query}
    setup_testing_defaults(environ)
    found: list[Any] = []
    body = b"".join(app(environ, lambda status, headers, info=None: found.extend([status, dict(headers)])))  # type: ignore[arg-type, return-value]
    return found[0], found[1], body


def app_of(told: Told, loop: asyncio.AbstractEventLoop, **more: Any) -> PageApp:
    shown: Any = told
    return PageApp(lambda: shown, loop, **more)


def test_the_page_and_its_questions_are_answered(loop: asyncio.AbstractEventLoop) -> None:
    told = Told()
    app = app_of(told, loop)
    status, headers, body = get(app, "/")
    assert status == "200 OK"
    assert headers["Content-Type"].startswith("text/html")
    assert body.startswith(b"<!doctype html>")
    assert json.loads(get(app, "/page/jobs")[2]) == {"jobs": []}
    assert json.loads(get(app, "/page/jobs/sums-1a", "after=17")[2]) == {"uid": "sums-1a"}
    assert json.loads(get(app, "/page/jobs/sums-1a/slots")[2]) == {"rows": []}
    assert json.loads(get(app, "/page/jobs/sums-1a/pictures")[2]) == {"step": None, "prompts": []}
    assert json.loads(get(app, "/page/jobs/sums-1a/pictures", "step=7")[2])["step"] == 7
    assert json.loads(get(app, "/page/jobs/sums-1a/pictures", "step=x")[2])["step"] is None
    assert json.loads(get(app, "/targets")[2])[0]["targets"] == ["127.0.0.1:9090"]
    assert told.asked == [("sums-1a", 17), ("sums-1a", -2)]


@pytest.mark.parametrize("folder", ["0-12", "evaluation-3-0"])
def test_a_picture_is_sent_with_its_type_and_nothing_is_guessed(loop: asyncio.AbstractEventLoop, folder: str) -> None:
    told = Told()
    status, headers, body = get(app_of(told, loop), f"/page/jobs/sums-1a/pictures/{folder}/{'ab' * 32}")
    assert (status, headers["Content-Type"], body) == ("200 OK", "image/png", b"\x89PNG")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert told.asked == [(f"sums-1a {folder} {'ab' * 32}", -3)]


@pytest.mark.parametrize(
    "path",
    [
        f"pictures/0-1/{'ab' * 31}",
        f"pictures/0-1/{'AB' * 32}",
        f"pictures/../{'ab' * 32}",
        f"pictures/0-1/../{'ab' * 32}",
        f"pictures/other-0-1/{'ab' * 32}",
        f"pictures/0-1/{'ab' * 32}.png",
        f"pictures/0-1/{'ab' * 32}\n",
        f"pictures/٣-1/{'ab' * 32}",
    ],
)
def test_a_path_that_names_no_picture_is_not_found(loop: asyncio.AbstractEventLoop, path: str) -> None:
    told = Told()
    assert get(app_of(told, loop), f"/page/jobs/sums-1a/{path}")[0] == "404 Not Found"
    assert told.asked == []


@pytest.mark.parametrize(
    "path",
    [
        "/x",
        "/page",
        "/page/jobs/",
        "/page/jobs/../../etc",
        "/page/jobs/a/b",
        "/page/jobs/a/slots/x",
        "/page/jobs/%2e",
        "//",
    ],
)
def test_unknown_paths_are_not_found(loop: asyncio.AbstractEventLoop, path: str) -> None:
    assert get(app_of(Told(), loop), path)[0] == "404 Not Found"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NotFound("there is no job 'x'", fix="Look"), "404 Not Found"),
        (StoreUnavailable("the store does not answer", fix="Wait"), "503 Service Unavailable"),
        (GcoreError("something is wrong", fix="Mend it"), "500 Internal Server Error"),
        (KeyError("a secret"), "500 Internal Server Error"),
    ],
    ids=["not there", "no store", "ours", "a defect"],
)
def test_each_error_is_a_status_and_a_sentence(loop: asyncio.AbstractEventLoop, error: Exception, status: str) -> None:
    told = Told()
    told.error = error
    found, _, body = get(app_of(told, loop), "/page/jobs")
    assert found == status
    said = json.loads(body)["error"]
    assert said.endswith((".", "Look", "Wait", "Mend it"))
    assert "a secret" not in said


def test_more_than_a_few_at_once_are_told_to_come_again_and_later_they_are_answered(
    loop: asyncio.AbstractEventLoop,
) -> None:
    told = Told()
    told.may_end.clear()
    app = app_of(told, loop)
    found: list[str] = []
    crowd = [threading.Thread(target=lambda: found.append(get(app, "/page/jobs")[0])) for _ in range(MOST_AT_ONCE)]
    for one in crowd:
        told.going.clear()
        one.start()
        assert told.going.wait(30)
    assert get(app, "/page/jobs")[0] == "503 Service Unavailable"
    told.may_end.set()
    for one in crowd:
        one.join()
    assert found == ["200 OK"] * MOST_AT_ONCE
    assert get(app, "/page/jobs")[0] == "200 OK"


def test_request_is_answered_as_its_own_caller(loop: asyncio.AbstractEventLoop) -> None:
    told = Told()
    one = Caller("ann", Role.VIEWER, frozenset({"research"}))
    get(app_of(told, loop, who=lambda environ: one), "/page/jobs")
    get(app_of(told, loop), "/page/jobs")
    assert told.callers == [one, NOBODY_IS_TOLD_APART]


def test_a_controller_that_ends_says_so() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    assert get(app_of(Told(), loop), "/page/jobs")[0] == "503 Service Unavailable"


@given(st.text(max_size=300))
def test_any_query_is_a_number_or_none(query: str) -> None:
    assert parse_number(query, "after") >= -1


def test_nothing_but_the_pages_own_script_runs_and_nothing_is_loaded_from_outside() -> None:
    body, (name, policy) = load_page()
    text = body.decode()
    assert name == "Content-Security-Policy"
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert content_security_policy(text) == policy
    assert content_security_policy(text.replace("gcore", "gcorf")) != policy, "a changed script has another hash"
    outside = text.replace("http://www.w3.org/2000/svg", "")
    for word in ("://", "src=", "@import", "url("):
        assert word not in outside
    # What makes markup of a string, or code.
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "onclick"):
        assert word not in text


def step(number: int, lineage: int = 0, **metrics: float) -> dict[str, Any]:
    return {"kind": "step", "lineage": lineage, "step": number, "metrics": metrics}


def test_a_curve_follows_the_chain_that_holds() -> None:
    lines = [
        *(step(at, reward=at / 10) for at in range(1, 6)),
        {"kind": "eval", "lineage": 0, "step": 4, "metrics": {"accuracy": 0.9}},
        {"kind": "rollback", "lineage": 1, "step": 3},
        step(4, 1, reward=0.7),
        {"kind": "eval", "lineage": 1, "step": 2, "metrics": {"accuracy": 0.5, "unscored": 3, "reward": 0.3}},
    ]
    found = curves.build_curves(lines)
    assert found.points["reward"] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.7)]
    assert found.points["accuracy"] == [(2, 0.5)]
    assert found.points["held_out_reward"] == [(2, 0.3)]
    assert (found.newest, "kl" in found.points) == (4, False)


@given(st.lists(FINITE, max_size=3000), st.integers(1, 400))
def test_a_long_curve_is_thinned_evenly_and_keeps_its_newest_point(values: list[float], most: int) -> None:
    points = list(enumerate(values))
    found = curves.thin_points(points, most)
    assert len(found) <= most
    assert found[-1:] == points[-1:]
    assert set(found) <= set(points)
    if len(points) <= most:
        assert found == points


def test_numbers_that_are_none_are_left_out_and_the_end_of_a_long_file_is_enough(tmp_path: Path) -> None:
    lines = [json.dumps(step(at, reward=at, kl=float("nan"))) for at in range(1, 101)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(["not a line", *lines, '{"kind": "st']))
    whole = curves.read_curves(tmp_path)
    assert (len(whole.points["reward"]), whole.partial, "kl" in whole.points) == (100, False, False)
    part = curves.read_curves(tmp_path, most_bytes=1000)
    assert part.partial
    assert part.points["reward"][-1] == (100, 100)
    assert len(part.points["reward"]) < 20
    assert curves.read_curves(tmp_path / "no such folder").points == {}


def book(tmp_path: Path, node: str, number: int, slots: int) -> None:
    spans = {f"cpu:{at}": [Span(0.0, 1.5, {"busy rollout": 1.5}), Span(1.5, 2.0, {})] for at in range(slots)}
    made = StepAccount(version=Version(0, number), began=100.0 + 2 * number, seconds=2.0, slots=slots)
    append_line(tmp_path, AccountLine(node, made, (), spans))


def test_the_slots_of_all_nodes_have_a_row_each_with_what_they_did_when(tmp_path: Path) -> None:
    for number in range(1, 13):
        book(tmp_path, "node-a", number, 2)
        book(tmp_path, "node-b", number, 1)
    found = timeline.read_timelines(tmp_path)
    assert [(row.node, row.slot) for row in found.rows] == [
        ("node-a", "cpu:0"),
        ("node-a", "cpu:1"),
        ("node-b", "cpu:0"),
    ]
    assert [step for _, _, step in found.steps] == list(range(5, 13))
    assert found.rows[0].spans[:2] == [(110.0, 111.5, "busy rollout"), (111.5, 112.0, "")]
    assert found.more == 0
    assert timeline.read_timelines(tmp_path / "none").rows == []


def test_of_more_slots_than_there_is_room_for_it_is_told_how_many(tmp_path: Path) -> None:
    book(tmp_path, "node-a", 1, timeline.MOST_SLOTS - 1)
    book(tmp_path, "node-b", 1, 3)
    found = timeline.read_timelines(tmp_path)
    assert (len(found.rows), found.more) == (timeline.MOST_SLOTS, 2)


@pytest.mark.parametrize(
    ("listens", "address", "reached"),
    [
        ("127.0.0.1:9090", "127.0.0.1:50051", "127.0.0.1:9090"),
        ("0.0.0.0:9090", "node-1.example:50051", "node-1.example:9090"),
        ("[::]:9090", "[fd00::1]:50051", "[fd00::1]:9090"),
        ("10.0.0.7:9090", "node-1.example:50051", "10.0.0.7:9090"),
    ],
)
def test_metrics_of_a_node_that_listens_everywhere_are_reached_where_its_daemon_is(
    listens: str, address: str, reached: str
) -> None:
    assert reachable_address(listens, address) == reached


def test_a_folder_is_read_once_until_there_is_something_new(tmp_path: Path) -> None:
    reads: list[Path] = []

    def read(folder: Path) -> int:
        reads.append(folder)
        return len(reads)

    kept = FileCache(curves.curves_stamp, read)
    runs = [tmp_path / str(number) for number in range(MOST_CACHED + 1)]
    for run in runs:
        run.mkdir()
    assert [kept.of(runs[0]), kept.of(runs[0])] == [1, 1]
    (runs[0] / "metrics.jsonl").write_text("new\n")
    assert [kept.of(runs[0]), kept.of(runs[0])] == [2, 2]
    for run in runs[1:]:
        kept.of(run)
    assert kept.of(runs[-1]) == MOST_CACHED + 2
    assert kept.of(runs[0]) == MOST_CACHED + 3, "the oldest was forgotten"


def test_a_disk_that_hangs_keeps_one_thread_and_not_all_who_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_runs, "TURN_S", 0.01)
    begun, goes_on = threading.Event(), threading.Event()

    def hang(folder: Path) -> str:
        begun.set()
        goes_on.wait()
        return "read"

    kept: FileCache[str] = FileCache(lambda folder: 0, hang)
    with ThreadPoolExecutor(1) as other:
        first = other.submit(kept.of, tmp_path)
        begun.wait()
        with pytest.raises(OSError, match="has not finished"):
            kept.of(tmp_path)
        goes_on.set()
        assert first.result() == "read"
    assert kept.of(tmp_path) == "read"


def test_of_many_nodes_fewer_steps_are_drawn(tmp_path: Path) -> None:
    for node in range(timeline.MOST_NODES):
        for number in range(1, 6):
            book(tmp_path, f"node-{node:02}", number, 1)
    found = timeline.read_timelines(tmp_path)
    assert len(found.rows) == timeline.MOST_NODES
    assert len(found.steps) == timeline.MOST_LINES // timeline.MOST_NODES
    before = timeline.timelines_stamp(tmp_path)
    book(tmp_path, "node-00", 6, 1)
    assert timeline.timelines_stamp(tmp_path) != before

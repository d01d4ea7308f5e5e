"""Trackers: early refusals, each line delivered once (or again after a crash), and always in order."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.config.load import parse_spec
from gcore.config.spec import TrackerSpec
from gcore.errors import SpecError
from gcore.ledger.records.job import METRICS_FILE
from gcore.observability import tracking as registry
from gcore.observability.metrics_file import encode_lines
from gcore.observability.tracking import (
    Cursor,
    Feeder,
    Point,
    TrackedRun,
    TrackerDocument,
    TrackerKind,
    flattened,
    load_cursor,
    tracker_folder,
)

STEPS = [
    {"kind": "start", "seq": 0, "lineage": 0, "step": 0, "time": 1.0},
    {"kind": "eval", "id": "0.0", "lineage": 0, "step": 0, "time": 1.0, "metrics": {"accuracy": 0.25}},
    {"kind": "step", "seq": 1, "lineage": 0, "step": 1, "time": 2.0, "metrics": {"reward": 0.1}, "groups": 4},
    {"kind": "step", "seq": 2, "lineage": 0, "step": 2, "time": 3.0, "metrics": {"reward": 0.2}, "groups": 4},
    {"kind": "rollback", "seq": 3, "lineage": 1, "step": 1, "from_step": 2, "time": 4.0, "reason": "a rank died"},
    {"kind": "step", "seq": 4, "lineage": 1, "step": 2, "time": 5.0, "metrics": {"reward": 0.7}, "groups": 4},
    {"kind": "account", "seq": 5, "lineage": 1, "step": 2, "time": 5.5, "failed": 1},
    {"kind": "step", "seq": 6, "lineage": 1, "step": 3, "time": 6.0, "metrics": {"reward": 0.9}, "groups": 4},
    {"kind": "eval", "id": "1.3", "lineage": 1, "step": 3, "time": 6.0, "metrics": {"accuracy": 0.75}},
    {"kind": "end", "state": "SUCCEEDED", "reason": "done", "time": 7.0},
]


class Remembering:
    """A tracker that records its calls. `breaks_at`: raises at that call."""

    def __init__(self, breaks_at: int | None = None) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.flushed = 0
        self._left = breaks_at

    def _note(self, *words: Any) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise ConnectionError("the tracker's server is away")
        self.told.append(words)

    def log(self, point: Point) -> None:
        self._note("log", point.seq, point.lineage, point.step, *sorted(point.metrics.items()))

    def rolled_back(self, point: Point, reason: str) -> None:
        self._note("back", point.lineage, point.step, reason)

    def flush(self) -> None:
        self.flushed = len(self.told)

    def finish(self, state: str | None) -> None:
        self._note("finish", state)


EVERYTHING = [
    ("log", -1, 0, 0, ("eval/accuracy", 0.25)),
    ("log", 1, 0, 1, ("train/groups", 4.0), ("train/reward", 0.1)),
    ("log", 2, 0, 2, ("train/groups", 4.0), ("train/reward", 0.2)),
    ("back", 1, 1, "a rank died"),
    ("log", 4, 1, 2, ("train/groups", 4.0), ("train/reward", 0.7)),
    ("log", 6, 1, 3, ("train/groups", 4.0), ("train/reward", 0.9)),
    ("log", 6, 1, 3, ("eval/accuracy", 0.75)),
    ("finish", "SUCCEEDED"),
]
EVERYTHING[0] = ("log", 0, 0, 0, ("eval/accuracy", 0.25))


def write(run_dir: Path, lines: list[dict[str, Any]] = STEPS) -> Path:
    file = run_dir / METRICS_FILE
    file.write_bytes(encode_lines(lines))
    return file


def feeder(run_dir: Path, tracker: Any) -> Feeder:
    return Feeder(run_dir / METRICS_FILE, run_dir / "cursor.json", tracker, lambda cursor: None)


def test_a_tracker_is_told_each_step_evaluation_rollback_and_the_end(tmp_path: Path) -> None:
    write(tmp_path)
    tracker = Remembering()
    feeder(tmp_path, tracker).feed()
    assert tracker.told == EVERYTHING
    assert load_cursor(tmp_path / "cursor.json").done


def test_resumed_feeder_sends_only_new_lines(tmp_path: Path) -> None:
    write(tmp_path, STEPS[:4])
    feeder(tmp_path, Remembering()).feed()
    write(tmp_path)
    tracker = Remembering()
    feeder(tmp_path, tracker).feed()
    assert tracker.told == EVERYTHING[3:]
    again = Remembering()
    feeder(tmp_path, again).feed()
    assert again.told == []


def test_a_line_that_stands_twice_or_is_no_line_is_told_once(tmp_path: Path) -> None:
    file = write(tmp_path, [*STEPS[:4], STEPS[2], STEPS[3]])
    file.write_bytes(file.read_bytes() + b"{half a li\n" + encode_lines(STEPS[4:]) + b'{"kind": "step", "torn')
    tracker = Remembering()
    feeder(tmp_path, tracker).feed()
    assert tracker.told == EVERYTHING


def test_a_file_written_anew_is_told_from_where_it_was_known(tmp_path: Path) -> None:
    write(tmp_path, STEPS[:5])
    feeder(tmp_path, Remembering()).feed()
    write(tmp_path, STEPS[2:4])
    tracker = Remembering()
    feeder(tmp_path, tracker).feed()
    assert tracker.told == []


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(1, 4))
def test_every_line_reaches_a_failing_tracker_in_order(
    tmp_path_factory: pytest.TempPathFactory, breaks: list[int], batch: int
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    write(run_dir)
    told: list[tuple[Any, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gcore.observability.tracking.BATCH", batch)
        for at in [*breaks, None]:
            tracker = Remembering(at)
            with contextlib.suppress(ConnectionError):
                feeder(run_dir, tracker).feed()
            told += tracker.told
    # Each process begins at or before the line where the last one stopped: nothing is left out, order is kept.
    assert [one for n, one in enumerate(told) if one not in told[:n]] == EVERYTHING


def test_a_cursor_that_cannot_be_read_means_the_beginning(tmp_path: Path) -> None:
    (tmp_path / "cursor.json").write_text("{")
    assert load_cursor(tmp_path / "cursor.json") == Cursor()


def test_hyperparameters_have_dotted_names() -> None:
    tree = {"train": {"learning_rate": 1e-4, "critic": None}, "tracking": [], "chat": True, "options": {}}
    assert flattened(tree) == {
        "train.learning_rate": 1e-4,
        "train.critic": "None",
        "tracking": "[]",
        "chat": True,
        "options": "{}",
    }


def refused(*trackers: TrackerSpec) -> str:
    with pytest.raises(SpecError) as error:
        registry.check_trackers(trackers)
    return str(error.value)


def test_an_unknown_tracker_is_answered_with_the_nearest_name() -> None:
    assert "no tracker is called 'tensorbord', did you mean 'tensorboard'?" in refused(TrackerSpec(name="tensorbord"))


def test_a_package_that_is_missing_is_told_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = TrackerKind(lambda run, options: Remembering(), "no_such_package", "gcore[wandb]")
    monkeypatch.setattr(registry, "find_plugin", lambda group, name: kind)
    assert "pip install 'gcore[wandb]'" in refused(TrackerSpec(name="wandb"))


def test_an_unknown_option_is_answered_with_the_nearest() -> None:
    said = refused(TrackerSpec(name="tensorboard", options={"foldr": "x"}))
    assert "tracker 'tensorboard' has no option 'foldr', did you mean 'folder'?" in said


def test_a_plain_function_is_a_tracker_and_takes_any_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_plugin", lambda group, name: lambda run, options: Remembering())
    registry.check_trackers([TrackerSpec(name="own", options={"anything": 1})])


def test_a_tracker_named_twice_is_refused() -> None:
    tree = {
        "name": "x", "model": {"path": "m"}, "data": {"path": "d"}, "flow": {"steps": 1}, "rollout": {"max_new_tokens": 1},
        "tracking": [{"name": "mlflow"}, {"name": "mlflow", "options": {"experiment": "b"}}],
    }  # fmt: skip
    with pytest.raises(SpecError, match="tracking lists 'mlflow' twice"):
        parse_spec(tree)


def run_of(run_dir: Path, next_step: int | None = None) -> TrackedRun:
    return TrackedRun("u1", "job", run_dir, run_dir, {"train": {"learning_rate": 0.1}, "chat": False}, next_step)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """As TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    # Scalars are kept as tensors by the reader's migration of old summaries.
    return {
        tag: [(event.step, round(event.value, 5)) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]
    }


def tensorboard(run_dir: Path, next_step: int | None = None) -> Any:
    return registry.find_tracker("tensorboard")(run_of(run_dir, next_step), {})


def test_tensorboard_shows_each_step_as_it_was_trained_last(tmp_path: Path) -> None:
    write(tmp_path)
    feeder(tmp_path, tensorboard(tmp_path)).feed()
    found = scalars(tmp_path / "tensorboard")
    assert found["train/reward"] == [(1, 0.1), (2, 0.7), (3, 0.9)]
    assert found["eval/accuracy"] == [(0, 0.25), (3, 0.75)]
    assert found["train/groups"] == [(1, 4.0), (2, 4.0), (3, 4.0)]


def test_tensorboard_shows_a_step_once_that_two_processes_wrote(tmp_path: Path) -> None:
    write(tmp_path, STEPS[:3])
    first = feeder(tmp_path, tensorboard(tmp_path))
    first.feed()
    write(tmp_path, STEPS[:4])
    with pytest.MonkeyPatch.context() as patch:  # it dies after it wrote, before it noted that it had
        patch.setattr("gcore.observability.tracking.replace_file", lambda path, data: None)
        first.feed()
    write(tmp_path)
    cursor = load_cursor(tmp_path / "cursor.json")
    assert cursor.step == 1
    feeder(tmp_path, tensorboard(tmp_path, cursor.step + 1)).feed()
    assert scalars(tmp_path / "tensorboard")["train/reward"] == [(1, 0.1), (2, 0.7), (3, 0.9)]


def test_tensorboard_has_the_spec_as_hyperparameters(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG, parse_session_start_info_plugin_data

    tensorboard(tmp_path).finish(None)
    (file,) = (tmp_path / "tensorboard").iterdir()
    values = [v for raw in RawEventFileLoader(str(file)).Load() for v in Event.FromString(raw).summary.value]
    (start,) = [v for v in values if v.tag == SESSION_START_INFO_TAG]
    hparams = parse_session_start_info_plugin_data(start.metadata.plugin_data.content).hparams
    assert hparams["train.learning_rate"].number_value == 0.1
    (text,) = [v for v in values if v.tag == "spec"]
    assert b'"learning_rate": 0.1' in text.tensor.string_val[0]


class Process:
    """A tracker's real process."""

    def __init__(self, run_dir: Path, tracker: str, options: dict[str, Any] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gcore.tracking", "--home", "/h", "--run-dir", str(run_dir), "--tracker", tracker],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write(TrackerDocument("u1", "job", {"seed": 0}, options or {}).encode())
        self.process.stdin.flush()

    def words(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout is not None
        return (json.loads(line) for line in self.process.stdout)

    def until(self, word: str) -> dict[str, Any]:
        return next(said for said in self.words() if word in said)

    def wake(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def let_go(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(60)


def test_a_process_feeds_what_comes_and_ends_with_the_job(tmp_path: Path) -> None:
    process = Process(tmp_path, "tensorboard")
    process.until("ready")
    write(tmp_path, STEPS[:4])
    process.wake()
    size = (tmp_path / METRICS_FILE).stat().st_size
    assert process.until("offset")["offset"] == size
    write(tmp_path)
    process.wake()
    assert process.process.wait(60) == 0
    assert scalars(tmp_path / "tensorboard")["train/reward"] == [(1, 0.1), (2, 0.7), (3, 0.9)]
    assert load_cursor(tracker_folder(tmp_path, "tensorboard") / "cursor.json").done


def test_a_process_whose_controller_is_gone_gives_what_there_is_and_ends(tmp_path: Path) -> None:
    process = Process(tmp_path, "tensorboard")
    process.until("ready")
    write(tmp_path, STEPS[:4])
    assert process.let_go() == 0
    assert scalars(tmp_path / "tensorboard")["train/reward"] == [(1, 0.1), (2, 0.2)]
    cursor = load_cursor(tracker_folder(tmp_path, "tensorboard") / "cursor.json")
    assert (cursor.step, cursor.done) == (2, False)


def test_a_second_process_of_one_tracker_does_not_feed_it(tmp_path: Path) -> None:
    first = Process(tmp_path, "tensorboard")
    first.until("ready")
    assert Process(tmp_path, "tensorboard").process.wait(60) == 75
    assert first.let_go() == 0


def test_a_tracker_that_cannot_be_opened_is_told_in_a_sentence(tmp_path: Path) -> None:
    process = Process(tmp_path, "tensorboard", {"folder": "/proc/nowhere"})
    said = process.until("error")["error"]
    assert "/proc/nowhere" in said
    assert "\n" not in said
    assert process.process.wait(60) == 1

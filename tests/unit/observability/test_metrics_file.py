"""metrics.jsonl: its lines are complete and correct for every writer, after every fault."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.ledger.records.chain import EndedRef, LogEntry
from gcore.ledger.records.job import Evaluation, JobPhase, JobRecord, JobStatus
from gcore.observability.metrics_file import (
    FileBusy,
    MetricsFile,
    MetricsFileState,
    MetricsSource,
    decode_line,
    encode_lines,
    finite_numbers,
    has_missing_lines,
    missing_lines,
)
from gcore.types import PromptRef, Version

JOB = JobRecord(uid="u1", name="job", spec={}, run_dir="/nowhere", created=0.0, prompts=10)


def entry(seq: int, kind: str, step: int, lineage: int = 0, **fields: object) -> LogEntry:
    parent = None if seq == 0 else seq - 1
    base = {
        "seq": seq,
        "parent": parent,
        "kind": kind,
        "lineage": lineage,
        "step": step,
        "world": "w",
        "nonce": str(seq),
    }
    return LogEntry.model_validate(base | fields)


def trained(seq: int, step: int, lineage: int = 0, **stats: float) -> LogEntry:
    delta = (EndedRef(ref=PromptRef(0, 0, seq), kind="trained"), EndedRef(ref=PromptRef(0, 1, seq), kind="filtered"))
    return entry(seq, "train", step, lineage, stats=stats or {"reward": step / 10}, delta=delta)


CHAIN = [
    entry(0, "base", 0),
    trained(1, 1),
    trained(2, 2),
    entry(3, "account", 2, delta=(EndedRef(ref=PromptRef(0, 2, 0), kind="failed"),)),
    entry(4, "rollback", 1, 1, reason="a rank died"),
    trained(5, 2, 1),
    trained(6, 3, 1),
]
EVALUATIONS = {
    "0.0": Evaluation(version=Version(0, 0), accuracy=0.25, count=4),
    "1.2": Evaluation(version=Version(1, 2), accuracy=0.5, count=4),
}


def source(upto: int = len(CHAIN), *, since: int = 0, evaluations: bool = True, ended: bool = False) -> MetricsSource:
    status = JobStatus(phase=JobPhase.SUCCEEDED if ended else JobPhase.RUNNING, reason="done")
    known = {e.seq: e for e in CHAIN[since:upto]}
    versions = {(e.lineage, e.step) for e in CHAIN[:upto] if e.kind in ("base", "train")}
    shown = {k: e for k, e in EVALUATIONS.items() if evaluations and tuple(e.version) in versions}
    return MetricsSource(JOB, status, known, shown)


def nothing() -> dict[int, LogEntry]:
    return {}


def lines(file: MetricsFile) -> list[dict]:
    return [json.loads(line) for line in file.path.read_text().splitlines()]


def told(run_dir: Path) -> list[str]:
    """Without the moment."""
    found = lines(MetricsFile(run_dir))
    for line in found:
        assert line.pop("time") > 0
    return [json.dumps(line) for line in found]


def in_order(upto: int = len(CHAIN), *, ended: bool = True) -> list[str]:
    return [
        json.dumps({k: v for k, v in line.items() if k != "time"})
        for line in missing_lines(MetricsFileState(), source(upto, ended=ended), 1.0)
    ]


def test_the_lines_follow_the_chain_with_each_evaluation_behind_its_step() -> None:
    kinds = [
        (line["kind"], line.get("lineage"), line.get("step"))
        for line in missing_lines(MetricsFileState(), source(ended=True), 1.0)
    ]
    assert kinds == [
        ("start", 0, 0),
        ("eval", 0, 0),
        ("step", 0, 1),
        ("step", 0, 2),
        ("account", 0, 2),
        ("rollback", 1, 1),
        ("step", 1, 2),
        ("eval", 1, 2),
        ("step", 1, 3),
        ("end", None, None),
    ]


def test_a_rollback_says_from_where_to_where_and_why() -> None:
    (line,) = [one for one in missing_lines(MetricsFileState(), source(), 1.0) if one["kind"] == "rollback"]
    assert (line["from_step"], line["step"], line["lineage"], line["reason"]) == (2, 1, 1, "a rank died")


def test_a_step_has_its_numbers_and_counts_and_nothing_that_is_no_number() -> None:
    one = trained(1, 1, reward=0.5, loss=float("nan"), grad_norm=float("inf"))
    (_, line) = missing_lines(MetricsFileState(), MetricsSource(JOB, None, {0: CHAIN[0], 1: one}, {}), 1.0)
    assert line["metrics"] == {"reward": 0.5}
    assert (line["groups"], line["filtered"], line["failed"]) == (1, 1, 0)
    assert decode_line(encode_lines([line])[:-1]) == line


def test_numbers_of_sections_carry_their_names() -> None:
    tree = {"accuracy": 0.5, "by_source": {"sums": {"accuracy": 1, "ok": True, "name": "x"}}}
    assert finite_numbers(tree) == {"accuracy": 0.5, "by_source/sums/accuracy": 1.0}


def test_a_writer_adds_only_what_is_missing(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    assert file.bring(source(3), 1.0, nothing) == 4
    assert not has_missing_lines(file.written, source(3))
    assert has_missing_lines(file.written, source(4))
    assert file.bring(source(3), 1.0, nothing) == 0
    assert file.bring(source(), 1.0, nothing) == 5
    assert file.bring(source(ended=True), 1.0, nothing) == 1
    assert file.bring(source(ended=True), 1.0, nothing) == 0
    assert told(tmp_path) == in_order()


def test_another_controller_goes_on_where_one_stopped_and_a_late_one_adds_nothing(tmp_path: Path) -> None:
    late, other = MetricsFile(tmp_path), MetricsFile(tmp_path)
    late.bring(source(3), 1.0, nothing)
    other.bring(source(6), 1.0, nothing)
    assert late.bring(source(4), 1.0, nothing) == 0
    assert late.bring(source(ended=True), 1.0, nothing) == 2
    assert other.bring(source(ended=True), 1.0, nothing) == 0
    assert told(tmp_path) == in_order()


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_line_that_was_torn_is_cut_off_and_written_whole(tmp_path: Path, cut: int) -> None:
    MetricsFile(tmp_path).bring(source(3), 1.0, nothing)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    MetricsFile(tmp_path).bring(source(ended=True), 1.0, nothing)
    assert told(tmp_path) == in_order()


def test_entries_that_left_the_store_are_taken_from_the_archive(tmp_path: Path) -> None:
    archived = {e.seq: e for e in CHAIN[:4]}
    MetricsFile(tmp_path).bring(source(since=4, ended=True), 1.0, lambda: archived)
    assert told(tmp_path) == in_order()


def test_nothing_is_written_behind_a_gap_until_it_is_given_up(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.bring(source(2), 1.0, nothing)
    with pytest.raises(ValueError, match="log entries after 1 are neither in the store nor in the archive"):
        file.bring(source(since=4), 1.0, nothing)
    assert len(lines(file)) == 3
    file.bring(source(since=4), 1.0, nothing, whole=False)
    assert [line["seq"] for line in lines(file) if "seq" in line] == [0, 1, 4, 5, 6]


def test_a_file_that_somebody_emptied_is_written_anew(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.bring(source(3), 1.0, nothing)
    file.path.write_bytes(b"")
    file.bring(source(ended=True), 1.0, nothing)
    assert told(tmp_path) == in_order()


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "step", "seq": 99, "lineage": 0, "step": null, "metrics": {}}',
        '{"kind": "step", "seq": 99, "metrics": {}}',
        '{"kind": "eval", "id": "0.0", "lineage": 0, "step": 0, "metrics": []}',
        '{"kind": "eval", "id": "0.0", "lineage": 0, "step": 0, "metrics": {"accuracy": "high"}}',
        '{"kind": "rollback", "seq": 99, "lineage": 1, "step": 1, "time": "noon"}',
        "[" * 100_000,
        "\0" * 4096,
    ],
)
def test_a_line_of_a_strangers_is_no_line_to_whoever_writes_or_reads(tmp_path: Path, line: str) -> None:
    file = MetricsFile(tmp_path)
    file.bring(source(3), 1.0, nothing)
    with file.path.open("a") as strange:
        strange.write(f"{line}\n")
    MetricsFile(tmp_path).bring(source(ended=True), 1.0, nothing)
    decoded = [decode_line(raw) for raw in file.path.read_bytes().splitlines()]
    assert decoded.count(None) == 1
    file.path.write_bytes(encode_lines([one for one in decoded if one is not None]))
    assert told(tmp_path) == in_order()


def test_busy_file_raises_without_waiting(tmp_path: Path) -> None:
    with (tmp_path / "metrics.jsonl").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(FileBusy):
            MetricsFile(tmp_path).bring(source(), 1.0, nothing)
    assert MetricsFile(tmp_path).bring(source(), 1.0, nothing) > 0


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, len(CHAIN)), st.booleans(), st.integers(0, 80)), max_size=12)
)
def test_concurrent_writers_with_old_views_and_torn_lines_give_the_same_file(
    tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[int, int, bool, int]]
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    writers = [MetricsFile(run_dir) for _ in range(3)]
    for who, upto, evaluations, torn in turns:
        writers[who].bring(source(upto, evaluations=evaluations), 1.0, nothing)
        content = writers[who].path.read_bytes()
        # A writer dies in the middle of its last line, with the lines of others before it.
        writers[who].path.write_bytes(
            content[: len(content) - min(torn, len(content.splitlines(keepends=True)[-1]) - 1)]
        )
        writers[who] = MetricsFile(run_dir)
    writers[0].bring(source(ended=True), 1.0, nothing)
    assert sorted(told(run_dir)) == sorted(in_order())
    found = [json.loads(line) for line in told(run_dir)]
    chain = [line["seq"] for line in found if "seq" in line]
    assert chain == sorted(set(chain))


def _write(run_dir: str) -> None:
    file = MetricsFile(Path(run_dir))
    for upto in range(1, len(CHAIN) + 1):
        while True:
            try:
                file.bring(source(upto, ended=upto == len(CHAIN)), 1.0, nothing)
                break
            except FileBusy:
                continue


def test_several_processes_at_once_write_each_line_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(str(tmp_path),)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert sorted(told(tmp_path)) == sorted(in_order())

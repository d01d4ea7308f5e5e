"""The audit log of calls: one line each, bounded in size and count, and without delay for the call."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from controllers.api.edge.gate import MOST_OF_A_FIELD, MOST_WAITING, CallEntry, CallJournal
from gcore.testing import FakeClock


def entry(number: int = 0, *, known: bool = True, job: str = "") -> CallEntry:
    who = ("ada", "admin") if known else ("", "")
    return CallEntry(*who, peer="ipv4:127.0.0.1:1", verb="CancelJob", job=job or f"job-{number}", outcome="OK")


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_each_call_is_a_line_of_who_did_what_when_for_the_owner_to_read(tmp_path: Path) -> None:
    file, clock = tmp_path / "logs" / "calls.jsonl", FakeClock()
    journal = CallJournal(file, clock)
    journal.note(entry())
    journal.close()
    (line,) = lines(file)
    assert line == {
        "time": round(clock.wall(), 3),
        "caller": "ada",
        "role": "admin",
        "peer": "ipv4:127.0.0.1:1",
        "verb": "CancelJob",
        "job": "job-0",
        "outcome": "OK",
    }
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_file_is_turned_over_and_never_grows_beyond_its_bounds(tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    journal = CallJournal(file, FakeClock(), most_bytes=1000, kept=2)
    for number in range(100):
        journal.note(entry(number))
    journal.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calls.jsonl", "calls.jsonl.1", "calls.jsonl.2"]
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    kept = [str(line["job"]) for name in (".2", ".1", "") for line in lines(tmp_path / f"calls.jsonl{name}")]
    assert kept == [f"job-{number}" for number in range(100 - len(kept), 100)]


def test_repeated_refusals_do_not_displace_lines_of_others(tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    journal = CallJournal(file, FakeClock(), most_bytes=1000, kept=0)
    journal.note(entry())
    for number in range(100):
        journal.note(entry(number, known=False))
    journal.close()
    assert [line["job"] for line in lines(file)] == ["job-0"]
    assert (tmp_path / "refused-calls.jsonl").stat().st_size <= 1000


def test_while_the_disk_hangs_a_crowd_of_strangers_drives_no_line_out_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CallJournal, "_write_all", lambda self: None)
    journal = CallJournal(tmp_path / "calls.jsonl", FakeClock())
    for number in range(10):
        journal.note(entry(number))
    for number in range(2 * MOST_WAITING):
        journal.note(entry(number, known=False))
    waiting = [one[0].name for one in journal._lines.queue if one is not None]
    assert waiting.count("calls.jsonl") == 10


def test_caller_text_is_one_line_of_bounded_length(tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    journal = CallJournal(file, FakeClock())
    journal.note(entry(job='x\n{"caller": "somebody else"}' + "y" * 10_000))
    journal.close()
    (line,) = lines(file)
    assert len(str(line["job"])) == MOST_OF_A_FIELD


def test_a_disk_that_takes_nothing_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    journal = CallJournal(tmp_path / "file" / "calls.jsonl", FakeClock())
    for number in range(2 * MOST_WAITING):
        journal.note(entry(number))
    journal.close()


def test_without_a_file_nothing_is_kept() -> None:
    journal = CallJournal(None, FakeClock())
    journal.note(entry())
    journal.close()

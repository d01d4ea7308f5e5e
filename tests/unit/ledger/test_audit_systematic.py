"""The audit finds every deletion of a record and every edit of a single field, except those that docs/develop/audit.md lists.

The test edits stored records field by field. It also adds fields that a record lacks, with the values of the golden records. A path
names the kind of record and the fields, without list positions: an edit of any element counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from recorded_job import (
    KEYS,
    UID,
    RecordedJob,
    a_finished_job,
    a_job_that_went_on,
    a_job_under_way,
    a_job_with_a_ready_step,
)

from controllers.api.run_reader import audit_of_records
from gcore.ledger.archive import read_entries
from gcore.store.types import KeyValue, WatchBatch, WatchEvent

GOLDEN = Path(__file__).parents[2] / "golden" / "records_of_version_2"
PAGE = Path(__file__).parents[3] / "docs" / "develop" / "audit.md"
HAS_VALUE: dict[str, str] = {
    "job": "gcore.ledger.records.job.JobRecord",
    "state": "gcore.ledger.records.job.JobStatus",
    "head": "gcore.ledger.records.chain.Head",
    "ckpts": "gcore.ledger.records.chain.Checkpoints",
    "log": "gcore.ledger.records.chain.LogEntry",
    "seal": "gcore.ledger.records.chain.Seal",
    "offer": "gcore.ledger.records.chain.Offer",
}
"""By key prefix: the golden record that has a value for each field."""

FREE = ("spec", "stats", "sources", "parts")
"""Fields whose keys are free names, which differ from the names in the golden records."""

Edit = tuple[str, Any]
"""The path, and the complete record after the edit; None: the record is deleted."""


def edits(tree: Any, golden: Any, path: str = "") -> Iterator[Edit]:
    """Yield all edits of one value, at any depth."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            below = f"{path}.{name}".lstrip(".")
            yield below, {key: other for key, other in tree.items() if key != name}
            of = golden.get(name) if isinstance(golden, dict) else None
            yield from ((place, {**tree, name: changed}) for place, changed in edits(value, of, below))
        for name in (golden or {}) if path.rpartition(".")[2] not in FREE else ():
            if name not in tree:
                yield f"{path}.{name}".lstrip("."), {**tree, name: golden[name]}
    elif isinstance(tree, list):
        yield from ((path, changed) for changed in edited_list(tree, golden))
        of = golden[0] if isinstance(golden, list) and golden else None
        for at in sorted({0, len(tree) - 1} if tree else ()):
            for place, changed in edits(tree[at], of, path):
                yield place, [*tree[:at], changed, *tree[at + 1 :]]
    else:
        yield from ((path, changed) for changed in edited_value(tree))


def edited_list(tree: list[Any], golden: Any) -> Iterator[list[Any]]:
    if tree:
        yield tree[:-1]
        yield tree[1:]
        yield [*tree, tree[-1]]
    if len(tree) > 1 and tree[0] != tree[-1]:
        yield [tree[-1], *tree[1:-1], tree[0]]
    if isinstance(golden, list) and golden:
        yield [*tree, golden[0]]


def edited_value(value: Any) -> Iterator[Any]:
    match value:
        case bool():
            yield not value
        case int():
            yield value + 1
            if value:
                yield 0
        case float():
            yield value + 0.5
        case str():
            yield from (other for other in OTHERS.get(value, (f"{value}x", "")) if other != value)
        case None:
            yield 1


OTHERS: dict[str, tuple[str, ...]] = {
    "RUNNING": ("PENDING", "SUCCEEDED", "FAILED", "CANCELLED"),
    "SUCCEEDED": ("PENDING", "RUNNING", "FAILED", "CANCELLED"),
    "SEALED": ("OPEN", "PARTIAL", "READY"),
    "READY": ("OPEN", "PARTIAL", "SEALED"),
    "train": ("account", "rollback", "base"),
    "account": ("train", "rollback", "base"),
    "rollback": ("train", "account", "base"),
    "base": ("train", "account", "rollback"),
    "trained": ("filtered", "failed"),
    "filtered": ("trained", "failed"),
    "failed": ("trained", "filtered"),
}
"""Other valid values in place of each of these."""


def kind_of(key: str, tree: Any) -> str:
    """Return the kind of a record; for a log entry with its own kind, such as `log.train`."""
    name = key.partition("/")[0]
    return f"{name}.{tree['kind']}" if name == "log" else name


def golden_of(key: str) -> Any:
    kind = HAS_VALUE[key.partition("/")[0]]
    return json.loads((GOLDEN / f"{kind}.json").read_text())


class Stored:
    """The records of a job, audited with one of them edited."""

    def __init__(self, job: RecordedJob) -> None:
        self.run_dir = job.run_dir
        self.records = {kv.key.removeprefix(KEYS.prefix): kv.value for kv in job.listing.kvs}

    def is_clean(self, key: str = "", value: bytes | None = b"") -> bool:
        """Return whether the audit is clean with `key` edited to `value`, or deleted if `value` is None."""
        records = {name: one for name, one in self.records.items() if name != key}
        if key and value is not None:
            records[key] = value
        kvs = (KeyValue(KEYS.prefix + name, one, 1, 1) for name, one in sorted(records.items()))
        batch = WatchBatch(tuple(WatchEvent("put", kv) for kv in kvs), 1, reset=True)
        return audit_of_records(UID, batch, self.run_dir).clean

    def missed(self, kinds: tuple[str, ...]) -> set[str]:
        """Return the paths of edits of these stored records that the audit does not find."""
        paths = set()
        for key, data in self.records.items():
            if key.partition("/")[0] not in kinds:
                continue
            tree = json.loads(data)
            kind = kind_of(key, tree)
            if self.is_clean(key, None):
                paths.add(kind)
            for path, changed in edits(tree, golden_of(key)):
                if f"{kind}.{path}" not in paths and self.is_clean(key, dumped(changed)):
                    paths.add(f"{kind}.{path}")
        return paths

    def missed_lines(self, folder: str, kind: Callable[[Any], str], golden: Any) -> set[str]:
        """Return the same for the lines of the files in a folder of the run."""
        paths = set()
        for file in sorted((self.run_dir / folder).glob("*.jsonl")):
            whole = file.read_text()
            lines = whole.splitlines()
            for number, line in enumerate(lines):
                tree = json.loads(line)
                for path, changed in [("", None), *edits(tree, golden)]:
                    name = f"{kind(tree)}.{path}".rstrip(".")
                    if name in paths:
                        continue
                    new = [] if changed is None else [dumped(changed).decode()]
                    file.write_text("".join(f"{one}\n" for one in [*lines[:number], *new, *lines[number + 1 :]]))
                    if self.is_clean():
                        paths.add(name)
            file.write_text(whole)
        return paths


def dumped(tree: Any) -> bytes:
    return json.dumps(tree, separators=(",", ":")).encode()


SCENES = {
    a_job_under_way: tuple(HAS_VALUE),
    a_job_with_a_ready_step: ("seal",),
    a_finished_job: ("job", "state", "head", "ckpts", "log"),
    a_job_that_went_on: ("job", "state", "head", "ckpts", "log"),
}
"""Jobs, and the records of each that are edited. Its other records are the same as in another job."""


def listed() -> set[str]:
    """Return the paths in the page's table. Each has a reason."""
    table = PAGE.read_text().partition("## Edits that are not found\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    assert all(reason.strip() for _, reason in rows)
    return {path.strip(" `") for path, _ in rows}


def kind_of_receipt(job: RecordedJob) -> Callable[[Any], str]:
    """Classify receipts: `receipt` if the step belongs to head's chain, otherwise `uncommitted_receipt`."""
    log, chain, seq = job.mirror.log, set(), job.head.seq
    archived = read_entries(job.run_dir)
    while seq is not None:
        entry = log[seq].record if seq in log else archived[seq]
        chain.add(str(entry.token))
        seq = entry.parent
    return lambda tree: "receipt" if tree["token"] in chain else "uncommitted_receipt"


def missed_in(job: RecordedJob, kinds: tuple[str, ...]) -> set[str]:
    stored = Stored(job)
    assert stored.is_clean()
    archived = stored.missed_lines("log", lambda tree: f"archive.{tree['kind']}", golden_of("log"))
    return stored.missed(kinds) | archived | stored.missed_lines("receipts", kind_of_receipt(job), {})


@pytest.mark.large  # a minute; test_audit_corruptions has an edit of each kind
def test_the_page_lists_exactly_the_edits_that_are_not_found(tmp_path: Path) -> None:
    missed: set[str] = set()
    for number, (scene, kinds) in enumerate(SCENES.items()):
        missed |= missed_in(scene(tmp_path / str(number) / f"sums-{UID}"), kinds)
    assert missed - listed() == set(), "not found, and not listed"
    assert listed() - missed == set(), "listed, and found"

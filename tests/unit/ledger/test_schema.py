"""Stored records: each says its version, and those of the version before are read and can be written.

`records_of_version_1/` holds one record of each kind as version 1 wrote it, with every field set, and which fields each kind
had then. They are never written anew.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gcore import schema
from gcore.errors import UsageError
from gcore.ledger.archive import StoreCopy
from gcore.ledger.records.chain import EndedRef, Head, LogEntry, Member, Seal
from gcore.schema import NEWEST_VERSION, PIN, Record, RecordPart, UnreadableRecord
from gcore.types import PromptRef

FOLDER = Path(__file__).parents[2] / "golden" / "records_of_version_1"
FIELDS: dict[str, list[str]] = json.loads((FOLDER / "fields.json").read_text(encoding="utf-8"))
GOLDEN = sorted(path for path in FOLDER.glob("*.json") if path.name != "fields.json")
MODULES = sorted({name.rpartition(".")[0] for name in FIELDS} | {"gcore.ledger.records.chain", "gcore.ledger.usage"})


def kind_of(name: str) -> type[RecordPart]:
    module, _, kind = name.rpartition(".")
    found: type[RecordPart] = getattr(importlib.import_module(module), kind)
    return found


def all_kinds(base: type[RecordPart] = RecordPart) -> Iterator[type[RecordPart]]:
    for kind in base.__subclasses__():
        if kind is not Record and kind.__module__.startswith("gcore."):
            yield kind
        yield from all_kinds(kind)


def name_of(kind: type[RecordPart]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_record_of_version_1_is_read_whole_and_written_as_it_was(path: Path) -> None:
    data = path.read_bytes().strip()
    kind = kind_of(path.stem)
    assert issubclass(kind, Record)
    record = kind.decode(data, "a golden record")
    assert record.schema_version == NEWEST_VERSION  # from here on there is one shape only
    assert json.loads(record.encode(1)) == json.loads(data)
    again = kind.decode(record.encode())
    assert again == record


def test_there_is_a_golden_record_of_each_kind_that_version_1_had() -> None:
    kinds = {name for name in FIELDS if issubclass(kind_of(name), Record)}
    assert {path.stem for path in GOLDEN} == kinds


def test_every_field_that_version_1_did_not_have_says_since_when_it_is_there() -> None:
    for module in MODULES:
        importlib.import_module(module)
    for kind in all_kinds():
        fields = set(kind.model_fields) - {"schema_version"}
        known = set(FIELDS.get(name_of(kind), fields))
        said = set(kind.came_with)
        assert fields - known <= said, f"{name_of(kind)}: put {sorted(fields - known)} into its `came_with`"
        assert known <= fields, (
            f"{name_of(kind)}: version 1 had {sorted(known - fields)}; `upgraded` must say what became of them"
        )
        assert said <= fields
        required = {name for name in said if kind.model_fields[name].is_required()}
        assert not required, f"{name_of(kind)}: {sorted(required)} need a default, for records of version 1 have none"


def test_what_came_later_is_left_out_for_readers_of_the_version_before() -> None:
    member = Member(incarnation="n.a", node="n", address="a:1", leaving=True)
    assert json.loads(member.encode())["leaving"] is True
    older = json.loads(member.encode(1))
    assert older == {"schema_version": 1, "incarnation": "n.a", "node": "n", "address": "a:1"}
    assert Member.decode(member.encode(1)) == member.model_copy(update={"leaving": False})


def test_what_came_later_is_left_out_at_any_depth() -> None:
    ended = EndedRef(ref=PromptRef(0, 1, 2), kind="trained", digest="d", samples=2)
    entry = LogEntry(
        seq=1, parent=0, kind="train", lineage=0, step=1, world="w", nonce="n", delta=(ended,), parent_digest="p"
    )
    tree = json.loads(entry.encode(1))
    assert tree["delta"] == [{"ref": [0, 1, 2], "kind": "trained"}]
    assert "parent_digest" not in tree


def test_a_field_that_its_version_does_not_have_is_refused() -> None:
    member = Member(incarnation="n.a", node="n", address="a:1", leaving=True)
    forged = member.encode().replace(b'"schema_version":2', b'"schema_version":1')
    with pytest.raises(UnreadableRecord, match="leaving: no field of version 1"):
        Member.decode(forged, "here")
    with pytest.raises(UnreadableRecord, match="Extra inputs"):
        Member.decode(member.encode().replace(b'"leaving"', b'"unknown"'), "here")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"schema_version":3,"incarnation":"n.a","node":"n","address":"a:1"}', "schema version 3 of the member is"),
        (b'{"schema_version":0,"incarnation":"n.a","node":"n","address":"a:1"}', "schema version 0 of the member is"),
        (
            b'{"schema_version":true,"incarnation":"n.a","node":"n","address":"a:1"}',
            "schema version True of the member",
        ),
        (b'{"schema_version":[2],"incarnation":"n.a","node":"n","address":"a:1"}', "of the member is not among"),
        (b'{"incarnation":"n.a","node":"n","address":"a:1"}', "schema version None of the member"),
        (b"[1]", "no member that this gcore can read"),
        (b"{", r"no member that this gcore can read \([A-Z]"),
        (b"\xff\xfe", "no member that this gcore can read"),
        (b'{"schema_version":2,"node":"n","address":"a:1"}', "incarnation: Field required"),
        (b'{"schema_version":1,"node":"n","address":"a:1"}', "incarnation: Field required"),
    ],
    ids=[
        "newer",
        "two older",
        "no number",
        "a list",
        "none",
        "no object",
        "cut off",
        "no text",
        "a gap",
        "an older gap",
    ],
)
def test_what_cannot_be_read_is_told_with_where_and_what_to_do(data: bytes, words: str) -> None:
    with pytest.raises(UnreadableRecord, match=words) as raised:
        Member.decode(data, "/gcore/jobs/u/member/n.a")
    assert raised.value.where == "/gcore/jobs/u/member/n.a"
    assert raised.value.fix
    assert "(:" not in raised.value.what


def test_a_kind_of_record_is_called_in_words_and_not_by_its_class() -> None:
    assert LogEntry.kind_in_words() == "log entry"
    cut_off = b'{"schema_version":2,"uid":"u","revision":1,"records":{"job":"'
    with pytest.raises(
        UnreadableRecord, match=r"no copy of a job's records that this gcore can read \(Invalid JSON: EOF"
    ):
        StoreCopy.decode(cut_off)


def test_a_record_whose_keys_stand_in_another_order_is_the_same_record() -> None:
    member = Member(incarnation="n.a", node="n", address="a:1")
    turned = json.dumps(dict(reversed(json.loads(member.encode()).items()))).encode()
    assert Member.decode(turned) == member


def test_a_process_writes_what_it_was_told_to_speak() -> None:
    member = Member(incarnation="n.a", node="n", address="a:1", leaving=True)
    schema.set_written_version(NEWEST_VERSION - 1)
    try:
        assert json.loads(member.encode())["schema_version"] == NEWEST_VERSION - 1
    finally:
        schema.set_written_version(NEWEST_VERSION)
    assert json.loads(member.encode())["schema_version"] == NEWEST_VERSION
    with pytest.raises(ValueError, match="not among"):
        schema.set_written_version(NEWEST_VERSION + 1)


@pytest.mark.parametrize(("value", "version"), [(None, NEWEST_VERSION), ("", NEWEST_VERSION), ("1", 1), ("2", 2)])
def test_a_process_can_be_pinned_to_the_version_before(value: str | None, version: int) -> None:
    assert schema.pinned_version(value) == version


PINNED = """
import json, sys
from pathlib import Path
from gcore.ledger.records.chain import EndedRef, Head, LogEntry, Member
from gcore.schema import UnreadableRecord
import importlib

for path in Path(sys.argv[1]).glob("gcore.*.json"):
    module, _, kind = path.stem.rpartition(".")
    record = getattr(importlib.import_module(module), kind).decode(path.read_bytes())
    assert json.loads(record.encode()) == json.loads(path.read_bytes()), path
member = Member(incarnation="n.a", node="n", address="a:1", leaving=True)
assert "leaving" not in json.loads(member.encode())
assert Member.decode(member.encode()).leaving is False
for data in (
    b'{"schema_version":2,"incarnation":"n.a","node":"n","address":"a:1"}',
    b'{"schema_version":1,"incarnation":"n.a","node":"n","address":"a:1","leaving":true}',
):
    try:
        Member.decode(data)
    except UnreadableRecord:
        continue
    raise AssertionError(data)
"""


def test_a_pinned_process_reads_and_writes_exactly_what_the_version_before_did() -> None:
    environment = {**os.environ, schema.PIN: str(NEWEST_VERSION - 1)}
    subprocess.run([sys.executable, "-c", PINNED, str(FOLDER)], env=environment, check=True, timeout=60)


@pytest.mark.parametrize("value", ["0", "3", "one", "1.0"])
def test_a_process_cannot_be_pinned_to_what_it_does_not_know(value: str) -> None:
    with pytest.raises(UsageError, match="cannot be spoken"):
        schema.pinned_version(value)


@pytest.mark.parametrize("kind", [Seal, Head], ids=["seal", "head"])
def test_a_record_of_this_version_is_read_without_a_detour(kind: type[Record], monkeypatch: pytest.MonkeyPatch) -> None:
    record = kind.decode((FOLDER / f"{name_of(kind)}.json").read_bytes())

    def other(*_: Any) -> Any:
        raise AssertionError("read the long way")

    monkeypatch.setattr(Record, "_decode_other", classmethod(other))
    assert kind.decode(record.encode()) == record


def test_a_pinned_process_leaves_out_what_came_later_though_it_is_the_version_it_speaks() -> None:
    program = (
        "from gcore.ledger import chain; from gcore.ledger.chain import ChainWriter; from gcore.ledger.records.chain import Head\n"
        "head = chain.base_entry(2, 'w', ChainWriter('a', 'n')).head\n"
        "assert head.digest; print(head.encode().decode())\n"
        "assert Head.decode(head.encode()).digest == ''"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, PIN: "1"}, capture_output=True, text=True, check=True
    )
    assert '"schema_version":1' in done.stdout
    assert "digest" not in done.stdout


@pytest.mark.parametrize(
    "stats",
    [{}, {"a": 1.5, "b": float("inf"), "c": 1e-9, "d": 12345678901234567890.0}, {'umlaut ä \U0001f600 \\u " \n': 0.0}],
    ids=["empty", "numbers", "text"],
)
def test_the_short_way_of_writing_a_record_says_what_the_long_one_says(stats: dict[str, float]) -> None:
    entry = LogEntry(seq=3, parent=2, kind="train", lineage=0, step=1, world="w", nonce="n", stats=stats, reason="süß")
    short = entry._as_json()
    assert short is not None
    tree = {"schema_version": NEWEST_VERSION} | entry.model_dump(mode="json", exclude_defaults=True)
    assert json.loads(short) == tree
    assert short == entry.encode()
    assert LogEntry.decode(short) == entry


def test_what_the_short_way_cannot_write_goes_the_long_one() -> None:
    entry = LogEntry(seq=1, parent=0, kind="train", lineage=0, step=1, world="w", nonce="n", reason="half \ud800 pair")
    assert entry._as_json() is None
    assert LogEntry.decode(entry.encode()).reason == "half \\ud800 pair"

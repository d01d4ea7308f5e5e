"""Stored records: each has its version, and records of the first version stay readable forever.

`records_of_version_2/` holds one record of each kind as the first version writes it, with every field set, and the fields of each kind
at that time. These files never change. `test_schema_versions.py` covers the relation between two versions.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gcore import schema
from gcore.errors import UsageError
from gcore.ledger.archive import StoreCopy
from gcore.ledger.records.chain import Head, LogEntry, Member, Seal
from gcore.schema import FIRST_VERSION, NEWEST_VERSION, Record, RecordPart, UnreadableRecord

FOLDER = Path(__file__).parents[2] / "golden" / "records_of_version_2"
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
def test_a_record_of_the_first_version_is_read_whole_and_written_as_it_was(path: Path) -> None:
    data = path.read_bytes().strip()
    kind = kind_of(path.stem)
    assert issubclass(kind, Record)
    record = kind.decode(data, "a golden record")
    assert record.schema_version == NEWEST_VERSION  # from here on there is one shape only
    assert json.loads(record.encode(FIRST_VERSION)) == json.loads(data)
    again = kind.decode(record.encode())
    assert again == record


def test_there_is_a_golden_record_of_each_kind_that_the_first_version_has() -> None:
    kinds = {name for name in FIELDS if issubclass(kind_of(name), Record)}
    assert {path.stem for path in GOLDEN} == kinds


def test_every_field_that_the_first_version_did_not_have_says_since_when_it_is_there() -> None:
    for module in MODULES:
        importlib.import_module(module)
    for kind in all_kinds():
        fields = set(kind.model_fields) - {"schema_version"}
        known = set(FIELDS.get(name_of(kind), fields))
        said = set(kind.came_with)
        assert fields - known <= said, f"{name_of(kind)}: put {sorted(fields - known)} into its `came_with`"
        assert known <= fields, (
            f"{name_of(kind)}: the first version had {sorted(known - fields)}; `upgraded` must say what became of them"
        )
        assert said <= fields
        required = {name for name in said if kind.model_fields[name].is_required()}
        assert not required, (
            f"{name_of(kind)}: {sorted(required)} need a default, for records of the first version have none"
        )


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"schema_version":4,"incarnation":"n.a","node":"n","address":"a:1"}', "schema version 4 of the member is"),
        (b'{"schema_version":1,"incarnation":"n.a","node":"n","address":"a:1"}', "schema version 1 of the member is"),
        (
            b'{"schema_version":true,"incarnation":"n.a","node":"n","address":"a:1"}',
            "schema version True of the member",
        ),
        (b'{"schema_version":[2],"incarnation":"n.a","node":"n","address":"a:1"}', "of the member is not among"),
        (b'{"incarnation":"n.a","node":"n","address":"a:1"}', "schema version None of the member"),
        (b"[1]", "this gcore cannot read the member"),
        (b"{", r"this gcore cannot read the member \([A-Z]"),
        (b"\xff\xfe", "this gcore cannot read the member"),
        (b'{"schema_version":2,"node":"n","address":"a:1"}', "incarnation: Field required"),
    ],
    ids=[
        "newer",
        "older than the first",
        "no number",
        "a list",
        "none",
        "no object",
        "cut off",
        "no text",
        "a gap",
    ],
)
def test_unreadable_record_error_names_the_key_and_a_fix(data: bytes, words: str) -> None:
    with pytest.raises(UnreadableRecord, match=words) as raised:
        Member.decode(data, "/gcore/jobs/u/member/n.a")
    assert raised.value.where == "/gcore/jobs/u/member/n.a"
    assert raised.value.fix
    assert "(:" not in raised.value.what


def test_a_kind_of_record_is_called_in_words_and_not_by_its_class() -> None:
    assert LogEntry.kind_in_words() == "log entry"
    cut_off = b'{"schema_version":3,"uid":"u","revision":1,"records":{"job":"'
    with pytest.raises(
        UnreadableRecord, match=r"this gcore cannot read the copy of a job's records \(Invalid JSON: EOF"
    ):
        StoreCopy.decode(cut_off)


def test_a_record_whose_keys_stand_in_another_order_is_the_same_record() -> None:
    member = Member(incarnation="n.a", node="n", address="a:1")
    turned = json.dumps(dict(reversed(json.loads(member.encode()).items()))).encode()
    assert Member.decode(turned) == member


@pytest.mark.parametrize("value", ["0", "1", "4", "one", "2.0"])
def test_a_process_cannot_be_pinned_to_what_it_does_not_know(value: str) -> None:
    with pytest.raises(UsageError, match="is not supported"):
        schema.pinned_version(value)


@pytest.mark.parametrize("kind", [Seal, Head], ids=["seal", "head"])
def test_a_record_of_this_version_is_read_without_a_detour(kind: type[Record], monkeypatch: pytest.MonkeyPatch) -> None:
    record = kind.decode((FOLDER / f"{name_of(kind)}.json").read_bytes())

    def other(*_: Any) -> Any:
        raise AssertionError("read the long way")

    monkeypatch.setattr(Record, "_decode_other", classmethod(other))
    assert kind.decode(record.encode()) == record


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


def test_fast_encoder_falls_back_to_the_slow_one() -> None:
    entry = LogEntry(seq=1, parent=0, kind="train", lineage=0, step=1, world="w", nonce="n", reason="half \ud800 pair")
    assert entry._as_json() is None
    assert LogEntry.decode(entry.encode()).reason == "half \\ud800 pair"

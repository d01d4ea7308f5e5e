"""A damaged hint (an offer, a part, what lies in a node's memory) keeps nobody from the job: it is as if it were not there."""

from __future__ import annotations

import pytest

from gcore.ledger.mirror import HINTS, JobMirror
from gcore.ledger.records import Offer
from gcore.schema import UnreadableRecord
from gcore.store.keys import JobKeys
from gcore.store.types import KeyValue, WatchBatch, WatchEvent

KEYS = JobKeys("u")
PREFIXES = {
    "offers": "offer/",
    "fetches": "fetch/",
    "parts": "part/",
    "copies": "copies/",
    "folders": "folder/",
    "troubles": "trouble/",
}


def batch(*events: tuple[str, bytes | None], revision: int = 5) -> WatchBatch:
    made = [
        WatchEvent("delete" if value is None else "put", KeyValue(KEYS.prefix + key, value or b"", revision, revision))
        for key, value in events
    ]
    return WatchBatch(tuple(made), revision)


def test_every_hint_is_tried_here() -> None:
    assert set(PREFIXES) == HINTS


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=list(PREFIXES))
def test_a_damaged_hint_is_as_if_it_were_not_there_and_is_named(prefix: str) -> None:
    mirror = JobMirror(KEYS).fold(batch((f"{prefix}ghost.dead", b'{"schema_version":2,"x":"\xff')))
    assert mirror.offers == mirror.parts == mirror.copies == mirror.folders == mirror.fetches == mirror.troubles == {}
    ((key, why),) = mirror.unreadable.items()
    assert key == f"{KEYS.prefix}{prefix}ghost.dead"
    assert key in why
    assert not mirror.fold(batch((f"{prefix}ghost.dead", None))).unreadable


def test_a_hint_that_is_damaged_takes_the_place_of_the_one_before_and_gives_it_back() -> None:
    good = Offer(incarnation="n.x").encode()
    mirror = JobMirror(KEYS).fold(batch(("offer/n.x", good)))
    assert mirror.offers
    damaged = mirror.fold(batch(("offer/n.x", b"{")))
    assert not damaged.offers
    assert damaged.unreadable
    again = damaged.fold(batch(("offer/n.x", good)))
    assert again.offers
    assert not again.unreadable


@pytest.mark.parametrize("key", ["head", "state", "ckpts", "plan", "assign", "seal/000000000001", "log/000000000001"])
def test_what_transactions_rest_on_is_never_passed_over(key: str) -> None:
    with pytest.raises(UnreadableRecord):
        JobMirror(KEYS).fold(batch((key, b"{")))

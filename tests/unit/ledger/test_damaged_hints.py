"""A damaged hint (an offer, a part, the contents of a node's memory) blocks no job: it counts as absent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from builders import KEYS as VIEW_KEYS
from builders import ME, RULES, refs_in_order, running_job

from controllers.job.executor import apply_action
from controllers.rules.actions import PutOffer
from controllers.rules.decide import decide
from gcore.ledger import collectives, transactions
from gcore.ledger.mirror import HINTS, JobMirror
from gcore.ledger.records.chain import NodeCopies, NodeFolder, Offer, OfferedGroup
from gcore.ledger.records.job import Trouble
from gcore.ledger.transactions import Transaction, TransactionExecutor, TxnOutcome
from gcore.schema import UnreadableRecord
from gcore.store.keys import JobKeys
from gcore.store.types import KeyValue, Put, WatchBatch, WatchEvent
from gcore.testing import FakeClock, MemoryCluster, MemoryStore
from gcore.types import Version

KEYS = JobKeys("u")
PREFIXES = {
    "offers": "offer/",
    "fetches": "fetch/",
    "parts": "part/",
    "copies": "copies/",
    "folders": "folder/",
    "spent": "spent/",
    "books": "placement/books/",
    "leaders": "placement/leader",
    "pins": "placement/pin",
    "movings": "placement/moves",
    "askings": "evalask",
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
    assert all(getattr(mirror, name) == {} for name in PREFIXES)
    ((key, unread),) = mirror.unreadable.items()
    assert key == f"{KEYS.prefix}{prefix}ghost.dead"
    assert key in unread.why
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
def test_damaged_records_that_transactions_compare_are_errors(key: str) -> None:
    with pytest.raises(UnreadableRecord):
        JobMirror(KEYS).fold(batch((key, b"{")))


@pytest.mark.parametrize("prefix", ["offer/", "part/", "copies/", "folder/", "trouble/"])
async def test_writer_of_a_damaged_hint_overwrites_it(prefix: str) -> None:
    """It would compare with an absent key and always lose, and the job would wait forever for the hint."""
    store = MemoryStore(MemoryCluster(FakeClock()))
    key = f"{KEYS.prefix}{prefix}n"
    await store.transact((), (Put(key, b"{"),))
    listing = await store.list(KEYS.prefix)
    puts = tuple(WatchEvent("put", kv) for kv in listing.kvs)
    mirror = JobMirror(KEYS).fold(WatchBatch(puts, listing.revision))
    written = mirror.written(key, None)
    anew: dict[str, Callable[[], Transaction]] = {
        "offer/": lambda: transactions.offer(KEYS, written, Offer(incarnation="n"), 0),
        "part/": lambda: collectives.give(KEYS, written, collectives.Part(incarnation="n", at=Version(0, 1)), 0),
        "copies/": lambda: transactions.take_stock(KEYS, written, NodeCopies(node="n", by="a", seq=0), 0),
        "folder/": lambda: transactions.say_folder(KEYS, written, NodeFolder(node="n", by="a"), 0),
        "trouble/": lambda: transactions.warn(KEYS, written, Trouble(topic="n", node="n", sentence="full")),
    }
    assert (await TransactionExecutor(store, KEYS).run(anew[prefix]())).outcome is TxnOutcome.WON


async def test_a_peer_whose_offer_was_damaged_offers_again() -> None:
    store = MemoryStore(MemoryCluster(FakeClock()))
    seen = running_job()
    group = OfferedGroup(
        ref=next(iter(refs_in_order(RULES, seen.head, ()))),
        digest="d",
        prompt_tokens=3,
        response_tokens=(2, 2),
        versions=(Version(0, 0),),
    )
    lease = await store.grant(60)
    await store.transact((), (Put(VIEW_KEYS.offer(ME), b"{", lease=lease),))
    kv = await store.get(VIEW_KEYS.offer(ME))
    assert kv is not None
    mirror = seen.mirror.fold(WatchBatch((WatchEvent("put", kv),), kv.mod_revision))
    view = replace(seen, mirror=mirror, holdings={group.ref: group})
    (action,) = (intent.action for intent in decide(view) if isinstance(intent.action, PutOffer))
    effects: Any = SimpleNamespace(ledger=TransactionExecutor(store, VIEW_KEYS), lease=lease)
    assert (await apply_action(action, view, effects)).outcome is TxnOutcome.WON
    assert (await store.get(VIEW_KEYS.offer(ME))).value == action.offer.encode()  # type: ignore[union-attr]

"""The rules of a blob store's room: pins, grace times, reservations and the order of deletion."""

import pytest

from gcore.media.accounts import BlobAccounts, BlobKey
from gcore.media.protocol import BlobTooLarge, StoreFull

A, B, C, D = (digit * 64 for digit in "abcd")
GRACE = 10.0


def accounts(bound: int = 100) -> BlobAccounts:
    return BlobAccounts(bound, GRACE)


def put(room: BlobAccounts, sha256: str, size: int, now: float, *, holder: str = "", job: str = "j") -> list[str]:
    """Store a blob, and return the blobs that were deleted for it."""
    admission, deleted = room.admit(BlobKey(job, sha256), size, holder, now)
    assert room.store(admission, now)
    return [key.sha256 for key in deleted]


def test_the_least_recently_used_blob_is_deleted_first() -> None:
    room = accounts()
    for sha256 in (A, B, C):
        put(room, sha256, 30, 0.0)
    room.use(BlobKey("j", A), 20.0)
    assert put(room, D, 60, 21.0) == [B, C]
    assert room.stored == 90


def test_the_end_of_a_pin_counts_as_a_use() -> None:
    room = accounts()
    put(room, A, 40, 0.0)
    put(room, B, 40, 0.0)
    room.pin("i", "j", [A], 100.0, 1.0)
    room.unpin("i", "j", [A], 50.0)
    assert put(room, C, 40, 51.0) == [B]


def test_a_blob_in_its_grace_time_is_not_deleted() -> None:
    room = accounts()
    put(room, A, 60, 0.0)
    with pytest.raises(StoreFull, match="no room for 60 bytes: of 100, 0 are pinned, 60 are of new blobs"):
        put(room, B, 60, GRACE - 0.1)
    assert put(room, B, 60, GRACE) == [A]


def test_a_confirmed_blob_begins_its_grace_time_again() -> None:
    room = accounts()
    put(room, A, 60, 0.0)
    room.use(BlobKey("j", A), 15.0, confirm=True)
    with pytest.raises(StoreFull):
        put(room, B, 60, 24.0)
    assert put(room, B, 60, 25.0) == [A]
    assert (room.held, room.stored) == (60, 60)


def test_a_pinned_blob_is_kept_until_the_last_pin_ends() -> None:
    room = accounts()
    put(room, A, 60, 0.0)
    room.pin("one", "j", [A], 30.0, 0.0)
    room.pin("two", "j", [A], 20.0, 0.0)
    room.pin("two", "j", [A], 40.0, 19.0)  # renewed
    for now in (20.0, 30.0, 39.9):
        with pytest.raises(StoreFull, match="60 are pinned"):
            put(room, B, 60, now)
    assert put(room, B, 60, 40.0) == [A]
    assert room.pinned == 0


def test_a_pin_may_come_before_its_blob() -> None:
    room = accounts()
    room.pin("i", "j", [A], 100.0, 0.0)
    put(room, A, 60, 1.0)
    assert room.pinned == 60
    assert room.is_held(BlobKey("j", A), 50.0)
    assert not room.is_held(BlobKey("j", A), 100.0)


def test_a_pin_of_one_job_does_not_protect_the_blob_of_another() -> None:
    room = accounts()
    put(room, A, 40, 0.0, job="x")
    put(room, A, 40, 0.0, job="y")
    room.pin("i", "x", [A], 100.0, 0.0)
    room.admit(BlobKey("x", B), 40, "", 20.0)
    assert room.find(BlobKey("x", A)) is not None
    assert room.find(BlobKey("y", A)) is None


def test_a_reservation_keeps_room_for_its_holder() -> None:
    room = accounts()
    assert room.reserve("j", "controller", 70, 1000.0, 0.0)
    with pytest.raises(StoreFull, match="70 are reserved"):
        put(room, A, 40, 0.0)
    assert not room.reserve("j", "other", 40, 1000.0, 0.0)
    assert put(room, A, 40, 0.0, holder="controller") == []
    assert room.reserved(0.0) == 30
    assert room.reserve("j", "other", 30, 1000.0, 0.0)


def test_a_refused_reservation_leaves_the_previous_one_and_a_smaller_one_is_always_granted() -> None:
    room = accounts()
    assert room.reserve("j", "h", 60, 1000.0, 0.0)
    assert not room.reserve("j", "h", 101, 1000.0, 0.0)
    assert room.reserved(0.0) == 60
    room.add(BlobKey("j", A), 90, 0.0, verified=True)  # as after a restart
    assert room.reserve("j", "h", 50, 1000.0, 0.0)
    assert room.reserved(0.0) == 50


def test_reservations_expire_and_can_be_ended() -> None:
    room = accounts()
    room.reserve("j", "one", 50, 10.0, 0.0)
    room.reserve("j", "two", 50, 100.0, 0.0)
    assert room.reserved(10.0) == 50
    room.reserve("j", "two", 0, 0.0, 11.0)
    assert room.reserved(11.0) == 0


def test_a_cancelled_admission_gives_back_room_and_reservation() -> None:
    room = accounts()
    room.reserve("j", "h", 50, 100.0, 0.0)
    admission, _ = room.admit(BlobKey("j", A), 60, "h", 0.0)
    assert (room.incoming, room.reserved(0.0)) == (60, 0)
    room.cancel(admission)
    room.cancel(admission)
    assert (room.incoming, room.reserved(0.0)) == (0, 50)


def test_a_blob_larger_than_the_store_is_refused_as_such() -> None:
    with pytest.raises(BlobTooLarge, match="the blob has 101 bytes, but the whole store may have 100"):
        put(accounts(), A, 101, 0.0)


def test_a_dropped_job_leaves_nothing_and_its_arriving_blobs_are_refused() -> None:
    room = accounts()
    put(room, A, 20, 0.0)
    put(room, B, 20, 0.0, job="other")
    room.pin("i", "j", [A, C], 100.0, 0.0)
    room.reserve("j", "h", 20, 100.0, 0.0)
    admission, _ = room.admit(BlobKey("j", C), 20, "", 0.0)
    assert list(room.drop_job("j", 1.0)) == [BlobKey("j", A)]
    assert not room.store(admission, 1.0)
    assert (room.stored, room.held, room.pinned, room.incoming, room.reserved(1.0)) == (20, 20, 0, 0, 0)


def test_the_same_blob_from_two_clients_counts_once() -> None:
    room = accounts()
    one, _ = room.admit(BlobKey("j", A), 30, "", 0.0)
    two, _ = room.admit(BlobKey("j", A), 30, "", 0.0)
    assert room.store(one, 0.0)
    assert room.store(two, 0.0)
    assert (room.stored, room.incoming, len(room)) == (30, 0, 1)


def test_a_pin_that_ends_because_nothing_uses_the_blob_ends_its_grace_time() -> None:
    accounts = BlobAccounts(100, 50.0)
    for name in ("a", "b"):
        accounts.add(BlobKey("j", name), 40, 0.0, verified=True)
        accounts.pin("me", "j", [name], 90.0, 0.0)
    accounts.pin("other", "j", ["b"], 90.0, 0.0)
    assert not accounts.reserve("j", "me", 60, 90.0, 1.0)
    accounts.unpin("me", "j", ["a", "b"], 1.0, ends_grace=True)
    assert not accounts.is_held(BlobKey("j", "a"), 1.0)
    assert accounts.is_held(BlobKey("j", "b"), 1.0), "it has another pin"
    assert accounts.reserve("j", "me", 60, 90.0, 1.0)
    accounts.unpin("other", "j", ["b"], 2.0)
    assert accounts.is_held(BlobKey("j", "b"), 49.0), "the grace time goes on"
    assert not accounts.is_held(BlobKey("j", "b"), 50.0)

"""Tokens: their form, the user of a call with a token, and their creation, listing and revocation by an admin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.api.edge.access import (
    FIRST_ADMIN,
    NOBODY_IS_TOLD_APART,
    AccessService,
    Authenticator,
    Caller,
    Role,
    acting_as,
    read_token,
)
from controllers.api.edge.errors import Unauthenticated
from gcore.api.tokens import DEFAULT_S, KEPT_S, TokenRecord, UserToken, new_token, parse_token
from gcore.api.v1 import access_pb2 as pb
from gcore.errors import StoreUnavailable, UsageError
from gcore.store import keys
from gcore.store.types import Put, WatchBatch, WatchEvent
from gcore.testing import FakeClock, MemoryCluster, MemoryStore

ADMIN = Caller("root", Role.ADMIN)


class Refusing:
    """A call's context that keeps what it was refused with."""

    refused: Any = None

    async def abort(self, code: Any, said: str, trailing: Any = ()) -> None:
        self.refused = code.name, said
        raise Aborted


class Aborted(Exception):
    pass


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


async def heard(book: Authenticator, store: MemoryStore) -> None:
    listing = await store.list(keys.TOKENS)
    book.note(WatchBatch(tuple(WatchEvent("put", kv) for kv in listing.kvs), listing.revision, reset=True))


async def made(store: MemoryStore, clock: FakeClock, **fields: Any) -> pb.CreateTokenReply:
    request = pb.CreateTokenRequest(**({"name": "ada", "role": "viewer", "namespaces": ["vision"]} | fields))
    with acting_as(ADMIN):
        reply: pb.CreateTokenReply = await AccessService(store, clock).CreateToken(request, Refusing())
    return reply


def test_a_token_is_read_as_it_was_written_and_shows_nothing_of_itself() -> None:
    token = new_token()
    assert parse_token(token.text) == token
    assert token.secret not in repr(token)
    assert token.is_of(token.sha256)
    assert not token.is_of(new_token().sha256)


@given(st.text(max_size=80))
def test_any_other_text_is_no_token(text: str) -> None:
    found = parse_token(text)
    assert found is None or found.text == text


async def test_stored_token_identifies_its_user_without_the_secret(clock: FakeClock) -> None:
    store, book = MemoryStore(MemoryCluster(clock)), Authenticator(clock, required=True)
    reply = await made(store, clock)
    (kv,) = (await store.list(keys.TOKENS)).kvs
    assert reply.secret.rpartition("_")[2].encode() not in kv.value
    await heard(book, store)
    assert book.caller(f"Bearer {reply.secret}", None) == Caller("ada", Role.VIEWER, frozenset({"vision"}))
    assert reply.token.created_by == "root"
    assert reply.token.expires == clock.wall() + DEFAULT_S


@pytest.mark.parametrize(
    ("role", "namespaces", "seen"),
    [("admin", [], None), ("viewer", ["*"], None), ("submitter", ["a", "b", "a"], frozenset({"a", "b"}))],
)
async def test_an_admin_has_every_namespace_and_others_those_that_were_named(
    clock: FakeClock, role: str, namespaces: list[str], seen: Any
) -> None:
    store, book = MemoryStore(MemoryCluster(clock)), Authenticator(clock, required=True)
    reply = await made(store, clock, role=role, namespaces=namespaces)
    await heard(book, store)
    assert book.by_token(reply.secret).namespaces == seen


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"name": ""}, "name"),
        ({"name": "a/b"}, "name"),
        ({"role": "node"}, "role"),
        ({"role": ""}, "role"),
        ({"namespaces": []}, "namespaces"),
        ({"namespaces": ["A!"]}, "namespaces"),
        ({"role": "admin"}, "namespaces"),
        ({"lifetime_s": -1.0}, "lifetime_s"),
        ({"lifetime_s": float("nan")}, "lifetime_s"),
        ({"lifetime_s": 1e12}, "lifetime_s"),
    ],
)
async def test_invalid_token_requests_are_refused_by_field(
    clock: FakeClock, fields: dict[str, Any], named: str
) -> None:
    context, store = Refusing(), MemoryStore(MemoryCluster(clock))
    request = pb.CreateTokenRequest(**({"name": "ada", "role": "viewer", "namespaces": ["vision"]} | fields))
    with pytest.raises(Aborted):
        await AccessService(store, clock).CreateToken(request, context)
    assert context.refused[0] == "INVALID_ARGUMENT"
    assert named in context.refused[1]
    assert not (await store.list(keys.TOKENS)).kvs


async def test_an_expired_a_revoked_a_foreign_and_a_garbled_token_are_each_refused(clock: FakeClock) -> None:
    store, book = MemoryStore(MemoryCluster(clock)), Authenticator(clock, required=True)
    short, revoked = await made(store, clock, lifetime_s=60.0), await made(store, clock)
    await heard(book, store)
    assert book.by_token(revoked.secret).name == "ada"
    service, context = AccessService(store, clock), Refusing()
    await service.RevokeToken(pb.RevokeTokenRequest(id=revoked.token.id), context)
    with pytest.raises(Aborted):
        await service.RevokeToken(pb.RevokeTokenRequest(id=revoked.token.id), context)
    assert context.refused[0] == "NOT_FOUND"
    await heard(book, store)
    await clock.advance(61)
    other = UserToken(short.token.id, new_token().secret).text
    for shown, reason in [
        (short.secret, "TOKEN_EXPIRED"),
        (revoked.secret, "BAD_TOKEN"),
        (new_token().text, "BAD_TOKEN"),
        (other, "BAD_TOKEN"),
        (short.secret[:-1], "BAD_TOKEN"),
        ("", "BAD_TOKEN"),
    ]:
        with pytest.raises(Unauthenticated) as caught:
            book.caller(f"Bearer {shown}", None)
        assert caught.value.reason == reason
        assert short.secret not in str(caught.value)


async def test_missing_or_foreign_credentials_are_unauthenticated(clock: FakeClock) -> None:
    book = Authenticator(clock, required=True)
    for header, uris, reason in [
        (None, None, "NO_CREDENTIALS"),
        ("Basic YTpi", None, "BAD_TOKEN"),
        (None, [], "BAD_CERTIFICATE"),
        (None, ["gcore://user/a?role=node"], "BAD_CERTIFICATE"),
    ]:
        with pytest.raises(Unauthenticated) as caught:
            book.caller(header, uris)
        assert caught.value.reason == reason


async def test_a_certificate_says_who_it_is_and_a_token_counts_before_it(clock: FakeClock) -> None:
    store, book = MemoryStore(MemoryCluster(clock)), Authenticator(clock, required=True)
    reply = await made(store, clock)
    await heard(book, store)
    assert book.caller(None, ["gcore://node/n1"]) == Caller("n1", Role.NODE)
    assert book.caller(None, ["gcore://user/root?role=admin"]) == Caller("root", Role.ADMIN)
    assert book.caller(f"Bearer {reply.secret}", ["gcore://node/n1"]).role is Role.VIEWER


async def test_until_the_tokens_were_heard_of_a_call_is_told_to_come_again(clock: FakeClock, tmp_path: Path) -> None:
    first = new_token()
    file = tmp_path / "token"
    file.write_text(first.text + "\n")
    file.chmod(0o600)
    book = Authenticator(clock, required=True, admin_file=file)
    with pytest.raises(StoreUnavailable):
        book.by_token(new_token().text)
    assert book.by_token(first.text) == Caller(FIRST_ADMIN, Role.ADMIN)  # even without a store


async def test_where_nobody_is_told_apart_nothing_is_asked_for(clock: FakeClock) -> None:
    assert Authenticator(clock).caller("Bearer junk", None) is NOBODY_IS_TOLD_APART


async def test_records_that_cannot_be_read_count_for_nothing_and_hide_no_others(clock: FakeClock) -> None:
    store, book = MemoryStore(MemoryCluster(clock)), Authenticator(clock, required=True)
    reply, token = await made(store, clock), new_token()
    await store.transact([], [Put(keys.token("broken"), b"junk")])
    odd = TokenRecord(id=token.id, name="x", role="node", sha256=token.sha256, created=0, expires=1e12)
    await store.transact([], [Put(keys.token(token.id), odd.encode())])
    await heard(book, store)
    assert book.by_token(reply.secret).name == "ada"
    with pytest.raises(Unauthenticated):
        book.by_token(token.text)
    with acting_as(ADMIN):
        listed = await AccessService(store, clock).ListTokens(pb.ListTokensRequest(), Refusing())
    assert [one.name for one in listed.tokens] == ["?", "ada", "x"]


async def test_long_expired_tokens_are_deleted_when_another_is_created(clock: FakeClock) -> None:
    store = MemoryStore(MemoryCluster(clock))
    await made(store, clock, lifetime_s=60.0)
    await clock.advance(61 + KEPT_S)
    await made(store, clock, name="bob")
    assert [TokenRecord.decode(kv.value).name for kv in (await store.list(keys.TOKENS)).kvs] == ["bob"]


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        ("junk", 0o600, "the file contains no token"),
        (None, 0, "cannot be read"),
        ("", 0o600, "no token"),
        ("x", 0o644, "other users can read"),
    ],
)
def test_the_first_admins_file_is_checked_at_the_start(
    tmp_path: Path, content: str | None, mode: int, said: str
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
        file.chmod(mode)
    with pytest.raises(UsageError, match=said):
        read_token(file)


async def test_who_am_i_reports_the_caller(clock: FakeClock) -> None:
    service = AccessService(MemoryStore(MemoryCluster(clock)), clock)
    with acting_as(Caller("ada", Role.VIEWER, frozenset({"b", "a"}))):
        told = await service.WhoAmI(pb.WhoAmIRequest(), Refusing())
    assert (told.name, told.role, list(told.namespaces), told.namespace) == ("ada", "viewer", ["a", "b"], "a")
    told = await service.WhoAmI(pb.WhoAmIRequest(), Refusing())
    assert (told.name, told.role, list(told.namespaces)) == ("", "admin", ["*"])


@given(st.none() | st.text(max_size=300), st.none() | st.lists(st.text(max_size=60), max_size=3))
def test_credentials_give_a_caller_or_a_short_refusal(header: str | None, uris: Any) -> None:
    book = Authenticator(FakeClock(), required=True)
    book.note(WatchBatch((), 1, reset=True))
    try:
        found = book.caller(header, uris)
    except Unauthenticated as error:
        assert len(str(error)) < 1000  # noqa: PT017 - either is right
    else:
        assert header is None
        assert found.role in Role

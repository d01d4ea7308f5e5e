"""The list of jobs: the newest first, in pages whose tokens belong to their request."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from listed_jobs import create

from controllers.api import job_messages as listing
from controllers.api.edge.access import Caller, Role, acting_as
from controllers.api.edge.errors import BadFields, NamespaceNotFound
from controllers.api.job_messages import list_jobs, parse_query
from controllers.api.store_reader import StoreReader
from gcore.api.v1 import jobs_pb2 as pb
from gcore.ledger.records.job import JobPhase
from gcore.store.keys import JobKeys
from gcore.store.types import Put
from gcore.testing import FakeClock, MemoryCluster, MemoryStore


def listed(*requests: dict[str, Any], jobs: int = 7, caller: Caller | None = None) -> list[pb.ListJobsReply]:
    """The answers to one request after the other; a `page_token` of "next" is that of the answer before."""

    async def ask() -> list[pb.ListJobsReply]:
        store = MemoryStore(MemoryCluster(FakeClock()))
        for number in range(jobs):
            phase = JobPhase.CANCELLED if number % 3 == 0 else JobPhase.PENDING
            await create(store, f"u{number}", f"job-{number % 5}", phase)
        replies: list[pb.ListJobsReply] = []
        for request in requests:
            if request.get("page_token") == "next":
                request = request | {"page_token": replies[-1].next_page_token}
            replies.append(await list_jobs(StoreReader(store), pb.ListJobsRequest(**request)))
        return replies

    with acting_as(caller or Caller("", Role.ADMIN)):
        return asyncio.run(ask())


def uids(reply: pb.ListJobsReply) -> list[str]:
    return [job.uid for job in reply.jobs]


def test_the_newest_jobs_come_first_and_pages_have_each_job_once() -> None:
    first, second, third = listed(
        {"page_size": 3}, {"page_size": 3, "page_token": "next"}, {"page_size": 3, "page_token": "next"}
    )
    assert [uids(one) for one in (first, second, third)] == [["u6", "u5", "u4"], ["u3", "u2", "u1"], ["u0"]]
    assert third.next_page_token == ""


def test_large_jobs_are_fewer_on_a_page_and_none_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = listed({})
    monkeypatch.setattr(listing, "MOST_BYTES", sum(job.ByteSize() for job in whole.jobs[:2]))
    pages = listed({}, *[{"page_token": "next"}] * 3)
    assert [uids(one) for one in pages] == [["u6", "u5"], ["u4", "u3"], ["u2", "u1"], ["u0"]]
    assert [bool(one.next_page_token) for one in pages] == [True, True, True, False]


def test_one_page_has_all_where_there_are_few() -> None:
    (reply,) = listed({})
    assert uids(reply) == [f"u{number}" for number in range(6, -1, -1)]
    assert reply.next_page_token == ""


def test_filters_leave_out_what_does_not_fit() -> None:
    ended, named = listed({"states": [pb.JOB_STATE_CANCELLED]}, {"name_prefix": "job-1"})
    assert uids(ended) == ["u6", "u3", "u0"]
    assert uids(named) == ["u6", "u1"]


def test_jobs_of_a_namespace_that_nobody_uses_are_not_none_but_asked_for_in_vain() -> None:
    with pytest.raises(NamespaceNotFound, match="there is no namespace 'elsewhere'"):
        listed({"namespace": "elsewhere"})
    with pytest.raises(NamespaceNotFound, match="there is no namespace 'elsewhere'"):
        listed({"namespace": "elsewhere"}, caller=Caller("eve", Role.VIEWER, frozenset({"research"})))
    (own,) = listed({"namespace": "research"}, caller=Caller("eve", Role.VIEWER, frozenset({"research"})))
    assert uids(own) == []
    (none,) = listed({"namespace": "default", "states": [pb.JOB_STATE_SUCCEEDED]})
    assert uids(none) == []


def test_a_filter_that_nothing_passes_ends_its_call_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MOST_LOOKED_AT", 4)
    first, second = listed({"name_prefix": "x"}, {"name_prefix": "x", "page_token": "next"})
    assert (uids(first), uids(second)) == ([], [])
    assert first.next_page_token
    assert second.next_page_token == ""


def test_jobs_of_other_namespaces_are_not_listed() -> None:
    (reply,) = listed({}, caller=Caller("eve", Role.VIEWER, frozenset({"research"})))
    assert uids(reply) == []


def test_more_on_a_page_than_there_may_be_is_as_many_as_there_may_be() -> None:
    assert parse_query(pb.ListJobsRequest(page_size=10**6), None).size == listing.MOST_ON_A_PAGE


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a negative size": ({"page_size": -1}, "page_size"),
    "an unknown state": ({"states": [99]}, "states"),
    "no state": ({"states": [0]}, "states"),
    "a long prefix": ({"name_prefix": "x" * 300}, "name_prefix"),
    "a token that is none": ({"page_token": "!!!"}, "page_token"),
    "a token of another kind": ({"page_token": base64.b64encode(b'{"a": 1}').decode()}, "page_token"),
    "a deep token": ({"page_token": base64.b64encode(b"[" * 9999).decode()}, "page_token"),
    "a token of true": ({"page_token": base64.b64encode(b'[true, "x"]').decode()}, "page_token"),
}


@pytest.mark.parametrize(("request_", "field"), WRONG.values(), ids=WRONG)
def test_invalid_requests_name_the_field(request_: dict[str, Any], field: str) -> None:
    with pytest.raises(BadFields) as error:
        parse_query(pb.ListJobsRequest(**request_), None)
    assert [one.field for one in error.value.violations] == [field]


@pytest.mark.parametrize(
    "other",
    [{"name_prefix": "job"}, {"namespace": "x"}, {"states": [pb.JOB_STATE_FAILED]}],
    ids=["prefix", "namespace", "states"],
)
def test_the_token_of_another_list_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(BadFields, match="belongs to a list with other filters"):
        listed({"page_size": 2}, other | {"page_token": "next"})


def test_a_token_that_another_caller_was_given_is_refused() -> None:
    token = parse_query(pb.ListJobsRequest(), None).token(7)
    assert parse_query(pb.ListJobsRequest(page_token=token), None).before == 7
    with pytest.raises(BadFields, match="belongs to a list with other filters"):
        parse_query(pb.ListJobsRequest(page_token=token), frozenset({"research"}))


@given(st.binary(max_size=60) | st.text(max_size=40).map(lambda t: json.dumps([1, t]).encode()))
def test_no_token_of_a_strangers_is_taken_or_breaks_anything(data: bytes) -> None:
    for token in (data.decode(errors="replace"), base64.urlsafe_b64encode(data).decode()):
        if token:
            with pytest.raises(BadFields):
                parse_query(pb.ListJobsRequest(page_token=token), None)


def test_a_job_that_cannot_be_read_is_listed_with_the_reason() -> None:
    async def ask() -> pb.ListJobsReply:
        store = MemoryStore(MemoryCluster(FakeClock()))
        await create(store, "u1", "one")
        await store.transact((), (Put(JobKeys("u1").state, b"{}x"),))
        return await list_jobs(StoreReader(store), pb.ListJobsRequest())

    (job,) = asyncio.run(ask()).jobs
    assert (job.uid, job.name, job.state) == ("u1", "one", pb.JOB_STATE_UNSPECIFIED)
    assert "cannot read the job status" in job.reason

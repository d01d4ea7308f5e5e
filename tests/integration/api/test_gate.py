"""Authentication of a daemon's services over real gRPC and TLS: without a token or certificate only health answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import grpc.aio
import issued
import pytest
from gated import CLOCK, MADE, Code, EveryService, Served, ask, behind_the_gate, by_token, channel_to
from grpc_health.v1 import health_pb2, health_pb2_grpc

from controllers.api.edge.access import TABLE, Role
from gcore.api.authority import CertificateRequest, issue_certificate_into, renew_certificate
from gcore.api.rpc import NodesOnlyInterceptor, VersionGate, server_credentials, version_metadata
from gcore.api.tls import Connector, ReloadingFiles, TlsMaterial
from gcore.api.tokens import new_token
from gcore.api.v1 import jobs_pb2 as pb
from gcore.api.v1 import jobs_pb2_grpc
from gcore.client import JobsClient
from gcore.errors import Unreachable


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with behind_the_gate(tmp_path) as one:
        yield one


async def test_without_a_token_every_call_of_every_service_is_refused_and_health_is_answered(served: Served) -> None:
    nobody = by_token(served, "")
    for method in TABLE:
        assert await ask(nobody, served.people, method) == (Code.UNAUTHENTICATED, "NO_CREDENTIALS"), method
    assert served.service.served == []
    async with channel_to(nobody, f"127.0.0.1:{served.people}") as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("role", ["viewer", "submitter", "admin"])
async def test_each_role_is_served_what_the_table_says_verb_by_verb(served: Served, role: str) -> None:
    one = by_token(served, served.token(role, *([] if role == "admin" else ["vision"])))
    for method, row in TABLE.items():
        allowed = row.least <= Role[role.upper()]
        wanted = (Code.OK, "") if allowed else (Code.PERMISSION_DENIED, "PERMISSION_DENIED")
        assert await ask(one, served.people, method) == wanted, method
    assert {name for _, name in served.service.served} == {role}


async def test_a_nodes_certificate_is_served_everything_and_a_users_what_its_role_may(served: Served) -> None:
    node, user = Connector(issued.node(served.ca, "n2")), Connector(issued.user(served.ca, "bob", "viewer", "vision"))
    for method, row in TABLE.items():
        assert await ask(node, served.peers, method) == (Code.OK, "")
        code, _ = await ask(user, served.peers, method)
        assert code is (Code.OK if row.least is Role.VIEWER else Code.PERMISSION_DENIED)


GET = "/gcore.api.v1.Jobs/GetJob"


async def test_a_foreign_an_expired_and_no_certificate_do_not_get_through_the_handshake(
    served: Served, tmp_path: Path
) -> None:
    foreign = issued.user(issued.authority(tmp_path / "theirs"), "ada")
    ours = served.ca / "ca.pem"
    old = issued.user(served.ca, "old", begun=timedelta(days=30), days=3)
    for material in (replace(foreign, ca=ours), old, TlsMaterial(ours)):
        assert (await ask(Connector(material), served.peers, GET))[0] is Code.UNAVAILABLE
    assert (await ask(Connector(issued.user(served.ca, "ada")), served.peers, GET))[0] is Code.OK


async def test_a_server_of_another_authority_or_name_is_not_spoken_to(served: Served, tmp_path: Path) -> None:
    theirs = issued.authority(tmp_path / "theirs")
    token = served.token("admin")
    other = Connector(TlsMaterial(theirs / "ca.pem"), token=token)
    assert (await ask(other, served.people, GET))[0] is Code.UNAVAILABLE
    elsewhere = ReloadingFiles(issued.node(served.ca, "n9", hosts=("elsewhere",)))
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", server_credentials(elsewhere, mutual=False))
    await server.start()
    assert (await ask(by_token(served, token), port, GET))[0] is Code.UNAVAILABLE
    await server.stop(None)
    assert (await ask(Connector(token=token), served.people, GET))[0] is Code.UNAVAILABLE  # in the clear
    assert (await ask(by_token(served, token), served.people, GET))[0] is Code.OK


async def test_connection_errors_explain_the_problem_with_the_certificates(served: Served, tmp_path: Path) -> None:
    ours = TlsMaterial(served.ca / "ca.pem")
    foreign = issued.authority(tmp_path / "theirs")
    wrong = {
        "elsewhere": issued.node(served.ca, "n9", hosts=("elsewhere",)),
        "old": issued.node(served.ca, "n8", begun=timedelta(days=30), days=3),
    }
    server = grpc.aio.server()
    ports = {
        name: server.add_secure_port("127.0.0.1:0", server_credentials(ReloadingFiles(material), mutual=False))
        for name, material in wrong.items()
    }
    plain = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    for connector, port, said in [
        (Connector(TlsMaterial(foreign / "ca.pem")), served.people, "is not signed by the trusted authority"),
        (Connector(ours), ports["elsewhere"], "is not valid for this host name"),
        (Connector(ours), ports["old"], "its certificate has expired"),
        (Connector(ours), plain, "does not use TLS"),
        (Connector(ours), served.peers, "needs TLS, or a valid certificate"),
        (Connector(), served.people, "needs TLS, or a valid certificate"),
    ]:
        async with JobsClient([f"127.0.0.1:{port}"], clock=CLOCK, connector=connector) as client:
            with pytest.raises(Unreachable, match=said):
                await client.list_jobs()
    await server.stop(None)


async def test_a_certificate_of_the_authority_that_is_nobodys_is_told_so(served: Served) -> None:
    issue_certificate_into(
        served.ca / "etcd", served.ca, CertificateRequest("etcd", "etcd", ("h",), days=2), datetime.now(UTC)
    )
    etcd = Connector(issued.material(served.ca / "etcd"))
    assert await ask(etcd, served.peers, GET) == (Code.UNAUTHENTICATED, "BAD_CERTIFICATE")


async def test_expired_revoked_foreign_and_garbled_tokens_are_told_apart_and_hurt_nobody(served: Served) -> None:
    revoked = served.token("viewer", "vision")
    served.revoke(revoked)
    expired = served.token("viewer", "vision", seconds=-1)
    for token, reason in [
        (expired, "TOKEN_EXPIRED"),
        (revoked, "BAD_TOKEN"),
        (new_token().text, "BAD_TOKEN"),
        ("junk", "BAD_TOKEN"),
        ("x" * 5000, "BAD_TOKEN"),
    ]:
        assert await ask(by_token(served, token), served.people, GET) == (Code.UNAUTHENTICATED, reason)
    assert served.service.served == []
    assert await ask(by_token(served, served.token("viewer", "vision")), served.people, GET) == (Code.OK, "")


async def test_two_tokens_at_once_are_none(served: Served) -> None:
    good = served.token("admin")
    connector = by_token(served, good)
    address = f"127.0.0.1:{served.people}"
    async with channel_to(connector, address) as channel:
        twice = (*version_metadata(), *connector.metadata(address), *connector.metadata(address))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await jobs_pb2_grpc.JobsStub(channel).GetJob(pb.GetJobRequest(job="j"), metadata=twice, timeout=10)
    assert caught.value.code() is Code.UNAUTHENTICATED


async def test_a_stream_ends_when_its_token_is_revoked(served: Served) -> None:
    token = served.token("viewer", "vision")
    connector = by_token(served, token)
    address = f"127.0.0.1:{served.people}"
    served.service.between.clear()
    async with channel_to(connector, address) as channel:
        metadata = (*version_metadata(), *connector.metadata(address))
        stream = jobs_pb2_grpc.JobsStub(channel).WatchJob(pb.WatchJobRequest(job="j"), metadata=metadata, timeout=10)
        assert await stream.read() is not grpc.aio.EOF
        served.revoke(token)
        served.service.between.set()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()  # not one message more, however long ago the one before was
    assert caught.value.code() is Code.UNAUTHENTICATED


async def test_journal_records_changes_and_refusals_without_secrets(served: Served) -> None:
    token = served.token("submitter", "vision")
    one = by_token(served, token)
    await ask(one, served.people, "/gcore.api.v1.Jobs/CancelJob", job="job-7")
    await ask(one, served.people, GET)
    await ask(one, served.people, "/gcore.api.v1.Jobs/DrainNode")
    known, unknown = served.file, served.file.with_name("refused-calls.jsonl")
    await ask(by_token(served, ""), served.people, GET)
    while not unknown.exists():
        await CLOCK.sleep(0.01)  # a refusal may reach who asked before it is noted
    served.journal.close()
    told_of = [json.loads(line) for line in known.read_text().splitlines()]
    assert told_of[0]["job"] == "job-7"
    assert [(one["caller"], one["role"], one["verb"], one["outcome"]) for one in told_of] == [
        ("submitter", "submitter", "CancelJob", "OK"),
        ("submitter", "submitter", "DrainNode", "PERMISSION_DENIED"),
    ]
    assert all(one["peer"].startswith("ipv4:127.0.0.1:") for one in told_of)
    (refused,) = [json.loads(line) for line in unknown.read_text().splitlines()]
    assert (refused["verb"], refused["outcome"]) == ("GetJob", "UNAUTHENTICATED")
    assert token not in known.read_text() + unknown.read_text()


SUBJECTS = {"CreateJob": "", "DrainNode": "node", "SetQuota": "namespace", "CreateToken": "name", "RevokeToken": "id"}
"""The field with the subject of a changing verb. By default it is `job`; for a created job the answer has it."""


async def test_of_each_verb_that_changes_anything_it_is_noted_what_it_was_about(served: Served) -> None:
    admin = by_token(served, served.token("admin"))
    # Train ranks, whose verbs are in the table too, have no journal: no daemon serves them.
    verbs = [method for method, row in TABLE.items() if row.changes and ".TrainRank/" not in method]
    for method in verbs:
        field = SUBJECTS.get(method.rpartition("/")[2], "job")
        about = {field: f"the-{field}"} if field else {}
        assert await ask(admin, served.people, method, **about) == (Code.OK, "")
    served.journal.close()
    told_of = {one["verb"]: one.get("job") for one in map(json.loads, served.file.read_text().splitlines())}
    wanted = {verb: SUBJECTS.get(verb, "job") for verb in (method.rpartition("/")[2] for method in verbs)}
    assert told_of == {verb: f"the-{field}" if field else MADE for verb, field in wanted.items()}


async def test_journal_records_the_subject_of_a_users_refused_call(served: Served) -> None:
    viewer = by_token(served, served.token("viewer", "vision"))
    assert (await ask(viewer, served.people, "/gcore.api.v1.Jobs/SetQuota", namespace="speech"))[
        0
    ] is Code.PERMISSION_DENIED
    while not served.file.exists():
        await CLOCK.sleep(0.01)  # the refusal may reach who asked before it is noted
    served.journal.close()
    (one,) = map(json.loads, served.file.read_text().splitlines())
    assert (one["job"], one["outcome"]) == ("speech", "PERMISSION_DENIED")


async def test_a_renewed_certificate_counts_without_a_restart(served: Served) -> None:
    connector = by_token(served, served.token("admin"))
    assert (await ask(connector, served.people, GET))[0] is Code.OK
    renew_certificate(served.ca / "n1", served.ca, within_days=None, days=2, now=datetime.now(UTC))
    assert (await ask(connector, served.people, GET))[0] is Code.OK
    assert (await ask(Connector(issued.material(served.ca / "n1")), served.peers, GET))[0] is Code.OK
    (served.ca / "n1" / "cert.pem").write_text("junk")  # what was read before goes on to count
    assert (await ask(connector, served.people, GET))[0] is Code.OK


async def test_train_ranks_serve_nodes_and_nobody_else(tmp_path: Path) -> None:
    ca = issued.authority(tmp_path / "ca")
    service = EveryService()
    server = grpc.aio.server(interceptors=[NodesOnlyInterceptor(), VersionGate()])
    server.add_generic_rpc_handlers((service,))
    port = server.add_secure_port("127.0.0.1:0", server_credentials(ReloadingFiles(issued.node(ca, "n1")), mutual=True))
    await server.start()
    ranks = [method for method in TABLE if ".TrainRank/" in method]
    node, admin = Connector(issued.node(ca, "n2")), Connector(issued.user(ca, "ada"))
    for method in ranks:
        assert (await ask(node, port, method))[0] is Code.OK
        assert (await ask(admin, port, method))[0] is Code.PERMISSION_DENIED
        async with channel_to(admin, f"127.0.0.1:{port}") as channel:
            # Before a request has come, whose it is, is known.
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.stream_unary(method)(timeout=10)
            assert caught.value.code() is Code.PERMISSION_DENIED
    assert len(service.served) == len(ranks)
    async with channel_to(node, f"127.0.0.1:{port}") as channel:
        empty = channel.stream_unary("/gcore.api.v1.TrainRank/Release")()
        await empty.done_writing()
        with pytest.raises(grpc.aio.AioRpcError, match="has no request"):
            await empty
    await server.stop(None)

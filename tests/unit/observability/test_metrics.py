"""Metrics are counted, removed with their job, and served over HTTP."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gcore.errors import CannotListen
from gcore.ledger.transactions import TxnOutcome
from gcore.observability import http as serving
from gcore.observability.http import MOST_CONNECTIONS, is_own_name, serve_metrics
from gcore.observability.metrics import RESULTS, Metrics, MoveFigures
from gcore.observability.step_metrics import SOURCE_STATS, STEP_STATS


def labelled(metrics: Metrics) -> Iterator[str]:
    for family in metrics.registry.collect():
        yield from (f"{sample.name}{sample.labels}" for sample in family.samples)


def test_a_forgotten_job_leaves_nothing_behind() -> None:
    metrics = Metrics()
    before = set(labelled(metrics))
    metrics.step.labels("sums").set(7)
    for gauge in (metrics.lineage, metrics.members, metrics.shards_owned, metrics.groups_in_flight):
        gauge.labels("sums").set(1)
    metrics.groups_offered.labels("sums").set(1)
    metrics.show_split("sums", {"rollout": 3, "train": 1})
    metrics.show_move("sums", "split", MoveFigures(1.0, -0.5, 2.0, 3.0))
    metrics.show_parts("sums", {"length": 0.5})
    metrics.show_evaluation("sums", "held-out", {"pass@4": 0.5})
    metrics.expected.labels("sums").set(4.0)
    metrics.show_stats("sums", {"seconds": 4.0, "train_s": 1.0, "collect_s": 3.0})
    metrics.show_waits("sums", {"train": 3.0, "peers": 1.0})
    metrics.show_stats("sums", dict.fromkeys(STEP_STATS, 0.5) | {"no_metric_for_this": 1.0})
    metrics.show_source("sums", "easy", dict.fromkeys(SOURCE_STATS, 0.5) | {"no_metric_for_this": 1.0}, {"trained": 3})
    metrics.show_source("sums", "hard", {"accuracy": 0.5}, {"filtered": 1, "failed": 0})
    assert {"sums"} == {
        sample.labels["job"] for f in metrics.registry.collect() for sample in f.samples if "job" in sample.labels
    }
    assert "gcore_accuracy_ratio{'job': 'sums'}" in set(labelled(metrics))
    metrics.forget_job("sums")
    metrics.forget_job("another")
    assert {name for name in labelled(metrics) if not name.startswith(("gcore_waiting", "gcore_stalls"))} == before


def test_two_catalogues_do_not_share_counts() -> None:
    one, other = Metrics(), Metrics()
    one.transactions.labels(kind="seal", result="won").inc()
    labels = {"kind": "seal", "result": "won"}
    assert one.registry.get_sample_value("gcore_transactions_total", labels) == 1
    assert other.registry.get_sample_value("gcore_transactions_total", labels) is None


def test_waits_are_counted_by_cause_and_their_seconds_summed() -> None:
    metrics = Metrics()

    def seen(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    metrics.show_waits("one", {"train": 2.0, "peers": 1.0})
    metrics.show_waits("other", {"train": 0.5})
    assert (seen("gcore_waiting", cause="train"), seen("gcore_waiting", cause="peers")) == (2, 1)
    metrics.show_waits("one", {"train": 3.0})
    assert (seen("gcore_waiting", cause="train"), seen("gcore_waiting", cause="peers")) == (2, 0)
    assert seen("gcore_waiting_seconds_total", cause="train") == 3.5
    assert seen("gcore_job_waiting_seconds", job="one", cause="train") == 3.0
    metrics.show_waits("one", {"train": 1.0})  # it was over, and has begun again
    assert seen("gcore_waiting_seconds_total", cause="train") == 4.5
    metrics.forget_job("one")
    metrics.forget_job("other")
    assert seen("gcore_waiting", cause="train") == 0


def test_workers_that_are_gone_are_shown_no_more() -> None:
    metrics = Metrics()
    metrics.show_cluster(3, {("rollout", "serving"): 2, ("train", "starting"): 1})
    assert metrics.registry.get_sample_value("gcore_nodes") == 3
    metrics.show_cluster(2, {("rollout", "serving"): 1})
    found = {str(s.labels): s.value for f in metrics.registry.collect() for s in f.samples if s.name == "gcore_workers"}
    assert found == {"{'pool': 'rollout', 'state': 'serving'}": 1}


def test_metrics_are_served_over_http_as_prometheus_reads_them() -> None:
    metrics = Metrics()
    metrics.stalls.labels("train").inc(3)
    server = serve_metrics(metrics)
    try:
        with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=30) as answer:
            families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    finally:
        server.close()
    assert [s.value for s in families["gcore_stalls"].samples if s.name.endswith("_total")] == [3]
    assert families["process_start_time_seconds"].samples[0].value > 1e9


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            CannotListen, match=rf"127\.0\.0\.1:{port} .*in use.*choose another address or port in the configuration"
        ):
            serve_metrics(Metrics(), port=port)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_every_address_is_of_either_family(host: str) -> None:
    server = serve_metrics(Metrics(), host)
    port = server.address.rpartition(":")[2]
    try:
        assert {asked(f"{own}:{port}") for own in ("127.0.0.1", "[::1]")} == {200}
    finally:
        server.close()


def test_a_closed_server_gives_its_port_back() -> None:
    server = serve_metrics(Metrics())
    server.close()
    again = serve_metrics(Metrics(), port=int(server.address.rpartition(":")[2]))
    again.close()
    assert again.address == server.address


def asked(server: str, path: str = "/metrics", method: str = "GET", **headers: str) -> int:
    request = urllib.request.Request(f"http://{server}{path}", headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_invalid_requests_are_refused() -> None:
    server = serve_metrics(Metrics())
    try:
        assert asked(server.address) == 200
        assert asked(server.address, method="HEAD") == 405
        assert asked(server.address, method="POST") == 405
        assert asked(server.address, "/metrics/../etc/passwd") == 404
        assert asked(server.address, "/") == 404
        assert asked(server.address, Host="evil.example") == 403
    finally:
        server.close()


@pytest.mark.parametrize(
    ("host", "asked_for", "own"),
    [
        ("127.0.0.1", "127.0.0.1:9000", True),
        ("127.0.0.1", "localhost:9000", True),
        ("::1", "[::1]:9000", True),
        ("127.0.0.1", "", True),
        ("127.0.0.1", "evil.example:9000", False),
        ("localhost", "127.0.0.1.evil.example", False),
        ("0.0.0.0", "node-a.example:9000", True),
    ],
)
def test_on_loopback_only_its_own_names_are_answered_to(host: str, asked_for: str, own: bool) -> None:
    assert is_own_name(host, asked_for) is own


def test_connections_that_say_nothing_make_room_for_who_asks_the_oldest_first() -> None:
    server = serve_metrics(Metrics())
    host, _, port = server.address.rpartition(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(MOST_CONNECTIONS + 10)]
    try:
        for one in idle[:10]:
            one.settimeout(20)
            assert one.recv(1) == b"", "the oldest are cut off"
        assert asked(server.address) == 200
        assert asked(server.address) == 200
    finally:
        for one in idle:
            one.close()
        server.close()


def test_waiting_client_keeps_its_connection_and_one_too_many_is_closed() -> None:
    server = serve_metrics(Metrics())
    host, _, port = server.address.rpartition(":")
    busy = [socket.create_connection((host, int(port))) for _ in range(MOST_CONNECTIONS)]
    try:
        for one in busy:
            one.sendall(b"GET /metrics HTTP/1.1\r\n")  # its headers are still to come
        for _ in range(500):
            if len(server._server._asked) == MOST_CONNECTIONS:
                break
            threading.Event().wait(0.02)
        with socket.create_connection((host, int(port))) as late:
            late.settimeout(20)
            assert late.recv(1) == b""
        busy[0].settimeout(20)
        busy[0].sendall(b"\r\n")
        assert busy[0].recv(12) == b"HTTP/1.0 200"
    finally:
        for one in busy:
            one.close()
        server.close()


def test_slow_sender_is_disconnected_eventually(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes before the connection would be taken for silent."""
    monkeypatch.setattr(serving, "LONGEST_S", 0.3)
    server = serve_metrics(Metrics())
    host, _, port = server.address.rpartition(":")
    try:
        with socket.create_connection((host, int(port))) as line:
            line.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
            line.settimeout(0.05)
            for _ in range(2000):
                try:
                    line.sendall(b"x")
                    if line.recv(1) == b"":
                        break
                except TimeoutError:
                    continue
                except OSError:
                    break
            else:
                raise AssertionError("the connection never closes")
        assert asked(server.address) == 200
    finally:
        server.close()


def test_counters_exist_before_their_first_increment() -> None:
    """A series that begins at 1 has no increase, so an alert on it would never hear of the first time."""
    metrics = Metrics()

    def seen(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    for result in ("registered", "forgotten", "failed"):
        assert seen("gcore_checkpoints_total", result=result) == 0
    for outcome in ("trained", "filtered", "failed"):
        assert seen("gcore_prompt_outcomes_total", outcome=outcome) == 0
    assert seen("gcore_engine_requests_total", pool="rollout", result="unreachable") == 0
    metrics.count_transaction("commit", "won")
    assert seen("gcore_transactions_total", kind="commit", result="won") == 1
    assert seen("gcore_transactions_total", kind="commit", result="stale") == 0
    metrics.show_waits("sums", {"train": 1.0})
    assert seen("gcore_stalls_total", cause="train") == 0
    metrics.know_judge("tutor")
    assert seen("gcore_judge_questions_total", judge="tutor", result="away") == 0
    assert seen("gcore_judge_unreadable_total", judge="tutor") == 0


def test_the_results_of_a_transaction_are_those_that_there_are() -> None:
    assert set(RESULTS) == {outcome.value for outcome in TxnOutcome}

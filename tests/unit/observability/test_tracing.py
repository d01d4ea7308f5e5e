"""Steps as spans: one trace per step over all nodes, sent to a collector over HTTP; without the extra, one sentence."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_collector import Collector

from gcore.errors import UsageError
from gcore.ledger.records.slot_accounting import AccountLine, Span, StepAccount
from gcore.observability import tracing as otel
from gcore.observability.tracing import StepTraces, step_span, trace_id
from gcore.types import Version


def line(node: str, step: int = 7, lineage: int = 0, began: float = 1000.0) -> AccountLine:
    book = StepAccount(
        version=Version(lineage, step),
        began=began,
        seconds=4.0,
        slots=2,
        booked={"busy rollout": 5.0, "idle rollout tail": 2.5},
        unbooked=0.5,
    )
    phases = (Span(0.0, 3.0, {"tail": 3.0}), Span(3.0, 3.0, {"barrier": 0.0}), Span(3.0, 4.0, {}))
    return AccountLine(node, book, phases)


@given(st.text(max_size=40), st.integers(0, 9), st.integers(0, 10**6))
def test_nodes_agree_on_the_trace_of_a_step_and_no_two_steps_share_one(uid: str, lineage: int, step: int) -> None:
    one, other = trace_id(uid, line("a", step, lineage)), trace_id(uid, line("b", step, lineage, began=5.0))
    assert one == other
    assert 0 < one < 2**128
    assert len({one, trace_id(uid, line("a", step + 1, lineage)), trace_id(uid, line("a", step, lineage + 1))}) == 3


def test_a_step_is_a_span_with_its_slots_seconds_and_a_span_for_each_phase() -> None:
    told = step_span("sums", "1a", line("node-1"))
    assert (told.name, told.begin, told.end) == ("step 7", 1000 * 10**9, 1004 * 10**9)
    assert told.attributes["gcore.slots"] == 2
    assert told.attributes["gcore.slot_seconds.busy.rollout"] == 5.0
    assert told.attributes["gcore.slot_seconds.unbooked"] == 0.5
    assert (told.attributes["gcore.job"], told.attributes["gcore.node"]) == ("sums", "node-1")
    assert [(one.name, one.begin - told.begin, one.end - told.begin) for one in told.within] == [
        ("tail", 0, 3 * 10**9),
        ("not known", 3 * 10**9, 4 * 10**9),
    ]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


def test_two_nodes_send_one_trace_a_step(collector: Collector) -> None:
    for node in ("node-1", "node-2"):
        traces = StepTraces(f"{collector.url}/", node)
        for step in (7, 8):
            traces.tell("sums", "1a", line(node, step))
        traces.close()
    assert collector.paths == {"/v1/traces"}
    spans = collector.spans
    assert len(spans) == 2 * 2 * 3
    assert set(collector.by_trace) == {trace_id("1a", line("x", step)) for step in (7, 8)}
    assert len({span.span_id for span in spans}) == len(spans)
    for whole in collector.by_trace.values():
        steps = {span.span_id for span in whole if not span.parent_span_id}
        assert len(steps) == 2
        assert {span.parent_span_id for span in whole if span.parent_span_id} == steps
    assert collector.services == {"gcore"}


def test_a_collector_that_is_away_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "PATIENCE_S", 0.2)
    traces = StepTraces("http://127.0.0.1:9", "node-1")
    for step in range(3 * otel.QUEUE // 3):
        traces.tell("sums", "1a", line("node-1", step))
    traces.close()


def test_without_the_extra_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"opentelemetry.*, which is not installed.*pip install 'gcore\[otel\]'"):
        StepTraces("http://127.0.0.1:4318", "node-1")

"""Counters at their source: checkpoints, requests to engines, calls to the store."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from builders import running_job, stored

from controllers.changes import ChangeSignal
from controllers.inference.requests import count_request
from controllers.job import reconciler as deeds
from controllers.job.reconciler import ActionsInFlight
from controllers.rules.actions import (
    Action,
    ActionResult,
    Intent,
    PostWarning,
    PublishWeights,
    RegisterCheckpoint,
    RetainCheckpoints,
    SleepEngine,
    WakeEngine,
)
from controllers.rules.retention import CHECKPOINT_TROUBLE
from gcore.errors import EngineError, EngineUnreachable, StoreUnavailable
from gcore.ledger.records.chain import Checkpoint, Checkpoints
from gcore.ledger.transactions import TxnOutcome
from gcore.observability.metrics import InstrumentedStore, Metrics
from gcore.testing import FakeClock, MemoryCluster, MemoryStore, PerfectNetwork
from gcore.types import Sample, Version, VersionSpan

FIRST = Checkpoint(lineage=0, step=0, seq=0, file="")
NEXT = Checkpoint(lineage=0, step=2, seq=2, file="checkpoints/0-2")


NO_EFFECTS: Any = None
"""Actions without effects."""


async def fail(reason: str) -> None:
    """No action here ends the job."""
    pytest.fail(reason)


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, labels) or 0.0


@pytest.mark.parametrize(
    ("action", "result", "count"),
    [
        (RegisterCheckpoint(NEXT), "registered", 1),
        (RetainCheckpoints((FIRST,)), "forgotten", 1),
        (PostWarning(CHECKPOINT_TROUBLE, "the disk is full"), "failed", 1),
        (PostWarning("damaged", "it is not whole"), "failed", 0),
    ],
)
async def test_checkpoints_are_counted_by_what_was_done_of_them_and_not_by_what_was_tried(
    action: Action, result: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = running_job()
    known = stored(Checkpoints(entries=(FIRST, NEXT)))
    view = replace(view, mirror=replace(view.mirror, checkpoints=known))
    metrics, outcomes = Metrics(), [TxnOutcome.STALE, TxnOutcome.UNKNOWN, TxnOutcome.WON]

    async def applied(*_: Any) -> ActionResult:
        return ActionResult(outcomes.pop(0), "done", 9)

    monkeypatch.setattr(deeds, "apply_action", applied)
    changes = ChangeSignal()
    job: Any = SimpleNamespace(uid="u", changes=changes, mirror=view.mirror, look_anew=lambda: None)
    doer = ActionsInFlight(job, NO_EFFECTS, fail, metrics, FakeClock())
    while outcomes:
        before = len(outcomes)
        await doer.carry_out(Intent(action, "topic"), view)
        while len(outcomes) == before:  # noqa: ASYNC110 - a deed in the background has nobody to wait for
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert value(metrics, "gcore_checkpoints_total", result=result) == count


async def test_executor_accepts_actions_again_after_the_write_was_received(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the driver would look five times a second, for seconds after everything it does."""

    async def applied(*_: Any) -> ActionResult:
        return ActionResult(TxnOutcome.WON, "done", 9)

    monkeypatch.setattr(deeds, "apply_action", applied)
    view, changes = running_job(), ChangeSignal()
    job: Any = SimpleNamespace(uid="u", changes=changes, mirror=view.mirror, look_anew=lambda: None)
    doer = ActionsInFlight(job, NO_EFFECTS, fail, Metrics(), FakeClock())
    await doer.carry_out(Intent(RegisterCheckpoint(NEXT), "topic"), view)
    doer.forget_what_is_over(0.0)
    assert (doer.held_off, doer.under_way()) == (True, {"topic"})
    job.mirror = replace(view.mirror, revision=9)
    doer.forget_what_is_over(0.0)
    assert (doer.held_off, doer.under_way()) == (False, frozenset())


@pytest.mark.parametrize("action", [WakeEngine("e", ""), SleepEngine("e", ""), PublishWeights("e", Version(0, 1))])
async def test_action_without_a_write_does_not_wait_for_a_notification(
    action: Action, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or an engine that has woken would be brought no weights until somebody happened to write something."""

    async def applied(*_: Any) -> ActionResult:
        return ActionResult(TxnOutcome.WON, "done")

    monkeypatch.setattr(deeds, "apply_action", applied)
    view = running_job()
    job: Any = SimpleNamespace(uid="u", changes=ChangeSignal(), mirror=view.mirror, look_anew=lambda: None)
    doer = ActionsInFlight(job, NO_EFFECTS, fail, Metrics(), FakeClock())
    await doer.carry_out(Intent(action, "topic"), view)
    assert doer.under_way() == {"topic"}
    for _ in range(5):
        await asyncio.sleep(0)
    assert doer.under_way() == frozenset()


def sample(reason: Any) -> Sample:
    return Sample((1, 2), (0.0, 0.0), "ab", reason, (VersionSpan(Version(0, 1), 0, 2),))


@pytest.mark.parametrize(
    ("brings", "result"),
    [
        ((sample("stop"), sample("length")), "ok"),
        ((sample("stop"), sample("abort")), "aborted"),
        (EngineUnreachable("gone"), "unreachable"),
        (EngineError("no"), "refused"),
        (asyncio.CancelledError(), "aborted"),
    ],
    ids=["ok", "aborted", "unreachable", "refused", "given up"],
)
@pytest.mark.parametrize("pool", ["rollout", "reward"])
async def test_requests_to_engines_are_counted_by_what_came_of_them(brings: Any, result: str, pool: Any) -> None:
    metrics = Metrics()

    async def request() -> tuple[Sample, ...]:
        if isinstance(brings, BaseException):
            raise brings
        return tuple(brings)

    asked = count_request(request(), metrics, FakeClock(), pool, lambda samples: samples)
    (outcome,) = await asyncio.gather(asked, return_exceptions=True)
    assert type(outcome) is type(brings)
    results = ("ok", "aborted", "unreachable", "refused")
    counts = {r: value(metrics, "gcore_engine_requests_total", pool=pool, result=r) for r in results}
    assert counts == {r: float(r == result) for r in results}
    made = 2 if isinstance(brings, tuple) and pool == "rollout" else 0  # what judges write is no sample
    assert value(metrics, "gcore_samples_total") == made
    assert value(metrics, "gcore_generated_tokens_total") == 2 * made
    assert value(metrics, "gcore_engine_request_seconds_count", pool=pool) == 1


async def test_calls_to_the_store_are_counted_with_those_that_had_no_answer() -> None:
    clock, metrics = FakeClock(), Metrics()
    store = InstrumentedStore(MemoryStore(MemoryCluster(clock), network=PerfectNetwork(clock)), metrics, clock)
    assert await clock.run(store.get("k")) is None
    assert (await clock.run(store.list(""))).kvs == ()

    class Away:
        async def get(self, key: str) -> None:
            raise StoreUnavailable("away")

    gone: Any = Away()
    with pytest.raises(StoreUnavailable):
        await InstrumentedStore(gone, metrics, clock).get("k")
    assert value(metrics, "gcore_store_call_seconds_count", operation="get") == 2
    assert value(metrics, "gcore_store_call_seconds_count", operation="list") == 1
    assert value(metrics, "gcore_store_unavailable_total", operation="get") == 1

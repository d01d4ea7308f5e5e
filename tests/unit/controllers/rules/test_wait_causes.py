"""Each cause of docs/operate/failures.md: the view, `gcore describe`, events and metrics name it, the events within the documented time.

The views are of one controller, as its records, engines, ranks and pools would make them; production's code makes all texts.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import job_record, running_job, sealed_job, stored, with_mirror
from rich.console import Console

from controllers.api.job_messages import JobsServiceBase
from controllers.cli.output import job_rows, job_snapshot, job_tree
from controllers.cli.view.live import render_view
from controllers.cli.view.state import ViewState
from controllers.rules.view import EngineView, JobView, RankView, Timers
from controllers.rules.waits import PATIENCE_S, Wait, current_waits
from controllers.telemetry.notices import WaitReporter
from gcore.config.rollout import AgentSpec
from gcore.ledger.collectives import Part
from gcore.ledger.records.cluster import Claim, KnownShare, Shares
from gcore.ledger.records.job import JobPhase, JobStatus, ModelFetch
from gcore.observability.metrics import Metrics
from gcore.testing import FakeClock
from gcore.train.rank.feed import Fetching
from gcore.types import PromptRef, Version
from gcore.worker.sandbox.pool import PoolStatus

ROOT = Path(__file__).parents[4]
NOTHING_TOLD = ("in_flight", "paused")
"""Causes of which no event tells: prompts in flight for long are given up, and who paused a job knows it."""
AT_ONCE = ("engine",)
"""Causes that have been waited for before they are one."""


def judged() -> JobView:
    """A judge's engine answers nothing."""
    return replace(running_job(), judge_pool=PoolStatus(2, 7, "2 questions wait for judge 'tutor'"))


def without_slots(claim: Claim) -> JobView:
    """Time does not advance."""
    view = running_job()
    assert view.mirror.plan is not None
    plan = view.mirror.plan.record.model_copy(update={"ranks": (), "engines": (), "stands_still": True})
    return replace(with_mirror(view, plan=stored(plan)), claim=claim, share=KnownShare("u", Shares(), 1))


def evaluated() -> JobView:
    view = running_job()
    spec = view.spec.model_copy(update={"eval": view.spec.eval.model_copy(update={"path": "held-out.jsonl"})})
    return replace(view, spec=spec)


def over() -> JobView:
    view = running_job()
    head = view.head.model_copy(update={"step": view.spec.flow.steps})
    return with_mirror(view, head=stored(head))


def waits_for_peer() -> JobView:
    view = running_job()
    part = Part(incarnation=view.me, at=view.head.version, given={"tried": 3})
    return with_mirror(view, parts={view.me: stored(part)})


def left_over() -> JobView:
    view = running_job()
    head = view.head.model_copy(update={"step": 2})
    view = with_mirror(view, head=stored(head))
    return replace(view, rules=replace(view.rules, staleness=2), in_flight={PromptRef(0, 0, 1): Version(0, 1)})


def fetching() -> JobView:
    fetch = ModelFetch(node="node-1", path="hf://owner/name", done=1_000_000, total=4_000_000)
    view = running_job()
    joined = {view.me: view.mirror.members[view.me]}
    return with_mirror(view, fetches={"node-1": stored(fetch)}, members=joined)


def with_agent() -> JobView:
    view = running_job()
    pool = PoolStatus(3, 7, "3 responses wait for a process of agent 'solver'")
    return replace(view, spec=view.spec.model_copy(update={"agent": AgentSpec(name="solver")}), tool_pool=pool)


def fetching_blobs() -> JobView:
    view = sealed_job()
    assert view.seal is not None
    fetching = {view.seal.groups[0].digest: Fetching(frozenset({0}), 3_000_000, 0)}
    return replace(view, ranks={0: RankView(0, holding=view.seal.token, fetching=fetching)})


CAUSES: dict[str, Callable[[], JobView]] = {
    "slots": lambda: without_slots(Claim()),
    "paused": lambda: without_slots(Claim(paused=True)),
    "store": lambda: replace(running_job(), store_trouble="the store's database is full"),
    "start": lambda: with_mirror(running_job(), status=stored(JobStatus(phase=JobPhase.PENDING)), head=None),
    "model": fetching,
    "material": lambda: replace(running_job(), missing_input="train.jsonl: cannot read the file"),
    "node": lambda: replace(running_job(), outdated_nodes={"node-9": 2}),
    "train_world": lambda: replace(running_job(), workers={}),
    "engines": lambda: replace(running_job(), engines={"e": EngineView("e", "h:1", None)}),
    "engine": lambda: replace(
        running_job(),
        engines={"e": EngineView("e", "h:1", Version(0, 0), silent=True, why="has answered nothing for 30 s")},
    ),
    "peers": waits_for_peer,
    "evaluation": evaluated,
    "groups": running_job,
    "order": lambda: replace(running_job(), is_ordering=True),
    "reward": lambda: replace(running_job(), reward_pool=PoolStatus(4, 7, "4 responses wait to be scored by 'r'")),
    "judge": judged,
    "agent": with_agent,
    "tools": lambda: replace(running_job(), tool_pool=PoolStatus(3, 7, "3 calls wait for a process of the tools")),
    "exchange": sealed_job,
    "blobs": fetching_blobs,
    "train": lambda: sealed_job(ready=True, fed=(0, 1)),
    "finish": over,
    "in_flight": left_over,
    "recovery": lambda: replace(running_job(), under_way=frozenset({"world w []"})),
    "tidying": lambda: replace(running_job(), under_way=frozenset({"prune 3"})),
}


@dataclass
class Told:
    """The job as its reporter sees it; `noted`: the warnings, by topic."""

    view: JobView
    waits: Timers = field(default_factory=lambda: Timers({}))
    noted: dict[str, str] = field(default_factory=dict)

    def look(self) -> JobView:
        return self.view

    @property
    def warnings(self) -> Any:
        return SimpleNamespace(note=self.noted.__setitem__)


def view_for(cause: str) -> JobView:
    spec = running_job().spec.model_dump(mode="json", exclude_defaults=True)
    return with_mirror(CAUSES[cause](), job=stored(job_record().model_copy(update={"spec": spec})))


def wait_for(cause: str) -> Wait:
    return next(wait for wait in current_waits(view_for(cause)) if wait.cause == cause)


def test_the_table_has_each_cause_of_the_page_and_of_the_code() -> None:
    page = (ROOT / "docs" / "operate" / "failures.md").read_text().partition("## Every wait")[2].partition("\n## ")[0]
    rows = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert rows == PATIENCE_S.keys()
    assert CAUSES.keys() == rows | {*NOTHING_TOLD, *AT_ONCE}
    seconds = {cause: float(s) for cause, s in re.findall(r"^\| `(\w+)` \|[^|]*\| (\d+) s \|", page, re.MULTILINE)}
    assert seconds == dict(PATIENCE_S), "the page states the times"


@pytest.mark.parametrize("cause", CAUSES)
def test_metrics_name_it_at_once_and_an_event_after_its_time(cause: str) -> None:
    """Whichever of the peers tells it."""
    view, metrics = view_for(cause), Metrics()
    told: dict[str, str] = {}
    patience = 0.0 if cause in AT_ONCE else PATIENCE_S.get(cause, 600.0)
    for me in view.mirror.members or (view.me,):
        job = Told(replace(view, me=me))
        reporter = WaitReporter(job, metrics, FakeClock())  # type: ignore[arg-type]
        looks = [0.0] if cause in AT_ONCE else [0.0, patience - 1.0]
        for now in looks:
            reporter.look(job.view, (), now)
            assert cause in AT_ONCE or not [topic for topic in job.noted if topic.startswith(f"wait-{cause}")]
        reporter.look(job.view, (), patience + 1.0)
        told |= job.noted
    assert view.mirror.job is not None
    labels = {"job": view.mirror.job.record.full_name, "cause": cause}
    assert metrics.registry.get_sample_value("gcore_job_waiting_seconds", labels) == patience + 1.0
    topics = {topic: said for topic, said in told.items() if topic in (f"wait-{cause}", f"wait-{cause}-{view.node}")}
    if cause in NOTHING_TOLD:
        assert topics == {}
    else:
        (said,) = topics.values()
        assert said.endswith(tuple(wait.what for wait in current_waits(view) if wait.cause == cause))


@pytest.mark.parametrize("cause", CAUSES)
async def test_describe_and_the_view_name_it(cause: str) -> None:
    view, wait, clock = view_for(cause), wait_for(cause), FakeClock()
    waits = Timers({}).note([wait.key], clock.monotonic())
    await clock.advance(5.0)  # it lasts longest, and so it is shown first
    runner = SimpleNamespace(is_working=True, node=view.node, look=lambda: view, waits=waits)

    class Jobs:
        async def mirror(self, uid: str) -> Any:
            return view.mirror

        async def shares(self) -> None:
            return None

        async def claim(self, uid: str) -> None:
            return None

    service = JobsServiceBase(Jobs(), None, lambda uid: runner, clock)  # type: ignore[arg-type]
    message = await service._describe("u")
    assert (cause, view.node, wait.what) in [(told.cause, told.who, told.what) for told in message.waiting]
    shown = job_snapshot(message)
    assert cause in [told["cause"] for told in job_tree(shown)["waiting"]]
    rows = {name: str(row) for name, row in job_rows(shown, 5.0).items()}
    assert any(wait.what in row for row in rows.values()), rows
    drawn = io.StringIO()
    console = Console(file=drawn, width=400, height=60)
    console.print(render_view(ViewState().observe(shown), 5.0, width=400))
    assert wait.what[:60] in drawn.getvalue()

"""The table of faults: what it holds, what it runs, what it skips, what it concludes. Nothing is broken here."""

from __future__ import annotations

import contextlib
import importlib.util
import random
import re
from collections.abc import AsyncIterator, Callable
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import chaos_faults
import chaos_run
import pytest
from chaos_cluster import ChaosCluster, ChaosFailed, NobodyHit
from chaos_faults import FAULTS, RECOVERY_GOAL_S, Fault, Told
from chaos_run import LAST_STEPS, Moment
from hypothesis import given
from hypothesis import strategies as st

from controllers.housekeeping import KEEP_LOG, PRUNE_AT
from gcore.fault_points import At
from gcore.ledger.guarded import TxnKind

ROOT = Path(__file__).parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("chaos_table", ROOT / "tests" / "chaos" / "table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


table = load()


def result(fault: str, seed: int, *, ok: bool = True, **more: Any) -> dict[str, Any]:
    return {"fault": fault, "seed": seed, "ok": ok, "after_step": 1, "delay_s": 0.5, "seconds": 9.0} | more


def test_names_are_unique_and_each_fault_has_one_way_to_act() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)
    assert all((fault.act is None) != (fault.whole is None) for fault in FAULTS)


def test_a_fault_at_random_moments_has_at_least_five() -> None:
    runs = [fault.name for fault, _ in table.planned(FAULTS, 5)]
    fewer = {name for name in runs if runs.count(name) < 5}
    exact = {fault.name for fault in FAULTS if fault.at_start or fault.whole is not None}
    assert fewer <= exact


def test_exact_moments_are_of_points_that_are_in_the_code() -> None:
    known = {str(kind) for kind in TxnKind} | {str(at) for at in At}
    named = {fault.name.removeprefix("at-") for fault in FAULTS if fault.name.startswith("at-")}
    assert named <= known
    assert {str(at) for at in At} <= named


def test_a_run_that_waits_for_old_entries_to_leave_has_a_prune_for_each_of_its_moments() -> None:
    (fault,) = table.chosen("at-prune")
    assert fault.moments is not None
    prunes = KEEP_LOG + fault.moments * PRUNE_AT
    assert fault.steps * fault.moments + LAST_STEPS >= prunes + PRUNE_AT, "some steps pass before each is made"


def test_the_page_names_every_row_and_no_other() -> None:
    page = (ROOT / "docs" / "chaos.md").read_text(encoding="utf-8")
    named = [
        name
        for line in page.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`([a-z*-]+)`", line.split("|")[1])
    ]
    names = [fault.name for fault in FAULTS]
    assert [name for name in names if not any(fnmatch(name, one) for one in named)] == []
    assert [one for one in named if not any(fnmatch(name, one) for name in names)] == []
    (ways,) = re.findall(r"`ONLY=mixed MOMENTS=(\d+)`", page)
    assert int(ways) == len(chaos_faults._mixture())


def test_rows_are_chosen_by_name_and_by_beginning() -> None:
    assert [fault.name for fault in table.chosen("etcd,controller")] == ["etcd", "controller"]
    assert {fault.name for fault in table.chosen("cut-*")} == {f.name for f in FAULTS if f.name.startswith("cut-")}
    assert table.chosen("") == FAULTS
    with pytest.raises(SystemExit, match="no fault is called 'contoller'"):
        table.chosen("contoller")


def test_what_has_passed_is_not_run_again_and_what_failed_is() -> None:
    runs = table.planned(table.chosen("etcd"), 3)
    done = [result("etcd", 0), result("etcd", 1, ok=False), result("rank", 2)]
    assert [seed for _, seed in table.still_to_do(runs, done)] == [1, 2]


def test_a_run_made_again_takes_its_older_results_place() -> None:
    done = [result("etcd", 1, ok=False), result("controller", 0)]
    again = table.with_result(done, result("etcd", 1))
    assert [(one["fault"], one["seed"], one["ok"]) for one in again] == [("controller", 0, True), ("etcd", 1, True)]


def test_recovery_is_judged_by_its_95th_percentile() -> None:
    some = [result("controller", n, recovery_s=float(n + 1)) for n in range(20)]
    assert table.recovery(some)["p95_s"] == 19.0
    assert table.recovery([result("etcd", 0)]) is None
    assert table.recovery(some)["goal_p95_s"] == RECOVERY_GOAL_S == 20.0


def test_a_line_tells_the_moment_the_target_and_why_it_failed() -> None:
    line = table.line(
        result("rank", 3, ok=False, target="train-node-0", why="no step 4", audit=["prompt (0, 1, 2) ..."])
    )
    for word in (
        "rank",
        "rank               3",
        "after step   1 + 0.50 s",
        "train-node-0",
        "FAILED: no step 4",
        "prompt (0, 1, 2)",
    ):
        assert word in line


@given(seed=st.integers(0, 1000))
def test_a_moment_follows_from_its_seed(seed: int) -> None:
    moment = Moment.drawn(random.Random(f"x {seed}"))
    assert moment == Moment.drawn(random.Random(f"x {seed}"))
    assert moment.more_steps >= 0
    assert moment.delay_s >= 0


def test_moments_share_a_job_where_they_may() -> None:
    runs = table.planned(table.chosen("etcd,losses"), 7)
    fault, seeds = table.next_job(runs)
    assert (fault.name, seeds) == ("etcd", [0, 1, 2, 3, 4])
    assert table.next_job([run for run in runs if run[0].name == "losses"])[1] == [0]


class Played:
    """A cluster in which only the job's steps go on: one at each look, up to its last."""

    def __init__(self, last: int = 10**6) -> None:
        self.last = last
        self.history: object | None = None
        self.seen = SimpleNamespace(step=0, rollbacks=0, broken=[])
        self.rng = random.Random(1)
        self.number = 0

    @property
    def ended(self) -> bool:
        return self.seen.step >= self.last

    async def submit(self, spec: Path, *settings: str) -> None:
        self.history = self.seen

    async def until(self, what: str, condition: Callable[[], Any], patience_s: float = 0.0) -> Any:
        while not (found := condition()):
            self.seen.step += 1
        return found

    async def audit(self) -> list[str]:
        return []


class Quick:
    """Time that does not pass."""

    async def sleep(self, seconds: float) -> None:
        """At once."""

    def monotonic(self) -> float:
        return 0.0


async def one_fault(monkeypatch: pytest.MonkeyPatch, fault: Fault, cluster: Played) -> dict[str, Any]:
    told: dict[str, Any] = {}
    monkeypatch.setattr(chaos_run, "CLOCK", Quick())
    await chaos_run._one_fault(cluster, fault, 0, Path("spec"), told)  # type: ignore[arg-type]
    return told


def misses(count: int) -> Callable[[ChaosCluster], Any]:
    """A fault that meets nobody so many times."""
    left = [None] * count

    async def act(cluster: ChaosCluster) -> Told:
        if left:
            left.pop()
            raise NobodyHit("nobody was there yet")
        return {"target": "somebody"}

    return act


async def test_a_fault_that_met_nobody_is_tried_again_at_another_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Moment.drawn(random.Random("x 0"))
    told = await one_fault(monkeypatch, Fault("x", "", misses(3)), Played())
    assert told["target"] == "somebody"
    assert (told["after_step"], told["delay_s"]) != (first.more_steps, first.delay_s)


async def test_a_job_in_which_a_fault_meets_nobody_is_no_run_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(chaos_run._TooLate):
        await one_fault(monkeypatch, Fault("x", "", misses(10**6)), Played(last=20))

    @contextlib.asynccontextmanager
    async def running(*_: object) -> AsyncIterator[Played]:
        yield Played(last=20)

    monkeypatch.setattr(ChaosCluster, "running", running)
    monkeypatch.setattr(chaos_run, "_keep_logs", lambda *_: None)
    (told,) = await chaos_run.one_job(Fault("x", "", misses(10**6)), [0], tmp_path)
    assert not told["ok"]
    assert "before x met anybody" in told["why"]


@pytest.mark.parametrize("act", [chaos_faults.killed("engine"), chaos_faults.paused("rank")])
async def test_there_is_no_fault_where_there_is_no_process(act: Callable[[ChaosCluster], Any]) -> None:
    async def workers(part: object) -> dict[str, object]:
        return {}

    cluster: Any = SimpleNamespace(workers=workers)
    with pytest.raises(NobodyHit, match="was there yet"):
        await act(cluster)


async def test_nobody_who_fell_asleep_is_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster: Any = Played(last=3)
    cluster.arm, cluster.fired, cluster.daemons = lambda *_: None, lambda _: None, {}
    with pytest.raises(NobodyHit, match=r"before anybody came to commit\.before"):
        await chaos_faults.paused_at_commit(cluster)


class Losing(Played):
    """Of a run with lost answers: which points are met, `but` for some."""

    def __init__(self, but: str = "") -> None:
        super().__init__(last=3)
        self.but = but
        self.armed: dict[str, str] = {}

    def arm(self, name: str, words: str) -> None:
        self.armed[name] = words

    def fired(self, name: str) -> int | None:
        return 1 if name in self.armed and name != self.but else None


async def test_every_usual_kind_of_transaction_must_have_lost_an_answer() -> None:
    cluster: Any = Losing()
    assert await chaos_faults.lost_answers(cluster) == {"target": "16 answers"}
    kinds = {name.partition(".")[0] for name in cluster.armed}
    assert kinds == set(chaos_faults.USUAL)
    assert {"offer", "seal", "ready", "commit", "register"} <= kinds <= {str(kind) for kind in TxnKind}
    assert all(cluster.armed[f"{kind}.after"] == "lose 1" for kind in ("join", "assign", "retain"))
    missed: Any = Losing(but="ready.after")
    with pytest.raises(ChaosFailed, match=r"nobody lost an answer at ready\.after"):
        await chaos_faults.lost_answers(missed)


def test_the_kinds_that_lose_answers_are_named_where_they_are_told() -> None:
    (fault,) = table.chosen("lost-answers")
    page = (ROOT / "docs" / "chaos.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if line.startswith("| `lost-answers` | the store")]
    assert set(re.findall(r"`([a-z]+)`", line)) == set(chaos_faults.USUAL)
    assert fault.what.endswith(", ".join(chaos_faults.USUAL))


async def test_two_more_steps_follow_also_a_fault_with_which_the_job_began(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Played()
    told = await one_fault(monkeypatch, Fault("x", "", misses(0), at_start=True), cluster)
    assert cluster.seen.step == chaos_run.STEPS_AFTER
    assert told["rollbacks"] == 0

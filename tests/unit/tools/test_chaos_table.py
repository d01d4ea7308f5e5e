"""The table of chaos faults: its rows, runs, skips and conclusions. These tests inject no real faults."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from fnmatch import fnmatch
from functools import partial
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

from controllers.rules.retention import KEEP_LOG, PRUNE_AT
from gcore.ledger.transactions import TxnKind
from gcore.reward.pool import SETTLED, LatencyTrend
from gcore.schema import NEWEST_VERSION, PIN
from gcore.store import client as watching
from gcore.store.connection import RevisionCompacted
from gcore.store.types import KeyListing
from gcore.system.fault_injection import FaultPoint

ROOT = Path(__file__).parents[3]


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
    known = {str(kind) for kind in TxnKind} | {str(at) for at in FaultPoint}
    named = {fault.name.removeprefix("at-") for fault in FAULTS if fault.name.startswith("at-")}
    assert named <= known
    assert {str(at) for at in FaultPoint} <= named


def test_a_run_that_waits_for_old_entries_to_leave_has_a_prune_for_each_of_its_moments() -> None:
    (fault,) = table.chosen("at-prune")
    assert fault.moments is not None
    prunes = KEEP_LOG + fault.moments * PRUNE_AT
    assert fault.steps * fault.moments + LAST_STEPS >= prunes + PRUNE_AT, "some steps pass before each is made"


def test_the_page_names_every_row_and_no_other() -> None:
    page = (ROOT / "docs" / "develop" / "simulation-and-chaos.md").read_text(encoding="utf-8")
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


def test_passed_runs_are_skipped_and_failed_ones_repeated() -> None:
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
    """A cluster in which only the job's step increases: by one at each read, up to the last."""

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
        """Return at once."""

    def monotonic(self) -> float:
        return 0.0


async def one_fault(monkeypatch: pytest.MonkeyPatch, fault: Fault, cluster: Played) -> dict[str, Any]:
    told: dict[str, Any] = {}
    monkeypatch.setattr(chaos_run, "CLOCK", Quick())
    await chaos_run._one_fault(cluster, fault, 0, Path("spec"), told)  # type: ignore[arg-type]
    return told


def misses(count: int) -> Callable[[ChaosCluster], Any]:
    """A fault that finds no target `count` times."""
    left = [None] * count

    async def act(cluster: ChaosCluster) -> Told:
        if left:
            left.pop()
            raise NobodyHit("no process was there yet")
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


async def test_pause_without_a_process_at_the_fault_point_is_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster: Any = Played(last=3)
    cluster.arm, cluster.fired, cluster.daemons = lambda *_: None, lambda _: None, {}
    with pytest.raises(NobodyHit, match=r"before a process reached commit\.before"):
        await chaos_faults.paused_at_commit(cluster)


class Losing(Played):
    """A run with lost responses: all points are reached except `but`."""

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
    with pytest.raises(ChaosFailed, match=r"no process lost an answer at ready\.after"):
        await chaos_faults.lost_answers(missed)


def test_the_kinds_that_lose_answers_are_named_where_they_are_told() -> None:
    (fault,) = table.chosen("lost-answers")
    page = (ROOT / "docs" / "develop" / "simulation-and-chaos.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if line.startswith("| `lost-answers` | the store")]
    assert set(re.findall(r"`([a-z]+)`", line)) == set(chaos_faults.USUAL)
    assert fault.what.endswith(", ".join(chaos_faults.USUAL))


async def test_two_more_steps_follow_also_a_fault_with_which_the_job_began(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Played()
    told = await one_fault(monkeypatch, Fault("x", "", misses(0), at_start=True), cluster)
    assert cluster.seen.step == chaos_run.STEPS_AFTER
    assert told["rollbacks"] == 0


class Versioned(Played):
    """Two daemons that are new after a restart. `written` gives the schema version of head from the number of old ones."""

    def __init__(self, written: Callable[[int], int]) -> None:
        super().__init__()
        self.written = written
        self.daemons = {
            name: SimpleNamespace(environment={PIN: "2"}, signal=partial(self.restart, name)) for name in ("a", "b")
        }
        self.up = ["a", "b"]
        self.incarnations = {"a": "a.1", "b": "b.1"}
        self.old = 2
        head = SimpleNamespace(record=SimpleNamespace(seq=0))
        keys = SimpleNamespace(head="jobs/u/head")
        self.seen.mirror = SimpleNamespace(head=head, keys=keys)
        self.seen.incarnation = self.incarnations.get
        self.store = self

    def restart(self, name: str, number: int) -> None:
        assert PIN not in self.daemons[name].environment
        self.old -= 1
        self.incarnations[name] = f"{name}.2"

    async def until(self, what: str, condition: Callable[[], Any], patience_s: float = 0.0) -> Any:
        self.seen.mirror.head.record.seq += 1
        return await super().until(what, condition)

    async def get(self, key: str) -> Any:
        return SimpleNamespace(value=json.dumps({"schema_version": self.written(self.old)}).encode())


async def test_a_restart_to_a_new_schema_version_looks_at_what_stands_in_the_store() -> None:
    before, now = NEWEST_VERSION - 1, NEWEST_VERSION
    right: Any = Versioned(lambda old: before if old else now)
    assert (await chaos_faults.rewritten_restart(right))["schema_versions"] == [before, now]
    for written, when in (
        (lambda old: now, "before any daemon is new"),
        (lambda old: before if old == 2 else now, "while b is old"),
        (lambda old: before, "when all daemons are new"),
    ):
        wrong: Any = Versioned(written)
        with pytest.raises(ChaosFailed, match=when):
            await chaos_faults.rewritten_restart(wrong)


class Telling(Played):
    """A cluster whose job reports `told(n)` at the n-th read."""

    def __init__(
        self, folder: Path, told: Callable[[int], dict[str, str]], *, last: int = 10**6, step: int = 5
    ) -> None:
        super().__init__(last)
        self.looks, self.told = 0, told
        self.seen.step = step
        self.seen.mirror = SimpleNamespace(revision=7, troubles={"folder": trouble("of an earlier moment", 7)})
        self.runs = self.packages = folder

    async def until(self, what: str, condition: Callable[[], Any], patience_s: float = 0.0) -> Any:
        while not (found := condition()):
            self.looks += 1
            self.seen.step += 1
            for topic, sentence in self.told(self.looks).items():
                self.seen.mirror.troubles[topic] = trouble(sentence, 7 + self.looks)
        return found


def trouble(sentence: str, revision: int) -> Any:
    return SimpleNamespace(revision=revision, record=SimpleNamespace(sentence=sentence))


FULL = "the weights of step 6 cannot be written (No space left on device): /r; it is tried again for 10 s"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the clock by one that does not wait, and fill no disk."""
    monkeypatch.setattr(chaos_faults, "CLOCK", Quick())
    monkeypatch.setattr(chaos_faults, "_full", lambda ballast: contextlib.nullcontext())


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("step", [0, 5])
async def test_a_full_disk_must_be_told(tmp_path: Path, step: int) -> None:
    told: Any = Telling(tmp_path, lambda looks: {"folder": FULL} if looks == 3 else {}, step=step)
    assert (await chaos_faults.disk_full(told))["told"] == ["folder"]
    silent: Any = Telling(tmp_path, lambda looks: {"engine-a": "another trouble"}, last=30, step=step)
    with pytest.raises(NobodyHit, match="No space left"):
        await chaos_faults.disk_full(silent)


@pytest.mark.usefixtures("quick")
async def test_warnings_of_an_earlier_moment_do_not_count(tmp_path: Path) -> None:
    cluster: Any = Telling(tmp_path, lambda looks: {}, last=30)
    cluster.seen.mirror.troubles = {"folder": trouble(FULL, 7)}
    with pytest.raises(NobodyHit):
        await chaos_faults.disk_full(cluster)


@pytest.mark.usefixtures("quick")
async def test_a_slow_reward_must_be_told_and_that_it_is_over(tmp_path: Path) -> None:
    before = LatencyTrend()
    for _ in range(SETTLED):
        before = before.note(0.02)
    slow = before.note(2.0).note(2.0).note(2.0)
    sentences = [slow.news(before, "chaos"), slow.note(0.02).news(slow, "chaos")]
    assert all(sentences)

    def told(looks: int) -> dict[str, str]:
        return {"reward-a": sentences[looks > 3]} if looks >= 2 else {}

    cluster: Any = Telling(tmp_path, told)
    assert (await chaos_faults.slow_reward(cluster))["told"] == ["reward-a"]
    assert cluster.looks > 3, "that it is quick again was waited for"
    silent: Any = Telling(tmp_path, lambda looks: {}, last=30)
    with pytest.raises(NobodyHit, match="times the usual"):
        await chaos_faults.slow_reward(silent)
    assert not (tmp_path / "slow").exists(), "the next run's reward is quick"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("listed", [True, False])
async def test_history_that_was_compacted_must_have_been_listed_again(tmp_path: Path, listed: bool) -> None:
    log = tmp_path / "logs" / "train-node-0-1.supervisor.log"
    log.parent.mkdir()
    log.write_text("of an earlier moment: it is listed again: compacted\n")
    workers = {"train-node-0-1 supervisor": object()}

    def heal() -> None:
        if listed:
            log.write_text(log.read_text() + "it is listed again: compacted\n")

    async def compact() -> int:
        return 9

    async def supervisors(part: str) -> dict[str, object]:
        return workers

    cluster: Any = Played(last=20)
    cluster.members, cluster.compact, cluster.workers = {}, compact, supervisors
    cluster.pick, cluster.up, cluster.homes = min, ["node-0"], {"node-0": tmp_path}
    cluster.network = SimpleNamespace(part=lambda *_: None, heal=heal)
    if listed:
        assert (await chaos_faults.compacted(cluster))["listed_again"] == 1
    else:
        with pytest.raises(NobodyHit, match="ended before a watch of node-0"):
            await chaos_faults.compacted(cluster)
    workers.clear()
    with pytest.raises(NobodyHit, match="no rank of node-0 has watched"):
        await chaos_faults.compacted(cluster)


async def test_a_watch_whose_history_is_gone_says_that_it_lists_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def compacted(*_: object) -> Any:
        raise RevisionCompacted("required revision has been compacted")

    async def listed(prefix: str) -> KeyListing:
        return KeyListing((), 5)

    monkeypatch.setattr(watching._Stream, "open", compacted)
    with caplog.at_level("INFO"):
        batches = watching.watch_prefix(SimpleNamespace(), "jobs/", listed)  # type: ignore[arg-type]
        assert (await anext(batches)).reset
        assert not caplog.messages
        assert (await anext(batches)).reset
    assert chaos_faults.LISTED_AGAIN in caplog.messages[0]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit: a module and results."""
    (tmp_path / "results.json").write_text("{}")
    (tmp_path / "module.py").write_text("x = 1\n")
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", "first")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


def test_results_file_of_the_table_makes_no_dirty_tree(repository: Path) -> None:
    results = repository / "results.json"
    clean = table.commit_of(repository, results)
    assert re.fullmatch(r"[0-9a-f]{7,}", clean)
    results.write_text('{"runs": []}')
    assert table.changed(repository, results) == []
    assert table.commit_of(repository, results) == clean
    (repository / "module.py").write_text("x = 2\n")
    assert table.changed(repository, results) == ["module.py"]
    assert table.commit_of(repository, results) == f"{clean}-dirty"
    assert table.commit_of(repository, repository / "other.json") == f"{clean}-dirty"


@pytest.mark.parametrize("dirty", [False, True])
def test_nothing_is_run_with_changes_in_no_commit_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, repository: Path, dirty: bool
) -> None:
    (repository / "module.py").write_text("x = 2\n")
    results = repository / "results.json"
    results.write_text('{"runs": []}')
    monkeypatch.setattr(table, "ROOT", repository)
    monkeypatch.setattr(table, "make", lambda runs, file, done, *_: done)
    monkeypatch.setattr(table.signal, "signal", lambda *_: None)
    words = ["table.py", "--only", "etcd", "--results", str(results), *(["--dirty"] if dirty else [])]
    monkeypatch.setattr(sys, "argv", words)
    if dirty:
        assert table.main() == 0
    else:
        with pytest.raises(SystemExit, match=r"^module\.py differ.* add --dirty"):
            table.main()


def test_of_many_changed_files_some_are_named() -> None:
    assert table.refused(["a", "b", "c", "d", "e"]).startswith("a, b, c and 2 more differ")

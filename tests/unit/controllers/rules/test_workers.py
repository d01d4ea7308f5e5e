"""The workers that a node starts and stops."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import KEYS, bare_job, stored, with_mirror, worker_record

from controllers.rules.view import EngineView, JobView, world_start
from controllers.rules.workers import (
    Launch,
    Launches,
    StartEngine,
    StartRank,
    StopWorker,
    launch_backoff_s,
    schedule_workers,
)
from controllers.rules.world import world_loss
from controllers.workers.launcher import MAX_LAUNCHES, WorkerLauncher
from gcore.config import NodeConfig, parse_spec
from gcore.engines.emulated.launch import HostLaunch
from gcore.ledger import chain
from gcore.ledger.chain import ChainWriter
from gcore.ledger.records.chain import Checkpoint, Checkpoints, WorldState
from gcore.ledger.records.job import EnginePlace, JobRecord, NodeRecord, Plan, RankClaim, RankPlace
from gcore.ledger.transactions import Versioned
from gcore.store.reference import StoreRef
from gcore.system.process import ProcessId, identify_process
from gcore.testing import FakeClock
from gcore.train.rank.launch import WorldStart
from gcore.worker.main import supervisor_log
from gcore.worker.records import LaunchSpec, WorkerRecord

SPEC = parse_spec(
    {
        "name": "j",
        "model": {"path": "m"},
        "data": {"path": "d", "shards": 2},
        "flow": {"steps": 3},
        "rollout": {"max_new_tokens": 4},
        "train": {"start_limit_s": 77.0},
    }
)
BASE = Checkpoint(lineage=0, step=0, seq=0, file="")


def worker(instance: str, role: str, node: str = "node-0", **more: Any) -> WorkerRecord:
    return worker_record(instance, role, node, **more)


def view(workers: dict[str, WorkerRecord] | None = None, claims: dict[int, str] | None = None) -> JobView:
    instances = {KEYS.world_rank("w", r): stored(RankClaim(instance=i), 1) for r, i in (claims or {}).items()}
    return with_mirror(bare_job(SPEC, workers=workers), claims=instances)


def kinds(v: JobView, launches: Launches | None = None, now: float = 100.0) -> list[type]:
    return [type(action) for action in schedule_workers(v, launches or Launches(), now)]


RUNNING = {"e": worker("e", "rollout"), "t": worker("t", "train", world="w", rank=0)}


def test_a_bare_node_starts_its_engine_and_its_rank_and_no_others() -> None:
    actions = list(schedule_workers(view(), Launches(), 0.0))
    assert [(type(a), a.place.node) for a in actions if not isinstance(a, StopWorker)] == [
        (StartEngine, "node-0"),
        (StartRank, "node-0"),
    ]


def test_running_workers_are_adopted() -> None:
    assert kinds(view(RUNNING, {0: "t"})) == []


def test_a_rank_whose_registration_is_heard_before_its_claim_is_neither_doubled_nor_stopped() -> None:
    assert kinds(view(RUNNING, {})) == []


def test_pending_launches_are_awaited() -> None:
    pending = {key: Launch("x", ProcessId(1, 1), 99.0) for key in ("rollout cpu:0", "train w 0")}
    assert kinds(view(), Launches(pending)) == []


def test_a_judges_engine_is_a_worker_of_its_own_beside_the_policys() -> None:
    seen = view(RUNNING, {0: "t"})
    assert seen.mirror.plan is not None
    plan = seen.mirror.plan.record
    judging = EnginePlace(node="node-0", slot="cpu:0", judge="sums")
    judged = Versioned(plan.model_copy(update={"engines": (*plan.engines, judging)}), 2)
    lacking = replace(seen, mirror=replace(seen.mirror, plan=judged))
    (start,) = schedule_workers(lacking, Launches(), 0.0)
    assert start == StartEngine(judging)
    pending = Launches({"judge sums cpu:0": Launch("x", ProcessId(1, 1), 99.0)})
    assert kinds(lacking, pending) == []
    there = {"j": worker("j", "reward", judge="sums"), "other": worker("other", "reward", judge="gone")}
    (stop,) = schedule_workers(replace(lacking, workers=RUNNING | there), Launches(), 0.0)
    assert stop == StopWorker("other", "the placement plan no longer includes it")
    hung = {"j": EngineView("j", "h:1", None, silent=True, hung=True, why="answers nothing")}
    (stop,) = schedule_workers(replace(lacking, workers=RUNNING | {"j": there["j"]}, judges=hung), Launches(), 0.0)
    assert stop == StopWorker("j", "it answers nothing", at_once=True)


def test_lost_slot_starts_no_worker_and_its_world_is_lost() -> None:
    """Else an accelerator that is gone would end the job: whatever is started there never lasts."""
    fewer = NodeRecord(name="node-0", incarnation="a", address="h:1", slots=("cpu:1",), pid=1)
    seen = replace(view(), nodes={"node-0": fewer, "node-1": fewer.model_copy(update={"name": "node-1"})})
    assert kinds(seen) == []
    lost = world_loss(seen)
    assert lost is not None
    assert lost.why == "node-0 lost slot cpu:0, which should run rank 0"
    assert kinds(replace(seen, workers={"e": RUNNING["e"]})) == [StopWorker]
    whole = fewer.model_copy(update={"slots": ("cpu:0", "cpu:1")})
    again = replace(seen, nodes={"node-0": whole, "node-1": whole.model_copy(update={"name": "node-1"})})
    assert kinds(again) == [StartEngine, StartRank]
    assert world_loss(again) is None


def test_a_dead_rank_is_not_started_again_in_the_same_world() -> None:
    assert kinds(view({"e": RUNNING["e"]}, {0: "t"})) == []


def test_a_dead_engine_is_started_again_later_and_later() -> None:
    later = Launches(tries={"rollout cpu:0": 3}, last={"rollout cpu:0": 98.0})
    assert launch_backoff_s(later, "rollout cpu:0") == 4.0
    assert kinds(view({"t": RUNNING["t"]}, {0: "t"}), later, now=100.0) == []
    assert kinds(view({"t": RUNNING["t"]}, {0: "t"}), later, now=102.0) == [StartEngine]


def test_a_second_engine_of_a_slot_and_a_rank_of_another_world_are_stopped() -> None:
    more = RUNNING | {"e2": worker("e2", "rollout"), "old": worker("old", "train", world="w0", rank=0)}
    stopped = {a.instance for a in schedule_workers(view(more, {0: "t"}), Launches(), 0.0) if isinstance(a, StopWorker)}
    assert stopped == {"e2", "old"}


def test_workers_of_other_nodes_and_jobs_are_left_alone() -> None:
    more = RUNNING | {"far": worker("far", "rollout", "node-1"), "other": worker("other", "rollout", job_uid="u2")}
    assert kinds(view(more, {0: "t"})) == []


def test_a_new_world_starts_from_what_its_rollback_named() -> None:
    first = view()
    assert world_start(first) == WorldStart(step=0)
    head = first.mirror.head
    assert head is not None
    target = Checkpoint(lineage=0, step=2, seq=2, file="checkpoints/0-2")
    entry = chain.base_entry(2, "w", ChainWriter("a", "n")).entry.model_copy(update={"seq": 2, "step": 2})
    later = head.record.model_copy(update={"seq": 4, "step": 4})
    back = chain.rollback_entry(later, entry, "w2", ChainWriter("a", "m"), "a rank died")
    mirror = replace(
        first.mirror,
        head=Versioned(back.head, 9),
        log={5: Versioned(back.entry, 9)},
        checkpoints=Versioned(Checkpoints(entries=(BASE, target)), 9),
    )
    assert world_start(replace(first, mirror=mirror)) == WorldStart(step=2, checkpoint="checkpoints/0-2")


def test_a_new_world_that_goes_on_from_copies_is_told_whose() -> None:
    first = view()
    head = first.mirror.head
    assert head is not None
    later = head.record.model_copy(update={"seq": 4, "step": 4})
    state = WorldState(world="w", lineage=0, step=4, attempt=1, shards=2)
    on = chain.reform_entry(later, state, "w2", ChainWriter("a", "m"), "a rank died")
    mirror = replace(first.mirror, head=Versioned(on.head, 9), log={5: Versioned(on.entry, 9)})
    assert world_start(replace(first, mirror=mirror)) == WorldStart(step=4, state=state)


def test_failed_spawn_is_retried_with_backoff_and_finally_abandoned(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.write_text("a file where the daemon's folder should be")
    clock = FakeClock()
    config = NodeConfig(
        node="node-0", home=str(home), etcd=StoreRef(endpoints=("h:1",)), slots=("cpu:0",), run_root="r"
    )
    bare = view()
    job = JobRecord(
        uid="u", name="j", spec=SPEC.model_dump(mode="json"), run_dir=str(tmp_path / "run"), created=0.0, prompts=4
    )
    bare = replace(bare, mirror=replace(bare.mirror, job=Versioned(job, 1)))
    staff = WorkerLauncher(config, clock)
    key = "train w 0"
    for _ in range(MAX_LAUNCHES):
        assert staff.failed_start({}) == ""
        staff.start(StartRank(RankPlace(rank=0, node="node-0", slot="cpu:0"), "w"), bare)
    launches = staff.launches({})
    assert launches.tries[key] == MAX_LAUNCHES
    assert StartRank not in kinds(bare, launches, now=launches.last[key] + 1.0)
    assert StartRank in kinds(bare, launches, now=launches.last[key] + launch_backoff_s(launches, key))
    assert f"{key} on node-0 was started {MAX_LAUNCHES} times" in staff.failed_start({})
    assert str(home) in staff.failed_start({})


def test_a_daemon_touches_nothing_of_a_runs_folder_to_start_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[LaunchSpec] = []

    def start(launch: LaunchSpec, home: Path) -> ProcessId:
        started.append(launch)
        return ProcessId(2**30, 1)

    monkeypatch.setattr("controllers.workers.launcher.start_worker", start)
    config = NodeConfig(
        node="node-0", home=str(tmp_path), etcd=StoreRef(endpoints=("h:1",)), slots=("cpu:0",), run_root="r"
    )
    run_dir = tmp_path / "run"
    job = JobRecord(uid="u", name="j", spec=SPEC.model_dump(mode="json"), run_dir=str(run_dir), created=0.0, prompts=4)
    bare = replace(view(), mirror=replace(view().mirror, job=Versioned(job, 1)))
    rank = RankPlace(rank=0, node="node-0", slot="cpu:0")
    assert WorkerLauncher(config, FakeClock()).start(StartRank(rank, "w"), bare) == ""
    assert [one.log_file.startswith(str(run_dir / "logs")) for one in started] == [True]
    assert not run_dir.exists(), "its mount may hang; the supervisor makes it"
    assert [one.start_limit_s for one in started] == [SPEC.train.start_limit_s]


def test_a_rank_whose_supervisor_dies_unregistered_is_started_again_later_and_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controllers.workers.launcher.start_worker", lambda *_: ProcessId(2**30, 1))
    config = NodeConfig(
        node="node-0", home=str(tmp_path), etcd=StoreRef(endpoints=("h:1",)), slots=("cpu:0",), run_root="r"
    )
    bare = view()
    job = JobRecord(uid="u", name="j", spec=SPEC.model_dump(mode="json"), run_dir=str(tmp_path), created=0.0, prompts=4)
    bare = replace(bare, mirror=replace(bare.mirror, job=Versioned(job, 1)))
    staff = WorkerLauncher(config, FakeClock())
    for _ in range(2):
        staff.start(StartRank(RankPlace(rank=0, node="node-0", slot="cpu:0"), "w"), bare)
    launches = staff.launches({})
    assert not launches.pending
    assert StartRank not in kinds(bare, launches, now=launches.last["train w 0"] + 1.9)
    assert StartRank in kinds(bare, launches, now=launches.last["train w 0"] + 2.0)


def test_a_job_that_is_given_up_names_the_file_that_says_why_and_what_it_said_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[LaunchSpec] = []

    def start(launch: LaunchSpec, home: Path) -> ProcessId:
        launched.append(launch)
        return ProcessId(2**30, 1)

    monkeypatch.setattr("controllers.workers.launcher.start_worker", start)
    config = NodeConfig(
        node="node-0", home=str(tmp_path), etcd=StoreRef(endpoints=("h:1",)), slots=("cpu:0",), run_root="r"
    )
    job = JobRecord(uid="u", name="j", spec=SPEC.model_dump(mode="json"), run_dir="/run", created=0.0, prompts=4)
    bare = replace(view(), mirror=replace(view().mirror, job=Versioned(job, 1)))
    staff = WorkerLauncher(config, FakeClock())
    for _ in range(MAX_LAUNCHES):
        staff.start(StartRank(RankPlace(rank=0, node="node-0", slot="cpu:0"), "w"), bare)
    newest = launched[-1]
    file = supervisor_log(newest.instance, tmp_path)
    file.parent.mkdir()
    file.write_text("1\n2\n3\n2026-11-23 07:43:23,666 ERROR gcore.worker no room for a thread\n")
    staff.launches({})
    assert staff.failed_start({}).endswith(f"and never lasted: 2 | 3 | no room for a thread (its log: {file})")
    dead = worker(newest.instance, "train", state="failed", reason="exit code 1: no such law")
    staff.launches({newest.instance: dead})
    assert staff.failed_start({newest.instance: dead}).endswith(
        f": exit code 1: no such law (its log: {newest.log_file})"
    )


def test_a_node_without_sglang_gives_the_job_up_with_what_is_missing(tmp_path: Path) -> None:
    config = NodeConfig(
        node="node-0", home=str(tmp_path), etcd=StoreRef(endpoints=("h:1",)), slots=("cpu:0",), run_root="r"
    )
    rollout = SPEC.rollout.model_copy(update={"engine": "sglang"})
    bare = replace(view(), spec=SPEC.model_copy(update={"rollout": rollout}))
    job = JobRecord(uid="u", name="j", spec=SPEC.model_dump(mode="json"), run_dir=str(tmp_path), created=0.0, prompts=4)
    bare = replace(bare, mirror=replace(bare.mirror, job=Versioned(job, 1)))
    staff = WorkerLauncher(config, FakeClock())
    for _ in range(MAX_LAUNCHES):
        staff.start(StartEngine(EnginePlace(node="node-0", slot="cpu:0")), bare)
    assert "node node-0 has no SGLang. Run 'make sglang-setup'" in staff.failed_start({})


def hung(workers: dict[str, WorkerRecord]) -> JobView:
    engine = EngineView("e", "h:1", None, silent=True, hung=True, why="has answered nothing for 120 s")
    return replace(view(workers, {0: "t"}), engines={"e": engine})


def test_an_engine_that_hangs_is_ended_at_once_and_its_slot_is_given_away_only_when_it_has_gone() -> None:
    (stop,) = schedule_workers(hung(RUNNING), Launches(), 100.0)
    assert stop == StopWorker("e", "it has answered nothing for 120 s", at_once=True)
    (again,) = schedule_workers(hung(RUNNING | {"e": worker("e", "rollout", state="stopping")}), Launches(), 100.0)
    assert again == stop  # who asks twice does not want to wait
    gone = replace(view({"t": RUNNING["t"]}, {0: "t"}), engines={})
    assert kinds(gone) == [StartEngine]


def test_an_engine_that_hangs_on_another_node_is_that_nodes_business() -> None:
    far = {"e": worker("e", "rollout", "node-1"), "e0": worker("e0", "rollout"), "t": RUNNING["t"]}
    assert list(schedule_workers(hung(far), Launches(), 100.0)) == []


def test_the_engines_of_emulated_slots_are_started_as_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[HostLaunch] = []

    def start(launch: HostLaunch, home: Path) -> ProcessId:
        started.append(launch)
        me = identify_process(os.getpid())
        assert me is not None
        return me

    monkeypatch.setattr("controllers.workers.launcher.start_host", start)
    places = tuple(EnginePlace(node="node-0", slot=f"emulated:{i}") for i in range(3))
    bare = view()
    plan = Plan(generation=1, world="w", ranks=(), engines=places)
    bare = replace(bare, mirror=replace(bare.mirror, plan=Versioned(plan, 1)))
    config = NodeConfig(
        node="node-0",
        home=str(tmp_path),
        etcd=StoreRef(endpoints=("h:1",)),
        slots=("emulated:0",),
        run_root=str(tmp_path),
    )
    staff = WorkerLauncher(config, FakeClock())
    staff.start_emulated(
        [a for a in schedule_workers(bare, staff.launches({}), 0.0) if isinstance(a, StartEngine)], bare
    )
    (launch,) = started
    assert [engine.slot for engine in launch.engines] == ["emulated:0", "emulated:1", "emulated:2"]
    assert len({engine.instance for engine in launch.engines}) == 3
    assert list(schedule_workers(bare, staff.launches({}), 1.0)) == []  # they are on their way

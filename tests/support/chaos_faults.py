"""The faults of `make chaos`: the effect of each on a running cluster, and the conditions that must hold besides the audit.

A fault is a coroutine over a cluster whose job is under way. It returns a description for the log and the results file. It
raises ChaosFailed if a condition is violated, and NobodyHit if it affected no process. Its start and every choice in it follow from
the run's seed. `chaos_run` has the parts that all runs share: the job, the moment, its end, the audit.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import random
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from chaos_cluster import BACK_S, CLOCK, TTL_S, ChaosCluster, ChaosFailed, NobodyHit, Part, Shape
from chaos_resumed import another_trainer, demo_survives, four_one_three, losses_equal, losses_equal_elsewhere

from controllers.cli.local import home_processes
from gcore.api.v1 import jobs_pb2 as pb
from gcore.errors import GcoreError
from gcore.schema import NEWEST_VERSION, PIN
from gcore.system.process import identify_process, send_signal

Told = dict[str, Any]
Whole = Callable[[Path, Path, random.Random], Awaitable[Told]]
"""(folder, spec, the run's dice)"""
Act = Callable[[ChaosCluster], Coroutine[Any, Any, Told]]
ALONE_S = 30.0
"""A controller that is killed for the measurement stays away so long: its peers are to recover without it."""
PAUSE_S = 3.0 * TTL_S
RECOVERY_GOAL_S = TTL_S + 15.0
AWAY_S = 60.0
LISTED_AGAIN = "is listed again"
"""What a log says of a watch whose history is gone (`gcore.store.client`)."""
NO_ROOM = os.strerror(errno.ENOSPC)
SLOWER, QUICK_AGAIN = "times the usual", "is back to its usual speed"
"""The warnings about a reward's pace (`gcore.reward.pool`)."""
USUAL_AFTER = 3
"""Steps after which every pool of rewards knows what is usual."""
ONE_STORE = Shape()
BEFORE_AFTER = ("before", "after")


@dataclass(frozen=True)
class Fault:
    """A row of the table. `moments`: how many, if not as many as asked for. `steps`: of the job, for each of them. `settings`: of its spec."""

    name: str
    what: str
    act: Act | None = None
    shape: Shape = ONE_STORE
    steps: int = 16
    settings: tuple[str, ...] = ()
    moments: int | None = None
    disk_mb: int | None = None
    """The runs' folder stands on a disk of this size."""
    at_start: bool = False
    """Begins with the job's creation, not at a random moment."""
    together: bool = True
    """Whether several moments may have one job."""
    whole: Whole | None = None
    """Instead of `act`: it runs its clusters itself."""
    pictures: bool = False
    """Its prompts have pictures."""
    generates: str = ""
    """Its policy generates pictures, with this flow."""
    demo: bool = False
    """Its job is the example's, which must have been prepared; else the small one."""


# One process killed.


async def controller(cluster: ChaosCluster) -> Told:
    """A controller dies and does not come back for a while: how long until its shards are in a commit again."""
    name = cluster.pick(cluster.up)
    return await _killed_controller(cluster, name, ALONE_S)


async def controller_back(cluster: ChaosCluster) -> Told:
    """It is started again at once, as a new incarnation."""
    name = cluster.pick(cluster.up)
    return await _killed_controller(cluster, name, 1.0)


async def _killed_controller(cluster: ChaosCluster, name: str, back_s: float) -> Told:
    seen = cluster.seen
    incarnation = seen.incarnation(name)
    assignment = seen.mirror.assign
    shards = (
        set(assignment.record.shards_of(incarnation)) if assignment is not None and incarnation is not None else set()
    )
    has_begun = seen.mirror.head is not None and seen.mirror.head.record.step > 0
    cluster.daemons[name].back_s = back_s
    at = CLOCK.monotonic()
    cluster.daemons[name].signal(signal.SIGKILL)
    told: Told = {"target": name}
    if not shards or incarnation is None:
        return told  # it had no part yet: nothing is to be recovered
    await cluster.until(
        f"commit with prompts of {name}'s shards from another holder",
        lambda: seen.ended or next(seen.commits_with(shards, at, but=incarnation), None),
    )
    by_others = next(seen.commits_with(shards, at, but=incarnation), None)
    if by_others is not None and not has_begun:
        told["first_commit_s"] = round(by_others - at, 2)  # how long a job takes to start is another matter
    elif by_others is not None:
        told["recovery_s"] = round(by_others - at, 2)
        told["next_commit_s"] = round(next(seen.commits_with(shards, at)) - at, 2)
        if by_others - at > 3 * RECOVERY_GOAL_S:
            raise ChaosFailed(f"recovery took {by_others - at:.0f} s")
    cluster.daemons[name].back_s = 0.0
    await cluster.until(f"return of {name}", lambda: cluster.ended or seen.incarnation(name) is not None)
    return told


def killed(part: Part) -> Act:
    """One worker's process dies."""

    async def act(cluster: ChaosCluster) -> Told:
        found = await cluster.workers(part)
        if not found:
            raise NobodyHit(f"no {part} was there yet")
        name = cluster.pick(found)
        send_signal(found[name], signal.SIGKILL)
        return {"target": name}

    return act


async def etcd(cluster: ChaosCluster) -> Told:
    """etcd dies and comes back on its data."""
    name = cluster.pick(cluster.members)
    cluster.members[name].signal(signal.SIGKILL)
    return {"target": name}


async def etcd_gone(cluster: ChaosCluster) -> Told:
    """There is no etcd for a minute."""
    for member in cluster.members.values():
        member.back_s = AWAY_S
        member.signal(signal.SIGKILL)
    await CLOCK.sleep(AWAY_S)
    for member in cluster.members.values():
        member.back_s = BACK_S
    return {"target": ", ".join(cluster.members)}


async def leader(cluster: ChaosCluster) -> Told:
    """The leader of three members dies; the others go on, and it comes back later."""
    name = await cluster.leader()
    cluster.members[name].back_s = 8.0
    cluster.members[name].signal(signal.SIGKILL)
    return {"target": name}


async def majority(cluster: ChaosCluster) -> Told:
    """Two of three members die: no controller can commit until they are back."""
    names = cluster.rng.sample(sorted(cluster.members), 2)
    for name in names:
        cluster.members[name].back_s = 10.0
        cluster.members[name].signal(signal.SIGKILL)
    return {"target": ", ".join(names)}


async def everything(cluster: ChaosCluster) -> Told:
    """Every process at once."""
    return {"target": f"{cluster.kill_all()} processes"}


async def node(cluster: ChaosCluster) -> Told:
    """A whole node: its controller, engine and rank."""
    name = cluster.pick(cluster.up)
    some = [one.process for one in home_processes(cluster.homes[name])]
    cluster.daemons[name].back_s = 10.0
    for process in some:
        send_signal(process, signal.SIGKILL)
    return {"target": f"{name}, {len(some)} processes"}


async def blob_store(cluster: ChaosCluster) -> Told:
    """The blob store of a node dies; its controller starts it again."""
    found = cluster.blob_stores()
    if not found:
        raise NobodyHit("no blob store was there yet")
    name = cluster.pick(found)
    send_signal(found[name], signal.SIGKILL)
    return {"target": name}


async def several(cluster: ChaosCluster) -> Told:
    """Two to four processes are hit at the same moment: most are killed, some stopped for three leases, some asked to end."""
    named = {**cluster.members, **cluster.daemons}
    there = {name: kept.process for name, kept in named.items() if kept.process is not None and kept.runs}
    there |= await cluster.workers()
    there |= (stores := cluster.blob_stores())
    if len(there) < 2:
        raise NobodyHit("one process alone was there")
    victims = cluster.rng.sample(sorted(there), min(len(there), cluster.rng.randint(2, 4)))
    ways = {name: cluster.rng.choices(("killed", "stopped", "asked to end"), (6, 2, 2))[0] for name in victims}
    for name in victims:
        cluster.stop(there[name])  # so that none sees another one's death
    for name, way in ways.items():
        if way != "stopped":
            send_signal(there[name], signal.SIGKILL if way == "killed" else signal.SIGTERM)
            send_signal(there[name], signal.SIGCONT)
    over = CLOCK.monotonic() + PAUSE_S
    store = cluster.members.keys() & ways.keys()
    causes = ALWAYS_AWAITED | ({"store"} if store else set()) | ({"blobs"} if stores else set())
    causes |= AFTER_A_LEASE if store or cluster.daemons.keys() & ways.keys() else set()
    seen = await _recovers(cluster, causes, over if "stopped" in ways.values() else 0.0)
    return {"target": ", ".join(f"{name} {way}" for name, way in ways.items()), "waits": seen}


ALWAYS_AWAITED = {
    "start",
    "train_world",
    "engines",
    "engine",
    "groups",
    "evaluation",
    "reward",
    "exchange",
    "train",
    "finish",
    "recovery",
    "tidying",
}
"""What any step of the small job may wait for, or a job that has lost a worker."""
AFTER_A_LEASE = {"material", "slots"}
"""Additional wait causes after a restart of daemons: they were killed, or lost their leases with the store."""
SILENT_S = 10.0
"""So long may nothing move while controllers answer and name no wait."""


async def _recovers(cluster: ChaosCluster, causes: set[str], stopped_until: float) -> list[str]:
    """Until two more steps are committed, or the job has ended: what it waited for meanwhile, by cause. None may be another than `causes`."""
    history, named = cluster.seen, set[str]()
    goal, silent = history.step + 2, None
    end, entries = CLOCK.monotonic() + 240.0, len(history.entries)
    while stopped_until or (not history.ended and history.step < goal):
        now = CLOCK.monotonic()
        if now > end:
            raise ChaosFailed(f"it does not go on: {await cluster.why()}")
        if stopped_until and now > stopped_until:
            cluster.go_on()
            stopped_until = 0.0
        before, entries = entries, len(history.entries)
        try:
            async with asyncio.timeout(2.0), cluster.client() as client:
                job = await client.get_job(cluster.uid)
        except (GcoreError, TimeoutError):
            silent = None
        else:
            waits = {wait.cause: wait.what for wait in job.waiting}
            named |= waits.keys()
            silent = None if waits or entries != before or job.state != pb.JOB_STATE_RUNNING else silent or now
            if wrong := waits.keys() - causes:
                raise ChaosFailed(
                    f"it is said to wait for {', '.join(f'{one}: {waits[one]}' for one in sorted(wrong))}"
                )
            if silent is not None and now - silent > SILENT_S and not history.ended:
                raise ChaosFailed(f"nothing has moved for {now - silent:.0f} s, and controllers name no wait")
        await CLOCK.sleep(0.5)
    return sorted(named)


# Processes that stop and go on.


async def paused_controller(cluster: ChaosCluster) -> Told:
    """A controller sleeps for three leases, wakes, and must not get anything into the chain."""
    name = cluster.pick(cluster.up)
    process = cluster.daemons[name].process
    assert process is not None
    before = cluster.seen.incarnation(name)
    cluster.stop(process)
    await CLOCK.sleep(PAUSE_S)
    slept = len(cluster.seen.entries)
    cluster.go_on()
    await CLOCK.sleep(TTL_S)
    wrote = [
        seen.entry.seq for seen in cluster.seen.entries[slept:] if before is not None and seen.entry.writer == before
    ]
    if wrote:
        raise ChaosFailed(f"{before} slept for {PAUSE_S:.0f} s, woke up, and wrote entries {wrote}")
    return {"target": name, "entries_meanwhile": slept}


def paused(part: Part) -> Act:
    """One worker's process sleeps for three leases."""

    async def act(cluster: ChaosCluster) -> Told:
        found = await cluster.workers(part)
        if not found:
            raise NobodyHit(f"no {part} was there yet")
        name = cluster.pick(found)
        cluster.stop(found[name])
        await CLOCK.sleep(PAUSE_S)
        cluster.go_on()
        return {"target": name}

    return act


async def paused_etcd(cluster: ChaosCluster) -> Told:
    """etcd sleeps for three leases: it answers nothing, and connections stand."""
    name = cluster.pick(cluster.members)
    process = cluster.members[name].process
    assert process is not None
    cluster.stop(process)
    await CLOCK.sleep(PAUSE_S)
    cluster.go_on()
    return {"target": name}


async def paused_at_commit(cluster: ChaosCluster) -> Told:
    """The committing controller is stopped with its transaction ready. Another one commits. The first continues and sends it."""
    return await _asleep_at(cluster, "commit.before")


async def paused_at_seal(cluster: ChaosCluster) -> Told:
    """The same with a seal."""
    return await _asleep_at(cluster, "seal.before")


async def _asleep_at(cluster: ChaosCluster, point: str) -> Told:
    cluster.arm(point, f"stop {cluster.rng.randint(1, 3)}")
    await cluster.until(f"process that sleeps at {point}", lambda: cluster.ended or cluster.fired(point))
    pid = cluster.fired(point)
    if pid is None:
        raise NobodyHit(f"the job ended before a process reached {point}")
    name = next((n for n, d in cluster.daemons.items() if d.process is not None and d.process.pid == pid), None)
    if name is None:
        raise ChaosFailed(f"process {pid} sleeps at {point} and is no daemon of the cluster")
    before = cluster.seen.incarnation(name)
    known = len(cluster.seen.entries)
    await cluster.until(
        "commit of the others", lambda: cluster.ended or len(cluster.seen.entries) > known, 4 * RECOVERY_GOAL_S
    )
    await CLOCK.sleep(PAUSE_S)  # until its lease is gone too: whatever this incarnation writes from now on is wrong
    slept = len(cluster.seen.entries)
    process = cluster.daemons[name].process
    assert process is not None
    send_signal(process, signal.SIGCONT)
    await CLOCK.sleep(TTL_S)
    wrote = [seen.entry.seq for seen in cluster.seen.entries[slept:] if seen.entry.writer == before]
    if wrote:
        raise ChaosFailed(f"{before} fell asleep at {point}, woke up, and wrote entries {wrote}")
    return {"target": name}


# The network.


async def cut_node(cluster: ChaosCluster) -> Told:
    """A node is cut off from everybody for three leases."""
    name = cluster.pick(cluster.up)
    return await _apart(cluster, [name], seconds=PAUSE_S)


async def cut_one_way(cluster: ChaosCluster) -> Told:
    """A node is heard by all and hears nothing, or the other way round."""
    assert cluster.network is not None
    name, deaf = cluster.pick(cluster.up), cluster.rng.random() < 0.5
    for other in _others(cluster, [name]):
        cluster.network.cut(*((other, name) if deaf else (name, other)))
    await CLOCK.sleep(PAUSE_S)
    cluster.network.heal()
    return {"target": f"{name} {'hears nothing' if deaf else 'is not heard'}"}


async def cut_from_store(cluster: ChaosCluster) -> Told:
    """A node reaches its peers and not the store."""
    assert cluster.network is not None
    name = cluster.pick(cluster.up)
    cluster.network.part([name], cluster.members)
    await CLOCK.sleep(PAUSE_S)
    cluster.network.heal()
    return {"target": name}


async def cut_peers(cluster: ChaosCluster) -> Told:
    """The nodes reach the store and not each other."""
    assert cluster.network is not None
    names = sorted(cluster.daemons)
    cluster.network.part(names[:1], names[1:])
    await CLOCK.sleep(PAUSE_S)
    cluster.network.heal()
    return {"target": " | ".join(names)}


async def cut_leader(cluster: ChaosCluster) -> Told:
    """The store's leader is cut off from everybody."""
    return await _apart(cluster, [await cluster.leader()], seconds=PAUSE_S)


async def compacted(cluster: ChaosCluster) -> Told:
    """While a node is cut off from the store, history is compacted beyond what it has seen: it must list again.

    Its daemon's watches end with its lease, mostly before they are opened again; its workers' supervisors watch on.
    """
    assert cluster.network is not None
    name = cluster.pick(cluster.up)
    if not any(f"-{name}-" in worker for worker in await cluster.workers("rank-supervisor")):
        raise NobodyHit(f"no rank of {name} has watched for longer than a lease yet")
    before = listings_again(cluster.homes[name])
    cluster.network.part([name], cluster.members)
    revisions = []
    for _ in range(3):
        await CLOCK.sleep(PAUSE_S / 3)
        revisions.append(await cluster.compact())
    cluster.network.heal()
    await cluster.until(
        f"watch of {name} that lists again", lambda: cluster.ended or listings_again(cluster.homes[name]) > before
    )
    listed = listings_again(cluster.homes[name]) - before
    if not listed:
        raise NobodyHit(f"the job ended before a watch of {name} was opened again")
    return {"target": name, "compacted": revisions[-1], "listed_again": listed}


def listings_again(home: Path) -> int:
    """How often the workers' supervisors on a node have found that a watch's history is gone, and listed again."""
    return sum(log.read_text(errors="replace").count(LISTED_AGAIN) for log in (home / "logs").glob("*.supervisor.log"))


def _others(cluster: ChaosCluster, names: list[str]) -> list[str]:
    return [other for other in (*cluster.daemons, *cluster.members) if other not in names]


async def _apart(cluster: ChaosCluster, names: list[str], *, seconds: float) -> Told:
    assert cluster.network is not None
    cluster.network.part(names, _others(cluster, names))
    await CLOCK.sleep(seconds)
    cluster.network.heal()
    return {"target": ", ".join(names)}


# What surrounds the processes.


async def disk_full(cluster: ChaosCluster) -> Told:
    """The runs' disk is full. Some seconds after the warning about it there is room again.

    Before the first step there may be nothing to write yet: then the disk is filled again later.
    """
    revision = cluster.seen.mirror.revision
    seconds = cluster.rng.uniform(4.0, 10.0)
    with _full(cluster.runs / "ballast"):
        await CLOCK.sleep(seconds)
        if cluster.seen.step:
            await _until_told(cluster, revision, NO_ROOM)
    if not _told_since(cluster, revision, NO_ROOM):
        await cluster.until("first step", lambda: cluster.ended or cluster.seen.step > 0)
        with _full(cluster.runs / "ballast"):
            await _until_told(cluster, revision, NO_ROOM)
    return {"target": f"full for {seconds:.1f} s", "told": _told_since(cluster, revision, NO_ROOM)}


@contextlib.contextmanager
def _full(ballast: Path) -> Iterator[None]:
    """There is no room beside it."""
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"\0" * 65536):
            pass
    try:
        yield
    finally:
        ballast.unlink()


def _told_since(cluster: ChaosCluster, revision: int, words: str) -> list[str]:
    """The topics of the job's events after that revision that contain these words."""
    troubles = cluster.seen.mirror.troubles
    return sorted(name for name, one in troubles.items() if one.revision > revision and words in one.record.sentence)


async def _until_told(cluster: ChaosCluster, revision: int, words: str) -> list[str]:
    """As `_told_since`, once there is something. Raises NobodyHit if the job ended before."""
    await cluster.until(f"event with {words!r}", lambda: cluster.ended or _told_since(cluster, revision, words))
    if not (topics := _told_since(cluster, revision, words)):
        raise NobodyHit(f"the job ended before an event with {words!r}")
    return topics


async def slow_reward(cluster: ChaosCluster) -> Told:
    """The reward is a hundred times slower until a warning appears; a second event reports the end.

    The usual pace must be known before, so some steps have passed.
    """
    slow = cluster.packages / "slow"
    await cluster.until(f"step {USUAL_AFTER}", lambda: cluster.ended or cluster.seen.step >= USUAL_AFTER)
    revision = cluster.seen.mirror.revision
    slow.touch()
    try:
        await CLOCK.sleep(PAUSE_S)
        await _until_told(cluster, revision, SLOWER)
    finally:
        slow.unlink()
    told = _told_since(cluster, revision, SLOWER)
    # Else a pool that still calls it slow would not tell it at the next moment.
    await cluster.until(
        f"event that {QUICK_AGAIN!r}",
        lambda: cluster.ended or set(told) <= set(_told_since(cluster, revision, QUICK_AGAIN)),
    )
    return {"target": "the reward", "told": told}


async def storm(cluster: ChaosCluster) -> Told:
    """Nodes come and go, in good order or not."""
    count = 0
    end = CLOCK.monotonic() + 4 * TTL_S
    permanent = "node-0"
    while CLOCK.monotonic() < end and not cluster.ended:
        daemon = cluster.daemons[cluster.pick(set(cluster.daemons) - {permanent})]
        daemon.wanted = not daemon.wanted
        if daemon.wanted and not daemon.runs:
            daemon.start()
        elif not daemon.wanted:
            daemon.signal(cluster.rng.choice((signal.SIGTERM, signal.SIGKILL)))
        count += 1
        await CLOCK.sleep(cluster.rng.uniform(0.3, 2.0))
    for daemon in cluster.daemons.values():
        daemon.wanted = True
    return {"target": f"{count} comings and goings"}


async def rolling_restart(cluster: ChaosCluster) -> Told:
    """Each daemon is stopped in good order and started again, one after the other."""
    for name in cluster.up:
        await _restart(cluster, name)
    return {"target": "each daemon"}


async def _restart(cluster: ChaosCluster, name: str) -> None:
    """A daemon is stopped in good order, started again, and works on the job."""
    old = cluster.seen.incarnation(name)
    cluster.daemons[name].signal(signal.SIGTERM)
    await cluster.until(f"{name}'s new incarnation", partial(_is_anew, cluster, name, old))


def _is_anew(cluster: ChaosCluster, name: str, old: str | None) -> bool:
    """Whether a node has another incarnation than `old`, or the job has ended."""
    return cluster.ended or cluster.seen.incarnation(name) not in (None, old)


OLDER_VERSION = NEWEST_VERSION - 1


async def rewritten_restart(cluster: ChaosCluster) -> Told:
    """The same, from daemons that are pinned to the schema version before to those of the newest, their workers among them.

    What stands in the store is of the version before while one old daemon is there, and of the newest when all are new.
    """
    for daemon in cluster.daemons.values():
        del daemon.environment[PIN]
    first, *others = cluster.up
    await _expect_written(cluster, OLDER_VERSION, "before any daemon is new")
    await _restart(cluster, first)
    for name in others:
        await _expect_written(cluster, OLDER_VERSION, f"while {name} is old")
        await _restart(cluster, name)
    await _expect_written(cluster, NEWEST_VERSION, "when all daemons are new")
    return {"target": "each daemon", "schema_versions": [OLDER_VERSION, NEWEST_VERSION]}


async def _expect_written(cluster: ChaosCluster, version: int, when: str) -> None:
    """The next head that is written is of this schema version, as it stands in the store."""
    seen = cluster.seen
    seq = seen.mirror.head.record.seq if seen.mirror.head is not None else -1
    await cluster.until(
        f"newer head {when}",
        lambda: cluster.ended or (seen.mirror.head is not None and seen.mirror.head.record.seq > seq),
    )
    if cluster.ended:
        raise NobodyHit(f"the job ended {when}")
    kv = await cluster.store.get(seen.mirror.keys.head)
    written = None if kv is None else json.loads(kv.value)["schema_version"]
    if written != version:
        raise ChaosFailed(f"head is written in schema version {written} {when}, expected {version}")


async def lost_answers(cluster: ChaosCluster) -> Told:
    """The store's answers to the usual transactions are lost, or the transactions before they are sent: each of them."""
    armed = [f"{kind}.{when}" for kind in USUAL for when in BEFORE_AFTER]
    for kind in USUAL:
        for when in BEFORE_AFTER:
            cluster.arm(f"{kind}.{when}", f"lose {1 if kind in ONCE else cluster.rng.randint(1, 2)}")
    await cluster.until("end of the job", lambda: cluster.ended, 120.0)
    kept = [point for point in armed if cluster.fired(point) is None]
    if kept:
        raise ChaosFailed(f"the job ended, and no process lost an answer at {', '.join(kept)}")
    return {"target": f"{len(armed)} answers"}


# Exact moments.

USUAL = ("join", "assign", "offer", "seal", "ready", "commit", "register", "retain")
"""Transactions that every run makes, also the shortest; most of them in every step."""
CONTROLLER_POINTS = (*USUAL, "prune")
"""Those, and one that comes only after many steps (`PRUNED_AFTER`)."""
OTHER_POINTS = ("start", "node", "feed", "apply", "publish", "forget", "rollback")
WORKER_POINTS = ("worker", "rendezvous", "step", "stage", "receipt", "checkpoint", "copies")


ONCE = ("join", "assign", "start", "node", "worker", "rendezvous", "retain", "forget", "prune", "rollback")
"""What a process comes to seldom: the first pass is the one."""


def at_point(what: str) -> Act:
    """The process that reaches the fault point is killed there: before it in even runs, after it in odd ones."""

    async def act(cluster: ChaosCluster) -> Told:
        point = f"{what}.{BEFORE_AFTER[cluster.number % 2]}"
        cluster.arm(point, f"kill {1 if what in ONCE else cluster.rng.randint(1, 3)}")
        if what == "node" or (what in ("join", "assign") and cluster.history is not None):
            cluster.daemons[cluster.pick(cluster.up)].signal(signal.SIGTERM)
        if what == "rollback":
            await cluster.until("first step", lambda: cluster.history is not None and cluster.seen.step > 0)
        with contextlib.suppress(NobodyHit):  # who is about to be started comes to the point by itself
            if what == "rollback" or (what == "rendezvous" and cluster.history is not None):
                await killed("rank")(cluster)
            if what == "worker" and cluster.history is not None:
                await killed("engine")(cluster)
        await cluster.until(f"death at {point}", lambda: cluster.ended or cluster.fired(point) is not None)
        pid = cluster.fired(point)
        if pid is None:
            raise ChaosFailed(f"no process reached {point}")
        await cluster.until("its end", lambda: identify_process(pid) is None, 10.0)
        return {"target": point}

    return act


def _mixture() -> list[tuple[str, Act]]:
    """Every fault that any running cluster can suffer, in an order that has nothing to do with the table's."""
    ways = [(f.name, f.act) for f in FAULTS if f.act is not None and f.act is not mixed and f.name not in OF_ITS_OWN]
    random.Random(1).shuffle(ways)
    return ways


async def mixed(cluster: ChaosCluster) -> Told:
    """The fault whose turn it is, by the run's number; as many runs as there are ways have each once."""
    ways = _mixture()
    name, act = ways[cluster.number % len(ways)]
    told = await act(cluster)
    return told | {"target": f"{name}: {told['target']}"}


OF_ITS_OWN = (
    *("blob-store", "several-with-pictures", "several-that-generate", "several-that-follow", "all-that-follow"),
    *("several-of-more", "schema-restart", "lost-answers", "at-start", "at-prune"),
)
"""Faults that need a job, or a cluster, that begins with them, lasts for them, or has pictures."""
THREE_STORES = Shape(members=3)
MIXED = Shape(nodes=2, spares=1, members=3, network=True)
OLD = Shape(environment={PIN: str(OLDER_VERSION)})
NAMESPACES = Shape(network=True)
LONG = 45
POINT_RUNS = 2
PRUNED_AFTER = 80
"""Steps of each such run: entries are moved out of the store many at a time (`controllers.rules.retention`), for the first time at
the 96th, then after 32 more, and each of a job's two moments needs one of those."""

FAULTS: tuple[Fault, ...] = (
    Fault("controller", "kill -9 of a controller, which stays away", controller, steps=30),
    Fault("controller-back", "kill -9 of a controller, started again at once", controller_back, steps=30),
    Fault("engine", "kill -9 of an engine", killed("engine")),
    Fault("engine-supervisor", "kill -9 of an engine's supervisor", killed("engine-supervisor")),
    Fault("rank", "kill -9 of a train rank", killed("rank")),
    Fault("rank-supervisor", "kill -9 of a rank's supervisor", killed("rank-supervisor")),
    Fault("etcd", "kill -9 of the only etcd", etcd),
    Fault("etcd-leader", "kill -9 of the leader of three etcd", leader, THREE_STORES),
    Fault("etcd-majority", "kill -9 of two of three etcd", majority, THREE_STORES),
    Fault("etcd-gone", "no etcd for 60 s", etcd_gone),
    Fault("node", "kill -9 of all of a node", node),
    Fault("everything", "kill -9 of everything at once", everything),
    Fault("several", "two to four processes hit at once", several, steps=LONG),
    Fault("several-of-more", "the same of three nodes and three etcd", several, Shape(nodes=3, members=3), steps=LONG),
    Fault("blob-store", "kill -9 of a blob store, in a job with pictures", blob_store, pictures=True),
    Fault(
        "several-with-pictures",
        "two to four processes hit at once, blob stores among them, in a job with pictures",
        several,
        steps=LONG,
        pictures=True,
    ),
    Fault(
        "several-that-generate",
        "two to four processes hit at once, blob stores among them, in a job that generates pictures (flow_grpo)",
        several,
        steps=LONG,
        generates="flow_grpo",
    ),
    Fault(
        "several-that-follow",
        "the same with diffusion_nft, whose served network follows the trained one",
        several,
        steps=LONG,
        generates="diffusion_nft",
    ),
    Fault(
        "all-that-follow",
        "kill -9 of everything at once, in a job of diffusion_nft",
        everything,
        generates="diffusion_nft",
    ),
    Fault("paused-controller", "SIGSTOP of a controller for three leases", paused_controller, steps=LONG),
    Fault("paused-engine", "SIGSTOP of an engine for three leases", paused("engine"), steps=LONG),
    Fault("paused-rank", "SIGSTOP of a train rank for three leases", paused("rank"), steps=LONG),
    Fault(
        "paused-supervisor", "SIGSTOP of a rank's supervisor for three leases", paused("rank-supervisor"), steps=LONG
    ),
    Fault("paused-etcd", "SIGSTOP of the only etcd for three leases", paused_etcd),
    Fault("paused-at-commit", "SIGSTOP with a commit in hand, until another committed", paused_at_commit, steps=LONG),
    Fault("paused-at-seal", "SIGSTOP with a seal in hand, until others committed", paused_at_seal, steps=LONG),
    Fault("cut-node", "a node cut off from everybody", cut_node, NAMESPACES, steps=LONG),
    Fault("cut-one-way", "a node that hears nothing, or is not heard", cut_one_way, NAMESPACES, steps=LONG),
    Fault("cut-from-store", "a node cut off from etcd only", cut_from_store, NAMESPACES, steps=LONG),
    Fault("cut-peers", "nodes that reach etcd and not each other", cut_peers, NAMESPACES, steps=LONG),
    Fault("cut-leader", "the leader of three etcd cut off", cut_leader, Shape(members=3, network=True), steps=LONG),
    Fault("compaction", "history compacted while a node is cut off", compacted, NAMESPACES, steps=LONG),
    Fault("disk-full", "no room on the runs' disk", disk_full, disk_mb=96),
    Fault("slow-reward", "a reward that takes a hundred times as long", slow_reward),
    Fault("storm", "nodes that come and go", storm, Shape(nodes=2, spares=2), steps=LONG),
    Fault("rolling-restart", "each daemon restarted in good order", rolling_restart, steps=LONG),
    Fault(
        "schema-restart",
        "each daemon restarted, from the schema version before to the newest",
        rewritten_restart,
        OLD,
        steps=LONG,
        together=False,
    ),
    Fault(
        "lost-answers",
        "answers of etcd that never came, of the usual kinds: " + ", ".join(USUAL),
        lost_answers,
        at_start=True,
        steps=18,
        together=False,
    ),
    *(
        Fault(
            f"at-{what}",
            f"kill -9 before and after {what}",
            at_point(what),
            steps=PRUNED_AFTER if what == "prune" else 16,
            moments=POINT_RUNS,
            at_start=True,
            together=what != "start",
        )
        for what in (*CONTROLLER_POINTS, *OTHER_POINTS, *WORKER_POINTS)
    ),
    Fault("mixed", "another one of these in each run", mixed, MIXED, disk_mb=192),
    Fault(
        "losses",
        "everything killed three times; the losses are an undisturbed run's",
        whole=losses_equal,
        together=False,
        moments=2,
    ),
    Fault(
        "losses-elsewhere",
        "the same, with other numbers of controllers",
        whole=losses_equal_elsewhere,
        together=False,
        moments=2,
    ),
    Fault(
        "four-one-three",
        "begun with 4 controllers, continued with 1, then 3",
        whole=four_one_three,
        together=False,
        moments=2,
    ),
    Fault(
        "another-trainer",
        "begun with DeepSpeed on two ranks, continued with FSDP2 on one, then with DeepSpeed on two",
        whole=another_trainer,
        together=False,
        moments=2,
    ),
    Fault("demo", "the demo, everything killed at ten moments", whole=demo_survives, moments=1, demo=True),
)

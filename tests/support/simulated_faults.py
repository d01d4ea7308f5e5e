"""The faults of a simulated cluster: kills, stops, partitions, joins and leaves, clock jumps, and faults of the store.

The story's seed selects kind, time and duration. Nothing here changes a record.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING

from people import People
from simulated_network import STORE, Weather
from virtual_time import Process

if TYPE_CHECKING:
    from simulated_cluster import Node, SimulatedCluster

TTL_S = 10
"""Of a simulated daemon's lease."""


class Faults:
    """What happens to the cluster, by chance. Each deed says what it does in the history."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._chance = cluster.chance
        self._joined = 0
        self._people = People(cluster.store, cluster.job.uid)
        self._deeds: dict[str, Callable[[], str]] = {
            "kill_daemon": self._kill_daemon,
            "kill_worker": self._kill_worker,
            "kill_node": self._kill_node,
            "kill_all": self._kill_all,
            "stop_daemon": self._stop_daemon,
            "stop_worker": self._stop_worker,
            "cut": self._cut,
            "cut_one_way": self._cut_one_way,
            "join": self._join,
            "leave": self._leave,
            "jump": self._jump,
            "compact": self._compact,
            "outage": self._outage,
            "new_leader": self._new_leader,
            "damage": self._damage,
            "pinch": self._pinch,
            "pause": self._pause,
            "drain": self._drain,
        }
        if cluster.story.copies is not None:
            self._deeds["wipe"] = self._wipe
        if cluster.story.has_blobs:
            self._deeds["lose_blobs"] = self._lose_blobs
            self._deeds["restart_blobs"] = self._restart_blobs
        often = ("lose_blobs", "lose_blobs") if cluster.story.has_blobs else ()
        self._kinds = cluster.story.faults or (*self._deeds, *often)

    def one(self) -> int:
        """Something happens."""
        what = self._deeds[self._chance.choice(self._kinds)]()
        if what:
            self._cluster.tell(f"* {what}")
        return bool(what)

    def stop(self) -> None:
        """All is well from now on: everything runs, nothing is cut, no message is lost."""
        cluster = self._cluster
        cluster.faulty = False
        cluster.tell("* the faults stop")
        cluster.network.cut.clear()
        cluster.network.weather = Weather()
        if cluster.store.stopped:
            cluster.store.start()
            cluster.pending.look()
        self._people.put_right()
        for name, store in cluster.floor.stores.nodes.items():
            if store.down:
                cluster.floor.stores.restart(name)
        for node in cluster.nodes.values():
            if node.process is not None:
                node.process.thaw()
            node.start()
            for worker in node.workers:
                worker.process.thaw()

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        self._cluster.loop.call_later(seconds, lambda: do() if self._cluster.faulty else None)

    def _node(self) -> Node:
        return self._chance.choice(list(self._cluster.nodes.values()))

    def _seconds(self) -> float:
        return self._chance.choice([1.0, 4.0, 8.0, 15.0, 35.0])

    def _start_later(self, node: Node) -> float:
        seconds = self._seconds()
        self._later(seconds, node.start)
        return seconds

    def _kill_daemon(self) -> str:
        node = self._node()
        node.kill()
        return f"kill -9 of {node.name}'s daemon; it comes back after {self._start_later(node):g} s"

    def _kill_worker(self) -> str:
        workers = [w for w in self._cluster.floor.workers if w.alive]
        if not workers:
            return ""
        worker = self._chance.choice(workers)
        worker.end("kill -9")
        return f"kill -9 of {worker.spec.instance}"

    def _kill_node(self) -> str:
        node = self._node()
        node.kill()
        for worker in node.workers:
            worker.end("its machine died")
        return f"{node.name} dies with all on it; it comes back after {self._start_later(node):g} s"

    def _kill_all(self) -> str:
        for node in self._cluster.nodes.values():
            node.kill()
            for worker in node.workers:
                worker.end("everything died")
            self._start_later(node)
        return "everything dies"

    def _freeze(self, process: Process) -> float:
        seconds = self._chance.choice([2.0, TTL_S * 1.5, TTL_S * 3.0])
        process.freeze()
        self._later(seconds, process.thaw)
        return seconds

    def _stop_daemon(self) -> str:
        node = self._node()
        if node.process is None or not node.process.running:
            return ""
        return f"{node.name}'s daemon is stopped for {self._freeze(node.process):g} s"

    def _stop_worker(self) -> str:
        workers = [w for w in self._cluster.floor.workers if w.process.running]
        if not workers:
            return ""
        worker = self._chance.choice(workers)
        return f"{worker.spec.instance} is stopped for {self._freeze(worker.process):g} s"

    def _cut(self) -> str:
        node, others = self._node(), [STORE, *self._cluster.nodes]
        other = self._chance.choice([name for name in others if name != node.name])
        return self._cut_links([(node.name, other), (other, node.name)])

    def _cut_one_way(self) -> str:
        node, others = self._node(), [STORE, STORE, *self._cluster.nodes]
        other = self._chance.choice([name for name in others if name != node.name])
        return self._cut_links([self._chance.choice([(node.name, other), (other, node.name)])])

    def _cut_links(self, links: list[tuple[str, str]]) -> str:
        seconds, cut = self._seconds(), self._cluster.network.cut
        cut.update(links)
        self._later(seconds, lambda: cut.difference_update(links))
        return f"nothing gets through for {seconds:g} s: {', '.join(f'{a} to {b}' for a, b in links)}"

    def _join(self) -> str:
        if len(self._cluster.nodes) >= 6:
            return ""
        self._joined += 1
        node = self._cluster.add_node(f"j{self._joined}")
        node.start()
        return f"{node.name} joins"

    def _leave(self) -> str:
        node = self._node()
        node.leave()
        return f"{node.name}'s daemon leaves; it comes back after {self._start_later(node):g} s"

    def _jump(self) -> str:
        node, seconds = self._node(), self._chance.choice([2.0, 20.0, 120.0])
        node.clock.offset += seconds
        return f"{node.name}'s clock jumps by {seconds:g} s"

    def _compact(self) -> str:
        if self._cluster.store.compacted == self._cluster.store.revision:
            return ""
        self._cluster.store.compact()
        self._cluster.pending.look()
        return "the store forgets its history"

    def _outage(self) -> str:
        store = self._cluster.store
        if store.stopped:
            return ""
        seconds = self._seconds()

        def back() -> None:
            if store.stopped:
                store.start()
                self._cluster.pending.look()

        store.stop()
        self._later(seconds, back)
        return f"the store is away for {seconds:g} s"

    def _new_leader(self) -> str:
        self._cluster.store.extend_leases()
        return "the store has a new leader: every lease has its full time again"

    def _damage(self) -> str:
        floor = self._cluster.floor
        pattern = "checkpoints/*/model.safetensors"
        home, name = floor.run_dir.parent, floor.run_dir.name
        files = sorted(home.glob(f"*/{name}/{pattern}" if floor.apart else f"{name}/{pattern}"))
        if not files:
            return ""
        file = self._chance.choice(files)
        file.write_text("[]")
        where = f" on {file.relative_to(home).parts[0]}" if floor.apart else ""
        return f"the disk damages {file.parent.name}{where}"

    def _pinch(self) -> str:
        """The job's namespace may have fewer slots, as if others claimed them."""
        slots, seconds = self._chance.randrange(len(self._cluster.nodes)), self._seconds()
        self._people.limit(slots)
        self._later(seconds, lambda: self._people.limit(None))
        return f"the job may have {slots} slots for {seconds:g} s"

    def _lose_blobs(self) -> str:
        """The stores of some nodes lose blobs: some of one, or all of all."""
        stores = {node: store for node, store in sorted(self._cluster.floor.stores.nodes.items()) if store.names}
        if not stores:
            return ""
        if self._chance.random() < 0.3:
            count = sum(len(store.names) for store in stores.values())
            for store in stores.values():
                store.lose(store.names)
            return f"all blob stores lose their {count} blobs"
        node = self._chance.choice(list(stores))
        names = stores[node].names
        lost = self._chance.sample(names, self._chance.randint(1, len(names)))
        stores[node].lose(lost)
        return f"the blob store of {node} loses {len(lost)} blobs"

    def _restart_blobs(self) -> str:
        """The store of a node is killed; until it is back it does not answer, and then it has neither pins nor reservations."""
        stores, seconds = self._cluster.floor.stores, self._seconds()
        if not stores.nodes:
            return ""
        node = self._chance.choice(sorted(stores.nodes))
        stores.of(node).down = True
        self._later(seconds, lambda: stores.restart(node))
        return f"kill -9 of the blob store of {node}; it comes back after {seconds:g} s"

    def _pause(self) -> str:
        seconds = self._seconds()
        if not self._people.pause(yes=True):
            return ""
        self._later(seconds, lambda: self._people.resume())
        return f"the job is paused for {seconds:g} s"

    def _drain(self) -> str:
        node, seconds = self._node(), self._seconds()
        self._people.drain(node.name, yes=True)
        self._later(seconds, lambda: self._people.drain(node.name, yes=False))
        return f"{node.name} is drained for {seconds:g} s"

    def _wipe(self) -> str:
        """A machine is lost with its disk, and another comes under its name."""
        said, floor = self._kill_node(), self._cluster.floor
        name = said.split()[0]
        shutil.rmtree(floor.folder(name), ignore_errors=True)
        if name in floor.stores.nodes:
            floor.stores.of(name).lose(floor.stores.of(name).names)
        floor.restage()
        return f"{said}, without its disk"

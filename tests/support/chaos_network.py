"""A small network of namespaces: every machine of a test cluster has its own, and a router between them can cut any path.

Each machine is 10.203.N.2 in a namespace of its own; the router has 10.203.N.1 toward it. The test itself is one of them,
in the machine's own namespace. A cut is a routing rule of the router that throws away what comes from one and goes to the
other: without an answer, as a broken switch does it, in one direction or both. Needs root and iproute2; nothing outside
the namespaces but one interface and one route of the test's own is made, and all of it is taken away by `close`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

PREFIX = "gcore-chaos-"
ROUTER = f"{PREFIX}router"
NETWORK = "10.203"
SELF = 250
"""The test's own number in the network."""


class NoNamespaces(RuntimeError):
    """This machine, or this user, makes none."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One namespace. `number`: from 1 to 249."""

    name: str
    number: int

    @property
    def namespace(self) -> str:
        """As `ip netns` knows it."""
        return f"{PREFIX}{self.name}"

    @property
    def address(self) -> str:
        """Where the others reach it."""
        return f"{NETWORK}.{self.number}.2"


class Network:
    """The namespaces of one cluster. One at a time on a machine: the names are fixed, so that leftovers can be found."""

    def __init__(self) -> None:
        self._machines: dict[str, Machine] = {}
        self._cuts: list[tuple[str, str]] = []

    @classmethod
    @contextlib.contextmanager
    def of(cls, names: Iterable[str]) -> Iterator[Network]:
        """With a namespace for each name. Raises NoNamespaces."""
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise NoNamespaces("network namespaces need root and iproute2")
        network = cls()
        clear()
        try:
            network._make(names)
            yield network
        finally:
            clear()

    def __getitem__(self, name: str) -> Machine:
        return self._machines[name]

    def command(self, name: str, command: Iterable[str]) -> list[str]:
        """`command` on that machine; the process is the command's own, for `ip` becomes it."""
        return ["ip", "netns", "exec", self._machines[name].namespace, *command]

    def cut(self, source: str, target: str) -> None:
        """Nothing that `source` sends reaches `target` any more."""
        pair = self._machines[source].address, self._machines[target].address
        _ip("-n", ROUTER, "rule", "add", "from", pair[0], "to", pair[1], "blackhole", "pref", "100")
        self._cuts.append(pair)

    def part(self, some: Iterable[str], others: Iterable[str]) -> None:
        """Nothing goes between the two sides any more, either way."""
        right = list(others)
        for one in some:
            for other in right:
                self.cut(one, other)
                self.cut(other, one)

    def heal(self) -> None:
        """Everything goes through again."""
        while self._cuts:
            source, target = self._cuts.pop()
            _ip("-n", ROUTER, "rule", "del", "from", source, "to", target, "blackhole", "pref", "100")

    def _make(self, names: Iterable[str]) -> None:
        _ip("netns", "add", ROUTER)
        _ip("-n", ROUTER, "link", "set", "lo", "up")
        _ip("netns", "exec", ROUTER, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        # The test's own place: the one end stays here.
        _ip("link", "add", f"{PREFIX}0", "type", "veth", "peer", "name", "self", "netns", ROUTER)
        _join(SELF, "self")
        _ip("addr", "add", f"{NETWORK}.{SELF}.2/24", "dev", f"{PREFIX}0")
        _ip("link", "set", f"{PREFIX}0", "up")
        _ip("route", "add", f"{NETWORK}.0.0/16", "via", f"{NETWORK}.{SELF}.1")
        for number, name in enumerate(names, start=1):
            machine = self._machines[name] = Machine(name, number)
            _ip("netns", "add", machine.namespace)
            _ip("-n", machine.namespace, "link", "set", "lo", "up")
            inside = ("peer", "name", "eth0", "netns", machine.namespace)
            _ip("-n", ROUTER, "link", "add", f"to{number}", "type", "veth", *inside)
            _join(number, f"to{number}")
            _ip("-n", machine.namespace, "addr", "add", f"{machine.address}/24", "dev", "eth0")
            _ip("-n", machine.namespace, "link", "set", "eth0", "up")
            _ip("-n", machine.namespace, "route", "add", "default", "via", f"{NETWORK}.{number}.1")


def _join(number: int, interface: str) -> None:
    """The router's end toward a machine."""
    _ip("-n", ROUTER, "addr", "add", f"{NETWORK}.{number}.1/24", "dev", interface)
    _ip("-n", ROUTER, "link", "set", interface, "up")


def clear() -> None:
    """Take away what an earlier test left, or this one made. Interfaces go with their namespaces."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        if line.startswith(PREFIX):
            _ip("netns", "del", line.split()[0])


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoNamespaces(f"ip {' '.join(arguments)}: {done.stderr.strip()}")

"""The process group of a world's ranks: rendezvous, and collectives for small values (sums, maxima, agreement checks).

Rank 0 listens on its own address only; gloo and NCCL are bound to the interface with that address. All communication
uses tensors; no objects are sent. The train backend (DeepSpeed or FSDP2) handles gradients and parameters.

Nothing here times out soon by itself: the supervisor's watchdog ends a rank that waits for a lost one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gcore.errors import GcoreError, first_line
from gcore.system.network import is_loopback, join_host_port, listen, split_host_port
from gcore.train.backends.sequence_parallel import ALONE, SequenceGroup

SIOCGIFADDR = 0x8915


MEETING_TIMEOUT = timedelta(minutes=10)
"""Maximum time that a rank waits at the store for the other ranks."""


COLLECTIVE_TIMEOUT = timedelta(hours=2)
"""Long, because a rank may wait for a peer that has not received Apply yet; the watchdog handles hangs."""


class WorldDiverged(GcoreError):
    """The ranks of a world do not agree on what to do next, for example which step to train."""


class RendezvousFailed(GcoreError):
    """A rank could not join the process group."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """What a rank needs to join the process group: its rank, the number of ranks, and its own address `host`."""

    rank: int
    size: int
    host: str


@dataclass(frozen=True, slots=True, eq=False)
class OpenStore:
    """Rank 0's key-value store (torch's TCPStore), over which the ranks find each other, and its address host:port."""

    store: TCPStore
    address: str


class Collective:
    """The process group of a world, seen from one rank. All methods are collectives: every rank calls them in the same
    order.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device

    @classmethod
    def join(cls, meeting: Rendezvous, store: TCPStore) -> Collective:
        """Join the process group through the store of rank 0; returns when all ranks have joined. Raises
        RendezvousFailed.
        """
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", 0) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        name = find_interface(meeting.host)
        if name is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
        # DeepSpeed reads its rank from the environment. Each rank sees only one device, so its local rank is always 0.
        os.environ.update(RANK=str(meeting.rank), WORLD_SIZE=str(meeting.size), LOCAL_RANK="0")
        with _meeting_errors(meeting):
            dist.init_process_group(
                "nccl" if cuda else "gloo",
                store=store,
                rank=meeting.rank,
                world_size=meeting.size,
                timeout=COLLECTIVE_TIMEOUT,
            )
        return cls(meeting.rank, meeting.size, device)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum of each value over all ranks, in float64.

        Also gathers values that one rank has, if the others pass zeros.
        """
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Maximum of each value over all ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def agree(self, what: str, numbers: Sequence[int]) -> None:
        """Raise WorldDiverged on every rank unless all pass the same int64 numbers."""
        mine = torch.tensor(list(numbers), dtype=torch.int64, device=self.device)
        brought = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(brought, mine)
        rows = [row.tolist() for row in brought]
        if any(row != rows[0] for row in rows):
            listing = ", ".join(f"rank {rank}: {row}" for rank, row in enumerate(rows))
            raise WorldDiverged(f"the ranks do not agree on {what} ({listing})")

    def form_sequence_groups(self, size: int) -> SequenceGroup:
        """Divide the ranks into sequence groups of `size` consecutive ranks. Returns that of this rank.

        `size` must divide the number of ranks.
        """
        if size == 1:
            return ALONE
        firsts = range(0, self.size, size)
        groups = [dist.new_group(list(range(first, first + size)), timeout=COLLECTIVE_TIMEOUT) for first in firsts]
        return SequenceGroup(self.rank % size, size, groups[self.rank // size])

    def leave(self) -> None:
        """Destroy the process group. Call it only while no collective runs."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _reduce(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        if self.size > 1 and len(tensor):
            dist.all_reduce(tensor, operation)
        return [float(value) for value in tensor.tolist()]


class SampleReductions:
    """Sums and maxima of numbers that ranks have from their samples, which are the same on all ranks of a sequence group.

    The numbers of the group's first rank are added. Both methods are collectives of all ranks.
    """

    def __init__(self, collective: Collective, group: SequenceGroup) -> None:
        self._collective = collective
        self._counts = group.index == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum of each number over the sequence groups."""
        return self._collective.sum(values if self._counts else [0.0] * len(values))

    def max(self, values: Sequence[float]) -> list[float]:
        """Maximum of each number over the ranks."""
        return self._collective.max(values)


def find_interface(host: str) -> str | None:
    """The name of the network interface with the address of `host`; None if there is none (gloo and NCCL then
    choose).
    """
    if is_loopback(host):
        return "lo"
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return _interface_v6(host)
    if is_loopback(address):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _interface_v6(host: str) -> str | None:
    """The network interface with the IPv6 address of `host`, from the kernel's list; None if there is none."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET6, socket.SOCK_STREAM)[0][4][0]
        packed = socket.inet_pton(socket.AF_INET6, str(found).partition("%")[0]).hex()
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()]
    except OSError:
        return None
    return next((row[-1] for row in rows if row[0] == packed), None)


def open_store(meeting: Rendezvous) -> OpenStore:
    """Open rank 0's store on its own address and a free port. Raises RendezvousFailed."""
    with _meeting_errors(meeting):
        # By default the store listens on every interface; with a socket it listens only on that.
        listener = listen(meeting.host)
        port = listener.getsockname()[1]
        store = TCPStore(
            meeting.host,
            port,
            meeting.size,
            is_master=True,
            timeout=MEETING_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return OpenStore(store, join_host_port(meeting.host, port))


def find_store(address: str, meeting: Rendezvous) -> TCPStore:
    """Connect to rank 0's store from another rank. Raises RendezvousFailed."""
    host, port = split_host_port(address)
    with _meeting_errors(meeting):
        return TCPStore(host, port, meeting.size, is_master=False, timeout=MEETING_TIMEOUT, wait_for_workers=False)


@contextlib.contextmanager
def _meeting_errors(meeting: Rendezvous) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:  # torch's own errors are RuntimeErrors
        raise RendezvousFailed(
            f"rank {meeting.rank} of {meeting.size} could not join the process group ({first_line(error)})",
            where=meeting.host,
        ) from error

"""Publishers: send a trainer's weights to engines (weight sync), through a folder or over a process group.

`gcore.train.checkpoint.writer.FolderPublisher` writes a folder; `BroadcastPublisher` broadcasts over a `WeightGroup`.

In a weight group, rank 0 is the trainer and the other ranks are engines. The group is independent of the process's
other groups. It is created in the same way as SGLang's (a TCP store under the group's name, then a group that is not
the world), so that either side may be SGLang. Tensors are sent one by one, in the order of the HTTP request that
announces them. Both sides must agree on names, dtypes and shapes first, because a broadcast carries no metadata.

This module does not send HTTP requests and does not decide when to send. An engine takes part only while its route
`/update_weights_from_distributed` runs, so the sender must have sent that request (without waiting for its response).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from gcore.errors import DataError, EngineError, UsageError
from gcore.rollout.api import BroadcastUpdate, TransferManifest, WeightUpdate
from gcore.system.network import join_host_port
from gcore.types import Version

SENDER = 0
"""Rank of the trainer in a weight group."""

BACKENDS = ("gloo", "nccl")
MOST_MEMBERS = 1 << 16
"""Maximum number of ranks of a weight group, as a check of the request."""


@dataclass(frozen=True, slots=True, eq=False)
class NamedTensor:
    """A full (unpartitioned) tensor of the model with its Hugging Face name."""

    name: str
    tensor: torch.Tensor


class Publisher(Protocol):
    """Publishes a trainer's weights to engines, version by version: stage, send, release.

    Every rank of the trainer has a publisher; one rank writes or sends.
    """

    def stage(self, version: Version, tell: Callable[[], None]) -> WeightUpdate:
        """Keep the current weights (in a folder or in memory) as `version`, to be sent later. A collective.

        `tell` is called after each tensor. Returns how engines get them, the same value on every rank.
        """
        ...

    def send(self, update: WeightUpdate) -> None:
        """Send staged weights to the engines; does nothing if engines read staged files. Raises EngineError."""
        ...

    def release(self, update: WeightUpdate) -> None:
        """Delete the staged weights. Idempotent."""
        ...


def describe_tensors(tensors: Mapping[str, torch.Tensor]) -> TransferManifest:
    """Return names, dtypes and shapes of the tensors, in the mapping's order, as an engine needs them to receive."""
    return TransferManifest(
        tuple(tensors),
        tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()),
        tuple(tuple(tensor.shape) for tensor in tensors.values()),
    )


def empty_tensors(manifest: TransferManifest, device: torch.device) -> dict[str, torch.Tensor]:
    """Allocate the tensors of a manifest, to receive into them.

    Raises DataError if the manifest's lists differ in length, if a tensor is listed twice, for an unknown dtype or an
    invalid shape, and if there is not enough memory.
    """
    if not len(manifest.names) == len(manifest.dtypes) == len(manifest.shapes):
        raise DataError(
            f"the manifest has {len(manifest.names)} names, {len(manifest.dtypes)} dtypes and {len(manifest.shapes)} shapes",
            where="weights",
            fix="Send one dtype and one shape per tensor",
        )
    found: dict[str, torch.Tensor] = {}
    for name, dtype, shape in zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True):
        kind = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(kind, torch.dtype):
            raise DataError(f"{dtype!r} is not a torch dtype", where=name, fix="Use a torch name such as float32")
        if any(length < 0 for length in shape):
            raise DataError(f"the shape {list(shape)} has a negative length", where=name)
        if name in found:
            raise DataError("the tensor is listed twice", where=name)
        try:
            found[name] = torch.empty(shape, dtype=kind, device=device)
        except (RuntimeError, TypeError) as error:  # larger than the memory, or than 64 bits can count
            raise DataError(f"there is not enough memory for {dtype} {list(shape)}", where=name) from error
    return found


class WeightGroup:
    """The process group of a trainer and its engines for weight sync, seen from one member. `close` is idempotent."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = group
        self.device = device

    @classmethod
    def join(
        cls, address: str, port: int, *, rank: int, world_size: int, name: str, backend: str, timeout_s: float
    ) -> WeightGroup:
        """Join the group at the trainer's `address`; return when all ranks have joined.

        Blocks for up to `timeout_s`, as does each broadcast later. Raises UsageError for invalid values, and
        EngineError if other ranks do not join.
        """
        if backend not in BACKENDS:
            raise UsageError(f"{backend!r} is not a backend of a weight group", fix=f"Use one of {', '.join(BACKENDS)}")
        if not 0 <= rank < world_size or world_size > MOST_MEMBERS:
            raise UsageError(
                f"rank {rank} of a group of {world_size} is not valid",
                where=name,
                fix=f"Use at most {MOST_MEMBERS} members",
            )
        if not 0 < port < 1 << 16:
            raise UsageError(f"{port} is not a valid port", where=name, fix="Name the port that the sender listens on")
        if not name:
            raise UsageError("the group's name is empty", fix="Give the group a name")
        if backend == "nccl" and not torch.cuda.is_available():
            raise UsageError("the backend nccl needs a GPU, but there is none", where=name, fix="Use the backend gloo")
        at = join_host_port(address, port)
        timeout = timedelta(seconds=timeout_s)
        try:
            store, rank, world_size = next(iter(rendezvous(f"tcp://{at}", rank, world_size, timeout=timeout)))
            store.set_timeout(timeout)
            group, _ = c10d._new_process_group_helper(
                world_size,
                rank,
                [],
                dist.Backend(backend),
                c10d.PrefixStore(name, store),
                group_name=c10d.GroupName(name),
                timeout=timeout,
            )
        except (RuntimeError, ValueError, OSError) as error:  # torch's DistError is a RuntimeError
            raise EngineError(
                f"the ranks of the weight group did not connect ({' '.join(str(error).split())[:200]})",
                where=f"{name} at {at}",
            ) from error
        c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
        return cls(group, torch.device("cuda" if backend == "nccl" else "cpu"))

    def send(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Broadcast these tensors in order, as rank 0. Returns when they are sent. Raises EngineError if the broadcast
        fails.
        """
        self._broadcast([tensor.detach().to(self.device).contiguous() for tensor in tensors.values()])

    def receive(self, manifest: TransferManifest) -> dict[str, torch.Tensor]:
        """Receive the tensors that rank 0 sends, by name, as another rank.

        Raises DataError for an invalid manifest, and EngineError if the broadcast fails.
        """
        tensors = empty_tensors(manifest, self.device)
        self._broadcast(list(tensors.values()))
        return tensors

    def _broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        try:
            handles = [dist.broadcast(t, group_src=SENDER, group=self._group, async_op=True) for t in tensors]
            for handle in handles:
                if handle is not None:
                    handle.wait()
        except RuntimeError as error:
            raise EngineError(f"the broadcast failed ({' '.join(str(error).split())[:200]})") from error

    def close(self) -> None:
        """Leave the group and destroy it in this process."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)


class BroadcastPublisher:
    """Implements `Publisher` over a weight group; only the sending rank has a group.

    Staged weights are copies of the tensors on the device from which the group sends.
    """

    def __init__(self, name: str, group: WeightGroup | None, tensors: Callable[[], Iterator[NamedTensor]]) -> None:
        """`name`: of the weight group. `group`: None on ranks that do not send.

        `tensors`: gathers the current weights one by one; a collective.
        """
        self._name = name
        self._group = group
        self._tensors = tensors
        self._staged: dict[Version, dict[str, torch.Tensor]] = {}

    def stage(self, version: Version, tell: Callable[[], None]) -> BroadcastUpdate:
        """Copy the current weights as `version` on the sending rank. A collective. Returns their names, dtypes and
        shapes.
        """
        described: dict[str, torch.Tensor] = {}
        staged: dict[str, torch.Tensor] = {}
        for one in self._tensors():
            described[one.name] = torch.empty_like(one.tensor, device="meta")
            if self._group is not None:
                staged[one.name] = one.tensor.detach().to(self._group.device, copy=True).contiguous()
            tell()
        self._staged[version] = staged
        return BroadcastUpdate(version, self._name, describe_tensors(described))

    def send(self, update: WeightUpdate) -> None:
        """Broadcast the staged weights. Returns when they are sent. Raises EngineError if they are not staged or not
        received.
        """
        staged = self._staged.get(update.version)
        if staged is None:
            raise EngineError(f"the weights of version {update.version} are not staged", where=self._name)
        if self._group is not None:
            self._group.send(staged)

    def release(self, update: WeightUpdate) -> None:
        """Free the copies of the staged weights."""
        self._staged.pop(update.version, None)

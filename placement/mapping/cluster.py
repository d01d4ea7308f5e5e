"""Description of the cluster that a job is planned for, and the table of known accelerators. A user writes the
description in the file for `gcore plan --cluster`:

    nodes:
      - { name: gpu, count: 2, accelerators: 8, device: h100, host_memory_gib: 1800 }
    network_gb_s: 50

A device is given by its name in `DEVICES` or by its figures. Figures beside a name override those of the named device.
Nodes may differ: the plan then assumes the weakest device everywhere, because any node may get any pool.

The figures of accelerators are those of their makers: dense bfloat16 operations without sparsity, memory as the driver
reports it, and half of a link's bidirectional bandwidth. `cpu-core` is a core of a virtual machine as gcore's own
benchmarks measure it: float32, one thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from gcore.config.base import Section, shorten_text
from gcore.errors import UsageError, did_you_mean

GIB = 1 << 30

NODE_GIB = 2.0
"""Host memory of a node that its controller, a store and the system use."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Figures of one accelerator.

    `memory_gib` None: it uses a share of the host's memory. `tflops`: 1e12 operations per second. `bandwidth_gb_s`: of
    its memory, 1e9 bytes per second. `link_gb_s`: bandwidth to another accelerator of the node, in one direction.
    `launch_s`: minimum seconds of one layer (kernel launches). `source`: where the figures come from.
    """

    memory_gib: float | None
    tflops: float
    bandwidth_gb_s: float
    link_gb_s: float
    launch_s: float
    source: str

    @property
    def is_gpu(self) -> bool:
        """Whether the accelerator has its own memory. Models are bfloat16 there, and float32 on other devices."""
        return self.memory_gib is not None


GPU_LAUNCH_S = 2e-5
CPU_LAUNCH_S = 8e-4

DEVICES: Mapping[str, Accelerator] = {
    "a10": Accelerator(22.5, 125.0, 600.0, 32.0, GPU_LAUNCH_S, "NVIDIA A10 data sheet"),
    "a100-40gb": Accelerator(40.0, 312.0, 1555.0, 300.0, GPU_LAUNCH_S, "NVIDIA A100 data sheet (SXM, 40 GB)"),
    "a100-80gb": Accelerator(80.0, 312.0, 2039.0, 300.0, GPU_LAUNCH_S, "NVIDIA A100 data sheet (SXM, 80 GB)"),
    "b200": Accelerator(179.0, 2250.0, 8000.0, 900.0, GPU_LAUNCH_S, "NVIDIA DGX B200 data sheet, an eighth"),
    "h100": Accelerator(79.6, 989.0, 3350.0, 450.0, GPU_LAUNCH_S, "NVIDIA H100 data sheet (SXM)"),
    "h100-pcie": Accelerator(79.6, 756.0, 2000.0, 64.0, GPU_LAUNCH_S, "NVIDIA H100 data sheet (PCIe)"),
    "h200": Accelerator(140.4, 989.0, 4800.0, 450.0, GPU_LAUNCH_S, "NVIDIA H200 data sheet (SXM)"),
    "l4": Accelerator(22.5, 121.0, 300.0, 32.0, GPU_LAUNCH_S, "NVIDIA L4 data sheet"),
    "l40s": Accelerator(45.0, 362.0, 864.0, 32.0, GPU_LAUNCH_S, "NVIDIA L40S data sheet"),
    "rtx-4090": Accelerator(24.0, 165.0, 1008.0, 32.0, GPU_LAUNCH_S, "NVIDIA Ada architecture paper, appendix A"),
    "cpu-core": Accelerator(None, 0.14, 8.0, 4.0, CPU_LAUNCH_S, "benchmarks/results/engine.json and trainer.json"),
}
"""Known accelerators, by the names that a cluster file may use."""

MOST_SLOTS = 100_000
Gib = Annotated[float, Field(gt=0, le=1e6)]
Tflops = Annotated[float, Field(gt=0, le=1e6)]
GbPerS = Annotated[float, Field(gt=0, le=1e6)]

_WORDS = {
    "tuple_type": "it should be a list",
    "model_type": "it should be a mapping of keys to values",
    "string_type": "it should be text",
    "int_from_float": "it should be a whole number",
    "int_parsing": "it should be a whole number",
    "float_parsing": "it should be a number",
    "float_type": "it should be a number",
    "finite_number": "it should be a number that is not infinite",
    "too_short": "it should have at least one item",
}
"""Messages that replace those of pydantic."""


class NodeKind(Section):
    """A number of identical nodes."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")] = "node"
    count: Annotated[PositiveInt, Field(le=MOST_SLOTS)] = 1
    accelerators: Annotated[PositiveInt, Field(le=1024)]
    """Accelerators (slots) per node."""
    device: str | None = None
    """Name of the accelerator: a key of `DEVICES`."""
    memory_gib: Gib | None = None
    """Memory per accelerator."""
    tflops: Tflops | None = None
    bandwidth_gb_s: GbPerS | None = None
    link_gb_s: GbPerS | None = None
    launch_s: PositiveFloat | None = None
    host_memory_gib: Gib
    """Host memory per node."""

    @model_validator(mode="after")
    def _check_device(self) -> NodeKind:
        if self.device is not None and self.device not in DEVICES:
            raise ValueError(
                f"there is no device {shorten_text(repr(self.device))}{did_you_mean(self.device, DEVICES)}; known are "
                f"{', '.join(sorted(DEVICES))}, or leave device out and give memory_gib, tflops, bandwidth_gb_s and link_gb_s"
            )
        if self.device is None:
            needed = ("memory_gib", "tflops", "bandwidth_gb_s", "link_gb_s")
            if lacking := [name for name in needed if getattr(self, name) is None]:
                raise ValueError(f"the fields {', '.join(lacking)} are required without device")
        return self

    @property
    def each(self) -> Accelerator:
        """Figures of one accelerator of these nodes."""
        base = None if self.device is None else DEVICES[self.device]
        given = {
            name: getattr(self, name) for name in ("memory_gib", "tflops", "bandwidth_gb_s", "link_gb_s", "launch_s")
        }
        known = {} if base is None else {name: getattr(base, name) for name in given}
        values = known | {name: value for name, value in given.items() if value is not None}
        return Accelerator(
            **{"launch_s": GPU_LAUNCH_S} | values, source="the cluster's file" if base is None else base.source
        )


class ClusterSpec(Section):
    """The nodes of a cluster and their networks."""

    nodes: Annotated[tuple[NodeKind, ...], Field(min_length=1, max_length=64)]
    network_gb_s: GbPerS = 25.0
    """Bandwidth between two nodes in one direction, per node."""
    storage_gb_s: GbPerS = 2.0
    """Bandwidth to and from the shared folder for weights, per node."""

    @model_validator(mode="after")
    def _is_not_too_large(self) -> ClusterSpec:
        if self.slots > MOST_SLOTS:
            raise ValueError(f"the cluster has {self.slots} accelerators; gcore plans for at most {MOST_SLOTS}")
        if len({kind.each.is_gpu for kind in self.nodes}) > 1:
            raise ValueError("nodes with GPUs and nodes with CPU cores cannot be planned together; use one kind only")
        return self

    @property
    def slots(self) -> int:
        """Total number of accelerators."""
        return sum(kind.count * kind.accelerators for kind in self.nodes)

    @property
    def node_count(self) -> int:
        """Total number of nodes."""
        return sum(kind.count for kind in self.nodes)

    @property
    def smallest_node(self) -> int:
        """Accelerators of the smallest node."""
        return min(kind.accelerators for kind in self.nodes)

    @property
    def alike(self) -> bool:
        """Whether all accelerators are equal."""
        return len({kind.each for kind in self.nodes}) == 1

    @property
    def device(self) -> Accelerator:
        """An accelerator that has, in each respect, the worst figure of all devices."""
        every = [kind.each for kind in self.nodes]
        return Accelerator(
            memory_gib=min((one.memory_gib for one in every if one.memory_gib is not None), default=None),
            tflops=min(one.tflops for one in every),
            bandwidth_gb_s=min(one.bandwidth_gb_s for one in every),
            link_gb_s=min(one.link_gb_s for one in every),
            launch_s=max(one.launch_s for one in every),
            source=every[0].source if self.alike else "the weakest of several devices",
        )

    @property
    def host_gib_of_a_slot(self) -> float:
        """Host memory per slot on the node where it is lowest."""
        return min(kind.host_memory_gib / kind.accelerators for kind in self.nodes)


def parse_cluster(tree: Mapping[str, Any], *, where: str) -> ClusterSpec:
    """Parse a cluster file. Raises UsageError for the first mistake."""
    try:
        return ClusterSpec.model_validate(tree)
    except ValidationError as error:
        raise UsageError(_said(error), where=where, fix="See deploy/local/clusters for valid files") from error


def _said(error: ValidationError) -> str:
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"]) or "the file"
    if problem["type"] == "extra_forbidden":
        last = str(problem["loc"][-1])
        known = NodeKind.model_fields if "nodes" in problem["loc"] else ClusterSpec.model_fields
        return f"unknown key {shorten_text(repr(key))}{did_you_mean(last, known)}"
    if problem["type"] == "missing":
        return f"{key!r} is missing"
    message = _WORDS.get(problem["type"]) or problem["msg"].removeprefix("Value error, ")
    shown = f" (got {shorten_text(repr(problem['input']))})" if isinstance(problem["input"], str | int | float) else ""
    return f"{key}: {message[:1].lower()}{message[1:]}{shown}"

"""What accelerators are said to do: memory, operations, bandwidths, by name. Pure data.

Figures are the makers' own: dense bfloat16 operations without sparsity, memory as the driver shows it, the link's two directions
halved. `cpu-core` is a core as gcore's own benchmarks find it on a virtual machine: float32, one thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GIB = 1 << 30
NODE_GIB = 2.0
"""Of a node's host memory, what its controller, a store and the system take."""


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator. `memory_gib` None: a share of its host's. `launch_s`: what a layer costs in time however little it does.

    `tflops`: 1e12 operations a second; `bandwidth_gb_s`: of its memory, 1e9 bytes a second; `link_gb_s`: to another of its node, one
    direction. `source`: where the figures are from.
    """

    memory_gib: float | None
    tflops: float
    bandwidth_gb_s: float
    link_gb_s: float
    launch_s: float
    source: str

    @property
    def is_gpu(self) -> bool:
        """Whether it has memory of its own; models are bfloat16 there, and float32 elsewhere."""
        return self.memory_gib is not None


GPU_LAUNCH_S = 2e-5
CPU_LAUNCH_S = 8e-4

DEVICES: Mapping[str, Device] = {
    "a10": Device(22.5, 125.0, 600.0, 32.0, GPU_LAUNCH_S, "NVIDIA A10 data sheet"),
    "a100-40gb": Device(40.0, 312.0, 1555.0, 300.0, GPU_LAUNCH_S, "NVIDIA A100 data sheet (SXM, 40 GB)"),
    "a100-80gb": Device(80.0, 312.0, 2039.0, 300.0, GPU_LAUNCH_S, "NVIDIA A100 data sheet (SXM, 80 GB)"),
    "b200": Device(179.0, 2250.0, 8000.0, 900.0, GPU_LAUNCH_S, "NVIDIA DGX B200 data sheet, an eighth"),
    "h100": Device(79.6, 989.0, 3350.0, 450.0, GPU_LAUNCH_S, "NVIDIA H100 data sheet (SXM)"),
    "h100-pcie": Device(79.6, 756.0, 2000.0, 64.0, GPU_LAUNCH_S, "NVIDIA H100 data sheet (PCIe)"),
    "h200": Device(140.4, 989.0, 4800.0, 450.0, GPU_LAUNCH_S, "NVIDIA H200 data sheet (SXM)"),
    "l4": Device(22.5, 121.0, 300.0, 32.0, GPU_LAUNCH_S, "NVIDIA L4 data sheet"),
    "l40s": Device(45.0, 362.0, 864.0, 32.0, GPU_LAUNCH_S, "NVIDIA L40S data sheet"),
    "rtx-4090": Device(24.0, 165.0, 1008.0, 32.0, GPU_LAUNCH_S, "NVIDIA Ada architecture paper, appendix A"),
    "cpu-core": Device(None, 0.14, 8.0, 4.0, CPU_LAUNCH_S, "benchmarks/results/engine.json and trainer.json"),
}
"""By the names that a cluster file may say."""

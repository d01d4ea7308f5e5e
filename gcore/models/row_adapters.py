"""Low-rank adapters at run time: several beside each other on one model, chosen row by row.

A linear layer with weight W [out, in] gives W·x for a row without an adapter, and W·x + s·B·A·x for a row with one, with
A [rank, in], B [out, rank] and s = alpha / rank (Hu et al. 2021, LoRA, section 4.1). The matrices of all adapters of a
layer are joined along their ranks, and a mask [row, ranks] selects those of each row's adapter. So rows of different
adapters share a pass, and every shape depends on the number of rows alone, as deterministic decoding needs.

Number 0 is the policy's adapter, which weight updates replace; the others are those of judges and never change. They
stay in memory while the engine sleeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gcore.errors import DataError
from gcore.models.adapters import AdapterConfig, read_adapters
from gcore.models.layout import ADAPTER_PREFIX

POLICY = 0
"""Number of the policy's adapter."""


@dataclass(frozen=True, slots=True)
class LayerMatrices:
    """An adapter's matrices for one layer: `down` (A) [rank, in] and `up` (s·B) [out, rank], in the model's dtype."""

    down: Tensor
    up: Tensor


AdapterMatrices = Mapping[str, LayerMatrices]
"""An adapter in memory, by the names of the layers."""


class _AdaptedLayer:
    """The forward function of a linear layer that adapters change."""

    def __init__(self, plain: Callable[[Tensor], Tensor], adapters: RowAdapters, name: str) -> None:
        self._plain = plain
        self._adapters = adapters
        self._name = name

    def __call__(self, x: Tensor) -> Tensor:
        y = self._plain(x)
        joined = self._adapters.layers.get(self._name)
        rows = self._adapters.rows
        if joined is None or rows is None:
            return y
        mask = (rows[:, None] == joined.owners).to(x.dtype)
        mask = mask.view(len(rows), *(1,) * (x.dim() - 2), -1)
        return y + functional.linear(functional.linear(x, joined.down) * mask, joined.up)


@dataclass(frozen=True, slots=True)
class _Joined:
    """The matrices of all adapters of a layer. `owners` [ranks]: whose adapter each rank is."""

    owners: Tensor
    down: Tensor
    up: Tensor


class RowAdapters:
    """The adapters on one model. `names`: numbers of the judges' adapters, by name."""

    def __init__(self, module: Any, folders: Mapping[str, Path]) -> None:
        """Read the judges' adapters and prepare the layers. Raises DataError if one does not fit the model."""
        self._linear = {
            name: layer
            for name, layer in module.named_modules()
            if type(layer) is torch.nn.Linear and layer is not module.get_output_embeddings()
        }
        self.names = {name: number for number, name in enumerate(folders, POLICY + 1)}
        self._matrices = {number: self.read(folders[name]) for name, number in self.names.items()}
        self.layers: dict[str, _Joined] = {}
        self.rows: Tensor | None = None
        """The number of the adapter of each row of the next pass; None: no row has one."""
        self._join()
        for name, layer in self._linear.items():
            layer.forward = _AdaptedLayer(layer.forward, self, name)  # type: ignore[assignment]  # any callable serves

    def read(self, folder: Path) -> AdapterMatrices:
        """Read an adapter from `folder`, in any thread. Raises DataError if it does not fit the model."""
        config, tensors = AdapterConfig.read(folder), read_adapters(folder)
        found = {}
        for name in sorted(tensors):
            layer, is_down, _ = name.removeprefix(ADAPTER_PREFIX).partition(".lora_A.")
            if not is_down:
                continue
            down, up = tensors[name].float(), tensors[name.replace(".lora_A.", ".lora_B.")].float()
            own = self._linear.get(layer)
            if own is None or (up.shape[0], down.shape[1]) != tuple(own.weight.shape) or down.shape[0] != up.shape[1]:
                shape = "which is no linear layer inside the model" if own is None else list(own.weight.shape)
                raise DataError(
                    f"the adapter's matrices A {list(down.shape)} and B {list(up.shape)} do not fit layer {layer}, {shape}",
                    where=str(folder),
                    fix="Name an adapter of the model that is served",
                )
            found[layer] = LayerMatrices(down.to(own.weight), (up * (config.alpha / config.rank)).to(own.weight))
        return found

    def set_policy(self, matrices: AdapterMatrices | None) -> None:
        """Replace the policy's adapter; None: it has none."""
        if matrices is None:
            self._matrices.pop(POLICY, None)
        else:
            self._matrices[POLICY] = matrices
        self._join()

    def _join(self) -> None:
        self.layers = {}
        for name, layer in self._linear.items():
            own = {number: one[name] for number, one in sorted(self._matrices.items()) if name in one}
            if own:
                owners = [number for number, one in own.items() for _ in range(len(one.down))]
                self.layers[name] = _Joined(
                    torch.tensor(owners, device=layer.weight.device),
                    torch.cat([one.down for one in own.values()]),
                    torch.cat([one.up for one in own.values()], 1),
                )

    def select(self, numbers: Sequence[int]) -> None:
        """Set the adapter of each row of the next pass."""
        used = any(number in self._matrices for number in numbers)
        device = next(iter(self._linear.values())).weight.device if used else None
        self.rows = torch.tensor(numbers, device=device) if used else None

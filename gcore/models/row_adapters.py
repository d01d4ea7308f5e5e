"""Low-rank adapters at run time: several beside each other on one model, chosen row by row.

A linear layer with weight W [out, in] gives W·x for a row without an adapter, and W·x + s·B·A·x for a row with one, with
A [rank, in], B [out, rank] and s = alpha / rank (Hu et al. 2021, LoRA, section 4.1). Rows of different adapters share a
pass: the product of each adapter that a row of the pass has is computed for all rows, and each row takes its own. So a row
depends neither on the adapters of other rows nor on updates of other adapters, with deterministic rollouts to the bit, and
an adapter whose values are not finite damages its own rows alone.

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

from gcore.errors import DataError, explain_os_errors
from gcore.models.adapter_checks import DOWN, UP
from gcore.models.adapters import read_adapter
from gcore.models.layout import ADAPTER_PREFIX, adapter_digest

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
        for number, own in self._adapters.chosen.items():
            matrices = self._adapters.matrices[number].get(self._name)
            if matrices is not None:
                added = y + functional.linear(functional.linear(x, matrices.down), matrices.up)
                # Some models put the tokens of all rows into one dimension.
                rows = own.repeat_interleave(x.shape[0] // len(own))
                y = torch.where(rows.view(-1, *(1,) * (x.dim() - 1)), added, y)
        return y


def _check_digest(name: str, folder: Path, digest: str) -> None:
    fix = "Restore the folder, or start a new job with this judge"
    with explain_os_errors(f"cannot read the adapter of judge {name!r}", DataError, where=folder, fix=fix):
        found = adapter_digest(folder)
    if found != digest:
        raise DataError(
            f"the adapter of judge {name!r} changed since the job was submitted (digest {found[:12]}, not {digest[:12]})",
            where=str(folder),
            fix=fix,
        )


class RowAdapters:
    """The adapters on one model. `names`: numbers of the judges' adapters, by name."""

    def __init__(self, module: Any, folders: Mapping[str, Path], digests: Mapping[str, str] = {}) -> None:
        """Read the judges' adapters and prepare the layers. Raises DataError if one does not fit the model, or has another
        digest (`gcore.models.layout.adapter_digest`) than in `digests`."""
        for name, digest in digests.items():
            if name in folders:
                _check_digest(name, folders[name], digest)
        self._linear = {
            name: layer
            for name, layer in module.named_modules()
            if type(layer) is torch.nn.Linear and layer is not module.get_output_embeddings()
        }
        self.names = {name: number for number, name in enumerate(folders, POLICY + 1)}
        self.matrices = {number: self._read_judge(folders[name]) for name, number in self.names.items()}
        """All adapters by number; the policy's only if it has one."""
        self.chosen: dict[int, Tensor] = {}
        """By number: which rows [row] of the next pass have this adapter; only adapters that any row has."""
        for name, layer in self._linear.items():
            layer.forward = _AdaptedLayer(layer.forward, self, name)  # type: ignore[assignment]  # any callable serves

    def read(self, folder: Path) -> AdapterMatrices:
        """Read an adapter from `folder`, in any thread. Raises DataError if it does not fit the model."""
        config, tensors = read_adapter(folder)
        found = {}
        for name in sorted(name for name in tensors if name.endswith(DOWN)):
            layer = name.removeprefix(ADAPTER_PREFIX).removesuffix(DOWN)
            down, up = tensors[name].float(), tensors[name.removesuffix(DOWN) + UP].float()
            own = self._linear.get(layer)
            if own is None or (up.shape[0], down.shape[1]) != tuple(own.weight.shape):
                shape = "which is no linear layer inside the model" if own is None else list(own.weight.shape)
                raise DataError(
                    f"the adapter's matrices A {list(down.shape)} and B {list(up.shape)} do not fit layer {layer}, {shape}",
                    where=str(folder),
                    fix="Name an adapter of the model that is served",
                )
            found[layer] = LayerMatrices(down.to(own.weight), (up * (config.alpha / config.rank)).to(own.weight))
        return found

    def _read_judge(self, folder: Path) -> AdapterMatrices:
        """Read the adapter of a judge. Raises DataError also if values are not finite in the model's dtype, with which the
        judge could never answer; a policy's values may become finite with a later update."""
        found = self.read(folder)
        for layer, one in found.items():
            for kind, matrix in (("A", one.down), ("s·B", one.up)):
                if not torch.isfinite(matrix).all():
                    raise DataError(
                        f"the adapter's matrix {kind} of layer {layer} has values that are not finite in {matrix.dtype}",
                        where=str(folder),
                        fix="Train or save the adapter again; lora_alpha / r may be too large",
                    )
        return found

    def set_policy(self, matrices: AdapterMatrices | None) -> None:
        """Replace the policy's adapter; None: it has none."""
        if matrices is None:
            self.matrices.pop(POLICY, None)
        else:
            self.matrices[POLICY] = matrices

    def select(self, numbers: Sequence[int]) -> None:
        """Set the adapter of each row of the next pass."""
        used = sorted(self.matrices.keys() & set(numbers))
        if used:
            rows = torch.tensor(numbers, device=next(iter(self._linear.values())).weight.device)
            self.chosen = {number: rows == number for number in used}
        else:
            self.chosen = {}

"""Define two operators in SGLang's CPU environment that its diffusion models call, and only its compiled CPU kernels have.

The kernels (`sgl_kernel` for CPUs) are not in a package index: they are built from SGLang's source. Language models do without
them. This module defines the operators with torch, in float32, with the meaning of the models' `forward_native`. It does so just
before the module that calls them is imported, and not if the kernels are installed.

The .pth file that deploy/sglang/setup.sh writes into site-packages loads this module.
"""

import importlib.abc
import sys

NORM = "fused_norm_scale_shift_cpu"
RESIDUAL_NORM = "fused_scale_residual_norm_scale_shift_cpu"
SCHEMAS = {
    NORM: "(Tensor x, Tensor? weight, Tensor? bias, Tensor scale, Tensor shift, str norm_type, float eps) -> Tensor",
    RESIDUAL_NORM: "(Tensor residual, Tensor x, Tensor? gate, Tensor? weight, Tensor? bias, Tensor scale, Tensor shift, "
    "str norm_type, float eps) -> (Tensor, Tensor)",
}


def _norm_scale_shift(x, weight, bias, scale, shift, norm_type, eps):
    import torch.nn.functional as F

    size = x.shape[-1:]
    if norm_type == "layer":
        normal = F.layer_norm(x.float(), size, *(None if one is None else one.float() for one in (weight, bias)), eps)
    else:
        normal = F.rms_norm(x.float(), size, None if weight is None else weight.float(), eps)
    return (normal * (1 + scale.float()) + shift.float()).to(x.dtype)


def _residual_norm_scale_shift(residual, x, gate, weight, bias, scale, shift, norm_type, eps):
    summed = residual + (x if gate is None else x * gate)
    return _norm_scale_shift(summed, weight, bias, scale, shift, norm_type, eps), summed


class _BeforeLayers(importlib.abc.MetaPathFinder):
    """A finder that finds no module, but notices the import of the layers that call the operators."""

    _library = None

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "sglang.multimodal_gen.runtime.layers.layernorm" and self._library is None:
            import torch

            if not hasattr(torch.ops.sgl_kernel, NORM):
                # Keep the object: the operators exist as long as it does.
                type(self)._library = torch.library.Library("sgl_kernel", "FRAGMENT")
                for (name, schema), made in zip(
                    SCHEMAS.items(), (_norm_scale_shift, _residual_norm_scale_shift), strict=True
                ):
                    self._library.define(name + schema)
                    self._library.impl(name, made, "CPU")
        return None


sys.meta_path.insert(0, _BeforeLayers())

"""Make torchvision importable in SGLang's CPU environment, where its compiled operators are built for another torch.

On import torchvision registers shape functions for `torchvision::nms` and `torchvision::qnms`. This fails if its compiled
library, which declares the operators, could not be loaded. Language models do not call them, so this module only declares them.
It does so just before torchvision is imported, because doing it at every start of Python would always import torch.

The .pth file that deploy/sglang/setup.sh writes into site-packages loads this module.
"""

import importlib.abc
import sys

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """A finder that finds no module, but notices the import of torchvision."""

    _library = None

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision" and self._library is None:
            import torch

            # Keep the object: the declarations exist as long as it does.
            type(self)._library = torch.library.Library("torchvision", "DEF")
            for schema in SCHEMAS:
                self._library.define(schema)
        return None


sys.meta_path.insert(0, _BeforeTorchvision())

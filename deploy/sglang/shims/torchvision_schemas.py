"""Lets the CPU build of SGLang's environment import torchvision, whose compiled operators are built for another torch.

torchvision registers shape functions for `torchvision::nms` and `torchvision::qnms` when it is imported, and fails
where its compiled library could not be loaded, for then nobody has declared them. A language model calls neither, so
their declarations are enough. They are made just before torchvision is imported, not at every start of Python: that
would import torch in each.

Loaded by the .pth file that deploy/sglang/setup.sh writes into the environment's site-packages.
"""

import importlib.abc
import sys

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing; it only sees that torchvision is about to be looked for."""

    _library = None

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision" and self._library is None:
            import torch

            # Kept for ever: the declarations go with the object.
            type(self)._library = torch.library.Library("torchvision", "DEF")
            for schema in SCHEMAS:
                self._library.define(schema)
        return None


sys.meta_path.insert(0, _BeforeTorchvision())

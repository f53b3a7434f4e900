"""Transforms that torch runs on a whole batch, between two parts of a chain that DALI runs."""

from __future__ import annotations

from typing import Any, cast

import torch
from torchvision import tv_tensors
from torchvision.transforms import v2

__all__ = ["Batched", "is_batchable"]

_is_pure_tensor = cast("Any", v2)._utils.is_pure_tensor  # noqa: SLF001


class Batched(v2.Transform):
    """Call a module with a batch of images, also in the middle of a chain.

    ``DALILoader`` calls it with all images of a batch at once, ``(N, C, H, W)`` on its device, without gradients.
    Transforms after it run in DALI again. In a plain ``DataLoader`` each image is a batch of one. A transform of yours
    that takes single images and batches alike needs no wrapper: give it an attribute ``batchable = True``.

    Images must have equal sizes there. Boxes, masks and key points do not pass through the module.

    Args:
        module: Called with ``(N, C, H, W)``. It returns images of any size and type, in the same order.
    """

    _transformed_types = (_is_pure_tensor, tv_tensors.Image)

    batchable = True

    def __init__(self, module: Any) -> None:
        super().__init__()
        if not callable(module) or isinstance(module, type):
            raise TypeError(f"module must be a function or module that takes a batch, got {module!r}")
        self.module = cast("Any", module)

    def check_inputs(self, flat_inputs: list[Any]) -> None:
        """Refuse a sample without a tensor."""
        if not any(isinstance(each, tv_tensors.Image) or _is_pure_tensor(each) for each in flat_inputs):
            raise TypeError("Batched takes tensors: put v2.ToImage() or v2.PILToTensor() before it")

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Apply the module to one image."""
        with torch.no_grad():
            image: Any = self.module(inpt.as_subclass(torch.Tensor)[None])[0]
        return tv_tensors.Image(image) if isinstance(inpt, tv_tensors.Image) else image

    def extra_repr(self) -> str:
        """Return the module if it is a function; torch shows others."""
        return "" if isinstance(self.module, torch.nn.Module) else getattr(self.module, "__name__", repr(self.module))


def is_batchable(transform: Any) -> bool:
    """Return whether a transform may be called with a whole batch of images."""
    return getattr(transform, "batchable", False) is True

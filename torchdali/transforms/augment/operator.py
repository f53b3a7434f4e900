"""Any operator of DALI as a transform."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import PIL.Image
import torch
from torchvision import tv_tensors

from torchdali.transforms.augment.base import Augmentation
from torchdali.transforms.rng import draw_seed

__all__ = ["Operator"]

_RANDOM = ("random", "noise.", "jitter", "coin_flip", "batch_permutation", "normal_distribution", "uniform")
_MOVING = (tv_tensors.BoundingBoxes, tv_tensors.Mask, getattr(tv_tensors, "KeyPoints", tv_tensors.Mask))


class Operator(Augmentation):
    """Apply an operator of ``nvidia.dali.fn``.

    Use it where ``torchdali.transforms`` has no class for the operator. The result has the height, width and channels
    of the image, and is converted back to the image's type. In a plain ``DataLoader`` each image is a run of DALI of
    its own, which is slow.

    Args:
        name: Name of the operator, as in ``nvidia.dali.fn``: ``"hue"`` or ``"experimental.median_blur"``. It takes an
            image (HWC) and returns one.
        **arguments: Arguments of the operator. A tuple ``(low, high)`` is a range from which each sample draws a
            number: an integer, both ends included, if both ends are integers. Use a list for an argument of two
            numbers.

    Raises:
        ValueError: The operator draws random numbers of its own, which cannot be resumed; or a range is none.
    """

    _compiled: dict[str, Any]

    def __init__(self, name: str, **arguments: Any) -> None:
        super().__init__()
        if any(part in name for part in _RANDOM):
            raise ValueError(
                f"{name} draws random numbers of its own, which depend on the batch and cannot be resumed; use a "
                "transform of torchdali.transforms, such as GaussianNoise, SaltAndPepper, ShotNoise or RandomApply"
            )
        self.name = name
        ranges = {key: _parse_range(key, value) for key, value in arguments.items() if isinstance(value, tuple)}
        self.ranges = ranges
        self.constants = {key: value for key, value in arguments.items() if key not in ranges}
        self._compiled = {}

    def check_inputs(self, flat_inputs: list[Any]) -> None:
        """Refuse a sample with targets, which an operator may have to move."""
        if found := [x for x in flat_inputs if isinstance(x, _MOVING)]:
            raise TypeError(f"Operator does not move {type(found[0]).__name__}; leave it out of this chain")

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw a seed, from which all images of the sample draw the same numbers."""
        return {"seed": draw_seed(None)}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Apply the operator to one input."""
        if isinstance(inpt, PIL.Image.Image) and inpt.mode not in ("RGB", "L"):
            raise TypeError(f"Operator takes PIL images of mode RGB and L, got {inpt.mode}; convert it before")
        return super().transform(inpt, params)

    def apply(self, image: torch.Tensor, params: Mapping[str, Any]) -> torch.Tensor:
        if image.dtype == torch.float16:
            raise TypeError("Operator does not take float16; convert images to float32 before it")
        device = str(image.device)
        if device not in self._compiled:
            public: Any = sys.modules["torchdali"]  # its later packages, which this one does not import, have compile()
            self._compiled[device] = public.compile(self, device=device, num_threads=1)
        run = self._compiled[device]
        with torch.random.fork_rng(devices=[]):
            frames: list[torch.Tensor] = []
            for frame in image.reshape(-1, *image.shape[-3:]):
                torch.manual_seed(params["seed"])
                frames.append(run(frame[None]))
        return torch.cat(frames).reshape(image.shape)

    def extra_repr(self) -> str:
        """Return the name and the arguments."""
        arguments: dict[str, Any] = {**self.constants, **self.ranges}
        return ", ".join([self.name, *(f"{key}={value!r}" for key, value in arguments.items())])

    def __getstate__(self) -> dict[str, Any]:
        """Leave the pipelines out. A copy builds its own."""
        return {**self.__dict__, "_compiled": {}}


def _parse_range(name: str, ends: Any) -> tuple[float, float]:
    """Return the ends of a range, as integers if both are."""
    if len(ends) != 2 or not all(isinstance(end, (int, float)) for end in ends) or not ends[0] <= ends[1]:
        raise ValueError(f"{name} must be a value or a range (low, high) of two numbers, got {ends!r}")
    return ends if all(isinstance(end, int) for end in ends) else (float(ends[0]), float(ends[1]))

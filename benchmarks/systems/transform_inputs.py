"""Decoded photographs, in the format of each system."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from benchmarks.systems.transform_rows import Row

if TYPE_CHECKING:
    import torch


@dataclass
class Inputs:
    """Photographs of one size, in each format. A format is made when it is first used.

    Attributes:
        size: Height and width, in pixels.
        count: Number of images in a batch.
        device: "cuda" or "cpu".
    """

    size: tuple[int, int]
    count: int
    device: str
    _floats: "dict[str, torch.Tensor]" = field(default_factory=dict)

    @cached_property
    def images(self) -> "torch.Tensor":
        """Different crops of photographs, ``(N, 3, H, W)``, uint8, on the host."""
        import numpy as np
        import torch

        from benchmarks.common import data

        height, width = self.size
        photographs = [x for x in data.load_photographs() if x.width >= width and x.height >= height]
        if not photographs:
            raise SystemExit("no photographs found: pip install scikit-image scikit-learn")
        rng = np.random.default_rng(0)
        crops = np.empty((self.count, height, width, 3), np.uint8)
        for i in range(self.count):
            photograph = photographs[i % len(photographs)]
            left = int(rng.integers(photograph.width - width + 1))
            top = int(rng.integers(photograph.height - height + 1))
            crops[i] = np.asarray(photograph.crop((left, top, left + width, top + height)))
        return torch.from_numpy(crops).permute(0, 3, 1, 2).contiguous()

    @cached_property
    def resident(self) -> "torch.Tensor":
        """The images on the device."""
        return self.images.to(self.device)

    def select(self, row: Row, device: str) -> "torch.Tensor":
        """Return the input of a row's transform."""
        images = self.resident if device == self.device else self.images
        return self.floats(device) if row.floats else images

    def floats(self, device: str) -> "torch.Tensor":
        """Return the images as float32 in [0, 1]."""
        if device not in self._floats:
            images = self.resident if device == self.device else self.images
            self._floats[device] = images.float().div_(255)
        return self._floats[device]

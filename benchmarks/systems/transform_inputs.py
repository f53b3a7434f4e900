"""The photographs that every system is given, decoded, in the form that it wants."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from benchmarks.systems.transform_rows import Row

if TYPE_CHECKING:
    import torch


@dataclass
class Inputs:
    """The photographs of one size, in each form that a system wants, made when it is first wanted.

    Attributes:
        size: Height and width.
        count: Images in a batch.
        device: "cuda" or "cpu".
    """

    size: tuple[int, int]
    count: int
    device: str
    _floats: "dict[str, torch.Tensor]" = field(default_factory=dict)

    @cached_property
    def images(self) -> "torch.Tensor":
        """(N, 3, H, W) uint8 on the host: crops of photographs, each its own."""
        import numpy as np
        import torch

        from benchmarks.common import data

        height, width = self.size
        photographs = [one for one in data.photographs() if one.width >= width and one.height >= height]
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
        """The same on the device."""
        return self.images.to(self.device)

    def of(self, row: Row, device: str) -> "torch.Tensor":
        """What the transform of a row is given."""
        images = self.resident if device == self.device else self.images
        return self.floats(device) if row.floats else images

    def floats(self, device: str) -> "torch.Tensor":
        """The same as float32 in [0, 1]."""
        if device not in self._floats:
            images = self.resident if device == self.device else self.images
            self._floats[device] = images.float().div_(255)
        return self._floats[device]

"""Nearest neighbours of images, over many sizes: few lines of pixels are others than torchvision's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2

from torchdali import DALILoader


class Lines(Dataset[Any]):
    """Images whose rows are numbered, of many heights."""

    def __init__(self, channels: int) -> None:
        self.heights = np.random.default_rng(5).integers(200, 3000, 150).tolist()
        self.channels = channels

    def __len__(self) -> int:
        return len(self.heights)

    def __getitem__(self, index: int) -> tv_tensors.Image:
        rows = torch.arange(self.heights[index], dtype=torch.float32)[:, None]
        return tv_tensors.Image(rows.expand(self.channels, -1, 4).contiguous())


@pytest.mark.parametrize("height", [384, 900, 1500])
@pytest.mark.parametrize("interpolation", [InterpolationMode.NEAREST, InterpolationMode.NEAREST_EXACT])
def test_few_lines_are_others(device: str, interpolation: Any, height: int) -> None:
    resize, dataset = v2.Resize((height, 4), interpolation=interpolation), Lines(6)
    ours = torch.cat(list(DALILoader(dataset, 50, device=device, transform=resize))).cpu()
    expected = torch.stack([resize(dataset[i]) for i in range(len(dataset))])
    off = (ours != expected).double().mean(dim=(1, 2, 3))
    assert off.mean() < 8e-4
    assert (off > 0).double().mean() < 0.1
    assert (ours - expected).abs().max() <= 1

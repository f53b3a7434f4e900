"""The device of the smoke tests, and how far their batches may be from torchvision's."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from helpers.proxied import assert_near
from torch.utils._pytree import tree_leaves

DEVICE = os.environ.get("TORCHDALI_SMOKE_DEVICE", "cuda")
"""Set the variable to "cpu" to run the smoke tests where there is no GPU."""

JPEG = 0 if DEVICE == "cpu" else 5
"""Bound of the mean difference of images from JPEGs, in grey levels: the GPU's decoder is not libjpeg."""


def assert_batches(ours: Iterable[Any], theirs: Iterable[Any], mean: float = 0) -> None:
    """Check that batches lie on the device and equal DataLoader's, their images within a mean difference."""
    ours, theirs = list(ours), list(theirs)
    assert len(ours) == len(theirs)
    for batch, expected in zip(ours, theirs, strict=True):
        assert_on_device(batch)
        assert_near(batch, expected, mean)


def assert_on_device(batch: Any) -> None:
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    assert tensors
    assert {tensor.device.type for tensor in tensors} == {DEVICE}

"""Run torch in the graph of a pipeline on the CPU, where DALI lacks an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt
import torch

from torchdali.transforms.rule import Node, Nodes, Ops
from torchdali.transforms.spec import Sample


def call_torch(ops: Ops, function: Callable[[torch.Tensor, Sample], torch.Tensor], image: Node, params: Nodes) -> Node:
    """Return what a function of an image, CHW, and of its parameters returns, CHW. The nodes are HWC."""

    def call(pixels: npt.NDArray[Any], *values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        result = function(torch.from_numpy(pixels).permute(2, 0, 1), dict(zip(params, values, strict=True)))
        return result.permute(1, 2, 0).contiguous().numpy()

    return ops.call(call, image, *params.values(), layout="HWC")

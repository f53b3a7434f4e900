"""Rule of Operator: an operator of DALI by its name."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torchdali.errors import TransformError
from torchdali.transforms.augment.operator import Operator
from torchdali.transforms.rng import Draws
from torchdali.transforms.rule import Input, Node, Nodes, Ops, Rule
from torchdali.transforms.spec import IntArray, Params, Sample, Spec


class OperatorRule(Rule):
    """Rule of Operator. It feeds a number for each argument that is a range."""

    handles = (Operator,)
    unsupported_when = "float16"

    def infer(self, spec: Spec) -> Spec:
        self.operators = self.transform.name
        self.randomness = ", ".join(self.transform.ranges)
        return spec.with_fill([np.inf])

    @property
    def inputs(self) -> dict[str, Input]:
        return {
            name: Input(np.int32 if isinstance(low, int) else np.float32)
            for name, (low, _) in self.transform.ranges.items()
        }

    def draw(self, draws: Draws, size: IntArray) -> Params:
        params: Params = {}
        for name, (low, high) in self.transform.ranges.items():
            if isinstance(low, int):
                params[name] = np.floor(draws.uniform_range(low, high + 1)).astype(np.int32)
            else:
                params[name] = draws.uniform_range(low, high).astype(np.float32)
        return params

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        operator: Any = ops.fn
        for part in self.transform.name.split("."):
            operator = getattr(operator, part, None)
        if not callable(operator):
            raise TransformError(f"nvidia.dali.fn has no operator {self.transform.name!r}")
        result = ops.fn.cast_like(operator(image, **self.transform.constants, **params), image)
        # An image of another shape has another length then, and reshaping to another length fails.
        changed = ops.math.abs(result.shape(dtype=ops.types.INT32) - image.shape(dtype=ops.types.INT32))
        shape = image.shape(dtype=ops.types.INT32) + ops.fn.reductions.sum(changed, keep_dims=True)
        return ops.fn.reshape(result, shape=shape, layout="HWC")

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        drawn = {name: sample[name].item() for name in self.transform.ranges}
        return type(self.transform)(self.transform.name, **self.transform.constants, **drawn).apply(image, {"seed": 0})

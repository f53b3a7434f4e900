"""A chain that is applied to some samples only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2

from torchdali.rng import Draws
from torchdali.spec import IntArray, Params, Sample, Spec
from torchdali.transforms._rule import Composite, Input, Node, Ops, Unsupported, find_rule, flatten


class RandomApply(Composite):
    """All of a list of transforms with probability p, else none of them."""

    handles = (v2.RandomApply, v1.RandomApply)

    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        inner = flatten(list(transform.transforms))
        found = [find_rule(one) for one in inner]
        self.parts = [rule for rule in found if rule]
        self._missing = [type(t).__name__ for t, rule in zip(inner, found, strict=True) if rule is None]

    def infer(self, spec: Spec) -> Spec:
        if self._missing:
            raise Unsupported(f"no rule for {', '.join(self._missing)} in it")
        out = spec
        for part in self.parts:
            out = part.infer(out)
        if replace(out, size=spec.size) != spec:
            raise Unsupported(f"some samples would be {spec}, others {out}")
        self.operators = ", ".join(["split", *filter(None, (part.operators for part in self.parts)), "merge"])
        inner = filter(None, (part.randomness for part in self.parts))
        self.randomness = "; ".join([f"apply with probability {self.transform.p:g}", *inner])
        return out if out == spec else replace(spec, size=None)

    @property
    def inputs(self) -> dict[str, Input]:
        return {"apply": Input(np.bool_), **super().inputs}

    def draw(self, draws: Draws, size: IntArray) -> Params:
        return {"apply": draws.chance(self.transform.p), **super().draw(draws, size)}

    def resized(self, size: IntArray, params: Params) -> IntArray:
        return np.where(params["apply"][:, None], super().resized(size, params), size)

    def lower(self, ops: Ops, image: Node, params: Mapping[str, Node]) -> Node:
        body = super().lower
        return ops.when(params["apply"], lambda x, p: body(ops, x, p), image, params)

    def replay(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        return super().replay(image, sample) if sample["apply"] else image

"""Rules of flips."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from torchdali.transforms.rng import Draws
from torchdali.transforms.rule import Composite, Input, Node, Nodes, Ops, Rule
from torchdali.transforms.spec import IntArray, Params, Sample, Spec
from torchdali.transforms.targets import Targets


class RandomHorizontalFlip(Rule):
    """Rule of RandomHorizontalFlip: left to right with probability p."""

    handles = (v2.RandomHorizontalFlip, v1.RandomHorizontalFlip)
    operators = "flip"
    axis = "horizontal"
    moves = True
    feeds: ClassVar = {"flip": Input(np.int32)}

    def infer(self, spec: Spec) -> Spec:
        self.randomness = f"flip with probability {self.transform.p:g}"
        return spec

    def draw(self, draws: Draws, size: IntArray) -> Params:
        return {"flip": draws.bernoulli(self.transform.p).astype(np.int32)}

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        return ops.fn.flip(image, **{"horizontal": 0, self.axis: params["flip"]})

    def move(self, targets: Targets, params: Params) -> None:
        targets.flip(int(self.axis == "vertical"), params["flip"].astype(bool))

    def make_params(self, sample: Sample, size: tuple[int, int]) -> dict[str, Any] | None:
        return {} if sample["flip"] else None

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        return F.horizontal_flip(image) if sample["flip"] else image

    def fuse_with_previous(self, previous: Rule) -> Rule | None:
        if isinstance(previous, RandomHorizontalFlip) and previous.axis != self.axis:
            return Flips([previous, self])
        return None


class RandomVerticalFlip(RandomHorizontalFlip):
    """Rule of RandomVerticalFlip: top to bottom with probability p."""

    handles = (v2.RandomVerticalFlip, v1.RandomVerticalFlip)
    axis = "vertical"

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        return F.vertical_flip(image) if sample["flip"] else image


class Flips(Composite):
    """Rule of a flip along each axis, in one operator."""

    operators = "flip"

    def __init__(self, parts: list[RandomHorizontalFlip]) -> None:
        super().__init__(parts[-1].transform)
        self.parts = parts
        self.axes = [part.axis for part in parts]

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        return ops.fn.flip(image, **{axis: params[f"{i}_flip"] for i, axis in enumerate(self.axes)})

"""Rules of several images from one: five and ten crops, and views with a chain each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from torchdali.transforms.chain import check_callable, flatten
from torchdali.transforms.rng import Draws
from torchdali.transforms.rule import Chain, Rule, SampleTransformError, Unsupported, Views, find_faulty_row
from torchdali.transforms.rules.crop import CenterCrop, Window, check_size
from torchdali.transforms.rules.flip import RandomHorizontalFlip, RandomVerticalFlip
from torchdali.transforms.spec import IntArray, Params, Sample, Spec


class MultiView:
    """Several views of one image: a list of what each transform makes of it.

    SimCLR, DINO and similar methods train on such views. torchvision has no such class. ``DALILoader`` decodes the
    image once for all views. ``default_collate`` makes a list of batches, one for each view.

    Args:
        transforms: Transform of each view. The same transform may occur several times, and draws new numbers each time.
    """

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        if callable(transforms) or isinstance(transforms, str):
            raise TypeError(f"MultiView needs a list of transforms, one for each view, got {transforms!r}")
        self.transforms = list(transforms)
        if not self.transforms:
            raise ValueError("MultiView needs at least one transform")
        for transform in self.transforms:
            check_callable(*flatten(transform))

    def __call__(self, image: Any) -> list[Any]:
        """Return the views of one image, as each transform makes them."""
        return [transform(image) for transform in self.transforms]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.transforms!r})"


class MultiViewRule(Views):
    """Rule of MultiView: a chain for each view."""

    handles = (MultiView,)
    unsupported_when = "a transform of a view runs in torch; views differ in type, dtype or channels"
    operators = "those of each view, below"

    def split(self, spec: Spec) -> list[tuple[Chain, Spec]]:
        self.chains = [Chain(self.transform, flatten(chain)) for chain in self.transform.transforms]
        parts: list[tuple[Chain, Spec]] = []
        for i, chain in enumerate(self.chains, start=1):
            try:
                parts.append((chain, chain.infer(spec)))
            except Unsupported as unsupported:
                raise Unsupported(f"view {i}: {unsupported}") from unsupported
        for name in ("kind", "dtype", "channels"):
            if len(values := {getattr(out, name) for _, out in parts}) > 1:
                raise Unsupported(f"its views differ in {name}: {', '.join(sorted(map(str, values)))}")
        drawn = [f"view {i}: {chain.randomness}" for i, chain in enumerate(self.chains, start=1) if chain.randomness]
        self.randomness = "; ".join(drawn)
        return parts

    def assign_positions(self, start: int) -> int:
        self.position = start
        for chain in self.chains:
            start = chain.assign_positions(start)
        return start


class _Corner(Window):
    """Rule of one of the four corners."""

    stays_inside = True

    def __init__(self, transform: Any, size: tuple[int, int], bottom: bool, right: bool) -> None:
        super().__init__(transform)
        self.size = size
        self.at_end = np.array([bottom, right])

    def infer(self, spec: Spec) -> Spec:
        check_size(self.size)
        return replace(spec, size=self.size)

    def window(self, draws: Draws, size: IntArray) -> tuple[IntArray, IntArray]:
        shape = np.broadcast_to(np.array(self.size, np.int64), size.shape)
        if (row := find_faulty_row(size < shape)) is not None:
            raise SampleTransformError(
                row, f"the crop of {self.size} is larger than the image of {tuple(size[row].tolist())}"
            )
        return (size - shape) * self.at_end, shape

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        return F.five_crop(image, list(self.size))[int(self.at_end[0]) * 2 + int(self.at_end[1])]


class _HorizontalFlip(RandomHorizontalFlip):
    """Rule of a flip from left to right, always."""

    randomness = ""

    def infer(self, spec: Spec) -> Spec:
        return spec

    def draw(self, draws: Draws, size: IntArray) -> Params:
        return {"flip": np.ones(len(draws), np.int32)}


class _UpsideDown(_HorizontalFlip, RandomVerticalFlip):
    """Rule of a flip from top to bottom, always."""


class FiveCrop(Views):
    """Rule of FiveCrop: the four corners and the middle."""

    handles = (v2.FiveCrop, v1.FiveCrop)
    operators = "slice for each view"
    container = tuple
    unsupported_when = "on several views"

    def views(self) -> list[list[Rule]]:
        """Return the rules of each view."""
        size = (int(self.transform.size[0]), int(self.transform.size[1]))
        corners = [_Corner(self.transform, size, bottom, right) for bottom in (False, True) for right in (False, True)]
        return [*([corner] for corner in corners), [CenterCrop(self.transform)]]

    def split(self, spec: Spec) -> list[tuple[Chain, Spec]]:
        parts: list[tuple[Chain, Spec]] = []
        for rules in self.views():
            chain = Chain(self.transform, [])
            chain.parts = rules
            parts.append((chain, chain.infer(spec)))
        return parts


class TenCrop(FiveCrop):
    """Rule of TenCrop: the five crops, and those of the flipped image."""

    handles = (v2.TenCrop, v1.TenCrop)
    operators = "slice for each view, flip"

    def views(self) -> list[list[Rule]]:
        mirror = _UpsideDown if self.transform.vertical_flip else _HorizontalFlip
        return [*super().views(), *([mirror(self.transform), *crop] for crop in super().views())]

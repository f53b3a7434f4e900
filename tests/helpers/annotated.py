"""Samples with boxes, key points and masks, and torchvision's transforms with the parameters that torchdali drew."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors

from torchdali.pipeline.compile import compile_plan
from torchdali.samples.annotations import is_annotation
from torchdali.samples.tree import build_tree, tree_leaves
from torchdali.transforms import Rule
from torchdali.transforms.rng import Draws, epoch_key
from torchdali.transforms.rule import Chain
from torchdali.transforms.rules.apply import MaskedChains
from torchdali.transforms.spec import Spec
from torchdali.transforms.targets import Targets

SEED = 7


def make_boxes(rng: np.random.Generator, size: tuple[int, int], count: int) -> torch.Tensor:
    """Return boxes XYXY of all sizes, most of them inside of the image."""
    height, width = size
    low = rng.uniform(-0.05, 0.9, (count, 2)) * (width, height)
    high = low + rng.uniform(0.02, 0.6, (count, 2)) * (width, height)
    return torch.from_numpy(np.concatenate((low, high), axis=1).astype(np.float32))


class Annotated(Dataset[Any]):
    """Photographs with made-up annotations, as a detection dataset returns them."""

    def __init__(
        self,
        images: Sequence[Any],
        count: int,
        box_format: str = "XYXY",
        dtype: torch.dtype = torch.float32,
        masks: bool = True,
        points: bool = True,
    ) -> None:
        self.images, self.count, self.format, self.dtype = images, count, box_format, dtype
        self.masks, self.points = masks, points

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, dict[str, Any]]:
        rng = np.random.default_rng(index)
        image = tv_tensors.Image(self.images[index % len(self.images)])
        size = cast("tuple[int, int]", tuple(image.shape[-2:]))
        count = int(rng.integers(1, 6))
        boxes: Any = tv_tensors.BoundingBoxes(make_boxes(rng, size, count), format="XYXY", canvas_size=size)  # pyright: ignore
        boxes = tv_tensors.BoundingBoxes(  # pyright: ignore
            _convert(boxes, self.format).to(self.dtype), format=self.format, canvas_size=size
        )
        target = {
            "boxes": boxes,
            "labels": torch.from_numpy(rng.integers(1, 91, count)),
            "area": torch.from_numpy(rng.random(count).astype(np.float32)),
            "image_id": index,
            "names": [f"thing {i}" for i in range(count)],
        }
        if self.masks:
            coarse = rng.random((count, 8, 8)) < 0.4
            target["masks"] = tv_tensors.Mask(torch.from_numpy(_enlarge(coarse, size).astype(np.uint8)))
            target["semantic"] = tv_tensors.Mask(torch.from_numpy(_enlarge(rng.integers(0, 9, (8, 8)), size)))
        if self.points:
            places = rng.random((count, 4, 2)) * size[::-1]
            target["points"] = tv_tensors.KeyPoints(torch.from_numpy(places.astype(np.float32)), canvas_size=size)
        return image, target


def _enlarge(values: Any, size: tuple[int, int]) -> Any:
    """Return ``(..., 8, 8)`` values as ``(..., height, width)`` with ragged edges."""
    rows, columns = (np.arange(side) * 8 // side for side in size)
    return values[..., rows, :][..., columns]


def _convert(boxes: Any, box_format: str) -> torch.Tensor:
    from torchvision.transforms.v2 import functional as F

    new = tv_tensors.BoundingBoxFormat[box_format]
    return F.convert_bounding_box_format(boxes, new_format=new).as_subclass(torch.Tensor)


class Given(Dataset[Any]):
    """A dataset with torchvision's own transforms, each with the parameters that torchdali draws for the sample."""

    def __init__(self, dataset: Any, chain: Sequence[Any]) -> None:
        self.dataset, self.chain = dataset, chain

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        sample = self.dataset[index]
        leaves = [leaf for _, leaf in tree_leaves(build_tree(sample))]
        image = next(leaf for leaf in leaves if isinstance(leaf, tv_tensors.Image))
        size = np.array([image.shape[-2:]])
        targets = Targets.collect([[leaf for leaf in leaves if is_annotation(leaf)]], size)
        plan = compile_plan(list(self.chain), torch.device("cpu"), "exact", Spec.from_input("image", image.dtype, 3))
        draws = Draws(epoch_key(SEED, 0), np.array([index]), np.zeros(1, np.int64)).keep_params()
        rules = {id(rule.transform): rule for rule in (*plan.rules, *plan.moves)}
        for transform in self.chain:
            rule = rules.get(id(transform))
            if rule is None:
                sample = transform(*sample)
                continue
            params = rule.draw_and_move(draws.select_position(rule.position), size, targets)
            sample = replay(rule, {name: values[0] for name, values in params.items()}, size, sample)
            size = rule.output_size(size, params)
        return sample


def replay(rule: Rule, sample: dict[str, Any], size: Any, parts: Any) -> Any:
    """Apply torchvision's transform to a sample, with the parameters that a rule drew for it."""
    if isinstance(rule, (MaskedChains, Chain)):
        stages = rule.stages if isinstance(rule, MaskedChains) else [("", i) for i in range(len(rule.parts))]
        for name, i in stages:
            if not name or sample[name]:
                own = rule.select_params(i, sample)
                parts = replay(rule.parts[i], own, size, parts)
                size = rule.parts[i].output_size(size, {key: np.asarray(value)[None] for key, value in own.items()})
        return parts
    height, width = size[0].tolist()
    params = rule.make_params(sample, (height, width))
    if params is None:
        return parts
    transform = copy.copy(rule.transform)
    transform.make_params = partial(_return, params)
    if hasattr(transform, "p"):
        transform.p = 1.0
    return transform(*parts)


def _return(params: Any, flat_inputs: Any) -> Any:
    return params


def load_expected(dataset: Any, chain: Sequence[Any], batch_size: int, collate_fn: Any) -> list[Any]:
    """Return the batches that DataLoader makes with the parameters that torchdali draws."""
    return list(DataLoader(Given(dataset, chain), batch_size, collate_fn=collate_fn))

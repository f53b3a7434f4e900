"""torchvision's own transforms on a dataset's samples, with the random numbers that torchdali draws for them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.datasets.folder import pil_loader
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from torchdali.pipeline.compile import compile_plan
from torchdali.samples.annotations import is_annotation
from torchdali.samples.finder import ImageFinder
from torchdali.samples.image import to_image_input
from torchdali.samples.tree import build_tree, tree_leaves, tree_map
from torchdali.transforms import Rule
from torchdali.transforms.rng import Draws, epoch_key
from torchdali.transforms.rule import Chain
from torchdali.transforms.rules.apply import MaskedChains
from torchdali.transforms.spec import Params, Spec
from torchdali.transforms.targets import Targets

__all__ = ["Replayed", "describe_image", "find_image", "list_leaves", "open_paths"]


def list_leaves(sample: Any) -> list[Any]:
    """Return the parts of a sample, in order."""
    return [leaf for _, leaf in tree_leaves(build_tree(sample))]


class Replayed(Dataset[Any]):
    """A dataset with torchvision's own transforms, each with the parameters that torchdali draws for the sample.

    Args:
        dataset: Its samples have an image or a video, and perhaps boxes, masks or key points. Paths are opened by PIL.
        chain: Transforms that torchdali runs in DALI. Those that move anything are of v2.
        seed: The ``seed`` of the loader, whose first epoch is meant.
    """

    def __init__(self, dataset: Any, chain: Sequence[Any], seed: int) -> None:
        self.dataset, self.chain, self.seed = dataset, chain, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""
        sample = open_paths(self.dataset[index])
        leaves = list_leaves(sample)
        place = find_image(sample)
        assert place is not None
        spec, shape = describe_image(leaves[place])
        size = np.array([shape])
        annotations = [leaf for leaf in leaves if is_annotation(leaf)]
        targets = Targets.collect([annotations], size)
        plan = compile_plan(list(self.chain), torch.device("cpu"), "exact", spec)
        draws = Draws(epoch_key(self.seed, 0), np.array([index]), np.zeros(1, np.int64)).keep_params()
        rules = {id(rule.transform): rule for rule in (*plan.rules, *plan.moves)}
        for transform in self.chain:
            rule = rules.get(id(transform))
            if rule is None:
                sample = _apply(transform, sample)
                continue
            own = draws.select_position(rule.position)
            image = list_leaves(sample)[place]
            if isinstance(image, tv_tensors.Video) and not annotations:  # some draw other numbers for each frame
                frame = np.arange(len(image))
                own = own.select_frames(np.zeros_like(frame), frame)
                params = rule.draw(own, size.repeat(len(frame), axis=0))
            else:
                params = rule.draw_and_move(own, size, targets)
            sample = _replay(rule, params, size, sample, place)
            size = rule.output_size(size, {name: values[:1] for name, values in params.items()})
        return sample


def open_paths(sample: Any) -> Any:
    """Return a sample with the images of its paths, as torchvision's default loader opens them."""
    return tree_map(sample, lambda leaf: pil_loader(leaf) if isinstance(leaf, Path) else leaf)


def find_image(sample: Any) -> int | None:
    """Return the number of the image or video among the parts of a sample; None if there is none."""
    tree = build_tree(sample)
    found = ImageFinder().find(tree)
    return [path for path, _ in tree_leaves(tree)].index(found[0][0]) if found else None


def describe_image(image: Any) -> tuple[Spec, tuple[int, int]]:
    """Return the spec of an image or video of a sample, and its height and width."""
    taken = to_image_input(image)
    return taken.key[0], taken.size


def _apply(transform: Any, sample: Any) -> Any:
    return transform(*cast("tuple[Any, ...]", sample)) if isinstance(sample, tuple) else transform(sample)


def _change_image(sample: Any, place: int, change: Callable[[Any], Any]) -> Any:
    numbers = itertools.count()
    return tree_map(sample, lambda leaf: change(leaf) if next(numbers) == place else leaf)


def _replay(rule: Rule, params: Params, size: Any, sample: Any, place: int) -> Any:
    """Apply torchvision's transform to a sample, with the parameters that a rule drew for it, or for its frames."""
    if isinstance(rule, (MaskedChains, Chain)):
        stages = rule.stages if isinstance(rule, MaskedChains) else [("", i) for i in range(len(rule.parts))]
        for name, i in stages:
            if not name or params[name][0]:
                own = rule.select_params(i, params)
                sample = _replay(rule.parts[i], own, size, sample, place)
                size = rule.parts[i].output_size(size, {key: values[:1] for key, values in own.items()})
        return sample
    transform: Any = rule.transform
    takes_params = isinstance(transform, v2.Transform) and type(rule).make_params is not Rule.make_params
    if not isinstance(transform, v2.Transform) and not rule.randomness:  # of v1, it takes images alone
        return _change_image(sample, place, transform)
    if rule.randomness and not takes_params:
        return _change_image(sample, place, partial(_apply_reference, rule, params))
    height, width = size[0].tolist()
    made = rule.make_params({name: values[0] for name, values in params.items()}, (height, width))
    if made is None:
        return sample
    if takes_params:
        transform = copy.copy(transform)
        transform.make_params = mock.Mock(return_value=made)
        if hasattr(transform, "p"):
            transform.p = 1.0
    return _apply(transform, sample)


def _apply_reference(rule: Rule, params: Params, image: Any) -> Any:
    """Apply torchvision's functionals to an image or to each frame of a video, with the numbers drawn for it."""
    if isinstance(image, tv_tensors.Video):
        each = [{name: values[min(t, len(values) - 1)] for name, values in params.items()} for t in range(len(image))]
        frames = [rule.reference(frame, own) for frame, own in zip(image.as_subclass(torch.Tensor), each, strict=True)]
        return tv_tensors.Video(torch.stack(frames))
    own = {name: values[0] for name, values in params.items()}
    if not isinstance(image, torch.Tensor):  # torchdali treats an array as a PIL image
        return cast("Any", F).to_pil_image(rule.reference(F.to_image(image).as_subclass(torch.Tensor), own))
    changed = rule.reference(image.as_subclass(torch.Tensor), own)
    return tv_tensors.Image(changed) if isinstance(image, tv_tensors.Image) else changed

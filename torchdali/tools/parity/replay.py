"""torchvision's own transforms on a dataset's samples, with the random numbers that torchdali draws for them."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import PIL.Image
import torch
from torch.utils.data import Dataset
from torchvision import tv_tensors

from torchdali.pipeline.compile import compile_plan
from torchdali.samples.annotations import is_annotation
from torchdali.samples.tree import build_tree, tree_leaves, tree_map
from torchdali.transforms import Rule
from torchdali.transforms.rng import Draws, epoch_key
from torchdali.transforms.rule import Chain
from torchdali.transforms.rules.apply import MaskedChains
from torchdali.transforms.spec import Spec
from torchdali.transforms.targets import Targets

__all__ = ["Replayed", "list_leaves"]

_open: Callable[..., Any] = PIL.Image.open


def list_leaves(sample: Any) -> list[Any]:
    """Return the parts of a sample, in order."""
    return [leaf for _, leaf in tree_leaves(build_tree(sample))]


class Replayed(Dataset[Any]):
    """A dataset with torchvision's own transforms, each with the parameters that torchdali draws for the sample.

    Args:
        dataset: Its samples have an image, and boxes, masks or key points. Paths are opened by PIL.
        chain: Transforms of v2 that torchdali runs in DALI.
        seed: The ``seed`` of the loader, whose first epoch is meant.
    """

    def __init__(self, dataset: Any, chain: Sequence[Any], seed: int) -> None:
        self.dataset, self.chain, self.seed = dataset, chain, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""
        sample = tree_map(self.dataset[index], _open_path)
        leaves = list_leaves(sample)
        image = next(leaf for leaf in leaves if isinstance(leaf, (tv_tensors.Image, PIL.Image.Image)))
        is_pil = isinstance(image, PIL.Image.Image)
        size = np.array([image.size[::-1] if is_pil else image.shape[-2:]])
        spec = Spec.from_input("pil" if is_pil else "image", torch.uint8 if is_pil else image.dtype, 3)
        targets = Targets.collect([[leaf for leaf in leaves if is_annotation(leaf)]], size)
        plan = compile_plan(list(self.chain), torch.device("cpu"), "exact", spec)
        draws = Draws(epoch_key(self.seed, 0), np.array([index]), np.zeros(1, np.int64)).keep_params()
        rules = {id(rule.transform): rule for rule in (*plan.rules, *plan.moves)}
        for transform in self.chain:
            rule = rules.get(id(transform))
            if rule is None:
                sample = _apply(transform, sample)
                continue
            params = rule.draw_and_move(draws.select_position(rule.position), size, targets)
            sample = _replay(rule, {name: values[0] for name, values in params.items()}, size, sample)
            size = rule.output_size(size, params)
        return sample


def _open_path(leaf: Any) -> Any:
    if not isinstance(leaf, os.PathLike):
        return leaf
    with _open(leaf) as image:
        return image.convert("RGB")


def _apply(transform: Any, sample: Any) -> Any:
    return transform(*cast("tuple[Any, ...]", sample)) if isinstance(sample, tuple) else transform(sample)


def _replay(rule: Rule, params: dict[str, Any], size: Any, sample: Any) -> Any:
    """Apply torchvision's transform to a sample, with the parameters that a rule drew for it."""
    if isinstance(rule, (MaskedChains, Chain)):
        stages = rule.stages if isinstance(rule, MaskedChains) else [("", i) for i in range(len(rule.parts))]
        for name, i in stages:
            if not name or params[name]:
                own = rule.select_params(i, params)
                sample = _replay(rule.parts[i], own, size, sample)
                size = rule.parts[i].output_size(size, {key: np.asarray(value)[None] for key, value in own.items()})
        return sample
    height, width = size[0].tolist()
    made = rule.make_params(params, (height, width))
    if made is None:
        return sample
    transform = copy.copy(rule.transform)
    transform.make_params = partial(_return, made)
    if hasattr(transform, "p"):
        transform.p = 1.0
    return _apply(transform, sample)


def _return(made: Any, flat_inputs: Any) -> Any:
    del flat_inputs
    return made

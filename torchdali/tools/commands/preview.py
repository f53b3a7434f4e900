"""``torchdali preview``: images through torchdali beside the same through torchvision, and their difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchdali.errors import OptionError
from torchdali.pipeline import graph
from torchdali.pipeline.compile import fuse
from torchdali.pipeline.plan import Plan
from torchdali.tools.bench.folder import load_transform, make_dataset, open_class_folders
from torchdali.tools.commands.grid import MAGNIFIED, Column, write
from torchdali.tools.parity.compare import compare_plan, compile_chain
from torchdali.transforms import Rule
from torchdali.transforms.rules.normalize import Arithmetic, Normalize

__all__ = ["Shown", "preview", "shown"]

_BEYOND_ONE = 2.0
"""Floating point values that reach this are grey levels of 255, others shares of 1."""


@dataclass(frozen=True)
class Shown:
    """One image of the grid, (C, H, W), float32, in grey levels of 255 with nothing cut off.

    Attributes:
        name: Of its file; with the number of the view, where there are several.
        ours: By torchdali.
        theirs: By torchvision, with the same random numbers.
    """

    name: str
    ours: torch.Tensor
    theirs: torch.Tensor

    @property
    def difference(self) -> torch.Tensor:
        """What is between them."""
        return (self.ours - self.theirs).abs()


def preview(folder: Path, *, transform: str | None, samples: int, seed: int, device: str, out: Path) -> str:
    """Writes a grid of samples.

    Args:
        folder: A folder of class folders, or of images.
        transform: ``FILE:NAME`` of a transform; ImageNet's training transform for None.
        samples: How many; all, where there are fewer.
        seed: Which samples, and what is drawn.
        device: As for ``DALILoader``.
        out: A file whose name ends in ``.png`` or ``.html``.

    Returns:
        What the grid shows, in a sentence or two.

    Raises:
        OptionError: The folder has no images, or the transform is not there.
        SampleError: A file cannot be read.
    """
    graph.require_dali()
    plan = compile_chain([load_transform(transform)], graph.resolve(device), fused=False)
    with open_class_folders(folder) as (root, _):
        images = make_dataset(root, None)
        if not len(images):
            raise OptionError(f"{folder} has no images")
        chosen = np.random.default_rng(seed).permutation(len(images))[:samples]
        images.samples = [images.samples[i] for i in sorted(chosen.tolist())]
        columns = shown(images, plan, seed)
    said = _said(columns, plan)
    tiles = [Column(one.name, *map(_pixels, (one.ours, one.theirs, MAGNIFIED * one.difference))) for one in columns]
    write(out, tiles, said, str(fuse(plan)))
    return said


def shown(images: Any, plan: Plan, seed: int) -> list[Shown]:
    """The images of a dataset by both, sample by sample and view by view.

    Args:
        images: An ``ImageFolder``.
        plan: Of the transform, not fused.
        seed: What is drawn.
    """
    undone = [_normalized([*plan.rules, *view.rules]) for view in plan.views]
    found: list[Shown] = []
    for index, view, both in compare_plan(images, fuse(plan), seed):
        name = Path(images.samples[index][0]).name + (f", view {view + 1}" if len(undone) > 1 else "")
        found.append(Shown(name, *(_undone(one, undone[view]) for one in both)))
    return _in_grey_levels(found) if plan.views[0].spec.dtype.is_floating_point else found


def _in_grey_levels(found: list[Shown]) -> list[Shown]:
    if max(float(one.theirs.max()) for one in found) >= _BEYOND_ONE:
        return found
    return [replace(one, ours=255 * one.ours, theirs=255 * one.theirs) for one in found]


def _normalized(rules: Sequence[Rule]) -> list[Normalize]:
    """What is normalised on the way to a view, in order."""
    found: list[Normalize] = []
    for rule in rules:
        if isinstance(rule, Normalize):
            found.append(rule)
        elif isinstance(rule, Arithmetic):
            found += _normalized(rule.parts)
    return found


def _undone(image: torch.Tensor, normalized: Sequence[Normalize]) -> torch.Tensor:
    image = image.as_subclass(torch.Tensor).to(torch.float32)
    for rule in reversed(normalized):
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (rule.mean, rule.std))
        image = image * std + mean
    return image


def _pixels(image: torch.Tensor) -> torch.Tensor:
    """(H, W, 3), uint8."""
    levels = image.nan_to_num().round().clamp(0, 255).to(torch.uint8)
    levels = levels[:3] if len(levels) >= 3 else levels[:1].expand(3, -1, -1)
    return levels.permute(1, 2, 0)


def _said(columns: Sequence[Shown], plan: Plan) -> str:
    largest = max(float(one.difference.max()) for one in columns)
    mean = sum(float(one.difference.mean()) for one in columns) / len(columns)
    where = "the GPU" if plan.device.type == "cuda" else "the CPU"
    said = (
        f"{len(columns)} images by torchdali with DALI on {where}, by PIL and torchvision with the same random "
        f"numbers, and their difference x {MAGNIFIED}: at most {largest:.3g} of 255 grey levels, {mean:.3g} in the "
        "mean."
    )
    beyond = [f"{step.position} {type(step.transform).__name__}" for step in plan.steps if step.where == "torch"]
    if beyond:
        said += f" Not shown is what torch does after DALI, in the same way on both sides: {', '.join(beyond)}."
    return said

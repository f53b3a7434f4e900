"""The samples of any map-style dataset by torchdali and by torchvision, with the same random numbers."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset
from torchvision.transforms.v2 import functional as F

from torchdali import DALILoader
from torchdali.errors import OptionError, UnsupportedDatasetError
from torchdali.loader.pictures import find_classes, line_up, make_title
from torchdali.pipeline import graph
from torchdali.pipeline.compile import compile_plan
from torchdali.pipeline.plan import Plan
from torchdali.samples.annotations import is_annotation
from torchdali.sources import Source, from_dataset
from torchdali.tools.bench.folder import is_factory, load_object, load_transform
from torchdali.tools.commands.grid import Sample
from torchdali.tools.parity.case import GroupDifferences
from torchdali.tools.parity.replay import Replayed, describe_image, find_image, list_leaves, open_paths
from torchdali.tools.parity.targets import compare_targets
from torchdali.transforms import flatten
from torchdali.workers.unread import leave_images_unread, take_transforms

__all__ = ["SamplePairs", "load_dataset", "make_pairs"]


@dataclass(frozen=True)
class SamplePairs:
    """Some samples of a dataset by both libraries.

    Attributes:
        samples: The samples. Their images are as the transforms leave them.
        plan: The plan of the transforms that were run, not fused.
        left_out: The transforms that were left out, because torch runs them on both sides, by their positions.
        differences: How far boxes, key points and masks are apart.
        text: What runs where, as ``explain()`` says it.
    """

    samples: list[Sample]
    plan: Plan
    left_out: list[str]
    differences: GroupDifferences
    text: str


def load_dataset(target: str, transform: str | None) -> tuple[Any, Any]:
    """Return the dataset that ``FILE:NAME`` is, makes or loads, and the transform of its loader.

    Raises:
        OptionError: It is something else.
    """
    thing = load_object(target)
    thing = thing() if is_factory(thing) else thing
    own: Any = None
    if _is_instance(thing, DataLoader):
        own, thing = getattr(thing, "transform", None), thing.dataset
    if _is_instance(thing, IterableDataset) or not (hasattr(thing, "__getitem__") and hasattr(thing, "__len__")):
        raise OptionError(
            f"{target} is of type {type(thing).__name__}; a map-style dataset, its loader, or what makes one without "
            "arguments is expected"
        )
    if not len(thing):
        raise OptionError(f"{target} has no samples")
    return thing, load_transform(transform) if transform else own


def make_pairs(dataset: Any, transform: Any, indices: Sequence[int], seed: int, device: str) -> SamplePairs:
    """Return samples of a dataset by both libraries.

    Args:
        dataset: The dataset.
        transform: The transform of its loader.
        indices: Which samples.
        seed: Seed of the random numbers.
        device: Where DALI runs.

    Raises:
        OptionError: The samples have no image, or a transform makes several of one.
        SampleError: A sample cannot be read.
    """
    bare, raw, source, chain = _take_apart(Subset(dataset, indices), transform, seed)
    first = open_paths(raw[0])
    leaves, place = list_leaves(first), find_image(first)
    if place is None:
        raise OptionError(
            "a sample must have a PIL image, a tensor (C, H, W), an array (H, W, C), a pathlib.Path or a "
            "tv_tensors.Video"
        )
    plan, end = _compile(chain, leaves, place, device)
    kept: Any = chain[:end]
    options: Any = {"transform": kept or None, "seed": seed, "device": device, "collate_fn": list}
    with DALILoader[Any](bare, 1, **options) as loader:
        ours = [sample for batch in loader for sample in batch]
        loader.explain(text := io.StringIO())
    replayed = Replayed(raw, kept, seed)
    theirs = [replayed[i] for i in range(len(ours))]
    classes = find_classes(dataset)
    samples: list[Sample] = []
    for i, pair in enumerate(zip(ours, theirs, strict=True)):
        parts = [list_leaves(sample) for sample in pair]
        (actual, count), (expected, _) = (line_up(_to_tensor(each.pop(place))) for each in parts)
        name = os.path.basename(source.name(i)) if source else f"sample {indices[i]}"  # noqa: PTH119 - or a URL
        samples.append(Sample(make_title(parts[1], classes), name, actual, expected, (parts[0], parts[1]), count))
    differences = compare_targets(ours, theirs)
    left_out = [f"{position} {type(leaf).__name__}" for position, leaf in enumerate(chain[end:], start=end + 1)]
    return SamplePairs(samples, plan, left_out, differences, text.getvalue())


def _take_apart(part: Any, transform: Any, seed: int) -> tuple[Any, Any, Source | None, list[Any]]:
    """Return a dataset for the loader, its samples before all transforms, its source, and all transforms."""
    joint, part = take_transforms(part)
    chain = [*flatten(joint), *flatten(transform)]
    try:
        own, part = _take_own_transform(part)
        source = from_dataset(part)
    except UnsupportedDatasetError:
        if leave_images_unread(part) is part:  # the user's code may draw random numbers, so it is called once
            part = [part[i] for i in range(len(part))]
        return part, part, None, chain
    raw = part
    if source.num_frames:  # DataLoader would take other clips
        with DALILoader[Any](part, 1, collate_fn=list, seed=seed, device="cpu") as loader:
            raw = [sample for (sample,) in loader]
    return part, raw, source, [*own, *chain]


def _take_own_transform(part: Any) -> tuple[list[Any], Any]:
    """Return the transform of a native dataset, and a copy without it.

    Raises:
        UnsupportedDatasetError: It is not native.
    """
    source = from_dataset(part)
    chain = flatten(source.transform)
    if not chain:
        return [], part
    kind = cast("type[Any]", type(part))
    bare: Any = object.__new__(kind)  # copy.copy() would wrap a wrapped dataset again
    vars(bare).update(vars(part))
    if kind is Subset:
        bare.dataset = _take_own_transform(part.dataset)[1]
    else:
        vars(bare).update({name: None for name in ("transform", "transforms") if hasattr(part, name)})
    if from_dataset(bare).transform is not None:
        raise OptionError(
            f"preview cannot take the transforms out of {type(part).__name__}; leave them out of it, and give them as "
            "--transform"
        )
    return chain, bare


def _compile(chain: list[Any], leaves: list[Any], place: int, device: str) -> tuple[Plan, int]:
    """Return the plan of the beginning of a chain that DALI runs, and the number of its transforms."""
    spec, _ = describe_image(leaves[place])
    target = graph.resolve(device)
    plan = compile_plan(chain, target, "exact", spec)
    ends = [step.position for step in plan.steps if step.library in ("batch", "torch")]
    if any(map(is_annotation, leaves)) and plan.end_with_annotations:
        ends.append(plan.end_with_annotations)
    end = min(ends, default=len(chain) + 1) - 1
    plan = compile_plan(chain[:end], target, "exact", spec)
    if plan.container is not None:
        raise OptionError(
            "preview of a dataset shows one image of a sample, and a transform makes several: leave it out, or give a "
            "folder of images"
        )
    return plan, end


def _is_instance(thing: Any, kind: type[Any]) -> bool:
    return isinstance(thing, kind)


def _to_tensor(image: Any) -> torch.Tensor:
    """Return an image or video as floats on the host."""
    if not isinstance(image, torch.Tensor):
        image = F.to_image(image)
    tensor: torch.Tensor = image.as_subclass(torch.Tensor)
    return tensor.cpu().to(torch.float32)

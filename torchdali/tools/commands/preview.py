"""``torchdali preview``: a grid of images by torchdali, the same by torchvision, and their difference."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchdali.datasets import VideoClips
from torchdali.errors import OptionError
from torchdali.pipeline import graph
from torchdali.pipeline.compile import fuse
from torchdali.pipeline.plan import Plan
from torchdali.tools.bench.folder import ONE_CLASS, load_transform, make_dataset, open_class_folders
from torchdali.tools.commands.files import find_files
from torchdali.tools.commands.grid import Sample, write_grid
from torchdali.tools.commands.samples import SamplePairs, load_dataset, make_pairs
from torchdali.tools.commands.videos import is_video_name
from torchdali.tools.parity.compare import compare_plan, compile_chain
from torchdali.transforms import Rule
from torchdali.transforms.rules.normalize import Arithmetic, Normalize

__all__ = ["make_samples", "preview"]
_UNIT_RANGE_BOUND = 2.0
"""Floats below this are taken for values in [0, 1], others for grey levels of 255."""


def preview(target: str, *, transform: str | None, samples: int, seed: int, device: str, out: Path) -> str:
    """Write a grid of images, as PNG or HTML. The arguments are the command's options.

    Returns:
        What the grid shows, in some sentences.

    Raises:
        OptionError: The folder or dataset has no images, or there is no such transform.
        SampleError: A file cannot be read.
    """
    graph.require_dali()
    folder = Path(target)
    if not folder.is_dir():
        return _preview_dataset(*load_dataset(target, transform), samples, seed, device, out)
    chain = load_transform(transform)
    with open_class_folders(folder) as (root, _):
        images = make_dataset(root, None)
        if len(images):
            plan = compile_chain([chain], graph.resolve(device), fused=False)
            images.samples = [images.samples[i] for i in _choose(len(images), samples, seed)]
            pairs = make_samples(images, plan, seed)
            in_torch = [step for step in plan.steps if step.library == "torch"]
            names = [f"{step.position} {type(step.transform).__name__}" for step in in_torch]
            summary = _summarize(pairs, plan, "images", "PIL", names)
            write_grid(out, pairs, summary, str(fuse(plan)))
            return summary
    videos = [path for path in find_files(folder).others if is_video_name(path)]
    if not videos:
        raise OptionError(f"{folder} has no images")
    with tempfile.TemporaryDirectory() as temporary:
        chosen = [videos[i] for i in _choose(len(videos), samples, seed)]
        rows = [(path, Path(path).parent.name) for path in chosen]
        clips = VideoClips(rows, index=Path(temporary) / "index.npz")
        return _preview_dataset(clips, chain, len(chosen), seed, device, out)


def _choose(count: int, samples: int, seed: int) -> list[int]:
    return sorted(np.random.default_rng(seed).permutation(count)[:samples].tolist())


def _preview_dataset(dataset: Any, transform: Any, samples: int, seed: int, device: str, out: Path) -> str:
    """Write a grid of a dataset's samples, with boxes, masks and key points. Return what it shows."""
    pairs = make_pairs(dataset, transform, _choose(len(dataset), samples, seed), seed, device)
    plan, normalizations = pairs.plan, _find_normalizations(pairs.plan.rules)
    shown = _to_grey_levels(
        [
            replace(
                sample,
                actual=_denormalize(sample.actual, normalizations),
                expected=_denormalize(sample.expected, normalizations),
            )
            for sample in pairs.samples
        ],
        plan.spec.dtype.is_floating_point,
    )
    are_videos = plan.spec.kind == "video"
    noun, decoder = ("clips", "PyAV") if are_videos else ("samples", "PIL")
    summary = _summarize(shown, plan, noun, decoder, pairs.left_out) + _summarize_targets(pairs)
    write_grid(out, shown, summary, pairs.text)
    return summary


def _summarize_targets(pairs: SamplePairs) -> str:
    """Return how far boxes, key points and masks are apart; empty if there are none."""
    found = pairs.differences
    if found.error:
        return f" Boxes, masks or key points differ: {found.error}."
    texts: list[str] = []
    for name, noun in (("boxes", "boxes"), ("points", "key points"), ("masks", "masks")):
        if figure := found.figures.get(name):
            far = f"in {figure:.2g} of their pixels" if name == "masks" else f"by at most {figure:.3g} pixels"
            texts.append(f"{noun} differ {far}")
        elif name in found.figures:
            texts.append(f"{noun} are equal")
    return f" Targets: {', '.join(texts)}." if texts else ""


def make_samples(images: Any, plan: Plan, seed: int) -> list[Sample]:
    """Return the images of an ImageFolder by both libraries, sample by sample and view by view.

    Args:
        images: The ImageFolder.
        plan: Plan of the transform, not fused.
        seed: Seed of the random numbers.
    """
    floating = plan.views[0].spec.dtype.is_floating_point
    normalizations = [_find_normalizations([*plan.rules, *view.rules]) for view in plan.views]
    samples: list[Sample] = []
    for index, view, pair in compare_plan(images, fuse(plan), seed):
        path = Path(images.samples[index][0])
        name = path.name + (f", view {view + 1}" if len(plan.views) > 1 else "")
        # A folder without class folders is reached by a link of that name.
        folder = path.parent.resolve() if path.parent.name == ONE_CLASS else path.parent
        actual, expected = (_denormalize(image, normalizations[view]) for image in pair)
        samples.append(Sample(folder.name, name, actual, expected))
    return _to_grey_levels(samples, floating)


def _to_grey_levels(samples: list[Sample], is_floating: bool) -> list[Sample]:
    if not is_floating or max(float(sample.expected.max()) for sample in samples) >= _UNIT_RANGE_BOUND:
        return samples
    return [replace(sample, actual=255 * sample.actual, expected=255 * sample.expected) for sample in samples]


def _find_normalizations(rules: Sequence[Rule]) -> list[Normalize]:
    """Return the ``Normalize`` rules of a view, in order."""
    found: list[Normalize] = []
    for rule in rules:
        if isinstance(rule, Normalize):
            found.append(rule)
        elif isinstance(rule, Arithmetic):
            found += _find_normalizations(rule.parts)
    return found


def _denormalize(image: torch.Tensor, normalizations: Sequence[Normalize]) -> torch.Tensor:
    image = image.as_subclass(torch.Tensor).to(torch.float32)
    for rule in reversed(normalizations):
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (rule.mean, rule.std))
        image = image * std + mean
    return image


def _summarize(samples: Sequence[Sample], plan: Plan, noun: str, decoder: str, left_out: Sequence[str]) -> str:
    largest = max(float(sample.difference.max()) for sample in samples)
    mean = sum(float(sample.difference.mean()) for sample in samples) / len(samples)
    where = "the GPU" if plan.device.type == "cuda" else "the CPU"
    text = (
        f"{len(samples)} {noun} by torchdali with DALI on {where}, by {decoder} and torchvision with the same random "
        f"numbers, and their difference: at most {largest:.3g} of 255 grey levels, {mean:.3g} on average."
    )
    return text + (f" Left out, because torch runs it on both sides: {', '.join(left_out)}." if left_out else "")

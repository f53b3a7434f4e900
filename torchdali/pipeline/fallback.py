"""Batches of images as the samples that user code expects: transforms that torch runs, and collate functions."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import PIL.Image
import torch
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from torchdali.errors import BatchShapeError
from torchdali.pipeline.dlpack import Images
from torchdali.pipeline.plan import Plan
from torchdali.pipeline.torch_transform import TorchTransform, cpu_semantics, resizes
from torchdali.runtime.exceptions import note
from torchdali.transforms.rng import Draws
from torchdali.transforms.spec import IntArray, Kind

_to_pil_image = cast("Callable[..., Any]", F.to_pil_image)

__all__ = ["as_samples", "call_on_batch", "call_seeded", "check_shapes", "run_on_batch", "seeded"]


def as_kind(image: torch.Tensor, kind: Kind) -> Any:
    """An image (CHW) as the object that torchvision would be holding at this place."""
    if kind == "pil":
        if image.dtype == torch.uint16:  # mode I;16, which torchvision only makes of int16
            return PIL.Image.fromarray(image[0].cpu().numpy())
        return _to_pil_image(image.cpu())
    if kind == "array":
        return image.permute(1, 2, 0).contiguous().cpu().numpy()
    return tv_tensors.Image(image) if kind == "image" else image


_lent = threading.RLock()
_PATIENCE = 10.0
"""Seconds after which a thread no longer waits for another one, whose transforms may be waiting for it."""


def _free_again() -> None:
    """In a forked process, which has no thread that would let go of it."""
    global _lent
    _lent = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_again)


@contextmanager
def seeded(device: torch.device) -> Generator[Callable[[int], None], None, None]:
    """Lends the global generators of torch, numpy and Python; gives a function that seeds them for one sample.

    To one thread at a time: else one would put back what another one had seeded, for good.
    """
    lock, taken = _lent, _lent.acquire(timeout=_PATIENCE)
    try:
        with _seeded(device) as seed:
            yield seed
    finally:
        if taken:
            lock.release()


@contextmanager
def _seeded(device: torch.device) -> Generator[Callable[[int], None], None, None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    cuda = torch.cuda.default_generators[device.index] if device.type == "cuda" else None
    cuda_state = cuda.get_state() if cuda else None

    def seed(number: int) -> None:
        random.seed(number)
        np.random.seed(number & 0xFFFFFFFF)  # noqa: NPY002
        torch.default_generator.manual_seed(number)
        if cuda:
            cuda.manual_seed(number)

    try:
        yield seed
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])
        if cuda and cuda_state is not None:
            cuda.set_state(cuda_state)


def run_on_batch(tail: Sequence[tuple[Kind, TorchTransform]], images: Images) -> Images:
    """Calls transforms that do to a batch what they do to each image.

    Args:
        tail: The transforms, in order, each with what it expects to be given.
        images: ``(N, C, H, W)``, or one tensor a sample where shapes differ.
    """
    together = isinstance(images, torch.Tensor)
    done = [images] if together else list(images)
    if not done:
        return []
    with cpu_semantics(done[0].device, any(transform.resizes for _, transform in tail)):
        for kind, transform in tail:
            try:
                done = [transform(as_kind(each, kind)) for each in done]
            except Exception as error:
                note(error, f"while {_name_of(transform)} ran in torch on a batch of {len(images)}")
                raise
    plain = [each.as_subclass(torch.Tensor) for each in done]
    return plain[0] if together else plain


def as_samples(plan: Plan, views: Sequence[Images], seeds: IntArray, name: Callable[[int], str]) -> list[Any]:
    """What torchvision would have made of each sample: images after the last transform, of the type that it has.

    Args:
        plan: What was run.
        views: For each view its images, after the plan's tail.
        seeds: ``(N,)`` numbers below 2**63 for the transforms that torch runs.
        name: Names the sample of a row.
    """
    each = [[as_kind(image, plan.spec.kind) for image in images] for images in views]
    rows = zip(*each, strict=True)  # none where the batch is empty, which has no views
    images = [row[0] if plan.container is None else plan.container(row) for row in rows]
    return run_in_torch(plan, images, seeds, name) if plan.suffix else images


def run_in_torch(plan: Plan, images: Sequence[Any], seeds: IntArray, name: Callable[[int], str]) -> list[Any]:
    """Calls each transform of the plan's suffix on each image; an exception of one says on which.

    The transforms draw from the global generators; each sample's numbers come from its own seed, and the generators
    are left as they were.

    Args:
        plan: What was run.
        images: One object a sample, as torchvision would be holding it.
        seeds: ``(N,)`` numbers below 2**63.
        name: Names the sample of a row.
    """
    done: list[Any] = []
    resizing = any(transform.resizes for transform in plan.suffix)
    with cpu_semantics(plan.device, resizing), seeded(plan.device) as seed:
        for row, (image, number) in enumerate(zip(images, seeds.tolist(), strict=True)):
            seed(number)
            for transform in plan.suffix:
                try:
                    image = transform(image)
                except Exception as error:
                    note(error, f"while {_name_of(transform)} ran in torch on {name(row)}")
                    raise
            done.append(image)
    return done


def _name_of(transform: TorchTransform) -> str:
    return getattr(transform.transform, "__qualname__", type(transform.transform).__name__)


def call_on_batch(transform: Callable[..., Any], data: Any, draws: Draws, device: torch.device) -> Any:
    """What a transform of whole batches makes of one; the global generators are seeded, and put back after it.

    Args:
        transform: Called with the parts of the batch.
        data: The batch.
        draws: The numbers of its samples, of which the first one's make the seed.
        device: Whose generator is seeded beside the CPU's.
    """
    parts: list[Any] = list(cast("Sequence[Any]", data)) if isinstance(data, (list, tuple)) else [data]
    try:
        return call_seeded(transform, *parts, draws=draws, device=device)
    except Exception as error:
        given = ", ".join(type(part).__name__ for part in parts)
        note(error, f"while batch_transform was called with the parts of a batch: {given}")
        raise


def call_seeded(function: Callable[..., Any], *given: Any, draws: Draws, device: torch.device) -> Any:
    """What a user's function, such as a ``collate_fn``, makes of a batch; the global generators are put back after it.

    In DataLoader's worker processes it draws from theirs, and the main process's stay where they are.

    Args:
        function: What is called.
        *given: With these.
        draws: The numbers of the batch's samples, of which the first one's make the seed.
        device: Whose generator is seeded beside the CPU's.
    """
    with cpu_semantics(device, resizes(function, device)), seeded(device) as seed:
        seed(int(draws.seeds()[0]))
        return function(*given)


def check_shapes(images: Sequence[Any], chain: Sequence[Any], name: Callable[[int], str]) -> None:
    """Raises where images that are to be stacked differ in shape.

    Args:
        images: One object a sample.
        chain: The transforms, for the advice.
        name: Names the sample of a row.

    Raises:
        BatchShapeError: Two shapes, their samples, and the transform that would make them equal.
    """
    shapes = [tuple(image.shape) for image in images if isinstance(image, torch.Tensor)]
    if len(shapes) < len(images):
        return
    row = next((i for i, shape in enumerate(shapes) if shape != shapes[0]), None)
    if row is None:
        return
    advice = _advice(chain, shapes[0], shapes[row])
    raise BatchShapeError(
        f"the images of a batch differ in shape: {shapes[0]} ({name(0)}) and {shapes[row]} ({name(row)}); {advice}"
    )


def _advice(chain: Sequence[Any], one: tuple[int, ...], other: tuple[int, ...]) -> str:
    """What would make the shapes of two images equal."""
    if one[-2:] == other[-2:]:
        return "give all images as many channels, with v2.RGB() or v2.Grayscale(num_output_channels=3)"
    sized = [transform for transform in chain if _sides(transform)]
    if not sized:
        return "add a transform that gives all images one size, such as RandomResizedCrop(224) or Resize((224, 224))"
    last, sides = type(sized[-1]).__name__, _sides(sized[-1])
    if len(sides) > 1:
        return f"a transform after {last} changes sizes: put one that gives all images one size behind it"
    return (
        f"{last}({sides[0]}) keeps each image's aspect ratio: add CenterCrop({sides[0]}) or RandomCrop({sides[0]}) "
        f"after it, or make it {last}(({sides[0]}, {sides[0]}))"
    )


def _sides(transform: Any) -> list[int]:
    """The size that a transform makes, for one side or for both; empty where it has none."""
    size: Any = getattr(transform, "size", None)
    return list(cast("list[int]", size)) if isinstance(size, (list, tuple)) else [size] if isinstance(size, int) else []

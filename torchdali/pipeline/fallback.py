"""Run user code on batches of images: transforms that torch runs, and collate functions."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any, cast

import numpy as np
import PIL.Image
import torch
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from torchdali.errors import BatchShapeError
from torchdali.pipeline.dlpack import Images
from torchdali.pipeline.plan import Plan
from torchdali.pipeline.torch_transform import TorchTransform, cpu_semantics, has_antialias_resize
from torchdali.runtime.exceptions import add_note
from torchdali.samples.guard import call_collate
from torchdali.samples.pil import PILHeader, restore_pil_image
from torchdali.transforms.rng import Draws
from torchdali.transforms.spec import IntArray, Kind

_to_pil_image = cast("Callable[..., Any]", F.to_pil_image)

__all__ = [
    "call_on_batch",
    "call_seeded",
    "check_shapes",
    "fork_generators",
    "run_in_torch",
    "run_on_batch",
    "stack_frames",
    "to_batch",
    "to_inputs",
    "to_samples",
]


def to_kind(image: torch.Tensor, kind: Kind) -> Any:
    """Convert an image (CHW) or a video (TCHW) to the type that torchvision would pass to the next transform.

    A sound (C, 1, T) loses its axis of height. A whole batch does, too.
    """
    if kind == "waveform":
        return image.squeeze(-2)
    if kind == "pil":
        if image.dtype in (torch.uint16, torch.float32):  # modes I;16 and F, which torchvision makes of nothing else
            return PIL.Image.fromarray(image[0].cpu().numpy())
        return _to_pil_image(image.cpu())
    if kind == "array":
        return image.permute(1, 2, 0).contiguous().cpu().numpy()
    # The constructors take several times as long, and this runs for every image.
    return image.as_subclass(_TV_TENSORS[kind]) if kind in _TV_TENSORS else image


_TV_TENSORS: dict[Kind, type[tv_tensors.Image | tv_tensors.Video]] = {
    "image": tv_tensors.Image,
    "video": tv_tensors.Video,
}
_PIXELS = {kind: tv_tensor(torch.zeros(1, 1, 1, 1)) for kind, tv_tensor in _TV_TENSORS.items()}

_REARRANGING = frozenset({"list", "tuple", "zip"})
"""Builtins that move samples and draw nothing."""

_generators_lock = threading.RLock()


def _reset_lock() -> None:
    """Replace the lock in a forked child, which lacks the thread that held it."""
    global _generators_lock
    _generators_lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_lock)


@contextmanager
def fork_generators(device: torch.device) -> Generator[Callable[[int], None], None, None]:
    """Save the global generators of torch, numpy and Python, yield a function that seeds them, and restore them.

    One thread at a time. Otherwise a thread could restore the states that another thread had seeded.
    """
    with _generators_lock:
        yield from _fork_generators(device)


def _fork_generators(device: torch.device) -> Iterator[Callable[[int], None]]:
    states = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()  # noqa: NPY002
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
    """Call transforms that can take a whole batch.

    Args:
        tail: The transforms, in order, each with the type of image that it expects.
        images: ``(N, C, H, W)``, or one tensor per sample if shapes differ.
    """
    together = isinstance(images, torch.Tensor)
    results = [images] if together else list(images)
    if not results:
        return []
    with cpu_semantics(results[0].device, any(transform.has_antialias_resize for _, transform in tail)):
        for kind, transform in tail:
            try:
                results = [_call(transform, each, kind) for each in results]
            except Exception as error:
                add_note(error, f"while {_name_of(transform)} ran in torch on a batch of {len(images)}")
                raise
    plain = [each.as_subclass(torch.Tensor) for each in results]
    return plain[0] if together else plain


def _call(transform: TorchTransform, images: torch.Tensor, kind: Kind) -> torch.Tensor:
    result = transform(to_kind(images, kind))
    is_still_sound = kind == "waveform" and result.ndim < images.ndim
    return result.unsqueeze(-2) if is_still_sound else result


def stack_frames(images: Images, firsts: IntArray) -> Images:
    """Return videos ``(T, C, H, W)`` of their frames: one tensor ``(N, T, C, H, W)`` if their shapes are equal.

    Args:
        images: ``(M, C, H, W)`` the frames of all videos, or one tensor for each.
        firsts: ``(N,)`` the position of each video's first frame.
    """
    counts = np.diff([*firsts, len(images)]).tolist()
    if isinstance(images, torch.Tensor) and len(set(counts)) == 1:
        return images.reshape(len(counts), -1, *images.shape[1:])
    frames = iter(images)
    return [torch.stack([next(frames) for _ in range(count)]) for count in counts]


def to_batch(plan: Plan, images: Images) -> Images:
    """Return stacked images in the type that ``default_collate`` would return.

    That is ``tv_tensors.Image`` or ``Video`` within ``tv_tensors.set_return_type("TVTensor")``, for which there is no
    public getter, so a pixel tells. Sounds lose their axis of height.
    """
    if plan.spec.kind == "waveform":
        return images.squeeze(-2) if isinstance(images, torch.Tensor) else [each.squeeze(-2) for each in images]
    kind = _TV_TENSORS.get(plan.spec.kind)
    # Not `kind(pixel) + 0`, which takes 0.5 ms a batch when its code is in no cache. This takes 0.2 ms.
    is_kept = kind is not None and isinstance(_PIXELS[plan.spec.kind].data, kind)
    return kind(images) if kind and is_kept and isinstance(images, torch.Tensor) else images


def to_samples(
    plan: Plan,
    views: Sequence[Images],
    seeds: IntArray,
    name: Callable[[int], str],
    pil_header: Callable[[int], PILHeader | None] = lambda row: None,  # noqa: ARG005
) -> list[Any]:
    """Return each sample's images after the last transform, in the type that torchvision would return.

    Args:
        plan: The plan that was run.
        views: For each view its images, after the plan's tail.
        seeds: ``(N,)`` seeds below 2**63 for the transforms that torch runs.
        name: Returns the name of the sample in a row.
        pil_header: Returns what the PIL image in a row had besides pixels, if that is known.
    """
    images = to_inputs(plan, views, pil_header)
    return run_in_torch(plan, images, seeds, name) if plan.suffix else images


def to_inputs(
    plan: Plan,
    views: Sequence[Images],
    pil_header: Callable[[int], PILHeader | None] = lambda row: None,  # noqa: ARG005
) -> list[Any]:
    """Return each sample's images before the plan's suffix. The arguments are those of :func:`to_samples`."""
    each = [[to_kind(image, plan.spec.kind) for image in images] for images in views]
    if plan.needs_pil_metadata and views:
        headers = [pil_header(row) for row in range(len(each[0]))]
        each = [
            [restore_pil_image(x, header) if header else x for x, header in zip(images, headers, strict=True)]
            for images in each
        ]
    rows = zip(*each, strict=True)  # an empty batch has no views and no rows
    return [row[0] if plan.container is None else plan.container(row) for row in rows]


def run_in_torch(
    plan: Plan, images: Sequence[Any], seeds: IntArray, name: Callable[[int], str], unpack: bool = False
) -> list[Any]:
    """Call the transforms of the plan's suffix on each image, or sample. A note names it if a transform raises.

    The transforms draw from the global generators. These are seeded for each sample, and restored in the end.

    Args:
        plan: The plan that was run.
        images: One object per sample, of the type that torchvision would pass.
        seeds: ``(N,)`` seeds below 2**63.
        name: Returns the name of the sample in a row.
        unpack: Whether the parts of a tuple become several arguments, as in torchvision's ``Compose``.
    """
    results: list[Any] = []
    resizing = any(transform.has_antialias_resize for transform in plan.suffix)
    with cpu_semantics(plan.device, resizing), fork_generators(plan.device) as seed:
        for row, (image, number) in enumerate(zip(images, seeds.tolist(), strict=True)):
            seed(number)
            for transform in plan.suffix:
                try:
                    image = transform(*image) if unpack and type(image) is tuple else transform(image)
                except Exception as error:
                    add_note(error, f"while {_name_of(transform)} ran in torch on {name(row)}")
                    raise
            results.append(image)
    return results


def _name_of(transform: TorchTransform) -> str:
    return getattr(transform.transform, "__qualname__", type(transform.transform).__name__)


def call_on_batch(transform: Callable[..., Any], data: Any, draws: Draws, device: torch.device) -> Any:
    """Call a transform on a whole batch. The global generators are seeded before it, and restored after it.

    Args:
        transform: Called with the parts of the batch.
        data: The batch.
        draws: The random numbers of its samples. Those of the first sample make the seed.
        device: The device whose generator is seeded, in addition to the CPU's.
    """
    parts: list[Any] = list(cast("Sequence[Any]", data)) if isinstance(data, (list, tuple)) else [data]
    try:
        return call_seeded(transform, *parts, draws=draws, device=device)
    except Exception as error:
        names = ", ".join(type(part).__name__ for part in parts)
        add_note(error, f"while batch_transform was called with the parts of a batch: {names}")
        raise


def call_seeded(function: Callable[..., Any], *args: Any, draws: Draws, device: torch.device) -> Any:
    """Call a user's function, such as a ``collate_fn``, on a batch, and restore the global generators after it.

    DataLoader calls it in worker processes, where it cannot change the generators of the main process.

    Args:
        function: The function.
        *args: Its arguments.
        draws: The random numbers of the batch's samples. Those of the first sample make the seed.
        device: The device whose generator is seeded, in addition to the CPU's.
    """
    if _only_rearranges(function):
        return call_collate(function, *args)
    with cpu_semantics(device, has_antialias_resize(function, device)), fork_generators(device) as seed:
        seed(int(draws.seeds()[0]))
        return call_collate(function, *args)


def _only_rearranges(function: Any) -> bool:
    """Return whether a function can draw nothing, as ``lambda samples: tuple(zip(*samples))``, for detection.

    It has nothing but the samples and three builtins. To save and restore the generators takes 0.1 to 0.5 ms.
    """
    if function is list or function is tuple:
        return True
    if type(function) is not FunctionType or function.__defaults__ or function.__kwdefaults__:
        return False
    code = function.__code__
    has_inner = code.co_freevars or any(isinstance(constant, CodeType) for constant in code.co_consts)
    return not has_inner and _REARRANGING.issuperset(code.co_names) and _REARRANGING.isdisjoint(function.__globals__)


def check_shapes(
    images: Sequence[Any], chain: Sequence[Any], name: Callable[[int], str], are_sounds: bool = False
) -> None:
    """Raise if images that must be stacked differ in shape.

    Args:
        images: One object per sample.
        chain: The transforms, for the advice.
        name: Returns the name of the sample in a row.
        are_sounds: Whether the images are sounds, or made of such.

    Raises:
        BatchShapeError: Two shapes differ. The message names their samples and a transform that makes them equal.
    """
    shapes = [tuple(image.shape) for image in images if isinstance(image, torch.Tensor)]
    if len(shapes) < len(images):
        return
    row = next((i for i, shape in enumerate(shapes) if shape != shapes[0]), None)
    if row is None:
        return
    differing = f"{shapes[0]} ({name(0)}) and {shapes[row]} ({name(row)})"
    if are_sounds:
        raise BatchShapeError(
            f"the sounds of a batch differ in shape: {differing}; give collate_fn=torchdali.pad_collate, or a "
            "transform that gives all sounds one length"
        )
    advice = _suggest_crop(chain, shapes[0], shapes[row])
    raise BatchShapeError(f"the images of a batch differ in shape: {differing}; {advice}")


def _suggest_crop(chain: Sequence[Any], shape: tuple[int, ...], other: tuple[int, ...]) -> str:
    """Return what to do so that the images have equal shapes."""
    if len(shape) == 4 and shape[1:] == other[1:]:
        return "give all videos one number of frames, in the dataset or with v2.UniformTemporalSubsample()"
    if shape[-2:] == other[-2:]:
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
    """Return a transform's output size, for one side or for both, or an empty list."""
    size: Any = getattr(transform, "size", None)
    return list(cast("list[int]", size)) if isinstance(size, (list, tuple)) else [size] if isinstance(size, int) else []

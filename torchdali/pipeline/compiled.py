"""A transform on its own: images in, a batch on the device out, with the loader's rules and no dataset."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, TextIO, cast

import numpy as np
import PIL.Image
import torch
from torchvision import tv_tensors

from torchdali.errors import SampleError
from torchdali.pipeline import graph
from torchdali.pipeline.engine import Views
from torchdali.pipeline.fallback import as_samples, run_on_batch
from torchdali.pipeline.feed import Batch, Prefetcher
from torchdali.pipeline.plan import Plan
from torchdali.pipeline.pool import InputKey, PipelineCache, PipelinePool
from torchdali.pipeline.readers import FileReader
from torchdali.pipeline.tuning import check_numbers
from torchdali.runtime.lifecycle import disable_compile
from torchdali.samples.image import PIXEL_DTYPES
from torchdali.sources import Source
from torchdali.transforms import SampleTransformError, check_callable, flatten
from torchdali.transforms.rng import Draws, Words, draw_seed, epoch_key
from torchdali.transforms.spec import Fidelity, InputKind, IntArray, Spec, check_fidelity

__all__ = ["CompiledTransform", "compile"]

_TAKEN = "paths, encoded bytes, PIL images and (C, H, W) tensors, or one (N, C, H, W) tensor"
_IN_MEMORY = "/proc/self/fd/"


def compile(  # noqa: A001 - as in torch.compile
    transform: Any,
    *,
    device: str | int | torch.device = "auto",
    fidelity: Fidelity = "exact",
    num_threads: int = 0,
) -> CompiledTransform:
    """Compiles a transform to a function from images to a batch.

    Args:
        transform: A torchvision transform or a chain of them, as for ``DALILoader``.
        device: Where the batch is made: "auto" is as for ``DALILoader``.
        fidelity: As for ``DALILoader``.
        num_threads: Number of DALI's CPU threads; 0 lets it be chosen.

    Raises:
        DALIUnavailableError: DALI is missing or cannot use the device; the text says what to install.
        TypeError: A transform cannot be called, or an argument is of no type that it may have.
        ValueError: An argument is none that exists.
    """
    check_callable(*flatten(transform))
    check_fidelity(fidelity)
    check_numbers(num_threads=num_threads)
    if num_threads < 0:
        raise ValueError(f"num_threads is 0 or more, not {num_threads}")
    graph.require_device(device)
    return CompiledTransform(transform, graph.resolve(device), fidelity, num_threads)


class CompiledTransform:
    """What :func:`compile` gives; called with images.

    The pipeline for a kind of input is built when that kind first comes, which takes a second or two on a GPU, and
    anew when more images come at once than ever before.

    Attributes:
        transform: As given.
        device: Where batches are made.
    """

    def __init__(self, transform: Any, device: torch.device, fidelity: Fidelity, threads: int) -> None:
        self.transform = transform
        self.device = device
        self._routes = PipelineCache(transform, device, fidelity, 1, threads)

    @disable_compile
    def __call__(self, images: torch.Tensor | Sequence[Any]) -> Any:
        """Transforms images.

        Each image has random parameters of its own, also in a batch that is one tensor. They follow from torch's
        global generator, from which a call draws one number where anything is random.

        Args:
            images: A sequence of paths, encoded files as bytes, PIL images and ``(C, H, W)`` tensors, in any mixture;
                or one ``(N, C, H, W)`` tensor. Files and PIL images are RGB, as ``ImageFolder`` makes them.

        Returns:
            One tensor, ``(N, C, H, W)`` on :attr:`device`; a list of N tensors where their shapes differ; for a
            transform that makes several views, a list with one of these for each view. PIL images that a transform
            ends in come as uint8 tensors. Where a transform that torch runs ends in something else, a list of that.

        Raises:
            SampleError: A file is missing or damaged, or an image cannot be transformed; ``index`` is its place.
            TypeError: Something is none of these.
            ValueError: There are no images.
        """
        _check(images)
        groups: dict[InputKey, list[int]] = {}
        if isinstance(images, torch.Tensor):
            groups[self._route(images[0], 0)] = list(range(len(images)))
        else:
            for i, image in enumerate(images):
                groups.setdefault(self._route(image, i), []).append(i)
        plans = [self._routes.pool(route).plan for route in groups]
        key = self._key(plans)
        results = [self._run(route, images, np.array(rows, np.int64), key) for route, rows in groups.items()]
        return results[0] if len(results) == 1 else _together(plans, list(groups.values()), results)

    def explain(self, file: TextIO | None = None) -> None:
        """Prints what will run, and where, for files and PIL images.

        Args:
            file: Where to; standard output by default.
        """
        plan = self._routes.plan(Spec(), InputKind.FILES)
        (file or sys.stdout).write(f"{type(self).__name__} on {self.device}\n{plan}\n")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.transform!r}, device={str(self.device)!r})"

    def _route(self, image: Any, place: int) -> InputKey:
        """What an image is, how it is fed, and whether it is on the device already."""
        if isinstance(image, (str, os.PathLike, bytes, bytearray, memoryview)):
            return Spec(), InputKind.FILES, False
        if isinstance(image, PIL.Image.Image):
            return Spec(), InputKind.PIXELS, False
        if not isinstance(image, torch.Tensor):
            raise TypeError(f"image {place} is a {type(image).__name__}; taken are {_TAKEN}")
        if image.ndim != 3:
            raise TypeError(f"image {place} is a tensor of shape {tuple(image.shape)}, not (C, H, W)")
        if image.dtype not in PIXEL_DTYPES:
            raise TypeError(
                f"image {place} is a tensor of {image.dtype}; DALI takes {', '.join(map(str, PIXEL_DTYPES))}"
            )
        kind = "image" if isinstance(image, tv_tensors.Image) else "tensor"
        resident = self.device.type == "cuda" and image.device == self.device
        return Spec.from_input(kind, image.dtype, image.shape[0]), InputKind.PIXELS, resident

    @staticmethod
    def _key(plans: Sequence[Plan]) -> Words:
        random = any(plan.random for plan in plans)
        return epoch_key(draw_seed(None) if random else 0, 0)

    def _run(self, route: InputKey, images: Any, rows: IntArray, key: Words) -> Any:
        pool = self._routes.pool(route)
        draws = Draws(key, rows, np.zeros_like(rows))
        views = (
            self._from_files(pool, images, rows, draws)
            if pool.plan.input_kind is InputKind.FILES
            else self._from_pixels(pool, images, rows, draws, route[2])
        )
        plan = pool.plan
        views = [run_on_batch(plan.tail, one) for one in views]
        if not plan.suffix:
            return views[0] if plan.container is None else views
        return _stacked(
            as_samples(
                plan, views, draws.select_position(plan.suffix_position).seeds(), lambda row: f"image {rows[row]}"
            )
        )

    def _from_files(self, pool: PipelinePool, images: Any, rows: IntArray, draws: Draws) -> Views:
        with ExitStack() as files:
            paths = [""] * len(images)
            for i in rows.tolist():
                paths[i] = _path_of(images[i], files)
            reader = FileReader(_GivenFiles(paths))
            feed = Prefetcher(window=1, timeout=0)
            try:
                feed.push(Batch(reader, pool, rows, draws))
                return feed.pop().views
            finally:
                feed.close()

    def _from_pixels(self, pool: PipelinePool, images: Any, rows: IntArray, draws: Draws, resident: bool) -> Views:
        if isinstance(images, torch.Tensor):
            pixels: Any = images.permute(0, 2, 3, 1).contiguous()
            size = np.tile(np.array(images.shape[2:], np.int64), (len(rows), 1))
            pixels = pixels if resident else pixels.cpu().numpy()
        else:
            pixels = [_pixels(images[i], resident) for i in rows.tolist()]
            size = np.array([one.shape[:2] for one in pixels], np.int64)
        try:
            inputs, _ = pool.plan.draw(draws, size)
        except SampleTransformError as error:
            place = int(rows[error.row])
            raise SampleError(place, f"image {place}", str(error)) from error
        engine = pool.acquire(len(rows))
        try:
            engine.submit(pixels, inputs)
            return engine.take().views
        finally:
            pool.release(engine)


class _GivenFiles(Source):
    """Files that were given to a transform. Encoded bytes, which became a file in memory, are named by their place."""

    kind = InputKind.FILES

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, rows: IntArray) -> list[str]:
        return [self._paths[row] for row in rows.tolist()]

    def target(self, row: int) -> Any:
        raise NotImplementedError  # a transform is called with images alone

    def name(self, row: int) -> str:
        path = self._paths[row]
        return f"image {row}" if path.startswith(_IN_MEMORY) else path


def _check(images: Any) -> None:
    """Raises what :class:`CompiledTransform` raises of what it is called with, before it looks at each image."""
    if isinstance(images, (str, bytes, os.PathLike, PIL.Image.Image)) or not isinstance(
        images, (torch.Tensor, Sequence)
    ):
        kind = type(cast("object", images)).__name__
        raise TypeError(f"a sequence is expected ({_TAKEN}), not one {kind}: put it into a list")
    if not len(cast("Sequence[Any]", images)):
        raise ValueError("there are no images")
    for one in [images] if isinstance(images, torch.Tensor) else cast("Sequence[Any]", images):
        if isinstance(one, tv_tensors.TVTensor) and not isinstance(one, tv_tensors.Image):
            raise TypeError(f"a {type(one).__name__} is no image; taken are {_TAKEN}")
    if isinstance(images, torch.Tensor) and images.ndim != 4:
        raise TypeError(f"a tensor is taken for a batch and has 4 axes (N, C, H, W), not {images.ndim}")


def _together(plans: Sequence[Plan], rows: Sequence[Sequence[int]], results: Sequence[Any]) -> Any:
    """The results of images of several kinds, each of which has its ``rows``, as if all were of one."""
    apart = [plan.container is not None and not plan.suffix for plan in plans]
    whole: list[Any] = [None] * sum(map(len, rows))
    for of_kind, result, views in zip(rows, results, apart, strict=True):
        for row, one in zip(of_kind, zip(*result, strict=True) if views else result, strict=True):
            whole[row] = one
    return [_stacked(list(view)) for view in zip(*whole, strict=True)] if any(apart) else _stacked(whole)


def _path_of(image: Any, files: ExitStack) -> str:
    """The path of a file; encoded bytes become a file in memory, which is closed with ``files``."""
    if isinstance(image, (str, os.PathLike)):
        return os.fspath(cast("str | os.PathLike[str]", image))
    file = os.memfd_create("torchdali")
    files.callback(os.close, file)
    with os.fdopen(file, "wb", closefd=False) as stream:
        stream.write(image)
    return f"{_IN_MEMORY}{file}"


def _pixels(image: Any, resident: bool) -> Any:
    """One image as DALI takes it: HWC, an array, or a tensor on the device."""
    if isinstance(image, PIL.Image.Image):
        return np.array(image.convert("RGB"))
    pixels = image.permute(1, 2, 0).contiguous()
    return pixels if resident else pixels.cpu().numpy()


def _stacked(samples: list[Any]) -> Any:
    """One tensor where all samples are tensors of one shape."""
    first = samples[0]
    if all(isinstance(one, torch.Tensor) and one.shape == first.shape for one in samples):
        return torch.stack(samples).as_subclass(torch.Tensor)
    return samples

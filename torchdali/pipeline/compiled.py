"""``torchdali.compile``: a transform without a dataset, from images to a batch on the device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, TextIO, cast

import numpy as np
import PIL.Image
import torch
from torchvision import tv_tensors

from torchdali.errors import SampleError
from torchdali.pipeline import graph
from torchdali.pipeline.batched import finish_views
from torchdali.pipeline.engine import Views
from torchdali.pipeline.fallback import to_samples
from torchdali.pipeline.feed import Batch, Prefetcher
from torchdali.pipeline.plan import Plan, summarize_plans
from torchdali.pipeline.plans import PlanCache
from torchdali.pipeline.pool import InputKey, PipelineCache, PipelinePool
from torchdali.pipeline.readers import FileReader
from torchdali.pipeline.tuning import check_numbers
from torchdali.runtime.columns import Explanation
from torchdali.runtime.lifecycle import disable_compile
from torchdali.samples.image import PIXEL_DTYPES, convert_to_rgb
from torchdali.sources import Source
from torchdali.transforms import SampleTransformError, check_callable, flatten
from torchdali.transforms.rng import Draws, Words, draw_seed, epoch_key
from torchdali.transforms.spec import Fidelity, InputKind, IntArray, Spec, check_fidelity

__all__ = ["CompiledTransform", "compile"]

_ACCEPTED = "paths, encoded bytes, PIL images and (C, H, W) tensors, or one (N, C, H, W) tensor"
_IN_MEMORY = "/proc/self/fd/"


def compile(  # noqa: A001 - as in torch.compile
    transform: Any,
    *,
    device: str | int | torch.device = "auto",
    fidelity: Fidelity = "exact",
    num_threads: int = 0,
) -> CompiledTransform:
    """Compile a transform to a function from images to a batch.

    Args:
        transform: A torchvision transform or a chain of them, as for ``DALILoader``.
        device: Where the batch is made, as for ``DALILoader``.
        fidelity: As for ``DALILoader``.
        num_threads: Number of DALI's CPU threads. With 0 it is chosen.

    Raises:
        DALIUnavailableError: DALI is missing or cannot use the device. The message says what to install.
        TypeError: A transform cannot be called, or an argument has a wrong type.
        ValueError: An argument has no valid value.
    """
    check_callable(*flatten(transform))
    check_fidelity(fidelity)
    check_numbers(num_threads=num_threads)
    if num_threads < 0:
        raise ValueError(f"num_threads must be 0 or more, got {num_threads}")
    graph.require_device(device)
    return CompiledTransform(transform, graph.resolve(device), fidelity, num_threads)


class CompiledTransform:
    """The function that :func:`compile` returns.

    It builds a pipeline when a kind of input first comes, and again for a larger batch than before. That takes a second
    or two on a GPU.

    Attributes:
        transform: The transform that was compiled.
        device: Where batches are made.
    """

    def __init__(self, transform: Any, device: torch.device, fidelity: Fidelity, threads: int) -> None:
        self.transform = transform
        self.device = device
        self._pipelines = PipelineCache(PlanCache(transform, device, fidelity), device, 1, threads)

    @disable_compile
    def __call__(self, images: torch.Tensor | Sequence[Any]) -> Any:
        """Transform images.

        Each image has its own random parameters, also in a batch that is one tensor. They follow from torch's global
        generator. If anything is random, a call draws one number from it.

        Args:
            images: A sequence of paths, encoded files as bytes, PIL images and ``(C, H, W)`` tensors, in any mixture;
                or one ``(N, C, H, W)`` tensor. Files and PIL images are RGB, as ``ImageFolder`` makes them.

        Returns:
            One tensor, ``(N, C, H, W)`` on :attr:`device`, or a list of N tensors if their shapes differ. For a
            transform that makes several views, a list with one of these for each view. PIL images at the end of a
            transform become uint8 tensors. If torch runs the last transform, and it does not return tensors, a list of
            its results.

        Raises:
            SampleError: A file is missing or damaged, or an image cannot be transformed. ``index`` is its position.
            TypeError: An image has another type.
            ValueError: There are no images.
        """
        _check(images)
        groups: dict[InputKey, list[int]] = {}
        if isinstance(images, torch.Tensor):
            groups[self._input_key(images[0], 0)] = list(range(len(images)))
        else:
            for i, image in enumerate(images):
                groups.setdefault(self._input_key(image, i), []).append(i)
        plans = [self._pipelines.plans.get((spec, input_kind)) for spec, input_kind, _ in groups]
        key = self._key(plans)
        results = [self._run(kind, images, np.array(rows, np.int64), key) for kind, rows in groups.items()]
        return results[0] if len(results) == 1 else _merge(plans, list(groups.values()), results)

    def explain(self, file: TextIO | None = None) -> None:
        """Print what will run, and where, for files and PIL images, in lines as those of :meth:`DALILoader.explain`.

        Args:
            file: Where to print; standard output by default, and in a notebook a table.
        """
        plan = self._pipelines.plans.get((Spec(), InputKind.FILES))
        Explanation(*summarize_plans([plan]), str(plan)).show(file)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.transform!r}, device={str(self.device)!r})"

    def _input_key(self, image: Any, index: int) -> InputKey:
        """Return the key of the pipelines for an image."""
        if isinstance(image, (str, os.PathLike, bytes, bytearray, memoryview)):
            return Spec(), InputKind.FILES, False
        if isinstance(image, PIL.Image.Image):
            return Spec(), InputKind.PIXELS, False
        if not isinstance(image, torch.Tensor):
            raise TypeError(f"image {index} is a {type(image).__name__}; taken are {_ACCEPTED}")
        if image.ndim != 3:
            raise TypeError(f"image {index} is a tensor of shape {tuple(image.shape)}, not (C, H, W)")
        if image.dtype not in PIXEL_DTYPES:
            dtypes = ", ".join(map(str, PIXEL_DTYPES))
            raise TypeError(f"image {index} is a tensor of {image.dtype}; DALI takes {dtypes}: convert it")
        kind = "image" if isinstance(image, tv_tensors.Image) else "tensor"
        resident = self.device.type == "cuda" and image.device == self.device
        return Spec.from_input(kind, image.dtype, image.shape[0]), InputKind.PIXELS, resident

    @staticmethod
    def _key(plans: Sequence[Plan]) -> Words:
        random = any(plan.is_random for plan in plans)
        return epoch_key(draw_seed(None) if random else 0, 0)

    def _run(self, kind: InputKey, images: Any, rows: IntArray, key: Words) -> Any:
        pool = self._pipelines.pool(kind)
        draws = Draws(key, rows, np.zeros_like(rows))
        views = (
            self._from_files(pool, images, rows, draws)
            if pool.plan.input_kind is InputKind.FILES
            else self._from_pixels(pool, images, rows, draws, kind[2])
        )

        def name(row: int) -> str:
            return f"image {rows[row]}"

        def make_error(row: int, reason: str) -> SampleError:
            return SampleError(int(rows[row]), name(row), reason)

        plan, views = finish_views(pool, views, draws, name, make_error)
        if not plan.suffix:
            return views[0] if plan.container is None else views
        return _stack(to_samples(plan, views, draws.select_position(plan.suffix_position).seeds(), name))

    def _from_files(self, pool: PipelinePool, images: Any, rows: IntArray, draws: Draws) -> Views:
        with ExitStack() as files:
            paths = [""] * len(images)
            for i in rows.tolist():
                paths[i] = _get_path(images[i], files)
            reader = FileReader(_InputFiles(paths), adjust_orientation=pool.plan.adjust_orientation)
            prefetcher = Prefetcher(prefetch_depth=1, timeout=0)
            try:
                prefetcher.put(Batch(reader, pool, rows, draws))
                return prefetcher.get().views
            finally:
                prefetcher.close()

    def _from_pixels(self, pool: PipelinePool, images: Any, rows: IntArray, draws: Draws, resident: bool) -> Views:
        if isinstance(images, torch.Tensor):
            pixels: Any = images.permute(0, 2, 3, 1).contiguous()
            size = np.tile(np.array(images.shape[2:], np.int64), (len(rows), 1))
            pixels = pixels if resident else pixels.cpu().numpy()
        else:
            pixels = [_pixels(images[i], resident, pool.plan.adjust_orientation) for i in rows.tolist()]
            size = np.array([image.shape[:2] for image in pixels], np.int64)
        try:
            inputs, _ = pool.plan.draw(draws, size)
        except SampleTransformError as error:
            index = int(rows[error.row])
            raise SampleError(index, f"image {index}", str(error)) from error
        runner = pool.acquire(len(rows))
        try:
            runner.submit(pixels, inputs)
            return runner.take().views
        finally:
            pool.release(runner)


class _InputFiles(Source):
    """The files that a transform is called with. Encoded bytes become files in memory, named by their position."""

    kind = InputKind.FILES

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, rows: IntArray) -> list[str]:
        return [self._paths[row] for row in rows.tolist()]

    def target(self, row: int) -> Any:
        raise NotImplementedError  # there are only images

    def name(self, row: int) -> str:
        path = self._paths[row]
        return f"image {row}" if path.startswith(_IN_MEMORY) else path


def _check(images: Any) -> None:
    """Raise the errors of :class:`CompiledTransform` that need no look at each image."""
    if isinstance(images, (str, bytes, os.PathLike, PIL.Image.Image)) or not isinstance(
        images, (torch.Tensor, Sequence)
    ):
        kind = type(cast("object", images)).__name__
        raise TypeError(f"a sequence is expected ({_ACCEPTED}), not one {kind}: put it into a list")
    if not len(cast("Sequence[Any]", images)):
        raise ValueError("there are no images")
    for image in [images] if isinstance(images, torch.Tensor) else cast("Sequence[Any]", images):
        if isinstance(image, tv_tensors.TVTensor) and not isinstance(image, tv_tensors.Image):
            raise TypeError(f"a {type(image).__name__} is no image; taken are {_ACCEPTED}")
    if isinstance(images, torch.Tensor) and images.ndim != 4:
        raise TypeError(f"a tensor is taken for a batch and has 4 axes (N, C, H, W), not {images.ndim}")


def _merge(plans: Sequence[Plan], rows: Sequence[Sequence[int]], results: Sequence[Any]) -> Any:
    """Return the results of several kinds of images as those of one kind. Each kind has its ``rows``."""
    has_views = [plan.container is not None and not plan.suffix for plan in plans]
    merged: list[Any] = [None] * sum(map(len, rows))
    for positions, result, views in zip(rows, results, has_views, strict=True):
        for row, image in zip(positions, zip(*result, strict=True) if views else result, strict=True):
            merged[row] = image
    return [_stack(list(view)) for view in zip(*merged, strict=True)] if any(has_views) else _stack(merged)


def _get_path(image: Any, files: ExitStack) -> str:
    """Return the path of a file. Encoded bytes become a file in memory, which ``files`` closes."""
    if isinstance(image, (str, os.PathLike)):
        return os.fspath(cast("str | os.PathLike[str]", image))
    file = os.memfd_create("torchdali")
    files.callback(os.close, file)
    with os.fdopen(file, "wb", closefd=False) as stream:
        stream.write(image)
    return f"{_IN_MEMORY}{file}"


def _pixels(image: Any, resident: bool, adjust_orientation: bool) -> Any:
    """Return an image for DALI, HWC: an array, or a tensor on the device."""
    if isinstance(image, PIL.Image.Image):
        return np.array(convert_to_rgb(image, adjust_orientation))
    pixels = image.permute(1, 2, 0).contiguous()
    return pixels if resident else pixels.cpu().numpy()


def _stack(samples: list[Any]) -> Any:
    """Return one tensor if all samples are tensors of one shape; else the list."""
    first = samples[0]
    if all(isinstance(sample, torch.Tensor) and sample.shape == first.shape for sample in samples):
        return torch.stack(samples).as_subclass(torch.Tensor)
    return samples

"""Run a batch through the rest of its plan, after the first part that DALI ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torchdali.errors import TransformError
from torchdali.pipeline.dlpack import Images
from torchdali.pipeline.engine import Views
from torchdali.pipeline.fallback import check_shapes, fork_generators, run_on_batch, to_kind
from torchdali.pipeline.plan import Cut, Plan
from torchdali.pipeline.pool import PipelinePool
from torchdali.pipeline.torch_transform import cpu_semantics
from torchdali.runtime.exceptions import add_note
from torchdali.samples.image import PIXEL_DTYPES
from torchdali.transforms import SampleTransformError
from torchdali.transforms.rng import Draws
from torchdali.transforms.spec import IntArray, Kind, Spec

__all__ = ["finish_views"]


def finish_views(
    pool: PipelinePool,
    views: Views,
    draws: Draws,
    name: Callable[[int], str],
    make_error: Callable[[int, str], Exception],
) -> tuple[Plan, Views]:
    """Run what follows the first part of a plan, up to the transforms that torch runs on each sample.

    Args:
        pool: The pipelines of the first part.
        views: For each view its images.
        draws: The random numbers of the batch's samples.
        name: Returns the name of the sample in a row.
        make_error: Returns the exception for a sample, from its row and a reason.

    Returns:
        The plan of the last part, and for each of its views the images.

    Raises:
        BatchShapeError: Images differ in shape where torch takes the whole batch.
        TransformError: The transform that took the whole batch did not return a batch.
    """
    plan = pool.plan
    if plan.tail:
        views = [run_on_batch(plan.tail, images) for images in views]
    if plan.cut is None:
        return plan, views
    if not len(draws):
        return plan.last, []
    images, kind = _run_cut(plan.cut, views[0], draws, plan.device, name)
    pool = pool.get_following(Spec.from_input(kind, images.dtype, images.shape[1]))
    views = _run_in_dali(pool, images, draws, plan.cut, make_error)
    return finish_views(pool, views, draws, name, make_error)


def _run_cut(
    cut: Cut, images: Images, draws: Draws, device: torch.device, name: Callable[[int], str]
) -> tuple[torch.Tensor, Kind]:
    """Return what the transform at a cut makes of the batch, ``(N, C, H, W)``, and what that is."""
    title = f"transform {cut.position}, {_name_of(cut)},"
    if not isinstance(images, torch.Tensor):
        try:
            check_shapes(images, (), name)
        except Exception as error:
            add_note(error, f"{title} takes whole batches: images must have equal sizes before it")
            raise
        images = torch.stack(images)
    try:
        with (
            cpu_semantics(device, cut.transform.has_antialias_resize),
            fork_generators(device) as seed,
            torch.no_grad(),
        ):
            seed(int(draws.select_position(cut.number).seeds()[0]))
            result = cut.transform(to_kind(images, cut.kind))
    except Exception as error:
        add_note(error, f"while {title} ran in torch on a batch of {len(images)}")
        raise
    kind = cut.kind
    if kind == "waveform" and isinstance(result, torch.Tensor):
        kind = "waveform" if result.ndim == 3 else "tensor"
        result = result.unsqueeze(-2) if result.ndim == 3 else result
    if not isinstance(result, torch.Tensor) or result.ndim != 4 or len(result) != len(images):
        got = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        raise TransformError(
            f"{title} must return a tensor (N, C, H, W) of {len(images)} images, got {got}; it was called with the "
            "whole batch because its batchable is True"
        )
    return result.as_subclass(torch.Tensor).to(device), kind


def _name_of(cut: Cut) -> str:
    transform = cut.transform.transform
    return getattr(transform, "__name__", type(transform).__name__)


def _run_in_dali(
    pool: PipelinePool, images: torch.Tensor, draws: Draws, cut: Cut, make_error: Callable[[int, str], Exception]
) -> Views:
    plan = pool.plan
    size: IntArray = np.tile(np.array(images.shape[2:], np.int64), (len(images), 1))
    try:
        inputs, _ = plan.draw(draws, size)
    except SampleTransformError as error:
        raise make_error(error.row, str(error)) from error
    if plan.container is None and not any(rule.operators for rule in plan.all_rules):
        return [images]
    if images.dtype not in PIXEL_DTYPES:
        raise TransformError(
            f"transform {cut.position}, {_name_of(cut)}, must return a type that DALI takes "
            f"({', '.join(map(str, PIXEL_DTYPES))}), got {images.dtype}"
        )
    pixels: Any = images.permute(0, 2, 3, 1).contiguous()
    runner = pool.acquire(len(images))
    try:
        runner.submit(pixels if pixels.is_cuda else pixels.numpy(), inputs)
        return runner.take().views
    finally:
        pool.release(runner)

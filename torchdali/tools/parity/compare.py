"""Run a chain through DALI and through torchvision with the same random numbers, sample by sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torchvision.transforms.v2 import functional as F

from torchdali.pipeline.compile import compile_plan, fuse
from torchdali.pipeline.feed import Batch, Prefetcher
from torchdali.pipeline.plan import Plan
from torchdali.pipeline.pool import PipelinePool
from torchdali.pipeline.readers import open_reader
from torchdali.pipeline.tuning import Threads
from torchdali.sources import from_dataset
from torchdali.tools.parity.case import Case
from torchdali.transforms.occurrences import DenseOccurrences
from torchdali.transforms.rng import Draws, epoch_key
from torchdali.transforms.spec import Fidelity

__all__ = [
    "BORDER",
    "Differences",
    "Pair",
    "compare_chain",
    "compare_plan",
    "compile_chain",
    "describe_exceeded",
    "describe_mismatch",
    "find_exceeded_bounds",
    "measure",
    "run",
    "split_indices",
    "subtract",
]

BORDER = 4
"""Width in pixels of the border that the interior leaves out."""

SIZE = 6


class Pair(NamedTuple):
    """One image, CHW on the CPU: torchdali's (actual) and torchvision's (expected)."""

    actual: torch.Tensor
    expected: torch.Tensor


@dataclass(frozen=True)
class Differences:
    """Differences of one chain's images from torchvision's, on one device.

    Attributes:
        max_abs: Largest absolute difference of a value.
        max_abs_interior: Largest absolute difference without a border of :data:`BORDER` pixels.
        mean_abs: Mean absolute difference.
        frac_above_1: Share of pixels with a value that differs by more than 1 (floating point: by more than 1/255).
        error: Why nothing was measured, or empty.
    """

    max_abs: float = 0.0
    max_abs_interior: float = 0.0
    mean_abs: float = 0.0
    frac_above_1: float = 0.0
    error: str = ""


def compile_chain(
    chain: Sequence[Any], device: str | torch.device = "cpu", fused: bool = True, fidelity: Fidelity = "exact"
) -> Plan:
    """Compile a chain to a plan. "cuda" is the first CUDA device."""
    device = torch.device("cuda", 0) if str(device) == "cuda" else torch.device(device)
    plan = compile_plan(list(chain), device, fidelity)
    return fuse(plan) if fused else plan


def run(dataset: Any, plan: Plan, batches: Sequence[Sequence[int]], seed: int = 0) -> Iterator[Batch]:
    """Run batches of a dataset through the loader's own prefetcher."""
    reader, key = open_reader(from_dataset(dataset)), epoch_key(seed, 0)
    pool = PipelinePool(plan, max(map(len, batches)), Threads(2, plan.device, plan.input_kind))
    feed, occurrences = Prefetcher(prefetch_depth=3, timeout=0), DenseOccurrences(len(reader.source))
    try:
        for indices in batches:
            index = np.asarray(indices, np.int64)
            feed.put(Batch(reader, pool, index, Draws(key, index, occurrences.count(index))))
        for _ in batches:
            yield feed.get()
    finally:
        feed.close()


def split_indices(count: int) -> list[list[int]]:
    """Return the indices of a dataset in order, in batches."""
    return [list(range(start, min(start + SIZE, count))) for start in range(0, count, SIZE)]


def compare_chain(dataset: Any, chain: Sequence[Any], device: str | torch.device = "cpu") -> Iterator[Pair]:
    """Yield every image of a dataset, by DALI and by torchvision's functionals with the same numbers.

    Raises:
        ValueError: A part of the chain runs in torch.
    """
    plan = compile_chain(chain, device)
    if plan.suffix or plan.tail:
        raise ValueError(f"a part of the chain runs in torch:\n{plan}")
    for _, _, pair in compare_plan(dataset, plan):
        yield pair


def compare_plan(dataset: Any, plan: Plan, seed: int = 0) -> Iterator[tuple[int, int, Pair]]:
    """Yield the number of each image, that of its view, and the pair. Skip what torch runs after the plan."""
    reader: Any = open_reader(from_dataset(dataset))
    trunk, views = plan.enumerate_rules()
    for batch in run(dataset, plan, split_indices(len(reader.source)), seed):
        for row, index in enumerate(batch.rows.tolist()):
            image = _apply_reference(F.pil_to_tensor(reader.load(index)), trunk, batch, row)
            for number, (made, rules) in enumerate(zip(batch.views, views, strict=True)):
                yield index, number, Pair(made[row].cpu(), _apply_reference(image, rules, batch, row))


def _apply_reference(image: torch.Tensor, rules: Sequence[tuple[int, Any]], batch: Batch, row: int) -> torch.Tensor:
    """Apply torchvision's functionals to an image (CHW), with the numbers drawn for a row of a batch."""
    for number, rule in rules:
        image = rule.reference(image, {name: values[row] for name, values in batch.params[number].items()})
    return image


def measure(case: Case, folder: Any, device: str | torch.device) -> Differences:
    """Measure how far the images of a folder are from torchvision's."""
    max_abs = max_abs_interior = 0.0
    means: list[float] = []
    offs: list[float] = []
    for actual, expected in compare_chain(folder, case.chain, device):
        if mismatch := describe_mismatch(actual, expected):
            return Differences(error=mismatch)
        difference = subtract(actual, expected)
        core = difference[:, BORDER:-BORDER, BORDER:-BORDER]
        max_abs = max(max_abs, float(difference.max()))
        max_abs_interior = max(max_abs_interior, float(core.max()) if core.numel() else 0.0)
        means.append(float(difference.mean()))
        step = 1.001 / 255 if actual.dtype.is_floating_point else 1.0
        offs.append(float((difference > step).any(0).double().mean()))
    if not means:
        return Differences(error="there is no image to compare")
    return Differences(max_abs, max_abs_interior, sum(means) / len(means), sum(offs) / len(offs))


def describe_mismatch(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """Return in words how two tensors differ in type, shape or dtype, or an empty string."""
    ours, theirs = (f"{type(x).__name__} {tuple(x.shape)} of {x.dtype}" for x in (actual, expected))
    return "" if ours == theirs else f"{ours}, expected {theirs}"


def subtract(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the absolute differences of two tensors. That of NaN is infinite, so it exceeds every bound."""
    return (actual.cpu().double() - expected.double()).abs().nan_to_num(nan=float("inf"))


def find_exceeded_bounds(case: Case, measured: Differences) -> str:
    """Return which bounds of a case are exceeded, in words, or an empty string."""
    return measured.error or describe_exceeded(
        ("max", measured.max_abs, case.max_abs),
        ("max inside", measured.max_abs_interior, case.max_abs_interior),
        ("mean", measured.mean_abs, case.mean_abs),
    )


def describe_exceeded(*figures: tuple[str, float, float]) -> str:
    """Return in words which figures exceed their bounds, or an empty string. A figure is its name, value and bound."""
    return "; ".join(f"{name} {got:.3g}, bound {bound:.3g}" for name, got, bound in figures if not got <= bound)

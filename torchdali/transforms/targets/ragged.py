"""Rows of coordinates of a batch, one sample after another. Each sample may have any number of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from torchdali.transforms.spec import IntArray

Values = npt.NDArray[Any]
Flags = npt.NDArray[np.bool_]
Self = TypeVar("Self", bound="Ragged")
Canvas = tuple[int, int]
"""Height and width of the image to which coordinates belong, in pixels."""


def canvas(size: IntArray, i: int) -> Canvas:
    """Return the height and width of one image of ``(N, 2)``."""
    return int(size[i, 0]), int(size[i, 1])


class Ragged:
    """Coordinates of one kind in a batch.

    A leaf is one tensor of one sample. All leaves have the same dtype, and the same shape without the first axis. Their
    rows lie one behind another, in the order of the leaves, and leaves are in the order of samples.

    Args:
        values: ``(M, ...)`` rows of all leaves.
        counts: ``(L,)`` numbers of rows of the leaves.
        owners: ``(L,)`` sample of each leaf, ascending.

    Attributes:
        values: ``(M, ...)`` rows of all leaves. It is replaced, never written to.
        leaf: ``(M,)`` leaf of each row.
        kept: ``(M,)`` number that each row had at the beginning. Rows that were dropped are missing.
        begin: ``(L,)`` number that the first row of each leaf had at the beginning.
        count_at_first: ``(L,)`` numbers of rows of the leaves at the beginning.
    """

    def __init__(self, values: Values, counts: IntArray, owners: IntArray) -> None:
        self.values: Values = values
        self.owners = owners
        self.leaf: IntArray = np.repeat(np.arange(len(counts)), counts)
        self.kept: IntArray = np.arange(len(values))
        self.begin: IntArray = np.cumsum(counts) - counts
        self.count_at_first = counts

    @property
    def row(self) -> IntArray:
        """``(M,)`` sample of each row of ``values``."""
        return self.owners[self.leaf]

    @property
    def counts(self) -> IntArray:
        """``(L,)`` numbers of rows of the leaves."""
        return np.bincount(self.leaf, minlength=len(self.owners))

    def split_kept_rows(self) -> list[IntArray]:
        """Return which of its rows each leaf still has, to choose their labels and masks."""
        rows, ends = self.kept - self.begin[self.leaf], np.cumsum(self.counts)
        return [rows[end - count : end] for count, end in zip(self.counts.tolist(), ends.tolist(), strict=True)]

    def drop(self, valid: Flags) -> None:
        """Keep the rows that are ``valid``, ``(M,)``."""
        self.values, self.leaf, self.kept = self.values[valid], self.leaf[valid], self.kept[valid]

    def select_rows(self: Self, rows: IntArray, count: int) -> Self:
        """Return the leaves of some samples. The sample at ``rows[i]`` gets the number ``i``.

        Args:
            rows: Samples, ascending.
            count: Number of samples in the batch.
        """
        number = _number_rows(rows, count)
        leaves = np.flatnonzero(number[self.owners] >= 0)
        chosen = _number_rows(leaves, len(self.owners))[self.leaf]
        part = self.copy()
        part.owners, part.begin = number[self.owners[leaves]], self.begin[leaves]
        part.count_at_first = self.count_at_first[leaves]
        part.values, part.leaf, part.kept = self.values[chosen >= 0], chosen[chosen >= 0], self.kept[chosen >= 0]
        return part

    def put_rows(self, rows: IntArray, part: Ragged, count: int) -> None:
        """Take back leaves that :meth:`select_rows` returned.

        Args:
            rows: Samples, ascending.
            part: The leaves of these samples.
            count: Number of samples in the batch.

        Raises:
            ValueError: Their dtype or their kind is another one now.
        """
        leaves = np.flatnonzero(_number_rows(rows, count)[self.owners] >= 0)
        self._check_kind(part)
        others = _number_rows(leaves, len(self.owners))[self.leaf] < 0
        leaf = np.concatenate((self.leaf[others], leaves[part.leaf]))
        order = np.argsort(leaf, kind="stable")
        self.leaf = leaf[order]
        self.values = np.concatenate((self.values[others], part.values))[order]
        self.kept = np.concatenate((self.kept[others], part.kept))[order]

    def apply_each(self, on: Flags | None, kernel: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        """Move rows by torchvision's kernel, in one call for each sample.

        Args:
            on: ``(N,)`` samples to move, or None for all.
            kernel: Function of the rows of a sample and of its number.
        """
        row, values = self.row, np.array(self.values)
        samples: list[int] = np.unique(row).tolist()
        for i in samples:
            if on is None or on[i]:
                chosen = np.flatnonzero(row == i)
                values[chosen] = kernel(torch.from_numpy(values[chosen]), i).as_subclass(torch.Tensor).numpy()
        self.values = values

    def replace_on(self, values: Values, on: Flags | None) -> None:
        """Take new values for the rows of some samples.

        Args:
            values: New values of all rows.
            on: ``(N,)`` samples that take them, or None for all.
        """
        if on is None or on.all():
            self.values = values
        else:
            chosen = on[self.row].reshape(-1, *[1] * (values.ndim - 1))
            self.values = np.where(chosen, values, self.values)

    def copy(self: Self) -> Self:
        """Return a copy whose moves do not change this object."""
        part = object.__new__(type(self))
        part.__dict__.update(self.__dict__)
        return part

    def without_values(self: Self) -> Self:
        """Return the same without values. It still has the numbers of rows."""
        part = self.copy()
        part.values, part.kept = self.values[:0].copy(), self.kept[:0].copy()
        return part

    def _check_kind(self, part: Ragged) -> None:
        if part.values.dtype != self.values.dtype:
            raise ValueError(
                f"all samples must have coordinates of one dtype, got {part.values.dtype} for some and "
                f"{self.values.dtype} for others; convert all of them"
            )


def _number_rows(rows: IntArray, count: int) -> IntArray:
    """Return ``(count,)`` numbers: ``i`` at ``rows[i]``, and -1 elsewhere."""
    number = np.full(count, -1)
    number[rows] = np.arange(len(rows))
    return number


def to_array(tensors: Sequence[torch.Tensor]) -> tuple[Values, IntArray]:
    """Return the rows of tensors, one behind another, and their counts. No tensor is changed later."""
    counts = np.array([len(tensor) for tensor in tensors], np.int64)
    arrays = [tensor.detach().as_subclass(torch.Tensor).numpy() for tensor in tensors]
    return np.concatenate(arrays), counts

"""Parameters of tests in which each pair of values comes, without their full product."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest


def cover_pairs(*axes: Iterable[Any]) -> list[Any]:
    """Choose combinations of values in which each two values of different axes meet at least once.

    Args:
        *axes: The values of each parameter. A value may be a ``pytest.param`` with an id and marks.
    """
    values = [[one if hasattr(one, "marks") else pytest.param(one, id=_name(one)) for one in axis] for axis in axes]
    left = {pair for indices in product(*map(_range, values)) for pair in _pairs(indices)}
    chosen: list[Any] = []
    while left:
        indices = max(product(*map(_range, values)), key=lambda indices: len(left & _pairs(indices)))
        left -= _pairs(indices)
        params = [axis[index] for axis, index in zip(values, indices, strict=True)]
        marks = [mark for param in params for mark in param.marks]
        chosen.append(
            pytest.param(*(param.values[0] for param in params), id="-".join(str(p.id) for p in params), marks=marks)
        )
    return chosen


def _range(axis: list[Any]) -> range:
    return range(len(axis))


def _pairs(indices: tuple[int, ...]) -> set[Any]:
    return set(combinations(enumerate(indices), 2))


def _name(value: Any) -> str:
    return getattr(value, "__name__", None) or str(value)

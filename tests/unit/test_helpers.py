"""What helps the tests."""

from __future__ import annotations

import itertools

import pytest
from helpers.cover import cover_pairs


def test_combinations_cover_each_pair_of_values() -> None:
    axes = "abc", (1, 2), ("x", "y", pytest.param("z", id="last", marks=pytest.mark.slow))
    combinations = cover_pairs(*axes)
    values = [param.values for param in combinations]
    assert len(values) == 9 < 3 * 2 * 3
    for (i, one), (j, other) in itertools.combinations(enumerate(("abc", (1, 2), "xyz")), 2):
        assert {(value[i], value[j]) for value in values} == set(itertools.product(one, other))
    assert [param.id.rpartition("-")[2] for param in combinations if param.marks] == ["last"] * 3

"""Options are checked when they are given, and do not change."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from torchdali.loader.options import LoaderOptions


def test_options_are_frozen() -> None:
    options: Any = LoaderOptions(seed=3)
    with pytest.raises(FrozenInstanceError):
        options.seed = 4
    assert options.seed == 3


def test_a_seed_of_numpy_becomes_an_int() -> None:
    assert type(LoaderOptions(seed=np.int64(3)).seed) is int  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"distributed": "all"}, ValueError, "distributed must be None or 'auto', got 'all'"),
        ({"transform": 3}, TypeError, "3"),
        ({"batch_transform": 3}, TypeError, "3"),
        ({"fidelity": "fastest"}, ValueError, "fastest"),
        ({"seed": 1.5}, TypeError, "1.5"),
    ],
)
def test_a_wrong_value_is_named(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        LoaderOptions(**options)

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


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cache": "tape"}, "cache must be None, 'host', 'device' or 'disk', got 'tape'"),
        ({"cache_dir": "x", "cache": "host"}, "cache_dir goes with cache='disk', got cache='host'"),
        ({"cache": "host", "cache_bytes": True}, "cache_bytes must be a number of bytes above 0, got True"),
        ({"cache_bytes": 3}, "cache_bytes goes with cache="),
        ({"decode_bytes": 0}, "decode_bytes must be a number of bytes above 0, got 0"),
        ({"on_error": "drop"}, "on_error must be 'raise', 'skip' or 'replace', got 'drop'"),
        ({"on_error": "skip", "max_errors": 2.5}, "max_errors must be None or an int of 0 or more, got 2.5"),
        ({"max_errors": 3}, "max_errors goes with on_error="),
    ],
)
def test_a_wrong_choice_is_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LoaderOptions(**options)

"""Arguments of transforms that are tensors or arrays of one number."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, cast

import numpy as np
import torch


def with_plain_numbers(transform: Any) -> Any:
    """Return a transform with Python's numbers where it has tensors, arrays or NumPy's scalars of one number.

    torchvision computes with all of these, and rules with NumPy.

    Args:
        transform: A transform with a rule. It is copied, not changed, and returned as it is if it has none of these.
    """
    own = cast("dict[str, Any]", getattr(transform, "__dict__", {}))
    plain = {name: _to_plain(value) for name, value in own.items() if not name.startswith("_")}
    changed = {name: value for name, value in plain.items() if value is not own[name]}
    if not changed:
        return transform
    copied = copy(transform)
    vars(copied).update(changed)
    return copied


def _to_plain(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray, torch.Tensor)):
        number = cast("Any", value)
        return number.item() if number.ndim == 0 else number
    if type(value) in (list, tuple):
        values = cast("Sequence[Any]", value)
        plain: Any = [_to_plain(one) for one in values]
        if any(one is not other for one, other in zip(plain, values, strict=True)):
            return tuple(plain) if isinstance(values, tuple) else plain
    return value

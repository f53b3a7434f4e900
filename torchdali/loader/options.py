"""The arguments that ``DALILoader`` adds to those of ``DataLoader``."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from torchdali.pipeline.tuning import check_numbers
from torchdali.samples.on_error import OnError
from torchdali.transforms import check_callable, flatten
from torchdali.transforms.spec import Fidelity, check_fidelity

__all__ = ["LoaderOptions"]


@dataclass(frozen=True, eq=False)
class LoaderOptions:
    """Checked options of a loader. Each but the last is an argument of :class:`torchdali.DALILoader`.

    Attributes:
        prefetch_depth: The ``prefetch_factor`` that the user gave. None if the loader may choose.

    Raises:
        TypeError: A transform cannot be called, or ``seed`` is no integer.
        ValueError: Another option has no valid value.
    """

    transform: Any = None
    batch_transform: Callable[..., Any] | None = None
    device: str | int | torch.device = "auto"
    seed: int | None = None
    fidelity: Fidelity = "exact"
    cache: Literal["host", "device"] | None = None
    cache_bytes: int | None = None
    on_error: OnError = "raise"
    max_errors: int | None = None
    distributed: Literal["auto"] | None = None
    prefetch_depth: int | None = None

    def __post_init__(self) -> None:
        check_callable(*flatten(self.transform), *([] if self.batch_transform is None else [self.batch_transform]))
        check_fidelity(self.fidelity)
        check_numbers(seed=self.seed)
        if self.seed is not None:  # a state may hold an int, but none of numpy's
            object.__setattr__(self, "seed", operator.index(self.seed))
        if self.distributed not in (None, "auto"):
            raise ValueError(f"distributed must be None or 'auto', got {self.distributed!r}")

"""The arguments that ``DALILoader`` adds to those of ``DataLoader``."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, cast

import torch

from torchdali.pipeline.tuning import check_numbers
from torchdali.samples.finder import ImageFinder, Images
from torchdali.samples.on_error import OnError
from torchdali.transforms import check_callable, flatten
from torchdali.transforms.spec import Fidelity, check_fidelity

__all__ = ["IMMUTABLE", "MUTABLE", "TRANSFORMS", "LoaderOptions", "check_assignment", "describe_collision"]

IMMUTABLE = ("seed", "on_error", "max_errors", "fidelity", "images")
TRANSFORMS = ("transform", "batch_transform")
MUTABLE = (*TRANSFORMS, "device", "cache", "cache_bytes", "cache_dir", "decode_bytes")
_READ_ONLY = ("distributed", "errors")


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
    cache: Literal["host", "device", "disk"] | None = None
    cache_bytes: int | None = None
    cache_dir: str | os.PathLike[str] | None = None
    on_error: OnError = "raise"
    max_errors: int | None = None
    distributed: Literal["auto"] | None = None
    images: Images | None = None
    decode_bytes: int | None = None
    prefetch_depth: int | None = None

    def __post_init__(self) -> None:
        check_callable(*flatten(self.transform), *([] if self.batch_transform is None else [self.batch_transform]))
        check_fidelity(self.fidelity)
        check_numbers(seed=self.seed)
        if self.seed is not None:  # a state may hold an int, but none of numpy's
            object.__setattr__(self, "seed", operator.index(self.seed))
        ImageFinder.parse(self.images)  # raises if it names nothing
        self._check_memory()
        self._check_on_error()
        if self.distributed not in (None, "auto"):
            raise ValueError(f"distributed must be None or 'auto', got {self.distributed!r}")

    @property
    def finder(self) -> ImageFinder:
        """Finds the images of a sample."""
        return ImageFinder.parse(self.images)

    def _check_memory(self) -> None:
        if self.cache not in (None, "host", "device", "disk"):
            raise ValueError(f"cache must be None, 'host', 'device' or 'disk', got {self.cache!r}")
        if self.cache_bytes is not None and self.cache is None:
            raise ValueError("cache_bytes goes with cache='host', cache='device' or cache='disk'")
        if self.cache_dir is not None and self.cache != "disk":
            raise ValueError(f"cache_dir goes with cache='disk', got cache={self.cache!r}")
        for name in ("cache_bytes", "decode_bytes"):
            if (value := getattr(self, name)) is not None and not _is_int(value, 1):
                raise ValueError(f"{name} must be a number of bytes above 0, got {value!r}")

    def _check_on_error(self) -> None:
        if self.on_error not in ("raise", "skip", "replace"):
            raise ValueError(f"on_error must be 'raise', 'skip' or 'replace', got {self.on_error!r}")
        if self.max_errors is not None and not _is_int(self.max_errors, 0):
            raise ValueError(f"max_errors must be None or an int of 0 or more, got {self.max_errors!r}")
        if self.max_errors is not None and self.on_error == "raise":
            raise ValueError("max_errors goes with on_error='skip' or on_error='replace'")


def _is_int(value: Any, least: int) -> bool:
    return isinstance(value, Integral) and value is not True and value is not False and int(value) >= least


def describe_collision(loader: Any, name: str) -> str:
    """Return the message for a subclass that has an attribute with the name of an argument."""
    return (
        f"{type(loader).__name__} keeps an attribute {name} of its own, which DALILoader takes for its argument "
        f"{name}=: give the attribute another name"
    )


def check_assignment(loader: Any, base: type, name: str) -> None:
    """Raise ValueError for an attribute that must not be assigned, or that a subclass uses for something else.

    Args:
        loader: The loader.
        base: ``DALILoader``.
        name: Name of the attribute.
    """
    if name in IMMUTABLE and name in vars(loader):
        raise ValueError(f"{name} attribute should not be set after {type(loader).__name__} is initialized")
    if name in _READ_ONLY and getattr(cast("Any", type(loader)), name) is getattr(base, name):
        raise ValueError(f"{name} of a DALILoader is for reading; a subclass keeps its own under another name")
    if name in TRANSFORMS and name in vars(loader) and not type(loader).__module__.startswith("torchdali."):
        raise ValueError(describe_collision(loader, name))

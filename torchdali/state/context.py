"""The parts of a loader that the iterators of its epochs see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from torchdali.samples.guard import unguard_collate
from torchdali.samples.on_error import ErrorPolicy
from torchdali.state.progress import EpochProgress
from torchdali.transforms.rng import Words

__all__ = ["EpochContext", "LoaderView"]


@dataclass(frozen=True, slots=True)
class LoaderView:
    """The attributes of a ``DataLoader`` that torch's iterators read, and no others.

    torch's iterators take a loader. Given a view in its place, they can be shown other values than the loader has:
    ``dataclasses.replace(view, collate_fn=...)``. The attributes are those that torch 2.8 to 2.14 read, in the
    iterators' constructors and in ``_reset``.
    """

    dataset: Any
    generator: torch.Generator | None
    collate_fn: Callable[[Any], Any]
    drop_last: bool
    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool
    worker_init_fn: Callable[[int], Any] | None
    multiprocessing_context: Any
    in_order: bool
    timeout: float
    pin_memory: bool
    pin_memory_device: str
    _dataset_kind: int
    _auto_collation: bool
    _index_sampler: Any
    _IterableDataset_len_called: int | None

    @classmethod
    def from_loader(cls, loader: Any) -> LoaderView:
        """Return the view of a ``DataLoader`` as it is now."""
        values = {field.name: getattr(loader, field.name) for field in fields(cls)}
        return cls(**values | {"collate_fn": unguard_collate(loader.collate_fn)})


@dataclass(frozen=True)
class EpochContext:
    """Everything that the iterator of one epoch is given of its loader.

    Attributes:
        view: The loader's arguments, for torch's iterators.
        progress: Where the epoch is.
        is_resumed: Whether the epoch begins from a state that was loaded.
        sampler: The loader's sampler.
        stateful: Samplers with ``state_dict`` and ``load_state_dict``, by their paths in the loader.
        next_key: Returns the random key of the epoch that begins; takes the base seed of ``DataLoader``'s workers.
        errors: What happens to samples that cannot be read.
        batch_transform: The loader's argument.
    """

    view: LoaderView
    progress: EpochProgress
    is_resumed: bool
    sampler: Any
    stateful: Mapping[str, Any]
    next_key: Callable[[int], Words]
    errors: ErrorPolicy
    batch_transform: Callable[..., Any] | None = None

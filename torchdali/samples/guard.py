"""Keep code that builds a plain ``DataLoader`` from a loader's attributes from losing its transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchdali.errors import TransformError

__all__ = ["GuardedCollate", "guard_collate", "unguard_collate"]


class GuardedCollate:
    """Takes the place of ``collate_fn`` in a loader with ``transform=``, and raises TransformError if it is called.

    Opacus' ``DPDataLoader.from_data_loader`` and Ray Train's ``prepare_data_loader`` make a plain ``DataLoader`` of a
    loader's dataset, ``collate_fn`` and so on. It would yield images that nothing has transformed.

    Args:
        collate_fn: The loader's own.
    """

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, _: Any) -> Any:
        """Raise TransformError: this loader's ``collate_fn`` was called by another loader."""
        raise TransformError(
            "a plain DataLoader was built from the attributes of a DALILoader, and would lose its transform= or "
            "batch_transform=: build a DALILoader instead, or call the transform in the dataset"
        )

    def __repr__(self) -> str:
        return f"<{self.collate_fn!r} of a DALILoader>"


def guard_collate(collate_fn: Any, has_transforms: bool) -> Any:
    """Return what a loader shows as ``collate_fn``: guarded if the loader has transforms of its own."""
    collate_fn = unguard_collate(collate_fn)
    return GuardedCollate(collate_fn) if has_transforms and collate_fn is not None else collate_fn


def unguard_collate(collate_fn: Any) -> Any:
    """Return the user's ``collate_fn``, or torch's."""
    return collate_fn.collate_fn if isinstance(collate_fn, GuardedCollate) else collate_fn

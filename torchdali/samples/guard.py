"""Keep code that builds a plain ``DataLoader`` from a loader's attributes from losing its transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchdali.errors import TransformError

__all__ = ["GuardedCollate", "guard_collate", "unguard_collate"]

_MESSAGE = (
    "a plain DataLoader was built from the attributes of a DALILoader, and would lose its transform= or "
    "batch_transform=: build a DALILoader instead, or call the transform in the dataset"
)


class GuardedCollate:
    """Takes the place of a loader's ``collate_fn``, and raises TransformError if another loader calls it.

    Opacus' ``DPDataLoader.from_data_loader`` and Ray Train's ``prepare_data_loader`` make a plain ``DataLoader`` of a
    loader's dataset, ``collate_fn`` and so on. It would yield images that nothing has transformed.

    Args:
        collate_fn: The loader's own.
        message: What to say.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], message: str) -> None:
        self.collate_fn, self._message = collate_fn, message

    def __call__(self, _: Any) -> Any:
        """Raise TransformError: this loader's ``collate_fn`` was called by another loader."""
        raise TransformError(self._message)

    def __repr__(self) -> str:
        return f"<{self.collate_fn!r} of a DALILoader>"


def guard_collate(collate_fn: Any, has_transforms: bool) -> Any:
    """Return what a loader shows as ``collate_fn``: guarded if the loader has transforms of its own."""
    collate_fn = unguard_collate(collate_fn)
    return GuardedCollate(collate_fn, _MESSAGE) if has_transforms and collate_fn is not None else collate_fn


def unguard_collate(collate_fn: Any) -> Any:
    """Return the user's ``collate_fn``, or torch's."""
    return collate_fn.collate_fn if isinstance(collate_fn, GuardedCollate) else collate_fn

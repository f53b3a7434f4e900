"""Keep code that builds a plain ``DataLoader`` from a loader's attributes from losing its transforms."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torchdali.errors import TransformError

__all__ = ["GuardedCollate", "call_collate", "guard_collate", "unguard_collate"]

_MESSAGE = (
    "a plain DataLoader was built from the attributes of a DALILoader, and would lose its transform= or "
    "batch_transform=: build a DALILoader instead, or call the transform in the dataset"
)


_is_own_call: ContextVar[bool] = ContextVar("_is_own_call", default=False)


class GuardedCollate:
    """Takes the place of a loader's ``collate_fn``, and raises TransformError if another loader calls it.

    A script may assign a function that calls it, and its attributes are those of ``collate_fn``.

    Opacus' ``DPDataLoader.from_data_loader`` and Ray Train's ``prepare_data_loader`` make a plain ``DataLoader`` of a
    loader's dataset, ``collate_fn`` and so on. It would yield images that nothing has transformed.

    Args:
        collate_fn: The loader's own.
        message: What to say.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], message: str) -> None:
        vars(self).update(collate_fn=collate_fn, _message=message)

    def __call__(self, data: Any) -> Any:
        """Collate, or raise TransformError if another loader calls."""
        if _is_own_call.get():
            return self.collate_fn(data)
        raise TransformError(self._message)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__name__":  # what copy and pickle ask for
            raise AttributeError(name)
        return getattr(vars(self).get("collate_fn"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.collate_fn, name, value)

    def __repr__(self) -> str:
        return f"<{self.collate_fn!r} of a DALILoader>"


def guard_collate(collate_fn: Any, has_transforms: bool) -> Any:
    """Return what a loader shows as ``collate_fn``: guarded if the loader has transforms of its own."""
    collate_fn = unguard_collate(collate_fn)
    return GuardedCollate(collate_fn, _MESSAGE) if has_transforms and collate_fn is not None else collate_fn


def unguard_collate(collate_fn: Any) -> Any:
    """Return the user's ``collate_fn``, or torch's."""
    return collate_fn.collate_fn if isinstance(collate_fn, GuardedCollate) else collate_fn


def call_collate(collate_fn: Callable[..., Any], *args: Any) -> Any:
    """Call a loader's function in its own epoch, where it may call what the loader has shown as ``collate_fn``."""
    token = _is_own_call.set(True)
    try:
        return collate_fn(*args)
    finally:
        _is_own_call.reset(token)

"""Build a loader again with other batches."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar, cast

from torchdali.loader.loader import DALILoader

_Loader = TypeVar("_Loader", bound=DALILoader[Any])

_OF_BATCHES = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "distributed")
_OTHER = [name for name in inspect.signature(cast("Any", DALILoader)).parameters if name not in _OF_BATCHES]


def rebuild(loader: DALILoader[Any], kind: type[_Loader], **changed: Any) -> _Loader:
    """Build a loader with the arguments of another one.

    Args:
        loader: The loader whose arguments are taken, but for its dataset and those that choose the batches.
        kind: The class of the new loader.
        **changed: The dataset, the arguments that choose the batches, and arguments to change.
    """
    return kind(**({name: getattr(loader, name) for name in _OTHER} | changed))

"""Ray Train with ``DALILoader``. Only the import of ``prepare_data_loader`` changes.

::

    from torchdali.ray import prepare_data_loader

Ray's own function makes a plain ``DataLoader`` from a loader's attributes. This one makes a ``DALILoader``, with the
same share of the samples for each worker.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any, cast

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from torchdali.loader import DALILoader
from torchdali.loader.rebuild import rebuild

try:
    _train: Any = importlib.import_module("ray.train")
    _theirs: Any = importlib.import_module("ray.train.torch")
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"torchdali.ray needs Ray Train, and {missing.name} is missing: pip install 'ray[train]'", name=missing.name
    ) from None

__all__ = ["prepare_data_loader"]


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
) -> DataLoader[Any]:
    """Prepare a loader as ``ray.train.torch.prepare_data_loader`` does, but keep a ``DALILoader``.

    Call it in the training function. Call ``loader.sampler.set_epoch(epoch)`` before each epoch, as with Ray's own.

    Args:
        data_loader: The loader to prepare. Ray's function gets any other than a ``DALILoader``.
        add_dist_sampler: Whether each of several workers gets its share by a ``DistributedSampler``. A loader that has
            one, or ``distributed="auto"``, keeps it. So does a loader of an ``IterableDataset``, which has no sampler.
        move_to_device: Whether a loader with ``device="auto"`` makes its batches on the worker's device.
        auto_transfer: Only for other loaders. A ``DALILoader`` always makes batches on its device ahead of time.

    Returns:
        A loader of this worker's share.

    Raises:
        ValueError: The loader has a batch sampler of its own, of which no share can be made.
    """
    if not isinstance(data_loader, DALILoader):
        return _theirs.prepare_data_loader(data_loader, add_dist_sampler, move_to_device, auto_transfer)
    loader = data_loader
    options: dict[str, Any] = {}
    if move_to_device and loader.device == "auto":
        options["device"] = _theirs.get_device()
    is_stream = isinstance(cast("object", loader.dataset), IterableDataset)
    needs_share = add_dist_sampler and not is_stream and _needs_share(loader)
    if not needs_share and not options:
        return loader
    batches: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    sampler = cast("Any", loader.sampler)
    if needs_share:
        batches["sampler"] = _make_sampler(loader)
    elif loader.distributed:
        batches["shuffle"] = getattr(sampler, "shuffle", isinstance(sampler, RandomSampler))
        batches["distributed"] = loader.distributed
    elif loader.batch_size is None and loader.batch_sampler is not None:
        batches = {"batch_sampler": loader.batch_sampler}
    elif not is_stream:
        batches["sampler"] = sampler
    return rebuild(loader, DALILoader[Any], dataset=loader.dataset, **batches, **options)


def _needs_share(loader: DALILoader[Any]) -> bool:
    """Return whether there are several workers, and the loader yields the samples of all."""
    return _train.get_context().get_world_size() > 1 and not isinstance(
        cast("object", loader.sampler), DistributedSampler
    )


def _make_sampler(loader: DALILoader[Any]) -> DistributedSampler[Any]:
    """Return Ray's sampler: it shuffles unless the loader's own takes the samples in order."""
    if loader.batch_size is None and loader.batch_sampler is not None:
        kind = type(cast("object", loader.batch_sampler)).__name__
        raise ValueError(
            f"prepare_data_loader must be given a loader with batch_size, got one with the batch sampler {kind}, of "
            "which no share can be made: let it yield this worker's batches, and give add_dist_sampler=False"
        )
    sampler = cast("object", loader.sampler)
    if not isinstance(sampler, (SequentialSampler, RandomSampler)) and _train.get_context().get_world_rank() == 0:
        warnings.warn(
            f"a DistributedSampler takes the place of {type(sampler).__name__}, as in Ray's prepare_data_loader: to "
            "keep it, let it yield this worker's samples, and give add_dist_sampler=False",
            stacklevel=3,
        )
    return DistributedSampler(cast("Any", loader.dataset), shuffle=not isinstance(sampler, SequentialSampler))

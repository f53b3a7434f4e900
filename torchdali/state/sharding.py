"""Sharding by rank: the sampler of ``distributed="auto"``, and a warning if all ranks would load the same samples."""

from __future__ import annotations

import os
from typing import Any, Literal

from torch import distributed
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset

from torchdali.runtime.warning import warn_user

__all__ = ["Shard", "Sharding", "find_epoch_aware_samplers", "find_sampler_rank", "get_rank_and_world_size"]


def get_rank_and_world_size() -> tuple[int, int] | None:
    """Return this process's rank in the default process group, and the group's size. None without a group."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return None


def find_epoch_aware_samplers(loader: Any) -> list[Any]:
    """Return the loader's samplers that have a ``set_epoch``, each once."""
    return list({id(sampler): sampler for sampler in _list_samplers(loader) if hasattr(sampler, "set_epoch")}.values())


def _list_samplers(loader: Any) -> list[Any]:
    return [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]


def find_sampler_rank(loader: Any) -> int:
    """Return the rank of a sampler other than ``DistributedSampler``; 0 if there is none.

    Such a sampler may repeat augmentations: it gives copies of a sample to several ranks, which must look different.
    """
    ranks = [sampler.rank for sampler in _list_samplers(loader) if type(getattr(sampler, "rank", None)) is int]
    is_disjoint = any(isinstance(sampler, DistributedSampler) for sampler in _list_samplers(loader))
    return ranks[0] if ranks and not is_disjoint else 0


class Shard(DistributedSampler[Any]):
    """``DistributedSampler`` that counts epochs by itself, from the number that was set, or from 0."""

    _has_begun = False

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch."""
        super().set_epoch(epoch)
        self._has_begun = False

    @property
    def next_epoch(self) -> int:
        """The number of the epoch that begins next."""
        return self.epoch + self._has_begun

    def begin_epoch(self) -> None:
        """Count the epoch that begins."""
        self.epoch, self._has_begun = self.next_epoch, True


class Sharding:
    """Gives a loader the samples of its rank.

    Args:
        mode: The loader's argument ``distributed``.
        loader: The loader.
        shuffle: The loader's argument.
        order_argument: The name of the argument that gives the order of samples: "sampler", "batch_sampler" or None.

    Raises:
        ValueError: The mode does not go with the dataset or the other arguments.
    """

    def __init__(
        self, mode: Literal["auto"] | None, loader: Any, shuffle: bool | None, order_argument: str | None
    ) -> None:
        self._mode: Literal["auto"] | None = mode
        self._shuffle = bool(shuffle)
        self._is_iterable = isinstance(loader.dataset, IterableDataset)
        self._order_argument = order_argument
        self._has_warned = False
        if mode and order_argument:
            raise ValueError(f"distributed must be None with {order_argument}=, got 'auto'; leave one of them out")
        if mode and self._is_iterable:
            raise ValueError(
                "distributed must be None for an IterableDataset, which has no indices to share, got 'auto'; let the "
                "dataset skip the samples of other ranks (torch.distributed.get_rank(), get_world_size())"
            )
        self.set_sampler(loader)

    def set_sampler(self, loader: Any) -> None:
        """Give the loader a sampler for its rank, once there is a process group. Does nothing if it has one."""
        if not self._mode or (group := get_rank_and_world_size()) is None:
            return
        rank, world = group
        old: Any = loader.sampler
        if isinstance(old, Shard) and (old.rank, old.num_replicas) == (rank, world):
            return
        shard = Shard(loader.dataset, world, rank, self._shuffle, loader.seed or 0, loader.drop_last)
        if isinstance(old, Shard):
            shard.set_epoch(old.next_epoch)
        # DataLoader's __setattr__ raises for a new sampler, so write past it.
        vars(loader)["sampler"] = shard
        if loader.batch_sampler is not None:
            vars(loader)["batch_sampler"] = BatchSampler(shard, loader.batch_size, loader.drop_last)
        loader._iterator = None  # noqa: SLF001 - torch's: its persistent workers get indices from the old sampler

    def set_epoch(self, loader: Any, epoch: int) -> None:
        """Set the number of the next epoch in all samplers that have a ``set_epoch``."""
        self.set_sampler(loader)
        for sampler in find_epoch_aware_samplers(loader):
            sampler.set_epoch(epoch)

    def begin_epoch(self, loader: Any) -> None:
        """Set the sampler and count the epoch. Warn once if all ranks load the same samples."""
        self.set_sampler(loader)
        if isinstance(loader.sampler, Shard):
            loader.sampler.begin_epoch()
        elif not self._has_warned and (message := self._find_warning()):
            self._has_warned = True
            warn_user(message)

    def _find_warning(self) -> str | None:
        """Return the warning for a loader that gives all samples to each of several processes; else None."""
        if self._order_argument or self._is_iterable:
            return None
        if group := get_rank_and_world_size():
            if group[1] == 1:
                return None
            return (
                f"Each of the {group[1]} processes gets all samples of this loader, because it has no sampler that "
                "gives it a share: give distributed='auto', or sampler=DistributedSampler(dataset). If that is meant, "
                "or each process has a dataset of its own, say so with sampler=SequentialSampler(dataset) or "
                "RandomSampler(dataset)."
            )
        processes = os.environ.get("WORLD_SIZE", "")
        if self._mode and processes.isdecimal() and int(processes) > 1:
            return (
                f"distributed='auto' without a process group, though WORLD_SIZE is {processes}: every process gets all "
                "samples. Call torch.distributed.init_process_group before iterating."
            )
        return None

    def describe(self, loader: Any) -> dict[str, str]:
        """Return the row "ranks" of ``explain()``, if there is something to say."""
        self.set_sampler(loader)
        group = get_rank_and_world_size()
        if group is None:
            return {"ranks": "no process group is initialised: all samples"} if self._mode else {}
        rank = f"{group[0]} of 0 to {group[1] - 1}"
        if self._is_iterable:
            return {"ranks": f"{rank}; what each gets is the dataset's own matter"}
        shard = loader.sampler
        if not isinstance(shard, Shard):
            if self._order_argument:
                return {"ranks": f"{rank}; what each gets is the {self._order_argument}'s own matter"}
            return {"ranks": f"{rank}; all samples to each"}
        count = len(loader.dataset)
        extra = shard.total_size - count
        rest = f", {abs(extra)} {'repeated' if extra > 0 else 'left out'} so that shares are even" if extra else ""
        order = f"shuffled by seed {shard.seed} + epoch" if self._shuffle else "in order"
        return {"ranks": f"{rank}; {shard.num_samples} of {count} samples to each{rest}, {order}"}

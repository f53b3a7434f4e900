"""Each rank's share of a dataset: made by the loader where it is asked to, and missed aloud where nobody made one."""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from torch import distributed
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset

__all__ = ["Distributed", "Shard", "Sharding", "epoch_aware_samplers", "group"]


def group() -> tuple[int, int] | None:
    """This process's rank and how many there are in the default process group; None where none is initialised."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return None


def epoch_aware_samplers(loader: Any) -> list[Any]:
    """The loader's samplers that want to know the number of an epoch, each once."""
    samplers: list[Any] = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    return list({id(one): one for one in samplers if hasattr(one, "set_epoch")}.values())


class Shard(DistributedSampler[Any]):
    """``DistributedSampler`` that counts epochs from the one that was set, or from 0."""

    _begun = False

    def set_epoch(self, epoch: int) -> None:
        """Says which number the next epoch has."""
        super().set_epoch(epoch)
        self._begun = False

    @property
    def next_epoch(self) -> int:
        """The number of the epoch that begins next."""
        return self.epoch + self._begun

    def begin(self) -> None:
        """An epoch begins."""
        self.epoch, self._begun = self.next_epoch, True


class Sharding:
    """What a loader does about the processes beside its own.

    Args:
        wanted: The loader's argument ``distributed``.
        loader: A ``DataLoader``.
        given: The arguments of ``DataLoader`` that it was made with, by name.

    Raises:
        ValueError: ``wanted`` is none that exists, or does not go with the other arguments.
    """

    def __init__(self, wanted: Literal["auto"] | None, loader: Any, given: Mapping[str, Any]) -> None:
        if wanted not in (None, "auto"):
            raise ValueError(f"distributed is None or 'auto', not {wanted!r}")
        # What Lightning kept to make the loader anew, which it does with a sampler of its own.
        vars(loader).get("__pl_saved_kwargs", {}).pop("distributed", None)
        self.wanted: Literal["auto"] | None = wanted
        self._shuffle = bool(given.get("shuffle"))
        self._by_dataset = isinstance(loader.dataset, IterableDataset)
        named = [name for name in ("sampler", "batch_sampler") if given.get(name) is not None]
        self._given = named[0] if named else None
        self._warned = False
        if wanted and named:
            raise ValueError(
                f"distributed='auto' makes a DistributedSampler, which leaves no room for {named[0]}=: leave one out"
            )
        if wanted and self._by_dataset:
            raise ValueError(
                "distributed='auto' gives each rank a share of the indices, and an IterableDataset has none: let it "
                "skip what is for other ranks (torch.distributed.get_rank(), get_world_size())"
            )
        self.apply(loader)

    def apply(self, loader: Any) -> None:
        """Gives the loader a sampler of this rank's share, once there is a process group."""
        if not self.wanted or (found := group()) is None:
            return
        rank, world = found
        old: Any = loader.sampler
        if isinstance(old, Shard) and (old.rank, old.num_replicas) == (rank, world):
            return
        shard = Shard(loader.dataset, world, rank, self._shuffle, loader.seed or 0, loader.drop_last)
        if isinstance(old, Shard):
            shard.set_epoch(old.next_epoch)
        # DataLoader refuses a change of its samplers.
        vars(loader)["sampler"] = shard
        if loader.batch_sampler is not None:
            vars(loader)["batch_sampler"] = BatchSampler(shard, loader.batch_size, loader.drop_last)
        loader._iterator = None  # noqa: SLF001 - persistent workers, which the old sampler feeds

    def set_epoch(self, loader: Any, epoch: int) -> None:
        """Says which number the next epoch has, to samplers that want to know."""
        self.apply(loader)
        for sampler in epoch_aware_samplers(loader):
            sampler.set_epoch(epoch)

    def begin(self, loader: Any) -> None:
        """An epoch begins: settles what the sampler is, and warns once where every rank gets the same samples."""
        self.apply(loader)
        if isinstance(loader.sampler, Shard):
            loader.sampler.begin()
        elif not self._warned and (text := self._same_for_all()):
            self._warned = True
            warnings.warn(text, stacklevel=5)  # beyond the two decorators of the loader's __iter__

    def _same_for_all(self) -> str | None:
        """What is to be said where each of several processes would get all samples."""
        if self._given or self._by_dataset:
            return None
        if found := group():
            if found[1] == 1:
                return None
            return (
                f"Each of the {found[1]} processes gets all samples of this loader, because it has no sampler that "
                "gives it a share: give distributed='auto', or sampler=DistributedSampler(dataset). If that is meant, "
                "or each process has a dataset of its own, say so with sampler=SequentialSampler(dataset) or "
                "RandomSampler(dataset)."
            )
        processes = os.environ.get("WORLD_SIZE", "")
        if self.wanted and processes.isdecimal() and int(processes) > 1:
            return (
                f"distributed='auto' without a process group, though WORLD_SIZE is {processes}: every process gets all "
                "samples. Call torch.distributed.init_process_group before iterating."
            )
        return None

    def rows(self, loader: Any) -> dict[str, str]:
        """What ``explain()`` says of it."""
        self.apply(loader)
        found = group()
        if found is None:
            return {"ranks": "no process group is initialised: all samples"} if self.wanted else {}
        where = f"{found[0]} of 0 to {found[1] - 1}"
        if self._by_dataset:
            return {"ranks": f"{where}; what each gets is the dataset's own matter"}
        shard = loader.sampler
        if not isinstance(shard, Shard):
            if self._given:
                return {"ranks": f"{where}; what each gets is the {self._given}'s own matter"}
            return {"ranks": f"{where}; all samples to each"}
        count = len(loader.dataset)
        over = shard.total_size - count
        rest = f", {abs(over)} {'repeated' if over > 0 else 'left out'} so that shares are even" if over else ""
        order = f"shuffled by seed {shard.seed} + epoch" if self._shuffle else "in order"
        return {"ranks": f"{where}; {shard.num_samples} of {count} samples to each{rest}, {order}"}


class Distributed:
    """What a loader has for several processes."""

    _sharding: Sharding
    _keys: Any

    @property
    def distributed(self) -> Literal["auto"] | None:
        """As given. No attribute: a loader that is made of this one's attributes and another sampler is not asked."""
        return self._sharding.wanted

    def set_epoch(self, epoch: int) -> None:
        """Says which number the next epoch has: to the sampler where that wants to know, and for the key of ``seed``.

        Those after it are counted on, but by a sampler with a ``set_epoch`` that was given.
        """
        epoch = operator.index(epoch)
        self._keys.epochs = epoch
        self._sharding.set_epoch(self, epoch)

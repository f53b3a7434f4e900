"""``DALILoader``: torch's DataLoader, with DALI in the place of its worker processes."""

from __future__ import annotations

import copy
import operator
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision.datasets import ImageFolder

from torchdali.errors import SampleError
from torchdali.loader.epoch import NativeIterator
from torchdali.loader.reporting import Reporting
from torchdali.loader.session import Building
from torchdali.loader.stats import Probe
from torchdali.pipeline import graph
from torchdali.pipeline.clock import Clock
from torchdali.pipeline.tuning import DefaultInt, check_numbers
from torchdali.runtime import lifecycle
from torchdali.runtime.lifecycle import disable_compile
from torchdali.samples.on_error import ErrorPolicy, OnError
from torchdali.state.checkpoint import find_stateful
from torchdali.state.context import EpochContext, LoaderView
from torchdali.state.epoch_keys import EpochKeys
from torchdali.state.iterator import ResumableIterator
from torchdali.state.sharding import Distributed, Sharding, epoch_aware_samplers
from torchdali.state.tracker import ProgressTracker, Stateful
from torchdali.transforms import check_callable, flatten
from torchdali.transforms.spec import Fidelity, check_fidelity
from torchdali.workers.plain import ParallelPlainIterator, SerialPlainIterator
from torchdali.workers.proxy import ParallelProxyIterator, SerialProxyIterator

__all__ = ["DALILoader"]

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    _T = TypeVar("_T", covariant=True, default=tuple[Any, Any])  # the samples of a folder
else:
    from typing import TypeVar

    _T = TypeVar("_T", covariant=True)
_Self = TypeVar("_Self", bound="DALILoader[Any]")

_SETTLED = ("seed", "on_error", "max_errors", "fidelity")
_TRANSFORMS = ("transform", "batch_transform")
_READ_ONLY = ("distributed", "errors")
_OPTIONS = {*_SETTLED, *_TRANSFORMS, "device", "cache", "cache_bytes"}


class DALILoader(Stateful, Distributed, Reporting, Building, DataLoader[_T]):
    """A ``torch.utils.data.DataLoader`` whose images are decoded and transformed by NVIDIA DALI.

    It takes the arguments of ``DataLoader`` and yields the batches that ``DataLoader`` would: in the same order, of
    the same structure, with tensors on ``device``.

    Image folders and torchvision's datasets in memory are *read*: their files or arrays, targets and transforms are
    taken, and no sample is asked for. ``num_workers`` above 0 is then the number of DALI's threads, 0 lets it be
    chosen; ``prefetch_factor`` is the number of batches in flight; ``timeout`` bounds the wait for a batch, in
    seconds; ``collate_fn`` gets the list of samples, each image on the device. As there are no workers,
    ``worker_init_fn``, ``multiprocessing_context`` and ``in_order`` have no effect, and ``persistent_workers`` only
    keeps the base seed. With CUDA batches come out on the device and ``pin_memory`` has no effect either.

    Every other dataset is *asked* for samples, exactly as ``DataLoader`` does it, and ``transform`` runs in DALI on the
    images of the samples. Without ``transform`` nothing does, and batches are ``DataLoader``'s, on ``device``.

    Args:
        dataset: Any dataset; or the path of a folder of class folders. The parameters that are not listed here are
            those of ``DataLoader``.
        transform: Transforms that follow the dataset's own, and run in DALI. Of a sample that the dataset was asked
            for, they are given every PIL image and ``tv_tensors.Image``, else the first array (H, W, C), tensor
            (C, H, W), encoded file or ``pathlib`` path.
        batch_transform: Called with the parts of each collated batch, ``batch_transform(images, labels)``, on the
            device; what it returns is the batch. For ``v2.MixUp`` and ``v2.CutMix``. The random numbers that it draws
            from torch's global generators follow from the batch's first sample.
        device: Where batches are made: "auto" is torch's current CUDA device where torch and DALI see one, and that of
            LOCAL_RANK where the current one is still the first; else the CPU.
        seed: Key of the random parameters, together with the epoch's number (the sampler's, where it has
            ``set_epoch``; else counted from 0). With None they follow ``torch.manual_seed`` or ``generator``, as in
            ``DataLoader``.
        fidelity: "exact" stays within the documented bounds of torchvision's tensor kernels; "fast" resizes both
            ways in one pass, which rounds once less and takes less time on the CPU, and lets the GPU do what
            ``v2.JPEG`` does, with another coder than torchvision's.
        cache: What is kept of an image folder's files from the first epoch on: "host" keeps the files in host memory,
            for storage that is slow; "device" keeps decoded images in the memory of ``device``, after the ``Resize``
            and ``CenterCrop`` that the transforms begin with. Batches are the same with it and without. A file that has
            another length or time of modification than before is read anew.
        cache_bytes: The most that the cache may take, beside the memory of the batches; what does not fit is read and
            decoded in every epoch. With None it is half of what is free when the first epoch begins.
        on_error: What is done about a sample that cannot be read or decoded. "raise" raises ``SampleError`` in its
            turn. With "skip" the next sample of its batch takes its place, with its target and other random numbers;
            with "replace" a black image does, and the target stays. Batches keep their sizes, and epochs their number
            of batches. Each such sample is logged, by the logger "torchdali", and kept in :attr:`errors`.
        max_errors: How many samples may be at fault before ``SampleError`` is raised all the same; None is any number.
        distributed: "auto" gives each process of an initialised ``torch.distributed`` group its share, as
            ``DistributedSampler(dataset, shuffle=shuffle, seed=seed or 0, drop_last=drop_last)`` does, and counts its
            epochs; ``loader.sampler`` is that sampler. With None, and no sampler, each process gets all samples, and
            a warning.

    Raises:
        DALIUnavailableError: DALI is missing or cannot use the device; the text says what to install.
        ValueError: An argument is none that exists; there is a cache, and the dataset no image folder; or
            ``distributed="auto"`` with a sampler, or an ``IterableDataset``.
        TypeError: A transform cannot be called, or an argument is of no type that it may have.
    """

    def __init__(
        self,
        dataset: Dataset[_T] | str | os.PathLike[str],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        transform: Any = None,
        batch_transform: Callable[..., Any] | None = None,
        device: str | int | torch.device = "auto",
        seed: int | None = None,
        fidelity: Fidelity = "exact",
        cache: Literal["host", "device"] | None = None,
        cache_bytes: int | None = None,
        on_error: OnError = "raise",
        max_errors: int | None = None,
        distributed: Literal["auto"] | None = None,
    ) -> None:
        if isinstance(dataset, (str, os.PathLike)):
            dataset = cast("Dataset[_T]", ImageFolder(Path(dataset)))
        if taken := sorted(_OPTIONS.intersection(vars(self))):
            raise ValueError(_kept(self, taken[0]))
        check_callable(*flatten(transform), *([] if batch_transform is None else [batch_transform]))
        check_fidelity(fidelity)
        check_numbers(seed=seed)
        # Each argument is an attribute of its name, by which Lightning makes a loader anew.
        self.on_error: OnError = on_error
        self.max_errors = max_errors
        self._tolerance = ErrorPolicy(on_error, max_errors)
        self.cache = cache
        self.cache_bytes = cache_bytes
        self.transform = transform
        self.batch_transform = batch_transform
        self.device = device
        self.seed: int | None = None if seed is None else operator.index(seed)  # numpy's are none that a state may have
        self.fidelity = fidelity
        self._keys = EpochKeys(self.seed)
        self._bookmark = ProgressTracker()
        self._live: weakref.WeakSet[ResumableIterator] = weakref.WeakSet()
        self._base_seed: int | None = None
        self._clock: Clock | None = None
        self._probed: tuple[object, Probe | None] | None = None
        self._source, self._source_state, self._not_lifted = self._lift(dataset)
        self._check_cache()
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        # With workers DataLoader turns None into 2, which here would be a choice of the user's.
        self._window: int | None = None if isinstance(prefetch_factor, DefaultInt) else prefetch_factor
        self._mark_window()
        given = {"shuffle": shuffle, "sampler": sampler, "batch_sampler": batch_sampler}
        self._sharding = Sharding(distributed, self, given)
        graph.require_device(device)

    @property
    def errors(self) -> list[SampleError]:
        """The samples that could not be read or decoded and were put up with so far, each once, as they were found."""
        return self._tolerance.errors

    def __setattr__(self, attr: str, val: Any) -> None:
        """Refuses, as ``DataLoader`` does, what is looked at only when a loader is made."""
        if attr in _SETTLED and attr in vars(self):
            raise ValueError(f"{attr} attribute should not be set after {type(self).__name__} is initialized")
        if attr in _READ_ONLY and getattr(type(self), attr) is getattr(DALILoader, attr):
            raise ValueError(f"{attr} of a DALILoader is for reading; a subclass keeps its own under another name")
        if attr in _TRANSFORMS and attr in vars(self) and not type(self).__module__.startswith("torchdali."):
            raise ValueError(_kept(self, attr))
        if attr == "prefetch_factor" and "_window" in vars(self) and not isinstance(val, DefaultInt):
            self._window = val
        super().__setattr__(attr, val)

    def _mark_window(self) -> None:
        if self._window is None and self.prefetch_factor is not None:
            self.prefetch_factor = DefaultInt(self.prefetch_factor)

    def check_worker_number_rationality(self) -> None:
        """Warns of more workers than cores, as in ``DataLoader``, where there are workers."""
        if self._source is None:
            super().check_worker_number_rationality()

    @disable_compile
    @lifecycle.native_call()
    def __iter__(self) -> Any:
        """A fresh epoch, whatever became of the ones before."""
        for epoch in list(self._live):
            epoch.rewind()
        self._lift_again()
        self._sharding.begin(self)
        proxy = self._proxy_now() if self._source is None else None
        other = self._bookmark.loaded or getattr(self._iterator, "proxy", None) is not proxy
        if other or getattr(self._iterator, "lost", ""):
            self._iterator = None  # persistent workers of another epoch, transform or device, or that lost a batch
        self._keys.epochs = self._bookmark.begin(self, self._keys.epochs)
        try:
            iterator = self._begin_epoch()
            if isinstance(iterator, ResumableIterator):  # a subclass may give one of its own
                iterator.resume()
        except BaseException:
            self._keys.epochs = self._bookmark.failed(self, self._keys.epochs)
            raise
        if self._bookmark.begun():
            generators = self._bookmark.here(self).generators
            now = generators.states()
            deque(iterator, maxlen=0)  # what a stream does at its end counts for the next epoch
            generators.set(now)  # samples that drop_last left out may draw again
            return iter(self)
        self._clock = getattr(iterator, "clock", None)  # torch's own iterators have none
        return iterator

    def _begin_epoch(self) -> Any:
        """Return the epoch's iterator: that of the persistent workers, or a new one."""
        if self._source is not None:
            return self._get_iterator()
        if isinstance(self._iterator, ResumableIterator) and self.persistent_workers and self.num_workers:
            self._iterator.restart(self._context())
            return self._iterator
        return super().__iter__()

    def _begin(self) -> NativeIterator:
        """An epoch of a dataset that is read."""
        compiled = self._compile()
        again = None if self._bookmark.loaded or not self.persistent_workers else self._base_seed
        epoch = NativeIterator(self._context(), compiled, again)
        self._base_seed = epoch.base_seed
        self._live.add(epoch)
        return epoch.start()

    def _context(self) -> EpochContext:
        """Return what the iterator of the epoch that begins is given of this loader."""
        return EpochContext(
            LoaderView.from_loader(self),
            self._bookmark.here(self),
            self._bookmark.loaded,
            self.sampler,
            find_stateful(self),
            # Not a method of this loader: an iterator that held its loader would end in a cycle, with its workers.
            partial(
                self._keys.next, samplers=epoch_aware_samplers(self), persistent_workers=bool(self.persistent_workers)
            ),
            self._tolerance,
            self.batch_transform,
        )

    def __len__(self) -> int:
        self._sharding.apply(self)
        return super().__len__()

    def _get_iterator(self) -> Any:
        iterator = self._begin() if self._source is not None else self._ask()
        iterator.resume()
        return iterator

    def _ask(self) -> ResumableIterator:
        """An epoch of a dataset that is asked for samples."""
        if self.num_workers:
            self.check_worker_number_rationality()
        proxy, context = self._proxy_now(), self._context()
        if proxy is None:
            epoch: ResumableIterator = (ParallelPlainIterator if self.num_workers else SerialPlainIterator)(context)
        else:
            epoch = (ParallelProxyIterator if self.num_workers else SerialProxyIterator)(context, proxy)
        self._live.add(epoch)
        return epoch

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Asked by Hugging Face Accelerate before it makes a plain ``DataLoader`` of the attributes."""
        if "accelerate" not in sys.modules:
            return False
        raise TypeError(
            "accelerate's prepare() would make a plain DataLoader of this DALILoader, and nothing would run in DALI: "
            "use the Accelerator of torchdali.accelerate, or its prepare_data_loader()"
        )

    def close(self) -> None:
        """Frees what the loader has: threads, worker processes, and memory on the host and on the GPU.

        Iterators under way raise ``RuntimeError`` when they are asked again. Batches that were handed out stay valid
        and keep their memory. The loader may be used again, and then builds its pipelines anew. Leaving a ``with``
        block closes, too.
        """
        epochs = list(self._live)
        self._iterator = None  # before its workers end: should that be interrupted, no epoch begins with them
        for epoch in epochs:
            epoch.close()
        device = self._compiled.device if self._compiled else self._proxy.device if self._proxy else None
        if self._compiled:
            self._compiled.pool.close()
        if self._proxy and self._proxy.routes:
            self._proxy.routes.close()
        if self._source:
            self._source.close()
        self._free_cache()
        self._compiled = self._proxy = None
        graph.release_memory(device)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, pickled or not, is a loader of its own that has built nothing yet."""
        built = ("_iterator", "_compiled", "_proxy", "_cache", "_live", "_clock", "_probed")
        own = {"_bookmark": self._bookmark.copy(), "_keys": copy.copy(self._keys)}
        state: dict[str, Any] = {**self.__dict__, **dict.fromkeys(built), **own}
        # Lightning keeps what attributes were set to while it looks on, and looks on for ever after an exception.
        if kept := state.get("__pl_attrs_record"):
            state["__pl_attrs_record"] = [one for one in kept if one[0][0] not in built]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._live = weakref.WeakSet()
        self._mark_window()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _kept(loader: Any, name: str) -> str:
    return (
        f"{type(loader).__name__} keeps an attribute {name} of its own, which DALILoader takes for its argument "
        f"{name}=: give the attribute another name"
    )

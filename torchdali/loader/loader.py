"""``DALILoader``: torch's DataLoader on NVIDIA DALI."""

from __future__ import annotations

import copy
import operator
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision.datasets import ImageFolder

from torchdali.errors import SampleError
from torchdali.loader.explain import collect_stats, describe_loader
from torchdali.loader.native_plan import NativePlan
from torchdali.loader.options import IMMUTABLE, MUTABLE, TRANSFORMS, LoaderOptions, check_assignment, describe_collision
from torchdali.loader.pictures import draw_batch
from torchdali.loader.probe import probe_session
from torchdali.loader.session import Session, make_context
from torchdali.loader.stats import Stats
from torchdali.loader.twin import read_next_batch
from torchdali.pipeline import graph
from torchdali.pipeline.clock import Clock
from torchdali.pipeline.tuning import DefaultInt
from torchdali.runtime import lifecycle
from torchdali.runtime.lifecycle import disable_compile
from torchdali.samples.finder import Images
from torchdali.samples.guard import guard_collate
from torchdali.samples.on_error import ErrorPolicy, OnError
from torchdali.state.iterator import ResumableIterator
from torchdali.state.sharding import Sharding
from torchdali.state.tracker import ProgressTracker
from torchdali.transforms.spec import Fidelity

__all__ = ["DALILoader"]

if TYPE_CHECKING:
    from typing_extensions import Self, TypeVar

    _T = TypeVar("_T", covariant=True, default=tuple[Any, Any])  # the default is for the path of a folder
else:
    from typing import TypeVar

    _T = TypeVar("_T", covariant=True)


class DALILoader(DataLoader[_T]):
    """A ``torch.utils.data.DataLoader`` whose images are decoded and transformed by NVIDIA DALI.

    It yields the batches that ``DataLoader`` would yield: same order, same structure, with tensors on ``device``.

    Image folders and torchvision's in-memory datasets are *native*: DALI reads their files or arrays, and no
    ``__getitem__`` is called. There are no worker processes. ``num_workers`` above 0 is then the number of DALI's
    threads, and 0 lets the loader choose it. ``prefetch_factor`` is the number of batches in flight. ``timeout`` bounds
    the wait for a batch, in seconds. ``collate_fn`` gets the list of samples, with images on the device.
    ``worker_init_fn``, ``multiprocessing_context`` and ``in_order`` have no effect, and ``persistent_workers`` only
    keeps the base seed. On CUDA ``pin_memory`` has no effect, because batches are on the device.

    Every other dataset is *worker-fed*: worker processes call its ``__getitem__``, as in ``DataLoader``, and DALI runs
    ``transform`` on the images of the samples. Without ``transform`` the batches are ``DataLoader``'s, on ``device``.

    Args:
        dataset: Any dataset, or the path of a folder of class folders. The parameters that are not listed here are
            those of ``DataLoader``.
        transform: Transforms that DALI runs after the dataset's own: on all images of a sample, see ``images``.
        batch_transform: Called with the parts of each collated batch, ``batch_transform(images, labels)``, on the
            device; its result is the batch. For ``v2.MixUp`` and ``v2.CutMix``. While it runs, torch's global
            generators are seeded by the batch's first sample.
        device: Where batches are made. "auto" is torch's current CUDA device if torch and DALI can use one, and else
            the CPU. If the current device is still the first one, "auto" is the device of LOCAL_RANK.
        seed: Key of the random parameters, together with the epoch's number. That is the sampler's number if it has
            ``set_epoch``, and else a count from 0. With None the random parameters follow ``torch.manual_seed`` or
            ``generator``, as in ``DataLoader``.
        fidelity: "exact" stays within the documented bounds of torchvision's tensor kernels. "fast" is for GPUs. It
            resizes both ways in one pass, which rounds once less, and runs ``v2.JPEG`` on the GPU.
        cache: What the loader keeps after the first epoch. "host" keeps files or objects in host memory, for slow
            storage. "device" keeps decoded images in the memory of ``device``, after the first ``Resize`` and
            ``CenterCrop``. "disk" keeps objects in files, also for later runs. Changed files are read again.
        cache_bytes: The most memory or disk space of the cache; None is half of what is free in the first epoch.
        cache_dir: The folder of ``cache="disk"``. None is one in ``~/.cache/torchdali``.
        on_error: What happens to a sample that cannot be read or decoded. "raise" raises ``SampleError`` when its
            batch is due. "skip" puts the next sample of the batch in its place, with that one's target and other
            random numbers. "replace" puts a black image, or silence, in its place and keeps the target. Batches keep
            their sizes. Each bad sample is logged by the logger "torchdali" and kept in :attr:`errors`.
        max_errors: Maximum number of bad samples before ``SampleError`` is raised. None means no limit.
        distributed: "auto" gives each process of an initialised ``torch.distributed`` group its share of the samples.
            ``loader.sampler`` is then ``DistributedSampler(dataset, shuffle=shuffle, seed=seed or 0,
            drop_last=drop_last)``, which counts its epochs by itself. With None, and no sampler, each process gets all
            samples, and a warning.
        images: The parts of a sample that are images: a key, an index, a tuple of them for a nested part, or a list of
            these, such as ``["left", "right"]``. Strings there are paths. None takes every PIL image and tv_tensors'
            ``Image`` and ``Video``, or else the first array (H, W, C), tensor (C, H, W), encoded file or path.
        decode_bytes: The most memory that the files and decoded images of one run of DALI may take. A batch of large
            images becomes several runs, and is the same batch. None is a 128th of the free memory, 192 MiB to 1 GiB.

    Raises:
        DALIUnavailableError: DALI is missing or cannot use the device. The message says what to install.
        ValueError: An argument has no valid value; the dataset cannot have the cache; or
            ``distributed="auto"`` comes with a sampler or an ``IterableDataset``.
        TypeError: A transform cannot be called, or an argument has a wrong type.
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
        cache: Literal["host", "device", "disk"] | None = None,
        cache_bytes: int | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        on_error: OnError = "raise",
        max_errors: int | None = None,
        distributed: Literal["auto"] | None = None,
        images: Images | None = None,
        decode_bytes: int | None = None,
    ) -> None:
        if isinstance(dataset, (str, os.PathLike)):
            dataset = cast("Dataset[_T]", ImageFolder(Path(dataset).expanduser()))
        if collisions := sorted({*IMMUTABLE, *MUTABLE}.intersection(vars(self))):
            raise ValueError(describe_collision(self, collisions[0]))
        # Lightning and Accelerate copy DataLoader's default from another loader. It is not the user's choice.
        prefetch_depth = None if isinstance(prefetch_factor, DefaultInt) else prefetch_factor
        options = LoaderOptions(
            transform, batch_transform, device, seed, fidelity, cache, cache_bytes, cache_dir, on_error, max_errors,
            distributed, images, decode_bytes, prefetch_depth,
        )  # fmt: skip
        # Lightning builds a loader again from the attributes with the names of arguments.
        self.transform, self.batch_transform, self.device = transform, batch_transform, device
        self.seed, self.fidelity = options.seed, fidelity
        self.cache, self.cache_bytes, self.cache_dir, self.decode_bytes = cache, cache_bytes, cache_dir, decode_bytes
        self.on_error, self.max_errors, self.images = on_error, max_errors, images
        self._error_policy = ErrorPolicy(on_error, max_errors)
        self._progress = ProgressTracker(options.seed)
        self._session = Session(dataset, options)
        self._clock: Clock | None = None
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory, drop_last,
            timeout, worker_init_fn, multiprocessing_context, generator, prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers, pin_memory_device=pin_memory_device, in_order=in_order,
        )  # fmt: skip
        self._options = options
        self._mark_default()
        argument = "sampler" if sampler is not None else "batch_sampler" if batch_sampler is not None else None
        self._shards = Sharding(distributed, self, shuffle, argument)
        # Lightning saves the arguments to build the loader again, then with a sampler of its own. So remove this one.
        vars(self).get("__pl_saved_kwargs", {}).pop("distributed", None)
        graph.require_device(device)

    @property
    def errors(self) -> list[SampleError]:
        """The samples that could not be read or decoded and did not end an epoch, each once, in order of appearance."""
        return self._error_policy.errors

    @property
    def distributed(self) -> Literal["auto"] | None:
        """The argument ``distributed``. It is not in ``vars(loader)``, so Lightning does not copy it."""
        return self._options.distributed

    def __setattr__(self, attr: str, val: Any) -> None:
        """Reject changes to arguments that only take effect at construction, as ``DataLoader`` does."""
        check_assignment(self, DALILoader, attr)
        if attr == "prefetch_factor" and "_options" in vars(self) and not isinstance(val, DefaultInt):
            self._options = replace(self._options, prefetch_depth=val)
        if attr == "collate_fn":
            val = guard_collate(val, self.transform is not None or self.batch_transform is not None)
        super().__setattr__(attr, val)
        if attr in TRANSFORMS and "collate_fn" in vars(self):
            self.collate_fn = self.collate_fn  # guard it, or not, for the transforms that are set now

    def _mark_default(self) -> None:
        """Mark DataLoader's default of 2. Else a loader built from these attributes takes it for the user's choice."""
        if self._options.prefetch_depth is None and self.prefetch_factor is not None:
            self.prefetch_factor = DefaultInt(self.prefetch_factor)

    def _refresh(self) -> None:
        """Apply assignments to attributes, and changes of the dataset."""
        self._session.refresh_source(self.dataset, self._update_options())

    def _update_options(self) -> LoaderOptions:
        self._options = replace(self._options, **{name: getattr(self, name) for name in MUTABLE})
        return self._options

    def _native_plan(self) -> NativePlan:
        return self._session.build_native_plan(self._update_options(), self)

    @property
    def _is_native(self) -> bool:
        return self._session.source is not None

    def check_worker_number_rationality(self) -> None:
        """Warn of more workers than cores, as ``DataLoader`` does, if there are workers."""
        if not self._is_native:
            super().check_worker_number_rationality()

    @disable_compile
    @lifecycle.native_call()
    def __iter__(self) -> Any:
        """Begin an epoch. The epoch before need not have ended."""
        self._session.rewind()
        self._refresh()
        self._shards.begin_epoch(self)
        proxy = None if self._is_native else self._session.build_proxy_plan(self._options, self)
        is_stale = self._progress.is_loaded or getattr(self._iterator, "proxy", None) is not proxy
        if is_stale or getattr(self._iterator, "is_lost", False):
            self._iterator = None  # persistent workers have another plan or position, or lost a batch
        self._progress.begin(self)
        try:
            iterator = self._begin_epoch()
            if isinstance(iterator, ResumableIterator):  # a subclass may return its own iterator
                iterator.resume()
        except BaseException:
            self._progress.cancel_begin(self)
            raise
        if self._progress.finish_begin():
            generators = self._progress.require_progress(self).generators
            states = generators.states()
            deque(iterator, maxlen=0)  # the end of a stream may change its dataset's state
            generators.set(states)  # the samples that drop_last left out may have drawn from them
            return iter(self)
        self._clock = getattr(iterator, "clock", None)  # torch's own iterators have none
        return iterator

    def _begin_epoch(self) -> Any:
        """Return the epoch's iterator: that of the persistent workers, or a new one."""
        if self._is_native:
            return self._get_iterator()
        if isinstance(self._iterator, ResumableIterator) and self.persistent_workers and self.num_workers:
            self._iterator.restart(make_context(self, self._options, self._progress, self._error_policy))
            return self._iterator
        return super().__iter__()

    def _get_iterator(self) -> Any:
        options = self._update_options()
        context = make_context(self, options, self._progress, self._error_policy)
        if self._is_native:
            iterator = self._session.make_native_iterator(options, self, context, self._progress)
        else:
            self.check_worker_number_rationality()
            iterator = self._session.make_iterator(options, self, context)
        iterator.resume()
        return iterator

    def __len__(self) -> int:
        self._shards.set_sampler(self)
        return super().__len__()

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, for the key of ``seed`` and for samplers that have a ``set_epoch``.

        Later epochs count on from it. A sampler that the user gave does not count by itself.
        """
        self._progress.next_epoch = operator.index(epoch)
        self._shards.set_epoch(self, self._progress.next_epoch)

    @disable_compile
    def state_dict(self) -> dict[str, Any]:
        """Return where the loader is: in the epoch that began last, after the batches that were yielded.

        The thread that iterates can call it at any time, also between epochs. Batches in flight do not count. An epoch
        ends when its iterator raises ``StopIteration``; then the state is that before the next epoch.

        Returns:
            Numbers, strings, lists and dictionaries, about 15 kB, which JSON and ``torch.load(weights_only=True)``
            take. For samplers with a ``state_dict`` it also has the result of that.

        Raises:
            ValueError: Worker processes give batches in any order (``in_order=False``).
            RuntimeError: The sampler draws again and again from a generator that other code draws from in between.
        """
        self._shards.set_sampler(self)
        return self._progress.state_dict(self, self._is_native)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next ``iter()`` continue from a state. The ``iter()`` after it begins the next epoch.

        Samplers with ``set_epoch`` are told the state's epoch at once. All else happens in ``iter()``. Generators that
        the order depends on get their saved states; torch's global generator is one if the loader or its sampler draws
        from it. Then the sampler skips the batches that were yielded. No sample is loaded for that.

        Args:
            state_dict: A result of ``state_dict()`` of a loader with equal arguments; number of workers, device,
                transforms, cache and ``prefetch_factor`` may differ. Or a result of :func:`torchdali.state.merge` on
                the states of all ranks; then the number of ranks and the batch size may differ as well. An empty
                dictionary undoes the load before.

        Raises:
            ValueError: The state is of another dataset length, sampler, batch size, seed or version. The message says
                what differs.
            TypeError: The state is no dictionary.
        """
        self._shards.set_sampler(self)
        self._progress.load_state_dict(self, state_dict, self._is_native)

    def explain(self, file: TextIO | None = None) -> None:
        """Print how many transforms run in DALI, what to change, and the plan: source, transforms, output, settings.

        Args:
            file: Where to print, in lines of at most 80 columns. Standard output by default; in a notebook a table.
        """
        self._refresh()
        describe_loader(self, self._options, self._session, self._shards, self._error_policy).show(file)

    def stats(self, probe: bool = False) -> Stats:
        """Return the times of the current or latest epoch, and its bottleneck; ``print`` shows a table.

        The thread that iterates can call it at any time. It never waits for the GPU.

        Args:
            probe: Whether to measure first how fast reading, decoding and transforming are alone, for a few seconds.
                A probe needs memory for one more pipeline. It changes no order, random number or epoch in progress.

        Raises:
            UnsupportedDatasetError: ``probe`` is true, and the dataset is worker-fed.
            ValueError: ``probe`` is true, and there is a cache.
        """
        if probe:
            self._refresh()
            probe_session(self, self._options, self._session, self._error_policy, self._clock)
        return collect_stats(self, self._update_options(), self._session, self._clock)

    def show_batch(self, max_images: int = 16, file: str | os.PathLike[str] | None = None) -> None:
        """Draw the next batch with matplotlib: a grid of images with their labels, boxes, masks and key points.

        A copy of the loader makes the batch. Order, random numbers and an epoch in progress stay as they are.

        Args:
            max_images: Maximum number of images.
            file: Where to save the picture. Without it pyplot gets a new figure, which notebooks show.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: The batch has no images, or an ``IterableDataset`` is without worker processes.
        """
        self._refresh()
        draw_batch(self, read_next_batch(self, self._options, self._shards, self._clock), max_images, file)

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Raise TypeError. Accelerate reads this attribute before it makes a plain ``DataLoader`` from the others."""
        if "accelerate" not in sys.modules:
            return False
        raise TypeError(
            "accelerate's prepare() would make a plain DataLoader of this DALILoader, and nothing would run in DALI: "
            "use the Accelerator of torchdali.accelerate, or its prepare_data_loader()"
        )

    def close(self) -> None:
        """Free what the loader has: threads, worker processes, and memory on the host and on the GPU.

        Iterators in progress raise ``RuntimeError`` at their next batch. Batches that were yielded stay valid. The
        loader can be used again, and builds its pipelines again. Leaving a ``with`` block closes it, too.
        """
        self._iterator = None  # before its workers end, so that no epoch begins with them after an interrupt
        self._session.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which builds its own iterators and pipelines."""
        reset = {"_iterator": None, "_clock": None, "_progress": copy.copy(self._progress)}
        state: dict[str, Any] = {**self.__dict__, **reset, "_session": copy.copy(self._session)}
        # Lightning records assignments to attributes while it wraps loaders. After an exception it never stops.
        if record := state.get("__pl_attrs_record"):
            state["__pl_attrs_record"] = [entry for entry in record if entry[0][0] not in reset]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._mark_default()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

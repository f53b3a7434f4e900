"""Hugging Face Accelerate with ``DALILoader``. Only the import of ``Accelerator`` changes.

::

    from torchdali.accelerate import Accelerator

Accelerate's ``prepare`` makes a new loader from a loader's attributes, with each process's share of the batches. Here
the new loader has a ``DALILoader`` inside. All else, also the shares, is Accelerate's own code.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import DataLoader, IterableDataset

from torchdali.loader import DALILoader
from torchdali.loader.rebuild import rebuild
from torchdali.samples.guard import GuardedCollate, unguard_collate
from torchdali.state.generators import TORCH, Generators

try:
    _accelerate: Any = importlib.import_module("accelerate")
    _theirs: Any = importlib.import_module("accelerate.data_loader")
except ModuleNotFoundError as missing:
    if missing.name != "accelerate":
        raise
    raise ModuleNotFoundError(
        "torchdali.accelerate needs Accelerate: pip install accelerate", name="accelerate"
    ) from None

__all__ = ["Accelerator", "prepare_data_loader", "skip_first_batches"]

_GLOBAL = (TORCH, "numpy", "python")
_PLAIN_LOADER = (
    "Accelerate made a plain DataLoader of a prepared DALILoader, without its transforms: use the "
    "skip_first_batches of torchdali.accelerate or of its Accelerator"
)


class _Base(DALILoader[Any]):
    """The loader inside a prepared one. Accelerate numbers its epochs, and restores the global generators itself."""

    _resumes_within_epoch = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as ``DALILoader`` does."""
        super().load_state_dict(state_dict)
        self._resumes_within_epoch = bool(state_dict.get("begun")) and not state_dict["over"]

    @property
    def epochs(self) -> int:
        """The number of the next epoch."""
        return self._progress.next_epoch

    def follow(self, epoch: int, known: bool) -> None:
        """Set the number of the next epoch.

        Args:
            epoch: Accelerate's number.
            known: Whether it is the number of the epoch before; Accelerate does not count on after a ``break``.
        """
        self._progress.next_epoch = max(epoch, self._progress.next_epoch) if known else epoch

    def count_with(self, other: _Base) -> None:
        """Share the count of epochs with another loader."""
        self._progress.keys = other._progress.keys

    def __iter__(self) -> Any:
        """Begin an epoch. If it resumes within one, keep the global generators, which Accelerate has restored."""
        if not self._resumes_within_epoch:
            return super().__iter__()
        generators = Generators(self)
        before = {name: state for name, state in generators.states().items() if name in _GLOBAL}
        try:
            iterator = super().__iter__()
        finally:
            generators.set(before)
        self._resumes_within_epoch = False
        return iterator


_Base.__name__ = DALILoader.__name__  # for explain() and errors


class _Prepared:
    """The parts that both kinds of prepared loaders share.

    Args:
        made: The loader that Accelerate made.
        template: The loader that it was made from.
        base: The loader that yields its batches.
    """

    use_stateful_dataloader: bool
    end_of_dataloader: bool
    iteration: int

    def __init__(self, made: Any, template: DALILoader[Any], base: Any) -> None:
        self.__dict__.update(made.__dict__)
        self.template, self.base_dataloader = template, base
        self._is_accelerate_prepared = True
        self._save_state()

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep the class in copies, pickled or not; Accelerate's ``__reduce__`` would return its own class."""
        return object.__new__, (type(self),), self.__dict__

    def _save_state(self) -> None:
        """Keep the state before the first batch for ``state_dict``."""
        if self.use_stateful_dataloader:
            self.dl_state_dict = self.base_dataloader.state_dict() | {"iteration": self.iteration}

    @property
    def collate_fn(self) -> Any:
        """A function that raises. Accelerate makes some loaders from the attributes of others."""
        return GuardedCollate(unguard_collate(self.template.collate_fn), _PLAIN_LOADER)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the batches that were yielded.

        Accelerate saves and loads the global generators itself. A state between epochs leaves them out, because other
        loaders may run before the next epoch begins.
        """
        state: dict[str, Any] = cast("Any", super()).state_dict()
        if state["begun"]:
            return state
        own = {
            part: {name: value for name, value in state[part].items() if name not in _GLOBAL}
            for part in ("generators", "generators_at_begin")
        }
        return state | own

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch. Accelerate calls this with ``iteration`` when an epoch begins."""
        known = epoch == self.iteration
        cast("Any", super()).set_epoch(epoch)
        if isinstance(self.base_dataloader, _Base):
            self.base_dataloader.follow(epoch, known)

    def _update_state_dict(self) -> None:
        """Keep the state after a batch. Accelerate calls this for every batch."""
        if self.use_stateful_dataloader:
            cast("Any", super())._update_state_dict()  # noqa: SLF001
            self.dl_state_dict["iteration"] = self.iteration + self.end_of_dataloader

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, and the number of the epoch in Accelerate's count."""
        state = dict(state_dict)
        iteration: int | None = state.pop("iteration", None)
        cast("Any", super()).load_state_dict(state)
        # The state of a loader that was not prepared has no iteration. An empty one undoes the load before.
        self.iteration = self.base_dataloader.epochs if iteration is None else iteration
        self._save_state()


class _Shard(_Prepared, _theirs.DataLoaderShard):
    """A loader in which each process makes its own batches."""


class _Dispatcher(_Prepared, _theirs.DataLoaderDispatcher):
    """A loader in which the first process makes all batches and sends them to the others."""


def prepare_data_loader(accelerator: Any, loader: Any, *args: Any, **kwargs: Any) -> Any:
    """Prepare a loader as ``accelerator.prepare_data_loader`` does, but keep a ``DALILoader``.

    Args:
        accelerator: Any ``accelerate.Accelerator``; in ``transformers``, that of the ``Trainer``.
        loader: The loader to prepare.
        *args: As for ``accelerator.prepare_data_loader``.
        **kwargs: As for ``accelerator.prepare_data_loader``.

    Returns:
        A loader of this process's share, of a subclass of Accelerate's, with batches on the accelerator's device.

    Raises:
        ValueError: The loader has ``distributed="auto"``, or its state is to be saved while one process makes all
            batches. Accelerate raises its own errors, too.
    """
    if type(loader) in (_Shard, _Dispatcher) or not isinstance(loader, DALILoader):
        return _accelerate.Accelerator.prepare_data_loader(accelerator, loader, *args, **kwargs)
    given = cast("DALILoader[Any]", loader)
    if given.distributed:
        raise ValueError("Accelerate gives each process its share: leave out distributed='auto'")
    # DALILoader refuses to be prepared by Accelerate itself.
    plain = DataLoader[Any](given.dataset)
    vars(plain).update({name: value for name, value in vars(given).items() if name in vars(plain)})
    # Else Accelerate would make torchdata's loader and ask for its state at once, which draws an epoch's order.
    stateful, config = accelerator.use_stateful_dataloader, accelerator.dataloader_config
    accelerator.dataloader_config = dataclasses.replace(config, use_stateful_dataloader=False)
    try:
        made = _accelerate.Accelerator.prepare_data_loader(accelerator, plain, *args, **kwargs)
    finally:
        accelerator.dataloader_config = config
    made.use_stateful_dataloader = stateful
    ours = _insert_dali(made, given, accelerator.device)
    accelerator._dataloaders[-1] = ours  # noqa: SLF001 - save_state and others use this list
    return ours


def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """Return a loader without the first batches, as ``accelerate.skip_first_batches`` does. Loads no skipped sample."""
    if type(loader) not in (_Shard, _Dispatcher):
        if isinstance(loader, DALILoader):
            return _skip_in_unprepared(cast("DALILoader[Any]", loader), num_batches)
        return _theirs.skip_first_batches(loader, num_batches)
    made = _theirs.skip_first_batches(loader, num_batches)
    device = loader.state.device if type(loader) is _Dispatcher else loader.device
    rest = _insert_dali(made, loader.template, device)
    if isinstance(rest.base_dataloader, _Base):
        rest.base_dataloader.count_with(loader.base_dataloader)
    return rest


def _skip_in_unprepared(loader: DALILoader[Any], num_batches: int) -> DALILoader[Any]:
    """Return a ``DALILoader`` without the first batches of one that no Accelerator has prepared."""
    if loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            "skip_first_batches must be given a loader of batches of a map-style dataset, or one that an Accelerator "
            f"has prepared, got a DALILoader with batch_size={loader.batch_size} of a {type(loader.dataset).__name__}"
        )
    batches = _theirs.SkipBatchSampler(loader.batch_sampler, skip_batches=num_batches)
    return rebuild(loader, DALILoader[Any], dataset=loader.dataset, batch_sampler=batches)


def _insert_dali(made: Any, loader: DALILoader[Any], device: Any) -> Any:
    """Return a loader that Accelerate made, with the batches of a ``DALILoader`` that has its sampler.

    Args:
        made: The loader that Accelerate made.
        loader: The loader whose arguments are copied.
        device: The accelerator's device, for a loader with ``device="auto"``.
    """
    dispatches = isinstance(made, _theirs.DataLoaderDispatcher)
    if dispatches and made.use_stateful_dataloader:
        raise ValueError(
            "with dispatch_batches the first process takes batches ahead of all, so that the place of a DALILoader "
            "cannot be saved: leave out use_stateful_dataloader or dispatch_batches"
        )
    base = made.base_dataloader
    streams = isinstance(cast("object", base.dataset), IterableDataset)
    if streams:
        batches: dict[str, Any] = {"batch_size": base.batch_size, "drop_last": base.drop_last}
    elif base.batch_sampler is None:
        batches = {"batch_size": None, "sampler": base.sampler}
    else:
        batches = {"batch_sampler": base.batch_sampler}
    if dispatches and not _accelerate.PartialState().is_main_process:
        # No batch is taken from it, so it must not start DALI.
        return _Dispatcher(made, loader, DataLoader[Any](base.dataset, **batches))
    changed: dict[str, Any] = {"generator": None} if dispatches else {}
    if loader.device == "auto" and device is not None and (dispatches or made.device is not None):
        changed["device"] = device
    kind = _Dispatcher if dispatches else _Shard
    return kind(made, loader, rebuild(loader, _Base, dataset=base.dataset, **batches, **changed))


if TYPE_CHECKING:
    from accelerate import Accelerator as _Theirs
else:
    _Theirs = _accelerate.Accelerator


class Accelerator(_Theirs):
    """``accelerate.Accelerator`` whose ``prepare`` keeps a ``DALILoader`` a ``DALILoader``."""

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a loader; see :func:`prepare_data_loader`."""
        return prepare_data_loader(self, data_loader, *args, **kwargs)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader without the first batches; see :func:`skip_first_batches`."""
        return skip_first_batches(dataloader, num_batches)

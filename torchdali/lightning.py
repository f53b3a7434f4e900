"""``DALIDataModule``: Lightning's data module, with a ``DALILoader`` for each dataset.

It needs ``lightning`` or ``pytorch_lightning``. It works with each of them that the program has imported, or else with
the first that is installed.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import IterableDataset
from torchvision.datasets import ImageFolder

from torchdali.loader import DALILoader
from torchdali.runtime.warning import warn_user
from torchdali.state import merge

__all__ = ["DALIDataModule", "TrainLoader"]

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _bases() -> tuple[Any, ...]:
    """Return the ``LightningDataModule`` of each package that a Trainer may come from."""
    loaded = [name for name in _PACKAGES if sys.modules.get(name)]
    for name in loaded or _PACKAGES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
        else:
            return tuple(sys.modules[module].LightningDataModule for module in loaded or [name])
    raise ModuleNotFoundError("torchdali.lightning needs Lightning: pip install lightning", name="lightning")


if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule

    class _Base(LightningDataModule, Any):
        """The type of either package's data module."""

        trainer: Any

else:
    _Base = type("_Base", _bases(), {})


class TrainLoader(DALILoader[Any]):
    """A loader that follows the Trainer's epochs. Its data module saves and loads its state.

    Args:
        *args: As for ``DALILoader``.
        module: The data module.
        number: The number of this loader in the data module.
        **kwargs: As for ``DALILoader``.
    """

    def __init__(self, *args: Any, module: DALIDataModule, number: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.module, self.number = module, number
        self._trainer_epoch: int | None = None

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch. It draws its random numbers now, as ``DataLoader``'s does.

        An epoch that resumes begins with its first batch, because the Trainer has not restored its epoch's number
        before. So does each epoch with ``reload_dataloaders_every_n_epochs``: the Trainer asks such loaders for two
        iterators, or for one when it resumes.
        """
        trainer = self.module.trainer
        if trainer is None:
            return self._iterate()
        waits = self.module.has_state(self.number) or trainer.reload_dataloaders_every_n_epochs
        return _LateIterator(self, None if waits else self._begin_new(trainer.current_epoch))

    def begin(self) -> Iterator[Any]:
        """Return the iterator of the Trainer's current epoch: a new one, or the rest of the saved one."""
        epoch = self.module.trainer.current_epoch
        saved = self.module.claim(self.number)
        if saved is not None and self._resume(saved, epoch):
            return self._iterate()
        return self._begin_new(epoch)

    def note_epoch(self, epoch: int) -> None:
        """Keep the Trainer's epoch, whose first batch is asked for."""
        self._trainer_epoch = epoch

    def _begin_new(self, epoch: int) -> Iterator[Any]:
        if epoch != self._trainer_epoch:
            self.set_epoch(epoch)
        else:
            self._progress.keys.repeat()
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        return cast("Iterator[Any]", super().__iter__())

    def _resume(self, saved: Mapping[str, Any], epoch: int) -> bool:
        """Load a state. Return whether it is of the current epoch; the rest of an older one is left out."""
        current = saved["epoch"] == epoch
        try:
            super().load_state_dict(_adapt_to_ranks(saved["state"], self))
        except ValueError as error:
            warn_user(f"Epoch {epoch} begins again from its start, not where it was: {error}")
            return False
        if not current:
            super().__iter__()
        return current

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, unless the data module has one, which holds more than the Trainer's."""
        if not self.module.has_state(self.number):
            super().load_state_dict(state_dict)

    def save(self) -> dict[str, Any] | None:
        """Return the state and the Trainer's epoch that it belongs to; None before the first batch."""
        return None if self._trainer_epoch is None else {"epoch": self._trainer_epoch, "state": self.state_dict()}


def _constructor() -> inspect.Signature:
    """Return the parameters whose names Lightning reads when it makes a loader again."""
    inherited = inspect.signature(cast("Any", DALILoader).__init__).parameters.values()
    own = inspect.signature(cast("Any", TrainLoader).__init__).parameters
    return inspect.Signature([*inherited, own["module"], own["number"]])


cast("Any", TrainLoader).__init__.__signature__ = _constructor()


class _LateIterator:
    """An iterator that belongs to the Trainer's epoch in which its first batch is asked for.

    The Trainer may ask for an iterator in one epoch and take the first batch in another one.

    Args:
        loader: The loader.
        iterator: The iterator that was begun for the Trainer's current epoch; None to begin it with the first batch.
    """

    def __init__(self, loader: TrainLoader, iterator: Iterator[Any] | None) -> None:
        self._loader, self._iterator = loader, iterator
        self._epoch = loader.module.trainer.current_epoch
        self._has_begun = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._has_begun:
            now = self._loader.module.trainer.current_epoch
            if self._iterator is None or now != self._epoch:
                self._iterator = self._loader.begin()
            self._loader.note_epoch(now)
            self._has_begun = True
        assert self._iterator is not None
        return next(self._iterator)


def _adapt_to_ranks(state: dict[str, Any], loader: TrainLoader) -> dict[str, Any]:
    """Return the state for this rank, from that of rank 0, which Lightning saves. Their number may have changed."""
    saved = state["loader"]
    ranks, here = saved.get("ranks"), getattr(cast("Any", loader.sampler), "num_replicas", None)
    if ranks is None or ranks == here:
        return state
    return merge({**state, "loader": {**saved, "rank": rank}} for rank in range(ranks))


class DALIDataModule(_Base):
    """A ``LightningDataModule`` that makes a ``DALILoader`` of each dataset, on the device of the Trainer's strategy.

    Each of ``train``, ``val``, ``test`` and ``predict`` is a dataset, the path of a folder of class folders, a loader,
    or a list, tuple or dictionary of these. A loader is used as it is, but a ``DALILoader`` for training is copied. The
    others are made when the Trainer asks for them; without a Trainer their device is "auto". Only those for training
    shuffle. If there are several processes, Lightning gives each of them its share.

    Each checkpoint holds the state of the training loaders. So training resumes within an epoch, or after its end,
    when Lightning itself begins each loader again.

    Args:
        train: Data for training, in ``trainer.fit``.
        val: Data for validation, in ``trainer.fit`` and ``trainer.validate``.
        test: For ``trainer.test``.
        predict: For ``trainer.predict``.
        train_transform: ``DALILoader``'s argument ``transform``, for training. The next three are for other stages.
        val_transform: For validation.
        test_transform: For the test.
        predict_transform: For prediction.
        batch_size: Samples in a batch, of each process.
        train_options: Arguments of ``DALILoader`` for training alone, such as ``drop_last`` or ``batch_transform``.
        val_options: The same for validation.
        test_options: The same for the test.
        predict_options: The same for prediction.
        **options: Arguments of ``DALILoader`` for all stages, such as ``num_workers``, ``seed`` or ``device``.

    Attributes:
        batch_size: The argument. Lightning's ``Tuner`` may change it.

    Raises:
        ValueError: A transform or an option is for a stage that has only loaders, or no data.
    """

    def __init__(
        self,
        train: Any = None,
        val: Any = None,
        test: Any = None,
        predict: Any = None,
        *,
        train_transform: Any = None,
        val_transform: Any = None,
        test_transform: Any = None,
        predict_transform: Any = None,
        batch_size: int = 1,
        train_options: Mapping[str, Any] | None = None,
        val_options: Mapping[str, Any] | None = None,
        test_options: Mapping[str, Any] | None = None,
        predict_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self._data = {"train": train, "val": val, "test": test, "predict": predict}
        self._options = options
        transforms = (train_transform, val_transform, test_transform, predict_transform)
        of_stages = (train_options, val_options, test_options, predict_options)
        self._own: dict[str, dict[str, Any]] = {}
        for stage, transform, own in zip(self._data, transforms, of_stages, strict=True):
            self._own[stage] = {**({} if transform is None else {"transform": transform}), **(own or {})}
            if self._own[stage] and all(map(_is_loader, _leaves(self._data[stage]))):
                raise ValueError(
                    f"{', '.join(self._own[stage])}: for {stage}= there is no dataset whose loader would take this"
                )
        given = [*options, *(["batch_size"] if batch_size != 1 else [])]
        leaves = [leaf for data in self._data.values() for leaf in _leaves(data)]
        if given and leaves and all(map(_is_loader, leaves)):
            raise ValueError(f"{', '.join(given)}: there is no dataset whose loader would take this")
        # Lightning takes a method that is defined for the presence of data; its from_datasets does the same.
        for stage in (stage for stage, data in self._data.items() if data is not None):
            setattr(self, f"{stage}_dataloader", partial(self._make_loaders, stage))
        self._folders: dict[str, ImageFolder] = {}
        self._saved: dict[str, Any] = {}

    def _make_loaders(self, stage: str) -> Any:
        """Return the result of ``train_dataloader`` and the methods of the other stages."""
        numbers = iter(range(sys.maxsize))

        def make(data: Any) -> Any:
            return self._make_loader(stage, data, next(numbers))

        return _map(self._data[stage], make)

    def _make_loader(self, stage: str, data: Any, number: int) -> Any:
        if _is_loader(data):
            is_ours = isinstance(cast("object", data), DALILoader)
            return self._copy_for_training(data, number) if stage == "train" and is_ours else data
        if isinstance(data, (str, os.PathLike)):
            folder = os.fspath(cast("str | os.PathLike[str]", data))
            if folder not in self._folders:
                self._folders[folder] = ImageFolder(Path(folder))
            data = self._folders[folder]
        options: dict[str, Any] = {"batch_size": self.batch_size, **self._options, **self._own[stage]}
        if self.trainer is not None:
            options.setdefault("device", self.trainer.strategy.root_device)
        if options.get("batch_sampler") is not None:
            del options["batch_size"]
        if stage != "train":
            return DALILoader(data, **options)
        ordered = any(options.get(name) is not None for name in ("sampler", "batch_sampler", "shuffle"))
        if not ordered and not isinstance(data, IterableDataset):
            options["shuffle"] = True
        return TrainLoader(data, module=self, number=number, **options)

    def _copy_for_training(self, loader: DALILoader[Any], number: int) -> TrainLoader:
        """Return a copy of the user's loader that follows the Trainer's epochs."""
        copied = copy.copy(loader)
        copied.__class__ = _add_train_loader(type(loader))
        vars(copied).update(module=self, number=number, _trainer_epoch=None)
        return cast("TrainLoader", copied)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the training loaders, by number. Lightning puts them into each checkpoint."""
        loaders = _leaves(self.trainer.train_dataloader) if self.trainer is not None else []
        states = {str(loader.number): loader.save() for loader in loaders if isinstance(loader, TrainLoader)}
        return self._saved | {number: state for number, state in states.items() if state is not None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the states for the loaders, if ``trainer.fit`` resumes."""
        fits = self.trainer is not None and self.trainer.state.fn == "fit"
        self._saved = dict(state_dict) if fits else {}

    def teardown(self, stage: str) -> None:
        """Forget the states that were loaded."""
        super().teardown(stage)
        self._saved = {}

    def has_state(self, number: int) -> bool:
        """Return whether there is a state for a loader."""
        return str(number) in self._saved

    def claim(self, number: int) -> dict[str, Any] | None:
        """Return the state for a loader, and forget it."""
        return self._saved.pop(str(number), None)


def _add_train_loader(kind: type[Any]) -> type[Any]:
    """Return a class with the methods of ``TrainLoader`` and of the loader's own class."""
    if kind is DALILoader:
        return TrainLoader
    namespace = {"__module__": kind.__module__}
    return kind if issubclass(kind, TrainLoader) else type(kind.__name__, (TrainLoader, kind), namespace)


def _is_loader(data: Any) -> bool:
    """Return whether the data is a loader: neither a dataset nor the path of a folder."""
    return not isinstance(data, os.PathLike) and not hasattr(data, "__getitem__")


def _map(data: Any, make: Callable[[Any], Any]) -> Any:
    """Apply a function to each leaf of a nested collection. Mappings become dictionaries, tuples become lists."""
    if isinstance(data, Mapping):
        return {key: _map(value, make) for key, value in cast("Mapping[Any, Any]", data).items()}
    if isinstance(data, (list, tuple)):
        return [_map(value, make) for value in cast("Iterable[Any]", data)]
    return make(data)


def _leaves(data: Any) -> list[Any]:
    """Return the leaves of a nested collection."""
    leaves: list[Any] = []
    if data is not None:
        _map(data, leaves.append)
    return leaves

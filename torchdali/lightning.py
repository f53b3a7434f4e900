"""``DALIDataModule``: Lightning's data module, with a ``DALILoader`` for each dataset.

The module is imported by who uses it, and needs ``lightning`` or ``pytorch_lightning``: the one that the program has
imported, which may be both, or else the first that is installed.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import IterableDataset
from torchvision.datasets import ImageFolder

from torchdali.loader import DALILoader
from torchdali.state import merge

__all__ = ["DALIDataModule", "TrainLoader"]

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _bases() -> tuple[Any, ...]:
    """The ``LightningDataModule`` of each package that a Trainer may come from."""
    loaded = [name for name in _PACKAGES if sys.modules.get(name)]
    for name in loaded or _PACKAGES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
        else:
            return tuple(sys.modules[one].LightningDataModule for one in loaded or [name])
    raise ModuleNotFoundError("torchdali.lightning needs Lightning: pip install lightning", name="lightning")


if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule

    class _Base(LightningDataModule, Any):
        """As a type it is that of either package."""

        trainer: Any

else:
    _Base = type("_Base", _bases(), {})


class TrainLoader(DALILoader[Any]):
    """A loader whose epochs are the Trainer's, and whose place its data module saves and finds again.

    Args:
        *args: As for ``DALILoader``.
        module: The data module.
        number: Which of its loaders this is.
        **kwargs: As for ``DALILoader``.
    """

    def __init__(self, *args: Any, module: DALIDataModule, number: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.module, self.number = module, number
        self._of: int | None = None

    def __iter__(self) -> Iterator[Any]:
        """An epoch, which draws its random numbers now, as DataLoader's does.

        One that goes on from a saved place begins with its first batch: only then does the Trainer's number hold. So
        does each where loaders are made anew, which the Trainer asks for an iterator twice, or once when it resumes.
        """
        trainer = self.module.trainer
        if trainer is None:
            return self._plain()
        waits = self.module.has_state(self.number) or trainer.reload_dataloaders_every_n_epochs
        return _Numbered(self, None if waits else self._new(trainer.current_epoch))

    def begin(self) -> Iterator[Any]:
        """The iterator of the Trainer's current epoch: a new one, or what is left of the one that was saved."""
        epoch = self.module.trainer.current_epoch
        saved = self.module.claim(self.number)
        if saved is not None and self._goes_on(saved, epoch):
            return self._plain()
        return self._new(epoch)

    def number_is(self, epoch: int) -> None:
        """The first batch of an epoch of the Trainer is asked for."""
        self._of = epoch

    def _new(self, epoch: int) -> Iterator[Any]:
        if epoch != self._of:
            self.set_epoch(epoch)
        else:
            self._progress.repeat_epoch()
        return self._plain()

    def _plain(self) -> Iterator[Any]:
        return cast("Iterator[Any]", super().__iter__())

    def _goes_on(self, saved: Mapping[str, Any], epoch: int) -> bool:
        """Whether the current epoch is the saved one; of an older one the end is left out, as it was."""
        current = saved["epoch"] == epoch
        try:
            super().load_state_dict(_for_ranks(saved["state"], self))
        except ValueError as error:
            warnings.warn(f"Epoch {epoch} begins anew, and not as it would have been: {error}", stacklevel=6)
            return False
        if not current:
            super().__iter__()
        return current

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As ``DALILoader``'s, but where the data module has a state: the Trainer's, which has less, is not taken."""
        if not self.module.has_state(self.number):
            super().load_state_dict(state_dict)

    def saved(self) -> dict[str, Any] | None:
        """The state and the Trainer's epoch of which it is; None before the first batch."""
        return None if self._of is None else {"epoch": self._of, "state": self.state_dict()}


def _constructor() -> inspect.Signature:
    """The parameters by whose names Lightning makes a loader anew."""
    inherited = inspect.signature(cast("Any", DALILoader).__init__).parameters.values()
    own = inspect.signature(cast("Any", TrainLoader).__init__).parameters
    return inspect.Signature([*inherited, own["module"], own["number"]])


cast("Any", TrainLoader).__init__.__signature__ = _constructor()


class _Numbered:
    """An iterator that belongs to the epoch in which its first batch is asked for.

    Args:
        loader: Whose it is.
        iterator: What was begun for the epoch that the Trainer is in now; None where it is to be begun later.
    """

    def __init__(self, loader: TrainLoader, iterator: Iterator[Any] | None) -> None:
        self._loader, self._iterator = loader, iterator
        self._epoch = loader.module.trainer.current_epoch
        self._asked = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._asked:
            now = self._loader.module.trainer.current_epoch
            if self._iterator is None or now != self._epoch:
                self._iterator = self._loader.begin()
            self._loader.number_is(now)
            self._asked = True
        assert self._iterator is not None
        return next(self._iterator)


def _for_ranks(state: dict[str, Any], loader: TrainLoader) -> dict[str, Any]:
    """A state of rank 0, the one that Lightning saves, for this rank, of perhaps another number of them."""
    about = state["loader"]
    ranks, here = about.get("ranks"), getattr(cast("Any", loader.sampler), "num_replicas", None)
    if ranks is None or ranks == here:
        return state
    return merge({**state, "loader": {**about, "rank": rank}} for rank in range(ranks))


class DALIDataModule(_Base):
    """A ``LightningDataModule`` that makes a ``DALILoader`` of each dataset, on the device of the Trainer's strategy.

    Each of ``train``, ``val``, ``test`` and ``predict`` is a dataset, the path of a folder of class folders, a loader,
    or a list, tuple or dictionary of these. A loader is taken as it is; a ``DALILoader`` for training is copied. The
    others are made when they are asked for; without a Trainer their device is "auto". Only those for training shuffle.
    Where there are several processes, Lightning gives each of them its share.

    The place in the training data is saved with each checkpoint, and found again: in the midst of an epoch, and at its
    end, after which Lightning itself has each loader begin anew.

    Args:
        train: What ``trainer.fit`` trains on.
        val: What ``trainer.fit`` and ``trainer.validate`` validate on.
        test: For ``trainer.test``.
        predict: For ``trainer.predict``.
        train_transform: ``DALILoader``'s argument ``transform``, for training. As are the next three.
        val_transform: For validation.
        test_transform: For the test.
        predict_transform: For prediction.
        batch_size: Samples in a batch, of each process.
        train_options: Arguments of ``DALILoader`` for training alone, such as ``drop_last`` or ``batch_transform``.
        val_options: For validation alone. As are the next two.
        test_options: For the test alone.
        predict_options: For prediction alone.
        **options: Arguments of ``DALILoader`` for all stages, such as ``num_workers``, ``seed`` or ``device``.

    Attributes:
        batch_size: As given; Lightning's ``Tuner`` may change it.

    Raises:
        ValueError: A transform or an option was given for a stage that has nothing but loaders, or nothing at all.
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
        # As Lightning's from_datasets does: a method that is defined says that there is data.
        for stage in (stage for stage, data in self._data.items() if data is not None):
            setattr(self, f"{stage}_dataloader", partial(self._loaders, stage))
        self._folders: dict[str, ImageFolder] = {}
        self._saved: dict[str, Any] = {}

    def _loaders(self, stage: str) -> Any:
        """What the Trainer gets of ``train_dataloader`` and its like."""
        numbers = iter(range(sys.maxsize))

        def make(one: Any) -> Any:
            return self._loader(stage, one, next(numbers))

        return _mapped(self._data[stage], make)

    def _loader(self, stage: str, data: Any, number: int) -> Any:
        if _is_loader(data):
            is_ours = isinstance(cast("object", data), DALILoader)
            return self._taken(data, number) if stage == "train" and is_ours else data
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

    def _taken(self, loader: DALILoader[Any], number: int) -> TrainLoader:
        """A copy of a loader that was given."""
        twin = copy.copy(loader)
        twin.__class__ = _training(type(loader))
        vars(twin).update(module=self, number=number, _of=None)
        return cast("TrainLoader", twin)

    def state_dict(self) -> dict[str, Any]:
        """The places of the loaders that train, by number; Lightning puts it into each checkpoint."""
        loaders = _leaves(self.trainer.train_dataloader) if self.trainer is not None else []
        places = {str(one.number): one.saved() for one in loaders if isinstance(one, TrainLoader)}
        return self._saved | {number: place for number, place in places.items() if place is not None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the places for the loaders, where it is ``trainer.fit`` that goes on."""
        fits = self.trainer is not None and self.trainer.state.fn == "fit"
        self._saved = dict(state_dict) if fits else {}

    def teardown(self, stage: str) -> None:
        """Forgets what was loaded."""
        super().teardown(stage)
        self._saved = {}

    def has_state(self, number: int) -> bool:
        """Whether a loader has a place to go on from."""
        return str(number) in self._saved

    def claim(self, number: int) -> dict[str, Any] | None:
        """The place that a loader goes on from, once."""
        return self._saved.pop(str(number), None)


def _training(kind: type[Any]) -> type[Any]:
    """The class of a copy that trains; that of a loader of a subclass has its methods, too."""
    if kind is DALILoader:
        return TrainLoader
    mixed = {"__module__": kind.__module__}
    return kind if issubclass(kind, TrainLoader) else type(kind.__name__, (TrainLoader, kind), mixed)


def _is_loader(data: Any) -> bool:
    """Whether it is something that gives batches: it is no dataset, and no folder of one."""
    return not isinstance(data, os.PathLike) and not hasattr(data, "__getitem__")


def _mapped(data: Any, make: Callable[[Any], Any]) -> Any:
    """What is made of each part of a collection: a dictionary of a mapping, a list of a list or tuple, at any depth."""
    if isinstance(data, Mapping):
        return {key: _mapped(value, make) for key, value in cast("Mapping[Any, Any]", data).items()}
    if isinstance(data, (list, tuple)):
        return [_mapped(value, make) for value in cast("Iterable[Any]", data)]
    return make(data)


def _leaves(data: Any) -> list[Any]:
    """What is in a collection."""
    found: list[Any] = []
    if data is not None:
        _mapped(data, found.append)
    return found

"""Hugging Face Accelerate with ``DALILoader``: the one changed line is the import of ``Accelerator``.

::

    from torchdali.accelerate import Accelerator

Accelerate's ``prepare`` makes a new loader of a loader's attributes, with each process's share of the batches. Here the
new one has a ``DALILoader`` inside; all else, the shares too, is Accelerate's own code.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import DataLoader, IterableDataset

from torchdali.errors import TransformError
from torchdali.loader import DALILoader
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

_OF_BATCHES = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "distributed")
_KEPT = [name for name in inspect.signature(cast("Any", DALILoader)).parameters if name not in _OF_BATCHES]
_GLOBAL = (TORCH, "numpy", "python")


class _Guard:
    """The ``collate_fn`` that Accelerate finds where it makes a loader of a prepared one by itself."""

    def __call__(self, _: Any) -> Any:
        raise TransformError(
            "Accelerate made a plain DataLoader of a prepared DALILoader, without its transforms: use the "
            "skip_first_batches of torchdali.accelerate or of its Accelerator"
        )


class _Base(DALILoader[Any]):
    """The loader inside, whose epochs Accelerate numbers, and around whose place it puts the global generators back."""

    _midst = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As ``DALILoader``'s."""
        super().load_state_dict(state_dict)
        self._midst = bool(state_dict.get("begun")) and not state_dict["over"]

    @property
    def epochs(self) -> int:
        """The number of the next epoch."""
        return self._progress.next_epoch

    def follow(self, epoch: int, known: bool) -> None:
        """Says which number the next epoch has.

        Args:
            epoch: The number.
            known: Whether Accelerate says what it said before: after a ``break`` it does not count on.
        """
        self._progress.next_epoch = max(epoch, self._progress.next_epoch) if known else epoch

    def count_with(self, other: _Base) -> None:
        """Has one count of epochs together with another loader."""
        self._progress.share_epochs(other._progress)

    def __iter__(self) -> Any:
        """An epoch; where it goes on in its midst, the global generators stay as Accelerate has put them back."""
        if not self._midst:
            return super().__iter__()
        generators = Generators(self)
        before = {name: state for name, state in generators.states().items() if name in _GLOBAL}
        try:
            iterator = super().__iter__()
        finally:
            generators.set(before)
        self._midst = False
        return iterator


_Base.__name__ = DALILoader.__name__  # which explain() and errors say


class _Prepared:
    """What the prepared loaders have in common.

    Args:
        made: What Accelerate made.
        template: The loader that it was made of.
        base: The loader that gives its batches.
    """

    use_stateful_dataloader: bool
    end_of_dataloader: bool
    iteration: int

    def __init__(self, made: Any, template: DALILoader[Any], base: Any) -> None:
        self.__dict__.update(made.__dict__)
        self.template, self.base_dataloader = template, base
        self._is_accelerate_prepared = True
        self._note_place()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, pickled or not, has all of this, too; Accelerate's own would be one of its class."""
        return _remade, (type(self),), self.__dict__

    def _note_place(self) -> None:
        """Keeps for ``state_dict`` where the loader is before the first batch that it is asked for."""
        if self.use_stateful_dataloader:
            self.dl_state_dict = self.base_dataloader.state_dict() | {"iteration": self.iteration}

    @property
    def collate_fn(self) -> Any:
        """What a loader would have that is not this one; Accelerate makes some from the attributes of others."""
        return _Guard()

    def state_dict(self) -> dict[str, Any]:
        """The place after the batches that were handed out.

        Accelerate saves and loads the global generators itself. Between epochs a loader leaves them alone: it may begin
        its next one long after other loaders went on.
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
        """Says which number the next epoch has; Accelerate itself does so at the begin of each, with ``iteration``."""
        known = epoch == self.iteration
        cast("Any", super()).set_epoch(epoch)
        if isinstance(self.base_dataloader, _Base):
            self.base_dataloader.follow(epoch, known)

    def _update_state_dict(self) -> None:
        """Called for every batch."""
        if self.use_stateful_dataloader:
            cast("Any", super())._update_state_dict()  # noqa: SLF001
            self.dl_state_dict["iteration"] = self.iteration + self.end_of_dataloader

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Accelerate says the number of the epoch to the sampler, and counts from 0 where nobody tells it."""
        state = dict(state_dict)
        iteration: int | None = state.pop("iteration", None)
        cast("Any", super()).load_state_dict(state)
        # A state of a loader that was not prepared counts epochs as Accelerate does; an empty one takes back another.
        self.iteration = self.base_dataloader.epochs if iteration is None else iteration
        self._note_place()


def _remade(kind: type[Any]) -> Any:
    return object.__new__(kind)


class _Shard(_Prepared, _theirs.DataLoaderShard):
    """Batches of each process's own."""


class _Dispatcher(_Prepared, _theirs.DataLoaderDispatcher):
    """Batches that the first process makes, and deals out."""


def prepare_data_loader(accelerator: Any, loader: Any, *args: Any, **kwargs: Any) -> Any:
    """What ``accelerator.prepare_data_loader`` does, but a ``DALILoader`` stays one.

    Args:
        accelerator: Any ``accelerate.Accelerator``; in ``transformers``, that of the ``Trainer``.
        loader: The loader.
        *args: As for ``accelerator.prepare_data_loader``.
        **kwargs: As for ``accelerator.prepare_data_loader``.

    Returns:
        A loader of this process's share, of a subclass of Accelerate's, with batches on the accelerator's device.

    Raises:
        ValueError: The loader shares by itself; or its place is to be saved, and one process makes all batches; or what
            Accelerate raises.
    """
    if type(loader) in (_Shard, _Dispatcher) or not isinstance(loader, DALILoader):
        return _accelerate.Accelerator.prepare_data_loader(accelerator, loader, *args, **kwargs)
    given = cast("DALILoader[Any]", loader)
    if given.distributed:
        raise ValueError("Accelerate gives each process its share: leave out distributed='auto'")
    # A DALILoader would refuse to be made a DataLoader of.
    plain = DataLoader[Any](given.dataset)
    vars(plain).update({name: value for name, value in vars(given).items() if name in vars(plain)})
    # Accelerate would have torchdata's loader, and ask for its state at once, for which it draws an epoch's order.
    stateful, config = accelerator.use_stateful_dataloader, accelerator.dataloader_config
    accelerator.dataloader_config = dataclasses.replace(config, use_stateful_dataloader=False)
    try:
        made = _accelerate.Accelerator.prepare_data_loader(accelerator, plain, *args, **kwargs)
    finally:
        accelerator.dataloader_config = config
    made.use_stateful_dataloader = stateful
    ours = _with_dali(made, given, accelerator.device)
    accelerator._dataloaders[-1] = ours  # noqa: SLF001 - which save_state and its like go through
    return ours


def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """What ``accelerate.skip_first_batches`` does: a loader without the first batches, of which no sample is loaded."""
    made = _theirs.skip_first_batches(loader, num_batches)
    if type(loader) not in (_Shard, _Dispatcher):
        return made
    device = loader.state.device if type(loader) is _Dispatcher else loader.device
    rest = _with_dali(made, loader.template, device)
    if isinstance(rest.base_dataloader, _Base):
        rest.base_dataloader.count_with(loader.base_dataloader)
    return rest


def _with_dali(made: Any, loader: DALILoader[Any], device: Any) -> Any:
    """A loader that Accelerate made, with the batches of a ``DALILoader`` that has its sampler.

    Args:
        made: The loader.
        loader: Whose arguments are taken.
        device: Where batches are made, if they are to be where the accelerator is, and the loader leaves it open.
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
        # It is asked for no batch, and should start nothing.
        return _Dispatcher(made, loader, DataLoader[Any](base.dataset, **batches))
    options = {name: getattr(loader, name) for name in _KEPT}
    if options["device"] == "auto" and device is not None and (dispatches or made.device is not None):
        options["device"] = device
    if dispatches:
        options["generator"] = None
    kind = _Dispatcher if dispatches else _Shard
    return kind(made, loader, _Base(base.dataset, **batches, **options))


if TYPE_CHECKING:
    from accelerate import Accelerator as _Theirs
else:
    _Theirs = _accelerate.Accelerator


class Accelerator(_Theirs):
    """``accelerate.Accelerator``, whose ``prepare`` keeps a ``DALILoader`` what it is."""

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """As in ``accelerate.Accelerator``; see :func:`prepare_data_loader`."""
        return prepare_data_loader(self, data_loader, *args, **kwargs)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """As in ``accelerate.Accelerator``; see :func:`skip_first_batches`."""
        return skip_first_batches(dataloader, num_batches)

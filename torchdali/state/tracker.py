"""What a loader knows of its place: where the epoch is that was begun last, and a state that was loaded."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterDataPipe

from torchdali.errors import UnsupportedDatasetError
from torchdali.runtime.lifecycle import disable_compile
from torchdali.state.checkpoint import build_state, check_state, check_version, describe, find_stateful, read_epochs
from torchdali.state.generators import Generators, find_samplers
from torchdali.state.progress import Checkpoint, EpochProgress
from torchdali.state.sharding import Sharding

__all__ = ["ProgressTracker", "Stateful"]


class ProgressTracker:
    """Where a loader is, and where it is to go on.

    Args:
        saved: A state that was loaded.

    Attributes:
        place: Where the epoch is that was begun last.
    """

    def __init__(self, saved: Checkpoint | None = None) -> None:
        self._saved = saved
        self._before: tuple[int, dict[str, dict[str, Any]]] = (0, {})
        self._used: set[str] = set()
        self._asked = False
        self.progress: EpochProgress | None = None

    def copy(self) -> ProgressTracker:
        """For a loader of its own."""
        bookmark = ProgressTracker(self._saved)
        bookmark._before = self._before
        return bookmark

    def state(self, loader: Any, epochs: int) -> dict[str, Any]:
        """The loader's state; ``epochs`` is the number of the next one."""
        _refuse(loader)
        if self._saved:
            given = copy.deepcopy(self._saved.state)
            if not self._saved.in_progress:  # set_epoch may have been called since
                given |= {"epoch": epochs, "loader": describe(loader)}
                for path, about in read_epochs(loader, upcoming=True).items():
                    given["samplers"].setdefault(path, {}).update(about)
            return given
        if self.progress:
            if self.progress.disturbed:
                raise RuntimeError(
                    "where the sampler is cannot be saved: it draws from a generator from which other code draws "
                    "between batches, too. Give it a generator of its own, or state_dict() and load_state_dict()"
                )
            self._note(self.progress)
        # Of a sampler that was never asked nobody knows what it will draw from.
        used = self._used if self._asked else self._used | Generators(loader).foreign
        return build_state(loader, self.progress, epochs, used)

    def _note(self, place: EpochProgress) -> None:
        """Keeps what was seen in an epoch."""
        self._used |= place.drawn_from
        self._asked = self._asked or place.num_requested > 0

    def load(self, loader: Any, state: dict[str, Any], epochs: int) -> int:
        """Remembers a state, from which the next epoch that is begun goes on.

        Args:
            loader: The loader.
            state: The state; an empty one lets the one before be forgotten.
            epochs: The number of the next epoch.

        Returns:
            The number that it has now.
        """
        _refuse(loader)
        now = read_epochs(loader, upcoming=True)
        before = self._before if self._saved else (epochs, now)
        if state == {}:
            saved, (epochs, of_samplers) = None, before
            _set_epochs(loader, of_samplers)
        else:
            check_version(state)
            _set_epochs(loader, state.get("samplers", {}))  # on which a sampler's length may depend
            try:
                saved = check_state(state, loader)
            except ValueError:
                _set_epochs(loader, now)
                raise
            epochs = saved.state["epoch"]
        self._saved, self._before = saved, before
        return epochs

    @property
    def loaded(self) -> bool:
        """Whether a state waits for the next epoch."""
        return self._saved is not None

    def begin(self, loader: Any, epochs: int) -> int:
        """To be called before an epoch's iterator is made; returns the epoch's number, which should be ``epochs``."""
        if self.progress:
            self._note(self.progress)
        generators, saved = Generators(loader), self._saved
        if saved is None:
            self.progress = EpochProgress(generators, generators.states(), epochs, read_epochs(loader))
            return epochs
        if saved.in_progress:
            epochs = _checked_epoch(saved, epochs, read_epochs(loader))
        generators.make(saved.rng_at_start)
        self._used |= saved.rng_now.keys() - generators.always
        generators.set(saved.rng_at_start)
        start = saved.state["start"]
        self.progress = EpochProgress(generators, generators.states(), epochs, read_epochs(loader), start=start)
        if saved.in_progress or saved.base_seed is not None:
            self.progress.checkpoint = saved
        else:
            for path, sampler in find_stateful(loader).items():
                if "state" in (kept := saved.sampler_state(path)):
                    sampler.load_state_dict(copy.deepcopy(kept["state"]))
        return self.progress.epoch

    def failed(self, loader: Any, epochs: int) -> int:
        """To be called where it could not be made; returns the number of the next epoch, which should be ``epochs``."""
        if self._saved is None or self.progress is None:
            return epochs
        # Between epochs set_epoch may have been called since the state was loaded.
        _set_epochs(loader, self._saved.state["samplers"] if self._saved.in_progress else self.progress.samplers)
        return self.progress.epoch

    def begun(self) -> bool:
        """To be called when the epoch's iterator was made; returns whether all is left of it is to come to its end."""
        over = self._saved is not None and self._saved.state["over"]
        self._saved = None
        return over

    def here(self, loader: Any) -> EpochProgress:
        """Where the epoch is whose iterator is being made."""
        if self.progress is None:
            self.begin(loader, 0)
        assert self.progress is not None
        return self.progress


class Stateful:
    """The methods of a loader that save its place and find it again, as those of torchdata's StatefulDataLoader."""

    _bookmark: ProgressTracker
    _keys: Any
    _sharding: Sharding

    @disable_compile
    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: in the epoch that was begun last, after the batches that were handed out.

        It may be asked for at any time, by the thread that iterates: before the first epoch, in the midst of one, also
        when it was left early, and after the last batch. Batches on their way do not count. An epoch is over when its
        iterator has raised ``StopIteration``; then the state is that before the next one.

        Returns:
            Numbers, strings, lists and dictionaries, some 15 kB, as JSON and ``torch.load(weights_only=True)`` take
            them; of samplers that have a ``state_dict`` what that returns.

        Raises:
            ValueError: Worker processes give batches in any order (``in_order=False``).
            RuntimeError: The sampler draws again and again from a generator that other code draws from in between.
        """
        self._sharding.apply(self)
        return self._bookmark.state(self, self._keys.epochs)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Lets the next ``iter()`` go on where a state was taken; the one after it begins the next epoch.

        Samplers with ``set_epoch`` are told the state's epoch at once. All else happens in ``iter()``: generators that
        the order depends on, torch's global one among them where the loader or its sampler draws from it, get the
        states that they had when ``state_dict()`` was called, and the sampler is asked for what was handed out, without
        loading a sample.

        Args:
            state_dict: What ``state_dict()`` returned, of a loader with equal arguments; number of workers, device,
                transforms, cache and ``prefetch_factor`` may differ. Or what :func:`torchdali.state.merge` made of the
                states of all ranks; then the number of ranks and the batch size may differ as well. Empty, it takes
                back what was loaded before.

        Raises:
            ValueError: It is of another dataset length, sampler, batch size, seed or version; the text says what
                differs.
            TypeError: It is no dictionary.
        """
        self._sharding.apply(self)
        self._keys.epochs = self._bookmark.load(self, state_dict, self._keys.epochs)


def _set_epochs(loader: Any, of_samplers: Mapping[str, Mapping[str, Any]]) -> None:
    """Tells samplers their epochs."""
    for path, sampler in find_samplers(loader).items():
        if "epoch" in of_samplers.get(path, {}) and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(of_samplers[path]["epoch"])


def _refuse(loader: Any) -> None:
    if isinstance(loader.dataset, IterDataPipe):
        raise UnsupportedDatasetError("the place of a datapipe is not saved")
    if loader.num_workers and not loader.in_order and loader._source is None:  # noqa: SLF001
        raise ValueError("with in_order=False batches come in an order that cannot be found again")


def _checked_epoch(saved: Checkpoint, epochs: int, of_samplers: dict[str, dict[str, Any]]) -> int:
    """The number of the epoch under way, which nobody changed since its state was loaded."""
    of_state = saved.state["epoch"]
    told = [("", of_state, epochs)] if not of_samplers else []
    for path, about in of_samplers.items():
        told.append((f"{path}.", saved.sampler_state(path).get("epoch", about["epoch"]), about["epoch"]))
    for whose, was, now in told:
        if was != now:
            raise ValueError(
                f"the state that was loaded is of epoch {was}, and {whose}set_epoch({now}) was called since"
            )
    return of_state

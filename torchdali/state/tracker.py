"""How far a loader is: in the epoch that began last, or at a state that was loaded."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterDataPipe

from torchdali.errors import UnsupportedDatasetError
from torchdali.state.checkpoint import build_state, check_state, check_version, describe, find_stateful, read_epochs
from torchdali.state.epoch_keys import EpochKeys
from torchdali.state.generators import Generators, find_samplers
from torchdali.state.progress import Checkpoint, EpochProgress
from torchdali.state.streaming import load_stream

__all__ = ["ProgressTracker"]

_SamplerEpochs = Mapping[str, Mapping[str, Any]]
"""The epochs of samplers, by their paths in the loader."""


class ProgressTracker:
    """The progress of a loader, and the state from which its next epoch begins.

    Args:
        seed: The loader's argument.

    Attributes:
        keys: The number of the next epoch, and the random keys of epochs.
        progress: Where the epoch is that began last; None before the first.
        base_seed: The base seed of the latest epoch of a native dataset. Persistent workers would keep it.
    """

    def __init__(self, seed: int | None) -> None:
        self.keys = EpochKeys(seed)
        self.progress: EpochProgress | None = None
        self.base_seed: int | None = None
        self._checkpoint: Checkpoint | None = None
        self._before_load: tuple[int, _SamplerEpochs] = (0, {})
        self._used: set[str] = set()
        self._has_asked_sampler = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy: it counts by itself, and has the loaded state, but no epoch."""
        fresh = {"keys": copy.copy(self.keys), "progress": None, "_used": set[str](), "_has_asked_sampler": False}
        return {**vars(self), **fresh}

    @property
    def is_loaded(self) -> bool:
        """Whether the next epoch begins from a state that was loaded."""
        return self._checkpoint is not None

    @property
    def next_epoch(self) -> int:
        """The number of the epoch that begins next."""
        return self.keys.epochs

    @next_epoch.setter
    def next_epoch(self, epoch: int) -> None:
        self.keys.epochs = epoch

    def state_dict(self, loader: Any, is_native: bool) -> dict[str, Any]:
        """Return the loader's state."""
        _check_is_resumable(loader, is_native)
        for name, kind in Generators(loader).stateless.items():
            raise RuntimeError(f"{name} must be a generator whose state can be saved, got {kind}; give it another one")
        if self._checkpoint:
            state = copy.deepcopy(self._checkpoint.state)
            if not self._checkpoint.in_progress:  # set_epoch may have been called since
                state |= {"epoch": self.next_epoch, "loader": describe(loader)}
                for path, epochs in read_epochs(loader, upcoming=True).items():
                    state["samplers"].setdefault(path, {}).update(epochs)
            return state
        if self.progress:
            if self.progress.is_disturbed:
                raise RuntimeError(
                    "the sampler must not share a generator with other code, but other code drew from it between "
                    "batches; give the sampler a generator of its own, or state_dict() and load_state_dict()"
                )
            if not self.progress.finished and (name := self.progress.generators.find_unrepeatable(loader)):
                raise RuntimeError(
                    f"the sampler must make {name} with the same state again to resume this epoch, but two that it "
                    "made differ. Make the generator before the epoch, give it a seed, or call state_dict() after "
                    "this epoch"
                )
            if failure := self.progress.find_failure():
                raise RuntimeError(
                    f"state_dict() of the dataset, its iterator or the sampler raised {failure}; mend it, or leave it "
                    "out to resume by skipping samples"
                )
            self._note_used(self.progress)
        # A sampler that has not run yet may still draw from any global generator, so save them all.
        used = self._used if self._has_asked_sampler else self._used | Generators(loader).non_torch
        return build_state(loader, self.progress, self.next_epoch, used)

    def _note_used(self, progress: EpochProgress) -> None:
        self._used |= progress.drawn_from
        self._has_asked_sampler = self._has_asked_sampler or progress.num_requested > 0

    def load_state_dict(self, loader: Any, state: dict[str, Any], is_native: bool) -> None:
        """Begin the next epoch from a state. An empty one undoes the load before."""
        _check_is_resumable(loader, is_native)
        now = read_epochs(loader, upcoming=True)
        before = self._before_load if self._checkpoint else (self.next_epoch, now)
        if state == {}:
            checkpoint, (epoch, sampler_epochs) = None, before
            _set_epochs(loader, sampler_epochs)
        else:
            check_version(state)
            _set_epochs(loader, state.get("samplers", {}))  # on which a sampler's length may depend
            try:
                checkpoint = check_state(state, loader)
            except ValueError:
                _set_epochs(loader, now)
                raise
            epoch = checkpoint.state["epoch"]
        self._checkpoint, self._before_load, self.next_epoch = checkpoint, before, epoch

    def begin(self, loader: Any) -> None:
        """Set generators, samplers and the epoch's number, before the iterator of an epoch is made."""
        if self.progress:
            self._note_used(self.progress)
        generators, checkpoint = Generators(loader), self._checkpoint
        if checkpoint is None:
            self.progress = EpochProgress(generators, generators.states(), self.next_epoch, read_epochs(loader))
            return
        if "stream" in checkpoint.state:
            load_stream(loader, checkpoint.state["stream"])
        if checkpoint.in_progress:
            self.next_epoch = _check_epoch(checkpoint, self.next_epoch, read_epochs(loader))
        generators.make(checkpoint.rng_at_start)
        self._used |= checkpoint.rng_now.keys() - generators.required
        generators.set(checkpoint.rng_at_start)
        start = checkpoint.state["start"]
        self.progress = EpochProgress(
            generators, generators.states(), self.next_epoch, read_epochs(loader), start=start
        )
        if checkpoint.in_progress or checkpoint.base_seed is not None:
            self.progress.checkpoint = checkpoint
        else:
            for path, sampler in find_stateful(loader).items():
                if "state" in (saved := checkpoint.sampler_state(path)):
                    sampler.load_state_dict(copy.deepcopy(saved["state"]))

    def cancel_begin(self, loader: Any) -> None:
        """Restore the epoch's numbers after ``begin``, because the iterator could not be made."""
        if self._checkpoint is None or self.progress is None:
            return
        # Between epochs set_epoch may have been called since the state was loaded.
        _set_epochs(
            loader, self._checkpoint.state["samplers"] if self._checkpoint.in_progress else self.progress.samplers
        )
        self.next_epoch = self.progress.epoch

    def finish_begin(self) -> bool:
        """Forget the loaded state, because the epoch's iterator has been made.

        Returns:
            Whether that state was taken after the epoch's last batch, so that only the iterator's end is left.
        """
        finished = self._checkpoint is not None and self._checkpoint.state["over"]
        self._checkpoint = None
        return finished

    def require_progress(self, loader: Any) -> EpochProgress:
        """Return the progress of the epoch whose iterator is being made, even if it is made without ``iter()``."""
        if self.progress is None:
            self.begin(loader)
        assert self.progress is not None
        return self.progress


def _set_epochs(loader: Any, epochs: _SamplerEpochs) -> None:
    """Call ``set_epoch`` of the loader's samplers."""
    for path, sampler in find_samplers(loader).items():
        if "epoch" in epochs.get(path, {}) and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epochs[path]["epoch"])


def _check_is_resumable(loader: Any, is_native: bool) -> None:
    if isinstance(loader.dataset, IterDataPipe):
        raise UnsupportedDatasetError(
            "dataset must not be a datapipe, because torch cannot resume one; use an IterableDataset"
        )
    if loader.num_workers and not loader.in_order and not is_native:
        raise ValueError("in_order must be True to save or load a state, got False; leave out in_order=False")


def _check_epoch(checkpoint: Checkpoint, epoch: int, sampler_epochs: _SamplerEpochs) -> int:
    """Return the number of the epoch in progress. Raise ValueError if ``set_epoch`` has changed it since the load."""
    in_state = checkpoint.state["epoch"]
    compared = [("", in_state, epoch)] if not sampler_epochs else []
    for path, own in sampler_epochs.items():
        compared.append((f"{path}.", checkpoint.sampler_state(path).get("epoch", own["epoch"]), own["epoch"]))
    for owner, was, now in compared:
        if was != now:
            raise ValueError(
                f"the epoch must be {was} as in the loaded state, got {owner}set_epoch({now}); call set_epoch before "
                "load_state_dict(), or not for this epoch"
            )
    return in_state

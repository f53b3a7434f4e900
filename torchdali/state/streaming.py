"""Streams whose ``state_dict`` takes arguments: the ``StreamingDataset`` of Mosaic and of LitData.

Their own loaders call it in the main process, and load the state there before the workers start.
"""

from __future__ import annotations

import copy
import inspect
import os
from typing import Any

from torchdali.state.progress import EpochProgress

__all__ = ["load_stream", "save_stream"]

_MOSAIC = ("num_samples", "from_beginning")
_LITDATA = ("num_samples_yielded", "num_workers", "batch_size")


def save_stream(loader: Any, progress: EpochProgress) -> dict[str, Any] | None:
    """Return the state of such a dataset, as its own loader would take it; None for other datasets.

    LitData's dataset counts epochs in the process that iterates. With workers that is a copy, so each epoch begins from
    the main process's count, and the loader skips samples when it resumes.
    """
    dataset, samples = loader.dataset, sum(stream.samples for stream in progress.streams.values())
    samples = 0 if progress.finished else samples
    names = _parameters(dataset)
    if names == _MOSAIC and hasattr(dataset, "replication"):
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        state: dict[str, Any] = dataset.state_dict(samples * ranks // (dataset.replication or 1), True)
        return {**state, "epoch": state["epoch"] + progress.finished}
    if names == _LITDATA and hasattr(dataset, "batch_size") and not loader.num_workers:
        return copy.deepcopy(dataset.state_dict(samples, 1, dataset.batch_size))
    return None


def load_stream(loader: Any, state: dict[str, Any]) -> None:
    """Load a state that :func:`save_stream` returned."""
    loader.dataset.load_state_dict(copy.deepcopy(state))


def _parameters(dataset: Any) -> tuple[str, ...]:
    """Return the names of the arguments of ``dataset.state_dict``; nothing if it has no such method."""
    save = getattr(dataset, "state_dict", None)
    try:
        return tuple(inspect.signature(save).parameters) if callable(save) else ()
    except ValueError:  # a function written in C
        return ()

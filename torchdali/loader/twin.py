"""The next batch of a loader, made by a copy of it, so that the loader and its epoch stay as they are."""

from __future__ import annotations

import copy
import random
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from torchdali.loader.options import LoaderOptions
from torchdali.loader.session import Session
from torchdali.pipeline import graph
from torchdali.pipeline.clock import Clock
from torchdali.pipeline.readers import open_reader
from torchdali.samples.on_error import ErrorPolicy
from torchdali.state.sharding import Sharding

__all__ = ["list_datasets", "read_next_batch"]


def read_next_batch(loader: DataLoader[Any], options: LoaderOptions, shards: Sharding, clock: Clock | None) -> Any:
    """Return the batch that the loader would yield next: in the epoch in progress, or else the first of the next epoch.

    The loader, its samplers, its random generators and the global ones stay as they are.

    Args:
        loader: The ``DALILoader``.
        options: Its options.
        shards: What gives it the samples of its rank.
        clock: The clock of the current or latest epoch. It does not count this time.

    Raises:
        ValueError: The loader has no batch, or its stream is read in this process.
        TypeError: A sampler cannot be copied.
    """
    if isinstance(loader.dataset, IterableDataset) and not loader.num_workers:
        raise ValueError(
            "show_batch() needs num_workers above 0 for an IterableDataset, got 0: to read the stream here would take "
            "samples from the epoch"
        )
    begin = perf_counter()
    try:
        with _keep_generators(graph.resolve(options.device)), _make_twin(loader, options, shards) as twin:
            for _ in range(2):  # an epoch whose last batch was yielded has none left
                for batch in twin:
                    return batch
            raise ValueError("show_batch() needs a batch, and this loader has none")
    finally:
        if clock:
            clock.skip(perf_counter() - begin)


def list_datasets(dataset: Any) -> list[Any]:
    """Return a dataset, the one that it is a ``Subset`` of, and so on."""
    datasets = [dataset]
    while (inner := getattr(datasets[-1], "dataset", None)) is not None and inner is not datasets[-1]:
        datasets.append(inner)
    return datasets


def _make_twin(loader: Any, options: LoaderOptions, shards: Sharding) -> Any:
    """Return a copy of a loader that is where the loader is, and shares nothing with it that an epoch changes."""
    state = loader.state_dict()
    twin = copy.copy(loader)
    shared = [torch.default_generator, *list_datasets(loader.dataset)]
    try:
        orders = copy.deepcopy(
            {name: getattr(loader, name) for name in ("sampler", "batch_sampler", "generator")},
            {id(value): value for value in shared},
        )
    except Exception as error:  # a sampler may hold anything
        raise TypeError(f"show_batch() needs samplers that copy.deepcopy() can copy, got {error!r}") from error
    # DataLoader's __setattr__ raises for a new sampler, so write past it. Without a cache, and with a prefetch depth of
    # 1, the twin needs little memory beside the loader.
    vars(twin).update(
        orders,
        cache=None,
        cache_bytes=None,
        cache_dir=None,
        _options=replace(options, cache=None, cache_bytes=None, cache_dir=None, prefetch_depth=1),
        _error_policy=ErrorPolicy(options.on_error, options.max_errors),
        _shards=copy.copy(shards),
    )
    session = cast("Session", vars(twin)["_session"])
    if (source := session.source) is not None:  # a reader remembers bad samples, and tries some again in each epoch
        session.reader = open_reader(source)
    twin.load_state_dict(state)
    return twin


@contextmanager
def _keep_generators(device: torch.device) -> Generator[None]:
    """Restore the global generators of torch, numpy and Python at the end."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global one is what others draw from
    with torch.random.fork_rng([device.index] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002

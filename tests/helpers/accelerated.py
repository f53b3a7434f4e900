"""One rank of several with Accelerate. It saves the batches of our loaders, and of torch's beside them.

Run as ``python accelerated.py RANK WORLD PORT PICTURES RESULTS``; tests/ecosystem/test_accelerate.py starts it.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from helpers.ranked import TRAIN, Numbered, numbered
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Subset

from torchdali import DALILoader

COUNT, BATCH = 23, 4
EPOCHS = 2
CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "not even": {"even_batches": False},
    "split": {"split_batches": True},
    "seedable": {"use_seedable_sampler": True, "data_seed": 5},
    "stateful": {"use_stateful_dataloader": True, "dispatch_batches": False},  # which streams are by default
    "dispatch": {"dispatch_batches": True},
    "dispatch, split": {"dispatch_batches": True, "split_batches": True},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "in order": {},
    "shuffled": {"shuffle": True},
    "drop_last": {"shuffle": True, "drop_last": True},
    "workers": {"shuffle": True, "num_workers": 2},
}
SHARES = [
    *(("read", "default", "in order"), ("asked", "default", "workers"), ("stream", "default", "in order")),
    *(("asked", "not even", "drop_last"), ("stream", "not even", "in order")),
    *(("read", "split", "shuffled"), ("asked", "seedable", "shuffled"), ("read", "seedable", "workers")),
    *(("read", "stateful", "drop_last"), ("stream", "stateful", "in order")),
    *(("read", "dispatch", "workers"), ("stream", "dispatch", "in order"), ("asked", "dispatch, split", "drop_last")),
]
"""Kinds of dataset, configurations and options of loaders."""
SKIPPED = {"read": "seedable", "asked": "dispatch"}
"""The configuration with which the first batches of each kind are skipped."""


class Labels(Dataset[Any]):
    """The labels without pictures, for DataLoader."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1), index


class Batched(Labels):
    """A dataset of whole batches."""

    def __getitem__(self, indices: Any) -> Any:
        return torch.zeros(len(indices)), torch.tensor(indices)


class Stream(IterableDataset[Any]):
    """A stream of pictures, or of labels alone."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[i] for i in range(COUNT))


def datasets(pictures: Path) -> dict[str, Any]:
    folder = numbered(pictures)
    asked = Numbered(folder, COUNT)
    return {"read": Subset(folder, range(COUNT)), "asked": asked, "stream": Stream(asked)}


def made(pictures: Path, **options: Any) -> DALILoader[Any]:
    """Return a loader of native pictures."""
    return DALILoader(datasets(pictures)["read"], BATCH, transform=TRAIN, **options)


def forget() -> None:
    """Reset the state that Accelerate keeps in classes."""
    import accelerate

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def accelerator(ours: bool, **config: Any) -> Any:
    import accelerate

    import torchdali.accelerate

    kind = torchdali.accelerate.Accelerator if ours else accelerate.Accelerator
    return kind(cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(**config))


def looked_at(loader: Any, of: Any) -> list[Any]:
    """Return each epoch's length, and its batches: labels, whether it is the last, labels gathered for a metric."""
    found: list[Any] = []
    for _ in range(EPOCHS):
        batches = []
        for _, labels in loader:
            ends = of.gradient_state.end_of_dataloader
            gathered = of.gather_for_metrics(labels).tolist() if of.even_batches else None
            batches.append((labels.tolist(), ends, gathered))
        found.append((len(loader) if not isinstance(loader.dataset, IterableDataset) else None, batches))
    return [found, getattr(loader, "total_batch_size", None)]


def both(dataset: Any, config: dict[str, Any], options: dict[str, Any], **own: Any) -> tuple[list[Any], list[Any]]:
    """Return what our loader gives, and what torch's gives."""
    found: list[list[Any]] = []
    stream = isinstance(dataset, IterableDataset)
    for ours in (True, False):
        torch.manual_seed(3)
        of = accelerator(ours, **config)
        options = {"batch_size": BATCH, **options}
        if ours:
            loader = DALILoader(dataset, transform=TRAIN, seed=1, **options, **own)
        else:
            loader = DataLoader(Stream(Labels()) if stream else Labels(), **options)
        found.append(looked_at(of.prepare(loader), of))
    ours, theirs = found
    return ours, theirs


def looks(pictures: Path) -> list[Any]:
    """Return the loader's device and type, and its batches."""
    of = accelerator(True)
    loader = of.prepare(DALILoader(datasets(pictures)["read"], BATCH, transform=TRAIN, seed=1))
    return [[loader.base_dataloader.device, type(loader).__name__], *([*batch] for batch in loader)]


def resumed(dataset: Any, folder: Path, **options: Any) -> tuple[list[Any], list[Any]]:
    """Return the rest of an epoch and the next one, from a saved state and without interruption."""

    def prepared() -> tuple[Any, Any]:
        of = accelerator(True, use_stateful_dataloader=True)
        return of, of.prepare(DALILoader(dataset, BATCH, shuffle=True, transform=TRAIN, seed=1, **options))

    torch.manual_seed(3)
    of, loader = prepared()
    true: list[Any] = []
    for i, batch in enumerate(loader):
        if i == 0:
            of.save_state(str(folder))
        else:
            true.append([*batch])
    true += [[*batch] for batch in loader]
    torch.manual_seed(4)
    of, again = prepared()
    of.load_state(str(folder))
    return [[*batch] for batch in [*again, *again]], true


def skipped(dataset: Any, config: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return an epoch without its first two batches: ours, and DataLoader's."""
    found = []
    for ours in (True, False):
        torch.manual_seed(3)
        of = accelerator(ours, **config)
        options: dict[str, Any] = {"batch_size": BATCH, "shuffle": True}
        loader = DALILoader(dataset, transform=TRAIN, **options) if ours else DataLoader(Labels(), **options)
        rest = of.skip_first_batches(of.prepare(loader), 2)
        found.append([len(rest), [labels.tolist() for _, labels in rest]])
    ours, theirs = found
    return ours, theirs


def batched() -> tuple[list[Any], list[Any]]:
    """Return an epoch, and one without its first two batches, of a dataset of whole batches."""
    found = []
    for ours in (True, False):
        of = accelerator(ours)
        sampler = BatchSampler(range(COUNT), BATCH, drop_last=False)
        loader = of.prepare((DALILoader if ours else DataLoader)(Batched(), batch_size=None, sampler=sampler))
        rest = of.skip_first_batches(loader, 2)
        found.append([[labels.tolist() for _, labels in one] for one in (loader, rest)])
    ours, theirs = found
    return ours, theirs


def run_all(pictures: Path, results: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    of_kind = datasets(pictures)
    for kind, config, options in SHARES:
        found[f"{kind}, {config}, {options}"] = both(of_kind[kind], CONFIGS[config], OPTIONS[options])
    found["looks"] = looks(pictures)
    found["batched"] = batched()
    for name, options in {"read": {}, "asked": {"num_workers": 2}}.items():
        found[f"{name}, resumed"] = resumed(of_kind[name], results / name, **options)
        found[f"{name}, skipped"] = skipped(of_kind[name], CONFIGS[SKIPPED[name]])
    return found


def main() -> None:
    rank, world, port, pictures, results = *sys.argv[1:4], *map(Path, sys.argv[4:])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {"LOCAL_RANK": rank, "RANK": rank, "WORLD_SIZE": world}
    # Accelerate would import it, which takes seconds and starts a thread of Arrow's beside the forks here.
    sys.modules["datasets"] = None  # type: ignore[assignment]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.save(run_all(pictures, results), results / rank)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

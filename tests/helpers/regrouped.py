"""One of two processes, of which some are ranks in turn: what N ranks began, M ranks end.

Run as ``python regrouped.py FOLDER NUMBER PICTURES``; tests/contract/test_state_elastic.py starts it.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.ranked import TRAIN, numbered
from torch.utils.data import Subset
from torchvision.datasets import ImageFolder

from torchdali import DALILoader
from torchdali.state import merge

MOST, COUNT, BATCH = 2, 23, 2
BATCHES = 2
"""That each rank delivers before the state is taken, in the epoch with the number 1."""

Seen = list[list[tuple[int, str]]]


def loader_of(folder: ImageFolder, **options: Any) -> DALILoader[Any]:
    options = {"batch_size": BATCH, "shuffle": True, "seed": 7, "device": "cpu", "distributed": "auto", **options}
    return DALILoader(Subset(folder, range(COUNT)), transform=TRAIN, **options)


def seen(batches: Iterable[Any]) -> Seen:
    """Of each batch the labels, and what their pictures look like."""
    looks = lambda image: hashlib.sha256(image.numpy().tobytes()).hexdigest()  # noqa: E731
    return [[(label, looks(image)) for image, label in zip(*batch, strict=True)] for batch in numbers(batches)]


def numbers(batches: Iterable[Any]) -> list[Any]:
    return [(images, labels.tolist()) for images, labels in batches]


@contextmanager
def group(folder: Path, name: str, rank: int, world: int) -> Any:
    dist.init_process_group("gloo", f"file://{folder / name}", timedelta(seconds=100), world, rank)
    yield
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    folder, number, pictures = Path(sys.argv[1]), int(sys.argv[2]), numbered(sys.argv[3])
    found: dict[Any, list[Seen]] = {}
    for ranks in range(1, MOST + 1):
        if number >= ranks:
            continue
        with group(folder, f"from {ranks}", number, ranks), loader_of(pictures) as loader:
            found[ranks] = [seen(loader)]
            iterator = iter(loader)
            found[ranks].append(seen(islice(iterator, BATCHES)))
            states: list[Any] = [None] * ranks
            dist.all_gather_object(states, loader.state_dict())
            if not number:
                torch.save(merge(states), folder / f"{ranks}.pt")
            found[ranks].append(seen(iterator))
            found[ranks].append(seen(loader))
    for before, ranks in product(range(1, MOST + 1), repeat=2):
        if number >= ranks:
            continue
        with group(folder, f"from {before} to {ranks}", number, ranks), loader_of(pictures) as loader:
            loader.load_state_dict(torch.load(folder / f"{before}.pt", weights_only=True))
            found[before, ranks] = [seen(loader), seen(loader)]
    torch.save(found, folder / f"seen by {number}")


if __name__ == "__main__":
    main()

"""Threads may share an iterator: each batch comes to one of them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from conftest import assert_pairs
from helpers.crops import EXACT, Crops, Truth
from torchvision.datasets import ImageFolder

from torchdali import DALILoader

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

COUNT = 48


def shared(iterator: Any, number: int = 4) -> list[Any]:
    """All batches, of one sample each, in the order of their labels; fails where a thread raised anything."""
    batches: list[Any] = []

    def take() -> None:
        try:
            batches.extend(iterator)
        except RuntimeError as error:
            batches.append(error)

    threads = [threading.Thread(target=take) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(batches, key=lambda batch: int(batch[1]))


@pytest.mark.parametrize("transform", [EXACT, None], ids=["images", "nothing"])
@pytest.mark.parametrize("workers", [0, 2])
def test_threads_share_the_batches_of_a_dataset_that_is_asked(transform: Any, workers: int, device: str) -> None:
    loader = DALILoader(Crops(count=COUNT), transform=transform, num_workers=workers, device=device)
    for _ in range(3):
        assert_pairs(shared(iter(loader)), Truth(transform), [[label] for label in range(COUNT)])


def test_threads_share_the_batches_of_a_folder(dataset: ImageFolder, device: str) -> None:
    dataset.samples *= 2
    loader = DALILoader(dataset, device=device)
    for _ in range(3):
        labels = [[label] for label in sorted(label for _, label in dataset.samples)]
        assert_pairs(shared(iter(loader)), dataset, labels)

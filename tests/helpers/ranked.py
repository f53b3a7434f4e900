"""One rank of several. It saves the batches of every loader of ``CASES``, and DataLoader's beside them.

Run as ``python ranked.py STORE RANK WORLD PICTURES RESULTS``; tests/ecosystem/test_ranks.py starts it.
"""

from __future__ import annotations

import hashlib
import io
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader

EPOCHS = 3
TRAIN = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(16), v2.RandomHorizontalFlip()])
AUGMENTED = ("read", "asked", "asked, persistent")


class Case(NamedTuple):
    """A loader.

    Attributes:
        count: Samples of the dataset.
        asked: Whether it is asked for samples.
        options: Of both loaders.
        seed: Of ours, and of DataLoader's sampler.
        numbers: The number that is set before each epoch, or None.
        counted: The number that each epoch should have.
    """

    count: int
    asked: bool
    options: dict[str, Any]
    seed: int | None = None
    numbers: tuple[int | None, ...] = (None, None, None)
    counted: tuple[int, ...] = (0, 1, 2)


PERSISTENT = {"num_workers": 2, "persistent_workers": True}
CASES: dict[str, Case] = {
    "even": Case(24, False, {"batch_size": 3, "shuffle": True}),
    "uneven, drop_last": Case(23, False, {"batch_size": 3, "shuffle": True, "drop_last": True}),
    "in order, uneven": Case(23, False, {"batch_size": 4}),
    "fewer than ranks": Case(1, False, {"batch_size": 2, "shuffle": True}),
    "no batches": Case(23, False, {"batch_size": None, "shuffle": True}),
    "set_epoch": Case(23, False, {"batch_size": 3, "shuffle": True}, None, (4, 2, 2), (4, 2, 2)),
    "set_epoch once": Case(23, False, {"batch_size": 3, "shuffle": True}, 7, (None, 9, None), (0, 9, 10)),
    "read": Case(23, False, {"batch_size": 5, "shuffle": True}, seed=7),
    "asked": Case(23, True, {"batch_size": 3, "shuffle": True}, seed=7),
    "asked, persistent": Case(23, True, {"batch_size": 4, "shuffle": True, **PERSISTENT}, seed=7),
}


def numbered(pictures: str | Path) -> ImageFolder:
    """Return the pictures, labelled by their indices."""
    folder = ImageFolder(pictures)
    folder.samples = [(path, i) for i, (path, _) in enumerate(folder.samples)]
    return folder


class Numbered(Dataset[Any]):
    """A dataset of pictures that torchdali must ask for samples."""

    def __init__(self, folder: ImageFolder, count: int) -> None:
        self.folder, self.count = folder, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.folder.loader(self.folder.samples[index][0]), index


def loader_of(case: Case, folder: ImageFolder) -> DALILoader[Any]:
    options = {**case.options, "seed": case.seed, "device": "cpu", "distributed": "auto"}
    if case.asked:
        return DALILoader(Numbered(folder, case.count), transform=TRAIN, **options)
    return DALILoader(Subset(folder, range(case.count)), transform=TRAIN, **options)


def epochs(case: Case, loader: DALILoader[Any]) -> list[Any]:
    """Return the loader's length and sampler, and each epoch's labels and its pictures' hashes by label."""
    found: list[Any] = []
    for i in range(EPOCHS):
        if (number := case.numbers[i]) is not None:
            (loader.set_epoch if i % 2 else loader.sampler.set_epoch)(number)
        labels, looks = [], {}
        for images, of_images in loader:
            labels.append(of_images.tolist() if isinstance(of_images, torch.Tensor) else of_images)
            of_each = labels[-1:] if images.ndim == 3 else labels[-1]
            for image, label in zip(images.view(-1, 3, 16, 16), of_each, strict=True):
                looks[label] = hashlib.sha256(image.numpy().tobytes()).hexdigest()
        found.append((labels, looks))
    return [len(loader), type(loader.sampler).__mro__[1].__name__, found]


def expected(case: Case, rank: int, world: int) -> list[Any]:
    shuffle, drop_last = case.options.get("shuffle", False), case.options.get("drop_last", False)
    data: Any = list(range(case.count))
    sampler = DistributedSampler(data, world, rank, shuffle, case.seed or 0, drop_last)
    options = {name: value for name, value in case.options.items() if name in ("batch_size", "drop_last")}
    loader = DataLoader(data, sampler=sampler, **options)
    found: list[Any] = [len(loader)]
    for number in case.counted:
        sampler.set_epoch(number)
        found.append([batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader])
    return found


def record_warnings(make: Callable[[], DALILoader[Any]]) -> list[str]:
    """Return the warnings of two epochs, and the files that they point to."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = make()
        for _ in range(2):
            next(iter(loader))
    return [f"{Path(one.filename).name}: {one.category.__name__}: {one.message}" for one in caught]


def main() -> None:
    store, rank, world, pictures, results = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
    torch.manual_seed(5)
    folder = numbered(pictures)
    subset = Subset(folder, range(23))

    early = DALILoader(subset, 4, transform=TRAIN, device="cpu", distributed="auto")
    before = [type(early.sampler).__name__, len(early), sum(len(labels) for _, labels in early)]
    dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), world, rank)
    after = [len(early), [labels.tolist() for _, labels in early], type(early.sampler).__mro__[1].__name__]

    found: dict[str, Any] = {"late": (before, after)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "This DataLoader will create|.*multi-threaded, use of fork")
        for name, case in CASES.items():
            loader = loader_of(case, folder)
            found[name] = (epochs(case, loader), expected(case, rank, world))
            loader.close()
    found["warnings"] = [
        record_warnings(lambda: DALILoader(subset, 4, shuffle=True, transform=TRAIN, device="cpu")),
        record_warnings(lambda: DALILoader(Numbered(folder, 9), 4, transform=TRAIN, device="cpu")),
    ]
    text = io.StringIO()
    loader_of(CASES["set_epoch"], folder).explain(text)
    found["explain"] = text.getvalue().replace("\n           ", " ")  # as if no line was wrapped
    torch.save(found, results)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One rank of several: iterates every loader of ``CASES`` and keeps what came, beside what DataLoader gives it.

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
AUGMENTED = ("read", "read, workers", "asked", "asked, workers", "asked, persistent")


class Case(NamedTuple):
    """A loader.

    Attributes:
        count: Samples of the dataset.
        asked: Whether it is asked for samples.
        options: Of both loaders.
        seed: Of ours, and of DataLoader's sampler.
        numbers: What the epochs are set to; None sets nothing, and they are to be ``counted``.
        counted: The numbers that DataLoader's sampler is set to.
    """

    count: int
    asked: bool
    options: dict[str, Any]
    seed: int | None = None
    numbers: tuple[int | None, ...] = (None, None, None)
    counted: tuple[int, ...] = (0, 1, 2)


WORKERS = {"num_workers": 2}
CASES: dict[str, Case] = {
    "shuffled": Case(24, False, {"batch_size": 3, "shuffle": True}),
    "shuffled, uneven": Case(23, False, {"batch_size": 3, "shuffle": True}),
    "shuffled, uneven, drop_last": Case(23, False, {"batch_size": 3, "shuffle": True, "drop_last": True}),
    "in order, uneven": Case(22, False, {"batch_size": 4}),
    "in order, drop_last": Case(22, False, {"batch_size": 4, "drop_last": True}),
    "fewer than ranks": Case(1, False, {"batch_size": 2, "shuffle": True}),
    "no batches": Case(23, False, {"batch_size": None, "shuffle": True}),
    "read, workers": Case(23, False, {"batch_size": 3, "shuffle": True, **WORKERS}, seed=7),
    "read, persistent": Case(23, False, {"batch_size": 3, "shuffle": True, **WORKERS, "persistent_workers": True}),
    "read": Case(23, False, {"batch_size": 5, "shuffle": True}, seed=7),
    "set_epoch": Case(23, False, {"batch_size": 3, "shuffle": True}, None, (4, 2, 2), (4, 2, 2)),
    "set_epoch once": Case(23, False, {"batch_size": 3, "shuffle": True}, 7, (4, None, None), (4, 5, 6)),
    "set_epoch after one": Case(23, False, {"batch_size": 3, "shuffle": True}, 7, (None, 9, None), (0, 9, 10)),
    "asked": Case(23, True, {"batch_size": 3, "shuffle": True}, seed=7),
    "asked, in order": Case(22, True, {"batch_size": 4, "drop_last": True}),
    "asked, set_epoch": Case(23, True, {"batch_size": 3, "shuffle": True, **WORKERS}, None, (4, 2, 2), (4, 2, 2)),
    "asked, workers": Case(23, True, {"batch_size": 4, "shuffle": True, **WORKERS}, seed=7),
    "asked, persistent": Case(
        23, True, {"batch_size": 3, "shuffle": True, **WORKERS, "persistent_workers": True}, seed=7
    ),
}


def numbered(pictures: str | Path) -> ImageFolder:
    """The pictures, of which each has its index as label."""
    folder = ImageFolder(pictures)
    folder.samples = [(path, i) for i, (path, _) in enumerate(folder.samples)]
    return folder


class Numbered(Dataset[Any]):
    """Gives pictures, so that it must be asked for them."""

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
    """Of each epoch the labels of the batches, and of each label what its picture looked like."""
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


def aloud(make: Callable[[], DALILoader[Any]]) -> list[str]:
    """The warnings of two epochs, and where they point to."""
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
        keyed_by_torch = DALILoader(subset, 4, shuffle=True, transform=TRAIN, device="cpu", distributed="auto")
        torch.manual_seed(11)
        found["torch.manual_seed"] = epochs(CASES["shuffled"], keyed_by_torch)
    found["warnings"] = [
        aloud(lambda: DALILoader(subset, 4, shuffle=True, transform=TRAIN, device="cpu")),
        aloud(lambda: DALILoader(Numbered(folder, 9), 4, transform=TRAIN, device="cpu")),
        aloud(lambda: DALILoader(Numbered(folder, 9), 1, collate_fn=len, device="cpu")),
    ]
    text = io.StringIO()
    loader_of(CASES["shuffled, uneven"], folder).explain(text)
    found["explain"] = text.getvalue()
    torch.save(found, results)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

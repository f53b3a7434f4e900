"""torchvision's datasets in memory, made by their own constructors from small files in their own formats."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.crops import EXACT
from PIL import Image
from torchvision import datasets
from torchvision.datasets import QMNIST, STL10, SVHN

COUNT = 20

Make = Callable[..., Any]


def photographs(size: int, kind: str = "") -> Any:
    """``(COUNT, size, size, 3)`` cuts of a photograph, no two alike, others for each ``kind``."""
    name = files("skimage") / "data" / "coffee.png"
    with name.open("rb") as stream:
        photograph = np.asarray(Image.open(stream).convert("RGB"))
    rng = np.random.default_rng([*kind.encode()])
    corners = rng.integers(0, [photograph.shape[0] - size, photograph.shape[1] - size], (COUNT, 2)).tolist()
    return np.stack([photograph[top : top + size, left : left + size] for top, left in corners])


def numbers(kind: str = "") -> list[int]:
    return np.random.default_rng([1, *kind.encode()]).integers(0, 10, COUNT).tolist()


def cifar(root: Path, patch: pytest.MonkeyPatch, name: str = "CIFAR10", key: str = "labels", **options: Any) -> Any:
    kind = getattr(datasets, name)
    patch.setattr(kind, "train_list", [["first", None], ["second", None]])
    patch.setattr(kind, "test_list", [])
    patch.setattr(kind, "meta", {"filename": "meta", "key": "names", "md5": None})
    folder = root / kind.base_folder
    folder.mkdir(exist_ok=True)
    (folder / "meta").write_bytes(pickle.dumps({"names": list("abcdefghij")}))
    rows = photographs(32, name).transpose(0, 3, 1, 2).reshape(COUNT, -1)
    for file, part in (("first", slice(0, 8)), ("second", slice(8, COUNT))):
        (folder / file).write_bytes(pickle.dumps({"data": rows[part], key: numbers(name)[part]}))
    return kind(root, **options)


def cifar100(root: Path, patch: pytest.MonkeyPatch, **options: Any) -> Any:
    return cifar(root, patch, "CIFAR100", "fine_labels", **options)


def idx(path: Path, values: Any, kind: int) -> None:
    """The format of MNIST's files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = struct.pack(f">BBBB{values.ndim}I", 0, 0, kind, values.ndim, *values.shape)
    path.write_bytes(shape + values.tobytes())


def grey(kind: str) -> Any:
    return photographs(28, kind)[..., 1]


def mnist(name: str = "MNIST", prefixes: tuple[str, ...] = ("train", "t10k"), *split: str) -> Make:
    def make(root: Path, patch: pytest.MonkeyPatch, **options: Any) -> Any:
        for prefix in prefixes:
            idx(root / name / "raw" / f"{prefix}-images-idx3-ubyte", grey(name), 8)
            idx(root / name / "raw" / f"{prefix}-labels-idx1-ubyte", np.array(numbers(name), np.uint8), 8)
        return getattr(datasets, name)(root, *split, **options)

    return make


def qmnist(root: Path, patch: pytest.MonkeyPatch, **options: Any) -> Any:
    about = np.stack([numbers("QMNIST"), *(np.arange(COUNT) + 1000 * i for i in range(7))], 1)
    idx(root / "QMNIST" / "raw" / "qmnist-train-images-idx3-ubyte", grey("QMNIST"), 8)
    idx(root / "QMNIST" / "raw" / "qmnist-train-labels-idx2-int", about.astype(">i4"), 12)
    return QMNIST(root, **options)


def svhn(root: Path, patch: pytest.MonkeyPatch, **options: Any) -> Any:
    scipy = pytest.importorskip("scipy.io")
    patch.setattr(SVHN, "split_list", {"train": ["", "train.mat", None]})
    labels = np.array([[number or 10] for number in numbers("SVHN")], np.uint8)  # 10 stands for the digit 0
    scipy.savemat(root / "train.mat", {"X": photographs(32, "SVHN").transpose(1, 2, 3, 0), "y": labels})
    return SVHN(root, **options)


def stl(root: Path, patch: pytest.MonkeyPatch, **options: Any) -> Any:
    folder = root / "stl10_binary"
    folder.mkdir(exist_ok=True)
    patch.setattr(STL10, "train_list", [["train_X", None], ["train_y", None], ["unlabeled_X", None]])
    patch.setattr(STL10, "test_list", [["test_X", None], ["test_y", None]])
    images = photographs(96, "STL10").transpose(0, 3, 2, 1)
    for i, name in enumerate(("train", "unlabeled", "test")):
        (folder / f"{name}_X").write_bytes(np.ascontiguousarray(images[::-1] if i else images).tobytes())
        (folder / f"{name}_y").write_bytes(np.array(numbers(name), np.uint8).tobytes())
    (folder / "fold_indices.txt").write_text("1 5 3 0 2 7 9 11 4 6 8 10 12\n")
    return STL10(root, **options)


MAKERS: dict[str, Make] = {
    "CIFAR10": cifar,
    "CIFAR100": cifar100,
    "MNIST": mnist(),
    "FashionMNIST": mnist("FashionMNIST"),
    "KMNIST": mnist("KMNIST"),
    "EMNIST": mnist("EMNIST", ("emnist-letters-train",), "letters"),
    "QMNIST": qmnist,
    "SVHN": svhn,
    "STL10": stl,
}


def maker(root: Path, patch: pytest.MonkeyPatch) -> Make:
    """What makes one of the datasets, by its name, with files under ``root``."""
    return lambda name, transform=EXACT, **options: MAKERS[name](root, patch, transform=transform, **options)


def identity(batch: Any) -> Any:
    return batch


def on_host(batches: Any) -> list[Any]:
    """The batches, their tensors in host memory."""
    return [
        [part.cpu().as_subclass(type(part)) if isinstance(part, torch.Tensor) else part for part in batch]
        for batch in batches
    ]

"""What a dataset raises reaches the user as with DataLoader, whatever its class does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from torchdali import DALILoader

pytestmark = pytest.mark.timeout(60)


class TwoArgumentsError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)
        self.second = second


class NotReducedError(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("it is not to be pickled")


class NoTextError(Exception):
    def __str__(self) -> str:
        raise ValueError("it has no text")


@dataclass(frozen=True)
class FrozenError(Exception):
    code: int


ODD: dict[str, Callable[[], Exception]] = {
    "two arguments": lambda: TwoArgumentsError("first", "second"),
    "not reduced": lambda: NotReducedError("text"),
    "no text": lambda: NoTextError("text"),
    "frozen": lambda: FrozenError(3),
    "system": lambda: OSError(5, "text"),
    "key": lambda: KeyError("text"),
}


class Raising(Dataset[Any]):
    """Every second sample raises one of them."""

    def __len__(self) -> int:
        return 2 * len(ODD)

    def __getitem__(self, index: int) -> Any:
        if index % 2:
            error = list(ODD.values())[index // 2]()
            raise error
        return torch.zeros(3, 4, 4, dtype=torch.uint8), index


def describe(error: Exception) -> tuple[str, str]:
    """Return the class and the text, without our note of the sample."""
    try:
        lines = str(error).splitlines()
    except ValueError:
        return type(error).__name__, "no text"
    if isinstance(error, KeyError):  # a worker's traceback is one string in it, with the note
        return "KeyError", ""
    return type(error).__name__, [line for line in lines if not line.startswith("while the dataset was asked")][-1]


def collect(loader: Any) -> list[Any]:
    """Return what comes for each sample: its number, or its exception in words."""
    outcomes: list[Any] = []
    iterator = iter(loader)
    while True:
        try:
            outcomes.append(next(iterator)[1].tolist())
        except StopIteration:
            return outcomes
        except Exception as error:  # noqa: BLE001 - that is the test
            outcomes.append(describe(error))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("transform", [None, v2.ToDtype(torch.float32)], ids=["plain", "transform"])
def test_each_comes_as_with_dataloader(transform: Any, num_workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 1, "num_workers": num_workers}
    theirs = collect(DataLoader(Raising(), **options))
    ours = collect(DALILoader(Raising(), transform=transform, device="cpu", **options))
    assert ours == theirs
    assert len(theirs) == 2 * len(ODD)
    assert theirs[1::2] != theirs[::2]

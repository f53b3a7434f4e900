"""Loaders whose state is saved and loaded: of three kinds of dataset, of several ranks, and samplers with a state."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from conftest import CROP, Numbered
from helpers.proxied import RANDOM, Pictures
from torch.utils.data import Dataset
from torchvision.transforms import v2

from torchdali import DALILoader

COUNT = 12

AUGMENT = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(CROP), v2.RandomHorizontalFlip()])


class Asked(Dataset[Any]):
    """Gives a picture with its number."""

    def __init__(self, files: list[Path], transform: Any = None) -> None:
        self.pictures = Pictures(files, transform)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Any:
        sample = self.pictures[index]
        return sample["image"], sample["index"]


Make = Callable[..., DALILoader[Any]]


def read(pictures: Path, numbered: Numbered) -> tuple[Any, dict[str, Any]]:
    return numbered(pictures, AUGMENT), {"device": "cpu"}


def asked(pictures: Path, numbered: Numbered) -> tuple[Any, dict[str, Any]]:
    return Asked(sorted(pictures.rglob("*.jpg"))[:COUNT]), {"device": "cpu", "transform": RANDOM}


def plain(pictures: Path, numbered: Numbered) -> tuple[Any, dict[str, Any]]:
    exact = v2.Compose([v2.ToImage(), v2.CenterCrop(CROP)])
    return Asked(sorted(pictures.rglob("*.jpg"))[:COUNT], exact), {"device": "cpu"}


KINDS = {"read": read, "asked": asked, "plain": plain}


def through_files(state: dict[str, Any]) -> dict[str, Any]:
    """A state that was saved, both ways."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded == state
    assert json.loads(json.dumps(state)) == state
    return loaded


def set_epoch(loader: DALILoader[Any], epoch: int) -> None:
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)


class Ranks:
    """Makes the loader that each of several processes would have, in this one.

    Args:
        kind: Dataset, and options of its loaders.
    """

    def __init__(self, kind: tuple[Any, dict[str, Any]]) -> None:
        self.dataset, self.own = kind

    def __call__(self, world: int, rank: int, number: int = 7, **options: Any) -> DALILoader[Any]:
        torch.manual_seed(number)
        with in_group(rank, world):
            return DALILoader(
                self.dataset, **{"batch_size": 2, "shuffle": True, "distributed": "auto", **self.own, **options}
            )


def in_group(rank: int, world: int) -> Any:
    return mock.patch("torchdali.state.sharding.get_rank_and_world_size", return_value=(rank, world))


class Remembering:
    """A sampler that has a state as torchdata asks for it, and draws from a generator that nobody can find."""

    def __init__(self, count: int) -> None:
        self.count, self.given, self.start, self.hidden = count, 0, 0, [random.Random(torch.initial_seed())]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        first, self.start = self.start, 0
        for number in range(first, self.count):
            self.given = number + 1
            yield self.hidden[0].randrange(self.count)

    def state_dict(self) -> dict[str, Any]:
        version, words, rest = self.hidden[0].getstate()
        return {"given": self.given, "random": [version, list(words), rest]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, words, rest = state["random"]
        self.start, self.hidden = state["given"], [random.Random()]
        self.hidden[0].setstate((version, tuple(words), rest))


class RememberingBatches(Remembering):
    def __iter__(self) -> Iterator[list[int]]:
        first, self.start = self.start, 0
        for number in range(first, self.count):
            self.given = number + 1
            yield [self.hidden[0].randrange(self.count) for _ in range(2)]

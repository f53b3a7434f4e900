"""A loader owns its parts, and its iterators see a view of it."""

from __future__ import annotations

import copy
import gc
import inspect
import warnings
import weakref
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data.dataloader import (
    _MultiProcessingDataLoaderIter,  # pyright: ignore[reportPrivateUsage]
    _SingleProcessDataLoaderIter,  # pyright: ignore[reportPrivateUsage]
)
from torchvision.transforms import v2

from torchdali import DALILoader
from torchdali.loader.session import Session
from torchdali.state.context import LoaderView
from torchdali.state.tracker import ProgressTracker

ATTRIBUTES = {field.name for field in fields(LoaderView)}
WORKERS = {"none": {}, "workers": {"num_workers": 1}, "persistent": {"num_workers": 1, "persistent_workers": True}}


class Recorder:
    """A view that notes which attributes are read, and has no others."""

    def __init__(self, view: LoaderView) -> None:
        vars(self).update(_view=view, _read=set[str]())

    def __getattr__(self, name: str) -> Any:
        self._read.add(name)
        return getattr(self._view, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"an iterator sets {name} of its loader")


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Any:
        info = get_worker_info()
        return iter(range(info.id if info else 0, 4, info.num_workers if info else 1))


def test_a_loader_inherits_from_dataloader_alone() -> None:
    assert DALILoader.__bases__ == (DataLoader,)


def test_what_torchs_iterators_read_is_what_a_view_has() -> None:
    read: set[str] = set()
    for data in (range(4), Numbers()):
        for options in WORKERS.values():
            recorder: Any = Recorder(LoaderView.from_loader(DataLoader[Any](data, **options)))  # pyright: ignore[reportArgumentType]
            kind = _MultiProcessingDataLoaderIter if options else _SingleProcessDataLoaderIter
            iterator: Any = kind(recorder)
            assert [int(number) for number in iterator] == [0, 1, 2, 3]
            if "persistent_workers" in options:
                iterator._reset(recorder)
                assert len(list(iterator)) == 4
            read |= recorder._read
    pinned: Any = Recorder(replace(LoaderView.from_loader(DataLoader[Any](range(4))), pin_memory=True))  # pyright: ignore[reportArgumentType]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without an accelerator
        _SingleProcessDataLoaderIter(pinned)
    assert read | pinned._read == ATTRIBUTES


@pytest.mark.parametrize("options", WORKERS.values(), ids=WORKERS.keys())
@pytest.mark.parametrize("kind", ["native", "plain", "proxy"])
def test_iterators_read_nothing_but_a_views_attributes(
    monkeypatch: pytest.MonkeyPatch, pictures: Path, kind: str, options: dict[str, Any]
) -> None:
    unknown: list[str] = []
    monkeypatch.setattr(LoaderView, "__getattr__", lambda _, name: unknown.append(name), raising=False)
    chain = v2.Compose([v2.Resize((8, 8)), v2.ToImage()])
    dataset: Any = pictures if kind == "native" else [(torch.zeros(3, 4, 4, dtype=torch.uint8), 1)] * 4
    transform = None if kind == "plain" else chain
    with DALILoader(dataset, 2, transform=transform, device="cpu", **options) as loader:
        assert len(list(loader)) == len(list(loader)) == len(loader)
    assert not unknown


def test_a_view_cannot_be_changed() -> None:
    view: Any = LoaderView.from_loader(DataLoader[Any](range(4)))  # pyright: ignore[reportArgumentType]
    with pytest.raises(FrozenInstanceError):
        view.dataset = None
    assert not hasattr(view, "__dict__")


@pytest.mark.parametrize("options", WORKERS.values(), ids=WORKERS.keys())
@pytest.mark.parametrize("kind", ["native", "plain", "proxy"])
def test_an_iterator_does_not_hold_its_loader(pictures: Path, kind: str, options: dict[str, Any]) -> None:
    chain = v2.Compose([v2.Resize((8, 8)), v2.ToImage()])
    dataset: Any = pictures if kind == "native" else [(torch.zeros(3, 4, 4, dtype=torch.uint8), 1)] * 4
    loader = DALILoader(dataset, 2, transform=None if kind == "plain" else chain, device="cpu", **options)
    iterator, alive = iter(loader), weakref.ref(loader)
    next(iterator)
    gc.disable()
    try:
        del loader
        assert alive() is None
    finally:
        gc.enable()
    iterator.close()


def test_a_loader_has_its_parts_and_a_copy_has_parts_of_its_own(pictures: Path) -> None:
    loader: Any = DALILoader(pictures, 2, transform=[v2.Resize((8, 8)), v2.ToImage()], device="cpu", seed=1)
    list(loader)
    # Once a Trainer has run in this process, a DataLoader has names of Lightning's, "__pl_...".
    theirs = {name for name in vars(loader) if name in vars(DataLoader(range(4))) or name.startswith("__pl_")}  # pyright: ignore[reportArgumentType]
    ours = vars(loader).keys() - theirs
    arguments = {name for name in ours if not name.startswith("_")}
    assert ours - arguments == {"_options", "_session", "_progress", "_shards", "_error_policy", "_clock"}
    assert arguments <= set(inspect.signature(DALILoader).parameters)
    other: Any = copy.copy(loader)
    assert isinstance(other._session, Session)
    assert isinstance(other._progress, ProgressTracker)
    assert other._session is not loader._session
    assert other._session.native_plan is None
    assert other._progress is not loader._progress
    assert other._progress.next_epoch == 1
    list(other)
    assert loader._progress.next_epoch == 1

"""What a loader of a dataset that is asked for samples says of itself, and what can be made of it."""

from __future__ import annotations

import gc
import io
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CROP, same
from helpers.proxied import EXACT, Named, Pictures, Stream, prepare
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    default_collate,
)
from torchvision.transforms import v2

from torchdali import DALILoader
from torchdali.transforms.spec import InputKind

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

COUNT = 11


@pytest.fixture
def files(pictures: Path) -> list[Path]:
    return sorted(pictures.rglob("*.jpg"))[:COUNT]


def test_persistent_workers_take_a_new_transform(files: list[Path]) -> None:
    options = {"batch_size": 4, "num_workers": 1, "persistent_workers": True}
    loader = DALILoader(Pictures(files), **options, transform=EXACT, device="cpu")
    assert next(iter(loader))["image"].shape[2:] == (CROP, CROP)
    loader.transform = v2.Compose([v2.ToImage(), v2.CenterCrop(9)])
    assert next(iter(loader))["image"].shape[2:] == (9, 9)
    true = list(DataLoader(Pictures(files, loader.transform), **options))
    assert same([batch["image"] for batch in loader], [batch["image"] for batch in true])


def test_batches_are_on_the_device(files: list[Path], device: str) -> None:
    for options in ({"transform": EXACT}, {}):
        dataset = Pictures(files, None if options else EXACT)
        for batch in DALILoader(dataset, 4, num_workers=2, device=device, **options):
            assert {batch[name].device.type for name in ("image", "torch", "index")} == {device}
            true = torch.stack([Pictures(files, EXACT)[index]["image"] for index in batch["index"].tolist()])
            assert (batch["image"].cpu().float() - true.float()).abs().mean() < (5 if device == "cuda" else 1e-9)


def explained(loader: DALILoader) -> str:
    text = io.StringIO()
    loader.explain(text)
    return " ".join(text.getvalue().split())


def test_explain_says_where_images_are_and_draws_nothing(files: list[Path], device: str) -> None:
    before = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore # noqa: NPY002
    loader = DALILoader(Pictures(files), 4, num_workers=1, transform=EXACT, device=device)
    text = explained(loader)
    assert "images at ['image'] of dataset[0]: uint8 (3, H, W) (pixels)" in text
    assert "Pictures, worker-fed: its samples come from 1 worker process," in text
    assert "CenterCrop" in text
    stream = DALILoader(Stream(Pictures(files), shares=True), 4, transform=EXACT, device=device)
    assert "images not known before the first batch" in explained(stream)
    assert "threads not known before the first batch prefetch" in explained(stream)
    after = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore # noqa: NPY002
    assert same(after, before)
    next(iter(stream))
    assert "images at ['image']: uint8 (3, H, W) (pixels)" in explained(stream)
    assert "worker, place in its stream" in explained(stream)
    assert "not known before the first batch (dataset[0] raises AttributeError" in explained(
        DALILoader(Named(files), sampler=["picture 1"], transform=EXACT, device=device)
    )
    assert "none in dataset[0], which is [0] int" in explained(
        DALILoader([(1, 2)], transform=EXACT, device=device)  # pyright: ignore[reportArgumentType]
    )
    assert "Nothing runs in DALI: give transform= to the loader" in explained(
        DALILoader(Pictures(files), device=device)
    )
    assert "at ['image']" in text


def test_explain_writes_every_kind_of_image_alike(files: list[Path]) -> None:
    class Both(Pictures):
        def __getitem__(self, index: int) -> Any:
            image = super().__getitem__(index)["image"]
            return {"coloured": image, "grey": image.convert("L")}

    text = io.StringIO()
    DALILoader(Both(files), 4, transform=EXACT, device="cpu").explain(text)
    lines = text.getvalue().splitlines()
    assert len([line for line in lines if "CenterCrop" in line]) == 2
    assert len(set(lines)) == len({line.strip() for line in lines}), "both begin where the other does"


def test_is_a_dataloader_with_its_attributes(files: list[Path]) -> None:
    dataset, generator = Pictures(files), torch.Generator()
    options: dict[str, Any] = {
        "sampler": RandomSampler(dataset, generator=generator),
        "batch_size": 3,
        "num_workers": 1,
        "collate_fn": default_collate,
        "pin_memory": False,
        "timeout": 4,
        "drop_last": True,
        "worker_init_fn": prepare,
        "generator": generator,
        "prefetch_factor": 3,
        "persistent_workers": True,
        "multiprocessing_context": "fork",
        "in_order": False,
    }
    ours, theirs = DALILoader(dataset, **options, device="cpu"), DataLoader(dataset, **options)
    assert isinstance(ours, DataLoader)
    assert {name: getattr(ours, name) for name in options} == {name: getattr(theirs, name) for name in options}
    assert ours.dataset is dataset
    assert type(ours.batch_sampler) is BatchSampler
    assert ours.batch_sampler.sampler is options["sampler"]


def test_accelerate_may_not_take_the_loader_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for this attribute first, and makes a plain DataLoader of what does not have it."""
    loader = DALILoader([1, 2, 3], transform=v2.ToImage(), device="cpu")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(TypeError, match=r"nothing would run in DALI: use the Accelerator of torchdali\.accelerate"):
        getattr(loader, "_is_accelerate_prepared", False)
    monkeypatch.delitem(sys.modules, "accelerate")
    assert not loader._is_accelerate_prepared, "which nobody asks for"


class Inherited:
    """Garbage of the process that makes it, once nobody else refers to it, and of those that it forks."""

    def __init__(self, dropped: Path) -> None:
        self.itself, self.dropped = self, dropped

    def __del__(self) -> None:
        (self.dropped / str(os.getpid())).touch()


collects_when_forked = False


def when_forked() -> None:
    """The garbage collector, which may run at any moment, runs as soon as there is a new process."""
    if collects_when_forked and gc.isenabled():
        gc.collect()


os.register_at_fork(after_in_child=when_forked)


class Enabled(Pictures):
    """A dataset that collects garbage, and tells whether that is done where it is asked."""

    def __getitem__(self, index: int) -> Any:
        gc.collect()
        return {**super().__getitem__(index), "collects": gc.isenabled()}


@pytest.mark.parametrize("enabled", [True, False])
def test_a_worker_that_is_being_forked_leaves_garbage_alone(
    enabled: bool, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA tensor in a cycle could end the worker. It collects its own afterwards, if its parent does."""
    monkeypatch.setattr(sys.modules[__name__], "collects_when_forked", True)
    before = gc.get_threshold()
    gc.set_threshold(10**6)
    try:
        Inherited(tmp_path)
        if not enabled:
            gc.disable()
        options = {"num_workers": 1, "multiprocessing_context": "fork", "device": "cpu"}
        batches = list(DALILoader(Enabled(files), 4, transform=EXACT, **options))
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
        gc.set_threshold(*before)
    assert {path.name for path in tmp_path.iterdir()} <= {str(os.getpid())}
    assert set(torch.cat([batch["collects"] for batch in batches]).tolist()) == {enabled}
    gc.collect()


@pytest.mark.parametrize("workers", [0, 1])
def test_profilers_see_dataloaders_name(workers: int) -> None:
    ours, theirs = (iter(kind(range(3), num_workers=workers)) for kind in (DALILoader, DataLoader))
    assert ours._profile_name == theirs._profile_name
    assert [next(ours), next(theirs)] == [0, 0]


def test_what_dali_is_fed_is_known_to_what_takes_the_time() -> None:
    iterator = iter(DALILoader([np.zeros((30, 40, 3), np.uint8)], transform=EXACT, device="cpu"))
    assert (iterator.clock.input_kind, iterator.clock.steps) == (None, ())
    next(iterator)
    assert (iterator.clock.input_kind, len(iterator.clock.steps)) == (InputKind.PIXELS, 2)

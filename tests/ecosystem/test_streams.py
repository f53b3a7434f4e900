"""Streams of other packages give DataLoader's batches, and go on where they were, within and between epochs."""

from __future__ import annotations

import gc
import importlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import encoded, same
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset
from torchvision.transforms import v2

from torchdali import DALILoader

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # of these packages
]

COUNT, BATCH = 22, 4
CROP = v2.Compose([v2.ToImage(), v2.CenterCrop(16)])
Make = Callable[[Path, bool], Any]


def images() -> Iterator[Image.Image]:
    rng = np.random.default_rng(0)
    for _ in range(COUNT):
        pixels = rng.integers(0, 255, (4, 5, 3), dtype=np.uint8)
        yield Image.fromarray(pixels).resize((30, 24), Image.Resampling.BICUBIC)


def make_mosaic(root: Path, crop: bool) -> Any:
    streaming = pytest.importorskip("streaming", reason="pip install mosaicml-streaming")
    if not root.exists():
        with streaming.MDSWriter(out=str(root), columns={"image": "bytes", "label": "int"}) as writer:
            for label, image in enumerate(images()):
                writer.write({"image": encoded(image, "PNG"), "label": label})

    class Samples(streaming.StreamingDataset):
        def __getitem__(self, index: int) -> Any:
            sample = super().__getitem__(index)
            image = Image.open(io.BytesIO(sample["image"]))
            return CROP(image) if crop else image, sample["label"]

    return Samples(local=str(root), shuffle=True, shuffle_seed=3, batch_size=BATCH)


def make_litdata(root: Path, crop: bool) -> Any:
    litdata = pytest.importorskip("litdata")
    if not root.exists():
        cache = importlib.import_module("litdata.streaming.cache").Cache(str(root), chunk_size=5)
        for label, image in enumerate(images()):
            cache[label] = {"image": image, "label": label}
        cache.done()
        cache.merge()

    class Samples(litdata.StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            return CROP(sample["image"]) if crop else sample["image"], sample["label"]

    return Samples(str(root), shuffle=True, seed=3)


def make_webdataset(root: Path, crop: bool) -> Any:
    webdataset = pytest.importorskip("webdataset")
    if not root.exists():
        root.mkdir()
        with webdataset.ShardWriter(f"{root}/%d.tar", maxcount=6, verbose=0) as writer:
            for label, image in enumerate(images()):
                writer.write({"__key__": f"{label:03}", "png": encoded(image, "PNG"), "cls": label})
    dataset = webdataset.WebDataset([str(path) for path in sorted(root.glob("*.tar"))], shardshuffle=False)
    dataset = dataset.decode("pil").to_tuple("png", "cls")
    return dataset.map_tuple(CROP) if crop else dataset


def make_hugging_face(root: Path, crop: bool) -> Any:
    datasets = pytest.importorskip("datasets")
    rows = {"image": [encoded(image, "PNG") for image in images()], "label": list(range(COUNT))}
    stream = datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=4)

    def prepare(row: dict[str, Any]) -> dict[str, Any]:
        image = Image.open(io.BytesIO(row["image"]))
        return {"image": CROP(image) if crop else image, "label": row["label"]}

    return stream.map(prepare)


MAKERS: dict[str, Make] = {
    "mosaic": make_mosaic,
    "litdata": make_litdata,
    "webdataset": make_webdataset,
    "hugging face": make_hugging_face,
}


def plain(batch: Any) -> list[Any]:
    """The images and labels of a batch, without the types of torchvision."""
    image, label = dict[str, Any](batch).values() if isinstance(batch, dict) else batch
    return [image.as_subclass(torch.Tensor), label]


@pytest.mark.parametrize(("transformed", "workers"), [(False, 0), (True, 2)], ids=["plain", "transform"])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_stream_gives_dataloaders_batches_and_goes_on(
    kind: str, workers: int, transformed: bool, tmp_path: Path
) -> None:
    def make(crop: bool) -> Any:
        return MAKERS[kind](tmp_path / "data", crop)

    theirs: Any = DataLoader(make(True), BATCH, num_workers=workers)
    expected = list(map(plain, theirs))
    assert sorted(torch.cat([labels for _, labels in expected]).tolist()) == list(range(COUNT))

    def new() -> DALILoader[Any]:
        dataset: IterableDataset[Any] = make(not transformed)
        transform = CROP if transformed else None
        return DALILoader(dataset, BATCH, num_workers=workers, transform=transform, device="cpu", seed=1)

    loader = new()
    assert same(list(map(plain, loader)), expected)
    between, batches = loader.state_dict(), iter(loader)
    first = [plain(next(batches)) for _ in range(3)]
    within = loader.state_dict()
    rest = list(map(plain, batches))
    assert len(first + rest) == len(expected)
    del batches, loader
    gc.collect()  # Mosaic's dataset keeps its epoch in shared memory while it lives

    resumed = new()
    resumed.load_state_dict(within)
    batches = iter(resumed)
    assert same(plain(next(batches)), rest[0])
    again = resumed.state_dict()
    assert same(list(map(plain, batches)), rest[1:])
    # The state of datasets' stream says that it has ended. Workers have new copies of the stream in each epoch.
    anew = [] if kind == "hugging face" and not workers else first + rest
    for state, left in ((again, rest[1:]), (between, anew)):
        del batches, resumed
        gc.collect()
        resumed = new()
        resumed.load_state_dict(state)
        batches = iter(resumed)
        assert same(list(map(plain, batches)), left)

"""A column of Hugging Face's datasets, read without workers, compared with DataLoader and the files."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from conftest import encoded, same
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, Subset, WeightedRandomSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError
from torchdali.datasets import HuggingFace

EXACT = v2.Compose([v2.ToImage(), v2.CenterCrop(24)])


@pytest.fixture(scope="module")
def folder(pictures: Path) -> ImageFolder:
    return ImageFolder(pictures, EXACT)


@pytest.fixture(scope="module")
def rows(folder: ImageFolder, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A dataset of several Arrow files and record batches, on disk."""
    columns = {
        "image": [{"bytes": Path(path).read_bytes(), "path": None} for path, _ in folder.samples],
        "label": [label for _, label in folder.samples],
        "text": [f"t{i}" for i in range(len(folder))],
        "sizes": [[i, i + 1] for i in range(len(folder))],
    }
    features = datasets.Features(
        image=datasets.Image(decode=False),
        label=datasets.ClassLabel(names=folder.classes),
        text=datasets.Value("string"),
        sizes=datasets.Sequence(datasets.Value("int64")),
    )
    root = tmp_path_factory.mktemp("arrow")
    datasets.Dataset.from_dict(columns, features).save_to_disk(root, num_shards=3)
    return datasets.load_from_disk(root)


def both(dataset: Any, **options: Any) -> list[Any]:
    make: Any = lambda kind, **more: list(  # noqa: E731
        kind(dataset, batch_size=5, generator=torch.Generator().manual_seed(2), **options, **more)
    )
    ours = make(DALILoader, device="cpu")
    assert same(ours, make(DataLoader))
    return ours


@pytest.mark.parametrize("decode", [True, False])
def test_samples_are_those_of_the_folder(rows: Any, folder: ImageFolder, decode: bool) -> None:
    dataset = HuggingFace(rows.cast_column("image", datasets.Image(decode=decode)), transform=EXACT)
    ours = both(dataset, shuffle=True)
    theirs = DataLoader(folder, batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(2))
    assert same(ours, list(theirs))
    both(Subset(dataset, [20, 1, 3]))


def test_selected_rows(rows: Any, folder: ImageFolder) -> None:
    def first(dataset: Any) -> list[str]:
        batches = both(HuggingFace(dataset, label=("text",), transform=EXACT))
        images = torch.cat([batch["image"] for batch in batches])
        texts = sum((batch["text"] for batch in batches), [])  # noqa: RUF017
        assert all(torch.equal(image, folder[int(text[1:])][0]) for image, text in zip(images, texts, strict=True))
        return texts

    assert first(rows.select([7, 3, 3, 23])) == ["t7", "t3", "t3", "t23"]
    assert first(rows.filter(lambda row: row["label"] == 1)) == [f"t{i}" for i in range(8, 16)]
    split = rows.shuffle(seed=1).train_test_split(6, seed=2)
    assert sorted(first(split["train"]) + first(split["test"])) == sorted(rows["text"][:])
    assert first(rows.skip(2).with_format("torch"))[0] == "t2"


def test_other_columns(rows: Any) -> None:
    batch = both(HuggingFace(rows, label=("label", "text", "sizes"), transform=EXACT))[1]
    assert list(batch) == ["image", "label", "text", "sizes"]
    assert batch["sizes"][1].tolist() == [6, 7, 8, 9, 10]
    assert both(HuggingFace(rows, label="text", transform=EXACT))[0][1][0] == "t0"
    assert HuggingFace(rows, label=lambda row: sorted(row))[0][1] == ["label", "sizes", "text"]
    assert both(HuggingFace(rows, label=None, transform=EXACT))[0].shape == (5, 3, 24, 24)


def test_a_subclass_may_override_how_rows_are_read(rows: Any) -> None:
    class Own(HuggingFace):
        def read_parts(self, row: int) -> Any:
            return super().read_parts(row) * 2

    assert both(Own(rows, label="text", transform=EXACT))[0][1][0] == "t0t0"


def test_other_processes_map_the_file(rows: Any) -> None:
    dataset = HuggingFace(rows, transform=EXACT)
    assert len(pickle.dumps(dataset)) < 20_000
    assert same(pickle.loads(pickle.dumps(dataset))[3], dataset[3])


def test_columns_that_cannot_be_read_are_refused(rows: Any, folder: ImageFolder) -> None:
    with pytest.raises(ValueError, match="the dataset has no column 'x'; it has image, label, text, sizes"):
        HuggingFace(rows, label="x")
    paths = datasets.Dataset.from_dict({"image": [folder.samples[0][0]], "label": [0]}).cast_column(
        "image", datasets.Image()
    )
    with pytest.raises(ValueError, match="1 rows of 'image' have no bytes; embed the files, or give the dataset"):
        HuggingFace(paths)
    with pytest.raises(TypeError, match="a column of images must be of bytes, got string"):
        HuggingFace(rows, image="text")


RGB = v2.Compose([v2.RGB(), v2.ToImage(), v2.CenterCrop(24)])


def assert_lifted(dataset: Any, transform: Any = EXACT, **options: Any) -> list[Any]:
    """The batches of a loader that reads rows as they are, after they were compared with DataLoader's."""
    options = {"batch_size": 5, "generator": torch.Generator().manual_seed(2), **options}
    loader = DALILoader(dataset, transform=transform, device="cpu", **options)
    assert loader._session.reader is not None

    def convert(row: dict[str, Any]) -> dict[str, Any]:
        image = row["image"]
        if isinstance(image, dict):
            image = Image.open(io.BytesIO(image["bytes"])).convert("RGB")
        return {**row, "image": transform(image)}

    class Rows(torch.utils.data.Dataset[Any]):
        __len__ = lambda _: len(dataset)  # noqa: E731
        __getitem__ = lambda _, i: convert(dataset[i])  # noqa: E731

    options["generator"] = torch.Generator().manual_seed(2)
    ours = list(loader)
    assert same(ours, list(DataLoader(Rows(), **options)))
    return ours


@pytest.mark.parametrize("decode", [True, False])
def test_rows_as_they_are(rows: Any, decode: bool) -> None:
    data = rows.cast_column("image", datasets.Image(decode=decode))
    transform = RGB if decode else EXACT
    batches = assert_lifted(data, transform, shuffle=True)
    assert [*batches[0]] == ["image", "label", "text", "sizes"]
    split = data.shuffle(seed=1).train_test_split(8, seed=2)["test"]
    assert assert_lifted(split.select([6, 2, 2]), transform)[0]["text"] == [split["text"][i] for i in (6, 2, 2)]
    assert_lifted(ConcatDataset([Subset(split, [3, 1]), data.filter(lambda row: row["label"] == 1)]), transform)
    integers = data.select_columns(["label", "image"])
    assert [*assert_lifted(integers, transform, sampler=[*WeightedRandomSampler([1.0] * 24, 9)])[0]] == [
        "label",
        "image",
    ]
    assert [*assert_lifted(data.select_columns("image"), transform)[0]] == ["image"]


def test_orientation_and_grey_images_of_rows(folder: ImageFolder) -> None:
    picture = Image.open(folder.samples[0][0])
    exif = Image.Exif()
    exif[0x0112] = 6
    files = [encoded(picture, "JPEG", exif=exif.tobytes()), encoded(picture.convert("L"), "PNG")]
    files += [encoded(picture.convert("RGBA"), "PNG"), encoded(picture, "JPEG")]
    data = datasets.Dataset.from_dict({"image": [{"bytes": data, "path": None} for data in files]})
    assert_lifted(data.cast_column("image", datasets.Image(mode="RGB")))
    assert_lifted(data.cast_column("image", datasets.Image()), RGB)
    assert_lifted(data.cast_column("image", datasets.Image(decode=False)))


def test_rows_that_workers_read(rows: Any, folder: ImageFolder) -> None:
    deep = encoded(Image.new("I;16", (30, 30)), "PNG")
    two = datasets.Dataset.from_dict({"image": [deep, deep], "label": [0, 1]})
    two = two.cast_column("image", datasets.Image(decode=False))
    for data, options in (
        (rows, {}),
        (rows.with_transform(dict), {"transform": EXACT}),
        (rows.cast_column("image", datasets.Image()), {"transform": EXACT}),
        (rows, {"transform": EXACT, "images": "image"}),
        (rows.add_column("other", rows["image"][:]), {"transform": EXACT}),
        (two, {"transform": EXACT}),
    ):
        assert DALILoader(data, device="cpu", **options)._session.reader is None
    mixed = datasets.concatenate_datasets([part.select_columns("image") for part in (rows, two, rows, rows)])
    loader = DALILoader(mixed, 6, transform=EXACT, device="cpu")
    with pytest.raises(
        SampleError, match=r"sample 24 .* it has more than 8 bits, and RGB has 8; give the loader images=, its column"
    ):
        list(loader)


def test_a_format_that_is_set_later_is_seen(rows: Any) -> None:
    data = rows.select(range(6))
    loader = DALILoader(data, 6, transform=EXACT, device="cpu")
    assert next(iter(loader))["label"].tolist() == [0] * 6
    assert loader._session.reader is not None
    data.set_format(columns=["image"])
    assert [*next(iter(loader))] == ["image"]


@pytest.mark.parametrize("wrapped", [True, False])
def test_rows_under_samplers_ranks_and_resumed(rows: Any, wrapped: bool) -> None:
    dataset = HuggingFace(rows, label=("text",), transform=EXACT) if wrapped else rows

    def make(**options: Any) -> DALILoader[Any]:
        return DALILoader(dataset, 5, transform=None if wrapped else EXACT, device="cpu", **options)

    def texts(loader: Any) -> list[str]:
        return [text for batch in loader for text in batch["text"]]

    for rank in (0, 1):
        sampler = DistributedSampler(rows, 2, rank, seed=3)
        assert texts(make(sampler=sampler)) == [f"t{i}" for i in sampler]
    weighted = [*WeightedRandomSampler([1.0] * 12 + [9.0] * 12, 20)]
    assert texts(make(sampler=weighted)) == [f"t{i}" for i in weighted]
    first, second = (make(shuffle=True) for _ in range(2))
    batches = iter(first)
    next(batches)
    second.load_state_dict(first.state_dict())
    assert same(list(second), list(batches))

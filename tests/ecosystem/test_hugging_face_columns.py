"""A column of Hugging Face's datasets, read without workers, compared with DataLoader and the files."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from conftest import same
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader
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

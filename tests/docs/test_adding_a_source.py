"""The source of docs/adding_a_source.md, a zip file of images, compared with DataLoader."""

from __future__ import annotations

import io
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError
from torchdali.pipeline.readers import EncodedReader
from torchdali.sources import InputKind, Source, Spec

PAGE = (Path(__file__).parents[2] / "docs" / "adding_a_source.md").read_text()
CROPPED = v2.Compose([v2.CenterCrop((32, 40)), v2.ToImage()])


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, pictures: Path) -> Any:
    """What the page's code defines, and zip files of JPEGs and a PNG; one file of the second is truncated."""
    folder = tmp_path_factory.mktemp("zip")
    with zipfile.ZipFile(folder / "train.zip", "w") as good, zipfile.ZipFile(folder / "bad.zip", "w") as bad:
        for i, (path, label) in enumerate(ImageFolder(pictures).samples):
            data = Path(path).read_bytes()
            bad.writestr(f"class{label}/{'cut' if i == 3 else i}.jpg", data[: len(data) // 2] if i == 3 else data)
            if i == 5:
                Image.open(path).save(stream := io.BytesIO(), "PNG")
                data = stream.getvalue()
            good.writestr(f"class{label}/{i:02}.jpg", data)
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
    namespace: dict[str, Any] = {"__name__": "adding_a_source"}
    code = code.replace('"train.zip"', repr(str(folder / "train.zip"))).replace("shuffle=True", 'device="cpu"')
    exec(compile(code, "docs/adding_a_source.md", "exec"), namespace)
    return {**namespace, "folder": folder}


def epoch(loader: Any) -> list[Any]:
    return [(images, labels) for images, labels in loader]


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for (images, labels), (true_images, true_labels) in zip(ours, theirs, strict=True):
        assert torch.equal(images, true_images)
        assert torch.equal(labels, true_labels)


def test_the_loader_of_the_page_reads_the_source(page: Any) -> None:
    images, labels = next(iter(page["loader"]))
    assert images.shape[1:] == (3, 224, 224)
    assert len(labels) == len(page["loader"].dataset)
    assert "ZipSource" in page["loader"]._session.source.describe()


@pytest.mark.parametrize(
    "nest",
    [
        lambda one, other: one,
        lambda one, other: Subset(one, [5, 2, 2, 7]),
        lambda one, other: ConcatDataset([other, Subset(one, range(3, 8))]),
    ],
    ids=["itself", "subset", "concatenated"],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_batches_are_those_of_dataloader(page: Any, nest: Any, device: str) -> None:
    make = page["ZipDataset"]
    dataset = nest(make(page["folder"] / "train.zip", CROPPED), make(page["folder"] / "train.zip", CROPPED))
    ours = [(images.cpu(), labels.cpu()) for images, labels in DALILoader(dataset, 3, device=device)]
    theirs = epoch(DataLoader(dataset, 3))
    if device == "cpu":
        assert_same(ours, theirs)
    assert [labels.tolist() for _, labels in ours] == [labels.tolist() for _, labels in theirs]


def test_an_epoch_is_resumed(page: Any) -> None:
    random = v2.Compose([v2.RandomResizedCrop(32), v2.ToImage()])

    def make() -> Any:
        torch.manual_seed(0)
        dataset = page["ZipDataset"](page["folder"] / "train.zip", random)
        return DALILoader(dataset, 3, shuffle=True, device="cpu", seed=3)

    whole, loader, resumed = epoch(make()), make(), make()
    batches = iter(loader)
    assert_same([next(batches), next(batches)], whole[:2])
    resumed.load_state_dict(loader.state_dict())
    assert_same(epoch(resumed), whole[2:])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_truncated_file_is_named_or_left_out(page: Any, device: str) -> None:
    dataset = page["ZipDataset"](page["folder"] / "bad.zip", CROPPED)
    (row,) = (i for i, name in enumerate(dataset.names) if "cut" in name)
    with pytest.raises(SampleError, match="truncated"):  # before a decoder sees it: the JPEG engine does not report it
        EncodedReader(dataset.torchdali_source()).load([row])
    with pytest.raises(SampleError, match=rf"sample {row} \(.*bad.zip/class\d/cut.jpg\).*truncated") as raised:
        epoch(DALILoader(dataset, 4, device=device))
    assert raised.value.index == row
    for mode in ("skip", "replace"):
        loader = DALILoader(dataset, 4, device=device, on_error=mode)
        assert sum(len(images) for images, _ in loader) == len(dataset)
        assert [error.index for error in loader.errors] == [row]


def test_what_read_raises_names_the_sample(page: Any) -> None:
    class Broken(page["ZipDataset"]):
        def read_bytes(self, index: int) -> bytes:
            if index == 2:
                raise LookupError("the container has no such entry")
            return super().read_bytes(index)

    with pytest.raises(SampleError, match=r"sample 2 .*it cannot be read \(LookupError: the container has no"):
        epoch(DALILoader(Broken(page["folder"] / "train.zip", CROPPED), 4, device="cpu"))


def test_a_subclass_that_changes_its_samples_is_asked_for_them(page: Any) -> None:
    class Negated(page["ZipDataset"]):
        def __getitem__(self, index: int) -> Any:
            image, label = super().__getitem__(index)
            return 255 - image, label

    dataset = Negated(page["folder"] / "train.zip", CROPPED)
    loader = DALILoader(dataset, 3, device="cpu")
    assert loader._session.source is None
    assert_same(epoch(loader), epoch(DataLoader(dataset, 3)))


def test_another_transform_is_seen(page: Any) -> None:
    dataset = page["ZipDataset"](page["folder"] / "train.zip", CROPPED)
    loader = DALILoader(dataset, 3, device="cpu")
    epoch(loader)
    dataset.transform = v2.Compose([v2.CenterCrop(20), v2.ToImage()])
    assert_same(epoch(loader), epoch(DataLoader(dataset, 3)))


@pytest.mark.parametrize("size", [None, (30, 40)])
def test_a_source_of_pixels_tells_their_size(size: Any) -> None:
    pixels = np.arange(6 * 30 * 40 * 3, dtype=np.uint8).reshape(6, 30, 40, 3)

    class Pixels(Source):
        kind, spec = InputKind.PIXELS, Spec(size=size)

        def __len__(self) -> int:
            return 6

        def read(self, rows: Any) -> Any:
            return pixels[rows]

        def target(self, row: int) -> int:
            return row

        def name(self, row: int) -> str:
            return f"image {row}"

    class Images(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            return pixels[index], index

        def torchdali_source(self) -> Source:
            return Pixels()

    loader: Any = DALILoader(Images(), 4, transform=v2.ToImage(), device="cpu")
    if size is None:
        assert loader._session.source is None
        assert "must have a size" in loader._session.why_not_native
    else:
        images, labels = next(iter(loader))
        assert np.array_equal(images.permute(0, 2, 3, 1).numpy(), pixels[:4])
        assert labels.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("as_array", [False, True], ids=["list", "array"])
@pytest.mark.parametrize("nest", [lambda one: one, lambda one: ConcatDataset([Subset(one, [5, 2]), one])])
def test_a_source_of_files_gives_their_paths(pictures: Path, nest: Any, as_array: bool) -> None:
    folder = ImageFolder(pictures, CROPPED)
    paths = [path for path, _ in folder.samples]

    class Files(Source):
        kind, transform = InputKind.FILES, CROPPED

        def __len__(self) -> int:
            return len(paths)

        def read(self, rows: Any) -> Any:
            chosen = [paths[row] for row in rows.tolist()]
            if not as_array:
                return chosen
            table = np.array([path.encode() for path in chosen])
            padded = np.zeros((len(chosen), 300), np.uint8)
            padded[:, : table.itemsize] = table.view(np.uint8).reshape(len(chosen), -1)
            return padded

        def target(self, row: int) -> int:
            return folder.targets[row]

        def name(self, row: int) -> str:
            return paths[row]

    class Own(torch.utils.data.Dataset[Any]):
        transform = CROPPED

        def __len__(self) -> int:
            return len(folder)

        def __getitem__(self, index: int) -> Any:
            return folder[index]

        def torchdali_source(self) -> Source:
            return Files()

    loader: Any = DALILoader(nest(Own()), 5, device="cpu")
    assert loader._session.source is not None
    assert_same(epoch(loader), epoch(DataLoader(nest(Own()), 5)))

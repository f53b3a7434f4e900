"""Which parts of a sample are images: the argument ``images=``, and what is taken without it."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import encoded
from PIL import Image
from skimage import data as photos
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.transforms import v2

from torchdali import DALILoader, TransformError
from torchdali.samples.finder import ImageFinder
from torchdali.samples.tree import build_tree

CROP = v2.Compose([v2.ToImage(), v2.CenterCrop(16)])
PHOTO = Image.fromarray(photos.astronaut()[:64, :80])
PICTURES = [PHOTO.rotate(90 * i) for i in range(4)]


def png(picture: Image.Image) -> bytes:
    return encoded(picture, "PNG")


class Samples(Dataset[Any]):
    """Samples made by a function of the sample's number and of what stands for a picture."""

    def __init__(self, make: Callable[[int, Callable[[Image.Image], Any]], Any], give: Callable[[Any], Any]) -> None:
        self.make, self.give = make, give

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.make(index, self.give)


def stereo(index: int, give: Callable[[Image.Image], Any]) -> Any:
    return {"left": give(PICTURES[index]), "views": [give(PICTURES[(index + k) % 4]) for k in (1, 2)], "y": index}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def ours(make: Any, give: Any, **options: Any) -> list[Any]:
    return list(DALILoader(Samples(make, give), 2, transform=CROP, device="cpu", **options))


@pytest.mark.parametrize("workers", [0, 2])
def test_named_images_are_transformed_and_nothing_else(workers: int) -> None:
    came = ours(stereo, png, images=["left", ("views", 1)], num_workers=workers)
    theirs = list(DataLoader(Samples(lambda i, give: {**stereo(i, give), "left": CROP(PICTURES[i])}, png), 2))
    for batch, expected in zip(came, theirs, strict=True):
        assert torch.equal(batch["left"], expected["left"])
        assert batch["views"][0] == expected["views"][0]
        assert isinstance(batch["views"][1], torch.Tensor)
        assert torch.equal(batch["y"], expected["y"])


def test_all_parts_of_a_named_list_are_images() -> None:
    whole = list(DataLoader(Samples(stereo, CROP), 2))
    assert equal(ours(stereo, png, images=["left", "views"]), whole)


@pytest.mark.parametrize("give", [png, np.asarray, str], ids=["bytes", "grey", "str"])
def test_a_string_is_a_path_and_two_axes_are_grey(give: Any, tmp_path: Path) -> None:
    for i, picture in enumerate(PICTURES):
        picture.convert("L").convert("RGB" if give is not np.asarray else "L").save(tmp_path / f"{i}.png")
    files = [tmp_path / f"{i}.png" for i in range(4)]
    values = {png: [f.read_bytes() for f in files], np.asarray: [np.asarray(Image.open(f)) for f in files]}
    items = values.get(give, [str(f) for f in files])
    expected = torch.stack([CROP(Image.open(f)) for f in files])
    for options in ({}, {"images": 0}):
        batches = list(
            DALILoader([(x, i) for i, x in enumerate(items)], 2, transform=CROP, device="cpu", **options)  # type: ignore[arg-type]
        )
        assert torch.equal(torch.cat([images for images, _ in batches]), expected)


def test_a_string_that_is_no_file_is_text_and_the_warning_says_what_to_write() -> None:
    with pytest.warns(UserWarning, match=r"pathlib\.Path\(\.\.\.\) or name its key in images="):
        list(DALILoader([("nowhere.png", 1)], transform=CROP, device="cpu"))  # type: ignore[arg-type]


def test_files_under_several_keys_are_refused() -> None:
    def make(index: int, give: Any) -> Any:
        return {"before": give(PICTURES[index]), "after": give(PICTURES[0]), "y": index}

    with pytest.raises(TransformError, match=r"at \['before'\], \['after'\].* images=\['before', 'after'\]"):
        ours(make, png)
    text = io.StringIO()
    DALILoader(Samples(make, png), 2, transform=CROP, device="cpu").explain(text)
    assert "the first batch will fail: a sample has several encoded images" in " ".join(text.getvalue().split())


def test_all_files_of_one_list_are_taken() -> None:
    def make(index: int, give: Any) -> Any:
        return [give(PICTURES[index]), give(PICTURES[index - 1])], index

    assert equal(ours(make, png), list(DataLoader(Samples(make, CROP), 2)))
    streamed = [[png(p) for p in PICTURES], [0, 1, 2, 3]]  # what webdataset's batched() gives
    (batch,) = DALILoader([streamed], batch_size=None, transform=CROP, device="cpu")  # type: ignore[arg-type]
    assert all(torch.equal(image, CROP(p)) for image, p in zip(batch[0], PICTURES, strict=True))


def test_a_path_beside_an_image_is_no_second_image() -> None:
    sample = build_tree({"meta": Path("a.json"), "scan": Path("a.png")})
    assert ImageFinder().find(sample) == [("['scan']", Path("a.png"))]


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        (1.5, TypeError, "images must be a key or an index"),
        (True, TypeError, "images must be a key or an index"),
        ([], ValueError, "images must name one part"),
        (["left", "left"], ValueError, "each once"),
    ],
)
def test_values_that_are_no_key_paths(images: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DALILoader(Samples(stereo, png), images=images, device="cpu")


@pytest.mark.parametrize(
    ("images", "message"),
    [("right", "must name parts that every sample has, got 'right'"), ("y", "got 'y', which is a int")],
)
def test_names_that_samples_do_not_have(images: str, message: str) -> None:
    with pytest.raises(TransformError, match=message):
        ours(stereo, png, images=images)


def test_a_native_dataset_has_its_image_where_it_has(pictures: Path) -> None:
    DALILoader(pictures, device="cpu", images=0)
    with pytest.raises(ValueError, match="images must be None or 0 for a native dataset"):
        DALILoader(pictures, device="cpu", images="scan")


def test_explain_says_why() -> None:
    for options, why in (
        ({"images": "left"}, "named by images="),
        ({}, "all PIL images, tv_tensors.Image and tv_tensors.Video"),
    ):
        text = io.StringIO()
        give = png if options else Image.Image.copy
        DALILoader(Samples(stereo, give), 2, transform=CROP, device="cpu", **options).explain(text)
        assert why in " ".join(text.getvalue().split())


def tasks(index: int, give: Callable[[Image.Image], Any]) -> Any:
    kinds = [
        {"photo": give(PICTURES[index]), "label": index},
        {"query": give(PICTURES[index]), "key": give(PICTURES[index - 1]), "match": float(index)},
        {"text": f"sentence {index}", "label": index},
    ]
    return kinds[min(index, 2)]


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"collate_fn": default_collate}, {"on_error": "skip"}])
def test_batches_of_several_tasks(options: dict[str, Any]) -> None:
    batches = [[0], [2, 3], [1], [0, 0], [3]]
    data = Samples(tasks, Image.Image.copy)
    came = list(DALILoader(data, batch_sampler=batches, transform=CROP, device="cpu", **options))
    assert equal(came, list(DataLoader(Samples(tasks, CROP), batch_sampler=batches)))


def test_files_in_an_archive_are_opened_as_datasets_does(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for i, picture in enumerate(PICTURES):
            archive.writestr(f"{i}.png", png(picture))

    def row(i: int, give: Any) -> Any:
        return {"image": {"bytes": None, "path": f"zip://{i}.png::{tmp_path}/all.zip"}, "label": i}

    came = torch.cat([batch["image"] for batch in ours(row, None)])
    assert torch.equal(came, torch.stack([CROP(picture) for picture in PICTURES]))
    loader = DALILoader(
        Samples(lambda i, give: row(i + i // 3, give), None), 4, transform=CROP, device="cpu", on_error="skip"
    )
    list(loader)
    assert [error.index for error in loader.errors] == [3]
    assert "4.png" in str(loader.errors[0])
    assert "there is no such file" in str(loader.errors[0])


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize("as_path", [True, False], ids=["path", "bytes"])
def test_files_of_16_bits_keep_them(kind: str, as_path: bool, tmp_path: Path) -> None:
    depth = np.asarray(PHOTO.convert("L")).astype(np.uint16) * 257 - 100
    picture = Image.fromarray(depth)
    path = tmp_path / f"depth.{kind.lower()}"
    picture.save(path, kind)
    chain = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    sample: Any = path if as_path else path.read_bytes()
    (batch,) = DALILoader([(sample, 0)], transform=chain, device="cpu")  # type: ignore[arg-type]
    assert torch.equal(batch[0][0], chain(depth[..., None]))
    assert len(batch[0].unique()) > 100


def test_lists_of_any_length_do_not_fill_the_memory_or_the_plan() -> None:
    samples = [(PHOTO, [0] * i, [PHOTO] * (i % 12)) for i in range(150)]
    loader = DALILoader(samples, transform=v2.Compose([v2.ToImage(), v2.CenterCrop(4)]), device="cpu")  # type: ignore[arg-type]
    assert sum(1 for _ in loader) == 150
    plan = loader._session.proxy_plan
    assert plan is not None
    assert len(plan.key_paths) == 100
    text = io.StringIO()
    loader.explain(text)
    assert "[2][6], ...: uint8" in " ".join(text.getvalue().split())

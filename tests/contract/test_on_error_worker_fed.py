"""The same of datasets that are asked for samples: what they raise themselves, and files that they hand over."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import skimage.data
import torch
from conftest import CROP, same
from helpers.damages import DAMAGES, next_good
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

BATCH = 5
SEED = 4
RANDOM = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(CROP), v2.ToDtype(torch.float32, scale=True)])


def scrambled(path: Path) -> None:
    """Header and end are well, so that only the decoder finds out."""
    data = bytearray(path.read_bytes())
    table = data.index(b"\xff\xc4")  # of Huffman codes
    data[table + 4 : table + 20] = b"\xff" * 16
    path.write_bytes(data)


HOW = {**DAMAGES, "scrambled": scrambled}
BAD = {2: "garbage", 3: "vanished", 9: "truncated JPEG", 11: "scrambled", 20: "empty"}


class Given(Dataset[Any]):
    """Samples of a folder, as PIL images, paths or encoded files."""

    def __init__(self, folder: ImageFolder, kind: str) -> None:
        self.folder, self.kind = folder, kind

    def __len__(self) -> int:
        return len(self.folder.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path, label = self.folder.samples[index]
        images = {"pil": lambda: self.folder.loader(path), "path": lambda: Path(path), "bytes": lambda: read(path)}
        return {"image": images[self.kind](), "label": label, "name": f"number {index}", "at": (index, float(index))}


def read(path: str) -> bytes:
    return Path(path).read_bytes() if Path(path).exists() else b"\xff\xd8\xff nothing"


class AtOnce(Given):
    """Whose batches are asked for at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def listed(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return default_collate(samples)


def batches(dataset: Any, device: str, **options: Any) -> tuple[list[Any], list[SampleError]]:
    torch.manual_seed(SEED)
    options = {"batch_size": BATCH, "shuffle": True, "seed": 5, "transform": RANDOM, **options}
    with DALILoader(dataset, device=device, **options) as loader:
        return list(loader), loader.errors


@pytest.mark.parametrize(
    ("kind", "mode", "workers", "collate"),
    [
        *(("path", "skip", 0, None), ("path", "replace", 0, listed), ("bytes", "skip", 0, listed)),
        ("path", "skip", 2, listed),
        pytest.param("bytes", "replace", 2, None, marks=pytest.mark.slow),
        pytest.param("path", "replace", 2, None, marks=pytest.mark.slow),
    ],
)
def test_files_that_are_handed_over(
    fresh: ImageFolder, device: str, kind: str, mode: str, workers: int, collate: Any
) -> None:
    options = {"num_workers": workers, "collate_fn": collate}
    true, _ = batches(Given(fresh, kind), device, **options)
    for index, how in BAD.items():
        HOW[how](Path(fresh.samples[index][0]))
    seen, errors = batches(Given(fresh, kind), device, on_error=mode, **options)
    assert_as_it_was(seen, true, mode)
    assert sorted(error.index for error in errors) == sorted(BAD)


@pytest.mark.parametrize("given", [Given, AtOnce])
@pytest.mark.parametrize("workers", [0, 2])
def test_what_the_dataset_raises_can_be_skipped(fresh: ImageFolder, workers: int, given: Any) -> None:
    true, _ = batches(given(fresh, "pil"), "cpu", num_workers=workers)
    for index, how in BAD.items():
        HOW["garbage" if how == "scrambled" else how](Path(fresh.samples[index][0]))
    seen, errors = batches(given(fresh, "pil"), "cpu", num_workers=workers, on_error="skip")
    assert_as_it_was(seen, true, "skip")
    assert sorted(error.index for error in errors) == sorted(BAD)
    assert all("the dataset raised" in error.reason and error.path == given.__name__ for error in errors)
    with pytest.raises((OSError, SampleError)):
        batches(given(fresh, "pil"), "cpu", num_workers=workers, on_error="replace")  # it alone knows the target


@pytest.mark.parametrize("raising", [(2, 3), (2,), ()])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_bad_sample_is_not_blamed_on_the_one_that_it_stood_in_for(
    fresh: ImageFolder, workers: int, raising: tuple[int, ...]
) -> None:
    """Of 2 and 3 the worker knows, and puts 4 there; of 4 only the decoder finds out."""

    class Mixed(Given):
        def __getitem__(self, index: int) -> dict[str, Any]:
            self.kind = "pil" if index in raising else "path"
            return super().__getitem__(index)

    true, _ = batches(Given(fresh, "path"), "cpu", shuffle=False, num_workers=workers)
    for index, how in {2: "vanished", 3: "garbage", 4: "truncated JPEG"}.items():
        HOW[how](Path(fresh.samples[index][0]))
    options: dict[str, Any] = {"num_workers": workers, "on_error": "skip", "max_errors": 3}
    seen, errors = batches(Mixed(fresh, "path"), "cpu", shuffle=False, **options)
    paths = {index: "Mixed" if index in raising else fresh.samples[index][0] for index in (2, 3, 4)}
    assert {error.index: error.path for error in errors} == paths
    assert len(errors) == 3
    assert [batch["label"].tolist() for batch in seen][:2] == [[0, 1, 0, 0, 0], [5, 6, 7, 8, 9]]
    assert torch.equal(seen[0]["image"][:2], true[0]["image"][:2])


@pytest.mark.parametrize("kinds", [1, 2])
def test_another_sample_stands_in_with_all_its_images_or_not_at_all(tmp_path: Path, kinds: int) -> None:
    """Not where they are of several kinds, of which each has a run of its own."""
    photograph, samples = PIL.Image.fromarray(skimage.data.astronaut()), list[Any]()
    for i in range(3):
        paths = [tmp_path / f"{i} {name}.jpg" for name in ("one", "other")]
        for path in paths:
            photograph.crop((50 * i, 0, 50 * i + 60, 50)).save(path)
        one, other = ({"bytes": None, "path": str(path)} for path in paths)
        samples.append({"one": photograph.crop((0, 0, 60, 50)) if kinds == 2 else one, "other": other, "number": i})
    scrambled(tmp_path / "1 other.jpg")
    iterator = iter(DALILoader(samples, 3, transform=v2.ToImage(), on_error="skip", device="cpu"))  # pyright: ignore
    if kinds == 2:
        with pytest.raises(SampleError, match=r"sample 1 .*no other sample of its batch can take its place"):
            next(iterator)
        return
    batch = next(iterator)
    assert batch["number"].tolist() == [0, 2, 2]
    for images in (batch["one"], batch["other"]):
        assert torch.equal(images[1], images[2])
        assert not torch.equal(images[0], images[1])


@pytest.mark.parametrize("mode", ["raise", "skip", "replace"])
@pytest.mark.parametrize("odd", [0, 2])
def test_images_in_other_places_are_a_mistake(odd: int, mode: Any) -> None:
    samples: Any = [{"other" if i == odd else "image": PIL.Image.new("RGB", (30, 20))} for i in range(3)]
    loader = DALILoader(samples, 3, transform=v2.ToImage(), on_error=mode, device="cpu")
    with pytest.raises(SampleError, match=rf"sample {odd} .*at \['other'\], in other samples .* at \['image'\]"):
        next(iter(loader))


@pytest.mark.parametrize("workers", [0, 2])
def test_without_a_transform(fresh: ImageFolder, workers: int) -> None:
    fresh.transform = v2.Compose([v2.ToImage(), v2.CenterCrop(24)])
    torch.manual_seed(SEED)
    true = [labels.tolist() for _, labels in DataLoader(fresh, BATCH, shuffle=True)]
    HOW["garbage"](Path(fresh.samples[2][0]))

    class Asked(Dataset[Any]):
        def __len__(self) -> int:
            return len(fresh)

        def __getitem__(self, index: int) -> Any:
            return fresh[index]

    seen, errors = batches(Asked(), "cpu", transform=None, num_workers=workers, on_error="skip")
    expected = [[next_good(labels, i, {2}) for i in range(len(labels))] for labels in true]
    assert [labels.tolist() for _, labels in seen] == expected
    assert [error.index for error in errors] == [2]


def test_limit_and_whole_batches(fresh: ImageFolder) -> None:
    for index in (5, 6, 7, 8, 9):
        HOW["garbage"](Path(fresh.samples[index][0]))
    for kind in ("pil", "path"):
        with pytest.raises(SampleError, match="no other sample of its batch can take its place"):
            batches(Given(fresh, kind), "cpu", on_error="skip", shuffle=False, num_workers=1)
    with pytest.raises(SampleError, match="max_errors=2 were found before"):
        batches(Given(fresh, "path"), "cpu", on_error="replace", max_errors=2, num_workers=1)
    one, errors = batches(Given(fresh, "path"), "cpu", on_error="replace", batch_size=None, shuffle=False)
    assert [bool(sample["image"].any()) for sample in one] == [i not in (5, 6, 7, 8, 9) for i in range(len(one))]
    assert len(errors) == 5


def assert_as_it_was(seen: list[Any], true: list[Any], mode: str) -> None:
    """All but the bad samples are what they were, with all that is theirs."""
    assert len(seen) == len(true)
    for batch, before in zip(seen, true, strict=True):
        asked = before["label"].tolist()
        for place, label in enumerate(asked):
            image, now = batch["image"][place], int(batch["label"][place])
            if label not in BAD:
                assert now == label
                assert torch.equal(image, before["image"][place])
            elif mode == "replace":
                assert now == label
                assert not image.any()
            else:
                assert now == next_good(asked, place, BAD)
                assert image.any()
            assert batch["name"][place] == f"number {now}"
            assert [part[place].item() for part in batch["at"]] == [now, now]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", ["skip", "replace"])
def test_bad_samples_are_counted_in_the_order_of_their_batches(fresh: ImageFolder, mode: Any, workers: int) -> None:
    """Whether a worker finds them ahead of time or DALI only then."""
    scrambled(Path(fresh.samples[1][0]))
    Path(fresh.samples[BATCH + 1][0]).unlink()
    options: Any = {"num_workers": workers, "transform": RANDOM, "device": "cpu", "on_error": mode, "max_errors": 1}
    loader: DALILoader[Any] = DALILoader(Given(fresh, "path"), BATCH, **options)
    iterator = iter(loader)
    assert len(next(iterator)["label"]) == BATCH
    assert [error.index for error in loader.errors] == [1]
    with pytest.raises(SampleError, match="max_errors=1 were found before") as caught:
        next(iterator)
    assert caught.value.index == BATCH + 1
    assert len(next(iterator)["label"]) == BATCH


def unread(path: Path) -> PIL.Image.Image:
    return PIL.Image.open(io.BytesIO(path.read_bytes()))


class Opened(Dataset[Any]):
    """Samples that are made of paths."""

    def __init__(self, give: Callable[[Path], Any], paths: list[Path]) -> None:
        self.give, self.paths = give, paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return self.give(self.paths[index])


@pytest.mark.parametrize(
    ("mode", "give", "workers"),
    [
        *((mode, give, 0) for mode in ("RGB", "RGBA", "CMYK", "P") for give in (Path, Path.read_bytes, unread)),
        *(("RGB", give, 1) for give in (Path, Path.read_bytes, unread)),
    ],
)
def test_a_black_image_is_as_large_as_its_header_says(tmp_path: Path, give: Any, mode: str, workers: int) -> None:
    """And not as the one beside it, though the file is cut off, whoever decodes it."""
    suffix = "jpg" if mode == "CMYK" else "png"
    photograph = PIL.Image.fromarray(skimage.data.astronaut())
    for name, size in (("cut", (60, 50)), ("good", (30, 20))):
        photograph.resize(size).convert(mode).save(tmp_path / f"{name}.{suffix}")
    cut = tmp_path / f"cut.{suffix}"
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    dataset = Opened(give, [cut, tmp_path / f"good.{suffix}"])
    transform = v2.Compose([v2.ToImage(), v2.Pad(4)])
    loader = DALILoader(
        dataset, 2, transform=transform, collate_fn=list, on_error="replace", num_workers=workers, device="cpu"
    )
    (images,) = loader
    assert [tuple(image.shape[1:]) for image in images] == [(58, 68), (28, 38)]
    assert not images[0][:, 4:-4, 4:-4].any()


@pytest.mark.parametrize("mode", ["raise", "skip", "replace"])
def test_a_timeout_is_not_taken_for_a_file_that_cannot_be_read(
    fresh: ImageFolder, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    """A handler of alarms may raise it anywhere. It is an OSError, as what is raised of files."""

    def hit(*_: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr("torchdali.samples.image.read_header", hit)
    loader = DALILoader(Given(fresh, "path"), BATCH, transform=v2.ToImage(), on_error=mode, device="cpu")
    with pytest.raises(TimeoutError):
        next(iter(loader))
    assert not loader.errors


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("collate_fn", [None, list])
@pytest.mark.parametrize("kind", [str, lambda path: path.read_bytes() if path.exists() else b"<html>"])
def test_a_text_or_bytes_in_the_place_of_images_is_a_bad_file(
    pictures: Path, workers: int, collate_fn: Any, kind: Callable[[Path], Any]
) -> None:
    paths = [*sorted(pictures.rglob("*.*g"))[:2], Path("typo.jpg")]
    options: dict[str, Any] = {"transform": v2.CenterCrop(8), "device": "cpu", "num_workers": workers}
    dataset: Any = [(kind(path), 1) for path in paths]
    with pytest.raises(SampleError, match=r"sample 2 \((typo\.jpg\): there is no such|\[0\]\): it cannot be decoded)"):
        next(iter(DALILoader(dataset, 3, collate_fn=collate_fn, **options)))
    samples = next(iter(DALILoader(dataset, 3, collate_fn=list, on_error="skip", **options)))
    assert [type(image) for image, _ in samples] == [type(samples[0][0])] * 3
    assert same(samples[2][0], samples[0][0])

"""What scripts do with DataLoader, and do with DALILoader: the same batches, or an error that says why."""

from __future__ import annotations

import errno
import io
import os
import re
import resource
import struct
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Numbered, encoded, in_order
from helpers.proxied import difference
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, ImageIndex, SampleError, TransformError

CROPPED = v2.Compose([v2.ToImage(), v2.CenterCrop(8)])
PICTURE = Image.fromarray(np.arange(30 * 40 * 3, dtype=np.uint8).reshape(30, 40, 3))

# Arguments


@pytest.mark.parametrize(
    "transform",
    [
        lambda p: v2.RandomHorizontalFlip(p),
        lambda p: v2.RandomGrayscale(p),
        lambda p: v2.RandomPhotometricDistort(p=p),
        lambda p: v2.RandomApply([v2.RandomInvert(1.0)], p=p),
        lambda p: v2.RandomErasing(p=p),
        lambda p: v2.RandomZoomOut(p=p, side_range=(1.0, 1.0)),
        lambda p: v2.RandomPerspective(p=p),
    ],
)
@pytest.mark.parametrize("kind", [torch.tensor, np.float64])
def test_a_probability_is_a_number_of_any_kind(pictures: Path, numbered: Numbered, transform: Any, kind: Any) -> None:
    batches = [
        list(DALILoader(numbered(pictures, v2.Compose([v2.ToImage(), transform(p), v2.CenterCrop(8)])), 3, **OWN))
        for p in (0.5, kind(0.5))
    ]
    assert not difference(*batches)


OWN: dict[str, Any] = {"device": "cpu", "seed": 1}


def test_a_path_may_begin_in_the_home_directory(
    pictures: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(pictures.parent))
    short = f"~/{pictures.name}"
    assert len(DALILoader(short, 3, transform=CROPPED, device="cpu")) == len(in_order())
    monkeypatch.setenv("HOME", str(tmp_path))
    ImageIndex.write("~/index.npz", pictures)
    assert len(ImageIndex("~/index.npz")) == len(ImageFolder(pictures))
    monkeypatch.setenv("HOME", str(pictures.parent))
    ImageIndex.write(tmp_path / "other.npz", short)
    assert (tmp_path / "other.npz").exists()


# Datasets


class Streaming(IterableDataset[Any]):
    """Its ``state_dict`` needs what its own loader gives, as that of Mosaic's and LitData's ``StreamingDataset``."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (torch.tensor(i) for i in range(8))

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_whose_state_needs_arguments_is_read_and_passed_over(workers: int) -> None:
    theirs = list(DataLoader(Streaming(), 2, num_workers=workers))
    loader, again = (DALILoader(Streaming(), 2, num_workers=workers, device="cpu") for _ in range(2))
    iterator = iter(loader)
    assert not difference([next(iterator)], theirs[:1])
    again.load_state_dict(loader.state_dict())
    assert not difference(list(again), theirs[1:])


class Words(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> str:
        return "a word"


class Boxes(torch.utils.data.Dataset[Any]):
    """Images with boxes, which transforms would have to move, too."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        boxes = tv_tensors.BoundingBoxes([[1, 2, 30, 40]], format="XYXY", canvas_size=(64, 64))  # pyright: ignore
        return tv_tensors.Image(torch.zeros(3, 64, 64, dtype=torch.uint8)), {"boxes": boxes}


def explained(loader: DALILoader[Any]) -> str:
    loader.explain(text := io.StringIO())
    return text.getvalue()


@pytest.mark.parametrize(
    ("dataset", "transform", "text"),
    [
        (Boxes(), v2.FiveCrop(8), "transform 1, FiveCrop: BoundingBoxes'es and Mask's are not supported by FiveCrop()"),
        ([(PICTURE, 1)] * 4, v2.CenterCrop(8), "the transforms end in PIL images or arrays"),
    ],
    ids=["boxes", "PIL images"],
)
def test_explain_says_that_the_first_batch_will_fail(dataset: Any, transform: Any, text: str) -> None:
    loader = DALILoader(dataset, 2, transform=transform, device="cpu")
    told = " ".join(explained(loader).split())
    assert f"the first batch will fail: {text}" in told
    assert "DALI CPU" not in told, "there is no plan"
    with pytest.raises(TransformError, match=re.escape(text)):
        next(iter(loader))


class Compose:
    """Stands for a transform of albumentations, which is called by name."""

    def __call__(self, *, image: Any) -> Any:
        return {"image": image}


Compose.__module__ = "albumentations.core.composition"


@pytest.mark.parametrize("before", [[], [v2.Lambda(lambda image: image)]], ids=["first", "after torch"])
def test_a_transform_of_albumentations_is_named(before: list[Any]) -> None:
    samples: Any = [(np.zeros((8, 8, 3), np.uint8), 1)] * 4
    loader = DALILoader(samples, 2, transform=[*before, Compose()], device="cpu")
    for use in (lambda: next(iter(loader)), lambda: explained(loader)):
        with pytest.raises(
            TransformError, match=r"transform \d, Compose, is of albumentations.*call it in the dataset"
        ):
            use()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_warning_points_at_the_line_of_the_script(workers: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in DALILoader(Words(), 2, transform=v2.ToImage(), num_workers=workers, device="cpu"):
            pass
    (warning,) = (one for one in caught if "no image was found" in str(one.message))
    assert warning.filename == __file__


# Files


def png_with_headers(*sizes: tuple[int, int]) -> bytes:
    """A PNG with several IHDR chunks; PIL takes the last."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    width, height = sizes[-1]
    heads = b"".join(chunk(b"IHDR", struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0)) for size in sizes)
    pixels = zlib.compress(bytes((3 * width + 1) * height))
    return b"\x89PNG\r\n\x1a\n" + heads + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize("count", [3, 40])
def test_a_png_with_two_headers_is_what_pil_takes_it_for(tmp_path: Path, count: int, device: str) -> None:
    (tmp_path / "a").mkdir()
    for i in range(count):
        sizes = [(40, 30), (80, 70)] if i == 1 else [(40, 30)]
        (tmp_path / "a" / f"{i:02}.png").write_bytes(png_with_headers(*sizes))
    dataset = ImageFolder(tmp_path, CROPPED)
    theirs = torch.cat([images for images, _ in DataLoader(dataset, count)])
    ours = torch.cat([images.cpu() for images, _ in DALILoader(dataset, count, device=device)])
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("count", [8, 40])
@pytest.mark.parametrize("known", [False, True])
def test_a_missing_file_whose_name_is_no_utf8_is_named(
    tmp_path: Path, known: bool, count: int, on_error: Any, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    """DALI's binding makes no str of its message then, and raises UnicodeDecodeError."""
    caplog.set_level("ERROR", "torchdali")  # pytest-xdist cannot send a report whose captured log has such a name
    (tmp_path / "a").mkdir()
    paths = [os.fsencode(tmp_path / "a") + b"/%02dcaf\xe9.png" % i for i in range(40)]
    for path in paths:
        Path(os.fsdecode(path)).write_bytes(encoded(PICTURE, "PNG"))
    loader = DALILoader(ImageFolder(tmp_path, CROPPED), count, on_error=on_error, device=device)
    if known:
        list(loader)
    Path(os.fsdecode(paths[5])).unlink()
    if on_error == "skip":
        assert sum(len(images) for images, _ in loader) == 40
        assert [error.index for error in loader.errors] == [5]
    else:
        with pytest.raises(SampleError, match="there is no such file") as raised:
            list(loader)
        assert (raised.value.index, os.fsencode(raised.value.path)) == (5, paths[5])


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_files_that_were_missing_are_tried_again_in_the_next_epoch(tmp_path: Path, on_error: Any, device: str) -> None:
    """A share may be away for a moment. What is damaged stays known."""
    (tmp_path / "share" / "a").mkdir(parents=True)
    for i in range(8):
        data = encoded(PICTURE, "PNG")
        (tmp_path / "share" / "a" / f"{i}.png").write_bytes(data[:60] if i == 1 else data)
    dataset = ImageFolder(tmp_path / "share", CROPPED)
    loader = DALILoader(dataset, 4, on_error=on_error, device=device)
    file = Path(dataset.samples[6][0])
    file.rename(tmp_path / "away")
    list(loader)
    assert [error.index for error in loader.errors] == [1, 6]
    (tmp_path / "away").rename(file)
    images = torch.cat([images for images, _ in loader]).cpu()
    assert torch.equal(images[6], dataset[6][0])
    assert [error.index for error in loader.errors] == [1, 6]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
@pytest.mark.parametrize("fed", [False, True])
def test_a_fault_of_the_system_is_no_fault_of_a_file(
    pictures: Path, numbered: Numbered, number: int, fed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset: Any = numbered(pictures, CROPPED)
    paths = [(Path(path), label) for path, label in dataset.samples]
    options: dict[str, Any] = {"transform": CROPPED} if fed else {}
    loader = DALILoader(paths if fed else dataset, 3, on_error="skip", device="cpu", **options)  # pyright: ignore
    opened, left = os.open, [1] if fed else [1, 1]  # a header that was not read with others is read once more

    def fail_once(path: Any, *args: Any, **kwargs: Any) -> int:
        if left and os.fsdecode(path) == str(paths[0][0]):
            left.pop()
            raise OSError(number, os.strerror(number), path)
        return opened(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail_once)
        iterator, raised = iter(loader), list[OSError]()
        while True:
            try:
                next(iterator)
            except StopIteration:
                break
            except OSError as error:
                raised.append(error)
    assert [error.errno for error in raised] == [number]
    assert not loader.errors


@pytest.mark.parametrize("count", [8, 40])
def test_a_path_that_is_written_as_a_uri_is_a_path(tmp_path: Path, count: int, device: str) -> None:
    """DALI would open the file that the URI names, also from a network."""
    (tmp_path / "a").mkdir()
    for i in range(count):
        (tmp_path / "a" / f"{i:02}.png").write_bytes(encoded(PICTURE, "PNG"))
    dataset = ImageFolder(tmp_path, CROPPED)
    dataset.samples[3] = (f"file://{dataset.samples[3][0]}", 0)
    with pytest.raises(SampleError, match="there is no such file") as raised:
        list(DALILoader(dataset, count, device=device))
    assert (raised.value.index, raised.value.path) == (3, dataset.samples[3][0])


@pytest.mark.parametrize(
    ("name", "column"),
    [("sizes", np.zeros(24, np.uint16)), ("flags", np.zeros(24)), ("lengths", np.zeros(24, np.uint8))],
)
def test_an_index_whose_headers_are_of_another_type_is_named(
    tmp_path: Path, pictures: Path, name: str, column: Any
) -> None:
    ImageIndex.write(tmp_path / "whole.npz", pictures, headers=True)
    np.savez(tmp_path / "damaged.npz", **{**np.load(tmp_path / "whole.npz"), name: column})
    with pytest.raises(ValueError, match=rf"damaged\.npz is no index: its array '{name}' must be"):
        ImageIndex(tmp_path / "damaged.npz")


def test_an_index_of_which_bytes_are_missing_is_named(tmp_path: Path, pictures: Path) -> None:
    ImageIndex.write(tmp_path / "whole.npz", pictures, headers=True)
    whole = (tmp_path / "whole.npz").read_bytes()
    for start in range(100, 500, 50):
        (tmp_path / "damaged.npz").write_bytes(whole[:start] + whole[start + 200 :])
        with pytest.raises(ValueError, match=r"damaged\.npz is no index"):
            ImageIndex(tmp_path / "damaged.npz")


# Loaders that others make of ours


def test_a_plain_loader_of_our_attributes_does_not_lose_the_transforms_in_silence(pictures: Path) -> None:
    """Opacus and Ray Train build one."""
    numbers = [(torch.full((3, 16, 16), float(i)), i) for i in range(4)]
    ours = DALILoader(numbers, 2, transform=v2.CenterCrop(8), device="cpu")  # type: ignore[arg-type]
    names = ("dataset", "batch_size", "sampler", "num_workers", "collate_fn", "drop_last", "timeout", "generator")
    options = {name: getattr(ours, name) for name in names}
    with pytest.raises(TransformError, match="a plain DataLoader was built from the attributes of a DALILoader"):
        next(iter(DataLoader(**options)))
    again, _ = next(iter(DALILoader(**options, transform=v2.CenterCrop(8), device="cpu")))
    assert again.shape == (2, 3, 8, 8)
    native = DALILoader(ImageFolder(pictures, v2.Compose([v2.Resize((8, 8)), v2.ToImage()])), 2, device="cpu")
    assert native.collate_fn is torch.utils.data.default_collate, "the dataset has the transforms"
    native.transform = v2.RandomInvert(1.0)
    with pytest.raises(TransformError, match="would lose its transform= or batch_transform="):
        next(iter(DataLoader(native.dataset, collate_fn=native.collate_fn)))
    native.transform = None
    assert native.collate_fn is torch.utils.data.default_collate


# Types of batches


@pytest.mark.parametrize("native", [True, False], ids=["native", "worker-fed"])
def test_batches_are_tv_tensors_where_the_script_says_so(native: bool, pictures: Path) -> None:
    chain = v2.Compose([v2.Resize((8, 8)), v2.ToImage()])
    dataset: Any = ImageFolder(pictures, chain) if native else [(PICTURE, 1)]
    loader = DALILoader(dataset, 2, transform=None if native else chain, device="cpu")
    for wanted in ("TVTensor", "Tensor"):
        with tv_tensors.set_return_type(wanted):
            theirs = next(iter(DataLoader(ImageFolder(pictures, chain), 2)))[0]
            assert type(next(iter(loader))[0]) is type(theirs)
    assert type(theirs) is torch.Tensor


# Random numbers on several ranks


class Repeated(torch.utils.data.Sampler[int]):
    """Each sample three times in a row, dealt to three ranks in turn."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        return iter(torch.arange(6).repeat_interleave(3).tolist()[self.rank :: 3])


def test_copies_of_a_sample_on_several_ranks_look_different(pictures: Path) -> None:
    crop = v2.Compose([v2.Resize((40, 40)), v2.RandomCrop(16), v2.ToImage()])

    def load(sampler: Any) -> torch.Tensor:
        loader = DALILoader(ImageFolder(pictures, crop), 3, sampler=sampler, seed=0, device="cpu")
        return torch.cat([images for images, _ in loader])

    ranks = [load(Repeated(rank)) for rank in range(3)]
    assert len({tuple(images.flatten(1).sum(1).tolist()) for images in ranks}) == 3
    assert torch.equal(ranks[1], load(Repeated(1)))
    shards = [
        torch.utils.data.DistributedSampler(ImageFolder(pictures), 2, rank, shuffle=False, seed=0) for rank in (0, 1)
    ]
    whole = load(torch.utils.data.SequentialSampler(ImageFolder(pictures)))
    assert all(torch.equal(load(shard), whole[rank::2]) for rank, shard in enumerate(shards)), "disjoint: no rank"


@pytest.mark.parametrize("count", [4, 40], ids=["few", "many"])
@pytest.mark.parametrize("kind", [b"eXIf", b"IDAT"])
def test_a_png_whose_chunk_is_longer_than_its_file_does_not_reach_dali(kind: bytes, count: int, tmp_path: Path) -> None:
    """DALI would take gigabytes for it. PIL says what it is."""
    (tmp_path / "a").mkdir()
    whole = encoded(PICTURE, "PNG")
    damaged = whole[:33] + struct.pack(">I", 0x80000020) + kind + whole[33:]
    for i in range(count):
        (tmp_path / "a" / f"{i:02}.png").write_bytes(damaged if i == 1 else whole)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loader = DALILoader(ImageFolder(tmp_path, v2.ToImage()), count, device="cpu", on_error="skip")
    assert sum(len(images) for images, _ in loader) == count
    assert [error.index for error in loader.errors] == [1]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 700 * 1024

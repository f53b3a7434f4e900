"""Masks that are no tensors on their way: files that DALI decodes, run lengths, and bits."""

from __future__ import annotations

import multiprocessing
import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin
from torch.utils.data import Subset
from torchvision import datasets, tv_tensors
from torchvision.transforms import v2

from tests.helpers.annotated import Annotated
from tests.helpers.wrapped import SIZES, assert_equal, load_expected, make_objects, make_voc, make_worker_fed
from torchdali import DALILoader, SampleError
from torchdali.pipeline.engine import PipelineRunner
from torchdali.sources import wrapped_classes
from torchdali.sources.mask_files import read_mask
from torchdali.transforms.targets.stored import EncodedMask
from torchdali.workers.packed_targets import PackedTargets

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning"),  # pycocotools
]

COLOURS = np.random.default_rng(1).integers(0, 256, 768).tolist()
CHAIN = v2.Compose([v2.ToImage(), v2.Pad(3, fill={tv_tensors.Mask: 255, "others": 0}), v2.RandomHorizontalFlip(1.0)])
ADAM7 = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]


def make_values(size: tuple[int, int], high: int) -> Any:
    return (np.indices(size).sum(0) // 3 * 7919 % high).astype(np.uint16 if high > 256 else np.uint8)


def join_chunks(*chunks: tuple[bytes, bytes]) -> bytes:
    parts = [struct.pack(">I", len(x)) + kind + x + struct.pack(">I", zlib.crc32(kind + x)) for kind, x in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def make_png(values: Any, colour: int, pixels: bytes, interlaced: int = 0, *more: tuple[bytes, bytes]) -> bytes:
    height, width = values.shape
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, interlaced)
    return join_chunks((b"IHDR", header), (b"PLTE", bytes(COLOURS)), *more, (b"IDAT", pixels), (b"IEND", b""))


def palette(bits: int, **options: Any) -> Callable[[Path, tuple[int, int]], None]:
    def write(path: Path, size: tuple[int, int]) -> None:
        image = Image.fromarray(make_values(size, 1 << bits)).convert("P")
        image.putpalette(COLOURS[: 3 << bits])
        image.putdata(make_values(size, 1 << bits).flatten().tolist())
        image.save(path, "PNG", bits=bits, **options)

    return write


def grey(high: int, suffix: str = "PNG") -> Callable[[Path, tuple[int, int]], None]:
    return lambda path, size: Image.fromarray(make_values(size, high)).save(path, suffix)


def one_bit(path: Path, size: tuple[int, int]) -> None:
    Image.fromarray(make_values(size, 2) > 0).save(path, "PNG")


def interlaced(path: Path, size: tuple[int, int]) -> None:
    values = make_values(size, 256)
    rows = [row for top, left, down, right in ADAM7 for row in values[top::down, left::right] if len(row)]
    path.write_bytes(make_png(values, 3, zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows)), 1))


def with_chunks_of_colour(path: Path, size: tuple[int, int]) -> None:
    values = make_values(size, 256)
    chunks = [(b"sBIT", b"\3\3\3"), (b"gAMA", struct.pack(">I", 30000)), (b"tRNS", bytes(range(256))), (b"bKGD", b"\7")]
    path.write_bytes(make_png(values, 3, zlib.compress(b"".join(b"\0" + row.tobytes() for row in values)), 0, *chunks))


FILES: dict[str, tuple[Callable[[Path, tuple[int, int]], None], bool]] = {
    "palette of 1 bit": (palette(1), True),
    "palette of 2 bits": (palette(2), False),
    "palette of 4 bits": (palette(4), False),
    "palette of 8 bits": (palette(8), True),
    "palette with transparency": (palette(8, transparency=3), True),
    "palette with chunks of colour": (with_chunks_of_colour, True),
    "grey of 8 bits": (grey(256), True),
    "grey of 16 bits": (grey(40_000), True),
    "grey of 1 bit": (one_bit, False),
    "interlaced": (interlaced, False),
    "a bitmap": (grey(256, "BMP"), False),
}
"""How each is written, and whether DALI decodes it."""


def list_flipped() -> list[str]:
    """List the files whose masks this version of torch can flip. Ours are compared with its masks."""
    try:
        torch.zeros(2, dtype=torch.uint16).flip(0)
    except NotImplementedError:
        return [name for name in FILES if name != "grey of 16 bits"]
    return list(FILES)


def make_dataset(root: Path, names: list[str]) -> Any:
    inner = datasets.VOCSegmentation(str(make_voc(root)), image_set="train")
    paths = inner.masks
    for i, name in enumerate(names):
        FILES[name][0](Path(paths[i % len(paths)]).with_name(f"{i}.png"), SIZES[i % len(SIZES)])
    inner.images = [inner.images[i % len(paths)] for i in range(len(names))]
    inner.targets = [str(Path(paths[0]).with_name(f"{i}.png")) for i in range(len(names))]
    return datasets.wrap_dataset_for_transforms_v2(inner)


def assert_same_samples(ours: list[Any], dataset: Any) -> None:
    expected = load_expected(dataset, CHAIN)
    assert len(ours) == len(expected)
    for (image, mask), (expected_image, expected_mask) in zip(ours, expected, strict=True):
        assert (type(image), type(mask)) == (tv_tensors.Image, tv_tensors.Mask)
        if image.device.type == "cpu":
            assert_equal(image, expected_image)
        else:  # a GPU decodes JPEGs otherwise than PIL
            assert image.shape == expected_image.shape
            assert (image.cpu().float() - expected_image.float()).abs().mean() < 1
        assert_equal(tv_tensors.Mask(mask.cpu()), expected_mask)


@pytest.mark.parametrize(("workers", "decode_bytes"), [(0, None), (1, None), (0, 500)])
def test_masks_are_those_of_pil(tmp_path: Path, device: str, workers: int, decode_bytes: int | None) -> None:
    """Also if an image file alone holds more memory than all runs in flight may."""
    names = list_flipped()
    dataset = make_dataset(tmp_path, names)
    for path, (_, is_encoded) in zip(dataset.masks, (FILES[name] for name in names), strict=True):
        assert isinstance(read_mask(path), EncodedMask if is_encoded else tv_tensors.Mask)
        assert isinstance(read_mask(Path(path).read_bytes()), EncodedMask if is_encoded else tv_tensors.Mask)
    options: Any = {"num_workers": workers, "decode_bytes": decode_bytes}
    whole = make_worker_fed(dataset) if workers else dataset
    loader = DALILoader(whole, 4, device=device, transform=CHAIN, collate_fn=list, **options)
    assert_same_samples([sample for batch in loader for sample in batch], dataset)


def test_no_worker_decodes_a_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = make_dataset(tmp_path, ["palette of 8 bits"] * 3)
    expected = load_expected(dataset, CHAIN)
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load_prepare", None)
    (batch,) = DALILoader(dataset, 3, device="cpu", transform=CHAIN, collate_fn=list)
    for (_, mask), (_, expected_mask) in zip(batch, expected, strict=True):
        assert_equal(mask, expected_mask)


@pytest.mark.parametrize("workers", [0, 2])
def test_threads_read_each_mask_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    dataset = make_dataset(tmp_path, ["palette of 8 bits"] * 3)
    reads: list[tuple[str, str]] = []

    def read(path: Any) -> Any:
        reads.append((str(path), threading.current_thread().name))
        return read_mask(path)

    monkeypatch.setattr(wrapped_classes, "read_mask", read)
    loader = DALILoader(dataset, 1, device="cpu", transform=CHAIN, collate_fn=list, num_workers=workers)
    next(batches := iter(loader))
    assert not multiprocessing.active_children()
    assert len(list(batches)) == 2
    assert sorted(path for path, _ in reads) == sorted(map(str, dataset.masks))
    assert all(name.startswith("torchdali-scan") for _, name in reads)


def test_epochs_with_masks_resume(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, ["palette of 8 bits", "grey of 8 bits", "interlaced"] * 2)
    chain = v2.Compose([v2.ToImage(), v2.RandomCrop(50, pad_if_needed=True), v2.RandomHorizontalFlip()])

    def make() -> DALILoader[Any]:
        return DALILoader(
            dataset, 2, shuffle=True, seed=1, generator=torch.Generator().manual_seed(2), transform=chain, device="cpu"
        )

    whole, loader = list(make()), make()
    next(iter(loader))
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    for ours, expected in zip(resumed, whole[1:], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(ours, expected, strict=True))


def test_damaged_masks_are_pils_to_refuse(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, ["palette of 8 bits"] * 3)
    path = Path(dataset.masks[1])
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(SampleError, match=r"sample 1 .*001\.jpg.*truncated"):
        list(DALILoader(dataset, device="cpu", transform=CHAIN, collate_fn=list))
    (batch,) = DALILoader(dataset, 3, device="cpu", transform=CHAIN, collate_fn=list, on_error="skip")
    assert torch.equal(batch[1][1], batch[2][1])


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_mask_that_nobody_decodes_is_named(tmp_path: Path, on_error: str) -> None:
    dataset = make_dataset(tmp_path, ["palette of 8 bits"] * 3)
    Path(dataset.masks[1]).write_bytes(make_png(np.zeros(SIZES[1]), 3, zlib.compress(b"\0" * 400)[:-9]))
    loader = DALILoader(dataset, 3, device="cpu", transform=CHAIN, collate_fn=list, on_error=on_error)
    if on_error == "raise":
        with pytest.raises(SampleError, match=r"sample 1.*decoded with its mask"):
            list(loader)
    else:
        (batch,) = loader
        assert torch.equal(batch[1][1], batch[2][1])


def test_pil_decodes_masks_if_dali_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    names = [*(name for name in list_flipped() if FILES[name][1]), "interlaced"]
    dataset = make_dataset(tmp_path, names)
    take = PipelineRunner.take

    def fail(runner: PipelineRunner, *args: Any) -> Any:
        outputs = take(runner, *args)
        if outputs.views[0][0].shape[-1] == 1:  # a grey mask, HWC
            raise RuntimeError("out of memory")
        return outputs

    monkeypatch.setattr(PipelineRunner, "take", fail)
    loader = DALILoader(dataset, 4, device=device, transform=CHAIN, collate_fn=list)
    assert_same_samples([sample for batch in loader for sample in batch], dataset)


def test_masks_are_decoded_once_if_the_images_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    take, failed = PipelineRunner.take, list[Any]()

    def fail(runner: PipelineRunner, *args: Any) -> Any:
        outputs = take(runner, *args)
        if outputs.views[0][0].shape[0] == 3 and not failed:
            failed.append(outputs)
            raise RuntimeError("once")
        return outputs

    monkeypatch.setattr(PipelineRunner, "take", fail)
    monkeypatch.setattr("torchdali.pipeline.readers.masks.decode_mask", None)
    dataset = make_dataset(tmp_path, ["palette of 8 bits"] * 4)
    loader = DALILoader(make_worker_fed(dataset), 4, device=device, transform=CHAIN, collate_fn=list, num_workers=1)
    (batch,) = loader
    assert failed
    assert_same_samples(batch, dataset)


def test_masks_of_16_bits_end_in_one_size(tmp_path: Path, device: str) -> None:
    dataset = make_dataset(tmp_path, ["grey of 16 bits"] * 4)
    fills: Any = {tv_tensors.Mask: 40_000, "others": 0}
    chain = v2.Compose([v2.ToImage(), v2.RandomCrop(150, pad_if_needed=True, fill=fills)])
    ours, expected = (
        next(iter(DALILoader(dataset, 4, device=name, transform=chain, seed=1)))[1] for name in (device, "cpu")
    )
    assert torch.equal(ours.cpu().int(), expected.int())
    assert expected.int().max() == 40_000
    assert 0 < (expected.int() == 40_000).sum() < expected.numel()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_substitute_comes_with_its_own_mask(tmp_path: Path, workers: int) -> None:
    dataset = make_dataset(tmp_path, ["palette of 8 bits", "grey of 16 bits", "palette of 4 bits"])
    path = Path(dataset.images[0])
    path.write_bytes(path.read_bytes()[:-300])
    whole = make_worker_fed(dataset) if workers else dataset
    (batch,) = DALILoader(
        whole, 3, device="cpu", transform=CHAIN, collate_fn=list, on_error="skip", num_workers=workers
    )
    for ours, other in ((0, 1), (1, 1), (2, 2)):
        assert_equal(batch[ours][1], CHAIN(*dataset[other])[1])


@pytest.mark.parametrize("workers", [0, 1])
def test_objects_of_coco_are_expanded_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, workers: int
) -> None:
    from pycocotools import mask

    dataset, chain = make_objects(tmp_path), v2.Compose([CHAIN, v2.SanitizeBoundingBoxes()])
    expected = load_expected(Subset(dataset, [0, 1, 2]), chain)
    assert [len(target["masks"]) for _, target in expected] == [2, 1, 1]
    monkeypatch.setattr(mask, "decode", None)
    some = Subset(dataset, [0, 1, 2])
    some = make_worker_fed(some) if workers else some
    (batch,) = DALILoader(some, 3, device=device, transform=chain, collate_fn=list, num_workers=workers)
    for (_, target), (_, expected_target) in zip(batch, expected, strict=True):
        assert_equal(list(target), list(expected_target))
        assert_equal(tv_tensors.Mask(target["masks"].cpu()), expected_target["masks"])
        assert (type(target["masks"]), target["iscrowd"]) == (tv_tensors.Mask, expected_target["iscrowd"])


@pytest.mark.parametrize("fill", [0, 3])
def test_masks_of_objects_cross_as_bits(
    photographs: Any, monkeypatch: pytest.MonkeyPatch, device: str, fill: int
) -> None:
    images = [v2.functional.pil_to_tensor(photographs[i][0]) for i in range(4)]
    fills: Any = {tv_tensors.Mask: fill, "others": 0}
    chain = v2.Compose([v2.Pad(5, fill=fills), v2.Resize((40, 50)), v2.SanitizeBoundingBoxes(min_size=9)])
    sizes: list[int] = []
    attach = PackedTargets.attach_masks

    def count(packed: PackedTargets, targets: Any, memory: Any) -> None:
        sizes.append(packed.mask_bytes)
        attach(packed, targets, memory)

    monkeypatch.setattr(PackedTargets, "attach_masks", count)
    ours, expected = (
        [
            target["masks"].cpu()
            for batch in DALILoader(
                Annotated(images, 8), 4, device=device, transform=chain, collate_fn=list, num_workers=workers
            )
            for _, target in batch
        ]
        for workers in (1, 0)
    )
    for masks, other in zip(ours, expected, strict=True):
        assert_equal(masks, other)
    dataset = Annotated(images, 8)
    targets = [dataset[i][1] for i in range(8)]
    dense = sum(target["masks"].nbytes for target in targets)
    assert sum(sizes[:2]) - sum(target["semantic"].nbytes for target in targets) < dense / 2

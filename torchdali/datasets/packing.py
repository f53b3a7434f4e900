"""Write shards: tar files of images and labels, as webdataset has them."""

from __future__ import annotations

import copy
import io
import operator
import os
import tarfile
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import PIL.Image
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset
from torchvision.datasets import DatasetFolder, ImageFolder

from torchdali.datasets.tar import IMAGE_PARTS, Tar
from torchdali.errors import UnsupportedDatasetError
from torchdali.sources import UNREADABLE, InputKind, from_dataset

__all__ = ["pack"]

_BLOCK = 512
_HEADERS = 4 * _BLOCK
"""Bytes of a sample beside its image: two headers, the label, and padding."""

_QUALITY = 90

_Sample = tuple[str, int]


def pack(
    samples: str | os.PathLike[str] | Iterable[tuple[str | os.PathLike[str], int]] | Dataset[Any],
    folder: str | os.PathLike[str],
    shard_bytes: int = 10**9,
    resize: int | None = None,
    quality: int | None = None,
    num_workers: int = 0,
    on_progress: Callable[[int], object] = bool,
) -> Tar:
    """Write images and labels into tar files, and their index.

    A sample has the parts ``cls``, its label, and its image, whose part is the suffix of the file. The image's bytes
    are those of the file, unless ``resize`` is given. No transform of a dataset is applied.

    Args:
        samples: A folder of class folders; pairs of a file and a label; or a dataset of image files and ints. Such are
            ``ImageFolder``, ``DatasetFolder``, ``ImageIndex``, a ``Table`` of paths, and others of torchvision. They
            may be under ``Subset`` and ``ConcatDataset``.
        folder: The folder to write ``shard-000000.tar`` and so on to. It is made if it does not exist.
        shard_bytes: Bytes of a shard at most, unless a single image has more. With ``resize``, of the images before.
        resize: The shorter side of images in pixels. Smaller images are not enlarged. All become JPEGs.
        quality: The quality of these JPEGs, from 1 to 100; None for 90.
        num_workers: Number of processes that read and resize images. 0: this one does.
        on_progress: Called with the number of samples that were just written.

    Returns:
        The shards.

    Raises:
        FileExistsError: The folder has shards already.
        ValueError: There are no samples, a label is negative, a file has no suffix, or ``quality`` comes without
            ``resize``.
        TypeError: A sample is no pair of a path and an int.
        OSError: A file cannot be read or written; or with ``resize``, it is no image.
        RuntimeError: A process was killed.
    """
    if quality is not None and resize is None:
        raise ValueError(f"quality= goes with resize=, got quality={quality} alone; other images keep their bytes")
    listed: list[_Sample] = []
    for sample in _list_pairs(samples):
        try:
            path, label = sample
            listed.append((os.fsdecode(path), operator.index(label)))
        except (TypeError, ValueError) as error:
            raise TypeError(
                "samples must be pairs of a path and an int, or a dataset of image files such as ImageFolder, "
                f"ImageIndex or a Table of paths, got {sample!r:.100}"
            ) from error
    if not listed:
        raise ValueError("samples must have at least one image, got none")
    for path, label in listed:
        if label < 0 or not Path(path).suffix:
            raise ValueError(f"{path} must have a suffix and a label of 0 or more, got {label}")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    if existing := sorted(target.glob("shard-*.tar")):
        raise FileExistsError(f"{target} has shards already, such as {existing[0].name}; give an empty folder")
    shards = _split(listed, shard_bytes)
    paths = [target / f"shard-{number:06}.tar" for number in range(len(shards))]

    files = _Files([path for path, _ in listed], resize, quality or _QUALITY)
    start = 0
    with closing(_read_all(files, num_workers)) as contents:
        for path, shard in zip(paths, shards, strict=True):
            names = [(_get_part(file) if resize is None else "jpg", label) for file, label in shard]
            _write_shard(path, start, names, contents, on_progress)
            start += len(shard)
    parts = {"jpg"} if resize else {_get_part(path) for path, _ in listed}
    return Tar(paths) if parts <= set(IMAGE_PARTS) else Tar(paths, image=sorted(parts))


def _list_pairs(samples: Any) -> Iterable[Any]:
    """Return the path and the label of each sample, which no transform has changed."""
    if isinstance(samples, (str, os.PathLike)):
        return ImageFolder(str(cast("Any", samples))).samples
    if isinstance(samples, Subset):
        pairs = list(_list_pairs(cast("Any", samples).dataset))
        return [pairs[i] for i in cast("Any", samples).indices]
    if isinstance(samples, ConcatDataset):
        return chain.from_iterable(map(_list_pairs, cast("Any", samples).datasets))
    if isinstance(samples, DatasetFolder):
        return samples.samples  # whatever its loader would do
    if not isinstance(samples, Dataset):
        return samples
    dataset = cast("Any", samples)
    if getattr(dataset, "target_transform", None):
        dataset = copy.copy(dataset)
        dataset.target_transform = None
    try:
        source = from_dataset(dataset)
    except UnsupportedDatasetError:  # it may still be one of pairs
        return dataset if isinstance(samples, IterableDataset) else (dataset[i] for i in range(len(dataset)))
    if source.kind is not InputKind.FILES:
        raise TypeError(
            f"a dataset must have its images in files of their own to be packed, got {source.describe()}; give an "
            "ImageFolder, ImageIndex or a Table of paths, or pairs of a path and an int"
        )
    rows = np.arange(len(source))
    labels = source.labels(rows)
    targets = labels.tolist() if isinstance(labels, np.ndarray) else map(source.target, rows.tolist())
    # Paths are text, or rows of bytes that NUL pads.
    paths = (path.tobytes().rstrip(b"\0") if isinstance(path, np.ndarray) else path for path in source.read(rows))
    return zip(map(os.fsdecode, paths), targets, strict=True)


def _get_part(path: str) -> str:
    return Path(path).suffix[1:].lower()


def _split(samples: list[_Sample], shard_bytes: int) -> list[list[_Sample]]:
    """Return the samples of each shard."""
    shards: list[list[_Sample]] = [[]]
    total = 0
    for sample in samples:
        size = Path(sample[0]).stat().st_size + _HEADERS
        if shards[-1] and total + size > shard_bytes:
            shards.append([])
            total = 0
        shards[-1].append(sample)
        total += size
    return shards


class _Files(Dataset[bytes | OSError]):
    """What shards have of some files. A sample that cannot be made is an error: :class:`DataLoader` would reword it."""

    def __init__(self, paths: list[str], side: int | None, quality: int) -> None:
        self._paths, self._side, self._quality = paths, side, quality

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, row: int) -> bytes | OSError:
        path = Path(self._paths[row])
        try:
            return path.read_bytes() if self._side is None else _resize(path, self._side, self._quality)
        except OSError as error:
            return error


def _read_all(files: _Files, num_workers: int) -> Generator[bytes]:
    """Read files in order. Workers end with the generator, even while the frames of an error are referred to.

    If the garbage collector finds an iterator of :class:`DataLoader`, it ends its queues first. The iterator then waits
    5 s for each worker.
    """
    generator = torch.Generator()  # else DataLoader draws from torch's, and the script's later numbers change
    contents = iter(DataLoader(files, batch_size=None, num_workers=num_workers, generator=generator))
    try:
        for content in contents:
            if isinstance(content, OSError):
                raise content
            yield content
    finally:
        del contents


def _write_shard(
    path: Path,
    start: int,
    samples: list[tuple[str, int]],
    contents: Iterator[bytes],
    on_progress: Callable[[int], object],
) -> None:
    """Write a shard of samples, each a part and a label. It appears under its name only when it is complete."""
    unfinished = Path(f"{path}.unfinished")
    try:
        with tarfile.open(unfinished, "w", format=tarfile.USTAR_FORMAT) as archive:
            for number, (part, label) in enumerate(samples, start):
                for name, content in ((part, next(contents)), ("cls", str(label).encode())):
                    member = tarfile.TarInfo(f"{number:08}.{name}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
                on_progress(1)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _resize(path: Path, side: int, quality: int) -> bytes:
    """Return an image as a JPEG whose shorter side has at most ``side`` pixels."""
    try:
        with cast("Any", PIL.Image).open(path) as opened:
            image = opened.convert("RGB")
    except UNREADABLE as error:
        raise OSError(f"{path} cannot be resized: {error}") from error
    shorter = min(image.size)
    if shorter > side:
        width, height = (max(1, round(length * side / shorter)) for length in image.size)
        image = image.resize((width, height), PIL.Image.Resampling.LANCZOS, reducing_gap=3.0)
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=quality)
    return stream.getvalue()

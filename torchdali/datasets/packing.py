"""Write shards: tar files of images and labels, as webdataset has them."""

from __future__ import annotations

import io
import operator
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import PIL.Image
import torch
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder

from torchdali.datasets.tar import IMAGE_PARTS, Tar
from torchdali.sources import UNREADABLE

__all__ = ["pack"]

_BLOCK = 512
_HEADERS = 4 * _BLOCK
"""Bytes of a sample beside its image: two headers, the label, and padding."""

_Sample = tuple[str, int]


def pack(
    samples: str | os.PathLike[str] | Iterable[tuple[str | os.PathLike[str], int]],
    folder: str | os.PathLike[str],
    shard_bytes: int = 10**9,
    resize: int | None = None,
    quality: int = 90,
    num_workers: int = 0,
    on_progress: Callable[[int], object] = bool,
) -> Tar:
    """Write images and labels into tar files, and their index.

    A sample has the parts ``cls``, its label, and its image, whose part is the suffix of the file. The image's bytes
    are those of the file, unless ``resize`` is given.

    Args:
        samples: A folder of class folders, or pairs of a file and a label.
        folder: The folder to write ``shard-000000.tar`` and so on to. It is made if it does not exist.
        shard_bytes: Bytes of a shard at most, unless a single image has more. With ``resize``, of the images before.
        resize: The shorter side of images in pixels. Smaller images are not enlarged. All become JPEGs.
        quality: The quality of these JPEGs.
        num_workers: Number of processes that read and resize images. 0: this one does.
        on_progress: Called with the number of samples that were just written.

    Returns:
        The shards.

    Raises:
        FileExistsError: The folder has shards already.
        ValueError: A label is negative, or a file has no suffix.
        TypeError: A sample is no pair of a path and an int.
        OSError: A file cannot be read or written; or with ``resize``, it is no image.
        RuntimeError: A process was killed.
    """
    pairs: Iterable[Any] = ImageFolder(str(samples)).samples if isinstance(samples, (str, os.PathLike)) else samples
    listed: list[_Sample] = []
    for path, label in pairs:
        try:
            listed.append((os.fspath(path), operator.index(label)))
        except TypeError as error:
            kind = type(cast("object", path)).__name__
            raise TypeError(
                f"samples must be pairs of a path and an int, got a {kind} and {label!r}; an ImageFolder has such "
                "pairs as .samples"
            ) from error
    for path, label in listed:
        if label < 0 or not Path(path).suffix:
            raise ValueError(f"{path} must have a suffix and a label of 0 or more, got {label}")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    if existing := sorted(target.glob("shard-*.tar")):
        raise FileExistsError(f"{target} has shards already, such as {existing[0].name}; give an empty folder")
    shards = _split(listed, shard_bytes)
    paths = [target / f"shard-{number:06}.tar" for number in range(len(shards))]

    files = _Files([path for path, _ in listed], resize, quality)
    generator = torch.Generator()  # else DataLoader draws from torch's, and the script's later numbers change
    contents = map(_unwrap, DataLoader(files, batch_size=None, num_workers=num_workers, generator=generator))
    start = 0
    for path, shard in zip(paths, shards, strict=True):
        names = [(_get_part(file) if resize is None else "jpg", label) for file, label in shard]
        _write_shard(path, start, names, contents, on_progress)
        start += len(shard)
    parts = {"jpg"} if resize else {_get_part(path) for path, _ in listed}
    return Tar(paths) if parts <= set(IMAGE_PARTS) else Tar(paths, image=sorted(parts))


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


def _unwrap(content: bytes | OSError) -> bytes:
    if isinstance(content, OSError):
        raise content
    return content


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

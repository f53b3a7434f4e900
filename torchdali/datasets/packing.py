"""Write shards: tar files of images and labels, as webdataset has them."""

from __future__ import annotations

import io
import os
import tarfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import PIL.Image
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
    num_threads: int = 1,
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
        num_threads: Number of threads that read and resize images.
        on_progress: Called with the number of samples that were just written.

    Returns:
        The shards.

    Raises:
        FileExistsError: The folder has shards already.
        ValueError: A label is negative, or a file has no suffix.
        OSError: A file cannot be read or written; or with ``resize``, it is no image.
    """
    pairs: Iterable[Any] = ImageFolder(str(samples)).samples if isinstance(samples, (str, os.PathLike)) else samples
    listed = [(os.fspath(path), int(label)) for path, label in pairs]
    for path, label in listed:
        if label < 0 or not Path(path).suffix:
            raise ValueError(f"{path} must have a suffix and a label of 0 or more, got {label}")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    if existing := sorted(target.glob("shard-*.tar")):
        raise FileExistsError(f"{target} has shards already, such as {existing[0].name}; give an empty folder")
    shards = _split(listed, shard_bytes)
    paths = [target / f"shard-{number:06}.tar" for number in range(len(shards))]

    read = Path.read_bytes if resize is None else partial(_resize, side=resize, quality=quality)
    threads, start = ThreadPoolExecutor(num_threads, "torchdali-pack"), 0
    try:
        contents = _map_ahead(threads, read, [Path(path) for path, _ in listed], 4 * num_threads)
        for path, shard in zip(paths, shards, strict=True):
            names = [(_get_part(file) if resize is None else "jpg", label) for file, label in shard]
            _write_shard(path, start, names, contents, on_progress)
            start += len(shard)
    finally:
        threads.shutdown(cancel_futures=True)
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


def _map_ahead(
    threads: Executor, function: Callable[[Path], bytes], paths: Iterable[Path], count: int
) -> Iterator[bytes]:
    """Yield what threads make of each file, in order. Keep at most ``count`` results that are not taken."""
    waiting: deque[Future[bytes]] = deque()
    for path in paths:
        waiting.append(threads.submit(function, path))
        if len(waiting) > count:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


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
    # PIL holds the interpreter's lock while it encodes to an object of Python's, but not for a file.
    with os.fdopen(os.memfd_create("jpeg"), "w+b", buffering=0) as file:
        image.save(file, "JPEG", quality=quality)
        file.seek(0)
        return file.read()

"""The index of shards: where each image is, in arrays that all processes of a machine share."""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
import time
from array import array
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from torchdali.datasets.shards import Column, describe_change, stat_shards
from torchdali.runtime.machine import find_user_cache_folder
from torchdali.sources.index import map_arrays
from torchdali.sources.remote import is_uri
from torchdali.transforms.spec import IntArray

__all__ = [
    "PROGRESS_INTERVAL",
    "Place",
    "ShardIndex",
    "find_index",
    "lock_index",
    "open_index",
    "show_progress",
    "write_arrays",
]

PROGRESS_INTERVAL = 0.2  # seconds
_LARGEST = 2**32 - 1
_NONE: IntArray = np.empty(0, np.int64)


class Place(NamedTuple):
    """Where a sample is in its shard.

    Attributes:
        key: Its name, for messages.
        offset: The first byte of its image.
        length: Bytes of its image.
        start: The first byte of all its parts.
        span: Bytes of all its parts.
        labels: For each part that is a label its value if that is an int, the name of its class, or None.
        is_split: Whether the image lies there in several pieces, with other bytes between them.
    """

    key: str
    offset: int
    length: int
    start: int = 0
    span: int = 0
    labels: tuple[int | str | None, ...] = ()
    is_split: bool = False


@dataclass(frozen=True)
class ShardIndex:
    """The columns of an index, mapped into memory.

    Attributes:
        file: The file.
        stamps: ``(S, 2)`` int64 length and time of modification of each shard.
        shard: ``(N,)`` the number of each sample's shard.
        offsets: ``(N,)`` int64 where its image begins.
        lengths: ``(N,)`` uint32 bytes of its image.
        labels: By the name of the part: ``(N,)`` its values, if all of them are integers.
        starts: ``(N,)`` int64 where its parts begin, if some of them must be read there.
        spans: ``(N,)`` uint32 bytes of its parts, likewise.
        split: The numbers of samples whose images lie in several pieces, in their order.
        classes: The names of classes by label, if labels are classes.
    """

    file: Path
    stamps: IntArray
    shard: Column
    offsets: Column
    lengths: Column
    labels: dict[str, Column]
    starts: Column | None
    spans: Column | None
    split: IntArray
    classes: tuple[str, ...] = ()

    def find_split(self, rows: IntArray) -> IntArray:
        """Return the positions of rows whose images lie in several pieces."""
        return np.flatnonzero(np.isin(rows, self.split)) if len(self.split) else _NONE

    @property
    def bytes_per_row(self) -> float:
        """Bytes that each sample takes."""
        columns = (self.shard, self.offsets, self.lengths, self.starts, self.spans, *self.labels.values())
        return sum(column.nbytes for column in columns if column is not None) / max(len(self.shard), 1)


def find_index(paths: Sequence[str], content: str) -> Path:
    """Return where the index of some shards is kept: beside the first of them; that of objects in the user's cache.

    Args:
        paths: The shards.
        content: What the index says of them, so that other labels have another index.
    """
    remote = is_uri(paths[0])
    folder = find_user_cache_folder() if remote else Path(paths[0]).parent
    if remote:
        folder.mkdir(parents=True, exist_ok=True)
    names = [content, *(paths if remote else _relative_names(paths))]
    digest = hashlib.sha256("\0".join(names).encode(errors="surrogateescape")).hexdigest()
    return folder / f"torchdali-{digest[:12]}.npz"


def _relative_names(paths: Sequence[str]) -> list[str]:
    folder = os.path.dirname(paths[0]) or "."  # noqa: PTH120 - relpath takes text
    return [os.path.relpath(path, folder) for path in paths]


def open_index(
    file: Path,
    paths: Sequence[str],
    content: str,
    scan: Callable[[str], Iterable[Place]],
    labels: Sequence[str],
    stat: Callable[[Sequence[str]], list[tuple[int, int]]],
) -> ShardIndex:
    """Map an index. Make it first if there is none.

    Args:
        file: The index.
        paths: The shards.
        content: See :func:`find_index`.
        scan: Yields the samples of a shard.
        labels: The names of the parts that are labels.
        stat: Returns the length of each shard, and a number that is another after a change.

    Raises:
        ValueError: A shard has changed since the index was made, the index is of other shards, or it is damaged; or a
            shard is damaged and the index cannot be made.
        OSError: A file cannot be read or written.
    """
    if not file.exists():
        with lock_index(file):
            if not file.exists():  # another process may have made it in the meantime
                _write_index(file, paths, content, scan, len(labels), stat)
    arrays, _ = map_arrays(file, "r")
    missing = [name for name in ("content", "names", "stamps", "shard", "offsets", "lengths") if name not in arrays]
    if missing:
        raise ValueError(f"{file} is no index of shards: it has no array {missing[0]!r}")
    if arrays["content"].tobytes().decode(errors="replace") != content:
        raise ValueError(
            f"{file} is an index of {arrays['content'].tobytes().decode(errors='replace')}, and {content} is wanted; "
            "give another index="
        )
    stamps, names = arrays["stamps"], "\0".join(map(_base_name, paths)).encode(errors="surrogateescape")
    if arrays["names"].tobytes() != names or stamps.shape != (len(paths), 2) or stamps.dtype != np.int64:
        raise ValueError(f"{file} is the index of other shards than {paths[0]} and its like; give another index=")
    for path, known, found in zip(paths, stamps.tolist(), stat(paths), strict=True):
        if [*found] != known:
            how = describe_change(found, (known[0], known[1])) if stat is stat_shards else ""
            raise ValueError(f"{path} has changed since {file} was made{how}; delete the index, and it is made again")
    columns = {name: arrays.get(name) for name in ("shard", "offsets", "lengths", "starts", "spans")}
    known = {f"labels{i or ''}": arrays.get(f"labels{i or ''}") for i in range(len(labels))}
    for name, column in (columns | known).items():
        if column is not None and not (_fits_int64(column) and column.shape == arrays["shard"].shape[:1]):
            raise ValueError(f"{file} is damaged: its array {name!r} must be integers of int64, one for each image")
    classes = tuple(map(str, arrays.get("classes", ())))
    of_parts = {name: column for name, column in zip(labels, known.values(), strict=True) if column is not None}
    split = arrays.get("split", _NONE)
    if split.ndim != 1 or not _fits_int64(split) or np.any((split < 0) | (split >= len(arrays["shard"]))):
        raise ValueError(f"{file} is damaged: its array 'split' must be the numbers of images")
    return ShardIndex(file, np.array(stamps), **cast("Any", columns), labels=of_parts, split=split, classes=classes)


def _fits_int64(column: npt.NDArray[Any]) -> bool:
    return column.dtype.kind in "iu" and np.can_cast(column.dtype, np.int64)  # uint64 has larger numbers


def _base_name(path: str) -> str:
    return os.path.basename(path)  # noqa: PTH119 - of thousands of texts


@contextmanager
def lock_index(file: Path) -> Generator[None, None, None]:
    """Let one process make an index while others wait for it, where the file system has locks."""
    lock = Path(f"{file}.lock")
    try:
        stream = lock.open("wb")
    except OSError as error:
        raise OSError(f"{file} cannot be written ({error.strerror}); give index= a file that can") from error
    with stream:
        with suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _write_index(
    file: Path,
    paths: Sequence[str],
    content: str,
    scan: Callable[[str], Iterable[Place]],
    num_labels: int,
    stat: Callable[[Sequence[str]], list[tuple[int, int]]],
) -> None:
    shard, offsets, lengths = array("I"), array("q"), array("I")
    starts, spans = array("q"), array("I")
    split = array("q")
    labels: list[array[int] | None] = [array("q") for _ in range(num_labels)]
    classes: dict[str, int] = {}
    stamps: list[tuple[int, int]] = []
    shown = 0.0
    for number, path in enumerate(paths):
        stamps += stat([path])
        for place in scan(path):
            if place.length > _LARGEST or place.span > _LARGEST:
                raise ValueError(f"{path}: sample {place.key} has more than 4 GiB")
            shard.append(number)
            offsets.append(place.offset)
            lengths.append(place.length)
            starts.append(place.start)
            spans.append(place.span)
            if place.is_split:
                split.append(len(offsets) - 1)
            for i, (column, label) in enumerate(zip(labels, place.labels, strict=True)):
                if label is None:
                    labels[i] = None
                elif column is not None:
                    column.append(classes.setdefault(label, len(classes)) if isinstance(label, str) else label)
            if time.monotonic() - shown > PROGRESS_INTERVAL:
                shown = show_progress(f"{len(offsets):,} images in {number:,} of {len(paths):,} shards")
        if stat([path]) != stamps[-1:]:
            raise ValueError(f"{path} changed while its index was made")
    if not offsets:
        raise ValueError(f"{paths[0]} and their like have no image that the arguments name: {content}")
    show_progress(f"{len(offsets):,} images in {len(paths):,} shards\n")
    arrays: dict[str, npt.NDArray[Any]] = {
        "content": np.frombuffer(content.encode(), np.uint8),
        "names": np.frombuffer("\0".join(map(_base_name, paths)).encode(errors="surrogateescape"), np.uint8),
        "stamps": np.array(stamps, np.int64).reshape(-1, 2),
        "shard": np.array(shard, np.min_scalar_type(len(paths))),
        "offsets": np.array(offsets, np.int64),
        "lengths": np.array(lengths, np.uint32),
    }
    for i, column in enumerate(labels):
        if column is None:
            continue
        values = np.array(column, np.int64)
        if classes:
            names = sorted(classes)
            numbers = np.empty(len(names), np.int64)
            numbers[[classes[name] for name in names]] = np.arange(len(names))
            values = numbers[values]
            arrays["classes"] = np.array(names, np.str_)
        arrays[f"labels{i or ''}"] = _shrink(values)
    if max(spans) and (None in labels or not labels):
        arrays |= {"starts": np.array(starts, np.int64), "spans": np.array(spans, np.uint32)}
    if split:
        arrays["split"] = np.array(split, np.int64)
    write_arrays(file, arrays)


def write_arrays(file: Path, arrays: dict[str, npt.NDArray[Any]]) -> None:
    """Write arrays as ``.npz``. Other processes see the file when it is whole."""
    unfinished = Path(f"{file}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as stream:
            np.savez(stream, **cast("Any", arrays))
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def _shrink(values: IntArray) -> npt.NDArray[Any]:
    """Return integers in the smallest type that holds all of them."""
    fits: Any = (kind for kind in (np.int8, np.int16, np.int32) if np.array_equal(values.astype(kind), values))
    return values.astype(next(fits, np.int64))


def show_progress(text: str) -> float:
    """Write a line over the last one, in a terminal. Return the time."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\rtorchdali: indexed {text}")
        sys.stderr.flush()
    return time.monotonic()

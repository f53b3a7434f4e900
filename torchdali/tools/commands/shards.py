"""``torchdali index``, ``torchdali pack``, and ``torchdali check`` of shards."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torchvision.datasets import ImageFolder

from torchdali.datasets import LMDB, RecordIO, Tar, TFRecord, Zip, pack
from torchdali.datasets.base import EncodedDataset
from torchdali.datasets.fields import open_rgb
from torchdali.datasets.patterns import expand
from torchdali.datasets.sharded import ShardedDataset
from torchdali.errors import OptionError
from torchdali.loader.stats import format_count
from torchdali.runtime.machine import count_available_cores
from torchdali.sources.remote import is_uri
from torchdali.tools.commands.files import Problem

_CHUNK = 256
_REQUESTS = 32
"""Threads that check objects, each of which waits for one."""


def open_shards(shards: Sequence[str], image: str | None, index: Path | None, **options: Any) -> ShardedDataset:
    """Return the dataset of some shards; their names tell which.

    Args:
        shards: The shards, or their patterns.
        image: The images in them; None for those that the dataset takes.
        index: The file of the index; None for a name beside the first shard.
        options: ``label``, if it is not the dataset's own.

    Raises:
        OptionError: They cannot be read as such.
    """
    try:
        first = shards[0] if is_uri(shards[0]) else expand(shards)[0]
        kind = {".tar": Tar, ".json": Tar, ".zip": Zip, ".rec": RecordIO, ".lmdb": LMDB, ".mdb": LMDB}.get(
            Path(first).suffix.lower(), LMDB if Path(first, "data.mdb").exists() else TFRecord
        )
        if image and kind in (Zip, RecordIO):
            raise OptionError(f"--image goes with tar, TFRecord and LMDB files, got {first}: a {kind.__name__} has one")
        if image:
            options["image"] = tuple(image.split(",")) if kind is Tar else image
        return kind(shards, index=index, **options)
    except (ValueError, TypeError, OSError) as error:
        raise OptionError(str(error)) from error


def index_shards(
    shards: Sequence[str], image: str | None, label: str | None, index: Path | None, console: Console
) -> None:
    """Make the index of shards, or check that the one that exists fits them."""
    start = time.perf_counter()
    options = {} if label is None else {"label": label.split(",") if "," in label else label}
    dataset = open_shards(shards, image, index, **options)
    console.out(
        f"{_count(dataset)}, {dataset.index.bytes_per_row:.0f} bytes for each, in {dataset.index.file} "
        f"({time.perf_counter() - start:.1f} s)",
        highlight=False,
    )


def pack_folder(folder: Path, out: Path, console: Console, **options: Any) -> None:
    """Write the images of a folder of class folders into tar files.

    Args:
        folder: The folder.
        out: The folder of the shards.
        console: Gets a line about what was written.
        options: More arguments of :func:`pack`.

    Raises:
        OptionError: There are no images, the shards cannot be written, or a worker was killed.
    """
    try:
        samples = ImageFolder(folder)
    except FileNotFoundError as error:
        raise OptionError(str(error)) from error
    with make_progress() as bar:
        advance = partial(bar.advance, bar.add_task("packed", total=len(samples)))
        try:
            dataset = pack(samples, out, on_progress=advance, **options)
        except (OSError, ValueError, RuntimeError) as error:
            raise OptionError(str(error)) from error
    (out / "classes.txt").write_text("".join(f"{name}\n" for name in samples.classes), encoding="utf-8")
    total = sum(Path(path).stat().st_size for path in dataset.shards.paths)
    console.out(f"{_count(dataset)} of {out}, {format_size(total)}", highlight=False)


def _count(dataset: ShardedDataset) -> str:
    shards = format_count(len(dataset.shards.paths), "shard", "shards")
    return f"{format_count(len(dataset), 'image', 'images')} in {shards}"


def format_size(size: int) -> str:
    """Return a number of bytes, rounded, in the unit that fits it."""
    unit = max(1, min((len(str(size)) - 1) // 3, 4))
    return f"{size / 1000**unit:.1f} {('kB', 'MB', 'GB', 'TB')[unit - 1]}"


def find_problems(dataset: EncodedDataset) -> list[Problem]:
    """Decode the images of shards with PIL. Return the problems, each with shard, key and offset, sorted."""
    result: list[Problem] = []
    chunk, count = (1, _REQUESTS) if dataset.client else (_CHUNK, count_available_cores())
    chunks = [range(start, min(start + chunk, len(dataset))) for start in range(0, len(dataset), chunk)]
    with make_progress() as bar, ThreadPoolExecutor(count, "torchdali-check") as threads:
        task = bar.add_task("checked", total=len(dataset))
        for rows, problems in zip(chunks, threads.map(partial(_check_rows, dataset), chunks), strict=True):
            result += problems
            bar.advance(task, len(rows))
    return sorted(result)


def _check_rows(dataset: EncodedDataset, rows: range) -> list[Problem]:
    return [Problem(dataset.name(row), *problem) for row in rows if (problem := _check_row(dataset, row))]


def _check_row(dataset: EncodedDataset, row: int) -> tuple[str, str] | None:
    try:
        (data,) = dataset.read(np.array([row], np.int64))
    except (OSError, ValueError) as error:
        return "unreadable", f"it cannot be read ({error})"
    if not len(data):
        return "empty", "it has no bytes"
    try:
        open_rgb(data)
    except PIL.UnidentifiedImageError:
        return "no image", f"no format that PIL knows begins with {data[:16].tobytes()!r}"
    except PIL.Image.DecompressionBombError as error:
        return "too large", str(error)
    except Exception as error:  # noqa: BLE001 - on files made to break it, PIL raises errors of any type
        if "truncated" in str(error):
            return "truncated", f"it ends before its image does ({error})"
        return "corrupt", f"it cannot be decoded ({error!r})"
    if data[:3].tobytes() == b"\xff\xd8\xff" and data[-2:].tobytes() != b"\xff\xd9":
        return "truncated", "it does not end as a JPEG does; PIL still reads it"
    return None


def make_progress() -> Progress:
    """Return a bar that counts, on the standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True))

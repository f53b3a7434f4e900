"""``torchdali check``: every image under a folder decoded once, and what is wrong with each."""

from __future__ import annotations

import csv
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import PIL.Image
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text
from torchvision.datasets.folder import IMG_EXTENSIONS

from torchdali.errors import OptionError, SampleError
from torchdali.pipeline import graph
from torchdali.pipeline.header_reader import HeaderReader
from torchdali.runtime.machine import available_cores
from torchdali.sources import HEAD, FileSource
from torchdali.sources.headers.batch import parse
from torchdali.sources.headers.table import HeaderColumns, HeaderTable
from torchdali.sources.paths import Paths, table_of
from torchdali.tools.commands.decode import Decoder, diagnose
from torchdali.tools.commands.files import Found, Problem, find, format_of, format_of_name
from torchdali.transforms.spec import IntArray

__all__ = ["Checked", "check", "write"]

_CHUNK = 1024
_OTHERS = ("JPEG", "PNG", "GIF", "WEBP")
"""Formats whose first bytes nothing but an image begins with, so that a file of any name is one."""


@dataclass
class Checked:
    """What was found.

    Attributes:
        folder: Where.
        images: Files that were taken for images by their names.
        problems: Sorted by path.
        left_out: For each ending that ImageFolder does not take the number of sound-looking images that have it.
        seconds: How long it took.
        device: What decoded.
    """

    folder: Path
    images: int = 0
    problems: list[Problem] = field(default_factory=list[Problem])
    left_out: Counter[str] = field(default_factory=Counter[str])
    seconds: float = 0.0
    device: str = "cpu"


def check(
    folder: Path, *, device: str = "auto", console: Console | None = None, progress: Console | None = None
) -> Checked:
    """Decodes the images under a folder, and prints each problem, then the sums.

    Args:
        folder: A folder, of class folders or not.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        console: Where problems are printed.
        progress: Where the progress bar is drawn.

    Raises:
        OptionError: There is no image in it.
        DALIUnavailableError: DALI cannot be used.
    """
    console, progress = console or Console(), progress or Console(stderr=True)
    graph.require_dali()
    where = graph.resolve(device)
    start = time.perf_counter()
    with progress.status(f"Looking for files in {escape(str(folder))}"):
        found = find(folder)
    checked = Checked(folder, len(found.images), device=str(where))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Speed(), TimeRemainingColumn())
    with (
        Progress(*columns, console=progress) as bar,
        ThreadPoolExecutor(available_cores(), thread_name_prefix="torchdali-check") as threads,
    ):
        task = bar.add_task("checked", total=len(found.images))
        checked.problems += found.problems
        for problem, ending in threads.map(_other, found.others, chunksize=64):
            if problem:
                checked.problems.append(problem)
            elif ending:
                checked.left_out[ending] += 1
        if not found.images and not checked.problems:
            raise OptionError(_nothing(folder, found, checked.left_out))
        tick = partial(bar.advance, task)
        files = _Files(found.images, threads, tick)
        decoder = Decoder(files.source, where, threads, tick)
        try:
            for problems in decoder.decode(files.looked(checked.problems)):
                checked.problems += problems
        finally:
            decoder.close()
            files.close()
    checked.problems.sort()
    checked.seconds = time.perf_counter() - start
    _show(checked, console)
    return checked


class _Speed(ProgressColumn):
    """Files a second, as soon as there is something to tell."""

    def render(self, task: Task) -> Text:
        """The column's text."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} files/s")


class _Files:
    """The files that are named as images, and what their first bytes say."""

    def __init__(self, paths: list[str], threads: ThreadPoolExecutor, tick: Callable[[int], None]) -> None:
        self._paths, self._threads, self._tick = paths, threads, tick
        self._facts = HeaderTable(HeaderColumns.unknown(len(paths)))
        self._table = Paths([table_of(paths)])
        self.source = FileSource(self._table, self._facts)
        self._heads = HeaderReader()
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="torchdali-check-heads")

    def close(self) -> None:
        self._ahead.shutdown(cancel_futures=True)
        self._heads.close()

    def looked(self, problems: list[Problem]) -> Iterator[IntArray]:
        """The numbers of the files that may be decoded, some at a time; adds the problems of others."""
        starts = range(0, len(self._paths), _CHUNK)
        chunks = [np.arange(start, min(start + _CHUNK, len(self._paths))) for start in starts]
        futures = [self._ahead.submit(self._look, chunk) for chunk in chunks[:1]]
        for number in range(len(chunks)):
            rows, found = futures.pop().result()
            futures += [self._ahead.submit(self._look, chunk) for chunk in chunks[number + 1 : number + 2]]
            problems += found
            self._tick(len(chunks[number]) - len(rows))
            yield rows

    def _look(self, rows: IntArray) -> tuple[IntArray, list[Problem]]:
        """The files of which the header could be read; and what is wrong with the files, as far as it tells."""
        known = np.zeros(len(rows), np.bool_)
        try:
            heads, lengths = self._heads(self._table.gather(rows), False)
        except RuntimeError:  # one of them cannot be read; each is asked alone
            pass
        else:
            said = parse(heads)
            self._facts.learn_many(rows, said, lengths)
            named = np.array([format_of_name(path) for path in self._paths[rows[0] : rows[-1] + 1]])
            known = said.known & (named == np.where(said.jpeg, "JPEG", "PNG"))
        found = list(self._threads.map(self._look_at, rows[~known].tolist()))
        known[~known] = [decodable for decodable, _ in found]
        return rows[known], [problem for _, problems in found for problem in problems]

    def _look_at(self, row: int) -> tuple[bool, list[Problem]]:
        path = self._paths[row]
        try:
            head = _head(path)
        except OSError as error:
            return False, [Problem(path, "unreadable", f"it cannot be read ({error.strerror})")]
        if not head:
            return False, [Problem(path, "empty", "it has no bytes")]
        problems: list[Problem] = []
        try:
            content, named = format_of(head) or _format_by_pil(path), format_of_name(path)
            if content != named:
                problems.append(Problem(path, "mislabelled", f"it is named as {named}, and its content is {content}"))
            self.source.read(row)
        except PIL.UnidentifiedImageError:
            return False, [Problem(path, "no image", f"no format that PIL knows begins with {head[:16]!r}")]
        except SampleError as error:
            return False, [*problems, diagnose(error)]
        except Exception as error:  # noqa: BLE001 - PIL raises anything on files that were made to break it
            return False, [*problems, Problem(path, "corrupt", f"its header cannot be read ({error!r})")]
        return True, problems


def _head(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(file, HEAD, 0)
    finally:
        os.close(file)


def _format_by_pil(path: str) -> str:
    with cast("Any", PIL.Image.open)(path) as image:
        return image.format


def _other(path: str) -> tuple[Problem | None, str]:
    """Of a file that is not named as an image: what is wrong if it is one, else the ending that it is named with."""
    try:
        content = format_of(_head(path))
    except OSError:
        return None, ""  # no image, as far as anybody says
    if content not in _OTHERS:
        return None, ""
    if format_of_name(path) == content:
        return None, Path(path).suffix.lower()
    reason = f"its content is {content}, and ImageFolder leaves it out because of its name"
    return Problem(path, "mislabelled", reason), ""


def _nothing(folder: Path, found: Found, left_out: Counter[str]) -> str:
    others = f", {len(found.others):,} files of other names" if found.others else ""
    images = f", of which {left_out.total():,} are images ({_listed(left_out)})" if left_out else ""
    return f"{folder} has no file that is named as an image ({', '.join(IMG_EXTENSIONS)}){others}{images}"


def _show(checked: Checked, console: Console) -> None:
    for problem in checked.problems:
        line = Text.assemble(
            (f"{problem.problem:<12}", "bold red"), f"{_printable(problem.path)}  ", (problem.reason, "dim")
        )
        console.print(line, soft_wrap=True)
    if checked.left_out:
        kinds = _listed(checked.left_out)
        console.print(f"Left out by ImageFolder because of their names: {kinds}", highlight=False, soft_wrap=True)
    speed = f"{checked.images / max(checked.seconds, 1e-6):,.0f} files/s"
    kinds = _listed(Counter(problem.problem for problem in checked.problems))
    files = len({problem.path for problem in checked.problems})
    said = f"{files:,} with problems: {kinds}" if files else "nothing is wrong with them"
    took = f"{checked.seconds:.1f} s on {checked.device}, {speed}"
    console.print(
        f"{checked.images:,} images under {checked.folder}, {said} ({took})",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _printable(path: str) -> str:
    """A path in one line, whatever is in it, that tells the terminal nothing."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in path)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.most_common())


def write(checked: Checked, out: Path) -> None:
    """Writes what was found: a CSV file has a line for each problem, a JSON file the sums too.

    Args:
        checked: What was found.
        out: A file whose name ends in ``.csv`` or ``.json``.
    """
    if out.suffix.lower() == ".csv":
        with out.open("w", newline="", errors="surrogateescape") as file:
            lines = csv.writer(file)
            lines.writerow(Problem._fields)
            lines.writerows(checked.problems)
        return
    whole = {
        "folder": str(checked.folder),
        "images": checked.images,
        "device": checked.device,
        "seconds": round(checked.seconds, 3),
        "left_out": dict(checked.left_out),
        "problems": [problem._asdict() for problem in checked.problems],
    }
    out.write_text(json.dumps(whole, indent=1) + "\n")

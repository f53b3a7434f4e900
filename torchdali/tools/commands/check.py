"""``torchdali check``: decode every image or video under a folder, and list the problems of each file."""

from __future__ import annotations

import csv
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import PIL.Image
from rich.console import Console
from rich.markup import escape
from rich.text import Text
from torchvision.datasets.folder import IMG_EXTENSIONS

from torchdali.errors import OptionError, SampleError
from torchdali.pipeline import graph
from torchdali.pipeline.readers import FileReader, FirstBytes
from torchdali.runtime.machine import count_available_cores
from torchdali.sources import HEADER_BYTES, FileSource
from torchdali.sources.headers.batch import parse
from torchdali.sources.paths import Paths, build_table
from torchdali.tools.commands.decode import Decoder, diagnose
from torchdali.tools.commands.files import FileList, Problem, detect_format, find_files, format_of_name
from torchdali.tools.commands.shards import find_problems, make_progress, open_shards
from torchdali.tools.commands.videos import find_video_problems, is_video_name
from torchdali.transforms.spec import IntArray

_CHUNK = 1024
_OTHERS = ("JPEG", "PNG", "GIF", "WEBP")
"""Formats whose first bytes prove that a file of any name is an image."""


@dataclass
class CheckResult:
    """Result of ``check``.

    Attributes:
        folder: The folder, or the first name of shards.
        images: Number of files with an image's name, or of images in shards, or of videos.
        problems: Problems, sorted by path.
        left_out: Number of images by extension, for extensions that ImageFolder does not take.
        seconds: Time that it took.
        device: Device that decoded.
        kind: What the files are: ``"images"`` or ``"videos"``.
    """

    folder: Path | str
    images: int = 0
    problems: list[Problem] = field(default_factory=list[Problem])
    left_out: Counter[str] = field(default_factory=Counter[str])
    seconds: float = 0.0
    device: str = "cpu"
    kind: str = "images"


def check(folder: Path, *, device: str = "auto") -> CheckResult:
    """Decode the images under a folder, and print each problem, then a summary. Without images, decode its videos.

    Args:
        folder: The folder, with class folders or without.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.

    Raises:
        OptionError: The folder has neither images nor videos, or PyAV for its videos is missing.
        DALIUnavailableError: DALI cannot be used.
    """
    start = time.perf_counter()
    with Console(stderr=True).status(f"Looking for files in {escape(str(folder))}"):
        files = find_files(folder)
    if not files.images and (videos := [path for path in files.others if is_video_name(path)]):
        return check_videos(folder, videos, files.problems)
    graph.require_dali()
    target = graph.resolve(device)
    result = CheckResult(folder, len(files.images), [*files.problems], device=str(target))
    with (
        make_progress() as bar,
        ThreadPoolExecutor(count_available_cores(), thread_name_prefix="torchdali-check") as threads,
    ):
        task = bar.add_task("checked", total=len(files.images))
        for problem, extension in threads.map(_check_other, files.others, chunksize=64):
            if problem:
                result.problems.append(problem)
            elif extension:
                result.left_out[extension] += 1
        if not files.images and not result.problems:
            raise OptionError(_explain_no_images(folder, files, result.left_out))
        tick = partial(bar.advance, task)
        scan = _HeaderScan(files.images, threads, tick)
        decoder = Decoder(scan.reader, target, threads, tick)
        try:
            for problems in decoder.decode(scan.find_decodable(result.problems)):
                result.problems += problems
        finally:
            decoder.close()
            scan.close()
    result.problems.sort()
    result.seconds = time.perf_counter() - start
    _print_result(result)
    return result


def check_shards(shards: Sequence[str], image: str | None) -> CheckResult:
    """Decode the images in shards with PIL, and print each problem, then a summary.

    Args:
        shards: The shards, or their patterns.
        image: The images in them; None for those that their datasets take.

    Raises:
        OptionError: They are no shards, or a shard is damaged so that its images cannot be listed.
    """
    start = time.perf_counter()
    with TemporaryDirectory() as folder:  # an index without labels, which nothing else needs
        dataset = open_shards(shards, image, Path(folder) / "index.npz", label=None)
        left_out: list[str] = getattr(dataset, "left_out", [])
        empty = [Problem(place, "empty", "it has no image, and RecordIO leaves it out") for place in left_out]
        problems = sorted([*find_problems(dataset), *empty])
    result = CheckResult(shards[0], len(dataset), problems)
    result.seconds = time.perf_counter() - start
    _print_result(result)
    return result


def check_videos(folder: Path, paths: Sequence[str], known: Sequence[Problem] = ()) -> CheckResult:
    """Decode all frames of videos with PyAV, and print each problem, then a summary.

    Args:
        folder: What the summary names.
        paths: The files.
        known: Problems that were found before.

    Raises:
        OptionError: PyAV is not installed.
    """
    start = time.perf_counter()
    problems = sorted([*known, *find_video_problems(paths)])
    result = CheckResult(folder, len(paths), problems, kind="videos")
    result.seconds = time.perf_counter() - start
    _print_result(result)
    return result


class _HeaderScan:
    """Reads the headers of the files with an image's name, one chunk ahead of the decoder."""

    def __init__(self, paths: list[str], threads: ThreadPoolExecutor, tick: Callable[[int], None]) -> None:
        self._paths, self._threads, self._tick = paths, threads, tick
        self.reader = FileReader(FileSource(Paths([build_table(paths)])))
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="torchdali-check-heads")

    def close(self) -> None:
        self._ahead.shutdown(cancel_futures=True)

    def find_decodable(self, problems: list[Problem]) -> Iterator[IntArray]:
        """Yield the numbers of files that can be decoded, in chunks. Append the problems of the others."""
        starts = range(0, len(self._paths), _CHUNK)
        chunks = [np.arange(start, min(start + _CHUNK, len(self._paths))) for start in starts]
        futures = [self._ahead.submit(self._scan_chunk, chunk) for chunk in chunks[:1]]
        for number in range(len(chunks)):
            rows, new = futures.pop().result()
            futures += [self._ahead.submit(self._scan_chunk, chunk) for chunk in chunks[number + 1 : number + 2]]
            problems += new
            self._tick(len(chunks[number]) - len(rows))
            yield rows

    def _scan_chunk(self, rows: IntArray) -> tuple[IntArray, list[Problem]]:
        """Return the files whose headers could be read, and the problems that headers show."""
        paths = self._paths[rows[0] : rows[-1] + 1]
        first = FirstBytes(paths)
        first.read(0, len(paths))
        headers = parse(first.data)
        self.reader.table.update_many(rows, headers, first.lengths)
        named = np.array([format_of_name(path) for path in paths])
        known = headers.known & (named == np.where(headers.jpeg, "JPEG", "PNG"))
        results = list(self._threads.map(self._scan_file, rows[~known].tolist()))
        known[~known] = [decodable for decodable, _ in results]
        return rows[known], [problem for _, problems in results for problem in problems]

    def _scan_file(self, row: int) -> tuple[bool, list[Problem]]:
        path = self._paths[row]
        try:
            head = _read_head(path)
        except OSError as error:
            return False, [Problem(path, "unreadable", f"it cannot be read ({error.strerror})")]
        if not head:
            return False, [Problem(path, "empty", "it has no bytes")]
        problems: list[Problem] = []
        try:
            content, named = detect_format(head) or _detect_format_with_pil(path), format_of_name(path)
            if content != named:
                problems.append(Problem(path, "mislabelled", f"it is named as {named}, and its content is {content}"))
            self.reader.read_header(row)
        except PIL.UnidentifiedImageError:
            return False, [Problem(path, "no image", f"no format that PIL knows begins with {head[:16]!r}")]
        except SampleError as error:
            return False, [*problems, diagnose(error)]
        except Exception as error:  # noqa: BLE001 - on files made to break it, PIL raises errors of any type
            return False, [*problems, Problem(path, "corrupt", f"its header cannot be read ({error!r})")]
        return True, problems


def _read_head(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(file, HEADER_BYTES, 0)
    finally:
        os.close(file)


def _detect_format_with_pil(path: str) -> str:
    with cast("Any", PIL.Image.open)(path) as image:
        return image.format


def _check_other(path: str) -> tuple[Problem | None, str]:
    """Check a file without an image's name. Return its problem, or its extension if that fits its content."""
    try:
        content = detect_format(_read_head(path))
    except OSError:
        return None, ""
    if content not in _OTHERS:
        return None, ""
    if format_of_name(path) == content:
        return None, Path(path).suffix.lower()
    reason = f"its content is {content}, and ImageFolder leaves it out because of its name"
    return Problem(path, "mislabelled", reason), ""


def _explain_no_images(folder: Path, files: FileList, left_out: Counter[str]) -> str:
    others = f", {len(files.others):,} files of other names" if files.others else ""
    images = f", of which {left_out.total():,} are images ({_format_counts(left_out)})" if left_out else ""
    return f"{folder} has no file that is named as an image ({', '.join(IMG_EXTENSIONS)}){others}{images}"


def _print_result(result: CheckResult) -> None:
    console = Console()
    for problem in result.problems:
        line = Text.assemble(
            (f"{problem.problem:<12}", "bold red"), f"{_escape_path(problem.path)}  ", (problem.reason, "dim")
        )
        console.print(line, soft_wrap=True)
    if result.left_out:
        console.out(
            f"Left out by ImageFolder because of their names: {_format_counts(result.left_out)}", highlight=False
        )
    speed = f"{result.images / max(result.seconds, 1e-6):,.0f} files/s"
    kinds = _format_counts(Counter(problem.problem for problem in result.problems))
    files = len({problem.path for problem in result.problems})
    summary = f"{files:,} with problems: {kinds}" if files else "no problems"
    took = f"{result.seconds:.1f} s on {result.device}, {speed}"
    console.out(f"{result.images:,} {result.kind} under {result.folder}, {summary} ({took})", highlight=False)


def _escape_path(path: str) -> str:
    """Escape line ends and control characters, so that a path cannot control the terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in path)


def _format_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.most_common())


def write_result(result: CheckResult, out: Path) -> None:
    """Write the problems to a ``.csv`` file, or the whole result to a ``.json`` file."""
    if out.suffix.lower() == ".csv":
        with out.open("w", newline="", errors="surrogateescape") as file:
            lines = csv.writer(file)
            lines.writerow(Problem._fields)
            lines.writerows(result.problems)
        return
    contents = {
        "folder": str(result.folder),
        result.kind: result.images,
        "device": result.device,
        "seconds": round(result.seconds, 3),
        "left_out": dict(result.left_out),
        "problems": [problem._asdict() for problem in result.problems],
    }
    out.write_text(json.dumps(contents, indent=1) + "\n")

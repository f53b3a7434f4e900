"""``torchdali check``: a file with each kind of problem, and the command's output."""

from __future__ import annotations

import csv
import ctypes
import json
import os
import shutil
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from conftest import PER_CLASS, PHOTOGRAPHS, encoded
from PIL import Image

from torchdali import DALILoader
from torchdali.pipeline.engine import PipelineRunner, RunOutputs
from torchdali.tools.cli import commands
from torchdali.tools.commands import check as command
from torchdali.tools.commands import decode
from torchdali.tools.commands.files import detect_format, find_files, format_of_name, is_cut_off

pytestmark = pytest.mark.timeout(60)

SOUND = len(PHOTOGRAPHS) * PER_CLASS


def check(folder: Path, *options: object) -> Result:
    return CliRunner().invoke(commands(), ["check", str(folder), *map(str, options)])


def flatten_output(result: Result) -> str:
    """Return the output in one line."""
    return " ".join(result.output.replace("\u2502", " ").split())


def run_check(folder: Path, tmp_path: Path, device: str = "cpu") -> dict[str, Any]:
    """Run the command on a folder with problems, and return its JSON."""
    out = tmp_path / "out.json"
    result = check(folder, "--device", device, "--output", out)
    assert result.exit_code == 1, result.output
    return json.loads(out.read_text())


def find_problems(folder: Path, tmp_path: Path, device: str = "cpu") -> set[tuple[str, str]]:
    problems = run_check(folder, tmp_path, device)["problems"]
    return {(os.path.relpath(one["path"], folder), one["problem"]) for one in problems}


def load_photograph() -> Image.Image:
    with (files("skimage") / "data" / "chelsea.png").open("rb") as stream:
        return Image.open(stream).convert("RGB")


def damage(data: bytes, at: int, count: int = 40) -> bytes:
    return data[:at] + bytes(byte ^ 0x5A for byte in data[at : at + count]) + data[at + count :]


def write_one_of_each(root: Path) -> set[tuple[str, str]]:
    """Write a folder with each kind of problem among sound files, and return the expected problems."""
    picture = load_photograph()
    jpeg, png, webp = (encoded(picture, kind) for kind in ("JPEG", "PNG", "WEBP"))
    grey = np.asarray(picture.convert("L"))
    deep, shallow = Image.fromarray(grey.astype(np.uint16) * 200), Image.fromarray(grey.astype(np.uint16))
    contents = {
        "half.jpg": (jpeg[: len(jpeg) // 2], "truncated"),
        "last_line.jpg": (jpeg[:-30], "truncated"),
        "half.png": (png[: len(png) // 2], "truncated"),
        "no_end.png": (png[:-12], "truncated"),
        "half.webp": (webp[: len(webp) // 2], "truncated"),
        "head.jpg": (jpeg[:10], "truncated"),
        "half.tiff": (encoded(picture, "TIFF")[:5000], "truncated"),
        "damaged.png": (damage(png, len(png) // 2), "corrupt"),
        "png.jpg": (png, "mislabelled"),
        "jpeg.png": (jpeg, "mislabelled"),
        "gif.jpg": (encoded(picture, "GIF"), "mislabelled"),
        "webp.tif": (webp, "mislabelled"),
        "picture.txt": (jpeg, "mislabelled"),
        "picture": (png, "mislabelled"),
        "deep.png": (encoded(deep, "PNG"), "clipped"),
        "deep.tif": (encoded(deep, "TIFF"), "clipped"),
        "float.tif": (encoded(Image.fromarray(grey.astype(np.float32) / 255), "TIFF"), "clipped"),
        "empty.jpg": (b"", "empty"),
        "page.jpg": (b"<!DOCTYPE html><title>404</title>", "no image"),
        "noise.png": (bytes(range(256)) * 20, "no image"),
    }
    sound = {
        "a.jpg": jpeg,
        "b.JPEG": jpeg,
        "c.png": png,
        "d.webp": webp,
        "e.bmp": encoded(picture, "BMP"),
        "f.tif": encoded(picture, "TIFF"),
        "g.ppm": encoded(picture, "PPM"),
        "cmyk.jpg": encoded(picture.convert("CMYK"), "JPEG"),
        "alpha.png": encoded(picture.convert("RGBA"), "PNG"),
        "shallow.png": encoded(shallow, "PNG"),
        "more.jpg": jpeg + b"bytes after the image are legal",
        "notes.txt": b"no picture",
        "BM.md": b"BM, and no picture either",
        "clip.gif": encoded(picture, "GIF"),
        "none.jpe": jpeg,
    }
    folder = root / "some" / "folder"
    folder.mkdir(parents=True)
    for name, data in {**sound, **{name: data for name, (data, _) in contents.items()}}.items():
        (folder / name).write_bytes(data)
    (folder / "gone.jpg").symlink_to("nowhere.jpg")
    os.mkfifo(folder / "pipe.jpg")
    (folder / "loop").symlink_to(root)
    expected = {(f"some/folder/{name}", problem) for name, (_, problem) in contents.items()}
    return expected | {(f"some/folder/{name}", "unreadable") for name in ("gone.jpg", "pipe.jpg")}


def test_names_tell_the_terminal_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "a\n\x1b[31m\u00e9.jpg").write_bytes(b"")
    result = check(folder)
    assert "\x1b" not in result.output
    (line,) = [line for line in result.output.splitlines() if line.startswith("empty")]
    assert f"{folder}/a\\n\\x1b[31m\u00e9.jpg " in line


def test_one_of_each_kind(tmp_path: Path, device: str) -> None:
    expected = write_one_of_each(tmp_path / "pictures")

    report = run_check(tmp_path / "pictures", tmp_path, device)

    problems = {(os.path.relpath(one["path"], tmp_path / "pictures"), one["problem"]) for one in report["problems"]}
    assert problems == expected
    assert len(report["problems"]) == len(expected)
    assert all(one["reason"] for one in report["problems"])
    assert report["left_out"] == {".gif": 1, ".jpe": 1}
    assert report["images"] == 29
    assert report["device"].startswith(device)
    reasons = {Path(one["path"]).name: one["reason"] for one in report["problems"]}
    assert reasons["png.jpg"] == "it is named as JPEG, and its content is PNG"
    assert "<!DOCTYPE html>" in reasons["page.jpg"]
    assert reasons["no_end.png"] == "it ends before its image does; PIL still reads it"
    top = int(np.asarray(load_photograph().convert("L")).max()) * 200
    assert reasons["deep.png"].endswith(f"to {top}, of which ImageFolder makes whole numbers up to 255")
    assert reasons["gone.jpg"] == "it is a link to a file that is not there"
    assert "because of its name" in reasons["picture.txt"]


def test_sound_files_and_the_end_of_the_output(pictures: Path, tmp_path: Path, device: str) -> None:
    out = tmp_path / "out.csv"
    result = check(pictures, "--device", device, "--output", out)
    assert result.exit_code == 0, result.output
    assert f"{SOUND} images under {pictures}, no problems" in flatten_output(result)
    assert out.read_text().split() == ["path,problem,reason"]


def test_each_problem_is_a_line_of_the_output_and_of_the_csv(fresh_pictures: Path, tmp_path: Path) -> None:
    bad, worse = sorted(fresh_pictures.rglob("*.jpg"))[:2]
    bad.write_bytes(bad.read_bytes()[:-100])
    worse.write_bytes(b"")
    out = tmp_path / "out.CSV"

    result = check(fresh_pictures, "--output", out)

    assert result.exit_code == 1
    lines = [line.split(maxsplit=2) for line in result.stdout.splitlines() if str(fresh_pictures) in line]
    assert [line[:2] for line in lines[:2]] == [["truncated", str(bad)], ["empty", str(worse)]]
    assert f"{SOUND} images under {fresh_pictures}, 2 with problems: 1 truncated, 1 empty" in flatten_output(result)
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["path"], row["problem"]) for row in rows] == [(str(bad), "truncated"), (str(worse), "empty")]


def test_many_files_in_many_batches(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Every batch fails, some twice, and chunks end within batches. No file is lost or listed twice."""
    monkeypatch.setattr(decode, "_BATCH", 8)
    monkeypatch.setattr(command, "_CHUNK", 21)
    originals = [path.read_bytes() for path in sorted(pictures.rglob("*.jpg"))]
    folder = tmp_path / "many"
    folder.mkdir()
    expected: set[tuple[str, str]] = set()
    png = encoded(load_photograph().resize((50, 50)), "PNG")
    for number in range(120):
        path = folder / f"{number:03}.jpg"
        path.write_bytes(originals[number % len(originals)])
        if number % 5 == 0:
            path.write_bytes(path.read_bytes()[:-60])
            expected.add((path.name, "truncated"))
        if number % 7 == 0:
            path.with_suffix(".png").write_bytes(damage(png, len(png) // 2))
            expected.add((path.with_suffix(".png").name, "corrupt"))
        if number % 11 == 0:
            path.with_suffix(".webp").write_bytes(png[:-12])  # which DALI alone refuses
            expected |= {(path.with_suffix(".webp").name, problem) for problem in ("truncated", "mislabelled")}

    report = run_check(folder, tmp_path, device)

    problems = Counter((Path(one["path"]).name, one["problem"]) for one in report["problems"])
    assert problems == Counter(expected)
    assert report["images"] == 120 + 18 + 11


def test_what_the_loader_would_raise_is_listed(fresh_pictures: Path, tmp_path: Path, device: str) -> None:
    """A loader stops at the first bad file. The list has all bad files."""
    names = sorted(fresh_pictures.rglob("*.jpg"))
    for path in names[::6]:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    listed = find_problems(fresh_pictures, tmp_path, device)
    assert {name for name, _ in listed} == {str(path.relative_to(fresh_pictures)) for path in names[::6]}

    for name, _ in listed:
        (fresh_pictures / name).unlink()
    with DALILoader(fresh_pictures, batch_size=1, device=device, collate_fn=len) as loader:
        assert list(loader) == [1] * (SOUND - len(listed))
    assert check(fresh_pictures, "--device", device).exit_code == 0


def test_a_file_that_only_dali_refuses(fresh_pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = sorted(fresh_pictures.rglob("*.jpg"))[5]
    submit = PipelineRunner.submit

    def refusing(self: PipelineRunner, images: np.ndarray, *rest: Any) -> None:
        if any(str(refused).encode() in row.tobytes() for row in images):
            raise RuntimeError("DALI does not like it")
        submit(self, images, *rest)

    monkeypatch.setattr(PipelineRunner, "submit", refusing)
    assert find_problems(fresh_pictures, tmp_path) == {(str(refused.relative_to(fresh_pictures)), "refused")}


def test_a_decoder_that_fills_with_grey_and_says_nothing(
    fresh_pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JPEG engines do so. Only a file's last bytes and its length show the problem."""
    names = sorted(fresh_pictures.rglob("*.jpg"))
    names[3].write_bytes(names[3].read_bytes()[:-10])
    names[4].write_bytes(names[4].read_bytes() + b"legal")
    submitted: deque[list[bytes]] = deque()

    def submit(self: PipelineRunner, images: np.ndarray, *rest: Any) -> None:
        submitted.append([Path(os.fsdecode(row.tobytes().rstrip(b"\0"))).read_bytes() for row in images])

    def take(self: PipelineRunner) -> RunOutputs:
        contents = submitted.popleft()
        endings = np.array([list(content[-2:]) for content in contents], np.uint8)
        return RunOutputs([], endings, np.array([[len(content)] for content in contents], np.int32))

    monkeypatch.setattr(PipelineRunner, "submit", submit)
    monkeypatch.setattr(PipelineRunner, "take", take)
    assert find_problems(fresh_pictures, tmp_path) == {(str(names[3].relative_to(fresh_pictures)), "truncated")}


def test_the_bar_comes_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_one_of_each(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    command.check(tmp_path, device="cpu")
    assert " 29/29 " in capsys.readouterr().err


def test_what_pil_calls_a_bomb(fresh_pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = fresh_pictures / "large.png"
    load_photograph().resize((200, 200)).save(large)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    assert find_problems(fresh_pictures, tmp_path) == {("large.png", "too large")}


@contextmanager
def without_override() -> Iterator[None]:
    """Takes from this thread the capabilities with which root reads all: DAC_OVERRIDE and DAC_READ_SEARCH."""
    libc, header = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522)
    before, sets = (ctypes.c_uint32 * 6)(), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, before) == libc.capget(header, sets) == 0
    sets[0] &= ~0b110
    assert libc.capset(header, sets) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


def test_files_and_folders_without_permission(fresh_pictures: Path, tmp_path: Path) -> None:
    closed = sorted(path for path in fresh_pictures.iterdir() if path.is_dir())
    files_of = sorted(closed[0].iterdir())
    files_of[2].chmod(0)
    closed[1].chmod(0)
    out = tmp_path / "out.json"
    try:
        with without_override():
            done = check(fresh_pictures, "--output", out)
    finally:
        closed[1].chmod(0o755)
    assert done.exit_code == 1, done.output
    report = json.loads(out.read_text())
    assert {(one["path"], one["problem"]) for one in report["problems"]} == {
        (str(files_of[2]), "unreadable"),
        (str(closed[1]), "unreadable"),
    }
    assert all("Permission denied" in one["reason"] for one in report["problems"])
    assert report["images"] == SOUND - PER_CLASS
    assert "Traceback" not in done.output


def test_options_that_are_wrong(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    shutil.copy(next(pictures.rglob("*.jpg")), tmp_path / "one.jpe")
    nothing = check(tmp_path)
    assert nothing.exit_code == 2
    assert "has no file that is named as an image (.jpg, " in flatten_output(nothing)
    assert "2 files of other names, of which 1 are images (1 .jpe)" in flatten_output(nothing)

    assert check(tmp_path / "missing").exit_code == 2
    wrong = check(pictures, "--output", tmp_path / "out.txt")
    assert wrong.exit_code == 2
    assert "must end in .csv or .json, got 'out.txt'" in flatten_output(wrong)
    nowhere = check(pictures, "--output", tmp_path / "missing" / "out.csv")
    assert nowhere.exit_code == 2
    assert "cannot be written" in flatten_output(nowhere)
    assert "images under" not in flatten_output(nowhere)  # not after the work


def test_help_has_the_exit_codes() -> None:
    assert "Exits with 0 if no file has a problem" in flatten_output(check(Path("--help")))


def test_formats_by_content_and_name(tmp_path: Path) -> None:
    picture = load_photograph().resize((20, 20))
    for kind, ending in {
        "JPEG": "jpg",
        "PNG": "PNG",
        "GIF": "gif",
        "TIFF": "tif",
        "BMP": "bmp",
        "WEBP": "webp",
    }.items():
        data = encoded(picture, kind)
        assert detect_format(data[:32]) == kind == format_of_name(f"a/b.c/x.{ending}")
        (tmp_path / "file").write_bytes(data)
        assert not is_cut_off(str(tmp_path / "file"))
        (tmp_path / "file").write_bytes(data[:-5])
        assert is_cut_off(str(tmp_path / "file")) == (kind in ("JPEG", "PNG", "WEBP"))
    assert detect_format(b"P6 2 2 255") == "PPM" == format_of_name("x.pgm")
    assert (detect_format(b""), format_of_name("x"), format_of_name("x.text")) == ("", "", "")
    assert not is_cut_off(str(tmp_path / "missing"))


def test_no_folder_is_met_twice(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(pictures)
    (tmp_path / "other").symlink_to(pictures)
    for name in ("self", "self.jpg"):
        (tmp_path / name).symlink_to(name)
    found = find_files(tmp_path)
    assert len(found.images) == SOUND
    assert [problem[:2] for problem in found.problems] == [(str(tmp_path / "self.jpg"), "unreadable")]

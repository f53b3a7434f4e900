"""``torchdali check`` of videos names each bad file, and what is wrong with it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from helpers import videos

from torchdali.tools.cli import commands

pytestmark = pytest.mark.timeout(60)

INVALID = "Invalid data found when processing input"
NO_VIDEO = f"it cannot be read as a video (InvalidDataError: {INVALID})"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(commands(), [str(argument) for argument in arguments])


def test_check_names_files_and_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "clips" / "a"
    folder.mkdir(parents=True)
    good = videos.write(folder / "good.mp4", videos.pan(20))
    assert run("check", good).exit_code == 0
    matroska = videos.write(folder / "good.mkv", videos.pan(40)).read_bytes()
    (folder / "cut.mkv").write_bytes(matroska[: len(matroska) * 3 // 4])
    (folder / "named.mp4").write_bytes(matroska)
    avi = videos.write(folder / "good.avi", videos.pan(20), codec="mjpeg").read_bytes()
    (folder / "cut.avi").write_bytes(avi[: len(avi) * 3 // 4])
    start = avi.index(b"\xff\xd8", len(avi) // 2)  # a picture
    (folder / "damaged.avi").write_bytes(avi[: start + 2] + bytes(400) + avi[start + 402 :])
    data = good.read_bytes()
    (folder / "cut.mp4").write_bytes(data[: len(data) // 2])
    (folder / "empty.mp4").write_bytes(b"")
    (folder / "text.mp4").write_text("not found")
    videos.write_sound(folder / "sound.mp4")
    videos.write_nothing(folder / "nothing.mp4")
    (folder / "notes.txt").write_text("no video")
    result = run("check", tmp_path / "clips", "--output", tmp_path / "found.json")
    assert result.exit_code == 1, result.output
    report = json.loads((tmp_path / "found.json").read_text())
    assert report["videos"] == 12
    found = {(Path(one["path"]).name, one["problem"]): one["reason"] for one in report["problems"]}
    assert found == {
        ("cut.avi", "truncated"): "its header tells 20 frames, and it has 13",
        ("cut.mkv", "truncated"): "its header tells 1.3 s, and it ends after 0.9 s",
        ("cut.mp4", "no video"): NO_VIDEO,
        ("damaged.avi", "corrupt"): f"a frame near number 6 is damaged ({INVALID}); PyAV may still show it",
        ("empty.mp4", "empty"): "it has no bytes",
        ("named.mp4", "mislabelled"): "it is named as .mp4, and its content is .mkv or .webm",
        ("nothing.mp4", "no video"): "it has no video",
        ("sound.mp4", "no video"): "it has no video, only sound",
        ("text.mp4", "no video"): NO_VIDEO,
    }
    for name, problem in found:
        assert re.search(rf"^{problem} +{folder / name}  ", result.output, re.MULTILINE)
    assert f"12 videos under {tmp_path / 'clips'}, 9 with problems: 4 no video, 2 truncated" in result.output
    monkeypatch.setitem(sys.modules, "av", None)
    missing = run("check", good)
    assert missing.exit_code == 2
    assert "needs PyAV: pip install" in " ".join(missing.output.split())

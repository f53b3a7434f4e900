"""The code of the quickstart and of the pages on migrating runs, from top to bottom of each page."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PER_CLASS, PHOTOGRAPHS
from helpers import sounds
from helpers.videos import pan, write

from torchdali import DALILoader

pytestmark = pytest.mark.timeout(120)

DOCS = Path(__file__).parents[2] / "docs"
COUNT = PER_CLASS * len(PHOTOGRAPHS)


def code(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def run(page: str, replaced: dict[str, str] | None = None) -> dict[str, Any]:
    """The names that the code of a page leaves behind."""
    text = "\n".join(code(page))
    for written, instead in (replaced or {}).items():
        assert written in text, f"{page} no longer says {written}"
        text = text.replace(written, instead)
    namespace: dict[str, Any] = {"__name__": page}
    exec(compile(text, page, "exec"), namespace)
    return namespace


@pytest.fixture(autouse=True)
def in_folder(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with ``data/train``, on a machine without a GPU."""
    shutil.copytree(pictures, tmp_path / "data" / "train")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def assert_batch(namespace: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
    images, labels = namespace["images"], namespace["labels"]
    assert images.shape == (8, 3, 224, 224)
    assert images.dtype == dtype
    assert labels.shape == (8,)
    assert labels.dtype == torch.int64
    assert 0.5 < float(images.float().std()) < 2


def test_the_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    left = run("quickstart.md", {"range(2)": "range(1)"})
    assert type(left["loader"]) is DALILoader
    assert_batch(left)
    assert torch.isfinite(left["loss"])
    assert left["batch"]["image"].shape == (8, 3, 224, 224)
    assert len(left["batch"]["name"]) == 8
    said = capsys.readouterr().out
    assert "RandomResizedCrop" in said
    assert said.startswith("5 of 5 transforms run in DALI on ")
    assert said.count("\nverdict    ") == 1


def test_from_a_dataloader() -> None:
    # Without worker processes, which could not import what is defined here.
    left = run("migrating.md", {"num_workers=2)": "num_workers=0)", "num_workers=2, transform": "transform"})
    before, after = left["Before"]("data/train"), left["After"]("data/train")
    assert len(before) == len(after) == COUNT
    plain = left["DataLoader"](before, batch_size=8)
    images, names = next(iter(plain))
    assert images.shape == (8, 3, 224, 224)
    images, names = next(iter(left["loader"]))
    assert images.shape == (8, 3, 224, 224)
    assert set(names) == {sorted(PHOTOGRAPHS)[0]}
    assert sum(len(batch[0]) for batch in left["DataLoader"](left["dataset"], 8)) == COUNT


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_from_a_dali_pipeline() -> None:
    pipeline, ours = code("migrating_from_dali.md")
    left = run("migrating_from_dali.md")
    assert "import nvidia" not in ours
    assert "DALIClassificationIterator" in pipeline
    assert_batch(left)
    assert type(left["loader"]) is DALILoader
    theirs = left["DALIClassificationIterator"]([left["pipeline"]()], reader_name="reader")
    (batch,) = next(iter(theirs))
    assert batch["data"].shape == (8, 3, 224, 224)
    assert 0.5 < float(batch["data"].std()) < 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_from_the_proxy() -> None:
    server, *ours = code("migrating_from_dali_proxy.md")
    assert len(ours) == 2
    assert "proxy.DALIServer" in server
    left = run("migrating_from_dali_proxy.md", {"num_workers=2, transform": "transform"})
    images, numbers = next(iter(left["loader"]))
    assert images.shape == (8, 3, 224, 224)
    assert 0 <= float(images.min()) < float(images.max()) <= 1
    assert numbers.tolist() == list(range(8))


def test_from_ffcv() -> None:
    left = run("migrating_from_ffcv.md")
    assert_batch(left, torch.float16)
    assert len(left["loader"]) == COUNT // 8


def test_every_page_is_found() -> None:
    readme = (DOCS.parent / "README.md").read_text()
    guide = (DOCS / "migrating.md").read_text()
    assert "docs/quickstart.md" in readme
    assert "docs/migrating.md" in readme
    pages = sorted(path.name for path in DOCS.glob("migrating_*.md"))
    assert len(pages) == 3
    assert all(f"]({page})" in guide for page in pages)


def test_audio(tmp_path: Path) -> None:
    for name in ("a", "b"):
        sounds.write(tmp_path / "data" / "sounds" / name / "one.wav", sounds.chirp(8000), 16_000)
        commands = tmp_path / "data" / "SpeechCommands" / "speech_commands_v0.02"
        sounds.write(commands / name / "0_nohash_0.wav", sounds.chirp(600), 16_000)
    for name in ("validation_list.txt", "testing_list.txt"):
        (commands / name).write_text("")
    left = run("audio.md")
    assert left["spectrograms"].shape == (2, 1, 64, 41)
    assert left["lengths"].tolist() == [41, 41]
    assert left["coefficients"].shape == (2, 1, 40, 4)
    assert sorted(left["words"]) == ["a", "b"]
    assert left["batch"]["audio"].shape == (2, 1, 64, 41)
    assert left["batch"]["label"].tolist() == [0, 1]


def test_videos(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="needs PyAV")
    for name in ("a", "b"):
        (tmp_path / "data" / "clips" / name).mkdir(parents=True)
        write(tmp_path / "data" / "clips" / name / "clip.mp4", pan(24))
    left = run("video.md")
    assert left["dataset"].classes == ["a", "b"]
    assert left["videos"].shape == (2, 8, 3, 112, 112)
    assert left["labels"].shape == (2,)

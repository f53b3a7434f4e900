"""Files that only PIL decodes are decoded in several threads, to the same pixels."""

from __future__ import annotations

import io
import tarfile
import threading
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from conftest import same
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError
from torchdali.datasets import Tar
from torchdali.runtime import machine

EXACT = v2.Compose([v2.ToImage(), v2.CenterCrop(24)])
KINDS = ("bmp", "tif", "ppm", "png")


@pytest.fixture
def datasets(pictures: Path, tmp_path: Path) -> dict[str, Any]:
    """Twelve pictures in other formats, PNGs among them transparent, in a folder and in a tar."""
    root = tmp_path / "folder" / "all"
    root.mkdir(parents=True)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number, path in enumerate(sorted(pictures.rglob("*.jpg"))[:12]):
            image, kind = PIL.Image.open(path), KINDS[number % 4]
            file = root / f"{number:02}.{kind}"
            (image.convert("RGBA") if kind == "png" else image).save(file)
            for name, data in ((file.name, file.read_bytes()), (f"{number:02}.cls", b"0")):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return {
        "folder": ImageFolder(root.parent, EXACT),
        "tar": Tar(tmp_path / "a.tar", image=KINDS, transform=EXACT),
    }


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_several_threads_decode_them(datasets: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = list(DataLoader(datasets[kind], batch_size=6))
    names, convert, meet = set[str](), PIL.Image.Image.convert, threading.Barrier(3)

    def note(image: Any, mode: str) -> Any:
        names.add(threading.current_thread().name.rpartition("_")[0])
        meet.wait(20)  # three of them at a time
        return convert(image, mode)

    monkeypatch.setattr(machine, "count_available_cores", lambda: 3)
    monkeypatch.setattr(PIL.Image.Image, "convert", note)
    assert same(list(DALILoader(datasets[kind], batch_size=6, device="cpu")), theirs)
    assert names == {"torchdali-pil"}


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_the_first_damaged_one_is_named(datasets: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load = PIL.Image.Image.convert

    def fail(image: Any, mode: str) -> Any:
        if image.format in ("TIFF", "PPM"):
            raise OSError("broken")
        return load(image, mode)

    monkeypatch.setattr(PIL.Image.Image, "convert", fail)
    batches = iter(DALILoader(datasets[kind], batch_size=12, device="cpu"))
    with pytest.raises(SampleError, match=r"sample 1 .*: it cannot be decoded \(broken\)"):
        next(batches)

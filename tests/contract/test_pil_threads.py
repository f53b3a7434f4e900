"""Files that only PIL decodes are decoded in several threads, to the same pixels."""

from __future__ import annotations

import io
import os
import tarfile
import threading
import weakref
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
from torchdali.pipeline.readers import memory_files
from torchdali.pipeline.readers.memory_files import MemoryFile
from torchdali.runtime import machine

EXACT = v2.Compose([v2.ToImage(), v2.CenterCrop(24)])
KINDS = ("bmp", "tif", "webp", "png")


@pytest.fixture
def datasets(pictures: Path, tmp_path: Path) -> dict[str, Any]:
    """Twelve pictures that only PIL decodes, in a folder and in a tar."""
    root = tmp_path / "folder" / "all"
    root.mkdir(parents=True)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number, path in enumerate(sorted(pictures.rglob("*.jpg"))[:12]):
            image, kind = PIL.Image.open(path), KINDS[number % 4]
            file = root / f"{number:02}.{kind}"
            image = image.convert("P" if kind == "bmp" else "RGB")
            if kind in ("webp", "png"):
                image.putalpha(128)
            image.save(file, **({"compression": "tiff_lzw"} if kind == "tif" else {}))
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


def test_a_batch_does_not_wait_for_the_files_of_later_ones(datasets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads decode them while the loop works on the first batch."""
    convert, is_out, decoded = PIL.Image.Image.convert, threading.Event(), threading.Semaphore(0)

    def note(image: Any, mode: str) -> Any:
        assert int(Path(image.filename).stem) < 3 or is_out.wait(20)
        decoded.release()
        return convert(image, mode)

    loader = DALILoader(datasets["folder"], batch_size=3, device="cpu")
    theirs = list(loader)  # the headers are known then
    monkeypatch.setattr(PIL.Image.Image, "convert", note)
    batches = iter(loader)
    ours = [next(batches)]
    is_out.set()
    assert all(decoded.acquire(timeout=20) for _ in range(12))
    assert same([*ours, *batches], theirs)


def test_few_files_in_memory_are_open_at_once(datasets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, most = weakref.WeakSet[Any](), list[int]()
    create = MemoryFile.__init__

    def count(file: MemoryFile) -> None:
        create(file)
        made.add(file)
        most.append(len(made))

    theirs = list(DataLoader(datasets["folder"], batch_size=6))
    monkeypatch.setattr(machine, "max_open_files", lambda: 12)
    monkeypatch.setattr(MemoryFile, "__init__", count)
    assert same(list(DALILoader(datasets["folder"], batch_size=6, device="cpu")), theirs)
    assert len(most) == 12
    assert max(most) <= 4


def test_a_file_in_memory_is_closed_after_its_module_has_lost_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of Python, if an epoch was left early."""
    file = MemoryFile.save(PIL.Image.new("RGB", (2, 2)))
    path = file.path
    assert os.path.exists(path)  # noqa: PTH110 - bytes
    monkeypatch.setattr(memory_files, "os", None)
    file.__del__()
    assert not os.path.exists(path)  # noqa: PTH110


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_the_first_damaged_one_is_named(datasets: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load = PIL.Image.Image.convert

    def fail(image: Any, mode: str) -> Any:
        if image.format in ("TIFF", "PNG"):
            raise OSError("broken")
        return load(image, mode)

    monkeypatch.setattr(PIL.Image.Image, "convert", fail)
    batches = iter(DALILoader(datasets[kind], batch_size=12, device="cpu"))
    with pytest.raises(SampleError, match=r"sample 1 .*: it cannot be decoded \(broken\)"):
        next(batches)

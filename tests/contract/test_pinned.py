"""The pinned memory that DALI copies files to a GPU from is there before the first batch, and does not grow later."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, cast

import pytest
import skimage.data
import torch
from conftest import Script
from PIL import Image
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader
from torchdali.pipeline import graph
from torchdali.pipeline.tuning import choose_pinned_bytes

CHAIN = v2.Compose([v2.ToImage(), v2.CenterCrop(32)])
BESIDE = 32 * 2**20


@pytest.mark.parametrize(
    ("batch", "window", "wanted"),
    [(0, 6, 0), (2**20, 6, 10 * 2**20 + BESIDE), (2**20, 1, 5 * 2**20 + BESIDE), (2**40, 6, 2**30)],
)
def test_what_is_taken(batch: int, window: int, wanted: int) -> None:
    assert choose_pinned_bytes(batch, window) == wanted


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is asked of DALI's pool, which begins as in a new process."""
    asked: list[int] = []
    backend = importlib.import_module("nvidia.dali.backend")
    monkeypatch.setattr(backend, "PreallocatePinnedMemory", asked.append)
    monkeypatch.setattr(graph, "_reserved", {"pinned": 0})
    return asked


def test_the_pool_is_asked_for_more_only(pool: list[int]) -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    for size, device in ((0, gpu), (9, cpu), (5, gpu), (5, gpu), (4, gpu), (7, gpu)):
        graph.reserve_pinned(size, device)
    assert pool == [5, 7]


def test_the_pool_is_asked_again_when_it_was_emptied(pool: list[int]) -> None:
    gpu = torch.device("cuda", 0)
    graph.reserve_pinned(5, gpu)
    graph.release_memory(None)
    graph.reserve_pinned(4, gpu)
    assert pool == [5, 4]


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_a_pool_that_cannot_grow_ends_nothing(
    pool: list[int], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(size: int) -> None:
        pool.append(size)
        raise error("no memory")

    monkeypatch.setattr(importlib.import_module("nvidia.dali.backend"), "PreallocatePinnedMemory", fail)
    graph.reserve_pinned(5, torch.device("cuda", 0))
    assert pool == [5]


class OneByOne(Dataset[Any]):
    """A dataset that is asked for its samples: paths, encoded files or pictures."""

    def __init__(self, folder: ImageFolder, kind: str) -> None:
        self.folder, self.kind = folder, kind

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> Any:
        path = Path(self.folder.samples[index][0])
        if self.kind == "pixels":
            return Image.open(path).convert("RGB")
        return path if self.kind == "paths" else path.read_bytes()


@pytest.mark.parametrize("kind", ["read", "paths", "host", "bytes", "pixels"])
def test_loaders_ask_for_what_their_first_batch_tells(
    pictures: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(graph, "reserve_pinned", lambda size, _device: asked.append(size))
    folder = ImageFolder(pictures, CHAIN)
    if kind in ("read", "host"):
        loader: Any = DALILoader(folder, 4, device="cpu", cache="host" if kind == "host" else None)
    else:
        loader = DALILoader(cast("Any", OneByOne(folder, kind)), 4, transform=CHAIN, device="cpu")
    for _ in range(2):
        list(loader)
    first = sum(Path(path).stat().st_size for path, _ in folder.samples[:4])
    assert asked == [{"read": choose_pinned_bytes(first, 6), "paths": choose_pinned_bytes(first, 1)}.get(kind, 0)]


GROWTH = """
    import json, sys, time
    from pathlib import Path
    from torch.utils.data import Subset
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2
    from torchdali import DALILoader
    from torchdali.pipeline import graph

    def shared():
        lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if "Rss" in line)
        return sum(int(lines[name].split()[0]) for name in ("RssShmem", "RssFile")) // 1024

    def reserve(size, device):
        if taken:
            reserve_pinned(size, device)
        seen.append(shared())

    reserve_pinned, graph.reserve_pinned = graph.reserve_pinned, reserve
    taken, seen = False, []
    folder = ImageFolder(sys.argv[1], v2.Compose([v2.ToImage(), v2.RandomResizedCrop(64)]))
    list(DALILoader(Subset(folder, range(64, 66)), 2, device="cuda"))  # so that all libraries are there
    taken, seen = sys.argv[2] == "taken", []
    loader = DALILoader(folder, 64, shuffle=True, device="cuda", num_workers=4)
    for epoch in range(4):
        for images, labels in loader:
            time.sleep(0.05 * (epoch % 2))  # so that all batches in flight are there
        seen.append(shared())
    print(json.dumps(max(seen) - seen[0]))
"""


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_the_pool_does_not_grow_beside_a_training(tmp_path: Path, run_script: Script) -> None:
    """Without what is asked for it does, by far more: so the memory is found where it is looked for."""
    (tmp_path / "a").mkdir()
    photograph = Image.fromarray(skimage.data.astronaut()).resize((1536, 1536))
    for number in range(64):
        photograph.save(tmp_path / "a" / f"{number}.jpg", quality=98)
    size = 64 * (tmp_path / "a" / "0.jpg").stat().st_size
    for number in range(64, 512):
        (tmp_path / "a" / f"{number}.jpg").symlink_to(tmp_path / "a" / f"{number % 64}.jpg")
    grown: dict[str, int] = {}
    for how in ("taken", "grown"):
        done = run_script(GROWTH, tmp_path, how)
        assert done.returncode == 0, done.stderr
        grown[how] = json.loads(done.stdout)
    assert grown["taken"] < 50 < 2 * size / 2**20 < grown["grown"], (grown, size)

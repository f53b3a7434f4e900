"""Batches of large images take several runs of DALI, and are the same batches."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Numbered, Script, same
from PIL import Image
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError, compile  # noqa: A004 - torchdali's own
from torchdali.pipeline import part_feeder
from torchdali.pipeline.engine import PipelineRunner
from torchdali.pipeline.parts import split

pytestmark = pytest.mark.timeout(120)

RANDOM = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(20), v2.RandomHorizontalFlip(), v2.ColorJitter(0.4)])
LIMIT = 50_000
"""Bytes. The pictures have 11,000 to 24,000 bytes."""


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of images in each run of DALI."""
    counts: list[int] = []
    submit = PipelineRunner.submit
    monkeypatch.setattr(
        PipelineRunner,
        "submit",
        lambda self, images, inputs, *more: counts.append(len(images)) or submit(self, images, inputs, *more),
    )
    return counts


class Paths(Dataset[Any]):
    def __init__(self, folder: ImageFolder, encoded: bool) -> None:
        self.files, self.encoded = [Path(path) for path, _ in folder.samples], encoded

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        return (self.files[index].read_bytes() if self.encoded else self.files[index]), index


def lists(samples: list[Any]) -> Any:
    return [image for image, _ in samples], [target for _, target in samples]


@pytest.mark.parametrize(
    ("kind", "options"),
    {
        "folder": ("native", {}),
        "host cache": ("native", {"cache": "host"}),
        "device cache": ("native", {"cache": "device"}),
        "paths": ("paths", {}),
        "encoded": ("encoded", {}),
        "in workers": ("paths", {"num_workers": 1}),
    }.values(),
)
def test_a_batch_of_several_runs_is_the_same_batch(
    kind: str, options: dict[str, Any], pictures: Path, numbered: Numbered, device: str, runs: list[int]
) -> None:
    dataset: Any = numbered(pictures, RANDOM if kind == "native" else None)
    if kind != "native":
        dataset, options = Paths(dataset, kind == "encoded"), options | {"transform": RANDOM}

    def epochs(**more: Any) -> Any:
        loader = DALILoader(
            dataset, 10, shuffle=True, generator=torch.Generator(), seed=3, device=device, **options, **more
        )
        batches = [list(loader) for _ in range(2)]
        loader.close()
        return batches

    expected, whole = epochs(), list(runs)
    runs.clear()
    assert same(epochs(decode_bytes=LIMIT), expected)
    assert set(whole) == {10, 4}
    assert len(runs) > len(whole) + 6
    assert max(runs) < 10 or options == {"cache": "device"}, "decoded images in memory are one run"


def test_images_of_different_sizes_are_the_same_list(pictures: Path, numbered: Numbered, device: str) -> None:
    dataset = numbered(pictures, v2.ToImage())
    expected, ours = (
        list(DALILoader(dataset, 7, collate_fn=lists, device=device, decode_bytes=limit)) for limit in (None, LIMIT)
    )
    assert same(ours, expected)


def test_a_bad_file_in_a_later_run(fresh: ImageFolder, device: str, runs: list[int]) -> None:
    """Its batch is named, and those behind it come out in order."""
    Path(fresh.samples[8][0]).write_bytes(Path(fresh.samples[8][0]).read_bytes()[:-400])
    expected = list(DALILoader(fresh, 10, on_error="skip", device=device))
    assert same(list(DALILoader(fresh, 10, on_error="skip", device=device, decode_bytes=LIMIT)), expected)
    batches = iter(DALILoader(fresh, 10, device=device, decode_bytes=LIMIT))
    with pytest.raises(SampleError, match=re.escape(fresh.samples[8][0])):
        next(batches)
    assert [labels.tolist() for _, labels in batches] == [list(range(10, 20)), [20, 21, 22, 23]]


@pytest.mark.parametrize("prefetch", [1, 5])
def test_pixels_that_pil_decoded_are_held_for_few_runs(
    fresh: ImageFolder, prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many batches may be in flight."""
    for path, _ in fresh.samples:
        Image.open(path).convert("CMYK").save(path, "JPEG")
    expected, held = list(DALILoader(fresh, 6, device="cpu")), list[int]()
    begin = part_feeder.PartFeeder._begin

    def count(self: part_feeder.PartFeeder, *args: Any) -> bool:
        has_begun = begin(self, *args)
        held.append(self._held_bytes)
        return has_begun

    monkeypatch.setattr(part_feeder.PartFeeder, "_begin", count)
    options: dict[str, Any] = {"num_workers": 1, "prefetch_factor": prefetch}
    assert same(list(DALILoader(fresh, 6, device="cpu", decode_bytes=LIMIT, **options)), expected)
    assert len(held) > 8
    assert 0 < max(held) <= part_feeder._HELD_RUNS * LIMIT


def test_a_compiled_transform_and_explain_know_the_limit(
    pictures: Path, numbered: Numbered, monkeypatch: pytest.MonkeyPatch, wide: None, runs: list[int]
) -> None:
    dataset, text = numbered(pictures), io.StringIO()
    DALILoader(dataset, device="cpu", decode_bytes=2**20).explain(text)
    row = "memory     files and decoded images of a run take at most 1.0 MiB (decode_bytes); a batch of more is several"
    assert row in text.getvalue()
    DALILoader(Paths(dataset, encoded=False), device="cpu", transform=RANDOM).explain(text)
    assert re.search(
        r"\nmemory     files .* at most [\d.]+ MiB \(chosen: a 128th of the free memory, 192 ", text.getvalue()
    )
    monkeypatch.setattr("torchdali.pipeline.pool.choose_decode_bytes", lambda _: LIMIT)
    crop = compile(v2.Compose([v2.ToImage(), v2.CenterCrop(24)]), device="cpu")
    images = crop([path for path, _ in dataset.samples])
    assert max(runs) < 5
    assert all(torch.equal(image, dataset[i][0]) for i, image in enumerate(images))


@pytest.mark.parametrize(
    ("counts", "limit", "expected"),
    [
        ([3, 3, 3], 9, [3]),
        ([3, 3, 3], 8, [2, 1]),
        ([9, 1, 1, 9], 5, [1, 2, 1]),
        ([1, 9, 1], 5, [1, 1, 1]),
        ([], 5, [0]),
    ],
)
def test_parts(counts: list[int], limit: int, expected: list[int]) -> None:
    parts = split(np.array(counts, np.int64), limit)
    assert [part.stop - part.start for part in parts] == expected
    assert [part.start for part in parts] == np.cumsum([0, *expected])[:-1].tolist()


STATUS = """
import sys
from pathlib import Path

from torch.utils.data import Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader


def status(name):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith(name)) // 1024


chain = v2.Compose([v2.ToImage(), v2.Resize((32, 32))])
"""
MEMORY = f"""
{STATUS}
DALILoader(ImageFolder(sys.argv[1] + "/small", chain), 24, device="cpu").__iter__().__next__()
before = status("VmRSS")
for name in ("long", "large"):
    loader = DALILoader(ImageFolder(sys.argv[1] + "/" + name, chain), 40, device="cpu", decode_bytes=2**26)
    print(sum(len(images) for images, _ in loader), status("VmHWM") - before)
    loader.close()
"""


def write_files(root: Path) -> None:
    small = np.random.default_rng(0).integers(0, 255, (12, 16, 3), dtype=np.uint8)
    for name, size in (("small", (40, 30)), ("long", (40, 30)), ("large", (2200, 1500)), ("gif", (2200, 1500))):
        (root / name / "a").mkdir(parents=True)
        path = root / name / "a" / "0.jpg"
        Image.fromarray(small).resize(size, Image.Resampling.BICUBIC).save(path, "GIF" if name == "gif" else "JPEG")
        if name == "long":  # a film follows a phone's "motion photo"
            with path.open("r+b") as file:
                file.truncate(10 << 20)
        for number in range(1, 40):
            (root / name / "a" / f"{number}.jpg").hardlink_to(path)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_batch(tmp_path: Path, run_script: Script) -> None:
    """A batch of these files takes 400 MB, decoded or as they are; DataLoader has one of them at once."""
    write_files(tmp_path)
    done = run_script(MEMORY, tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    counts, grown = zip(*(map(int, line.split()) for line in done.stdout.splitlines()), strict=True)
    assert counts == (40, 40)
    assert max(grown) < 200, done.stdout


CLOSED = f"""
{STATUS}
left = []
for name, cache in (("small", None), ("large", None), ("gif", None), ("long", "host")):
    dataset = Subset(ImageFolder(sys.argv[1] + "/" + name, chain), range(20))
    loader = DALILoader(dataset, 20, device="cpu", cache=cache)
    assert sum(len(images) for images, _ in loader) == 20
    loader.close()
    left.append(status("VmRSS"))
print(*(one - left[0] for one in left[1:]))
"""


@pytest.mark.slow
def test_closing_gives_all_memory_back_if_malloc_and_dali_keep_none(tmp_path: Path, run_script: Script) -> None:
    """An epoch takes 200 MB and more, in DALI, in PIL or in the cache. The variables are those of arguments.md."""
    write_files(tmp_path)
    keep_none = {"DALI_MALLOC_POOL_THRESHOLD": "0", "MALLOC_TRIM_THRESHOLD_": "131072"}
    done = run_script(CLOSED, tmp_path, fresh=True, CUDA_VISIBLE_DEVICES="", **keep_none)
    assert done.returncode == 0, done.stderr
    assert max(map(int, done.stdout.split())) < 30, done.stdout

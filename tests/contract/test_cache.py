"""With a cache batches are bit for bit those without, and files that it has are neither read nor decoded again."""

from __future__ import annotations

import gc
import io
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from conftest import PER_BATCH, Numbered, encoded, in_order, same
from torch.utils.data import ConcatDataset, RandomSampler, Subset
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError
from torchdali.transforms import MultiView

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("wide")]

KINDS = ["host", "device"]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FLOATS = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]


def darkened(image: torch.Tensor) -> torch.Tensor:
    """A transform that only torch knows, and that draws."""
    return image * torch.rand(())


CHAINS: dict[str, list[Any]] = {
    "RandomResizedCrop": [v2.RandomResizedCrop(32), v2.RandomHorizontalFlip(), *FLOATS],
    "Resize, CenterCrop": [v2.Resize(40), v2.CenterCrop(32), *FLOATS],
    "Resize, RandomCrop": [v2.Grayscale(3), v2.Resize((50, 40)), v2.RandomCrop(32), *FLOATS],
    "two crops": [v2.CenterCrop(40), v2.RandomCrop(24), v2.CenterCrop(20)],
    "float first": [v2.Resize(40), *FLOATS, v2.CenterCrop(32)],
    "policy": [v2.Resize((40, 40)), v2.TrivialAugmentWide(), v2.RandomErasing(1.0)],
    "policy first": [v2.RandAugment(), v2.Resize((32, 32)), v2.ColorJitter(0.4, 0.4)],
    "several views": [v2.Resize(60), v2.FiveCrop(30)],
    "random views": [MultiView([v2.RandomResizedCrop(32), v2.RandomCrop(20)])],
    "in torch": [v2.Resize(40), v2.CenterCrop(32), v2.Lambda(darkened), v2.RandomHorizontalFlip()],
}


def loader_of(dataset: Any, device: str, kind: str | None = None, **options: Any) -> DALILoader[Any]:
    options = {"batch_size": PER_BATCH, "shuffle": True, "generator": torch.Generator().manual_seed(5), **options}
    return DALILoader(dataset, device=device, seed=3, cache=kind, **options)


def epochs(loader: DALILoader[Any], count: int = 3) -> list[list[Any]]:
    return [list(loader) for _ in range(count)]


def said(loader: DALILoader[Any]) -> str:
    """What ``explain()`` says of the cache."""
    text = io.StringIO()
    loader.explain(text)
    return next((line for line in text.getvalue().splitlines() if line.startswith("cache ")), "")


def path_of(dataset: ImageFolder, index: int) -> Path:
    return Path(dataset.samples[index][0])


def blackened(path: Path) -> None:
    """Another picture of the same size, in a file of the same length and time of modification."""
    before = path.stat()
    with PIL.Image.open(path) as image:
        data = encoded(PIL.Image.new("RGB", image.size), "JPEG", quality=30)
    # What is missing in length is a comment behind the first marker.
    gap = before.st_size - len(data)
    data = data[:2] + b"\xff\xfe" + (gap - 2).to_bytes(2, "big") + bytes(gap - 4) + data[2:]
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def blacken_all(dataset: ImageFolder) -> None:
    for path, _ in dataset.samples:
        blackened(Path(path))


# The same batches


@pytest.mark.parametrize(
    ("chain", "kind", "budget"),
    [
        pytest.param(
            name, kind, (None, 45_000)[(i + j) % 2], marks=[pytest.mark.slow] * (i > 3 and j != i % len(KINDS))
        )
        for i, name in enumerate(CHAINS)
        for j, kind in enumerate(KINDS)
    ],
)
def test_batches_are_those_without_a_cache(
    pictures: Path, numbered: Numbered, chain: str, kind: str, budget: int | None, device: str
) -> None:
    dataset = numbered(pictures, v2.Compose([v2.ToImage(), *CHAINS[chain]]))
    if budget and kind == "host":
        budget = 20_000
    with (
        loader_of(dataset, device) as plain,
        loader_of(dataset, device, kind, cache_bytes=budget) as cached,
    ):
        assert same(epochs(cached), epochs(plain))
        kept = int(said(cached).split(" of 24 samples")[0].split()[-1])
        assert kept == 24 if budget is None else 0 < kept < 24


@pytest.mark.parametrize("kind", KINDS)
def test_window_of_a_prefetch_factor_and_threads(pictures: Path, numbered: Numbered, kind: str, device: str) -> None:
    dataset = numbered(pictures, v2.Compose([v2.ToImage(), *CHAINS["RandomResizedCrop"]]))
    options = {"num_workers": 2, "prefetch_factor": 1, "batch_size": 5, "drop_last": True}
    ours = epochs(loader_of(dataset, device, kind, **options))
    assert same(ours, epochs(loader_of(dataset, device, **options)))


@pytest.mark.parametrize("kind", KINDS)
def test_samples_that_come_up_several_times(dataset: ImageFolder, kind: str, device: str) -> None:
    def loader(kind: str | None) -> DALILoader[Any]:
        sampler = RandomSampler(dataset, True, 60, torch.Generator().manual_seed(1))
        return loader_of(dataset, device, kind, sampler=sampler, shuffle=None, batch_size=20)

    dataset.transform = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(24)])
    assert same(epochs(loader(kind)), epochs(loader(None)))


@pytest.mark.parametrize("kind", KINDS)
def test_nested_datasets(pictures: Path, numbered: Numbered, kind: str, device: str) -> None:
    one = numbered(pictures)
    two = numbered(pictures, one.transform, first=100)
    dataset = ConcatDataset([Subset(one, [3, 3, 5, 7, 1]), two, Subset(Subset(two, range(9, 15)), [0, 2])])
    ours = loader_of(dataset, device, kind)
    assert same(epochs(ours), epochs(loader_of(dataset, device)))
    assert "31 of 31 samples" in said(ours)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [True, False], ids=["inference first", "inference last"])
def test_inference_mode_of_some_epochs(dataset: ImageFolder, kind: str, first: bool, device: str) -> None:
    ours, theirs = (loader_of(dataset, device, cache, batch_size=2) for cache in (kind, None))
    iterator = iter(ours)
    with torch.inference_mode(first):
        batches = [next(iterator)]
    with torch.inference_mode(not first):
        batches += iterator
    assert same([(x.clone(), y.clone()) for x, y in batches], [tuple(batch) for batch in theirs])


@pytest.mark.parametrize("kind", KINDS)
def test_epoch_that_is_left_early(dataset: ImageFolder, kind: str, device: str) -> None:
    ours, theirs = (loader_of(dataset, device, cache, shuffle=False) for cache in (kind, None))
    for loader in (ours, theirs):
        for _ in zip(range(2), loader, strict=False):
            pass
    assert same(epochs(ours), epochs(theirs))
    assert "24 of 24" in said(ours)


@pytest.mark.parametrize("kind", KINDS)
def test_two_iterators_at_once(dataset: ImageFolder, kind: str, device: str) -> None:
    ours, theirs = loader_of(dataset, device, kind), loader_of(dataset, device)
    assert same(list(zip(ours, ours, strict=True)), list(zip(theirs, theirs, strict=True)))
    whole = loader_of(dataset, device, kind)
    list(whole)
    if kind == "device":  # none of the images is there twice
        assert said(ours).split(" in ")[0] == said(whole).split(" in ")[0]
    assert same(epochs(ours), epochs(theirs))


@pytest.mark.parametrize("kind", KINDS)
def test_transform_that_changes_between_epochs(fresh: ImageFolder, kind: str, device: str) -> None:
    ours, theirs = loader_of(fresh, device, kind), loader_of(fresh, device)
    fresh.transform = v2.Compose([v2.ToImage(), *CHAINS["RandomResizedCrop"]])
    assert same(list(ours), list(theirs))
    fresh.transform = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(20), v2.RandomVerticalFlip()])
    expected = list(theirs)
    blacken_all(fresh)
    assert same(list(ours), expected), "what was kept is of use still"
    fresh.transform = v2.Compose([v2.ToImage(), v2.Resize(40), v2.CenterCrop(24)])
    black, kept = list(theirs), list(ours)
    assert same(kept, black) is (kind == "device"), "images that were resized are others than whole ones"


def test_cache_that_is_changed_between_epochs(dataset: ImageFolder, device: str) -> None:
    ours, theirs = loader_of(dataset, device), loader_of(dataset, device)
    rows: list[str] = []
    for kind in (None, "device", "host", None):
        ours.cache = kind
        assert same(list(ours), list(theirs))
        rows.append(said(ours))
    assert [row[11:].partition(",")[0] for row in rows] == ["", "decoded images", "encoded files", ""]
    assert ours._session.cache is None
    ours.cache = "tape"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="got 'tape'"):
        iter(ours)


# What is kept


@pytest.mark.parametrize("kind", KINDS)
def test_kept_files_are_not_read_again(fresh: ImageFolder, kind: str, device: str) -> None:
    loader = loader_of(fresh, device, kind, shuffle=False)
    before = list(loader)
    blacken_all(fresh)
    assert same(epochs(loader), [before] * 3)
    assert not same(list(loader_of(fresh, device, shuffle=False)), before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", ["time", "length"])
def test_file_that_was_rewritten_is_read_anew(fresh: ImageFolder, kind: str, change: str, device: str) -> None:
    loader = loader_of(fresh, device, kind, shuffle=False)
    before = epochs(loader)[-1]  # by then there is no decoder any more
    path = path_of(fresh, 4)
    stat = path.stat()
    blackened(path)
    if change == "length":
        path.write_bytes(path.read_bytes() + b"\0")
    nanoseconds = 0 if change == "length" else 1
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + nanoseconds))
    plain = list(loader_of(fresh, device, shuffle=False))
    after = epochs(loader)
    assert same(after, [plain] * 3)
    assert [not same(x, y) for x, y in zip(before, plain, strict=True)].count(True) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_other_files_are_kept_anew(fresh: ImageFolder, kind: str, device: str) -> None:
    loader = loader_of(fresh, device, kind, shuffle=False)
    list(loader)
    fresh.samples = fresh.samples[::-1][:10]
    assert same(epochs(loader), epochs(loader_of(fresh, device, shuffle=False)))
    assert "10 of 10 samples" in said(loader)


def test_images_are_kept_after_the_transforms_that_draw_nothing(
    pictures: Path, numbered: Numbered, device: str
) -> None:
    expected = {
        "RandomResizedCrop": "whole decoded images",
        "Resize, CenterCrop": "after ToImage, Resize, CenterCrop",
        "Resize, RandomCrop": "after ToImage, Grayscale, Resize",
        "two crops": "after ToImage, CenterCrop",
        "float first": "after ToImage, Resize,",
        "policy first": "whole decoded images",
        "several views": "after ToImage, Resize,",
    }
    for name, words in expected.items():
        chain = v2.Compose([v2.ToImage(), *CHAINS[name]])
        assert words in said(loader_of(numbered(pictures, chain), device, "device")), name


def test_explain_says_what_is_kept(dataset: ImageFolder, device: str) -> None:
    size = sum(path_of(dataset, i).stat().st_size for i in range(24))
    loader = loader_of(dataset, device, "host", cache_bytes=2**20)
    assert "encoded files, in host memory: 0 of 24 samples" in said(loader)
    list(loader)
    assert f"24 of 24 samples, {size / 2**20:.1f} MiB in 1.0 MiB of at most 1.0 MiB (cache_bytes)" in said(loader)
    loader = loader_of(dataset, device, "device")
    assert "at most half of what is free when the first epoch begins" in said(loader)
    list(loader)
    assert "(chosen: half of what was free when the first epoch began)" in said(loader)
    assert said(loader_of(dataset, device)) == ""


# What it costs, and how it ends


def test_decoder_is_given_back_when_all_images_are_kept(dataset: ImageFolder, device: str) -> None:
    loader = loader_of(dataset, device, "device")
    decoders: list[int] = []
    for _ in range(3):
        list(loader)
        assert loader._session.native_plan is not None
        cache: Any = loader._session.native_plan.cache
        decoders.append(len(cache.pool._idle))
    assert decoders == [1, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_close_frees_the_memory(dataset: ImageFolder, kind: str, device: str) -> None:
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    loader = loader_of(dataset, device, kind)
    first = list(loader)
    assert loader._session.native_plan is not None
    cache: Any = loader._session.native_plan.cache
    blocks = cache._blocks if kind == "host" else cache._store._blocks
    memory = [weakref.ref(block) for block in blocks]
    assert memory
    del cache, blocks
    iterator = iter(loader)
    next(iterator)
    loader.close()
    gc.collect()
    assert [one() for one in memory] == [None] * len(memory)
    if device == "cuda":
        # Batches are DALI's memory; labels are torch's.
        assert torch.cuda.memory_allocated() - before < 2**20
    with pytest.raises(RuntimeError, match="closed"):
        next(iterator)
    again = loader_of(dataset, device, kind)
    assert same(list(again), first)


@pytest.mark.parametrize("kind", KINDS)
def test_copy_of_a_loader_has_a_cache_of_its_own(dataset: ImageFolder, kind: str) -> None:
    loader = loader_of(dataset, "cpu", kind, shuffle=False, cache_bytes=10_000_000)
    before = epochs(loader, 1)
    twin = pickle.loads(pickle.dumps(loader))
    assert (twin.cache, twin.cache_bytes, "0 of 24 samples" in said(twin)) == (kind, 10_000_000, True)
    assert same(epochs(twin, 1), before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_timeout_holds(monkeypatch: pytest.MonkeyPatch, fresh: ImageFolder, kind: str) -> None:
    """On storage that does not answer."""
    go_on, answer, silent = threading.Event(), os.open, str(path_of(fresh, 7))
    monkeypatch.setattr(os, "open", lambda path, *how: (path != silent or go_on.wait(30), answer(path, *how))[1])
    iterator = iter(loader_of(fresh, "cpu", kind, shuffle=False, timeout=1))
    try:
        assert [next(iterator)[1].tolist() for _ in range(2)] == in_order()[:2]
        with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
            next(iterator)
    finally:
        go_on.set()
    with pytest.raises(RuntimeError, match="timed out"):
        next(iterator)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipe_is_named_and_not_waited_for(fresh: ImageFolder, kind: str) -> None:
    path_of(fresh, 7).unlink()
    os.mkfifo(path_of(fresh, 7))
    iterator = iter(loader_of(fresh, "cpu", kind, shuffle=False))
    assert [next(iterator)[1].tolist() for _ in range(2)] == in_order()[:2]
    with pytest.raises(SampleError, match="it is no regular file"):
        next(iterator)
    assert [labels.tolist() for _, labels in iterator] == in_order()[3:]


# What cannot be


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"cache": "tape"}, "cache must be None, 'host', 'device' or 'disk', got 'tape'"),
    "True": ({"cache": True}, "cache must be None, 'host', 'device' or 'disk', got True"),
    "no cache": ({"cache_bytes": 10}, "cache_bytes goes with cache='host', cache='device' or cache='disk'"),
    "text": ({"cache": "host", "cache_bytes": "1G"}, "cache_bytes must be a number of bytes above 0, got '1G'"),
    "nothing": ({"cache": "device", "cache_bytes": 0}, "cache_bytes must be a number of bytes above 0, got 0"),
}


@pytest.mark.parametrize(("options", "text"), WRONG.values(), ids=WRONG.keys())
def test_arguments_that_do_not_exist(dataset: ImageFolder, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="cache") as caught:
        DALILoader(dataset, device="cpu", **options)
    assert text in str(caught.value)


class Asked(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3, 8, 8), index


def in_memory() -> Any:
    dataset: Any = CIFAR10.__new__(CIFAR10)
    dataset.data = torch.zeros(4, 32, 32, 3, dtype=torch.uint8).numpy()
    dataset.targets, dataset.transform, dataset.target_transform = [0] * 4, None, None
    return dataset


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("make", "text"),
    [(Asked, "Asked is not an image folder"), (in_memory, "its images are in memory already")],
    ids=["asked", "in memory"],
)
def test_datasets_without_files(kind: Any, make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match="keeps files by their path, size and time of modification") as caught:
        DALILoader(make(), device="cpu", cache=kind)
    assert text in str(caught.value)


# The decoder


@pytest.mark.parametrize("subsampling", ["4:2:0", "4:2:2", "4:4:4"])
@pytest.mark.parametrize("progressive", [False, True], ids=["baseline", "progressive"])
def test_window_that_is_decoded_is_that_of_the_whole_picture(
    tmp_path: Path, subsampling: str, progressive: bool, device: str
) -> None:
    """Without a cache the decoder decodes a crop alone, which has to be what a crop of the whole is."""
    (tmp_path / "one").mkdir()
    for name in ("astronaut", "chelsea", "coffee"):
        with (files("skimage") / "data" / f"{name}.png").open("rb") as stream:
            photograph = PIL.Image.open(stream).convert("RGB").resize((500, 375))
        data = encoded(photograph, "JPEG", quality=90, subsampling=subsampling, progressive=progressive)
        (tmp_path / "one" / f"{name}.jpg").write_bytes(data)
    dataset = ImageFolder(tmp_path, v2.Compose([v2.ToImage(), v2.RandomResizedCrop(224)]))
    dataset.samples = dataset.samples * 8
    plain, whole = (
        torch.cat([images for images, _ in loader_of(dataset, device, cache, batch_size=8)]).cpu().int()
        for cache in (None, "device")
    )
    difference = (plain - whole).abs()
    assert not difference.any(), f"{(difference > 0).float().mean():.2%} differ, by {difference.max()} at most"

"""Datasets whose paths lie in a file that is mapped: what they give, what they cost, and what is known of files."""

from __future__ import annotations

import os
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from conftest import Numbered, assert_pairs, encoded, in_order, same
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, RandomSampler, Subset, random_split
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, ImageIndex, SampleError
from torchdali.pipeline.readers import open_reader
from torchdali.pipeline.readers.header_reader import FirstBytes
from torchdali.sources import Header, from_dataset
from torchdali.sources.headers.table import HeaderColumns, HeaderTable
from torchdali.transforms.occurrences import DenseOccurrences

pytestmark = pytest.mark.timeout(60)

MANY = 200_000


@pytest.fixture
def index(pictures: Path, exact: v2.Compose, dataset: ImageFolder, tmp_path: Path) -> ImageIndex:
    """The numbered pictures as an index."""
    ImageIndex.write(tmp_path / "pictures.npz", dataset.samples)
    return ImageIndex(tmp_path / "pictures.npz", exact)


@pytest.fixture
def many(tmp_path: Path) -> list[tuple[str, int]]:
    """Samples of files that do not exist."""
    return [(f"/data/train/n{i % 1000:08d}/n{i % 1000:08d}_{i}.JPEG", i % 1000) for i in range(MANY)]


def on_host(loader: Any) -> list[Any]:
    return [[part.cpu() for part in batch] for batch in loader]


def mapped(array: Any) -> bool:
    while array is not None and not isinstance(array, np.memmap):
        array = array.base
    return array is not None


def allocated(call: Callable[[], Any]) -> tuple[int, int, Any]:
    """Bytes that are allocated after a call and its result, the most in between, and the result."""
    tracemalloc.start()
    try:
        result = call()
        return *tracemalloc.get_traced_memory(), result
    finally:
        tracemalloc.stop()


# What it is


def test_a_folder_is_written_as_imagefolder_reads_it(pictures: Path, tmp_path: Path, exact: v2.Compose) -> None:
    theirs = ImageFolder(pictures, exact, target_transform=lambda label: label + 100)
    ImageIndex.write(tmp_path / "a.npz", pictures)
    ours = ImageIndex(tmp_path / "a.npz", exact, lambda label: label + 100)
    assert (ours.classes, ours.class_to_idx) == (theirs.classes, theirs.class_to_idx)
    assert [(os.fsdecode(path), label) for path, label in zip(ours.paths, ours.targets.tolist(), strict=True)] == (
        theirs.samples
    )
    assert len(ours) == len(theirs) == len(ours.targets)
    assert same(list(ours), list(theirs))
    assert "a.npz" in repr(ours)
    with np.load(tmp_path / "a.npz") as arrays:
        assert set(arrays) == {"paths", "labels", "classes"}


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_dataloader_takes_it(index: ImageIndex, dataset: ImageFolder, workers: int) -> None:
    assert same(list(DataLoader(index, 5, num_workers=workers)), list(DataLoader(dataset, 5)))


NESTED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "plain": lambda a, b, f: a,
    "subset": lambda a, b, f: Subset(a, [5, 3, 3, -1]),
    "array": lambda a, b, f: Subset(a, np.array([5, 3, 3, -1], np.int32)),
    "range": lambda a, b, f: Subset(a, range(7, 1, -2)),
    "empty": lambda a, b, f: Subset(a, []),
    "random_split": lambda a, b, f: random_split(a, [12, 12], torch.Generator().manual_seed(0))[1],
    "concat": lambda a, b, f: ConcatDataset([a, b]),
    "twice": lambda a, b, f: ConcatDataset([a, b, a]),
    "folder": lambda a, b, f: ConcatDataset([f, a]),
    "nested": lambda a, b, f: Subset(ConcatDataset([Subset(b, [4, 2]), ConcatDataset([f, a])]), [1, 26, 0, 45, -2]),
}


@pytest.mark.parametrize("nest", NESTED.values(), ids=NESTED.keys())
@pytest.mark.parametrize("headers", [False, True], ids=["", "headers"])
def test_it_is_read_without_being_asked_wherever_it_is(
    pictures: Path, tmp_path: Path, dataset: ImageFolder, exact: v2.Compose, nest: Any, headers: bool, device: str
) -> None:
    ImageIndex.write(tmp_path / "a.npz", pictures, headers=headers)
    ImageIndex.write(tmp_path / "b.npz", reversed(dataset.samples))
    first = ImageIndex(tmp_path / "a.npz", exact)
    other = ImageIndex(tmp_path / "b.npz", exact, lambda label: label + 100)
    ours = nest(first, other, dataset)
    loader = DALILoader(ours, 5, device=device)
    assert loader._session.source is not None
    theirs = list(DataLoader(ours, 5))
    assert same([labels for _, labels in on_host(loader)], [labels for _, labels in theirs])
    if device == "cpu":
        assert same(on_host(loader), theirs)


def test_targets_that_are_no_integers_are_kept(index: ImageIndex, pictures: Path, exact: v2.Compose) -> None:
    folder = ImageFolder(pictures, exact)
    folder.samples = [(path, float(label)) for path, label in folder.samples]
    both = ConcatDataset([index, folder])
    assert same([from_dataset(both).target(row) for row in range(48)], [target for _, target in both])


def test_paths_are_any(tmp_path: Path, pictures: Path, exact: v2.Compose) -> None:
    names = ["ä\n.jpg", "日本.jpg", "plain.jpg", os.fsdecode(b"\xff\xfe.jpg"), "x" * 200 + ".jpg"]
    files = [tmp_path / name for name in names]
    source = next(pictures.rglob("*.jpg")).read_bytes()
    for file in files:
        file.write_bytes(source)
    given: list[Any] = [files[0], *map(str, files[1:4]), os.fsencode(files[4])]
    ImageIndex.write(tmp_path / "a.npz", ((path, i) for i, path in enumerate(given)))
    ours = ImageIndex(tmp_path / "a.npz", exact)
    assert [os.fsdecode(path) for path in ours.paths] == list(map(str, files))
    folder = ImageFolder(pictures, exact)
    folder.samples = list(zip(given, range(5), strict=True))
    for dataset in (ours, folder, ConcatDataset([ours, folder])):
        source = from_dataset(dataset)
        assert [source.name(row % 5) for row in range(len(dataset))] == [*map(str, files)] * (len(dataset) // 5)
        assert_pairs(DALILoader(dataset, 2, device="cpu"), ours)


def test_it_is_pickled_by_its_name(index: ImageIndex, dataset: ImageFolder, tmp_path: Path, many: Any) -> None:
    ImageIndex.write(tmp_path / "many.npz", many)
    long = ImageIndex(tmp_path / "many.npz", index.transform)
    for one in (long, DALILoader(long, 3, device="cpu")):
        assert len(pickle.dumps(one)) < 20_000
    assert mapped(pickle.loads(pickle.dumps(long)).paths)
    assert_pairs(pickle.loads(pickle.dumps(DALILoader(index, 3, device="cpu"))), dataset, in_order())


def test_another_index_under_its_name_leaves_what_is_open(index: ImageIndex, dataset: ImageFolder) -> None:
    loader = DALILoader(index, 3, device="cpu")
    assert_pairs(loader, dataset, in_order())
    ImageIndex.write(index.file, dataset.samples[:4])
    assert_pairs(loader, dataset, in_order())
    assert len(ImageIndex(index.file)) == 4


@pytest.mark.parametrize("headers", [False, True])
@pytest.mark.parametrize("count", [4, 24])
def test_another_index_under_its_name_tells_no_headers(
    dataset: ImageFolder, exact: v2.Compose, tmp_path: Path, headers: bool, count: int, device: str
) -> None:
    """Neither before a loader is made, nor when the dataset is read anew for its transform."""
    ImageIndex.write(tmp_path / "a.npz", dataset.samples, headers=True)
    index = ImageIndex(tmp_path / "a.npz", exact)
    ImageIndex.write(tmp_path / "a.npz", dataset.samples[::-1][:count], headers=headers)
    loader = DALILoader(index, 3, device=device)
    assert loader._session.source is not None
    assert_pairs(loader, dataset, in_order())
    for name in ("text", "gone"):
        index.file.write_text("text") if name == "text" else index.file.unlink()
        index.transform = v2.Compose([*exact.transforms])
        assert_pairs(loader, dataset, in_order())
        assert loader._session.source is not None


def saved(file: Path, save: Any = np.savez, **arrays: Any) -> None:
    with file.open("wb") as stream:
        save(stream, **arrays)


def damaged(file: Path, start: int, end: int) -> None:
    ImageIndex.write(file, [("a.jpg", 3), ("b.jpg", 4)])
    whole = file.read_bytes()
    file.write_bytes(whole[:start] + b"\xff" * (end - start) + whole[end:])


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "text": (lambda f: f.write_text("a.jpg 3\n"), "is no index"),
    "compressed": (lambda f: saved(f, np.savez_compressed, paths=[b"a"], labels=[1]), "is compressed"),
    "no paths": (lambda f: saved(f, labels=[1]), "no array 'paths'"),
    "strings": (lambda f: saved(f, paths=["a"], labels=[1]), "no array 'paths'"),
    "no labels": (lambda f: saved(f, paths=[b"a"]), "no array 'labels' of 1 integers"),
    "few labels": (lambda f: saved(f, paths=[b"a", b"b"], labels=[1]), "no array 'labels' of 2 integers"),
    "floats": (lambda f: saved(f, paths=[b"a"], labels=[1.0]), "no array 'labels'"),
    "objects": (lambda f: saved(f, paths=np.array([b"a"], object), labels=[1]), "Python objects"),
    "another order": (
        lambda f: saved(f, paths=[b"a"] * 2, labels=[1, 2], sizes=np.ones((2, 2), np.uint16, "F")),
        "Fortran's order",
    ),
    "one class": (lambda f: saved(f, paths=[b"a"], labels=[1], classes="cat"), "'classes' is no list of names"),
    "damaged header": (lambda f: damaged(f, 100, 160), "is no index, which is a file that"),
    "damaged magic": (lambda f: damaged(f, 40, 60), "is no index, which is a file that"),
}


@pytest.mark.parametrize(("make", "text"), BAD.values(), ids=BAD.keys())
def test_what_is_no_index_is_refused(tmp_path: Path, make: Any, text: str) -> None:
    make(tmp_path / "bad.npz")
    with pytest.raises(ValueError, match=rf"bad\.npz .*{text}"):
        ImageIndex(tmp_path / "bad.npz")


@pytest.mark.parametrize("kind", ["host", "device"])
def test_other_rows_of_an_index_are_kept_anew(
    fresh: ImageFolder, exact: v2.Compose, tmp_path: Path, kind: Any, device: str
) -> None:
    """Although their files are as long as the others and as old."""
    paths = [Path(path) for path, _ in fresh.samples]
    longest = max(path.stat().st_size for path in paths)
    for path in paths:
        path.write_bytes(path.read_bytes().ljust(longest, b"\0"))
        os.utime(path, (1, 1))
    ImageIndex.write(tmp_path / "fresh.npz", fresh.samples)
    part = Subset(ImageIndex(tmp_path / "fresh.npz", exact), [0, 1, 2])
    loader = DALILoader(part, 3, device=device, cache=kind)
    assert_pairs(loader, fresh, [[0, 1, 2]])
    part.indices = [5, 6, 7]
    assert_pairs(loader, fresh, [[5, 6, 7]])


def test_files_whose_headers_an_index_has_are_decoded_once(
    dataset: ImageFolder, exact: v2.Compose, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ImageIndex.write(tmp_path / "headers.npz", dataset.samples, headers=True)
    loader = DALILoader(ImageIndex(tmp_path / "headers.npz", exact), 3, device=device, cache="device")
    first = on_host(loader)
    monkeypatch.setattr(
        "torchdali.pipeline.cache.decoded.DecodedCache.drop", lambda self, rows: pytest.fail("decoded anew")
    )
    assert same(on_host(loader), first)


def test_an_index_by_numpy_alone_is_one(index: ImageIndex, dataset: ImageFolder, tmp_path: Path) -> None:
    paths = np.array([os.fsencode(path) for path, _ in dataset.samples])
    saved(tmp_path / "own.npz", paths=paths, labels=np.arange(len(paths), dtype=np.uint8))
    own = ImageIndex(tmp_path / "own.npz", index.transform)
    assert (own.classes, mapped(own.paths)) == ([], True)
    assert_pairs(DALILoader(own, 3, device="cpu"), dataset, in_order())


@pytest.mark.parametrize("label", ["7", 2**63, 2**70, -(2**63) - 1])
def test_a_label_that_is_no_int_leaves_the_old_index(index: ImageIndex, label: Any) -> None:
    with pytest.raises(TypeError, match=rf"the label of b\.jpg is no int of 64 bits: {label!r}"):
        ImageIndex.write(index.file, [("a.jpg", 3), ("b.jpg", label)])
    assert len(ImageIndex(index.file)) == len(index)


def test_labels_of_64_bits_are_kept(tmp_path: Path) -> None:
    ImageIndex.write(tmp_path / "a.npz", [("a.jpg", 2**63 - 1), ("b.jpg", -(2**63))])
    assert ImageIndex(tmp_path / "a.npz").targets.tolist() == [2**63 - 1, -(2**63)]


@pytest.mark.parametrize("classes", ["cat", [["cat"], ["dog"]]])
def test_classes_that_are_no_list_of_names_leave_the_old_index(index: ImageIndex, classes: Any) -> None:
    with pytest.raises(TypeError, match="classes is a list of names, not"):
        ImageIndex.write(index.file, [("a.jpg", 3)], classes=classes)
    assert len(ImageIndex(index.file)) == len(index)


# What it costs


def test_nothing_of_an_index_is_copied(tmp_path: Path, many: Any) -> None:
    ImageIndex.write(tmp_path / "many.npz", many)
    kept, peak, (dataset, source) = allocated(lambda: ((one := ImageIndex(tmp_path / "many.npz")), from_dataset(one)))
    assert peak < 10 * MANY  # the table, of which the system gives no page before it is written to
    assert kept >= 9 * MANY
    assert all(map(mapped, (dataset.paths, dataset.targets, source._targets._values, source._paths._rows[0])))
    assert source.name(MANY - 1) == many[-1][0]


def test_headers_in_an_index_are_mapped_and_copied_where_they_change(tmp_path: Path, pictures: Path) -> None:
    ImageIndex.write(tmp_path / "a.npz", pictures, headers=True)
    before = (tmp_path / "a.npz").read_bytes()
    _, peak, source = allocated(lambda: from_dataset(ImageIndex(tmp_path / "a.npz")))
    assert peak < 100_000
    assert all(map(mapped, source.headers().columns[1:]))
    rows = np.arange(24)
    reader = open_reader(source)
    assert not len(reader.table.find_unknown(rows))
    reader.forget(rows[:3])
    assert reader.table.find_unknown(rows).tolist() == [0, 1, 2]
    assert (tmp_path / "a.npz").read_bytes() == before


@pytest.mark.parametrize("nest", [lambda one: one, lambda one: Subset(one, range(0, MANY, 2))], ids=["", "subset"])
def test_a_list_of_paths_takes_what_they_are_long(many: Any, pictures: Path, nest: Any) -> None:
    dataset = ImageFolder(pictures)
    dataset.samples = many
    nested = nest(dataset)
    width = max(len(path) for path, _ in many)
    kept, peak, source = allocated(lambda: from_dataset(nested))
    assert kept < (width + 4 + 9) * len(nested) + 50_000
    assert peak < 3 * (width + 13) * len(nested) + 8 * MANY
    assert source.name(len(nested) - 1) == many[nested.indices[-1] if nested is not dataset else -1][0]


def test_a_subset_of_an_index_takes_few_bytes_a_sample(tmp_path: Path, many: Any) -> None:
    ImageIndex.write(tmp_path / "many.npz", many)
    dataset = Subset(ImageIndex(tmp_path / "many.npz"), np.arange(MANY)[::-1])
    kept, _, source = allocated(lambda: from_dataset(dataset))
    assert kept < (4 + 4 + 9) * MANY + 50_000
    assert source.name(0) == many[-1][0]


def test_an_epoch_takes_two_bytes_a_sample() -> None:
    kept, _, occurrences = allocated(lambda: DenseOccurrences(MANY))
    assert kept < 2 * MANY + 10_000
    counts = [occurrences.count(np.array([7, 9, 7])).tolist() for _ in range(200)]
    assert counts == [[2 * i, i, 2 * i + 1] for i in range(200)]


# What is known of files


def test_no_header_is_read_that_the_index_has(
    pictures: Path,
    tmp_path: Path,
    dataset: ImageFolder,
    exact: v2.Compose,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
) -> None:
    ImageIndex.write(tmp_path / "a.npz", dataset.samples, headers=True)
    monkeypatch.setattr(FirstBytes, "read", lambda *args: pytest.fail("a header was read"))
    assert_pairs(DALILoader(ImageIndex(tmp_path / "a.npz", exact), 3, device=device), dataset, in_order())


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF"])
@pytest.mark.parametrize("before", ["JPEG", "GIF"])
def test_a_file_that_changed_since_the_index_was_written_is_read_anew(
    fresh_pictures: Path, tmp_path: Path, numbered: Numbered, before: str, kind: str, device: str
) -> None:
    dataset = numbered(fresh_pictures)
    path = Path(dataset.samples[4][0])
    picture = Image.open(dataset.samples[20][0]).copy()
    path.write_bytes(encoded(picture.resize((80, 30)), before))
    ImageIndex.write(tmp_path / "a.npz", dataset.samples, headers=True)
    path.write_bytes(encoded(picture.resize((31, 70)), kind))
    index = ImageIndex(tmp_path / "a.npz", dataset.transform)
    loader = DALILoader(index, 3, device=device)
    for _ in range(2):
        assert_pairs(loader, dataset, in_order())


def test_a_file_without_a_header_raises_in_its_turn(fresh: ImageFolder, tmp_path: Path) -> None:
    Path(fresh.samples[4][0]).write_text("no picture")
    Path(fresh.samples[7][0]).unlink()
    ImageIndex.write(tmp_path / "a.npz", fresh.samples, headers=True)
    batches = iter(DALILoader(ImageIndex(tmp_path / "a.npz", fresh.transform), 3, device="cpu"))
    assert next(batches)[1].tolist() == [0, 1, 2]
    for sample in (4, 7):
        with pytest.raises(SampleError, match=rf"sample {sample} "):
            next(batches)
    assert next(batches)[1].tolist() == [9, 10, 11]


def test_facts_hold_sizes_and_lengths_of_any_size(tmp_path: Path) -> None:
    table = HeaderTable(HeaderColumns.unknown(4), np.array([3, 1, 0, 2]))
    headers = [
        Header(2, 70_000, 2**33 + 2**31 + 5, False, True),
        Header(65_534, 1, 7, True, True),
        Header(1, 65_535, 9, True, False),
    ]
    for row, header in enumerate(headers):
        table.update(row, header)
    rows = np.array([2, 0, 1, 0])
    assert table.sizes(rows).tolist() == [[1, 65_535], [2, 70_000], [65_534, 1], [2, 70_000]]
    assert table.is_native(rows).tolist() == [False, True, True, True]
    assert table.find_possibly_truncated(rows).tolist() == [False, False, True, False]
    lengths = np.array([9, 2**31 + 5, 8, 2**31 + 5], np.uint32).view(np.int32)
    assert table.has_other_length(rows, lengths).tolist() == [False, False, True, False]
    assert table.find_unknown(np.arange(4)).tolist() == [3]
    assert table.columns.sizes.tolist() == [[0, 0], [65_534, 1], [0, 0], [0, 0]]
    table.forget(rows[:1])
    assert table.find_unknown(np.arange(4)).tolist() == [2, 3]


def test_many_draws_of_few_samples(index: ImageIndex, dataset: ImageFolder) -> None:
    sampler = RandomSampler(range(2), replacement=True, num_samples=600, generator=torch.Generator().manual_seed(0))
    assert_pairs(DALILoader(Subset(index, [0, 5]), 200, sampler=sampler, device="cpu"), dataset)


def test_labels_may_be_a_column_of_a_table(tmp_path: Path) -> None:
    files = ["a.jpg", "b.jpg"]
    for dtype in (np.int64, np.int8, np.uint16):
        ImageIndex.write(tmp_path / "index.npz", zip(files, np.array([3, 1], dtype), strict=True), headers=False)
        assert ImageIndex(tmp_path / "index.npz").targets.tolist() == [3, 1]


def test_labels_have_names_where_there_are_classes(tmp_path: Path) -> None:
    """A loss over as many classes as there are names would end in an assertion on the GPU, which names nobody."""
    file = tmp_path / "index.npz"
    for label in (2, -1):
        with pytest.raises(ValueError, match=rf"the label of b\.jpg is {label}, and there are 2 classes"):
            ImageIndex.write(file, [("a.jpg", 1), ("b.jpg", label)], classes=["cat", "dog"])
    with pytest.raises(TypeError, match="classes is a list of names"):
        ImageIndex.write(file, [("a.jpg", 1)], classes=cast("Any", [1, 2]))
    with pytest.raises(ValueError, match="give classes= with pairs only"):
        ImageIndex.write(file, tmp_path, classes=["cat"])
    assert not file.exists()
    ImageIndex.write(file, [("a.jpg", -1), ("b.jpg", 1000)])
    assert ImageIndex(file).targets.tolist() == [-1, 1000]

"""Zip, TFRecord, RecordIO, LMDB and tables: the same pixels and labels as from the files, in DataLoader's order."""

from __future__ import annotations

import csv
import os
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import same
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, Subset, WeightedRandomSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from benchmarks.common.stores import encode_field, encode_varint
from torchdali import DALILoader
from torchdali.datasets import LMDB, RecordIO, Table, TFRecord, Zip

EXACT = v2.Compose([v2.ToImage(), v2.CenterCrop(24)])
MAGIC = struct.pack("<I", 0xCED7230A)
Samples = list[tuple[bytes, int]]
KINDS = ("zip", "tfrecord", "recordio", "lmdb", "csv", "parquet", "parquet_bytes")


@pytest.fixture(scope="module")
def folder(pictures: Path) -> ImageFolder:
    return ImageFolder(pictures, EXACT)


@pytest.fixture(scope="module")
def samples(folder: ImageFolder) -> Samples:
    return [(Path(path).read_bytes(), label) for path, label in folder.samples]


def write_zip(root: Path, folder: ImageFolder, kind: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(root / "all.zip", "w", kind) as archive:
        for path, label in reversed(folder.samples):
            archive.write(path, f"train/{folder.classes[label]}/{Path(path).name}")
        archive.writestr("train/notes.txt", "no image")
        archive.writestr(f"__MACOSX/train/{folder.classes[0]}/._0.jpg", "no image")  # as macOS writes them
    return root / "all.zip"


def feature(value: Any) -> bytes:
    """A tf.train.Feature, whose numbers are packed as TensorFlow packs them."""
    values = value if isinstance(value, list) else [value]
    if isinstance(values[0], bytes):
        return encode_field(1, b"".join(encode_field(1, one) for one in values))
    if isinstance(values[0], float):
        return encode_field(2, encode_field(1, struct.pack(f"<{len(values)}f", *values)))
    return encode_field(3, encode_field(1, b"".join(map(encode_varint, values))))


def write_tfrecord(path: Path, examples: list[dict[str, Any]]) -> Path:
    with path.open("wb") as stream:
        for example in examples:
            entries = [
                encode_field(1, encode_field(1, name.encode()) + encode_field(2, feature(x)))
                for name, x in example.items()
            ]
            data = encode_field(1, b"".join(entries))
            stream.write(struct.pack("<Q", len(data)) + bytes(4) + data + bytes(4))
    return path


def example(data: bytes, label: int, number: int = 0) -> dict[str, Any]:
    return {
        "image/class/label": label,
        "image/encoded": data,
        "box": [0.5, number / 4],
        "score": 0.25,
        "sides": [number, -1],
        "text": f"t{number}".encode(),
    }


def write_recordio(path: Path, samples: Samples, split: int = -1, labels: tuple[float, ...] = ()) -> Path:
    """Write records; one of them contains the magic number, so it is in two parts, as dmlc-core writes it."""
    with path.open("wb") as stream:
        for i, (data, label) in enumerate(samples):
            head = struct.pack("<IfQQ", len(labels), label, i, 0) + struct.pack(f"<{len(labels)}f", *labels)
            content = head + data
            at = content.find(MAGIC, len(head)) if i == split else -1
            parts = [content] if at < 0 else [content[:at], content[at + 4 :]]
            for number, part in enumerate(parts):
                kind = 0 if len(parts) == 1 else (1, 3)[number]
                stream.write(MAGIC + struct.pack("<I", kind << 29 | len(part)) + part + bytes(-len(part) % 4))
    return path


def write_lmdb(path: Path, samples: Samples) -> Path:
    with lmdb.open(str(path), map_size=2**24) as environment, environment.begin(write=True) as transaction:
        for i, (data, label) in enumerate(samples):
            transaction.put(f"image-{i:04}".encode(), data)
            transaction.put(f"label-{i:04}.cls".encode(), str(label).encode())
            transaction.put(f"text-{i:04}".encode(), f"№ {i}".encode())
        transaction.put(b"num-samples", b"24")
    return path


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, folder: ImageFolder, samples: Samples) -> Callable[..., Any]:
    """Makes the dataset of a kind."""
    root = tmp_path_factory.mktemp("stores")
    write_zip(root, folder)
    for part, rows in enumerate((range(10), range(10, 24))):
        write_tfrecord(root / f"train-0000{part}-of-00002", [example(*samples[i], i) for i in rows])
    # An application segment that contains the magic number: 25 + 19 bytes from the record's begin on, aligned.
    marked = list(samples)
    data, label = marked[4]
    marked[4] = data[:2] + b"\xff\xfe" + struct.pack(">H", 2 + 8) + bytes(2) + MAGIC + bytes(2) + data[2:], label
    write_recordio(root / "train.rec", marked, 4)
    write_lmdb(root / "train.lmdb", samples)
    rows = [{"file": path, "y": label, "note": f"n{i}"} for i, (path, label) in enumerate(folder.samples)]
    with (root / "list.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, ["note", "file", "y"])
        writer.writeheader()
        writer.writerows({**row, "file": os.path.relpath(row["file"], folder.root)} for row in rows)
    pq.write_table(pa.Table.from_pylist(rows), root / "list.parquet")
    column = [{"bytes": data, "path": None} for data, _ in samples]
    table = pa.table({"image": column, "y": [label for _, label in samples]})
    pq.write_table(table, root / "bytes.parquet", row_group_size=7)
    makers: dict[str, Callable[..., Any]] = {
        "zip": lambda **options: Zip(root / "all.zip", **options),
        "tfrecord": lambda **options: TFRecord(root / "train-*", **options),
        "recordio": lambda **options: RecordIO(root / "train.rec", **options),
        "lmdb": lambda **options: LMDB(root / "train.lmdb", image="image-*", label="label-*.cls", **options),
        "csv": lambda **options: Table(root / "list.csv", label="y", root=folder.root, **options),
        "parquet": lambda **options: Table(root / "list.parquet", label="y", **options),
        "parquet_bytes": lambda **options: Table(root / "bytes.parquet", image="image", label="y", **options),
    }
    return lambda kind, **options: makers[kind](transform=EXACT, **options)


def epoch(kind: Any, dataset: Any, **options: Any) -> list[Any]:
    options = {**options, **({"device": "cpu"} if kind is DALILoader else {})}
    return list(kind(dataset, batch_size=5, generator=torch.Generator().manual_seed(3), **options))


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_those_of_the_folder(stores: Any, folder: ImageFolder, kind: str) -> None:
    dataset = stores(kind)
    ours = epoch(DALILoader, dataset, shuffle=True)
    assert same(ours, epoch(DataLoader, dataset, shuffle=True))
    assert same(ours, epoch(DataLoader, folder, shuffle=True))


@pytest.mark.parametrize("kind", KINDS)
def test_order_under_wrappers_samplers_and_ranks(stores: Any, kind: str) -> None:
    dataset = stores(kind)
    parts = ConcatDataset([Subset(dataset, [20, 3, 11, 3]), dataset, Subset(dataset, [1])])
    assert same(epoch(DALILoader, parts), epoch(DataLoader, parts))
    weights = [1.0] * 12 + [9.0] * 12
    drawn = [
        epoch(one, dataset, sampler=WeightedRandomSampler(weights, 9, generator=torch.Generator().manual_seed(0)))
        for one in (DALILoader, DataLoader)
    ]
    assert same(*drawn)
    for rank in (0, 1):
        shares = [epoch(one, dataset, sampler=DistributedSampler(dataset, 2, rank)) for one in (DALILoader, DataLoader)]
        assert same(*shares)


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_resumes(stores: Any, kind: str) -> None:
    first, second = (DALILoader(stores(kind), batch_size=5, shuffle=True, device="cpu") for _ in range(2))
    batches = iter(first)
    next(batches)
    second.load_state_dict(first.state_dict())
    assert same(list(second), list(batches))


@pytest.mark.parametrize("kind", ["zip", "tfrecord", "recordio", "lmdb"])
def test_shards_need_not_be_mapped(stores: Any, folder: ImageFolder, kind: str) -> None:
    assert same(epoch(DALILoader, stores(kind, is_mapped=False)), epoch(DataLoader, folder))


def test_features_of_tfrecords(stores: Any, tmp_path: Path, samples: Samples) -> None:
    path = write_tfrecord(tmp_path / "one", [example(*samples[0], 3), example(*samples[1], 1)])
    names = ("box", "score", "sides", "text", "image/class/label")
    dataset = TFRecord(path, label=names, transform=EXACT)
    sample = dataset[0]
    assert {name: np.asarray(sample[name]).tolist() for name in names} == {
        "box": [0.5, 0.75],
        "score": 0.25,
        "sides": [3, -1],
        "text": b"t3",
        "image/class/label": 0,
    }
    batch = epoch(DALILoader, dataset)
    assert same(batch, epoch(DataLoader, dataset))
    assert batch[0]["sides"].tolist() == [[3, -1], [1, -1]]
    assert TFRecord(path, label=lambda parts: sorted(parts))[1][1] == sorted(names)
    assert TFRecord(path, label=None)[0].size
    with pytest.raises(ValueError, match="record 0 at byte 12 has no feature 'x'; it has image/class/label, "):
        TFRecord(path, label="x")
    two = write_tfrecord(tmp_path / "two", [example(*samples[0]), {**example(*samples[2]), "x": 5}])
    incomplete = TFRecord(two, label="x", transform=EXACT)
    assert incomplete[1][1] == 5
    with pytest.raises(ValueError, match="has no part 'x', which label= names"):
        incomplete[0]
    assert epoch(DALILoader, incomplete, on_error="skip")[0][1].tolist() == [5, 5]
    assert dataset.name(1).startswith(f"{path}, image 1 at byte")


def test_a_record_in_two_parts_is_joined_and_others_are_cut_out_by_dali(stores: Any) -> None:
    dataset = stores("recordio")
    assert dataset.index.split.tolist() == [4]
    assert dataset.torchdali_source().has_places
    places = dataset.find(np.array([4, 0, 4, 23]))
    assert places.passing == {0, 2}
    for view, image in zip(places.views(), dataset.read(np.array([4, 0, 4, 23])), strict=True):
        assert np.array_equal(view, image)
    for row in (0, 4):
        start, length = int(dataset.index.offsets[row]), int(dataset.index.lengths[row])
        fetched = np.fromfile(dataset.shards.paths[0], np.uint8)[start : start + length]  # as of an object store
        assert np.array_equal(dataset.image_in(row, fetched), dataset.read(np.array([row]))[0])


def test_labels_of_recordio_may_be_several_or_floats(tmp_path: Path, samples: Samples) -> None:
    several = RecordIO(write_recordio(tmp_path / "a.rec", samples[:3], labels=(1.0, 2.5)), transform=EXACT)
    assert several[1][1].tolist() == [1, 2.5]
    assert same(epoch(DALILoader, several), epoch(DataLoader, several))
    floats = [(data, number / 2) for number, (data, _) in enumerate(samples[:3])]
    assert [label for _, label in RecordIO(write_recordio(tmp_path / "b.rec", floats))] == [0.0, 0.5, 1.0]
    assert len(RecordIO(write_recordio(tmp_path / "c.rec", [(b"", 2), *samples[:2]]))) == 2


def test_labels_of_an_lmdb_may_be_text(stores: Any, tmp_path: Path, samples: Samples) -> None:
    path = write_lmdb(tmp_path / "db", samples[:3])
    assert [text for _, text in LMDB(path, image="image-*", label="text-*")] == ["№ 0", "№ 1", "№ 2"]
    with lmdb.open(str(path)) as environment, environment.begin(write=True) as transaction:
        for number in range(3):
            transaction.put(f"box-{number:04}.json".encode(), f'{{"x": {number}}}'.encode())
    boxes = LMDB(path, image="image-*", label="box-*.json", index=tmp_path / "boxes")
    assert [box for _, box in boxes] == [{"x": 0}, {"x": 1}, {"x": 2}]
    plain = LMDB(path / "data.mdb", image="image-*", transform=EXACT)
    assert same(epoch(DALILoader, plain), epoch(DataLoader, plain))
    assert plain.name(1).startswith(f"{path}/data.mdb, image-0001 at byte ")
    with pytest.raises(ValueError, match=r"key image-0000 has no label: there is no key b'x-0000'"):
        LMDB(path, image="image-*", label="x-*")
    for wrong in ({"image": "image"}, {"label": len}, {"label": ("text-*", "x-*")}):
        ((name, value),) = wrong.items()
        with pytest.raises(
            ValueError, match=rf"{name} must be a name of keys with one '\*', got {re.escape(repr(value))}"
        ):
            LMDB(path, **{"image": "image-*"} | wrong)
    with lmdb.open(str(path)) as environment, environment.begin(write=True) as transaction:
        for number in range(3):
            transaction.put(f"n-{number:04}.cls".encode(), b"dog")
    with pytest.raises(ValueError, match=r"data\.mdb: the value of key b'n-0000\.cls' must be an int, got b'dog'"):
        LMDB(path, image="image-*", label="n-*.cls")


def test_an_lmdb_of_many_pages_is_read_as_lmdb_reads_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    written = {
        os.urandom(int(n)): os.urandom(int(m))
        for n, m in zip(rng.integers(1, 300, 900), rng.integers(0, 9000, 900), strict=True)
    }
    with lmdb.open(str(tmp_path), map_size=2**26) as environment:
        for items in (list(written.items())[:500], list(written.items())[400:]):
            with environment.begin(write=True) as transaction:
                for key, value in items:
                    transaction.put(key, value)
                transaction.delete(items[0][0])
                written.pop(items[0][0], None)
        with environment.begin() as transaction:
            entries = list(transaction.cursor())
    dataset = LMDB(tmp_path)
    read = dataset.read(np.arange(len(dataset)))
    assert [view.tobytes() for view in read] == [value for _, value in entries]
    assert len(dataset) == len(written)


def test_classes_of_a_zip(stores: Any, folder: ImageFolder, tmp_path: Path) -> None:
    dataset = stores("zip")
    assert dataset.classes == folder.classes
    assert dataset.name(0) == f"{dataset.shards.paths[0]}, train/astronaut/0.jpg at byte {dataset.index.offsets[0]:,}"
    assert type(stores("zip", label=None)[0]) is type(folder[0][0])
    with pytest.raises(ValueError, match=r"train/coffee/7.jpg is compressed or encrypted; pack it with zip -0"):
        Zip(
            write_zip(
                tmp_path,
                ImageFolder(folder.root, is_valid_file=lambda path: path.endswith("e/7.jpg"), allow_empty=True),
                zipfile.ZIP_DEFLATED,
            )
        )
    with pytest.raises(ValueError, match="label must be 'folder' or None"):
        stores("zip", label="x")


def test_columns_of_tables(tmp_path: Path, folder: ImageFolder, stores: Any) -> None:
    path = tmp_path / "list.csv"
    path.write_text(
        "\ufefffile,a,b,c\n"
        + "\n".join(f"{file},{i},{i / 2},{'x' * i}" for i, (file, _) in enumerate(folder.samples[:4]))
    )
    dataset = Table(path, label=("a", "b", "c"), transform=EXACT)
    batches = epoch(DALILoader, dataset)
    assert same(batches, epoch(DataLoader, dataset))
    assert batches[0]["b"].tolist() == [0, 0.5, 1, 1.5]
    assert batches[0]["c"] == ["", "x", "xx", "xxx"]
    assert Table(path, label=lambda row: row)[1][1] == {"a": 1, "b": 0.5, "c": "x"}
    pq.write_table(pa.table({"file": [file for file, _ in folder.samples[:2]]}), tmp_path / "files.parquet")
    assert Table(tmp_path / "files.parquet", label="file")[1][1] == folder.samples[1][0]
    unlabelled = epoch(DALILoader, Table(path, transform=EXACT))
    assert type(unlabelled[0]) is torch.Tensor
    assert same(unlabelled, epoch(DataLoader, Table(path, transform=EXACT)))
    assert dataset.name(1) == folder.samples[1][0]
    assert stores("parquet_bytes").name(3).endswith("bytes.parquet, row 3")
    with pytest.raises(ValueError, match="has no column 'z'; it has file, a, b, c"):
        Table(path, label="z")
    with pytest.raises(ValueError, match=r"must be a .csv or a .parquet file"):
        Table(tmp_path / "list.txt")
    path.write_text("file,a\nx\n")
    with pytest.raises(ValueError, match="has a line without a value of 'a'"):
        Table(path, label="a")
    path.write_bytes("file,a\nx,1\ny,é\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"list\.csv must be a CSV file in UTF-8, got another: line 3 has other"):
        Table(path, label="a")
    with pytest.raises(TypeError, match="tables must be a path, a pattern or several, got None"):
        Table(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a table must be a file, got s3://bucket/list\.csv"):
        Table("s3://bucket/list.csv")
    pq.write_table(pa.table({"file": [1, 2]}), tmp_path / "numbers.parquet")
    with pytest.raises(TypeError, match="a column of images must be of bytes, got int64"):
        Table(tmp_path / "numbers.parquet")
    pq.write_table(pa.table({"file": ["x", None]}), tmp_path / "null.parquet")
    with pytest.raises(ValueError, match=r"null\.parquet, row 1: the column 'file' must have a path in each row"):
        Table(tmp_path / "null.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "null.parquet").read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"cut\.parquet is no Parquet file, or damaged \(.*\); write it again"):
        Table(tmp_path / "cut.parquet")
    with pytest.raises(FileNotFoundError, match=r"none\.parquet"):
        Table(tmp_path / "none.parquet")


def test_several_tables_are_one(tmp_path: Path, folder: ImageFolder) -> None:
    for number, rows in enumerate((folder.samples[:3], folder.samples[3:5])):
        part = tmp_path / str(number)
        part.mkdir()
        names = [os.path.relpath(path, part) for path, _ in rows]
        labels = ["x" if number else "1"] * len(rows)  # one column of texts, not of ints and texts
        lines = [f"{name},{label}" for name, label in zip(names, labels, strict=True)]
        (part / "list.csv").write_text("\n".join(["file,y", *lines]))
        # as pandas writes a Categorical
        paths = pa.array(names).dictionary_encode()
        pq.write_table(pa.table({"file": paths, "y": labels}), part / "list.parquet")
        images = [Path(path).read_bytes() for path, _ in rows]
        pq.write_table(pa.table({"file": images, "y": labels}), part / "bytes.parquet")
    for name in ("list.csv", "list.parquet", "bytes.parquet"):
        dataset = Table(str(tmp_path / "{0,1}" / name), label="y", transform=EXACT)
        batches = epoch(DALILoader, dataset)
        assert same(batches, epoch(DataLoader, dataset))
        assert [label for _, labels in batches for label in labels] == ["1", "1", "1", "x", "x"]
        expected = [Path(path).read_bytes() for path, _ in folder.samples[:5]]
        assert [data.tobytes() for data in dataset.read(np.arange(5))] == expected
    assert dataset.name(3) == f"{tmp_path / '1' / 'bytes.parquet'}, row 0"
    assert len(Table([tmp_path / "0" / "list.csv"] * 2)) == 6
    with pytest.raises(ValueError, match=r"tables must be all \.csv or all \.parquet files, got "):
        Table(str(tmp_path / "0" / "list.*"))
    with pytest.raises(ValueError, match="'file' must be of one type in all tables, got binary and string"):
        Table(str(tmp_path / "0" / "*.parquet"))


def test_texts_of_tables_that_python_takes_for_numbers_stay_texts(tmp_path: Path) -> None:
    for values in (["1_2", "3"], ["1_0.5", "2"], ["1", "٢"]):
        (tmp_path / "list.csv").write_text("\n".join(["file,y", *(f"a.jpg,{value}" for value in values)]))
        table = Table(tmp_path / "list.csv", label="y")
        assert [table.target(row) for row in range(2)] == values
        assert table.labels(np.arange(2)) is None
    (tmp_path / "list.csv").write_text("file,y,z\na.jpg,-07,nan\na.jpg, 2,-inf\n")
    table = Table(tmp_path / "list.csv", label=("y", "z"))
    assert [str(table.target(row)) for row in range(2)] == ["{'y': -7, 'z': nan}", "{'y': 2, 'z': -inf}"]


@pytest.mark.parametrize("kind", ["zip", "tfrecord", "csv", "parquet_bytes"])
@pytest.mark.parametrize("name", ["make_target", "read_parts", "target", "labels"])
def test_a_subclass_may_override_how_targets_are_made(stores: Any, kind: str, name: str) -> None:
    dataset = stores(kind)
    base = type(dataset)
    dataset.__class__ = type("Own", (base,), {name: lambda self, given: getattr(base, name)(self, given) + 500})
    batches = epoch(DALILoader, dataset)
    assert DALILoader(dataset, device="cpu")._session.reader is not None
    assert same(batches, epoch(DataLoader, dataset))
    is_used = name in ("make_target", "read_parts") or (name, kind) == ("target", "csv")
    assert bool(batches[0][1].max() > 400) == is_used


def test_a_subclass_may_override_labels_and_what_they_are_made_of(stores: Any) -> None:
    asked: list[int] = []
    dataset = stores("zip")

    def labels(self: Any, rows: Any) -> Any:
        asked.append(len(rows))
        return Zip.labels(self, rows) + 500  # type: ignore[operator]

    make_target = lambda self, parts: parts + 500  # noqa: E731
    dataset.__class__ = type("Own", (Zip,), {"labels": labels, "make_target": make_target})
    assert same(epoch(DALILoader, dataset), epoch(DataLoader, dataset))
    assert sum(asked) >= len(dataset)


@pytest.mark.parametrize("kind", ["zip", "tfrecord", "recordio", "lmdb"])
def test_truncated_and_other_files_are_refused(
    tmp_path: Path, folder: ImageFolder, samples: Samples, kind: str
) -> None:
    make: Any = {"zip": Zip, "tfrecord": TFRecord, "recordio": RecordIO, "lmdb": LMDB}[kind]
    path = {
        "zip": lambda: write_zip(tmp_path, folder),
        "tfrecord": lambda: write_tfrecord(tmp_path / "x", [example(*sample) for sample in samples]),
        "recordio": lambda: write_recordio(tmp_path / "x", samples),
        "lmdb": lambda: write_lmdb(tmp_path / "x", samples) / "data.mdb",
    }[kind]()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}.* (is truncated|damaged)"):
        make(path)
    path.write_bytes(b"something else " * 600)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))} is (no|truncated, compressed or no) "):
        make(path)


def test_damaged_bytes_are_errors_and_nothing_else(tmp_path: Path, folder: ImageFolder, samples: Samples) -> None:
    """Whatever bytes are changed, making an index gives samples within the file, or a ValueError."""
    rng = np.random.default_rng(0)
    paths = {
        Zip: write_zip(tmp_path, ImageFolder(folder.root)),
        TFRecord: write_tfrecord(tmp_path / "a.tfrecord", [example(*sample) for sample in samples[:3]]),
        RecordIO: write_recordio(tmp_path / "a.rec", samples[:3]),
        LMDB: write_lmdb(tmp_path / "db", samples[:3]) / "data.mdb",
    }
    told: list[tuple[bool, str]] = []
    for kind, path in paths.items():
        whole = np.frombuffer(path.read_bytes(), np.uint8)
        for _ in range(40):
            changed = whole.copy()
            first = rng.choice([0, len(whole) - 1200, int(rng.integers(len(whole)))])
            places = np.clip(first + rng.integers(0, 1200, 3), 0, len(whole) - 1)
            changed[places] = rng.integers(0, 256, 3)
            path.write_bytes(changed.tobytes())
            (tmp_path / "index").unlink(missing_ok=True)
            try:
                dataset: Any = kind(path, label=None, index=tmp_path / "index")
                read = dataset.read(np.arange(len(dataset)))
            except ValueError as error:
                told.append((str(path) in str(error), str(error)))
            else:
                assert all(len(data) <= len(whole) for data in read)
    assert len(told) > 10
    assert all(is_named for is_named, _ in told), told


def test_names_in_archives_are_never_paths(tmp_path: Path, samples: Samples) -> None:
    with zipfile.ZipFile(tmp_path / "up.zip", "w") as archive:
        archive.writestr("../../etc/x.jpg", samples[0][0])
    dataset = Zip(tmp_path / "up.zip", transform=EXACT)
    assert len(epoch(DALILoader, dataset)) == 1
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".npz", ".zip"]

"""Write the pictures of an image folder into every kind of store that `torchdali.datasets` reads."""

import csv
import importlib
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchvision.datasets import ImageFolder

from torchdali.datasets import LMDB, RecordIO, Table, Tar, TFRecord, Zip, pack

_MAGIC = struct.pack("<I", 0xCED7230A)
_SHARD_BYTES = 2 * 10**8


def make(kind: str, root: Path, transform: Callable[..., Any], **options: Any) -> Any:
    """Return a dataset of all pictures under `root`. Its files are written at the first call.

    Args:
        kind: A key of `KINDS`.
        root: A folder of class folders.
        transform: The transform of the dataset.
        options: Other arguments of the dataset.
    """
    write, read = KINDS[kind]
    path = root.with_name(f"{root.name}-{kind}")
    finished = path.with_name(f"{path.name}.finished")
    if not finished.exists():
        write(path, ImageFolder(root))
        finished.touch()
    return read(path, transform=transform, **options)


def list_files(kind: str, root: Path) -> list[Path]:
    """Return the files of a store."""
    path = root.with_name(f"{root.name}-{kind}")
    return [file for file in path.rglob("*") if file.is_file()]


def _write_folder(path: Path, folder: ImageFolder) -> None:
    shutil.copytree(folder.root, path)


def _write_tar(path: Path, folder: ImageFolder) -> None:
    pack(folder.samples, path, _SHARD_BYTES)


def _write_zip(path: Path, folder: ImageFolder) -> None:
    path.mkdir()
    with zipfile.ZipFile(path / "all.zip", "w", zipfile.ZIP_STORED) as archive:
        for file, label in folder.samples:
            archive.write(file, f"{folder.classes[label]}/{Path(file).name}")


def _write_tfrecord(path: Path, folder: ImageFolder) -> None:
    """Write records of `tf.train.Example`. Checksums are 0, because the reader does not check them."""
    path.mkdir()
    for part, samples in enumerate(_split(folder.samples)):
        with (path / f"train-{part:05}").open("wb") as stream:
            for file, label in samples:
                data = _example(Path(file).read_bytes(), label)
                stream.write(struct.pack("<Q", len(data)) + bytes(4) + data + bytes(4))


def _example(image: bytes, label: int) -> bytes:
    features = {
        b"image/encoded": encode_field(1, encode_field(1, image)),
        b"image/class/label": encode_field(3, encode_field(1, encode_varint(label))),
    }
    entries = [encode_field(1, encode_field(1, name) + encode_field(2, value)) for name, value in features.items()]
    return encode_field(1, b"".join(entries))


def encode_field(number: int, data: bytes) -> bytes:
    """Return a field of a Protocol Buffers message: bytes, a text or another message."""
    return encode_varint(number << 3 | 2) + encode_varint(len(data)) + data


def encode_varint(number: int) -> bytes:
    """Return an integer as Protocol Buffers write an int64."""
    number %= 2**64
    parts: list[int] = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


def _write_recordio(path: Path, folder: ImageFolder) -> None:
    path.mkdir()
    for part, samples in enumerate(_split(folder.samples)):
        with (path / f"train-{part:05}.rec").open("wb") as stream:
            for number, (file, label) in enumerate(samples):
                record = struct.pack("<IfQQ", 0, label, number, 0) + Path(file).read_bytes()
                stream.write(_MAGIC + struct.pack("<I", len(record)) + record + bytes(-len(record) % 4))


def _write_lmdb(path: Path, folder: ImageFolder) -> None:
    lmdb = importlib.import_module("lmdb")
    size = 2 * sum(Path(file).stat().st_size for file, _ in folder.samples) + 2**24
    with lmdb.open(str(path), map_size=size) as environment, environment.begin(write=True) as transaction:
        for number, (file, label) in enumerate(folder.samples):
            transaction.put(f"image-{number:08}".encode(), Path(file).read_bytes())
            transaction.put(f"label-{number:08}.cls".encode(), str(label).encode())


def _write_csv(path: Path, folder: ImageFolder) -> None:
    path.mkdir()
    with (path / "list.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("file", "label"), *folder.samples])


def _write_parquet(path: Path, folder: ImageFolder) -> None:
    pa, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    path.mkdir()
    images = [Path(file).read_bytes() for file, _ in folder.samples]
    table = pa.table({"image": pa.array(images, pa.binary()), "label": [label for _, label in folder.samples]})
    parquet.write_table(table, path / "list.parquet", row_group_size=256)


def _split(samples: list[tuple[str, int]]) -> list[list[tuple[str, int]]]:
    """Return the samples of each shard, 2,048 at most."""
    return [samples[i : i + 2048] for i in range(0, len(samples), 2048)]


_Writer = Callable[[Path, ImageFolder], None]
_Reader = Callable[..., Any]
KINDS: dict[str, tuple[_Writer, _Reader]] = {
    "folder": (_write_folder, lambda path, **options: ImageFolder(str(path), **options)),
    "tar": (_write_tar, lambda path, **options: Tar(path / "*.tar", **options)),
    "zip": (_write_zip, lambda path, **options: Zip(path / "all.zip", **options)),
    "tfrecord": (_write_tfrecord, lambda path, **options: TFRecord(path / "train-*", **options)),
    "recordio": (_write_recordio, lambda path, **options: RecordIO(path / "*.rec", **options)),
    "lmdb": (_write_lmdb, lambda path, **options: LMDB(path, image="image-*", label="label-*.cls", **options)),
    "csv": (_write_csv, lambda path, **options: Table(path / "list.csv", label="label", **options)),
    "parquet": (
        _write_parquet,
        lambda path, **options: Table(path / "list.parquet", image="image", label="label", **options),
    ),
}

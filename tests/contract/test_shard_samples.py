"""What belongs to the images of shards is read ahead or taken from columns, and memory is used again."""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
import tarfile
import threading
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import torch
import wds2idx
from conftest import encoded, same
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision.datasets import LSUN
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError
from torchdali.datasets import Tar
from torchdali.datasets.sharded import ShardedDataset
from torchdali.datasets.wds2idx import read_wds2idx

COUNT = 20
EXACT = v2.Compose([v2.ToImage(), v2.CenterCrop(8)])


def write_members(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard of small pictures with labels and JSON. The last has no ``json``."""
    members: dict[str, bytes] = {}
    for i in range(COUNT):
        image = Image.linear_gradient("L").resize((12 + i, 10)).convert("RGB")
        parts = {"jpg": encoded(image, "JPEG"), "cls": b"%d" % (i * 1000), "cls2": b"%d" % -i}
        parts |= {"json": json.dumps({"boxes": [i]}).encode()} if i < COUNT - 1 else {}
        members |= {f"{i:03}.{name}": data for name, data in parts.items()}
    return write_members(tmp_path_factory.mktemp("shard") / "a.tar", members)


def assert_as_dataloader(dataset: Any, **options: Any) -> list[Any]:
    ours, theirs = (
        list(kind(dataset, batch_size=6, **options, **more))
        for kind, more in ((DALILoader, {"device": "cpu"}), (DataLoader, {}))
    )
    assert same(ours, theirs)
    return ours


def test_dictionaries_of_integers_are_columns_of_the_index(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Tar(shard, label=("cls", "cls2"), transform=EXACT)
    assert (dataset.index.starts, dataset.index.labels["cls"].dtype, dataset.index.labels["cls2"].dtype) == (
        *(None, np.int16, np.int8),
    )
    batches = assert_as_dataloader(ConcatDataset([dataset, dataset]))
    assert [*batches[0]] == ["image", "cls", "cls2"]
    assert_as_dataloader(dataset, collate_fn=lambda samples: [sorted(sample.items(), key=str) for sample in samples])
    monkeypatch.setattr(ShardedDataset, "read_parts", None)
    assert len(list(DALILoader(ConcatDataset([dataset, dataset]), batch_size=6, device="cpu"))) == 7


def test_other_parts_are_read_in_threads_and_functions_run_in_the_iterating_one(
    shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, called, own = set[str](), set[str](), threading.current_thread().name
    read_fields = Tar._read_fields

    def note(self: Tar, *arguments: Any) -> Any:
        read.add(threading.current_thread().name.partition("_")[0])
        return read_fields(self, *arguments)

    def choose(parts: dict[str, Any]) -> float:
        called.add(threading.current_thread().name)
        return float(parts["cls"]) + float(torch.rand(()))

    monkeypatch.setattr(Tar, "_read_fields", note)
    dataset = Tar(shard, label=choose, transform=EXACT)
    for data in (dataset, ConcatDataset([dataset, dataset])):
        for _ in DALILoader(data, batch_size=6, device="cpu"):
            pass
    assert (read, called) == ({"torchdali-scan"}, {own})


def test_a_sample_that_comes_twice_has_two_targets(shard: Path) -> None:
    def grow(parts: dict[str, Any]) -> Any:
        parts["json"]["boxes"].append(0)
        return parts

    dataset = Tar(shard, label=("json",), transform=EXACT, target_transform=grow)
    assert_as_dataloader(dataset, sampler=[3, 4, 3, 3])


def test_a_part_that_is_missing_is_told_in_its_turn(shard: Path) -> None:
    dataset = Tar(shard, label=("cls", "json"), transform=EXACT)
    batches = iter(DALILoader(dataset, batch_size=6, device="cpu", collate_fn=len))
    assert [next(batches) for _ in range(3)] == [6, 6, 6]
    with pytest.raises(SampleError, match=rf"{shard}, 019 at byte .* has no part 'json', which label= names") as raised:
        next(batches)
    assert raised.value.index == COUNT - 1


def test_a_part_that_is_missing_is_skipped_or_raised_as_on_error_says(shard: Path) -> None:
    """A black image would have no target."""
    dataset = Tar(shard, label=("cls", "json"), transform=EXACT)
    loader = DALILoader(dataset, batch_size=6, device="cpu", on_error="skip", collate_fn=list)
    for _ in range(2):
        *_, last = loader
        assert [sample["json"]["boxes"] for sample in last] == [[18], [18]]
    (error,) = loader.errors
    assert error.index == COUNT - 1
    loader = DALILoader(dataset, batch_size=6, device="cpu", on_error="replace", collate_fn=len)
    with pytest.raises(SampleError, match="its target cannot be read"):
        list(loader)
    assert not loader.errors, "nothing took its place"


@pytest.mark.parametrize("name", ["json", "txt", "npz", "mask.png"])
def test_a_part_that_is_damaged_is_told_in_its_turn(tmp_path: Path, name: str) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for key in ("a", "b"):
            for part, data in (("jpg", b""), (name, b"{bad\xff")):
                member = tarfile.TarInfo(f"{key}.{part}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    dataset = Tar(tmp_path / "a.tar", label=(name,))
    with pytest.raises(
        ValueError, match=r"a\.tar, b at byte .* has a part that cannot be decoded \(\w+\(.*; write the"
    ):
        dataset.target(1)


def test_memory_for_images_is_used_again_but_not_while_it_is_read(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchdali.datasets.shards._SMALL", 0)
    dataset, mapped, rows = Tar(shard, is_mapped=False), Tar(shard), np.array([5, 19, 0, 5])
    first, second = dataset.read(rows), dataset.read(rows[::-1])
    assert [data.tobytes() for data in first] == [data.tobytes() for data in mapped.read(rows)]
    assert [data.tobytes() for data in second] == [data.tobytes() for data in mapped.read(rows[::-1])]
    places = {data.ctypes.data for data in (*first, *second)}
    assert len(places) == 8
    del first
    (memory,) = dataset.shards._blocks
    assert all(np.shares_memory(data, memory) for data in dataset.read(rows))


def test_an_idx_file_of_wds2idx_is_used_if_it_fits(
    shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "a.tar"
    own.write_bytes(shard.read_bytes())
    with wds2idx.IndexCreator(str(own), str(tmp_path / "a.idx"), verbose=False) as creator:
        creator.create_index()
    label = ("cls", "json", "__key__")
    walked = Tar(shard, label=label)
    with monkeypatch.context() as patched:
        patched.setattr("torchdali.datasets.tar.read_members", None)
        known = Tar(own, label=label, index=tmp_path / "1")
    columns = ("offsets", "lengths", "starts", "spans")
    assert all(np.array_equal(getattr(known.index, name), getattr(walked.index, name)) for name in columns)
    assert known[3]["__key__"] == "003"
    text = (tmp_path / "a.idx").read_text()
    lines = text.splitlines()
    for number, other in enumerate(
        (
            text.replace("v1.2", "v1.1"),
            "\n".join(lines[:-1]),
            "\n".join([lines[0], *reversed(lines[1:])]),
            text.replace(f" {walked.index.offsets[0]} ", f" {int(walked.index.offsets[0]) + 512} "),
            text.replace("000.jpg", f"{'long/' * 20}000.jpg"),
            text + " 7",
            text.replace("v1.2 ", "v1.2 x"),
            "",
        )
    ):
        (tmp_path / "a.idx").write_text(other)
        again = Tar(own, label=label, index=tmp_path / f"other-{number}")
        assert np.array_equal(again.index.offsets, walked.index.offsets)
    (tmp_path / "a.idx").write_text(text.replace("jpg", "png"))
    os.utime(tmp_path / "a.idx", ns=(0, own.stat().st_mtime_ns - 1))
    assert len(Tar(own, index=tmp_path / "last")) == COUNT


@pytest.mark.parametrize("checked", [4096, 40])
@pytest.mark.parametrize("change", ["order", "folders", "more"])
def test_an_idx_file_of_another_tar_is_not_used(
    shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, checked: int
) -> None:
    """The first and the last member are the same."""
    monkeypatch.setattr("torchdali.datasets.wds2idx._CHECKED", checked)
    own = tmp_path / "a.tar"
    with tarfile.open(shard) as archive:
        content = [(member, archive.extractfile(member).read()) for member in archive]  # type: ignore[union-attr]
    others = list(content)
    if change == "order":
        others[10:70] = reversed(content[10:70])
    elif change == "folders":
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        others[40:43] = [(folder, b"")] * 3
    else:
        content = content[:-1]
    for members in (content, others):
        with tarfile.open(own, "w", format=tarfile.USTAR_FORMAT) as archive:
            for member, data in members:
                archive.addfile(member, io.BytesIO(data))
        if members is content:
            with wds2idx.IndexCreator(str(own), str(tmp_path / "a.idx"), verbose=False) as creator:
                creator.create_index()
    os.utime(tmp_path / "a.idx", ns=(0, own.stat().st_mtime_ns + 1))
    assert read_wds2idx(str(own), own.stat(), lambda at, count: own.read_bytes()[at : at + count]) is None


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # torchvision's lists of keys
def test_lsun_of_torchvision_is_read_without_workers(
    shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # torchvision writes its lists of keys here
    images = [data.tobytes() for data in Tar(shard).read(np.arange(COUNT))]
    for name, numbers in (("bedroom", range(12)), ("tower", range(12, COUNT))):
        with lmdb.open(f"{name}_train_lmdb", map_size=2**22) as store, store.begin(write=True) as writes:
            for number in numbers:
                writes.put(b"%d" % (number * 7919 % 1000), images[number])
    dataset = LSUN(".", ["bedroom_train", "tower_train"], EXACT, target_transform=lambda target: target + 1)
    assert DALILoader(dataset, device="cpu")._session.reader is not None
    labels = torch.cat(
        [labels for _, labels in assert_as_dataloader(ConcatDataset([Subset(dataset, [13, 2]), dataset]))]
    )
    assert labels.tolist() == [2, 1] + [1] * 12 + [2] * 8
    loader = DALILoader(dataset, 6, device="cpu")
    for part in dataset.dbs:
        part.transform = v2.Compose([v2.ToImage(), v2.CenterCrop(6)])
    dataset.dbs[1].transform = dataset.dbs[0].transform
    assert next(iter(loader))[0].shape == (6, 3, 6, 6)
    dataset.dbs[1].keys.reverse()
    loader = DALILoader(dataset, 6, device="cpu")
    assert loader._session.reader is None
    assert same(list(loader), list(DataLoader(dataset, 6)))


def test_a_million_rows_are_mapped_and_take_few_bytes(shard: Path, tmp_path: Path) -> None:
    index, count = tmp_path / "index.npz", 10**6
    arrays = dict(np.load(Tar(shard, index=index).index.file))
    arrays |= {name: np.resize(arrays[name], count) for name in ("shard", "offsets", "lengths", "labels")}
    np.savez(index, **arrays)
    dataset = Tar(shard, index=index, transform=EXACT)
    assert (len(dataset), dataset.index.bytes_per_row <= 30) == (count, True)
    columns = (dataset.index.shard, dataset.index.offsets, dataset.index.lengths, dataset.index.labels["cls"])
    assert all(isinstance(find_owner(column), mmap.mmap) for column in columns)
    assert len(pickle.dumps(dataset)) < 4000
    images, labels = next(iter(DALILoader(dataset, 3, sampler=[count - 1, 5, count // 2], device="cpu")))
    assert same(images, torch.stack([dataset[i][0] for i in (count - 1, 5, count // 2)]))
    assert labels.tolist() == [19000, 5000, 0]


@pytest.mark.parametrize(
    ("label", "part", "data"),
    [
        ("json", "json", b'{"a"'),
        ("json:a", "json", b"{}"),
        ("json", "json", None),
        ("cls", "cls", b"x"),
        ("cls", "cls", None),
    ],
)
def test_one_bad_label_is_an_error_of_its_sample(tmp_path: Path, label: str, part: str, data: bytes | None) -> None:
    image = encoded(Image.new("RGB", (9, 8)), "PNG")
    members = {f"{i}.{name}": x for i in range(6) for name, x in (("png", image), ("json", b'{"a": 1}'), ("cls", b"7"))}
    good = members.pop(f"2.{part}")
    assert data != good
    if data is not None:
        members[f"2.{part}"] = data
    dataset = Tar(write_members(tmp_path / "a.tar", members), label=label, transform=EXACT)
    with pytest.raises(ValueError, match=r"a\.tar, 2 at byte"):
        dataset[2]
    with pytest.raises(SampleError, match=r"sample 2 .*a\.tar, 2 at byte"):
        list(DALILoader(dataset, 3, device="cpu"))
    batches = list(DALILoader(dataset, 3, device="cpu", on_error="skip"))
    assert same(batches[1], next(iter(DataLoader(Subset(dataset, [3, 4, 5]), 3))))
    assert len(batches) == 2


def test_hidden_files_and_samples_with_other_pictures_are_left_out(tmp_path: Path) -> None:
    image = encoded(Image.new("RGB", (9, 8)), "JPEG")
    members = {"._0.jpg": b"x", "0.jpg": image, "._0.cls": b"x", "0.cls": b"3", "d/.DS.cls": b"", "1.seg.png": b"y"}
    dataset = Tar(write_members(tmp_path / "a.tar", members), image="jpg", transform=EXACT)
    assert [label for _, label in dataset] == [3]
    assert_as_dataloader(dataset)


def find_owner(array: Any) -> Any:
    while isinstance(array, (np.ndarray, memoryview)):
        array = array.obj if isinstance(array, memoryview) else array.base
    return array

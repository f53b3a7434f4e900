"""Images in tar files: the same samples in the same order as from a folder and from DataLoader; damage is named."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import re
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import encoded, same
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Subset, WeightedRandomSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError
from torchdali.datasets import LMDB, Tar
from torchdali.datasets.patterns import expand
from torchdali.loader import probe
from torchdali.runtime import machine

EXACT = v2.Compose([v2.ToImage(), v2.CenterCrop(24)])
Samples = list[tuple[str, int]]


def write_tar(path: Path, samples: list[tuple[str, dict[str, bytes]]], kind: int = tarfile.USTAR_FORMAT) -> None:
    """Write samples of a key and parts."""
    with tarfile.open(path, "w", format=kind) as archive:
        for key, parts in samples:
            for part, data in parts.items():
                info = tarfile.TarInfo(f"{key}.{part}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


def parts_of(number: int, path: str, label: int) -> dict[str, bytes]:
    """The parts of a sample: its image, label, JSON, text and an array."""
    return {
        "jpg": Path(path).read_bytes(),
        "cls": str(label).encode(),
        "json": json.dumps({"number": number, "place": f"№ {number}"}).encode(),
        "txt": f"picture {number}".encode(),
        "points.npy": npy(np.arange(number % 2 + 2) * np.float32(1)),
        "seg.png": encoded(Image.new("L", (3, 2), number), "PNG"),
    }


def npy(array: Any) -> bytes:
    np.save(stream := io.BytesIO(), array)
    return stream.getvalue()


@pytest.fixture(scope="module")
def folder(pictures: Path) -> ImageFolder:
    return ImageFolder(pictures, EXACT)


def write_shards(root: Path, samples: Samples, count: int = 3) -> str:
    """Write shards in three formats of tar, and a name of 150 characters. Return their pattern."""
    for shard in range(count):
        rows = range(shard * len(samples) // count, (shard + 1) * len(samples) // count)
        keyed = [(f"{'long/' * 30 if i == 5 else ''}a.b/{i:04}", parts_of(i, *samples[i])) for i in rows]
        write_tar(
            root / f"train-{shard:02}.tar",
            keyed,
            (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)[shard % 3],
        )
    return str(root / f"train-{{00..{count - 1:02}}}.tar")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, folder: ImageFolder) -> str:
    return write_shards(tmp_path_factory.mktemp("shards"), folder.samples)


@pytest.fixture
def own(tmp_path: Path, folder: ImageFolder) -> str:
    """One shard that a test may damage."""
    write_shards(tmp_path, folder.samples, 1)
    return str(tmp_path / "train-00.tar")


def collect(loader: Any) -> list[Any]:
    return list(loader)


def both(dataset: Any, **options: Any) -> list[Any]:
    """Return the batches of DALILoader, after they were compared with DataLoader's."""
    make: Callable[..., Any] = lambda kind, **more: collect(  # noqa: E731
        kind(dataset, batch_size=5, generator=torch.Generator().manual_seed(3), **{**options, **more})
    )
    ours = make(DALILoader, device="cpu")
    assert same(ours, make(DataLoader))
    return ours


@pytest.mark.parametrize("mapped", [True, False])
def test_samples_are_those_of_the_folder(shards: str, folder: ImageFolder, mapped: bool) -> None:
    dataset = Tar(shards, transform=EXACT, is_mapped=mapped)
    loader = DALILoader(dataset, batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(3), device="cpu")
    theirs = DALILoader(folder, batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(3), device="cpu")
    assert same(collect(loader), collect(theirs))
    assert loader.state_dict() is not None
    both(dataset, shuffle=True)


def test_random_transforms_draw_as_for_the_folder(shards: str, folder: ImageFolder) -> None:
    chain = v2.Compose([v2.RandomResizedCrop(20), v2.RandomHorizontalFlip(), v2.ToImage()])
    ours, theirs = Tar(shards, transform=chain), ImageFolder(folder.root, chain)
    loaders = [DALILoader(dataset, batch_size=7, shuffle=True, seed=1, device="cpu") for dataset in (ours, theirs)]
    for loader in loaders:
        torch.manual_seed(0)
        loader.batches = collect(loader) + collect(loader)
    assert same(loaders[0].batches, loaders[1].batches)


@pytest.mark.parametrize(
    "label",
    [
        "json:number",
        "txt",
        None,
        ("cls", "json", "txt", "__key__", "json:place"),
        ("json:number", "cls"),
        lambda parts: parts["json"]["number"] * 2 + len(parts["__key__"]),
    ],
    ids=["key", "text", "none", "several", "integers", "function"],
)
def test_labels(shards: str, label: Any) -> None:
    batches = both(Tar(shards, label=label, transform=EXACT), shuffle=True)
    numbers: dict[Any, Any] = {None: lambda batch: len(batch), "txt": lambda batch: batch[1][0]}
    assert type(batches[0]) is {None: torch.Tensor, tuple: dict}.get(label if label is None else type(label), list)
    if label in numbers:
        assert numbers[label](batches[0]) in (5, *(f"picture {i}" for i in range(24)))


def test_parts_of_other_shapes_come_through_collate_fn(shards: str) -> None:
    dataset = Tar(shards, label=("points.npy", "seg.png"), transform=EXACT)
    for index, sample in enumerate(dataset):
        assert sample["points.npy"].shape == (index % 2 + 2,)
        assert (sample["seg.png"].mode, sample["seg.png"].getpixel((0, 0))) == ("L", index)
        if index == 3:
            break
    gather = lambda samples: [(x["image"], x["points.npy"], x["seg.png"].tobytes()) for x in samples]  # noqa: E731
    ours, theirs = (
        collect(kind(dataset, batch_size=4, collate_fn=gather, **options))
        for kind, options in ((DALILoader, {"device": "cpu"}), (DataLoader, {}))
    )
    for (image, points, mask), (image_too, points_too, mask_too) in zip(chain(*ours), chain(*theirs), strict=True):
        assert torch.equal(image, image_too)
        assert (points == points_too).all()
        assert mask == mask_too


def test_transforms_that_torch_runs_get_the_metadata_of_images(tmp_path: Path) -> None:
    image = Image.open(io.BytesIO(encoded(Image.new("RGB", (40, 30)), "JPEG", dpi=(72, 99), comment=b"note")))
    write_tar(tmp_path / "a.tar", [("a", {"jpg": encoded(image, "JPEG", dpi=(72, 99), comment=b"note"), "cls": b"0"})])
    ask = lambda image: (image.info["dpi"], image.info["comment"], image.mode)  # noqa: E731
    dataset = Tar(tmp_path / "a.tar", transform=ask)
    assert ask(image) == dataset[0][0]
    assert collect(DALILoader(dataset, collate_fn=list, device="cpu")) == [[dataset[0]]]


def test_target_transform_gets_the_parts(shards: str) -> None:
    halve = lambda parts: {"half": parts["cls"] / 2}  # noqa: E731
    assert set(both(Tar(shards, label=("cls",), transform=EXACT, target_transform=halve))[0]) == {"image", "half"}
    assert both(Tar(shards, transform=EXACT, target_transform=str))[0][1] == ("0",) * 5


def test_order_under_wrappers_and_samplers(shards: str) -> None:
    dataset = Tar(shards, label="json:number", transform=EXACT)
    parts = ConcatDataset([Subset(dataset, [7, 3, 23, 3]), dataset])
    numbers = torch.cat([labels for _, labels in both(parts)]).tolist()
    assert numbers == [7, 3, 23, 3, *range(24)]
    loader = DALILoader(parts, batch_size=5, device="cpu")
    assert loader.explain is not None
    weighted = WeightedRandomSampler([1.0] * 12 + [9.0] * 12, 20, generator=torch.Generator().manual_seed(0))
    drawn = torch.cat([labels for _, labels in DALILoader(dataset, batch_size=5, sampler=weighted, device="cpu")])
    weighted.generator = torch.Generator().manual_seed(0)
    assert drawn.tolist() == list(weighted)


def test_what_else_a_loader_can_do(shards: str, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(probe, "_SECONDS", 0.05)
    loader = DALILoader(Tar(shards, transform=EXACT), batch_size=5, device=device)
    case = loader.stats(probe=True).probe
    assert case is not None
    assert case.read is None
    assert min(case.decode or 0, case.transforms, case.together) > 0
    with pytest.raises(ValueError, match="its images lie in larger files"):
        DALILoader(Tar(shards, transform=EXACT), cache="host", device=device)


def test_an_epoch_resumes(shards: str) -> None:
    dataset = Tar(shards, label="json:number", transform=v2.Compose([v2.RandomCrop(20), v2.ToImage()]))
    make = lambda: DALILoader(dataset, batch_size=5, shuffle=True, device="cpu")  # noqa: E731
    first = make()
    batches = iter(first)
    next(batches)
    state = first.state_dict()
    second = make()
    second.load_state_dict(state)
    assert same(collect(second), collect(batches))


def test_ranks_share_an_epoch(shards: str) -> None:
    dataset = Tar(shards, label="json:number", transform=EXACT)
    samplers = [torch.utils.data.DistributedSampler(dataset, 2, rank, seed=4) for rank in (0, 1)]
    labels = [
        torch.cat([labels for _, labels in DALILoader(dataset, batch_size=5, sampler=one, device="cpu")]).tolist()
        for one in samplers
    ]
    assert labels == [list(one) for one in samplers]
    assert sorted(chain(*labels)) == list(range(24))


def test_workers_and_other_processes_open_the_index_themselves(shards: str) -> None:
    dataset = Tar(shards, label="json:number", transform=EXACT)
    next(iter(DALILoader(dataset, batch_size=5, device="cpu")))  # the shards are mapped
    assert len(pickle.dumps(dataset)) < 4000
    copy = pickle.loads(pickle.dumps(dataset))
    assert same(collect(DataLoader(copy, batch_size=5, num_workers=1)), collect(DataLoader(dataset, batch_size=5)))


def test_an_index_takes_few_bytes_and_is_made_once(shards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Tar(shards).index.bytes_per_row <= 30
    assert Tar(shards, label=("cls", "txt")).index.bytes_per_row <= 30
    monkeypatch.setattr(Tar, "_scan", None)
    assert len(Tar(shards)) == 24


def test_images_and_shards_are_found_by_name(tmp_path: Path, folder: ImageFolder) -> None:
    jpeg = Path(folder.samples[0][0]).read_bytes()
    png = encoded(Image.open(folder.samples[1][0]), "PNG")
    both_kinds = {"jpg": jpeg, "png": png, "cls": b"1"}
    write_tar(tmp_path / "b.tar", [("x", both_kinds), ("meta", {"json": b"{}"}), ("Y", {"JPG": jpeg, "cls": b"2"})])
    write_tar(tmp_path / "a.tar", [("z", {"left.png": png, "cls": b"3"})])
    assert [label for _, label in Tar(tmp_path / "b.tar", image=("png", "jpg"))] == [1, 2]
    assert Tar(tmp_path / "b.tar", image=("png", "jpg"))[0][0].size == Image.open(io.BytesIO(png)).size
    assert [label for _, label in Tar(str(tmp_path / "?.tar"), image=("left.png", "jpg"), index=tmp_path / "i")] == [
        *(3, 1, 2)
    ]
    assert len(Tar([tmp_path / "b.tar", tmp_path / "b.tar"])) == 4
    listed = {"url": "b.tar", "md5sum": "0" * 32, "nsamples": 2, "filesize": (tmp_path / "b.tar").stat().st_size}
    kind = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "name": "some"}
    for name, content, count in (("a", kind | {"shardlist": [listed]}, 2), ("b", {"shardlist": [listed] * 2}, 4)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
        assert len(Tar(tmp_path / f"{name}.json")) == count
    for content in ([], {}, {"shardlist": [{}]}, {"shardlist": "b.tar"}):
        (tmp_path / "c.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=r"c.json must be a JSON with a list 'shardlist' of entries with a 'url'"):
            Tar(tmp_path / "c.json")
    for content in ({"shardlist": []}, {"shardlist": [listed], "datasets": [{"source_url": "d.json"}]}):
        (tmp_path / "c.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=r"c.json lists no shards, or names other lists as 'datasets'"):
            Tar(tmp_path / "c.json")
    with pytest.raises(ValueError, match=r"a.tar: sample z has left.png, and image=\('jpg',\) names none of them"):
        Tar(tmp_path / "a.tar", image="jpg")
    for pattern in ("x-{0,{1..2}}.tar", "x-{{1..2},0}.tar"):
        with pytest.raises(
            ValueError, match=rf"braces in a pattern must not be nested, got .*{re.escape(pattern)}'; g"
        ):
            Tar(str(tmp_path / pattern))
    with pytest.raises(FileNotFoundError, match=r"no file has a name like .*d\*.tar"):
        Tar(str(tmp_path / "d*.tar"))
    with pytest.raises(ValueError, match="has no 'txt', its label; it has jpg, png, cls"):
        Tar(tmp_path / "b.tar", label="txt")
    write_tar(tmp_path / "c.tar", [("y", {"jpg": jpeg, "json": b"{}"})])
    assert Tar(tmp_path / "b.tar", label="__key__", transform=EXACT)[1][1] == "Y"
    with pytest.raises(ValueError, match="the json:x of sample y cannot be read"):
        Tar(tmp_path / "c.tar", label="json:x")
    with pytest.raises(ValueError, match="label must be names of parts other than 'image'"):
        Tar(tmp_path / "b.tar", label=("image",))


def test_a_pattern_leaves_out_indexes(own: str, tmp_path: Path) -> None:
    for name in ("train-00.idx", "train-00.json", "classes.txt", "lock.mdb", "i.npz.lock", "i.npz.7.unfinished"):
        (tmp_path / name).write_text("{}")
    for pattern in ("*", "*", "train-*"):  # the first call writes an index
        assert Tar(tmp_path / pattern).shards.paths == [own]
    objects = [f"s3://bucket/{name}" for name in ("a.idx", "a.tar", "a.json", "torchdali-1.npz")]
    assert expand("s3://bucket/*", lambda folder: objects) == objects[1:2]
    named = Path(own).rename(tmp_path / "named.idx")
    assert len(Tar(named)) == 24


def errors(dataset: Any, **options: Any) -> Iterator[str]:
    """The messages of an epoch's batches."""
    batches = iter(DALILoader(dataset, batch_size=4, device="cpu", **options))
    while True:
        try:
            next(batches)
            yield ""
        except StopIteration:
            return
        except SampleError as error:
            yield str(error)


def test_a_damaged_image_is_named_in_its_turn(own: str) -> None:
    dataset = Tar(own, transform=EXACT, index=Path(own).with_suffix(".npz"))
    offset, length = int(dataset.index.offsets[6]), int(dataset.index.lengths[6])
    times = Path(own).stat()
    with Path(own).open("r+b") as stream:
        stream.seek(offset + length // 2)
        stream.write(bytes(length - length // 2))
    os.utime(own, ns=(times.st_atime_ns, times.st_mtime_ns))
    told = list(errors(dataset))
    assert [bool(text) for text in told] == [False, True, False, False, False, False]
    assert told[1].startswith(f"sample 6 ({own}, a.b/0006 at byte {offset:,}): it cannot be decoded")
    assert list(errors(dataset, on_error="skip")) == [""] * 6
    assert list(errors(dataset, on_error="replace")) == [""] * 6


@pytest.mark.parametrize("mapped", [True, False])
def test_a_shard_that_shrinks_is_an_error_that_names_it(own: str, mapped: bool) -> None:
    dataset = Tar(own, transform=EXACT, is_mapped=mapped)
    loader = DALILoader(dataset, batch_size=4, device="cpu")
    assert len(collect(loader)) == 6  # in an epoch, a batch that DALI is reading could die of SIGBUS
    os.truncate(own, 5000)
    with pytest.raises(SampleError, match=rf"{own}, .*: it cannot be read .*{own} has changed since .* was made"):
        collect(loader)
    with pytest.raises(ValueError, match="has changed since"):
        dataset[20]
    with pytest.raises(ValueError, match=f"{own} has changed since .*; delete the index, and it is made again"):
        Tar(own)


def test_shards_on_a_network_file_system_are_not_mapped(shards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Tar(shards).is_mapped
    monkeypatch.setattr(machine, "_NETWORKS", {0x9FA0})  # of /proc, which any Linux has
    assert machine.is_on_network("/proc/self/maps")
    assert not machine.is_on_network(str(Path(shards).parent))
    monkeypatch.setattr(machine, "is_on_network", {str(Path(shards).parent): True}.__getitem__)
    dataset = Tar(shards, transform=EXACT)
    assert not dataset.is_mapped
    assert not dataset.shards.is_mapped
    assert Tar(shards, is_mapped=True).is_mapped


def test_a_truncated_shard_is_refused(own: str) -> None:
    os.truncate(own, Path(own).stat().st_size // 2)
    with pytest.raises(ValueError, match=rf"{own} is truncated after 'a.b/0011.seg.png': the zeros that end"):
        Tar(own)
    os.truncate(own, Path(own).stat().st_size - 7000)
    with pytest.raises(ValueError, match=rf"{own} is truncated: a.b/00\d\d.\w+ at byte [\d,]+ has [\d,]+ bytes"):
        Tar(own)
    Path(own).write_bytes(b"no tar " * 1000)
    with pytest.raises(ValueError, match="is no tar file, or damaged: it has no header at byte 0"):
        Tar(own)
    assert [path.name for path in Path(own).parent.iterdir()] == ["train-00.tar"]


def test_what_is_no_tar_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder.tar").mkdir()
    (tmp_path / "empty.tar").touch()
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(os.urandom(2048)))
    with pytest.raises(IsADirectoryError, match=r"folder\.tar is a folder; name its files, such as .*folder\.tar/\*"):
        Tar(str(tmp_path / "folder.tar"))
    with pytest.raises(ValueError, match=r"empty\.tar is a file of 0 bytes"):
        Tar(str(tmp_path / "empty.tar"))
    with pytest.raises(ValueError, match=r"a\.tar\.gz is compressed; unpack it"):
        Tar(str(tmp_path / "a.tar.gz"))
    os.mkfifo(tmp_path / "pipe.tar")
    for kind in (Tar, LMDB):
        with pytest.raises(OSError, match=r"pipe\.tar must be a file, got a pipe or a device"):
            kind(tmp_path / "pipe.tar")
    with pytest.raises(ValueError, match="shards must be a path, a pattern or several, got an empty list"):
        Tar([])
    for wrong in (None, 5, [None], b"a.tar"):
        with pytest.raises(
            TypeError, match=f"shards must be a path, a pattern or several, got {re.escape(repr(wrong))}"
        ):
            Tar(wrong)  # type: ignore[arg-type]
    for name in ("gcs://bucket/x.tar", "s3a://bucket/x.json", "ftp://host/x.tar"):
        with pytest.raises(ValueError, match=f"must begin with s3://, gs://, az:// or https://, got '{name}'"):
            Tar(name)
    (tmp_path / "list.json").write_text('{"shardlist": [{"url": "gcs://bucket/x.tar"}]}')
    with pytest.raises(ValueError, match=r"must begin with s3://, gs://, az:// or https://, got 'gcs://bucket/x\.tar'"):
        Tar(tmp_path / "list.json")


def test_a_label_or_index_of_another_type_is_named(shards: str) -> None:
    for label in (5, ("cls", 5)):
        with pytest.raises(TypeError, match=r"label must be a name, several names, a function or None, got .*5\)?$"):
            Tar(shards, label=label)  # type: ignore[arg-type]
    dataset = Tar(shards)
    assert dataset[np.int64(-1)][1] == dataset[len(dataset) - 1][1]
    with pytest.raises(
        TypeError, match=r"an index of a Tar of .*train-00\.tar.* must be an int, got slice\(0, 2, None\)"
    ):
        dataset[0:2]


def test_a_copy_with_another_time_is_told_from_other_content(own: str) -> None:
    Tar(own, label="cls")
    os.utime(own, (1, 1))
    with pytest.raises(ValueError, match=r"its time is another, its length is not \(cp -p"):
        Tar(own, label="cls")


def test_a_shard_that_was_replaced_has_no_keys(own: str) -> None:
    """What lies at the places of the old ones is none."""
    dataset = Tar(own, label="cls")
    assert re.fullmatch(rf"{own}, \S+ at byte [\d,]+", dataset.name(1))
    Path(own).write_bytes(bytes(range(255, 0, -1)) * 1000)
    assert re.fullmatch(rf"{own}, an image at byte [\d,]+", dataset.name(1))


def change(index: Path, **arrays: Any) -> None:
    """Replace arrays of an index, as another process would: the file that is mapped stays."""
    np.savez(index.with_name("new.npz"), **{**np.load(index), **arrays})
    index.with_name("new.npz").replace(index)


def test_a_hostile_index_does_not_read_outside(own: str, tmp_path: Path) -> None:
    index = tmp_path / "index.npz"
    offsets = np.array(Tar(own, index=index).index.offsets)
    for wrong in (offsets + 2**40, offsets - 2**40, np.full_like(offsets, 2**63 - 1)):
        change(index, offsets=wrong)
        dataset = Tar(own, transform=EXACT, index=index)
        with pytest.raises(ValueError, match=rf"{index} is damaged: it names bytes .* of {own}, which has"):
            dataset[0]
        assert "is damaged" in next(errors(dataset))
    change(index, offsets=offsets, lengths=np.full(len(offsets), 2**32 - 1, np.uint32))
    assert "is damaged" in next(errors(Tar(own, transform=EXACT, index=index)))
    change(index, offsets=offsets, shard=np.full(len(offsets), 9, np.uint8))
    assert "it names shard 9 of 1" in next(errors(Tar(own, transform=EXACT, index=index)))
    change(index, shard=np.zeros(3, np.uint8))
    with pytest.raises(ValueError, match="is damaged: its array 'offsets' must be integers of int64, one for each"):
        Tar(own, index=index)
    change(index, shard=np.zeros(24, np.uint8), offsets=np.full_like(offsets, 2**64 - 1, np.uint64))
    with pytest.raises(ValueError, match=rf"{index} is damaged: its array 'offsets' must be integers of int64"):
        Tar(own, index=index)
    for split in (np.array([24]), np.array([-1]), np.array([0.5]), np.array(1), np.array([True]), np.array(["0"])):
        change(index, offsets=offsets, split=split)
        with pytest.raises(ValueError, match=rf"{index} is damaged: its array 'split' must be the numbers of images"):
            Tar(own, index=index)


def test_an_index_of_something_else_is_refused(own: str, tmp_path: Path) -> None:
    index = tmp_path / "index.npz"
    Tar(own, index=index)
    with pytest.raises(ValueError, match=r"is an index of Tar\(.*label='cls'\), and Tar\(.*label='txt'\) is wanted"):
        Tar(own, label="txt", index=index)
    Path(own).rename(tmp_path / "other.tar")
    with pytest.raises(ValueError, match=r"is the index of other shards than .*other.tar"):
        Tar(tmp_path / "other.tar", index=index)
    np.savez(tmp_path / "new.npz", paths=np.zeros(3))
    (tmp_path / "new.npz").replace(index)
    with pytest.raises(ValueError, match="is no index of shards: it has no array 'content'"):
        Tar(tmp_path / "other.tar", index=index)
    with pytest.raises(OSError, match="cannot be written"):
        Tar(tmp_path / "other.tar", index=tmp_path / "missing" / "index.npz")


def test_an_index_is_made_by_one_process_while_others_wait(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scan, scanned, begun = Tar._scan, [], threading.Event()

    def slow(self: Tar, path: str) -> Iterator[Any]:
        scanned.append(path)
        begun.set()
        time.sleep(0.2)
        yield from scan(self, path)

    monkeypatch.setattr(Tar, "_scan", slow)
    lengths: list[int] = []
    threads = [threading.Thread(target=lambda: lengths.append(len(Tar(own)))) for _ in range(3)]
    for thread in threads:
        thread.start()
        begun.wait(5)
    for thread in threads:
        thread.join()
    assert lengths == [24] * 3
    assert scanned == [own]
    assert [path.suffix for path in Path(own).parent.iterdir()].count(".lock") == 0

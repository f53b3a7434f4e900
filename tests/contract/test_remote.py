"""Images in an object store: the samples and the order of the same files in a folder, in both loaders; named faults."""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import tarfile
import time
import weakref
import zipfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Script, same
from helpers.object_server import ObjectServer
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, ImageIndex, SampleError
from torchdali.datasets import LMDB, RemoteImages, Table, Tar, Zip
from torchdali.sources.remote import client as client_module
from torchdali.tools.commands.shards import open_shards

pytest.importorskip("obstore")
EXACT = v2.Compose([v2.ToImage(), v2.CenterCrop(24)])


def tar_of(samples: list[tuple[str, int]], first: int) -> bytes:
    """Return a tar of images, labels, texts and JSON."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for number, (path, label) in enumerate(samples, first):
            parts = {
                "jpg": Path(path).read_bytes(),
                "cls": str(label).encode(),
                "txt": f"picture {number}".encode(),
                "json": json.dumps({"number": number}).encode(),
            }
            for part, data in parts.items():
                info = tarfile.TarInfo(f"a/{number:04}.{part}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def zip_of(folder: ImageFolder) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for path, _ in folder.samples:
            archive.write(path, os.path.relpath(path, folder.root))
    return stream.getvalue()


@pytest.fixture(scope="module")
def folder(pictures: Path) -> ImageFolder:
    return ImageFolder(pictures, EXACT)


@pytest.fixture(scope="module")
def contents(folder: ImageFolder) -> dict[str, bytes]:
    samples = folder.samples
    third = len(samples) // 3
    objects = {
        f"bucket/train/{os.path.relpath(path, folder.root)}": Path(path).read_bytes() for path, _ in folder.samples
    }
    shards = {f"bucket/shards/s-{i}.tar": tar_of(samples[i * third : (i + 1) * third], i * third) for i in range(3)}
    return {**objects, **shards, "bucket/all.zip": zip_of(folder), "bucket/train/notes.txt": b"no image"}


@pytest.fixture
def server(contents: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with ObjectServer(contents) as running:
        for name, value in running.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield running


def make(kind: str, folder: ImageFolder, tmp_path: Path, root: str = "s3://bucket", **options: Any) -> Any:
    """Return a dataset of the folder's images, as objects."""
    pairs = [(f"{root}/train/{os.path.relpath(path, folder.root)}", label) for path, label in folder.samples]
    if kind == "tar":
        return Tar(f"{root}/shards/s-{{0..2}}.tar", transform=EXACT, **options)
    if kind == "pattern":
        return Tar(f"{root}/shards/s-*.tar", transform=EXACT, **options)
    if kind == "zip":
        return Zip(f"{root}/all.zip", transform=EXACT, **options)
    if kind == "folder":
        return RemoteImages(f"{root}/train", transform=EXACT, **options)
    if kind == "list":
        return RemoteImages(pairs, transform=EXACT, **options)
    if kind == "index":
        ImageIndex.write(tmp_path / "index.npz", pairs, folder.classes)
        return RemoteImages(tmp_path / "index.npz", transform=EXACT, **options)
    lines = [
        "file,label",
        *(f"{name if i % 2 else name.removeprefix(root)[1:]},{y}" for i, (name, y) in enumerate(pairs)),
    ]
    (tmp_path / "list.csv").write_text("\n".join(lines))
    return Table(tmp_path / "list.csv", label="label", root=root, transform=EXACT, **options)


def batches(kind: Any, dataset: Any, **options: Any) -> list[Any]:
    options = {"batch_size": 5, "shuffle": True, "generator": torch.Generator().manual_seed(3), **options}
    return list(kind(dataset, **options, **({"device": "cpu"} if kind is DALILoader else {})))


@pytest.mark.parametrize("kind", ["tar", "pattern", "zip", "folder", "list", "index", "table"])
def test_samples_are_those_of_the_folder(kind: str, server: ObjectServer, folder: ImageFolder, tmp_path: Path) -> None:
    dataset = make(kind, folder, tmp_path)
    ours = batches(DALILoader, dataset)
    assert same(ours, batches(DALILoader, folder))
    assert same(ours, batches(DataLoader, dataset))
    if kind in ("zip", "folder", "index"):
        assert dataset.classes == folder.classes
    if kind == "tar":
        assert same(batches(DALILoader, pickle.loads(pickle.dumps(dataset))), ours)


def test_objects_of_a_server_without_lists(server: ObjectServer, folder: ImageFolder, tmp_path: Path) -> None:
    root = f"{server.url}/bucket"
    expected = batches(DALILoader, folder)
    for kind in ("tar", "list"):
        assert same(batches(DALILoader, make(kind, folder, tmp_path, root)), expected)


@pytest.mark.parametrize(
    "label",
    ["txt", ("cls", "json"), lambda parts: parts["json"]["number"] + len(parts["__key__"])],
    ids=["text", "several", "function"],
)
@pytest.mark.parametrize("cache", [None, "host", "disk"])
def test_other_parts_come_with_the_image(server: ObjectServer, label: Any, cache: Any) -> None:
    dataset = Tar("s3://bucket/shards/s-{0..2}.tar", label=label, transform=EXACT)
    theirs = batches(DataLoader, dataset)
    before = server.total
    loader = DALILoader(dataset, 5, shuffle=True, generator=torch.Generator().manual_seed(3), device="cpu", cache=cache)
    assert same(list(loader), theirs)
    assert server.total - before <= len(dataset)
    if cache:
        before = server.total
        list(loader)
        assert server.total == before


def test_other_parts_come_with_the_image_beside_a_source_without_such(
    server: ObjectServer, folder: ImageFolder, tmp_path: Path
) -> None:
    texts = Tar("s3://bucket/shards/s-{0..2}.tar", label=lambda parts: int(parts["cls"]), transform=EXACT)
    both = ConcatDataset([texts, make("list", folder, tmp_path)])
    before = server.total
    assert same(batches(DALILoader, both), batches(DataLoader, ConcatDataset([folder, folder])))
    assert server.total - before <= len(both)


def test_a_source_keeps_no_image_whose_target_it_knows(
    server: ObjectServer, folder: ImageFolder, tmp_path: Path
) -> None:
    for kind in ("tar", "list"):
        source = make(kind, folder, tmp_path).torchdali_source()
        (image,) = source.read(np.array([0]))
        kept = weakref.ref(image)
        del image
        assert kept() is None


def test_forked_workers_read_what_the_parent_has_read_before(
    server: ObjectServer, folder: ImageFolder, tmp_path: Path
) -> None:
    expected = batches(DALILoader, folder)
    for kind in ("tar", "list"):
        dataset = make(kind, folder, tmp_path)
        assert same(batches(DALILoader, dataset), expected)
        assert same(batches(DataLoader, dataset, num_workers=2), expected)
    server.faults["bucket/shards/s-1.tar"] = 404
    with pytest.raises(FileNotFoundError, match=r"there is no such object.*s3://bucket/shards/s-1.tar"):
        batches(DataLoader, make("tar", folder, tmp_path), num_workers=1)


def test_subset_concat_resume_and_ranks(server: ObjectServer, folder: ImageFolder, tmp_path: Path) -> None:
    tar, images = make("tar", folder, tmp_path), make("list", folder, tmp_path)
    rows = [20, 3, 3, 11, 0, 17]
    mixed = ConcatDataset([Subset(tar, rows), images])
    expected = ConcatDataset([Subset(folder, rows), folder])
    assert same(batches(DALILoader, mixed), batches(DataLoader, expected))
    for rank in range(2):
        samplers = [DistributedSampler(one, num_replicas=2, rank=rank, seed=4) for one in (tar, folder)]
        ours, theirs = (
            batches(kind, one, shuffle=None, generator=None, sampler=sampler)
            for kind, one, sampler in zip((DALILoader, DataLoader), (tar, folder), samplers, strict=True)
        )
        assert same(ours, theirs)

    def loader() -> DALILoader[Any]:
        return DALILoader(tar, 5, shuffle=True, generator=torch.Generator().manual_seed(3), device="cpu")

    whole, first = list(loader()), loader()
    iterator = iter(first)
    begun = [next(iterator) for _ in range(2)]
    state, second = json.loads(json.dumps(first.state_dict())), loader()
    second.load_state_dict(state)
    assert same([*begun, *second], whole)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (404, "it cannot be read (there is no such object)"),
        (403, "it cannot be read (the store refuses access ("),
        pytest.param("hang", "it cannot be read (the store did not answer in time (", marks=pytest.mark.slow),
        (400, "it cannot be read (it cannot be fetched ("),
    ],
)
@pytest.mark.parametrize("kind", ["tar", "list"])
def test_faults_name_the_object(
    kind: str, fault: Any, text: str, server: ObjectServer, folder: ImageFolder, tmp_path: Path
) -> None:
    from obstore.store import S3Store

    impatient = S3Store(
        "bucket",
        client_options={"timeout": "200ms" if fault == "hang" else "20s", "allow_http": True},
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
    )
    dataset = make(kind, folder, tmp_path, remote=impatient)
    name = dataset.shards.paths[1] if kind == "tar" else dataset.name(9)
    server.faults[name.removeprefix("s3://")] = fault
    good = batches(DataLoader, folder, shuffle=False, generator=None)
    loader = DALILoader(dataset, 5, device="cpu")
    iterator = iter(loader)
    assert same(next(iterator), good[0])
    with pytest.raises(SampleError) as caught:
        next(iterator)
    assert caught.value.path.startswith(name)
    assert caught.value.reason.startswith(text)
    lenient = DALILoader(dataset, 5, device="cpu", on_error="replace")
    replaced = list(lenient)
    bad = range(8, 16) if kind == "tar" else [9]
    assert [error.index for error in lenient.errors] == list(bad)
    for batch, (ours, theirs) in enumerate(zip(replaced, good, strict=True)):
        assert ours[1].tolist() == theirs[1].tolist()
        for i in range(len(ours[1])):
            assert same(ours[0][i], theirs[0][i]) is (batch * 5 + i not in bad)
    server.faults.clear()
    assert same(list(lenient), good)  # the store is back


def test_requests_are_retried(server: ObjectServer, folder: ImageFolder, tmp_path: Path) -> None:
    dataset = make("list", folder, tmp_path)
    server.faults = {"bucket/train/" + dataset.name(3).partition("train/")[2]: (503, 2)}
    server.faults["bucket/train/" + dataset.name(7).partition("train/")[2]] = ("cut", 1)
    assert same(batches(DALILoader, dataset), batches(DALILoader, folder))


def test_a_changed_shard_is_refused(
    server: ObjectServer, contents: dict[str, bytes], folder: ImageFolder, tmp_path: Path
) -> None:
    index = tmp_path / "index.npz"
    dataset = make("tar", folder, tmp_path, index=index)
    server.objects["bucket/shards/s-0.tar"] = contents["bucket/shards/s-0.tar"][:-1] + b"\1"
    with pytest.raises(SampleError, match=r"image 0 at byte 512.*s-0.tar: it has changed since its index was made"):
        list(DALILoader(dataset, 5, device="cpu"))
    with pytest.raises(ValueError, match=r"s3://bucket/shards/s-0.tar has changed since .*index.npz was made; delete"):
        make("tar", folder, tmp_path, index=index)
    index.unlink()
    assert len(make("tar", folder, tmp_path, index=index)) == len(folder)


def test_weak_tags_are_in_no_request(
    server: ObjectServer, contents: dict[str, bytes], folder: ImageFolder, tmp_path: Path
) -> None:
    server.has_weak_tags = True
    index, rows = tmp_path / "index.npz", np.arange(2)
    dataset = make("tar", folder, tmp_path, index=index)
    assert same(batches(DALILoader, dataset), batches(DataLoader, folder))
    server.objects["bucket/shards/s-0.tar"] = contents["bucket/shards/s-0.tar"][:-1] + b"\1"
    index.unlink()
    changed = make("tar", folder, tmp_path, index=index)
    assert changed.locate(rows) != dataset.locate(rows)  # so that a cache on the disk has no old images for it


def test_an_index_takes_one_read_of_each_shard(server: ObjectServer, folder: ImageFolder, tmp_path: Path) -> None:
    dataset = make("tar", folder, tmp_path)
    assert [server.requests[f"GET bucket/shards/s-{i}.tar"] for i in range(3)] == [1, 1, 1]
    assert server.requests["HEAD bucket/shards/s-0.tar"] == 3  # before and after that read, and to open the index
    assert dataset.index.file.parent == tmp_path / "cache" / "torchdali"
    make("tar", folder, tmp_path)
    assert server.requests["GET bucket/shards/s-0.tar"] == 1
    other = {name.replace("bucket/", "other/", 1): data for name, data in server.objects.items()}
    server.objects.update(other)
    assert make("tar", folder, tmp_path, "s3://other").index.file != dataset.index.file


@pytest.mark.parametrize("cache", ["host", "disk"])
@pytest.mark.parametrize("kind", ["tar", "list", "concat"])
def test_a_cache_saves_the_requests_of_later_epochs(
    kind: str, cache: Any, server: ObjectServer, folder: ImageFolder, tmp_path: Path
) -> None:
    if kind == "concat":
        parts = [Subset(make("tar", folder, tmp_path), range(9)), make("list", folder, tmp_path)]
        dataset, same_files = ConcatDataset(parts), ConcatDataset([Subset(folder, range(9)), folder])
    else:
        dataset, same_files = make(kind, folder, tmp_path), folder
    expected = batches(DataLoader, same_files, shuffle=False, generator=None)
    options: Any = {"device": "cpu", "cache": cache, "cache_dir": tmp_path / "objects" if cache == "disk" else None}
    loader = DALILoader(dataset, 5, **options)
    assert same(list(loader), expected)
    before = server.total
    assert same(list(loader), expected)
    assert server.total == before
    assert "objects, in" in loader._session.cache.describe()
    loader.close()
    assert same(list(loader), expected)
    assert (server.total == before) is (cache == "disk")
    before = server.total
    assert same(next(iter(DALILoader(dataset, 3, **options)))[0], expected[0][0][:3])
    assert (server.total == before) is (cache == "disk")
    small = DALILoader(
        dataset, 5, **{**options, "cache_bytes": 20_000, "cache_dir": options["cache_dir"] and tmp_path / "x"}
    )
    assert same(list(small), expected)
    assert same(list(small), expected)
    assert server.total > before


def test_a_list_of_wids_names_objects(server: ObjectServer, folder: ImageFolder, tmp_path: Path) -> None:
    def write(names: list[str]) -> bytes:
        return json.dumps({"wids_version": 1, "shardlist": [{"url": name, "nsamples": 8} for name in names]}).encode()

    (tmp_path / "index.json").write_bytes(write([f"s3://bucket/shards/s-{i}.tar" for i in range(3)]))
    server.objects["bucket/lists/index.json"] = write(["../shards/s-0.tar", "../shards/s-1.tar"])
    expected = make("tar", folder, tmp_path).shards.paths
    assert Tar(tmp_path / "index.json").shards.paths == expected
    assert Tar("s3://bucket/lists/index.json").shards.paths == expected[:2]
    (tmp_path / "both.json").write_bytes(write(["s3://bucket/shards/s-0.tar", "s-1.tar"]))
    with pytest.raises(ValueError, match="shards must be all files or all objects"):
        Tar(tmp_path / "both.json")


def test_the_command_line_takes_objects(server: ObjectServer, tmp_path: Path) -> None:
    assert len(open_shards(["s3://bucket/shards/s-*.tar"], None, None)) == 24
    assert len(open_shards(["s3://bucket/all.zip"], None, tmp_path / "index.npz")) == 24


def test_another_cache_and_no_cache(server: ObjectServer, folder: ImageFolder, tmp_path: Path) -> None:
    loader = DALILoader(make("tar", folder, tmp_path), 5, device="cpu", cache="host")
    expected = list(loader)
    for cache in ("disk", None, "host"):
        loader.cache = cache
        assert same(list(loader), expected)
    assert (tmp_path / "cache" / "torchdali" / "objects" / "used").exists()
    copied = pickle.loads(pickle.dumps(loader))
    assert same(list(copied), expected)


@pytest.mark.parametrize("end", ["break", "close", "timeout"])
def test_an_interrupted_epoch_leaves_no_request(
    end: str, server: ObjectServer, folder: ImageFolder, tmp_path: Path
) -> None:
    dataset = make("list", folder, tmp_path)
    loader = DALILoader(dataset, 2, device="cpu", timeout=0.3 if end == "timeout" else 0)
    server.latency = 60.0
    if end == "timeout":
        with pytest.raises(RuntimeError, match="timed out"):
            next(iter(loader))
    else:
        iterator = loader.__iter__()
        iterator._pull(iterator._prefetcher)
        wait_until(lambda: server.open_requests > 4)
        if end == "close":
            loader.close()
        del iterator
        gc.collect()
    wait_until(lambda: server.open_requests == 0)
    time.sleep(0.3)  # the server may accept what was sent before the end only now
    before = server.total
    time.sleep(0.1)
    assert (server.total, server.open_requests) == (before, 0)
    server.latency = 0.0
    assert same(list(DALILoader(dataset, 5, device="cpu")), batches(DataLoader, folder, shuffle=False, generator=None))


def wait_until(holds: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
def test_a_process_ends_while_requests_wait(server: ObjectServer, run_script: Script) -> None:
    server.latency = 60.0
    done = run_script(
        """
        import threading
        from torchdali.sources.remote import Client, Range

        client = Client()
        call = lambda: client.read([Range(f"s3://bucket/train/{i}") for i in range(20)])
        thread = threading.Thread(target=call, daemon=True)
        threading.excepthook = lambda _: None
        thread.start()
        thread.join(1)
        print("ends")
        """,
        **server.environment(),
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["ends"], "")


def test_what_is_refused(
    server: ObjectServer, folder: ImageFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="shards must be all files or all objects, got both"):
        Tar(["s3://bucket/shards/s-0.tar", "x.tar"])
    with pytest.raises(ValueError, match=r"remote= goes with shards such as s3://bucket/name, got files"):
        Tar("x.tar", remote=object())
    with pytest.raises(ValueError, match=r"an https:// name must have no query, got 'https://host/a.tar\?x=1'"):
        Tar("https://host/a.tar?x=1")
    with pytest.raises(ValueError, match=r"an object must have a name like s3://bucket/key, got 's3://bucket'"):
        Tar("s3://bucket")
    with pytest.raises(ValueError, match="an LMDB must be a file, got"):
        LMDB("s3://bucket/db")
    with pytest.raises(ValueError, match=r"samples must be objects such as s3://bucket/name, got 'a.jpg'"):
        RemoteImages([("a.jpg", 1)])
    with pytest.raises(ValueError, match="s3://bucket/shards/ has no images in class folders"):
        RemoteImages("s3://bucket/shards")
    with pytest.raises(FileNotFoundError, match="no file has a name like"):
        Tar("s3://bucket/shards/t-*.tar")
    with pytest.raises(FileNotFoundError, match=r"there is no such object: 's3://bucket/nothing.tar'"):
        Tar("s3://bucket/nothing.tar")
    dataset = make("list", folder, tmp_path)
    with pytest.raises(ValueError, match="its images lie in an object store; cache='host' and cache='disk' keep them"):
        DALILoader(dataset, device="cpu", cache="device")
    with pytest.raises(ValueError, match="cache='disk' keeps what is fetched of object stores"):
        DALILoader(folder, device="cpu", cache="disk")
    from obstore.store import S3Store

    stores = RemoteImages([("s3://bucket/train/x", 0), ("s3://other/x", 0)], remote=S3Store("bucket"))
    with pytest.raises(FileNotFoundError):
        stores[0]
    with pytest.raises(ValueError, match=r"remote= is a store of s3://bucket, got an object of s3://other"):
        stores[1]
    monkeypatch.setattr(client_module, "find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'torchdali\[remote\]'"):
        Tar("s3://bucket/shards/s-0.tar")


def test_a_plain_path_stays_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match="No such file"):
        Tar(Path("s3://bucket/shards/s-0.tar"))
    with pytest.raises(FileNotFoundError):
        ImageFolder("s3://bucket/train")

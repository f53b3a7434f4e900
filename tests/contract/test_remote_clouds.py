"""Objects of Azure and Google: obstore's clients for ``az://`` and ``gs://`` against a server on the loopback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import same
from helpers import object_server
from helpers.object_server import ObjectServer
from torch.utils.data import ConcatDataset, DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError
from torchdali.datasets import RemoteImages, Tar, pack
from torchdali.pipeline.readers.header_reader import HeaderValidator
from torchdali.sources.remote.uris import identify_store

pytest.importorskip("obstore")
EXACT = v2.Compose([v2.ToImage(), v2.CenterCrop(24)])


@pytest.fixture(scope="module")
def folder(pictures: Path) -> ImageFolder:
    return ImageFolder(pictures, EXACT)


@pytest.fixture(scope="module")
def contents(folder: ImageFolder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    shards = tmp_path_factory.mktemp("shards")
    pack(folder.samples, shards, shard_bytes=20_000)
    images = {f"bucket/train/{os.path.relpath(path, folder.root)}": Path(path) for path, _ in folder.samples}
    files = images | {f"bucket/shards/{path.name}": path for path in shards.glob("*.tar")}
    return {name: path.read_bytes() for name, path in files.items()}


@pytest.fixture
def server(contents: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with ObjectServer(contents) as running:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        for scheme in ("az", "gs"):
            for name, value in running.environment(scheme).items():
                monkeypatch.setenv(name, value)
        yield running


def batches(kind: Any, dataset: Any, **options: Any) -> list[Any]:
    options |= {"device": "cpu"} if kind is DALILoader else {}
    return list(kind(dataset, 5, shuffle=True, generator=torch.Generator().manual_seed(3), **options))


@pytest.mark.parametrize("scheme", ["az", "gs"])
def test_shards_and_images_come_in_the_order_of_the_folder(
    scheme: str, server: ObjectServer, folder: ImageFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_server, "PAGE", 4)  # so that a list has several pages
    found = Tar(f"{scheme}://bucket/shards/*.tar", transform=EXACT)
    count = len(found.shards.paths)
    assert count > 2
    first = Path(found.shards.paths[0]).name
    named = Tar([f"{scheme}://bucket/shards/{Path(path).name}" for path in found.shards.paths], transform=EXACT)
    images = RemoteImages(f"{scheme}://bucket/train", EXACT)
    assert images.classes == folder.classes
    expected, reads = batches(DataLoader, folder), server.requests[f"GET bucket/shards/{first}"]
    for dataset in (found, named, images):
        assert same(batches(DALILoader, dataset), expected)
    assert server.requests[f"GET bucket/shards/{first}"] > reads
    assert same(batches(DataLoader, images, num_workers=1), expected)  # a forked worker's program has the variables


@pytest.mark.parametrize("scheme", ["az", "gs"])
def test_a_changed_shard_and_a_missing_object_are_named(
    scheme: str, server: ObjectServer, contents: dict[str, bytes]
) -> None:
    shards = Tar(f"{scheme}://bucket/shards/*.tar", transform=EXACT)
    first = shards.shards.paths[0]
    path = first.removeprefix(f"{scheme}://")
    server.objects[path] = contents[path][:-1] + b"\1"
    with pytest.raises(SampleError, match=f"{first}: it has changed since its index was made"):
        batches(DALILoader, shards)
    missing = f"{scheme}://bucket/train/none.jpg"
    with pytest.raises(SampleError, match=f"{missing}.*there is no such object"):
        batches(DALILoader, RemoteImages([(missing, 0)], EXACT))
    with pytest.raises(FileNotFoundError, match=f"there is no such object: '{scheme}://bucket/none.tar'"):
        Tar(f"{scheme}://bucket/none.tar")
    server.faults[path] = 403
    with pytest.raises(PermissionError, match=f"the store refuses access .*{first}"):
        Tar(first)


@pytest.mark.parametrize("scheme", ["az", "gs"])
def test_a_store_is_given(
    scheme: str, server: ObjectServer, folder: ImageFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from obstore.store import AzureStore, GCSStore

    for name in server.environment(scheme):
        monkeypatch.delenv(name)
    store: Any
    if scheme == "az":
        store = AzureStore(
            "bucket",
            account_name="account",
            endpoint=f"{server.url}/account",
            skip_signature=True,
            client_options={"allow_http": True},
        )
    else:
        store = GCSStore("bucket", base_url=server.url, skip_signature=True)
    expected = batches(DataLoader, folder)
    for dataset in (
        Tar(f"{scheme}://bucket/shards/*.tar", transform=EXACT, remote=store),
        RemoteImages(f"{scheme}://bucket/train", EXACT, remote=store),
    ):
        assert same(batches(DALILoader, dataset), expected)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_two_accounts_with_objects_of_one_name_are_told_apart(kind: str, folder: ImageFolder, tmp_path: Path) -> None:
    from obstore.store import AzureStore

    paths = [Path(folder.samples[0][0]), Path(folder.samples[-1][0])]
    options: dict[str, Any] = {"skip_signature": True, "client_options": {"allow_http": True}}
    place: dict[str, Any] = {"cache_dir": tmp_path} if kind == "disk" else {}
    with ExitStack() as stack:
        servers = [stack.enter_context(ObjectServer({"data/x.jpg": path.read_bytes()})) for path in paths]
        stores = [AzureStore("data", account_name="a", endpoint=f"{server.url}/a", **options) for server in servers]
        images = [RemoteImages([("az://data/x.jpg", 0)], EXACT, remote=store) for store in stores]
        loader = DALILoader(ConcatDataset(images), 2, device="cpu", cache=kind, **place)
        expected = next(iter(DataLoader(ConcatDataset(images), 2)))
        assert not torch.equal(*expected[0])
        for _ in range(2):
            assert same(next(iter(loader)), expected)


def test_the_indexes_of_two_accounts_are_told_apart(
    contents: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shards = [content for name, content in sorted(contents.items()) if name.endswith(".tar")][:2]
    lengths: list[int] = []
    with ExitStack() as stack:
        for shard in shards:
            server = stack.enter_context(ObjectServer({"bucket/x.tar": shard}))
            monkeypatch.setenv("GOOGLE_BASE_URL", server.url)
            monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
            lengths.append(len(Tar("gs://bucket/x.tar")))
    assert all(lengths)


def test_the_pipelines_validate_objects_which_may_change(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a GPU, files of a folder and of shards on a disk are validated before."""
    monkeypatch.setattr(HeaderValidator, "is_on", True)
    for dataset in (RemoteImages("gs://bucket/train", EXACT), Tar("gs://bucket/shards/*.tar", transform=EXACT)):
        loader = DALILoader(dataset, 4, device="cpu")
        next(iter(loader))
        assert loader._session.native_plan is not None
        assert not loader._session.native_plan.pool.plan.headers_validated


def test_two_environments_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: ImageFolder) -> None:
    """Each dataset keeps the store that it was opened with."""
    paths = [Path(folder.samples[0][0]), Path(folder.samples[-1][0])]
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    datasets: list[RemoteImages] = []
    with ExitStack() as stack:
        for path in paths:
            server = stack.enter_context(ObjectServer({"data/a/x.jpg": path.read_bytes()}))
            monkeypatch.setenv("GOOGLE_BASE_URL", server.url)
            datasets.append(RemoteImages("gs://data/", EXACT))
        both = ConcatDataset(datasets)
        loader = DALILoader(both, 2, device="cpu", cache="disk", cache_dir=tmp_path)
        for _ in range(2):
            assert same(next(iter(loader)), next(iter(DataLoader(both, 2))))


def test_stores_are_told_apart_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    from obstore.store import AzureStore, HTTPStore, LocalStore, MemoryStore, S3Store

    def list_places() -> list[str]:
        secret = {"access_key_id": "key", "secret_access_key": os.environ["AWS_SECRET_ACCESS_KEY"]}
        stores = [
            None,
            *(S3Store(name, region="r", **secret) for name in ("one", "two")),
            S3Store("one", region="other", **secret),
            S3Store("one", region="r", prefix="p", **secret),
            S3Store("one", region="r", endpoint=f"http://user:{os.environ['AWS_SECRET_ACCESS_KEY']}@two", **secret),
            *(AzureStore("one", account_name="a", use_emulator=flag) for flag in (False, True)),
            *(HTTPStore.from_url(url) for url in ("https://one", "https://two")),
            LocalStore("/"),
        ]
        return [identify_store(store) for store in stores]

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "first")
    before = list_places()
    assert len(set(before)) == len(before)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "second")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
    monkeypatch.setenv("AZURE_MSI_ENDPOINT", "http://127.0.0.1:41235")
    assert list_places() == before
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:first@other")
    changed = list_places()
    assert not set(changed) & set(before)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:second@other")
    assert list_places() == changed
    assert identify_store(MemoryStore()) != identify_store(MemoryStore())

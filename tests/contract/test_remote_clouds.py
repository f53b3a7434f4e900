"""Objects of Azure and Google: obstore's clients for ``az://`` and ``gs://`` against a server on the loopback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import same
from helpers import object_server
from helpers.object_server import ObjectServer
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError
from torchdali.datasets import RemoteImages, Tar, pack

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

"""Objects of a real S3 server, moto, on the loopback: its lists, ranges, conditions and refusals, through obstore."""

from __future__ import annotations

import gc
import os
import select
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from conftest import same
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError
from torchdali.datasets import RemoteImages, Tar, pack
from torchdali.tools.cli import commands

obstore = pytest.importorskip("obstore")
moto_app = pytest.importorskip("moto.moto_server.werkzeug_app", reason="needs moto[s3] and flask")

from obstore.store import S3Store  # noqa: E402
from werkzeug.serving import make_server  # noqa: E402

pytestmark = pytest.mark.slow
EXACT = v2.Compose([v2.ToImage(), v2.CenterCrop(24)])
HELD = 20.0


class Counted:
    """moto's application. It counts requests, and keeps them waiting until the client hangs up if it is held."""

    def __init__(self) -> None:
        self._application: Any = moto_app.DomainDispatcherApplication(moto_app.create_backend_app)
        self._lock = threading.Lock()
        self.is_held = False
        self.total = self.open = 0

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        with self._lock:
            self.total, self.open = self.total + 1, self.open + 1
        try:
            if self.is_held:  # a request without a body: its connection has something to read when it ends
                select.select([environ["werkzeug.socket"]], [], [], HELD)
            return self._application(environ, start_response)
        finally:
            with self._lock:
                self.open -= 1


@pytest.fixture(scope="module")
def folder(pictures: Path) -> ImageFolder:
    return ImageFolder(pictures, EXACT)


@pytest.fixture(scope="module")
def server(folder: ImageFolder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Counted]:
    """A server with the folder's images in ``s3://bucket/train``, and in shards in ``s3://bucket/shards``."""
    counted = Counted()
    root, running = tmp_path_factory.mktemp("s3"), make_server("127.0.0.1", 0, counted, threaded=True)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{running.server_port}"
    known = {"AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in (known | {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}).items():
            patched.setenv(name, value)
        patched.setenv("XDG_CACHE_HOME", str(root / "cache"))
        urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
        pack(folder.samples, root / "shards", shard_bytes=20_000)
        store = S3Store("bucket")
        for path in (root / "shards").glob("*.tar"):
            obstore.put(store, f"shards/{path.name}", path.read_bytes())
        for name, _ in folder.samples:
            obstore.put(store, f"train/{os.path.relpath(name, folder.root)}", Path(name).read_bytes())
        yield counted
    running.shutdown()
    thread.join()
    running.server_close()


def batches(kind: Any, dataset: Any) -> list[Any]:
    options = {"device": "cpu"} if kind is DALILoader else {}
    return list(kind(dataset, 5, shuffle=True, generator=torch.Generator().manual_seed(3), **options))


def test_shards_and_images_come_in_the_order_of_the_folder(server: Counted, folder: ImageFolder) -> None:
    shards, images = Tar("s3://bucket/shards/*.tar", transform=EXACT), RemoteImages("s3://bucket/train", EXACT)
    assert len(shards.shards.paths) > 2
    assert images.classes == folder.classes
    expected = batches(DataLoader, folder)
    for dataset in (shards, images):
        assert same(batches(DALILoader, dataset), expected)
    assert same(batches(DataLoader, shards), expected)


def test_a_changed_shard_and_a_missing_object_are_named(server: Counted, folder: ImageFolder) -> None:
    store, shards = S3Store("bucket"), Tar("s3://bucket/shards/*.tar", transform=EXACT)
    first = shards.shards.paths[0]
    key = first.removeprefix("s3://bucket/")
    content = bytes(obstore.get(store, key).bytes())
    obstore.put(store, key, content[:-1] + b"\1")
    with pytest.raises(SampleError, match=f"{first}: it has changed since its index was made"):
        batches(DALILoader, shards)
    obstore.put(store, key, content)
    assert same(batches(DALILoader, shards), batches(DataLoader, folder))
    with pytest.raises(SampleError, match=r"s3://bucket/train/none.jpg.*there is no such object"):
        batches(DALILoader, RemoteImages([("s3://bucket/train/none.jpg", 0)], EXACT))


def test_commands_take_objects(server: Counted, folder: ImageFolder) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(commands(), arguments, terminal_width=500)
        return done.exit_code, done.output

    store, names = S3Store("bucket"), "s3://bucket/shards/*.tar"
    code, text = run("index", names)
    assert (code, text.startswith(f"{len(folder)} images in ")) == (0, True), text
    code, text = run("check", names)
    assert code == 0, text
    assert f"{len(folder)} images under {names}, no problems" in text
    content = bytes(obstore.get(store, Tar(names).shards.paths[1].removeprefix("s3://bucket/")).bytes())
    place = content.index(b"\xff\xd8\xff") + 600
    obstore.put(store, "damaged.tar", content[:place] + bytes(20) + content[place + 20 :])
    code, text = run("check", "s3://bucket/damaged.tar")
    assert code == 1, text
    assert "s3://bucket/damaged.tar, image 0 at byte 512  it cannot be decoded" in " ".join(text.split("\n"))
    code, text = run("index", "s3://bucket/none.tar")
    assert code == 2, text
    assert "there is no such object: 's3://bucket/none.tar'" in text


def test_an_interrupted_epoch_leaves_no_request(server: Counted, folder: ImageFolder) -> None:
    loader = DALILoader(RemoteImages("s3://bucket/train", EXACT), 2, device="cpu")
    server.is_held = True
    iterator: Any = iter(loader)
    iterator._pull(iterator._prefetcher)  # as next() does, which would wait
    wait_until(lambda: server.open > 4)
    del iterator
    gc.collect()
    wait_until(lambda: server.open == 0)
    time.sleep(0.2)  # a request that was sent before may still arrive
    server.is_held, before = False, server.total
    time.sleep(0.2)
    assert server.total == before


def wait_until(holds: Any) -> None:
    end = time.monotonic() + HELD / 2
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)

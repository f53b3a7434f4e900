"""The memory of the caches: what is in it, how much, and who is in its way while it is filled."""

from __future__ import annotations

import os

import pytest
import torch
from conftest import encoded as encoded_as
from helpers.cuts import CROPPED, PHOTOGRAPH, RESIZED, folder, loader_of, write
from PIL import Image

from torchdali.pipeline.cache import encoded as files_cache
from torchdali.pipeline.cache.decoded import DecodedCache
from torchdali.pipeline.cache.encoded import EncodedCache
from torchdali.pipeline.readers import FileReader, encoded

pytestmark = pytest.mark.timeout(120)


def test_files_in_several_pieces_of_memory(tmp_path, monkeypatch, device):
    monkeypatch.setattr(files_cache, "_BLOCK", 10_000)
    paths = folder(tmp_path, 24)
    loader = loader_of(tmp_path, CROPPED, 4, cache="host", device=device)
    expected = torch.cat([images.clone() for images, _ in loader])
    cache = loader._session.native_plan.cache
    assert 3 < len(cache._blocks) < 20
    for row, path in enumerate(paths):
        assert cache._find(row)[1].tobytes() == path.read_bytes()
    monkeypatch.setattr(files_cache, "read_file", lambda path: pytest.fail("read again"))
    assert torch.equal(torch.cat([images for images, _ in loader]), expected)
    loader.close()


@pytest.mark.parametrize("cache", ["host", "device"])
@pytest.mark.parametrize("touched", [False, True])
def test_a_file_that_was_rewritten_is_kept_as_what_it_is_now(cache, touched, tmp_path, monkeypatch, device):
    paths = folder(tmp_path, 8)
    loader = loader_of(tmp_path, CROPPED, 4, cache=cache, device=device)
    list(loader)
    os.utime(paths[3], (1, 1)) if touched else write(paths[3], 80, 112)
    expected = torch.cat([images.clone() for images, _ in loader])
    monkeypatch.setattr(EncodedCache, "_drop", lambda *_: pytest.fail("read anew"))
    monkeypatch.setattr(DecodedCache, "drop", lambda *_: pytest.fail("decoded anew"))
    assert torch.equal(torch.cat([images for images, _ in loader]), expected)
    loader.close()


def test_no_file_that_is_for_dali_is_decoded_by_pil(tmp_path, monkeypatch, device):
    folder(tmp_path, 8)
    monkeypatch.setattr(encoded, "decode_to_ppm", lambda data: pytest.fail("decoded by PIL"))
    loader = loader_of(tmp_path, CROPPED, 4, cache="host", device=device)
    assert [len(images) for _ in range(2) for images, _ in loader] == [4] * 4
    loader.close()


@pytest.mark.parametrize("left", [0, 1])
def test_files_that_fill_the_budget(left, tmp_path, monkeypatch, device):
    """To the last byte, or but for one."""
    monkeypatch.setattr(files_cache, "_BLOCK", 10_000)
    paths = [*folder(tmp_path, 3), tmp_path / "c" / "large.png"]
    PHOTOGRAPH.crop((0, 0, 120, 120)).save(paths[-1])
    lengths = [path.stat().st_size for path in paths]
    assert max(lengths[:3]) < sum(lengths[:3]) < 20_000 < lengths[3]
    loader = loader_of(tmp_path, CROPPED, 1, cache="host", cache_bytes=lengths[3] - left, device=device)
    loader.dataset.samples = loader.dataset.samples[3:]
    next(iter(loader))
    cache = loader._session.native_plan.cache
    assert cache._reserved == cache._used == (0 if left else lengths[3])
    loader.close()


@pytest.mark.parametrize("cache", ["host", "device"])
def test_a_process_that_is_forked_while_a_thread_fills_the_cache(cache, tmp_path):
    folder(tmp_path, 8)
    loader = loader_of(tmp_path, RESIZED, 4, cache=cache, device="cpu")
    next(iter(loader))
    with loader._session.cache._lock:
        loader._session.cache.renew()  # as in the child
        assert sum(len(images) for images, _ in loader) == 8
    loader.close()


@pytest.mark.parametrize("whole", [True, False])
def test_a_file_that_comes_in_parts(whole, tmp_path, monkeypatch):
    """Or that becomes shorter meanwhile."""
    (path,) = folder(tmp_path, 1)
    read, parts = os.readv, iter([100] * 1000 if whole else [100, 30, 0])
    monkeypatch.setattr(os, "readv", lambda file, buffers: read(file, [buffers[0][: next(parts)]]))
    data, modified = files_cache.read_file(str(path))
    assert data.tobytes() == path.read_bytes()[: None if whole else 130]
    assert modified == path.stat().st_mtime_ns


def test_what_is_kept_is_checked_and_not_the_file_once_more(tmp_path, monkeypatch):
    for path in folder(tmp_path, 4):
        with Image.open(path) as image:
            path.write_bytes(encoded_as(image, "JPEG") + b"more")
    monkeypatch.setattr(FileReader, "load", lambda self, row: pytest.fail("opened again"))
    loader = loader_of(tmp_path, CROPPED, 4, cache="host", device="cpu")
    assert [len(images) for images, _ in loader] == [4]
    loader.close()

"""Image files in shards, or from a source of the user's, are validated before DALI decodes them beside a GPU."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import skimage.data
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.transforms import v2

from torchdali import DALILoader
from torchdali.datasets import Tar
from torchdali.pipeline.feed import Prefetcher
from torchdali.pipeline.readers.header_reader import HeaderValidator
from torchdali.sources import InputKind, Source

CHAIN = v2.Compose([v2.ToImage(), v2.CenterCrop(20)])
REFUSED = "12.png"


def save(kind: str) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(skimage.data.coffee()).resize((40, 30)).save(stream, kind)
    return stream.getvalue()


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    files = {f"{i:02}.{kind.lower()}": save(kind) for i, kind in enumerate(["JPEG", "PNG", "GIF"] * 4)}
    files[REFUSED] = save("PNG")[:-12]  # PIL needs no last chunk
    return files


class OwnSource(Source):
    kind = InputKind.ENCODED

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.transform = list(files.values()), CHAIN

    def __len__(self) -> int:
        return len(self.files)

    def read(self, rows: Any) -> Any:
        return [self.files[row] for row in rows.tolist()]

    def target(self, row: int) -> int:
        return row

    def name(self, row: int) -> str:
        return f"row {row}"


class Own(Dataset[Any]):
    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def torchdali_source(self) -> Source:
        return OwnSource(self.files)


def make_tar(files: dict[str, bytes], folder: Path) -> Dataset[Any]:
    with tarfile.open(folder / "some.tar", "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return Tar(folder / "some.tar", image=("jpeg", "png", "gif"), label=None, transform=CHAIN)


def make_own(files: dict[str, bytes], folder: Path) -> Dataset[Any]:
    return Own(files)


@pytest.mark.parametrize("make", [make_tar, make_own])
def test_a_file_that_dali_refuses_is_left_to_pil(
    make: Callable[..., Dataset[Any]],
    files: dict[str, bytes],
    tmp_path: Path,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No batch is run twice for it, and no JPEG is asked about."""
    if device == "cpu":
        monkeypatch.setattr(HeaderValidator, "is_on", True)
    asked: list[bytes] = []
    find = HeaderValidator.find_refused

    def find_refused(self: HeaderValidator, contents: Any) -> list[int]:
        asked.extend(content.tobytes() for content in contents)
        return find(self, contents)

    monkeypatch.setattr(HeaderValidator, "find_refused", find_refused)
    monkeypatch.setattr(Prefetcher, "_run_again", lambda self, batch: pytest.fail("run twice"))
    names = list(files)
    loader = DALILoader(make(files, tmp_path), len(files), device=device)
    for _ in range(2):
        (batch,) = loader
        images = batch if isinstance(batch, torch.Tensor) else batch[0]
        refused = names.index(REFUSED)
        assert torch.equal(images[refused], images[names.index("01.png")])
    assert set(files.values()) >= set(asked) >= {files[name] for name in names if name.endswith("png")}
    assert not any(content.startswith(b"\xff\xd8") for content in asked)
    assert loader._session.native_plan is not None
    assert loader._session.native_plan.pool.plan.headers_validated


def test_the_pipelines_validate_where_nothing_else_does(files: dict[str, bytes]) -> None:
    loader = DALILoader(Own(files), len(files), device="cpu")
    assert len(list(loader)) == 1
    assert loader._session.native_plan is not None
    assert not loader._session.native_plan.pool.plan.headers_validated

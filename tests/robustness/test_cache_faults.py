"""With a cache, bad files, bad arguments and early ends have the same consequences as without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from conftest import PER_BATCH, assert_pairs, encoded, in_order
from helpers.damages import DAMAGES
from torchvision.datasets import ImageFolder

from torchdali import DALILoader, SampleError

pytestmark = pytest.mark.timeout(30)

BAD = 7
BATCH_OF_BAD = BAD // PER_BATCH

Load = Callable[..., DALILoader[Any]]


@pytest.fixture(params=["host", "device"])
def load(request: pytest.FixtureRequest) -> Load:
    """Make a loader with a cache."""

    def make(dataset: Any, batch_size: int = PER_BATCH, **options: Any) -> DALILoader[Any]:
        size = {} if "batch_sampler" in options else {"batch_size": batch_size}
        return DALILoader(dataset, cache=request.param, **{**size, "device": "cpu", **options})

    return make


def path_of(dataset: ImageFolder, index: int = BAD) -> Path:
    return Path(dataset.samples[index][0])


# Bad samples


@pytest.mark.parametrize("read_before", [False, True], ids=["never read", "read before"])
@pytest.mark.parametrize("damage", ["garbage", "truncated JPEG", "truncated PNG", "empty", "vanished"])
def test_a_damaged_file_is_named_in_its_turn(
    load: Load, fresh: ImageFolder, damage: str, read_before: bool, device: str
) -> None:
    loader, path = load(fresh, device=device), path_of(fresh)
    if read_before:
        assert_pairs(loader, fresh, in_order())
    content = path.read_bytes()
    DAMAGES[damage](path)
    for _ in range(2):
        iterator = iter(loader)
        assert_pairs((next(iterator) for _ in range(BATCH_OF_BAD)), fresh, in_order()[:BATCH_OF_BAD])
        with pytest.raises(SampleError) as caught:
            next(iterator)
        assert (caught.value.index, caught.value.path) == (BAD, str(path))
        assert_pairs(iterator, fresh, in_order()[BATCH_OF_BAD + 1 :])
    path.write_bytes(content)
    assert_pairs(loader, fresh, in_order())


# Odd files


@pytest.mark.parametrize("kind", ["GIF", "CMYK JPEG", "RGBA PNG"])
def test_an_odd_file_is_read_as_pil_reads_it(load: Load, fresh: ImageFolder, kind: str, device: str) -> None:
    mode, _, suffix = kind.rpartition(" ")
    with PIL.Image.open(path_of(fresh)) as image:
        path_of(fresh).write_bytes(encoded(image.convert(mode or "RGB"), suffix))
    loader = load(fresh, device=device)
    for _ in range(2):
        assert_pairs(loader, fresh, in_order())

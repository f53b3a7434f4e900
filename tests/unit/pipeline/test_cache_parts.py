"""The parts of the caches alone: where images lie in memory, where a plan is cut, how much memory there is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2

from torchdali.pipeline.cache.base import choose_budget
from torchdali.pipeline.cache.decoded import _length as length_of
from torchdali.pipeline.cache.split import split_plan
from torchdali.pipeline.cache.store import WORD, Store
from torchdali.pipeline.compile import compile_plan
from torchdali.runtime import machine
from torchdali.transforms import flatten
from torchdali.transforms.rng import Draws, epoch_key
from torchdali.transforms.spec import InputKind, Spec

pytestmark = pytest.mark.timeout(30)

MIB = 2**20


def made(words: list[int], first: int = 0) -> list[torch.Tensor]:
    """Images of these lengths; no two bytes-in-a-row of two of them are the same."""
    return [
        torch.from_numpy(np.random.default_rng(first + i).integers(256, size=length * WORD, dtype=np.uint8))
        for i, length in enumerate(words)
    ]


def moved(images: list[torch.Tensor], device: str) -> list[torch.Tensor]:
    return [image.to(device) for image in images]


def assert_gathered(
    store: Store,
    places: Any,
    images: list[torch.Tensor],
    others: list[torch.Tensor] | None = None,
) -> None:
    words = np.array([len(image) // WORD for image in images], np.int64)
    batch = store.gather(np.asarray(places, np.int64), words, moved(others or [], store.device.type)).cpu()
    assert batch.shape == (len(images), words.max() * WORD)
    for row, image in zip(batch, images, strict=True):
        assert torch.equal(row[: len(image)], image)


def test_images_of_any_length_come_back_in_any_order(device: str) -> None:
    words = np.random.default_rng(0).integers(1, 3000, 40).tolist()
    images = made(words)
    store = Store(torch.device(device), 64 * MIB, len(images))
    places = [*store.add(moved(images[:15], device), np.array(words[:15]))]
    places += [*store.add(moved(images[15:], device), np.array(words[15:]))]
    order = np.random.default_rng(1).integers(40, size=100).tolist()
    assert_gathered(store, [places[i] for i in order], [images[i] for i in order])
    assert store.used == sum(words) * WORD <= store.reserved


def test_images_of_one_length_come_as_one(device: str) -> None:
    images = made([70] * 9)
    store = Store(torch.device(device), MIB, 9)
    places = store.add(torch.stack(moved(images, device)), np.array([70] * 9))
    assert_gathered(store, places[::-1], images[::-1])


def test_blocks_are_added_where_more_comes_than_was_expected(device: str) -> None:
    words = [5000] * 60
    images = made(words)
    store = Store(torch.device(device), 64 * MIB, 4)
    places = np.concatenate([store.add(moved(images[i : i + 4], device), np.array(words[:4])) for i in range(0, 60, 4)])
    assert len(places) == 60
    assert 1 < len(store._blocks) < 6
    assert_gathered(store, places[::-7], images[::-7])


def test_long_image_beside_the_last_one_of_a_block(device: str) -> None:
    """The window of the longest image, laid on the last one, would leave the block."""
    words = [1000] * 131 + [60_000]
    images = made(words)
    store = Store(torch.device(device), 16 * MIB, 1)
    places = [*store.add(moved(images[:131], device), np.array(words[:131]))]
    places += [*store.add(moved(images[131:], device), np.array(words[131:]))]
    assert len(store._blocks) == 2
    assert len(store._blocks[0]) - places[130] < 60_000
    assert_gathered(store, [places[130], places[131], places[0]], [images[130], images[131], images[0]])


def test_what_has_no_room_is_gathered_beside_what_is_kept(device: str) -> None:
    words = [4000] * 40
    images = made(words)
    store = Store(torch.device(device), MIB, 40)
    places = store.add(moved(images, device), np.array(words))
    assert 0 < len(places) < 40
    assert store.reserved <= MIB
    assert len(store.add(moved(images[:1], device), np.array([4000]))) == 0
    passing = images[len(places) :]
    order = [39, 0, 5, 38, len(places)]
    numbers = [places[i] if i < len(places) else -1 - (i - len(places)) for i in order]
    assert_gathered(store, numbers, [images[i] for i in order], passing)
    assert_gathered(store, [-2], passing[1:2], passing)


def test_what_is_taken_grows_with_what_came(device: str) -> None:
    """Where more comes than was expected: in few blocks, and not for much more than there is."""
    store = Store(torch.device(device), 256 * MIB, 10)
    images = moved(made([20_000] * 5), device)
    for _ in range(10):
        assert len(store.add(images, np.array([20_000] * 5))) == 5
    assert len(store._blocks) == 4
    assert store.used <= store.reserved < 2 * store.used


def test_large_image_after_small_ones(device: str) -> None:
    store = Store(torch.device(device), 256 * MIB, 11)
    places = [*store.add(moved(made([10] * 9), device), np.array([10] * 9))]
    words = [2 * MIB // WORD] * 2
    images = made(words)
    places += [*store.add(moved(images, device), np.array(words))]
    assert len(places) == 11
    assert_gathered(store, places[-2:], images)


def test_budget_is_used_to_the_last_word(device: str) -> None:
    """But for the longest image once more, whose window must not leave the block."""
    words = [MIB // WORD] * 10
    images = made(words)
    for count in (1, 10):
        store = Store(torch.device(device), (count + 1) * MIB, 10)
        assert len(store.add(moved(images, device), np.array(words))) == count
        assert store.reserved == (count + 1) * MIB


def test_closed_store_takes_no_memory_and_gives_nothing(device: str) -> None:
    images = made([100, 200])
    store = Store(torch.device(device), MIB * 4, 2)
    places = store.add(moved(images, device), np.array([100, 200]))
    store.close()
    assert len(store.add(moved(images, device), np.array([100, 200]))) == 0
    assert store.reserved == 0
    with pytest.raises(RuntimeError, match="closed"):
        store.gather(places, np.array([100, 200]), [])
    assert_gathered(store, [-2, -1], images[::-1], images)


def test_nothing_fits(device: str) -> None:
    images = made([100, 200])
    store = Store(torch.device(device), 500, 2)
    assert len(store.add(moved(images, device), np.array([100, 200]))) == 0
    assert store.reserved == 0
    assert_gathered(store, [-2, -1], images[::-1], images)


def test_memory_that_cannot_be_had_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("no memory")

    images = made([100, 200])
    store = Store(torch.device("cpu"), MIB, 2)
    monkeypatch.setattr(torch, "empty", fail)
    assert len(store.add(images, np.array([100, 200]))) == 0
    monkeypatch.undo()
    assert len(store.add(images, np.array([100, 200]))) == 0
    assert_gathered(store, [-1, -2], images, images)


# The cut


HEADS: list[tuple[list[Any], int]] = [
    ([], 0),
    ([v2.ToImage()], 0),
    ([v2.ToImage(), v2.Resize(40), v2.CenterCrop(32), v2.RandomHorizontalFlip()], 3),
    ([v2.Resize((50, 60)), v2.RandomCrop(32), v2.Resize(20)], 1),
    ([v2.RandomHorizontalFlip(), v2.Resize(40)], 0),
    ([v2.Grayscale(1), v2.Resize(40), v2.RandomCrop(32)], 2),
    ([v2.Pad(4), v2.RandomCrop(32)], 0),
    ([v1.ToTensor(), v2.Resize(40), v2.CenterCrop(30)], 0),
    ([v2.Resize(40), v1.ToTensor(), v2.CenterCrop(30)], 1),
    ([v2.Resize(40), v2.Lambda(abs), v2.CenterCrop(30)], 1),
    ([v2.CenterCrop(30), v2.RandomApply([v2.Resize(40)]), v2.Resize(20)], 1),
]


@pytest.mark.parametrize(("chain", "length"), HEADS, ids=[str(i) for i in range(len(HEADS))])
def test_a_plan_is_cut_before_the_first_draw(chain: list[Any], length: int) -> None:
    leaves = flatten(v2.Compose(chain)) if chain else []
    plan = compile_plan(leaves, torch.device("cpu"), "exact")
    head, rest, transforms = split_plan(plan, leaves, Spec())
    assert list(transforms) == leaves[:length]
    assert (head.input_kind, rest.input_kind, head.spec.dtype) == (InputKind.FILES, InputKind.PACKED, torch.uint8)
    assert not head.is_random
    assert rest.spec == plan.spec


def test_the_rest_draws_what_the_whole_draws() -> None:
    leaves = [v2.ToImage(), v2.Resize((40, 40)), v2.RandomCrop(32), v2.RandomHorizontalFlip(), v2.ColorJitter(0.5)]
    plan = compile_plan(leaves, torch.device("cpu"), "exact")
    _, rest, _ = split_plan(plan, leaves, Spec())
    rows = np.arange(9)
    draws = Draws(epoch_key(1, 2), rows, np.zeros_like(rows))
    ours = rest.draw(draws, np.full((9, 2), 40))[1][1:]
    theirs = plan.draw(draws, np.full((9, 2), 100))[1][2:]
    assert len(ours) == len(theirs) == 3
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)


# What the control group grants


def version_2(root: Path, most: str) -> None:
    (root / "memory.max").write_text(f"{most}\n")
    (root / "memory.current").write_text("600\n")
    (root / "memory.stat").write_text("anon 1\ninactive_file 100\n")


def version_1(root: Path, most: str) -> None:
    (root / "memory").mkdir()
    (root / "memory/memory.limit_in_bytes").write_text(f"{most}\n")
    (root / "memory/memory.usage_in_bytes").write_text("600\n")
    (root / "memory/memory.stat").write_text("inactive_file 3\ntotal_inactive_file 100\n")


@pytest.mark.parametrize(
    ("make", "most", "left"),
    [
        (version_2, "1000", [500]),
        (version_2, "max", []),
        (version_1, "1000", [500]),
        (lambda root, most: None, "", []),
    ],
    ids=["version 2", "no limit", "version 1", "none"],
)
def test_limit_of_a_control_group(
    tmp_path: Path, make: Callable[[Path, str], None], most: str, left: list[int]
) -> None:
    make(tmp_path, most)
    assert machine._cgroup_memory(tmp_path) == left


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
    ids=["version 2", "version 2, no limit", "version 1", "version 1, no limit", "none"],
)
def test_cores_of_a_control_group(tmp_path: Path, files: dict[str, str], cores: float | None) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert machine._cgroup_quota(tmp_path) == cores


def test_half_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "measure_available_memory", lambda: 1001)
    assert choose_budget(torch.device("cpu")) == 500


@pytest.mark.parametrize(("sampler", "length"), [(range(9), 9), (range(600), 24), (iter(range(9)), 24), (None, 24)])
def test_no_more_images_are_expected_than_there_are_files(sampler: Any, length: int) -> None:
    assert length_of(sampler, 24) == length


def test_memory_of_this_process() -> None:
    assert 2**20 < machine.measure_available_memory() < 2**50

"""Files in larger arrays are given to DALI as words of 8 bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from torchdali.pipeline import words
from torchdali.pipeline.words import WordTensors
from torchdali.samples.image import encode_ppm
from torchdali.sources.places import WORD, Bytes, Places, join


def cut(tensors: WordTensors, places: Places) -> list[Bytes]:
    """Return the bytes that DALI cuts out."""
    arrays, begins, counts = tensors.cut(places)
    assert begins.shape == counts.shape == (len(arrays), 1)
    pairs = zip(arrays, begins[:, 0].tolist(), counts[:, 0].tolist(), strict=True)
    for array, begin, count in zip(arrays, begins, counts, strict=True):
        assert begin + count <= len(array)  # DALI refuses more
    return [array[begin : begin + count].view(np.uint8) for array, begin, count in pairs]


@pytest.fixture
def made() -> list[Any]:
    return []


@pytest.fixture
def tensors(made: list[Any]) -> WordTensors:
    def make(array: Any) -> Any:
        made.append(array)
        return array

    return WordTensors(make)


def make_places(size: int, count: int, seed: int = 0) -> Places:
    rng = np.random.default_rng(seed)
    arrays = [rng.integers(0, 256, size + i, np.uint8) for i in range(3)]
    starts = rng.integers(0, size, count)
    lengths = rng.integers(1, size - starts + 1)
    starts[0], lengths[0] = 0, size  # the whole of an array
    starts[1], lengths[1] = size - 1, 1
    return Places([arrays[0], arrays[0], *(arrays[i % 3] for i in range(count - 2))], starts, lengths)


@pytest.mark.parametrize("size", [5, 8, 64, 1001])
def test_files_begin_and_end_anywhere_in_their_array(tensors: WordTensors, size: int) -> None:
    places = make_places(size, 200)
    assert {*(places.starts % 8).tolist()} == {*range(min(size, 8))}
    for got, file in zip(cut(tensors, places), places.views(), strict=True):
        np.testing.assert_array_equal(got[: len(file)], file)
        assert len(got) - len(file) < 8


def test_an_array_has_one_tensor_for_each_remainder(tensors: WordTensors, made: list[Any]) -> None:
    places = make_places(10_000, 300)._replace(lengths=np.full(300, 3), starts=np.arange(300))
    cut(tensors, places)
    assert len(made) == 3 * 8
    cut(tensors, places)
    assert len(made) == 3 * 8


@pytest.mark.parametrize("size", [13, 16])
def test_what_passes_is_not_kept(tensors: WordTensors, made: list[Any], size: int) -> None:
    array = np.arange(size, dtype=np.uint8)
    for _ in range(2):
        (got,) = cut(tensors, join(1, [], {0: array}))
        np.testing.assert_array_equal(got[:size], array)
    assert len(made) == 2
    assert all(np.shares_memory(one, array) is (size == 16) for one in made), "whole words need no copy"


def test_images_of_pil_are_whole_words() -> None:
    for side in range(1, 9):
        assert not len(encode_ppm(Image.new("RGB", (side, 5)))) % WORD


def test_few_tensors_are_kept(tensors: WordTensors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "_MAX_TENSORS", 5)
    places = make_places(1000, 50)
    for got, file in zip(cut(tensors, places), places.views(), strict=True):
        np.testing.assert_array_equal(got[: len(file)], file)
    assert len(tensors._tensors) <= 5


def test_files_of_a_batch_come_from_several_places() -> None:
    places = make_places(100, 6)
    own, other = np.array([4, 0, 2]), np.array([5, 1])
    parts = [
        (rows, Places([places.arrays[i] for i in rows], places.starts[rows], places.lengths[rows]))
        for rows in (own, other)
    ]
    whole = join(6, parts, {3: np.arange(9, dtype=np.uint8)})
    for i, (got, file) in enumerate(zip(whole.views(), places.views(), strict=True)):
        np.testing.assert_array_equal(got, np.arange(9) if i == 3 else file)
    assert whole.passing == {3}
    part = whole._replace(arrays=whole.arrays[2:4], starts=whole.starts[2:4], lengths=whole.lengths[2:4])
    part = part._replace(passing=frozenset({1}))
    assert join(8, [(np.array([6, 5]), part)], {0: np.arange(3, dtype=np.uint8)}).passing == {0, 5}

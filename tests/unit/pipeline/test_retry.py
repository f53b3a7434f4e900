"""Bad samples that are left out or replaced, on a prefetcher of integers."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from torchdali.errors import SampleError
from torchdali.pipeline.feed import Batch
from torchdali.pipeline.readers import Reader
from torchdali.pipeline.retry import RetryingPrefetcher
from torchdali.samples.on_error import SIZE, ErrorPolicy
from torchdali.transforms import SampleTransformError


class Numbers(Reader):
    """Samples are their own rows; some cannot be read until they are replaced."""

    def __init__(self, *unreadable, sizes=None):
        self.unreadable, self.known_sizes = set(unreadable), sizes or {}
        self.replaced = {}

    def error(self, row, reason):
        return SampleError(row, f"{row}.jpg", reason)

    def read_size(self, row):
        return self.known_sizes.get(row)

    def substitute_black(self, row, size):
        self.replaced[row] = size
        self.unreadable.discard(row)


class Queue:
    """A prefetcher that gives back what was put, or the error of its first unreadable sample."""

    def __init__(self):
        self.batches, self.ended, self.closed = deque(), False, False

    def __len__(self):
        return len(self.batches)

    def put(self, batch):
        self.batches.append(batch)

    def get(self):
        batch = self.batches.popleft()
        for row in batch.rows.tolist():
            if row in batch.reader.unreadable:
                raise batch.reader.error(row, "damaged")
        return batch

    def close(self):
        self.closed = True

    def end(self):
        self.ended = True


def retrying(mode="skip", limit=None):
    """One with its main queue, and the list of those that it makes beside it."""
    main, beside = Queue(), []

    def another():
        beside.append(Queue())
        return beside[-1]

    return RetryingPrefetcher(main, another, ErrorPolicy(mode, limit)), main, beside


def batch(source, *rows):
    return Batch(source, SimpleNamespace(), np.array(rows), SimpleNamespace())


def rows_of(feed, *batches):
    for one in batches:
        feed.put(one)
    return [feed.get().rows.tolist() for _ in batches]


def test_good_batches_pass_in_order():
    source = Numbers()
    feed, _, beside = retrying()
    assert rows_of(feed, batch(source, 0, 1), batch(source, 2, 3)) == [[0, 1], [2, 3]]
    assert not beside


@pytest.mark.parametrize(
    ("unreadable", "rows", "expected"),
    [
        ((1,), (0, 1, 2), [0, 2, 2]),
        ((2,), (0, 1, 2), [0, 1, 0]),
        ((0, 1), (0, 1, 2, 3), [2, 2, 2, 3]),
        ((5,), (5, 4, 5), [4, 4, 4]),
    ],
)
def test_the_next_good_sample_of_the_batch_takes_the_place_of_a_bad_one(unreadable, rows, expected):
    source = Numbers(*unreadable)
    feed, _, _ = retrying()
    assert rows_of(feed, batch(source, *rows)) == [expected]
    assert source.bad_rows == set(unreadable)


def test_later_batches_are_put_without_samples_that_are_known_to_be_bad():
    source = Numbers(1)
    feed, main, beside = retrying()
    rows_of(feed, batch(source, 0, 1))
    feed.put(batch(source, 1, 2))
    assert main.batches[0].rows.tolist() == [2, 2]
    assert len(beside) == 1, "one is made, and used again"


def test_batches_in_flight_keep_their_places():
    source = Numbers(1)
    feed, _, _ = retrying()
    assert rows_of(feed, batch(source, 0, 1), batch(source, 2, 3), batch(source, 1, 4)) == [[0, 0], [2, 3], [4, 4]]


def test_a_batch_without_a_good_sample_is_an_error():
    feed, _, _ = retrying()
    feed.put(batch(Numbers(0, 1), 0, 1))
    with pytest.raises(SampleError, match="no other sample of its batch"):
        feed.get()


def test_with_replace_rows_stay_and_images_are_made_in_a_size_of_the_batch():
    source = Numbers(1, 2, sizes={2: (30, 40), 0: (50, 60)})
    feed, _, _ = retrying("replace")
    assert rows_of(feed, batch(source, 0, 1, 2)) == [[0, 1, 2]]
    assert source.replaced == {1: (30, 40), 2: (30, 40)}
    lonely = Numbers(7)
    assert rows_of(feed, batch(lonely, 7)) == [[7]]
    assert lonely.replaced == {7: SIZE}


def test_one_more_than_max_errors_is_raised():
    source = Numbers(1, 3)
    feed, _, _ = retrying(limit=1)
    feed.put(batch(source, 0, 1))
    feed.put(batch(source, 2, 3))
    assert feed.get().rows.tolist() == [0, 0]
    with pytest.raises(SampleError, match="max_errors=1"):
        feed.get()


def test_other_errors_are_raised_as_they_are():
    """Of a transform that fails, and of anything that is not about one sample."""
    feed, main, beside = retrying()
    of_transform = SampleError(0, "", "too small")
    of_transform.__cause__ = SampleTransformError(0, "too small")
    for error in (of_transform, RuntimeError("DALI")):

        def fail(error=error):
            raise error

        main.get = fail
        feed.put(batch(Numbers(), 0))
        with pytest.raises(type(error)) as raised:
            feed.get()
        assert raised.value is error
    assert not beside


def test_the_same_sample_is_given_up_once():
    """An error that names it again cannot be helped, and must not be tried for ever."""
    source, tries = Numbers(1), iter(range(3))
    source.substitute_black = lambda row, size: next(tries)
    feed, _, _ = retrying("replace")
    feed.put(batch(source, 0, 1))
    with pytest.raises(SampleError, match="damaged"):
        feed.get()


def test_what_is_no_error_of_a_sample_passes_through_a_second_run():
    """The iterator ends the epoch by it."""
    source = Numbers(1)
    feed, _, beside = retrying()
    rows_of(feed, batch(source, 1, 2))

    def interrupted():
        raise KeyboardInterrupt

    beside[0].get = interrupted
    source.unreadable.add(3)
    feed.put(batch(source, 3, 4))
    with pytest.raises(KeyboardInterrupt):
        feed.get()


def test_closing_closes_both():
    feed, main, beside = retrying()
    rows_of(feed, batch(Numbers(1), 1, 2))
    feed.end()
    assert main.ended
    assert main.closed
    assert beside[0].closed

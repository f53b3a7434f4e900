"""What the feed knows of files, and what happens when they change."""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import pytest
import skimage.data
import torch
from helpers.cover import cover_pairs
from PIL import Image
from torch.utils.data import DataLoader, RandomSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from torchdali import DALILoader, SampleError
from torchdali.pipeline.engine import PipelineRunner
from torchdali.pipeline.feed import Prefetcher
from torchdali.transforms.occurrences import DenseOccurrences, Occurrences
from torchdali.workers.packed import Packed
from torchdali.workers.sample_keys import SampleKeys

CROPPED = v2.Compose([v2.ToImage(), v2.RandomCrop(40)])


def test_a_file_that_is_replaced_by_a_smaller_picture_is_read_anew(fresh_pictures, device):
    dataset = ImageFolder(fresh_pictures, CROPPED)
    loader = DALILoader(dataset, batch_size=4, device=device, seed=0)
    list(loader)
    path, small = dataset.samples[2][0], Image.fromarray(skimage.data.coffee()).resize((41, 42))
    small.save(path, "PNG")
    whole = F.pil_to_tensor(small)
    windows = [whole[:, top : top + 40, left : left + 40] for top in range(3) for left in range(2)]
    for _ in range(3):
        found = next(iter(loader))[0][2].cpu()
        assert any(torch.equal(found, window) for window in windows)
    Image.fromarray(skimage.data.coffee()).resize((30, 30)).save(path, "PNG")
    with pytest.raises(SampleError, match=r"transform 2, RandomCrop.*pad_if_needed") as raised:
        list(loader)
    assert raised.value.path == path


def test_what_dali_is_fed_is_kept_until_it_was_read(pictures, monkeypatch):
    """For it is not copied."""
    submit, take = PipelineRunner.submit, PipelineRunner.take
    fed, kept, in_flight = deque(), [], []

    def feed(engine, images, *others):
        fed.append(weakref.ref(images))
        submit(engine, images, *others)
        in_flight.append(engine.in_flight)

    def taken(engine, *timeout):
        kept.append(fed.popleft()() is not None)
        return take(engine, *timeout)

    monkeypatch.setattr(PipelineRunner, "submit", feed)
    monkeypatch.setattr(PipelineRunner, "take", taken)
    list(DALILoader(ImageFolder(pictures, CROPPED), batch_size=2, num_workers=1, prefetch_factor=3, device="cpu"))
    assert kept == [True] * 12
    assert max(in_flight) == 3, "as many batches as prefetch_factor says"


def test_only_the_file_that_dali_refuses_is_left_to_pil(pictures, monkeypatch):
    """From then on, by the loader that found out."""
    dataset, submit = ImageFolder(pictures, CROPPED), PipelineRunner.submit

    def refuse(engine, images, *others):
        if any(dataset.samples[5][0].encode() in row.tobytes() for row in images):
            raise RuntimeError("DALI does not like it")
        submit(engine, images, *others)

    monkeypatch.setattr(PipelineRunner, "submit", refuse)
    loader = DALILoader(dataset, batch_size=8, seed=1, device="cpu")
    assert [len(images) for images, _ in loader] == [8, 8, 8]
    assert loader._session.reader.find_pil_only(np.arange(24)).tolist() == [5]
    monkeypatch.setattr(Prefetcher, "_run_again", lambda self, batch: pytest.fail("run twice"))
    assert [len(images) for images, _ in loader] == [8, 8, 8]


def test_keys_that_were_passed_over_are_counted_whatever_they_are():
    some = [1, np.int64(1), True, torch.tensor(1), 2**70, "a", (1, 2), -(2**70)]
    asked, passed = (SampleKeys(is_batched=True, is_stream=False, has_workers=False) for _ in range(2))
    asked.remember(0, some)
    asked.make_batch_keys(Packed(None, len(some), task=0))
    passed.fast_forward([some])
    for one in (asked, passed):
        one.remember(1, some)
    again, found = (one.make_batch_keys(Packed(None, len(some), task=1)) for one in (asked, passed))
    assert again.occurrence.tolist() == found.occurrence.tolist() == [4, 5, 6, 7, 1, 1, 1, 1]


@pytest.mark.parametrize("occurrences", [Occurrences(), DenseOccurrences(8)], ids=["sparse", "dense"])
def test_occurrences_are_counted_within_and_across_batches(occurrences):
    counts = [occurrences.count(index).tolist() for index in np.array([[3, 5, 3, 3], [5, 1, 3, 5]])]
    assert counts == [[0, 0, 1, 2], [1, 0, 3, 2]]


def test_occurrences_that_are_passed_over_are_counted():
    rng = np.random.default_rng(0)
    batches = [rng.integers(0, 9, 40) ** 3 // 64 for _ in range(30)]  # of 8 there are few, of 0 several hundred
    for passed in (0, 3, 25):
        asked, over = [(Occurrences(), Occurrences()), (DenseOccurrences(9), DenseOccurrences(9))], []
        for one, other in asked:
            for batch in batches[:passed]:
                one.count(batch.tolist() if isinstance(one, Occurrences) else batch)
            if isinstance(other, DenseOccurrences):
                each = np.concatenate([np.empty(0, np.int64), *batches[:passed]])
                each -= 9 * (each % 2)
                other.fast_forward([[*each[::2].tolist(), -10, 9], each[1::2]])
            else:
                other.fast_forward(batches[: passed // 2])
                other.fast_forward(batches[passed // 2 : passed])
            given = [batch.tolist() if isinstance(one, Occurrences) else batch for batch in batches[passed:]]
            over.append([one.count(batch).tolist() for batch in given])
            assert [other.count(batch).tolist() for batch in given] == over[-1]
        assert over[0] == over[1]
        assert max(map(max, over[0])) > 255


@pytest.mark.timeout(60)
def test_a_sampler_is_asked_as_far_ahead_as_by_dataloader(pictures):
    dataset, states = ImageFolder(pictures, CROPPED), []
    for kind, options in ((DataLoader, {}), (DALILoader, {"device": "cpu"})):
        generator = torch.Generator().manual_seed(7)
        sampler = RandomSampler(dataset, replacement=True, num_samples=100, generator=generator)  # draws 32 at once
        iterator = iter(kind(dataset, 1, sampler=sampler, num_workers=2, prefetch_factor=20, **options))
        next(iterator)
        del iterator
        states.append(generator.get_state().tolist())
    assert states[0] == states[1]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("taken", "workers", "replacement"), cover_pairs([0, 1, 3], [0, 2], [False, True]))
@pytest.mark.slow
def test_an_epoch_left_early_leaves_the_generator_as_dataloader_would(pictures, taken, workers, replacement):
    dataset = ImageFolder(pictures, CROPPED)
    dataset.samples = [(path, i) for i, (path, _) in enumerate(dataset.samples)]
    orders = []
    for kind in (DataLoader, DALILoader):
        generator = torch.Generator().manual_seed(7)
        sampler = RandomSampler(dataset, replacement=replacement, generator=generator)
        options = {"device": "cpu"} if kind is DALILoader else {}
        loader = kind(dataset, 5, sampler=sampler, num_workers=workers, generator=generator, **options)
        order = []
        for _ in range(3):
            iterator = iter(loader)
            order += [next(iterator)[1].tolist() for _ in range(taken)]
            del iterator
            order.append(generator.get_state().tolist())
        order += [labels.tolist() for _, labels in loader]
        orders.append(order)
    assert orders[0] == orders[1]


def test_few_batches_are_scheduled_before_the_first_is_returned(pictures, monkeypatch):
    """For someone may want to look at one batch alone."""
    submit, runners = PipelineRunner.submit, []

    def note(runner, *args):
        runners.append(runner)
        return submit(runner, *args)

    loader = DALILoader(ImageFolder(pictures, CROPPED), batch_size=2, device="cpu")
    list(loader)  # the headers are known then, so that no batch waits for them
    monkeypatch.setattr(PipelineRunner, "submit", note)
    iterator = iter(loader)
    in_flight = [(next(iterator), runners[-1].in_flight)[1] for _ in range(6)]
    assert in_flight == [3, 6, 6, 6, 6, 6]

"""Batches share DALI's memory and own it; on a GPU they follow torch's streams."""

from __future__ import annotations

import gc

import numpy as np
import nvidia.dali.fn
import pytest
import torch
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader
from torchdali.pipeline import dlpack

CHAIN = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(64), v2.ToDtype(torch.float32, scale=True)])
DETERMINISTIC = v2.Compose([v2.ToImage(), v2.Resize((256, 256)), v2.ToDtype(torch.float32, scale=True)])


def loader(pictures, device, transform=CHAIN, **options):
    return DALILoader(ImageFolder(pictures, transform), device=device, seed=0, **{"batch_size": 6} | options)


def test_fifty_held_batches_never_change(pictures, device):
    one = loader(pictures, device)
    held = []
    while len(held) < 50:
        for images, labels in one:
            held.append((images, images.clone(), labels, labels.clone()))
            if len(held) % 7 == 0:
                break
    del one
    gc.collect()
    list(loader(pictures, device))
    assert len({images.data_ptr() for images, *_ in held}) == len(held)
    for images, images_then, labels, labels_then in held:
        assert torch.equal(images, images_then)
        assert torch.equal(labels, labels_then)


def test_single_images_own_their_memory_too(pictures, device):
    transform = v2.Compose([v2.ToImage(), v2.Resize(40)])
    held = []
    for _ in range(4):
        for images, _ in loader(
            pictures, device, transform, collate_fn=lambda samples: tuple(zip(*samples, strict=True))
        ):
            held += [(image, image.clone()) for image in images]
    assert len({tuple(image.shape) for image, _ in held}) > 1
    assert all(torch.equal(image, then) for image, then in held)


def test_bytes_of_any_length_are_parts_of_one_tensor(device):
    """As the cache of decoded images is given them; DALI takes its time for each tensor that is handed over."""
    rng = np.random.default_rng(0)
    given = [rng.integers(0, 256, length, np.uint8) for length in (48, 1, 300, 16)]
    pipeline = nvidia.dali.Pipeline(
        len(given), 1, 0 if device == "cuda" else None, prefetch_queue_depth=1, exec_dynamic=True
    )
    with pipeline:
        node = nvidia.dali.fn.external_source(name="given", ndim=1)
        pipeline.set_outputs(
            nvidia.dali.fn.pad(node.gpu() if device == "cuda" else node, axes=[0], shape=[1], align=[16])
        )
    pipeline.feed_input("given", given)
    pipeline.schedule_run()
    stream = dlpack.get_stream(torch.device(device))
    (outputs,) = pipeline.share_outputs(stream)
    parts = dlpack.to_torch(outputs, stream)
    pipeline.release_outputs()
    del outputs, pipeline
    gc.collect()
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert [len(part) for part in parts] == [48, 16, 304, 16]
    for part, true in zip(parts, given, strict=True):
        assert part.cpu().numpy()[: len(true)].tolist() == true.tolist()


def test_batches_may_be_changed_in_place(pictures, device):
    one = loader(pictures, device)
    expected = [images.clone() for images, _ in loader(pictures, device)]
    for (images, _), clean in zip(one, expected, strict=True):
        assert torch.equal(images, clean)
        images.fill_(7)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
def test_no_batch_is_copied_on_the_device(pictures):
    one = loader(pictures, "cuda", batch_size=20)
    list(one)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        taken = [images for images, _ in one]
        torch.cuda.synchronize()
    assert taken[0].is_cuda
    names = [event.key for event in profile.key_averages()]
    assert any("HtoD" in name for name in names), names  # the profiler does see copies
    assert not any("DtoD" in name for name in names), names


@pytest.mark.gpu
def test_a_consumer_on_a_side_stream_reads_whole_batches(pictures):
    expected = [images.clone() for images, _ in loader(pictures, "cuda", DETERMINISTIC)]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for _ in range(5):
        with torch.cuda.stream(side):
            found = [images * 1 for images, _ in loader(pictures, "cuda", DETERMINISTIC)]
        side.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.gpu
def test_a_dropped_batch_is_not_reused_before_its_reader_ran(pictures):
    expected = [images.sum().item() for images, _ in loader(pictures, "cuda", batch_size=4)]
    sums = []
    for images, _ in loader(pictures, "cuda", batch_size=4):
        torch.cuda._sleep(20_000_000)  # the reader below is still queued when the next batches are made
        sums.append(images.sum())
        del images
    assert [one.item() for one in sums] == pytest.approx(expected, rel=1e-6)


@pytest.mark.gpu
def test_the_host_does_not_wait_for_the_consumers_stream(pictures):
    one = loader(pictures, "cuda", batch_size=4)
    list(one)
    iterator = iter(one)
    next(iterator)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    still_busy = torch.cuda.Event()
    still_busy.record()
    next(iterator)
    assert not still_busy.query()
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_auto_is_the_current_device(pictures):
    images, labels = next(iter(loader(pictures, "auto")))
    assert images.device == labels.device == torch.device("cuda", torch.cuda.current_device())

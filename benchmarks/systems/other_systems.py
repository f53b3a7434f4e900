"""Systems other than torchdali, DALI by hand and DataLoader, each as its documentation uses it.

Their work and their batches are those of `systems`. SPDL and FFCV are measured if they are installed. FFCV reads its
own file format, which is written when the system is built.
"""

import os
import weakref
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from benchmarks.systems.systems import (
    MEAN,
    SIZE,
    STD,
    Epoch,
    Job,
    add_normalize,
    add_random_crop,
    decode,
    has_gpu,
    make_epoch,
    make_sampler,
    make_transforms,
)

if TYPE_CHECKING:
    import torch


# DALI's proxy


def dali_proxy(job: Job) -> Epoch:
    """DALI's own proxy as in its documentation for an image folder, with the JPEG engine set as in DALI tuned.

    It gets half as many workers as cores, which was better on 16 cores in `benchmarks.suite.proxy`.
    """
    from nvidia.dali import fn, pipeline_def
    from nvidia.dali.plugin.pytorch.experimental import proxy
    from torchvision.datasets import ImageFolder

    gpu = has_gpu()
    options = {"batch_size": job.batch_size, "num_threads": job.threads, "device_id": 0 if gpu else None}

    @pipeline_def(**options, prefetch_queue_depth=2 * job.threads, seed=12)
    def pipeline() -> Any:
        encoded = fn.io.file.read(fn.external_source(name="images", no_copy=True))
        images = add_random_crop(encoded, {"hw_decoder_load": 1.0} if gpu else {})
        return add_normalize(fn.resize(images, resize_x=SIZE, resize_y=SIZE))

    server = proxy.DALIServer(pipeline())
    dataset = ImageFolder(job.root, transform=server.proxy, loader=encode_path)
    loader = proxy.DataLoader(
        server,
        dataset,
        batch_size=job.batch_size,
        sampler=make_sampler(dataset, job.passes),
        drop_last=True,
        num_workers=job.threads,
        persistent_workers=True,
        multiprocessing_context="fork",  # it cannot be pickled
    )
    server.start_thread()
    epoch = make_epoch(loader)
    weakref.finalize(epoch, server.stop_thread)  # Python waits for its thread at exit
    return epoch


def encode_path(path: str) -> Any:
    """Encode a path for DALI's operators."""
    import numpy as np

    return np.frombuffer(path.encode(), dtype=np.int8)


# Images of different sizes, from workers to the GPU


def pack(samples: list[Any]) -> tuple["torch.Tensor", list[Any], "torch.Tensor"]:
    """Pack tensors of different shapes into one flat tensor. Return it with the shapes and the labels."""
    import torch

    flat = torch.cat([image.reshape(-1) for image, _ in samples])
    return flat, [image.shape for image, _ in samples], torch.tensor([label for _, label in samples])


def unpack(flat: "torch.Tensor", shapes: list[Any]) -> list["torch.Tensor"]:
    """Return the tensors of a packed batch, without a copy."""
    ends = list(accumulate(shape.numel() for shape in shapes))
    starts = [0, *ends[:-1]]
    return [flat[start:end].view(shape) for start, end, shape in zip(starts, ends, shapes, strict=True)]


def _load_unequal(job: Job, load: Any) -> Any:
    """Return a DataLoader of images that `load` makes from paths, in worker processes."""
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    dataset = ImageFolder(job.root, loader=load)
    return DataLoader(
        dataset,
        batch_size=job.batch_size,
        sampler=make_sampler(dataset, job.passes),
        drop_last=True,
        num_workers=job.threads,
        collate_fn=pack,
        pin_memory=has_gpu(),
        persistent_workers=True,
    )


def torchvision_cuda(job: Job) -> Epoch:
    """Workers read files; torchvision decodes the whole batch on CUDA, and transforms it image by image on CUDA."""
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms import v2

    steps = make_transforms(job.data).transforms
    by_image, by_batch = v2.Compose(steps[1:3]), v2.Compose(steps[3:])
    loader = _load_unequal(job, read)

    def epoch() -> Iterator[Any]:
        for flat, shapes, labels in loader:
            images = decode_jpeg(unpack(flat, shapes), mode=ImageReadMode.RGB, device="cuda")
            yield [by_batch(torch.stack([by_image(image) for image in images])), labels.to("cuda", non_blocking=True)]

    return epoch


def torchvision_cuda_decode(job: Job) -> Epoch:
    """Do the same with a centre crop as the only transform."""
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms.v2 import functional

    loader = _load_unequal(job, read)

    def epoch() -> Iterator[Any]:
        for flat, shapes, labels in loader:
            images = decode_jpeg(unpack(flat, shapes), mode=ImageReadMode.RGB, device="cuda")
            cropped = [functional.center_crop(image, [job.size, job.size]) for image in images]
            yield [torch.stack(cropped), labels.to("cuda", non_blocking=True)]

    return epoch


def read(path: str) -> "torch.Tensor":
    """Return the encoded file."""
    from torchvision.io import read_file

    return read_file(path)


def dali_torchvision(job: Job) -> Epoch:
    """DALI's classes with torchvision's names, on images that workers of a DataLoader have decoded.

    A `Compose` takes one image, or several of one size. Before the crop, sizes differ. With a GPU it cannot be called
    in the workers, because they were forked.
    """
    import nvidia.dali.experimental.torchvision as dtv
    import torch

    steps = [
        dtv.RandomResizedCrop(SIZE, device="gpu"),
        dtv.RandomHorizontalFlip(device="gpu"),
        dtv.Normalize([255 * value for value in MEAN], [255 * value for value in STD], device="gpu"),
    ]
    transform = dtv.Compose(steps, batch_size=1)
    loader = _load_unequal(job, decode)

    def epoch() -> Iterator[Any]:
        for flat, shapes, labels in loader:
            images = unpack(flat.to("cuda", non_blocking=True), shapes)
            yield [torch.stack([transform(image) for image in images]), labels.to("cuda", non_blocking=True)]

    return epoch


# SPDL and FFCV


def spdl(job: Job) -> Epoch:
    """SPDL's pipeline of threads, which run torchvision's decoder and v2 transforms on tensors."""
    import torch
    from spdl.pipeline import PipelineBuilder
    from torchvision.datasets import ImageFolder

    torch.set_num_threads(1)  # SPDL has its own threads; as in DataLoader's workers
    dataset = ImageFolder(job.root, make_transforms(job.data), loader=decode)
    device = torch.device("cuda" if has_gpu() else "cpu")

    def batch(samples: list[Any]) -> list["torch.Tensor"]:
        images, labels = torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples])
        return [images.to(device), labels.to(device)]

    def epoch() -> Iterator[Any]:
        pipeline = (
            PipelineBuilder()
            .add_source(make_sampler(dataset, job.passes))
            .pipe(dataset.__getitem__, concurrency=job.threads)
            .aggregate(job.batch_size, drop_last=True)
            .pipe(batch)
            .add_sink(3)
            .build(num_threads=job.threads + 1)
        )
        with pipeline.auto_stop():
            yield from pipeline

    return epoch


def ffcv(job: Job) -> Epoch:
    """FFCV as in its ImageNet example, from a file of JPEGs as large as the folder's."""
    import numpy as np
    import torch
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.decoders import IntDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, Squeeze, ToDevice, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter
    from torchvision.datasets import ImageFolder

    beton = job.root.with_name(f"{job.root.name}.beton")
    if not beton.exists():
        unfinished = beton.with_suffix(".unfinished")
        fields = {"image": RGBImageField(write_mode="jpg", jpeg_quality=95), "label": IntField()}
        writer = DatasetWriter(str(unfinished), fields, num_workers=len(os.sched_getaffinity(0)))
        writer.from_indexed_dataset(ImageFolder(job.root))
        unfinished.rename(beton)
    device = torch.device("cuda:0" if has_gpu() else "cpu")
    normalize = NormalizeImage(255 * np.array(MEAN), 255 * np.array(STD), np.float32)
    image = [RandomResizedCropRGBImageDecoder((SIZE, SIZE)), RandomHorizontalFlip(), ToTensor()]
    loader = Loader(
        str(beton),
        batch_size=job.batch_size,
        num_workers=job.threads,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        pipelines={
            "image": [*image, ToDevice(device, non_blocking=True), ToTorchImage(), normalize],
            "label": [IntDecoder(), ToTensor(), Squeeze(), ToDevice(device, non_blocking=True)],
        },
    )
    return lambda: iter(loader)

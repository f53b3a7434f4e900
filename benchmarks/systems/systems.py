"""The systems under measurement: one function each, the same work from the same folder of pictures.

A system is built for a `Job` and gives back a function that starts one epoch. An epoch is an iterator of
`[images, labels]` on the GPU: images float32 (N, 3, 224, 224), after a random resized crop, a flip and ImageNet's
normalization; labels (N,). Of the set ``small`` they are (N, 3, 32, 32), after a random crop with a padding of 4.
All shuffle and drop the last incomplete batch. Where decoding alone is measured, images are uint8, cropped at the
centre. Without a GPU the same systems run on the CPU, so that the harness can be tried anywhere; such numbers mean
nothing.

Modules are imported where they are used, so that a measured process loads only what its system needs. The tables of
systems are in `benchmarks.suite.all`.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.common.data import KINDS

if TYPE_CHECKING:
    import torch

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
SIZE = 224
SMALL = 32
PASSES = 8
PADDING = 4
RANGES = {"random_area": [0.08, 1.0], "random_aspect_ratio": [3 / 4, 4 / 3]}

Epoch = Callable[[], Iterator[Any]]


@dataclass(frozen=True)
class Job:
    """What a system is to do.

    Attributes:
        root: the folder of class folders.
        batch_size: images in a batch.
        threads: what it is told about threads or workers.
        data: which set the pictures are of, a name in `benchmarks.common.data.KINDS`.
        passes: how often an epoch of a system with workers goes through the pictures. Workers begin each epoch with
            nothing in hand, which counts for little where epochs are long, as those of real data sets are.
    """

    root: Path
    batch_size: int
    threads: int
    data: str = "imagenet"
    passes: int = 1

    @property
    def size(self) -> int:
        """The side of the squares that a batch is made of."""
        return KINDS[self.data].size


Build = Callable[[Job], Epoch]


@dataclass(frozen=True)
class System:
    """How one system is called, what it imports and how it is built.

    Attributes:
        title: what the tables call it.
        imports: the modules to import before the clock starts, each timed by itself, in this order.
        build: a job to a function that starts one epoch.
        output: normalized floats, or what a decoder gives, channels last or first.
        threads: one for each core, half as many, the best of a few that are tried, or whatever it chooses by itself.
        cores: whether it is measured for every number of cores, for the largest, 4 and 1, or for the largest only.
        package: what must be installed beside torchdali's own dependencies; empty where nothing is.
        needs_cuda: whether it is measured on a GPU only.
        data: the sets that it can read.
        exits: whether its process ends by itself when the work is done.
        workers: whether it makes `Job.passes` of the job.
    """

    title: str
    imports: tuple[str, ...]
    build: Build
    output: Literal["floats", "uint8 last", "uint8 first"] = "floats"
    threads: Literal["a core", "half", "tried", "its own"] = "a core"
    cores: Literal["all", "some", "most"] = "some"
    package: str = ""
    needs_cuda: bool = False
    data: tuple[str, ...] = tuple(KINDS)
    exits: bool = True
    workers: bool = False

    def cannot(self, data: str) -> str:
        """Why it cannot be measured here with these pictures; empty where it can."""
        if data not in self.data:
            return f"it does not read {KINDS[data].title}"
        if self.package and importlib.util.find_spec(self.package.partition(".")[0]) is None:
            return f"not installed: No module named {self.package.partition('.')[0]!r}"
        return "" if not self.needs_cuda or has_gpu() else "it needs a CUDA device"


def torchdali(job: Job) -> Epoch:
    """A training script after the one changed import: no option of torchdali's own."""
    return _torchdali(job, transforms(job.data))


def torchdali_decode(job: Job) -> Epoch:
    """The same with no more transforms than a batch needs."""
    return _torchdali(job, decoded(job.data))


def _torchdali(job: Job, transform: Any) -> Epoch:
    from torchvision.datasets import ImageFolder

    from torchdali import DALILoader as DataLoader

    dataset = ImageFolder(job.root, transform=transform)
    loader = DataLoader(dataset, batch_size=job.batch_size, shuffle=True, drop_last=True)
    return lambda: iter(loader)


def dataloader_v2(job: Job) -> Epoch:
    """DataLoader as the fastest plain PyTorch: torchvision's decoder and v2 transforms on tensors."""
    from torchvision.datasets import ImageFolder

    return dataloader(
        ImageFolder(job.root, transforms(job.data), loader=decode), job.batch_size, job.threads, passes=job.passes
    )


def dataloader_decode(job: Job) -> Epoch:
    """The same with no more transforms than a batch needs."""
    from torchvision.datasets import ImageFolder

    return dataloader(
        ImageFolder(job.root, decoded(job.data), loader=decode), job.batch_size, job.threads, passes=job.passes
    )


def dataloader_pil(job: Job) -> Epoch:
    """DataLoader as most scripts write it: ImageFolder's own PIL loader, one worker a core."""
    from torchvision.datasets import ImageFolder

    return dataloader(ImageFolder(job.root, transforms(job.data)), job.batch_size, job.threads, passes=job.passes)


def dali_documented(job: Job) -> Epoch:
    """DALI by hand, as its ImageNet example for PyTorch writes it: same operators, hints and defaults.

    Only the crop's ranges differ from the example (0.1 to 1 and 0.8 to 1.25): they are RandomResizedCrop's.
    """
    biggest_of_imagenet = {"preallocate_width_hint": 5980, "preallocate_height_hint": 6430}
    return _dali(job, 2, biggest_of_imagenet if has_gpu() and job.data != "small" else {})


def dali_tuned(job: Job) -> Epoch:
    """DALI by hand, tuned: all JPEGs to the card's engine, eight batches in flight, the best thread count."""
    return _dali(job, 8, {"hw_decoder_load": 1.0} if has_gpu() else {})


def dali_tuned_read(job: Job) -> Epoch:
    """The same, and files are read into memory instead of mapped into it."""
    return _dali(job, 8, {"hw_decoder_load": 1.0} if has_gpu() else {}, {"dont_use_mmap": True})


def dali_decode_only(job: Job) -> Epoch:
    """Decode and crop, nothing else, tuned: what the JPEG engine can give at most."""
    from nvidia.dali import fn, pipeline_def

    gpu = has_gpu()

    @pipeline_def(**_pipeline_options(job, 8))
    def pipeline() -> Any:
        files, labels = fn.readers.file(file_root=str(job.root), random_shuffle=True, name="Reader")
        images = fn.crop(decoded_whole(files, {"hw_decoder_load": 1.0} if gpu else {}), crop=(job.size, job.size))
        return images, labels.gpu() if gpu else labels

    return _dali_epochs(pipeline())


def _dali(job: Job, depth: int, decoder: dict[str, Any], reader: dict[str, Any] | None = None) -> Epoch:
    from nvidia.dali import fn, pipeline_def

    gpu = has_gpu()

    @pipeline_def(**_pipeline_options(job, depth))
    def pipeline() -> Any:
        files, labels = fn.readers.file(
            file_root=str(job.root), random_shuffle=True, pad_last_batch=True, name="Reader", **(reader or {})
        )
        if job.data == "small":
            images = padded_crop(decoded_whole(files, decoder))
        else:
            images = fn.resize(decoded_crop(files, decoder), resize_x=job.size, resize_y=job.size)
        images = mirrored_normalized(images, job.size)
        return images, labels.gpu() if gpu else labels

    return _dali_epochs(pipeline())


def decoded_whole(files: Any, decoder: dict[str, Any]) -> Any:
    """DALI's operator for encoded files."""
    from nvidia.dali import fn, types

    device = "mixed" if has_gpu() else "cpu"
    return fn.decoders.image(files, device=device, output_type=types.DALIImageType.RGB, **decoder)


def padded_crop(images: Any) -> Any:
    """RandomCrop(32, padding=4) in DALI's operators: a window that may leave the image, where it is black."""
    from nvidia.dali import fn, types

    places = [float(place) for place in range(-PADDING, PADDING + 1)]
    start = fn.cast(fn.random.uniform(values=places, shape=[2]), dtype=types.DALIDataType.INT32)
    return fn.slice(
        images, start=start, shape=[SMALL, SMALL], axis_names="HW", out_of_bounds_policy="pad", fill_values=[0, 0, 0]
    )


def decoded_crop(files: Any, decoder: dict[str, Any]) -> Any:
    """DALI's operator for encoded files, with the ranges of RandomResizedCrop."""
    from nvidia.dali import fn, types

    return fn.decoders.image_random_crop(
        files,
        device="mixed" if has_gpu() else "cpu",
        output_type=types.DALIImageType.RGB,
        **RANGES,
        **decoder,
    )


def mirrored_normalized(images: Any, size: int = SIZE) -> Any:
    """DALI's operator for what follows the resized crop."""
    from nvidia.dali import fn, types

    return fn.crop_mirror_normalize(
        images,
        dtype=types.DALIDataType.FLOAT,
        output_layout="CHW",
        crop=(size, size),
        mean=[255 * value for value in MEAN],
        std=[255 * value for value in STD],
        mirror=fn.random.coin_flip(probability=0.5),
    )


def _pipeline_options(job: Job, depth: int) -> dict[str, Any]:
    import torch

    return {
        "batch_size": job.batch_size,
        "num_threads": job.threads,
        "device_id": torch.cuda.current_device() if has_gpu() else None,
        "prefetch_queue_depth": depth,
        "seed": 12,
    }


def _dali_epochs(pipeline: Any) -> Epoch:
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIClassificationIterator

    iterator = DALIClassificationIterator(
        pipeline, reader_name="Reader", last_batch_policy=LastBatchPolicy.DROP, auto_reset=True
    )

    def epoch() -> Iterator[Any]:
        for (batch,) in iterator:
            yield [batch["data"], batch["label"].squeeze(-1).long()]

    return epoch


def shuffled(dataset: Any, passes: int) -> Any:
    """A sampler of so many permutations, one after another."""
    from torch.utils.data import RandomSampler

    return RandomSampler(dataset, num_samples=passes * len(dataset))


def dataloader(dataset: Any, batch_size: int, threads: int, persistent: bool = True, passes: int = 1) -> Epoch:
    """DataLoader with `threads` workers, its batches moved to the GPU."""
    import torch

    device = torch.device("cuda" if has_gpu() else "cpu")
    loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=shuffled(dataset, passes),
        drop_last=True,
        num_workers=threads,
        pin_memory=device.type == "cuda",
        persistent_workers=persistent,
    )

    def epoch() -> Iterator[Any]:
        for images, labels in loader:
            yield [images.to(device, non_blocking=True), labels.to(device, non_blocking=True)]

    return epoch


def transforms(data: str = "imagenet") -> Any:
    """What all do, in torchvision's words."""
    import torch
    from torchvision.transforms import v2

    crop = v2.RandomCrop(SMALL, padding=PADDING) if data == "small" else v2.RandomResizedCrop(SIZE, antialias=True)
    return v2.Compose(
        [
            v2.ToImage(),
            crop,
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )


def decoded(data: str = "imagenet") -> Any:
    """No more than a batch needs: images of one size."""
    from torchvision.transforms import v2

    return v2.Compose([v2.ToImage(), v2.CenterCrop(KINDS[data].size)])


def decode(path: str) -> "torch.Tensor":
    """A loader for ImageFolder that gives a uint8 tensor; a function, so that workers can pickle it."""
    from torchvision.io import ImageReadMode, decode_image, read_file

    return decode_image(read_file(path), mode=ImageReadMode.RGB)


def has_gpu() -> bool:
    """Whether torch sees one."""
    import torch

    return torch.cuda.is_available()


TORCH = ("torch", "torchvision.transforms.v2", "torchvision.datasets")
DALI = ("torch", "nvidia.dali", "nvidia.dali.plugin.pytorch")
TORCHDALI = (*TORCH, "torchdali", "nvidia.dali")

"""Systems that are measured. Each is one function, and all do the same work from the same folder of pictures.

A system is built for a `Job`, and returns a function that starts an epoch. An epoch is an iterator of `[images,
labels]` on the GPU. Images are float32 (N, 3, 224, 224), after a random resized crop, a flip and ImageNet's
normalization. Labels are (N,). Images of the set ``small`` are (N, 3, 32, 32), after a random crop with a padding of 4.
All systems shuffle, and drop the last incomplete batch. If only decoding is measured, images are uint8, cropped at the
centre. Without a GPU the systems run on the CPU, to try the harness; such numbers mean nothing.

Modules are imported where they are used, so that a process loads only what its system needs.
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
    """The work of a system.

    Attributes:
        root: Folder of class folders.
        batch_size: Number of images in a batch.
        threads: Number of threads or workers for the system.
        data: Set of pictures, a name in `benchmarks.common.data.KINDS`.
        passes: How often an epoch of a system with workers goes through the pictures. Workers start each epoch without
            prepared batches, which matters little in the long epochs of real datasets.
    """

    root: Path
    batch_size: int
    threads: int
    data: str = "imagenet"
    passes: int = 1

    @property
    def size(self) -> int:
        """Side of the images in a batch, in pixels."""
        return KINDS[self.data].size


Build = Callable[[Job], Epoch]


@dataclass(frozen=True)
class System:
    """A system.

    Attributes:
        title: Title in the tables.
        imports: Modules to import before the time is measured, in this order. Each is timed alone.
        build: Function from a job to an `Epoch`.
        output: Normalized floats, or uint8, channels last or first.
        threads: One for each core, half as many, the best of a few that are tried, or the system's own choice.
        cores: Whether it is measured for every number of cores, for the largest, 4 and 1, or for the largest only.
        package: Package that must be installed beside torchdali's dependencies, or empty.
        needs_cuda: Whether it is measured on a GPU only.
        data: Sets of pictures that it can read.
        exits: Whether its process ends by itself when the work is done.
        workers: Whether its epochs go through the pictures `Job.passes` times.
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

    def why_not(self, data: str) -> str:
        """Return why it cannot be measured here with these pictures, or an empty string."""
        if data not in self.data:
            return f"it does not read {KINDS[data].title}"
        if self.package and importlib.util.find_spec(self.package.partition(".")[0]) is None:
            return f"not installed: No module named {self.package.partition('.')[0]!r}"
        return "" if not self.needs_cuda or has_gpu() else "it needs a CUDA device"


def torchdali(job: Job) -> Epoch:
    """DALILoader in a training script after the one changed import, without options of torchdali."""
    return _torchdali(job, make_transforms(job.data))


def torchdali_decode(job: Job) -> Epoch:
    """Do the same with a centre crop as the only transform."""
    return _torchdali(job, make_crop(job.data))


def _torchdali(job: Job, transform: Any) -> Epoch:
    from torchvision.datasets import ImageFolder

    from torchdali import DALILoader as DataLoader

    dataset = ImageFolder(job.root, transform=transform)
    loader = DataLoader(dataset, batch_size=job.batch_size, shuffle=True, drop_last=True)
    return lambda: iter(loader)


def dataloader_v2(job: Job) -> Epoch:
    """DataLoader in the fastest plain PyTorch: torchvision's decoder and v2 transforms on tensors."""
    from torchvision.datasets import ImageFolder

    return make_dataloader(
        ImageFolder(job.root, make_transforms(job.data), loader=decode), job.batch_size, job.threads, passes=job.passes
    )


def dataloader_decode(job: Job) -> Epoch:
    """Do the same with a centre crop as the only transform."""
    from torchvision.datasets import ImageFolder

    return make_dataloader(
        ImageFolder(job.root, make_crop(job.data), loader=decode), job.batch_size, job.threads, passes=job.passes
    )


def dataloader_pil(job: Job) -> Epoch:
    """DataLoader as in most scripts: ImageFolder's own PIL loader, one worker for each core."""
    from torchvision.datasets import ImageFolder

    return make_dataloader(
        ImageFolder(job.root, make_transforms(job.data)), job.batch_size, job.threads, passes=job.passes
    )


def dali_documented(job: Job) -> Epoch:
    """DALI by hand, as in its ImageNet example for PyTorch: same operators, hints and defaults.

    Only the crop's ranges are RandomResizedCrop's, not the example's (0.1 to 1 and 0.8 to 1.25).
    """
    imagenet_maximum = {"preallocate_width_hint": 5980, "preallocate_height_hint": 6430}
    return build_dali(job, 2, imagenet_maximum if has_gpu() and job.data != "small" else {})


def dali_tuned(job: Job) -> Epoch:
    """DALI by hand, tuned: all JPEGs on the GPU's JPEG engine, eight batches in flight, the best thread count."""
    return build_dali(job, 8, {"hw_decoder_load": 1.0} if has_gpu() else {})


def dali_tuned_read(job: Job) -> Epoch:
    """Do the same with files that are read into memory, and not mapped."""
    return build_dali(job, 8, {"hw_decoder_load": 1.0} if has_gpu() else {}, {"dont_use_mmap": True})


def dali_decode_only(job: Job) -> Epoch:
    """DALI by hand, tuned, with decoding and a crop only: the most that the JPEG engine can do."""
    from nvidia.dali import fn, pipeline_def

    gpu = has_gpu()

    @pipeline_def(**_pipeline_options(job, 8))
    def pipeline() -> Any:
        files, labels = fn.readers.file(file_root=str(job.root), random_shuffle=True, name="Reader")
        images = fn.crop(add_decoder(files, {"hw_decoder_load": 1.0} if gpu else {}), crop=(job.size, job.size))
        return images, labels.gpu() if gpu else labels

    return _dali_epochs(pipeline())


def build_dali(job: Job, depth: int, decoder: dict[str, Any], reader: dict[str, Any] | None = None) -> Epoch:
    """Build DALI by hand, with `depth` batches in flight, and with options of its decoder and of its file reader."""
    from nvidia.dali import fn, pipeline_def

    gpu = has_gpu()

    @pipeline_def(**_pipeline_options(job, depth))
    def pipeline() -> Any:
        files, labels = fn.readers.file(
            file_root=str(job.root), random_shuffle=True, pad_last_batch=True, name="Reader", **(reader or {})
        )
        if job.data == "small":
            images = add_padded_crop(add_decoder(files, decoder))
        else:
            images = fn.resize(add_random_crop(files, decoder), resize_x=job.size, resize_y=job.size)
        images = add_normalize(images, job.size)
        return images, labels.gpu() if gpu else labels

    return _dali_epochs(pipeline())


def add_decoder(files: Any, decoder: dict[str, Any]) -> Any:
    """Add DALI's operator that decodes whole images."""
    from nvidia.dali import fn, types

    device = "mixed" if has_gpu() else "cpu"
    return fn.decoders.image(files, device=device, output_type=types.DALIImageType.RGB, **decoder)


def add_padded_crop(images: Any) -> Any:
    """Add RandomCrop(32, padding=4) in DALI's operators: a window that may leave the image, and is black there."""
    from nvidia.dali import fn, types

    offsets = [float(offset) for offset in range(-PADDING, PADDING + 1)]
    start = fn.cast(fn.random.uniform(values=offsets, shape=[2]), dtype=types.DALIDataType.INT32)
    return fn.slice(
        images, start=start, shape=[SMALL, SMALL], axis_names="HW", out_of_bounds_policy="pad", fill_values=[0, 0, 0]
    )


def add_random_crop(files: Any, decoder: dict[str, Any]) -> Any:
    """Add DALI's operator that decodes a random crop, with the ranges of RandomResizedCrop."""
    from nvidia.dali import fn, types

    return fn.decoders.image_random_crop(
        files,
        device="mixed" if has_gpu() else "cpu",
        output_type=types.DALIImageType.RGB,
        **RANGES,
        **decoder,
    )


def add_normalize(images: Any, size: int = SIZE) -> Any:
    """Add DALI's operator for the flip and the normalization."""
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


def make_sampler(dataset: Any, passes: int) -> Any:
    """Return a sampler that goes through the dataset `passes` times, in random order each time."""
    from torch.utils.data import RandomSampler

    return RandomSampler(dataset, num_samples=passes * len(dataset))


def make_dataloader(dataset: Any, batch_size: int, threads: int, persistent: bool = True, passes: int = 1) -> Epoch:
    """Return the epochs of a DataLoader with `threads` workers. Its batches are moved to the GPU."""
    import torch

    loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=make_sampler(dataset, passes),
        drop_last=True,
        num_workers=threads,
        pin_memory=has_gpu(),
        persistent_workers=persistent,
    )
    return make_epoch(loader)


def make_epoch(loader: Any) -> Epoch:
    """Return the epochs of a loader of tensors. Its batches are moved to the GPU."""
    import torch

    device = torch.device("cuda" if has_gpu() else "cpu")

    def epoch() -> Iterator[Any]:
        for images, labels in loader:
            yield [images.to(device, non_blocking=True), labels.to(device, non_blocking=True)]

    return epoch


def make_transforms(data: str = "imagenet") -> Any:
    """Return the transforms of all systems, as torchvision's."""
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


def make_crop(data: str = "imagenet") -> Any:
    """Return a centre crop, so that all images have one size."""
    from torchvision.transforms import v2

    return v2.Compose([v2.ToImage(), v2.CenterCrop(KINDS[data].size)])


def decode(path: str) -> "torch.Tensor":
    """Decode a file to a uint8 tensor, for ImageFolder. A function at module level can be pickled for workers."""
    from torchvision.io import ImageReadMode, decode_image, read_file

    return decode_image(read_file(path), mode=ImageReadMode.RGB)


def has_gpu() -> bool:
    """Return True if torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


TORCH = ("torch", "torchvision.transforms.v2", "torchvision.datasets")
DALI = ("torch", "nvidia.dali", "nvidia.dali.plugin.pytorch")
TORCHDALI = (*TORCH, "torchdali", "nvidia.dali")

"""Clips of videos: torchdali, DataLoader with PyAV, and PyNvVideoCodec alone, in one run.

    python -m benchmarks.studies.video --videos 64 --clips 512 --workers 16

H.264 files are made once, by PyAV: a camera moves over photographs. A clip has 16 frames of stride 2 from a random
start. RandomResizedCrop(224), a flip and the normalization follow; batches are on the device. The systems take
turns, so that all meet the same state of the machine, and the median counts. PyNvVideoCodec alone decodes
the same number of clips in threads with open decoders, and transforms nothing. ``--train r3d_18`` adds steps of
this network: on one batch again and again, and with each loader. Without a GPU the numbers mean nothing.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import av
import numpy as np
import skimage.data
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import models
from torchvision.transforms import v2

from torchdali import DALILoader
from torchdali.datasets import VideoClips
from torchdali.datasets.video.device_decoding import DeviceDecoders, find_engine

TRANSFORM = v2.Compose(
    [
        v2.RandomResizedCrop(224, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.43216, 0.394666, 0.37645], [0.22803, 0.22145, 0.216989]),
    ]
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--videos", type=int, default=64)
    parser.add_argument("--clips", type=int, default=512, help="clips of an epoch")
    parser.add_argument("--frames", type=int, default=300, help="frames of a video")
    parser.add_argument("--size", default="340x256", help="width and height")
    parser.add_argument("--codec", default="libx264", help="an encoder of FFmpeg")
    parser.add_argument("--group", type=int, default=60, help="frames from one key frame to the next")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="of DataLoader")
    parser.add_argument("--threads", type=int, default=8, help="of PyNvVideoCodec alone")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--train", help="a network of torchvision.models.video beside which they run, too")
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir(), "torchdali-videos"))
    args = parser.parse_args()
    width, height = map(int, args.size.split("x"))
    folder = args.root / f"{args.codec}-{args.size}-{args.group}-{args.frames}"
    paths = make_videos(folder, args.videos, args.frames, (height, width), args.codec, args.group)
    repeated = [(path, number % 10) for number, path in enumerate(paths * -(-args.clips // len(paths)))][: args.clips]
    dataset = VideoClips(repeated, frames=16, stride=2, transform=TRANSFORM, index=folder / "index.npz")
    cuda = torch.cuda.is_available()
    loader = DALILoader(dataset, args.batch_size, shuffle=True, drop_last=True)
    plain = DataLoader(
        dataset,
        args.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=args.workers,
        pin_memory=cuda,
        persistent_workers=args.workers > 0,
    )
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    systems: dict[str, Callable[[], float]] = {
        "torchdali": lambda: run_epoch(loader, device),
        f"DataLoader and PyAV, {args.workers} workers": lambda: run_epoch(plain, device),
    }
    if why := find_engine(device):
        print(f"PyNvVideoCodec alone is left out: {why}")
    else:
        systems[f"PyNvVideoCodec alone, {args.threads} threads"] = lambda: decode_alone(dataset, device, args.threads)
    print(f"{args.clips} clips of {args.videos} videos, {args.size}, {args.codec}, groups of {args.group}, on {device}")
    measure(systems, args.turns)
    print(loader.explain())
    if args.train:
        train(args.train, {"torchdali": loader, "DataLoader": plain}, args.batch_size, args.turns, device)
    loader.close()


def make_videos(folder: Path, count: int, frames: int, size: tuple[int, int], codec: str, group: int) -> list[Path]:
    """Write videos of a camera that moves over photographs, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:04}.mp4" for number in range(count)]
    for number, path in enumerate(paths):
        if not path.exists():
            unfinished = path.with_suffix(".unfinished.mp4")
            write_video(unfinished, pan(number, frames, size), codec, group)
            unfinished.replace(path)
    return paths


def pan(number: int, frames: int, size: tuple[int, int]) -> Any:
    """Yield the frames of a video. Each shows a part of one of two photographs, and some noise."""
    height, width = size
    draws = np.random.default_rng(number)
    room = 300
    pictures = [
        np.asarray(Image.fromarray(getattr(skimage.data, name)()).resize((width + room, height + room)))
        for name in (("coffee", "chelsea"), ("astronaut", "rocket"))[number % 2]
    ]
    noise = draws.integers(-4, 5, (height, width, 1), np.int16)
    for i in range(frames):
        x, y = int(room * abs(np.sin(i / 50 + number))), int(room * abs(np.cos(i / 70)))
        frame = pictures[i // 100 % 2][y : y + height, x : x + width] + np.roll(noise, i, 0)
        yield frame.clip(0, 255).astype(np.uint8)


def write_video(path: Path, frames: Any, codec: str, group: int) -> None:
    """Write frames of uint8 ``(H, W, 3)`` as a video of 30 frames/s."""
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=30)
        stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size = group
        for number, frame in enumerate(frames):
            if not number:
                stream.height, stream.width = frame.shape[:2]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))


def measure(systems: dict[str, Callable[[], float]], turns: int) -> None:
    """Measure the clips/s of the systems by turns, and print a table."""
    found: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(turns + 1):  # the first warms up
        for name, run in systems.items():
            speed = run()
            if turn:
                found[name].append(speed)
    base = found["torchdali"]
    for name, speeds in found.items():
        ratio = statistics.median(own / other for own, other in zip(base, speeds, strict=True))
        spread = f"{min(speeds):,.1f} to {max(speeds):,.1f}"
        print(f"{name:36} {statistics.median(speeds):9,.1f} clips/s ({spread})  torchdali is {ratio:.2f} times as fast")


def run_epoch(batches: Any, device: torch.device, step: Any = None) -> float:
    """Return clips/s of one epoch. Batches are copied to the device, and ``step`` is called with each."""
    start, count = time.perf_counter(), 0
    for clips, labels in batches:
        moved = clips.to(device, non_blocking=True)
        if step:
            step(moved, labels.to(device, non_blocking=True))
        count += len(clips)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return count / (time.perf_counter() - start)


def decode_alone(dataset: VideoClips, device: torch.device, threads: int) -> float:
    """Return clips/s of the decoders without a loader."""
    decoders = DeviceDecoders(device)

    def decode(index: int) -> None:
        video = dataset.get_video(index)
        decoders.decode(video, dataset.choose_frames(index, video, float(torch.rand(()))))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(decode, range(threads)))
        start = time.perf_counter()
        list(pool.map(decode, torch.randperm(len(dataset)).tolist()))
        speed = len(dataset) / (time.perf_counter() - start)
    if decoders.refused:
        print(decoders.describe())
    decoders.close()
    return speed


def train(network: str, loaders: dict[str, Any], size: int, turns: int, device: torch.device) -> None:
    """Print the clips/s of training steps on one batch again and again, and with each loader."""
    model = models.get_model(network, num_classes=10).to(device, memory_format=torch.channels_last_3d)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(clips: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(clips.movedim(2, 1)), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    batch = torch.randn(size, 16, 3, 224, 224, device=device), torch.zeros(size, dtype=torch.long, device=device)
    number = len(next(iter(loaders.values())))
    systems: dict[str, Callable[[], float]] = {
        name: (lambda loader=loader: run_epoch(loader, device, step)) for name, loader in loaders.items()
    }
    systems["one batch again and again"] = lambda: run_epoch([batch] * number, device, step)
    print(f"beside {network}:")
    measure(systems, turns)


if __name__ == "__main__":
    main()

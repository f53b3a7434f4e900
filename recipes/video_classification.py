"""Train a video network of torchvision on clips of video files.

What it shows: ``torchdali.datasets.VideoClips``. The training takes one clip of each video, from a random frame. The
validation takes several clips of each video, and adds up what the network says of them. On a GPU with PyNvVideoCodec
the card's video engine decodes. ``--loader torch`` gives the same datasets to ``DataLoader``.

FOLDER holds ``train/<class>/<name>.mp4`` and ``val/<class>/<name>.mp4``. The second command first writes such a folder:
a bright disc that rises or falls, so that no single frame tells the class::

    python recipes/video_classification.py FOLDER
    python recipes/video_classification.py /tmp/discs --example --frames 8 --size 48 --network small --lr 0.01
    python recipes/video_classification.py FOLDER --loader torch

What to expect: what decodes, then one line for each epoch, with the loss, the share of validation videos that are
recognised, and the speed of training. It needs ``pip install 'torchdali[video]'``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.models import get_model, list_models, video
from torchvision.transforms import v2

from torchdali import DALILoader
from torchdali.datasets import VideoClips


def main() -> None:
    args = parse_args()
    if args.example:
        write_example(args.folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)

    to_floats = [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.432, 0.395, 0.376], [0.228, 0.221, 0.217])]
    augment = [v2.RandomResizedCrop(args.size, (0.5, 1.0)), v2.RandomHorizontalFlip(), *to_floats]
    centre = [v2.Resize(args.size), v2.CenterCrop(args.size), *to_floats]
    clip: dict[str, Any] = {"frames": args.frames, "stride": args.stride}
    train = VideoClips(args.folder / "train", clips="random", transform=v2.Compose(augment), **clip)
    val = VideoClips(args.folder / "val", clips=args.val_clips, transform=v2.Compose(centre), **clip)

    kind = DALILoader if args.loader == "torchdali" else DataLoader
    train_loader = kind(train, args.batch_size, shuffle=True, num_workers=args.workers)
    val_loader = kind(val, args.batch_size, num_workers=args.workers)
    if isinstance(train_loader, DALILoader):
        train_loader.explain()

    network = make_network(args.network, len(train.classes)).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), args.lr)
    for epoch in range(1, args.epochs + 1):
        losses: list[float] = []
        start = time.perf_counter()
        for videos, labels in train_loader:
            loss = nn.functional.cross_entropy(network(to_network(videos, device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        speed = len(train) / (time.perf_counter() - start)
        share = evaluate(network, val_loader, val, device)
        print(
            f"epoch {epoch}/{args.epochs}  loss {np.mean(losses):.4f}  acc {share:.1%}  {speed:.1f} clips/s",
            flush=True,
        )


@torch.no_grad()
def evaluate(network: nn.Module, loader: DataLoader, dataset: VideoClips, device: torch.device) -> float:
    """Return the share of the videos whose clips together are recognised. The clips of a video follow each other."""
    network.eval()
    scores = torch.cat([network(to_network(videos, device)).softmax(1).cpu() for videos, _ in loader])
    network.train()
    scores = scores.view(len(dataset.paths), -1, scores.shape[1]).sum(1)
    labels = torch.tensor([dataset.classes.index(Path(path).parent.name) for path in dataset.paths])
    return float((scores.argmax(1) == labels).float().mean())


def to_network(videos: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``(N, C, T, H, W)`` what networks for videos take, of ``(N, T, C, H, W)`` batches."""
    return videos.to(device, non_blocking=True).transpose(1, 2)


def make_network(name: str, num_classes: int) -> nn.Module:
    if name != "small":
        return get_model(name, num_classes=num_classes)
    return nn.Sequential(
        nn.Conv3d(3, 16, (3, 7, 7), (1, 4, 4)),
        nn.BatchNorm3d(16),
        nn.ReLU(),
        nn.Conv3d(16, 32, 3, (1, 2, 2)),
        nn.BatchNorm3d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(32, num_classes),
    )


def write_example(folder: Path) -> None:
    """Write videos of a disc that rises or falls before a picture that stands still."""
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:64, :80]
    for split, count in (("train", 16), ("val", 4)):
        for name, step in (("falls", 1.5), ("rises", -1.5)):
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                ground = np.kron(rng.integers(30, 130, (8, 10, 3)), np.ones((8, 8, 1)))
                first, centre, radius = rng.uniform(0, 64), rng.uniform(20, 60), rng.uniform(8, 14)
                frames = []
                for time_ in range(24):
                    down = (rows - first - step * time_ + 32) % 64 - 32
                    is_disc = down**2 + (columns - centre) ** 2 < radius**2
                    frames.append(np.where(is_disc[..., None], 230, ground).astype(np.uint8))
                write_video(folder / split / name / f"{number}.mp4", frames)


def write_video(path: Path, frames: list[np.ndarray]) -> None:
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=24)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--example", action="store_true", help="write an example into the folder first")
    parser.add_argument("--network", choices=["small", *list_models(video)], default="r3d_18")
    parser.add_argument("--frames", type=int, default=16)
    parser.add_argument("--stride", type=int, default=2)
    parser.add_argument("--size", type=int, default=112)
    parser.add_argument("--val-clips", type=int, default=3, help="clips of each validation video")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loader", choices=["torchdali", "torch"], default="torchdali")
    return parser.parse_args()


if __name__ == "__main__":
    main()

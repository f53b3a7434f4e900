"""Train a small network to segment volumes, from random patches of ``.npy`` files.

What it shows: ``torchdali.datasets.Volumes``. Files are mapped, so a patch reads its own pages alone. Image and labels
are cut from the same place, and flipped and turned alike. Patches follow from the seed, the epoch and the sample, so
both loaders give the same batches, with any number of workers. The validation takes all patches of a grid.

FOLDER holds ``images/`` and ``labels/`` with files of the same names. The second command first writes such a folder:
noisy volumes with bright balls::

    python recipes/volumes.py FOLDER
    python recipes/volumes.py /tmp/balls --example --patch 32
    python recipes/volumes.py FOLDER --loader torch

What to expect: one line for each epoch, with the loss, and the Dice coefficient of the validation volumes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from torchdali import DALILoader
from torchdali.datasets import Volumes
from torchdali.transforms import RandomFlip3D, RandomIntensity, RandomRotate3D


def main() -> None:
    args = parse_args()
    if args.example:
        write_example(args.folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)

    images, labels = (sorted((args.folder / name).glob("*.npy")) for name in ("images", "labels"))
    count = max(1, len(images) // 4)
    patch = (args.patch,) * 3
    augment = v2.Compose([RandomFlip3D(), RandomRotate3D((-15, 15)), RandomIntensity()])
    train = Volumes(images[count:], patch, labels[count:], per_volume=args.patches, transform=augment, seed=args.seed)
    val = Volumes(images[:count], patch, labels[:count], places="grid")

    kind = DALILoader if args.loader == "torchdali" else DataLoader
    train_loader = kind(train, args.batch_size, shuffle=True, num_workers=args.workers)
    val_loader = kind(val, args.batch_size, num_workers=args.workers)

    network = nn.Sequential(
        nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 2, 1)
    ).to(device)
    optimizer = torch.optim.Adam(network.parameters(), args.lr)
    weight = torch.tensor([1.0, 5.0], device=device)  # most voxels are background
    for epoch in range(1, args.epochs + 1):
        train.set_epoch(epoch)
        losses = []
        for volumes, masks in train_loader:
            loss = nn.functional.cross_entropy(network(volumes.to(device)), masks[:, 0].to(device).long(), weight)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        dice = evaluate(network, val_loader, device)
        print(f"epoch {epoch}/{args.epochs}  loss {np.mean(losses):.4f}  dice {dice:.3f}", flush=True)


@torch.no_grad()
def evaluate(network: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """Return the Dice coefficient of the foreground, over all patches."""
    both, each = 0, 0
    for volumes, masks in loader:
        found, truth = network(volumes.to(device)).argmax(1) == 1, masks[:, 0].to(device) == 1
        both += int((found & truth).sum())
        each += int(found.sum() + truth.sum())
    return 2 * both / max(each, 1)


def write_example(folder: Path) -> None:
    """Write eight noisy volumes with bright balls, and their labels."""
    rng = np.random.default_rng(0)
    for name in ("images", "labels"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number in range(8):
        sides = rng.integers(40, 56, 3)
        voxels = np.stack(np.meshgrid(*map(np.arange, sides), indexing="ij"), -1)
        label = np.zeros(sides, np.uint8)
        for _ in range(6):
            radius = rng.uniform(5, 10)
            label[((voxels - rng.uniform(0, sides)) ** 2).sum(-1) < radius**2] = 1
        np.save(folder / "labels" / f"{number}.npy", label)
        np.save(folder / "images" / f"{number}.npy", (label + rng.normal(0, 0.4, sides)).astype(np.float32))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--example", action="store_true", help="write an example into the folder first")
    parser.add_argument("--patch", type=int, default=96, help="side of a patch in voxels")
    parser.add_argument("--patches", type=int, default=4, help="random patches of a volume in an epoch")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loader", choices=["torchdali", "torch"], default="torchdali")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Train a network that finds points in images: the corners of a tile that lies on a photograph.

What it shows: key points move with the images, also under rotations and shears. The dataset is the user's own. Each of
its samples is a dictionary with an image, its points as ``tv_tensors.KeyPoints``, and its number. With DataLoader the
dataset applies the transforms. With torchdali the loader has them: worker processes ask the dataset for samples, DALI
transforms the images, on the GPU if there is one, and the points are moved by the same random numbers.

FOLDER holds pictures, and ``points.json`` with the four points of each. The second command first writes such a folder::

    python recipes/keypoints.py FOLDER
    python recipes/keypoints.py /tmp/tiles --example --epochs 6
    python recipes/keypoints.py FOLDER --loader torch

What to expect: first what runs where (``explain()``), then one line for each epoch, with the loss, the mean distance
from the points in pixels, of pictures that are not augmented, and the training images per second.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn
from torch.utils.data import Dataset
from torchvision import models, tv_tensors
from torchvision.transforms import v2

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


class Pictures(Dataset):
    """Pictures with their points. ``transform`` is for torch's DataLoader only."""

    def __init__(self, folder: Path, split: str, transform: v2.Transform | None = None) -> None:
        table = json.loads((folder / "points.json").read_text())
        self.rows = [(name, points) for name, points in sorted(table.items()) if name.startswith(split)]
        self.folder, self.transform = folder, transform

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        name, points = self.rows[index]
        with Image.open(self.folder / name) as file:
            image = tv_tensors.Image(np.asarray(file.convert("RGB")).transpose(2, 0, 1).copy())
        moved = tv_tensors.KeyPoints(torch.tensor(points, dtype=torch.float32), canvas_size=tuple(image.shape[-2:]))
        sample = {"image": image, "points": moved, "number": index}
        return self.transform(sample) if self.transform else sample


def main() -> None:
    args = parse_args()
    if args.example:
        write_example(args.folder)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)

    to_float = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    size = [args.size, args.size]
    augment = v2.Compose(
        [
            v2.Resize(size),
            v2.RandomAffine(degrees=20, translate=(0.05, 0.05), scale=(0.8, 1.1), shear=5),
            v2.ColorJitter(0.2, 0.2, 0.2),
            *to_float,
        ]
    )
    view = v2.Compose([v2.Resize(size), *to_float])

    settings = {"num_workers": args.workers, "persistent_workers": args.workers > 0}
    if args.loader == "torchdali":
        from torchdali import DALILoader

        train, val = (Pictures(args.folder, split) for split in ("train", "val"))
        loader = DALILoader(train, args.batch_size, shuffle=True, transform=augment, **settings)
        val_loader = DALILoader(val, args.batch_size, transform=view, **settings)
        loader.explain()
    else:
        from torch.utils.data import DataLoader

        train, val = Pictures(args.folder, "train", augment), Pictures(args.folder, "val", view)
        loader = DataLoader(train, args.batch_size, shuffle=True, **settings)
        val_loader = DataLoader(val, args.batch_size, **settings)

    model = models.get_model(args.model, weights=None, num_classes=8).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)

    for epoch in range(args.epochs):
        model.train()
        start, loss_sum, seen = time.perf_counter(), torch.zeros((), device=device), 0
        for batch in loader:
            images, points = prepare(batch, args.size, device)
            loss = nn.functional.smooth_l1_loss(model(images), points, beta=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach() * len(images)
            seen += len(images)
        # Reading the sum waits for the GPU, so the time is read after it.
        loss = loss_sum.item() / seen
        speed = seen / (time.perf_counter() - start)

        model.eval()
        distances = []
        with torch.inference_mode():
            for batch in val_loader:
                images, points = prepare(batch, args.size, device)
                off = (model(images) - points).view(-1, 4, 2) * (args.size / 2)
                distances.append(off.norm(dim=2).mean(dim=1))
        off = torch.cat(distances).mean().item()
        print(
            f"epoch {epoch + 1:3}/{args.epochs}  loss {loss:.4f}  off {off:6.2f} px  {speed:8,.0f} images/s",
            flush=True,
        )


def prepare(batch: dict, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images on the device, and the points as numbers from -1 to 1, ``(N, 8)``."""
    points = batch["points"].as_subclass(torch.Tensor).to(device, non_blocking=True)
    images = batch["image"].as_subclass(torch.Tensor).to(device, non_blocking=True)
    return images, (points / (size / 2) - 1).flatten(1)


def write_example(folder: Path) -> None:
    """Write pictures of a tile, turned a little, whose corners have four colours."""
    from skimage import data

    rng = np.random.default_rng(0)
    photograph = Image.fromarray(data.coffee())
    folder.mkdir(parents=True, exist_ok=True)
    table = {}
    for split, count in {"train": 128, "val": 16}.items():
        for number in range(count):
            width, height = rng.integers(90, 130, 2).tolist()
            left, top = int(rng.integers(0, 600 - width)), int(rng.integers(0, 400 - height))
            picture = photograph.crop((left, top, left + width, top + height))
            angle, radius = rng.uniform(-0.4, 0.4), rng.uniform(22, 32)
            turns = angle + np.pi * np.array([1.25, 1.75, 0.25, 0.75])
            middle = rng.uniform(36, np.array([width, height]) - 36)
            points = (middle + radius * np.stack((np.cos(turns), np.sin(turns)), axis=1)).round(2)
            draw = ImageDraw.Draw(picture)
            draw.polygon([tuple(point) for point in points.tolist()], fill=(245, 245, 245))
            for (x, y), colour in zip(points.tolist(), ("red", "lime", "blue", "black"), strict=True):
                draw.ellipse((x - 4, y - 4, x + 4, y + 4), fill=colour)
            name = f"{split}_{number:03}.jpg"
            picture.save(folder / name, quality=95)
            table[name] = points.tolist()
    (folder / "points.json").write_text(json.dumps(table))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="with pictures and points.json")
    parser.add_argument("--example", action="store_true", help="write the folder first")
    parser.add_argument("--loader", choices=["torchdali", "torch"], default="torchdali")
    parser.add_argument("--model", default="resnet18", help="any of torchvision's classification networks")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--size", type=int, default=96, help="height and width that the network sees")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--workers", type=int, default=min(8, len(os.sched_getaffinity(0))), help="num_workers")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()

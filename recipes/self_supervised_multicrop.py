"""Learn from an image folder without its labels, from two large and several small crops of each image (DINO).

What it shows: ``MultiView`` is a transform that makes views of different sizes. The loader yields a list of batches,
the large crops first, as DataLoader does with any such transform. torchdali decodes each image once, and makes all of
its crops on the GPU. A student sees all crops. A teacher, which is the student's moving average, sees the large ones.
The student learns to give for each crop the teacher's output for another one.

DATA holds ``train/`` and ``val/``, each with one folder of images per class. The classes are used only for the
printed accuracy: how often the most similar training image of a validation image has its class::

    python recipes/self_supervised_multicrop.py DATA
    python recipes/self_supervised_multicrop.py DATA --loader torch

If you have no dataset, ``torchdali demo`` writes a small one to ``torchdali-demo/pictures``. For that one, add
``--size 64 --local-size 32 --batch-size 64 --epochs 5``. A CPU is enough.

What to expect: one line for each epoch, with the loss, the accuracy of the nearest neighbour on ``val/``, and the
training images per second. Each of these images is two large crops and six small ones. Eight crops of an image cost
the CPU several times as much as one, so with DataLoader a GPU waits for them.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

# Import torchdali before the first use of CUDA. It sets the number of hardware queues of this process.
from torchdali.transforms import MultiView

LARGE = 2


def main() -> None:
    args = parse_args()

    if args.loader == "torchdali":
        from torchdali import DALILoader as DataLoader  # the one changed line
    else:
        from torch.utils.data import DataLoader

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)

    to_float = [
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ]
    jitter = v2.ColorJitter(0.4 * args.strength, 0.4 * args.strength, 0.2 * args.strength, 0.1 * args.strength)

    def make_crop(size: int, scale: tuple[float, float], blurred: float, solarized: float = 0.0) -> v2.Compose:
        blur = v2.GaussianBlur(size // 20 * 2 + 1, sigma=(0.1, 2.0))
        return v2.Compose(
            [
                v2.RandomResizedCrop(size, scale),
                v2.RandomHorizontalFlip(),
                v2.RandomApply([jitter], p=0.8),
                v2.RandomGrayscale(p=0.2),
                v2.RandomApply([blur], p=blurred),
                v2.RandomSolarize(128, p=solarized),
                *to_float,
            ]
        )

    crops = [
        make_crop(args.size, (0.4, 1.0), blurred=1.0),
        make_crop(args.size, (0.4, 1.0), blurred=0.1, solarized=0.2 * args.strength),
        *[make_crop(args.local_size, (0.05, 0.4), blurred=0.5)] * args.local_crops,
    ]
    whole = v2.Compose([v2.Resize(args.size * 8 // 7), v2.CenterCrop(args.size), *to_float])

    settings = {
        "num_workers": args.workers,
        "pin_memory": device.type == "cuda",
        "persistent_workers": args.workers > 0,
    }
    images = ImageFolder(args.data / "train", transform=MultiView(crops))
    loader = DataLoader(images, args.batch_size, shuffle=True, drop_last=True, **settings)
    train, val = (
        DataLoader(ImageFolder(args.data / split, transform=whole), args.batch_size, **settings)
        for split in ("train", "val")
    )
    if not len(loader):
        raise SystemExit(f"{len(images)} training images are less than --batch-size {args.batch_size}")

    encoder = models.get_model(args.model, weights=None)
    width, encoder.fc = encoder.fc.in_features, nn.Identity()
    head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, args.outputs))
    student = nn.Sequential(encoder, head).to(device, memory_format=torch.channels_last)
    teacher = copy.deepcopy(student).requires_grad_(False)
    center = torch.zeros(args.outputs, device=device)
    optimizer = torch.optim.AdamW(student.parameters(), args.lr, weight_decay=0.04)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    for epoch in range(args.epochs):
        student.train()
        start, loss_sum, seen = time.perf_counter(), torch.zeros((), device=device), 0
        for views, _ in loader:
            views = [view.to(device, memory_format=torch.channels_last, non_blocking=True) for view in views]
            count = len(views[0])
            with autocast:
                with torch.no_grad():
                    targets = teacher(torch.cat(views[:LARGE])).float().split(count)
                # Crops of one size go through the network together.
                outputs = [student(torch.cat(part)) for part in (views[:LARGE], views[LARGE:]) if part]
            loss = cross_entropy(torch.cat(outputs).float().split(count), targets, center)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                    slow.lerp_(fast, 1 - args.momentum)
                center.lerp_(torch.cat(targets).mean(0), 0.1)
            loss_sum += loss.detach() * count
            seen += count
        # Reading the sum waits for the GPU, so the time is read after it.
        loss = loss_sum.item() / seen
        speed = seen / (time.perf_counter() - start)
        accuracy = measure_nearest_neighbour(encoder.eval(), train, val, device)
        print(
            f"epoch {epoch + 1:3}/{args.epochs}  loss {loss:.4f}  acc {accuracy:7.2%}  {speed:8,.0f} images/s",
            flush=True,
        )


def cross_entropy(outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...], center: Tensor) -> Tensor:
    """Return the loss of the student's outputs for each crop, with the teacher's for every other large crop."""
    softened = [F.softmax((target - center) / 0.04, dim=1) for target in targets]
    losses = [
        F.cross_entropy(student / 0.1, teacher)
        for i, teacher in enumerate(softened)
        for j, student in enumerate(outputs)
        if i != j
    ]
    return torch.stack(losses).mean()


@torch.inference_mode()
def measure_nearest_neighbour(encoder: nn.Module, train, val, device: torch.device) -> float:
    """Return the share of validation images whose most similar training image has their class."""

    def encode(loader) -> tuple[Tensor, Tensor]:
        pairs = [(F.normalize(encoder(images.to(device))), labels.to(device)) for images, labels in loader]
        return torch.cat([x for x, _ in pairs]), torch.cat([labels for _, labels in pairs])

    (train_features, train_labels), (val_features, val_labels) = encode(train), encode(val)
    return (train_labels[(val_features @ train_features.T).argmax(1)] == val_labels).double().mean().item()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("data", type=Path, help="folder with train/ and val/")
    parser.add_argument("--loader", choices=["torchdali", "torch"], default="torchdali")
    parser.add_argument("--model", default="resnet18", help="any of torchvision's ResNets")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument(
        "--batch-size", type=int, default=128, help="images in a step; the network sees all their crops"
    )
    parser.add_argument("--size", type=int, default=224, help="height and width of the large crops")
    parser.add_argument("--local-size", type=int, default=96, help="height and width of the small crops")
    parser.add_argument("--local-crops", type=int, default=6, help="number of small crops")
    parser.add_argument("--strength", type=float, default=1.0, help="strength of the change of colours")
    parser.add_argument("--outputs", type=int, default=1024, help="number of outputs of student and teacher")
    parser.add_argument("--momentum", type=float, default=0.99, help="momentum of the teacher")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate at the start")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="num_workers")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()

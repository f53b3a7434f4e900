"""Learn from an image folder without its labels (SimCLR), with torchdali or with DataLoader.

What it shows: ``MultiView`` is a transform that makes two views of each image. The loader yields a list of two
batches, as DataLoader does with any such transform. torchdali decodes each image once, and makes both views on the
GPU. DINO's multi-crop is a longer list, with smaller crops.

DATA holds ``train/`` and ``val/``, each with one folder of images per class. The classes are used only for the
printed accuracy: how often the most similar training image of a validation image has its class::

    python recipes/simclr.py DATA
    python recipes/simclr.py DATA --loader torch

If you have no dataset, ``torchdali demo`` writes a small one to ``torchdali-demo/pictures``. For that one, add
``--size 64 --batch-size 64 --epochs 5``. A CPU is enough.

What to expect: one line for each epoch, with the loss, the accuracy of the nearest neighbour on ``val/``, and the
training images per second, each of them two views. The views cost several times as much as those of a supervised
recipe, so with DataLoader a GPU waits for the CPU.
"""

from __future__ import annotations

import argparse
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


def main() -> None:
    args = parse_args()

    if args.loader == "torchdali":
        from torchdali import DALILoader as DataLoader  # the one changed line
    else:
        from torch.utils.data import DataLoader

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)

    to_float = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    jitter = v2.ColorJitter(0.8 * args.strength, 0.8 * args.strength, 0.8 * args.strength, 0.2 * args.strength)
    blur = v2.GaussianBlur(args.size // 20 * 2 + 1, sigma=(0.1, 2.0))
    view = v2.Compose(
        [
            v2.RandomResizedCrop(args.size),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([jitter], p=0.8),
            v2.RandomGrayscale(p=0.2),
            v2.RandomApply([blur], p=0.5),
            *to_float,
        ]
    )
    whole = v2.Compose([v2.Resize(args.size * 8 // 7), v2.CenterCrop(args.size), *to_float])

    settings = {
        "num_workers": args.workers,
        "pin_memory": device.type == "cuda",
        "persistent_workers": args.workers > 0,
    }
    views = ImageFolder(args.data / "train", transform=MultiView([view, view]))
    loader = DataLoader(views, args.batch_size, shuffle=True, drop_last=True, **settings)
    train, val = (
        DataLoader(ImageFolder(args.data / split, transform=whole), args.batch_size, **settings)
        for split in ("train", "val")
    )
    if not len(loader):
        raise SystemExit(f"{len(views)} training images are less than --batch-size {args.batch_size}")

    encoder = models.get_model(args.model, weights=None)
    width, encoder.fc = encoder.fc.in_features, nn.Identity()
    projector = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 128))
    model = nn.Sequential(encoder, projector).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    for epoch in range(args.epochs):
        model.train()
        start, loss_sum, seen = time.perf_counter(), torch.zeros((), device=device), 0
        for (first, second), _ in loader:
            images = torch.cat([first, second]).to(device, memory_format=torch.channels_last, non_blocking=True)
            with autocast:
                projected = model(images)
            loss = nt_xent(projected.float(), args.temperature)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            loss_sum += loss.detach() * len(first)
            seen += len(first)
        # Reading the sum waits for the GPU, so the time is read after it.
        loss = loss_sum.item() / seen
        speed = seen / (time.perf_counter() - start)
        accuracy = measure_nearest_neighbour(encoder.eval(), train, val, device)
        print(
            f"epoch {epoch + 1:3}/{args.epochs}  loss {loss:.4f}  acc {accuracy:7.2%}  {speed:8,.0f} images/s",
            flush=True,
        )


def nt_xent(projected: Tensor, temperature: float) -> Tensor:
    """Return SimCLR's loss for N first views, followed by the N second views of the same images."""
    projected = F.normalize(projected)
    similarity = projected @ projected.T / temperature
    similarity.fill_diagonal_(float("-inf"))
    partner = torch.arange(len(projected), device=projected.device).roll(len(projected) // 2)
    return F.cross_entropy(similarity, partner)


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
        "--batch-size", type=int, default=256, help="images in a step; the network sees two views of each"
    )
    parser.add_argument("--size", type=int, default=224, help="height and width that the network sees")
    parser.add_argument("--strength", type=float, default=1.0, help="strength of the change of colours")
    parser.add_argument("--temperature", type=float, default=0.2)
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate at the start")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="num_workers")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()

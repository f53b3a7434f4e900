"""Train a network of timm with timm's transforms, optimizer, schedule, MixUp and averaged weights, on torchdali.

What it shows: of a timm script only the loader changes. ``create_transform`` makes the transforms as before, for the
network's size, mean and deviation, and torchdali has rules for its classes. ``create_loader``, with its fast
collation and its prefetcher, is left out. All that comes after the loader stays timm's.

Of timm's transforms, only its automatic augmentation (such as ``rand-m9-mstd0.5-inc1``) would run in torch, image by
image. ``separate=True`` returns the transforms in three parts. So torchvision's ``RandAugment`` can replace timm's,
and runs in DALI::

    pip install timm
    python recipes/timm_training.py DATA --model resnet18
    python recipes/timm_training.py DATA --model vit_tiny_patch16_224 --rand-augment --mixup 0.2 --cutmix 1
    python recipes/timm_training.py DATA --loader timm

DATA holds ``train/`` and ``val/``, each with one folder of images per class. If you have no dataset, ``torchdali
demo`` writes a small one to ``torchdali-demo/pictures``. For that one, add ``--size 96 --batch-size 32 --epochs 5``.
A CPU is enough.

What to expect: first what runs where (``explain()``), which is all in DALI. Then one line for each epoch, with the
loss, the accuracy of the averaged weights on ``val/``, and the training images per second. With ``--loader timm``,
the same with timm's loader: the accuracies differ as those of two seeds do. The images per second differ if the GPU
waits for the loader.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import timm
import torch
from timm.data import Mixup, create_loader, create_transform, resolve_model_data_config
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2


def main() -> None:
    args = parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)

    train_set, val_set = (ImageFolder(args.data / split) for split in ("train", "val"))
    classes = len(train_set.classes)
    if len(train_set) < args.batch_size:
        raise SystemExit(f"{len(train_set)} training images are less than --batch-size {args.batch_size}")
    # A network for images of one size must be made for that size.
    sized = {"img_size": args.size} if args.size and "vit" in args.model else {}
    net = timm.create_model(args.model, num_classes=classes, **sized)
    config = resolve_model_data_config(net)
    if args.size:
        config["input_size"] = (3, args.size, args.size)
    make_loaders = make_timm_loaders if args.loader == "timm" else make_torchdali_loaders
    loader, val_loader = make_loaders(train_set, val_set, config, device, args)

    net = net.to(device, memory_format=torch.channels_last)
    averaged = ModelEmaV3(net, decay=0.999, use_warmup=True)
    optimizer = create_optimizer_v2(net, opt="adamw", lr=args.lr, weight_decay=0.05)
    schedule, _ = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=args.epochs, step_on_epochs=False, updates_per_epoch=len(loader)
    )
    mix, criterion = None, LabelSmoothingCrossEntropy(0.1)
    if args.mixup or args.cutmix:
        mix = Mixup(args.mixup, args.cutmix, label_smoothing=0.1, num_classes=classes)
        criterion = SoftTargetCrossEntropy()
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    step = 0
    for epoch in range(args.epochs):
        net.train()
        start, loss_sum, seen = time.perf_counter(), torch.zeros((), device=device), 0
        for images, labels in loader:
            images = images.to(device, memory_format=torch.channels_last, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            if mix:
                images, labels = mix(images, labels)
            with autocast:
                loss = criterion(net(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            averaged.update(net, step=step)
            schedule.step_update(step)
            loss_sum += loss.detach() * len(images)
            seen += len(images)
        # Reading the sum waits for the GPU, so the time is read after it.
        loss = loss_sum.item() / seen
        speed = seen / (time.perf_counter() - start)

        averaged.module.eval()
        correct = torch.zeros((), device=device)
        with torch.inference_mode(), autocast:
            for images, labels in val_loader:
                images = images.to(device, memory_format=torch.channels_last, non_blocking=True)
                correct += (averaged.module(images).argmax(1) == labels.to(device)).sum()
        print(
            f"epoch {epoch + 1:3}/{args.epochs}  loss {loss:.4f}  acc {correct.item() / len(val_set):7.2%}  "
            f"{speed:8,.0f} images/s",
            flush=True,
        )


def make_torchdali_loaders(train_set, val_set, config: dict, device: torch.device, args: argparse.Namespace) -> tuple:
    """Return torchdali's loaders, with timm's transforms."""
    from torchdali import DALILoader

    settings = {name: config[name] for name in ("input_size", "interpolation", "mean", "std")}
    first, augmentation, last = create_transform(**settings, is_training=True, re_prob=args.random_erase, separate=True)
    train_set.transform = v2.Compose([first, v2.RandAugment() if args.rand_augment else augmentation, last])
    val_set.transform = create_transform(**settings, crop_pct=config["crop_pct"])
    loader = DALILoader(
        train_set, args.batch_size, shuffle=True, drop_last=True, num_workers=args.workers, device=device
    )
    loader.explain()
    return loader, DALILoader(val_set, args.batch_size, num_workers=args.workers, device=device)


def make_timm_loaders(train_set, val_set, config: dict, device: torch.device, args: argparse.Namespace) -> tuple:
    """Return timm's loaders, as in its training script."""
    settings = {name: config[name] for name in ("input_size", "interpolation", "mean", "std")}
    settings |= {"num_workers": max(1, args.workers), "use_prefetcher": device.type == "cuda", "device": device}
    policy = "rand-m9-mstd0.5-inc1" if args.rand_augment else None
    loader = create_loader(
        train_set,
        batch_size=args.batch_size,
        is_training=True,
        color_jitter=0.4,
        auto_augment=policy,
        re_prob=args.random_erase,
        **settings,
    )
    return loader, create_loader(val_set, batch_size=args.batch_size, crop_pct=config["crop_pct"], **settings)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("data", type=Path, help="folder with train/ and val/")
    parser.add_argument("--loader", choices=["torchdali", "timm"], default="torchdali")
    parser.add_argument("--model", default="resnet18", help="any of timm.list_models()")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--size", type=int, help="height and width that the network sees; its own by default")
    parser.add_argument(
        "--rand-augment", action="store_true", help="use torchvision's RandAugment, or timm's with timm's loader"
    )
    parser.add_argument("--random-erase", type=float, default=0.0, help="probability")
    parser.add_argument(
        "--mixup", type=float, default=0.0, help="alpha; with --cutmix too, one of the two is drawn for each batch"
    )
    parser.add_argument("--cutmix", type=float, default=0.0, help="alpha")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate at the start")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="num_workers")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()

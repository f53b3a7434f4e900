"""Train a torchvision network on an image folder, on one or many GPUs, with torchdali or with DataLoader.

What it shows: an ordinary PyTorch training script with mixed precision, channels_last, DistributedDataParallel, a
cosine learning rate and label smoothing. torchdali changes only the import of the loader. The dataset, the
transforms, the samplers and the loop stay the same.

DATA holds ``train/`` and ``val/``, each with one folder of images per class. The commands train alone, train with
DataLoader to compare, and train with one process for each of four GPUs::

    python recipes/imagefolder_classification.py DATA
    python recipes/imagefolder_classification.py DATA --loader torch
    torchrun --nproc-per-node 4 recipes/imagefolder_classification.py DATA

With more augmentation, as in torchvision's newer training recipes::

    python recipes/imagefolder_classification.py DATA --auto-augment ta_wide --random-erase 0.1 --mixup 0.2 --cutmix 1

If you have no dataset, ``torchdali demo`` writes a small one to ``torchdali-demo/pictures``. For that one, add
``--size 96 --batch-size 32 --lr 0.05 --epochs 5``. A CPU is enough.

What to expect: one line for each epoch, with the loss, the accuracy on ``val/``, and the training images per second
of all processes together. Both loaders give the same images in the same order, with the same kind of random
augmentation, so their accuracies differ as those of two seeds do. The images per second differ if the GPU waits for
the loader: with small networks, fast GPUs, or few cores for each GPU.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, SequentialSampler, Subset
from torchvision import models
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
AUTO_AUGMENT = {"ra": v2.RandAugment, "ta_wide": v2.TrivialAugmentWide, "augmix": v2.AugMix, "imagenet": v2.AutoAugment}


def main() -> None:
    args = parse_args()

    # Import torchdali before the first use of CUDA. It sets the number of hardware queues of this process.
    if args.loader == "torchdali":
        from torchdali import DALILoader as DataLoader  # the one changed line
    else:
        from torch.utils.data import DataLoader

    rank, world, device = initialize()
    torch.manual_seed(args.seed)

    normalize = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    augment = [v2.ToImage(), v2.RandomResizedCrop(args.size, antialias=True), v2.RandomHorizontalFlip()]
    if args.auto_augment:
        augment.append(AUTO_AUGMENT[args.auto_augment]())
    erase = [v2.RandomErasing(args.random_erase)] if args.random_erase else []
    view = [v2.ToImage(), v2.Resize(args.size * 8 // 7, antialias=True), v2.CenterCrop(args.size)]
    train_set = ImageFolder(args.data / "train", transform=v2.Compose([*augment, *normalize, *erase]))
    val_set = ImageFolder(args.data / "val", transform=v2.Compose([*view, *normalize]))

    sampler = DistributedSampler(train_set, world, rank, seed=args.seed)
    # A DistributedSampler would repeat images so that all processes have equally many, and count them twice.
    val_part = Subset(val_set, range(rank, len(val_set), world))
    settings = {
        "num_workers": args.workers,
        "pin_memory": device.type == "cuda",
        "persistent_workers": args.workers > 0,
    }
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True, **settings)
    # With a sampler, torchdali does not warn that each process gets all images.
    val_loader = DataLoader(val_part, args.batch_size, sampler=SequentialSampler(val_part), **settings)
    if not len(train_loader):
        raise SystemExit(f"{len(sampler)} training images a process are less than --batch-size {args.batch_size}")

    classes = len(train_set.classes)
    mixes = [v2.MixUp(alpha=args.mixup, num_classes=classes)] if args.mixup else []
    mixes += [v2.CutMix(alpha=args.cutmix, num_classes=classes)] if args.cutmix else []
    mix = v2.RandomChoice(mixes) if mixes else None

    net = models.get_model(args.model, weights=None, num_classes=classes)
    net = net.to(device, memory_format=torch.channels_last)
    ids = [device.index] if device.type == "cuda" else None
    model = DistributedDataParallel(net, device_ids=ids) if world > 1 else net
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    optimizer = torch.optim.SGD(net.parameters(), args.lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train_loader))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "none": torch.float32}[args.amp]
    autocast = torch.autocast(device.type, dtype, enabled=device.type == "cuda" and args.amp != "none")
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda" and args.amp == "fp16")

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        start, loss_sum, seen = time.perf_counter(), torch.zeros((), device=device), 0
        for images, labels in train_loader:
            images = images.to(device, memory_format=torch.channels_last, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            if mix:
                images, labels = mix(images, labels)
            with autocast:
                loss = criterion(model(images), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            loss_sum += loss.detach() * len(labels)
            seen += len(labels)
        # Reading the sum waits for the GPU, so the time is read after it.
        loss_sum, count = sum_over_processes(loss_sum.item(), seen, device=device)
        speed = count / (time.perf_counter() - start)

        net.eval()
        correct, seen = torch.zeros((), device=device), 0
        with torch.inference_mode(), autocast:
            for images, labels in val_loader:
                images = images.to(device, memory_format=torch.channels_last, non_blocking=True)
                correct += (net(images).argmax(1) == labels.to(device, non_blocking=True)).sum()
                seen += len(labels)
        correct, val_count = sum_over_processes(correct.item(), seen, device=device)
        if rank == 0:
            print(
                f"epoch {epoch + 1:3}/{args.epochs}  loss {loss_sum / count:.4f}  "
                f"acc {correct / val_count:7.2%}  {speed:8,.0f} images/s",
                flush=True,
            )

    if dist.is_initialized():
        dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("data", type=Path, help="folder with train/ and val/")
    parser.add_argument("--loader", choices=["torchdali", "torch"], default="torchdali")
    parser.add_argument("--model", default="resnet18", help="any of torchvision.models.list_models()")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=256, help="images in a step of each process")
    parser.add_argument("--size", type=int, default=224, help="height and width that the network sees")
    parser.add_argument("--auto-augment", choices=list(AUTO_AUGMENT), help="policy, applied after the flip")
    parser.add_argument("--random-erase", type=float, default=0.0, help="probability")
    parser.add_argument(
        "--mixup", type=float, default=0.0, help="alpha; with --cutmix too, one of the two is drawn for each batch"
    )
    parser.add_argument("--cutmix", type=float, default=0.0, help="alpha")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate at the start")
    parser.add_argument("--label-smoothing", type=float, default=0.1)
    parser.add_argument(
        "--amp", choices=["bf16", "fp16", "none"], default="bf16", help="precision on CUDA; the CPU uses float32"
    )
    parser.add_argument("--workers", type=int, default=max(1, cores), help="num_workers")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def initialize() -> tuple[int, int, torch.device]:
    """Join torchrun's processes, if there are any. Return rank, world size and this process's device."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return rank, world, device


def sum_over_processes(*values: float, device: torch.device) -> list[float]:
    """Sum each value over the processes."""
    sums = torch.tensor(values, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(sums)
    return sums.tolist()


if __name__ == "__main__":
    main()

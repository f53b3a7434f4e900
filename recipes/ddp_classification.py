r"""Train on one or many GPUs. The run may be killed at any time, and proves that it lost no image.

What it shows: with ``distributed="auto"`` each process gets its share. ``state_dict()`` and ``load_state_dict()``
resume the loader within an epoch. ``merge`` makes one state from those of all processes, so that any number of
processes can resume. Model, optimizer and loader are saved together, every few batches, to one file that is replaced
atomically.

The commands train alone, on four GPUs, and on a CPU with two processes. If a run was killed, the same command resumes
it, also with another number of processes::

    python recipes/ddp_classification.py DATA
    torchrun --standalone --nproc-per-node 4 recipes/ddp_classification.py DATA
    torchrun --standalone --nproc-per-node 2 recipes/ddp_classification.py DATA

DATA holds ``train/`` with one folder of images per class. If it is missing, the pictures of ``torchdali demo`` are
written there. The next command runs two processes, of which one kills itself, and torchrun starts them again. The
variable gives the new processes their own store; without it they may look for the dead ones
(pytorch/pytorch#135712)::

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 --max-restarts 1 \
        recipes/ddp_classification.py DATA --kill-after 17 --kill-rank 1

What to expect: one line for each epoch, with the loss, the number of images, how many came twice, and a checksum of
all images as the network saw them, after random transforms. The checksum does not depend on their order, so it does
not depend on the number of processes. If the run was killed, the checksums are still those of a run that was not. An
image comes twice if the images cannot be shared evenly, as with ``DistributedSampler``. It counts once in the
checksum.
"""

from __future__ import annotations

import argparse
import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

# Import torchdali before the first use of CUDA. It sets the number of hardware queues of this process.
from torchdali import DALILoader as DataLoader
from torchdali.state import merge


def main() -> None:
    args = parse_args()
    device = initialize()
    rank, world = dist.get_rank(), dist.get_world_size()
    print(f"process {os.getpid()} is rank {rank} of {world}, on {device}", flush=True)
    if rank == 0 and not (args.data / "train").exists():
        from torchdali.tools.demo.pictures import write_pictures

        write_pictures(args.data, train=24, val=1, seed=0, tick=lambda _: None)
    dist.barrier()

    train = v2.Compose(
        [
            *(v2.ToImage(), v2.RandomResizedCrop(args.size), v2.RandomHorizontalFlip(), v2.ColorJitter(0.4, 0.4, 0.4)),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )
    data = ImageFolder(args.data / "train", train)
    class_of = torch.tensor(data.targets, device=device)
    # Each label becomes the image's number, which identifies it. Its class follows from that.
    data.samples = [(path, number) for number, (path, _) in enumerate(data.samples)]
    loader = DataLoader(
        data, args.batch_size, shuffle=True, num_workers=args.workers, device=device, seed=args.seed, distributed="auto"
    )

    torch.manual_seed(args.seed)
    net = make_cnn(len(data.classes)).to(device)
    model = DistributedDataParallel(net, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(net.parameters(), args.lr, momentum=0.9)

    first, checksums = 0, []
    # In this epoch: a fingerprint of each image; the sum of the losses, and the number of images.
    prints, sums = make_counters(len(data), device)
    if resumed := args.checkpoint.exists():
        checkpoint = torch.load(args.checkpoint, map_location=device, weights_only=True)
        net.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        loader.load_state_dict(checkpoint["loader"])
        first, checksums, prints = checkpoint["epoch"], checkpoint["checksums"], checkpoint["prints"]
        sums = checkpoint["sums"] if rank == 0 else sums
        if rank == 0:
            print(f"resumes after {checkpoint['sums'][1]:.0f} images of epoch {first + 1}", flush=True)

    def save(epoch: int) -> None:
        """Save a checkpoint. All processes must call this after the same number of batches."""
        states: list[Any] = [None] * world
        dist.all_gather_object(states, loader.state_dict())
        all_prints, all_sums = reduce_counters(prints, sums)
        if rank:
            return
        checkpoint = {"epoch": epoch, "checksums": checksums, "prints": all_prints, "sums": all_sums}
        checkpoint |= {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "loader": merge(states)}
        new = args.checkpoint.with_suffix(".new")
        with new.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(args.checkpoint)  # atomic: if this process is killed, there is the old file or the new one

    batches = 0
    for epoch in range(first, args.epochs):
        loader.set_epoch(epoch)
        for images, numbers in loader:
            loss = nn.functional.cross_entropy(model(images), class_of[numbers])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            prints[numbers] = compute_fingerprints(images)
            sums += torch.stack([loss.detach() * len(numbers), torch.tensor(float(len(numbers)), device=device)])
            batches += 1
            if batches % args.save_every == 0:
                save(epoch)
            if batches == args.kill_after and args.kill_rank in (None, rank) and not resumed:
                os.kill(os.getpid(), signal.SIGKILL)

        prints, sums = reduce_counters(prints, sums)
        checksums.append(checksum := prints.sum().item() % 2**64)
        loss_sum, count = sums.tolist()
        seen = int((prints > 0).sum())
        if rank == 0:
            print(
                f"epoch {epoch + 1:3}/{args.epochs}  loss {loss_sum / count:.4f}  {seen} of {len(data)} images, "
                f"{count - seen:.0f} twice  checksum {checksum:016x}",
                flush=True,
            )
        prints, sums = make_counters(len(data), device)
        save(epoch + 1)

    if rank == 0:
        print(f"checksum of {len(checksums)} epochs  {sum(checksums) % 2**64:016x}", flush=True)
    loader.close()
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "data", type=Path, nargs="?", default=Path("torchdali-demo/pictures"), help="folder with train/"
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path("ddp-checkpoint.pt"),
        help="file to save to, and to resume from if it exists",
    )
    parser.add_argument("--save-every", type=int, default=5, help="number of batches between checkpoints")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="images in a step of each process")
    parser.add_argument("--size", type=int, default=64, help="height and width that the network sees")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate")
    parser.add_argument("--workers", type=int, default=0, help="num_workers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill-after", type=int, help="number of batches after which the first run kills itself")
    parser.add_argument("--kill-rank", type=int, help="process that does so; all of them by default")
    return parser.parse_args()


def initialize() -> torch.device:
    """Join torchrun's processes, or make a group of one, and return this process's device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    alone = {} if "WORLD_SIZE" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", **alone)
    return device


def make_cnn(classes: int) -> nn.Module:
    widths, layers = (3, 16, 32, 64), []
    for before, width in pairwise(widths):
        layers += [nn.Conv2d(before, width, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))


def make_counters(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.zeros(count, dtype=torch.int64, device=device), torch.zeros(2, dtype=torch.float64, device=device)


def reduce_counters(prints: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Combine the counters of all processes. If an image came twice, its fingerprints are equal."""
    prints, sums = prints.clone(), sums.clone()
    dist.all_reduce(prints, dist.ReduceOp.MAX)
    dist.all_reduce(sums)
    return prints, sums


def compute_fingerprints(images: Tensor) -> Tensor:
    """Return ``(N,)`` positive integers for ``(N, C, H, W)`` float32 images. Any changed bit changes the integer."""
    pixels = images.reshape(len(images), -1).view(torch.int32).long()
    odd = torch.arange(pixels.shape[1], device=images.device) * 0x2545F4914F6CDD1D * 2 + 1  # overflows, as intended
    sums = (pixels * odd).sum(1)
    return ((sums ^ (sums >> 29)) * 0x5851F42D4C957F2D & (2**62 - 1)) | 1


if __name__ == "__main__":
    main()

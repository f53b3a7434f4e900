r"""Train on one or many GPUs so that the run can be killed at any moment, and prove that it lost no image.

What it shows: ``distributed="auto"``, which gives each process its share; ``state_dict()`` and
``load_state_dict()``, with which the loader goes on in the midst of an epoch; and ``merge``, which makes one state
of those of all processes, so that any number of them can go on. Model, optimizer and loader are saved together,
every few batches, to one file that is replaced at once.

Alone, on four GPUs, and on two processors without one; a second run of the same line goes on where the first
was when it was killed, and with another number of processes if that is changed::

    python recipes/ddp_classification.py DATA
    torchrun --standalone --nproc-per-node 4 recipes/ddp_classification.py DATA
    torchrun --standalone --nproc-per-node 2 recipes/ddp_classification.py DATA

DATA holds ``train/`` with one folder of images per class. Where there is none, the pictures of ``torchdali demo``
are written there. To see a run die and go on by itself, with two processes of which one kills itself; the variable
gives the new processes a store of their own, without which they may look for those that died (pytorch/pytorch#135712)::

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 --max-restarts 1 \
        recipes/ddp_classification.py DATA --kill-after 17 --kill-rank 1

What to expect: one line an epoch with the loss, how many of the images came, how many came twice, and a checksum of
all of them as the network saw them, after random transforms. It does not depend on their order, and so not on the
number of processes. However often the run was killed, the checksums are those of a run that was not. An image comes
twice where the images cannot be shared evenly, as with ``DistributedSampler``; it counts once in the checksum.
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

# Before the first use of CUDA: torchdali sets how many hardware queues the driver gives this process.
from torchdali import DALILoader as DataLoader
from torchdali.state import merge


def main() -> None:
    args = parse_args()
    device = set_up()
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
    # The loader is to give each image's number, by which it is known, and from which its class follows.
    data.samples = [(path, number) for number, (path, _) in enumerate(data.samples)]
    loader = DataLoader(
        data, args.batch_size, shuffle=True, num_workers=args.workers, device=device, seed=args.seed, distributed="auto"
    )

    torch.manual_seed(args.seed)
    net = small_cnn(len(data.classes)).to(device)
    model = DistributedDataParallel(net, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(net.parameters(), args.lr, momentum=0.9)

    first, checksums = 0, []
    # Of this epoch: what each image looked like, as a number; the sum of the losses, and how many images came.
    looks, sums = nothing_seen(len(data), device)
    if resumed := args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location=device, weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        first, checksums, looks = saved["epoch"], saved["checksums"], saved["looks"]
        sums = saved["sums"] if rank == 0 else sums
        if rank == 0:
            print(f"goes on after {saved['sums'][1]:.0f} images of epoch {first + 1}", flush=True)

    def save(epoch: int) -> None:
        """To be called by all processes after as many batches."""
        states: list[Any] = [None] * world
        dist.all_gather_object(states, loader.state_dict())
        all_looks, all_sums = of_all(looks, sums)
        if rank:
            return
        saved = {"epoch": epoch, "checksums": checksums, "looks": all_looks, "sums": all_sums}
        saved |= {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "loader": merge(states)}
        beside = args.checkpoint.with_suffix(".new")
        with beside.open("wb") as file:
            torch.save(saved, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(args.checkpoint)  # at once: whoever kills us finds the old one or the new one

    batches = 0
    for epoch in range(first, args.epochs):
        loader.set_epoch(epoch)
        for images, numbers in loader:
            loss = nn.functional.cross_entropy(model(images), class_of[numbers])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            looks[numbers] = fingerprints(images)
            sums += torch.stack([loss.detach() * len(numbers), torch.tensor(float(len(numbers)), device=device)])
            batches += 1
            if batches % args.save_every == 0:
                save(epoch)
            if batches == args.kill_after and args.kill_rank in (None, rank) and not resumed:
                os.kill(os.getpid(), signal.SIGKILL)

        looks, sums = of_all(looks, sums)
        checksums.append(checksum := looks.sum().item() % 2**64)
        loss_sum, count = sums.tolist()
        came = int((looks > 0).sum())
        if rank == 0:
            print(
                f"epoch {epoch + 1:3}/{args.epochs}  loss {loss_sum / count:.4f}  {came} of {len(data)} images, "
                f"{count - came:.0f} twice  checksum {checksum:016x}",
                flush=True,
            )
        looks, sums = nothing_seen(len(data), device)
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
        "--checkpoint", type=Path, default=Path("ddp-checkpoint.pt"), help="goes on from it, if it exists"
    )
    parser.add_argument("--save-every", type=int, default=5, help="batches")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="images a step, of each process")
    parser.add_argument("--size", type=int, default=64, help="height and width that the network sees")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate")
    parser.add_argument("--workers", type=int, default=0, help="num_workers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill-after", type=int, help="batches, after which the first run kills itself with SIGKILL")
    parser.add_argument("--kill-rank", type=int, help="the process that does so; without it, each of them")
    return parser.parse_args()


def set_up() -> torch.device:
    """Joins torchrun's processes, or makes a group of this one alone; gives this process's device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    alone = {} if "WORLD_SIZE" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", **alone)
    return device


def small_cnn(classes: int) -> nn.Module:
    widths, layers = (3, 16, 32, 64), []
    for before, width in pairwise(widths):
        layers += [nn.Conv2d(before, width, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))


def nothing_seen(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.zeros(count, dtype=torch.int64, device=device), torch.zeros(2, dtype=torch.float64, device=device)


def of_all(looks: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """What all processes saw together: of an image that came to two of them either number, because they are equal."""
    looks, sums = looks.clone(), sums.clone()
    dist.all_reduce(looks, dist.ReduceOp.MAX)
    dist.all_reduce(sums)
    return looks, sums


def fingerprints(images: Tensor) -> Tensor:
    """``(N,)`` a positive integer of each image, which any changed bit of a ``(N, C, H, W)`` float32 batch changes."""
    pixels = images.reshape(len(images), -1).view(torch.int32).long()
    odd = torch.arange(pixels.shape[1], device=images.device) * 0x2545F4914F6CDD1D * 2 + 1  # overflows, as it should
    sums = (pixels * odd).sum(1)
    return ((sums ^ (sums >> 29)) * 0x5851F42D4C957F2D & (2**62 - 1)) | 1


if __name__ == "__main__":
    main()

"""Train with Ray Train, on one machine or on a cluster.

What it shows: the loader and Ray's ``prepare_data_loader`` are imported from torchdali, and nothing else changes. Each
worker decodes its own share on its own GPU.

::

    python recipes/ray_training.py DATA --workers 2

DATA holds ``train/`` with one folder of images per class, on storage that all workers see. If it is missing, the
pictures of ``torchdali demo`` are written there. Without a GPU the workers use CPUs. It needs ``pip install
'ray[train]'``.

What to expect: one line for each epoch, with the loss and the number of images of all workers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
import torchvision
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torchvision.transforms import v2

from torchdali import DALILoader as DataLoader
from torchdali.ray import prepare_data_loader


def train_loop(config: dict[str, Any]) -> None:
    """What each worker runs."""
    chain = v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop(config["size"]),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
    loader = DataLoader(config["data"], batch_size=config["batch_size"], shuffle=True, transform=chain, seed=0)
    classes = len(loader.dataset.classes)
    loader = prepare_data_loader(loader)
    net = ray.train.torch.prepare_model(torchvision.models.get_model(config["model"], num_classes=classes))
    optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"], momentum=0.9)
    rank = ray.train.get_context().get_world_rank()
    for epoch in range(config["epochs"]):
        if ray.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        sums = torch.zeros(2, device=ray.train.torch.get_device())
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(net(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item() * len(labels), len(labels)], device=sums.device)
        if dist.is_initialized():
            dist.all_reduce(sums)
        metrics = {"loss": float(sums[0] / sums[1]), "images": int(sums[1])}
        if rank == 0:
            print(f"epoch {epoch + 1:3d}/{config['epochs']}  loss {metrics['loss']:.4f}  {metrics['images']} images")
        ray.train.report(metrics)


def main() -> None:
    args = parse_args()
    train = args.data.resolve() / "train"
    if not train.exists():
        from torchdali.tools.demo.pictures import write_pictures

        write_pictures(args.data, train=24, val=1, seed=0, tick=lambda _: None)
    config = {**vars(args), "data": str(train)}
    scaling = ScalingConfig(num_workers=args.workers, use_gpu=torch.cuda.is_available())
    run = RunConfig(storage_path=str(args.results.resolve()))
    result = TorchTrainer(train_loop, train_loop_config=config, scaling_config=scaling, run_config=run).fit()
    print(f"loss of the last epoch: {result.metrics['loss']:.4f}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with train/<class>/<image>")
    parser.add_argument("--workers", type=int, default=1, help="processes of Ray; with GPUs one for each")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=64, help="of each worker")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--results", type=Path, default=Path("ray_results"), help="where Ray keeps the run")
    return parser.parse_args()


if __name__ == "__main__":
    main()

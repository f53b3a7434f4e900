"""One rank with a GPU of its own, which is not the first: makes batches in every way, and says where contexts came up.

Run as ``python own_gpu.py PICTURES RESULTS HOW``, with LOCAL_RANK set; tests/gpu/test_own_gpu.py does. HOW is "auto",
which leaves torch's current device at the first one, or "set_device".
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, compile  # noqa: A004

TRAIN = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(32, antialias=True), v2.RandomHorizontalFlip()])
BATCH = 8


class Arrays(Dataset[Any]):
    """What has to be asked."""

    def __init__(self, folder: ImageFolder) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return len(self.folder.samples)

    def __getitem__(self, index: int) -> Any:
        return v2.functional.center_crop(v2.functional.pil_to_tensor(self.folder[index][0]), [40, 40]), index


def in_memory(folder: ImageFolder) -> Any:
    """A dataset in memory, which is copied to the device."""
    from torchvision.datasets import CIFAR10

    dataset = CIFAR10.__new__(CIFAR10)
    pixels = np.stack([np.asarray(image.resize((32, 32))) for image, _ in folder])
    vars(dataset).update(
        data=pixels, targets=list(range(len(pixels))), transform=None, target_transform=None, transforms=None
    )
    return dataset


def used() -> dict[str, int]:
    """MiB that are in use on each GPU of the host, of whichever process."""
    query = ["nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    return {uuid.strip(): int(mib) for uuid, mib in (line.split(",") for line in lines)}


def contexts() -> list[int]:
    """The devices on which this process has a context."""
    return [i for i in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(i)]


def seen(loader: Any) -> list[Any]:
    """Of two epochs: devices of the batches, and what they are."""
    found: list[Any] = []
    with loader:
        for _ in range(2):
            for batch in loader:
                tensors = [one for one in batch if isinstance(one, torch.Tensor)]
                devices = sorted({str(one.device) for one in tensors})
                found.append((devices, [hashlib.sha256(one.cpu().numpy().tobytes()).hexdigest() for one in tensors]))
            loader.stats()
    return found


def explained(loader: Any) -> str:
    text = io.StringIO()
    loader.explain(text)
    return text.getvalue().replace("\n           ", " ")  # as if no line was wrapped


def steps(folder: ImageFolder, files: list[str]) -> dict[str, Callable[[], Any]]:
    def read(**options: Any) -> Any:
        options = {"transform": TRAIN, **options}
        return DALILoader(folder, BATCH, shuffle=True, seed=1, distributed="auto", **options)

    def asked(**options: Any) -> Any:
        return DALILoader(Arrays(folder), BATCH, seed=1, distributed="auto", **options)

    def probed() -> Any:
        with read() as loader:
            return str(loader.stats(probe=True)) != ""

    def transformed() -> Any:
        torch.manual_seed(0)
        batch = compile(TRAIN)(files[:BATCH])
        return str(batch.device), hashlib.sha256(batch.cpu().numpy().tobytes()).hexdigest()

    in_torch, mix = v2.Compose([TRAIN, v2.Lambda(lambda x: x / 255 + torch.rand(()))]), v2.MixUp(num_classes=3)
    return {
        "explain": lambda: explained(read()),
        "read": lambda: seen(read()),
        "read, timeout": lambda: seen(read(timeout=30)),
        "read, in torch": lambda: seen(read(transform=in_torch, batch_transform=lambda x, y: mix(x, y % 3))),
        "cache": lambda: seen(read(cache="device")),
        "cache, host": lambda: seen(read(cache="host")),
        "in memory": lambda: seen(DALILoader(in_memory(folder), BATCH, seed=1, transform=TRAIN, distributed="auto")),
        "asked": lambda: seen(asked(transform=v2.RandomHorizontalFlip())),
        "asked, workers": lambda: seen(asked(transform=v2.RandomHorizontalFlip(), num_workers=2)),
        "moved": lambda: seen(asked()),
        "moved, workers": lambda: seen(asked(num_workers=2, persistent_workers=True)),
        "probe": probed,
        "compile": transformed,
    }


def main() -> None:
    pictures, results, how = sys.argv[1:]
    rank = int(os.environ["LOCAL_RANK"])
    if how == "set_device":
        torch.cuda.set_device(rank)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(5)
    folder = ImageFolder(pictures)
    files = [path for path, _ in folder.samples]
    folder.samples = [(path, i) for i, path in enumerate(files)]
    first = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    found: dict[str, Any] = {"current": torch.cuda.current_device(), "first": [used().get(first)], "contexts": {}}
    found["contexts"]["before"] = contexts()
    found["batches"] = {}
    for name, step in steps(folder, files).items():
        found["batches"][name] = step()
        found["contexts"][name] = contexts()
    found["first"].append(used().get(first))
    found["current at the end"] = torch.cuda.current_device()
    Path(results).write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

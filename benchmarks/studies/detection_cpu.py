"""Measure the time of all cores for samples with boxes by both loaders, without a GPU.

``python -m benchmarks.studies.detection_cpu`` writes ``benchmarks/results/detection-cpu.md``.
"""

import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import skimage.data
import torch
import torchvision
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from benchmarks.studies.boxes import CHAINS
from torchdali import DALILoader
from torchdali.tools.bench import metrics

IMAGES, EPOCHS = 64, 4
END: list[v2.Transform] = [v2.ToDtype(torch.float32, scale=True), v2.SanitizeBoundingBoxes(), v2.ToPureTensor()]
FILL: dict[Any, Any] = {tv_tensors.Image: (123.0, 117.0, 104.0), "others": 0}
ON_THE_CPU = {
    **CHAINS,
    "ssdlite, then Resize 320": [*CHAINS["ssdlite (RandomIoUCrop)"], v2.Resize((320, 320))],
    "ssd": [v2.RandomPhotometricDistort(), v2.RandomZoomOut(fill=FILL), *CHAINS["ssdlite (RandomIoUCrop)"]],
}


class Pictures(Dataset[Any]):
    """Crops of a photograph with 7 boxes each. Without a transform, samples have paths."""

    def __init__(self, folder: Path, transform: Any = None) -> None:
        self.folder, self.transform = folder, transform

    def write(self) -> None:
        """Write the files."""
        picture = PIL.Image.fromarray(skimage.data.astronaut()).resize((900, 900))
        for i in range(IMAGES):
            crop = picture.crop((4 * i, 3 * i, 4 * i + 640, 3 * i + 480))
            crop.save(self.folder / f"{i}.jpg", quality=92)

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> Any:
        rng = np.random.default_rng(index)
        low = rng.uniform(0, 0.7, (7, 2))
        corners = np.concatenate((low, low + rng.uniform(0.1, 0.3, (7, 2))), axis=1) * (640, 480, 640, 480)
        boxes = tv_tensors.BoundingBoxes(torch.from_numpy(corners).float(), format="XYXY", canvas_size=(480, 640))
        target = {"boxes": boxes, "labels": torch.arange(7)}
        path = self.folder / f"{index}.jpg"
        return self.transform(PIL.Image.open(path).convert("RGB"), target) if self.transform else (path, target)


def measure_core_time(loader: Any) -> float:
    """Return milliseconds of all cores a sample, the least of several epochs."""
    times: list[float] = []
    for _ in range(EPOCHS):
        start = time.process_time()
        for _ in loader:
            pass
        times.append(time.process_time() - start)
    return min(times) / IMAGES * 1e3


def compare_on_the_cpu() -> list[str]:
    """Return the lines of a table with both loaders, in one process each."""
    torch.set_num_threads(1)  # as in a worker
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        pictures = Pictures(Path(folder))
        pictures.write()
        for name, chain in ON_THE_CPU.items():
            transform = v2.Compose([v2.ToImage(), *chain, *END])
            theirs = measure_core_time(DataLoader(Pictures(Path(folder), transform), 8, collate_fn=list))
            ours = measure_core_time(DALILoader(pictures, 8, transform=transform, device="cpu", collate_fn=list))
            lines.append(f"| {name} | {theirs:.1f} | {ours:.1f} | {ours / theirs:.2f} |")
    return lines


def main() -> None:
    """Run the study and write the table."""
    lines = [
        "# Boxes by both loaders, without a GPU",
        "",
        f"- machine: {metrics.cpu_model()}, {len(os.sched_getaffinity(0))} cores, both busy with other work",
        (
            f"- software: python {platform.python_version()}, torch {torch.__version__}, "
            f"torchvision {torchvision.__version__}"
        ),
        (
            f"- data: {IMAGES} JPEGs of 640x480 with 7 boxes each, in batches of 8, in the process itself; the least "
            f"CPU time of {EPOCHS} epochs, of all threads"
        ),
        "- command: `python -m benchmarks.studies.detection_cpu`",
        "",
        "| Chain, then ToDtype and SanitizeBoundingBoxes | DataLoader, core-ms | torchdali, core-ms | Share |",
        "| --- | ---: | ---: | ---: |",
        *compare_on_the_cpu(),
    ]
    text = "\n".join(lines) + "\n"
    (Path(__file__).parents[1] / "results" / "detection-cpu.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

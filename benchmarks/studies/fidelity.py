"""Measure the CPU time of an image with ``fidelity="exact"`` and ``"fast"`` on DALI's CPU backend, in one process.

``python -m benchmarks.studies.fidelity`` writes ``benchmarks/results/fidelity-cpu.md``.
"""

import os
import platform
import statistics
import time
from pathlib import Path

import torch
import torchvision
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from benchmarks.common import data
from torchdali import DALILoader
from torchdali.tools.bench import metrics

IMAGES = 512
ROUNDS = 8
CHAINS = {
    "RandomResizedCrop(224)": [v2.RandomResizedCrop(224)],
    "Resize(256), CenterCrop(224)": [v2.Resize(256), v2.CenterCrop(224)],
}


def measure_milliseconds(folder: Path, chain: list[v2.Transform]) -> dict[str, float]:
    """Return CPU milliseconds for an image, by fidelity: the median of the rounds."""
    dataset = ImageFolder(folder, v2.Compose([v2.ToImage(), *chain]))
    loaders = {name: DALILoader(dataset, 64, device="cpu", seed=0, fidelity=name) for name in ("exact", "fast")}
    times: dict[str, list[float]] = {name: [] for name in loaders}
    for turn in range(ROUNDS + 1):
        for name, loader in loaders.items():
            start = time.process_time()
            for _ in loader:
                pass
            if turn:  # the first epoch builds pipelines and reads headers
                times[name].append((time.process_time() - start) / len(dataset) * 1000)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Run the study and write the table."""
    folder = data.default_root(IMAGES)
    data.make(folder, IMAGES)
    lines = [
        "# CPU time by fidelity, CPU backend",
        "",
        f"- machine: {metrics.cpu_model()}, {len(os.sched_getaffinity(0))} cores",
        (
            f"- software: python {platform.python_version()}, torch {torch.__version__}, "
            f"torchvision {torchvision.__version__}"
        ),
        f"- data: {IMAGES} JPEGs of about 500x375 in memory; decoding is included; median of {ROUNDS} epochs",
        "- command: `python -m benchmarks.studies.fidelity`",
        "",
        "| CPU-ms an image | exact | fast |",
        "| --- | ---: | ---: |",
    ]
    for name, chain in CHAINS.items():
        result = measure_milliseconds(folder, chain)
        lines.append(f"| {name} | {result['exact']:.2f} | {result['fast']:.2f} |")
    text = "\n".join(lines) + "\n"
    (Path(__file__).parents[1] / "results" / "fidelity-cpu.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

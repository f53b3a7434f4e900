"""Measure the host's time for the boxes of a sample: drawing, moving, dropping and handing them out, in one thread.

``python -m benchmarks.studies.boxes`` writes ``benchmarks/results/boxes-cpu.md``.
"""

import os
import platform
import time
from pathlib import Path

import numpy as np
import torch
import torchvision
from torchvision import tv_tensors
from torchvision.transforms import v2

from torchdali.pipeline.compile import compile_plan
from torchdali.tools.bench import metrics
from torchdali.transforms.rng import Draws, epoch_key
from torchdali.transforms.targets import Targets

BATCH, ROUNDS = 128, 12
CHAINS: dict[str, list[v2.Transform]] = {
    "hflip": [v2.RandomHorizontalFlip()],
    "multiscale": [v2.RandomShortestSize(list(range(480, 801, 32)), max_size=1333), v2.RandomHorizontalFlip()],
    "lsj": [
        v2.ScaleJitter((1024, 1024)),
        v2.RandomCrop((1024, 1024), pad_if_needed=True),
        v2.RandomHorizontalFlip(),
    ],
    "ssdlite (RandomIoUCrop)": [v2.RandomIoUCrop(), v2.RandomHorizontalFlip()],
}


def make_samples() -> tuple[list[list[torch.Tensor]], np.ndarray]:
    """Return the boxes of a batch, 7 a sample on the average, and the sizes of its images."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(400, 641, (BATCH, 2))
    samples: list[list[torch.Tensor]] = []
    for height, width in sizes.tolist():
        count = min(int(rng.geometric(1 / 7)), 60)
        corner = rng.uniform(0, 0.8, (count, 2)) * (width, height)
        side = np.exp(rng.uniform(np.log(8), np.log(220), (count, 2)))
        values = np.concatenate((corner, np.minimum(corner + side, (width, height))), axis=1).astype(np.float32)
        samples.append([tv_tensors.BoundingBoxes(torch.from_numpy(values), format="XYXY", canvas_size=(height, width))])
    return samples, sizes


def measure_microseconds(chain: list[v2.Transform]) -> float:
    """Return microseconds a sample, the least of several batches."""
    samples, sizes = make_samples()
    plan = compile_plan([v2.ToImage(), *chain, v2.SanitizeBoundingBoxes()], torch.device("cpu"), "exact")
    best = float("inf")
    for turn in range(ROUNDS):
        targets = Targets.collect(samples, sizes)
        draws = Draws(epoch_key(turn, 0), np.arange(BATCH), np.zeros(BATCH, np.int64)).keep_params()
        size = sizes
        start = time.thread_time()
        for rule in plan.moves:
            params = rule.draw_and_move(draws.select_position(rule.position), size, targets)
            size = rule.output_size(size, params)
        targets.leaves()
        best = min(best, time.thread_time() - start)
    return best / BATCH * 1e6


def main() -> None:
    """Run the study and write the table."""
    lines = [
        "# Host time for boxes",
        "",
        f"- machine: {metrics.cpu_model()}, {len(os.sched_getaffinity(0))} cores, one thread",
        (
            f"- software: python {platform.python_version()}, torch {torch.__version__}, "
            f"torchvision {torchvision.__version__}"
        ),
        f"- data: batches of {BATCH}, about 7 boxes a sample; the least CPU time of {ROUNDS} batches",
        "- command: `python -m benchmarks.studies.boxes`",
        "",
        "| Chain, then SanitizeBoundingBoxes | µs a sample |",
        "| --- | ---: |",
    ]
    lines += [f"| {name} | {measure_microseconds(chain):.1f} |" for name, chain in CHAINS.items()]
    text = "\n".join(lines) + "\n"
    (Path(__file__).parents[1] / "results" / "boxes-cpu.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

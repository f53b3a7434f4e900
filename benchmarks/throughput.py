"""Draw the chart of the README: ``python -m benchmarks.throughput``.

The numbers are those of ``benchmarks/results/loader-h200.json``, on 16 cores.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.common.benchmark import Bars
from benchmarks.common.picture import draw

_REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = _REPOSITORY / "benchmarks/results/loader-h200.json"
CHART = _REPOSITORY / "docs/images/throughput.svg"
CORES = 16
SYSTEMS = {
    "torchdali, defaults": ("torchdali",),
    "DALI, written and tuned by hand": ("dali_tuned", "dali_tuned_read"),
    "NVIDIA's DALI proxy": ("dali_proxy",),
    "DALI as its documentation writes it": ("dali_documented",),
    "DataLoader, torchvision v2 on tensors": ("dataloader_v2",),
}
"""The bars, from top to bottom, and the systems of each. A bar of several systems is that of the fastest."""


def choose_bars(runs: list[dict[str, Any]]) -> Bars:
    """Return the bars of the README."""
    rates = {run["system"]: run["images_per_s"] for run in runs if run["cores"] == CORES and run["status"] == "ok"}
    groups: list[tuple[str, list[float | None]]] = [
        (title, [max((rates[name] for name in names if name in rates), default=None)])
        for title, names in SYSTEMS.items()
    ]
    return Bars("Loader only", "images/s", [f"{CORES} cores"], groups)


def main() -> None:
    """Draw the chart."""
    whole = json.loads(RESULTS.read_text())
    CHART.parent.mkdir(parents=True, exist_ok=True)
    draw(choose_bars(whole["runs"]), f"Images/s from the loader alone, one {whole['machine']['gpu']}", CHART)


if __name__ == "__main__":
    main()

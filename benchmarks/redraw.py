"""Draw the charts of results again: ``python -m benchmarks.redraw benchmarks/results/loader-h200.json``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.common.picture import draw
from benchmarks.suite.all import BENCHMARKS


def main() -> None:
    """Draw a chart beside each JSON file."""
    parser = argparse.ArgumentParser(description="Draw results.")
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of the benchmarks")
    for path in parser.parse_args().results:
        whole = json.loads(path.read_text())
        benchmark = BENCHMARKS[whole.get("benchmark", path.name.partition("-")[0])]
        bars = benchmark.bars(whole["runs"])
        if bars and draw(bars, f"{benchmark.title}: {whole['machine']['gpu'] or 'CPU'}", path.with_suffix(".svg")):
            print(path.with_suffix(".svg"))


if __name__ == "__main__":
    main()

"""The charts of the benchmarks: their numbers, and what they show of bars that are missing."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.common.benchmark import Bars
from benchmarks.common.picture import draw
from benchmarks.suite.all import BENCHMARKS
from benchmarks.throughput import CHART, RESULTS, SYSTEMS, choose_bars


def read_texts(path: Path) -> list[str]:
    return [text.replace("&#x27;", "'") for text in re.findall(r"<text [^>]*>([^<]*)</text>", path.read_text())]


def test_the_readmes_chart_has_the_latest_numbers() -> None:
    groups = choose_bars(json.loads(RESULTS.read_text())["runs"]).groups
    texts = read_texts(CHART)
    numbers = [f"{length:,.0f}" for _, (length,) in groups if length]
    assert len(numbers) == 5
    assert [text for text in texts if text in numbers] == numbers
    assert [text for text in texts if text in SYSTEMS] == list(SYSTEMS)


def test_a_chart_names_missing_bars_and_highlights_torchdali(tmp_path: Path) -> None:
    groups = [("torchdali, defaults", [31234.0, 95.5]), ("DataLoader", [12.34, None])]
    path = tmp_path / "chart.svg"
    assert draw(Bars("", "images/s", ["16 cores", "1 core"], groups, 100.0), "Loader only: CPU", path)
    texts = read_texts(path)
    bars = [text for text in texts if text in ("31,234", "95.5", "12.3", "not measured")]
    assert bars == ["31,234", "12.3", "95.5", "not measured"]
    assert texts.count("torchdali, defaults") == texts.count("DataLoader") == 2
    assert path.read_text().count('style="fill: #178a48"') == 2, "torchdali's bars"
    assert "Date" not in path.read_text()


def test_the_native_folder_is_a_bar_of_torchdali() -> None:
    runs = json.loads((RESULTS.parent / "proxy-h200.json").read_text())["runs"]
    bars = BENCHMARKS["proxy"].bars(runs)
    assert bars is not None
    assert [(name, lengths[-1]) for name, lengths in bars.groups] == [
        ("torchdali", 25948.1),
        ("DALI's proxy", None),
        ("DataLoader, torchvision v2", None),
    ]
    assert bars.columns[-1] == "image folder, native"

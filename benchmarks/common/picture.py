"""Draw results as horizontal bars, as SVG.

Without matplotlib (the extra ``bench``) there is no picture. It can be drawn later from the JSON:

    python -m benchmarks.redraw benchmarks/results/loader-h200.json
"""

import importlib.util
from pathlib import Path

from benchmarks.common.benchmark import Bars

_COLORS = ("#1f6f50", "#4c9f70", "#8cc7a1", "#bcdcc8", "#dcebe1", "#eef5f0")
_BAR = 0.2
"""Height in inches."""


def draw(bars: Bars, title: str, path: Path) -> bool:
    """Write the picture. Return False if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Keep text as text. Write nothing that differs between two drawings of the same numbers.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "torchdali", "font.size": 9}):
        columns, groups = len(bars.columns), list(reversed(bars.groups))
        figure = Figure(figsize=(8, 1.2 + _BAR * columns * len(groups) + 0.1 * len(groups)), layout="constrained")
        axes = figure.add_subplot()
        height = 0.85 / columns
        longest = max((length or 0 for _, lengths in groups for length in lengths), default=1) or 1
        for column, name in enumerate(bars.columns):
            places = [group + height * ((columns - 1) / 2 - column) for group in range(len(groups))]
            lengths = [lengths[column] or 0 for _, lengths in groups]
            color = _COLORS[column % len(_COLORS)]
            axes.barh(places, lengths, height, label=name, color=color, edgecolor="#1f6f50", linewidth=0.3)
            for place, length in zip(places, lengths, strict=True):
                if length:
                    axes.text(length + longest / 100, place, _format_number(length), va="center", fontsize=7)
        if bars.limit:
            axes.axvline(bars.limit, color="#999999", linewidth=0.8, linestyle="--")
        axes.set_yticks(range(len(groups)), [name for name, _ in groups])
        axes.set_xlim(0, longest * 1.12)
        axes.set_xlabel(bars.unit)
        axes.set_title(title, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        if columns > 1:
            # Below the bars, because any of them may be the longest.
            figure.legend(frameon=False, fontsize=8, loc="outside lower right", ncols=columns)
        figure.savefig(path, format="svg", metadata={"Date": None})
    return True


def _format_number(length: float) -> str:
    return f"{length:,.0f}" if length >= 100 else f"{length:.3g}"

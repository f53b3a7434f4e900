"""Draw results as horizontal bars, as SVG.

Without matplotlib (the extra ``bench``) there is no picture. It can be drawn later from the JSON:

    python -m benchmarks.redraw benchmarks/results/loader-h200.json
"""

import importlib.util
from pathlib import Path
from typing import Any

from benchmarks.common.benchmark import Bars

# Each color has a contrast above 4 on white and on the dark grey of GitHub's and furo's dark themes.
_TEXT, _TORCHDALI, _OTHERS = "#747b84", "#178a48", "#9aa2ab"
_BAR, _HEADING, _AXIS = 0.24, 0.36, 0.75
"""Heights in inches: of a bar, of what is above a panel's bars, and of the title and the axis below."""


def draw(bars: Bars, title: str, path: Path) -> bool:
    """Write a picture with a panel for each column. Return False if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Keep text as text. The layout is for DejaVu Sans, and the fonts that replace it are narrower, so no label is cut.
    # Write nothing that differs between two drawings of the same numbers.
    settings = {"svg.fonttype": "none", "svg.hashsalt": "torchdali", "font.size": 9, "text.color": _TEXT}
    colors = dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), _TEXT)
    with mpl.rc_context({**settings, **colors}):
        panels, names = len(bars.columns), [name for name, _ in bars.groups]
        height = panels * (_HEADING + _BAR * len(names)) + _AXIS
        figure = Figure(figsize=(8, height), layout="constrained", facecolor="none")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.06)
        longest = max((length or 0 for _, lengths in bars.groups for length in lengths), default=1) or 1
        all_axes = figure.subplots(panels, sharex=True, squeeze=False)[:, 0]
        for column, (axes, heading) in enumerate(zip(all_axes, bars.columns, strict=True)):
            axes.set_facecolor("none")
            lengths = [lengths[column] for _, lengths in bars.groups]
            colors = [_TORCHDALI if is_torchdali(name) else _OTHERS for name in names]
            axes.barh(range(len(names)), [length or 0 for length in lengths], 0.75, color=colors)
            for place, (name, length) in enumerate(zip(names, lengths, strict=True)):
                text = "not measured" if length is None else _format_number(length)
                style = {**_style(name), "fontsize": 8, "va": "center"}
                if bars.limit and (length or 0) > 0.9 * bars.limit:  # inside the bar, because the line is beside it
                    style |= {"color": "white" if is_torchdali(name) else "black", "ha": "right"}
                    axes.text(length - longest / 100, place, text, **style)
                else:
                    axes.text((length or 0) + longest / 100, place, text, **style)
            axes.set_yticks(range(len(names)), names)
            for name, label in zip(names, axes.get_yticklabels(), strict=True):
                label.set(**_style(name))
            axes.set_ylim(len(names) - 0.4, -0.6)  # the first at the top
            axes.tick_params("y", length=0)
            axes.tick_params("x", length=0 if column + 1 < panels else 3)
            axes.spines[["top", "right", "bottom"]].set_visible(False)
            if panels > 1:
                axes.set_title(heading, loc="left", fontsize=9)
            if bars.limit:
                axes.axvline(bars.limit, color=_TEXT, linewidth=0.8, linestyle="--", zorder=0)
        all_axes[-1].set_xlim(0, longest * 1.12)
        all_axes[-1].xaxis.set_major_formatter(lambda value, _: f"{value:,.4g}" if value < 100 else f"{value:,.0f}")
        all_axes[-1].set_xlabel(bars.unit if panels > 1 else f"{bars.unit}, {bars.columns[0]}")
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        figure.savefig(path, format="svg", metadata={"Date": None})
    return True


def is_torchdali(name: str) -> bool:
    """Return True if a group of bars is torchdali's."""
    return name.startswith("torchdali")


def _style(name: str) -> dict[str, Any]:
    return {"color": _TORCHDALI, "fontweight": "bold"} if is_torchdali(name) else {"color": _TEXT}


def _format_number(length: float) -> str:
    return f"{length:,.0f}" if length >= 100 else f"{length:.1f}" if length >= 10 else f"{length:.3g}"

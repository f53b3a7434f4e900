"""The grid of ``torchdali preview``: a picture by torchdali, the same by torchvision, and their difference."""

from __future__ import annotations

import base64
import html
import importlib
import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch.nn import functional as nn

from torchdali.errors import OptionError
from torchdali.loader.pictures import draw_part
from torchdali.samples.annotations import is_annotation

_MAGNIFICATIONS = (200, 100, 50, 20, 10, 5, 2, 1)
_WHITE = 255
_MAX_SIDE = 384
_GAP, _LABELS, _LINE = 4, 110, 18
_DPI = 64
"""A power of two, so that a figure has as many pixels as its tile."""
_DARK, _GREY = "#1f2328", "#656d76"
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; }
table { border-collapse: collapse; }
th { text-align: left; font-weight: 600; padding: 0.3rem 0.6rem 0.3rem 0; }
th small { display: block; font-weight: 400; opacity: 0.7; }
tr:first-child th { position: sticky; top: 0; background: Canvas; }
td { padding: 0.15rem 0.3rem 0.15rem 0; }
img { display: block; min-width: 8rem; image-rendering: pixelated; border-radius: 3px; }
pre { padding: 0.8rem 1rem; white-space: pre-wrap; border: 1px solid #8884; border-radius: 6px; font-size: 13px; }
"""


@dataclass(frozen=True)
class Sample:
    """One image of the grid: ``(C, H, W)``, float32, in grey levels of 255, not clamped.

    Attributes:
        folder: Name of its class.
        name: Name of its file, and of the view if there are several.
        actual: The image by torchdali.
        expected: The image by torchvision, with the same random numbers.
        parts: The other parts of the sample by torchdali, and by torchvision. Boxes, masks and key points are drawn.
        num_frames: Number of frames of a video that stand side by side in the image.
    """

    folder: str
    name: str
    actual: torch.Tensor
    expected: torch.Tensor
    parts: tuple[Sequence[Any], Sequence[Any]] = ((), ())
    num_frames: int = 1

    @property
    def difference(self) -> torch.Tensor:
        """Absolute difference."""
        return (self.actual - self.expected).abs()


def choose_magnification(samples: Sequence[Sample]) -> int:
    """Return the largest factor that leaves 99 of 100 differences below white; 1 if there are none."""
    differences = torch.cat([sample.difference[sample.difference > 0] for sample in samples])
    if not len(differences):
        return 1
    typical = float(np.quantile(differences.numpy(), 0.99))
    return next((factor for factor in _MAGNIFICATIONS if factor * typical <= _WHITE), 1)


def write_grid(out: Path, samples: Sequence[Sample], summary: str, plan: str) -> None:
    """Write the grid to an ``.html`` page, with the plan, or to a PNG. Shrink images of more than 384 pixels a side."""
    if out.suffix.lower() == ".html":
        out.write_text(_draw_page(samples, summary, plan), "utf-8", "backslashreplace")  # for names that are no UTF-8
    else:
        _draw_grid(samples, summary).save(out, "PNG")


def _name_rows(magnification: int) -> tuple[str, str, str]:
    return "torchdali", "torchvision", "difference" + (f" x {magnification}" if magnification > 1 else "")


def _make_tiles(sample: Sample, magnification: int) -> list[Image.Image]:
    count, tiles = sample.num_frames, list[Image.Image]()
    for image, parts in zip((sample.actual, sample.expected), sample.parts, strict=True):
        tile = _make_tile(_to_pixels(image), count)
        drawn = [part for part in parts if is_annotation(part)]
        tiles.append(_draw_parts(tile, drawn, image.shape[-2], image.shape[-1] // count, count) if drawn else tile)
    return [*tiles, _make_tile(_to_pixels(magnification * sample.difference), count, largest=True)]


def _draw_parts(tile: Image.Image, parts: Sequence[Any], height: int, width: int, num_frames: int) -> Image.Image:
    """Draw boxes, masks and key points over a picture of an image, or over the first of several frames."""
    try:
        backend: Any = importlib.import_module("matplotlib.backends.backend_agg")
        figures: Any = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        raise OptionError(
            "preview needs matplotlib to draw boxes, masks and key points: pip install matplotlib"
        ) from error
    figure = figures.Figure((tile.width / _DPI, tile.height / _DPI), dpi=_DPI)
    canvas = backend.FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    right, bottom = width * num_frames - 0.5, height - 0.5  # the middle of the first pixel is 0
    axes.imshow(np.asarray(tile), interpolation="nearest", extent=(-0.5, right, bottom, -0.5), aspect="auto")
    for part in parts:
        draw_part(axes, part, (height, width))
    axes.set(xlim=(-0.5, right), ylim=(bottom, -0.5))
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def _to_pixels(image: torch.Tensor) -> torch.Tensor:
    """Convert an image to ``(H, W, 3)``, uint8."""
    levels = image.nan_to_num().round().clamp(0, 255).to(torch.uint8)
    levels = levels[:3] if len(levels) >= 3 else levels[:1].expand(3, -1, -1)
    return levels.permute(1, 2, 0)


def _make_tile(pixels: torch.Tensor, num_frames: int = 1, largest: bool = False) -> Image.Image:
    """Make a picture, smaller by a whole number if needed. With ``largest``, no bright pixel is lost by that."""
    height, width = pixels.shape[:2]
    factor = -(-max(height, width // num_frames) // _MAX_SIDE)
    if factor > 1:
        reduce: Any = nn.max_pool2d if largest else nn.avg_pool2d
        reduced = reduce(pixels.permute(2, 0, 1)[None].float(), factor, ceil_mode=True)
        pixels = reduced[0].round().to(torch.uint8).permute(1, 2, 0)
    return Image.fromarray(cast("Any", pixels.contiguous().numpy()))


def _draw_grid(samples: Sequence[Sample], summary: str) -> Image.Image:
    magnification = choose_magnification(samples)
    columns = [_make_tiles(sample, magnification) for sample in samples]
    width = max(tile.width for column in columns for tile in column)
    height = max(tile.height for column in columns for tile in column)
    grid_width = max(_LABELS + len(columns) * (width + _GAP), 640)
    font = ImageFont.load_default(13)
    lines = textwrap.wrap(summary, max(20, int((grid_width - 2 * _GAP) / font.getlength("e"))))
    rows = _name_rows(magnification)
    has_classes = any(sample.folder for sample in samples)
    top = (len(lines) + 1 + has_classes) * _LINE + 2 * _GAP
    grid = Image.new("RGB", (grid_width, top + len(rows) * (height + _GAP)), "white")
    draw = ImageDraw.Draw(grid)
    for i, line in enumerate(lines):
        draw.text((_GAP, _GAP + i * _LINE), line, _DARK, font)
    for row, label in enumerate(rows):
        draw.text((_GAP, top + row * (height + _GAP) + height // 2 - _LINE // 2), label, _DARK, font)
    for i, (sample, column) in enumerate(zip(samples, columns, strict=True)):
        left = _LABELS + i * (width + _GAP)
        for line, (name, color) in enumerate(((sample.name, _GREY), (sample.folder, _DARK)), start=1):
            draw.text((left, top - line * _LINE), _shorten(name, width - _GAP, font), color, font)
        for row, tile in enumerate(column):
            grid.paste(tile, (left, top + row * (height + _GAP)))
    return grid


def _shorten(name: str, width: int, font: Any) -> str:
    """Return a name without its middle if it is too long for a column. Both ends may tell files apart."""
    shown, kept = name, len(name)
    while kept and font.getlength(shown) > width:
        kept -= 1
        shown = f"{name[: kept - kept // 2]}...{name[len(name) - kept // 2 :]}"
    return shown if kept else ""


def _draw_page(samples: Sequence[Sample], summary: str, plan: str) -> str:
    magnification = choose_magnification(samples)
    head = "".join(f"<th>{html.escape(label)}</th>" for label in ("", *_name_rows(magnification)))
    rows = "\n".join(
        f"<tr><th>{html.escape(sample.folder)}<small>{html.escape(sample.name)}</small></th>"
        f"{''.join(map(_draw_cell, _make_tiles(sample, magnification)))}</tr>"
        for sample in samples
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>torchdali preview</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>torchdali preview</h1>
<p>{html.escape(summary)}</p>
<table>
<tr>{head}</tr>
{rows}
</table>
<h2>What runs where</h2>
<pre>{html.escape(plan)}</pre>
</body>
</html>
"""


def _draw_cell(tile: Image.Image) -> str:
    stream = io.BytesIO()
    tile.save(stream, "PNG")
    return f'<td><img alt="" src="data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"></td>'

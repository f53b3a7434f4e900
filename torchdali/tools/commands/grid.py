"""Pictures in columns of three, as one PNG or as an HTML page of its own."""

from __future__ import annotations

import base64
import html
import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from PIL import Image, ImageDraw, ImageFont
from torch.nn import functional as nn

__all__ = ["MAGNIFIED", "Column", "write"]

MAGNIFIED = 10
"""How many times differences are shown."""

_ROWS = ("torchdali", "torchvision", f"difference x {MAGNIFIED}")
_LARGEST = 384
_GAP, _LABELS, _LINE = 4, 110, 18


class Column(NamedTuple):
    """One image: each part ``(H, W, 3)``, uint8.

    Attributes:
        name: What stands above it.
        ours: By torchdali.
        theirs: By torchvision.
        difference: Between them, magnified.
    """

    name: str
    ours: torch.Tensor
    theirs: torch.Tensor
    difference: torch.Tensor


def write(out: Path, columns: Sequence[Column], said: str, plan: str) -> None:
    """Writes the columns.

    Args:
        out: A file whose name ends in ``.html``; every other becomes a PNG.
        columns: The images; those with a side of more than 384 pixels are made smaller.
        said: What is shown.
        plan: What was done with them; only a page has room for it.
    """
    if out.suffix.lower() == ".html":
        out.write_text(_page(columns, said, plan), "utf-8", "backslashreplace")  # of names that are no text
    else:
        _grid(columns, said).save(out, "PNG")


def _tiles(column: Column) -> list[Image.Image]:
    return [_tile(column.ours), _tile(column.theirs), _tile(column.difference, largest=True)]


def _tile(pixels: torch.Tensor, largest: bool = False) -> Image.Image:
    """A picture, smaller by a whole number if it is too large; of a difference no pixel is lost by that."""
    factor = -(-max(pixels.shape[:2]) // _LARGEST)
    if factor > 1:
        reduce: Any = nn.max_pool2d if largest else nn.avg_pool2d
        reduced = reduce(pixels.permute(2, 0, 1)[None].float(), factor, ceil_mode=True)
        pixels = reduced[0].round().to(torch.uint8).permute(1, 2, 0)
    return Image.fromarray(cast("Any", pixels.contiguous().numpy()))


def _grid(columns: Sequence[Column], said: str) -> Image.Image:
    tiles = [_tiles(column) for column in columns]
    width = max(tile.width for of_column in tiles for tile in of_column)
    height = max(tile.height for of_column in tiles for tile in of_column)
    whole = max(_LABELS + len(tiles) * (width + _GAP), 640)
    font = ImageFont.load_default(13)
    per_line = max(20, int((whole - 2 * _GAP) / font.getlength("e")))
    lines = textwrap.wrap(said, per_line)
    top = (len(lines) + 1) * _LINE + 2 * _GAP
    grid = Image.new("RGB", (whole, top + len(_ROWS) * (height + _GAP)), "white")
    draw = ImageDraw.Draw(grid)
    for number, line in enumerate(lines):
        draw.text((_GAP, _GAP + number * _LINE), line, "black", font)
    for row, label in enumerate(_ROWS):
        draw.text((_GAP, top + row * (height + _GAP) + height // 2), label, "black", font)
    for place, (column, of_column) in enumerate(zip(columns, tiles, strict=True)):
        left = _LABELS + place * (width + _GAP)
        draw.text((left, top - _LINE), _shortened(column.name, width, font), "black", font)
        for row, tile in enumerate(of_column):
            grid.paste(tile, (left, top + row * (height + _GAP)))
    return grid


def _shortened(name: str, width: int, font: Any) -> str:
    """The end of a name, as far as there is room."""
    short = name
    while short and font.getlength(short) > width:
        short = short[1:]
    return short


def _page(columns: Sequence[Column], said: str, plan: str) -> str:
    head = "".join(f"<th>{html.escape(label)}</th>" for label in ("", *_ROWS))
    rows = "\n".join(
        f"<tr><th>{html.escape(column.name)}</th>{''.join(map(_cell, _tiles(column)))}</tr>" for column in columns
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>torchdali preview</title></head>
<body style="font-family: sans-serif">
<p>{html.escape(said)}</p>
<table>
<tr>{head}</tr>
{rows}
</table>
<pre>{html.escape(plan)}</pre>
</body>
</html>
"""


def _cell(tile: Image.Image) -> str:
    stream = io.BytesIO()
    tile.save(stream, "PNG")
    return f'<td><img alt="" src="data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"></td>'

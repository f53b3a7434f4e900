"""``torchdali preview``: a grid of images by torchdali, the same by torchvision, and their difference."""

from __future__ import annotations

import base64
import html
import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch.nn import functional as nn

from torchdali.errors import OptionError
from torchdali.pipeline import graph
from torchdali.pipeline.compile import fuse
from torchdali.pipeline.plan import Plan
from torchdali.tools.bench.folder import ONE_CLASS, load_transform, make_dataset, open_class_folders
from torchdali.tools.parity.compare import compare_plan, compile_chain
from torchdali.transforms import Rule
from torchdali.transforms.rules.normalize import Arithmetic, Normalize

_MAGNIFICATIONS = (200, 100, 50, 20, 10, 5, 2, 1)
_WHITE = 255
_MAX_SIDE = 384
_GAP, _LABELS, _LINE = 4, 110, 18
_NAMES = 2
"""Lines above each column: the class, and the file."""
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

_UNIT_RANGE_BOUND = 2.0
"""Floats below this are taken for values in [0, 1], others for grey levels of 255."""


@dataclass(frozen=True)
class Sample:
    """One image of the grid: ``(C, H, W)``, float32, in grey levels of 255, not clamped.

    Attributes:
        folder: Name of its class folder.
        name: Name of its file, and of the view if there are several.
        actual: The image by torchdali.
        expected: The image by torchvision, with the same random numbers.
    """

    folder: str
    name: str
    actual: torch.Tensor
    expected: torch.Tensor

    @property
    def difference(self) -> torch.Tensor:
        """Absolute difference."""
        return (self.actual - self.expected).abs()


def preview(folder: Path, *, transform: str | None, samples: int, seed: int, device: str, out: Path) -> str:
    """Write a grid of images, as PNG or HTML. The arguments are the command's options.

    Returns:
        What the grid shows, in a sentence or two.

    Raises:
        OptionError: The folder has no images, or there is no such transform.
        SampleError: A file cannot be read.
    """
    graph.require_dali()
    plan = compile_chain([load_transform(transform)], graph.resolve(device), fused=False)
    with open_class_folders(folder) as (root, _):
        images = make_dataset(root, None)
        if not len(images):
            raise OptionError(f"{folder} has no images")
        chosen = np.random.default_rng(seed).permutation(len(images))[:samples]
        images.samples = [images.samples[i] for i in sorted(chosen.tolist())]
        pairs = make_samples(images, plan, seed)
    summary = _summarize(pairs, plan)
    write_grid(out, pairs, summary, str(fuse(plan)))
    return summary


def make_samples(images: Any, plan: Plan, seed: int) -> list[Sample]:
    """Return the images of an ImageFolder by both libraries, sample by sample and view by view.

    Args:
        images: The ImageFolder.
        plan: Plan of the transform, not fused.
        seed: Seed of the random numbers.
    """
    floating = plan.views[0].spec.dtype.is_floating_point
    normalizations = [_find_normalizations([*plan.rules, *view.rules]) for view in plan.views]
    samples: list[Sample] = []
    for index, view, pair in compare_plan(images, fuse(plan), seed):
        path = Path(images.samples[index][0])
        name = path.name + (f", view {view + 1}" if len(plan.views) > 1 else "")
        # A folder without class folders is reached by a link of that name.
        folder = path.parent.resolve() if path.parent.name == ONE_CLASS else path.parent
        samples.append(Sample(folder.name, name, *(_denormalize(image, normalizations[view]) for image in pair)))
    if not floating or max(float(sample.expected.max()) for sample in samples) >= _UNIT_RANGE_BOUND:
        return samples
    return [replace(sample, actual=255 * sample.actual, expected=255 * sample.expected) for sample in samples]


def _find_normalizations(rules: Sequence[Rule]) -> list[Normalize]:
    """Return the ``Normalize`` rules of a view, in order."""
    found: list[Normalize] = []
    for rule in rules:
        if isinstance(rule, Normalize):
            found.append(rule)
        elif isinstance(rule, Arithmetic):
            found += _find_normalizations(rule.parts)
    return found


def _denormalize(image: torch.Tensor, normalizations: Sequence[Normalize]) -> torch.Tensor:
    image = image.as_subclass(torch.Tensor).to(torch.float32)
    for rule in reversed(normalizations):
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (rule.mean, rule.std))
        image = image * std + mean
    return image


def choose_magnification(samples: Sequence[Sample]) -> int:
    """Return the largest factor that leaves 99 of 100 differences below white; 1 if there are none."""
    differences = torch.cat([sample.difference[sample.difference > 0] for sample in samples])
    if not len(differences):
        return 1
    typical = float(np.quantile(differences.numpy(), 0.99))
    return next((factor for factor in _MAGNIFICATIONS if factor * typical <= _WHITE), 1)


def _summarize(samples: Sequence[Sample], plan: Plan) -> str:
    largest = max(float(sample.difference.max()) for sample in samples)
    mean = sum(float(sample.difference.mean()) for sample in samples) / len(samples)
    where = "the GPU" if plan.device.type == "cuda" else "the CPU"
    text = (
        f"{len(samples)} images by torchdali with DALI on {where}, by PIL and torchvision with the same random "
        f"numbers, and their difference: at most {largest:.3g} of 255 grey levels, {mean:.3g} on "
        "average."
    )
    in_torch = [f"{step.position} {type(step.transform).__name__}" for step in plan.steps if step.library == "torch"]
    if in_torch:
        text += f" Left out, because torch runs it on both sides: {', '.join(in_torch)}."
    return text


def write_grid(out: Path, samples: Sequence[Sample], summary: str, plan: str) -> None:
    """Write the grid to an ``.html`` page, with the plan, or to a PNG. Shrink images of more than 384 pixels a side."""
    if out.suffix.lower() == ".html":
        out.write_text(_draw_page(samples, summary, plan), "utf-8", "backslashreplace")  # for names that are no UTF-8
    else:
        _draw_grid(samples, summary).save(out, "PNG")


def _name_rows(magnification: int) -> tuple[str, str, str]:
    return "torchdali", "torchvision", "difference" + (f" x {magnification}" if magnification > 1 else "")


def _make_tiles(sample: Sample, magnification: int) -> list[Image.Image]:
    difference = _to_pixels(magnification * sample.difference)
    tiles = [_make_tile(_to_pixels(image)) for image in (sample.actual, sample.expected)]
    return [*tiles, _make_tile(difference, largest=True)]


def _to_pixels(image: torch.Tensor) -> torch.Tensor:
    """Convert an image to ``(H, W, 3)``, uint8."""
    levels = image.nan_to_num().round().clamp(0, 255).to(torch.uint8)
    levels = levels[:3] if len(levels) >= 3 else levels[:1].expand(3, -1, -1)
    return levels.permute(1, 2, 0)


def _make_tile(pixels: torch.Tensor, largest: bool = False) -> Image.Image:
    """Make a picture, smaller by a whole number if needed. With ``largest``, no bright pixel is lost by that."""
    factor = -(-max(pixels.shape[:2]) // _MAX_SIDE)
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
    top = (len(lines) + _NAMES) * _LINE + 2 * _GAP
    grid = Image.new("RGB", (grid_width, top + len(rows) * (height + _GAP)), "white")
    draw = ImageDraw.Draw(grid)
    for i, line in enumerate(lines):
        draw.text((_GAP, _GAP + i * _LINE), line, _DARK, font)
    for row, label in enumerate(rows):
        draw.text((_GAP, top + row * (height + _GAP) + height // 2 - _LINE // 2), label, _DARK, font)
    for i, (sample, column) in enumerate(zip(samples, columns, strict=True)):
        left = _LABELS + i * (width + _GAP)
        for line, (name, color) in enumerate(((sample.folder, _DARK), (sample.name, _GREY))):
            draw.text((left, top - (_NAMES - line) * _LINE), _shorten(name, width, font), color, font)
        for row, tile in enumerate(column):
            grid.paste(tile, (left, top + row * (height + _GAP)))
    return grid


def _shorten(name: str, width: int, font: Any) -> str:
    """Return the end of a name that is too long for a column. It tells more than the beginning."""
    if font.getlength(name) <= width:
        return name
    while name and font.getlength(f"...{name}") > width:
        name = name[1:]
    return f"...{name}" if name else ""


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

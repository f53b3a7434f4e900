"""Write the certificate as a page in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torchdali.tools.parity.case import Case
from torchdali.tools.parity.cases import CASES
from torchdali.tools.parity.compare import BORDER, Differences, find_exceeded_bounds
from torchdali.tools.parity.decoding import FORMATS, decoding_bound, find_exceeded_decoding_bounds
from torchdali.tools.parity.distributions import LEVEL, SAMPLES, significance_level
from torchdali.tools.parity.draws import DRAWS
from torchdali.tools.parity.groups import GROUPS, Group, describe_chain
from torchdali.tools.parity.photographs import COUNT, LARGEST, SMALLEST
from torchdali.tools.parity.results import DeviceResult, Results, describe
from torchdali.transforms import Rule

TORCH_ONLY: dict[str, str] = {
    "AutoAugmentPolicy": "an enum of policies",
    "Compose": "taken apart: its transforms are taken one by one",
    "CutMix": "mixes the samples of a batch: `batch_transform=`",
    "InterpolationMode": "an enum of filters",
    "Lambda": "any Python function",
    "MixUp": "mixes the samples of a batch: `batch_transform=`",
    "ToPILImage": "makes a PIL image, on the host",
    "Transform": "the base class of the others",
    "UniformTemporalSubsample": "takes frames of videos",
}
"""Classes of ``torchvision.transforms.v2`` without a rule, with the reason."""

TITLES = {"cpu": "CPU", "cuda": "GPU"}
NOT_MEASURED = "not measured"
_ESCAPED = "\\|"
_ELSEWHERE = " (†)"


def _number(value: float) -> str:
    """Format a number with two digits, or an integer below 1000 in full."""
    return f"{value:g}" if abs(value) < 1000 and value == int(value) else f"{value:.2g}"


_HEAD = """\
# Parity with torchvision

Written by `torchdali parity`; do not edit. The command runs every rule. It gives the numbers that the rule drew to
torchvision's own functionals for tensors on the CPU, and compares the images. The tests run the same cases
(`tests/parity/test_rules.py`). A run measures the devices of its machine again. It keeps the results of other devices
from the JSON file beside this page."""

_ABOUT_TRANSFORMS = f"""\
## Transforms

Each chain runs on {COUNT} crops of photographs, PNGs of {SMALLEST} to {LARGEST} pixels a side. All decoders decode PNGs
alike, so every difference is the transforms'.

- *max*: the largest difference of a value. *inside*: the same without the outermost {BORDER} pixels at each edge.
  *mean*: over all values. In grey levels for uint8, else in the values' own units.
- *off*: the share of pixels with a value that differs by more than 1 (floating point: by more than 1/255).
- Nearest neighbours over more sizes: of 150 heights of 200 to 3,000 pixels, resized to 384, 900 and 1,500 on the CPU,
  up to 8 % have lines that are their neighbours. That is 0.05 % of all lines at most, and 2 % in the worst image.
  torchvision's float32 arithmetic rounds some whole positions down (`tests/parity/test_nearest.py`).
- *Operators on a GPU*: on the CPU torch resizes uint8 images, or PIL those of PIL.
- *bound*: holds on both devices. *why*: the reason, if the bound is looser than the one promised for the transform
  (`tests/helpers/design.py`)."""

_ABOUT_TARGETS = """\
## Boxes, key points and masks

The photographs are samples with made-up boxes, key points and a mask for each box. `DALILoader` gives them with these
transforms. torchvision's transforms get the same random numbers. *boxes* and *points*: the largest difference of a
coordinate, in pixels. *masks*: the share of the pixels of all masks that differ. Boxes and points move on the host, and
masks on the device."""

_ABOUT_SOUNDS = """\
## Sounds

Five made-up sounds of one channel and different lengths, at 16 kHz: tones that rise, and noise. torchaudio's transforms
get the same random numbers. The difference is the largest of a value, as a share of the largest value of its sound."""

_ABOUT_VOLUMES = """\
## Volumes

Eight patches of two made-up volumes with values from 0 to 1, and labels from 0 to 3. The transforms' own torch bodies
get the same random numbers. *values*: the largest difference of a value. *labels*: the share of all labels that
differ."""

_ABOUT_DRAWS = f"""\
## Random parameters

{SAMPLES:,} samples of each parameter, drawn by torchdali, beside as many from torchvision's own sampler. If torchvision
draws outside of `make_params`, they are compared with its probabilities. *p* is the probability of such a difference if
both distributions are equal. A test fails below {_number(significance_level())}: {LEVEL:g}, divided by the number of
tests ({len(DRAWS)}). The seeds are fixed. The host draws the numbers, so they are the same on every device."""

_ABOUT_DECODING = """\
## Decoding

Four photographs in each format, beside `PIL.Image.open(file).convert("RGB")`: max / mean difference in grey levels.
The loader lets PIL decode what DALI decodes differently. The JPEG standard leaves open how colours are scaled up, so
decoders on the GPU differ from libjpeg."""

_ABOUT_LIMITS = """\
## Runs in torch

A transform runs in torch, after the DALI part, if its rule does not cover its arguments or images. `loader.explain()`
says so. A subclass may do anything, so it has no rule."""


def write_markdown(results: Results, path: Path) -> None:
    """Write the page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(format_markdown(results))


def format_markdown(results: Results) -> str:
    """Return the page in GitHub's Markdown."""
    devices = {name: results.devices[name] for name in TITLES if name in results.devices}
    parts = [
        _HEAD,
        _machines(devices),
        _ABOUT_TRANSFORMS,
        _transforms(devices),
        _ABOUT_TARGETS,
        _group("targets", devices),
        _ABOUT_SOUNDS,
        _group("sounds", devices),
        _ABOUT_VOLUMES,
        _group("volumes", devices),
        _ABOUT_DRAWS,
        _draws(results),
        _ABOUT_DECODING,
        *(_format_decoding(name, of_device) for name, of_device in devices.items()),
        _ABOUT_LIMITS,
        _limits(),
        "These names of `torchvision.transforms.v2` have no rule:",
        _table(["Name", "Why"], ([_code(name), why] for name, why in sorted(TORCH_ONLY.items()))),
    ]
    return "\n\n".join(parts) + "\n"


def _machines(devices: dict[str, DeviceResult]) -> str:
    machines = {name: of_device.machine for name, of_device in devices.items()}
    packages = list(dict.fromkeys(package for machine in machines.values() for package in machine.versions))
    rows = (
        [TITLES[name], machine.name, *(machine.versions.get(package, NOT_MEASURED) for package in packages)]
        for name, machine in machines.items()
    )
    table = _table(["Device", "Machine", *packages], rows)
    elsewhere = sorted({name for of_device in devices.values() for name in of_device.elsewhere.values()})
    return f"{table}\n\n{_ELSEWHERE.strip()}: measured on {', '.join(elsewhere)}." if elsewhere else table


def _mark(of_device: DeviceResult, name: str, cell: str) -> str:
    return cell + _ELSEWHERE if name in of_device.elsewhere else cell


def _transforms(devices: dict[str, DeviceResult]) -> str:
    head = ["Case", "Chain", "Operators on a GPU", "Random numbers"]
    head += [f"{TITLES[name]}: max / inside / mean / off" for name in devices]
    head += ["Bound: max / inside / mean", "Why"]
    rows: list[list[str]] = []
    for name, case in CASES.items():
        chain, operators, randomness = describe(case)
        cells = [name, _code(chain if len(chain) <= 200 else f"{chain[:197]}..."), operators, randomness or "none"]
        for device, of_device in devices.items():
            result = of_device.cases.get(name)
            absent = case.refused or (NOT_MEASURED if device in case.devices else "in torch")
            cells.append(_mark(of_device, name, _differences(case, result.measured)) if result else absent)
        bounds = (case.max_abs, case.max_abs_interior, case.mean_abs)
        rows.append([*cells, " / ".join(map(_number, bounds)), case.why])
    return _table(head, rows)


def _differences(case: Case, measured: Differences) -> str:
    text = " / ".join(map(_number, (measured.max_abs, measured.max_abs_interior, measured.mean_abs)))
    text = f"{text} / {_number(100 * measured.frac_above_1)} %"
    return _cell(measured.error, text, bool(find_exceeded_bounds(case, measured)))


def _group(key: str, devices: dict[str, DeviceResult]) -> str:
    """Return the table of a group of cases."""
    group = GROUPS[key]
    columns = f": {' / '.join(group.units)}" if len(group.units) > 1 else ""
    head = [key.capitalize(), "Chain", *(TITLES[name] + columns for name in devices), "Bound", "Why"]
    rows: list[list[str]] = []
    for name, case in group.cases.items():
        cells = [name.removeprefix(f"{key} "), _code(describe_chain(case.chain))]
        for of_device in devices.values():
            if result := of_device.groups[key].get(name):
                error, figures = result.measured.error, result.measured.figures
                text = "" if error else _format_figures(group, (figures[unit] for unit in group.units))
                cell = _cell(error, text, bool(group.find_exceeded(case, result.measured)))
                cells.append(_mark(of_device, name, cell))
            else:
                cells.append(NOT_MEASURED)
        rows.append([*cells, _format_figures(group, case.bounds), case.why])
    return _table(head, rows)


def _format_figures(group: Group, figures: Iterable[float]) -> str:
    pairs = zip(figures, group.units.values(), strict=False)
    return " / ".join(f"{_number(100 * x if unit == '%' else x)} {unit}".rstrip() for x, unit in pairs)


def _cell(error: str, text: str, exceeds: bool) -> str:
    if error:
        return f"**failed**: {error}"
    return f"**{text}**" if exceeds else text


def _draws(results: Results) -> str:
    rows: list[list[str]] = []
    for name in DRAWS:
        if result := results.draws.get(name):
            p = _number(result.p)
            rows.append([name, result.kind, f"**{p}**" if result.p < significance_level() else p])
        else:
            rows.append([name, NOT_MEASURED, NOT_MEASURED])
    return _table(["Parameter", "Test", "p"], rows)


def _format_decoding(device: str, of_device: DeviceResult) -> str:
    rows: list[list[str]] = []
    for name in FORMATS:
        cells = [NOT_MEASURED, NOT_MEASURED]
        if result := of_device.decoding.get(name):
            text = f"{_number(result.max_abs)} / {_number(result.mean_abs)}"
            exceeds = bool(find_exceeded_decoding_bounds(name, device, result))
            cells = [_mark(of_device, f"decoding {name}", result.by), _cell(result.error, text, exceeds)]
        rows.append([name, *cells, " / ".join(map(_number, decoding_bound(name, device)))])
    head = ["Format", "torchdali decodes with", "Max / mean", "Bound"]
    return f"On the {TITLES[device]}:\n\n" + _table(head, rows)


def _limits() -> str:
    rows = {
        ", ".join(map(_code, list_names(rule))): rule.unsupported_when or "never" for rule in set(list_rules().values())
    }
    return _table(["Transform", "Runs in torch where"], ([name, limits] for name, limits in sorted(rows.items())))


def _code(text: str) -> str:
    return f"`{text}`"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', _ESCAPED) for cell in line)} |" for line in lines)


def list_rules() -> dict[type[Any] | str, type[Rule]]:
    """Return the rule of every class that has one. Classes of packages that may be missing are given by name."""
    by_class: dict[type[Any] | str, type[Rule]] = {}
    waiting: list[type[Rule]] = [Rule]
    while waiting:
        rule = waiting.pop()
        waiting += rule.__subclasses__()
        by_class |= dict.fromkeys(rule.__dict__.get("handles", ()), rule)
    return by_class


def list_names(rule: type[Rule]) -> list[str]:
    """Return the names of a rule's transforms."""
    return list(dict.fromkeys(map(_format_name, rule.handles)))


def _format_name(handled: type[Any] | str) -> str:
    if not isinstance(handled, str):
        return handled.__name__
    package, *_, name = handled.split(".")
    return f"{package}: {name}"

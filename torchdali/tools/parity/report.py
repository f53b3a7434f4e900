"""Write the certificate as a page in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from torchdali.tools.parity.case import Case
from torchdali.tools.parity.cases import CASES
from torchdali.tools.parity.compare import BORDER, Differences, exceeded_bounds
from torchdali.tools.parity.coverage import TORCH_ONLY, names, rules
from torchdali.tools.parity.decoding import FORMATS, DecodingDifferences, decoders, decoding_bound
from torchdali.tools.parity.distributions import LEVEL, MANY, significance_level
from torchdali.tools.parity.draws import DRAWS
from torchdali.tools.parity.photographs import COUNT, LARGEST, SMALLEST
from torchdali.tools.parity.results import DeviceResult, Results, describe, is_within

__all__ = ["markdown", "write_markdown"]

TITLES = {"cpu": "CPU", "cuda": "GPU"}
NOT_MEASURED = "not measured"
_ESCAPED = "\\|"


def _number(value: float) -> str:
    """Format a number with two digits. Integers below 1000 are written in full."""
    return f"{value:g}" if abs(value) < 1000 and value == int(value) else f"{value:.2g}"


_HEAD = """\
# Parity with torchvision

Written by `torchdali parity`; do not edit. It runs every rule and, with the numbers that the rule drew, torchvision's
own functionals for tensors on the CPU, and compares the images. The tests run the same cases
(`tests/parity/test_rules.py`).
A run renews the devices of its machine and keeps what was measured on others, from the JSON file beside this one."""

_ABOUT_TRANSFORMS = f"""\
## Transforms

Each chain runs on {COUNT} crops of photographs, PNGs of {SMALLEST} to {LARGEST} pixels a side, so that the decoder is
not part of the difference.

- *max*: the largest difference of a value; *inside*: the same without the outermost {BORDER} pixels at each edge;
  *mean*: over all values. In grey levels for uint8, else in the values' own units.
- *off*: the share of pixels of which a value is off by more than 1; for floating point, by more than 1/255.
- *bound*: holds on both devices. *why*: what makes it looser than what is promised for
  the transform (`torchdali/parity/design.py`), where it is."""

_ABOUT_DRAWS = f"""\
## Random parameters

{MANY:,} samples of each, drawn by torchdali, beside as many from torchvision's own sampler. If torchvision draws
outside of `make_params`, its probability is taken. *p* is how likely such a difference is if both come from one
distribution. A test fails below {_number(significance_level())}: {LEVEL:g} shared among {len(DRAWS)} tests. The seeds
are fixed, and the numbers are drawn on the host, so they are the same on every device."""

_ABOUT_DECODING = """\
## Decoding

Four photographs in each format, beside `PIL.Image.open(file).convert("RGB")`: max / mean difference in grey levels.
The loader, *torchdali*, leaves to PIL what DALI does not decode as PIL does; the bound is the loader's. The standard
leaves open how a JPEG's colours are scaled up, so that decoders on the GPU differ from libjpeg."""

_ABOUT_LIMITS = """\
## Runs in torch

Where its rule does not cover it, a transform runs in torch, after the DALI part; `loader.explain()` says so. A subclass
may do anything, so it has no rule."""


def write_markdown(results: Results, path: Path) -> None:
    """Write the page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(markdown(results))


def markdown(results: Results) -> str:
    """Return the page in GitHub's Markdown."""
    devices = {name: results.devices[name] for name in TITLES if name in results.devices}
    parts = [
        _HEAD,
        _machines(devices),
        _ABOUT_TRANSFORMS,
        _transforms(devices),
        _ABOUT_DRAWS,
        _draws(results),
        _ABOUT_DECODING,
        *(_decoding(name, of_device) for name, of_device in devices.items()),
        _ABOUT_LIMITS,
        _limits(),
        "These names of `torchvision.transforms.v2` have no rule:",
        _table(["Name", "Why"], ([_code(name), why] for name, why in sorted(TORCH_ONLY.items()))),
    ]
    return "\n\n".join(parts) + "\n"


def _machines(devices: dict[str, DeviceResult]) -> str:
    packages = list(dict.fromkeys(name for one in devices.values() for name in one.machine.versions))
    rows = (
        [TITLES[name], one.machine.name, *(one.machine.versions.get(package, NOT_MEASURED) for package in packages)]
        for name, one in devices.items()
    )
    return _table(["Device", "Machine", *packages], rows)


def _transforms(devices: dict[str, DeviceResult]) -> str:
    head = ["Case", "Chain", "DALI operators", "Random numbers"]
    head += [f"{TITLES[name]}: max / inside / mean / off" for name in devices]
    head += ["Bound: max / inside / mean", "Why"]
    rows: list[list[str]] = []
    for name, case in CASES.items():
        chain, operators, randomness = describe(case)
        cells = [name, _code(chain if len(chain) <= 200 else f"{chain[:197]}..."), operators, randomness or "none"]
        for device, one in devices.items():
            of_case = one.cases.get(name)
            absent = case.refused or (NOT_MEASURED if device in case.devices else "in torch")
            cells.append(_differences(case, of_case.measured) if of_case else absent)
        bounds = (case.max_abs, case.max_abs_interior, case.mean_abs)
        rows.append([*cells, " / ".join(map(_number, bounds)), case.why])
    return _table(head, rows)


def _differences(case: Case, measured: Differences) -> str:
    if measured.error:
        return f"**failed**: {measured.error}"
    text = " / ".join(map(_number, (measured.max_abs, measured.max_abs_interior, measured.mean_abs)))
    text = f"{text} / {_number(100 * measured.frac_above_1)} %"
    return f"**{text}**" if exceeded_bounds(case, measured) else text


def _draws(results: Results) -> str:
    rows: list[list[str]] = []
    for name in DRAWS:
        one = results.draws.get(name)
        said = (
            NOT_MEASURED if one is None else f"**{_number(one.p)}**" if one.p < significance_level() else _number(one.p)
        )
        rows.append([name, one.kind if one else NOT_MEASURED, said])
    return _table(["Parameter", "Test", "p"], rows)


def _decoding(device: str, of_device: DeviceResult) -> str:
    columns = list(decoders(device))
    rows: list[list[str]] = []
    for name in FORMATS:
        found = of_device.decoding.get(name, {})
        bound = decoding_bound(name, device)
        own = found.get(columns[0])
        cells = [_decoded(found.get(column), bound if column == columns[0] else None) for column in columns]
        rows.append([name, own.by if own else NOT_MEASURED, *cells, " / ".join(map(_number, bound))])
    return f"On the {TITLES[device]}:\n\n" + _table(["Format", "torchdali decodes with", *columns, "Bound"], rows)


def _decoded(decoded: DecodingDifferences | None, bound: tuple[float, float] | None) -> str:
    if decoded is None:
        return NOT_MEASURED
    if decoded.error:
        return f"**failed**: {decoded.error}" if bound else "not decoded"
    text = f"{_number(decoded.max_abs)} / {_number(decoded.mean_abs)}"
    return f"**{text}**" if bound and not is_within(decoded, bound) else text


def _limits() -> str:
    rows = {", ".join(map(_code, names(rule))): rule.unsupported_when or "never" for rule in set(rules().values())}
    return _table(["Transform", "Runs in torch where"], ([name, limits] for name, limits in sorted(rows.items())))


def _code(text: str) -> str:
    return f"`{text}`"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', _ESCAPED) for cell in line)} |" for line in lines)

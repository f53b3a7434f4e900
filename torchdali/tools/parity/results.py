"""Results by machine, stored as JSON, so that runs on two machines make one page."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torchvision

from torchdali import __version__
from torchdali.pipeline import graph
from torchdali.tools.bench.metrics import cpu_model
from torchdali.tools.parity.case import Case, GroupDifferences
from torchdali.tools.parity.cases import CASES
from torchdali.tools.parity.compare import Differences, compile_chain, find_exceeded_bounds
from torchdali.tools.parity.decoding import FORMATS, DecodingDifferences, find_exceeded_decoding_bounds
from torchdali.tools.parity.distributions import DistributionTest, significance_level
from torchdali.tools.parity.draws import DRAWS
from torchdali.tools.parity.groups import GROUPS, describe_chain

_FORMAT = 2


@dataclass(frozen=True)
class Machine:
    """Machine and packages of a measurement.

    Attributes:
        name: Name of the GPU or of the CPU.
        versions: Version of each package.
    """

    name: str = ""
    versions: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class CaseResult:
    """Result of one case.

    Attributes:
        chain: Chain of the case, as text.
        operators: DALI operators that it was compiled to.
        measured: Differences from torchvision.
    """

    chain: str
    operators: str
    measured: Differences


@dataclass(frozen=True)
class GroupResult:
    """Result of one case of a :class:`Group`.

    Attributes:
        chain: Chain of the case, as text.
        measured: Differences from the reference.
    """

    chain: str
    measured: GroupDifferences


@dataclass
class DeviceResult:
    """Results of one device, "cpu" or "cuda".

    Attributes:
        machine: Machine of the measurement.
        cases: Results by the name of the case.
        decoding: Results by format.
        groups: Results of each of :data:`GROUPS` by the name of the case.
        elsewhere: The name of the machine, by the name of each case that was measured on another one.
    """

    machine: Machine = field(default_factory=Machine)
    cases: dict[str, CaseResult] = field(default_factory=dict[str, CaseResult])
    decoding: dict[str, DecodingDifferences] = field(default_factory=dict[str, DecodingDifferences])
    groups: dict[str, dict[str, GroupResult]] = field(default_factory=lambda: {key: {} for key in GROUPS})
    elsewhere: dict[str, str] = field(default_factory=dict[str, str])

    def note_machine(self, name: str, where: Machine) -> None:
        """Note on which machine a case was measured."""
        self.elsewhere.pop(name, None)
        if where != self.machine:
            self.elsewhere[name] = where.name


@dataclass
class Results:
    """All results that the page shows.

    Attributes:
        devices: Results by "cpu" and "cuda", if measured.
        draws: Tests of the random parameters by name. The host draws them, so they do not depend on the device.
    """

    devices: dict[str, DeviceResult] = field(default_factory=dict[str, DeviceResult])
    draws: dict[str, DistributionTest] = field(default_factory=dict[str, DistributionTest])

    def select_device(self, device: str, where: Machine, is_part: bool = False) -> DeviceResult:
        """Return the results of a device. Drop those of another machine, unless only a part is measured here."""
        if device not in self.devices or (self.devices[device].machine != where and not is_part):
            self.devices[device] = DeviceResult(where)
        return self.devices[device]


def describe_machine(device: str) -> Machine:
    """Return this machine's name and versions."""
    versions = {
        "torchdali": __version__,
        "NVIDIA DALI": str(graph.require_dali().__version__),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "Python": platform.python_version(),
    }
    return Machine(torch.cuda.get_device_name() if device == "cuda" else cpu_model(), versions)


def describe(case: Case, device: str = "") -> tuple[str, str, str]:
    """Return a case's chain, its operators and its random numbers, as text.

    Args:
        case: The case.
        device: The device that it is compiled for, by default the last of the case's, a GPU. It need not be here.
    """
    plan = compile_chain(case.chain, device or case.devices[-1])
    views = [line.partition(": ")[2] for line in str(plan).splitlines() if line.startswith("view ")]
    randomness = "; ".join(dict.fromkeys(step.randomness for step in plan.steps if step.randomness))
    return describe_chain(case.chain), "; ".join(dict.fromkeys([plan.trunk, *views])), randomness


def find_failures(results: Results) -> list[str]:
    """Return a line for each bound that is exceeded and each p-value below :func:`significance_level`."""
    failures: list[str] = []
    for device, of_device in results.devices.items():
        for name, case in of_device.cases.items():
            if over := find_exceeded_bounds(CASES[name], case.measured):
                failures.append(f"{name} on {device}: {over}")
        for key, group in GROUPS.items():
            for name, result in of_device.groups[key].items():
                if over := group.find_exceeded(group.cases[name], result.measured):
                    failures.append(f"{name} on {device}: {over}")
        for name, result in of_device.decoding.items():
            if over := find_exceeded_decoding_bounds(name, device, result):
                failures.append(f"decoding {name} on {device}: {over}")
    level = significance_level()
    failures += [f"{name}: p = {x.p:.2g}, below {level:.2g}" for name, x in results.draws.items() if x.p < level]
    return failures


def write(results: Results, path: Path) -> None:
    """Write the results as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format": _FORMAT, **asdict(results)}, indent=1) + "\n")


def read(path: Path) -> Results:
    """Read results from JSON. Drop cases that were removed or changed since."""
    if not path.exists():
        return Results()
    stored: Any = json.loads(path.read_text())
    if stored.get("format") != _FORMAT:
        return Results()
    results = Results(draws={name: DistributionTest(**x) for name, x in _select(stored["draws"], DRAWS)})
    for device, part in stored["devices"].items():
        now = {name: describe(case, device)[:2] for name, case in CASES.items() if device in case.devices}
        cases = {
            name: CaseResult(case["chain"], case["operators"], Differences(**case["measured"]))
            for name, case in part["cases"].items()
            if (case["chain"], case["operators"]) == now.get(name)
        }
        decoding = {name: DecodingDifferences(**x) for name, x in _select(part["decoding"], FORMATS)}
        of_device = DeviceResult(Machine(**part["machine"]), cases, decoding)
        of_device.elsewhere = part.get("elsewhere", {})
        for key, group in GROUPS.items():
            for name, x in _select(part["groups"][key], group.cases):
                if x["chain"] == describe_chain(group.cases[name].chain):
                    of_device.groups[key][name] = GroupResult(x["chain"], GroupDifferences(**x["measured"]))
        results.devices[device] = of_device
    return results


def _select(stored: dict[str, Any], names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    return ((name, stored[name]) for name in names if name in stored)

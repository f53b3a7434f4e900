"""Run of ``torchdali parity``."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from torchdali.errors import OptionError
from torchdali.tools.parity import results
from torchdali.tools.parity.case import GroupDifferences
from torchdali.tools.parity.cases import CASES
from torchdali.tools.parity.compare import Differences, measure
from torchdali.tools.parity.decoding import FORMATS, measure_decoding
from torchdali.tools.parity.distributions import compare_distributions
from torchdali.tools.parity.draws import DRAWS
from torchdali.tools.parity.groups import GROUPS, describe_chain
from torchdali.tools.parity.photographs import write_photographs
from torchdali.tools.parity.report import TITLES, write_markdown

Tick = Callable[[], None]
_Measured = TypeVar("_Measured")


def certify(out: Path, devices: Sequence[str], only: str, console: Console) -> list[str]:
    """Measure on some devices, and write the page and, beside it, the results as JSON.

    Args:
        out: Path of the page. Results of an earlier run that are not measured again are kept from the JSON beside it.
        devices: "cpu", "cuda" or both.
        only: Regular expression that selects cases, random parameters, "targets <name>", "sounds <name>",
            "volumes <name>" and "decoding <format>" by name.
        console: Console to print to.

    Returns:
        Failures in all that the page shows, one line each.

    Raises:
        OptionError: ``only`` is no regular expression, selects nothing, or the page has results of other versions.
    """
    stored = out.with_suffix(".json")
    known = results.read(stored)
    try:
        wanted = re.compile(only)
    except re.error as error:
        raise OptionError(f"--only is not a regular expression: {error}") from error
    cases = [name for name in CASES if wanted.search(name)]
    formats = [name for name in FORMATS if wanted.search(f"decoding {name}")]
    draws = [name for name in DRAWS if wanted.search(name)]
    grouped = {key: [name for name in group.cases if wanted.search(name)] for key, group in GROUPS.items()}
    if not (cases or formats or draws or any(grouped.values())):
        raise OptionError(f"--only {only!r} is found in no name of a case, random parameter or format")

    for device in devices if only else ():
        stored_on = known.devices[device].machine if device in known.devices else None
        if stored_on and stored_on.versions != results.describe_machine(device).versions:
            raise OptionError(
                f"--only measures a part, and {out} has results of other versions for {device} "
                f"({stored_on.name}); measure all, or give another --out"
            )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, tempfile.TemporaryDirectory() as folder:

        def stage(title: str, total: int) -> Tick:
            task = progress.add_task(title, total=total)
            return lambda: progress.advance(task)

        photographs = write_photographs(Path(folder) / "photographs")
        for device in devices:
            here_on = results.describe_machine(device)
            of_device = known.select_device(device, here_on, is_part=bool(only))
            here = [name for name in cases if device in CASES[name].devices and not CASES[name].refused]
            tick = stage(f"transforms, {TITLES[device]}", len(here))
            for name in here:
                chain, operators, _ = results.describe(CASES[name], device)
                measured = _measure(measure, Differences, CASES[name], photographs, device)
                of_device.cases[name] = results.CaseResult(chain, operators, measured)
                of_device.note_machine(name, here_on)
                tick()
            for key, group in GROUPS.items():
                tick = stage(f"{group.title}, {TITLES[device]}", len(grouped[key]))
                for name in grouped[key]:
                    case = group.cases[name]
                    measured = _measure(group.measure, GroupDifferences, case, photographs, device)
                    of_device.groups[key][name] = results.GroupResult(describe_chain(case.chain), measured)
                    of_device.note_machine(name, here_on)
                    tick()
            tick = stage(f"decoding, {TITLES[device]}", len(formats))
            for name in formats:
                of_device.decoding[name] = measure_decoding(Path(folder) / device / name, name, device)
                of_device.note_machine(f"decoding {name}", here_on)
                tick()
            results.write(known, stored)
        tick = stage("random parameters", len(draws))
        for name in draws:
            known.draws[name] = compare_distributions(DRAWS[name])
            tick()

    results.write(known, stored)
    write_markdown(known, out)
    failures = results.find_failures(known)
    for line in failures:
        console.print(f"[red]{line}[/]", soft_wrap=True)
    count = len(cases) + sum(map(len, grouped.values()))
    console.print(
        f"{count} cases, {len(draws)} random parameters and {len(formats)} formats; "
        f"{len(failures) or 'no'} {'failure' if len(failures) == 1 else 'failures'}. Written: {out}",
        soft_wrap=True,
    )
    return failures


def _measure(
    run: Callable[[Any, Any, str], _Measured],
    failed: Callable[..., _Measured],
    case: Any,
    photographs: object,
    device: str,
) -> _Measured:
    try:
        return run(case, photographs, device)
    except Exception as error:  # noqa: BLE001 - a case that cannot run is a result, and the others run
        return failed(error=_describe(error))


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"

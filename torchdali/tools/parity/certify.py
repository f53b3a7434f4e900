"""Run of ``torchdali parity``."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from torchdali.errors import OptionError
from torchdali.tools.parity import results
from torchdali.tools.parity.case import Case
from torchdali.tools.parity.cases import CASES
from torchdali.tools.parity.compare import Differences, measure
from torchdali.tools.parity.decoding import FORMATS, measure_decoding
from torchdali.tools.parity.distributions import compare_distributions
from torchdali.tools.parity.draws import DRAWS
from torchdali.tools.parity.photographs import write_photographs
from torchdali.tools.parity.report import TITLES, write_markdown
from torchdali.tools.parity.sounds import SOUNDS, SoundCase, SoundDifferences, measure_sounds
from torchdali.tools.parity.targets import TARGETS, TargetCase, TargetDifferences, measure_targets
from torchdali.tools.parity.volumes import VOLUMES, VolumeCase, VolumeDifferences, measure_volumes

Tick = Callable[[], None]


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
        OptionError: ``only`` is no regular expression, or selects nothing.
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
    targets = [name for name in TARGETS if wanted.search(name)]
    sounds = [name for name in SOUNDS if wanted.search(name)]
    volumes = [name for name in VOLUMES if wanted.search(name)]
    if not (cases or formats or draws or targets or sounds or volumes):
        raise OptionError(f"--only {only!r} is found in no name of a case, random parameter or format")

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, tempfile.TemporaryDirectory() as folder:

        def stage(title: str, total: int) -> Tick:
            task = progress.add_task(title, total=total)
            return lambda: progress.advance(task)

        photographs = write_photographs(Path(folder) / "photographs")
        for device in devices:
            of_device = known.select_device(device, results.describe_machine(device))
            here = [name for name in cases if device in CASES[name].devices and not CASES[name].refused]
            tick = stage(f"transforms, {TITLES[device]}", len(here))
            for name in here:
                chain, operators, _ = results.describe(CASES[name])
                of_device.cases[name] = results.CaseResult(chain, operators, _measure(CASES[name], photographs, device))
                tick()
            tick = stage(f"boxes and masks, {TITLES[device]}", len(targets))
            for name in targets:
                chain, measured = TARGETS[name].chain, _measure_targets(TARGETS[name], photographs, device)
                of_device.targets[name] = results.TargetResult(results.describe_chain(chain), measured)
                tick()
            tick = stage(f"sounds, {TITLES[device]}", len(sounds))
            for name in sounds:
                of_device.sounds[name] = results.SoundResult(str(SOUNDS[name]), _measure_sounds(SOUNDS[name], device))
                tick()
            tick = stage(f"volumes, {TITLES[device]}", len(volumes))
            for name in volumes:
                chain, measured = VOLUMES[name].chain, _measure_volumes(VOLUMES[name], device)
                of_device.volumes[name] = results.VolumeResult(results.describe_chain(chain), measured)
                tick()
            tick = stage(f"decoding, {TITLES[device]}", len(formats))
            for name in formats:
                of_device.decoding[name] = measure_decoding(Path(folder) / device / name, name, device)
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
    count = len(cases) + len(targets) + len(sounds) + len(volumes)
    console.print(
        f"{count} cases, {len(draws)} random parameters and {len(formats)} formats; "
        f"{len(failures) or 'no'} {'failure' if len(failures) == 1 else 'failures'}. Written: {out}",
        soft_wrap=True,
    )
    return failures


def _measure(case: Case, photographs: object, device: str) -> Differences:
    try:
        return measure(case, photographs, device)
    except Exception as error:  # noqa: BLE001 - a case that cannot run is a result, and the others run
        return Differences(error=_describe(error))


def _measure_targets(case: TargetCase, photographs: object, device: str) -> TargetDifferences:
    try:
        return measure_targets(case, photographs, device)
    except Exception as error:  # noqa: BLE001 - as above
        return TargetDifferences(error=_describe(error))


def _measure_sounds(case: SoundCase, device: str) -> SoundDifferences:
    try:
        return measure_sounds(case, device)
    except Exception as error:  # noqa: BLE001 - as above
        return SoundDifferences(error=_describe(error))


def _measure_volumes(case: VolumeCase, device: str) -> VolumeDifferences:
    try:
        return measure_volumes(case, device)
    except Exception as error:  # noqa: BLE001 - as above
        return VolumeDifferences(error=_describe(error))


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"

"""Two checkouts of torchdali by turns: is the new one as fast as the old one?

    python -m benchmarks.studies.versions OLD NEW --cores 16,4,1 --cases alone,resnet18

OLD and NEW are folders that hold the package. Each version has one process, and both live as long as the case. They
iterate by turns over a few epochs, so that both meet the same state of the machine. The result is the median of the
ratios of neighbouring turns, with its quartiles: processes of the same code differ more than the ratio does.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import data, report
from benchmarks.common.script import Results, make_parser, parse_args

CASES = {"alone": "the loader alone", "resnet18": "beside a step of ResNet-18"}
_WORKER = Path(__file__).resolve().with_name("versions_worker.py")


class Version:
    """A process that measures one version. It imports nothing of this checkout.

    Args:
        path: Folder that holds the package.
        options: What the process is told of the case.
    """

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        paths = [str(path.resolve()), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        self._process = subprocess.Popen(
            [sys.executable, str(_WORKER), json.dumps(options)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, word: str) -> float:
        """Return the images per second of a turn of `word`: "loader", or "batch" for one batch again and again."""
        assert self._process.stdin
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return float(self.read())

    def read(self) -> str:
        """Return the next line that the process prints."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a version's process ended with {self._process.wait()}")
        return line

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def compare(old: Path, new: Path, options: dict[str, Any], turns: int) -> dict[str, Any]:
    """Return every turn of both versions, and the quartiles of the ratios of neighbouring turns."""
    versions = {"old": Version(old, options), "new": Version(new, options)}
    rates: dict[str, list[float]] = {"old": [], "new": [], "batch": []}
    described = [json.loads(version.read()) for version in versions.values()]
    for turn in range(turns):
        # Each version is first in every other turn, because a turn warms the machine for the next.
        for name in ("old", "new") if turn % 2 == 0 else ("new", "old"):
            rates[name].append(versions[name].ask("loader"))
        if options["case"] != "alone":
            rates["batch"].append(versions["old"].ask("batch"))
    for version in versions.values():
        version.close()
    return {**options, **described[-1], "rates": rates, "ratios": summarize(rates["old"], rates["new"])}


def summarize(old: list[float], new: list[float]) -> list[float]:
    """Return the quartiles of new divided by old, turn by turn."""
    ratios = [after / before for before, after in zip(old, new, strict=True)]
    return statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3


def render(whole: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    rows = [["case", "old", "new", "new / old", "quartiles", "one batch again"]]
    for run in whole["runs"]:
        low, middle, high = run["ratios"]
        medians = {key: statistics.median(rates) if rates else None for key, rates in run["rates"].items()}
        ranges = {
            key: f"{medians[key]:,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"
            for key, rates in run["rates"].items()
            if rates
        }
        case = f"{CASES[run['case']]}, {report.cores(run['cores'])}, {len(run['rates']['old'])} turns"
        batch = f"{medians['batch']:,.0f}" if medians["batch"] else ""
        rows.append([case, ranges["old"], ranges["new"], f"{middle:.3f}", f"{low:.3f} to {high:.3f}", batch])
    lines = ["# Two versions by turns", "", *report.format_machine(whole["machine"])]
    lines += [f"- old: {whole['old']}; new: {whole['new']}", f"- command: `{whole['command']}`", ""]
    lines += ["Images per second: medians, least and largest turn.", "", report.markdown(rows)]
    return "\n".join(lines)


def main(command: list[str] | None = None) -> None:
    """Run the study."""
    parser = make_parser("studies.versions", __doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="folder that holds the old package")
    parser.add_argument("new", type=Path, help="folder that holds the new package")
    parser.add_argument("--cases", default="alone,resnet18", help=f"some of {', '.join(CASES)}, separated by commas")
    parser.add_argument("--cores", default="16,4,1", help="numbers of cores, separated by commas")
    parser.add_argument("--turns", type=int, default=16, help="turns of each version")
    parser.add_argument("--epochs", type=int, default=4, help="epochs in a turn")
    parser.add_argument("--images", type=int, default=5_120, help="pictures in an epoch")
    parser.add_argument("--batch-size", type=int, default=256, help="images in a batch")
    parser.add_argument("--titles", default="old,new", help="names of the two versions, separated by a comma")
    args = parse_args(parser, sys.argv[1:] if command is None else command)
    root = data.default_root(args.images)
    data.make(root, args.images)
    old, new = args.titles.split(",")
    args.command = [
        "OLD" if Path(word) == args.old else "NEW" if Path(word) == args.new else word for word in args.command
    ]
    results = Results("studies.versions", args, render, old=old, new=new)
    for cores in map(int, args.cores.split(",")):
        for case in args.cases.split(","):
            options = {
                "case": case,
                "cores": cores,
                "epochs": args.epochs,
                "root": str(root.resolve()),
                "batch_size": args.batch_size,
            }
            run = compare(args.old, args.new, options, args.turns)
            results.add(run, f"{case}, {report.cores(cores)}: new / old {run['ratios'][1]:.3f}")
    print(render(results.whole))


if __name__ == "__main__":
    main()

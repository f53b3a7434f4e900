"""Command lines and result files of the studies, which the harness does not run."""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.common import report


def make_parser(benchmark: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the common options."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{benchmark}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    parser.add_argument("--commit", help="torchdali's commit, if git cannot tell it")
    parser.add_argument("--name", help=f"name of the result files [{benchmark}-<GPU>]")
    return parser


def parse_args(parser: argparse.ArgumentParser, command: list[str]) -> argparse.Namespace:
    """Parse the command, and add the command itself and the name of the results."""
    args = parser.parse_args(command)
    args.command = report.hide_paths(command, args)
    args.name = args.name or report.default_name(parser.prog.rpartition(".")[2])
    return args


class Results:
    """Results of a study, which are printed and written after each case.

    Args:
        benchmark: Name of the study.
        args: Its options.
        render: Returns the report as Markdown.
        details: More entries of the report.
    """

    def __init__(
        self,
        benchmark: str,
        args: argparse.Namespace,
        render: Callable[[dict[str, Any]], str],
        **details: Any,
    ) -> None:
        self._args, self._render, self._started = args, render, time.perf_counter()
        self.runs: list[dict[str, Any]] = []
        self.whole: dict[str, Any] = {
            "command": shlex.join(["python", "-m", f"benchmarks.{benchmark}", *args.command]),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **details,
            "runs": self.runs,
        }

    def add(self, entry: dict[str, Any], line: str) -> None:
        """Add the result of a case, and print a line."""
        self.runs.append(entry)
        print(line, flush=True)
        self.whole["machine"] = report.describe_machine(self.runs, self._args.commit)
        self.whole["total_seconds"] = round(time.perf_counter() - self._started, 1)
        report.save(self.whole, self._args.out, self._args.name, self._render(self.whole))


def run_worker(benchmark: str, options: dict[str, Any], timeout: float | None = None) -> list[dict[str, Any]]:
    """Run a process of a study, whose work gets ``options``. Return the lines of JSON that it prints."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", "--worker", json.dumps(options)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=timeout)
    return [json.loads(line) for line in done.stdout.splitlines()]


def main(
    work: Callable[[dict[str, Any]], None],
    run: Callable[[argparse.Namespace], object],
    parse: Callable[[list[str]], argparse.Namespace],
) -> None:
    """Do what the command line asks for: a study, or with ``--worker`` what one of its processes does."""
    if sys.argv[1:2] == ["--worker"]:
        work(json.loads(sys.argv[2]))
    else:
        run(parse(sys.argv[1:]))

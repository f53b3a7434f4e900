"""Command lines and result files of the studies, which the harness does not run."""

import argparse
import shlex
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.common import report


def parser_of(benchmark: str, description: str) -> argparse.ArgumentParser:
    """A parser with the options that all of them have."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{benchmark}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="where the results go")
    parser.add_argument("--commit", help="torchdali's commit, where git cannot tell it")
    parser.add_argument("--name", help=f"name of the result files [{benchmark}-<GPU>]")
    return parser


def parsed(parser: argparse.ArgumentParser, command: list[str]) -> argparse.Namespace:
    """What was given, with the command itself and the name of the results."""
    args = parser.parse_args(command)
    args.command = report.shown(command, args)
    args.name = args.name or report.default_name(parser.prog.rpartition(".")[2])
    return args


class Results:
    """What was measured so far, printed and written anew after each case.

    Args:
        benchmark: its name.
        args: its options.
        write: writes the report into a folder, under a name.
        about: what else the report says.
    """

    def __init__(
        self,
        benchmark: str,
        args: argparse.Namespace,
        write: Callable[[dict[str, Any], Path, str], None],
        **about: Any,
    ) -> None:
        self._args, self._write, self._started = args, write, time.perf_counter()
        self.runs: list[dict[str, Any]] = []
        self.whole: dict[str, Any] = {
            "command": shlex.join(["python", "-m", f"benchmarks.{benchmark}", *args.command]),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **about,
            "runs": self.runs,
        }

    def add(self, entry: dict[str, Any], line: str) -> None:
        """One case more, and what to print of it."""
        self.runs.append(entry)
        print(line, flush=True)
        self.whole["machine"] = report.machine(self.runs, self._args.commit)
        self.whole["total_seconds"] = round(time.perf_counter() - self._started, 1)
        self._write(self.whole, self._args.out, self._args.name)

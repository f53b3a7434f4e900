"""What the command lines of benchmarks that are no regime of the harness have in common."""

import argparse
from pathlib import Path

from benchmarks import report


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
    args.command = command
    args.name = args.name or report.default_name(parser.prog.rpartition(".")[2])
    return args

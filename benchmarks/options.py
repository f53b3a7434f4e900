"""Command line of all benchmarks.

Each benchmark has its own defaults. An option that none of the chosen benchmarks has is an error.
"""

import argparse
import copy
import os
import shlex
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import report
from benchmarks.common.benchmark import Benchmark
from benchmarks.common.data import KINDS
from benchmarks.suite import proxy, training
from benchmarks.suite.all import BENCHMARKS, DEFAULT

_SPECIAL = (
    "cores",
    "seconds",
    "warmup",
    "settle",
    "timeout",
    "tune",
    "models",
    "levers",
    "cudnn_benchmark",
    "sources",
    "lengths",
)


def parse(command: Sequence[str]) -> Namespace:
    """Parse and check the options. `benchmarks` and `data` become lists."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure torchdali and other loaders in one run. Defaults that differ between benchmarks: "
        + "; ".join(f"{name}: {_describe_defaults(BENCHMARKS[name])}" for name in BENCHMARKS),
    )
    parser.add_argument(
        "benchmarks", nargs="*", metavar="BENCHMARK", help=f"some of {', '.join(BENCHMARKS)} [{' '.join(DEFAULT)}]"
    )
    parser.add_argument(
        "--data", default="imagenet", help=f"some of {', '.join(KINDS)}, separated by commas [imagenet]"
    )
    parser.add_argument(
        "--cache", choices=("warm", "cold"), default="warm", help="cold drops the files from the page cache"
    )
    parser.add_argument("--systems", help="some of a benchmark's systems, separated by commas [all]")
    parser.add_argument("--cores", help="numbers of cores, separated by commas")
    parser.add_argument("--seconds", type=float, help="time of one measurement")
    parser.add_argument("--limit", type=float, help="seconds in all, after which other cases are skipped")
    parser.add_argument("--timeout", type=float, help="limit of one process in seconds; more for compiled models")
    parser.add_argument("--warmup", type=float, help="seconds after which a slow first epoch or warm-up is cut")
    parser.add_argument("--settle", type=float, help="training: seconds before it is measured")
    parser.add_argument("--images", type=int, help="number of pictures to make, and in an epoch")
    parser.add_argument("--batch-size", type=int, help="images in a batch")
    parser.add_argument("--root", type=Path, help="folder of the pictures [in /dev/shm; cold: in /tmp]")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    parser.add_argument("--name", help="name of the results, after the benchmark's [the GPU's]")
    parser.add_argument("--commit", help="torchdali's commit, if git cannot tell it")
    parser.add_argument("--quick", action="store_true", help="a trial with few pictures")
    parser.add_argument("--no-preload", dest="preload", action="store_false", help="each process imports torch")
    parser.add_argument(
        "--no-tune", dest="tune", action="store_false", default=None, help="do not try several thread counts"
    )
    parser.add_argument("--models", help=f"training: some of {', '.join(training.MODELS)}")
    levers = ",".join(training.LEVERS)
    parser.add_argument("--levers", nargs="?", const=levers, help=f"training: all levers, or some of {levers}")
    parser.add_argument("--cudnn-benchmark", action="store_true", default=None, help="training: let cuDNN try kernels")
    parser.add_argument("--sources", help=f"proxy: some of {', '.join(proxy.SOURCES)}")
    parser.add_argument("--lengths", help="proxy: samples in an epoch, for each number of cores")
    args = parser.parse_args(command)
    args.command = shlex.join(["python", "-m", "benchmarks", *report.hide_paths(command, args)])
    args.benchmarks = args.benchmarks or list(DEFAULT)
    args.data = args.data.split(",")
    _check(parser, "benchmark", args.benchmarks, BENCHMARKS)
    _check(parser, "data", args.data, KINDS)
    benchmarks = [BENCHMARKS[name] for name in args.benchmarks]
    if args.systems == "all":
        args.systems = None
    if args.systems:
        args.systems = args.systems.split(",")
        _check(parser, "system", args.systems, {name for benchmark in benchmarks for name in benchmark.systems})
    for option in _SPECIAL:
        if getattr(args, option) is not None and not any(option in benchmark.defaults for benchmark in benchmarks):
            parser.error(f"--{option.replace('_', '-')} is no option of {' or '.join(args.benchmarks)}")
    if args.cache == "cold" and (warm := [benchmark.name for benchmark in benchmarks if not benchmark.cold]):
        parser.error(f"--cache cold is no option of {' or '.join(warm)}")
    if args.root and len(args.data) > 1:
        parser.error("--root holds one set of pictures, and --data names several")
    images: set[int] = set()
    for benchmark in benchmarks:
        for kind in args.data:
            try:
                images.add(settings(benchmark, args, kind).images)
            except ValueError as error:
                parser.error(str(error))
    if args.root and len(images) > 1:
        numbers = " and ".join(map(str, sorted(images)))
        parser.error(f"--root holds one set of pictures, and these benchmarks have {numbers}: give --images")
    return args


def settings(benchmark: Benchmark, options: Namespace, kind: str) -> Namespace:
    """Return the options for one benchmark with one set of pictures, with all defaults.

    Raises:
        ValueError: The options contradict each other, or the machine has too few cores.
    """
    args = copy.copy(options)
    args.data = kind
    defaults = {"images": KINDS[kind].images, "batch_size": KINDS[kind].batch_size, **benchmark.defaults}
    defaults |= benchmark.quick if options.quick else {}
    for option, value in defaults.items():
        if getattr(options, option) is None:
            setattr(args, option, value)
    wanted = options.systems or list(benchmark.defaults.get("systems", benchmark.systems))
    args.systems = [name for name in wanted if name in benchmark.systems]
    for option in ("models", "levers", "sources"):
        if isinstance(getattr(args, option), str):
            setattr(args, option, [part for part in getattr(args, option).split(",") if part])
    for option, known in (("models", training.MODELS), ("levers", training.LEVERS), ("sources", proxy.SOURCES)):
        if unknown := set(getattr(args, option) or ()) - set(known):
            raise ValueError(f"--{option}: unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    args.cores = _cores(args.cores, options.cores is not None)
    if args.images < args.batch_size:
        raise ValueError(f"--images {args.images} is less than one batch of {args.batch_size}")
    if "lengths" in benchmark.defaults:
        args.lengths = _lengths(args)
    return args


def _cores(text: str, chosen: bool) -> list[int]:
    """Return the numbers of cores that this process has, the largest first, or all of its cores if there is none."""
    here = len(os.sched_getaffinity(0))
    try:
        wanted = {int(count) for count in text.split(",")}
    except ValueError:
        raise ValueError(f"--cores {text} are not numbers, separated by commas") from None
    counts = sorted((count for count in wanted if 0 < count <= here), reverse=True)
    if chosen and not counts:
        raise ValueError(f"--cores {text}: this process has only {here}")
    return counts or [here]


def _lengths(args: Namespace) -> list[int]:
    lengths = [int(part) for part in args.lengths.split(",")]
    if len(lengths) < len(args.cores):
        raise ValueError(f"--lengths {args.lengths} has fewer numbers than there are numbers of cores: {args.cores}")
    if min(lengths) < args.batch_size:
        raise ValueError(f"--lengths {args.lengths} has less than one batch of {args.batch_size}")
    return lengths[: len(args.cores)]


def make_name(benchmark: Benchmark, args: Namespace, gpu: str) -> str:
    """Return the name of the result files: benchmark, machine, and options that differ from the usual ones."""
    kind = [] if args.data == "imagenet" else [args.data]
    cold = ["cold"] if args.cache == "cold" else []
    quick = ["quick"] if args.quick and not args.name else []
    return "-".join([benchmark.name, args.name or gpu, *kind, *cold, *quick])


def _check(parser: argparse.ArgumentParser, what: str, wanted: Sequence[str], known: Any) -> None:
    if unknown := [name for name in wanted if name not in known]:
        parser.error(f"no such {what}: {', '.join(unknown)}; there are {', '.join(sorted(known))}")


def _describe_defaults(benchmark: Benchmark) -> str:
    names = ("cores", "seconds", "timeout")
    return ", ".join(f"{name} {benchmark.defaults[name]}" for name in names if name in benchmark.defaults)

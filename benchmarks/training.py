"""Beside a training step: how much of the speed that the step has with no loading is left with each loader.

    python -m benchmarks.training
    python -m benchmarks.training --levers
    python -m benchmarks.training --quick --levers
    python -m benchmarks.training --models resnet18 --systems synthetic,torchdali --cores 16 --seconds 10 --name trial

The ceiling is the same step on one batch that lies on the GPU. It is measured with the driver's 8 hardware queues and
with the 32 that torchdali asks for, and shares are of the faster one. The step is a ResNet's of torchvision: bfloat16
autocast, channels last, cross entropy, SGD with momentum (`benchmarks.training_worker` has the loop and says what
the figures mean). `--levers` adds torchdali with one thing changed at a time, on the first model and the most cores.

Every case runs in a process of its own that may use only those cores, under a time limit, so one that hangs or fails is
reported and the others go on. These processes are forked from one that has imported torch and torchvision but not
initialised CUDA, which saves most of the time; `--no-preload` lets each import for itself. Compiled models are
measured on the most cores only. Cases that `--limit` leaves no time for are reported as skipped; the results are
rewritten after each case.
"""

import argparse
import itertools
import os
import shlex
import sys
import time
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks import children, data, report, training_report
from benchmarks.training_systems import LEVERS, MODELS, QUEUES, SYSTEMS, Case
from benchmarks.training_worker import measure_case

_PRELOADED = [
    "torch",
    "torchvision.transforms.v2",
    "torchvision.datasets",
    "torchvision.models",
    "benchmarks.training_worker",
]
_MODELS = "resnet18,resnet50,resnet18_compiled"
_QUICK = ["--images", "64", "--batch-size", "8", "--cores", "2,1", "--seconds", "0.1", "--warmup", "2"]
_QUICK += ["--models", "tiny,tiny_compiled"]
_LIMIT, _LIMIT_WITH_LEVERS = 390.0, 565.0
_COMPILING = 90.0
"""Seconds that a case with a compiled model may take longer than others."""


def cases(args: argparse.Namespace, root: Path) -> list[Case]:
    """All of them, ceilings before what is compared with them."""
    most = max(args.cores)
    plain = Case(
        model=args.models[0],
        system="torchdali",
        lever="",
        cores=most,
        queues=None,
        root=root,
        batch_size=args.batch_size,
        length=args.images // args.batch_size,
        seconds=args.seconds,
        warmup=args.warmup,
        patience=args.patience,
        cudnn_benchmark=args.cudnn_benchmark,
    )
    found: list[Case] = []
    for cores, model, name in itertools.product(args.cores, args.models, args.systems):
        system, compiled = SYSTEMS[name], MODELS[model].compiled
        if (compiled and not system.for_compiled) or (cores != most and (compiled or not system.every_core_count)):
            continue
        seconds = args.seconds / 2 if system.short else args.seconds
        case = replace(plain, cores=cores, model=model, system=name, seconds=seconds)
        found.append(case)
        if name == "synthetic":
            found.append(replace(case, queues=QUEUES))
    for name in args.levers:
        lever = LEVERS[name]
        found.append(replace(plain, system=lever.system, lever=name, queues=lever.queues))
    return found


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures all cases and writes the results after each; the whole report."""
    started = time.perf_counter()
    root = (args.root or data.default_root(args.images)).resolve()
    pictures = data.make(root, args.images)
    print(f"data: {pictures['images']} pictures of {pictures['mean_bytes'] / 1000:.1f} kB in {root}", flush=True)
    whole: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.training", *args.command]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "data": pictures,
        "batch_size": args.batch_size,
        "seconds": args.seconds,
        "cudnn_benchmark": args.cudnn_benchmark,
        "runs": [],
    }
    context = children.start_context(_PRELOADED if args.preload else ())
    whole["started_by"] = context.get_start_method()
    for case in cases(args, root):
        entry: dict[str, Any] = {**case.label(), "status": "skipped"}
        if time.perf_counter() - started < args.limit:
            timeout = args.timeout + (_COMPILING if MODELS[case.model].compiled else 0)
            entry |= children.measured(context, measure_case, case, timeout)
        whole["runs"].append(entry)
        training_report.add_shares(whole["runs"])
        print(_line(entry), flush=True)
        whole |= {"machine": report.machine(whole["runs"], args.commit)}
        whole["total_seconds"] = round(time.perf_counter() - started, 1)
        training_report.write(whole, args.out, args.name)
    return whole


def _rate(entry: dict[str, Any]) -> str:
    # whether it is the ceiling is known later
    return f"{(report.rate if entry['system'] == 'synthetic' else training_report.rate)(entry)} images/s"


def _line(entry: dict[str, Any]) -> str:
    """One case in one line, as it ends."""
    line = f"{entry['cores']:>3} cores  {entry['model']:<18}{training_report.plain_title(entry):<45}"
    if entry["status"] != "ok":
        return f"{line}{entry['status']}\n{entry.get('stderr', '')}".rstrip()
    line += f"{_rate(entry):>25}, waiting {entry['waiting_share']:.1%}"
    return line + report.ending(entry)


def parse(command: list[str]) -> argparse.Namespace:
    """The options, with core counts that this machine does not have left out."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training",
        description="Measures loaders beside a training step.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help=f"a trial: {shlex.join(_QUICK)}")
    parser.add_argument("--images", type=int, default=8192, help="number of pictures to make, and in an epoch")
    parser.add_argument("--root", type=Path, help="where they are or will be [in /dev/shm]")
    parser.add_argument("--cores", default="16,4", help="numbers of cores, separated by commas")
    parser.add_argument("--models", default=_MODELS, help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"some of {', '.join(SYSTEMS)}")
    names = ",".join(LEVERS)
    parser.add_argument("--levers", nargs="?", const=names, default="", help=f"add all levers, or some of {names}")
    parser.add_argument("--seconds", type=float, default=6.0, help="time of one measurement, to the nearest epoch")
    parser.add_argument("--warmup", type=int, default=10, help="steps before it, from the last slow one on")
    parser.add_argument("--patience", type=float, default=40.0, help="seconds after which warming up ends in any case")
    parser.add_argument("--timeout", type=float, default=60.0, help="limit of one process, seconds; more to compile")
    parser.add_argument(
        "--limit", type=float, help="seconds after which what is left is skipped [390, 565 with levers]"
    )
    parser.add_argument("--no-preload", dest="preload", action="store_false", help="each process imports torch")
    parser.add_argument("--cudnn-benchmark", action="store_true", help="let cuDNN try its kernels and take the fastest")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--commit", help="torchdali's commit, where git cannot tell it")
    parser.add_argument("--name", help="name of the result files [training-<GPU>]")
    args = parser.parse_args([*_QUICK, *command] if "--quick" in command else command)
    args.command = command
    args.name = args.name or report.default_name("training") + ("-quick" if args.quick else "")
    args.models, args.systems = args.models.split(","), args.systems.split(",")
    args.levers = args.levers.split(",") if args.levers else []
    if args.limit is None:
        args.limit = _LIMIT_WITH_LEVERS if args.levers else _LIMIT
    for wanted, known in ((args.models, MODELS), (args.systems, SYSTEMS), (args.levers, LEVERS)):
        if unknown := set(wanted) - set(known):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if args.images < args.batch_size:
        parser.error(f"--images {args.images} is less than one batch of {args.batch_size}")
    here = len(os.sched_getaffinity(0))
    wanted = [int(count) for count in args.cores.split(",")]
    args.cores = sorted((count for count in wanted if count <= here), reverse=True)
    if len(args.cores) != len(wanted):
        print(f"this process has {here} cores: measuring with {args.cores or 'none'} of {wanted}", flush=True)
    if not args.cores:
        parser.error(f"--cores: this process has only {here}")
    return args


def main() -> None:
    """Runs the benchmark and prints its tables, the short one last."""
    whole = run(parse(sys.argv[1:]))
    runs = whole["runs"]
    tables = [training_report.full_table(runs), training_report.lever_table(runs), training_report.short_table(runs)]
    print("\n" + "\n\n".join(filter(None, tables)))


if __name__ == "__main__":
    main()

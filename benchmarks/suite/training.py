"""Measure training with each loader, as a share of the speed of the training step alone.

The ceiling is the same step on one batch that stays on the GPU. It is measured with the driver's 8 hardware queues and
with torchdali's 32. Shares are of the faster one. The step is that of a torchvision ResNet: bfloat16 autocast, channels
last, cross entropy, SGD with momentum. `torchdali.tools.bench.training` has the loop and explains the figures.
`--levers` adds torchdali with one change at a time, on the first model and the most cores. Compiled models are measured
on the most cores only.
"""

import itertools
from argparse import Namespace
from dataclasses import replace
from multiprocessing.context import BaseContext
from pathlib import Path

from benchmarks.common import report
from benchmarks.common.benchmark import Benchmark, Run, make_unavailable_run
from benchmarks.suite import training_report
from benchmarks.suite.training_worker import measure_case
from benchmarks.systems.systems import PASSES
from benchmarks.systems.training_systems import DEFAULT, LEVERS, MODELS, QUEUES, SYSTEMS, Case
from torchdali.tools.bench import subprocesses

_STEPS, _QUICK_STEPS = 10, 2
"""Number of steps in the warm-up, after the last slow one."""
_COMPILING = 90.0
"""Additional seconds for a case with a compiled model."""


def cases(args: Namespace, root: Path) -> list[Case]:
    """Return all cases, ceilings first."""
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
        warmup=_QUICK_STEPS if args.quick else _STEPS,
        patience=args.warmup + args.settle,
        settle=args.settle,
        cudnn_benchmark=args.cudnn_benchmark,
        data=args.data,
        passes=1 if args.quick else PASSES,
    )
    cases: list[Case] = []
    for cores, model, name in itertools.product(args.cores, args.models, args.systems):
        system, compiled = SYSTEMS[name], MODELS[model].compiled
        if (compiled and not system.for_compiled) or (cores != most and (compiled or not system.every_core_count)):
            continue
        part = 0.5 if system.short else 1.0
        case = replace(plain, cores=cores, model=model, system=name)
        case = replace(case, seconds=args.seconds * part, settle=args.settle * part)
        if compiled:
            case = replace(case, patience=case.patience + _COMPILING)
        if system.workers:
            case = replace(case, length=case.length * case.passes)
        cases.append(case)
        if name == "synthetic":
            cases.append(replace(case, queues=QUEUES))
    for name in args.levers:
        lever = LEVERS[name]
        cases.append(replace(plain, system=lever.system, lever=name, queues=lever.queues))
    return cases


def _measure(context: BaseContext, case: Case, args: Namespace) -> Run:
    if reason := SYSTEMS[case.system].why_not(case.data):
        return make_unavailable_run(reason)
    timeout = args.timeout + (_COMPILING if MODELS[case.model].compiled else 0)
    return subprocesses.measure_in_process(context, measure_case, case, timeout)


def _rate(entry: Run) -> str:
    # The ceiling, of which this is a share, is known later.
    return f"{(report.rate if entry['system'] == 'synthetic' else training_report.rate)(entry)} images/s"


def _line(entry: Run) -> str:
    """Return the line that is printed for a case."""
    line = f"{entry['cores']:>3} cores  {entry['model']:<18}{training_report.plain_title(entry):<45}"
    if entry["status"] != "ok":
        return f"{line}{entry.get('reason', entry['status'])}\n{entry.get('stderr', '')}".rstrip()
    line += f"{_rate(entry):>25}, waiting {entry['waiting_share']:.1%}"
    return line + report.describe_ending(entry)


BENCHMARK = Benchmark(
    name="training",
    title="Beside a training step",
    systems=tuple(SYSTEMS),
    defaults={
        "systems": DEFAULT,
        "cores": "16,4",
        "models": "resnet18,resnet50,resnet18_compiled",
        "levers": "",
        "cudnn_benchmark": False,
        "seconds": 4.0,
        "warmup": 20.0,
        "settle": 8.0,
        "timeout": 60.0,
    },
    quick={"images": 64, "batch_size": 8, "cores": "1", "seconds": 0.1, "settle": 0.0, "models": "tiny"},
    preloaded=(
        "torch",
        "torchvision.transforms.v2",
        "torchvision.datasets",
        "torchvision.models",
        "benchmarks.suite.training",
    ),
    cases=cases,
    measure=_measure,
    label=Case.label,
    line=_line,
    finish=training_report.add_shares,
    heading=training_report.heading,
    tables=training_report.tables,
    legend=training_report.LEGEND,
    bars=training_report.bars,
    share=0.34,
)

"""Measure loading alone: how fast each system returns batches, and how fast it decodes.

DALI tuned by hand gets the best of a few thread counts. They are tried shortly before, each with its own pipeline, in
one process. torchdali gets no options.
"""

import os
import time
from argparse import Namespace
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from benchmarks.common import page_cache
from benchmarks.common.benchmark import Benchmark, Run, make_unavailable_run
from benchmarks.suite import loader_report
from benchmarks.systems.batches import describe, import_modules, set_queues, surroundings
from benchmarks.systems.loader_systems import DECODE, LOADER, SYSTEMS
from benchmarks.systems.systems import PASSES, Job, System
from torchdali.tools.bench import loading, subprocesses
from torchdali.tools.bench.metrics import Gpu

_TRIAL_SECONDS = 0.8


@dataclass(frozen=True)
class Case:
    """One line of the full table, and how to measure it.

    Attributes:
        benchmark: 'loader' or 'decode'.
        system: Name of one of the benchmark's systems.
        cores: Number of cores that the process may use.
        job: The job.
        seconds: How long to measure.
        warmup: Seconds after which a slow first epoch is cut.
        cold: Whether the files are dropped from the page cache before each epoch.
        tried: Numbers of threads to try, or empty to use the job's.
    """

    benchmark: str
    system: str
    cores: int
    job: Job
    seconds: float
    warmup: float
    cold: bool
    tried: tuple[int, ...] = ()


def _cases(benchmark: str, args: Namespace, root: Path) -> list[Case]:
    """Return all cases. Systems that are measured for every number of cores come first."""
    cases: list[Case] = []
    most, some = max(args.cores), {max(args.cores), 4, 1}
    for cores in args.cores:
        for name in args.systems:
            system = SYSTEMS[benchmark][name]
            if cores not in {"all": {cores}, "some": some, "most": {most}}[system.cores]:
                continue
            threads = max(1, cores // 2) if system.threads == "half" else cores
            tried = _candidates(cores) if system.threads == "tried" and args.tune else ()
            passes = 1 if args.quick or args.cache == "cold" else PASSES
            job = Job(root, args.batch_size, threads, args.data, passes)
            cases.append(Case(benchmark, name, cores, job, args.seconds, args.warmup, args.cache == "cold", tried))
    ranks = ("all", "some", "most")
    return sorted(cases, key=lambda case: ranks.index(SYSTEMS[benchmark][case.system].cores))


def _candidates(cores: int) -> tuple[int, ...]:
    """Return the numbers of threads to try."""
    return tuple(sorted({max(1, cores // 4), max(1, cores // 2), cores} | ({2 * cores} if cores < 4 else set())))


def _label(case: Case) -> Run:
    return {"system": case.system, "cores": case.cores, "threads": None}


def _measure(context: BaseContext, case: Case, args: Namespace) -> Run:
    """Measure one case, after choosing the number of threads if several are tried."""
    system = SYSTEMS[case.benchmark][case.system]
    if reason := system.why_not(case.job.data):
        return make_unavailable_run(reason)
    threads, extra = case.job.threads, {}
    if case.tried:
        tried = subprocesses.measure_in_process(context, try_threads, case, args.timeout).get("images_per_s", {})
        if tried:
            threads = int(max(tried, key=tried.get))
        extra = {"threads_tried": {count: tried.get(str(count)) for count in case.tried}}
    case = replace(case, job=replace(case.job, threads=threads), tried=())
    figures = subprocesses.measure_in_process(context, measure_case, case, args.timeout)
    return {**figures, "threads": None if system.threads == "its own" else threads, **extra}


def measure_case(case: Case, result: Path) -> None:
    """Measure one case in this process, and write the figures to `result` as JSON."""
    system = SYSTEMS[case.benchmark][case.system]
    gpu, import_s = _prepare(system, case)
    files = _files(case)
    forget = partial(page_cache.forget, files) if case.cold else None
    still_cached: dict[str, Any] = {}
    if forget:
        os.sync()
        forget()
        still_cached = {"cached_share": page_cache.cached_share(files)}
    figures, batch = loading.measure(
        partial(system.build, case.job), gpu, case.job.batch_size, case.seconds, case.warmup, forget
    )
    described = {"batch": describe(batch, case.job.batch_size, case.job.size, system.output)}
    subprocesses.write_figures({"import_s": import_s, **figures, **described, **still_cached, **surroundings()}, result)
    if not system.exits:
        subprocesses.exit_now(0)  # the thread of DALI's server would keep the process alive


def try_threads(case: Case, result: Path) -> None:
    """Measure images/s for each number of threads in this process, and write them to `result` as JSON."""
    system = SYSTEMS[case.benchmark][case.system]
    gpu, _ = _prepare(system, case)
    rates: dict[int, float] = {}
    for threads in case.tried:
        epoch = system.build(replace(case.job, threads=threads))
        rates[threads] = _rate(epoch, gpu, case.job.batch_size, min(_TRIAL_SECONDS, case.seconds))
        subprocesses.write_figures({"images_per_s": rates}, result)
        del epoch


def _rate(epoch: loading.Epoch, gpu: Gpu, batch_size: int, seconds: float) -> float:
    """Return images/s, from the third batch on."""
    taken, start = 0, 0.0
    while not start or time.perf_counter() - start < seconds:
        for number, _ in enumerate(epoch()):
            taken += 1
            if not start and number == 1:
                gpu.wait()
                taken, start = 0, time.perf_counter()
            if start and time.perf_counter() - start > seconds:
                break
        if not start:  # an epoch of one batch
            taken, start = 0, time.perf_counter()
    gpu.wait()
    return round(taken * batch_size / (time.perf_counter() - start), 1)


def _prepare(system: System, case: Case) -> tuple[Gpu, dict[str, float]]:
    import torch

    set_queues(system.imports)
    torch.set_num_threads(case.cores)  # torch was imported when the process still had all cores
    import_s = import_modules(system)
    return Gpu(), import_s


def _files(case: Case) -> list[Path]:
    return sorted(case.job.root.glob("*/*")) if case.cold else []


_PRELOADED = ("torch", "torchvision.transforms.v2", "torchvision.datasets", "benchmarks.suite.loader")
_DEFAULTS = {"cores": "16,8,4,2,1", "seconds": 2.5, "warmup": 6.0, "timeout": 60.0, "tune": True}
_QUICK = {"images": 64, "batch_size": 16, "cores": "1", "seconds": 0.2, "warmup": 5.0, "tune": False}


def _make_benchmark(name: str, title: str, share: float) -> Benchmark:
    known = {**DECODE, **LOADER, **SYSTEMS[name]}  # older results have both in one table
    return Benchmark(
        name=name,
        title=title,
        systems=tuple(SYSTEMS[name]),
        defaults=_DEFAULTS,
        quick=_QUICK,
        preloaded=_PRELOADED,
        cases=partial(_cases, name),
        measure=_measure,
        label=_label,
        line=loader_report.line,
        heading=partial(loader_report.heading, name),
        tables=partial(loader_report.tables, known),
        legend=loader_report.LEGEND,
        bars=partial(loader_report.bars, known, title),
        share=share,
        cold=True,
    )


BENCHMARKS = {
    "decode": _make_benchmark("decode", "Decoding only", 0.16),
    "loader": _make_benchmark("loader", "Loader only", 0.4),
}

"""Loading alone: how fast each system hands out batches that nobody uses, and how fast it decodes.

DALI tuned by hand gets the best of a few thread counts, tried shortly beforehand, each with a pipeline of its own in
one process; torchdali is told nothing.
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
from benchmarks.common.benchmark import Benchmark, Run, none
from benchmarks.suite import loader_report
from benchmarks.systems.batches import describe, imported, set_queues, surroundings
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
        system: a name among the benchmark's.
        cores: how many cores the process may use.
        job: what is to be done.
        seconds: how long to measure.
        warmup: where to cut a slow first epoch, seconds.
        cold: whether the files are forgotten before each epoch.
        tried: numbers of threads to try; empty where the job's number is taken.
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
    """All of them, those first that are measured for every number of cores."""
    found: list[Case] = []
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
            found.append(Case(benchmark, name, cores, job, args.seconds, args.warmup, args.cache == "cold", tried))
    ranks = ("all", "some", "most")
    return sorted(found, key=lambda case: ranks.index(SYSTEMS[benchmark][case.system].cores))


def _candidates(cores: int) -> tuple[int, ...]:
    """Numbers of threads to try on so many cores."""
    return tuple(sorted({max(1, cores // 4), max(1, cores // 2), cores} | ({2 * cores} if cores < 4 else set())))


def _label(case: Case) -> Run:
    return {"system": case.system, "cores": case.cores, "threads": None}


def _measure(context: BaseContext, case: Case, args: Namespace) -> Run:
    """The figures of one case, after finding out the number of threads where that is asked for."""
    system = SYSTEMS[case.benchmark][case.system]
    if reason := system.cannot(case.job.data):
        return none(reason)
    threads, told = case.job.threads, {}
    if case.tried:
        tried = subprocesses.measure_in_process(context, try_threads, case, args.timeout).get("images_per_s", {})
        if tried:
            threads = int(max(tried, key=tried.get))
        told = {"threads_tried": {count: tried.get(str(count)) for count in case.tried}}
    case = replace(case, job=replace(case.job, threads=threads), tried=())
    figures = subprocesses.measure_in_process(context, measure_case, case, args.timeout)
    return {**figures, "threads": None if system.threads == "its own" else threads, **told}


def measure_case(case: Case, result: Path) -> None:
    """Measures one case in this process, which is one of its own, and writes the figures to `result` as JSON."""
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
        subprocesses.exit_now(0)  # the thread of DALI's server would not let the process end


def try_threads(case: Case, result: Path) -> None:
    """Images/s for each number of threads, one after another in this process, written to `result` as JSON."""
    system = SYSTEMS[case.benchmark][case.system]
    gpu, _ = _prepare(system, case)
    rates: dict[int, float] = {}
    for threads in case.tried:
        epoch = system.build(replace(case.job, threads=threads))
        rates[threads] = _rate(epoch, gpu, case.job.batch_size, min(_TRIAL_SECONDS, case.seconds))
        subprocesses.write_figures({"images_per_s": rates}, result)
        del epoch


def _rate(epoch: loading.Epoch, gpu: Gpu, batch_size: int, seconds: float) -> float:
    """Images/s, from the third batch on."""
    taken, start = 0, 0.0
    while not start or time.perf_counter() - start < seconds:
        for number, _ in enumerate(epoch()):
            taken += 1
            if not start and number == 1:
                gpu.wait()
                taken, start = 0, time.perf_counter()
            if start and time.perf_counter() - start > seconds:
                break
        if not start:  # a set of one batch
            taken, start = 0, time.perf_counter()
    gpu.wait()
    return round(taken * batch_size / (time.perf_counter() - start), 1)


def _prepare(system: System, case: Case) -> tuple[Gpu, dict[str, float]]:
    import torch

    set_queues(system.imports)
    torch.set_num_threads(case.cores)  # it was imported before the process had given up the other cores
    import_s = imported(system)
    return Gpu(), import_s


def _files(case: Case) -> list[Path]:
    return sorted(case.job.root.glob("*/*")) if case.cold else []


_PRELOADED = ("torch", "torchvision.transforms.v2", "torchvision.datasets", "benchmarks.suite.loader")
_DEFAULTS = {"cores": "16,8,4,2,1", "seconds": 2.5, "warmup": 6.0, "timeout": 60.0, "tune": True}
_QUICK = {"images": 64, "batch_size": 16, "cores": "1", "seconds": 0.2, "warmup": 5.0, "tune": False}


def _make_benchmark(name: str, title: str, share: float) -> Benchmark:
    known = {**DECODE, **LOADER, **SYSTEMS[name]}  # older results have both kinds in one table
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
        said=partial(loader_report.said, name),
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

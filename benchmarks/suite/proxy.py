"""Measure datasets in worker processes.

The same samples (`proxy_datasets`) go through torchdali, DALI's own proxy, and DataLoader with torchvision. For
comparison, torchdali also reads the same pictures natively, as an image folder. Each system gets a worker for each
core. DALI's proxy is also tried with half as many, and the short table has the better result. Workers stay between
epochs. With the most cores, the start of a second epoch with new workers is measured too. The likely best numbers of
workers come first. Cases for which `--limit` leaves no time are reported as skipped.
"""

import time
import traceback
from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from benchmarks.common import report
from benchmarks.common.benchmark import Benchmark, Run
from benchmarks.suite import proxy_report
from benchmarks.systems.batches import describe, import_modules, set_queues, surroundings
from benchmarks.systems.proxy_datasets import SOURCES, make_arrays
from benchmarks.systems.proxy_systems import SYSTEMS
from benchmarks.systems.systems import SIZE, Job
from torchdali.tools.bench import loading, subprocesses
from torchdali.tools.bench.metrics import Gpu


@dataclass(frozen=True)
class Case:
    """One line of the full table, and how to measure it."""

    system: str
    source: str
    cores: int
    workers: int
    length: int
    new_workers: bool
    root: Path
    batch_size: int
    seconds: float
    warmup: float

    def label(self) -> dict[str, Any]:
        """Return its label in the results."""
        names = ("system", "source", "cores", "workers", "length")
        return {name: getattr(self, name) for name in names}


def cases(args: Namespace, root: Path) -> list[Case]:
    """Return all cases, the most important first."""
    make_arrays(root)
    ranked: list[tuple[int, Case]] = []
    for cores, length in zip(args.cores, args.lengths, strict=True):
        for name in args.systems:
            for source in SYSTEMS[name].sources:
                if source not in args.sources and source in SOURCES:
                    continue
                for rank, workers in enumerate(SYSTEMS[name].workers(cores)):
                    # With half the workers an epoch starts in another way, which is not measured.
                    new_workers = cores == max(args.cores) and workers in (0, cores)
                    settings = (root, args.batch_size, args.seconds, args.warmup)
                    ranked.append((rank, Case(name, source, cores, workers, length, new_workers, *settings)))
    return [case for _, case in sorted(ranked, key=lambda pair: pair[0])]


def _measure(context: BaseContext, case: Case, args: Namespace) -> Run:
    return subprocesses.measure_in_process(context, measure_case, case, args.timeout)


def measure_case(case: Case, result: Path) -> None:
    """Measure one case in this process, and write the figures to `result` as JSON."""
    import torch

    system = SYSTEMS[case.system]
    of_source = system.make_system(case.source, case.length)
    set_queues(of_source.imports)
    torch.set_num_threads(case.cores)  # torch was imported when the process still had all cores
    import_s, gpu = import_modules(of_source), Gpu()
    job = Job(case.root, case.batch_size, case.workers)
    figures, batch = loading.measure(partial(of_source.build, job), gpu, case.batch_size, case.seconds, case.warmup)
    figures |= {"import_s": import_s, "batch": describe(batch, case.batch_size, SIZE), **surroundings()}
    subprocesses.write_figures(figures, result)
    if case.new_workers:
        # An epoch of one batch for each worker, because only the first batch is timed.
        length = min(case.length, max(case.workers, 1) * case.batch_size)
        build = system.make_system(case.source, length, persistent=False).build
        try:
            figures["new_workers_first_batch_s"] = _time_second_start(build(job))
        except Exception:  # noqa: BLE001 - the other figures are still valid
            figures["new_workers_error"] = traceback.format_exc()[-3000:]
        subprocesses.write_figures(figures, result)
    if not system.exits:
        subprocesses.exit_now(0)  # the thread of DALI's server would keep the process alive


def _time_second_start(epoch: Any) -> float:
    """Return the seconds from the second epoch's start to its first batch, after a whole first epoch."""
    import torch

    first = 0.0
    for _ in range(2):
        start = time.perf_counter()
        for number, _ in enumerate(epoch()):
            if number == 0:
                if torch.cuda.is_available():
                    torch.cuda.current_stream().synchronize()
                first = time.perf_counter() - start
    return round(first, 4)


def _line(entry: Run) -> str:
    """Return the line that is printed for a case."""
    line = f"{entry['cores']:>3} cores  {entry['system']:<10}{entry['source']:<8}{entry['workers']:>3} workers"
    if entry["status"] != "ok":
        return f"{line}  {entry['status']}\n{entry.get('stderr', '')}".rstrip()
    line += f"{entry['images_per_s']:>10,.0f} images/s, first batch {entry['first_batch_s']:.2f} s"
    return line + report.describe_ending(entry)


BENCHMARK = Benchmark(
    name="proxy",
    title="Datasets in worker processes",
    systems=tuple(SYSTEMS),
    defaults={
        "cores": "16,4",
        "lengths": "8192,4096",
        "sources": ",".join(SOURCES),
        "seconds": 2.5,
        "warmup": 15.0,
        "timeout": 45.0,
    },
    quick={"images": 96, "batch_size": 16, "cores": "2,1", "lengths": "96,96", "seconds": 0.3},
    preloaded=("torch", "torchvision.transforms.v2", "torchvision.datasets", "benchmarks.suite.proxy"),
    cases=cases,
    measure=_measure,
    label=Case.label,
    line=_line,
    heading=proxy_report.heading,
    tables=proxy_report.tables,
    legend=proxy_report.LEGEND,
    bars=proxy_report.bars,
    share=0.6,
)

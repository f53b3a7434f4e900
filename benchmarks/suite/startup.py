"""Measure start-up: the time to the first batch of a script, of later epochs, and of one after an early break.

Each system starts in a new interpreter, which has imported none of its modules.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from dataclasses import asdict, dataclass
from multiprocessing.context import BaseContext
from pathlib import Path

from benchmarks.common import page_cache, report
from benchmarks.common.benchmark import Bars, Benchmark, Run, make_unavailable_run
from benchmarks.systems.batches import VARIABLE
from benchmarks.systems.loader_systems import LOADER
from benchmarks.systems.systems import Job
from torchdali.tools.bench.subprocesses import kill_group, read_outcome

_REPOSITORY = Path(__file__).resolve().parents[2]
_DEFAULT = ("torchdali", "dali_tuned", "dali_documented", "dali_proxy", "dataloader_v2", "dataloader_pil")
_LEGEND = """\
Each line is a new interpreter on those cores only. *Imports* is the time to import the modules that the system
needs, *CUDA* the time until a first kernel has run, and *construct* the time to make the loader. *First batch*
counts from there, and *in all* from the start of the imports. *Second epoch's* is the time from `iter()` to the
first batch, after a whole first epoch. *After a break* is the same after an epoch that was left after three batches.
DALI's own iterators cannot leave an epoch, and continue the old one. DALI tuned by hand and DALI's proxy have half
as many threads as cores. Other systems have one for each core, or choose themselves. CPU time and memory include
child processes. Gaps are those of the first epoch."""


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    system: str
    cores: int
    job: Job


def _cases(args: Namespace, root: Path) -> list[Case]:
    cases: list[Case] = []
    for cores in args.cores:
        for name in args.systems:
            half = LOADER[name].threads in ("half", "tried")
            threads = max(1, cores // 2) if half else cores
            cases.append(Case(name, cores, Job(root, args.batch_size, threads, args.data)))
    return cases


def _label(case: Case) -> Run:
    return {"system": case.system, "cores": case.cores, "threads": case.job.threads}


def _measure(context: BaseContext, case: Case, args: Namespace) -> Run:  # noqa: ARG001 - each is a new interpreter
    if reason := LOADER[case.system].why_not(case.job.data):
        return make_unavailable_run(reason)
    options = {**asdict(case.job), "root": str(case.job.root), "system": case.system, "cores": case.cores}
    options |= {"warmup": args.warmup, "variable": VARIABLE}
    still_cached: Run = {}
    if args.cache == "cold":
        files = sorted(case.job.root.glob("*/*"))
        os.sync()
        page_cache.forget(files)
        still_cached = {"cached_share": page_cache.cached_share(files)}
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    command = [sys.executable, "-m", "benchmarks.suite.startup_worker", json.dumps(options)]
    if not args.quick:
        _read_libraries()
    return {**still_cached, **measure_command(command, environment, args.timeout)}


def measure_command(command: list[str], environment: dict[str, str], timeout: float) -> Run:
    """Run a program that writes its figures to the file that is its last argument, with a limit of `timeout` seconds.

    The result is that of `measure_in_process`.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result, output = Path(folder) / "result.json", Path(folder) / "output"
        with output.open("w") as file:
            # A session of its own, so that a timeout also ends the workers that it started.
            child = subprocess.Popen(
                [*command, str(result)],
                cwd=_REPOSITORY,
                env=environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        try:
            ended = str(child.wait(timeout))
        except subprocess.TimeoutExpired:
            ended = "timeout"
        finally:
            kill_group(child.pid)
            child.wait()
        return read_outcome(result, output, ended, started)


@functools.cache
def _read_libraries() -> None:
    """Import everything once, so that all systems find the libraries in the page cache."""
    names = {name for system in LOADER.values() if not system.package for name in system.imports}
    code = f"import importlib\nfor name in {sorted(names)}: importlib.import_module(name)"
    subprocess.run([sys.executable, "-c", code], cwd=_REPOSITORY, capture_output=True, timeout=120, check=False)


def _title(run: Run) -> str:
    return LOADER[run["system"]].title


def _tables(runs: list[Run]) -> list[str]:
    seconds = {
        "imports": lambda run: report.number(run, "imports_s", 1),
        "CUDA": lambda run: report.number(run, "cuda_init_s", 1),
        "construct": lambda run: report.number(run, "construct_s", 2),
        "first batch": lambda run: report.number(run, "next_s", 2),
        "in all": lambda run: report.number(run, "in_all_s", 1),
        "second epoch's": lambda run: report.number(run, "second_epoch_first_batch_s", 3),
        "after a break": lambda run: report.number(run, "after_break_first_batch_s", 3),
    }
    others = {
        "images/s of the first epoch": report.rate,
        "gap p50 / p99 / max, ms": report.gaps,
        "CPU-s per 1,000": lambda run: report.number(run, "cpu_s_per_1000_images", 2),
        "GPU MiB": lambda run: report.number(run, "gpu_peak_mib", 0),
        "host MiB (PSS)": report.host_memory,
    }
    first = {"seconds": _title, "cores": lambda run: str(run["cores"])}
    outcome = {"status": lambda run: run["status"]}
    short = report.table({**first, **outcome, **seconds}, runs, 3)
    full = report.table({"system": _title, "cores": first["cores"], **others}, runs, 3)
    return list(filter(None, [short, full, report.failures(runs, lambda run: report.strip_markdown(_title(run)))]))


def _line(run: Run) -> str:
    text = f"{run['cores']:>3} cores  {run['system']:<18}"
    if run["status"] != "ok":
        return f"{text}{run.get('reason', run['status'])}\n{run.get('stderr', '')}".rstrip()
    second = report.number(run, "second_epoch_first_batch_s", 3)
    text += f"first batch {run['in_all_s']:.1f} s after start, second epoch's {second} s"
    return text + report.describe_ending(run)


def _heading(whole: dict) -> list[str]:
    return [f"- work: batches of {whole['batch_size']}, as in the loader benchmark"]


def _bars(runs: list[Run]) -> Bars | None:
    most = max((run["cores"] for run in runs), default=0)
    measured = [run for run in runs if run["status"] == "ok" and run["cores"] == most]
    keys = {
        "first batch of a process, with its imports": "in_all_s",
        "first batch of the second epoch": "second_epoch_first_batch_s",
        "first batch after a break": "after_break_first_batch_s",
    }
    groups = [(report.strip_markdown(_title(run)), [run.get(key) for key in keys.values()]) for run in measured]
    return Bars(BENCHMARK.title, f"seconds, less is better, {most} cores", list(keys), groups) if groups else None


BENCHMARK = Benchmark(
    name="startup",
    title="Start-up",
    systems=tuple(LOADER),
    defaults={"systems": _DEFAULT, "cores": "16", "seconds": 0.0, "warmup": 6.0, "timeout": 40.0},
    quick={"images": 64, "batch_size": 16, "cores": "1"},
    preloaded=(),
    cases=_cases,
    measure=_measure,
    label=_label,
    line=_line,
    heading=_heading,
    tables=_tables,
    legend=_LEGEND,
    bars=_bars,
    share=0.1,
    cold=True,
)

"""Proxy mode: datasets that are no image folder, run by worker processes, on 16 and 4 cores.

    python -m benchmarks.proxy
    python -m benchmarks.proxy --quick
    python -m benchmarks.proxy --cores 16 --systems torchdali,nvidia --sources bytes --seconds 10 --name trial

The same samples (`benchmarks.proxy_datasets`) through torchdali, through DALI's own proxy and through DataLoader
with torchvision, and as the yardstick the same pictures as an image folder, which torchdali reads without workers.
Each system gets a worker for each core; DALI's proxy is also tried with half as many, and the short table has the
better. Workers stay between epochs; with the most cores the start of a second epoch with new workers is measured
too. Every case runs in a process of its own that may use only those cores, under a time limit, so one that hangs or
fails is reported and the others go on. These processes are forked from one that has imported torch and torchvision,
which saves most of the time; `--no-preload` lets each import for itself. The likely best worker counts come first,
and what `--limit` leaves no time for is reported as skipped.
"""

import argparse
import os
import shlex
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks import children, data, proxy_report, report
from benchmarks.proxy_datasets import ARRAYS, SOURCES, make_arrays
from benchmarks.proxy_systems import SYSTEMS

_PRELOADED = ["torch", "torchvision.transforms.v2", "torchvision.datasets", "benchmarks.measure"]
_QUICK = ["--images", "96", "--batch-size", "16", "--cores", "2", "--lengths", "96", "--seconds", "0.3"]


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
        """What it is, for the report."""
        names = ("system", "source", "cores", "workers", "length")
        return {name: getattr(self, name) for name in names}


def cases(args: argparse.Namespace, root: Path) -> list[Case]:
    """All of them, those first that are measured in any case."""
    found: list[tuple[int, Case]] = []
    for cores, length in zip(args.cores, args.lengths, strict=True):
        for name in args.systems:
            for source in SYSTEMS[name].sources:
                if source not in args.sources and source in SOURCES:
                    continue
                for rank, workers in enumerate(SYSTEMS[name].workers(cores)):
                    # with half the workers an epoch starts otherwise: that would be another measurement
                    new_workers = cores == max(args.cores) and workers in (0, cores)
                    settings = (root, args.batch_size, args.seconds, args.warmup)
                    found.append((rank, Case(name, source, cores, workers, length, new_workers, *settings)))
    return [case for _, case in sorted(found, key=lambda pair: pair[0])]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures all cases and writes the results after each; the whole report."""
    started = time.perf_counter()
    root = (args.root or data.default_root(args.images)).resolve()
    pictures = data.make(root, args.images)
    pictures["arrays"] = make_arrays(root, args.arrays)
    print(f"data: {pictures['images']} pictures of {pictures['mean_bytes'] / 1000:.1f} kB in {root}", flush=True)
    whole: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.proxy", *args.command]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "data": pictures,
        "batch_size": args.batch_size,
        "seconds": args.seconds,
        "runs": [],
    }
    context = children.start_context(_PRELOADED if args.preload else ())
    whole["started_by"] = context.get_start_method()
    for case in cases(args, root):
        entry: dict[str, Any] = {**case.label(), "status": "skipped"}
        if not args.limit or time.perf_counter() - started < args.limit:
            entry |= _in_a_process(context, case, args.timeout)
        whole["runs"].append(entry)
        print(_line(entry), flush=True)
        whole |= {"machine": report.machine(whole["runs"], args.commit)}
        whole["total_seconds"] = round(time.perf_counter() - started, 1)
        proxy_report.write(whole, args.out, args.name)
    return whole


def _in_a_process(context: Any, case: Case, timeout: float) -> dict[str, Any]:
    return children.measured(context, measure_case, case, timeout)


def measure_case(case: Case, result: Path) -> None:
    """Measures one case in this process, which is one of its own, and writes the figures to `result` as JSON."""
    import torch

    from benchmarks import measure

    torch.set_num_threads(case.cores)  # it was imported before the process had given up the other cores
    system = SYSTEMS[case.system]
    figures = measure.measure(
        system.system(case.source, case.length), case.root, case.batch_size, case.workers, case.seconds, case.warmup
    )
    figures |= measure.surroundings()
    children.write(figures, result)
    if case.new_workers:
        # an epoch of one batch for each worker, because the first batches are what is timed
        length = min(case.length, max(case.workers, 1) * case.batch_size)
        build = system.system(case.source, length, persistent=False).build
        try:
            figures["new_workers_first_batch_s"] = _second_start(build(case.root, case.batch_size, case.workers))
        except Exception:  # noqa: BLE001 - the figures before are good
            figures["new_workers_error"] = traceback.format_exc()[-3000:]
        children.write(figures, result)
    if not system.exits:
        children.leave(0)  # the thread of DALI's server would not let the process end


def _second_start(epoch: Any) -> float:
    """Seconds from the second epoch's start to its first batch, after a whole first epoch."""
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


def _line(entry: dict[str, Any]) -> str:
    """One case in one line, as it ends."""
    line = f"{entry['cores']:>3} cores  {entry['system']:<10}{entry['source']:<8}{entry['workers']:>3} workers"
    if entry["status"] != "ok":
        return f"{line}  {entry['status']}\n{entry.get('stderr', '')}".rstrip()
    line += f"{entry['images_per_s']:>10,.0f} images/s, first batch {entry['first_batch_s']:.2f} s"
    return line + report.ending(entry)


def parse(command: list[str]) -> argparse.Namespace:
    """The options, with core counts that this machine does not have left out."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.proxy",
        description="Measures datasets that run in worker processes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help=f"a trial: {shlex.join(_QUICK)}")
    parser.add_argument("--images", type=int, default=8192, help="number of pictures to make")
    parser.add_argument("--arrays", type=int, default=ARRAYS, help="how many of them are arrays in memory")
    parser.add_argument("--root", type=Path, help="where they are or will be [in /dev/shm]")
    parser.add_argument("--cores", default="16,4", help="numbers of cores, separated by commas")
    parser.add_argument("--lengths", default="8192,4096", help="samples in an epoch, for each number of cores")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"some of {', '.join(SYSTEMS)}")
    parser.add_argument("--sources", default=",".join(SOURCES), help=f"some of {', '.join(SOURCES)}")
    parser.add_argument("--seconds", type=float, default=2.5, help="time of one measurement")
    parser.add_argument("--warmup", type=float, default=15.0, help="where to cut a slow first epoch, seconds")
    parser.add_argument("--timeout", type=float, default=45.0, help="limit of one process, seconds")
    parser.add_argument("--limit", type=float, default=330.0, help="seconds after which what is left is skipped")
    parser.add_argument("--no-preload", dest="preload", action="store_false", help="each process imports torch")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--commit", help="torchdali's commit, where git cannot tell it")
    parser.add_argument("--name", help="name of the result files [proxy-<GPU>]")
    args = parser.parse_args([*_QUICK, *command] if "--quick" in command else command)
    args.command = command
    args.name = args.name or report.default_name("proxy") + ("-quick" if args.quick else "")
    args.systems, args.sources = args.systems.split(","), args.sources.split(",")
    for wanted, known in ((args.systems, SYSTEMS), (args.sources, SOURCES)):
        if unknown := set(wanted) - set(known):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    here = len(os.sched_getaffinity(0))
    cores, lengths = ([int(part) for part in text.split(",")] for text in (args.cores, args.lengths))
    if len(cores) > len(lengths):
        parser.error(f"--cores {args.cores} has more numbers than --lengths {args.lengths}")
    pairs = [pair for pair in zip(cores, lengths, strict=False) if pair[0] <= here]
    if len(pairs) != len(cores):
        print(f"this process has {here} cores: measuring with {[pair[0] for pair in pairs]} of {cores}", flush=True)
    if not pairs:
        parser.error(f"--cores: this process has only {here}")
    args.cores, args.lengths = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if min(args.lengths) < args.batch_size:
        parser.error(f"--lengths {min(args.lengths)} is less than one batch of {args.batch_size}")
    return args


def main() -> None:
    """Runs the benchmark and prints its tables, the short one last."""
    whole = run(parse(sys.argv[1:]))
    print(f"\n{proxy_report.full_table(whole['runs'])}\n\n{proxy_report.short_table(whole['runs'])}")


if __name__ == "__main__":
    main()

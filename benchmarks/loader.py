"""Loader only: how fast each system hands out batches that nobody uses, on 16, 4 and 1 cores.

    python -m benchmarks.loader
    python -m benchmarks.loader --cores 16 --systems torchdali,dali_tuned --seconds 10 --name trial

Every (system, cores) pair runs in a fresh process that may use only those cores (`benchmarks.measure`), under
a time limit, so one that hangs or fails is reported and the others go on. DALI tuned by hand gets the best of
a few thread counts, tried shortly beforehand; torchdali is told nothing. The results are rewritten after each
pair, as JSON and as Markdown in `benchmarks/results`.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks import data, report
from benchmarks.systems import DEFAULT_SYSTEMS, SYSTEMS

_REPOSITORY = Path(__file__).resolve().parent.parent
_TRIAL_SECONDS = 1.5


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures all pairs and writes the results; the whole report."""
    started = time.perf_counter()
    root = args.root or data.default_root(args.images)
    pictures = data.make(root, args.images)
    print(f"data: {pictures['images']} pictures of {pictures['mean_bytes'] / 1000:.1f} kB in {root}", flush=True)
    whole: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.loader", *args.command]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "data": pictures,
        "batch_size": args.batch_size,
        "seconds": args.seconds,
        "runs": [],
    }
    for cores in args.cores:
        for system in args.systems:
            if not SYSTEMS[system].every_core_count and cores != max(args.cores):
                continue
            entry: dict[str, Any] = {"system": system, "cores": cores, "status": "skipped", "threads": None}
            if not args.limit or time.perf_counter() - started < args.limit:
                entry |= _run_one(args, root, system, cores)
            whole["runs"].append(entry)
            print(_line(entry), flush=True)
            whole |= {"machine": report.machine(whole["runs"], args.commit)}
            whole["total_seconds"] = round(time.perf_counter() - started, 1)
            report.write(whole, args.out, args.name)
    return whole


def _run_one(args: argparse.Namespace, root: Path, system: str, cores: int) -> dict[str, Any]:
    """The figures of one pair, after finding out the number of threads where that is asked for."""
    wanted = SYSTEMS[system].threads
    if wanted == "tried" and args.tune:
        tried = _try_threads(args, root, system, cores)
        best = max(tried, key=lambda threads: tried[threads] or 0)
        figures = _measure(args, root, system, cores, best, args.seconds)
        return {**figures, "threads": best, "threads_tried": tried}
    figures = _measure(args, root, system, cores, cores, args.seconds)
    return {**figures, "threads": None if wanted == "its own" else cores}


def _try_threads(args: argparse.Namespace, root: Path, system: str, cores: int) -> dict[int, float | None]:
    """Images per second for each of a few numbers of threads; None where the trial failed."""
    candidates = {max(1, cores // 4), max(1, cores // 2), cores} | ({2 * cores} if cores < 8 else set())
    tried: dict[int, float | None] = {}
    for threads in sorted(candidates):
        figures = _measure(args, root, system, cores, threads, min(_TRIAL_SECONDS, args.seconds))
        tried[threads] = figures.get("images_per_s")
    return tried


def _measure(
    args: argparse.Namespace, root: Path, system: str, cores: int, threads: int, seconds: float
) -> dict[str, Any]:
    """One fresh process: its figures and status 'ok', or status 'timeout' or 'failed' and what it wrote last.

    A process that wrote its figures and then did not end cleanly is 'ok', and `exit` says how it ended.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result, errors = Path(folder) / "result.json", Path(folder) / "stderr"
        cpus = sorted(os.sched_getaffinity(0))[:cores]
        command = [sys.executable, "-m", "benchmarks.measure", system]
        options = {
            "root": root.resolve(),
            "cpus": ",".join(map(str, cpus)),
            "batch-size": args.batch_size,
            "threads": threads,
            "seconds": seconds,
            "warmup": args.warmup,
            "result": result,
        }
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        with errors.open("w") as stderr:
            # its own session, so that a time-out also ends the workers that it started
            child = subprocess.Popen(command, cwd=_REPOSITORY, stdout=stderr, stderr=stderr, start_new_session=True)
            try:
                ended = str(child.wait(args.timeout))
            except subprocess.TimeoutExpired:
                ended = "timeout"
            finally:
                _kill_group(child)
        figures: dict[str, Any] = {"exit": ended, "process_s": round(time.perf_counter() - started, 1)}
        if result.exists():
            return {"status": "ok", **figures, **json.loads(result.read_text())}
        said = errors.read_text(errors="replace").replace(f"{_REPOSITORY}{os.sep}", "")
        status = "timeout" if ended == "timeout" else "failed"
        return {"status": status, **figures, "stderr": said[-3000:]}


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it and its children have ended, as they should
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _line(entry: dict[str, Any]) -> str:
    """One run in one line, as it ends."""
    line = f"{entry['cores']:>3} cores  {entry['system']:<18}"
    if entry["status"] != "ok":
        return f"{line}{entry['status']}\n{entry.get('stderr', '')}".rstrip()
    line += f"{entry['images_per_s']:>10,.0f} images/s, first batch {entry['first_batch_s']:.2f} s"
    if entry.get("threads_tried"):
        line += f", threads tried: {entry['threads_tried']}"
    return line + report.ending(entry)


def parse(command: list[str]) -> argparse.Namespace:
    """The options, with core counts that this machine does not have left out."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loader",
        description="Measures how fast each loader hands out batches.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--images", type=int, default=8192, help="number of pictures to make")
    parser.add_argument("--root", type=Path, help="where they are or will be [in /dev/shm]")
    parser.add_argument("--cores", default="16,4,1", help="numbers of cores, separated by commas")
    parser.add_argument("--systems", default=",".join(DEFAULT_SYSTEMS), help=f"'all', or some of {', '.join(SYSTEMS)}")
    parser.add_argument("--seconds", type=float, default=6.0, help="time of one measurement")
    parser.add_argument("--warmup", type=float, default=40.0, help="where to cut a slow first epoch, seconds")
    parser.add_argument("--timeout", type=float, default=120.0, help="limit of one process, seconds")
    parser.add_argument("--limit", type=float, help="seconds after which what is left is skipped")
    parser.add_argument("--no-tune", dest="tune", action="store_false", help="one thread a core for all")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--commit", help="torchdali's commit, where git cannot tell it")
    parser.add_argument("--name", help="name of the result files [loader-<GPU>]")
    args = parser.parse_args(command)
    args.command = command
    args.name = args.name or report.default_name("loader")
    args.systems = list(SYSTEMS) if args.systems == "all" else args.systems.split(",")
    if unknown := set(args.systems) - set(SYSTEMS):
        parser.error(f"no such system: {', '.join(sorted(unknown))}; there are {', '.join(SYSTEMS)}")
    if args.images < args.batch_size:
        parser.error(f"--images {args.images} is less than one batch of {args.batch_size}")
    here = len(os.sched_getaffinity(0))
    wanted = [int(count) for count in args.cores.split(",")]
    args.cores = [count for count in wanted if count <= here]
    if args.cores != wanted:
        print(f"this process has {here} cores: measuring with {args.cores or 'none'} of {wanted}", flush=True)
    if not args.cores:
        parser.error(f"--cores: this process has only {here}")
    return args


def main() -> None:
    """Runs the benchmark and prints its tables, the short one last."""
    args = parse(sys.argv[1:])
    whole = run(args)
    print(f"\n{report.full_table(whole['runs'])}\n\n{report.short_table(whole['runs'])}")


if __name__ == "__main__":
    main()

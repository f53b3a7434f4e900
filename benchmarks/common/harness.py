"""Measure the cases of a benchmark, each in its own process, and write the results after each.

A case that fails or hangs is reported, and the others run. Cases for which there is no time are reported as skipped.
"""

import os
import time
from argparse import Namespace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.common import data, page_cache, report
from benchmarks.common.benchmark import Benchmark, Run
from torchdali.tools.bench import subprocesses

_REPOSITORY = Path(__file__).resolve().parents[2]


def run(benchmark: Benchmark, args: Namespace, name: str, until: float) -> dict[str, Any]:
    """Measure all cases, write the results, and return the whole report.

    Args:
        benchmark: The benchmark.
        args: The options, from `benchmarks.options`.
        name: Name of the result files.
        until: Time, by `time.perf_counter`, from which on cases are skipped.
    """
    started = time.perf_counter()
    root, pictures = make_pictures(args)
    whole: dict[str, Any] = {
        "benchmark": benchmark.name,
        "command": args.command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "data": pictures,
        "cache": args.cache,
        "file_system": page_cache.file_system(root),
        "batch_size": args.batch_size,
        "seconds": args.seconds,
        "options": {option: getattr(args, option) for option in benchmark.defaults if option != "cores"},
        "runs": [],
    }
    context = subprocesses.start_context(benchmark.preloaded if args.preload else ())
    whole["started_by"] = context.get_start_method()
    for case in benchmark.cases(args, root):
        entry: Run = {**benchmark.label(case), "status": "skipped"}
        if time.perf_counter() < until:
            entry |= benchmark.measure(context, case, args)
        if "stderr" in entry:
            entry["stderr"] = entry["stderr"].replace(f"{_REPOSITORY}{os.sep}", "").replace(str(root), root.name)
        whole["runs"].append(entry)
        benchmark.finish(whole["runs"])
        print(benchmark.line(entry), flush=True)
        whole |= {"machine": report.describe_machine(whole["runs"], args.commit)}
        whole["total_seconds"] = round(time.perf_counter() - started, 1)
        report.write(benchmark, whole, args.out, name)
    return whole


def make_pictures(args: Namespace) -> tuple[Path, dict[str, Any]]:
    """Make the pictures if they are missing, and return their folder and their report.

    Raises:
        SystemExit: The page cache must be cold, but the folder is in memory.
    """
    root = (args.root or data.default_root(args.images, args.data, in_memory=args.cache == "warm")).resolve()
    if args.cache == "cold" and page_cache.is_in_memory(root):
        where = f"{root} is in memory ({page_cache.file_system(root)})"
        raise SystemExit(f"--cache cold: {where}: there is no page cache to drop; name a folder on a disk with --root")
    pictures = data.make(root, args.images, kind=args.data)
    print(f"data: {pictures['images']} pictures of {pictures['mean_bytes'] / 1000:.1f} kB in {root}", flush=True)
    return root, pictures

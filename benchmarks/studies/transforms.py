"""Measure each transform alone, after decoding: images per second of torchdali, torchvision and Kornia.

    python -m benchmarks.studies.transforms
    python -m benchmarks.studies.transforms --only 'Flip|Resize' --sizes 224x224 --systems torchdali,kornia --name trial

Two processes measure, but not at the same time: one has the GPU, the other the workers of a DataLoader. A process that
dies or hangs is reported and replaced, without effect on other cells. The results are written after each transform, as
JSON and Markdown in `benchmarks/results`. With ``--device cpu``, torchdali runs on the CPU, and systems that need CUDA
are left out, to try the study without a GPU; such numbers mean nothing.
"""

import argparse
import re
import shlex
import sys
import time
from datetime import datetime, timezone
from typing import Any

from benchmarks.common import report
from benchmarks.common.script import make_parser, parse_args
from benchmarks.studies import transform_report
from benchmarks.studies.transform_worker import Worker
from benchmarks.systems.transform_rows import BY_CALL, ROWS, Row
from benchmarks.systems.transform_systems import SYSTEMS

_NEEDS_CUDA = ("torchvision-cuda", "kornia")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all cells, write the results, and return the whole report."""
    started = time.perf_counter()
    whole: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.studies.transforms", *args.command]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "batch_size": args.batch_size,
        "seconds": args.seconds,
        "runs": [],
    }
    gpu_worker = Worker(args.sizes, args.batch_size, args.device, args.timeout)
    cpu_worker = Worker(args.sizes, args.batch_size, "cpu", args.timeout)
    environments: list[dict[str, Any]] = []
    try:
        for row in args.rows:
            for size in args.sizes:
                for system in args.systems:
                    late = args.limit and time.perf_counter() - started > args.limit
                    worker = cpu_worker if system == "torchvision-cpu" else gpu_worker
                    entry = {"status": "skipped"} if late else _measure(args, worker, system, row, size)
                    whole["runs"].append({"transform": row.call, "size": _format_size(size), "system": system, **entry})
                    print(_line(whole["runs"][-1]), flush=True)
            environments.append(gpu_worker.surroundings())  # after each row, because modules are imported at first use
            whole |= {"machine": report.describe_machine(environments, args.commit)}
            whole["total_seconds"] = round(time.perf_counter() - started, 1)
            transform_report.write(whole, args.out, args.name)
    finally:
        gpu_worker.close()
        cpu_worker.close()
    return whole


def _measure(args: argparse.Namespace, worker: Worker, system: str, row: Row, size: tuple[int, int]) -> dict[str, Any]:
    if args.device == "cpu" and system in _NEEDS_CUDA:
        return {"status": "none", "reason": "needs CUDA"}
    started = time.perf_counter()
    figures = worker.measure(system, row, size, args.seconds)
    return {**figures, "cell_s": round(time.perf_counter() - started, 2)}


def _line(entry: dict[str, Any]) -> str:
    """Return the line that is printed for a cell."""
    line = f"{entry['size']:<8} {entry['system']:<17}{BY_CALL[entry['transform']].name[:44]:<45}"
    if entry["status"] == "ok":
        return f"{line}{entry['images_per_s']:>12,.0f} images/s, {entry['cell_s']:.1f} s in all"
    return f"{line}{entry['status']:>12} {entry.get('reason', '')}"


def _format_size(size: tuple[int, int]) -> str:
    """Format a size as width x height."""
    return f"{size[1]}x{size[0]}"


def parse(command: list[str]) -> argparse.Namespace:
    """Parse the options."""
    parser = make_parser("transforms", "Measure each transform alone, after decoding.")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="device of torchdali")
    parser.add_argument("--only", default="", help="regular expression that selects transforms by their call")
    parser.add_argument("--sizes", default="224x224,500x375", help="WIDTHxHEIGHT, separated by commas")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="systems, separated by commas")
    parser.add_argument("--seconds", type=float, default=0.5, help="time of one measurement")
    parser.add_argument("--timeout", type=float, default=45.0, help="limit of one cell in seconds")
    parser.add_argument("--limit", type=float, help="seconds after which other cells are skipped")
    parser.add_argument("--batch-size", type=int, default=256)
    args = parse_args(parser, command)
    args.systems = args.systems.split(",")
    if unknown := set(args.systems) - set(SYSTEMS):
        parser.error(f"no such system: {', '.join(sorted(unknown))}; there are {', '.join(SYSTEMS)}")
    args.rows = [row for row in ROWS if re.search(args.only, row.call)]
    if not args.rows:
        parser.error(f"--only {args.only!r} selects no transform; there are {', '.join(BY_CALL)}")
    sizes = [re.fullmatch(r"(\d+)x(\d+)", size) for size in args.sizes.split(",")]
    if not all(sizes):
        parser.error(f"--sizes {args.sizes}: each must be WIDTHxHEIGHT")
    args.sizes = [(int(size[2]), int(size[1])) for size in sizes if size]
    return args


def main() -> None:
    """Run the study and print its tables."""
    args = parse(sys.argv[1:])
    print("\n" + "\n\n".join(transform_report.tables(run(args)["runs"])))


if __name__ == "__main__":
    main()

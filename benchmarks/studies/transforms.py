"""Each transform alone, after decoding: images per second of torchdali, torchvision and Kornia.

    python -m benchmarks.studies.transforms
    python -m benchmarks.studies.transforms --only 'Flip|Resize' --sizes 224x224 --systems torchdali,kornia --name trial

Two processes measure, never both at once: one has the GPU, the other only the workers of a DataLoader. One that
dies or hangs is reported and replaced, and the other cells are not harmed. The results are rewritten after each
transform, as JSON and as Markdown in `benchmarks/results`. Without a GPU (``--device cpu``) torchdali runs on the
CPU and what needs CUDA is left out, so that the harness can be tried anywhere; such numbers mean nothing.
"""

import argparse
import re
import shlex
import sys
import time
from datetime import datetime, timezone
from typing import Any

from benchmarks.common import report
from benchmarks.common.script import parsed, parser_of
from benchmarks.studies import transform_report
from benchmarks.studies.transform_worker import Worker
from benchmarks.systems.transform_rows import BY_CALL, ROWS, Row
from benchmarks.systems.transform_systems import SYSTEMS

_NEEDS_CUDA = ("torchvision-cuda", "kornia")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures all cells and writes the results; the whole report."""
    started = time.perf_counter()
    whole: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.studies.transforms", *args.command]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "batch_size": args.batch_size,
        "seconds": args.seconds,
        "runs": [],
    }
    on_device = Worker(args.sizes, args.batch_size, args.device, args.timeout)
    on_cores = Worker(args.sizes, args.batch_size, "cpu", args.timeout)
    seen: list[dict[str, Any]] = []
    try:
        for row in args.rows:
            for size in args.sizes:
                for system in args.systems:
                    late = args.limit and time.perf_counter() - started > args.limit
                    worker = on_cores if system == "torchvision-cpu" else on_device
                    entry = {"status": "skipped"} if late else _measure(args, worker, system, row, size)
                    whole["runs"].append({"transform": row.call, "size": _named(size), "system": system, **entry})
                    print(_line(whole["runs"][-1]), flush=True)
            seen.append(on_device.surroundings())  # again, because modules are imported when they are needed
            whole |= {"machine": report.machine(seen, args.commit)}
            whole["total_seconds"] = round(time.perf_counter() - started, 1)
            transform_report.write(whole, args.out, args.name)
    finally:
        on_device.close()
        on_cores.close()
    return whole


def _measure(args: argparse.Namespace, worker: Worker, system: str, row: Row, size: tuple[int, int]) -> dict[str, Any]:
    if args.device == "cpu" and system in _NEEDS_CUDA:
        return {"status": "none", "reason": "needs CUDA"}
    started = time.perf_counter()
    figures = worker.measure(system, row, size, args.seconds)
    return {**figures, "cell_s": round(time.perf_counter() - started, 2)}


def _line(entry: dict[str, Any]) -> str:
    """One cell in one line, as it ends."""
    line = f"{entry['size']:<8} {entry['system']:<17}{BY_CALL[entry['transform']].name[:44]:<45}"
    if entry["status"] == "ok":
        return f"{line}{entry['images_per_s']:>12,.0f} images/s, {entry['cell_s']:.1f} s in all"
    return f"{line}{entry['status']:>12} {entry.get('reason', '')}"


def _named(size: tuple[int, int]) -> str:
    """The size as people say it: width first."""
    return f"{size[1]}x{size[0]}"


def parse(command: list[str]) -> argparse.Namespace:
    """The options."""
    parser = parser_of("transforms", "Measures each transform alone, after decoding.")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="where torchdali runs")
    parser.add_argument("--only", default="", help="a regular expression: transforms in whose call it is found")
    parser.add_argument("--sizes", default="224x224,500x375", help="WIDTHxHEIGHT, separated by commas")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="which, separated by commas")
    parser.add_argument("--seconds", type=float, default=0.5, help="time of one measurement")
    parser.add_argument("--timeout", type=float, default=45.0, help="limit of one cell, seconds")
    parser.add_argument("--limit", type=float, help="seconds after which what is left is skipped")
    parser.add_argument("--batch-size", type=int, default=256)
    args = parsed(parser, command)
    args.systems = args.systems.split(",")
    if unknown := set(args.systems) - set(SYSTEMS):
        parser.error(f"no such system: {', '.join(sorted(unknown))}; there are {', '.join(SYSTEMS)}")
    args.rows = [row for row in ROWS if re.search(args.only, row.call)]
    if not args.rows:
        parser.error(f"--only {args.only!r} leaves nothing; there are {', '.join(BY_CALL)}")
    sizes = [re.fullmatch(r"(\d+)x(\d+)", size) for size in args.sizes.split(",")]
    if not all(sizes):
        parser.error(f"--sizes {args.sizes}: not WIDTHxHEIGHT")
    args.sizes = [(int(size[2]), int(size[1])) for size in sizes if size]
    return args


def main() -> None:
    """Runs the benchmark and prints its tables."""
    args = parse(sys.argv[1:])
    print("\n" + "\n\n".join(transform_report.tables(run(args)["runs"])))


if __name__ == "__main__":
    main()

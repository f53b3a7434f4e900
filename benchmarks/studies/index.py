"""Measure what ten million paths cost: memory of all processes of a host, and the time until the first batch.

    python -m benchmarks.studies.index
    python -m benchmarks.studies.index --files 1000000 --processes 1,2 --name trial

The paths are synthetic, except for a few pictures, over which the sampler goes. Each case starts several processes at
once, each with its own loader, as on a host with several GPUs. After its first batch each process goes through the
whole index in random order, as epochs do. It reads all paths and labels, counts all samples, and stores a header of
every unknown file. So the memory is that at the end of a long training. The memory of the same processes with an index
of only the few pictures is subtracted.

*list* is an `ImageFolder` with a list of tuples, which is counted too. *index* is an `ImageIndex`, and *index with
headers* was written with `headers=True`.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.common import data, memory_use, report
from benchmarks.common.script import Results, make_parser, parse_args

KINDS = {"list": "list (ImageFolder)", "index": "index", "headers": "index with headers"}
PICTURES = 64
BATCH = 32
_BARRIER_S = 120
_CHUNK = 4096
_LEGEND = """\
*Shared* is the index's file in memory, once for all processes. *Own* is the private memory of all processes together,
less that of as many processes with an index of {pictures} files. *Memory* is both. *Open* is the time of
`ImageIndex(...)`, and for the list nothing. *Loader* is the time of `DALILoader(...)`. *First batch* is the time from
`iter(loader)` to {batch} decoded pictures. All times are of the slowest process, after imports, with all processes
running at once. *Start* is their sum."""


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases, write the results, and return the whole report."""
    with tempfile.TemporaryDirectory(dir=args.root, prefix="torchdali-index-") as folder:
        root = Path(folder)
        details = prepare(root, args.files)
        results = Results("index", args, render, files=args.files, **details)
        print(f"an index of {args.files:,} paths, {details['mean_path_bytes']:.1f} bytes each", flush=True)
        controls: dict[int, dict[str, Any]] = {}
        for kind in args.kinds:
            for count in args.processes if kind != "list" else args.processes[:1]:
                if count not in controls:
                    controls[count] = measure_processes(root, "control", count, args.timeout)
                entry = {"kind": kind, "processes": count, **measure_processes(root, kind, count, args.timeout)}
                if entry["status"] == "ok" and controls[count]["status"] == "ok":
                    entry["own_mib"] = round(entry["anonymous_mib"] - controls[count]["anonymous_mib"], 1)
                    entry["memory_mib"] = round(entry["own_mib"] + entry["shared_mib"], 1)
                results.add(entry, _line(entry))
    return results.whole


def prepare(root: Path, files: int) -> dict[str, Any]:
    """Write the pictures and the indexes, and return a summary."""
    import numpy as np

    from torchdali import ImageIndex

    data.make(root / "pictures", PICTURES, 1)
    pictures = sorted(map(str, (root / "pictures").rglob("*.jpg")))
    rows = np.linspace(0, files - 1, PICTURES).astype(int).tolist()
    path_of = dict(zip(rows, pictures, strict=True))

    def samples() -> Any:
        for row in range(files):
            label = row * 1000 // files
            yield path_of.get(row) or f"/mnt/datasets/imagenet/train/n{label:08d}/n{label:08d}_{row}.JPEG", label

    start = time.perf_counter()
    ImageIndex.write(root / "index.npz", samples(), [f"n{label:08d}" for label in range(1000)])
    written_s = round(time.perf_counter() - start, 1)
    ImageIndex.write(root / "control.npz", [(path, row) for row, path in enumerate(pictures)], headers=True)
    with np.load(root / "control.npz") as known, np.load(root / "index.npz") as index:
        arrays = dict(index)
        lengths = np.char.str_len(arrays["paths"][:: max(1, files // 1000)])
        # The files do not exist, so any header is good.
        arrays["sizes"] = np.full((files, 2), (375, 500), np.uint16)
        arrays["lengths"] = np.full(files, 98_000, np.uint32)
        arrays["flags"] = np.full(files, 11, np.uint8)
        for name in ("sizes", "lengths", "flags"):
            arrays[name][rows] = known[name]
    with (root / "headers.npz").open("wb") as stream:
        np.savez(stream, **arrays)
    (root / "rows.json").write_text(json.dumps(rows))
    return {"mean_path_bytes": float(lengths.mean()), "written_s": written_s, "data": {"images": PICTURES}}


def measure_processes(root: Path, kind: str, count: int, timeout: float) -> dict[str, Any]:
    """Run a case in `count` processes at once. Return the sums of their memory, and the times of the slowest."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(count, timeout=min(_BARRIER_S, timeout))
    results = [root / f"{kind}-{rank}.json" for rank in range(count)]
    for result in results:
        result.unlink(missing_ok=True)
    children = [context.Process(target=_rank, args=(root, kind, barrier, result)) for result in results]
    deadline = time.perf_counter() + timeout
    for child in children:
        child.start()
    for child in children:
        child.join(max(0.1, deadline - time.perf_counter()))
    late = any(child.is_alive() for child in children)
    for child in children:
        child.kill()
        child.join()
    reports = [json.loads(result.read_text()) for result in results if result.exists()]
    if failed := [part["error"] for part in reports if "error" in part]:
        return {"status": "failed", "stderr": failed[0][-3000:]}
    if late or len(reports) < count:
        return {
            "status": "timeout" if late else "failed",
            "stderr": f"{len(reports)} of {count} processes wrote a result",
        }
    sums = {name: round(sum(part[name] for part in reports), 1) for name in ("anonymous_mib", "shared_mib")}
    slowest = {name: max(part[name] for part in reports) for name in ("open_s", "loader_s", "first_batch_s", "start_s")}
    return {"status": "ok", **sums, **slowest, **{name: reports[0][name] for name in ("versions", "gpu", "epoch_s")}}


def _rank(root: Path, kind: str, barrier: Any, result: Path) -> None:
    try:
        figures = _measure(root, kind, barrier)
    except Exception:  # noqa: BLE001 - any error is reported
        barrier.abort()
        figures = {"error": traceback.format_exc()}
    unfinished = result.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(figures))
    unfinished.rename(result)


def _measure(root: Path, kind: str, barrier: Any) -> dict[str, Any]:
    from benchmarks.systems.batches import surroundings
    from benchmarks.systems.systems import make_transforms
    from torchdali import DALILoader, ImageIndex
    from torchdali.pipeline import graph

    graph.require_dali()
    rows: list[int] = json.loads((root / "rows.json").read_text())
    if kind == "control":
        rows = list(range(PICTURES))
    folder = _make_list_dataset(ImageIndex(root / "index.npz"), make_transforms()) if kind == "list" else None
    barrier.wait()

    start = time.perf_counter()
    dataset = folder or ImageIndex(root / f"{kind}.npz", make_transforms())
    opened = time.perf_counter()
    loader: Any = DALILoader(dataset, batch_size=BATCH, sampler=rows)
    made = time.perf_counter()
    epoch: Any = iter(loader)
    images, labels = next(epoch)
    labels.tolist()  # waits for a GPU
    first = time.perf_counter()
    assert len(images) == BATCH

    _touch_all(loader._session.reader, epoch._occurrences)  # noqa: SLF001 - there is no public way
    end = time.perf_counter()
    barrier.wait()
    memory, shared = memory_use.measure_host(), memory_use.measure_mapped_file(root / f"{kind}.npz")
    barrier.wait()
    return {
        **memory,
        "shared_mib": shared,
        "open_s": round(opened - start, 4),
        "loader_s": round(made - opened, 3),
        "first_batch_s": round(first - made, 3),
        "start_s": round(first - start, 3),
        "epoch_s": round(end - first, 1),
        **surroundings(),
    }


def _make_list_dataset(index: Any, transform: Any) -> Any:
    """Return an `ImageFolder` with the files of an index, without reading the folder."""
    from torchvision.datasets import ImageFolder
    from torchvision.datasets.folder import default_loader

    folder: Any = ImageFolder.__new__(ImageFolder)
    folder.transform, folder.target_transform, folder.loader, folder.classes = transform, None, default_loader, []
    names = [str(path, "ascii") for path in index.paths]
    folder.samples = list(zip(names, index.targets.tolist(), strict=True))
    return folder


def _touch_all(reader: Any, occurrences: Any) -> None:
    """Touch all memory that epochs touch."""
    import numpy as np

    order = np.random.default_rng(os.getpid()).permutation(len(reader.source)).astype(np.uint32)
    table = reader.table  # adding ten million headers one by one takes minutes
    for start in range(0, len(reader.source), _CHUNK):
        rows = order[start : start + _CHUNK].astype(np.int64)
        reader.read_inputs(rows, {}, contextlib.ExitStack())
        reader.source.labels(rows)
        occurrences.count(rows)
        table.sizes(rows)
        reader.find_pil_only(rows)
        unknown = table.find_unknown(rows)
        for column in (table._sizes, table._lengths, table._flags):  # noqa: SLF001
            column[unknown] = 1


def render(whole: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    heading = report.study_heading(
        f"An index of {whole['files']:,} paths",
        whole,
        f"- paths: {whole['mean_path_bytes']:.0f} bytes on average; writing the index took {whole['written_s']} s",
    )
    legend = _LEGEND.format(pictures=PICTURES, batch=BATCH)
    return "\n\n".join([heading, table(whole), legend])


def table(whole: dict[str, Any]) -> str:
    """Return a row for each case."""
    head = [
        "",
        "processes",
        "memory, MiB",
        "shared",
        "own",
        "bytes a path",
        "open, s",
        "loader, s",
        "first batch, s",
        "start, s",
    ]
    rows = [head]
    for run in whole["runs"]:
        cells = [run["status"]] + [""] * (len(head) - 3)
        if run["status"] == "ok":
            memory = run.get("memory_mib")
            cells = [
                *(report.number(run, name, 0) for name in ("memory_mib", "shared_mib", "own_mib")),
                "-" if memory is None else f"{memory * 2**20 / whole['files']:.0f}",
                *(
                    report.number(run, f"{part}_s", 3 if part == "open" else 2)
                    for part in ("open", "loader", "first_batch")
                ),
                report.number(run, "start_s", 2),
            ]
        rows.append([KINDS[run["kind"]], str(run["processes"]), *cells])
    return report.markdown(rows)


def _line(entry: dict[str, Any]) -> str:
    line = f"{entry['processes']:>3} x {KINDS[entry['kind']]:<20}"
    if entry["status"] != "ok":
        return f"{line}{entry['status']}\n{entry['stderr']}"
    return f"{line}{entry.get('memory_mib', '-'):>8} MiB, start {entry['start_s']:.2f} s"


def parse(command: list[str]) -> argparse.Namespace:
    """Parse the options."""
    parser = make_parser("index", "Measure what an index of many paths costs.")
    parser.add_argument("--files", type=int, default=10_000_000)
    parser.add_argument("--processes", default="1,2,8", help="numbers of processes, separated by commas")
    parser.add_argument(
        "--kinds",
        default=",".join(KINDS),
        help=f"some of {', '.join(KINDS)}; the list only with the first number of processes",
    )
    parser.add_argument("--root", type=Path, help="folder for the indexes [the temporary folder]")
    parser.add_argument("--timeout", type=float, default=300.0, help="limit of one case in seconds")
    args = parse_args(parser, command)
    args.kinds = args.kinds.split(",")
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"no such kind: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    if args.files < PICTURES:
        parser.error(f"--files {args.files} is less than the {PICTURES} pictures")
    args.processes = [int(count) for count in args.processes.split(",")]
    return args


def main() -> None:
    """Run the study and print its table."""
    whole = run(parse(sys.argv[1:]))
    print(f"\n{table(whole)}")


if __name__ == "__main__":
    main()

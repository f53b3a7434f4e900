"""Measure what a loader uses, what it frees, and whether it uses more after hundreds of epochs.

    python -m benchmarks.studies.memory
    python -m benchmarks.studies.memory --images 64 --batch-size 4 --epochs 200 --name trial

Each case is a new process:

* *peak*: the peak of GPU memory while epochs run, of torchdali without options and of tuned DALI.
* *close*: three loaders one after another, each for an epoch. The first is closed by `close()`, the others by leaving a
  `with` block. Memory is measured before, during and after. Memory that a process keeps after its first loader (of
  NVIDIA's codecs, CUDA's kernels, threads of torch and DALI) is shown apart from what each later loader leaves.
* *constant*: hundreds of short epochs, with the memory after every few of them.

A dataset is *native* (an `ImageFolder`), or *worker-fed* (one that returns paths, with `transform=`), by worker
processes that stay.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import data, memory_use, report
from benchmarks.common.script import Results, make_parser, parse_args
from benchmarks.systems.loader_systems import LOADER
from benchmarks.systems.systems import Job
from torchdali.tools.bench import subprocesses

CASES = ("peak", "close", "constant")
_WORKERS = 2
_SAMPLES = 10
_TITLES = {
    "torchdali": "torchdali, defaults",
    "dali_tuned": "DALI tuned by hand",
    "native": "native",
    "worker-fed": "worker-fed",
}
_LEGEND = """\
GPU memory of the *peak* is what the device has less free than just after CUDA was initialised, measured at every batch.
So it is without CUDA's context; the other cases include the context. Host memory is the proportional share (PSS) of the
process and its workers, which changes when other processes use the same libraries. *Own* is memory that belongs to no
file. *In use* is what a later loader adds. *Kept once* is the difference between before the first loader was made and
after it was closed. *Kept by each* is the same for a later loader, without what a process makes once. *Slope* is per
epoch, the median of all pairs of samples without the first. *Range* is the largest less the smallest value."""


@dataclass(frozen=True)
class Case:
    """One case. `subject` is a system, or a kind of dataset."""

    name: str
    subject: str
    root: Path
    cores: int
    threads: int
    batch_size: int
    seconds: float
    epochs: int
    batches: int
    small_batch: int


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases, write the results, and return the whole report."""
    root = args.root or data.default_root(args.images)
    pictures = data.make(root, args.images)
    print(f"data: {pictures['images']} pictures of {pictures['mean_bytes'] / 1000:.1f} kB in {root}", flush=True)
    details = {name: getattr(args, name) for name in ("batch_size", "seconds", "epochs", "batches", "small_batch")}
    results = Results("memory", args, render, data=pictures, **details)
    context = multiprocessing.get_context("spawn")
    cores = min(args.cores, len(os.sched_getaffinity(0)))
    for case in cases(args, root, cores):
        entry = {"case": case.name, "subject": case.subject, "threads": case.threads or None}
        entry |= subprocesses.measure_in_process(context, work, case, args.timeout)
        results.add(entry, _line(entry))
    return results.whole


def cases(args: argparse.Namespace, root: Path, cores: int) -> Iterator[Case]:
    """Yield the cases, in order."""
    settings = (args.batch_size, args.seconds, args.epochs, args.batches, args.small_batch)
    for name in args.cases:
        if name == "peak":
            yield Case(name, "torchdali", root, cores, 0, *settings)
            for threads in sorted({max(1, cores // 2), cores}):
                yield Case(name, "dali_tuned", root, cores, threads, *settings)
        else:
            for kind in ("native", "worker-fed"):
                yield Case(name, kind, root, cores, 0, *settings)


def work(case: Case, result: Path) -> None:
    """Measure a case in this process, and write its figures to `result`."""
    import torch

    from benchmarks.systems.batches import surroundings

    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    figures = {"peak": measure_peak, "close": measure_close, "constant": measure_constant}[case.name](case)
    subprocesses.write_figures({**figures, **surroundings()}, result)
    subprocesses.exit_now(0)


def measure_peak(case: Case) -> dict[str, Any]:
    """Measure the peak of GPU memory while epochs run."""
    import torch

    used = _Used()
    epoch = LOADER[case.subject].build(Job(case.root, case.batch_size, case.threads or case.cores))
    until = time.perf_counter() + case.seconds
    most, images, start = 0.0, 0, 0.0
    while not start or time.perf_counter() < until:
        for batch in epoch():
            if not start:
                start = time.perf_counter()
                until = start + case.seconds
            images += len(batch[0])
            most = max(most, used.gpu())
            del batch
        most = max(most, used.gpu())
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    rate = images / (time.perf_counter() - start)
    return {"gpu_peak_mib": most, "images_per_s": round(rate, 1), **memory_use.measure_all()}


class _Used:
    """GPU memory in use since the object was made. 0 without a GPU."""

    def __init__(self) -> None:
        self._before = self._measure()

    def gpu(self) -> float:
        """Return it in MiB."""
        return round(self._measure() - self._before, 1)

    @staticmethod
    def _measure() -> float:
        import torch

        if not torch.cuda.is_available():
            return 0.0
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**20


def measure_close(case: Case) -> dict[str, Any]:
    """Measure what three loaders one after another use and leave."""
    rows = {"before": memory_use.measure_all()}
    loader = _loader(case, case.batch_size)
    _run_epoch(loader)
    rows["first"] = memory_use.measure_all()
    loader.close()
    del loader
    rows["first closed"] = memory_use.measure_all()
    for name in ("second", "third"):
        with _loader(case, case.batch_size) as loader:
            _run_epoch(loader)
            rows[name] = memory_use.measure_all()
        del loader
        rows[f"{name} left"] = memory_use.measure_all()
    return {"used": rows}


def measure_constant(case: Case) -> dict[str, Any]:
    """Measure what a loader uses every few epochs."""
    from torch.utils.data import RandomSampler

    loader = _loader(case, case.small_batch, lambda data: RandomSampler(data, True, case.batches * case.small_batch))
    rows: list[dict[str, float]] = []
    every = max(1, case.epochs // _SAMPLES)
    start = time.perf_counter()
    for number in range(case.epochs):
        assert _run_epoch(loader) == case.batches
        if number % every == every - 1 or not number:
            rows.append({"epoch": number + 1, **memory_use.measure_all()})
    seconds = time.perf_counter() - start
    images = case.epochs * case.batches * case.small_batch
    return {"used": rows, "every": every, "images_per_s": round(images / seconds, 1), "seconds": round(seconds, 1)}


def _run_epoch(loader: Any) -> int:
    """Run an epoch, wait for the GPU, and return the number of batches."""
    count = sum(1 for _ in loader)
    memory_use.measure_gpu()
    return count


def _loader(case: Case, batch_size: int, sampler: Any = None) -> Any:
    from torchvision.datasets import ImageFolder

    from benchmarks.systems.systems import make_transforms
    from torchdali import DALILoader

    folder = ImageFolder(case.root, make_transforms())
    if case.subject == "native":
        return DALILoader(folder, batch_size, sampler=sampler and sampler(folder), drop_last=True)
    dataset = Paths(folder.samples[: 32 * batch_size])
    options = {"num_workers": _WORKERS, "persistent_workers": True, "transform": folder.transform}
    return DALILoader(dataset, batch_size, sampler=sampler and sampler(dataset), drop_last=True, **options)


class Paths:
    """Dataset that returns paths."""

    def __init__(self, samples: list[tuple[str, int]]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Path, int]:
        path, label = self._samples[index]
        return Path(path), label


def render(whole: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    pictures = whole["data"]
    heading = report.study_heading(
        f"Memory: {report.describe_device(whole)}",
        whole,
        f"- data: {pictures['images']} unique JPEGs of {pictures['mean_bytes'] / 1000:.1f} kB, about 500x375",
        f"- work: batches of {whole['batch_size']}, random resized crop to 224, flip, normalize, fp32",
        f"- constant: {whole['epochs']} epochs of {whole['batches']} batches of {whole['small_batch']}",
    )
    return "\n\n".join([heading, *tables(whole["runs"]), _LEGEND])


_COLUMNS = {
    "gpu_mib": "GPU, MiB",
    "pss_mib": "host, MiB",
    "anonymous_mib": "own",
    "threads": "threads",
    "files": "files",
    "workers": "workers",
}


def tables(runs: list[dict[str, Any]]) -> list[str]:
    """Return a table for each kind of case."""
    makers = {"peak": _peak_rows, "close": _close_rows, "constant": _constant_rows}
    by_kind = {name: [run for run in runs if run["case"] == name] for name in makers}
    return [report.markdown(make(by_kind[name])) for name, make in makers.items() if by_kind[name]]


def _peak_rows(runs: list[dict[str, Any]]) -> list[list[str]]:
    rows = [["peak", "threads", "GPU, MiB", "images/s", "host, MiB"]]
    for run in runs:
        cells = [report.number(run, name, 0) for name in ("gpu_peak_mib", "images_per_s", "pss_mib")]
        state = cells if run["status"] == "ok" else [run["status"], "", ""]
        rows.append([_TITLES[run["subject"]], str(run["threads"] or "its own"), *state])
    return rows


def _close_rows(runs: list[dict[str, Any]]) -> list[list[str]]:
    rows = [["close", "", *_COLUMNS.values()]]
    for run in runs:
        if run["status"] != "ok":
            rows.append([_TITLES[run["subject"]], run["status"], *[""] * len(_COLUMNS)])
            continue
        rows_by_name = run["used"]
        lines = {
            "in use": _subtract(rows_by_name["third"], rows_by_name["second left"]),
            "kept once": _subtract(rows_by_name["first closed"], rows_by_name["before"]),
            "kept by each": _subtract(rows_by_name["third left"], rows_by_name["second left"]),
        }
        for title, figures in lines.items():
            cells = [f"{figures[name]:,.0f}" if name in figures else "-" for name in _COLUMNS]
            rows.append([_TITLES[run["subject"]], title, *cells])
    return rows


def _subtract(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: round(after[name] - before[name], 1) for name in after}


def _constant_rows(runs: list[dict[str, Any]]) -> list[list[str]]:
    rows = [["constant", "", "first", "last", "slope", "range"]]
    for run in runs:
        if run["status"] != "ok":
            rows.append([_TITLES[run["subject"]], run["status"], "", "", "", ""])
            continue
        samples = run["used"][1:]  # after one epoch, not all pools are full
        for name, drift in memory_use.fit_drifts(samples, 1).items():
            if name in _COLUMNS:
                ends = [f"{samples[at][name]:,.0f}" for at in (0, -1)]
                slope = f"{drift['slope'] / run['every']:.4f}"
                rows.append([_TITLES[run["subject"]], _COLUMNS[name], *ends, slope, f"{drift['range']:.1f}"])
    return rows


def _line(entry: dict[str, Any]) -> str:
    line = f"{entry['case']:<10}{_TITLES[entry['subject']]:<22}"
    if entry["status"] != "ok":
        return f"{line}{entry['status']}\n{entry.get('stderr', '')}".rstrip()
    if entry["case"] == "peak":
        return f"{line}{entry['gpu_peak_mib']:,.0f} MiB, {entry['images_per_s']:,.0f} images/s"
    return f"{line}{entry['process_s']:.0f} s"


def parse(command: list[str]) -> argparse.Namespace:
    """Parse the options."""
    parser = make_parser("memory", "Measure what loaders use and free.")
    parser.add_argument("--images", type=int, default=8192, help="number of pictures to make")
    parser.add_argument("--root", type=Path, help="folder of the pictures [in /dev/shm]")
    parser.add_argument("--cases", default=",".join(CASES), help=f"some of {', '.join(CASES)}")
    parser.add_argument("--cores", type=int, default=16, help="number of cores of a process, if there are as many")
    parser.add_argument("--batch-size", type=int, default=256, help="images in a batch of peak and close")
    parser.add_argument("--small-batch", type=int, default=32, help="images in a batch of constant")
    parser.add_argument("--seconds", type=float, default=2.0, help="time in which the peak is measured")
    parser.add_argument("--epochs", type=int, default=200, help="number of epochs of constant")
    parser.add_argument("--batches", type=int, default=20, help="number of batches in an epoch of constant")
    parser.add_argument("--timeout", type=float, default=120.0, help="limit of one process in seconds")
    args = parse_args(parser, command)
    args.cases = args.cases.split(",")
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    return args


def main() -> None:
    """Run the study and print its tables."""
    whole = run(parse(sys.argv[1:]))
    print("", *tables(whole["runs"]), sep="\n\n")


if __name__ == "__main__":
    main()

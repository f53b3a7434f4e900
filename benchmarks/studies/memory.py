"""What a loader holds, what it gives back, and that it holds no more after hundreds of epochs.

    python -m benchmarks.studies.memory
    python -m benchmarks.studies.memory --images 64 --batch-size 4 --epochs 200 --name trial

Every case is a fresh process:

* *peak*: the most that is in use on the GPU while epochs run, of torchdali with no option set and of tuned DALI.
* *close*: three loaders after one another, each for an epoch, the first closed by `close()`, the others by leaving a
  `with` block; what is in use before, while, and after. What a process keeps after its first loader, whoever makes it
  (NVIDIA's codecs, CUDA's kernels, threads of torch and DALI), is told apart from what each further loader leaves.
* *constant*: hundreds of short epochs, and what is in use every few of them.

A dataset is *read* (an `ImageFolder`), or *asked* for samples (one that gives paths, with `transform=`), by worker
processes, which stay.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import data, memory_use, report
from benchmarks.common.script import Results, parsed, parser_of
from benchmarks.systems.loader_systems import LOADER
from benchmarks.systems.systems import Job
from torchdali.tools.bench import subprocesses

CASES = ("peak", "close", "constant")
_WORKERS = 2
_SAMPLES = 10
_TITLES = {"torchdali": "torchdali, defaults", "dali_tuned": "DALI tuned by hand", "read": "read", "asked": "asked"}
_LEGEND = """\
GPU memory of the *peak* is what the device has less free than when CUDA had just been initialised, so without CUDA's
context, looked at with every batch; elsewhere it includes the context. Host memory is the proportional share (PSS) of
the process and its workers, which moves when others come and go that use the same libraries; *own* is what is in no
file. *In use* is what a later loader adds. *Kept once* is what is in use after the first loader was closed less what
was before it was made; *kept by each* is the same of a later loader, without what is made once for a process.
*Slope* is per epoch, by the median of all pairs of samples, the first left out; *range* is the largest less the
smallest."""


@dataclass(frozen=True)
class Case:
    """One process: what it measures, of which system or kind of dataset, and with what."""

    name: str
    of: str
    root: Path
    cores: int
    threads: int
    batch_size: int
    seconds: float
    epochs: int
    batches: int
    small_batch: int


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures all cases and writes the results; the whole report."""
    root = args.root or data.default_root(args.images)
    pictures = data.make(root, args.images)
    print(f"data: {pictures['images']} pictures of {pictures['mean_bytes'] / 1000:.1f} kB in {root}", flush=True)
    about = {name: getattr(args, name) for name in ("batch_size", "seconds", "epochs", "batches", "small_batch")}
    results = Results("memory", args, write, data=pictures, **about)
    context = multiprocessing.get_context("spawn")
    cores = min(args.cores, len(os.sched_getaffinity(0)))
    for case in cases(args, root, cores):
        entry = {"case": case.name, "of": case.of, "threads": case.threads or None}
        entry |= subprocesses.measure_in_process(context, work, case, args.timeout)
        results.add(entry, _line(entry))
    return results.whole


def cases(args: argparse.Namespace, root: Path, cores: int) -> Iterator[Case]:
    """What is to be measured, in order."""
    about = (args.batch_size, args.seconds, args.epochs, args.batches, args.small_batch)
    for name in args.cases:
        if name == "peak":
            yield Case(name, "torchdali", root, cores, 0, *about)
            for threads in sorted({max(1, cores // 2), cores}):
                yield Case(name, "dali_tuned", root, cores, threads, *about)
        else:
            for kind in ("read", "asked"):
                yield Case(name, kind, root, cores, 0, *about)


def work(case: Case, result: Path) -> None:
    """Measures a case in a process of its own."""
    import torch

    from benchmarks.systems.batches import surroundings

    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    figures = {"peak": peak, "close": close, "constant": constant}[case.name](case)
    subprocesses.write_figures({**figures, **surroundings()}, result)
    subprocesses.exit_now(0)


def peak(case: Case) -> dict[str, Any]:
    """The most that is in use while epochs run."""
    import torch

    used = _Used()
    epoch = LOADER[case.of].build(Job(case.root, case.batch_size, case.threads or case.cores))
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
    """GPU memory that is in use beside what was when this was made; nothing without a GPU."""

    def __init__(self) -> None:
        self._before = self._now()

    def gpu(self) -> float:
        """MiB."""
        return round(self._now() - self._before, 1)

    @staticmethod
    def _now() -> float:
        import torch

        if not torch.cuda.is_available():
            return 0.0
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**20


def close(case: Case) -> dict[str, Any]:
    """What three loaders after one another hold and leave."""
    rows = {"before": memory_use.measure_all()}
    loader = _loader(case, case.batch_size)
    _take(loader)
    rows["first"] = memory_use.measure_all()
    loader.close()
    del loader
    rows["first closed"] = memory_use.measure_all()
    for name in ("second", "third"):
        with _loader(case, case.batch_size) as loader:
            _take(loader)
            rows[name] = memory_use.measure_all()
        del loader
        rows[f"{name} left"] = memory_use.measure_all()
    return {"held": rows}


def constant(case: Case) -> dict[str, Any]:
    """What a loader holds every few epochs."""
    from torch.utils.data import RandomSampler

    loader = _loader(case, case.small_batch, lambda data: RandomSampler(data, True, case.batches * case.small_batch))
    rows: list[dict[str, float]] = []
    every = max(1, case.epochs // _SAMPLES)
    start = time.perf_counter()
    for number in range(case.epochs):
        assert _take(loader) == case.batches
        if number % every == every - 1 or not number:
            rows.append({"epoch": number + 1, **memory_use.measure_all()})
    seconds = time.perf_counter() - start
    images = case.epochs * case.batches * case.small_batch
    return {"held": rows, "every": every, "images_per_s": round(images / seconds, 1), "seconds": round(seconds, 1)}


def _take(loader: Any) -> int:
    """Takes an epoch, and waits for it."""
    taken = sum(1 for _ in loader)
    memory_use.measure_gpu()
    return taken


def _loader(case: Case, batch_size: int, sampler: Any = None) -> Any:
    from torchvision.datasets import ImageFolder

    from benchmarks.systems.systems import transforms
    from torchdali import DALILoader

    folder = ImageFolder(case.root, transforms())
    if case.of == "read":
        return DALILoader(folder, batch_size, sampler=sampler and sampler(folder), drop_last=True)
    asked = Asked(folder.samples[: 32 * batch_size])
    options = {"num_workers": _WORKERS, "persistent_workers": True, "transform": folder.transform}
    return DALILoader(asked, batch_size, sampler=sampler and sampler(asked), drop_last=True, **options)


class Asked:
    """A dataset that gives paths."""

    def __init__(self, samples: list[tuple[str, int]]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Path, int]:
        path, label = self._samples[index]
        return Path(path), label


def write(whole: dict[str, Any], out: Path, name: str) -> None:
    """Writes ``<name>.json`` and ``<name>.md`` into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n")
    host, pictures = whole["machine"], whole["data"]
    heading = "\n".join(
        [
            f"# Memory: {host['gpu'] or 'CPU'}",
            "",
            *report.machine_lines(host),
            f"- data: {pictures['images']} unique JPEGs of {pictures['mean_bytes'] / 1000:.1f} kB, about 500x375",
            f"- work: batches of {whole['batch_size']}, random resized crop to 224, flip, normalize, fp32",
            f"- constant: {whole['epochs']} epochs of {whole['batches']} batches of {whole['small_batch']}",
            f"- command: `{whole['command']}`",
            f"- date: {whole['date']}",
        ]
    )
    (out / f"{name}.md").write_text("\n\n".join([heading, *tables(whole["runs"]), _LEGEND]) + "\n")


_COLUMNS = {
    "gpu_mib": "GPU, MiB",
    "pss_mib": "host, MiB",
    "anonymous_mib": "own",
    "threads": "threads",
    "files": "files",
    "workers": "workers",
}


def tables(runs: list[dict[str, Any]]) -> list[str]:
    """One for each kind of case."""
    makers = {"peak": _peaks, "close": _closed, "constant": _constants}
    of_kind = {name: [run for run in runs if run["case"] == name] for name in makers}
    return [report.markdown(make(of_kind[name])) for name, make in makers.items() if of_kind[name]]


def _peaks(runs: list[dict[str, Any]]) -> list[list[str]]:
    rows = [["peak", "threads", "GPU, MiB", "images/s", "host, MiB"]]
    for run in runs:
        cells = [report.number(run, name, 0) for name in ("gpu_peak_mib", "images_per_s", "pss_mib")]
        state = cells if run["status"] == "ok" else [run["status"], "", ""]
        rows.append([_TITLES[run["of"]], str(run["threads"] or "its own"), *state])
    return rows


def _closed(runs: list[dict[str, Any]]) -> list[list[str]]:
    rows = [["close", "", *_COLUMNS.values()]]
    for run in runs:
        if run["status"] != "ok":
            rows.append([_TITLES[run["of"]], run["status"], *[""] * len(_COLUMNS)])
            continue
        found = run["held"]
        lines = {
            "in use": _less(found["third"], found["second left"]),
            "kept once": _less(found["first closed"], found["before"]),
            "kept by each": _less(found["third left"], found["second left"]),
        }
        for title, figures in lines.items():
            cells = [f"{figures[name]:,.0f}" if name in figures else "-" for name in _COLUMNS]
            rows.append([_TITLES[run["of"]], title, *cells])
    return rows


def _less(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: round(after[name] - before[name], 1) for name in after}


def _constants(runs: list[dict[str, Any]]) -> list[list[str]]:
    rows = [["constant", "", "first", "last", "slope", "range"]]
    for run in runs:
        if run["status"] != "ok":
            rows.append([_TITLES[run["of"]], run["status"], "", "", "", ""])
            continue
        found = run["held"][1:]  # one epoch alone has not filled all pools
        for name, moved in memory_use.fit_drifts(found, 1).items():
            if name in _COLUMNS:
                ends = [f"{found[at][name]:,.0f}" for at in (0, -1)]
                slope = f"{moved['slope'] / run['every']:.4f}"
                rows.append([_TITLES[run["of"]], _COLUMNS[name], *ends, slope, f"{moved['range']:.1f}"])
    return rows


def _line(entry: dict[str, Any]) -> str:
    line = f"{entry['case']:<10}{_TITLES[entry['of']]:<22}"
    if entry["status"] != "ok":
        return f"{line}{entry['status']}\n{entry.get('stderr', '')}".rstrip()
    if entry["case"] == "peak":
        return f"{line}{entry['gpu_peak_mib']:,.0f} MiB, {entry['images_per_s']:,.0f} images/s"
    return f"{line}{entry['process_s']:.0f} s"


def parse(command: list[str]) -> argparse.Namespace:
    """The options."""
    parser = parser_of("memory", "Measures what loaders hold and give back.")
    parser.add_argument("--images", type=int, default=8192, help="number of pictures to make")
    parser.add_argument("--root", type=Path, help="where they are or will be [in /dev/shm]")
    parser.add_argument("--cases", default=",".join(CASES), help=f"some of {', '.join(CASES)}")
    parser.add_argument("--cores", type=int, default=16, help="cores of a process, where there are so many")
    parser.add_argument("--batch-size", type=int, default=256, help="of the peak and of closing")
    parser.add_argument("--small-batch", type=int, default=32, help="of the constant case")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for which a peak is looked for")
    parser.add_argument("--epochs", type=int, default=200, help="of the constant case")
    parser.add_argument("--batches", type=int, default=20, help="of an epoch of the constant case")
    parser.add_argument("--timeout", type=float, default=120.0, help="limit of one process, seconds")
    args = parsed(parser, command)
    args.cases = args.cases.split(",")
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    return args


def main() -> None:
    """Runs the benchmark and prints its tables."""
    whole = run(parse(sys.argv[1:]))
    print("", *tables(whole["runs"]), sep="\n\n")


if __name__ == "__main__":
    main()

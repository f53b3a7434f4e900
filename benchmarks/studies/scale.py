"""Several GPUs of one host, a process each: images/s of each GPU, and what each process holds, epoch by epoch.

    python -m benchmarks.studies.scale
    python -m benchmarks.studies.scale --gpus 1,2 --systems torchdali --seconds 3 --name trial

Each number of GPUs is run by itself: so many processes with the variables that `torchrun` sets, each with its own GPU
and its own cores, a `DistributedSampler` and a `DALILoader` with no option set. Every GPU gets as many pictures as one
GPU alone does. First each process counts images for the same few seconds, after an epoch that warms up; then another
loader goes through short epochs, and after each of them memory, threads and open files are looked at. While all loaders
are there, the memory that is in use on each GPU tells whether a process has also put something on another's. DALI by
hand, tuned, is counted beside it in as many processes, each with all pictures: what it loses is lost to the host.

Without a GPU the processes run on the CPU, which is good for trying the harness only.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import data, memory_use, report
from benchmarks.common.script import Results, parsed, parser_of

_REPOSITORY = Path(__file__).resolve().parents[2]
SYSTEMS = ("torchdali", "dali_tuned")
_FIGURES = ("pss_mib", "anonymous_mib", "gpu_mib", "threads", "files")
_LEGEND = """\
Each process has {cores} cores (where there are so many) and one GPU, batches of {batch_size}. *Images/s* are of each
process over the same {seconds} s, in the mean, the slowest and the fastest; *of one* is the mean as a share of that
with one process. Tuned DALI has half as many threads as cores. Memory is of one process of torchdali, after the first
of {epochs} epochs of {batches} batches and after the last; on the GPU it includes CUDA's context. *Slope* is the
largest of any process, per epoch, by the median of all pairs, the first epoch left out; *range* is the largest less the
smallest. *Used on each GPU* is while all loaders are there: equal numbers mean that each process is on its own GPU
only."""


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures all numbers of processes and writes the results; the whole report."""
    root = args.root or data.default_root(args.images)
    pictures = data.make(root, args.images)
    print(f"data: {pictures['images']} pictures of {pictures['mean_bytes'] / 1000:.1f} kB in {root}", flush=True)
    about = {name: getattr(args, name) for name in ("batch_size", "seconds", "epochs", "batches", "cores")}
    results = Results("scale", args, write, data=pictures, **about)
    for count in args.gpus:
        for system in args.systems:
            entry = {"processes": count, "system": system, **measured(args, root, count, system)}
            results.add(entry, _line(entry))
    return results.whole


def measured(args: argparse.Namespace, root: Path, count: int, system: str = "torchdali") -> dict[str, Any]:
    """So many processes at once: each one's figures and status 'ok', or what the first that failed wrote last."""
    cpus = sorted(os.sched_getaffinity(0))
    share = max(1, min(args.cores, len(cpus) // count))
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder) / f"{rank}.json" for rank in range(count)]
        logs = [Path(folder) / f"{rank}.log" for rank in range(count)]
        port = _free_port()
        children: list[subprocess.Popen[bytes]] = []
        for rank, (result, log) in enumerate(zip(results, logs, strict=True)):
            mine = [cpus[i % len(cpus)] for i in range(rank * share, (rank + 1) * share)]
            options = {
                "root": root.resolve(),
                "system": system,
                "result": result,
                **{name: getattr(args, name) for name in ("batch_size", "seconds", "epochs", "batches", "timeout")},
            }
            command = [sys.executable, "-m", "benchmarks.studies.scale_worker"]
            command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
            variables |= {"OMP_NUM_THREADS": 1} if count > 1 and "OMP_NUM_THREADS" not in os.environ else {}
            environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
            # Before it starts: a library that has seen all cores would start as many threads on the few.
            os.sched_setaffinity(0, mine)
            with log.open("w") as said:
                child = subprocess.Popen(command, cwd=_REPOSITORY, stdout=said, stderr=said, env=environment)
            os.sched_setaffinity(0, cpus)
            children.append(child)
        ended = _wait(children, args.timeout)
        if ended == "ok" and all(result.exists() for result in results):
            ranks = [json.loads(result.read_text()) for result in results]
            return {"status": "ok", "cores_each": share, **summary(ranks), "ranks": ranks, **_about(ranks[0])}
        said = [log.read_text(errors="replace").replace(f"{_REPOSITORY}{os.sep}", "") for log in logs]
        # Those that wait for the one that failed fail after it, and say less.
        codes = [child.returncode for child in children]
        first = next((text for text in said if "Traceback" in text and "Connection" not in text), said[0])
        return {"status": "timeout" if ended == "timeout" else "failed", "exits": codes, "stderr": first[-3000:]}


def _wait(children: list[subprocess.Popen[bytes]], timeout: float) -> str:
    """Waits until all have ended, one has failed, or the time is over; then ends those that are left."""
    deadline = time.perf_counter() + timeout
    ended = "timeout"
    while time.perf_counter() < deadline:
        codes = [child.poll() for child in children]
        if any(codes):
            time.sleep(2)  # for what the others have to say
            ended = "failed"
            break
        if all(code == 0 for code in codes):
            ended = "ok"
            break
        time.sleep(0.1)
    for child in children:
        if child.poll() is None:
            child.kill()
        child.wait()
    return ended


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _about(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: figures.pop(name) for name in ("versions", "gpu", "environment")}


def summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What all processes did together."""
    rates = [rank["images_per_s"] for rank in ranks]
    whole = {
        "images_per_s": round(sum(rates) / len(rates), 1),
        "slowest": min(rates),
        "fastest": max(rates),
        "first_batch_s": max(rank["first_batch_s"] for rank in ranks),
        "cpu_s_per_1000_images": max(rank["cpu_s_per_1000_images"] for rank in ranks),
    }
    if "held" not in ranks[0]:
        return whole
    moved = [memory_use.fit_drifts(rank["held"]) for rank in ranks]
    figures = [name for name in _FIGURES if name in moved[0]]
    return whole | {
        "drift": {
            name: {what: max((one[name][what] for one in moved), key=abs) for what in ("slope", "range")}
            for name in figures
        },
        "first": {name: ranks[0]["held"][0][name] for name in figures},
        "last": {name: ranks[0]["held"][-1][name] for name in figures},
        "used_on_each_gpu_mib": ranks[0]["used_on_each_gpu_mib"],
        "torch_on_other_gpus_mib": max(rank["torch_on_other_gpus_mib"] for rank in ranks),
    }


def write(whole: dict[str, Any], out: Path, name: str) -> None:
    """Writes ``<name>.json`` and ``<name>.md`` into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n")
    host, pictures = whole["machine"], whole["data"]
    heading = "\n".join(
        [
            f"# Several GPUs: {host['gpu'] or 'CPU'}",
            "",
            *report.machine_lines(host),
            f"- data: {pictures['images']} unique JPEGs of {pictures['mean_bytes'] / 1000:.1f} kB, about 500x375",
            "- work: random resized crop to 224, flip, normalize, fp32; loader only",
            f"- command: `{whole['command']}`",
            f"- date: {whole['date']}",
        ]
    )
    legend = _LEGEND.format(**{key: whole[key] for key in ("cores", "batch_size", "seconds", "epochs", "batches")})
    (out / f"{name}.md").write_text(
        "\n\n".join([heading, table(whole["runs"]), memory_table(whole["runs"]), legend]) + "\n"
    )


def table(runs: list[dict[str, Any]]) -> str:
    """Throughput: a line a system and number of processes."""
    titles = ["GPUs", "cores each", "images/s each", "slowest to fastest", "of one", "together"]
    rows = [["", *titles, "CPU-s per 1,000", "first batch, s"]]
    alone = {run["system"]: run["images_per_s"] for run in runs if run["status"] == "ok" and run["processes"] == 1}
    for run in sorted(runs, key=lambda run: SYSTEMS.index(run["system"])):
        system = run["system"]
        if run["status"] != "ok":
            rows.append([system, str(run["processes"]), "", run["status"], *[""] * 5])
            continue
        rate = run["images_per_s"]
        rows.append(
            [
                system,
                str(run["processes"]),
                str(run["cores_each"]),
                f"{rate:,.0f}",
                f"{run['slowest']:,.0f} to {run['fastest']:,.0f}",
                f"{rate / alone[system]:.3f}" if system in alone else "-",
                f"{rate * run['processes']:,.0f}",
                f"{run['cpu_s_per_1000_images']:.2f}",
                f"{run['first_batch_s']:.2f}",
            ]
        )
    return report.markdown(rows)


def memory_table(runs: list[dict[str, Any]]) -> str:
    """What a process holds: a line a number of processes and figure."""
    titles = {
        "pss_mib": "host, MiB (PSS)",
        "anonymous_mib": "host, MiB, its own",
        "gpu_mib": "GPU, MiB",
        "threads": "threads",
        "files": "open files",
    }
    rows = [["", "GPUs", "first", "last", "slope", "range", "used on each GPU, MiB"]]
    for run in runs:
        for name, moved in run.get("drift", {}).items():
            cells = [f"{run[when][name]:,.0f}" for when in ("first", "last")]
            cells += [f"{moved['slope']:.3f}", f"{moved['range']:.1f}"]
            used = run["used_on_each_gpu_mib"] if name == "gpu_mib" else []
            rows.append([titles[name], str(run["processes"]), *cells, ", ".join(f"{value:,.0f}" for value in used)])
    return report.markdown(rows)


def _line(entry: dict[str, Any]) -> str:
    line = f"{entry['processes']:>3} processes  {entry['system']:<11}"
    if entry["status"] != "ok":
        return f"{line}{entry['status']}\n{entry['stderr']}"
    return f"{line}{entry['images_per_s']:,.0f} images/s each, {entry['slowest']:,.0f} to {entry['fastest']:,.0f}"


def parse(command: list[str]) -> argparse.Namespace:
    """The options, with numbers of GPUs that this machine does not have left out."""
    import torch

    parser = parser_of("scale", "Measures several GPUs of one host.")
    parser.add_argument("--images", type=int, default=8192, help="number of pictures to make")
    parser.add_argument("--root", type=Path, help="where they are or will be [in /dev/shm]")
    parser.add_argument("--gpus", default="1,2,4", help="numbers of GPUs, separated by commas")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="what is measured, separated by commas")
    parser.add_argument("--cores", type=int, default=16, help="cores of a process, where there are so many")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=6.0, help="time of one measurement")
    parser.add_argument("--epochs", type=int, default=20, help="short epochs, after which memory is looked at")
    parser.add_argument("--batches", type=int, default=20, help="batches of a short epoch")
    parser.add_argument("--timeout", type=float, default=150.0, help="limit of one number of processes, seconds")
    args = parsed(parser, command)
    args.systems = args.systems.split(",")
    if wrong := set(args.systems) - set(SYSTEMS):
        parser.error(f"--systems: {', '.join(sorted(wrong))}: it is of {', '.join(SYSTEMS)}")
    wanted = [int(count) for count in args.gpus.split(",")]
    here = torch.cuda.device_count() or max(wanted)
    args.gpus = [count for count in wanted if count <= here]
    if args.gpus != wanted:
        print(f"this machine has {here} GPUs: measuring with {args.gpus or 'none'} of {wanted}", flush=True)
    return args


def main() -> None:
    """Runs the benchmark and prints its tables."""
    whole = run(parse(sys.argv[1:]))
    print(f"\n{table(whole['runs'])}\n\n{memory_table(whole['runs'])}")


if __name__ == "__main__":
    main()

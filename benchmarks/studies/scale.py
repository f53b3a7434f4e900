"""Measure several GPUs of one host, with a process for each: images/s, and the memory of each process by epoch.

    python -m benchmarks.studies.scale
    python -m benchmarks.studies.scale --gpus 1,2 --systems torchdali --seconds 3 --name trial

Each number of GPUs is one run: that many processes with the variables of `torchrun`, each with its own GPU and cores, a
`DistributedSampler` and a `DALILoader` without options. Every GPU gets as many pictures as one GPU alone. First each
process counts images for the same few seconds, after an epoch to warm up. Then another loader runs short epochs, and
memory, threads and open files are measured after each. While all loaders exist, the memory in use on each GPU shows
whether a process also uses another's. DALI by hand, tuned, runs in as many processes, each with all pictures, to show
what the host costs.

Without a GPU the processes run on the CPU, to try the study only.
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
from benchmarks.common.script import Results, make_parser, parse_args

_REPOSITORY = Path(__file__).resolve().parents[2]
SYSTEMS = ("torchdali", "dali_tuned")
_FIGURES = ("pss_mib", "anonymous_mib", "gpu_mib", "threads", "files")
_LEGEND = """\
Each process has {cores} cores (if there are as many) and one GPU, and batches of {batch_size}. *Images/s* are of each
process over the same {seconds} s: the mean, the slowest and the fastest. *Of one* is the mean as a share of that with
one process. Tuned DALI has half as many threads as cores. Memory is of one process of torchdali, after the first and
after the last of {epochs} epochs of {batches} batches. On the GPU it includes CUDA's context. *Slope* is per epoch, the
median of all pairs without the first epoch, and the largest of all processes. *Range* is the largest less the smallest
value. *Used on each GPU* is measured while all loaders exist. Equal numbers mean that each process uses only its own
GPU."""


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all numbers of processes, write the results, and return the whole report."""
    root = args.root or data.default_root(args.images)
    pictures = data.make(root, args.images)
    print(f"data: {pictures['images']} pictures of {pictures['mean_bytes'] / 1000:.1f} kB in {root}", flush=True)
    details = {name: getattr(args, name) for name in ("batch_size", "seconds", "epochs", "batches", "cores")}
    results = Results("scale", args, render, data=pictures, **details)
    for count in args.gpus:
        for system in args.systems:
            entry = {"processes": count, "system": system, **run_processes(args, root, count, system)}
            results.add(entry, _line(entry))
    return results.whole


def run_processes(args: argparse.Namespace, root: Path, count: int, system: str = "torchdali") -> dict[str, Any]:
    """Run `count` processes at once. Return their figures and status 'ok', or the output of the one that failed."""
    cpus = sorted(os.sched_getaffinity(0))
    share = max(1, min(args.cores, len(cpus) // count))
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder) / f"{rank}.json" for rank in range(count)]
        logs = [Path(folder) / f"{rank}.log" for rank in range(count)]
        port = _free_port()
        children: list[subprocess.Popen[bytes]] = []
        for rank, (result, log) in enumerate(zip(results, logs, strict=True)):
            own_cpus = [cpus[i % len(cpus)] for i in range(rank * share, (rank + 1) * share)]
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
            # Before it starts, because a library that sees all cores would start as many threads.
            os.sched_setaffinity(0, own_cpus)
            with log.open("w") as output:
                child = subprocess.Popen(command, cwd=_REPOSITORY, stdout=output, stderr=output, env=environment)
            os.sched_setaffinity(0, cpus)
            children.append(child)
        ended = _wait(children, args.timeout)
        if ended == "ok" and all(result.exists() for result in results):
            ranks = [json.loads(result.read_text()) for result in results]
            return {
                "status": "ok",
                "cores_each": share,
                **summarize(ranks),
                "ranks": ranks,
                **_pop_environment(ranks[0]),
            }
        outputs = [log.read_text(errors="replace").replace(f"{_REPOSITORY}{os.sep}", "") for log in logs]
        # Processes that wait for the one that failed fail later, with a message that tells less.
        codes = [child.returncode for child in children]
        first = next((text for text in outputs if "Traceback" in text and "Connection" not in text), outputs[0])
        return {"status": "timeout" if ended == "timeout" else "failed", "exits": codes, "stderr": first[-3000:]}


def _wait(children: list[subprocess.Popen[bytes]], timeout: float) -> str:
    """Wait until all have ended, one has failed, or the time is over. Then kill the others."""
    deadline = time.perf_counter() + timeout
    ended = "timeout"
    while time.perf_counter() < deadline:
        codes = [child.poll() for child in children]
        if any(codes):
            time.sleep(2)  # so that the others can write their errors
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _pop_environment(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: figures.pop(name) for name in ("versions", "gpu", "environment")}


def summarize(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the figures of all processes."""
    rates = [rank["images_per_s"] for rank in ranks]
    summary = {
        "images_per_s": round(sum(rates) / len(rates), 1),
        "slowest": min(rates),
        "fastest": max(rates),
        "first_batch_s": max(rank["first_batch_s"] for rank in ranks),
        "cpu_s_per_1000_images": max(rank["cpu_s_per_1000_images"] for rank in ranks),
    }
    if "used" not in ranks[0]:
        return summary
    drifts = [memory_use.fit_drifts(rank["used"]) for rank in ranks]
    figures = [name for name in _FIGURES if name in drifts[0]]
    return summary | {
        "drift": {
            name: {what: max((drift[name][what] for drift in drifts), key=abs) for what in ("slope", "range")}
            for name in figures
        },
        "first": {name: ranks[0]["used"][0][name] for name in figures},
        "last": {name: ranks[0]["used"][-1][name] for name in figures},
        "used_on_each_gpu_mib": ranks[0]["used_on_each_gpu_mib"],
        "torch_on_other_gpus_mib": max(rank["torch_on_other_gpus_mib"] for rank in ranks),
    }


def render(whole: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    pictures = whole["data"]
    heading = report.study_heading(
        f"Several GPUs: {report.describe_device(whole)}",
        whole,
        f"- data: {pictures['images']} unique JPEGs of {pictures['mean_bytes'] / 1000:.1f} kB, about 500x375",
        "- work: random resized crop to 224, flip, normalize, fp32; loader only",
    )
    legend = _LEGEND.format(**{key: whole[key] for key in ("cores", "batch_size", "seconds", "epochs", "batches")})
    return "\n\n".join([heading, table(whole["runs"]), memory_table(whole["runs"]), legend])


def table(runs: list[dict[str, Any]]) -> str:
    """Return the speed, with a row for each system and number of processes."""
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
    """Return the memory of a process, with a row for each number of processes and figure."""
    titles = {
        "pss_mib": "host, MiB (PSS)",
        "anonymous_mib": "host, MiB, its own",
        "gpu_mib": "GPU, MiB",
        "threads": "threads",
        "files": "open files",
    }
    rows = [["", "GPUs", "first", "last", "slope", "range", "used on each GPU, MiB"]]
    for run in runs:
        for name, drift in run.get("drift", {}).items():
            cells = [f"{run[when][name]:,.0f}" for when in ("first", "last")]
            cells += [f"{drift['slope']:.3f}", f"{drift['range']:.1f}"]
            used = run["used_on_each_gpu_mib"] if name == "gpu_mib" else []
            rows.append([titles[name], str(run["processes"]), *cells, ", ".join(f"{value:,.0f}" for value in used)])
    return report.markdown(rows)


def _line(entry: dict[str, Any]) -> str:
    line = f"{entry['processes']:>3} processes  {entry['system']:<11}"
    if entry["status"] != "ok":
        return f"{line}{entry['status']}\n{entry['stderr']}"
    return f"{line}{entry['images_per_s']:,.0f} images/s each, {entry['slowest']:,.0f} to {entry['fastest']:,.0f}"


def parse(command: list[str]) -> argparse.Namespace:
    """Parse the options. Leave out numbers of GPUs that this machine does not have."""
    import torch

    parser = make_parser("scale", "Measure several GPUs of one host.")
    parser.add_argument("--images", type=int, default=8192, help="number of pictures to make")
    parser.add_argument("--root", type=Path, help="folder of the pictures [in /dev/shm]")
    parser.add_argument("--gpus", default="1,2,4", help="numbers of GPUs, separated by commas")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="systems, separated by commas")
    parser.add_argument("--cores", type=int, default=16, help="number of cores of a process, if there are as many")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=6.0, help="time of one measurement")
    parser.add_argument("--epochs", type=int, default=20, help="number of short epochs, after which memory is measured")
    parser.add_argument("--batches", type=int, default=20, help="number of batches in a short epoch")
    parser.add_argument("--timeout", type=float, default=150.0, help="limit of one number of processes in seconds")
    args = parse_args(parser, command)
    args.systems = args.systems.split(",")
    if wrong := set(args.systems) - set(SYSTEMS):
        parser.error(f"--systems: {', '.join(sorted(wrong))}: there are {', '.join(SYSTEMS)}")
    wanted = [int(count) for count in args.gpus.split(",")]
    here = torch.cuda.device_count() or max(wanted)
    args.gpus = [count for count in wanted if count <= here]
    if args.gpus != wanted:
        print(f"this machine has {here} GPUs: measuring with {args.gpus or 'none'} of {wanted}", flush=True)
    return args


def main() -> None:
    """Run the study and print its tables."""
    whole = run(parse(sys.argv[1:]))
    print(f"\n{table(whole['runs'])}\n\n{memory_table(whole['runs'])}")


if __name__ == "__main__":
    main()

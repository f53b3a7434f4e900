"""Measure torchdali beside other loaders, in one run.

    python -m benchmarks                                  # decode, loader, training, startup
    python -m benchmarks loader --cores 16,4 --systems torchdali,dali_tuned --seconds 10 --name trial
    python -m benchmarks decode loader --data large,small,progressive --cores 16
    python -m benchmarks loader --cache cold --root /some/disk/pictures
    python -m benchmarks training --levers
    python -m benchmarks proxy
    python -m benchmarks --quick                          # a short trial

Each benchmark prints its table, and writes ``<benchmark>-<name>.json``, ``.md`` and ``.svg`` to ``benchmarks/results``.
Each case runs in its own process, on some of the cores, under a time limit. A case that hangs or fails is reported, and
does not affect the others.
"""

import sys
import time

from benchmarks import options
from benchmarks.common import harness, report
from benchmarks.suite.all import BENCHMARKS


def main() -> None:
    """Run the benchmarks one after another, print their tables, and print the short ones again at the end."""
    args = options.parse(sys.argv[1:])
    gpu = report.default_name("").removeprefix("-")
    parts = [(BENCHMARKS[name], kind) for kind in args.data for name in args.benchmarks]
    end = time.perf_counter() + (args.limit or float("inf"))
    short: list[str] = []
    for number, (benchmark, kind) in enumerate(parts):
        left = sum(later.share for later, _ in parts[number:])
        now = time.perf_counter()
        until = now + (end - now) * benchmark.share / left
        own = options.settings(benchmark, args, kind)
        name = options.make_name(benchmark, own, gpu)
        print(f"\n{benchmark.title}, {kind}: {len(own.systems)} systems on {own.cores} cores", flush=True)
        whole = harness.run(benchmark, own, name, until)
        first, *others = benchmark.tables(whole["runs"])
        short.append(f"{benchmark.title}, {kind}\n{first}")
        print("\n" + "\n\n".join([*others, first]), flush=True)
    if len(parts) > 1:
        print("\n" + "\n\n".join(short))


if __name__ == "__main__":
    main()

"""Measures torchdali beside other loaders, in one run.

    python -m benchmarks                                  # decode, loader, training, startup
    python -m benchmarks loader --cores 16,4 --systems torchdali,dali_tuned --seconds 10 --name trial
    python -m benchmarks decode loader --data large,small,progressive --cores 16
    python -m benchmarks loader --cache cold --root /some/disk/pictures
    python -m benchmarks training --levers
    python -m benchmarks proxy
    python -m benchmarks --quick                          # a trial, here

Each regime prints its table and writes ``<regime>-<name>.json``, ``.md`` and ``.svg`` into ``benchmarks/results``.
Every case runs in a process of its own that may use only some of the cores, under a time limit, so one that hangs or
fails is reported and the others go on.
"""

import sys
import time

from benchmarks import options
from benchmarks.common import harness, report
from benchmarks.regimes.all import REGIMES


def main() -> None:
    """Runs the regimes one after another, prints their tables, and the short ones again at the end."""
    args = options.parse(sys.argv[1:])
    gpu = report.default_name("").removeprefix("-")
    parts = [(REGIMES[name], kind) for kind in args.data for name in args.regimes]
    end = time.perf_counter() + (args.limit or float("inf"))
    short: list[str] = []
    for number, (regime, kind) in enumerate(parts):
        left = sum(later.share for later, _ in parts[number:])
        now = time.perf_counter()
        until = now + (end - now) * regime.share / left
        own = options.settings(regime, args, kind)
        name = options.name_of(regime, own, gpu)
        print(f"\n{regime.title}, {kind}: {len(own.systems)} systems on {own.cores} cores", flush=True)
        whole = harness.run(regime, own, name, until)
        first, *others = regime.tables(whole["runs"])
        short.append(f"{regime.title}, {kind}\n{first}")
        print("\n" + "\n\n".join([*others, first]), flush=True)
    if len(parts) > 1:
        print("\n" + "\n\n".join(short))


if __name__ == "__main__":
    main()

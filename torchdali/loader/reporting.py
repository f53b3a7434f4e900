"""What a loader says of itself: what it will do, and what its time was spent on."""

# ruff: noqa: SLF001 - a part of the loader, in a file of its own

from __future__ import annotations

import sys
from time import perf_counter
from typing import Any, TextIO, cast

from torchdali.errors import UnsupportedDatasetError
from torchdali.loader import explain
from torchdali.loader.probe import probe_of
from torchdali.loader.stats import Probe, Stats
from torchdali.loader.verdict import UNMEASURED, diagnose
from torchdali.pipeline import graph
from torchdali.pipeline.clock import Clock
from torchdali.runtime import machine

__all__ = ["Reporting"]


class Reporting:
    """The methods of a loader that describe it."""

    def explain(self, file: TextIO | None = None) -> None:
        """Prints what the loader will do: source, transforms and what runs them, random numbers, output, settings.

        Args:
            file: Where to; standard output by default.
        """
        loader = cast("Any", self)
        loader._lift_again()
        if loader._source is not None:
            rows = explain.lifted(loader, loader._compile(), loader._window)
        else:
            rows = explain.proxied(loader, loader._proxy_now(), loader._not_lifted)
        device = graph.resolve(loader.device)
        about = f"{explain.device_of(loader, device)}, fidelity {loader.fidelity}"
        head = {"device": about, **loader._sharding.rows(loader)}
        tail = {"driver": machine.connections()} if device.type == "cuda" else {}
        text = "\n".join(f"{label:<11}{row}" if label.strip() else row for label, row in (head | rows | tail).items())
        (file or sys.stdout).write(f"{type(self).__name__}\n{text}\n")

    def stats(self, probe: bool = False) -> Stats:
        """What the time of the current or latest epoch was spent on, and its bottleneck; ``print`` shows a table.

        It may be asked for at any time, by the thread that iterates, and never waits for the GPU.

        Args:
            probe: Whether to measure first what the loader can do alone, on some batches of a few seconds: reading,
                decoding and transforming each, and all of it. Later calls show that too. It needs memory for a
                pipeline more, and calls the transforms, ``collate_fn`` and ``batch_transform``; the order of samples,
                random numbers and the epoch under way are what they were.

        Raises:
            UnsupportedDatasetError: ``probe`` is true, and samples would have to be asked for.
            ValueError: ``probe`` is true, and there is a cache.
        """
        loader = cast("Any", self)
        if probe:
            seen, begin = loader._clock, perf_counter()
            try:
                loader._probed = _probed(loader, seen)
            finally:
                if seen:
                    seen.skip(perf_counter() - begin)
        if loader._source is None:
            if loader._clock is None and loader._proxy_now() is None:
                return UNMEASURED
            return diagnose(loader._clock, None, loader.num_workers, given=loader.transform is not None)
        state, probed = loader._probed or (None, None)
        outdated = loader._compiled is not None and loader._compiled.state != state
        steps = loader._compiled.plan.steps if loader._compiled else ()
        probed = None if outdated else probed
        return diagnose(loader._clock, probed, None, steps, cached=loader.cache is not None)


def _probed(loader: Any, seen: Clock | None) -> tuple[object, Probe | None]:
    """What a probe found, and of which state of the loader; ``seen`` is the epoch's, for the size of its batches."""
    loader._lift_again()
    if loader._source is None:
        raise UnsupportedDatasetError(f"a dataset that is asked for samples is not probed: {loader._not_lifted}")
    if loader.cache:
        raise ValueError("a loader with a cache is not probed, because what it can do changes as the cache fills")
    compiled = loader._compile()
    mean = round(seen.images / seen.batches) if seen and seen.batches else 1
    return compiled.state, probe_of(loader, compiled, max(mean, loader._declared_batch_size()))

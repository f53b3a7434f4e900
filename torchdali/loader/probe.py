"""Measure how fast a loader is alone: reading, decoding and transforming each, and all of them together.

DALI does not report the times of its operators, and on a GPU they run side by side. So each part runs as a pipeline of
its own, with several batches in flight as in an epoch. The probe counts the batches that come out in about two seconds.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from torchdali.errors import SampleError, UnsupportedDatasetError
from torchdali.loader.epoch import NativeIterator
from torchdali.loader.native_plan import NativePlan
from torchdali.loader.options import LoaderOptions
from torchdali.loader.session import Session, get_declared_batch_size
from torchdali.loader.stats import Probe
from torchdali.pipeline.clock import Clock
from torchdali.pipeline.engine import PipelineRunner
from torchdali.pipeline.fallback import fork_generators
from torchdali.pipeline.plan import Plan, View
from torchdali.pipeline.pool import PipelinePool
from torchdali.pipeline.readers import decode_with_pil
from torchdali.pipeline.windows import move_window
from torchdali.runtime import devices
from torchdali.samples.on_error import ErrorPolicy
from torchdali.sources.places import Places
from torchdali.state.context import EpochContext, LoaderView
from torchdali.state.generators import Generators
from torchdali.state.progress import EpochProgress
from torchdali.transforms import Input, Node, Ops, Rule
from torchdali.transforms.rng import Draws, epoch_key
from torchdali.transforms.rules.crop import Window
from torchdali.transforms.spec import InputKind, Inputs, IntArray, Spec

__all__ = ["probe_session"]

_SECONDS = 1.5
_BATCHES = 32
_MAX_FAILURES = 16
"""Maximum number of bad samples. A probe starts again after each."""
_IN_FLIGHT_BYTES = 2**30
_SCAN_THREADS = 16


class _WindowAlone(Window):
    """The crop of a first rule, which the decoder does, without the rest of the rule. The plan's own rule draws it."""

    def infer(self, spec: Spec) -> Spec:
        return spec


class _AfterWindow(Rule):
    """A first rule without its crop, which the decoder does.

    Args:
        rule: The first rule of a plan.
    """

    def __init__(self, rule: Window) -> None:
        super().__init__(rule.transform)
        self._rule = rule

    def infer(self, spec: Spec) -> Spec:
        return spec

    @property
    def inputs(self) -> dict[str, Input]:
        return {name: x for name, x in self._rule.inputs.items() if name not in ("start", "shape")}

    def lower(self, ops: Ops, image: Node, params: Mapping[str, Node]) -> Node:
        return self._rule.lower_window(ops, image, params)


def plan_reading(plan: Plan) -> Plan:
    """Return the plan reduced to reading files. It outputs no image."""
    return replace(plan, rules=(), views=(), container=None, decode_window=False)


def plan_decoding(plan: Plan) -> Plan:
    """Return the plan reduced to decoding files in memory. It outputs images (H, W, C)."""
    rules = (_WindowAlone(plan.rules[0].transform),) if plan.decode_window else ()
    return replace(plan, rules=rules, views=(View((), Spec(), True),), container=None, input_kind=InputKind.ENCODED)


def plan_transforms(plan: Plan) -> Plan:
    """Return the part of the plan after the decoder. Its input are images."""
    if plan.input_kind is InputKind.PIXELS:
        return plan
    first = plan.rules[0] if plan.rules else None
    if plan.decode_window and isinstance(first, Window):
        plan = replace(plan, rules=(_AfterWindow(first), *plan.rules[1:]))
    return replace(plan, input_kind=InputKind.PIXELS, decode_window=False)


def probe_session(
    loader: DataLoader[Any], options: LoaderOptions, session: Session, errors: ErrorPolicy, clock: Clock | None
) -> None:
    """Measure the speed of a loader alone, and store the result in its session.

    The order of samples, random numbers and global generators stay as they are. The result is None if no sample can be
    read.

    Args:
        loader: The loader.
        options: Its options.
        session: Its session, whose native plan is built if necessary.
        errors: Its policy for bad samples.
        clock: The clock of the current or latest epoch. It does not count the time of the probe.

    Raises:
        UnsupportedDatasetError: The dataset is worker-fed.
        ValueError: There is a cache.
        SampleError: A sample is damaged, and the loader neither skips nor replaces bad samples.
    """
    begin = perf_counter()
    try:
        if session.source is None:
            raise UnsupportedDatasetError(
                f"stats(probe=True) needs a native dataset, got a worker-fed one: {session.why_not_native}"
            )
        if options.cache:
            raise ValueError(
                "stats(probe=True) needs a loader without a cache, because its speed changes as the cache fills"
            )
        native = session.build_native_plan(options, loader)
        mean = round(clock.images / clock.batches) if clock and clock.batches else 1
        size = max(mean, get_declared_batch_size(loader))
        session.probe = native.key, _probe(loader, options, native, errors, size)
    finally:
        if clock:
            clock.skip(perf_counter() - begin)


def _probe(
    loader: DataLoader[Any], options: LoaderOptions, native: NativePlan, errors: ErrorPolicy, size: int
) -> Probe | None:
    count = len(native.source)
    bad = {error.index for error in errors.errors}
    failures = 0
    with fork_generators(native.device):
        while len(bad) < count:
            rows = _draw_batches(count, bad, size, native.prefetch_depth)
            try:
                return _ProbeRun(loader, options, native, size, rows).run()
            except SampleError as error:
                failures += 1
                if failures > _MAX_FAILURES or not errors.is_bad_sample(error):
                    raise
                bad.add(error.index)
    return None


def _draw_batches(count: int, bad: Iterable[int], size: int, depth: int) -> list[list[IntArray]]:
    """Return two lists of batches of rows, for the parts and for the whole. Both read different files."""
    batches = _BATCHES + 2 * depth + 8
    good = np.setdiff1d(np.arange(count), list(bad))
    rows = np.random.default_rng().choice(good, min(len(good), 2 * batches * size), replace=False)
    halves = np.array_split(rows, 2) if len(rows) > 1 else [rows, rows]
    return [list(np.resize(half, (batches, size)).astype(np.int64)) for half in halves]


@dataclass
class _ProbeRun:
    """One probe.

    Attributes:
        loader: The loader.
        options: Its options.
        native: Its plan.
        size: Samples in a batch.
        rows: Batches of samples: first those for reading, decoding and transforms, then those for all together.
    """

    loader: DataLoader[Any]
    options: LoaderOptions
    native: NativePlan
    size: int
    rows: list[list[IntArray]]

    def run(self) -> Probe:
        plan, reader = self.native.plan, self.native.reader
        read = decode = None
        with ExitStack() as resources:
            rows = self.rows[0][0]
            decodes = plan.input_kind.is_encoded
            if plan.input_kind is InputKind.FILES:
                read = self._measure_reading(plan_reading(plan))
            draws = Draws(epoch_key(0, 0), rows, np.zeros_like(rows))
            reader = reader.bind_draws(draws, plan)
            with ThreadPoolExecutor(_SCAN_THREADS) as threads:
                reader.scan(rows, lambda: threads).wait()
                pixels, decoding = decode_with_pil(reader, rows, reader.find_pil_only(rows), lambda: threads)
                decoding.wait()
            with devices.use(plan.device):
                images: Any = reader.read_inputs(rows, pixels, resources)
            inputs, _ = plan.draw(*plan.expand_frames(reader.add_params(draws), reader.sizes(rows)))
            inputs = move_window(plan, inputs, reader.origins(rows))
            if plan.input_kind is InputKind.FILES:
                images = [np.fromfile(row.tobytes().rstrip(b"\0"), np.uint8) for row in images]
            if isinstance(images, Places):
                images = images.views()
            if decodes:
                decode, images = self._measure_decoding(plan_decoding(plan), images, inputs)
            transform_plan = plan_transforms(plan)
            resident = self.native.reader.is_resident or (decodes and plan.device.type == "cuda")
            transforms, _ = self._measure_alone(
                transform_plan, itertools.repeat(images), inputs, self.native.prefetch_depth, resident
            )
        together, parts = self._measure_together()
        overlapping = plan.device.type == "cuda"
        return Probe(self.size, read, decode, transforms, together, parts, overlapping)

    def _measure_reading(self, plan: Plan) -> float:
        reader = self.native.reader
        requested: deque[IntArray] = deque(maxlen=self.native.prefetch_depth + 1)

        def paths() -> Iterator[Any]:
            with ExitStack() as resources:
                for rows in itertools.cycle(self.rows[0][1:]):
                    requested.append(rows)
                    yield reader.read_inputs(rows, {}, resources)

        try:
            return self._measure_alone(plan, paths(), {}, self.native.prefetch_depth)[0]
        except RuntimeError:
            for row in np.concatenate(requested).tolist():
                reader.check(row)
            raise

    def _measure_decoding(self, plan: Plan, files: Any, inputs: Inputs) -> tuple[float, list[Any]]:
        """Measure decoding. Return seconds a batch, and the images."""
        reader, rows = self.native.reader, self.rows[0][0]
        whole = 3 * int(reader.sizes(rows).prod(1).sum())
        depth = max(2, min(self.native.prefetch_depth, _IN_FLIGHT_BYTES // max(whole, 1)))
        try:
            seconds, images = self._measure_alone(plan, itertools.repeat(files), inputs, depth)
        except RuntimeError:
            for row in rows.tolist():
                reader.check(row)
            raise
        return seconds, [image.numpy() if plan.device.type == "cpu" else image for image in images]

    def _measure_alone(
        self, plan: Plan, images: Iterator[Any], inputs: Inputs, depth: int, resident: bool = False
    ) -> tuple[float, Any]:
        """Run a pipeline on these inputs. Return seconds a batch, and the last output."""
        threads = self.native.threads.choose(self.native.reader.input_stats())
        inputs = {name: inputs[name] for name in plan.inputs}
        views: Any = [[]]
        with closing(PipelineRunner(plan, self.size * plan.num_images, threads, resident)) as engine:

            def step() -> None:
                nonlocal views
                engine.submit(next(images), inputs)
                views = engine.take().views

            for _ in range(depth - 1):
                engine.submit(next(images), inputs)
            seconds = self._time(step, depth)
        return seconds, views[0] if views else None

    def _measure_together(self) -> tuple[float, dict[Any, float]]:
        """Run an epoch. Return seconds a batch, and those of them that the iterating thread spends on each part."""
        native = self.native
        pool = PipelinePool(native.plan, self.size, native.threads, native.reader.is_resident, native.pool.decode_bytes)
        epoch = NativeIterator(self._context(), replace(native, pool=pool)).start()
        try:
            seconds = self._time(lambda: next(epoch), native.prefetch_depth + 1)
        finally:
            epoch.close()
            pool.close()
        epoch.clock.read()
        return seconds, {part: spent / epoch.clock.timed.batches for part, spent in epoch.clock.parts.items()}

    def _context(self) -> EpochContext:
        """Return the context of an epoch that leaves the loader's samplers, generators and progress alone."""
        batches = [rows.tolist() for rows in self.rows[1]]
        first_rows = [batch[0] for batch in batches]
        whole = self.loader.batch_sampler is not None
        generator, view = torch.Generator(), LoaderView.from_loader(self.loader)
        index_sampler = batches if whole else first_rows
        proxy = SimpleNamespace(generator=generator, sampler=first_rows, batch_sampler=batches if whole else None)
        return EpochContext(
            replace(view, generator=generator, _index_sampler=index_sampler),
            EpochProgress(Generators(proxy), {}, 0),
            is_resumed=False,
            sampler=first_rows,
            stateful={},
            next_key=lambda _: epoch_key(0, 0),
            errors=ErrorPolicy("raise", None),  # the loader's own policy counts the errors of epochs
            batch_transform=self.options.batch_transform,
        )

    def _time(self, step: Callable[[], object], warmup: int) -> float:
        """Return seconds a step, after warmup steps."""
        for _ in range(warmup):
            step()
        begin, steps = self._read_time(), 0
        while steps < _BATCHES and perf_counter() - begin < _SECONDS:
            step()
            steps += 1
        return (self._read_time() - begin) / steps

    def _read_time(self) -> float:
        """Return the time after the GPU has finished its queue."""
        if self.native.device.type == "cuda":
            with devices.use(self.native.device):
                torch.cuda.current_stream(self.native.device).synchronize()
        return perf_counter()

"""The text of ``loader.explain()``, and the statistics of ``loader.stats()``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from torchdali.errors import TransformError
from torchdali.loader.native_plan import NativePlan
from torchdali.loader.options import LoaderOptions
from torchdali.loader.session import Session
from torchdali.loader.stats import Stats
from torchdali.loader.verdict import UNMEASURED, diagnose
from torchdali.pipeline import graph
from torchdali.pipeline.annotations import check_annotations
from torchdali.pipeline.cache.base import mib
from torchdali.pipeline.clock import Clock
from torchdali.pipeline.fallback import fork_generators
from torchdali.pipeline.plan import Plan, summarize_plans
from torchdali.pipeline.tuning import Threads
from torchdali.runtime import machine
from torchdali.runtime.columns import LABEL, Explanation
from torchdali.samples.annotations import find_annotations, find_labels_getters
from torchdali.samples.finder import RULE
from torchdali.samples.guard import unguard_collate
from torchdali.samples.image import RefusedError, to_image_input
from torchdali.samples.on_error import ErrorPolicy
from torchdali.samples.tree import build_tree, describe_sample, format_key_paths
from torchdali.state.sharding import Sharding
from torchdali.transforms.spec import NO_INPUT_STATS, InputStats
from torchdali.workers.unpacking import check_stackable
from torchdali.workers.unread import leave_images_unread, take_transforms
from torchdali.workers.validation import ProxyPlan, has_default_collate

__all__ = ["collect_stats", "describe_loader"]

Rows = dict[str, str]

_MAX_KEY_PATHS = 8
_UNKNOWN = "What runs in DALI is known after the first batch"
_RAISES = "What runs in DALI is not known: dataset[0] raises an exception"
_NO_IMAGE = "Nothing runs in DALI: dataset[0] has no image"
_FAILURE = 'The first batch will fail: the row "images" says why'


def describe_loader(
    loader: DataLoader[Any], options: LoaderOptions, session: Session, shards: Sharding, errors: ErrorPolicy
) -> Explanation:
    """Return what a loader will do: what runs in DALI, what to change, and the plan."""
    device = graph.resolve(options.device)
    rows = {"device": f"{_describe_device(options, device)}, fidelity {options.fidelity}", **shards.describe(loader)}
    timeout = f"{loader.timeout} s a batch" if loader.timeout else "none"
    if session.source is not None:
        native = session.build_native_plan(options, loader)
        answer, to_do = summarize_plans([native.plan])
        on_error = {"on error": errors.describe(native.reader.substitute), "timeout": timeout}
        rows |= _describe_native(loader, options, native, on_error)
    else:
        proxy = session.build_proxy_plan(options, loader)
        answer, to_do, others = _describe_worker_fed(loader, options, proxy, session.why_not_native)
        rows |= others | {"on error": errors.describe(), "timeout": timeout}
    rows |= {"driver": machine.describe_connections()} if device.type == "cuda" else {}
    lines = [f"{label:<{LABEL}}{row}" if label.strip() else row for label, row in rows.items()]
    return Explanation(answer, to_do, "\n".join(lines))


def collect_stats(loader: DataLoader[Any], options: LoaderOptions, session: Session, clock: Clock | None) -> Stats:
    """Return the statistics of an epoch, and of the latest probe if it measured the same plan."""
    if session.source is None:
        proxy = session.build_proxy_plan(options, loader)
        if clock is None and proxy is None:
            return UNMEASURED
        has_transform = proxy is not None and proxy.pipelines is not None
        return diagnose(clock, None, loader.num_workers, has_transform=has_transform)
    key, probe = session.probe or (None, None)
    plan = session.native_plan
    if plan is not None and plan.key != key:
        probe = None
    return diagnose(clock, probe, None, plan.plan.steps if plan else (), has_cache=options.cache is not None)


def _describe_device(options: LoaderOptions, device: torch.device) -> str:
    """Return the device of the batches, and why it was chosen."""
    if options.device == "auto" and device.type == "cuda" and device.index != torch.cuda.current_device():
        return f"{device} (LOCAL_RANK; torch's current device is cuda:{torch.cuda.current_device()})"
    is_fallback = device.type == "cpu" and options.device == "auto"
    reason = graph.explain_unavailability(torch.device("cuda")) if is_fallback else None
    return f"{device} ({reason})" if reason else str(device)


def _describe_native(loader: DataLoader[Any], options: LoaderOptions, native: NativePlan, on_error: Rows) -> Rows:
    plan, source = native.plan, native.source
    no_effect = ["worker_init_fn, multiprocessing_context, in_order: there are no worker processes"]
    if loader.persistent_workers:
        no_effect.append("persistent_workers, but that the base seed stays, as in DataLoader")
    if plan.device.type == "cuda":
        no_effect.append("pin_memory: batches are on the device")
    return {
        "source": f"{source.describe()}; its targets do not pass through DALI",
        **({"decode": decoding} if (decoding := native.reader.describe_decoding(plan)) else {}),
        "": str(plan),
        **({"targets": _describe_moves(native)} if source.annotations else {}),
        "output": _describe_output(plan, are_sounds=source.spec.kind == "waveform"),
        "collate": f"{_get_function_name(loader.collate_fn)}, in this process",
        **_describe_batch_transform(options),
        "random": _describe_random(options, "index, occurrence, transform"),
        **({"cache": native.cache.describe()} if native.cache else {}),
        "threads": _describe_threads(native.threads, native.reader.input_stats()),
        "prefetch": f"depth {native.prefetch_depth} batches ("
        + (
            "prefetch_factor)"
            if options.prefetch_depth
            else "chosen: 6, or what fits 1 GiB and an eighth of the free memory)"
        ),
        **_describe_memory(options, native.pool.decode_bytes if plan.input_kind.is_encoded else None),
        **on_error,
        "no effect": "; ".join(no_effect),
    }


def _describe_moves(native: NativePlan) -> str:
    """Return how the boxes, masks and key points of a native dataset move."""
    names = ", ".join(sorted(kind.__name__ for kind in native.source.annotations))
    alone = "; transform= of the dataset is for images alone" if native.source.transform is not None else ""
    return _describe_targets(names, [native.plan]) + ("" if native.source.is_joint else alone)


def _describe_worker_fed(
    loader: DataLoader[Any], options: LoaderOptions, proxy: ProxyPlan | None, why: str
) -> tuple[str, str, Rows]:
    """Return what runs in DALI, what to change, and the rows."""
    workers = "1 worker process" if loader.num_workers == 1 else f"{loader.num_workers} worker processes"
    origin = workers if loader.num_workers else "this process (num_workers=0)"
    rows = {"source": f"{type(loader.dataset).__name__}, worker-fed: its samples come from {origin}, as in DataLoader"}
    rows["not native"] = why
    if proxy is None or proxy.pipelines is None:
        rows["transforms"] = "none of the loader; those of the dataset run where its samples are made"
        rows["collate"] = f"{_get_function_name(loader.collate_fn)}, where the samples are made"
        device = "cpu" if proxy is None else str(proxy.device)
        copy = "" if device == "cpu" else f", then copied to {device} from pinned memory, on a stream of its own"
        rows = {**rows, "output": f"as DataLoader's{copy}", **_describe_batch_transform(options)}
        return "Nothing runs in DALI: give transform= to the loader", _describe_movable(loader.dataset), rows
    rows["images"], rows["targets"], plans, problem = _describe_images(loader, proxy)
    if not rows["targets"]:
        del rows["targets"]
    answer, to_do = summarize_plans(plans) if plans else (problem, "")
    if not proxy.takes_transforms:
        to_do = "; ".join(filter(None, (to_do, _describe_remaining(loader.dataset))))
    rows |= {("" if i == 0 else " " * i): str(plan) for i, plan in enumerate(plans)}
    if has_default_collate(loader) and "targets" in rows:
        rows["collate"] = (
            f"{_get_function_name(loader.collate_fn)}, in this process: boxes and masks may differ in shape"
        )
    elif has_default_collate(loader):
        rows["collate"] = f"{_get_function_name(loader.collate_fn)}, where the samples are made, of all but the images"
    else:
        cost = "; so all else in a sample crosses from the workers piece by piece, and one core collates it"
        rows["collate"] = (
            f"{_get_function_name(loader.collate_fn)}, in this process, on the list of samples with the transformed "
            f"images in their places{cost if loader.num_workers else ''}"
        )
    counter = "index, occurrence, transform"
    if isinstance(loader.dataset, IterableDataset):
        counter = "worker, place in its stream, transform"
    prefetch = (
        f"depth {proxy.prefetch_depth} batches in DALI, beside those of the workers"
        if loader.num_workers
        else "depth 0: no batch is made ahead"
    )
    rows = {
        **rows,
        "output": "; ".join(dict.fromkeys(map(_describe_output, plans))) or "images as the transforms leave them",
        **_describe_batch_transform(options),
        "random": _describe_random(options, counter) + "; the dataset's own numbers as in DataLoader",
        "threads": "; ".join(
            dict.fromkeys(_describe_threads(proxy.pipelines.threads(plan.input_kind)) for plan in plans)
        )
        or "not known before the first batch",
        "prefetch": prefetch,
        **_describe_memory(options, proxy.pipelines.decode_bytes),
    }
    return answer, to_do, rows


def _describe_memory(options: LoaderOptions, decode_bytes: int | None) -> Rows:
    """Return the limit of a run's memory; nothing if files are not decoded."""
    origin = "decode_bytes" if options.decode_bytes else "chosen: a 128th of the free memory, 192 MiB to 1 GiB"
    text = f"files and decoded images of a run take at most {mib(decode_bytes or 0)} ({origin})"
    return {"memory": f"{text}; a batch of more is several runs"} if decode_bytes else {}


def _describe_movable(dataset: Any) -> str:
    """Return what to move to the loader, if a dataset has a transform of torchvision's; empty if it has none."""
    if not (name := _find_transform(dataset)):
        return ""
    return (
        f"return images without {name}, and give it to the loader as transform=; wrap masks in tv_tensors.Mask, or "
        "they are images too"
    )


def _describe_remaining(dataset: Any) -> str:
    """Return which transform of a dataset runs before those of the loader; empty if it has none."""
    name = _find_transform(dataset)
    return f"{name} runs too, before transform=: remove it there if it is the same" if name else ""


def _find_transform(dataset: Any) -> str:
    """Return the name of a dataset's attribute that is a transform of torchvision's; empty if it has none."""
    while isinstance(dataset, Subset):
        dataset = cast("Any", dataset).dataset
    for name, value in getattr(dataset, "__dict__", {}).items():
        if type(value).__module__.startswith("torchvision.transforms"):
            return f"{type(dataset).__name__}.{name}"
    return ""


def _describe_threads(threads: Threads, stats: InputStats = NO_INPUT_STATS) -> str:
    return f"{threads.choose(stats)} of DALI ({threads.explain(stats)})"


def _describe_targets(annotations: str, plans: Sequence[Plan]) -> str:
    """Return how boxes, masks and key points move; empty if there are none."""
    in_torch = ", then in torch, as whole samples" if any(plan.suffix for plan in plans) else ""
    return f"{annotations}: they move with the image, on the host{in_torch}" if annotations else ""


def _describe_images(loader: DataLoader[Any], proxy: ProxyPlan) -> tuple[str, str, Sequence[Plan], str]:
    """Return where the images are in a sample, their boxes and masks, their plans, and why there are none.

    Use the batches so far, or else the first sample.
    """
    assert proxy.pipelines is not None
    if keys := list(proxy.pipelines):
        kinds = [f"{spec} ({input_kind})" for spec, input_kind in keys]
        key_paths = list(dict.fromkeys(path for paths in proxy.key_paths.values() for path in paths))
        more = ", ..." if len(key_paths) > _MAX_KEY_PATHS else ""
        location = (
            f"at {format_key_paths(key_paths[:_MAX_KEY_PATHS])}{more}" if key_paths else "wherever a sample has them"
        )
        plans = [proxy.pipelines.plans.get_for_samples(key, bool(proxy.annotations)) for key in keys]
        return f"{location}: {', '.join(kinds)}", _describe_targets(proxy.annotations, plans), plans, ""
    if isinstance(loader.dataset, IterableDataset):
        return f"not known before the first batch: {RULE}", "", [], _UNKNOWN
    try:
        with fork_generators(proxy.device):
            dataset = take_transforms(loader.dataset)[1] if proxy.takes_transforms else loader.dataset
            sample = leave_images_unread(dataset)[0]
    except Exception as error:  # noqa: BLE001 - a dataset may raise anything, and explain() must not fail
        return f"not known before the first batch (dataset[0] raises {error!r}): {RULE}", "", [], _RAISES
    parts = build_tree(sample)
    try:
        images = proxy.finder.find(parts)
        annotations = find_annotations(parts, find_labels_getters(proxy.pipelines.plans.chain))
        if annotations.moved:
            check_annotations(proxy.pipelines.plans.chain, annotations.kinds)
    except (TransformError, ValueError) as error:
        return f"the first batch will fail: {error}", "", [], _FAILURE
    if not images:
        return f"none in dataset[0], which is {describe_sample(parts)}: {RULE}", "", [], _NO_IMAGE
    location = format_key_paths([key_path for key_path, _ in images])
    try:
        first, turns = proxy.pipelines.plans.first, proxy.pipelines.plans.adjust_orientation
        keys = list(dict.fromkeys(to_image_input(leaf, first, turns).key for _, leaf in images))
    except RefusedError as error:
        return f"at {location}, of which one cannot be taken: {error}", "", [], _FAILURE
    kinds = [f"{spec} ({input_kind})" for spec, input_kind in keys]
    plans = [proxy.pipelines.plans.get_for_samples(key, bool(annotations.moved)) for key in keys]
    try:
        for plan in plans if has_default_collate(loader) and loader.batch_sampler is not None else ():
            check_stackable(plan)
    except TransformError as error:
        return f"at {location}; the first batch will fail: {error}", "", [], _FAILURE
    found = f"at {location} of dataset[0]: {', '.join(kinds)}; {proxy.finder.explain(parts, images)}"
    return found, _describe_targets(annotations.describe(), plans), plans, ""


def _describe_output(plan: Plan, are_sounds: bool = False) -> str:
    plan = plan.last
    noun = "waveforms" if plan.spec.kind == "waveform" else "spectrograms" if are_sounds else "images"
    if plan.suffix:
        return f"{'sounds' if are_sounds else 'images'} as torch leaves them"
    images = f"{noun} {plan.spec}" if plan.container is None else f"{len(plan.views)} views, each as above"
    return f"{images}, batch in front, contiguous"


def _describe_batch_transform(options: LoaderOptions) -> Rows:
    return {"batch": f"{options.batch_transform!r}, torch, after collate"} if options.batch_transform else {}


def _describe_random(options: LoaderOptions, counter: str) -> str:
    key = f"seed {options.seed}, epoch" if options.seed is not None else "DataLoader's base seed of the epoch"
    return f"Philox4x32-10 keyed by {key}, {counter}"


def _get_function_name(function: Any) -> str:
    function = unguard_collate(function)
    return getattr(function, "__name__", repr(function))

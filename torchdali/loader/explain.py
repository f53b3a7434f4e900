"""What ``loader.explain()`` says: each row a label and what the loader will do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchdali.loader.epoch import Compiled
from torchdali.pipeline import graph
from torchdali.pipeline.fallback import seeded
from torchdali.pipeline.plan import Plan
from torchdali.pipeline.tuning import Threads
from torchdali.samples.image import RefusedError, to_image_input
from torchdali.samples.tree import images_of, tree
from torchdali.transforms.spec import NOTHING_SEEN, InputStats
from torchdali.workers.packing import listed, outline
from torchdali.workers.validation import ProxyPlan, stacks

__all__ = ["device_of", "lifted", "proxied"]

Rows = dict[str, str]

_RULE = (
    "all PIL images and tv_tensors.Image of a sample, else the first array (H, W, C), tensor (C, H, W), encoded file "
    "or pathlib.Path"
)


def device_of(loader: Any, found: torch.device) -> str:
    """Where batches are made, and why."""
    if loader.device == "auto" and found.type == "cuda" and found.index != torch.cuda.current_device():
        return f"{found} (LOCAL_RANK; torch's current device is cuda:{torch.cuda.current_device()})"
    asked = found.type == "cpu" and loader.device == "auto"
    reason = graph.unavailable_on(torch.device("cuda")) if asked else None
    return f"{found} ({reason})" if reason else str(found)


def lifted(loader: Any, compiled: Compiled, window: int | None) -> Rows:
    """For a dataset that is read without asking it for samples; ``window`` is the user's."""
    plan, source = compiled.plan, compiled.source
    no_effect = ["worker_init_fn, multiprocessing_context, in_order: there are no worker processes"]
    if loader.persistent_workers:
        no_effect.append("persistent_workers, but that the base seed stays, as in DataLoader")
    if plan.device.type == "cuda":
        no_effect.append("pin_memory: batches are on the device")
    return {
        "source": f"{source.description}; its targets do not pass through DALI",
        "": str(plan),
        "output": _output(plan),
        "collate": f"{_named(loader.collate_fn)}, in this process",
        **_batch_transform(loader),
        "random": _random(loader, "index, occurrence, transform"),
        **({"cache": compiled.cache.describe()} if compiled.cache else {}),
        "threads": _threads(compiled.threads, source.seen()),
        "window": f"{compiled.window} batches in flight ("
        + ("prefetch_factor)" if window else "chosen: 6, or what fits 1 GiB and an eighth of the free memory)"),
        **_on_error(loader),
        "no effect": "; ".join(no_effect),
    }


def proxied(loader: Any, proxy: ProxyPlan | None, not_lifted: str) -> Rows:
    """For a dataset that is asked for samples; ``proxy`` is None where DataLoader does all there is to do."""
    workers = "1 worker process" if loader.num_workers == 1 else f"{loader.num_workers} worker processes"
    where = workers if loader.num_workers else "this process (num_workers=0)"
    rows = {"source": f"{type(loader.dataset).__name__}, asked for samples in {where}, as DataLoader does"}
    rows["not read"] = not_lifted
    if proxy is None or proxy.routes is None:
        rows["transforms"] = "none: without transform= nothing runs in DALI"
        rows["collate"] = f"{_named(loader.collate_fn)}, where the dataset is asked"
        device = "cpu" if proxy is None else str(proxy.device)
        moved = "" if device == "cpu" else f", then copied to {device} from pinned memory, on a stream of its own"
        return {**rows, "output": f"as DataLoader's{moved}", **_batch_transform(loader), **_on_error(loader)}
    places, plans = _images(loader, proxy)
    rows["images"] = places
    rows |= {("" if i == 0 else " " * i): str(plan) for i, plan in enumerate(plans)}
    if stacks(loader):
        rows["collate"] = f"{_named(loader.collate_fn)}, where the dataset is asked, of all but the images"
    else:
        crossing = "; so all else in a sample crosses from the workers piece by piece, and one core collates it"
        rows["collate"] = (
            f"{_named(loader.collate_fn)}, in this process, on the list of samples with the transformed images in "
            f"their places{crossing if loader.num_workers else ''}"
        )
    iterable = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    keyed = "worker, place in its stream, transform" if iterable else "index, occurrence, transform"
    ahead = f"{proxy.window} batches in DALI, beside those of the workers" if loader.num_workers else "no batch ahead"
    return {
        **rows,
        "output": "; ".join(dict.fromkeys(map(_output, plans))) or "images as the transforms leave them",
        **_batch_transform(loader),
        "random": _random(loader, keyed) + "; the dataset's own numbers as in DataLoader",
        "threads": "; ".join(dict.fromkeys(_threads(proxy.routes.threads(plan.entry)) for plan in plans))
        or "not known before the first batch",
        "window": ahead,
        **_on_error(loader),
    }


def _threads(threads: Threads, seen: InputStats = NOTHING_SEEN) -> str:
    return f"{threads.number(seen)} of DALI ({threads.why(seen)})"


def _images(loader: Any, proxy: ProxyPlan) -> tuple[str, Sequence[Plan]]:
    """Where the images are and what is done with them: known from batches, or from a look at the first sample."""
    assert proxy.routes is not None
    if routes := list(proxy.routes):
        kinds = [f"{spec} ({entry})" for spec, entry, _ in routes]
        at = listed(proxy.places) if proxy.places else "where a sample has them"
        return f"at {at}: {', '.join(kinds)}", [proxy.routes.pool(route).plan for route in routes]
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return f"not known before the first batch: {_RULE}", []
    try:
        with seeded(proxy.device):
            sample = loader.dataset[0]
    except Exception as error:  # noqa: BLE001 - the dataset's own, of any kind; to explain is not to fail
        return f"not known before the first batch (dataset[0] raises {error!r}): {_RULE}", []
    parts = tree(sample)
    found = images_of(parts)
    if not found:
        return f"none in dataset[0], which is {outline(parts)}: {_RULE}", []
    try:
        routes = list(dict.fromkeys(to_image_input(leaf, proxy.routes.first).route for _, leaf in found))
    except RefusedError as error:
        return f"at {listed([place for place, _ in found])}, of which one cannot be taken: {error}", []
    kinds = [f"{spec} ({entry})" for spec, entry in routes]
    at = listed([place for place, _ in found])
    return f"at {at} of dataset[0]: {', '.join(kinds)}", [proxy.routes.plan(*route) for route in routes]


def _on_error(loader: Any) -> Rows:
    timeout = f"{loader.timeout} s a batch" if loader.timeout else "none"
    return {"on error": loader._tolerance.explained(), "timeout": timeout}  # noqa: SLF001


def _output(plan: Plan) -> str:
    if plan.suffix:
        return "images as torch leaves them"
    images = f"images {plan.spec}" if plan.container is None else f"{len(plan.views)} views, each as above"
    return f"{images}, batch in front, contiguous"


def _batch_transform(loader: Any) -> Rows:
    return {"batch": f"{loader.batch_transform!r}, torch, after collate"} if loader.batch_transform else {}


def _random(loader: Any, counter: str) -> str:
    key = f"seed {loader.seed}, epoch" if loader.seed is not None else "DataLoader's base seed of the epoch"
    return f"Philox4x32-10 keyed by {key}, {counter}"


def _named(function: Any) -> str:
    return getattr(function, "__name__", repr(function))

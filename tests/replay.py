"""Runs a chain through DALI and hands out, sample by sample, what torchvision makes of the same numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from PIL import Image
from torchvision.transforms.v2 import functional as F

from torchdali.engine import EnginePool
from torchdali.feed import Batch, Feed
from torchdali.plan import Plan, compile_plan, fuse
from torchdali.rng import epoch_key
from torchdali.sources import lift


class Pair(NamedTuple):
    ours: torch.Tensor
    theirs: torch.Tensor


def compiled(chain: Sequence[Any], device: str | torch.device = "cpu", fused: bool = True, fidelity="exact") -> Plan:
    device = torch.device("cuda", 0) if str(device) == "cuda" else torch.device(device)
    plan = compile_plan(list(chain), device, fidelity)
    return fuse(plan) if fused else plan


def run(dataset: Any, plan: Plan, batches: Sequence[Sequence[int]], seed: int = 0) -> Iterator[Batch]:
    source = lift(dataset)
    feed = Feed(source, EnginePool(plan, max(map(len, batches)), 2), epoch_key(seed, 0), window=3, timeout=0)
    for indices in batches:
        feed.push(indices)
    for _ in batches:
        yield feed.pop()
    feed.close()


def pairs(dataset: Any, chain: Sequence[Any], device: str = "cpu", size: int = 6) -> Iterator[Pair]:
    """Every sample of a dataset, by DALI and by torchvision's functionals with the drawn parameters."""
    plan = compiled(chain, device)
    assert not plan.suffix, str(plan)
    source = lift(dataset)
    indices = list(range(len(source)))
    batches = [indices[i : i + size] for i in range(0, len(indices), size)]
    for batch in run(dataset, plan, batches):
        for row, index in enumerate(batch.index.tolist()):
            image = F.pil_to_tensor(Image.open(source.path(index)).convert("RGB"))
            for rule, params in zip(plan.rules, batch.params, strict=True):
                image = rule.replay(image, {name: values[row] for name, values in params.items()})
            yield Pair(batch.images[row].cpu(), image)

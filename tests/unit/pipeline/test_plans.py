"""Plans are compiled and drawn without the device: workers do so, and must not use CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from helpers.chains import make
from torchvision.transforms import v2

from torchdali import TransformError
from torchdali.pipeline.plans import PlanCache
from torchdali.transforms import SampleTransformError
from torchdali.transforms.rng import Draws, epoch_key
from torchdali.transforms.spec import InputKind, Spec

pytestmark = pytest.mark.filterwarnings("ignore")  # of what is in the random chains
CUDA = torch.device("cuda", 0)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every use of CUDA fail, as it does in a forked worker."""

    def fail() -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "_lazy_init", fail)
    monkeypatch.setattr(torch.cuda, "_initialized", False)


@pytest.mark.usefixtures("no_cuda")
def test_no_chain_needs_cuda_before_it_runs() -> None:
    """Neither random ones, nor one whose matrix torch multiplies on the GPU."""
    whiten = v2.LinearTransformation(torch.eye(12), torch.zeros(12))
    assert draw([v2.RandomResizedCrop(2), v2.ToImage(), v2.ToDtype(torch.float32), whiten], Spec())
    drawn = 0
    for seed in range(150):
        chain = make(seed)
        with suppress(TransformError, SampleTransformError):  # crops that are larger than the image, and so on
            drawn += draw(chain.transforms, chain.spec)
    assert drawn > 75


def draw(chain: Sequence[Any], spec: Spec) -> bool:
    """Draw for two samples. Return whether anything is fed for them."""
    plan = PlanCache(chain, CUDA, "exact").get((spec, InputKind.PIXELS))
    rows = np.arange(2)
    inputs, _ = plan.draw(Draws(epoch_key(0, 0), rows, rows * 0), np.array([[60, 90], [81, 70]]))
    return bool(inputs)


def test_a_plan_is_compiled_once() -> None:
    plans = PlanCache([v2.RandomCrop(8)], torch.device("cpu"), "exact")
    key = Spec(), InputKind.FILES
    assert plans.get(key) is plans.get(key)
    assert plans.get_for_samples(key, have_annotations=True) is plans.get(key)

"""Python functions that a run of DALI calls on the CPU."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Script
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import InterpolationMode, v2

from torchdali import DALILoader, PipelineError
from torchdali.pipeline.host_calls import HostCalls
from torchdali.runtime import lifecycle
from torchdali.transforms.rules.resize import Resampling

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_results_are_in_order(threads: int, count: int) -> None:
    calls = HostCalls(lambda image, side: image * side, threads)
    images, sides = np.arange(count), np.arange(count) + 1
    assert calls(list(images), list(sides)) == list(images * sides)
    calls.close()


def test_torch_computes_in_the_calling_thread_alone() -> None:
    """Else 16 callers on 16 cores would start 256 threads."""
    before = torch.get_num_threads()
    seen: list[int] = []

    def observe() -> None:
        seen.append(torch.get_num_threads())

    torch.set_num_threads(3)
    try:
        calls = HostCalls(lambda _: torch.get_num_threads(), 4)
        assert calls([0] * 32) == [1] * 32
        calls.close()
        later = threading.Thread(target=observe)
        later.start()
        later.join()
        assert seen == [torch.get_num_threads()] == [3]
    finally:
        torch.set_num_threads(before)


def test_threads_end_with_the_loader(dataset: ImageFolder) -> None:
    dataset.transform = v2.Compose([v2.ToImage(), v2.Resize((16, 16))])
    others = {*threading.enumerate()}  # of tests in other files
    loader = DALILoader(dataset, 8, num_workers=2, device="cpu")
    list(loader)
    names = {thread.name for thread in {*threading.enumerate()} - others}
    assert any(name.startswith(lifecycle.HOST_THREADS) for name in names)
    loader.close()
    names = {thread.name for thread in {*threading.enumerate()} - others}
    assert not any(name.startswith(lifecycle.HOST_THREADS) for name in names)


def test_an_error_ends_the_epoch_alone(dataset: ImageFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset.transform = v2.Compose([v2.ToImage(), v2.Resize((16, 16))])
    loader = DALILoader(dataset, 8, device="cpu")

    def fail(*args: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Resampling, "_resize", fail)
        with pytest.raises(PipelineError, match="no room"):
            list(loader)
    assert len(list(DALILoader(dataset, 8, device="cpu"))) == 3


@pytest.mark.parametrize("kind", ["tensor", "PIL"])
@pytest.mark.parametrize("mode", [InterpolationMode.BILINEAR, InterpolationMode.BICUBIC])
@pytest.mark.parametrize("fidelity", ["exact", "fast"])
def test_the_cpu_resizes_bit_for_bit_as_torchvision(
    dataset: ImageFolder, kind: str, mode: InterpolationMode, fidelity: str
) -> None:
    resize = [v2.Resize((19, 31), mode), v2.Resize(23, mode, antialias=kind == "PIL" or mode.value == "bicubic")]
    for one in resize:
        dataset.transform = v2.Compose([v2.ToImage(), one] if kind == "tensor" else [one, v2.ToImage()])
        samples, loader = DataLoader(dataset, None), DALILoader(dataset, 1, device="cpu", fidelity=fidelity)
        assert len(samples) == len(loader)
        for (image, _), (ours, _) in zip(samples, loader, strict=True):
            assert torch.equal(image, ours[0])


COLLECT = """
import gc, sys, threading, time, weakref
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchdali import DALILoader
from torchdali.transforms.rules.resize import Resampling

resize, dropped, collected, calls = Resampling._resize, threading.Event(), threading.Event(), []

def collect(*args):
    calls.append(1)
    if len(calls) > few:
        dropped.wait()
        gc.collect()
        collected.set()
    return resize(*args)

Resampling._resize, few = collect, 1000
gc.disable()
dataset = ImageFolder(sys.argv[1], v2.Compose([v2.ToImage(), v2.Resize((16, 16))]))
loader = DALILoader(dataset, 4, num_workers=int(sys.argv[2]), prefetch_factor=4, device="cpu")
list(loader)  # headers are known then, and a batch waits for no thread that reads them
few = len(calls) + 8
iterator = iter(loader)
next(iterator)
cycle, gone = [loader, iterator], weakref.ref(loader)
cycle.append(cycle)
del loader, iterator, cycle
dropped.set()
collected.wait()
while any(thread.name.startswith("torchdali") for thread in threading.enumerate()):
    time.sleep(0.01)
print("gone" if gone() is None else "still there")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "threads",
    [pytest.param(1, id="DALI's thread"), pytest.param(2, id="a thread of ours")],
)
def test_a_thread_that_a_run_waits_for_may_collect_the_loader(pictures: Path, threads: int, run_script: Script) -> None:
    """Not only is nothing stuck: DALI aborts the process if one of its threads waits for itself."""
    done = run_script(COLLECT, pictures, threads, timeout=50)
    assert (done.returncode, done.stdout) == (0, "gone\n"), done.stderr[-2000:]

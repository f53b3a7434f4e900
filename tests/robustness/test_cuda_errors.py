"""CUDA beside a loader: its errors that stay, and graphs that are captured while batches are made."""

from __future__ import annotations

import re

import pytest
import torch
from conftest import assert_pairs, in_order
from torch import nn
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader
from torchdali.pipeline import graph
from torchdali.runtime import devices

pytestmark = pytest.mark.timeout(120)

WRONG_LABEL = """
import sys
from torch import nn
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchdali import DALILoader

chain = v2.Compose([v2.CenterCrop(24), v2.ToImage(), v2.ToDtype(__import__("torch").float32, scale=True)])


def train(loader):
    for images, labels in loader:
        nn.functional.cross_entropy(images.flatten(1)[:, :2], labels).item()  # of three classes


with DALILoader(ImageFolder(sys.argv[1], chain), batch_size=3, shuffle=True) as loader:
    train(loader)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_an_assertion_in_a_kernel_of_the_training_step_ends_the_process(run_script, pictures, seed):
    """DALI would wait for ever for the runs that were in flight, with the traceback on the screen."""
    done = run_script(WRONG_LABEL, str(pictures), CUDA_LAUNCH_BLOCKING="1", PYTHONHASHSEED=str(seed))
    assert done.returncode
    assert re.search(r"Assertion `t >= 0 && t < n_classes` failed", done.stderr + done.stdout)
    assert re.search(r"in train\n.*cross_entropy.*\n", done.stderr)


@pytest.mark.parametrize("in_flight", [True, False])
def test_a_pipeline_on_a_device_that_failed_is_left_to_itself(in_flight, dataset, monkeypatch):
    leaked = []
    leak = graph.leak
    monkeypatch.setattr(graph, "leak", lambda pipeline: (leaked.append(pipeline), leak(pipeline)))
    loader = DALILoader(dataset, batch_size=3, device="cpu")
    batches = iter(loader)
    shown = [next(batches)] if in_flight else list(batches)
    with monkeypatch.context() as patched:
        patched.setattr(devices, "has_failed", lambda index: True)
        loader.close()
    assert len(set(map(id, leaked))) == 1
    assert_pairs(shown, dataset, in_order()[: len(shown)])
    assert_pairs(loader, dataset, in_order())


@pytest.fixture
def step():
    """A step of a model, with its input where a graph reads it."""
    net = nn.Conv2d(3, 8, 3).cuda()
    given = torch.zeros(3, 3, 24, 24, device="cuda")
    net(given)  # cuDNN chooses its algorithm outside of the graph
    torch.cuda.synchronize()
    return net, given


@pytest.mark.gpu
@pytest.mark.parametrize("taken", [0, 1, 2])
def test_a_graph_is_captured_while_batches_are_made(taken, step, dataset):
    """Of this thread, as torch.compile does it; DALI's threads meanwhile ask CUDA for memory and wait for it."""
    net, given = step
    for _ in range(3):
        batches = iter(DALILoader(dataset, batch_size=3))
        shown = [next(batches) for _ in range(taken)]
        captured = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(captured, capture_error_mode="thread_local"):
            for _ in range(50):
                made = net(given)
        given.copy_(torch.rand_like(given))
        captured.replay()
        assert torch.allclose(made, net(given), atol=1e-4)
        assert_pairs([*shown, *batches], dataset, in_order())


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch.compile's own imports
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # which torch.compile begins with
def test_torch_compile_that_captures_graphs(pictures):
    """Also of the last, short batch, in the midst of the first epoch."""
    dataset = ImageFolder(
        pictures, v2.Compose([v2.CenterCrop(24), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    )
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten()).cuda()
    compiled, loader = torch.compile(net, mode="reduce-overhead"), DALILoader(dataset, batch_size=5)
    for _ in range(3):
        for images, _labels in loader:
            made = compiled(images)
            made.sum().backward()
            assert torch.allclose(made.detach(), net(images).detach(), atol=1e-2)
            net.zero_grad()  # they are outputs of a graph, which the next step would overwrite

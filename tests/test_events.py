"""What a forked process inherits of CUDA, and must not free."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdali
from torchdali.events import Event, FreedAtHome

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


class Box(FreedAtHome, list[Any]):
    """Lets go of what it holds when it is freed."""


def in_a_cycle(box: Box) -> None:
    box.append(box)


def in_a_cycle_with_another(box: Box) -> None:
    other: list[Any] = [box]
    box.append(other)


def alone(_: Box) -> None:
    """As it is."""


@pytest.mark.parametrize("tie", [alone, in_a_cycle, in_a_cycle_with_another])
def test_only_the_process_that_made_it_frees_it(tie: Callable[[Box], None]) -> None:
    content = object()
    alone = sys.getrefcount(content)
    box = Box()
    box.append(content)
    tie(box)
    child = os.fork()
    if not child:
        del box
        gc.collect()
        os._exit(sys.getrefcount(content) - alone)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    del box
    gc.collect()
    assert sys.getrefcount(content) == alone


def test_the_process_that_made_it_ends_without_a_word(run_script: Any) -> None:
    done = run_script("from torchdali.events import FreedAtHome\nkept = FreedAtHome()\nkept.itself = kept")
    assert (done.returncode, done.stderr) == (0, "")


def test_no_event_is_made_that_a_forked_process_could_free() -> None:
    """In what a loader keeps; the benchmark's own are freed where they are made."""
    package = Path(torchdali.__file__).parent
    for module in package.rglob("*.py"):
        if module.parent.name not in ("bench", "demo", "commands"):
            assert not re.search(r"record_event\(\)|torch\.cuda\.Event\(", module.read_text()), module


@pytest.mark.gpu
def test_a_forked_process_drops_an_event() -> None:
    event = Event(enable_timing=True)
    event.record()
    child = os.fork()
    if not child:
        del event
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    torch.cuda.synchronize()
    assert event.query()

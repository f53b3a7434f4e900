"""What a forked process inherits of CUDA, and must not free."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import torchdali

pytestmark = pytest.mark.timeout(60)


# In processes of their own: a child of this one would collect whatever other tests left behind.
FORKS = """
import gc, os, sys
from torchdali.runtime.events import OwnedByProcess

class Box(OwnedByProcess, list):
    "Lets go of what it holds when it is freed."

def alone(box):
    pass

def in_a_cycle(box):
    box.append(box)

def in_a_cycle_with_another(box):
    box.append([box])

content = object()
before = sys.getrefcount(content)
box = Box()
box.append(content)
globals()[sys.argv[1]](box)
child = os.fork()
if not child:
    del box
    gc.collect()
    os._exit(sys.getrefcount(content) - before)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
del box
gc.collect()
print(sys.getrefcount(content) - before)
"""


@pytest.mark.parametrize("tie", ["alone", "in_a_cycle", "in_a_cycle_with_another"])
def test_only_the_process_that_made_it_frees_it(run_script: Any, tie: str) -> None:
    done = run_script(FORKS, tie, PYTHONWARNINGS="ignore::DeprecationWarning")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "1\n0\n")


def test_the_process_that_made_it_ends_without_a_word(run_script: Any) -> None:
    done = run_script(
        "from torchdali.runtime.events import OwnedByProcess\nkept = OwnedByProcess()\nkept.itself = kept"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_no_event_is_made_that_a_forked_process_could_free() -> None:
    """In what a loader keeps; the benchmark's own are freed where they are made."""
    package = Path(torchdali.__file__).parent
    for module in package.rglob("*.py"):
        if module.parent.name not in ("bench", "demo", "commands"):
            assert not re.search(r"record_event\(\)|torch\.cuda\.Event\(", module.read_text()), module


RENEWED = """
import os, sys
from torchdali.runtime.lifecycle import Resource

class Counted(Resource):
    renewed = 0

    def renew(self):
        self.renewed += 1

kept, dropped = Counted(), Counted()
del dropped
child = os.fork()
if not child:
    os._exit(kept.renewed)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), kept.renewed)
"""


def test_only_the_child_of_a_fork_renews_its_resources(run_script: Any) -> None:
    done = run_script(RENEWED, PYTHONWARNINGS="ignore::DeprecationWarning")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "1 0\n")


ABANDONED = """
from torchdali.runtime import lifecycle

class Said(lifecycle.Resource):
    def abandon(self):
        print("abandoned")

kept = Said()
lifecycle.install_exit_hook()
lifecycle.install_exit_hook()
print("end")
"""


def test_resources_are_abandoned_once_at_the_end(run_script: Any) -> None:
    done = run_script(ABANDONED)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "end\nabandoned\n")


EVENT = """
import os
import torch
from torchdali.runtime.events import Event

event = Event(enable_timing=True)
event.record()
child = os.fork()
if not child:
    del event
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
torch.cuda.synchronize()
print(event.query())
"""


@pytest.mark.gpu
def test_a_forked_process_drops_an_event(run_script: Any) -> None:
    done = run_script(EVENT, PYTHONWARNINGS="ignore::DeprecationWarning")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "0\nTrue\n")

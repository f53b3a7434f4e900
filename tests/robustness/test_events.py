"""What a forked process inherits of CUDA, and must not free."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import torchdali

pytestmark = pytest.mark.timeout(60)


# In a process of its own: a child of this one would collect whatever other tests left behind.
FORK = """
import gc, os, sys
os.register_at_fork(after_in_child=gc.collect)  # runs before the hook of torchdali
from torchdali.runtime.lifecycle import Resource

class Box(Resource):
    def renew(self):
        os.write(1, b"renewed ")

    def __del__(self, write=os.write):
        write(1, b"freed ")

def make():
    box = Box()
    box.cycle = [box]
    return box

gc.disable()
box, alone = make(), Box()
make()  # is garbage as the process is forked
child = os.fork()
if not child:
    del box, alone
    gc.collect()
    sys.exit()
status = os.waitpid(child, 0)[1]
os.write(1, b"| ")
del box, alone
gc.collect()
sys.exit(status)
"""


OWNED = """
import gc, os, sys
from torchdali.runtime.events import OwnedByProcess

class Box(OwnedByProcess, list):
    "Frees what it contains when it is freed."

content = object()
before = sys.getrefcount(content)
box = Box()
box.append(box)  # a cycle
box.append(content)
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


def test_only_the_process_that_made_it_frees_an_event(run_script: Any) -> None:
    done = run_script(OWNED, PYTHONWARNINGS="ignore::DeprecationWarning")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "1\n0\n")


def test_a_forked_child_renews_what_it_inherits_and_only_the_parent_frees_it(run_script: Any) -> None:
    done = run_script(FORK, fresh=True, PYTHONWARNINGS="ignore::DeprecationWarning")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "renewed " * 3 + "| " + "freed " * 3)


def test_no_event_is_made_that_a_forked_process_could_free() -> None:
    """In what a loader keeps; the benchmark's own are freed where they are made."""
    package = Path(torchdali.__file__).parent
    for module in package.rglob("*.py"):
        if module.parent.name not in ("bench", "demo", "commands"):
            assert not re.search(r"record_event\(\)|torch\.cuda\.Event\(", module.read_text()), module


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

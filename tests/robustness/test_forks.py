"""A process that is forked while DALI calls a Python function ends its epoch with an error, and does not hang."""

from __future__ import annotations

from pathlib import Path

from conftest import Script

FORKED = """
import os, sys, threading
import numpy as np
import PIL.Image, skimage.data
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchdali import DALILoader
from torchdali.pipeline import host_calls

root = sys.argv[1]
os.mkdir(root + "/a")
for i in range(12):
    PIL.Image.fromarray(skimage.data.coffee()).resize((40, 30)).save(f"{root}/a/{i}.png")
host_calls._PATIENCE = 0.5
began, ends, call = threading.Event(), threading.Event(), host_calls.HostCalls.__call__
is_parent = True

def call_slowly(self, *inputs):
    if is_parent:
        began.set()
        ends.wait(60)
    return call(self, *inputs)

host_calls.HostCalls.__call__ = call_slowly

def make(**options):
    return DALILoader(ImageFolder(root, v2.Compose([v2.ToImage(), v2.Resize((20, 20))])), 4, device="cpu", **options)

thread = threading.Thread(target=lambda: print("parent", len(list(make()))))
thread.start()
began.wait(60)  # DALI holds its lock now
child = os.fork()
if not child:
    is_parent = False
    try:
        print("child", len(list(make())), flush=True)
    except RuntimeError as error:
        print("child", error, flush=True)
    sys.exit(0)
print("ended with", os.waitpid(child, 0)[1], flush=True)
ends.set()
thread.join()
"""


def test_a_process_that_is_forked_while_a_function_is_called(run_script: Script, tmp_path: Path) -> None:
    done = run_script(FORKED, tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("child DALI was calling a Python function when this process was forked"), done
    assert lines[1:] == ["ended with 0", "parent 3"], done

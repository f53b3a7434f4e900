"""What importing torchdali does to a process: what it loads, and how many CUDA connections it asks for."""

from __future__ import annotations

import ast
import importlib
import json
from pathlib import Path

import pytest
import torch
from conftest import Script

import torchdali
from torchdali.runtime import machine

pytestmark = pytest.mark.timeout(50)

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"

IMPORT = """
import json, os, sys, warnings
warnings.simplefilter("error")
import torchdali
{after}
loaded = sorted({{name.partition(".")[0] for name in sys.modules}} | {{n for n in sys.modules if "dali" in n}})
connections = torchdali.runtime.machine.describe_connections()
print(json.dumps([os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"), connections, loaded]))
"""


@pytest.mark.slow
def test_import_loads_no_more_than_it_needs_and_asks_for_32_connections(run_script: Script) -> None:
    done = run_script(IMPORT.format(after=""), fresh=True, **{VARIABLE: None})
    assert (done.returncode, done.stderr) == (0, "")
    value, said, loaded = json.loads(done.stdout)
    assert value == "32"
    assert said == f"{VARIABLE}=32 (set by torchdali)"
    assert "torchdali" in loaded
    heavy = {
        "torchvision",
        "lightning",
        "pytorch_lightning",
        "rich",
        "click",
        "skimage",
        "scipy",
        "nvidia.dali",
        "torchdali.tools.demo",
    }
    assert not heavy & set(loaded)


LOADED = """
import json, sys
import torch
known = set(sys.modules)
import torchdali
package = sorted(set(sys.modules) - known)
import torchvision.transforms.v2, nvidia.dali.fn, nvidia.dali.pipeline
known = {name.partition(".")[0] for name in sys.modules} | sys.stdlib_module_names
before = set(sys.modules)
from torchdali import DALILoader
loader = set(sys.modules) - before
others = sorted({name.partition(".")[0] for name in loader} - known)
parts = sorted({name.split(".")[1] for name in loader if name.startswith("torchdali.")})
print(json.dumps([package, others, parts]))
"""


@pytest.mark.slow
def test_imports_load_these_modules_beside_torch_torchvision_and_dali(run_script: Script) -> None:
    done = run_script(LOADED, fresh=True)
    package, others, parts = json.loads(done.stdout)
    assert package == ["torchdali", "torchdali.runtime", "torchdali.runtime.machine", "torchdali.runtime.warning"]
    assert others == []
    assert parts == [
        *("datasets", "errors", "loader", "pipeline", "runtime", "samples", "sources", "state", "transforms"),
        "workers",
    ]


@pytest.mark.slow
def test_the_loader_is_imported_without_dali_and_what_is_seldom_needed(run_script: Script) -> None:
    done = run_script(IMPORT.format(after="from torchdali import DALILoader"), fresh=True)
    loaded = json.loads(done.stdout)[2]
    assert "torchdali.loader" in loaded
    seldom = {
        *("av", "pyarrow", "obstore", "datasets", "soundfile", "torchaudio", "nibabel", "matplotlib", "IPython"),
        *("rich", "click", "scipy", "pandas", "lightning", "pytorch_lightning", "accelerate", "ray", "nvidia"),
        *("torchdali.tools", "torchdali.lightning", "torchdali.accelerate", "torchdali.ray"),
    }
    assert not seldom & set(loaded)


IN_A_WORKER = "torchdali.workers.queues, torchdali.workers.streams, torchdali.state.stream"
"""What a spawned worker unpickles, if DALI does nothing in the epoch."""


@pytest.mark.slow
def test_a_spawned_worker_imports_little(run_script: Script) -> None:
    code = (
        f"import sys, torch.utils.data; known = set(sys.modules); import {IN_A_WORKER}; print(set(sys.modules) - known)"
    )
    done = run_script(code, fresh=True)
    loaded = {name for name in ast.literal_eval(done.stdout) if not name.startswith("torchdali")}
    assert len(loaded) < 10
    assert not {name for name in loaded if name.startswith(("torch", "torchvision", "PIL"))}


def test_public_names_are_imported_when_they_are_used() -> None:
    assert set(torchdali.__all__) <= set(dir(torchdali))
    for name in torchdali.__all__:
        assert getattr(torchdali, name).__name__ == name
    assert torchdali.DALILoader is importlib.import_module("torchdali.loader").DALILoader
    assert torchdali.state.merge is importlib.import_module("torchdali.state.checkpoint").merge
    for module in (torchdali, torchdali.state):
        with pytest.raises(AttributeError, match="has no attribute 'Loader'"):
            module.Loader  # noqa: B018


def test_an_import_after_cuda_sets_nothing_and_the_first_compilation_warns_once(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(machine, "_state", {"source": "not set", "warned": ""})
    machine.set_connections()
    for _ in range(3):
        machine.warn_of_few_connections()
    (warning,) = recwarn.list
    assert VARIABLE in str(warning.message)
    assert "Import torchdali first" in str(warning.message)
    assert VARIABLE not in machine.os.environ
    text = machine.describe_connections()
    assert text == f"{VARIABLE}=8 (the default) (CUDA was initialised before torchdali was imported)"


@pytest.mark.parametrize("cuda", [False, True], ids=["before CUDA", "after CUDA"])
@pytest.mark.parametrize("value", ["1", "8", ""])
def test_a_number_of_connections_is_never_overridden(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, value: str, cuda: bool
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: cuda)
    monkeypatch.setattr(machine, "_state", {"source": "not set", "warned": ""})
    machine.set_connections()
    machine.warn_of_few_connections()
    assert machine.os.environ[VARIABLE] == value
    assert machine.describe_connections() == f"{VARIABLE}={value} (set by the environment)"
    assert not recwarn.list


@pytest.mark.gpu
def test_connections_count_on_the_device(run_script: Script, pictures: Path) -> None:
    loader = f"torchdali.DALILoader({str(pictures)!r}, device='cuda', transform=torchdali.transforms.ToImage())"
    done = run_script(IMPORT.format(after=f"{loader}.explain()"), fresh=True, **{VARIABLE: None})
    assert f"{VARIABLE}=32 (set by torchdali)" in done.stdout

"""What imports what, what importing torchdali does to a process, and what it says where DALI cannot be used."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import Script
from torchvision.datasets import ImageFolder

import torchdali
from torchdali import DALILoader, DALIUnavailableError
from torchdali.runtime import machine

pytestmark = pytest.mark.timeout(50)

LAYERS = [
    {"errors", "devices", "events", "sharding", "daemons", "ending", "byvalue", "uncompiled"},
    {"spec", "tracing"},
    {"rng", "occurrences", "generators", "remainder"},
    {"redrawn"},
    {"place", "skip"},
    {"transforms"},
    {"sources"},
    {"structure", "blocks", "tolerance", "workers", "queues"},
    {"preparing", "transfer", "machine", "hosted", "jpeg_engine"},
    {"packing"},
    {"plan"},
    {"compiler"},
    {"graph"},
    {"bridge"},
    {"tuning"},
    {"clock", "engine", "heads"},
    {"feed", "routes"},
    {"cache", "lenient"},
    {"received"},
    {"samples"},
    {"readahead", "state"},
    {"stream"},
    {"resume", "bookmark"},
    {"epoch", "rejoin", "admission", "identities", "parallel"},
    {"proxy", "plain"},
    {"stats"},
    {"explain", "verdict", "probe"},
    {"reporting", "building"},
    {"loader", "compiled"},
    {"__init__", "accelerate", "lightning"},
    {"parity"},
    {"bench", "demo"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
"""From the bottom up. A module imports from layers below its own; a package's modules also import each other."""

ONLY_THESE_IMPORT_DALI = {"graph", "bridge"}
VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"

PACKAGE = Path(torchdali.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def unit(module: Path) -> str:
    """The file or package that stands in ``LAYERS``."""
    return module.parts[0].removesuffix(".py")


def rank(name: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if name in layer)


def tree(module: Path) -> ast.Module:
    return ast.parse((PACKAGE / module).read_text())


def imported(module: Path) -> Iterator[str]:
    """All modules that a module imports, also inside functions and by ``import_module`` with a literal."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            assert node.module
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (value.value for value in ast.walk(node.args[0]) if isinstance(value, ast.Constant))


def imported_units(module: Path) -> set[str]:
    """The project's files and packages that a module imports from."""
    units: set[str] = set()
    for name in imported(module):
        if name == "torchdali":
            continue  # the names that are taken from it follow
        if name.startswith("torchdali."):
            part = name.split(".")[1]
            is_module = any(unit(other) == part for other in MODULES)
            units.add(part if is_module else "__init__")
    return units


def test_every_module_has_its_layer() -> None:
    assert {unit(module) for module in MODULES} == set().union(*LAYERS)


def rows_of_the_table() -> dict[str, int]:
    """The row of each module in the table of docs/architecture.md."""
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    table = text.partition("| Module | What it is |\n|---|---|\n")[2].partition("\n\n")[0]
    firsts = [line.split("|")[1] for line in table.splitlines()]
    return {name: i for i, first in enumerate(firsts) for name in re.findall(r"`(\w+)(?:\.py|/)`", first)}


def test_the_documented_layers_are_those() -> None:
    row = rows_of_the_table()
    assert {unit(module) for module in MODULES} - row.keys() == {"__init__", "__main__"}
    for module in MODULES:
        if (name := unit(module)) in row:
            assert [other for other in imported_units(module) if row.get(other, 0) > row[name]] == [], module


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_point_downward(module: Path) -> None:
    own = unit(module)
    above = {other for other in imported_units(module) - {own} if rank(other) >= rank(own)}
    assert above == set()


def test_machine_stands_alone() -> None:
    assert imported_units(Path("machine.py")) == set()


def literals(module: Path) -> Iterator[str]:
    """The strings of a module that are not documentation."""
    nodes = list(ast.walk(tree(module)))
    documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value


def test_dali_is_imported_in_two_places_alone() -> None:
    def mentions(module: Path) -> bool:
        names = [name for name in (*imported(module), *literals(module)) if "-" not in name]
        return any(name == "nvidia" or name.startswith("nvidia.dali") for name in names)

    assert {unit(module) for module in MODULES if mentions(module)} <= ONLY_THESE_IMPORT_DALI
    assert mentions(Path("graph.py")), "else this test sees nothing"


# Importing torchdali

IMPORT = """
import json, os, sys, warnings
warnings.simplefilter("error")
import torch
{before}
import torchdali
{after}
loaded = sorted({{name.partition(".")[0] for name in sys.modules}} | {{n for n in sys.modules if "dali" in n}})
print(json.dumps([os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"), torchdali.runtime.machine.connections(), loaded]))
"""


def import_it(run_script: Script, before: str = "", after: str = "", **variables: str | None) -> list[Any]:
    done = run_script(IMPORT.format(before=before, after=after), **variables)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_import_loads_no_more_than_it_needs_and_asks_for_32_connections(run_script: Script) -> None:
    value, said, loaded = import_it(run_script, **{VARIABLE: None})
    assert value == "32"
    assert said == f"{VARIABLE}=32 (set by torchdali)"
    assert {"torchdali", "torchvision"} <= set(loaded)
    heavy = {
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


def test_import_after_cuda_sets_nothing_and_the_first_compilation_warns_once(run_script: Script) -> None:
    value, said, _ = import_it(
        run_script,
        before="torch.cuda.is_initialized = lambda: True",
        after="""
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        torchdali.runtime.machine.warn_of_few_connections()
assert len(caught) == 1
assert "CUDA_DEVICE_MAX_CONNECTIONS" in str(caught[0].message) and "Import torchdali first" in str(caught[0].message)
""",
        **{VARIABLE: None},
    )
    assert value is None
    assert said == f"{VARIABLE}=8 (the default) (CUDA was initialised before torchdali was imported)"


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
    assert machine.connections() == f"{VARIABLE}={value} (set by the environment)"
    assert not recwarn.list


@pytest.mark.gpu
def test_connections_count_on_the_device(run_script: Script, pictures: Path) -> None:
    loader = f"torchdali.DALILoader({str(pictures)!r}, device='cuda', transform=torchdali.transforms.ToImage())"
    done = run_script(IMPORT.format(before="", after=f"{loader}.explain()"), **{VARIABLE: None})
    assert f"{VARIABLE}=32 (set by torchdali)" in done.stdout


# Where DALI cannot be used

INSTALL = r"pip install 'nvidia-dali-cuda120>=2\.4,<3'"


def stub(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    for name in ("nvidia.dali", "nvidia.dali.fn", "nvidia.dali.types", "nvidia.dali.math"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["nvidia.dali"].__version__ = version  # pyright: ignore


def fail_to_load(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    class Finder:
        """Finds DALI and fails, as a package does whose libraries are not there."""

        @staticmethod
        def find_spec(name: str, *_: Any) -> None:
            if name.startswith("nvidia.dali"):
                raise error

    for name in [name for name in sys.modules if name.startswith("nvidia.dali")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])


UNAVAILABLE = {
    "missing": (
        lambda patch: fail_to_load(patch, ModuleNotFoundError("No module named 'nvidia.dali'", name="nvidia.dali")),
        rf"not installed.*{INSTALL}",
    ),
    "library missing": (
        lambda patch: fail_to_load(patch, OSError("libcudart.so.12: cannot open shared object file")),
        rf"does not load.*libcudart.*{INSTALL}",
    ),
    "wrong Python": (
        lambda patch: fail_to_load(patch, ImportError("undefined symbol: _PyThing")),
        rf"does not load.*undefined symbol.*{INSTALL}",
    ),
    "old": (lambda patch: stub(patch, "1.50.0"), rf"needs NVIDIA DALI 2\.4.*1\.50\.0.*{INSTALL}"),
    "a little old": (lambda patch: stub(patch, "2.3.9"), rf"this is 2\.3\.9: {INSTALL}"),
    "Windows": (lambda patch: patch.setattr(sys, "platform", "win32"), rf"Linux.*win32.*WSL 2.*{INSTALL}"),
    "macOS": (lambda patch: patch.setattr(sys, "platform", "darwin"), r"Linux.*darwin"),
}


@pytest.mark.parametrize(("make", "text"), UNAVAILABLE.values(), ids=UNAVAILABLE.keys())
@pytest.mark.parametrize("wanted", ["auto", "cpu"])
def test_unusable_dali_is_one_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, dataset: ImageFolder, make: Any, text: str, wanted: str
) -> None:
    make(monkeypatch)
    with pytest.raises(DALIUnavailableError, match=text) as caught:
        DALILoader(dataset, device=wanted)
    assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize("version", ["2.4.0", "2.10.1", "2.5.0.dev20260101"])
def test_newer_versions_are_taken(monkeypatch: pytest.MonkeyPatch, dataset: ImageFolder, version: str) -> None:
    stub(monkeypatch, version)
    assert len(DALILoader(dataset, device="cpu")) == len(dataset)


def test_torchdali_is_imported_without_dali(run_script: Script, pictures: Path) -> None:
    done = run_script(
        """
        import sys

        class Blocker:
            @staticmethod
            def find_spec(name, *_):
                if name.partition(".")[0] == "nvidia" and name != "nvidia":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Blocker)
        from torchdali import DALILoader, DALIUnavailableError
        try:
            DALILoader(sys.argv[1])
        except DALIUnavailableError as error:
            print(error)
        """,
        pictures,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("NVIDIA DALI is not installed (No module named 'nvidia.dali')")
    assert done.stdout.endswith("pip install 'nvidia-dali-cuda120>=2.4,<3'\n")


@pytest.mark.parametrize("wanted", ["cuda", "cuda:1", 0, torch.device("cuda")], ids=str)
def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch, dataset: ImageFolder, wanted: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(DALIUnavailableError, match=r"torch sees no CUDA device.*update the NVIDIA driver"):
        DALILoader(dataset, device=wanted)


def test_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch, dataset: ImageFolder) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DALIUnavailableError, match=r"built without CUDA.*install the CUDA build of torch"):
        DALILoader(dataset, device="cuda")


def test_a_device_that_dali_has_no_backend_for(dataset: ImageFolder) -> None:
    with pytest.raises(DALIUnavailableError, match="not on 'mps'"):
        DALILoader(dataset, device="mps")


def test_auto_is_the_cpu_where_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch, dataset: ImageFolder) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    images, labels = next(iter(DALILoader(dataset, 3)))
    assert {images.device.type, labels.device.type} == {"cpu"}


@pytest.mark.gpu
def test_auto_is_torchs_current_cuda_device(dataset: ImageFolder) -> None:
    images, labels = next(iter(DALILoader(dataset, 3)))
    assert images.device == labels.device == torch.device("cuda", torch.cuda.current_device())


def see_one_device(monkeypatch: pytest.MonkeyPatch, driver: int) -> None:
    """Makes torch see one device, and DALI a driver of this version."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("nvidia.dali.backend.GetCudaVersion", lambda: driver)


def test_a_device_that_only_torch_sees(monkeypatch: pytest.MonkeyPatch, dataset: ImageFolder) -> None:
    see_one_device(monkeypatch, driver=0)
    with pytest.raises(DALIUnavailableError, match=f"but DALI does not.*update the NVIDIA driver.*{INSTALL}"):
        DALILoader(dataset, device="cuda")


def test_a_device_beyond_the_last(monkeypatch: pytest.MonkeyPatch, dataset: ImageFolder) -> None:
    see_one_device(monkeypatch, driver=13000)
    DALILoader(dataset, device="cuda:0")
    with pytest.raises(DALIUnavailableError, match="cuda:1"):
        DALILoader(dataset, device="cuda:1")


@pytest.mark.parametrize(
    ("wanted", "error"),
    [("gpu", ValueError), ("cuda:first", ValueError), (None, TypeError), (1.5, TypeError), (True, TypeError)],
)
def test_a_device_that_does_not_exist(dataset: ImageFolder, wanted: Any, error: type[Exception]) -> None:
    said = f"^device is 'auto' or a device of torch's such as 'cuda:1', not {re.escape(repr(wanted))}$"
    with pytest.raises(error, match=said):
        DALILoader(dataset, device=wanted)
    with pytest.raises(error, match=said):
        torchdali.compile([], device=wanted)


@pytest.mark.parametrize("wanted", ["one", 1.5])
def test_a_seed_that_is_no_number(dataset: ImageFolder, wanted: Any) -> None:
    with pytest.raises(TypeError, match=f"^seed is a whole number, not {wanted!r}$"):
        DALILoader(dataset, seed=wanted, device="cpu")


def test_a_fidelity_that_does_not_exist(dataset: ImageFolder) -> None:
    with pytest.raises(ValueError, match="'exact' or 'fast', not 'perfect'"):
        DALILoader(dataset, fidelity="perfect", device="cpu")  # pyright: ignore
    with pytest.raises(ValueError, match="'exact' or 'fast', not 'perfect'"):
        torchdali.compile([], fidelity="perfect", device="cpu")  # pyright: ignore


@pytest.mark.parametrize(
    ("wanted", "error", "said"),
    [("two", TypeError, "a whole number, not 'two'"), (-1, ValueError, "0 or more, not -1")],
)
def test_threads_that_there_cannot_be(wanted: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=f"^num_threads is {said}$"):
        torchdali.compile([], num_threads=wanted, device="cpu")

"""``torchdali explain``: explain the loader of a folder, of a Python file or of a script."""

from __future__ import annotations

import inspect
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory
from typing import Any, TextIO, cast

from torch.utils.data import DataLoader, Dataset, IterableDataset

from torchdali import DALILoader
from torchdali import compile as compile_transform
from torchdali.errors import OptionError, TorchDALIError, UnsupportedDatasetError
from torchdali.sources import from_dataset
from torchdali.tools.bench.folder import is_factory, load_object, load_transform, make_dataset, open_class_folders

_BATCH = 256
_DEFAULT_PREFETCH_FACTOR = 2
"""DataLoader's default. It does not tell whether the user gave this number."""
_REPORT, _DEVICE, _GROUP = "TORCHDALI_EXPLAIN_REPORT", "TORCHDALI_EXPLAIN_DEVICE", "TORCHDALI_EXPLAIN_GROUP"
_COPIED = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "persistent_workers",
    "in_order",
)


def explain_folder(folder: Path, transform: str | None, device: str, file: TextIO) -> None:
    """Explain a loader of an image folder, and print to ``file``.

    Raises:
        OptionError: The folder has no images, or there is no such transform.
    """
    chain = load_transform(transform)
    with open_class_folders(folder) as (root, _):
        images = make_dataset(root, chain)
        if not len(images):
            raise OptionError(f"{folder} has no images")
        if not root.samefile(folder):
            file.write(f"{folder} has no class folders, which ImageFolder needs. With one around all its images:\n")
        with DALILoader[Any](images, _BATCH, shuffle=True, device=device) as loader:
            loader.explain(file)


def explain_named(target: str, device: str, file: TextIO) -> None:
    """Explain the object ``FILE:NAME``: a loader, a dataset, a transform, or a function that makes one of them.

    Raises:
        OptionError: There is no such file or name, or the object is something else.
    """
    _explain(load_object(target), target, device, file)


def _explain(thing: Any, name: str, device: str, file: TextIO) -> None:
    parts = _list_parts(thing)
    if isinstance(thing, DataLoader):
        _explain_loader(cast("Any", thing), device, file)
    elif is_factory(thing):
        _explain(thing(), f"{name}()", device, file)
    elif parts and not all(map(_is_transform, parts.values())):
        for key, part in parts.items():
            file.write(f"{name}, {key}:\n")
            _explain(part, f"{name}, {key}", device, file)
    elif parts or _is_transform(thing):
        compile_transform(thing, device=device).explain(file)
    elif isinstance(thing, Dataset) or (hasattr(thing, "__getitem__") and not inspect.isclass(thing)):
        shuffle = None if isinstance(cast("object", thing), IterableDataset) else True
        with DALILoader[Any](cast("Any", thing), _BATCH, shuffle, device=device) as loader:
            loader.explain(file)
        _explain_dataset_transform(thing, loader, device, file)
    else:
        kind = f"the class {thing.__name__}" if inspect.isclass(thing) else f"of type {type(thing).__name__}"
        raise OptionError(
            f"{name} is {kind}; a loader, a dataset, a transform, or what makes one without arguments is expected"
        )


def _list_parts(thing: Any) -> dict[str, Any]:
    """Return the items of a list, tuple or dictionary, by name."""
    if isinstance(thing, Mapping):
        return {str(key): value for key, value in cast("Mapping[Any, Any]", thing).items()}
    if isinstance(thing, (list, tuple)):
        return {f"part {i}": part for i, part in enumerate(cast("Sequence[Any]", thing), start=1)}
    return {}


def _is_transform(thing: Any) -> bool:
    return callable(thing) and not isinstance(thing, (DataLoader, Dataset)) and not inspect.isclass(thing)


def _explain_loader(loader: DataLoader[Any], device: str, file: TextIO) -> None:
    if isinstance(loader, DALILoader):
        loader.explain(file)
        return
    file.write(f"A {type(loader).__name__}. In its place, with the same arguments:\n")
    with convert_loader(loader, device) as converted:
        converted.explain(file)
    _explain_dataset_transform(loader.dataset, converted, device, file)


def _explain_dataset_transform(dataset: Any, loader: DALILoader[Any], device: str, file: TextIO) -> None:
    """Explain the transform of a worker-fed dataset, as if the loader had it."""
    own = getattr(dataset, "transform", None)
    if loader.transform is not None or not callable(own):
        return
    try:
        from_dataset(dataset)
    except UnsupportedDatasetError:
        file.write("\nIf the dataset returned its images as they are, with its transform given as transform=:\n")
        compile_transform(own, device=device).explain(file)


def convert_loader(loader: DataLoader[Any], device: str) -> DALILoader[Any]:
    """Return a ``DALILoader`` with the arguments of a ``DataLoader``, which is not changed."""
    options: dict[str, Any] = {name: getattr(loader, name) for name in _COPIED if hasattr(loader, name)}
    if loader.num_workers and loader.prefetch_factor != _DEFAULT_PREFETCH_FACTOR:
        options["prefetch_factor"] = loader.prefetch_factor
    if isinstance(loader.dataset, IterableDataset):
        options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif loader.batch_size is None and loader.batch_sampler is not None:
        options["batch_sampler"] = loader.batch_sampler
    elif loader.batch_size is None:
        options |= {"batch_size": None, "sampler": loader.sampler}
    else:
        options |= {"batch_size": loader.batch_size, "sampler": loader.sampler, "drop_last": loader.drop_last}
    return DALILoader(loader.dataset, device=device, **options)


def explain_script(script: Path, arguments: Sequence[str], device: str, file: TextIO) -> bool:
    """Run ``python SCRIPT ARGUMENTS`` up to where it first iterates over a loader, and explain that loader.

    The script runs in its own process group, which is killed after the explanation. No ``except`` or ``finally`` of the
    script runs then. ``script_hook`` calls :func:`stop_at_loader` in all its processes.

    Returns:
        Whether the script iterated over a loader.

    Raises:
        SystemExit: The script failed before, or the loader cannot do what it is asked to.
    """
    hook = str(Path(__file__).with_name("script_hook"))
    with TemporaryDirectory() as folder:
        path = os.pathsep.join(filter(None, [hook, os.environ.get("PYTHONPATH")]))
        options = {"PYTHONPATH": path, _REPORT: folder, _DEVICE: device}
        process = Popen([sys.executable, str(script), *arguments], env=os.environ | options, start_new_session=True)
        try:
            code = process.wait()
        finally:
            with suppress(ProcessLookupError):  # none is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        report, error = Path(folder, "report"), Path(folder, "error")
        if report.exists():
            file.write(report.read_text())
            if text := error.read_text():
                sys.exit(text)
            return True
    if code:
        sys.exit(code if code > 0 else 128 - code)
    return False


def stop_at_loader(loader: DataLoader[Any]) -> None:
    """Explain a loader that a script iterates over, for :func:`explain_script`, and kill the script.

    Returns only if the explanation itself iterates. A second thread or process waits until the explanation is there.
    """
    folder = Path(os.environ[_REPORT])
    thread = f"{os.getpid()} {threading.get_ident()}"
    try:
        with Path(folder, "thread").open("x") as claim:
            claim.write(thread)
    except FileExistsError:
        if Path(folder, "thread").read_text() == thread:
            return
        while folder.exists() and not Path(folder, "report").exists():
            time.sleep(0.05)
    else:
        text, error = io.StringIO(), ""
        text.write(f"{_describe_caller()} first iterates over a loader.\n")
        try:
            _explain_loader(loader, os.environ[_DEVICE], text)
        except TorchDALIError as reason:
            error = f"torchdali: {reason}"
        except BaseException:  # noqa: BLE001 - also SystemExit of user code: the script must not continue
            error = traceback.format_exc()
        Path(folder, "error").write_text(error)
        Path(folder, "unfinished").write_text(text.getvalue())
        Path(folder, "unfinished").rename(folder / "report")
        sys.stdout.flush()
        sys.stderr.flush()
    with suppress(ProcessLookupError):
        os.killpg(int(os.environ[_GROUP]), signal.SIGKILL)
    os.killpg(0, signal.SIGKILL)  # launchers such as torchrun may put a process into a group of its own


def _describe_caller() -> str:
    """Return the position of the code, in the script or in what it uses, that iterates."""
    here = Path(__file__).parent
    frame = next(frame for frame in reversed(traceback.extract_stack()) if here not in Path(frame.filename).parents)
    return f"{frame.filename}, line {frame.lineno}, in {frame.name},"

"""``torchdali explain``: explain the loader of a folder, of a Python file or of a script."""

from __future__ import annotations

import inspect
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
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


class _ExplainedError(BaseException):
    """Ends a script. It is no Exception, so that the script does not catch it as an error of its own."""


def explain_script(script: Path, arguments: Sequence[str], device: str, file: TextIO) -> bool:
    """Run ``python SCRIPT ARGUMENTS`` up to where it first iterates over a loader, and explain that loader.

    Returns:
        Whether the script iterated over a loader.

    Raises:
        SystemExit: The script failed before. Its error is printed to stderr, as by the interpreter.
        TorchDALIError: The loader cannot do what it is asked to.
    """
    done = False

    def stop(loader: DataLoader[Any]) -> Any:
        nonlocal done
        if not done:
            done = True
            file.write(f"{_describe_caller()} first iterates over a loader.\n")
            _explain_loader(loader, device, file)
        if threading.current_thread() is not threading.main_thread():
            file.flush()
            os._exit(0)  # an exception would end only this thread
        raise _ExplainedError

    with _run_as_main(script, arguments), _replace_iter(stop):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except _ExplainedError:
            pass
        except SystemExit as ended:
            if not done and ended.code not in (None, 0):
                raise
        except Exception as error:
            if done and isinstance(error, TorchDALIError):
                raise  # from the explanation, not from the script
            traceback.print_exception(error.with_traceback(_skip_to_script(error.__traceback__, script)))
            raise SystemExit(1) from error
    return done


def _skip_to_script(frames: TracebackType | None, script: Path) -> TracebackType | None:
    """Return the frames from the script's on, or None if there is no frame of the script."""
    while frames and frames.tb_frame.f_code.co_filename != str(script):
        frames = frames.tb_next
    return frames


def _describe_caller() -> str:
    """Return the position of the code, in the script or in what it uses, that called this module."""
    frame = next(frame for frame in reversed(traceback.extract_stack()) if frame.filename != __file__)
    return f"{frame.filename}, line {frame.lineno}, in {frame.name},"


@contextmanager
def _run_as_main(script: Path, arguments: Sequence[str]) -> Generator[None, None, None]:
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


@contextmanager
def _replace_iter(replacement: Callable[[DataLoader[Any]], Any]) -> Generator[None, None, None]:
    """Call ``replacement`` instead of the ``__iter__`` of loaders."""
    kinds: list[Any] = [DataLoader, DALILoader]
    originals = [kind.__iter__ for kind in kinds]

    def call_replacement(self: DataLoader[Any]) -> Any:
        return replacement(self)

    for kind in kinds:
        kind.__iter__ = call_replacement
    try:
        yield
    finally:
        for kind, original in zip(kinds, originals, strict=True):
            kind.__iter__ = original

"""``torchdali explain``: what a loader of a folder, of a file, or of a script would do, without doing it."""

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

__all__ = ["explain_folder", "explain_named", "explain_script", "take_over"]

_BATCH = 256
_TORCHS_PREFETCH = 2
"""What DataLoader makes of no prefetch_factor, so that nobody can be said to have chosen it."""
_KEPT = (
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
    """Explains a loader of an image folder.

    Args:
        folder: A folder of class folders, or of images.
        transform: ``FILE:NAME`` of a transform; ImageNet's training transform for None.
        device: As for ``DALILoader``.
        file: Where to print.

    Raises:
        OptionError: The folder has no images, or the transform is not there.
    """
    chain = load_transform(transform)
    with open_class_folders(folder) as (root, _):
        images = make_dataset(root, chain)
        if not len(images):
            raise OptionError(f"{folder} has no images")
        if not root.samefile(folder):
            file.write(f"{folder} has no class folders, which ImageFolder asks for. With one, all of it in there:\n")
        with DALILoader[Any](images, _BATCH, shuffle=True, device=device) as loader:
            loader.explain(file)


def explain_named(named: str, device: str, file: TextIO) -> None:
    """Explains what a Python file has under a name: a loader, a dataset, a transform, or what makes one of them.

    Args:
        named: ``FILE:NAME``.
        device: As for ``DALILoader``, for what is no ``DALILoader`` already.
        file: Where to print.

    Raises:
        OptionError: There is no such file or name, or it is something else.
    """
    _explain(load_object(named), named, device, file)


def _explain(thing: Any, called: str, device: str, file: TextIO) -> None:
    parts = _parts(thing)
    if isinstance(thing, DataLoader):
        _explain_loader(cast("Any", thing), device, file)
    elif is_factory(thing):
        _explain(thing(), f"{called}()", device, file)
    elif parts and not all(map(_is_transform, parts.values())):
        for name, part in parts.items():
            file.write(f"{called}, {name}:\n")
            _explain(part, f"{called}, {name}", device, file)
    elif parts or _is_transform(thing):
        compile_transform(thing, device=device).explain(file)
    elif isinstance(thing, Dataset) or (hasattr(thing, "__getitem__") and not inspect.isclass(thing)):
        _explain_dataset(thing, device, file)
    else:
        kind = f"the class {thing.__name__}" if inspect.isclass(thing) else f"of type {type(thing).__name__}"
        raise OptionError(
            f"{called} is {kind}; a loader, a dataset, a transform, or what makes one without arguments is expected"
        )


def _parts(thing: Any) -> dict[str, Any]:
    """What a list, tuple or dictionary of loaders, datasets or transforms has."""
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
    with take_over(loader, device) as ours:
        ours.explain(file)
    _explain_own(loader.dataset, ours, device, file)


def _explain_dataset(thing: Any, device: str, file: TextIO) -> None:
    shuffle = None if isinstance(cast("object", thing), IterableDataset) else True
    with DALILoader[Any](thing, _BATCH, shuffle, device=device) as loader:
        loader.explain(file)
    _explain_own(thing, loader, device, file)


def _explain_own(dataset: Any, loader: DALILoader[Any], device: str, file: TextIO) -> None:
    """What the transform of a dataset that is asked for samples would be, if the loader had it."""
    own = getattr(dataset, "transform", None)
    if loader.transform is not None or not callable(own):
        return
    try:
        from_dataset(dataset)
    except UnsupportedDatasetError:
        file.write("\nIf the dataset gave its images as they are, and its transform were given as transform=:\n")
        compile_transform(own, device=device).explain(file)


def take_over(loader: DataLoader[Any], device: str) -> DALILoader[Any]:
    """A ``DALILoader`` with the arguments of a ``DataLoader``.

    Args:
        loader: The one whose dataset, sampler and other arguments are taken; it is not changed.
        device: As for ``DALILoader``.
    """
    given: dict[str, Any] = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    if loader.num_workers and loader.prefetch_factor != _TORCHS_PREFETCH:
        given["prefetch_factor"] = loader.prefetch_factor
    if isinstance(loader.dataset, IterableDataset):
        given |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif loader.batch_size is None and loader.batch_sampler is not None:
        given["batch_sampler"] = loader.batch_sampler
    elif loader.batch_size is None:
        given |= {"batch_size": None, "sampler": loader.sampler}
    else:
        given |= {"batch_size": loader.batch_size, "sampler": loader.sampler, "drop_last": loader.drop_last}
    return DALILoader(loader.dataset, device=device, **given)


class _ExplainedError(BaseException):
    """Ends a script: no ``except Exception`` of its own may take it for a failure."""


def explain_script(script: Path, arguments: Sequence[str], device: str, file: TextIO) -> bool:
    """Runs a script up to where it first iterates over a loader, and explains that loader.

    Args:
        script: The script, which finds itself run as ``python SCRIPT ARGUMENTS``.
        arguments: What it finds in ``sys.argv``.
        device: As for ``DALILoader``, where the loader is none already.
        file: Where to print.

    Returns:
        Whether it iterated.

    Raises:
        SystemExit: It failed before that. What it raised is on stderr, as the interpreter would have shown it.
        TorchDALIError: The loader cannot do what it is to do.
    """
    done = False

    def stop(loader: DataLoader[Any]) -> Any:
        nonlocal done
        if not done:
            done = True
            file.write(f"{_place()} first iterates over a loader.\n")
            _explain_loader(loader, device, file)
        if threading.current_thread() is not threading.main_thread():
            file.flush()
            os._exit(0)  # an exception would end this thread alone
        raise _ExplainedError

    with _as_main(script, arguments), _iterated(stop):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except _ExplainedError:
            pass
        except SystemExit as ended:
            if not done and ended.code not in (None, 0):
                raise
        except Exception as error:
            if done and isinstance(error, TorchDALIError):
                raise  # it is said of the loader, and not of the script
            traceback.print_exception(error.with_traceback(_of_script(error.__traceback__, script)))
            raise SystemExit(1) from error
    return done


def _of_script(frames: TracebackType | None, script: Path) -> TracebackType | None:
    """The frames from the script's on; none where it does not get so far."""
    while frames and frames.tb_frame.f_code.co_filename != str(script):
        frames = frames.tb_next
    return frames


def _place() -> str:
    """Where the script, or what it uses, is now."""
    frame = next(frame for frame in reversed(traceback.extract_stack()) if frame.filename != __file__)
    return f"{frame.filename}, line {frame.lineno}, in {frame.name},"


@contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Generator[None, None, None]:
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


@contextmanager
def _iterated(instead: Callable[[DataLoader[Any]], Any]) -> Generator[None, None, None]:
    """Calls something else where a loader is iterated over."""
    kinds: list[Any] = [DataLoader, DALILoader]
    own = [kind.__iter__ for kind in kinds]

    def intercepted(self: DataLoader[Any]) -> Any:
        return instead(self)

    for kind in kinds:
        kind.__iter__ = intercepted
    try:
        yield
    finally:
        for kind, method in zip(kinds, own, strict=True):
            kind.__iter__ = method
